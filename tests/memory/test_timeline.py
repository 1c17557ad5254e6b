"""`Timeline` against a list of dicts and plain loops, and at every edge that a ring of rows has."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.errors import BlockError, StaleKey
from fastrl_replay.steps.row_dtypes import extend_dtype, leaves, step_dtype
from fastrl_replay.memory.timeline import Timeline
from fastrl_replay.testing import through_file
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


def episode(n, dtype=KINDS['cartpole'], env=0):
    "Rows of one episode of one environment; `total_reward` counts them"
    rows = numbers(n, dtype)
    rows['env_id'], rows['episode_n'] = env, 1
    rows['terminated'] = rows['truncated'] = False
    rows['step_n'] = rows['total_reward'] = np.arange(1, n + 1)
    return rows


def filled(n=8, max_sz=5, **kw):
    line = Timeline(max_sz)
    line.add(Steps(episode(n, **kw)))
    return line


# ---- the reference ----

ENVS = [0, 3, 15, 4000]  # the last one needs more places than there are at first


def story(program, dtype):
    """Return what a string of bytes tells: (rows, lives, cuts).

    A byte is a step of one of four environments, which goes on, terminates, is truncated, or is
    never heard of again (and another may come with its number). It may also end a block, followed
    by an empty block, a save or a bad block."""
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
@cases(80)
@given(program=st.binary(max_size=40), max_sz=st.integers(1, 12) | st.just(60))
def test_timeline_is_a_list_of_dicts(kind, program, max_sz):
    """Compare len, keys, valid, take and windows with the list after every block.

    Interleavings, endings, block sizes and capacities are random. A save and load in between
    changes nothing, and neither does a refused block."""
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


# ---- what goes in ----


def test_rows_of_any_origin_go_in(tmp_path):
    "Single steps, empty blocks, rows of a numpy file, more rows of the memory than it holds"
    line, steps = Timeline(5), Steps(episode(3))
    assert line.add(steps[:0]).tolist() == []
    assert [line.add(s).tolist() for s in steps] == [[0], [1], [2]]
    np.save(tmp_path / 'rows.npy', steps.rows)
    assert line.add(Steps(np.load(tmp_path / 'rows.npy', mmap_mode='r'))).tolist() == [3, 4, 5]
    line.add(Steps.cat([line[:]] * 3))
    assert line[:].total_reward.tolist() == [2, 3, 1, 2, 3]
    assert line.inserted == 21


def test_memory_is_apart_from_blocks():
    "Neither the block that went in nor one that came out is the memory's own"
    rows, line = episode(3), Timeline(5)
    line.add(Steps(rows))
    for own in rows, line[:].rows, line.take([0]).rows, line.windows([0], 2).rows:
        own['reward'] = 1e9
    assert line[:].reward.max() < 1e9


# ---- blocks that are refused ----

FLOATS = dict(
    half=('f2', (3,)), whole=('f4', (2,)), double=('f8', (2, 2)), pad='u1', words='i8', last='f4'
)
NANS = {
    'float16': [0x7E00, 0x7C01, 0xFC01],
    'float32': [0x7FC00000, 0x7F800001, 0xFFFFFFFF],
    'float64': [0x7FF8 << 48, (0x7FF0 << 48) + 1, 2**64 - 1],
}


@pytest.mark.parametrize('pixels', [1, 3000])
def test_any_nan_is_refused_and_other_bits_are_taken(pixels):
    "In any float and row, among few or many; infinities, and integers with a NaN's bits, are none"
    nested = spaces.Dict(a=Box(-1, 1, (3,), np.float16), p=Box(0, 255, (pixels,), np.uint8))
    dtype = step_dtype(nested, Box(-1, 1, (2,), np.float64), **FLOATS)
    clean = episode(3, dtype)
    clean['words'], clean['pad'], clean['state']['p'] = -1, 0xFF, 0xFF
    line = Timeline(30)
    line.add(Steps(clean))
    for name, leaf in leaves(clean):
        if leaf.dtype.kind != 'f':
            continue
        for row in range(3):
            for pattern in NANS[leaf.dtype.name] + [np.inf]:
                rows = clean.copy()
                [a] = [x for n, x in leaves(rows) if n == name]
                if pattern == np.inf:
                    a[row] = pattern
                    line.add(Steps(rows))
                    assert bits(line[-3:].rows) == bits(rows)
                    continue
                unsigned = a.view(f'u{a.itemsize}')
                unsigned[row].reshape(-1)[-1:] = pattern
                if not unsigned[row].shape:
                    unsigned[row] = pattern
                before = line.inserted, line[:]
                with pytest.raises(BlockError, match=f"row {row} .*NaN in column '{name}'"):
                    line.add(Steps(rows))
                assert before == (line.inserted, line[:])


@pytest.mark.parametrize('kind', ['c8', 'f16', '>f4', 'M8[s]', 'U3'])
def test_columns_that_not_every_stage_knows_are_refused_by_name(kind):
    line, pole = Timeline(9), KINDS['cartpole']
    rows = np.zeros(3, np.dtype([*((n, pole[n]) for n in pole.names), ('mine', kind)], align=True))
    with pytest.raises(BlockError, match="Timeline: column 'mine'; got .*; expected bool, int8 to"):
        line.add(Steps(rows))
    line.add(Steps(episode(3)))
    with pytest.raises(BlockError, match="'n' is int32, not there"):
        line.add(Steps(episode(3, extend_dtype(pole, n='i4'))))
    assert line.inserted == 3


@pytest.mark.parametrize('max_sz', [0, 2**31, 1.5, '3', None, True], ids=str)
def test_max_sz_is_a_whole_number_of_rows(max_sz):
    with pytest.raises((ValueError, TypeError), match='max_sz'):
        Timeline(max_sz)


# ---- keys ----


@pytest.mark.parametrize('key', [2, -1, -(2**63), 8, 2**40, 2**63 - 1], ids=str)
def test_keys_that_are_gone_or_never_were_are_named(key):
    "In a memory of 5 after 8 rows, keys 3 to 7 are there"
    line = filled(8, 5)
    for keys in [key], [3, key], [7, key, 4]:
        keys = np.array(keys)
        assert not line.valid(keys).all()
        for call in line.take, lambda k: line.windows(k, 2):
            with pytest.raises(StaleKey, match=f' {key} .*3 to 7'):
                call(keys)
    if key == 2:
        with pytest.raises(StaleKey, match='overwritten 1 rows ago'):
            line.batch(np.array([3, key]), np.ones(2, np.float32))
    assert not line.times_drawn.any(), 'a draw that failed was counted'


@pytest.mark.parametrize('keys', [[1.0], ['a'], [None], [True], torch.tensor([3.0])], ids=str)
def test_keys_are_integers(keys):
    line = filled()
    for call in line.take, line.valid, lambda k: line.windows(k, 2):
        with pytest.raises(TypeError, match='integers'):
            call(keys)


@pytest.mark.parametrize(
    'keys',
    [5, (4,), range(3, 8), np.array([[3, 4]], np.uint16), torch.tensor([7, 3]), np.array(6, '>i8')],
    ids=str,
)
def test_keys_of_any_integer_kind_and_shape(keys):
    "`take` and `valid` give what they find in the shape of the keys"
    line, want = filled(8, 5), np.asarray(keys).astype(int)
    assert line.take(keys).shape == np.shape(line.valid(keys)) == want.shape
    assert line.take(keys).total_reward.tolist() == (want + 1).tolist()
    assert line.windows(keys, 2).total_reward[:, 0].tolist() == (want.ravel() + 1).tolist()


def test_an_empty_memory_has_no_rows_to_give():
    line = Timeline(3)
    for call in line.take, lambda k: line.windows(k, 2):
        with pytest.raises(KeyError, match='key 0 was never given out'):
            call([0])
    assert line.valid([-1, 0, 1]).tolist() == [False] * 3
    assert list(line) == []
    assert line.nbytes == 0


# ---- what comes out ----


@pytest.mark.parametrize('kind', KINDS)
def test_batches_hold_rows_keys_and_weights_and_are_counted(kind):
    "Draws are counted by row, ages over all draws; looking at rows is no draw"
    line, rows = filled(8, 5, dtype=KINDS[kind]), episode(8, KINDS[kind])
    keys, weights = np.array([7, 3, 3, 5]), np.array([0.5, 1, 2, 0.25], np.float32)
    batch = line.batch(keys, weights)
    line.take(line.keys)
    line.windows(line.keys, 3)
    for name in rows.dtype.names:
        assert bits(batch.rows[name]) == bits(rows[name][keys])
    assert batch.index.tolist() == keys.tolist()
    assert batch.weight.tolist() == weights.tolist()
    assert line.times_drawn.tolist() == [2, 0, 1, 0, 1]
    assert line.ages.tolist() == [1 + 5 + 5 + 3, 5]
    line.add(Steps(episode(2, KINDS[kind])))
    assert line.times_drawn.tolist() == [1, 0, 1, 0, 0]


def test_a_memory_is_read_like_a_block():
    line = filled(5000, 3000)
    assert [s.total_reward.item() for s in line] == [*range(2001, 5001)]
    assert line.total_reward.tolist() == line['total_reward'].tolist() == [*range(2001, 5001)]
    for i in 3000, -3001, [0, 3000]:
        with pytest.raises(IndexError):
            line[i]
    with pytest.raises(AttributeError, match='nothing'):
        line.nothing


@pytest.mark.parametrize('kind', KINDS)
def test_nbytes_is_rows_and_twelve_bytes_each(kind):
    line = Timeline(10_000)
    assert line.nbytes == 0
    for env in range(20):
        line.add(Steps(episode(1, KINDS[kind], env=env)))
    assert 1 <= line.nbytes / (10_000 * (KINDS[kind].itemsize + 12)) < 1.03


def test_a_used_memory_becomes_the_saved_one():
    "Whatever it held, columns included"
    line, other = filled(3, 5), filled(9, 5, dtype=KINDS['odd'])
    other.load_state_dict(line.state_dict())
    assert other[:] == line[:]
    other.load_state_dict(Timeline(5).state_dict())
    assert len(other) == 0 and other.dtype is None
    with pytest.raises(ValueError, match='got 3; expected at most max_sz=2'):
        Timeline(2).load_state_dict(line.state_dict())
