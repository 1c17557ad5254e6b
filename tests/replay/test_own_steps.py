"Steps of a loop, given to `add_step`, are the rows of `GymStepper` in the same environments"

import pickle
import numpy as np, pytest, torch
import gymnasium as gym
from gymnasium.vector import SyncVectorEnv
from fastrl_replay.all import *
from fastrl_replay.testing import through_file
from scripted import MODES, needs_modes


def rows_of(memory):
    rows = memory[:].rows
    return rows[np.lexsort((rows['step_n'], rows['episode_n'], rows['env_id']))]


def same_rows(a, b):
    names = [n for n in b.dtype.names if n in a.dtype.names]
    n = min(len(a), len(b))
    assert n and {'state', 'next_state', 'total_reward', 'truncated'} <= set(names)
    for name in names:
        assert np.array_equal(a[name], b[name]), name


def reference(envs, n, **kw):
    stepper, memory = (
        GymStepper(envs, lambda s: np.zeros(len(s), np.int64), seed=3, **kw),
        ExperienceReplay(None, 1, 1000),
    )
    for block in stepper:
        memory.add(block)
        if len(memory) >= n:
            return memory.memory


LASTS = 3, -2, 1, 4  # lengths of episodes; negative: truncated


ENVS = [lambda: ScriptedEnv(**script(*LASTS)), lambda: ScriptedEnv(**script(-1, 2))]


@pytest.mark.parametrize(
    'make',
    [lambda: ExperienceReplay(None, 1, 1000), lambda: SequenceReplay(None, 1, 1000, length=2)],
)
def test_a_single_environment(make):
    env, replay = ScriptedEnv(**script(*LASTS)), make()
    obs, _ = env.reset(seed=3)
    for _ in range(40):
        nxt, reward, term, trunc, _ = env.step(0)
        assert len(replay.add_step(obs, 0, reward, nxt, term, trunc)) == 1
        obs = env.reset()[0] if term or trunc else nxt
    same_rows(
        rows_of(replay.memory), rows_of(reference([lambda: ScriptedEnv(**script(*LASTS))], 40))[:40]
    )


@pytest.mark.parametrize('mode', ['default', *(pytest.param(m, marks=needs_modes) for m in MODES)])
@pytest.mark.parametrize('as_', [np.asarray, torch.as_tensor])
def test_vectors_under_all_modes(mode, as_):
    "The default of gymnasium 0.29 is to reset in the same step, and that of later ones in the next"
    replay = ExperienceReplay(None, 1, 1000)
    envs = SyncVectorEnv(ENVS, **{} if mode == 'default' else dict(autoreset_mode=mode))
    if mode == 'default':
        mode = 'SameStep' if gym.__version__ < '1' else 'NextStep'
    final = 'final_observation' if gym.__version__ < '1' else 'final_obs'
    obs, _ = envs.reset(seed=3)
    for _ in range(30):
        nxt, reward, term, trunc, info = envs.step(np.zeros(2, np.int64))
        how = dict(final_obs=info.get(final)) if mode == 'SameStep' else dict(autoreset_mode=mode)
        replay.add_step(
            as_(obs.copy()),
            np.zeros(2, np.int64),
            as_(reward.copy()),
            as_(nxt.copy()),
            term,
            trunc,
            **how,
        )
        done = term | trunc
        obs = (
            envs.reset(options=dict(reset_mask=done))[0]
            if mode == 'Disabled' and done.any()
            else nxt
        )
    wanted = rows_of(reference([make() for make in ENVS], 60))
    got = rows_of(replay.memory)
    for e in range(2):
        a, b = got[got['env_id'] == e], wanted[wanted['env_id'] == e]
        n = min(len(a), len(b))
        assert n > 15
        same_rows(a[:n], b[:n])


def test_dicts_and_columns():
    replay = ExperienceReplay(None, 1, 100)

    def observation(k):
        return dict(eye=np.full((2, 3, 3), k, np.uint8), arm=(torch.ones(2) * k, np.arange(2.0)))

    for k in range(4):
        replay.add_step(
            observation(k),
            np.ones((2, 1), np.float32) * k,
            [k, 1.0],
            observation(k + 1),
            [False, k == 1],
            env_id=[7, 3],
            autoreset_mode='disabled',
            logp=[0.5, k],
        )
    rows = replay.memory[:].rows
    assert rows['env_id'].tolist() == [7, 3] * 4
    assert rows['episode_n'].tolist() == [1, 1, 1, 1, 1, 2, 1, 2]
    assert rows['state']['eye'].shape == (8, 3, 3)
    assert rows['state']['arm']['[1]'].dtype == np.float64
    assert rows['logp'].dtype == np.float32


BAD = [
    (dict(obs=[1.0, 2.0, 3.0]), r'state has a different shape than in the first call; got \[3\]'),
    (dict(action=0.5), 'action has a different dtype .*; got float32; expected int64'),
    (dict(terminated=2), 'terminated has a number .*; got 2; expected bool'),
    (dict(next_obs=dict(a=1)), 'next_state'),
    (dict(obs=[np.nan, 0.0]), 'NaN'),
    (dict(reward=None), 'reward'),
    (dict(env_id=-1), 'env_id'),
    (dict(more=1.0), 'the columns differ from the first call: this step is with more'),
    (dict(autoreset_mode='sometimes'), 'autoreset_mode'),
]


@pytest.mark.parametrize('bad, says', BAD)
@pytest.mark.parametrize('chain', [False, True])
def test_what_is_refused_leaves_all_as_it_was(bad, says, chain):
    made = (
        (lambda: OwnSteps().n_step(2, 0.9).experience_replay(1, 100))
        if chain
        else lambda: ExperienceReplay(None, 1, 100)
    )
    one, other = made(), made()
    good = dict(obs=[1.0, 2.0], action=1, reward=1.0, next_obs=[1.0, 2.0], terminated=False)
    for k in range(6):
        for r in one, other:
            r.add_step(**dict(good, terminated=k == 2))
        with pytest.raises((ValueError, TypeError), match=says):
            one.add_step(**dict(good, **{}) | bad)
    assert np.array_equal(one.memory[:].rows, other.memory[:].rows)


def going_on(replay, times, k=0):
    for k in range(k, k + times):
        replay.add_step([k, 1.0], k % 2, k, [k + 2, 1.0], k % 5 == 4, env_id=k % 2)


@pytest.mark.parametrize('how', ['checkpoint', 'pickle', 'directory', 'chain'])
def test_counting_goes_on(how, tmp_path):
    def made(name='m'):
        if how == 'chain':
            return OwnSteps().n_step(3, 0.9).experience_replay(2, 100, seed=0)
        return ExperienceReplay(
            None, 2, 100, seed=0, store=Rows(tmp_path / name) if how == 'directory' else None
        )

    whole, first = made('whole'), made()
    going_on(whole, 30)
    going_on(first, 13)
    if how == 'pickle':
        second = pickle.loads(pickle.dumps(first))
    elif how == 'directory':
        first.close()
        second = made()
    else:
        second = made()
        going_on(second, 3)
        second.load_state_dict(through_file(first.state_dict()))
    going_on(second, 17, 13)
    assert np.array_equal(second.memory[:].rows, whole.memory[:].rows)


@pytest.mark.parametrize('store', [Rows, Frames])
def test_an_environment_that_was_reset_begins_the_next_episode(store, tmp_path):
    "After a restart, one of two environments continues; the other begins with another state"

    def obs(k):
        picture = np.full((2, 8, 8), k, np.uint8)
        return picture if store is Frames else dict(picture=picture, speed=np.float32(k))

    def made():
        return ExperienceReplay(None, 2, 100, seed=0, store=store(path=tmp_path / 'm'))

    def step(replay, env, k):
        replay.add_step(obs(k), 0, 1.0, obs(k + 1), False, env_id=env)

    first = made()
    for k in range(3):
        step(first, 0, k)
        step(first, 7, k)
    first.close()
    second = made()
    for k in range(2):
        step(second, 0, k)
        step(second, 7, 3 + k)
    rows = second.memory[:].rows[-4:]
    assert rows[['env_id', 'episode_n', 'step_n', 'total_reward']].tolist() == [
        (0, 2, 1, 1.0),
        (7, 1, 4, 4.0),
        (0, 2, 2, 2.0),
        (7, 1, 5, 5.0),
    ]
    second.close()


@pytest.mark.parametrize('begins', [1, 0], ids=['goes on', 'was reset'])
def test_a_refused_first_step_settles_nothing(begins, tmp_path):
    "After a restart the first row that is taken decides whether the episode goes on"

    def made():
        return ExperienceReplay(None, 2, 100, seed=0, store=Rows(tmp_path / 'm'))

    def step(replay, k, end=False):
        replay.add_step(np.float32([k, k]), 0, 1.0, np.float32([k + 1, k + 1]), end)

    first = made()
    step(first, 0)
    first.close()
    second = made()
    for k, end in (np.nan, False), (1, 7):
        with pytest.raises(ValueError):
            step(second, k, end)
    step(second, begins)
    step(second, begins + 1)
    wanted = [(1, 2, 2.0), (1, 3, 3.0)] if begins else [(2, 1, 1.0), (2, 2, 2.0)]
    assert second.memory[:].rows[['episode_n', 'step_n', 'total_reward']].tolist()[1:] == wanted
    second.close()


@pytest.mark.parametrize('mode', ['next_step', 'same_step', 'disabled'])
def test_a_vector_that_goes_on_after_a_restart(mode, tmp_path):
    "The replay in a directory is opened anew at every step: the rows are those of one that was not"

    def made(name):
        return ExperienceReplay(None, 2, 100, seed=0, store=Rows(tmp_path / name))

    whole, cut = made('whole'), made('cut')
    first, state, resets = np.float32([[0], [10]]), np.float32([[0], [10]]), np.zeros(2, bool)
    for t in range(16):
        end = np.array([t % 5 == 3, t % 7 == 2]) & ~resets
        after = np.where(resets[:, None], first, state + 1)
        begun = np.where(end[:, None], first, after)
        final = None
        if mode == 'same_step' and end.any():
            final = np.array([a if e else None for a, e in zip(after, end)], object)
        given = begun if mode == 'same_step' else after
        reward = np.float32(~resets)
        for r in whole, cut:
            r.add_step(state, [0, 0], reward, given, end, final_obs=final, autoreset_mode=mode)
        state = after if mode == 'next_step' else begun
        if mode == 'next_step':
            resets = end
        cut.close()
        cut = made('cut')
    assert np.array_equal(cut.memory[:].rows, whole.memory[:].rows)


def test_a_chain_over_a_memory_on_disk_goes_on_with_the_next_episodes(tmp_path):
    "Without a checkpoint, stored episodes keep their numbers; no n-step return spans the restart"

    def run(lengths, envs):
        chain = OwnSteps().n_step(3, 0.9)
        replay = chain.experience_replay(2, 100, seed=0, store=Rows(tmp_path / 'm'))
        n = len(envs)
        for length, end in lengths:
            for k in range(length):
                obs, after = [[k, k + 0.5]] * n, [[k + 1, k + 1.5]] * n
                over = [end and k == length - 1] * n
                replay.add_step(
                    obs, [0] * n, [1.0] * n, after, over, env_id=envs, autoreset_mode='disabled'
                )
        found = replay.memory[:].rows.copy()
        replay.close()
        return found

    first = run([(5, True), (6, False)], [0, 7])
    assert {*first['episode_n'].tolist()} == {1, 2}
    then = run([(4, True), (5, True)], [7, 3])[len(first) :]
    for env, numbers in (7, [3, 4]), (3, [1, 2]):
        rows = then[then['env_id'] == env]
        assert rows['episode_n'].tolist() == [numbers[0]] * 4 + [numbers[1]] * 5
        assert rows['step_n'].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 5]


def steps_of(as_, action, logp, **more):
    return dict(
        obs=as_([1, 2]),
        action=action,
        reward=1.0,
        next_obs=as_([2, 3]),
        terminated=False,
        logp=logp,
        **more,
    )


BEFORE = steps_of(np.float32, np.float32(0.5), np.float64(0.1), alive=True)
AFTER = {
    'whole numbers': steps_of(np.int64, 1, 2, alive=1),
    'lists': dict(alive=True, **steps_of(list, 0.5, np.float32(0.25))),
}


@pytest.mark.parametrize('after', AFTER)
@pytest.mark.parametrize('how', ['directory', 'checkpoint'])
def test_the_first_step_after_a_restart_is_kept_in_the_columns_that_are_there(how, after, tmp_path):
    "As any later step is; what the columns can't hold is refused, and decides nothing"

    def made():
        store = Rows(tmp_path / 'm') if how == 'directory' else None
        return ExperienceReplay(None, 1, 100, store=store)

    first = made()
    first.add_step(**BEFORE)
    state = first.state_dict()
    first.close()
    second = made()
    if how == 'checkpoint':
        second.load_state_dict(state)
    for bad in dict(obs=[1.0, 2.0, 3.0]), dict(action=[1.0, 2.0]):
        with pytest.raises(BlockError):
            second.add_step(**AFTER[after] | bad)
    second.add_step(**AFTER[after])
    rows = second.memory[:].rows
    assert rows['alive'].tolist() == [True, True]
    assert [rows.dtype[k] for k in ('state', 'action', 'logp')] == [('f4', (2,)), 'f4', 'f8']
    assert rows['logp'][1] == AFTER[after]['logp']
    second.close()


def test_a_reset_that_is_none_is_refused():
    replay = ExperienceReplay(None, 1, 100)

    def step(obs, reward, after, end):
        return replay.add_step([[obs]], [0], [reward], [[after]], [end], autoreset_mode='next_step')

    step(1.0, 1.0, 2.0, True)
    with pytest.raises(BlockError, match=r'must be a reset \(env_id 0\); got reward 1'):
        step(2.0, 1.0, 3.0, False)
    assert len(step(2.0, 0.0, 3.0, False)) == 0
    assert replay.memory[:].rows['episode_n'].tolist() == [1]
    step(3.0, 1.0, 4.0, False)
    assert replay.memory[:].rows[['episode_n', 'step_n']].tolist() == [(1, 1), (2, 1)]


@pytest.mark.parametrize('seed', range(3))
def test_groups_that_change_are_counted_one_by_one(seed):
    """Single environments and overlapping vectors in any order, refused steps, saved counters.

    A dict for each environment computes the same."""
    rng, own, model, wanted = np.random.default_rng(seed), OwnSteps(), {}, []
    for k in range(150):
        ids = (
            rng.choice(6, rng.integers(1, 5), replace=False)
            if rng.random() < 0.6
            else np.arange(f := rng.integers(4), f + 2)
        )
        lags, n = rng.random() < 0.5, len(ids)
        stands = {e: model.get(e, (1, 0, 0.0, False)) for e in ids.tolist()}
        resets = np.array([lags and over for *_, over in stands.values()])
        reward, end = (
            np.where(resets, 0.0, rng.normal(size=n)).astype(np.float32),
            ~resets & (rng.random(n) < 0.3),
        )
        one = n == 1 and rng.random() < 0.5
        step = dict(
            obs=np.ones((n, 2), np.float32),
            action=np.zeros(n, np.int64),
            reward=reward,
            next_obs=np.ones((n, 2), np.float32),
            terminated=end,
        )
        if one:
            step = dict(
                {c: x[0] for c, x in step.items()},
                reward=float(reward[0]),
                terminated=bool(end[0]),
                action=0,
            )
        how = dict(
            env_id=int(ids[0])
            if one or (np.diff(ids) == 1).all() and rng.random() < 0.5
            else ids.tolist(),
            autoreset_mode='next_step' if lags else 'disabled',
        )
        if rng.random() < 0.3:
            with pytest.raises(BlockError):
                own.add_step(
                    **dict(step, obs=step['obs'] * np.nan), **how
                ) if not resets.all() else own.add_step(**dict(step, obs='x'), **how)
        own.add_step(**step, **how)
        for (e, (episode, made, total, over)), r, is_over, reset in zip(
            stands.items(), reward, end, resets
        ):
            if over:
                episode, made, total = episode + 1, 0, 0.0
            if not reset:
                made, total = made + 1, total + float(r)
            if not reset:
                wanted.append((e, episode, made, total))
            model[e] = (episode, made, total, bool(is_over))
        if k % 40 == 39:
            state, own = own.state_dict(), OwnSteps()
            own.load_state_dict(through_file(state))
    got = np.concatenate([b.rows for b in own])[
        ['env_id', 'episode_n', 'step_n', 'total_reward']
    ].tolist()
    assert [g[:3] for g in got] == [w[:3] for w in wanted] and np.allclose(
        [g[3] for g in got], [w[3] for w in wanted], atol=1e-5
    )
