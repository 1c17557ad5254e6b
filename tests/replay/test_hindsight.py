"""HindsightReplay: against a naive reference that keeps whole episodes; distributions, checkpoints, disk, frames, priorities, what is refused."""

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from scipy.stats import chisquare

from fastrl_replay.all import *
from fastrl_replay.envs import bitflip  # noqa: F401 (registers the game)
from fastrl_replay.steps.row_dtypes import extend_dtype
from fastrl_replay.learning.registry import SettingsError
from fastrl_replay.app.recipe_settings import recipe
from fastrl_replay.app.recipes import Agent, make_env
from fastrl_replay.replay.hindsight import STRATEGIES, episode_end, episode_start, row_at
from fastrl_replay.testing import same, through_file
from scripted import everything, take
from strategies import bits, cases


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
    "Rewards and ends that are different for each pair of goals; the two arguments can't be mistaken for each other"

    def compute_reward(self, achieved, desired, info):
        return 3 * achieved[..., 0] - desired[..., 0]

    def compute_terminated(self, achieved, desired, info):
        return (achieved[..., 0] - desired[..., 0]) % 3 == 1


JUDGE = Judge()


def made(**kw):
    return HindsightReplay(**{**dict(bs=1, max_sz=30, seed=0, share=1.0, reward=JUDGE), **kw})


class Episodes:
    "Environments that give rows, and a list of the keys of each episode; what a row achieves is its key"

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
    "Is this batch what the reference allows? The keys whose goals were taken"
    b, was, taken = batch.rows, stored.rows, []
    for row, old in zip(b, was):
        goal = row['state']['desired_goal'][0]
        assert row['next_state']['desired_goal'][0] == goal and row['truncated'] == old['truncated']
        assert goal in episodes.goals(int(row['index']), strategy, oldest), (row['index'], goal)
        achieved, desired = row['next_state']['achieved_goal'], row['state']['desired_goal']
        assert row['reward'] == np.float32(JUDGE.compute_reward(achieved, desired, {}))
        assert row['terminated'] == JUDGE.compute_terminated(achieved, desired, {})
        for n in 'action', 'step_n', 'total_reward', 'env_id':
            assert row[n] == old[n]
        assert (
            row['next_state']['achieved_goal'] == old['next_state']['achieved_goal'] == row['index']
        )
        taken.append(int(goal))
    return taken


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
    for _ in range(40):
        replay.add(
            episodes.block([(e, None) for e in range(3) if not ragged or rng.random() < 0.6])
        )
    m, view = replay.memory, replay.view
    replay.sample(1)
    for key in m.oldest, m.oldest + 30, m.inserted - 9:
        allowed = episodes.goals(key, strategy, m.oldest)
        batch = view.batch(np.full(4000, key), np.ones(4000))
        counts = [int((batch.rows['state']['desired_goal'] == k).sum()) for k in allowed]
        assert sum(counts) == 4000
        if len(counts) > 1:
            assert chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize(
    'n', [1, 2, 15, 16, 17, 1000, pytest.param(100_000, marks=pytest.mark.slow)]
)
def test_any_place_is_found_in_few_jumps(n):
    "Each row from each end, beside the list; the number of jumps grows with the logarithm"
    episodes, replay = Episodes(2), made(max_sz=2 * n)
    replay.add(episodes.block([(i % 2, None) for i in range(2 * n)]))
    replay.sample()
    table, keys = replay.view._table, np.arange(0, 2 * n, 2)
    assert all(episode_end(k, table) == keys[-1] for k in keys[:: max(1, n // 500)])
    for place in range(0, n, max(1, n // 500)):
        assert row_at(place, keys[-1], 0, table) == keys[place]
    assert episode_start(keys[-1], 0, table) == 0

    def jumps(place):
        key, count = int(keys[-1]), 0
        while table[key, 0] > place:
            to = key - table[key, 2]
            key, count = to if table[to, 0] >= place else key - table[key, 1], count + 1
        return count

    assert max(jumps(p) for p in range(0, n, max(1, n // 300))) <= 3 * np.log2(n + 1) + 2


def test_what_is_stored_is_left_alone():
    replay, episodes = made(bs=20), Episodes(2)
    keys = replay.add(episodes.block([(0, None), (1, None)] * 10))
    before = bits(replay.memory[:].rows)
    replay.sample()
    assert bits(replay.memory.take(keys).rows) == before


# ---- who says what a goal is worth ----


def flips(n=2, **kw):
    return GymStepper(['fastrl_replay/BitFlip-v0'] * n, seed=0).hindsight_replay(
        **{**dict(bs=32, max_sz=500, seed=0), **kw}
    )


@pytest.mark.parametrize('source', ['id', 'env', 'vector', 'several'])
def test_the_source_is_asked(source):
    name = 'fastrl_replay/BitFlip-v0'
    made = dict(
        id=name,
        env=gym.make(name),
        several=[name] * 3,
        vector=gym.make_vec(name, 3, vectorization_mode='sync'),
    )[source]
    with GymStepper(made, seed=0).hindsight_replay(bs=30, max_sz=500, warmup=60, seed=0) as pipe:
        for batch in take(pipe, 3):
            there = (batch.next_state['achieved_goal'] == batch.next_state['desired_goal']).all(1)
            assert torch.equal(batch.terminated, there) and torch.equal(
                batch.reward, there.float() - 1
            )
            assert there.any()


def test_other_processes_are_not_asked():
    pipe = (
        GymStepper('fastrl_replay/BitFlip-v0', seed=0)
        .parallel(1, method='fork')
        .hindsight_replay(bs=2, max_sz=50)
    )
    try:
        with pytest.raises(ArgumentError, match='environments are stepped in other processes'):
            next(iter(pipe))
    finally:
        pipe.close()


def test_a_function_leaves_ends_as_they_are():
    replay, episodes = made(reward=JUDGE.compute_reward, bs=6), Episodes(1)
    replay.add(episodes.block([(0, None)] * 4 + [(0, 'terminated'), (0, 'truncated')]))
    batch = replay.sample()
    assert [int(i) for i in batch.index[batch.terminated]] == [4]


class RowByRow(Judge):
    def compute_terminated(self, achieved, desired, info):
        return bool(np.sum((achieved - desired) % 3) == 1)


def test_ends_that_are_told_for_one_row_only():
    a, b = (made(reward=judge, bs=20) for judge in (JUDGE, RowByRow()))
    block = Episodes(3).block([(i % 3, None) for i in range(25)])
    for replay in a, b:
        replay.add(block)
    assert same(a.sample(), b.sample())


def test_rewards_that_another_wrapper_has_changed():
    env = gym.wrappers.TransformReward(gym.make('fastrl_replay/BitFlip-v0'), lambda r: r / 10)
    with pytest.raises(
        ArgumentError,
        match='compute_reward gives other rewards than .* got -1; expected -0.1.*wrappers that change rewards',
    ):
        take(GymStepper(env, seed=0).hindsight_replay(bs=8, max_sz=99, warmup=8), 1)


class Bits:
    "BitFlip's rewards for rows that are made here: 0 at the goal, or else -1"

    def compute_reward(self, achieved, desired, info):
        return (achieved[..., 0] == desired[..., 0]) * 1.0 - 1

    def rows(self, n, first, rng, change):
        rows = np.zeros(n, dtype())
        rows['episode_n'], rows['step_n'] = 1, np.arange(first, first + n) + 1
        for s in 'state', 'next_state':
            rows[s]['achieved_goal'][:, 0], rows[s]['desired_goal'][:, 0] = (
                rng.integers(0, 12, n),
                rng.integers(0, 12, n),
            )
        rows['state']['desired_goal'] = rows['next_state']['desired_goal']
        rows['reward'] = change(
            self.compute_reward(
                rows['next_state']['achieved_goal'], rows['next_state']['desired_goal'], {}
            ),
            rng,
        )
        return Steps(rows)


def drawn_for_long(change, times=400, bs=16, store=None, seed=0):
    "Many batches of rows of which one in twelve is a success"
    replay, rng = made(bs=bs, max_sz=2000, reward=Bits(), store=store), np.random.default_rng(seed)
    for i in range(times):
        replay.add(Bits().rows(5 + bs * (i == 0), 5 * i + bs * (i > 0), rng, change))
        replay.sample()
    return replay


@pytest.mark.parametrize('store', [None, Rows(device='cpu')], ids=['main memory', 'device'])
@pytest.mark.parametrize('bs', [1, 16, 256])
def test_a_wrapper_that_changes_only_successes_is_noticed(bs, store):
    "It was not: where most rows of the first batch agreed, nothing was compared any more. It is said at each draw that looks"
    with pytest.raises(
        ArgumentError,
        match='compute_reward gives other rewards than .* %s have; got 0; expected 10'
        % ('(rows|successes)' if bs == 1 else 'successes'),
    ):
        drawn_for_long(lambda r, rng: np.where(r == 0, 10, r), bs=bs, store=store)


def test_a_wrapper_of_successes_is_said_again():
    replay = made(bs=200, max_sz=2000, reward=Bits())
    replay.add(
        Bits().rows(600, 0, np.random.default_rng(0), lambda r, rng: np.where(r == 0, 10, r))
    )
    for _ in range(3):
        with pytest.raises(ArgumentError, match='successes have; got 0; expected 10'):
            replay.sample()


def test_dense_rewards_with_a_bonus_for_arriving():
    "No success is exact here: those nearest to their goals are looked at"

    def dense(achieved, desired, info):
        return -abs(achieved - desired)[:, 0]

    replay, rng = made(bs=64, max_sz=4000, reward=dense), np.random.default_rng(0)
    rows = np.zeros(4000, dtype())
    rows['episode_n'], rows['step_n'] = 1, np.arange(4000) + 1
    for s in 'state', 'next_state':
        rows[s]['achieved_goal'][:, 0], rows[s]['desired_goal'][:, 0] = rng.random(4000), 0.5
    near = dense(rows['next_state']['achieved_goal'], rows['next_state']['desired_goal'], {})
    rows['reward'] = near + 10 * (near > -0.05)
    replay.add(Steps(rows))
    with pytest.raises(ArgumentError, match='successes have'):
        for _ in range(20):
            replay.sample()


@pytest.mark.parametrize('seed', range(8))
@pytest.mark.parametrize('share', [0, 0.1, 0.3])
def test_noisy_rewards_are_no_false_alarm(share, seed):
    "Rewards of which some are replaced at random, those of successes too, are taken as they were; and looking ends"
    replay = drawn_for_long(
        lambda r, rng: np.where(rng.random(len(r)) < share, rng.normal(size=len(r)), r),
        times=120,
        bs=64,
        seed=seed,
    )
    assert replay.view._agreed


def test_looking_ends():
    "Sixteen successes that agree, and the reward function is asked for goals in hindsight only; where none is met, for each 16th batch"
    asked = []

    class Counts(Bits):
        def compute_reward(self, *args):
            asked.append(len(args[0]))
            return Bits.compute_reward(self, *args)

    for goals, most in (12, 1000), (10**9, 2 * (256 + 744 // 16) + 1000):
        replay, rng = made(bs=16, max_sz=500, reward=Counts()), np.random.default_rng(0)
        rows = Bits().rows(500, 0, rng, lambda r, rng: r)
        if goals > 12:
            rows.rows['next_state']['desired_goal'] = rows.rows['state']['desired_goal'] = goals
            rows.rows['reward'] = -1
        replay.add(rows)
        asked.clear()
        for _ in range(1000):
            replay.sample()
        assert len(asked) <= most + 32


@pytest.mark.parametrize(
    'wrong, words',
    [
        (lambda a, d, i: 1.0, r'shape \[\]'),
        (lambda a, d, i: a, r'shape \[4, 1\]'),
        (lambda a, d, i: np.full(len(a), np.nan), 'NaN or infinity'),
        (lambda a, d, i: np.array(['x'] * len(a)), '<U1'),
    ],
)
def test_what_is_no_reward(wrong, words):
    replay = made(reward=wrong, bs=4)
    replay.add(Episodes(1).block([(0, None)] * 9))
    with pytest.raises(ArgumentError, match=words):
        replay.sample()


# ---- what is refused ----


@pytest.mark.parametrize(
    'kw, words',
    [
        (dict(share=1.1), 'share'),
        (dict(share='x'), 'share'),
        (dict(strategy='futre'), "did you mean 'future'"),
        (dict(reward=3), 'reward'),
        (dict(reward=None), 'no environments above'),
        (dict(beta=-1), 'beta'),
    ],
)
def test_arguments_are_checked(kw, words):
    with pytest.raises((ValueError, TypeError), match=words):
        made(**kw)


@pytest.mark.parametrize(
    'kind, words',
    [
        (step_dtype(spaces.Box(-1, 1, (2,)), spaces.Discrete(2)), 'achieved_goal and desired_goal'),
        (
            step_dtype(spaces.Dict(achieved_goal=spaces.Discrete(3)), spaces.Discrete(2)),
            'entries achieved_goal',
        ),
        (dtype(desired_goal=spaces.Box(-1, 1, (1,), np.float32)), 'kinds of the two goals'),
        (dtype(goal=spaces.Dict(x=spaces.Discrete(3))), 'kinds of the two goals'),
        (extend_dtype(dtype(), discount='f4', n='i4'), 'leave .n_step out'),
        (extend_dtype(dtype(), weight='f8'), "column 'weight'"),
    ],
)
def test_rows_without_goals_are_refused_whole(kind, words):
    replay = made()
    with pytest.raises(BlockError, match=words):
        replay.add(Steps(np.zeros(3, kind)))
    assert len(replay) == 0
    replay.add(Episodes(1).block([(0, None)] * 3))


def test_n_step_rows_are_refused():
    with pytest.raises(ArgumentError, match='leave .n_step out'):  # when the chain is made
        GymStepper('fastrl_replay/BitFlip-v0', seed=0).n_step(2, 0.9).hindsight_replay(
            bs=2, max_sz=50
        )


# ---- with the other parts ----


def test_priorities():
    "Rows with large errors are drawn more often, with weights, whatever goals they get"
    episodes = Episodes(1)
    replay = made(
        bs=50, sampler=Proportional(100, alpha=1.0, eps=0.0, seed=0), max_sz=100, beta=1.0
    )
    keys = replay.add(episodes.block([(0, None)] * 100))
    replay.update_priorities(keys, np.where(keys < 10, 9.0, 1.0))
    batch = Steps.cat([replay.sample(100) for _ in range(10)])
    assert abs((batch.index < 10).float().mean() - 0.5) < 0.06
    assert torch.allclose(batch.weight, torch.where(batch.index < 10, 1 / 9, 1.0))
    check(batch, replay.memory.take(batch.index), episodes, 'future', 0)
    batch.update_priorities(torch.where(batch.index < 10, 0.0, 1.0))
    assert (replay.sample(90).index >= 10).all()


def test_a_checkpoint_of_other_settings():
    a = made()
    a.add(Episodes(1).block([(0, None)] * 4))
    for kw in dict(share=0.5), dict(strategy='final'):
        b = made(**kw)
        with pytest.raises(StateError, match='other settings'):
            b.load_state_dict(everything(a))
        assert len(b) == 0
    damaged = everything(a)
    damaged['own']['view']['seed'] = -1
    with pytest.raises(StateError):
        made().load_state_dict(damaged)


def test_on_disk(tmp_path):
    "Opened again, the same goals; drawn by another process's reader; gone back to a checkpoint"

    def on_disk(**kw):
        return made(bs=8, max_sz=20, strategy='episode', store=Rows(tmp_path / 'm', **kw))

    episodes, a = Episodes(3), on_disk(spare=20)
    a.add(episodes.block([(i % 3, 'truncated' if i % 7 == 6 else None) for i in range(33)]))
    a.sample()
    state = everything(a)
    a.add(episodes.block([(0, None)] * 5))
    want = a.sample()
    check(want, a.memory.take(want.index), episodes, 'episode', a.memory.oldest)
    with on_disk(mode='r') as reader:
        got = reader.sample()
        check(got, reader.memory.take(got.index), episodes, 'episode', reader.memory.oldest)
        a.add(episodes.block([(1, None)] * 3))
        got = reader.sample()
        check(got, reader.memory.take(got.index), episodes, 'episode', reader.memory.oldest)
    a.close()
    b = on_disk(spare=20)
    b.load_state_dict(state)
    assert b.memory.inserted == 33
    was, twin = b.sample(), made(bs=8, max_sz=20, strategy='episode')
    episodes = Episodes(3)
    twin.add(episodes.block([(i % 3, 'truncated' if i % 7 == 6 else None) for i in range(33)]))
    twin.sample()
    assert same(was, twin.sample())
    b.close()


def test_goals_that_another_process_overwrites_are_chosen_again(tmp_path):
    "While a batch is made, the writer takes the slots of the rows whose goals were chosen"

    def on_disk(**kw):
        return made(
            bs=8, max_sz=20, share=1.0, strategy='episode', store=Rows(tmp_path / 'm', **kw)
        )

    episodes, writer = Episodes(1), on_disk()
    writer.add(episodes.block([(0, 'truncated' if i % 4 == 3 else None) for i in range(20)]))
    with on_disk(mode='r') as reader:
        reader.sample()
        choose = reader.view.choose

        def late(keys):
            chosen = choose(keys)
            reader.view.choose = choose
            writer.add(
                episodes.block([(0, 'truncated' if i % 4 == 3 else None) for i in range(16)])
            )
            return chosen

        for _ in range(3):
            reader.view.choose = late
            got = reader.sample()
            check(got, reader.memory.take(got.index), episodes, 'episode', reader.memory.oldest)
    writer.close()


def with_pictures(n):
    "Rows of one episode with stacks of two pictures"
    space = goal_space(observation=spaces.Box(0, 255, (2, 8, 8), np.uint8))
    rows, pictures = (
        np.zeros(n, step_dtype(space, spaces.Discrete(2))),
        np.random.default_rng(0).integers(0, 255, (n + 1, 8, 8), np.uint8),
    )
    for i, row in enumerate(rows):
        for s, at in ('state', i), ('next_state', i + 1):
            row[s]['observation'], row[s]['achieved_goal'] = pictures[[max(at - 1, 0), at]], at - 1
    rows['step_n'], rows['episode_n'] = range(1, n + 1), 1
    rows['reward'] = JUDGE.compute_reward(
        rows['next_state']['achieved_goal'], rows['next_state']['desired_goal'], {}
    )
    return Steps(rows)


class TensorRows(Rows):
    "A store of one's own that lies on a device whatever it is told"

    def __init__(self):
        super().__init__(device='cpu')


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('reward', [JUDGE, JUDGE.compute_reward], ids=['ends too', 'rewards only'])
@pytest.mark.parametrize(
    'store',
    [Rows(device='cpu'), Frames(2, device='cpu'), TensorRows()],
    ids=['rows', 'frames', 'own'],
)
def test_on_a_device(store, reward, strategy):
    "The same batches as in main memory, errors come back, checkpoints go either way; was: passed its check, and failed at the first draw"
    kw, plain = (
        dict(bs=8, max_sz=16, strategy=strategy, share=0.7, reward=reward, beta=1.0),
        Frames(2) if isinstance(store, Frames) else None,
    )
    a, b = (
        made(**kw, store=s, sampler=Proportional(16, alpha=1.0, seed=0)) for s in (plain, store)
    )
    rows = with_pictures(25)
    for i in range(0, 25, 5):
        for r in a, b:
            r.add(rows[i : i + 5])
        if i < 5:
            continue
        x, y = a.sample(), b.sample()
        assert y._block is not None and same(x, y.to('cpu')), i
        for r, batch in (a, x), (b, y):
            batch.update_priorities(batch.reward)
    held = b.memory[:].to('cpu')
    assert same(a.memory[:], held)  # what is stored is left alone
    twins = [
        made(**kw, store=s, sampler=Proportional(16, alpha=1.0, seed=5)) for s in (plain, store)
    ]
    for twin, of in zip(twins, (b, a)):
        twin.load_state_dict(everything(of))
    want = a.sample()
    for r in b, *twins:
        assert same(r.sample().to('cpu'), want)


@pytest.mark.parametrize(
    'make',
    [lambda: dict(replacement=True), lambda: dict(sampler=Uniform(0, True))],
    ids=['argument', 'sampler'],
)
def test_draws_with_replacement_need_one_row(make):
    "More rows in a batch than in memory, or than it will ever hold; the argument and the sampler mean the same. Was: as many distinct rows as a batch has"
    replay = made(bs=50, max_sz=30, share=0.5, **make())
    with pytest.raises(
        ValueError, match='fewer rows than a batch needs; got 0 rows; expected 1 rows'
    ):
        replay.sample()
    replay.add(Episodes(1).block([(0, None)] * 3))
    batch = replay.sample()
    assert len(batch) == 50 and set(batch.index.tolist()) == {0, 1, 2}
    twin = made(bs=50, max_sz=30, share=0.5, **make())
    twin.load_state_dict(everything(replay))
    assert same(replay.sample(), twin.sample())
    with pytest.raises(ValueError):
        replay.replacement = not replay.replacement


def test_a_uniform_replay_takes_it_from_its_sampler():
    "A relative: with sampler=Uniform(0, True) it demanded as many rows as a batch has; from a source, too, and in a mixture"
    from fastrl_replay.replay.mixture import Mixture

    rows = Episodes(1).block([(0, None)] * 3)
    a, b = (
        ExperienceReplay(bs=8, max_sz=4, sampler=Uniform(0, True)),
        ExperienceReplay(bs=8, max_sz=4, seed=0, replacement=True),
    )
    for r in a, b:
        r.add(rows)
    assert same(a.sample(), b.sample()) and len(Mixture(dict(a=a, b=b), bs=20).sample()) == 20
    pipe = GymStepper('CartPole-v1', seed=0).experience_replay(
        bs=64, max_sz=9, sampler=Uniform(0, True)
    )
    assert len(take(pipe, 1)[0]) == 64 and pipe.memory.inserted == 1


def test_the_memory_may_be_cleared_and_go_on():
    "Links of a new memory are looked at anew"
    replay, episodes = made(bs=4), Episodes(1)
    replay.add(episodes.block([(0, None)] * 20))
    replay.sample()
    fresh = replay.view.fresh(made().memory, 'Me')
    assert fresh._table is None and fresh.nbytes == 0 and replay.view.nbytes == 30 * 16


@pytest.mark.parametrize('size', [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_rows(size):
    "Episodes of 1 to 200 steps of eight environments, overwritten one and a half times"
    replay, rng = made(bs=256, max_sz=size, strategy='future'), np.random.default_rng(0)
    left, step, number, key = np.zeros(8, int), np.zeros(8, int), np.zeros(8, int), 0
    last_of = {}
    while key < 1.5 * size:
        rows = np.zeros(800, dtype())
        for i in range(800):
            e = i % 8
            if left[e] == 0:
                left[e], step[e], number[e] = rng.integers(1, 200), 0, number[e] + 1
            left[e], step[e] = left[e] - 1, step[e] + 1
            rows[i]['env_id'], rows[i]['episode_n'], rows[i]['step_n'], rows[i]['truncated'] = (
                e,
                number[e],
                step[e],
                left[e] == 0,
            )
            last_of[e, number[e]] = key + i
        rows['next_state']['achieved_goal'][:, 0] = np.arange(key, key + 800)
        rows['reward'] = 3 * rows['next_state']['achieved_goal'][:, 0]
        replay.add(Steps(rows))
        key += 800
        b = replay.sample().rows if key >= 256 else []
        for row in b:
            goal = int(row['state']['desired_goal'][0])
            assert (
                row['index'] <= goal <= last_of[int(row['env_id']), int(row['episode_n'])]
                and goal % 8 == row['index'] % 8
            )


def test_it_costs_no_more_memory_than_it_says():
    replay = made(max_sz=1000)
    replay.add(Episodes(1).block([(0, None)] * 5))
    replay.sample()
    assert replay.nbytes - replay.memory.nbytes - replay.sampler.nbytes == 16_000


def test_uniform_where_nothing_is_changed():
    "With share 0 the rows are those that a plain replay draws"
    block = Episodes(2).block([(0, None), (1, None)] * 15)
    a, b = made(share=0.0, bs=10), ExperienceReplay(bs=10, max_sz=30, seed=0)
    for replay in a, b:
        replay.add(block)
    for _ in range(4):
        assert same(a.sample(), b.sample())


# ---- recipes ----


def agent(name, **changes):
    a = Agent(recipe(name, **changes).settings)
    for _ in a.pipe:
        pass
    return a


def flipped(bits, **changes):
    "The share of 100 episodes in which the goal is reached"
    a = agent('bitflip', env=f'fastrl_replay/BitFlip-v0(bits={bits})', **changes)
    return (evaluate(a, 100, 7) > -bits).mean()


TINY = dict(
    env='fastrl_replay/BitFlip-v0(bits=3)', steps=400, warmup=50, network=8, bs=8, max_sz=300
)


def test_the_recipe_trains_and_goes_on():
    "A few steps, saved in the middle: the same weights"
    a = Agent(recipe('bitflip', **TINY).settings)
    it = iter(a.pipe)
    for _ in range(20):
        next(it)
    b = Agent(recipe('bitflip', **TINY).settings)
    b.load_state_dict(through_file(a.state_dict()))
    for record in it:
        last = record
    for record in b.pipe:
        other = record
    assert last == other and isinstance(a.memory, HindsightReplay)


def test_recipes_say_what_does_not_go_together():
    for changes, said in (
        (dict(n_step=3), 'other goals change the reward'),
        (dict(share=2), "setting 'share'"),
        (dict(strategy='futre'), 'strategy'),
    ):
        with pytest.raises(SettingsError, match=said):
            Agent(recipe('bitflip', **changes).settings)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(2))
def test_bitflip_learns_with_hindsight_only(seed):
    assert flipped(15, seed=seed) >= 0.95
    assert flipped(15, seed=seed, memory='uniform') <= 0.2


def reached(a, episodes=100):
    "The share of episodes that end at the goal"
    stepper = GymStepper([lambda: make_env(a.settings)] * 10, a.greedy(), 10_000)
    ends = np.concatenate(
        [b.rows for b in take(stepper, 5 * episodes)][49::50]
    )  # all episodes have 50 steps
    stepper.close()
    assert ends['truncated'].all()
    return (ends['reward'] == 0).mean()


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(3))
def test_fetchreach_learns(seed):
    "95 of 100 after 20,000 steps"
    pytest.importorskip('gymnasium_robotics')
    assert reached(agent('fetchreach-her', seed=seed)) >= 0.95


def test_in_a_mixture():
    "Its part of a batch has goals in hindsight, as when it draws alone, and the environment's reward function is found"
    from fastrl_replay.replay.mixture import Mixture

    def online():
        return GymStepper(['fastrl_replay/BitFlip-v0'] * 2, seed=0).hindsight_replay(
            bs=32, max_sz=500, warmup=200, seed=0, share=1.0
        )

    demos = HindsightReplay(
        bs=8, max_sz=500, seed=1, share=0.0, reward=make_env(recipe('bitflip').settings)
    )
    for block in GymStepper('fastrl_replay/BitFlip-v0', seed=2).header(60):
        demos.add(block)
    batch = next(
        iter(Mixture(dict(online=online(), demos=demos), dict(online=0.75, demos=0.25), bs=32))
    )
    reached = (batch.next_state['achieved_goal'] == batch.next_state['desired_goal']).all(1)
    assert [(batch.replay == i).sum() for i in range(2)] == [24, 8] and torch.equal(
        batch.terminated, reached
    )
    assert reached[batch.replay == 0].sum() > reached[batch.replay == 1].sum()


def test_a_reward_function_of_other_arguments_is_refused_when_it_is_given():
    for wrong in (lambda achieved, desired: 0, lambda a, b, c, d: 0):
        with pytest.raises(ArgumentTypeError, match='three arguments'):
            HindsightReplay(None, 2, 10, reward=wrong)
    for right in (lambda *goals: 0, lambda achieved, desired, info: 0, lambda a, b, c, scale=1: 0):
        assert HindsightReplay(None, 2, 10, reward=right).reward is right
