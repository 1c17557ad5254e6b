"""`testing`: scripted environments play their scripts, and `check_contract` catches violations."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.testing import same, through_file
from strategies import cases

lengths = st.lists(st.sampled_from([1, 2, 3, 5, -1, -2, -4]), min_size=1, max_size=4)

# ---- scripts ----


@cases(60)
@given(lengths, st.integers(0, 9))
def test_script_numbers_are_all_different(episodes, env):
    "One state more than steps for each episode, an end after each length, of its sign's kind"
    s = script(*episodes, env=env)
    n = sum(map(abs, episodes))
    ends = np.cumsum(np.abs(episodes)) - 1
    assert len(s['rewards']) == len(set(s['rewards'])) == n
    assert len(s['states']) == len(set(map(tuple, s['states']))) == n + len(episodes)
    assert np.flatnonzero(s['terminations']).tolist() == ends[np.array(episodes) > 0].tolist()
    assert np.flatnonzero(s['truncations']).tolist() == ends[np.array(episodes) < 0].tolist()


def single(scripts, n):
    "Step scripted environments one by one, the plain way"
    rows = []
    for e, s in enumerate(scripts):
        env = ScriptedEnv(**s)
        obs, _ = env.reset(seed=e)
        for _ in range(n):
            after, reward, terminated, truncated, _ = env.step(0)
            rows.append((e, tuple(obs), reward, tuple(after), terminated, truncated))
            obs = env.reset()[0] if terminated or truncated else after
    return rows


@cases(40)
@given(st.lists(lengths, min_size=1, max_size=3), st.integers(1, 25))
def test_scripted_environments_play_their_scripts(episodes, n):
    "They give the transitions of the lists"
    scripts = [script(*e, env=i) for i, e in enumerate(episodes)]
    blocks = [b.rows for b in scripted_steps(scripts, n)]
    want = [
        (e, tuple(r['state']), r['reward'], tuple(r['next_state']), r['terminated'], r['truncated'])
        for e in range(len(scripts))
        for r in (block[e] for block in blocks)
    ]
    assert single(scripts, n) == want


def test_scripted_environments_guard_their_use():
    "No step before a reset or after an end, no action outside the space; a reset ends an episode"
    env = ScriptedEnv(**script(1, 2))
    with pytest.raises(RuntimeError):
        env.step(0)
    env.reset(seed=5)
    with pytest.raises(ValueError):
        env.step(3)
    assert env.step(2)[2] is True
    with pytest.raises(RuntimeError):
        env.step(0)
    assert [env.reset()[0].tolist() for _ in range(2)] == [[2, 4], [0, 0]]
    assert env.seeds == [5, None, None] and env.actions == [2]


# ---- same, through_file ----


@pytest.mark.parametrize(
    'a, b, want',
    [
        ([1, 'ab', None], (1, 'ab', None), True),
        ([1, 2], [1, 2, 3], False),
        (dict(a=np.arange(3)), dict(a=torch.arange(3)), True),
        (dict(a=1), dict(b=1), False),
        (torch.arange(3), torch.arange(3) + 1, False),
        (np.zeros(2), np.zeros(3), False),
        (dict(loss=float('nan')), dict(loss=float('nan')), True),
    ],
)
def test_same_is_equality_by_value(a, b, want):
    assert same(a, b) is want and same(b, a) is want


def test_files_hold_plain_data_only():
    "Tensors, numbers, strings, lists and dicts come back; an object that would run code does not"
    state = dict(a=torch.arange(3), b=[1, 2**63, 'x', None, 1.5, True], c=dict(d=torch.zeros(0, 2)))
    assert same(through_file(state), state)
    for bad in scripted_steps([script(2)], 1)[0], np.arange(3), print:
        with pytest.raises(pickle.UnpicklingError):
            through_file(dict(x=bad))


# ---- the contract ----


class Adds(Pipe):
    "Add the number of blocks so far to the rewards"

    def __init__(self, source):
        super().__init__(source)
        self.n = 0

    def snapshot(self):
        return dict(n=self.n)

    def restore(self, state):
        self.n = state['n']

    def __iter__(self):
        for steps in self.blocks():
            self.n += 1
            steps = steps.copy()
            steps.reward.add_(self.n)
            yield steps


class Unseeded(Pipe):
    def __iter__(self):
        for steps in self.blocks():
            steps = steps.copy()
            steps.reward.add_(np.random.rand())
            yield steps


class GivesNothing(Pipe):
    def __iter__(self):
        for _ in self.blocks():
            pass
        yield from ()


class PickleForgets(Adds):
    def __init__(self, source):
        super().__init__(source)
        self.n = 3

    def __getstate__(self):
        return {**super().__getstate__(), 'n': 1}


class ForgetsLate(Adds):
    "Saves well, but only for the first 8 blocks"

    def snapshot(self):
        return dict(n=min(self.n, 8))


@pytest.mark.parametrize(
    'bad, words',
    [
        (Unseeded, 'disagree'),
        (ForgetsLate, 'restored chain'),
        (GivesNothing, 'yielded nothing'),
        (PickleForgets, 'unpickled copy'),
    ],
)
def test_broken_promises_are_caught(bad, words):
    "Each promise of the contract has a stage that breaks it, and an error that says which"
    with pytest.raises(AssertionError, match=f'(?s){bad.__name__}.*{words}'):
        check_contract(bad)
