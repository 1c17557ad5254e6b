"""`LaneReplay` against lists of transitions, one for each environment."""

import copy
import pickle
import random
import warnings
from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy.stats import chisquare

from fastrl_replay.all import *
from fastrl_replay.replay.lanes import LOOK_EVERY
from fastrl_replay.steps.core import pack, unpack
from fastrl_replay.testing import through_file

GAMMA = 0.9


class Worlds:
    "Random environments that step together, and the transitions that they made"

    def __init__(self, envs, ends, seed, resets='same step'):
        self.resets = resets
        self.random = random.Random(seed)
        self.envs = envs
        self.ends = ends  # probability that an episode ends
        self.numbers = 0.0
        self.rows = [[] for _ in range(envs)]
        self.states = [self.number() for _ in range(envs)]
        self.continues = False  # True if the states are the observations that `step` returned
        self.final = None  # what the newest step had as last observations

    def number(self):
        self.numbers += 1
        return self.numbers

    def restart(self):
        "The loop resets an environment in the middle of an episode"
        env = self.random.randrange(self.envs)
        if self.rows[env] and not self.rows[env][-1]['end']:
            self.rows[env][-1]['end'] = 2
            self.states[env] = self.number()
            self.continues = False

    def step(self):
        "Return the arguments of `add_step`"
        obs = column(self.states)
        if self.continues and self.random.random() < 0.5:
            obs = None
        rewards, ends, finals, after = [], [], [], []
        for env in range(self.envs):
            end = self.random.choices([0, 1, 2, 3], [1 - self.ends, *[self.ends / 3] * 3])[0]
            final = self.number()
            reward = float(self.random.randint(-3, 3))
            row = dict(state=self.states[env], reward=reward, end=end, after=final)
            self.rows[env].append(row)
            rewards.append(reward)
            ends.append(end)
            finals.append(final)
            after.append(self.number() if end else final)
        self.states = after
        by_loop = self.resets == 'loop'
        self.continues = not (by_loop and any(ends))
        answer = column(finals if by_loop else after)
        ends = torch.tensor(ends)
        known = self.resets == 'same step' or by_loop and self.random.random() < 0.5
        self.final = column(finals) if known else None
        final = self.final if ends.any() else None
        flags = (ends & 1).bool(), (ends & 2).bool()
        return obs, torch.zeros(self.envs), torch.tensor(rewards), answer, *flags, final

    def unknown(self, key, n):
        "Return True if the loop has not yet shown whether it resets this environment"
        last = key // self.envs + len(self.merged(key, n)) - 1
        newest = self.rows[key % self.envs][-1]
        return self.final is None and last == len(self.rows[0]) - 1 and newest['end'] == 2

    def merged(self, key, n):
        "Return the rows that an n-step return consists of"
        step, env = divmod(key, self.envs)
        rows = []
        for row in self.rows[env][step : step + n]:
            rows.append(row)
            if row['end']:
                break
        return rows


def column(numbers):
    return torch.tensor(numbers)[:, None]


def check(batch, worlds, n, steps):
    now = len(worlds.rows[0])
    for i, key in enumerate(batch.index.tolist()):
        assert now - steps <= key // worlds.envs < now
        rows = worlds.merged(key, n)
        last = rows[-1]
        terminated, truncated = bool(last['end'] & 1), bool(last['end'] & 2)
        assert batch.state[i] == rows[0]['state'] and batch.n[i] == len(rows)
        wanted = sum(GAMMA**k * row['reward'] for k, row in enumerate(rows))
        assert batch.reward[i].item() == pytest.approx(wanted, abs=1e-4)
        assert (batch.terminated[i], batch.truncated[i]) == (terminated, truncated)
        discount = 0 if terminated else GAMMA ** len(rows)
        assert batch.discount[i].item() == pytest.approx(discount, abs=1e-6)
        if batch.weight[i] > 0 and not terminated:
            assert batch.next_state[i] == last['after']


@pytest.mark.parametrize('seed', range(60))
def test_rows_are_those_of_a_plain_model(seed):
    "Through several turns of the ring; every second stream has loops that reset early"
    choose = random.Random(seed)
    resets = choose.choice(['same step', 'loop'])
    envs, steps, n = choose.choice([1, 2, 3, 5, 8, 64]), choose.randint(1, 12), choose.randint(1, 8)
    worlds = Worlds(envs, choose.choice([0, 0.1, 0.5, 1]), seed, resets)
    finals = choose.choice(['all', 'truncated'])
    replay = LaneReplay(envs, steps, n=n, gamma=GAMMA, finals=finals, seed=seed)
    for _ in range(choose.randint(1, 40)):
        if seed % 2 and choose.random() < 0.2:
            worlds.restart()
        keys = replay.add_step(*worlds.step())
        assert keys.tolist() == [*range(len(worlds.rows[0]) * envs)][-envs:]
        batch = replay.sample(16)
        check(batch, worlds, n, steps)
        unknown = [worlds.unknown(key, n) for key in batch.index.tolist()]
        assert batch.weight.eq(0).tolist() == unknown
    rows = min(steps, len(worlds.rows[0]))
    assert len(replay) == rows * envs


@pytest.mark.parametrize('seed', range(20))
def test_a_row_whose_last_observation_was_overwritten_has_no_weight(seed):
    worlds = Worlds(4, 0.5, seed)
    replay = LaneReplay(4, 30, n=3, gamma=GAMMA, room=4, seed=0)
    for _ in range(40):
        replay.add_step(*worlds.step())
    batch = replay.sample(500)
    check(batch, worlds, 3, 30)
    lost = replay.stats()['lost']
    assert lost and lost == batch.weight.eq(0).sum()


@pytest.mark.parametrize('seed', range(10))
def test_truncated_rows_without_last_observations_have_no_weight(seed):
    "The environments reset themselves, and final_obs is not passed"
    worlds = Worlds(4, 0.5, seed, 'unseen')
    replay = LaneReplay(4, 30, gamma=GAMMA, seed=0)
    for _ in range(40):
        replay.add_step(*worlds.step())
    batch = replay.sample(300)
    assert torch.equal(batch.weight == 0, batch.truncated & ~batch.terminated)
    check(batch, worlds, 1, 30)


def test_missing_last_observations_are_warned_of_once():
    worlds = Worlds(4, 0.5, 0)
    replay = LaneReplay(4, 300, room=4, bs=300, seed=0)
    with pytest.warns(UserWarning, match='are missing.*final_obs.*room above 4') as caught:
        for _ in range(4 * LOOK_EVERY):
            replay.add_step(*worlds.step())
            replay.sample()
    assert len(caught) == 1


def test_observations_that_never_match_are_warned_of():
    "For example, if they are normalized by statistics that change"
    replay, zeros = LaneReplay(3, 50), torch.zeros(3)
    with pytest.warns(UserWarning, match='most observations differ.*normalize batches') as caught:
        for t in range(3 * LOOK_EVERY):
            replay.add_step(zeros + t, zeros, zeros, zeros + t + 0.5, zeros.bool(), zeros.bool())
    assert len(caught) == 1


def test_sequences_are_steps_of_one_episode():
    worlds = Worlds(3, 0.2, 1)
    replay = LaneReplay(3, 20, gamma=GAMMA, seed=0)
    for _ in range(33):
        replay.add_step(*worlds.step())
    batch = replay.sample(200, length=5)
    for i, key in enumerate(batch.index.tolist()):
        rows = worlds.merged(key, 5)
        real = [True] * len(rows) + [False] * (5 - len(rows))
        assert batch.mask[i].tolist() == real
        for k, row in enumerate(rows):
            got = batch.state[i, k], batch.reward[i, k], batch.next_state[i, k]
            assert got == (row['state'], row['reward'], row['after'])
            assert batch.discount[i, k].item() == pytest.approx(GAMMA * (not row['end'] & 1))


def filled(envs=3, steps=5, moments=9, **kwargs):
    replay = LaneReplay(envs, steps, seed=0, **kwargs)
    zeros = torch.zeros(envs)
    for t in range(moments):
        flags = zeros.bool(), zeros.bool()
        replay.add_step(zeros[:, None] + t, zeros, zeros, zeros[:, None] + t + 1, *flags)
    return replay


def test_priorities_are_exact_and_late_errors_are_dropped():
    replay = filled(sampler=LanePriority(alpha=1, beta=1, eps=0))
    keys = torch.arange(12, 27)
    td = torch.rand(15, generator=torch.Generator().manual_seed(0))
    td[2] = 0
    replay.update_priorities(torch.cat([keys, keys[:4] - 12]), torch.cat([td, td[:4]]))
    assert replay.stats()['dropped_errors'] == 4
    batch = replay.sample(100_000)
    found = torch.bincount(batch.index - 12, minlength=15).numpy()
    share = (td.double() / td.double().sum()).numpy()
    assert found[2] == 0
    drawn = share > 0
    assert chisquare(found[drawn], share[drawn] * 100_000).pvalue > 1e-4
    weight = torch.from_numpy(1 / share[batch.index - 12])
    assert torch.allclose(batch.weight.double(), weight / weight.max(), atol=1e-5)
    # new rows have the largest priority so far
    zeros = torch.zeros(3)
    replay.add_step(zeros[:, None], zeros, zeros, zeros[:, None], zeros.bool(), zeros.bool())
    levels = replay.sampler.levels
    assert levels[0].max() == 1 and levels[0].count_nonzero() == 15
    assert levels[-1].sum() == pytest.approx(levels[0].double().sum())


@pytest.mark.parametrize('twice', [torch.tensor([13, 13]), torch.tensor([13, 14, 13])])
def test_a_row_that_was_drawn_twice_has_one_priority(twice):
    replay = filled(sampler=LanePriority(alpha=1, eps=0))
    replay.update_priorities(twice, torch.arange(1.0, len(twice) + 1))
    at = 13 % replay.store.size
    assert replay.sampler.levels[0][at] == len(twice)
    assert replay.sampler.levels[-1].sum() == replay.sampler.levels[0].sum()


def test_newer_rows_are_drawn_more_often():
    replay = filled(2, 10, 25, sampler=LaneUniform(decay=0.7))
    age = 24 - replay.sample(50_000).index // 2
    wanted = 0.7 ** np.arange(10)
    found = torch.bincount(age, minlength=10).numpy()
    assert chisquare(found, wanted / wanted.sum() * 50_000).pvalue > 1e-4


def test_as_many_rows_from_each_environment():
    replay = filled(sampler=LaneUniform(each=True))
    assert (replay.sample(12).index % 3).bincount().tolist() == [4, 4, 4]
    with pytest.raises(ArgumentError, match='a multiple of the number of environments, 3'):
        replay.sample(10)


@pytest.mark.parametrize('sampler', [LaneUniform, LanePriority])
def test_a_loaded_replay_continues_exactly(sampler):
    worlds = Worlds(4, 0.3, 2)
    replay = LaneReplay(4, 10, bs=9, n=2, sampler=sampler(), seed=0)
    for _ in range(17):
        replay.add_step(*worlds.step())
        batch = replay.sample()
        batch.update_priorities(batch.reward)
    fresh = LaneReplay(4, 10, bs=9, n=2, sampler=sampler(), seed=1)
    fresh.load_state_dict(through_file(replay.state_dict()))
    for _ in range(12):
        step = worlds.step()
        for r in replay, fresh:
            r.add_step(*step)
        a, b = replay.sample().asdict(), fresh.sample().asdict()
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for r in replay, fresh:
            r.update_priorities(a['index'], a['reward'])


def test_a_state_of_other_columns_changes_nothing():
    replay, other = filled(), LaneReplay(3, 5)
    two, zeros = torch.zeros(3, 2), torch.zeros(3)
    other.add_step(two, zeros, zeros, two, zeros.bool(), zeros.bool())
    before = replay.stats()
    with pytest.raises(StateError, match='the saved state .* does not fit'):
        replay.load_state_dict(other.state_dict())
    assert replay.stats() == before


def test_nested_columns_and_storage_dtypes():
    "Bytes stay bytes, and observations are stored in half the memory"
    replay = LaneReplay(2, 50, dtype={'state.critic': torch.bfloat16, 'action': torch.float16})
    zeros = torch.zeros(2)
    for t in range(20):
        obs, after = (
            dict(image=torch.full((2, 3, 3), k, dtype=torch.uint8), critic=zeros[:, None] + k)
            for k in (t, t + 1)
        )
        ends = torch.tensor([t % 5 == 4, False])
        replay.add_step(obs, (zeros, zeros[:, None]), zeros, after, ends, ~ends & ends, value=zeros)
    batch = replay.sample(64)
    step = batch.index // 2
    assert (
        batch.state['image'].dtype == torch.uint8 and batch.state['critic'].dtype == torch.bfloat16
    )
    assert torch.equal(batch.state['image'][:, 0, 0].long(), step)
    assert torch.equal(batch.next_state['critic'][:, 0].long(), step + 1)
    assert batch.action[1].dtype == torch.float16 and batch.value.shape == (64,)
    rows = replay.to_steps()
    assert rows.rows['state']['critic'][:, 0].tolist() == [t for t in range(20) for _ in range(2)]


def test_rows_in_the_ordinary_format():
    env = ScriptedLanes([[2, 3], [-2]])
    chain = TensorStepper(env, lambda obs: torch.zeros(len(obs))).lane_replay(steps=20, bs=2)
    for _ in islice(chain, 9):
        pass
    rows = chain.replay.to_steps().rows
    first = rows[rows['env_id'] == 0]
    assert first['episode_n'][:6].tolist() == [1, 1, 2, 2, 2, 3]
    assert first['step_n'][:6].tolist() == [1, 2, 1, 2, 3, 1]
    assert first['total_reward'][:5].tolist() == [1, 3, 101, 203, 306]
    assert first['next_state'][1].tolist() == [0, 0, 2]
    second = rows[rows['env_id'] == 1]
    assert second['truncated'][:4].tolist() == [False, True, False, True]


def test_memory_of_an_earlier_batch_is_used():
    replay = filled(bs=4)
    batch = replay.sample()
    place = batch.state.data_ptr()
    same = LaneReplay(3, 5, bs=4)
    same.load_state_dict(replay.state_dict())
    assert replay.sample(out=batch) is batch and batch.state.data_ptr() == place
    assert torch.equal(batch.index, same.sample().index)


def test_errors_come_before_anything_is_changed():
    with pytest.raises(ArgumentError, match='room; got 2; expected an integer, at least 3'):
        LaneReplay(3, 5, room=2)
    replay = LaneReplay(3, 5)
    with pytest.raises(NotEnoughRows, match='there are no rows'):
        replay.sample(2)
    zeros = torch.zeros(3)
    with pytest.raises(
        BlockError,
        match=r"terminated has a wrong shape .*got {.*bool\[3, 1\].*expected {.*bool\[3\]",
    ):
        replay.add_step(zeros, zeros, zeros, zeros, zeros[:, None].bool(), zeros.bool())
    with pytest.raises(BlockError, match=r'state has a wrong shape or dtype; got .*float32\[2\]'):
        replay.add_step(zeros[:2], zeros, zeros, zeros, zeros.bool(), zeros.bool())
    replay.add_step(zeros, zeros, zeros, zeros, zeros.bool(), zeros.bool())
    with pytest.raises(ArgumentError, match='bs; got None'):
        replay.sample()
    with pytest.raises(BlockError, match=r'td has the wrong shape; got \[2\]; expected \[3\]'):
        replay.update_priorities(torch.arange(3), zeros[:2])


def test_the_first_step_must_have_one_structure():
    "Or the parts of last observations would be those of others"
    replay, zeros = LaneReplay(2, 5), torch.zeros(2)
    step = dict(action=zeros, reward=zeros, terminated=zeros.bool(), truncated=zeros.bool())
    with pytest.raises(BlockError, match=r'final_obs has a wrong shape.*critic.*expected .*state'):
        replay.add_step(zeros, next_obs=zeros, final_obs=dict(critic=zeros), **step)
    with pytest.raises(BlockError, match='next_obs has a wrong shape'):
        replay.add_step(dict(policy=zeros), next_obs=zeros, **step)
    with pytest.raises(NotEnoughRows):
        replay.sample(2)
    with pytest.raises(BlockError, match='the first step, also after loading, needs obs'):
        replay.add_step(None, next_obs=zeros, **step)


def test_a_simulator_may_overwrite_the_tensor_that_it_returned():
    "Then `obs` has the values of `next_obs`; those that were stored are used"
    replay, buffer, zeros = LaneReplay(2, 50, gamma=0.5, seed=0), torch.zeros(2, 1), torch.zeros(2)
    replay.add_step(buffer.clone(), zeros, zeros, buffer, zeros.bool(), zeros.bool())
    for t in range(1, 20):
        obs = buffer
        buffer += 1
        ends = torch.tensor([t % 5 == 0, False])
        final = torch.full((2, 1), -1.0) if ends.any() else None
        replay.add_step(obs, zeros, zeros + t, buffer, ends, zeros.bool(), final)
    batch = replay.sample(200)
    assert torch.equal(batch.state[:, 0], (batch.index // 2 - 1).clamp(0).float())
    assert not batch.truncated.any() and replay.stats()['resets_without_end'] == 0
    wanted = torch.where(batch.terminated, -1, batch.state[:, 0] + (batch.index >= 2))
    assert torch.equal(batch.next_state[:, 0], wanted)


def test_observations_that_do_not_match_end_episodes_but_nan_matches_nan():
    replay, zeros = LaneReplay(3, 50), torch.zeros(3)
    after = torch.tensor([[1.0], [torch.nan], [3.0]])
    replay.add_step(after, zeros, zeros, after.clone(), zeros.bool(), zeros.bool())
    replay.add_step(
        after + torch.tensor([[1.0], [0], [0]]), zeros, zeros, after, zeros.bool(), zeros.bool()
    )
    assert replay.take(torch.arange(3)).truncated.tolist() == [True, False, False]
    assert replay.stats()['resets_without_end'] == 1


def flags(n):
    return dict(terminated=torch.zeros(n).bool(), truncated=torch.zeros(n).bool())


def test_parts_are_matched_by_name_and_all_are_needed():
    replay, zeros = LaneReplay(2, 20), torch.zeros(2)
    obs, after = dict(a=zeros, b=zeros + 10), dict(b=zeros + 11, a=zeros + 1)
    step = dict(action=zeros, reward=zeros, next_obs=after, **flags(2))
    replay.add_step(obs, **step)
    after = replay.take(torch.arange(2)).next_state
    assert after['a'].tolist() == [1, 1] and after['b'].tolist() == [11, 11]
    for partial in dict(a=zeros), {}:
        with pytest.raises(BlockError, match='final_obs has a wrong shape'):
            replay.add_step(obs, final_obs=partial, **step)


def test_a_loop_may_reset_in_place():
    replay, zeros, obs = LaneReplay(2, 20), torch.zeros(2), torch.zeros(2, 1)
    for t in range(4):
        after, terminated = obs + 1, torch.tensor([t == 1, False])
        replay.add_step(obs, zeros, zeros, after, terminated, zeros.bool())
        after[terminated] = 100
        obs = after
    batch = replay.take(torch.arange(0, 8, 2))
    assert batch.state[:, 0].tolist() == [0, 1, 100, 101]
    assert batch.next_state[:, 0].tolist() == [1, 2, 101, 102]


def test_nan_rewards_stay_in_their_episode():
    replay = LaneReplay(1, 20, gamma=1.0)
    for t, reward in enumerate([1.0, 2.0, torch.nan, 4.0]):
        states = [
            torch.zeros(1) + t,
            torch.zeros(1),
            torch.tensor([reward]),
            torch.zeros(1) + t + 1,
        ]
        ends = torch.tensor([t == 1]), torch.tensor([False])
        replay.add_step(*states, *ends, torch.zeros(1) + t + 1)
    rewards = replay.take(torch.arange(4), n=3).reward.tolist()
    assert rewards[:2] == [3, 2] and rewards[3] == 4 and np.isnan(rewards[2])


def unseen(replay, moments):
    "The environments reset themselves, and the last observation is not passed"
    for t in range(moments):
        ends, none = torch.tensor([t % 3 == 2]), torch.tensor([False])
        obs, after = torch.tensor([float(t)]), torch.tensor([t + 1.0])
        replay.add_step(obs, after, after, after, none, ends)


def test_rows_without_last_observations_are_not_exported():
    replay = LaneReplay(1, 20)
    unseen(replay, 8)
    rows = replay.to_steps().rows
    assert rows['state'].tolist() == [0, 1, 3, 4, 6, 7] and not replay.stats()['lost']


def test_replays_do_not_share_a_sampler():
    sampler = LanePriority()
    first, second = filled(sampler=sampler), filled(2, 9, sampler=sampler)
    assert first.sampler.store is first.store and second.sampler.store is second.store


@pytest.mark.parametrize(
    'damage',
    [
        lambda state: state.pop('generator'),
        lambda state: state.update(generator=torch.zeros(3)),
        lambda state: state['tensors'].pop('store.owner'),
        lambda state: state['tensors']['store.ends'].fill_(-5),
        lambda state: state['tensors']['store.count'].fill_(-5),
        lambda state: state['tensors']['sampler.levels[0]'].fill_(torch.nan),
        lambda state: state['tensors'].update({'store.columns.state': torch.zeros(5, 1)}),
        lambda state: state['tensors'].pop('store.columns.reward'),
        lambda state: state.update(tensors=3),
        lambda state: state.pop('settings'),
    ],
)
def test_damaged_states_are_refused(damage):
    state = filled(moments=7, sampler=LanePriority()).state_dict()
    damage(state)
    used = filled(sampler=LanePriority())
    fresh = LaneReplay(3, 5, sampler=LanePriority())
    before = used.state_dict()
    for replay in used, fresh:
        with pytest.raises(StateError):
            replay.load_state_dict(state)
    after = used.state_dict()
    assert all(torch.equal(after['tensors'][k], x) for k, x in before['tensors'].items())
    with pytest.raises(NotEnoughRows):
        fresh.sample(2)


def test_columns_may_have_any_other_name():
    "Also those of attributes, and those that begin like the observations"
    replay, fresh, zeros = LaneReplay(2, 5), LaneReplay(2, 5), torch.zeros(2)
    more = dict(count=zeros + 7, ends=zeros + 8, state_h=zeros + 9)
    replay.add_step(zeros, zeros, zeros, zeros, **flags(2), **more)
    fresh.load_state_dict(through_file(replay.state_dict()))
    batch = fresh.take(torch.arange(2))
    assert [batch[name].tolist() for name in more] == [[7, 7], [8, 8], [9, 9]]


def test_a_loaded_replay_does_not_warn_of_the_past():
    replay, zeros = LaneReplay(3, 50), torch.zeros(3)
    fresh = LaneReplay(3, 50)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for t in range(700):
            replay.add_step(zeros + t, zeros, zeros, zeros + t + 0.5, **flags(3))
    fresh.load_state_dict(replay.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for t in range(700):
            fresh.add_step(zeros + t, zeros, zeros, zeros + t + 1, **flags(3))


@pytest.mark.parametrize('as_', [lambda x: x[:, :1], lambda x: dict(a=x, b=x + 0)['a'].view(2, 2)])
def test_views_of_a_tensor_that_is_overwritten(as_):
    replay, buffer, zeros = LaneReplay(2, 50, seed=0), torch.zeros(2, 2), torch.zeros(2)
    replay.add_step(as_(buffer.clone()), zeros, zeros, as_(buffer), **flags(2))
    for _ in range(10):
        obs = as_(buffer)
        buffer += 1
        replay.add_step(obs, zeros, zeros, as_(buffer), **flags(2))
    batch = replay.sample(100)
    assert torch.equal(batch.state[:, 0], (batch.index // 2 - 1).clamp(0).float())
    assert not batch.truncated.any()


def test_steps_of_a_loaded_replay_are_checked():
    fresh, zeros = LaneReplay(3, 5), torch.zeros(3)
    fresh.load_state_dict(filled().state_dict())
    with pytest.raises(BlockError, match='value has a wrong shape or dtype; .*expected nothing'):
        fresh.add_step(zeros[:, None], zeros, zeros, zeros[:, None], **flags(3), value=zeros)
    with pytest.raises(ArgumentError, match="is taken; got .*'weight'"):
        fresh.add_step(zeros[:, None], zeros, zeros, zeros[:, None], **flags(3), weight=zeros)


def test_numbers_keep_their_kind_and_gradients_are_not_kept():
    replay, whole, half = LaneReplay(2, 5), torch.zeros(2, dtype=torch.int64), torch.full((2,), 0.5)
    with torch.inference_mode():
        replay.add_step(half, half, whole, half, **flags(2))
    with pytest.raises(BlockError, match=r'reward has a wrong shape.*float32\[2\].*int64\[2\]'):
        replay.add_step(half, half, half, half, **flags(2))
    replay.add_step(half, torch.ones(2, requires_grad=True), whole, half, **flags(2))
    assert not replay.sample(4).action.requires_grad


def test_all_errors_may_be_zero():
    replay = filled(sampler=LanePriority(eps=0))
    replay.update_priorities(torch.arange(12, 27), torch.zeros(15))
    assert len(replay.sample(50)) == 50


@pytest.mark.filterwarnings('ignore:.*begin new episodes')
def test_learners_of_discrete_actions_take_its_batches():
    torch.manual_seed(0)
    net = value_net(spaces.Box(-9, 9, (3,)), spaces.Discrete(2), (8,))
    act = lambda obs: torch.randint(2, (len(obs),))
    chain = TensorStepper(ScriptedLanes([[4], [-3]]), act).lane_replay(50, 8, seed=0)
    records = list(islice(chain.dqn(net), 5))
    assert all(np.isfinite(record['loss']) for record in records)
    copied = pickle.loads(pickle.dumps(chain.replay.sample()))
    assert copied.state.shape == (8, 3)


def test_not_finite_rewards_are_counted():
    replay, zeros = LaneReplay(3, 5), torch.zeros(3)
    replay.add_step(zeros, zeros, zeros / 0, zeros, zeros.bool(), zeros.bool())
    assert replay.stats()['rewards_not_finite'] == 3


def test_a_chain_continues_at_every_item():
    worlds = Worlds(3, 0.3, 5)
    names = 'obs action reward next_obs terminated truncated final_obs'.split()
    steps = []
    for _ in range(8):
        worlds.continues = False  # so that `obs` is given
        steps.append(dict(zip(names, worlds.step())))

    def chain():
        return Items(steps).lane_replay(
            4, 5, n=2, updates=2, warmup=7, sampler=LanePriority(), seed=0
        )

    whole = list(chain())
    assert len(whole) == 12
    for k in range(13):
        a, b = chain(), chain()
        found = list(islice(a, k))
        b.load_state_dict(through_file(a.state_dict()))
        for x, y in zip(found + list(b), whole, strict=True):
            assert torch.equal(x.index, y.index) and torch.equal(x.reward, y.reward)


class Steered:
    "A point is pushed, and should be near 0; episodes are truncated after 20 steps"

    def __init__(self, envs):
        self.num_envs = envs

    def reset(self, *, seed=None):
        self.random = torch.Generator().manual_seed(seed)
        self.t = torch.zeros(self.num_envs)
        self.x = torch.rand(self.num_envs, generator=self.random) * 2 - 1
        return self.x[:, None].clone(), {}

    def step(self, action):
        self.x = self.x + 0.2 * action[:, 0].clamp(-1, 1)
        self.t += 1
        reward, last, over = -self.x.abs(), self.x[:, None].clone(), self.t == 20
        self.x[over] = torch.rand(int(over.sum()), generator=self.random) * 2 - 1
        self.t[over] = 0
        none = torch.zeros_like(over)
        return self.x[:, None].clone(), reward, none, over, dict(final_observation=last)


@pytest.mark.slow
def test_a_chain_learns():
    torch.manual_seed(0)
    box, act = spaces.Box(-9, 9, (1,)), spaces.Box(-1, 1, (1,))
    actor, critics = actor_net(box, act, hidden=(32,)), Critics(box, act, hidden=(32,))
    env = Steered(64)
    noise = torch.Generator().manual_seed(0)

    def policy(obs):
        return (actor(obs).tanh() + 0.3 * torch.randn(64, 1, generator=noise)).clamp(-1, 1)

    def mean_reward():
        env = Steered(64)
        obs, _ = env.reset(seed=1)
        rewards = []
        for _ in range(20):
            with torch.no_grad():
                obs, reward, *_ = env.step(actor(obs).tanh())
            rewards.append(reward.mean().item())
        return np.mean(rewards)

    before = mean_reward()
    chain = TensorStepper(env, policy, seed=0).lane_replay(steps=200, bs=128, n=3, seed=0)
    for _ in islice(chain.td3(actor, critics, act, lr=1e-3, seed=0), 1_000):
        pass
    assert mean_reward() > max(-0.2, before / 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
def test_on_a_gpu_nothing_waits_for_the_device():
    replay = LaneReplay(16, 30, n=3, bs=8, sampler=LanePriority(), device='cuda', seed=0)
    worlds = Worlds(16, 0.3, 0)
    steps = [[None if x is None else x.cuda() for x in worlds.step()] for _ in range(50)]
    replay.add_step(*steps[0])
    torch.cuda.set_sync_debug_mode('error')
    for step in steps[1:]:
        replay.add_step(*step)
        replay.update_priorities(replay.sample().index, torch.ones(8, device='cuda'))
    torch.cuda.set_sync_debug_mode('default')
    check(replay.sample(200).to('cpu'), worlds, 3, 30)


def test_batches_can_be_copied_joined_and_made_rows():
    replay = filled()
    batch = replay.take(torch.arange(12, 20))
    for same in batch.copy(), copy.copy(batch):
        same.reward.add_(1)
        assert torch.equal(same.state, batch.state) and same.reward.eq(batch.reward + 1).all()
    both = Steps.cat([batch, batch])
    assert torch.equal(both.state, torch.cat([batch.state, batch.state]))
    assert batch == batch and batch.to('cpu').rows['n'].tolist() == [1] * 8
    assert unpack(pack(batch)) == batch


def test_parts_that_are_overwritten_in_place_are_taken_from_the_row_before():
    zeros = torch.zeros(1)
    replay, buffer = LaneReplay(1, 20), torch.zeros(1)
    replay.add_step((zeros, buffer.clone()), zeros, zeros, (zeros + 1, buffer), **flags(1))
    for t in range(1, 4):
        obs = zeros + t, buffer
        buffer += 1
        replay.add_step(obs, zeros, zeros, (zeros + t + 1, buffer), **flags(1))
    batch = replay.take(torch.arange(4))
    assert batch.state[1].tolist() == [0, 0, 1, 2] and not batch.truncated.any()


class Overwriting:
    "A simulator that always returns the same tensor"

    def __init__(self):
        self.obs = torch.zeros(2, 1)

    def reset(self, *, seed=None):
        self.obs.zero_()
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, action, action.bool(), action.bool(), {}


@pytest.mark.filterwarnings('ignore:.*begin|.*start new episodes')
def test_a_chain_resumes_with_a_simulator_that_overwrites_its_tensor():
    def chain():
        act = lambda obs: torch.zeros(2)
        return TensorStepper(Overwriting(), act).lane_replay(20, 4, warmup=1, seed=0)

    before, after = chain(), chain()
    list(islice(before, 5))
    after.load_state_dict(through_file(before.state_dict()))
    list(islice(after, 3))
    batch = after.replay.take(torch.arange(0, 16, 2))
    assert batch.state[:, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.next_state[:, 0].tolist() == [1, 2, 3, 4, 5, 1, 2, 3]
    assert batch.truncated.tolist() == [False] * 4 + [True] + [False] * 3


def test_environments_that_the_loop_must_reset_are_refused():
    env = Overwriting()
    env.metadata = dict(autoreset_mode='disabled')
    with pytest.raises(ArgumentError, match='must reset in the step that ends an episode'):
        TensorStepper(env, lambda obs: obs)


def test_a_replay_that_inference_mode_made_can_be_used_outside():
    zeros = torch.zeros(2)
    with torch.inference_mode():
        replay = LaneReplay(2, 5, sampler=LanePriority())
        replay.add_step(zeros, zeros, zeros, zeros, **flags(2))
    replay.add_step(zeros, zeros, zeros, zeros, **flags(2))
    replay.update_priorities(replay.sample(4).index, torch.ones(4))


@pytest.mark.parametrize(
    'obs',
    [
        torch.zeros(1, 2)[:, 0],
        torch.zeros(1, 3).T[:1],
        dict(a=torch.zeros(1), empty=torch.zeros(1, 0)),
        torch.zeros(1, 1).expand(1, 3),
    ],
)
def test_layouts_of_observations(obs):
    replay, zeros = LaneReplay(1, 5, room=1), torch.zeros(1)
    for _ in range(3):
        replay.add_step(obs, zeros, zeros, obs, **flags(1))
    assert replay.stats()['resets_without_end'] == 0 and len(replay) == 3


def test_a_first_step_that_torch_cannot_store_changes_nothing():
    replay, zeros = LaneReplay(2, 5), torch.zeros(2)
    with pytest.raises(RuntimeError, match='index_copy'):
        replay.add_step(zeros.to(torch.uint16), zeros, zeros, zeros.to(torch.uint16), **flags(2))
    with pytest.raises(ArgumentTypeError, match='NoneType cannot be a tensor'):
        replay.add_step(zeros, None, zeros, zeros, **flags(2))
    replay.add_step(zeros, zeros, zeros, zeros, **flags(2))


def test_columns_that_dtype_names_must_exist():
    zeros = torch.zeros(2)
    for names, step in (['obs'], zeros), (['state.b', 'reward'], dict(a=zeros)):
        replay = LaneReplay(2, 5, dtype=dict.fromkeys(names, torch.bfloat16))
        with pytest.raises(
            ArgumentError, match=rf'unknown columns; got .*{names[0]}.*some of state'
        ):
            replay.add_step(step, zeros, zeros, step, **flags(2))


def test_the_first_step_after_loading_needs_observations():
    replay, zeros = filled(), torch.zeros(3)
    replay.load_state_dict(replay.state_dict())
    with pytest.raises(BlockError, match='after loading, needs obs'):
        replay.add_step(None, zeros, zeros, zeros[:, None], **flags(3))
    replay.add_step(zeros[:, None] - 1, zeros, zeros, zeros[:, None], **flags(3))
    assert replay.stats()['resets_without_end'] == 3


@pytest.mark.parametrize(
    'damage',
    [
        lambda tensors: tensors['sampler.levels[0]'].zero_(),
        lambda tensors: tensors['sampler.levels[0]'].fill_(1),
        lambda tensors: tensors['store.ends'].fill_(400_000),
        lambda tensors: tensors['store.count'].zero_(),
    ],
)
def test_states_with_wrong_numbers_do_not_crash(damage):
    state = filled(moments=7, sampler=LanePriority()).state_dict()
    damage(state['tensors'])
    replay = LaneReplay(3, 5, sampler=LanePriority())
    replay.load_state_dict(state)
    assert len(replay.sample(9)) == 9


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_compiled_functions_may_add_sample_and_learn():
    "Without a compiler of C++: what is tested is that torch can trace or skip each call"
    replay, same, zeros = filled(bs=4, n=2), LaneReplay(3, 5, bs=4, n=2), torch.zeros(3)
    same.load_state_dict(replay.state_dict())

    def compiled(f):
        return torch.compile(f, backend='eager')

    step = zeros[:, None] + 9, zeros, zeros, zeros[:, None] + 10, *flags(3).values()
    keys = compiled(replay.add_step)(*step)
    assert torch.equal(keys, same.add_step(*step))
    batch, other = compiled(replay.sample)(), same.sample()
    assert torch.equal(batch.index, other.index)
    loss = lambda batch: (batch.reward + batch.discount * batch.next_state[:, 0]).sum()
    assert compiled(loss)(batch) == loss(other)
    assert torch.equal(compiled(lambda: replay.sample(out=batch))().index, same.sample().index)
