"""`Steps` and row dtypes: any space, block shape and way to pick rows, on rows and on bytes."""

import copy, pickle

import numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.steps.row_dtypes import dtype_spec, extend_dtype, spec_dtype
from fastrl_replay.testing import through_file
from scripted import elsewhere
from strategies import any_space, bits, cases, numpy_leaves, pairs, plain, scribble

Box, Discrete = spaces.Box, spaces.Discrete
SMALL = step_dtype(Box(-1, 1, (3,)), Discrete(2))
DEEP = step_dtype(
    spaces.Dict(
        img=Box(0, 255, (2, 2), np.uint8),
        arm=spaces.Tuple([Discrete(3, start=-1), Box(-1, 1, (2,), np.float16)]),
    ),
    spaces.Tuple([spaces.MultiBinary(3), Box(-1, 1, (), np.float64)]),
    logp='f8',
)


def block(shape, dtype=SMALL, seed=0):
    return Steps(scribble(np.zeros(shape, dtype), seed))


def columns(steps, rows=None):
    "(numpy field, tensor) of all plain fields of all columns"
    rows = steps.rows if rows is None else rows
    for n in rows.dtype.names:
        yield from pairs(rows[n], steps[n])


def agrees(steps, rows):
    "Do all columns have the shapes, types and bits of these rows?"
    return all(
        tuple(t.shape) == a.shape and str(t.dtype) == f'torch.{a.dtype}' and bits(t) == bits(a)
        for a, t in columns(steps, rows)
    )


# ---- dtypes from spaces ----


def fields_of(space):
    "The (dtype, shape) of each plain part of a space, depth first, by gymnasium's own attributes"
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for s in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            yield from fields_of(s)
    else:
        yield space.dtype, space.shape


def offsets(dtype, start=0):
    "(offset in the row, dtype) of each plain field"
    for n in dtype.names:
        d, at = dtype.fields[n][0], start + dtype.fields[n][1]
        if d.names:
            yield from offsets(d, at)
        else:
            yield at, d


@cases(150)
@given(any_space, any_space)
def test_row_dtype_is_aligned_and_keeps_what_spaces_declare(obs, act):
    "Every part of both spaces is a field with its type and shape, at a multiple of its size"
    dt = step_dtype(obs, act)
    assert (
        dt.isalignedstruct
        and all(at % d.base.alignment == 0 for at, d in offsets(dt))
        and dt.itemsize % dt.alignment == 0
    )
    row = np.zeros((), dt)
    for column, space in ('state', obs), ('next_state', obs), ('action', act):
        assert [(a.dtype, a.shape) for a in numpy_leaves(row[column])] == list(fields_of(space))
    ends = sorted((at, at + d.itemsize) for at, d in offsets(dt) if d.itemsize)
    assert all(e <= s for (_, e), (s, _) in zip(ends, ends[1:])), 'fields overlap'


def put(field, sample, space):
    "Write a sample of a space into a field, part by part"
    if isinstance(space, spaces.Dict):
        for n, s in space.spaces.items():
            put(field[n], sample[n], s)
    elif isinstance(space, spaces.Tuple):
        for i, s in enumerate(space.spaces):
            put(field[f'[{i}]'], sample[i], s)
    else:
        field[...] = sample


def same_sample(column, sample):
    "Is a nested column the sample, with dicts where it has dicts and tuples where it has tuples?"
    if isinstance(sample, dict):
        return (
            isinstance(column, dict)
            and column.keys() == sample.keys()
            and all(same_sample(column[k], sample[k]) for k in sample)
        )
    if isinstance(sample, tuple):
        return (
            isinstance(column, tuple)
            and len(column) == len(sample)
            and all(map(same_sample, column, sample))
        )
    return bits(column) == bits(sample)


@cases(80)
@given(any_space)
def test_columns_speak_the_language_of_the_space(space):
    "What a space samples comes back nested as it was, to the bit"
    space.seed(0)
    sample = space.sample()
    steps = Steps(np.zeros((), step_dtype(space, Discrete(2))))
    put(steps.rows['state'], sample, space)
    assert same_sample(steps.state, sample)


@pytest.mark.parametrize('bad', [spaces.Text(5), spaces.Sequence(Discrete(2))])
def test_spaces_without_a_size_are_named(bad):
    "The error names the kind of space and where in the whole it is"
    with pytest.raises(TypeError, match=f'action_space.*{type(bad).__name__}.*Remedy'):
        step_dtype(Discrete(2), bad)
    nested = spaces.Tuple([Discrete(2), spaces.Dict(c=bad)])
    with pytest.raises(TypeError, match=r'observation_space\[1\].c'):
        step_dtype(nested, Discrete(2))


@pytest.mark.parametrize(
    'empty',
    [spaces.Dict(), spaces.Dict(a=spaces.Tuple([])), spaces.Dict({1: Discrete(2)})],
    ids=str,
)
def test_spaces_without_parts_or_names_are_refused(empty):
    with pytest.raises(TypeError, match='at least one part'):
        step_dtype(empty, Discrete(2))


@pytest.mark.parametrize('kind', ['f16', '>f4', 'c8', 'U5', 'O', 'M8[s]'])
def test_columns_of_other_types_are_refused_by_name(kind):
    "In an observation, however deep, and in an extra column"
    box = Box(0, 1, (2,))
    box.dtype = np.dtype(kind)  # gymnasium refuses some
    says = 'got .*; expected bool, int8 to int64.* in native byte order. Remedy: convert it'
    with pytest.raises(TypeError, match=r"column 'state.a.\[1\]' .*" + says):
        step_dtype(spaces.Dict(a=spaces.Tuple([Discrete(2), box])), Discrete(2))
    with pytest.raises(TypeError, match="column 'x' .*" + says):
        extend_dtype(SMALL, x=(kind, (2,)))


@pytest.mark.parametrize('name', ['rows', 'shape', 'done', 'to', '_rows'])
def test_columns_that_steps_would_hide_are_refused(name):
    "`steps.shape` can't be both the block's shape and a column"
    with pytest.raises(ValueError, match=name):
        step_dtype(Discrete(2), Discrete(2), **{name: 'f4'})


def test_extra_columns_may_be_dtypes_shapes_and_spaces():
    space = spaces.Dict(x=Box(0, 1, (2,), np.float16))
    dt = step_dtype(Discrete(2), Discrete(2), a='f8', b=('u1', (2, 3)), c=space)
    assert dt['a'] == 'f8'
    assert dt['b'] == np.dtype(('u1', (2, 3)))
    assert dt['c']['x'] == np.dtype(('f2', (2,)))
    with pytest.raises(ValueError, match='reward'):
        step_dtype(Discrete(2), Discrete(2), reward='f8')


# ---- extended dtypes and their description ----

extras = st.dictionaries(
    st.sampled_from(['index', 'weight', 'mask', 'hidden', 'z']),
    st.sampled_from(['i8', 'f4', '?', 'u1', ('f8', (2,)), ('f2', (3,)), ('i2', (2, 2))]),
    min_size=1,
)


@cases(100)
@given(any_space, plain, extras)
def test_extended_dtype_begins_with_the_old_row(obs, act, extra):
    "Old fields stay, new ones follow, aligned: a row fits into its longer self as one piece"
    dt = step_dtype(obs, act)
    new = extend_dtype(dt, **extra)
    assert new.names == (*dt.names, *extra)
    assert all(at % d.base.alignment == 0 for at, d in offsets(new))
    assert all(new.fields[n] == dt.fields[n] for n in dt.names)
    assert all(new[n] == np.dtype(v) for n, v in extra.items())
    assert min(new.fields[n][1] for n in extra) >= dt.itemsize


def test_extending_by_a_column_that_is_there_names_it():
    "numpy's own message ('name already used as a name or title') doesn't say which"
    with pytest.raises(ValueError, match='reward'):
        extend_dtype(SMALL, reward='f8')  # was unnamed


@cases(80)
@given(any_space, any_space, extras)
def test_dtype_goes_through_a_file_as_plain_data(obs, act, extra):
    "dtype → plain data → torch.save → torch.load(weights_only) → the same dtype and offsets"
    for dt in step_dtype(obs, act), extend_dtype(step_dtype(obs, act), **extra):
        back = spec_dtype(through_file(dict(spec=dtype_spec(dt)))['spec'])
        assert (
            back == dt
            and back.isalignedstruct
            and back.itemsize == dt.itemsize
            and list(offsets(back)) == list(offsets(dt))
        )


# ---- columns ----

SHAPES = [(), (1,), (5,), (2, 3), (0,), (2, 0), (2, 1, 3)]
PICKS = {
    'all': lambda r: r,
    'slice': lambda r: r[1:] if r.ndim else r,
    'step': lambda r: r[::2] if r.ndim else r,
    'inner': lambda r: r[..., :2] if r.ndim else r,
    'transposed': lambda r: r.T,
}


@cases(200)
@given(any_space, any_space, st.sampled_from(SHAPES), st.sampled_from(list(PICKS)))
def test_every_column_is_a_view(obs, act, shape, pick):
    "Each plain field is a tensor with the rows' bits, shape and type; writes to it reach the rows"
    steps = Steps(PICKS[pick](scribble(np.zeros(shape, step_dtype(obs, act)))))
    assert agrees(steps, steps.rows) and steps.shape == steps.rows.shape
    fresh = Steps(scribble(np.zeros(steps.shape, steps.dtype), 1))
    for (_, ours), (_, theirs) in zip(columns(steps), columns(fresh)):
        ours.copy_(theirs)
    assert agrees(fresh, steps.rows)


@cases(150)
@given(any_space, any_space, st.sampled_from(SHAPES), st.sampled_from(list(PICKS)))
def test_bytes_give_the_same_columns_as_rows(obs, act, shape, pick):
    "A block on another device is a tensor of bytes: it has the same columns and comes back equal"
    steps = Steps(PICKS[pick](scribble(np.zeros(shape, step_dtype(obs, act)), 1)))
    there = elsewhere(steps)
    assert agrees(there, steps.rows)
    assert there.shape == steps.shape and len(there) == len(steps)
    assert there.to('cpu') == steps and there == steps
    assert bits(there.done) == bits(steps.done)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
def test_a_gpu_holds_the_same_columns():
    for steps in block(5), block((2, 3), DEEP), block(()):
        there = steps.pin_memory().to('cuda', non_blocking=True)
        torch.cuda.synchronize()
        assert there.device.type == 'cuda' and there.to('cpu') == steps
        assert all(bits(t.cpu()) == bits(a) for a, t in columns(there, steps.rows))
        assert pickle.loads(pickle.dumps(there)) == steps


def test_to_copies_only_where_it_must():
    steps = block(3)
    assert steps.to('cpu') is steps
    assert steps.to(torch.device('cpu')) is steps


# ---- picking rows ----


FLAT = [
    0,
    -1,
    slice(1, 4),
    slice(None, None, 2),
    slice(4, 1),
    [4, 4, -1],
    [],
    [True, False, True, False, True],
    np.array([3, 1], np.int32),
    np.array([2, 0], np.uint8),
    np.array([[0, 1], [2, 3]]),
    np.array([True, False, False, True, True]),
    torch.tensor(3),
    None,
    (slice(1, 3),),
    Ellipsis,
]
DEEPER = [
    0,
    (1, -1),
    (slice(None), 1),
    (Ellipsis, 1),
    (slice(None), slice(None, None, 2)),
    ([0, 1], [1, 2]),
    (slice(None), [1]),
    np.array([[True, False, True], [False, True, False]]),
    (slice(None), None, 1),
    (slice(None), np.array([True, False, True])),
]


# was: on rows `...`, `(1,)` and `(i,j)` (numpy gives a void, which `_like` takes for a device's
# block), and tensors of one number in a tuple (numpy takes them for an int); on bytes `(..., j)`
# (picks bytes, not rows) and uint8 numbers (taken for a mask).
def in_torch(i):
    "The same index with tensors instead of arrays"
    if isinstance(i, tuple):
        return tuple(map(in_torch, i))
    return torch.as_tensor(i) if isinstance(i, np.ndarray) else i


@pytest.mark.parametrize(
    'shape,i', [((5,), i) for i in FLAT] + [((2, 3), i) for i in DEEPER], ids=str
)
@pytest.mark.parametrize('where', [lambda steps: steps, elsewhere], ids=['rows', 'bytes'])
@pytest.mark.filterwarnings('ignore:indexing with dtype torch.uint8')
def test_rows_are_picked_as_numpy_picks_them(where, shape, i):
    "In all columns, in main memory and on a device, by arrays and by tensors"
    steps = block(shape, DEEP, 3)
    want = steps.rows[i]
    if isinstance(want, np.void):
        want = np.array(want, DEEP)
    for index in i, in_torch(i):
        got = where(steps)[index]
        assert isinstance(got, Steps) and got.shape == want.shape
        assert agrees(got, want)


@pytest.mark.parametrize('where', [lambda steps: steps, elsewhere], ids=['rows', 'bytes'])
@pytest.mark.parametrize('bad', [5, -6, [0, 9], 1.5, [True, False], (slice(None), 0)], ids=str)
def test_wrong_indices_raise(where, bad):
    with pytest.raises((IndexError, TypeError)):
        where(block(5))[bad]


@pytest.mark.parametrize(
    'i,shared', [(slice(1, None), True), (0, True), ([0, 1], False), (np.ones(4, bool), False)]
)
def test_slices_share_memory_and_masks_copy(i, shared):
    "As in numpy"
    rows = np.zeros(4, SMALL)
    Steps(rows)[i].reward.fill_(7)
    assert (rows['reward'] == 7).any() == shared


# ---- what a block can do ----


@cases(60)
@given(any_space, any_space, st.sampled_from(SHAPES), st.sampled_from(list(PICKS)))
def test_copies_are_equal_and_apart(obs, act, shape, pick):
    "Also with NaN; they keep the aligned dtype, and share no memory"
    steps = Steps(PICKS[pick](scribble(np.zeros(shape, step_dtype(obs, act)), 2)))
    for c in pickle.loads(pickle.dumps(steps)), copy.deepcopy(steps), steps.copy():
        assert c == steps and not (c != steps)
        assert c.dtype == steps.dtype and c.dtype.isalignedstruct
        assert agrees(c, steps.rows) and not np.shares_memory(c.rows, steps.rows)
    assert elsewhere(steps).copy() == pickle.loads(pickle.dumps(elsewhere(steps))) == steps


@cases(100)
@given(any_space, st.integers(0, 10**6))
def test_one_changed_number_makes_blocks_differ(obs, which):
    "Equality looks at every plain field of every row"
    steps = Steps(scribble(np.zeros(3, step_dtype(obs, Discrete(2))), 5))
    parts = [a for a in numpy_leaves(steps.rows) if a.size]
    other = steps.copy()
    a = [a for a in numpy_leaves(other.rows) if a.size][which % len(parts)]
    spot = np.unravel_index(which % a.size, a.shape)
    a[spot] = ~a[spot] if a.dtype == bool else 1 if not a[spot] == 1 else 0
    assert other != steps and not (other == steps)


def test_equality_asks_for_columns_and_shape_too():
    steps = block(3)
    longer = Steps(np.zeros(3, extend_dtype(SMALL, z='?')))
    for other in longer, block((3, 1)), block(2), 'steps', steps.rows.tolist():
        assert steps != other
    with pytest.raises(TypeError):
        hash(steps)


@cases(60)
@given(any_space, st.lists(st.integers(0, 3), min_size=1, max_size=5), st.booleans())
def test_cat_is_concatenation(obs, sizes, on_bytes):
    "Blocks of any number of rows are joined in order, to the bit; nothing is shared"
    parts = [
        Steps(scribble(np.zeros(n, step_dtype(obs, Discrete(2))), i)) for i, n in enumerate(sizes)
    ]
    joined = Steps.cat([elsewhere(p) if on_bytes else p for p in parts])
    want = np.concatenate([p.rows for p in parts])
    assert agrees(joined, want) and joined.dtype.isalignedstruct
    if not on_bytes:
        assert not any(np.shares_memory(joined.rows, p.rows) for p in parts)


def test_cat_takes_single_steps_and_generators():
    steps = block(4)
    assert Steps.cat(s for s in steps) == Steps.cat([steps[0], steps[1:]]) == steps
    sequences = block((4, 3))
    assert Steps.cat([sequences[:1], sequences[1:]]) == sequences


def in_sequences(burn_in):
    each = Steps(np.zeros(2, [('index', 'i8')]))
    return Sequences(np.zeros((2, 5), SMALL), each, burn_in)


@pytest.mark.parametrize(
    'parts,says',
    [
        ([block((2, 3)), block((2, 4))], ''),
        ([block((2, 3)), block((2, 1))], ''),
        ([block((2, 3)), block(3)], ''),
        ([], 'no blocks to join'),
        ([block(2), Steps(np.zeros(2, extend_dtype(SMALL, z='f8')))], r"got {'z': \(dtype"),
        ([in_sequences(2), in_sequences(3)], 'burn_in; got 3; expected 2'),
    ],
    ids=['lengths', 'broadcast', 'dimensions', 'nothing', 'columns', 'burn-in'],
)
def test_what_cat_refuses(parts, says):
    with pytest.raises(ValueError, match=f'^Steps.cat.*{says}'):
        Steps.cat(parts)


@pytest.mark.parametrize('where', [lambda steps: steps, elsewhere], ids=['rows', 'bytes'])
def test_iteration_and_length(where):
    steps = where(block(4))
    assert len(steps) == 4 and len(steps[0]) == 1
    assert [*steps] == [steps[i] for i in range(4)]
    with pytest.raises(TypeError, match='no rows to iterate'):
        iter(steps[0])
    assert [r.shape for r in where(block((2, 3)))] == [(3,)] * 2


def test_done_is_either_end():
    steps = Steps(np.zeros(4, SMALL))
    steps.terminated[:], steps.truncated[:] = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]])
    assert steps.done.tolist() == elsewhere(steps).done.tolist() == [False, True, True, True]


def test_asdict_holds_views_of_all_columns():
    steps = block(3, DEEP)
    d = steps.asdict()
    assert list(d) == list(DEEP.names)
    assert d['state']['arm'][1].data_ptr() == steps.state['arm'][1].data_ptr()


@pytest.mark.parametrize('rows', [None, [1, 2], np.zeros(3), torch.zeros(3), np.zeros(3, SMALL)[0]])
def test_rows_must_be_a_structured_array(rows):
    with pytest.raises(TypeError, match='rows must be a structured array'):
        Steps(rows)


@pytest.mark.parametrize('where', [lambda steps: steps, elsewhere], ids=['rows', 'bytes'])
def test_unknown_columns_are_named_with_a_neighbor(where):
    steps = where(block(2))
    with pytest.raises(AttributeError, match="no column 'rewrd', did you mean 'reward'"):
        steps.rewrd
    with pytest.raises(KeyError, match="no column 'nxt_state', did you mean 'next_state'"):
        steps['nxt_state']
    assert not hasattr(steps, 'discount') and not hasattr(steps, '__array__')
    assert {'state', 'reward', 'to'} <= set(dir(steps))


@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_every_shape_can_be_shown(shape):
    "Also on a device"
    steps = block(shape, DEEP)
    for s in steps, elsewhere(steps):
        assert repr(s).startswith(f'Steps {list(shape)}, {DEEP.itemsize} bytes a row')
        assert 'state' in repr(s)


@pytest.mark.filterwarnings('error')
def test_read_only_rows_are_read_without_complaint():
    "Rows from a memory map or from another process' memory may be read-only"
    rows = np.zeros(3, SMALL)
    rows.flags.writeable = False
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch warns once in a process
    try:
        assert Steps(rows).reward.tolist() == [0, 0, 0]
    finally:
        torch.set_warn_always(before)
