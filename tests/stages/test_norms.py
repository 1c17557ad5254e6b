"""Normalization, against the statistics of Stable-Baselines3 on the same stream.

Saved, sent to workers, shared with target networks, frozen in evaluations."""

import copy
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.learning.settings import recipe
from fastrl_replay.app.recipes import Agent, play_episodes
from fastrl_replay.learning.settings import SettingsError
from fastrl_replay.testing import same, through_file
from scripted import numbered
from strategies import cases


def pendulum():
    return gym.wrappers.TimeLimit(gym.make('Pendulum-v1').unwrapped, 37)


def torque(obs):
    return np.clip(2 * np.asarray(obs)[..., 1:2], -2, 2).astype(np.float32)


BOX = spaces.Box(-np.inf, np.inf, (2,))


@pytest.mark.parametrize('envs', [1, 3])
def test_statistics_are_those_of_vecnormalize_on_the_same_stream(envs):
    "Means, variances, the variance of returns, and what they make of states and rewards, to 1e-6"
    vec_env = pytest.importorskip('stable_baselines3.common.vec_env')
    venv = vec_env.VecNormalize(vec_env.DummyVecEnv([pendulum] * envs), gamma=0.9)
    states, rewards = StateNorm(pendulum().observation_space), RewardNorm(gamma=0.9)
    blocks = GymStepper([pendulum] * envs, torque, seed=3).update_norms(states, rewards)
    venv.seed(3)
    obs = venv.reset() is not None and venv.get_original_obs()
    for i, block in enumerate(islice(blocks, 200)):
        np.testing.assert_array_equal(block.rows['state'], obs)
        m = states.moments[0]
        for ours, theirs in (
            (m.mean, venv.obs_rms.mean),
            (m.var, venv.obs_rms.var),
            (m.count, venv.obs_rms.count),
        ):  # of all states up to this one
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(
            states(block.state), venv.normalize_obs(obs), rtol=1e-5, atol=1e-6
        )
        venv.step(torque(obs))
        obs = venv.get_original_obs()
        r = rewards.moments
        for ours, theirs in (
            (r.mean, venv.ret_rms.mean),
            (r.var, venv.ret_rms.var),
            (r.count, venv.ret_rms.count),
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(
            rewards(block.reward),
            venv.normalize_reward(venv.get_original_reward()),
            rtol=1e-5,
            atol=1e-6,
        )
    assert i == 199 and sum(block.rows['episode_n'] > 5) == envs


@cases(60)
@given(st.lists(st.lists(st.integers(-50, 50), max_size=7), min_size=1, max_size=9))
def test_blocks_of_any_size_give_the_same_statistics(blocks):
    "However a stream is cut"
    norm, whole = StateNorm(spaces.Box(-99, 99, (1,))), StateNorm(spaces.Box(-99, 99, (1,)))
    for b in blocks:
        norm.update(np.array(b, np.float32).reshape(-1, 1))
    x = np.array(sum(blocks, []), np.float32).reshape(-1, 1)
    whole.update(x)
    for a, b in zip(norm.buffers(), whole.buffers()):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-7)
    if len(x):
        np.testing.assert_allclose(norm.moments[0].var, x.var(0), rtol=1e-3, atol=0.3)


def test_flags_are_left_as_they_are():
    space = spaces.Dict(a=spaces.Box(-9, 9, (2,), np.float32), b=spaces.Box(0, 1, (3,), bool))
    norm = StateNorm(space)
    norm.update(dict(a=np.ones((4, 2), np.float32), b=np.ones((4, 3), bool)))
    states = dict(a=torch.ones(4, 2), b=torch.ones(4, 3, dtype=torch.bool))
    assert torch.equal(norm(states)['b'], states['b'])
    with pytest.raises(ValueError, match='nothing to normalize'):
        StateNorm(space['b'])


def test_a_block_that_is_refused_counts_nothing():
    "NaN in states or rewards is named, and statistics stay"
    stage = Items([]).update_norms(StateNorm(BOX), RewardNorm())
    good, bad, worse = (scripted_steps([script(3)], 1)[0].copy() for _ in range(3))
    bad.rows['state'][0, 1], worse.rows['reward'] = np.nan, np.inf
    stage.update(good)
    before = through_file(stage.state_dict())
    for block, column in (bad, 'state'), (worse, 'reward'):
        with pytest.raises(
            BlockError, match=f"row 0 of the block is not finite in column '{column}'"
        ):
            stage.update(block)
    assert same(through_file(stage.state_dict()), before)


def test_a_state_of_other_statistics_is_refused():
    def stage(*norms):
        return Items([]).update_norms(*norms)

    state = stage(StateNorm(BOX), RewardNorm()).state_dict()
    for other in stage(StateNorm(spaces.Box(-1, 1, (3,))), RewardNorm()), stage(StateNorm(BOX)):
        with pytest.raises(StateError):
            other.load_state_dict(state)


def sac_chain(n_step=1):
    env = pendulum()
    states, rewards = StateNorm(env.observation_space), RewardNorm(0.99)
    torch.manual_seed(0)
    actor = Normalized(states, actor_net(env.observation_space, env.action_space, (8,), True))
    critics = Normalized(states, Critics(env.observation_space, env.action_space, (8,)))
    steps = GymStepper(
        [pendulum] * 2, SquashedGaussian(actor, env.action_space, seed=1), seed=0
    ).update_norms(states, rewards)
    if n_step > 1:
        steps = steps.n_step(n_step, 0.99)
    return (
        steps.prioritized_replay(bs=16, max_sz=500, warmup=20, seed=2)
        .scale_rewards(rewards)
        .sac(actor, critics, env.action_space, seed=4)
    )


@pytest.mark.parametrize('n_step', [1, 3])
def test_a_chain_goes_on_exactly_with_its_statistics(n_step):
    "Records after a restart are those of the chain that went on"
    a, b = sac_chain(n_step), sac_chain(n_step)
    it = iter(a)
    for _ in islice(it, 60):
        pass
    b.load_state_dict(through_file(a.state_dict()))
    assert list(islice(it, 30)) == list(islice(b, 30))


def test_target_networks_have_the_statistics_of_their_models():
    "The very same layer, also in a copy"
    a = sac_chain()
    for _ in islice(a, 30):
        pass
    for learner in a, copy.deepcopy(a):
        assert learner.target.norm is learner.critics.norm is learner.actor.norm
        assert learner.target.net is not learner.critics.net


def test_counting_in_a_worker_is_refused():
    "Its statistics would stay there"
    with (
        GymStepper('CartPole-v1', seed=0)
        .update_norms(StateNorm(gym.make('CartPole-v1').observation_space))
        .parallel(1, method='fork') as pipe
    ):
        with pytest.raises(Exception, match='UpdateNorms: its statistics would stay in a worker'):
            next(iter(pipe))


ON = dict(normalize_states=True, normalize_rewards=True)
SMALL = {
    'cartpole': dict(steps=600, warmup=100, train_every=64),
    'pendulum-sac': dict(steps=150, warmup=50),
    'cartpole-r2d2': dict(steps=600, warmup=300),
}


@pytest.mark.parametrize('name', SMALL)
def test_recipes_have_normalization_as_settings(name):
    "Statistics of each step, the same after a restart, and none of evaluations"
    a, b = (Agent(recipe(name, **SMALL[name], **ON).settings) for _ in range(2))
    it = iter(a.pipe)
    for _ in islice(it, 20):
        pass
    norm = next(m for m in a.model.modules() if isinstance(m, StateNorm))
    assert int(norm.moments[0].count) == a.journal.steps == int(a.rewards.moments.count)
    b.load_state_dict(through_file(a.state_dict()))
    count = norm.moments[0].count.clone()
    assert play_episodes(a, 2)[0].tolist() == play_episodes(b, 2)[0].tolist()
    assert norm.moments[0].count == count
    assert list(islice(it, 10)) == list(islice(b.pipe, 10))


@pytest.mark.parametrize('change', [dict(shards=2), dict(data='recordings')])
def test_recipes_refuse_normalization_where_steps_are_elsewhere(change):
    with pytest.raises(SettingsError, match="setting 'normalize_states'"):
        Agent(recipe('cartpole', normalize_states=True, **change).settings)


def reward_rows(envs, ended):
    block = numbered(len(envs))
    block.rows['env_id'], block.rows['terminated'] = envs, ended
    block.rows['reward'] = 1 + np.arange(len(envs))
    block.rows['step_n'] = 2
    return block.rows


def test_returns_of_environments_with_large_numbers_take_no_more_room():
    "The statistics are those of small numbers, also after a restart"
    large, small = RewardNorm(0.5), RewardNorm(0.5)
    last = 2**24 - 1
    for i in range(4):
        large.update(reward_rows([last, i + 7, 3, last], [False, True, False, False]))
        small.update(reward_rows([2, 1, 0, 2], [False, True, False, False]))
    stages = [Items([]).update_norms(rewards=r) for r in (large, RewardNorm(0.5))]
    stages[1].load_state_dict(through_file(stages[0].state_dict()))
    large.update(reward_rows([last, 3, 5], True))
    stages[1].rewards.update(reward_rows([last, 3, 5], True))
    small.update(reward_rows([2, 0, 4], True))
    std = small.moments.std(0)
    assert large.moments.std(0) == stages[1].rewards.moments.std(0) == std
    assert sum(a.nbytes for a in vars(large).values() if isinstance(a, np.ndarray)) < 200
