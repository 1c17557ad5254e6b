"""`Steps` and row dtypes: any space, any shape of block, any way to pick rows, on the rows and on a block of bytes."""

import copy, pickle

import numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from fastrl_replay.all import *
from fastrl_replay.steps.row_dtypes import dtype_spec, extend_dtype, leaves, spec_dtype
from fastrl_replay.testing import through_file
from scripted import elsewhere
from strategies import DTYPES, any_space, bits, cases, numpy_leaves, pairs, plain, scribble

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


def test_cartpole_fits_a_cache_line():
    assert step_dtype(Box(-1, 1, (4,)), Discrete(2)).itemsize == 64


NO_SIZE = [
    spaces.Text(5),
    spaces.Graph(Discrete(2), None),
    spaces.Sequence(Discrete(2)),
    spaces.OneOf([Discrete(2), Box(0, 1)]),
]


@pytest.mark.parametrize('bad', NO_SIZE, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    'wrap,where',
    [
        (lambda s: s, 'state'),
        (lambda s: spaces.Dict(a=Discrete(2), b=s), "'b'"),
        (
            lambda s: spaces.Tuple([Discrete(2), spaces.Dict(c=spaces.Tuple([s]))]),
            "['[1]']['c']['[0]']",
        ),
    ],
)
def test_spaces_without_a_size_are_named(bad, wrap, where):
    "The error names the kind of space and where in the whole it lies, as observation and as action, and what to do"
    for args, name in (
        ((wrap(bad), Discrete(2)), 'observation_space'),
        ((Discrete(2), wrap(bad)), 'action_space'),
    ):
        with pytest.raises(TypeError) as e:
            step_dtype(*args)
        assert (
            type(bad).__name__ in str(e.value) and name in str(e.value) and 'Remedy' in str(e.value)
        )
        assert where == 'state' or where in str(e.value)


@pytest.mark.parametrize(
    'empty',
    [
        spaces.Dict(),
        spaces.Tuple([]),
        spaces.Dict(a=spaces.Tuple([])),
        spaces.Dict({1: Discrete(2)}),
        spaces.Dict({'': Discrete(2)}),
    ],
    ids=str,
)
def test_spaces_without_parts_or_names_are_refused(empty):
    with pytest.raises(TypeError, match='at least one part'):
        step_dtype(empty, Discrete(2))


def test_dict_with_a_key_like_a_tuples_stays_a_dict():
    "A Dict is a dict of tensors whatever its keys are, or it is refused with a word"
    try:
        dt = step_dtype(spaces.Dict({'[0]': Discrete(2), 'b': Discrete(2)}), Discrete(2))
    except (TypeError, ValueError):
        return
    assert isinstance(Steps(np.zeros(2, dt)).state, dict)  # was: it comes back as a tuple of two


@pytest.mark.parametrize(
    'kind', ['f16', '>f4', 'U5', 'S3', 'O', 'M8[s]', 'V3']
)  # was: all are taken without a word
def test_columns_that_torch_cannot_view_are_refused_early(kind):
    "step_dtype promises rows whose every column is a tensor: a type that has none is refused where it is named"
    with pytest.raises((TypeError, ValueError), match='x'):
        step_dtype(Discrete(2), Discrete(2), x=kind)


ACCEPTED = 'expected bool, int8 to int64, uint8 to uint64, float16, float32 or float64, in native byte order. Remedy: another dtype'


def box_of(kind):
    "A space of any dtype; gymnasium's own refuses some"
    box = Box(0, 1, (2,), np.float32)
    box.dtype = np.dtype(kind)
    return box


@pytest.mark.parametrize(
    'kind', ['f16', '>f4', '>i8', 'c8', 'c16', 'c32', 'U5', 'S3', 'O', 'M8[s]', 'm8[s]', 'V3']
)  # was: taken without a word, but for extra columns
@pytest.mark.parametrize(
    'wrap, part',
    [(lambda s: s, ''), (lambda s: spaces.Dict(a=spaces.Tuple([Discrete(2), s])), r'.a.\[1\]')],
    ids=['plain', 'nested'],
)
def test_leaves_with_which_not_every_stage_can_work_are_refused_by_name(kind, wrap, part):
    "As an observation, an action or a column, however deep: which column, what came, what is accepted, what to do"
    for args, extra, name in (
        ((wrap(box_of(kind)), Discrete(2)), {}, 'state'),
        ((Discrete(2), wrap(box_of(kind))), {}, 'action'),
        ((Discrete(2), Discrete(2)), dict(x=wrap(box_of(kind))), 'x'),
    ):
        with pytest.raises(
            TypeError, match=f"step_dtype: column '{name}{part}'; got .*; {ACCEPTED}"
        ):
            step_dtype(*args, **extra)
    with pytest.raises(TypeError, match=f"step_dtype: column 'x'; got .*; {ACCEPTED}"):
        extend_dtype(SMALL, x=(kind, (2,)))


@pytest.mark.parametrize('kind', [*DTYPES, 'longlong', 'ulonglong'])
def test_all_other_leaves_are_accepted(kind):
    for dt in (
        step_dtype(box_of(kind), box_of(kind), x=box_of(kind)),
        step_dtype(Discrete(2), Discrete(2), x=kind),
    ):
        columns = [*Steps(np.zeros(2, dt)).asdict()]
    assert columns[-1] == 'x'


@pytest.mark.parametrize(
    'name', ['rows', 'shape', 'dtype', 'device', 'done', 'to', 'copy', 'cat', '_rows']
)  # was: all are taken without a word
def test_columns_that_steps_would_hide_are_refused(name):
    "`steps.shape` can't be both the block's shape and a column: as with the columns that are always there, choose another name"
    with pytest.raises(ValueError, match=name):
        step_dtype(Discrete(2), Discrete(2), **{name: 'f4'})


def test_extra_columns_may_be_dtypes_shapes_and_spaces():
    dt = step_dtype(
        Discrete(2),
        Discrete(2),
        a='f8',
        b=('u1', (2, 3)),
        c=spaces.Dict(x=Box(0, 1, (2,), np.float16)),
        d=np.int16,
    )
    assert [dt['a'], dt['b'], dt['c']['x'], dt['d']] == [
        np.dtype('f8'),
        np.dtype(('u1', (2, 3))),
        np.dtype(('f2', (2,))),
        np.dtype('i2'),
    ]
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
    "Old fields stay where they are, new ones lie after them, aligned: a row can be copied into its longer self as one piece"
    dt = step_dtype(obs, act)
    new = extend_dtype(dt, **extra)
    assert (
        new.isalignedstruct
        and new.names == (*dt.names, *extra)
        and all(at % d.base.alignment == 0 for at, d in offsets(new))
    )
    assert all(new.fields[n] == dt.fields[n] for n in dt.names) and all(
        new[n] == np.dtype(v) for n, v in extra.items()
    )
    assert min(new.fields[n][1] for n in extra) >= dt.itemsize
    old, long = scribble(np.zeros(3, dt)), np.zeros(3, new)
    long.view(np.uint8).reshape(3, -1)[:, : dt.itemsize] = old.view(np.uint8).reshape(3, -1)
    assert all(bits(long[n]) == bits(old[n]) for n in dt.names)


def test_extending_by_a_space_gives_the_spaces_dtype():
    "What step_dtype takes as a column, extend_dtype takes too, or refuses with a word"
    try:
        dt = extend_dtype(SMALL, goal=Box(-1, 1, (2,)))
    except (TypeError, ValueError):
        return
    assert dt['goal'].shape == (
        2,
    )  # was: np.dtype(a Box) is its scalar type: the shape is lost without a word


def test_extending_by_a_column_that_is_there_names_it():
    "numpy's own message ('name already used as a name or title') doesn't say which"
    with pytest.raises(ValueError, match='reward'):
        extend_dtype(SMALL, reward='f8')  # was unnamed


@cases(80)
@given(any_space, any_space, extras)
def test_dtype_goes_through_a_file_as_plain_data(obs, act, extra):
    "dtype → plain data → torch.save → torch.load(weights_only) → the same dtype, aligned, at the same offsets"
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
@given(
    any_space, any_space, st.sampled_from(SHAPES), st.sampled_from(list(PICKS)), st.integers(0, 99)
)
def test_every_column_is_a_view(obs, act, shape, pick, seed):
    "Each plain field is a tensor inside the rows' memory with their bits, shape and type; what is written into it is in the rows"
    whole = scribble(np.zeros(shape, step_dtype(obs, act)), seed)
    steps = Steps(PICKS[pick](whole))
    assert agrees(steps, steps.rows) and steps.shape == steps.rows.shape
    low, high = np.lib.array_utils.byte_bounds(whole)
    for a, t in columns(steps):
        if t.numel():
            assert low <= t.data_ptr() < high and t.data_ptr() == a.__array_interface__['data'][0]
    fresh = scribble(np.zeros(shape, whole.dtype), seed + 1)
    for (_, t), (b, _) in zip(columns(steps), columns(Steps(PICKS[pick](fresh)))):
        t.copy_(torch.from_numpy(b.copy()))
    assert agrees(Steps(PICKS[pick](fresh)), steps.rows), 'what was written is not in the rows'


@pytest.mark.parametrize('dtype', DTYPES)
def test_dtypes_are_kept(dtype):
    "No type is widened, narrowed or turned into another, scalar or array, on rows and on bytes"
    steps = block(
        4, step_dtype(Box(0, 1, (3,), np.dtype(dtype).type), Box(0, 1, (), np.dtype(dtype).type))
    )
    for s in steps, elsewhere(steps), steps.to('meta'):
        assert [str(s.state.dtype), str(s.action.dtype)] == [f'torch.{dtype}'] * 2 and [
            tuple(s.state.shape),
            tuple(s.action.shape),
        ] == [(4, 3), (4,)]


@cases(150)
@given(any_space, any_space, st.sampled_from(SHAPES), st.sampled_from(list(PICKS)))
def test_bytes_give_the_same_columns_as_rows(obs, act, shape, pick):
    "A block on another device is a tensor of bytes: column by column it is the block in main memory, and comes back equal"
    steps = Steps(PICKS[pick](scribble(np.zeros(shape, step_dtype(obs, act)), 1)))
    there = elsewhere(steps)
    assert agrees(there, steps.rows) and there.shape == steps.shape and len(there) == len(steps)
    assert there.to('cpu') == steps and there == steps and bits(there.done) == bits(steps.done)
    assert all(
        t.data_ptr() - there._block.data_ptr() < there._block.numel()
        for _, t in columns(there, steps.rows)
        if t.numel()
    )
    ghost = steps.to('meta')
    assert all(
        (t.shape, t.dtype, t.device.type) == (u.shape, u.dtype, 'meta')
        for n in steps.dtype.names
        for (_, t), (_, u) in zip(pairs(steps.rows[n], ghost[n]), pairs(steps.rows[n], steps[n]))
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
def test_a_gpu_holds_the_same_columns():
    "One copy there, one back; pinned memory on the way"
    for steps in block(5), block((2, 3), DEEP), block(()):
        there = steps.pin_memory().to('cuda', non_blocking=True)
        torch.cuda.synchronize()
        assert there.device.type == 'cuda' and there.to('cpu') == steps
        assert all(bits(t.cpu()) == bits(a) for a, t in columns(there, steps.rows))
        assert (
            steps.pin_memory().is_pinned()
            and not steps.is_pinned()
            and pickle.loads(pickle.dumps(there)) == steps
        )


def test_to_copies_one_block_and_only_where_it_must():
    steps = block(3)
    assert steps.to('cpu') is steps and steps.to(torch.device('cpu')) is steps
    calls = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            if 'copy' in str(f):
                calls.append(str(f))
            return f(*args, **(kwargs or {}))

    with Counting():
        block(4, DEEP).to('meta')
    assert len(calls) == 1, calls


# ---- picking rows ----


def t(*xs, **kw):
    return torch.tensor(*xs, **kw)


FLAT = [
    0,
    -1,
    np.int64(2),
    slice(None),
    slice(1, 4),
    slice(None, None, 2),
    slice(4, 1),
    slice(-2, None),
    slice(1, None, 3),
    [0, 2],
    [],
    [4, 4, -1],
    [True, False, True, False, True],
    np.array([2, 0]),
    np.array([3, 1], np.int32),
    np.array([], np.int64),
    np.array([True, False, False, True, True]),
    np.array([[0, 1], [2, 3]]),
    None,
    (1,),
    (slice(1, 3),),
    t([2, 0]),
    t(3),
    t([3], dtype=torch.int32),
    t([True, False, False, True, True]),
    t([False] * 5),
    Ellipsis,
    range(2),
    np.array([2, 0], np.uint8),
    t([2, 0], dtype=torch.uint8),
]
DEEPER = [
    0,
    -1,
    (0, 1),
    (1, -1),
    (slice(None), 1),
    (0, slice(1, None)),
    (Ellipsis, 1),
    (slice(None), slice(None, None, 2)),
    ([0, 1], [1, 2]),
    (np.array([0, 1]), np.array([1, 2])),
    (t([0, 1]), t([1, 2])),
    (slice(None), t([1])),
    (slice(None), np.array([1])),
    (slice(None), [1]),
    np.array([[True, False, True], [False, True, False]]),
    t([[True, False, True], [False, True, False]]),
    None,
    (None, 0),
    (slice(None), None, 1),
    Ellipsis,
    (Ellipsis,),
    (Ellipsis, slice(1, None)),
    (t(1), t(2)),
    (slice(None), np.array([True, False, True])),
]


def plain_index(i):
    "The same index for a numpy array"
    if isinstance(i, tuple):
        return tuple(map(plain_index, i))
    return i.numpy() if isinstance(i, torch.Tensor) else list(i) if isinstance(i, range) else i


# was: on rows `...`, `(1,)` and `(i,j)` (numpy gives a void, which `_like` takes for a device's block), and tensors of one number
# in a tuple (numpy takes them for an int); on bytes `(..., j)` (picks bytes, not rows) and uint8 numbers (taken for a mask).
@pytest.mark.parametrize(
    'shape,i', [((5,), i) for i in FLAT] + [((2, 3), i) for i in DEEPER], ids=str
)
@pytest.mark.parametrize('where', ['rows', 'bytes'])
@pytest.mark.filterwarnings('ignore:indexing with dtype torch.uint8')
def test_rows_are_picked_as_numpy_picks_them(where, shape, i):
    "Every way to pick rows gives numpy's rows, in all columns, in main memory and on a device"
    steps = block(shape, DEEP, 3)
    want = steps.rows[plain_index(i)]
    if isinstance(want, np.void):
        want = np.array(want, DEEP)
    got = (steps if where == 'rows' else elsewhere(steps))[i]
    assert isinstance(got, Steps) and got.shape == want.shape and agrees(got, want)


@pytest.mark.parametrize('where', ['rows', 'bytes'])
def test_rows_backwards(where):
    "torch has no negative strides: a block backwards is a copy, or is refused when it is asked for, not at its first column"
    steps = block(3) if where == 'rows' else elsewhere(block(3))
    try:
        back = steps[::-1]
    except (ValueError, IndexError):
        return
    assert (
        back.step_n.tolist() == steps.step_n.tolist()[::-1]
    )  # was: steps[::-1] is fine, its columns raise numpy's stride error


@pytest.mark.parametrize('where', ['rows', 'bytes'])
@pytest.mark.parametrize(
    'bad',
    [
        5,
        -6,
        [0, 9],
        1.5,
        np.array([0.5]),
        [True, False],
        (0, 0),
        (slice(None), 0),
        (slice(None), slice(1, 2)),
    ],
    ids=str,
)  # was: on a device, the last ones picked bytes
def test_wrong_indices_raise(where, bad):
    steps = block(5) if where == 'rows' else elsewhere(block(5))
    with pytest.raises((IndexError, TypeError)):
        steps[bad]


def test_slices_share_memory_and_masks_copy():
    "As in numpy: `steps[1:]` and `steps[0]` are views, a mask or a list of numbers copies"
    for i, shared in (
        (slice(1, None), True),
        (0, True),
        (slice(None, None, 2), True),
        ([0, 1], False),
        (np.ones(4, bool), False),
    ):
        rows = np.zeros(4, SMALL)
        Steps(rows)[i].reward.fill_(7)
        assert bool((rows['reward'] == 7).any()) == shared


def test_every_pick_knows_the_replay():
    "A part of a batch still tells its replay; a pickled one doesn't"

    class Ear:
        def update_priorities(self, keys, td):
            self.heard = keys.tolist(), td

    ear, batch = Ear(), Steps(np.zeros(4, extend_dtype(SMALL, index='i8', weight='f4')))
    batch.rows['index'], batch._replay = [3, 5, 7, 9], ear
    for part, keys in (
        (batch[1:], [5, 7, 9]),
        (batch[batch.index > 4], [5, 7, 9]),
        (batch.to('meta').copy(), None),
        (elsewhere(batch)[2:], [7, 9]),
        (batch.copy(), [3, 5, 7, 9]),
    ):
        if keys is None:
            assert part._replay is ear
            continue
        part.update_priorities(1.0)
        assert ear.heard == (keys, 1.0)
    with pytest.raises(TypeError, match='not drawn from a replay'):
        pickle.loads(pickle.dumps(batch)).update_priorities(1.0)


def test_a_shallow_copy_of_a_batch_knows_the_replay():
    "copy.copy copies all attributes of an object"
    batch = block(2)
    batch._replay = 'a replay'
    assert (
        copy.copy(batch)._replay == 'a replay'
    )  # was: __reduce__ is for other processes, but copy.copy uses it too, and the replay is lost


# ---- what a block can do ----


@cases(60)
@given(any_space, any_space, st.sampled_from(SHAPES), st.sampled_from(list(PICKS)))
def test_copies_are_equal_and_apart(obs, act, shape, pick):
    "Pickled, deep-copied and copied blocks equal the original by value, NaN included, keep the aligned dtype, and share no memory"
    steps = Steps(PICKS[pick](scribble(np.zeros(shape, step_dtype(obs, act)), 2)))
    for c in (
        pickle.loads(pickle.dumps(steps)),
        copy.deepcopy(steps),
        steps.copy(),
        pickle.loads(pickle.dumps(elsewhere(steps))),
        elsewhere(steps).copy(),
    ):
        assert (
            c == steps
            and steps == c
            and not (c != steps)
            and c.dtype == steps.dtype
            and c.dtype.isalignedstruct
        )
        if c._block is None:
            assert agrees(c, steps.rows) and not np.shares_memory(c.rows, steps.rows)


def test_a_pickled_slice_holds_only_its_rows():
    big = block(10_000)
    assert len(pickle.dumps(big[5:6])) < 2000 and len(pickle.dumps(big[::5000])) < 2000


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
    other = Steps(np.zeros(3, step_dtype(Box(-1, 1, (3,)), Discrete(2), z='?')))
    assert (
        steps != other
        and steps != block((3, 1))
        and steps != block(2)
        and steps != 'steps'
        and steps != steps.rows.tolist()
    )
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


def test_cat_takes_single_steps_generators_and_blocks_of_sequences():
    steps = block(4)
    assert (
        Steps.cat(steps) == steps
        and Steps.cat(s for s in steps) == steps
        and Steps.cat([steps[0], steps[1:]]) == steps
    )
    seqs = block((4, 3))
    assert (
        Steps.cat([seqs[:1], seqs[1:]]) == seqs
        and Steps.cat([elsewhere(steps)[0], elsewhere(steps)[1:]]) == steps
    )


@pytest.mark.parametrize(
    'parts',
    [[block((2, 3)), block((2, 4))], [block((2, 3)), block(3)]],
    ids=['lengths', 'dimensions'],
)  # was: numpy's broadcasting error
def test_cat_names_shapes_that_do_not_join(parts):
    with pytest.raises(BlockError, match='Steps.cat'):
        Steps.cat(parts)


def test_cat_broadcasts_nothing():
    "A row of one is not a row of three"
    with pytest.raises((BlockError, ValueError)):
        Steps.cat(
            [block((2, 3)), block((2, 1))]
        )  # was: the one column is written three times, in silence


def test_cat_of_blocks_here_and_there_says_so():
    "Mixed devices are joined, or refused by the name of Steps.cat"
    for parts in [block(2), elsewhere(block(2))], [elsewhere(block(2)), block(2)]:
        try:
            assert len(Steps.cat(parts)) == 4
        except (BlockError, RuntimeError, TypeError) as e:
            assert 'Steps.cat' in str(
                e
            )  # was: torch's "expected Tensor as element 1 in argument 0"


def test_cat_refuses_nothing_and_strangers():
    with pytest.raises(ValueError, match='at least one'):
        Steps.cat([])
    with pytest.raises(BlockError, match='different columns'):
        Steps.cat([block(2), block(2, DEEP)])


def test_iteration_and_length():
    steps = block(4)
    for s in steps, elsewhere(steps):
        assert (
            len(s) == 4
            and [r.shape for r in s] == [()] * 4
            and all(r == steps[i] for i, r in enumerate(s))
        )
        with pytest.raises(TypeError, match='no rows to iterate'):
            iter(s[0])
        assert len(s[0]) == 1
    assert [r.shape for r in block((2, 3))] == [(3,)] * 2 and list(block(0)) == []


def test_done_is_either_end():
    rows = np.zeros(4, SMALL)
    rows['terminated'], rows['truncated'] = [0, 1, 0, 1], [0, 0, 1, 1]
    for s in Steps(rows), elsewhere(Steps(rows)):
        assert s.done.tolist() == [False, True, True, True] and s[1].done.item() is True


def test_asdict_holds_views_of_all_columns():
    steps = block(3, DEEP)
    d = steps.asdict()
    assert (
        list(d) == list(DEEP.names)
        and d['state']['arm'][1].data_ptr() == steps.state['arm'][1].data_ptr()
    )


def test_leaves_have_dotted_names():
    assert [n for n, _ in leaves(np.zeros(1, DEEP))][:4] == [
        'state.img',
        'state.arm.[0]',
        'state.arm.[1]',
        'action.[0]',
    ]


@pytest.mark.parametrize(
    'rows',
    [
        None,
        [1, 2],
        np.zeros(3),
        torch.zeros(3),
        {},
        np.zeros(3, SMALL).tolist(),
        np.zeros(3, SMALL)[0],
    ],
    ids=lambda r: type(r).__name__,
)
def test_rows_must_be_a_structured_array(rows):
    with pytest.raises(TypeError, match='structured numpy array'):
        Steps(rows)


def test_unknown_columns_are_named_with_a_neighbour():
    steps = block(2)
    for s in steps, elsewhere(steps):
        with pytest.raises(AttributeError, match="no column 'rewrd', did you mean 'reward'"):
            s.rewrd
        with pytest.raises(KeyError, match="no column 'nxt_state', did you mean 'next_state'"):
            s['nxt_state']
        assert (
            not hasattr(s, 'discount')
            and not hasattr(s, '__array__')
            and not hasattr(s, '_anything')
        )


@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_every_shape_has_a_face(shape):
    "repr and html show any block, nested, empty, single or elsewhere"
    steps = block(shape, DEEP)
    assert (
        repr(steps).startswith(f'Steps {list(shape)}, {DEEP.itemsize} bytes a row')
        and 'state.arm.[1]' in repr(steps)
        and 'float16' in repr(steps)
    )
    assert (
        '<table>' in steps._repr_html_()
        and 'state' in repr(elsewhere(steps))
        and 'meta' in repr(steps.to('meta'))
        and elsewhere(steps)._repr_html_()
    )


def test_columns_are_completed_in_an_editor():
    "dir() is what a notebook offers after `steps.`"
    assert {'state', 'reward', 'to'} <= set(dir(block(2)))  # was: columns are missing


def test_rows_elsewhere_say_how_to_get_them():
    with pytest.raises(RuntimeError, match=r"\.to\('cpu'\)\.rows"):
        block(2).to('meta').rows


@pytest.mark.filterwarnings('error')
def test_read_only_rows_are_read_without_complaint():
    "Rows from a memory map or from another process' memory may be read-only; looking at them is no offence"
    rows = np.zeros(3, SMALL)
    rows.flags.writeable = False
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch complains once in a process
    try:
        assert Steps(rows).reward.tolist() == [
            0,
            0,
            0,
        ]  # was: torch's UserWarning, which promises undefined behaviour
    finally:
        torch.set_warn_always(before)


# ---- between processes ----


class _Deaf:  # stands in for a replay: may not travel
    def __reduce__(self):
        raise RuntimeError('a replay was pickled with its batch')


@pytest.mark.parametrize('workers', [0, 1, 2])
@pytest.mark.parametrize('collate', [None, 'identity'])
def test_blocks_travel_through_a_data_loader(workers, collate):
    "Every worker sends every block, equal by value, still fit for a memory; the replay stays at home"
    blocks = [block(n, DEEP, n) for n in (1, 3, 5)]
    for b in blocks:
        for a in numpy_leaves(b.rows):
            if a.dtype.kind == 'f':
                a[...] = np.nan_to_num(a)
        b.rows['env_id'] = 0
        b._replay = _Deaf()
    loader = DataLoader(
        Items(blocks).header(3),
        batch_size=None,
        num_workers=workers,
        collate_fn=(lambda x: x) if collate else None,
    )
    got = list(loader)
    assert sorted(len(b) for b in got) == sorted([1, 3, 5] * max(workers, 1)) and all(
        b == blocks[len(b) // 2] for b in got
    )
    assert all(b.dtype.isalignedstruct for b in got) and len(
        Timeline(100).add(Steps.cat(got))
    ) == 9 * max(workers, 1)


def test_a_pickled_block_leaves_its_replay_behind():
    steps = block(2)
    steps._replay = _Deaf()
    assert pickle.loads(pickle.dumps(steps)) == steps and copy.deepcopy(steps) == steps
    assert pickle.loads(pickle.dumps(steps))._replay is None


def test_blocks_with_other_columns_name_those_that_differ():
    "And not two whole dtypes"
    a, b = (
        Steps(np.zeros(2, np.dtype([('x', 'f4'), ('y', 'i8'), *more], align=True)))
        for more in ([], [('z', 'f8')])
    )
    with pytest.raises(
        BlockError, match=r"^Steps.cat: different columns; got 'z' float64; expected no 'z'$"
    ):
        Steps.cat([a, b])


def test_sequences_with_other_burn_in_are_not_joined():
    from fastrl_replay.steps.batches import Sequences
    from fastrl_replay.steps.errors import BlockError

    rows = np.zeros((2, 5), step_dtype(spaces.Discrete(3), spaces.Discrete(2)))
    each = Steps(np.zeros(2, [('index', 'i8')]))
    a, b, c = (Sequences(rows, each, k) for k in (2, 2, 3))
    assert Steps.cat([a, b]).burn_in.shape == (4, 2)
    with pytest.raises(BlockError, match='burn_in; got 3; expected 2'):
        Steps.cat([a, b, c])
