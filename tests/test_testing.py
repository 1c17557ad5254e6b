"""`testing`: scripted environments tell what their scripts say in every mode, and `check_contract` catches what it promises to catch."""

import pickle
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st

import fastrl_replay.data.interop  # noqa: F401 (registers `stateful` and `node`, under which the contract is tried)
from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.row_dtypes import step_dtype
from fastrl_replay.pipe import Items, Pipe, Positioned
from fastrl_replay.generic import Cycler, Header
from fastrl_replay.testing import (
    ScriptedEnv,
    ScriptedVectorEnv,
    check_contract,
    same,
    script,
    scripted_steps,
    through_file,
)
from strategies import cases

lengths = st.lists(
    st.integers(1, 5).flatmap(lambda n: st.sampled_from([n, -n])), min_size=1, max_size=4
)

# ---- scripts ----


@cases(60)
@given(lengths, st.integers(0, 9))
def test_script_numbers_are_all_different(ls, env):
    "One state more than steps for each episode, an end where each length says, of the kind its sign says, and no number twice"
    s = script(*ls, env=env)
    n, ends = sum(map(abs, ls)), np.cumsum(np.abs(ls)) - 1
    assert len(s['rewards']) == n and len(s['states']) == n + len(ls)
    assert [i for i in range(n) if s['terminations'][i]] == [e for e, l in zip(ends, ls) if l > 0]
    assert [i for i in range(n) if s['truncations'][i]] == [e for e, l in zip(ends, ls) if l < 0]
    assert len(set(s['rewards'])) == n and len(set(map(tuple, s['states']))) == n + len(ls)


def test_environments_have_numbers_of_their_own():
    "No reward and no state is shared by two environments' scripts, so rows can't change places unseen"
    scripts = [script(20, env=e) for e in range(8)]
    for what in 'rewards', 'states':
        seen = [tuple(np.atleast_1d(x)) for s in scripts for x in s[what]]
        assert len(set(seen)) == len(seen), what


def single(scripts, n):
    "Step scripted environments one by one, the plain way"
    rows = []
    for e, s in enumerate(scripts):
        env = ScriptedEnv(**s)
        obs, _ = env.reset(seed=e)
        for _ in range(n):
            nxt, r, term, trunc, _ = env.step(0)
            rows.append((e, tuple(obs), r, tuple(nxt), term, trunc))
            obs = env.reset()[0] if term or trunc else nxt
    return rows


def vector(scripts, n, mode):
    "Step a vector of them in an autoreset mode, and keep the true transitions by gymnasium's own rules"
    env = ScriptedVectorEnv(
        scripts,
        getattr(
            gym.vector.AutoresetMode,
            {'NextStep': 'NEXT_STEP', 'SameStep': 'SAME_STEP', 'Disabled': 'DISABLED'}[mode],
        ),
    )
    k, rows = len(scripts), [[] for _ in scripts]
    obs, _ = env.reset(seed=0)
    obs, ended = obs.copy(), np.zeros(k, bool)
    while min(map(len, rows)) < n:
        nxt, r, term, trunc, info = env.step(np.zeros(k, int))
        done = term | trunc
        for e in range(k):
            if mode == 'NextStep' and ended[e]:
                continue
            true = info['final_obs'][e] if mode == 'SameStep' and done[e] else nxt[e]
            rows[e].append((e, tuple(obs[e]), r[e], tuple(true), bool(term[e]), bool(trunc[e])))
        obs, ended = nxt.copy(), done
        if mode == 'Disabled' and done.any():
            obs = env.reset(options=dict(reset_mask=done))[0].copy()
    env.close()
    return [row for stream in rows for row in stream[:n]]


def oracle(scripts, n):
    rows = np.stack([b.rows for b in scripted_steps(scripts, n)])
    return [
        (e, tuple(r['state']), r['reward'], tuple(r['next_state']), r['terminated'], r['truncated'])
        for e in range(len(scripts))
        for r in rows[:, e]
    ]


@cases(40)
@given(st.lists(lengths, min_size=1, max_size=3), st.integers(1, 25))
def test_scripted_environments_play_their_scripts(ls, n):
    "Single environments and vectors in all three autoreset modes give the transitions that are read off the lists"
    scripts = [script(*l, env=e) for e, l in enumerate(ls)]
    want = oracle(scripts, n)
    assert single(scripts, n) == want and len(want) == n * len(ls)
    for mode in 'NextStep', 'SameStep', 'Disabled':
        assert vector(scripts, n, mode) == want, mode


@cases(40)
@given(lengths, st.integers(1, 25))
def test_scripted_steps_count_as_steps_do(ls, n):
    "env_id, episode_n from 1, step_n from 1, and the return so far, by a second plain loop over the rewards"
    s, at, want = script(*ls, env=1), 0, []
    total, step, episode = 0.0, 0, 1
    for _ in range(n):
        total, step = total + s['rewards'][at], step + 1
        want.append((1, episode, step, total))
        if s['terminations'][at] or s['truncations'][at]:
            total, step, episode = 0.0, 0, episode + 1
        at = (at + 1) % len(s['rewards'])
    got = [
        tuple(b.rows[['env_id', 'episode_n', 'step_n', 'total_reward']][1].item())
        for b in scripted_steps([script(1), s], n)
    ]
    assert got == want


@pytest.mark.parametrize(
    'ls', [(0,), (2, 0), (), (0, 0)]
)  # was: an episode of no steps gives a crooked script; no episode at all an IndexError
def test_episodes_have_steps(ls):
    with pytest.raises(ValueError, match='script'):
        script(*ls)


@pytest.mark.parametrize(
    'change,words',
    [
        (dict(states=[[0, 0]] * 4), 'final state'),
        (dict(states=[[0, 0]] * 6), 'final state'),
        (dict(terminations=[1, 0, 0], truncations=[0, 0, 0]), 'end of an episode'),
        (dict(states=[], rewards=[], terminations=[], truncations=[]), 'end of an episode'),
        (dict(rewards=[1.0]), 'ScriptedEnv'),
        (dict(truncations=[0, 1]), 'ScriptedEnv'),
    ],
    ids=str,
)  # was: the last: numpy's broadcasting error
def test_crooked_scripts_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        ScriptedEnv(**{**script(2, 1), **change})


def test_scripted_environments_guard_their_use():
    "No step before a reset or after an end, no action outside the space; seeds and actions are remembered"
    env = ScriptedEnv(**script(1, 2))
    with pytest.raises(RuntimeError):
        env.step(0)
    env.reset(seed=5)
    with pytest.raises(ValueError):
        env.step(3)
    assert env.step(2)[2] is True
    with pytest.raises(RuntimeError):
        env.step(0)
    env.reset()
    env.step(1)
    env.reset()
    assert (
        env.seeds == [5, None, None] and env.actions == [2, 1] and env.reset()[0].tolist() == [2, 4]
    )


def test_a_reset_in_mid_episode_leaves_it():
    "The next episode begins; after the last one, the first"
    env = ScriptedEnv(**script(3, 2))
    assert [env.reset()[0].tolist() for _ in range(4)] == [[0, 0], [4, 16], [0, 0], [4, 16]]
    env.step(0)
    assert env.reset()[0].tolist() == [0, 0]


def test_scripted_environments_continue_where_they_were():
    a, b = ScriptedEnv(**script(2, -3)), ScriptedEnv(**script(2, -3))
    a.reset()
    a.step(0)
    b.load_state_dict(through_file(a.state_dict()))
    assert [x.tolist() if hasattr(x, 'tolist') else x for x in a.step(1)] == [
        x.tolist() if hasattr(x, 'tolist') else x for x in b.step(1)
    ]


def test_scripted_states_are_in_their_space():
    env = ScriptedEnv(**script(3))
    assert env.observation_space.contains(env.reset()[0]) and env.observation_space.contains(
        env.step(0)[0]
    )


def test_states_may_be_numbers():
    "A script whose states are plain numbers, as a Discrete space's"
    s = dict(states=[1.0, 2.0, 3.0], rewards=[1.0, 2.0], terminations=[0, 1], truncations=[0, 0])
    assert ScriptedEnv(**s).reset()[0] == 1
    assert [b.state.tolist() for b in scripted_steps([s], 2)] == [
        [1.0],
        [2.0],
    ]  # was: 'float' object is not iterable


# ---- same, through_file ----


@pytest.mark.parametrize(
    'a,b,want',
    [
        (1, 1, True),
        ([1, 2], (1, 2), True),
        ([1, 2], [1, 2, 3], False),
        (dict(a=1), dict(a=1), True),
        (dict(a=1), dict(b=1), False),
        (dict(a=np.arange(3)), dict(a=np.arange(3)), True),
        (torch.arange(3), np.arange(3), True),
        (torch.arange(3), torch.arange(3) + 1, False),
        (np.zeros(2), np.zeros(3), False),
        ('ab', 'ab', True),
        (None, None, True),
        (None, 0, False),
        ((torch.zeros(2), dict(x=[1])), (torch.zeros(2), dict(x=[1])), True),
        (np.array([np.nan, 1]), np.array([np.nan, 1]), True),
        (dict(loss=float('nan')), dict(loss=float('nan')), True),
    ],
    ids=str,
)  # was: the last two: copies of a record with a NaN differ
def test_same_is_equality_by_value(a, b, want):
    "A copy always equals its original, as with Steps"
    assert same(a, b) is want and same(b, a) is want


def test_same_compares_blocks():
    a = scripted_steps([script(2)], 1)[0]
    b = a.copy()
    b.reward[0] = 9
    assert same(a, a.copy()) and not same(a, b) and not same([a], [b]) and not same(a, None)


def test_files_hold_plain_data_only():
    "Tensors, numbers, strings, lists and dicts come back; an object that would run code does not"
    state = dict(
        a=torch.arange(3),
        b=[1, 2**63, 'x', None, 1.5, True],
        c=dict(d=torch.zeros(0, 2, dtype=torch.uint8)),
    )
    assert same(through_file(state), state)
    for bad in (
        Steps(np.zeros(1, step_dtype(spaces.Discrete(2), spaces.Discrete(2)))),
        np.arange(3),
        print,
    ):
        with pytest.raises(pickle.UnpicklingError):
            through_file(dict(x=bad))


# ---- the contract ----


class Good(Pipe):
    "Doubles rewards"

    def __iter__(self):
        for s in self.blocks():
            s = s.copy()
            s.reward.mul_(2)
            yield s


class Remembers(Pipe):
    "Adds the number of blocks so far, and saves it"

    def __init__(self, source):
        super().__init__(source)
        self.n = 0

    def snapshot(self):
        return dict(n=self.n)

    def restore(self, state):
        self.n = state['n']

    def __iter__(self):
        for s in self.blocks():
            self.n += 1
            s = s.copy()
            s.reward.add_(self.n)
            yield s


class Source(Positioned):
    "A stage that is a source"

    def __init__(self, n=30):
        super().__init__(None)
        self.n = n

    def __iter__(self):
        for b in scripted_steps([script(3, -2)], self.n)[self._start() :]:
            self.place += 1
            yield b


@pytest.mark.parametrize(
    'factory',
    [
        Good,
        Remembers,
        lambda s: Header(s, 20),
        lambda s: Good(s).cycle().header(50),
        lambda s: Cycler(Good(Header(s, 5)), 4),
        lambda: Source(),
        lambda: Good(Source()),
        lambda source=None: Source(),
    ],
    ids=['Good', 'Remembers', 'header', 'cycle', 'Cycler', 'Source', 'Good(Source)', 'default'],
)
def test_stages_that_keep_the_contract_pass(factory):
    res = check_contract(factory)
    assert 0 < res['items'] <= 40 and res['us_per_item'] > 0


class Mutates(Pipe):
    def __iter__(self):
        for s in self.blocks():
            s.reward.mul_(2)
            yield s


class Unseeded(Pipe):
    def __iter__(self):
        for s in self.blocks():
            s = s.copy()
            s.reward.add_(torch.from_numpy(np.random.rand(len(s)).astype('f4')))
            yield s


class Forgets(Remembers):
    def snapshot(self):
        return {}

    def restore(self, state):
        pass


class Credulous(Pipe):
    def __iter__(self):
        for s in self.source:
            yield s


class Hoards(Pipe):
    def __init__(self, source):
        super().__init__(source)
        self.seen = []

    def __iter__(self):
        for s in self.blocks():
            self.seen.append(s)
            yield s


class HoldsInABuffer(Pipe):
    _buffers = ('seen',)

    def __init__(self, source):
        super().__init__(source)
        self._fresh()

    def _fresh(self):
        self.seen = []

    def __iter__(self):
        for s in self.blocks():
            self.seen = (self.seen + [s])[-5:]
            yield s


class GivesNothing(Pipe):
    def __iter__(self):
        for s in self.blocks():
            pass
        yield from ()


class NoGenerator(Pipe):
    def __iter__(self):
        return (s for s in self.blocks())


class Nexts(Pipe):
    def __iter__(self):
        self.it = iter(list(self.blocks()))
        return self

    def __next__(self):
        return next(self.it)


class Patched(Pipe):
    pass


def _late(self):
    for s in self.blocks():
        yield s


class SavesObjects(Good):
    def snapshot(self):
        return dict(x=np.arange(3))


class Unpicklable(Good):
    def __init__(self, source):
        super().__init__(source)
        self.f = lambda x: x


class PickleForgets(Remembers):
    def __init__(self, source):
        super().__init__(source)
        self.by = 3

    def __getstate__(self):
        return {**super().__getstate__(), 'by': 1}

    def __iter__(self):
        for s in self.blocks():
            s = s.copy()
            s.reward.mul_(self.by)
            yield s


class OneEnvironmentOnly(Pipe):
    def __iter__(self):
        for s in self.blocks():
            assert len(s) == 1
            yield s


class SecondPassDiffers(Pipe):
    made = 0

    def __init__(self, source):
        super().__init__(source)
        self.passes, SecondPassDiffers.made = 0, SecondPassDiffers.made + 1
        self.me = SecondPassDiffers.made

    def __iter__(self):
        self.passes += 1
        for s in self.blocks():
            s = s.copy()
            s.reward.add_(self.me if self.passes > 1 else 0)
            yield s


class ForgetsLate(Pipe):
    "Saves well, but only for the first 8 blocks"

    n = 0

    def snapshot(self):
        return dict(n=min(self.n, 8))

    def restore(self, state):
        self.n = state['n']

    def __iter__(self):
        for s in self.blocks():
            self.n += 1
            s = s.copy()
            s.reward.add_(self.n)
            yield s


class RewindsTooMuch(Remembers):
    "As `Pipe.rewind` once did with every stage that had an attribute `_place`"

    def _rewind(self):
        self.n = 0


class CountsOn(Pipe):
    "Knows its place in the first pass, and not in one after a pass that was left"

    reads_anew = True

    def __init__(self, source):
        super().__init__(source)
        self.at, self.resume = 0, 0

    def snapshot(self):
        return dict(at=self.at)

    def restore(self, state):
        self.at = self.resume = state['at']

    def __iter__(self):
        skip, self.resume = self.resume, 0
        for b in islice(self.blocks(), skip, None):
            self.at += 1
            yield b


class StaysBehind(CountsOn):
    "Knows its place in all passes, but not that a pass was left before it has begun the next one"

    def __iter__(self):
        self.at, self.resume = self.resume, 0
        for b in islice(self.blocks(), self.at, None):
            self.at += 1
            yield b


class GivesNone(Pipe):
    def __iter__(self):
        for s in self.blocks():
            yield None if s.step_n[0] == 3 else s


@pytest.mark.parametrize(
    'bad,words',
    [
        (Mutates, 'changed the blocks'),
        (Unseeded, 'disagree'),
        (Forgets, 'restored chain'),
        (Credulous, 'accepted a str'),
        (Hoards, '_buffers'),
        (HoldsInABuffer, 'still held'),
        (GivesNothing, 'gave nothing'),
        (NoGenerator, 'generator'),
        (Nexts, ''),
        (SavesObjects, ''),
        (Unpicklable, ''),
        (PickleForgets, 'unpickled copy'),
        (OneEnvironmentOnly, ''),
        (SecondPassDiffers, 'second pass'),
        (RewindsTooMuch, 'under header, iterated twice'),
        (CountsOn, 'after 6 items, a restored chain'),
        (StaysBehind, 'after 4 items, a restored chain'),
        (GivesNone, ''),  # was: all four pass
        (ForgetsLate, 'restored chain'),
    ],  # the check once missed this: it saves after 0, 1 and 7 items only; `Items('abc').cycle()`, which can't be saved after 3, passes too
    ids=lambda x: getattr(x, '__name__', None),
)
def test_broken_promises_are_caught(bad, words):
    "Each promise of the contract has a stage that breaks it, and an error that says which"
    with pytest.raises(Exception, match=words or None) as e:
        check_contract(bad)
    if words:
        assert isinstance(e.value, AssertionError) and bad.__name__ in str(e.value)


def test_a_patched_iter_is_caught():
    "`@patch` puts __iter__ past torch's hook: no hook"
    Patched.__iter__ = _late
    assert [len(x) for x in islice(Patched(Items(scripted_steps([script(2)], 2))), 2)] == [1, 1]
    try:
        check_contract(Patched)
    except Exception:
        return
    raise AssertionError(
        'a stage without the hook passed'
    )  # the check once missed this: unwrap() finds the bare generator and is content
