"""`Timeline` against a list of dicts and plain loops, and at every edge that a ring of rows has."""

import numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.errors import BlockError, StaleKey
from fastrl_replay.steps.row_dtypes import extend_dtype, leaves, step_dtype
from fastrl_replay.envs.nans import NaNSearch, first_nan, has_nan
from fastrl_replay.memory.timeline import Timeline
from fastrl_replay.testing import same, through_file
from strategies import bits, cases, numbers, numpy_leaves

Box, Discrete = spaces.Box, spaces.Discrete
KINDS = dict(
    cartpole=step_dtype(Box(-1, 1, (4,)), Discrete(2)),
    odd=step_dtype(
        Box(0, 255, (9,), np.uint8), Box(0, 1, (), np.int8)
    ),  # 4 × an odd number of bytes
    nested=step_dtype(
        spaces.Dict(
            a=Box(-1, 1, (3,), np.float16),
            b=spaces.Tuple([Box(-1, 1, (), np.float64), Box(0, 9, (5,), np.uint8)]),
        ),
        spaces.Tuple([Discrete(3), spaces.MultiBinary(3)]),
        logp='f8',
        hidden=('f2', (2,)),
    ),
    wide=step_dtype(Box(0, 255, (7, 11), np.uint8), Discrete(2), n='i2'),
)
assert KINDS['odd'].itemsize % 8 == 4


def episode(n, dtype=KINDS['cartpole'], env=0, ends=False, number=1, start=1):
    "Rows of one episode of one environment; `total_reward` counts them from `start`"
    rows = numbers(n, dtype)
    rows['env_id'], rows['episode_n'], rows['step_n'] = env, number, np.arange(1, n + 1)
    rows['terminated'], rows['truncated'], rows['total_reward'] = (
        False,
        False,
        np.arange(start, start + n),
    )
    if ends and n:
        rows['terminated'][-1] = True
    return rows


def filled(n=8, max_sz=5, **kw):
    line = Timeline(max_sz)
    line.add(Steps(episode(n, **kw)))
    return line


def frozen(line):
    "All that can be seen of a timeline, saved"
    return dict(
        state=line.state_dict(),
        size=len(line),
        nbytes=line.nbytes,
        dtype=str(line.dtype),
        keys=line.keys,
    )


# ---- the reference ----

ENVS = [0, 3, 15, 4000]  # the last one needs more places than there are at first


def story(program, dtype):
    """What a string of bytes tells: (rows, lives, cuts). A byte is a step of one of four environments, which goes on, terminates, is truncated,
    or is never heard of again (and another may come with its number); it may also end a block, followed by an empty block, a save or a bad block."""
    n = len(program)
    rows, lives, cuts = numbers(n, dtype, n), np.zeros(n, int), []
    place = [dict(life=None, episode=0, step=0) for _ in ENVS]
    for i, b in enumerate(program):
        env, what = place[b & 3], b >> 2 & 3
        if env['life'] is None:
            env.update(life=i, episode=env['episode'] + 1, step=0)
        env['step'] += 1
        lives[i], r = env['life'], rows[i]
        r['env_id'], r['episode_n'], r['step_n'], r['total_reward'] = (
            ENVS[b & 3],
            env['episode'],
            env['step'],
            i + 1,
        )
        r['terminated'], r['truncated'] = what == 1, what == 2
        if what:
            env['life'] = None
        if what == 3 and b & 128:
            env['episode'] = 0  # another environment takes the number, and counts from 1 again
        if b & 16:
            cuts.append((i + 1, bool(b & 32), bool(b & 64), bool(b & 128)))
    return rows, lives, cuts + [(n, False, True, False)]


class Naive:
    "A list of dicts"

    def __init__(self, max_sz):
        self.rows, self.max_sz = [], max_sz

    def add(self, lives):
        self.rows += [dict(key=len(self.rows) + i, life=life) for i, life in enumerate(lives)]

    def alive(self):
        return [r['key'] for r in self.rows][-self.max_sz :]

    def window(self, key, length):
        later = [r['key'] for r in self.rows[key:] if r['life'] == self.rows[key]['life']]
        return later[:length]


def agrees(line, naive, rows, length, rng):
    "Hold all that a timeline says against the list"
    n, keys = len(naive.rows), naive.alive()
    assert len(line) == len(keys) and line.inserted == n and line.keys.tolist() == keys
    asked = np.arange(-2, n + 3)
    assert line.valid(asked).tolist() == [k in set(keys) for k in asked]
    if not keys:
        return
    order = rng.permutation(keys)
    assert line.take(order) == Steps(rows[order]) and line[:] == Steps(rows[keys])
    seen = line.windows(order, length)
    want = [naive.window(k, length) for k in order]
    assert seen.shape == (len(order), length)
    assert seen.total_reward.tolist() == [
        [k + 1 for k in w] + [0] * (length - len(w)) for w in want
    ]
    assert seen.mask.tolist() == [[True] * len(w) + [False] * (length - len(w)) for w in want]


@pytest.mark.parametrize('kind', KINDS)
@cases(500)
@given(program=st.binary(max_size=40), max_sz=st.integers(1, 12) | st.just(60))
def test_timeline_is_a_list_of_dicts(kind, program, max_sz):
    """Random interleavings, endings, block sizes and capacities: len, keys, valid, take and windows agree with the list after every block;
    a save and load in between changes nothing, and neither does a refused block"""
    rows, lives, cuts = story(program, KINDS[kind])
    line, naive, at, rng = Timeline(max_sz), Naive(max_sz), 0, np.random.default_rng(0)
    for cut, empty, save, bad in cuts:
        if bad:
            wrong = rows[at:cut].copy()
            wrong['reward'][-1:] = np.nan
            if len(wrong):
                with pytest.raises(BlockError):
                    line.add(Steps(wrong))
        assert line.add(Steps(rows[at:cut])).tolist() == list(range(at, cut))
        naive.add(lives[at:cut])
        if empty:
            assert line.add(Steps(rows[cut:cut])).tolist() == []
        if save:
            twin = Timeline(max_sz)
            twin.load_state_dict(through_file(line.state_dict()))
            line = twin
        at = cut
        agrees(line, naive, rows, 1 + (cut * 5) % 9, rng)
    if len(line):  # windows hold whole rows, and nothing but zeros after them
        seen = line.windows(line.keys, 4)
        for key, w in zip(line.keys, seen):
            want = naive.window(key, 4)
            assert all(
                bits(w.rows[n][: len(want)]) == bits(rows[n][want])
                for n in rows.dtype.names
                if rows.dtype[n].names is None
            )
            assert not any(np.asarray(a[len(want) :]).any() for a in numpy_leaves(w.rows))


@pytest.mark.slow
@cases(10_000)
@given(program=st.binary(max_size=120), max_sz=st.integers(1, 40))
def test_timeline_is_a_list_of_dicts_for_long(program, max_sz):
    test_timeline_is_a_list_of_dicts.hypothesis.inner_test('cartpole', program, max_sz)


# ---- where episodes end ----


def linked(first, second, max_sz=9):
    "Does a window go from the first row to the second?"
    line = Timeline(max_sz)
    for r in first, second:
        line.add(Steps(r))
    return bool(line.windows([0], 2).mask[0, 1])


@pytest.mark.parametrize(
    'change,want',
    [
        (dict(), True),
        (dict(terminated=True), False),
        (dict(truncated=True), False),
        (dict(terminated=True, truncated=True), False),
    ],
    ids=str,
)
def test_nothing_follows_an_end(change, want):
    a, b = episode(1), episode(2)[1:]
    for n, v in change.items():
        a[n] = v
    assert linked(a, b) == want


# ---- blocks in every guise ----


def test_rows_from_a_file_are_taken(tmp_path):
    "numpy's own file keeps offsets but forgets that they were aligned; the rows are the same"
    np.save(tmp_path / 'rows.npy', episode(3))
    rows = np.load(tmp_path / 'rows.npy', mmap_mode='r')
    line = Timeline(5)
    line.add(
        Steps(rows)
    )  # was: "a packed dtype" is refused, though every offset is aligned and equal to step_dtype's
    assert line[:].total_reward.tolist() == [1, 2, 3]


def test_broadcast_rows_are_as_many_rows():
    line = Timeline(9)
    assert (
        line.add(Steps(np.broadcast_to(episode(1), (4,)))).tolist() == [0, 1, 2, 3]
        and line[:].total_reward.tolist() == [1] * 4
    )


def test_single_steps_and_empty_blocks():
    line, steps = Timeline(4), Steps(episode(3))
    assert (
        line.add(steps[:0]).tolist() == []
        and len(line) == 0
        and line.keys.tolist() == []
        and list(line) == []
    )
    assert [line.add(s).tolist() for s in steps] == [[0], [1], [2]] and line[:] == steps
    assert (
        line.take([]).shape == (0,)
        and line.windows([], 3).shape == (0, 3)
        and line.valid([]).tolist() == []
    )


def test_adding_what_was_taken_from_itself():
    "What a memory gives are copies, so they may be put in again, more of them than it holds"
    line = filled(5)
    line.add(line[:])
    assert line[:].total_reward.tolist() == [1, 2, 3, 4, 5] and line.keys.tolist() == [
        5,
        6,
        7,
        8,
        9,
    ]
    line.add(Steps.cat([line[:]] * 3))
    assert line[:].total_reward.tolist() == [1, 2, 3, 4, 5] and line.inserted == 25


def test_memory_is_apart_from_blocks():
    "Neither the block that went in nor one that came out is the memory's own"
    rows, line = episode(3), Timeline(5)
    line.add(Steps(rows))
    (
        rows['reward'],
        line[:].rows['reward'],
        line.take([0]).rows['reward'],
        line.windows([0], 2).rows['reward'],
    ) = 1e9, 1e9, 1e9, 1e9
    assert line[:].reward.max() < 1e9


# ---- blocks that are refused ----


@pytest.mark.parametrize('kind', ['c8', ('c16', (2,)), 'f16', '>f4', 'M8[s]', 'U3', 'V3'])
def test_columns_that_not_every_stage_knows_are_refused_by_name(kind):
    "Of rows that were made without `step_dtype`; the next block decides what the columns are"
    line, pole = Timeline(9), KINDS['cartpole']
    rows = np.zeros(3, np.dtype([*((n, pole[n]) for n in pole.names), ('mine', kind)], align=True))
    with pytest.raises(
        BlockError,
        match=r"Timeline: column 'mine'; got .*; expected bool, int8 to int64, uint8 to uint64, float16, float32 or float64",
    ):
        line.add(Steps(rows))
    assert line.add(Steps(episode(3))).tolist() == [0, 1, 2]


FLOATS = step_dtype(
    spaces.Dict(
        h=Box(-1, 1, (3,), np.float16),
        t=spaces.Tuple([Box(-1, 1, (2, 2), np.float64), Discrete(2), Box(-1, 1, (), np.float16)]),
    ),
    Box(-1, 1, (2,), np.float64),
    logp='f4',
    c=('f4', 2),
    z=('f8', (2, 2)),
    pad='u1',
)
NANS = {
    2: [0x7E00, 0x7C01, 0xFFFF, 0xFC01],
    4: [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800001],
    8: [
        0x7FF8 << 48,
        (0x7FF0 << 48) + 1,
        2**64 - 1,
        (0xFFF0 << 48) + 1,
        (0x7FF0 << 48) + (1 << 32),
        (0x7FF0 << 48) + (1 << 31),
    ],
}
FINE = {
    2: [0x7C00, 0xFC00, 0x8000, 1, 0x7BFF],
    4: [0x7F800000, 0xFF800000, 1 << 31, 1, 0x7F7FFFFF],
    8: [0x7FF0 << 48, 0xFFF0 << 48, 1 << 63, 1, (0x7FF0 << 48) - 1, 0x7FEFFFFF_FFFFFFFF],
}


def float_spots(rows):
    "(column, the numbers of one row as unsigned integers) of each float field, real and imaginary parts apart"
    for name, a in leaves(rows):
        if a.dtype.kind in 'fc':
            width = a.dtype.itemsize // (1 + (a.dtype.kind == 'c'))
            yield (
                name,
                width,
                [
                    (at, part)
                    for at in np.ndindex(a.shape[1:])
                    for part in range(a.dtype.itemsize // width)
                ],
            )


SPOTS = [
    (name, width, at, part)
    for name, width, spots in float_spots(np.zeros(1, FLOATS))
    for at, part in spots
]


def write_bits(rows, i, name, width, at, part, pattern):
    "Put a bit pattern into one float of row i"
    a = rows
    for n in name.split('.'):
        a = a[n]
    address = (
        a[i : i + 1].__array_interface__['data'][0]
        + sum(x * s for x, s in zip(at, a.strides[1:]))
        + part * width
        - rows.__array_interface__['data'][0]
    )
    rows.view(np.uint8)[address : address + width] = np.frombuffer(
        int(pattern).to_bytes(width, 'little'), np.uint8
    )


@pytest.mark.parametrize('name,width,at,part', SPOTS, ids=str)
def test_any_nan_in_any_float_is_refused(name, width, at, part):
    "Quiet and signalling, of both signs, in any float of any type, in the first, a middle or the last row: refused by name, and all is as it was"
    line = filled(7, dtype=FLOATS)
    before = frozen(line)
    for i in 0, 2, 4:
        for pattern in NANS[width]:
            rows = episode(5, FLOATS, start=8)
            write_bits(rows, i, name, width, at, part, pattern)
            with pytest.raises(BlockError) as e:
                line.add(Steps(rows))
            assert (
                f'row {i} ' in str(e.value)
                and repr(name) in str(e.value)
                and same(frozen(line), before)
            )


@pytest.mark.parametrize('name,width,at,part', SPOTS, ids=str)
def test_infinities_and_the_like_are_taken(name, width, at, part):
    "What is no NaN goes in: infinities, minus zero, the smallest and the largest number, to the bit"
    for pattern in FINE[width]:
        rows, line = episode(3, FLOATS), Timeline(3)
        write_bits(rows, 1, name, width, at, part, pattern)
        line.add(Steps(rows))
        assert bits(line[:].rows) == bits(rows)


def test_bits_of_other_columns_are_no_nan():
    "Integers, bytes and padding whose bits would be a NaN are none"
    rows = episode(3, FLOATS)
    rows.view(np.uint8)[:] = 0xFF
    clean = episode(3, FLOATS)
    for n, kind in [(n, FLOATS[n]) for n in FLOATS.names]:
        if (
            n in ('env_id', 'episode_n', 'step_n', 'terminated', 'truncated')
            or kind.names
            or kind.base.kind in 'fc'
        ):
            rows[n] = clean[n]
    rows['state']['t']['[1]'], rows['pad'] = -1, 0xFF  # an int64 of ones between floats
    assert Timeline(5).add(Steps(rows)).tolist() == [0, 1, 2]


@pytest.mark.parametrize('pixels', [0, 3000])
def test_the_search_for_nan_says_what_numpy_says(pixels):
    "In rows whose floats lie under a mask, and in those where they are few; also where only the lower half of a float64 tells it"
    dtype = np.dtype(
        [
            ('env_id', 'i4'),
            ('a', 'f8', (3,)),
            ('b', 'f2', (5,)),
            ('c', 'c16'),
            ('d', 'f4'),
            ('e', [('f', 'c8'), ('g', 'f2')]),
            ('h', 'u1', (pixels,)),
        ],
        align=True,
    )
    search, rng, found = NaNSearch(dtype), np.random.default_rng(0), []
    spots = [
        (name, width, at, part)
        for name, width, places in float_spots(np.zeros(1, dtype))
        for at, part in places
    ]
    for n in rng.integers(1, 40, 300):
        rows = np.frombuffer(
            rng.bytes(n * dtype.itemsize), dtype
        ).copy()  # random bits, in padding and whole numbers too
        for _, x in leaves(rows):
            if x.dtype.kind in 'fc':
                x[...] = rng.normal(size=x.shape)
        for _ in range(rng.integers(4)):
            spot = spots[rng.integers(len(spots))]
            patterns = [*FINE[spot[1]], *NANS[spot[1]]]
            write_bits(rows, rng.integers(n), *spot, patterns[rng.integers(len(patterns))])
        found.append(first_nan(rows) is not None)
        assert has_nan(rows.ctypes.data, n, search.at) == found[-1]
    assert 30 < sum(found) < 270


OTHER = step_dtype(Box(-1, 1, (5,)), Discrete(2))


def test_a_memory_that_cannot_be_reserved_stays_empty():
    "A first block whose memory the machine doesn't have: an error, and a smaller row fits next"
    line = Timeline(2**31 - 1)
    with pytest.raises(MemoryError):
        line.add(Steps(np.zeros(1, step_dtype(Box(0, 1, (1 << 20,)), Discrete(2)))))
    assert (
        line.dtype is None and line.nbytes == 0
    )  # was: dtype stays, and all that follows fails with "no attribute or column '_mem'"


def test_other_columns_are_told_apart():
    with pytest.raises(BlockError, match=r"'state' is .*5.*, not .*4"):
        filled().add(Steps(episode(3, OTHER)))
    with pytest.raises(BlockError, match="'n' is int32, not there"):
        filled().add(Steps(episode(3, extend_dtype(KINDS['cartpole'], n='i4'))))


# ---- keys that are not there ----

STALE = [
    2,
    0,
    -1,
    -(2**63),
    8,
    9,
    2**40,
    2**63 - 1,
    np.uint8(200),
    2**63,
    2**64 - 1,
]  # was: the last two are named as the negative numbers with the same bits


@pytest.mark.parametrize('key', STALE, ids=str)
@pytest.mark.parametrize('ask', ['take', 'windows', 'draw'])
def test_keys_that_are_gone_or_never_were_are_named(ask, key):
    "In a memory of 5 after 8 rows, keys 3 to 7 are there; any other is a KeyError that names it, wherever it stands among good ones"
    line = filled(8, 5)
    call = dict(
        take=line.take,
        windows=lambda k: line.windows(k, 2),
        draw=lambda k: line.batch(k, np.ones(len(k), np.float32)),
    )[ask]
    drawn = frozen(line)
    for keys in [key], [3, key], [key, 3], [7, key, 4]:
        keys = np.array(
            keys, np.uint64 if int(key) >= 2**63 else None
        )  # numpy would make floats of them
        if ask == 'draw' and keys.dtype != np.int64:
            continue
        assert not line.valid(keys).all()
        with pytest.raises(KeyError) as e:
            call(keys)
        assert (
            isinstance(e.value, StaleKey)
            and f' {key} ' in str(e.value)
            and '3 to 7' in str(e.value)
        )
    assert same(frozen(line), drawn), 'a draw that failed was counted'


@pytest.mark.parametrize('key,ago', [(2, 1), (1, 2), (0, 3)])
def test_stale_keys_say_how_old_they_are(key, ago):
    with pytest.raises(StaleKey, match=f'overwritten {ago} rows ago'):
        filled(8, 5).take([3, key])


@pytest.mark.parametrize(
    'keys', [[1.0], ['a'], [None], [True], np.array([3.0]), torch.tensor([3.0])], ids=str
)
def test_keys_are_integers(keys):
    line = filled()
    for call in line.take, line.valid, lambda k: line.windows(k, 2):
        with pytest.raises(TypeError, match='integers'):
            call(keys)


@pytest.mark.parametrize(
    'keys',
    [
        5,
        np.int32(5),
        [5, 3],
        (4,),
        range(3, 8),
        np.array([[3, 4], [5, 6]], np.uint16),
        torch.tensor([7, 3]),
        np.arange(3, 8)[::-2],
        np.array([7, 7, 7]),
        np.array(6),
        np.frombuffer(np.array([3, 4]).tobytes(), np.int64),
        np.arange(3, 8).astype('>i8'),
    ],
    ids=str,
)
def test_keys_of_any_integer_kind_and_shape(keys):
    "take gives rows in the shape of the keys; valid too"
    line = filled(8, 5)
    want = np.asarray(keys).astype(int)
    assert (
        line.take(keys).shape == want.shape
        and line.take(keys).total_reward.tolist() == (want + 1).tolist()
        and np.all(line.valid(keys))
        and np.shape(line.valid(keys)) == want.shape
    )
    assert (
        line.windows(keys, 2).shape == (want.size, 2)
        and line.windows(keys, 2).total_reward[:, 0].tolist() == (want.ravel() + 1).tolist()
    )


def test_an_empty_memory_has_no_rows_to_give():
    line = Timeline(3)
    for call in line.take, lambda k: line.windows(k, 2):
        with pytest.raises(KeyError, match='key 0 was never given out'):
            call([0])
        with pytest.raises(BlockError, match='nothing was ever added'):
            call([])
    assert (
        line.valid([-1, 0, 1]).tolist() == [False] * 3
        and list(line) == []
        and line.nbytes == 0
        and 'empty' in repr(line)
    )


@pytest.mark.parametrize('length', [0, -1])
def test_windows_have_a_length(length):
    with pytest.raises(ValueError, match='length'):
        filled().windows([3], length)


# ---- batches ----


def test_batches_hold_rows_keys_and_weights_and_are_counted():
    "Each drawn row is whole, beside its key and its weight; draws are counted by row, ages over all draws; overwriting a row ends its count"
    for dtype in KINDS.values():
        line = filled(8, 5, dtype=dtype)
        keys, weights = np.array([7, 3, 3, 5]), np.array([0.5, 1, 2, 0.25], np.float32)
        batch = line.batch(keys, weights)
        rows = episode(8, dtype)
        assert all(
            bits(batch.rows[n]) == bits(rows[n][keys]) for n in dtype.names if not dtype[n].names
        )
        assert (
            batch.index.tolist() == keys.tolist()
            and batch.weight.tolist() == weights.tolist()
            and batch.index.dtype == torch.int64
        )
        assert line._parts[0].drawn[line.keys % 5].tolist() == [
            2,
            0,
            1,
            0,
            1,
        ] and line.ages.tolist() == [1 + 5 + 5 + 3, 5]
        line.add(Steps(episode(2, dtype)))
        assert line._parts[0].drawn[line.keys % 5].tolist() == [1, 0, 1, 0, 0]


def test_take_and_windows_are_no_draws():
    line = filled()
    line.take(line.keys)
    line.windows(line.keys, 3)
    line[:]
    list(line)
    assert not line._parts[0].drawn.any() and not line.ages.any()


def test_rows_that_are_batches_of_another_memory_can_be_kept_and_drawn():
    "By a memory that no replay owns: its rows have `index` and `weight` already, and the new batch says its own. (A replay refuses them: test_replay)"
    line = Timeline(9)
    line.add(filled().batch(np.array([3, 4, 6]), np.ones(3, np.float32)))
    batch = line.batch(
        np.array([0, 2]), np.full(2, 0.5, np.float32)
    )  # was: numpy's "name already used as a name or title"
    assert batch.index.tolist() == [0, 2]


def test_windows_of_rows_that_have_a_mask():
    "Rows of padded sequences carry `mask`; windows on them say what they mean, or refuse them by name"
    line = Timeline(9)
    line.add(filled().windows([3], 3)[0])
    try:
        line.windows([0], 2)
    except ValueError as e:
        assert 'mask' in str(e)  # was: numpy's "name already used as a name or title" names nothing


# ---- size ----


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('max_sz', [10_000, 100_000])
def test_nbytes_is_rows_and_twelve_bytes_each(kind, max_sz):
    "Within 1% of max_sz × (row + 12), from the first row on, and what is reserved is what it says"
    line = Timeline(max_sz)
    assert line.nbytes == 0
    for env in range(20):
        line.add(Steps(episode(1, KINDS[kind], env=env)))
    assert 1 <= line.nbytes / (max_sz * (KINDS[kind].itemsize + 12)) < 1.01
    held = {
        a.ctypes.data: a.nbytes
        for p in line._parts[:2]
        for a in vars(p).values()
        if isinstance(a, np.ndarray)
    }  # once each
    assert sum(held.values()) <= line.nbytes + 1000


@pytest.mark.parametrize(
    'max_sz', [0, -1, 2**31, float('nan'), 1.5, '3', None, True], ids=str
)  # was: 1.5 and True become 1; '3' and None raise '<' not supported
def test_max_sz_is_a_whole_number_of_rows(max_sz):
    with pytest.raises((ValueError, TypeError), match='max_sz'):
        Timeline(max_sz)


# ---- saving ----


def test_a_used_memory_becomes_the_saved_one():
    "Whatever it held, columns included"
    line, other = filled(3, 5), filled(9, 5, dtype=KINDS['odd'])
    other.load_state_dict(line.state_dict())
    assert other[:] == line[:] and other.dtype == line.dtype and other.added == 3
    other.load_state_dict(Timeline(5).state_dict())
    assert len(other) == 0 and other.dtype is None
    with pytest.raises(
        ValueError, match='more rows than this one has room for; got 3; expected at most max_sz=2'
    ):
        Timeline(2).load_state_dict(line.state_dict())


# ---- read like a block ----


def test_places_that_are_not_there():
    for i in 5, -6, [0, 5]:
        with pytest.raises(IndexError):
            filled(8, 5)[i]
    with pytest.raises(AttributeError, match='nothing'):
        filled().nothing
    assert filled().total_reward.tolist() == [4, 5, 6, 7, 8]


def test_iteration_gives_every_row_once():
    line = filled(5000, 3000)
    assert [s.total_reward.item() for s in line] == list(range(2001, 5001)) and next(
        iter(line)
    ).shape == ()


# ---- a column ----


@pytest.mark.parametrize('kind', KINDS)
def test_a_column_alone_is_that_of_all_rows(kind):
    from fastrl_replay.memory.frames import Frames

    for store in (
        None,
        Frames(
            columns=[
                n for n, d in leaves(filled(dtype=KINDS[kind])[:].rows) if n.startswith('state')
            ]
        ),
    ):
        line = Timeline(5, store)
        line.add(Steps(episode(8, dtype=KINDS[kind])))
        whole = line[:]
        for name in line.dtype.names:
            assert same(line[name], whole[name]), name


def test_a_column_reads_no_whole_rows():
    import tracemalloc

    dtype = step_dtype(spaces.Box(0, 255, (100_000,), np.uint8), spaces.Discrete(2))
    line = Timeline(100)
    line.add(Steps(np.zeros(100, dtype)))
    tracemalloc.start()
    try:
        assert line.reward.shape == (100,) and tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
