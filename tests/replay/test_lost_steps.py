"""Lost steps: no row leads across them, nor from one episode into the next."""

import contextlib
import copy
import itertools
import random
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fastrl_replay.all import ExperienceReplay, Gather, GymStepper, Mixture, OwnSteps, Rows, Steps
from fastrl_replay.steps.errors import BlockError
from fastrl_replay.testing import through_file
from scripted import needs_modes, numbered
from strategies import cases


class Counts(gym.Env):
    "Observe [episode, step] in episodes of four steps"

    observation_space = gym.spaces.Box(-99, 99, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        return self.observe(), {}

    def observe(self):
        return np.array([self.episode, self.t], np.float32)

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, self.t == 4, False, {}


def memory(n_step):
    if not n_step:
        return ExperienceReplay(bs=1, max_sz=100, seed=0)
    return OwnSteps().n_step(2, gamma=0.5).experience_replay(bs=1, max_sz=100, seed=0)


def check(replay, n_step):
    "Each row stays in its episode and leads as many steps ahead as its column `n` says"
    for r in replay.memory[:].rows:
        assert r['state'][0] == r['next_state'][0], r
        assert r['next_state'][1] - r['state'][1] == (r['n'] if n_step else 1), r


@needs_modes
@pytest.mark.parametrize('n_step', [False, True])
@pytest.mark.parametrize('what', ['refused', 'cleared', 'rolled back'])
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_row_that_only_resets_is_left_out_though_the_end_is_lost(what, n_step):
    "The step that ends an episode is refused, or forgotten, before gymnasium's next-step reset"
    replay = memory(n_step)
    envs = gym.vector.SyncVectorEnv([Counts])
    obs, _ = envs.reset()
    saved = None
    for t in range(1, 13):
        next_obs, reward, terminated, truncated, _ = envs.step(np.zeros(1, int))
        if t == 2:
            saved = replay.state_dict()
        given = np.array([np.nan]) if what == 'refused' and t == 4 else reward
        step = (obs, [0], given, next_obs, terminated, truncated)
        if what == 'refused' and t == 4:
            with pytest.raises(BlockError, match='reward'):
                replay.add_step(*step, autoreset_mode='next_step')
        else:
            replay.add_step(*step, autoreset_mode='next_step')
        if t == 4 and what == 'cleared':
            replay.clear()
        if t == 4 and what == 'rolled back':
            replay.load_state_dict(saved)
        obs = next_obs
    check(replay, n_step)
    if not n_step:
        expected = dict(refused=9, cleared=6, **{'rolled back': 7})[what]
        assert len(replay) == expected


RESETS = [(0, 1.0, 1), (1, 1.0, 2, True), (2, 0.0, 100), (100, 1.0, 101), (101, 1.0, 102, True)]


def vector_step(replay, state, reward, after, end=False, **how):
    "A step of a vector of one environment that resets itself in the next step"
    obs, next_obs = np.float32([[state]]), np.float32([[after]])
    ends, none = np.array([end]), np.zeros(1, bool)
    how = dict(autoreset_mode='next_step') | how
    replay.add_step(obs, np.zeros(1, int), np.float32([reward]), next_obs, ends, none, **how)


def leads(replay):
    "From which state to which each row leads"
    rows = replay.memory[:].rows
    return list(zip(rows['state'][:, 0].tolist(), rows['next_state'][:, 0].tolist()))


def test_thousands_of_environments_that_wait_for_their_reset_are_known():
    n = 3000
    replay = ExperienceReplay(bs=1, max_sz=1000)
    for obs, reward, next_obs, end in (0, 1, 1, True), (1, 0, 100, False), (100, 1, 101, False):
        for first in 0, n:
            replay.add_step(
                np.full((n, 1), obs, np.float32),
                np.zeros(n, int),
                np.full(n, reward, np.float32),
                np.full((n, 1), next_obs, np.float32),
                np.full(n, end),
                env_id=first,
                autoreset_mode='next_step',
            )
        assert set(leads(replay)) <= {(0, 1), (100, 101)}


def test_a_mixture_tells_of_the_environment_that_steps_and_of_no_other():
    "An old end in the other replay hides no true step that looks like a reset"
    mixture = Mixture({name: ExperienceReplay(bs=1, max_sz=20) for name in 'ab'}, bs=2)
    # environment 1 ends in state 2, in b; its reset, and an episode that comes to state 2, in a
    vector_step(mixture, 1, 1.0, 2, True, env_id=1, to='b')
    vector_step(mixture, 2, 0.0, 7, env_id=1, to='a')
    vector_step(mixture, 7, 1.0, 2, env_id=1, to='a')
    vector_step(mixture, 5, 1.0, 6, env_id=0, to='b')
    vector_step(mixture, 6, 1.0, 8, env_id=0, to='a')
    vector_step(mixture, 2, 0.0, 3, env_id=1, to='a')
    assert (2, 3) in leads(mixture.replays['a'])


def test_a_mixture_whose_replays_take_turns_keeps_no_resets():
    mixture = Mixture({k: ExperienceReplay(bs=1, max_sz=100) for k in 'ab'})
    for episode in range(6):
        to = 'ab'[episode % 2]
        first = 100 * episode
        if episode:
            vector_step(mixture, first - 98, 0.0, first, to='ab'[(episode - 1) % 2 - 1])
        vector_step(mixture, first, 1.0, first + 1, to=to)
        vector_step(mixture, first + 1, 1.0, first + 2, True, to=to)
    for k, episodes in dict(a=(0, 200, 400), b=(100, 300, 500)).items():
        expected = [(x, x + 1) for first in episodes for x in (first, first + 1)]
        assert leads(mixture.replays[k]) == expected


@pytest.mark.parametrize(
    'lost',
    [dict(reward=np.nan), dict(final_info=np.zeros(1)), dict(end=None), dict(end=[])],
    ids=str,
)
@pytest.mark.parametrize('first', [False, True])
def test_the_reset_after_any_refused_end_is_left_out(lost, first):
    "Also if it is the first step after a reset that was refused, or was refused for its arguments"
    replay = ExperienceReplay(bs=1, max_sz=100)
    vector_step(replay, 1, 1.0, 2)
    vector_step(replay, 2, 1.0, 3, True)
    vector_step(replay, 3, 0.0, 10)
    if not first:
        vector_step(replay, 10, 1.0, 11)
    x = 10 if first else 11
    step = dict(state=x, reward=1.0, after=x + 1, end=True) | lost
    with pytest.raises((BlockError, TypeError, ValueError)):
        vector_step(replay, **step)
    vector_step(replay, x + 1, 0.0, 20)
    vector_step(replay, 20, 1.0, 21)
    kept = [] if first else [(10, 11)]
    assert leads(replay) == [(1, 2), (2, 3), *kept, (20, 21)]


def test_a_step_whose_flag_was_refused_may_be_given_again():
    replay = ExperienceReplay(bs=1, max_sz=100)
    vector_step(replay, 0, 0.0, 1)
    with pytest.raises(BlockError, match='terminated'):
        vector_step(replay, 1, 0.0, 2, None)
    vector_step(replay, 1, 0.0, 2)
    assert leads(replay) == [(0, 1), (1, 2)]


def test_first_steps_of_new_environments_are_kept_after_others_were_forgotten():
    replay = ExperienceReplay(bs=1, max_sz=100)
    for env in range(5000):
        vector_step(replay, 2 * env, 0.0, 2 * env + 1, env_id=env)
        vector_step(replay, 2 * env + 1, 1.0, 2 * env + 2, True, env_id=env)
        assert replay.memory.inserted == 2 * env + 2


def test_a_loop_that_resets_may_give_each_episode_another_number():
    "Nothing is kept of those that are over and overwritten"
    replay = ExperienceReplay(bs=1, max_sz=100)
    for env in range(5000):
        replay.add_step([0.0], 0, 1.0, [1.0], True, env_id=env)
    assert replay.state_dict()['own']['steps']['lost'] == []


@pytest.mark.parametrize('to', ['typo', ['a']])
def test_the_reset_after_an_end_that_a_mixture_refused_is_left_out(to):
    mixture = Mixture({k: ExperienceReplay(bs=1, max_sz=100) for k in 'ab'})
    vector_step(mixture, 1, 1.0, 2)
    with pytest.raises(ValueError, match='Mixture: to; got'):
        vector_step(mixture, 2, 1.0, 3, True, to=to)
    vector_step(mixture, 3, 0.0, 10)
    vector_step(mixture, 10, 1.0, 11)
    assert leads(mixture.replays['a']) == [(1, 2), (10, 11)]


def test_the_reset_after_going_back_is_left_out():
    "To a state that was saved at an end, or after a reset"
    for saved_at in 2, 3:
        replay = ExperienceReplay(bs=1, max_sz=100)
        vector_step(replay, 1, 1.0, 2, True)
        steps = [(2, 0.0, 10), (10, 1.0, 11), (11, 1.0, 12, True)]
        for i, step in enumerate(steps):
            if i == saved_at - 2:
                state = replay.state_dict()
            vector_step(replay, *step)
        replay.load_state_dict(state)
        vector_step(replay, 12, 0.0, 20)
        vector_step(replay, 20, 1.0, 21)
        assert leads(replay) == [(1, 2), (20, 21)]


def test_an_array_of_env_ids_may_change_afterwards():
    replay = ExperienceReplay(bs=1, max_sz=100)
    env_id = np.array(3)
    replay.add_step([1.0], 0, 1.0, [2.0], False, env_id=env_id)
    env_id[...] = 4
    replay.add_step([7.0], 0, 1.0, [8.0], False, env_id=4)
    assert replay.memory[:].env_id.tolist() == [3, 4]
    for ids in np.array([5]), 5, [5], 6:
        replay.add_step([7.0], 0, 1.0, [8.0], True, env_id=ids, autoreset_mode='disabled')
    assert replay.memory[:].env_id.tolist() == [3, 4, 5, 5, 5, 6]


def test_episodes_of_thousands_of_environments_are_numbered_on_while_rows_are_there():
    replay = ExperienceReplay(bs=1, max_sz=100_000)
    for env_id in [*range(5000), 0, 1, 2]:
        replay.add_step(np.float32([0]), 0, 1.0, np.float32([1]), True, env_id=env_id)
    rows = replay.memory[:].rows
    again = rows[rows['env_id'] < 3]
    assert again['episode_n'].tolist() == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize('again', ['clear', 'load'])
@pytest.mark.parametrize('own', [False, True])
def test_a_lost_end_is_remembered_however_often_all_is_forgotten(own, again):
    replay = memory(own)
    empty = replay.state_dict()
    vector_step(replay, 1, 1.0, 2, True)
    for _ in range(3):
        replay.clear()
        if again == 'load' or own:
            replay.load_state_dict(empty)
    vector_step(replay, 2, 0.0, 20)
    vector_step(replay, 20, 1.0, 21, True)
    assert leads(replay) == [(20, 21)]


def interrupted_at(line, call, *args):
    "Call, and raise KeyboardInterrupt at this line of own_steps.py; return whether it came so far"
    left = [line]

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.endswith('own_steps.py'):
            return None
        if event == 'line':
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call(*args)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize('own', [False, True])
@pytest.mark.parametrize('env', [0, 1, 2])
def test_after_an_interrupt_each_row_has_its_environment(own, env):
    "At each line, within an episode, in an episode of one step, and in a new environment's"
    for line in range(1, 200):
        replay = ExperienceReplay(OwnSteps() if own else None, bs=1, max_sz=100)

        def step(obs, of, end=False):
            replay.add_step([float(obs)], of, 1.0, [obs + 1.0], end, env_id=of)

        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            step(0, 0)
            step(100, 1, True)
            step(1, 0)
            came = interrupted_at(line, step, 2 if env == 0 else 200, env, env > 0)
            for obs in 10, 11:
                for of in range(4):
                    step(100 * of + obs, of)
        rows = replay.memory[:].rows
        assert (rows['env_id'] == rows['action']).all(), line
        numbers = rows[['env_id', 'episode_n', 'step_n']].tolist()
        assert len(set(numbers)) == len(numbers), line
        if not came:
            break
    assert not came


def test_after_an_interrupt_a_vector_may_have_another_size():
    for line in range(1, 200):
        replay = ExperienceReplay(bs=1, max_sz=100)

        def step(n, obs):
            states = np.arange(n, dtype='f4')[:, None] * 100 + obs
            no = np.zeros(n, bool)
            replay.add_step(states, np.arange(n), np.ones(n), states + 1, no, no)

        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            step(3, 0)
            came = interrupted_at(line, step, 2, 1)
            step(2, 10)
            step(3, 20)
        rows = replay.memory[-5:].rows
        assert rows['env_id'].tolist() == rows['action'].tolist() == [0, 1, 0, 1, 2], line
        if not came:
            break
    assert not came


@pytest.mark.parametrize('n_step', [False, True])
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_directory_that_is_opened_again_at_an_end_knows_it(n_step, tmp_path):
    def opened():
        source = OwnSteps().n_step(2, gamma=0.5) if n_step else None
        return ExperienceReplay(source, bs=1, max_sz=100, store=Rows(tmp_path / 'm'))

    replay = opened()
    vector_step(replay, 1, 1.0, 2)
    vector_step(replay, 2, 1.0, 3, True)
    replay.close()
    replay = opened()
    vector_step(replay, 3, 0.0, 10)
    vector_step(replay, 10, 1.0, 11, True)
    assert leads(replay) == [(1, 3 if n_step else 2), (2, 3), (10, 11)]


def test_a_vector_that_resets_itself_though_its_loop_should_is_told():
    replay = ExperienceReplay(bs=1, max_sz=100)
    vector_step(replay, 1, 1.0, 2, True, autoreset_mode='disabled')
    with pytest.warns(UserWarning, match='continues from the state in which its episode ended'):
        vector_step(replay, 2, 0.0, 10, autoreset_mode='disabled')


def test_no_window_spans_what_an_error_behind_the_chain_has_lost():
    "The loop resets its environment; the other environment continues"
    chain = OwnSteps().n_step(3, gamma=0.5).map(lambda steps: fails(steps))
    replay = chain.sequence_replay(
        bs=8, max_sz=1000, length=3, overlap=2, burn_in=0, prioritized=False, seed=0
    )
    failing = False

    def fails(steps):
        if failing:
            raise ValueError
        return steps

    state = [0, 1000]
    for t in range(40):
        for env in range(2):
            failing = t == 10 and env == 0
            step = [state[env]], 0, 1.0, [state[env] + 1], False
            with pytest.raises(ValueError) if failing else contextlib.nullcontext():
                replay.add_step(*step, env_id=env)
            state[env] = 500 if failing else state[env] + 1
    kept = replay.memory[:]
    assert kept.state.flatten().unique().numel() == len(kept)
    assert torch.equal(kept.next_state, kept.state + kept.n[:, None])
    for batch in (replay.sample() for _ in range(30)):
        follows = batch.state.diff(dim=1).squeeze(-1)[batch.mask[:, 1:]]
        assert (follows == 1).all()


def test_a_loaded_mixture_knows_of_steps_in_another_replay():
    def build():
        return Mixture({name: ExperienceReplay(bs=2, max_sz=99) for name in 'ab'})

    def step(obs, reward, next_obs, end, to):
        how = dict(autoreset_mode='next_step', to=to)
        mixture.add_step([[obs]], [0], [reward], [[next_obs]], end, **how)

    mixture = build()
    step(0, 1.0, 1, False, 'a')
    step(1, 1.0, 2, False, 'b')
    step(2, 1.0, 3, True, 'b')
    state = through_file(mixture.state_dict())
    mixture = build()
    mixture.load_state_dict(state)
    step(3, 0.0, 10, False, 'a')  # the reset
    step(10, 1.0, 11, False, 'a')
    assert mixture.replays['a'].memory[:].state.flatten().tolist() == [0, 10]


def test_a_refused_end_of_unknown_environments_may_be_that_of_any():
    "Also if they came in another order before, and the observation stays as it was at the end"
    replay = ExperienceReplay(bs=2, max_sz=100)

    def step(ids, obs, reward, next_obs, end=False):
        how = dict(env_id=ids, autoreset_mode='next_step')
        obs, next_obs = np.float32(obs)[:, None], np.float32(next_obs)[:, None]
        replay.add_step(obs, [0, 0], reward, next_obs, [end, False], **how)

    step([1, 0], [10, 0], [1.0, 1.0], [11, 1])
    with pytest.raises(BlockError, match='env_id'):
        step(None, [1, 11], [1.0, 0.0], [1, 12], True)  # of 0 and 1
    with pytest.warns(UserWarning, match='left out'):
        step([0, 1], [1, 12], [0.0, 1.0], [50, 13])
    step([0, 1], [50, 13], [1.0, 1.0], [51, 14])
    assert leads(replay) == [(10, 11), (0, 1), (12, 13), (50, 51), (13, 14)]
    assert replay.memory[:].episode_n.tolist() == [1, 1, 2, 2, 2]


def test_an_interrupt_while_a_step_waits_for_the_lock_loses_no_end():
    replay = ExperienceReplay(bs=1, max_sz=100)
    vector_step(replay, 1, 1.0, 2)

    class Rings(contextlib.ExitStack):
        def __enter__(self):
            replay.lock = lock
            raise KeyboardInterrupt

    lock, replay.lock = replay.lock, Rings()
    with pytest.raises(KeyboardInterrupt):
        vector_step(replay, 2, 1.0, 3, True)
    vector_step(replay, 3, 0.0, 10)
    vector_step(replay, 10, 1.0, 11)
    assert leads(replay) == [(1, 2), (10, 11)]


def test_no_sequence_leads_over_a_missing_step():
    def chain():
        calls = itertools.count(1)
        return GymStepper(Counts()).filter(lambda steps: next(calls) % 7).gather(3, exact=True)

    how = dict(length=3, overlap=2)
    replay = chain().sequence_replay(bs=1, max_sz=200, burn_in=0, seed=0, **how)
    batches = [batch[0] for batch in itertools.islice(replay, 60)]
    chunks = list(itertools.islice(chain().chunk_sequences(**how), 60))
    for sequence in batches + chunks:
        rows = sequence[sequence.mask]
        assert (rows.state[1:] == rows.next_state[:-1]).all(), rows.state
    assert max(int(s.mask.sum()) for s in chunks) == 3


def test_a_block_that_gather_can_not_join_changes_nothing():
    wrong = Steps(numbered(3).rows[['state', 'reward']])
    stage = Gather(iter([numbered(2), wrong, numbered(2, 2)]), 4)
    with pytest.raises(BlockError, match='reward'):
        list(stage)
    assert through_file(stage.state_dict())
    (joined,) = stage
    assert joined == numbered(4)


def test_gather_copies_each_row_of_a_large_block_twice_at_most(monkeypatch):
    rows = []
    cat = Steps.cat
    monkeypatch.setattr(Steps, 'cat', lambda blocks: rows.extend(map(len, blocks)) or cat(blocks))
    list(Gather([numbered(1000)], 10, exact=True))
    assert sum(rows) <= 1000


@pytest.mark.parametrize('restored', [False, True])
def test_steps_in_another_replay_of_a_mixture_are_missing_in_this_one(restored):
    "They lead back to the observation where they began; another environment continues"

    def build():
        return Mixture({name: ExperienceReplay(bs=1, max_sz=9) for name in 'ab'})

    def step(env, obs, next_obs, to='a'):
        mixture.add_step([obs], 0, 1.0, [next_obs], False, env_id=env, to=to)

    mixture = build()
    step(0, 0, 1)
    step(1, 100, 101)
    if restored:
        state = through_file(mixture.state_dict())
        mixture = build()
        mixture.load_state_dict(state)
        with pytest.raises(BlockError, match='env_id'):  # before any step is counted
            step(-1, 1, 1)
    step(0, 1, 2, to='b')
    step(0, 2, 1, to='b')
    step(0, 1, 3)
    step(1, 101, 102)
    rows = mixture.replays['a'].memory[:]
    assert rows.episode_n.tolist() == [1, 1, 2, 1] and rows.step_n.tolist() == [1, 1, 1, 2]


def test_any_byte_but_0_is_true_in_flags():
    "The episode ends, and a checkpoint is loaded"
    replay = ExperienceReplay(bs=1, max_sz=9)
    yes = np.uint8([255]).view(bool)
    for end in [False], yes, [False]:
        replay.add_step([[0.0]], [0], [1.0], [[0.0]], end, autoreset_mode='disabled', z=yes)
    replay.load_state_dict(through_file(replay.state_dict()))
    rows = replay.memory[:].rows
    assert rows['episode_n'].tolist() == [1, 1, 2] and (rows['z'].view(np.uint8) == 1).all()


def test_steps_of_several_threads_are_all_counted():
    "Some give them to the replay, and some to the first stage"
    own = OwnSteps()
    replay = own.n_step(1, 0.9).experience_replay(bs=1, max_sz=9999)
    sys.setswitchinterval(1e-6)

    def steps(env):
        for t in range(300):
            (own if env else replay).add_step([t], 0, 1.0, [t + 1], False, env_id=env)

    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(steps, range(2)))
    finally:
        sys.setswitchinterval(0.005)
    replay.add_step([0], 0, 1.0, [1], False, env_id=2)  # takes what waits, too
    assert sorted(replay.memory[:].step_n.tolist()) == sorted([1, *range(1, 301), *range(1, 301)])


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_steps_that_follow_each_other_are_taken_after_many_that_did_not():
    "Every other step is wrong, until an error says so; then all are right"
    replay = ExperienceReplay(bs=1, max_sz=100)
    for t in range(20):
        with contextlib.suppress(BlockError):
            vector_step(replay, t, 1.0 if t % 2 else np.nan, t + 1)
    for t in range(20, 30):
        vector_step(replay, t, 1.0, t + 1)
    assert leads(replay)[-10:] == [(t, t + 1) for t in range(20, 30)]


@pytest.mark.parametrize('chain', [False, True])
def test_a_wrong_column_after_a_checkpoint_changes_no_later_step(chain):
    replay = memory(chain)
    vector_step(replay, 0, 1.0, 1)
    vector_step(replay, 1, 1.0, 2, True)
    state = through_file(replay.state_dict())
    replay = memory(chain)
    replay.load_state_dict(state)
    # a reset, of which no row comes
    with pytest.raises(
        BlockError, match='the columns differ from the first call: this step is with typo'
    ):
        vector_step(replay, 2, 0.0, 10, typo=np.zeros(1))
    vector_step(replay, 2, 0.0, 10)
    vector_step(replay, 10, 1.0, 11)
    vector_step(replay, 11, 1.0, 12, True)
    assert leads(replay)[-1][0] == 11


@pytest.mark.parametrize('own', [False, True])
@pytest.mark.parametrize('before', [False, True])
def test_no_window_spans_a_block_that_an_error_in_a_pass_has_lost(own, before):
    "The function fails once, before `n_step` or after it"
    source = OwnSteps() if own else GymStepper(Counts(), seed=0)
    seen = []

    def fails_once(steps):
        seen.append(steps)
        if len(seen) == 2:
            raise RuntimeError
        return steps

    chain = (
        source.map(fails_once).n_step(2, 0.5) if before else source.n_step(2, 0.5).map(fails_once)
    )
    replay = chain.experience_replay(bs=1, max_sz=100, seed=0)
    env = Counts()
    obs = env.reset()[0]
    for _ in range(40):
        if own:
            after, reward, ended, _, _ = env.step(0)
            source.add_step(obs, 0, reward, after, ended)
            obs = env.reset()[0] if ended else after
        with contextlib.suppress(RuntimeError):
            next(iter(replay), None)
    assert len(replay) > 20
    check(replay, 2)
    rows = replay.memory[:].rows
    lost = seen[1].rows[0]
    later = rows[rows['episode_n'] == lost['episode_n']]['step_n'] > lost['step_n']
    assert later.any()  # the episode continues behind the gap


class Resets:
    "An environment that resets itself in the next step, and observes [number, episode, step]"

    def __init__(self, number, rng):
        self.number, self.rng = number, rng
        self.episode = 0
        self.ended = True
        self.step()

    def step(self):
        "Return observation, reward, next observation, end, and whether this was no reset"
        before = [self.number, self.episode, self.t] if self.episode else None
        if self.ended:
            self.episode += 1
            self.t = self.left = 0
            self.ended = False
            self.length = self.rng.choice([1, 1, 2, 3, 5])
            self.made = 0
            return before, 0.0, [self.number, self.episode, 0], False, False
        self.made += 1
        self.ended = self.made == self.length
        # at some ends the observation stays as it was, as at a wall
        if not self.ended or self.rng.random() < 0.6:
            self.t += 1
        reward = 0.0 if not self.ended and self.rng.random() < 0.5 else 1.0
        return before, reward, [self.number, self.episode, self.t], self.ended, True


SPOILED = dict(
    reward=lambda how: how['reward'].__setitem__(0, np.nan),
    column=lambda how: how.update(typo=how['reward']),
    flags=lambda how: how.update(truncated=np.zeros((len(how['reward']), 1), bool)),
    single=lambda how: how.update(reward=1.0, truncated=[False] * 9),
    number=lambda how: how.update(env_id=[-1]),
    ragged=lambda how: how.update(env_id=[[0], [0, 1]]),
)


@pytest.mark.parametrize('kind', ['plain', 'own', 'n_step'])
@cases(400)
@given(st.integers(0, 2**32))
def test_no_row_leads_over_a_reset_whatever_was_refused(kind, seed):
    """Steps of three environments, of all or some at a time, are refused, given again, or lost.

    Between them are checkpoints and copies. A row with reward 0 may be missing, with a warning."""
    rng = random.Random(seed)
    envs = [Resets(i, rng) for i in range(3)]
    kinds = dict(plain=lambda: None, own=OwnSteps, n_step=lambda: OwnSteps().n_step(2, 0.5))

    def empty():
        return ExperienceReplay(kinds[kind](), bs=1, max_sz=999)

    replay = empty()
    given, last, begun = {}, [0], False
    doubt, may_miss = set(), set()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        for _ in range(rng.randint(3, 20)):
            some = rng.choice([last, rng.sample(range(3), rng.choice([1, 2, 3]))])
            obs, reward, next_obs, ended, real = zip(*(envs[i].step() for i in some))
            how = dict(reward=np.float32(reward), terminated=np.array(ended), env_id=np.array(some))
            how.update(truncated=np.zeros(len(some), bool), autoreset_mode='next_step')
            step = np.float32(obs), np.zeros(len(some), int), np.float32(next_obs)
            refused = rng.random() < 0.4 and rng.choice([*SPOILED])
            if refused in ('number', 'ragged') and some != last:
                refused = False  # whose step it was can't be known
            if refused == 'column' and not begun:
                refused = False  # the first step decides which columns there are
            if refused:
                if any(ended):
                    doubt |= {i for i, end in zip(some, ended) if end}
                    doubt |= {0, 1, 2} if refused not in ('reward', 'column') else set()
                wrong = dict(how, reward=how['reward'].copy())
                SPOILED[refused](wrong)
                with pytest.raises((BlockError, TypeError)):
                    replay.add_step(*step[:2], next_obs=step[2], **wrong)
            if not refused or rng.random() < 0.5:
                replay.add_step(*step[:2], next_obs=step[2], **how)
                begun = True
                given.update((tuple(o), r) for o, r, ok in zip(obs, reward, real) if ok)
                may_miss |= {tuple(o) for i, o in zip(some, obs) if i in doubt}
                doubt -= set(some)
            else:
                doubt |= set(some)
            last = some
            again = rng.choice(['copied', 'saved', 'saved', *['no'] * 6])
            if again == 'saved':
                state = through_file(replay.state_dict())
                replay = empty()
                replay.load_state_dict(state)
            if again == 'copied':
                replay = copy.deepcopy(replay)
                doubt = {0, 1, 2}
            begun = begun and again == 'no'
    rows = replay.memory[:].rows if len(replay.memory) else []
    episodes = {}
    for row in rows:
        (env, episode, t), after = row['state'].tolist(), row['next_state'].tolist()
        assert after[:2] == [env, episode], (seed, row)
        assert episodes.setdefault((env, row['episode_n']), episode) == episode, (seed, row)
        assert given.get((env, episode, t)) is not None, (seed, row)
    if kind == 'n_step':
        return
    kept = [tuple(row['state'].tolist()) for row in rows]
    assert len(set(kept)) == len(kept)
    missing = given.keys() - set(kept)
    assert missing <= may_miss and not any(given[step] for step in missing), seed
    assert not missing or any('left out' in str(w.message) for w in said), seed
