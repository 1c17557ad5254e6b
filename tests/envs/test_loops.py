"Loops that reset, restart, or give values that do not fit: `add_step` writes true rows, or raises"

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from fastrl_replay.all import *
from fastrl_replay.steps.core import pack, unpack
from fastrl_replay.testing import same, through_file

GAMMA = 0.5


class Walk:
    "An environment that is killed now and then, and a list of the true steps of each episode"

    def __init__(self, seed, env_id=0, pixels=False):
        self.rng = np.random.default_rng(seed)
        self.env_id = env_id
        self.pixels = pixels
        self.episodes = []
        self.killed = True

    def observation(self):
        if self.pixels:
            return self.rng.integers(0, 256, (1, 8, 8), dtype=np.uint8)
        return self.rng.normal(size=3).astype(np.float32)

    def step(self, replay):
        "Step, and give the step to a replay"
        if self.killed or self.episodes[-1][-1]['end']:
            self.obs = self.observation()
            self.episodes.append([])
        self.killed = False
        after = self.observation()
        step = dict(state=self.obs, next_state=after, reward=float(self.rng.integers(1, 9)))
        step['end'] = bool(self.rng.random() < 0.15)
        self.episodes[-1].append(step)
        replay.add_step(self.obs, 1, step['reward'], after, step['end'], False, env_id=self.env_id)
        self.obs = after


def merged(episodes, n):
    "The n-step rows of these episodes, by plain loops; the last episode may still run"
    rows = {}
    for number, episode in enumerate(episodes, 1):
        runs = number == len(episodes) and not episode[-1]['end']
        for start in range(len(episode)):
            part = episode[start : start + n]
            if len(part) < n and runs:
                continue
            whole = not episode[-1]['end'] and start + n > len(episode)
            last = part[-1]
            rows[number, start + 1] = dict(
                state=part[0]['state'],
                next_state=last['next_state'],
                reward=sum(GAMMA**k * s['reward'] for k, s in enumerate(part)),
                terminated=last['end'],
                truncated=whole and n > 1,
                n=len(part),
                total_reward=sum(s['reward'] for s in episode[: start + 1]),
            )
    return rows


def check_rows(memory, walk, n):
    rows = memory[:].rows
    rows = rows[rows['env_id'] == walk.env_id]
    wanted = merged(walk.episodes, n)
    numbers = list(zip(rows['episode_n'].tolist(), rows['step_n'].tolist()))
    assert sorted(numbers) == sorted(wanted)
    for number, row in zip(numbers, rows):
        for name, value in wanted[number].items():
            if name in rows.dtype.names:
                assert np.allclose(row[name], value), (number, name)


CHAINS = {
    'one step': (1, lambda: ExperienceReplay(None, 2, 5000)),
    'own steps': (1, lambda: OwnSteps().experience_replay(2, 5000)),
    'three steps': (3, lambda: OwnSteps().n_step(3, GAMMA).experience_replay(2, 5000)),
    'prioritized': (2, lambda: OwnSteps().n_step(2, GAMMA).prioritized_replay(2, 5000)),
    'norms': (
        3,
        lambda: (
            OwnSteps()
            .update_norms(rewards=RewardNorm())
            .n_step(3, GAMMA)
            .experience_replay(2, 5000)
        ),
    ),
}


@pytest.mark.filterwarnings('ignore:.*new episode')
@pytest.mark.parametrize('kills, pixels', [('restored', False), ('reset by the loop', True)])
@pytest.mark.parametrize('chain', CHAINS)
def test_a_killed_episode_is_not_merged_with_the_next(chain, kills, pixels):
    "28 kills at random moments: rows are those of a list of episodes"
    n, make = CHAINS[chain]
    rng, walks, replay = np.random.default_rng(1), [Walk(2, 0, pixels), Walk(3, 5, pixels)], make()
    for _ in range(28):
        for _ in range(rng.integers(1, 25)):
            walks[rng.integers(2)].step(replay)
        for walk in walks:
            walk.killed = True
        if kills == 'restored':
            state = through_file(replay.state_dict())
            replay = make()
            replay.load_state_dict(state)
    for walk in walks:
        walk.step(replay)
        walk.step(replay)
        check_rows(replay.memory, walk, n)


@pytest.mark.filterwarnings('ignore:.*new episode')
@pytest.mark.parametrize('tail', ['shift', 'pad'])
def test_a_sequence_does_not_cross_a_restart(tail):
    chain = OwnSteps().chunk_sequences(4, overlap=2, tail=tail)
    walk, found = Walk(4), []
    for _ in range(12):
        for _ in range(7):
            walk.step(chain.source)
        found += [s.rows.copy() for s in chain]
        walk.killed = True
        state = through_file(chain.state_dict())
        chain = OwnSteps().chunk_sequences(4, overlap=2, tail=tail)
        chain.load_state_dict(state)
    assert len(found) > 20
    for rows in found:
        rows = rows[rows['mask']]
        assert len(set(rows['episode_n'].tolist())) == 1
        assert np.array_equal(rows['state'][1:], rows['next_state'][:-1])


def test_one_warning_says_that_a_new_episode_begins():
    for replay in ExperienceReplay(None, 1, 99), OwnSteps().n_step(2, 0.9).experience_replay(1, 99):
        walk = Walk(0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            for _ in range(5):
                for _ in range(3):
                    walk.step(replay)
                walk.killed = True
        assert len(said) == 1 and 'new episode' in str(said[0].message)


@pytest.mark.filterwarnings('ignore:.*new episode')
@pytest.mark.parametrize('n', [None, 3])
def test_observations_that_always_differ_are_an_error(n):
    "Noise between two steps: not episodes of one step, but an error that names the cause"
    rng, replay = np.random.default_rng(0), ExperienceReplay(None, 1, 99)

    def observe(k):
        clean = np.full((n or 1, 2) if n else 2, k, np.float32)
        return clean + rng.normal(size=clean.shape).astype(np.float32)

    how = [0] * n if n else 0, np.ones(n) if n else 1.0
    with pytest.raises(BlockError, match='nois'):
        for k in range(9):
            obs, after = observe(k), observe(k + 1)
            replay.add_step(obs, *how, after, False)
            accepted = after
    assert len(replay) == 5 * (n or 1)
    for k in range(5):  # what was refused has changed nothing
        replay.add_step(accepted, *how, accepted, False)
    assert replay.memory[-1].rows[['episode_n', 'step_n']].item() == (5, 6)


@pytest.mark.filterwarnings('ignore:.*new episode')
def test_resets_without_an_end_are_no_noise():
    "As long as some step goes on where the one before ended"
    replay, walk = ExperienceReplay(None, 1, 999), Walk(0)
    for _ in range(40):
        for _ in range(2):
            walk.step(replay)
        walk.killed = True
    check_rows(replay.memory, walk, 1)


@pytest.mark.filterwarnings('ignore:.*new episode')
@pytest.mark.parametrize('ended', [False, True])
@pytest.mark.parametrize('make', [CHAINS['one step'][1], CHAINS['three steps'][1]])
def test_a_restart_in_next_step_mode_loses_no_step(make, ended):
    "Killed within an episode or after its end: the first step is no reset, whatever its reward"
    for reward in 0.0, 1.0:
        replay = make()

        def step(obs, reward, after, end):
            replay.add_step(
                np.float32([[obs]]),
                [0],
                [reward],
                np.float32([[after]]),
                [end],
                autoreset_mode='next_step',
            )

        step(1, 1.0, 2, False)
        step(2, 1.0, 3, ended)
        state = through_file(replay.state_dict())
        replay = make()
        replay.load_state_dict(state)
        step(10, reward, 11, False)
        step(11, 1.0, 12, True)
        step(12, 0.0, 20, False)  # the reset
        step(20, 1.0, 21, True)
        rows = replay.memory[:].rows
        assert rows['state'].ravel().tolist() == [1, 2, 10, 11, 20]
        assert rows['episode_n'].tolist() == [1, 1, 2, 2, 3]


@pytest.mark.parametrize('vector', [False, True])
@pytest.mark.parametrize('mode', ['disabled', 'next_step'])
@pytest.mark.parametrize('restart', [False, True])
def test_a_bandit_has_one_state(vector, mode, restart):
    "Every step ends an episode, and all states are equal: no warning, no error, no row is lost"
    make = lambda: ExperienceReplay(None, 1, 99)
    replay = make()

    def step(reward, end):
        of = (lambda x: [x, x]) if vector else lambda x: x
        state = np.ones((2, 1) if vector else 1, np.float32)
        how = mode if vector else None
        return replay.add_step(state, of(0), of(reward), state, of(end), autoreset_mode=how)

    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for k in range(10):
            made = step(1.0 + k, True)
            assert len(made) == 1 + vector
            if mode == 'next_step' and vector and not (restart and k % 2):
                assert len(step(0.0, False)) == 0
            elif restart:
                state = through_file(replay.state_dict())
                replay = make()
                replay.load_state_dict(state)
    assert len(replay) == 10 * (1 + vector)


@pytest.mark.parametrize('env', ['FrozenLake-v1', 'CliffWalking-v1'])
@pytest.mark.parametrize('mode', AutoresetMode)
def test_a_vector_says_how_it_resets_at_its_first_end(env, mode):
    "Also if episodes begin where others end, if the loop resets once itself, and after loading"
    envs = gym.make_vec(
        env,
        num_envs=3,
        vectorization_mode='sync',
        vector_kwargs=dict(autoreset_mode=mode),
        max_episode_steps=30,
    )
    replay = ExperienceReplay(None, 1, 999)
    obs, _ = envs.reset(seed=0)
    rng = np.random.default_rng(0)
    for t in range(60):
        action = rng.integers(0, 4, 3)
        after, reward, terminated, truncated, _ = envs.step(action)
        if (terminated | truncated).any():
            before = replay.memory[:].rows.copy()
            with pytest.raises(BlockError, match='disabled'):
                replay.add_step(obs, action, reward, after, terminated, truncated)
            assert np.array_equal(before, replay.memory[:].rows)
            return
        replay.add_step(obs, action, reward, after, terminated, truncated)
        obs = after
        if t == 3:
            saved = through_file(replay.state_dict())
            replay = ExperienceReplay(None, 1, 999)
            replay.load_state_dict(saved)
            obs, _ = envs.reset(seed=1)
    raise AssertionError('no episode has ended')


def test_a_name_that_is_nearly_a_parameter_is_no_column():
    step = np.zeros(2), 0, 1.0, np.ones(2), False
    for replay in (
        ExperienceReplay(None, 1, 9),
        OwnSteps().n_step(2, 0.9).experience_replay(1, 9),
        OwnSteps(),
    ):
        for wrong, meant in dict(
            final_observation='final_obs',
            env_ids='env_id',
            done='terminated',
            info='final_obs',
            truncate='truncated',
            autoreset='autoreset_mode',
            next_state='next_obs',
            rewards='reward',
            episode_n='itself',
        ).items():
            with pytest.raises(ArgumentTypeError, match=f'{wrong}.*{meant}'):
                replay.add_step(*step, **{wrong: 1})
        replay.add_step(
            *step, logp=0.5, value=1.0, action_mask=np.ones(3, bool), autoreset_mode=None
        )


@pytest.mark.parametrize('kind', ['i1', 'u1', 'i2', 'i4'])
@pytest.mark.parametrize('as_', [np.asarray, torch.as_tensor, lambda x: x.tolist()])
def test_integers_that_do_not_fit_are_refused(kind, as_):
    replay, top = ExperienceReplay(None, 1, 9), np.iinfo(kind).max
    small = np.zeros(2, kind)
    replay.add_step(small, 0, 1.0, small, False, count=np.zeros((), kind))
    wide = np.array([1, int(top) + 1])
    with pytest.raises(BlockError, match=f'state.*{int(top) + 1}'):
        replay.add_step(as_(wide), 0, 1.0, small, False, count=np.zeros((), kind))
    with pytest.raises(BlockError, match='count.*1099511627783'):
        replay.add_step(small, 0, 1.0, small, False, count=2**40 + 7)
    replay.add_step(as_(wide - 1), 0, 1.0, small, True, count=int(top))
    assert replay.memory[:].rows['state'][-1].tolist() == [0, top]
    assert replay.memory[:].rows['count'][-1] == top


@pytest.mark.filterwarnings('ignore:.*new episode')
@pytest.mark.parametrize('as_', [np.asarray, torch.as_tensor, lambda x: x.tolist()])
@pytest.mark.parametrize('n', [None, 3])
def test_a_mask_is_taken_from_anything_and_never_broadcast(as_, n):
    replay = ExperienceReplay(None, 1, 99)
    shape = () if n is None else (n,)

    def step(mask, **more):
        zeros = np.zeros((*shape, 2), np.float32)
        values = dict(terminated=np.zeros(shape, bool), truncated=False) | more
        values['autoreset_mode'] = 'disabled' if shape else None
        replay.add_step(zeros, np.zeros(shape, int), np.ones(shape), zeros, **values, mask=mask)

    mask = np.arange(4 * (n or 1)).reshape(*shape, 4) % 3 == 0
    step(mask)
    step(as_(mask))
    assert np.array_equal(replay.memory[:].rows['mask'][-(n or 1) :], mask.reshape(-1, 4))
    for wrong in True, 1, [True], mask[..., :2]:
        with pytest.raises(BlockError, match='mask'):
            step(wrong)
    if n:
        for name in 'terminated', 'truncated':
            with pytest.raises(BlockError, match=name):
                step(mask, **{name: [True]})
    step(mask, truncated=True)  # one truth value is that of all environments
    assert replay.memory[:].rows['truncated'][-(n or 1) :].all()


@pytest.mark.parametrize('make', [CHAINS['one step'][1], CHAINS['three steps'][1]])
@pytest.mark.parametrize(
    'bad, name',
    [
        (dict(obs=[], next_obs=[]), 'state'),
        (dict(obs={}, next_obs={}), 'state'),
        (dict(obs=dict(a={}, b=1), next_obs=dict(a={}, b=1)), 'state'),
        (dict(hidden=np.zeros((0, 3))), 'hidden'),
        (dict(reward=-np.inf), 'reward'),
        (dict(reward=1e300), 'reward'),
        (dict(obs=np.zeros((0, 2)), action=[], reward=[], next_obs=np.zeros((0, 2))), 'reward'),
    ],
)
def test_values_without_numbers_are_refused_by_name(make, bad, name):
    "By the first step and by later ones, which are as if nothing had happened"
    first = dict(obs=[1.0], action=0, reward=1.0, next_obs=[2.0], terminated=False)
    second = first | dict(obs=[2.0], terminated=True)
    replay = make()

    def refuse(step):
        with np.errstate(over='ignore'), pytest.raises((BlockError, ArgumentTypeError), match=name):
            replay.add_step(**step | bad)

    refuse(first)
    replay.add_step(**first)
    refuse(second)
    replay.add_step(**second)
    refuse(first)
    assert replay.memory[:].rows[['episode_n', 'step_n']].tolist() == [(1, 1), (1, 2)]


def test_bfloat16_becomes_float32():
    replay = ExperienceReplay(None, 1, 9)
    value = torch.tensor([1.5, 2.0], dtype=torch.bfloat16)
    for _ in range(2):
        replay.add_step(value, 0, value[0], value, True)
    assert replay.memory[:].state.tolist() == [[1.5, 2.0]] * 2
    assert replay.memory[:].state.dtype == torch.float32


@pytest.mark.parametrize('kind', ['main memory', 'chain'])
def test_a_checkpoint_knows_environments_whose_rows_were_overwritten(kind):
    def make():
        return (
            OwnSteps().experience_replay(1, 5) if kind == 'chain' else ExperienceReplay(None, 1, 5)
        )

    def step(replay, env_id, end, k=0):
        obs = [float(k)], 0, 1.0, [float(k + 1)]
        replay.add_step(*obs, end, env_id=env_id)
        return replay.memory[-1].rows[['env_id', 'episode_n', 'step_n', 'total_reward']].item()

    first = make()
    for _ in range(5):
        step(first, 7, True)
    for k in range(3):
        step(first, 8, False, k)
    for _ in range(9):
        step(first, 1, True)
    second = make()
    second.load_state_dict(through_file(first.state_dict()))
    for replay in first, second:
        assert step(replay, 7, False) == (7, 6, 1, 1.0)
        assert step(replay, 8, False, 3) == (8, 1, 4, 4.0)


def test_many_environments_cost_no_more_than_few():
    "Environments that have ended, and whose rows are gone, are forgotten"
    replay = ExperienceReplay(None, 1, 100)
    for e in range(8000):
        replay.add_step([0.0], 0, 1.0, [1.0], True, env_id=e)
    assert len(unpack(replay.state_dict()['own']['steps']['envs'])) < 6000
    keys = replay.add_step([0.0], 0, 1.0, [1.0], True, env_id=7999)
    assert replay.memory.take(keys).episode_n.tolist() == [2]


def chain_on(path, **how):
    chain = OwnSteps().n_step(2, 0.9)
    return chain.prioritized_replay(1, 99, store=Rows(path) if path else None, **how)


def give(replay, k, end=False, **columns):
    obs, after = (np.full(2, x, np.float32) for x in (k, k + 1))
    return replay.add_step(obs, 0, 1.0, after, end, **columns)


@pytest.mark.parametrize('why', ['columns', 'errors', 'reward'])
def test_a_step_that_the_memory_behind_a_chain_refuses_changes_nothing(why, tmp_path):
    "It is not counted, and no merged row is lost"
    if why == 'columns':
        with chain_on(tmp_path) as first:
            for k in range(4):
                give(first, k, extra=1.0)
    replay = chain_on(
        tmp_path if why == 'columns' else None, initial=None if why == 'columns' else 'td'
    )
    columns = {} if why == 'columns' else dict(td=0.5)
    bad = columns | (dict(td=np.inf) if why == 'errors' else {})
    if why != 'columns':
        for k in range(3):
            give(replay, k, **columns)
    else:
        give(replay, 0)
    for k in range(3):
        chain, n = through_file(replay.source.state_dict()), len(replay)
        with pytest.raises((BlockError, ValueError)):
            if why == 'reward':
                replay.add_step(np.ones(2), 0, np.inf, np.ones(2), False, **bad)
            else:
                give(replay, 1 if why == 'columns' else 3, **bad)
        assert len(replay) == n and same(through_file(replay.source.state_dict()), chain)
    if why != 'columns':
        for k in range(3, 6):
            give(replay, k, end=k == 5, **columns)
        rows = replay.memory[:].rows
        assert rows['step_n'].tolist() == [1, 2, 3, 4, 5, 6]
        assert rows['n'].tolist() == [2, 2, 2, 2, 2, 1]


def change(state, how):
    "Change the environments in a saved state"
    rows = unpack(state['envs']).rows
    how(rows)
    state['envs'] = pack(Steps(rows))


DAMAGE = [
    lambda s: s.update(envs=pack(Steps(np.zeros(2, [('env_id', 'i8')])))),
    lambda s: s.update(envs=pack(Steps(np.zeros(2, [('next_state', 'i8')])))),
    lambda s: change(s, lambda r: r['counts'].fill(np.nan)),
    lambda s: change(s, lambda r: r['counts'].fill(2**31)),
    lambda s: change(s, lambda r: r['env_id'].fill(-1)),
    lambda s: change(s, lambda r: r['next_state'].fill(np.nan)),
    lambda s: s.update(resets_unknown=3),
    lambda s: s.pop('envs'),
]


@pytest.mark.parametrize('damage', range(len(DAMAGE)))
@pytest.mark.parametrize('chain', [False, True])
def test_a_damaged_state_changes_nothing(damage, chain):
    "A state that fits no loop is a StateError; no other error, then or later"
    make = (lambda: chain_on(None)) if chain else lambda: ExperienceReplay(None, 1, 99)
    replay, other = make(), make()
    for k in range(5):
        give(replay, k, end=k == 2)
        give(other, k + 7)
    state = through_file(replay.state_dict())
    part = state
    while part['stage'] != ('OwnSteps' if chain else 'ExperienceReplay'):
        part = part['above']
    DAMAGE[damage](part['own']['steps'])
    before = through_file(other.state_dict())
    try:
        other.load_state_dict(state)
    except StateError:
        assert same(through_file(other.state_dict()), before)
        give(other, 12)
    else:
        try:
            give(other, 5)
        except BlockError as e:
            assert 'columns' in str(e)


def test_a_mixture_takes_steps():
    "Into the replay that is named, or the one that has a source, or else the first"
    chain = OwnSteps().n_step(2, 0.9).experience_replay(2, 99)
    demos, more = ExperienceReplay(None, 2, 99), ExperienceReplay(None, 2, 99)
    fed, plain = Mixture(dict(demos=demos, online=chain)), Mixture(dict(more=more, other=demos))
    for k in range(5):
        give(fed, k)
        give(fed, k + 20, to='demos', env_id=3)
        assert give(plain, k, autoreset_mode='disabled').tolist() == [k]
    assert chain.memory[:].rows['n'].tolist() == [2] * 4
    assert demos.memory[:].rows['env_id'].tolist() == [3] * 5
    assert more.memory[:].rows['step_n'].tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ArgumentError, match="'to'|to; got"):
        give(fed, 0, to='nowhere')
    assert set(plain.sample(8).replay.tolist()) == {0, 1}


@pytest.mark.filterwarnings('ignore:.*new episode')
@pytest.mark.parametrize('restored', [False, True])
@pytest.mark.parametrize('mode', ['next_step', 'same_step', 'disabled'])
@pytest.mark.parametrize('make', [CHAINS['one step'][1], CHAINS['three steps'][1]])
def test_vectors_that_are_killed(make, mode, restored):
    "At random moments, in each mode: rows are steps of a list of episodes, and none is missing"
    rng, n, replay = np.random.default_rng(5), 3, make()

    def fresh():
        return rng.normal(size=(n, 2)).astype(np.float32)

    obs, over, episodes = fresh(), np.zeros(n, bool), [[[]] for _ in range(n)]
    for _ in range(150):
        if rng.random() < 0.08:
            obs, over = fresh(), np.zeros(n, bool)
            for own in episodes:
                own.append([])
            if restored:
                state = through_file(replay.state_dict())
                replay = make()
                replay.load_state_dict(state)
        resets = over & (mode == 'next_step')
        end = ~resets & (rng.random(n) < 0.2)
        after, reward = fresh(), np.where(resets, 0, rng.integers(1, 9, n)).astype(float)
        for i in np.flatnonzero(~resets):
            episodes[i][-1].append((obs[i], after[i], reward[i]))
            if end[i]:
                episodes[i].append([])
        begun = np.where(end[:, None], fresh(), after)
        how = dict(autoreset_mode=mode)
        given = begun if mode == 'same_step' else after
        if mode == 'same_step':
            how['final_obs'] = list(after)
        replay.add_step(obs, np.zeros(n, int), reward, given, end, **how)
        obs, over = (after if mode == 'next_step' else begun), end
    rows = replay.memory[:].rows
    for i, own in enumerate(episodes):
        own = [episode for episode in own if episode]
        mine = rows[rows['env_id'] == i]
        assert len(mine) >= sum(map(len, own[:-1]))
        for row in mine:
            start = row['step_n'] - 1
            steps = row['n'] if 'n' in rows.dtype.names else 1
            part = own[row['episode_n'] - 1][start : start + 3][: 3 if steps > 1 else 1]
            assert len(part) == steps and (row['state'] == part[0][0]).all()
            assert (row['next_state'] == part[-1][1]).all()
            total = sum(GAMMA**k * reward for k, (*_, reward) in enumerate(part))
            assert np.isclose(row['reward'], total)
