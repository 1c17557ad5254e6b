"""Environments that come and go, each with a number of its own.

Tables stay as long as the number of environments at once; nothing else shows it."""

import pickle
from collections import deque

import numpy as np, pytest
from gymnasium.spaces import Box, Discrete

from fastrl_replay.all import *
from fastrl_replay.testing import through_file

DT = step_dtype(Box(-1, 1, ()), Discrete(2))
FAR = 1 << 20
N = 20_000


def coming_and_going(n, together=5, ids=lambda i: i, break_off=0.0):
    """Return rows of `n` environments, `together` at a time, and the episode of each row.

    Each has one episode of 1 to 5 steps; some break off without an end. Rewards count the rows."""
    rng, found, come = np.random.default_rng(0), [], together
    running = deque((env, 0, rng.integers(1, 6)) for env in range(together))
    while running:
        env, step, length = running.popleft()
        step += 1
        over = step == length
        found.append((env, step, over and rng.random() >= break_off))
        if not over:
            running.append((env, step, length))
        elif come < n:
            running.append((come, 0, rng.integers(1, 6)))
            come += 1
    env, step, end = np.array(found).T
    rows = np.zeros(len(env), DT)
    rows['env_id'], rows['episode_n'], rows['step_n'] = ids(env), 1, step
    rows['reward'], rows['terminated'] = np.arange(len(env)) % 10_000, end
    return rows, env


def blocks(rows, size):
    return map(Steps, np.split(rows, range(size, len(rows), size)))


def size_of(stage):
    return len(pickle.dumps(stage.state_dict()))


def stays_small(sizes):
    "Do sizes not grow with the number of environments that have come?"
    return max(sizes) < 2 * min(sizes)


def test_n_step():
    "Each row is the start of a merged one, with the at most two rows of its episode that follow"
    rows, _ = coming_and_going(N)
    rows['reward'] = np.arange(len(rows)) % 64
    stage, seen, sizes = NStep(None, 3, 0.5), [], []
    for i, b in enumerate(blocks(rows, 64)):
        seen.append(stage.merge(b).rows)
        if i >= 20 and i % 20 == 0:
            sizes.append(size_of(stage))
    assert stays_small(sizes)
    got = np.concatenate(seen)
    got = got[np.lexsort((got['step_n'], got['env_id']))]
    want = rows[np.lexsort((rows['step_n'], rows['env_id']))]
    r, e = want['reward'], want['env_id']
    total, n = r.copy(), np.ones(len(want), int)
    for k in 1, 2:
        same = np.append(e[k:] == e[:-k], [False] * k)
        total[same] += 0.5**k * np.append(r[k:], [0] * k)[same]
        n += same
    assert (got['env_id'] == e).all()
    assert (got['reward'] == total).all()
    assert (got['n'] == n).all()


def test_chunks():
    "Each environment gives its one episode, cut"
    rows, _ = coming_and_going(N, ids=lambda i: i + FAR)
    stage, seen, sizes = SequenceChunker(None, 3, 1, tail='pad'), [], []
    for i, b in enumerate(blocks(rows, 64)):
        seen += [s.rows for s in stage.chunk(b)]
        if i >= 20 and i % 20 == 0:
            sizes.append(size_of(stage))
    assert stays_small(sizes)
    got = np.array(seen)
    real = got[got['mask']]
    steps = {*zip(real['env_id'].tolist(), real['step_n'].tolist())}
    assert steps == {*zip(rows['env_id'].tolist(), rows['step_n'].tolist())}
    for sequence in got[:5000]:
        assert len({*sequence[sequence['mask']]['env_id']}) == 1
        assert sequence['step_n'][0] in (1, 3)


@pytest.mark.parametrize('tail', ['shift', 'pad', 'drop'])
def test_chunks_as_if_nothing_were_forgotten(tail):
    "Compare a stage that gets one row per block with one that gets all at once and forgets nothing"
    rows, _ = coming_and_going(400, 7, break_off=0.1)
    one, other = (SequenceChunker(None, 3, 1, tail) for _ in range(2))
    assert [s for b in blocks(rows, 1) for s in one.chunk(b)] == other.chunk(Steps(rows))


def check(memory, rows, episode, length=6, n=50):
    "Windows of some rows hold the rest of their episodes, as far as it has come"
    keys = memory.keys[np.random.default_rng(0).integers(0, len(memory), n)]
    windows, upto = memory.windows(keys, length), memory.inserted
    for key, w in zip(keys.tolist(), windows):
        later = np.arange(key, min(key + length * 9, upto))
        want = rows[later[episode[later] == episode[key]]][:length]
        assert w.reward[w.mask].tolist() == want['reward'].tolist()


REPLAYS = dict(
    proportional=lambda **kw: PrioritizedReplay(None, 4, seed=0, **kw),
    rank=lambda **kw: PrioritizedReplay(None, 4, kind='rank', seed=0, **kw),
    sequences=lambda **kw: SequenceReplay(None, 4, length=3, burn_in=1, overlap=1, seed=0, **kw),
)


@pytest.mark.parametrize('kind', REPLAYS)
@pytest.mark.parametrize('break_off', [0.0, 0.3])
def test_replays(kind, break_off):
    "Rows in memory follow each other as they should, and tables stay small"
    rows, episode = coming_and_going(N, break_off=break_off)
    replay, sizes = REPLAYS[kind](max_sz=5000), []
    for i, b in enumerate(blocks(rows, 1000)):
        replay.add(b)
        replay.sample()
        if i >= 10:
            sizes.append(replay.nbytes)
            check(replay.memory, rows, episode)
    assert stays_small(sizes)
    assert (replay.memory[:].rows == rows[-5000:]).all()


@pytest.mark.slow
@pytest.mark.parametrize('kind', REPLAYS)
@pytest.mark.parametrize('break_off', [0.0, 0.3])
def test_a_replay_that_is_saved_now_and_then_holds_what_another_holds(kind, break_off):
    rows, _ = coming_and_going(600, 6, break_off=break_off)
    a, b = (REPLAYS[kind](max_sz=50) for _ in range(2))
    for i, block in enumerate(blocks(rows, 7)):
        assert (a.add(block) == b.add(block)).all()
        if i % 9 == 5:
            state = through_file(b.state_dict())
            b = REPLAYS[kind](max_sz=50)
            b.load_state_dict(state)
        keys = a.memory.keys
        assert a.memory.windows(keys, 6) == b.memory.windows(keys, 6)
        assert (a.memory.walk(keys, [-1, 1]) == b.memory.walk(keys, [-1, 1])).all()
        if i > 5:
            assert a.sample() == b.sample()
