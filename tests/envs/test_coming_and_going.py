"""Environments that come and go for ever, each with a number of its own: tables stay as long as those that are under way at once, and nothing else is to be seen of it."""

from collections import deque

import numpy as np, pytest
from gymnasium.spaces import Box, Discrete

from fastrl_replay.all import *
from fastrl_replay.envs.numbering import MAX_ENVS, NEAR, Environments, number_of
from fastrl_replay.memory import links
from fastrl_replay.testing import through_file

DT = step_dtype(Box(-1, 1, ()), Discrete(2))
IDS = dict(
    counted=lambda i: i,
    far=lambda i: i + NEAR,
    strided=lambda i: i * 4096 % (MAX_ENVS - 1),
    last=lambda i: MAX_ENVS - 1 - i,
)


def coming_and_going(n, together=5, ids=IDS['counted'], seed=0, break_off=0.0):
    """Rows of `n` environments, so many at a time, one episode of 1 to 5 steps each; some break off without an end. The
    rewards count the rows; also the episodes, as a number for each row"""
    rng, length = np.random.default_rng(seed), np.random.default_rng(seed + 1).integers(1, 6, n)
    lane = [
        length[k::together] for k in range(together)
    ]  # environments k, k + together, ... one after the other
    parts = []
    for k, lengths in enumerate(lane):
        env = np.repeat(np.arange(k, n, together), lengths)
        step = np.arange(len(env)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
        parts.append(
            np.stack(
                [
                    np.arange(len(env)),
                    np.full(len(env), k),
                    env,
                    step,
                    step == np.repeat(lengths, lengths),
                ]
            )
        )
    at, _, env, step, end = (a := np.concatenate(parts, 1))[:, np.lexsort(a[:2][::-1])]
    rows = np.zeros(len(at), DT)
    rows['env_id'], rows['episode_n'], rows['step_n'], rows['reward'] = (
        ids(env),
        1,
        step,
        np.arange(len(at)) % 10_000,
    )
    rows['terminated'] = end & (rng.random(n) >= break_off)[env]
    return rows, env


def blocks(rows, size):
    return map(Steps, np.split(rows, range(size, len(rows), size)))


def tables(x):
    "How many bytes the arrays have that are as long as there are environments"
    return x._held.nbytes - x._held.held[4].nbytes  # those are as long as a block


MANY = [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
SIZES = pytest.mark.parametrize('size', [64, 1000])
HALF = dict(bs=4, max_sz=5000, seed=0)
REPLAYS = dict(
    uniform=lambda: ExperienceReplay(**HALF),
    proportional=lambda: PrioritizedReplay(**HALF),
    rank=lambda: PrioritizedReplay(kind='rank', **HALF),
    sequences=lambda: SequenceReplay(length=3, burn_in=1, overlap=1, **HALF),
)

# ---- the numbers ----


@pytest.mark.parametrize('which', IDS)
def test_numbers_are_those_of_a_dict(which):
    "Whoever has a number keeps it; a number has one owner; tables are a few times as long as what is kept"
    rng, envs, model, alive = np.random.default_rng(0), Environments(), {}, deque()
    for i in range(3000):
        come = IDS[which](
            rng.integers(0, 3000, rng.integers(0, 6))
            if i % 50 == 0
            else np.arange(3 * i, 3 * i + 3)
        )
        if not envs.admit(come):
            kept = np.array([model[e] for e in alive if e in model], int)
            envs = envs.with_room(come, kept)
            model = {e: model[e] for e in alive if e in model}
            assert envs.admit(come)
        for e in come.tolist():
            number = number_of(e, envs.number)
            assert model.setdefault(e, number) == number and envs.ids[number] == e
            if e in alive:
                alive.remove(e)
            alive.append(e)
        while len(alive) > 9:
            alive.popleft()
        assert sorted(model.values()) == np.flatnonzero(envs.ids >= 0).tolist() and len(
            envs
        ) == len(model)
    assert len(envs.ids) <= 64 and envs.nbytes < 8000


# ---- stages ----


@pytest.mark.parametrize('which', ['counted', 'strided'])
@pytest.mark.parametrize('n', MANY)
@SIZES
def test_n_step(n, size, which):
    "Each row is the start of a merged one, with the rows of its episode that follow, two at most; tables double once at most, and are in proportion to a block"
    (rows, _), stage, seen, sizes = coming_and_going(n, ids=IDS[which]), NStep(None, 3, 0.5), [], []
    rows['reward'] = np.arange(len(rows)) % 64
    for i, b in enumerate(blocks(rows, size)):
        seen.append(stage.merge(b).rows)
        if i >= 20:
            sizes.append(tables(stage))
    assert (
        max(sizes) < 2 * min(sizes) and len(stage._held.envs.ids) <= 4 * size and stage.waiting == 0
    )
    got = np.concatenate(seen)
    order = np.lexsort((got['step_n'], got['env_id']))
    want = rows[np.lexsort((rows['step_n'], rows['env_id']))]
    r, e, total, m = want['reward'], want['env_id'], want['reward'].copy(), np.ones(len(want), int)
    for k in 1, 2:
        same = np.append(e[k:] == e[:-k], [False] * k)
        total[same] += 0.5**k * np.append(r[k:], [0] * k)[same]
        m += same
    assert (
        (got[order]['env_id'] == e).all()
        and (got[order]['reward'] == total).all()
        and (got[order]['n'] == m).all()
    )


@pytest.mark.parametrize('n', MANY)
@SIZES
def test_chunks(n, size):
    "Each environment gives its one episode, cut; tables double once at most, and are in proportion to a block"
    (rows, _), stage, seen, sizes = (
        coming_and_going(n, ids=IDS['far']),
        SequenceChunker(None, 3, 1, tail='pad'),
        [],
        [],
    )
    for i, b in enumerate(blocks(rows, size)):
        seen += [s.rows for s in stage.chunk(b)]
        if i >= 20:
            sizes.append(tables(stage))
    assert (
        max(sizes) < 2 * min(sizes)
        and len(stage._held.envs.ids) <= 4 * size
        and not stage._held.counts.any()
    )
    got = np.array(seen)
    steps = {
        (e, s)
        for e, s in zip(got[got['mask']]['env_id'].tolist(), got[got['mask']]['step_n'].tolist())
    }
    assert steps == set(zip(rows['env_id'].tolist(), rows['step_n'].tolist()))
    assert all(
        len(set(g[g['mask']]['env_id'])) == 1 and g['step_n'][0] in (1, 3)
        for g in (got if n < 100_000 else got[:20_000])
    )


@pytest.mark.parametrize('tail', ['shift', 'pad', 'drop'])
def test_chunks_as_if_nothing_were_forgotten(tail):
    "A stage that takes each row in a block of its own, and one that takes all at once, which forgets nothing"
    rows, _ = coming_and_going(400, 7, break_off=0.1)
    one, other = SequenceChunker(None, 3, 1, tail), SequenceChunker(None, 3, 1, tail)
    assert [s for b in blocks(rows, 1) for s in one.chunk(b)] == other.chunk(Steps(rows))
    assert len(one._held.envs.ids) < 400 <= len(other._held.envs.ids)


# ---- memories ----


def check(memory, rows, episode, length=6, n=50):
    "Windows of some rows hold the rest of their episodes, as far as it has come"
    keys = memory.keys[np.random.default_rng(0).integers(0, len(memory), n)]
    windows, upto = memory.windows(keys, length), memory.inserted
    for key, w in zip(keys.tolist(), windows):
        want = rows[
            key + np.flatnonzero(episode[key : min(key + length * 9, upto)] == episode[key])
        ][:length]
        assert w.reward[w.mask].tolist() == want['reward'].tolist()


@pytest.mark.parametrize('kind', REPLAYS)
@pytest.mark.parametrize('n', MANY)
@SIZES
def test_replays(kind, n, size):
    "Rows in memory follow each other as they should; tables stay small; draws are of what is there"
    if kind == 'rank' and n > 100_000:
        n = 200_000
    (rows, episode), replay, sizes = coming_and_going(n), REPLAYS[kind](), []
    for i, b in enumerate(blocks(rows, size)):
        replay.add(b)
        if i % 20 == 0:
            replay.sample()
        if i >= 20:
            sizes.append(replay.nbytes)
        if i % (len(rows) // size // 20 or 1) == 0:
            check(replay.memory, rows, episode)
    sizes = sizes[len(sizes) // 4 :]
    assert max(sizes) < 2 * min(sizes) and len(replay.memory.environments.ids) <= 4 * size
    assert (replay.memory[:].rows == rows[-5000:]).all()


@pytest.mark.parametrize('n', [2000, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize('max_sz', [7, 40, 300])
def test_those_that_break_off_are_forgotten_when_their_rows_are_gone(max_sz, n, monkeypatch):
    "None of them ever says that its episode has ended"
    if n < 100_000:
        monkeypatch.setattr(links, 'PATIENCE', 0)
    reach = links.reach(max_sz)
    (rows, episode), line, replay = (
        coming_and_going(n, break_off=1.0),
        Timeline(max_sz),
        SequenceReplay(None, 1, max_sz, length=3, burn_in=0, overlap=1),
    )
    for i, b in enumerate(blocks(rows, 5)):
        line.add(b), replay.add(b)
        check(line, rows, episode, n=50 if n < 100_000 or i % 100 == 0 else 2)
    for m in line, replay.memory:
        assert len(m.environments.ids) <= 4 * reach + 8


def first_keys(replay):
    replay._catch_up()
    return sorted(replay.table.first[replay.table.first >= 0].tolist())


@pytest.mark.parametrize('come', ['others', 'itself'])
@pytest.mark.parametrize('max_sz', [4, 20])
def test_what_comes_back_begins_anew(max_sz, come, monkeypatch):
    "An environment that was silent for long has nothing to go on with, whether its number was given to another or not"
    monkeypatch.setattr(links, 'PATIENCE', 0)

    def row(env, step, n=1):
        r = np.zeros(n, DT)
        r['env_id'], r['episode_n'], r['step_n'] = env, 1, np.arange(step, step + n)
        return Steps(r)

    replay = SequenceReplay(None, 1, max_sz, length=3, burn_in=0, overlap=0)
    replay.add(row(7, 1, 2))
    if come == 'others':
        for e in range(100, 100 + max_sz):
            replay.add(row(e, 1))
    else:
        replay.add(row(8, 1, max_sz))
    first = replay.memory.inserted
    replay.add(row(7, 50, 3))
    assert first in first_keys(replay) and replay.memory.windows([first], 9).step_n[
        0, :4
    ].tolist() == [50, 51, 52, 0]
    assert replay.memory.walk([first], [-1]).tolist() == [[-1]]


@pytest.mark.parametrize('kind', REPLAYS)
@pytest.mark.parametrize('break_off', [0.0, 0.3])
@pytest.mark.parametrize('patience', [0, links.PATIENCE])
def test_a_state_holds_those_under_way_and_goes_on_alike(kind, break_off, patience, monkeypatch):
    "Saved and restored now and then, a replay holds what one holds that was never saved"
    monkeypatch.setattr(links, 'PATIENCE', patience)
    rows, _ = coming_and_going(600, 6, break_off=break_off)
    a, b = (
        type(r := REPLAYS[kind]())(
            None,
            4,
            50,
            seed=0,
            **(dict(length=3, burn_in=1, overlap=1) if kind == 'sequences' else {}),
        )
        for _ in range(2)
    )
    for i, block in enumerate(blocks(rows, 7)):
        assert (a.add(block) == b.add(block)).all()
        if i % 9 == 5:
            state = through_file(b.state_dict())
            b = type(b)(
                None,
                4,
                50,
                seed=0,
                **(dict(length=3, burn_in=1, overlap=1) if kind == 'sequences' else {}),
            )
            b.load_state_dict(state)
            assert len(b.memory.environments) <= (60 if not break_off or not patience else 600)
        if kind == 'sequences':
            assert first_keys(a) == first_keys(b)
        keys = a.memory.keys
        assert (
            a.memory.windows(keys, 6) == b.memory.windows(keys, 6)
            and (a.memory.walk(keys, [-1, 1]) == b.memory.walk(keys, [-1, 1])).all()
        )
