"""`NStep` against a judge that sees the whole stream at once.

At every edge that episodes, environments and blocks have."""

import math

import numpy as np, pytest
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.steps.row_dtypes import extend_dtype
from fastrl_replay.testing import same, script, scripted_steps, through_file
from strategies import cases, numbers, story
from test_timeline import KINDS as COLUMNS

Box, Discrete = spaces.Box, spaces.Discrete
KINDS = {kind: COLUMNS[kind] for kind in ('cartpole', 'odd', 'nested')}
KINDS['empty'] = step_dtype(Box(0, 1, (0,)), Discrete(2))


def episode(*rewards, ends='terminated', env=0, number=1, start=1, dtype=KINDS['cartpole']):
    "An episode, or a part of one, as a block"
    rows = numbers(len(rewards), dtype, sum(map(int, rewards)))
    rows['reward'], rows['env_id'], rows['episode_n'], rows['step_n'] = (
        rewards,
        env,
        number,
        np.arange(len(rewards)) + start,
    )
    rows['terminated'], rows['truncated'], rows['total_reward'] = False, False, np.cumsum(rewards)
    if ends:
        rows[ends][-1] = True
    return Steps(rows)


# ---- the judge ----


def judge(rows, n, gamma, ended=False):
    """Return the rows that must come out, in order, of each start that is complete.

    If the data has ended, the other starts follow, as for episodes that broke off."""
    out = []
    for i, start in enumerate(rows):
        window, by, broken = [i], None, False
        for j in range(i, len(rows)):
            r = rows[j]
            if r['env_id'] != start['env_id']:
                continue
            if j > i:
                last = rows[window[-1]]
                if r['step_n'] != last['step_n'] + 1 or r['episode_n'] != last['episode_n']:
                    by, broken = j, True
                    break
                window.append(j)
            if r['terminated'] or r['truncated'] or len(window) == n:
                by = j
                break
        if by is not None or ended:
            out.append((len(rows) if by is None else by, by is not None and not broken, i, window))
    out.sort(key=lambda o: o[:3])  # what breaks off comes before what the same row completes
    merged = np.zeros(len(out), extend_dtype(rows.dtype, discount='f4', n='i4'))
    for m, (_, whole, i, window) in zip(merged, out):
        last = rows[window[-1]]
        for name in rows.dtype.names:
            m[name] = rows[i][name]
        m['reward'] = math.fsum(gamma**k * float(rows[j]['reward']) for k, j in enumerate(window))
        m['next_state'], m['terminated'], m['truncated'] = (
            last['next_state'],
            last['terminated'],
            last['truncated'] or not whole,
        )
        m['discount'], m['n'] = gamma ** len(window) * (not last['terminated']), len(window)
    return merged


@pytest.mark.parametrize('kind', KINDS)
@cases(60)
@given(st.binary(max_size=60), st.integers(1, 6) | st.just(100), st.sampled_from([0, 0.25, 0.5, 1]))
def test_it_does_what_the_judge_says(kind, program, n, gamma):
    """Every bit of each row, in order, in any blocks, through files at any time.

    These γ are exact in floating point."""
    rows, cuts = story(program, KINDS[kind])
    stage, out, at, before = NStep([], n, gamma), [], 0, rows.copy()
    for end, how in [*cuts, (len(rows), 1)]:
        out.append(stage.merge(Steps(rows[at:end])))
        done = len(out[-1])
        assert done == 0 or same(Steps(judge(rows[:end], n, gamma)[-done:]), out[-1])
        at = end
        if how == 2:
            assert len(stage.merge(Steps(rows[:0]))) == 0
        if how == 3:
            state = through_file(stage.state_dict())
            stage = NStep([], n, gamma)
            stage.load_state_dict(state)
    expected = Steps(judge(rows, n, gamma))
    assert Steps.cat(out) == expected
    assert Steps(rows) == Steps(before)
    assert stage.waiting == len(rows) - len(expected)  # none is lost
    if stage.waiting:
        left = judge(rows, n, gamma, ended=True)[len(expected) :]
        assert stage.flush() == Steps(left[left['env_id'].argsort(kind='stable')])
        assert stage.waiting == 0


@cases(60)
@given(
    st.binary(min_size=1, max_size=60), st.integers(1, 9), st.floats(0, 1), st.integers(0, 2**31)
)
def test_any_gamma_and_any_rewards(program, n, gamma, seed):
    "The same with rewards of many sizes: to the last digits of single precision"
    rows, _ = story(program, KINDS['cartpole'])
    rng = np.random.default_rng(seed)
    rows['reward'] = rng.normal(size=len(rows)) * 10.0 ** rng.integers(-9, 9, len(rows))
    got, expected = NStep([], n, gamma).merge(Steps(rows)).rows, judge(rows, n, gamma)
    scale = np.abs(rows['reward']).max()
    np.testing.assert_allclose(got['reward'], expected['reward'], rtol=2e-7, atol=1e-9 * scale)
    np.testing.assert_allclose(got['discount'], expected['discount'], rtol=2e-7, atol=1e-44)
    for name in set(got.dtype.names) - {'reward', 'discount'}:
        assert np.array_equal(got[name], expected[name])


# ---- tables ----


def test_sums_are_double_inside():
    "In single precision, 2²⁴ would swallow every 1 that is added to it, from either side"
    for rewards in [2.0**24, *[1] * 100], [*[1] * 100, 2.0**24]:
        (out,) = NStep([episode(*rewards)], 101, 1.0)
        assert out.reward[0] == 2**24 + 100


# ---- what is refused ----


@pytest.mark.parametrize('n', [0, 1.5, True])
@pytest.mark.parametrize('make', [lambda n: NStep([], n, 0.9), lambda n: NSkip([], n)])
def test_n_must_be_a_whole_number(make, n):
    with pytest.raises(ValueError, match=r'n; got .*an integer, 1 to 2147483647'):
        make(n)


# ---- n_skip ----


@cases(100)
@given(st.binary(max_size=60), st.integers(1, 9), st.integers(0, 1))
def test_skipping(program, n, first):
    "The first, every n-th after it, the last; whatever the blocks, and bit for bit"
    rows, cuts = story(program, KINDS['nested'])
    rows['step_n'] -= 1 - first
    before = rows.copy()
    blocks = [Steps(r) for r in np.split(rows, [c for c, _ in cuts])]
    expected = [
        i
        for i, r in enumerate(rows)
        if r['step_n'] == 0 or r['step_n'] % n == 1 % n or r['terminated'] or r['truncated']
    ]
    kept = rows[expected]
    for r in kept:  # a step's number among those that its episode keeps, if none is missing
        before_it = range(1, r['step_n'])
        r['step_n'] = min(r['step_n'], 1 + sum(i % n == 1 % n for i in before_it))
    got = list(NSkip(blocks, n))
    assert all(map(len, got)) and Steps(rows) == Steps(before)
    assert not expected and not got or Steps.cat(got) == Steps(kept)


def test_skipping_gives_rows_of_its_own():
    "Also where it keeps all"
    block = episode(1, 2, 3)
    for n in 1, 2:
        (out,) = NSkip([block], n)
        assert not np.shares_memory(out.rows, block.rows) and out.rows.dtype == block.rows.dtype


# ---- rows whose counters were never filled in ----

_goal = Box(-1, 1, (1,))
GOALS = step_dtype(
    spaces.Dict(observation=_goal, achieved_goal=_goal, desired_goal=_goal), Discrete(2)
)


def blank(n=20):
    "Rows as one's own loop makes them that fills in no counters; the last one ends"
    rows = np.zeros(n, GOALS)
    rows['terminated'][-1] = True
    return rows


UNCOUNTED = {
    'NStep': lambda: NStep(None, 3, 0.9).merge,
    'NSkip': lambda: NSkip(None, 3).skip,
    'SequenceChunker': lambda: SequenceChunker(None, 4).chunk,
    'SequenceReplay': lambda: SequenceReplay(None, 1, 99, length=4).add,
    'HindsightReplay': lambda: (
        HindsightReplay(None, 1, 99, reward=lambda got, wanted, info: np.zeros(len(got))).add
    ),
}


@pytest.mark.parametrize('name', UNCOUNTED)
@pytest.mark.parametrize('size', [1, 20])
def test_rows_without_counters_are_refused(name, size):
    "In blocks of any size, with the remedy"
    rows, take = blank(), UNCOUNTED[name]()
    with pytest.raises(
        BlockError,
        match=f"{name}: .*'step_n' and 'episode_n'; got 0 in both.*Remedy: fill in both columns",
    ):
        for i in range(0, 20, size):
            take(Steps(rows[i : i + size]))


@pytest.mark.parametrize('name', UNCOUNTED)
@pytest.mark.parametrize('size', [1, 60])
def test_rows_that_count_in_their_way_are_taken(name, size):
    "Episodes of one step, several environments, gaps, counters from 0, restarts"
    rows = blank(60)
    rows['env_id'], rows['episode_n'], rows['step_n'] = np.arange(60) % 3, 1, np.arange(60) // 3
    ends = blank(60)
    ends['terminated'] = True
    again = np.concatenate([rows[:3], rows[:3], rows])  # a checkpoint from the first steps, twice
    for legitimate in rows, ends, again, rows[::7]:
        take = UNCOUNTED[name]()
        for i in range(0, len(legitimate), size):
            take(Steps(legitimate[i : i + size]))


def test_without_episodes_no_counters_are_asked_for():
    "Uniform replay, and n-step rows of one step"
    replay = ExperienceReplay(None, 4, 99, seed=0)
    replay.add(Steps(blank()))
    assert len(replay.sample()) == 4 and len(NStep(None, 1, 0.9).merge(Steps(blank()))) == 20


def test_a_refused_block_is_not_counted():
    "The same rows, put right, are taken"
    stage, rows = NStep(None, 2, 0.9), blank(2)
    rows['reward'][1] = np.nan
    with pytest.raises(BlockError, match='finite'):
        stage.merge(Steps(rows))
    rows['reward'], rows['step_n'] = 1, (1, 2)
    assert len(stage.merge(Steps(rows))) == 2


def test_no_sum_leads_across_a_missing_step():
    blocks = scripted_steps([script(6)], 6)
    del blocks[2]
    rows = Steps.cat([*NStep(Items(blocks), 3, 1.0)]).rows
    assert rows[['step_n', 'n']].tolist() == [(1, 2), (2, 1), (4, 3), (5, 2), (6, 1)]
