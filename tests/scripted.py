"""What several test files share: environments that tell on a stepper, policies, small helpers."""

import importlib, os, pkgutil
from importlib.util import find_spec
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
import fastrl_replay
from fastrl_replay.all import *
from fastrl_replay.steps.batches import burn_in_of, each_of
from fastrl_replay.steps.row_dtypes import extend_dtype, leaves
from fastrl_replay.testing import through_file

MODES = 'NextStep', 'SameStep', 'Disabled'
needs_modes = pytest.mark.skipif(
    not hasattr(gym.vector, 'AutoresetMode'), reason='gymnasium before 1.1 has no autoreset modes'
)
needs_datapipes = pytest.mark.skipif(
    'WITHOUT_DATAPIPES' in os.environ, reason="torch's own stages are blocked"
)


def take(pipe, n):
    return list(islice(pipe, n))


def modules():
    "All modules of the package, imported; without Stable-Baselines3, all but the one that needs it"
    names = [
        m.name
        for m in pkgutil.walk_packages(fastrl_replay.__path__, 'fastrl_replay.')
        if not m.name.endswith('__main__')
    ]
    if not find_spec('stable_baselines3'):
        names.remove('fastrl_replay.sb3')
    return {name: importlib.import_module(name) for name in names}


def draws(replay, n, bs=None):
    return [replay.sample(bs).index.tolist() for _ in range(n)]


def everything(replay):
    return through_file(replay.state_dict())


def by_env(blocks, k=None):
    "The first `k` rows of each environment, as arrays, in order of env_id"
    rows = np.concatenate([b.rows for b in blocks])
    return [rows[rows['env_id'] == e][:k] for e in range(rows['env_id'].max() + 1)]


def same_streams(a, b, k):
    "Do both lists of blocks hold the same first `k` rows of each environment?"
    a, b = by_env(a, k), by_env(b, k)
    assert len(a) == len(b) and all(len(x) == len(y) == k for x, y in zip(a, b)), (
        'too few rows or environments'
    )
    return all(Steps(x) == Steps(y) for x, y in zip(a, b))


def vector(makers, mode, kind=SyncVectorEnv, **kw):
    return kind(list(makers), autoreset_mode=mode, **kw)


def makers(scripts):
    return [lambda s=s: ScriptedEnv(**s) for s in scripts]


def cartpole():
    return gym.make('CartPole-v1')


def close(source):
    "Close given environments, wherever they are in a list"
    for s in source if isinstance(source, (list, tuple)) else [source]:
        if isinstance(s, (list, tuple)):
            close(s)
        elif hasattr(s, 'close'):
            s.close()


def n_of(state):
    "How many environments a policy is asked for, whatever the states are"
    while not isinstance(state, torch.Tensor):
        state = state[next(iter(state))] if isinstance(state, dict) else state[0]
    return len(state)


def zeros(state):
    return torch.zeros(n_of(state), dtype=torch.int64)


def well_counted(rows):
    "Do the counters of one environment's rows tell one unbroken story? What is wrong, or None"
    episode, step, total = 1, 0, 0.0
    for i, r in enumerate(rows):
        step, total = step + 1, total + float(r['reward'])
        if (r['episode_n'], r['step_n']) != (episode, step):
            return f'row {i}: episode {r["episode_n"]}, step {r["step_n"]}, not {episode}, {step}'
        if not np.isclose(r['total_reward'], total, rtol=1e-6):
            return f'row {i}: total_reward {r["total_reward"]}, not {total}'
        if r['terminated'] or r['truncated']:
            episode, step, total = episode + 1, 0, 0.0


def chained(rows):
    "Within an episode, is every next_state the next row's state?"
    inside = ~(rows['terminated'] | rows['truncated'])[:-1]
    after, before = leaves(rows['next_state'][:-1][inside]), leaves(rows['state'][1:][inside])
    return all(np.array_equal(a, b) for (_, a), (_, b) in zip(after, before))


class Witness(gym.Env):
    "Observations tell their episode, their step and the last action, so each row can be checked"

    def __init__(self, *lengths, in_place=False, action_space=None, rude=False):
        self.lengths, self.in_place, self.rude = (
            lengths,
            in_place,
            rude,
        )  # rude: overwrites the action it is given
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = action_space or spaces.Discrete(7)
        self.episode, self.buffer = 0, np.zeros(3, np.float32)

    def _obs(self, heard):
        new = np.array([self.episode, self.t, heard], np.float32)
        if not self.in_place:
            return new
        self.buffer[:] = new
        return self.buffer

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs(-1), {}

    def step(self, action):
        self.t += 1
        heard = float(np.asarray(action).ravel()[0])
        if self.rude:
            action *= 0
        return (
            self._obs(heard),
            self.t / 4,
            self.t >= self.lengths[(self.episode - 1) % len(self.lengths)],
            False,
            {},
        )


def witnessed(rows):
    "Rows of a Witness that are not what it saw"
    s, t, e = rows['state'], rows['next_state'], rows['episode_n']
    action = rows['action'].reshape(len(rows), -1)[:, 0]
    good = (
        (s[:, 0] == e)
        & (t[:, 0] == e)
        & (s[:, 1] == rows['step_n'] - 1)
        & (t[:, 1] == rows['step_n'])
        & (t[:, 2] == action)
    )
    return int((~good).sum())


class Nested(gym.Env):
    "The same with nested spaces on both sides: Dict of Tuple of Dict, scalars included"

    def __init__(self, *lengths):
        self.lengths, self.episode = lengths, 0
        self.observation_space = spaces.Dict(
            at=spaces.Box(-99, 99, (2,), np.float32),
            deep=spaces.Tuple(
                [
                    spaces.Discrete(99),
                    spaces.Dict(z=spaces.Box(0, 99, (), np.float64), bits=spaces.MultiBinary(3)),
                ]
            ),
        )
        self.action_space = spaces.Dict(
            go=spaces.Discrete(3, start=-1),
            to=spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.MultiDiscrete([2, 5])]),
        )

    def _obs(self, z=0.0, bits=(0, 0, 0)):
        return dict(
            at=np.array([self.episode, self.t], np.float32),
            deep=(np.int64(self.t), dict(z=np.array(z), bits=np.array(bits, np.int8))),
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        done = self.t >= self.lengths[(self.episode - 1) % len(self.lengths)]
        return (
            self._obs(action['to'][0][1] + 10, [action['go'] == g for g in (-1, 0, 1)]),
            float(action['to'][1][1]),
            False,
            done,
            {},
        )


class Remember:
    "A recurrent policy whose hidden state counts its calls in the episode and sums what it saw"

    def initial_hidden(self, n):
        return torch.zeros(n), dict(saw=torch.zeros(n, 2))

    def __call__(self, state, hidden):
        calls, saw = hidden[0], hidden[1]['saw']
        seen = (
            state.double().reshape(len(state), -1)[:, :1].float()
            if isinstance(state, torch.Tensor)
            else torch.ones(n_of(state), 1)
        )
        return torch.zeros(n_of(state), dtype=torch.int64), (calls + 1, dict(saw=saw + seen))


def numbered(n, first=0, env=0):
    "A block of rows, one long episode, whose reward is the row's number"
    rows = np.zeros(n, step_dtype(spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3)))
    rows['reward'] = rows['state'][:, 0] = np.arange(first, first + n)
    rows['next_state'][:, 0], rows['step_n'], rows['episode_n'], rows['env_id'] = (
        rows['reward'] + 1,
        rows['reward'] + 1,
        1,
        env,
    )
    return Steps(rows)


def with_columns(steps, **columns):
    "The same rows with more columns"
    rows = np.zeros(
        steps.shape,
        extend_dtype(steps.dtype, **{n: (a.dtype, a.shape[1:]) for n, a in columns.items()}),
    )
    for n in steps.dtype.names:
        rows[n] = steps.rows[n]
    for n, a in columns.items():
        rows[n] = a
    return Steps(rows)


def elsewhere(steps):
    "The block as a tensor of bytes, as a device would hold it, but in main memory"
    there = steps._like(steps._bytes().clone())
    if isinstance(steps, Sequences):
        return Sequences(there, elsewhere(each_of(steps)), burn_in_of(steps))
    return there


class Queue:
    "A source that gives each block once"

    def __init__(self):
        self.blocks = []

    def __iter__(self):
        while self.blocks:
            yield self.blocks.pop(0)


def in_blocks(*sizes):
    "Numbered rows in blocks of these sizes"
    ends = np.cumsum(sizes)
    return [numbered(n, end - n) for n, end in zip(sizes, ends)]
