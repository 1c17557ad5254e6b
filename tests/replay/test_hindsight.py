"""HindsightReplay, against a naive reference that keeps whole episodes.

Distributions, checkpoints, disk, frames, priorities, what is refused."""

import pickle

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from scipy.stats import chisquare

from fastrl_replay.all import *
from fastrl_replay.envs import bitflip  # noqa: F401 (registers the game)
from fastrl_replay.learning.settings import recipe
from fastrl_replay.app.recipes import Agent, make_env, play_episodes
from fastrl_replay.pipe import WorkerInfo
from fastrl_replay.replay.hindsight import STRATEGIES
from fastrl_replay.testing import same, through_file
from scripted import everything, needs_modes, take
from strategies import cases


def goal_space(goal=spaces.Box(-np.inf, np.inf, (1,), np.float64), **more):
    return spaces.Dict(
        **{
            **dict(achieved_goal=goal, desired_goal=goal, observation=spaces.Box(-9, 9, (2,))),
            **more,
        }
    )


def dtype(**kw):
    return step_dtype(goal_space(**kw), spaces.Discrete(3))


class Judge:
    "Rewards and ends that differ for each pair of goals, so swapped arguments are noticed"

    def compute_reward(self, achieved, desired, info):
        return 3 * achieved[..., 0] - desired[..., 0]

    def compute_terminated(self, achieved, desired, info):
        return (achieved[..., 0] - desired[..., 0]) % 3 == 1


JUDGE = Judge()


def made(**kw):
    return HindsightReplay(**{**dict(bs=1, max_sz=30, seed=0, share=1.0, reward=JUDGE), **kw})


class Episodes:
    "Environments that give rows, and the keys of each episode; what a row achieves is its key"

    def __init__(self, envs):
        self.n, self.key, self.of_env, self.episode, self.all = envs, 0, {}, {}, {}

    def block(
        self, story
    ):  # (env, how it ends) for each row; 'left': it begins anew without an end
        rows = np.zeros(len(story), dtype())
        for row, (env, end) in zip(rows, story):
            if end == 'left' or env not in self.of_env:
                self.of_env[env], self.episode[env] = [], self.episode.get(env, 0) + 1
            keys = self.of_env[env]
            keys.append(self.key)
            self.all[self.key] = keys
            row['env_id'], row['episode_n'], row['step_n'] = env, self.episode[env], len(keys)
            row['terminated'], row['truncated'] = end == 'terminated', end == 'truncated'
            row['next_state']['achieved_goal'] = self.key
            row['state']['achieved_goal'] = keys[-2] if len(keys) > 1 else -1
            row['next_state']['desired_goal'] = row['state']['desired_goal'] = -5 - env
            row['reward'] = JUDGE.compute_reward(
                row['next_state']['achieved_goal'], row['state']['desired_goal'], {}
            )
            if end in ('terminated', 'truncated'):
                del self.of_env[env]
            self.key += 1
        return Steps(rows)

    def goals(self, key, strategy, oldest):  # the keys whose goals it may get
        keys = self.all[key]
        if strategy == 'final':
            return keys[-1:]
        return [k for k in keys if k >= (key if strategy == 'future' else oldest)]


def check(batch, stored, episodes, strategy, oldest):
    "Is this batch what the reference allows?"
    for row, old in zip(batch.rows, stored.rows):
        goal = row['state']['desired_goal'][0]
        assert row['next_state']['desired_goal'][0] == goal
        assert goal in episodes.goals(int(row['index']), strategy, oldest), (row['index'], goal)
        achieved, desired = row['next_state']['achieved_goal'], row['state']['desired_goal']
        assert row['reward'] == np.float32(JUDGE.compute_reward(achieved, desired, {}))
        assert row['terminated'] == JUDGE.compute_terminated(achieved, desired, {})
        for n in 'action', 'step_n', 'total_reward', 'env_id', 'truncated':
            assert row[n] == old[n]
        assert achieved == old['next_state']['achieved_goal'] == row['index']


rows = st.tuples(
    st.integers(0, 3), st.sampled_from([None] * 8 + ['terminated', 'truncated', 'left'])
)
events = st.lists(rows, min_size=1, max_size=12) | st.sampled_from(['draw', 'draw', 'save'])


@cases(150)
@given(
    st.lists(events, min_size=3, max_size=40),
    st.sampled_from(STRATEGIES),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_any_story_agrees_with_whole_episodes(story, strategy, max_sz, seed):
    "Running, broken off, truncated, overwritten episodes; drawn at any time"
    kw = dict(strategy=strategy, max_sz=max_sz, seed=seed)
    replay, episodes = made(**kw), Episodes(4)
    for event in [*story, 'draw']:
        if event == 'draw' and len(replay):
            n = len(replay)
            check(
                b := replay.sample(n),
                replay.memory.take(b.index),
                episodes,
                strategy,
                replay.memory.oldest,
            )
        elif event == 'save' and len(replay):
            twin = made(**kw)
            twin.load_state_dict(everything(replay))
            assert same(twin.sample(), replay.sample())
            replay = twin
        elif event not in ('draw', 'save'):
            replay.add(episodes.block(event))


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('ragged', [False, True])
def test_every_goal_is_as_likely(strategy, ragged):
    "Chi-square for rows in even and in uneven distances, some of which are gone"
    episodes, rng = Episodes(3), np.random.default_rng(0)
    replay = made(strategy=strategy, max_sz=80)
    for _ in range(60):
        replay.add(
            episodes.block([(e, None) for e in range(3) if not ragged or rng.random() < 0.6])
        )
    counts = {}
    for _ in range(1000):
        batch = replay.sample(80)
        goals = batch.state['desired_goal'][:, 0].tolist()
        for key, goal in zip(batch.index.tolist(), goals):
            counts.setdefault(key, []).append(goal)
    oldest = replay.memory.oldest
    for key in oldest, oldest + 30, replay.memory.inserted - 9:
        allowed = episodes.goals(key, strategy, oldest)
        found = [counts[key].count(k) for k in allowed]
        assert sum(found) == len(counts[key])
        if len(found) > 1:
            assert chisquare(found).pvalue > 1e-4


# ---- who says what a goal is worth ----


@pytest.mark.parametrize('vector', [False, pytest.param(True, marks=needs_modes)])
def test_the_source_is_asked(vector):
    name = 'fastrl_replay/BitFlip-v0'
    env = gym.make_vec(name, 3, vectorization_mode='sync') if vector else name
    with GymStepper(env, seed=0).hindsight_replay(bs=30, max_sz=500, warmup=60, seed=0) as pipe:
        for batch in take(pipe, 3):
            reached = (batch.next_state['achieved_goal'] == batch.next_state['desired_goal']).all(1)
            assert torch.equal(batch.terminated, reached)
            assert torch.equal(batch.reward, reached.float() - 1)
            assert reached.any()


def test_other_processes_are_not_asked():
    pipe = (
        GymStepper('fastrl_replay/BitFlip-v0', seed=0)
        .parallel(1, method='fork')
        .hindsight_replay(bs=2, max_sz=50)
    )
    try:
        with pytest.raises(ArgumentError, match='needs a stage above that steps environments'):
            next(iter(pipe))
    finally:
        pipe.close()


def test_a_function_leaves_ends_as_they_are():
    replay, episodes = made(reward=JUDGE.compute_reward, bs=6), Episodes(1)
    replay.add(episodes.block([(0, None)] * 4 + [(0, 'terminated'), (0, 'truncated')]))
    batch = replay.sample()
    assert [int(i) for i in batch.index[batch.terminated]] == [4]


def test_rewards_that_another_wrapper_has_changed():
    env = gym.wrappers.TransformReward(gym.make('fastrl_replay/BitFlip-v0'), lambda r: r / 10)
    with pytest.raises(
        ArgumentError,
        match='compute_reward disagrees with the reward of .* got -1; expected -0.1'
        '.*wrappers that change rewards',
    ):
        take(GymStepper(env, seed=0).hindsight_replay(bs=8, max_sz=99, warmup=8), 1)


@pytest.mark.parametrize(
    'wrong, words',
    [
        (lambda a, d, i: 1.0, 'disagrees with the reward'),
        (lambda a, d, i: np.full(len(a), np.nan), 'expected a finite number'),
        (lambda a, d, i: np.array(['x'] * len(a)), '<U1'),
    ],
)
def test_what_is_no_reward(wrong, words):
    replay = made(reward=wrong, bs=4)
    replay.add(Episodes(1).block([(0, None)] * 9))
    with pytest.raises(ArgumentError, match=words):
        replay.sample()


# ---- with the other parts ----


def test_weights_are_those_of_the_sampler():
    sampler = Proportional(100, alpha=1.0, eps=0.0, seed=0)
    replay = made(bs=50, sampler=sampler, max_sz=100, beta=1.0)
    keys = replay.add(Episodes(1).block([(0, None)] * 100))
    replay.update_priorities(keys, np.where(keys < 10, 9.0, 1.0))
    batch = replay.sample(100)
    assert torch.allclose(batch.weight, torch.where(batch.index < 10, 1 / 9, 1.0))


def test_a_checkpoint_of_other_settings():
    a = made()
    a.add(Episodes(1).block([(0, None)] * 4))
    for kw in dict(share=0.5), dict(strategy='final'):
        b = made(**kw)
        with pytest.raises(StateError, match='settings'):
            b.load_state_dict(everything(a))
        assert len(b) == 0


def story(n, envs=3):
    return [(i % envs, 'truncated' if i % 7 == 6 else None) for i in range(n)]


def on_disk(path, **kw):
    return made(bs=8, max_sz=20, strategy='episode', store=Rows(path / 'm', **kw))


def test_goals_that_another_process_overwrites_are_chosen_again(tmp_path):
    "While a batch is made, the writer takes the slots of the rows whose goals were chosen"
    episodes, writer = Episodes(1), on_disk(tmp_path)
    writer.add(episodes.block(story(20, 1)))
    with on_disk(tmp_path, mode='r') as reader:
        reader.sample()
        choose = reader.view.choose

        def late(keys):
            chosen = choose(keys)
            reader.view.choose = choose
            writer.add(episodes.block(story(16, 1)))
            return chosen

        for _ in range(3):
            reader.view.choose = late
            got = reader.sample()
            check(got, reader.memory.take(got.index), episodes, 'episode', reader.memory.oldest)
    writer.close()


@pytest.mark.parametrize('kw', [dict(replacement=True), dict(sampler=Uniform(0, True))])
def test_draws_with_replacement_need_one_row(kw):
    "A batch may have more rows than the memory, if the argument or the sampler allows it"
    for replay in made(bs=50, max_sz=30, **kw), ExperienceReplay(bs=50, max_sz=30, **kw):
        with pytest.raises(ValueError, match='a batch needs 1 rows, and the buffer has 0 rows'):
            replay.sample()
        replay.add(Episodes(1).block([(0, None)] * 3))
        assert set(replay.sample().index.tolist()) == {0, 1, 2}


# ---- recipes ----


def flipped(bits, **changes):
    "The share of 100 episodes in which the goal is reached"
    settings = recipe('bitflip', env=f'fastrl_replay/BitFlip-v0(bits={bits})', **changes).settings
    a = Agent(settings)
    for _ in a.pipe:
        pass
    return (play_episodes(a, 100, 7)[0] > -bits).mean()


TINY = dict(
    env='fastrl_replay/BitFlip-v0(bits=3)', steps=400, warmup=50, network=8, bs=8, max_sz=300
)


def test_the_recipe_trains_and_goes_on():
    "Saved in the middle: the same records"
    a, b = (Agent(recipe('bitflip', **TINY).settings) for _ in 'ab')
    it = iter(a.pipe)
    for _ in range(20):
        next(it)
    b.load_state_dict(through_file(a.state_dict()))
    assert list(it) == list(b.pipe)


@pytest.mark.slow
def test_bitflip_learns_with_hindsight_only():
    small = dict(seed=0, steps=16_000, eps_steps=16_000, network=128, bs=128)
    assert flipped(13, **small) >= 0.8
    assert flipped(13, memory='uniform', **small) <= 0.2


def test_in_a_mixture():
    "Its part of a batch has goals in hindsight, and the environment's reward function is found"
    from fastrl_replay.replay.mixture import Mixture

    def bits():
        return GymStepper(['fastrl_replay/BitFlip-v0'] * 2, seed=0)

    online = bits().hindsight_replay(bs=32, max_sz=500, warmup=200, seed=0, share=1.0)
    demos = HindsightReplay(
        bs=8, max_sz=500, seed=1, share=0.0, reward=make_env(recipe('bitflip').settings)
    )
    for block in bits().header(60):
        demos.add(block)
    mixture = Mixture(dict(online=online, demos=demos), dict(online=0.75, demos=0.25), bs=32)
    batch = next(iter(mixture))
    reached = (batch.next_state['achieved_goal'] == batch.next_state['desired_goal']).all(1)
    assert [(batch.replay == i).sum() for i in range(2)] == [24, 8]
    assert torch.equal(batch.terminated, reached)
    assert reached[batch.replay == 0].sum() > reached[batch.replay == 1].sum()


class InOrder(Uniform):
    "Draws the first rows"

    def sample(self, n):
        return np.arange(n), np.full(n, 1 / n)


@pytest.mark.parametrize('seed, filled', [(0, False), (0, True), (None, True)])
def test_shards_choose_different_goals(seed, filled):
    "Of the same rows, whether these come before or after the workers start"
    goals = []
    whole = made(seed=seed, max_sz=50, sampler=InOrder())
    block = Episodes(1).block([(0, None)] * 39 + [(0, 'terminated')])
    if filled:
        whole.add(block)
    for rank in 0, 1:
        shard = pickle.loads(pickle.dumps(whole))
        shard.in_worker(WorkerInfo(rank, 2))
        if not filled:
            shard.add(block)
        batch = shard.sample(20)
        goals.append(batch.state['desired_goal'].flatten().tolist())
    assert goals[0] != goals[1]
