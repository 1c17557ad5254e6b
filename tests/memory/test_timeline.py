"""`Timeline` against a list of dicts and plain loops, and at every edge that a ring of rows has."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.steps.row_dtypes import extend_dtype, leaves
from fastrl_replay.testing import through_file
from strategies import bits, cases, numbers, story

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


def links(rows, max_sz, oldest):
    "Which row follows each row, and which comes before it, by the rule as it is written"
    last, after, before = {}, {}, {}
    several = 'n' in rows.dtype.names and rows.dtype['n'] in (np.int32, np.int64)
    for key, r in enumerate(rows):
        env, episode, step = (int(r[n]) for n in ('env_id', 'episode_n', 'step_n'))
        if env in last:
            old, old_episode, old_step, ended = last[env]
            goes_on = not ended and old_episode == episode and old_step + 1 == step
            if goes_on and key - old < max_sz:
                after[old], before[key] = key, old
        ended = r['terminated'] or r['truncated']
        if several:
            ended = ended and r['n'] <= 1
        last[env] = key, episode, step, ended
    return after, {k: b for k, b in before.items() if b >= oldest}


def walked(after, before, key, offset):
    for _ in range(min(abs(offset), 99)):
        key = (after if offset > 0 else before).get(key, -1)
    return key


def agrees(line, rows, max_sz, rng):
    "Compare all that a timeline gives with the rows that were added"
    n, length = len(rows), 1 + len(rows) * 5 % 9
    keys = [*range(n)][-max_sz:]
    assert len(line) == len(keys) and line.inserted == n and line.keys.tolist() == keys
    asked = np.arange(-2, n + 3)
    assert line.valid(asked).tolist() == [k in keys for k in asked]
    if not keys:
        return
    order = rng.permutation(keys)
    assert line.take(order) == Steps(rows[order]) and line[:] == Steps(rows[keys])
    after, before = links(rows, max_sz, keys[0])
    offsets = [0, 1, -1, 2, -2, 5, -5, 10**6, -(10**6)]
    ways = [[walked(after, before, k, o) for o in offsets] for k in order]
    assert line.walk(order, offsets).tolist() == ways
    at = np.array([[walked(after, before, k, o) for o in range(length)] for k in order])
    seen, want = line.windows(order, length), np.zeros(at.shape, rows.dtype)
    want[at >= 0] = rows[at[at >= 0]]
    assert seen.mask.tolist() == (at >= 0).tolist()
    assert all(bits(seen.rows[name]) == bits(want[name]) for name in rows.dtype.names)


STEPS = dict(
    KINDS,
    n_step=extend_dtype(KINDS['cartpole'], n='i4'),
    n_long=extend_dtype(KINDS['cartpole'], n='i8'),
)


@pytest.mark.parametrize('kind', STEPS)
@cases(80)
@given(
    program=st.binary(max_size=60),
    max_sz=st.integers(1, 12) | st.just(70),
    first=st.integers(0, 1),
    odd=st.integers(0, 2**16),
)
def test_timeline_is_a_list_of_rows(kind, program, max_sz, first, odd):
    """Interleavings, endings, block sizes and capacities are random.

    Steps may stand still or go back, and episode numbers change without an end. A save and load
    in between changes nothing, and neither does a refused block."""
    rows, cuts = story(program, STEPS[kind])
    rows['step_n'] -= 1 - first
    for i, b in enumerate(program):
        if odd >> (b & 15) & 1:
            rows['step_n'][i] -= b >> 6
        if odd >> (b >> 4) & 1:
            rows['episode_n'][i] += b & 1
    if kind in ('n_step', 'n_long'):
        rows['n'] = np.frombuffer(program, np.uint8) % 3
    line, at, rng = Timeline(max_sz), 0, np.random.default_rng(0)
    for end, how in [*cuts, (len(rows), 1)]:
        wrong = rows[at:end].copy()
        wrong['reward'][-1:] = np.nan
        if len(wrong) and how == 1:
            with pytest.raises(BlockError):
                line.add(Steps(wrong))
        assert line.add(Steps(rows[at:end])).tolist() == [*range(at, end)]
        if how == 2:
            assert line.add(Steps(rows[end:end])).tolist() == []
        if how == 3:
            twin = Timeline(max_sz)
            twin.load_state_dict(through_file(line.state_dict()))
            line = twin
        at = end
        agrees(line, rows[:at], max_sz, rng)


# ---- what goes in ----


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
    with pytest.raises(
        BlockError, match="Timeline: column 'mine' .*; got .*; expected bool, int8 to"
    ):
        line.add(Steps(rows))
    line.add(Steps(episode(3)))
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
        with pytest.raises(KeyError, match='key 0 is unknown'):
            call([0])
    assert line.valid([-1, 0, 1]).tolist() == [False] * 3
    assert list(line) == []
    assert line.nbytes == 0


# ---- what comes out ----


def test_a_memory_is_read_like_a_block():
    line = filled(5000, 3000)
    assert [s.total_reward.item() for s in line] == [*range(2001, 5001)]
    assert line.total_reward.tolist() == line['total_reward'].tolist() == [*range(2001, 5001)]
    for i in 3000, -3001, [0, 3000]:
        with pytest.raises(IndexError):
            line[i]
    with pytest.raises(AttributeError, match='nothing'):
        line.nothing


def test_a_used_memory_becomes_the_saved_one():
    "Whatever it held, columns included"
    line, other = filled(3, 5), filled(9, 5, dtype=KINDS['odd'])
    other.load_state_dict(line.state_dict())
    assert other[:] == line[:]
    other.load_state_dict(Timeline(5).state_dict())
    assert len(other) == 0 and other.dtype is None
    with pytest.raises(ValueError, match='got 3; expected at most max_sz=2'):
        Timeline(2).load_state_dict(line.state_dict())
