"""Environments that continue exactly from a checkpoint, or begin a new episode with a warning."""

import warnings
from collections import deque
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from fastrl_replay.all import GymStepper
from fastrl_replay.testing import through_file

PLAIN = (
    'CartPole-v1 Pendulum-v1 Acrobot-v1 MountainCar-v0 MountainCarContinuous-v0 '
    'Taxi-v4 FrozenLake-v1 CliffWalking-v1 Blackjack-v1'
).split()


def pong(**kwargs):
    ale_py = pytest.importorskip('ale_py')
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    game = gym.make('ALE/Pong-v5', frameskip=1, **{'repeat_action_probability': 0.0, **kwargs})
    return FrameStackObservation(AtariPreprocessing(game, noop_max=5, screen_size=36), 4)


def mujoco(name):
    pytest.importorskip('mujoco')
    return gym.make(name)


def wrapped():
    "Statistics, functions, spaces that were made by a wrapper"
    env = gym.wrappers.RecordEpisodeStatistics(gym.make('Pendulum-v1', max_episode_steps=25))
    env = gym.wrappers.RescaleAction(gym.wrappers.FlattenObservation(env), -1, 1)
    return gym.wrappers.TransformReward(FrameStackObservation(env, 3), lambda r: r / 8)


EXACT = {
    **{name: lambda name=name: gym.make(name) for name in PLAIN},
    'HalfCheetah-v5': lambda: mujoco('HalfCheetah-v5'),
    'Ant-v5': lambda: mujoco('Ant-v5'),
    'ALE/Pong-v5': pong,
    'wrapped': wrapped,
    'vector': lambda: gym.make_vec('CartPole-v1', 3, vectorization_mode='sync'),
}


def rows(stepper, n):
    return [steps.rows for steps in islice(stepper, n)]


@pytest.mark.parametrize('name', EXACT)
def test_an_environment_continues_exactly(name):
    "No warning, the rows of the uninterrupted stepper, and a state that use does not change"
    first, other, third = (GymStepper(EXACT[name](), seed=3) for _ in range(3))
    rows(first, 30)
    state = through_file(first.state_dict())
    expected = rows(first, 60)
    for stepper in other, third:
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            stepper.load_state_dict(state)
        got = rows(stepper, 60)
        assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


class Counts(gym.Env):
    observation_space, action_space = (
        gym.spaces.Box(-99, 99, (1,), np.float32),
        gym.spaces.Discrete(2),
    )

    def __init__(self):
        self.dice, self.last = np.random.default_rng(0), deque([0.0], 3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0.0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        self.last.append(self.t + self.dice.random())
        return np.float32([sum(self.last)]), 1.0, False, False, {}


class Handle:
    "The state of a simulator"

    t = 0.0


class Simulated(Counts):
    def __init__(self):
        super().__init__()
        self.handle = Handle()


class OwnState(Simulated):
    def state_dict(self):
        return dict(t=self.t, last=self.last, dice=self.dice)

    def load_state_dict(self, state):
        vars(self).update(state)


@pytest.mark.parametrize('kind', [Counts, OwnState])
def test_plain_data_and_own_states_continue_exactly(kind):
    a, b = (GymStepper(kind(), seed=0) for _ in 'ab')
    rows(a, 5)
    b.load_state_dict(through_file(a.state_dict()))
    expected = rows(a, 5)
    assert all(np.array_equal(x, y) for x, y in zip(rows(b, 5), expected, strict=True))


@pytest.mark.parametrize('wrap', [lambda env: env, lambda env: gym.wrappers.TimeLimit(env, 9)])
def test_others_begin_a_new_episode_with_a_warning_that_names_what_they_hold(wrap):
    a, b = (GymStepper(wrap(Simulated()), seed=0) for _ in 'ab')
    rows(a, 5)
    with pytest.warns(UserWarning, match='handle: Handle'):
        b.load_state_dict(through_file(a.state_dict()))
    row = rows(b, 1)[0][0]
    assert (row['episode_n'], row['step_n']) == (2, 1)


def test_a_game_that_delays_actions_begins_anew():
    "The emulator does not give the action that it repeats"
    a, b = (GymStepper(pong(repeat_action_probability=0.25), seed=0) for _ in 'ab')
    rows(a, 5)
    with pytest.warns(UserWarning, match='repeat_action_probability'):
        b.load_state_dict(through_file(a.state_dict()))


def test_a_state_of_another_environment_is_refused():
    a, b = GymStepper(Counts(), seed=0), GymStepper(OwnState(), seed=0)
    rows(a, 5)
    b.load_state_dict(through_file(a.state_dict()))
    with pytest.raises(ValueError, match='Counts.*OwnState'):
        rows(b, 1)
