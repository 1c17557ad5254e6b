"""Several agents: rows of a scripted environment, places, errors, saving, masks, combinations."""

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from scripted import take, through_file
from fastrl_replay.all import *


class Script:
    """Play a plan, which names the agents at each time.

    Observations and rewards say which agent it is and when. `b` breaks off instead of ending.
    Actions, which the plan can't know, are kept."""

    possible_agents = ['a', 'b', 'c']
    plan = 'ab', 'a', 'abc', 'ac', ''
    obs, acts, extra = spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(4), ()

    def __init__(self):
        self.seeds, self.actions, self.agents, self.total = [], [], [], 0

    def observation_space(self, agent):
        return self.obs

    def action_space(self, agent):
        return self.acts

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.t, self.agents = 0, list(self.plan[0])
        return self.look(self.agents)

    def step(self, actions):
        assert sorted(actions) == sorted(self.agents), 'actions of others than those that are there'
        assert all(self.acts.contains(a) for a in actions.values())
        self.actions.append(actions)
        acted, self.t, self.total = self.agents, self.t + 1, self.total + 1
        self.agents = list(self.plan[self.t])
        left = {n: n not in self.agents for n in acted}
        obs, infos = self.look(list(dict.fromkeys([*acted, *self.agents])))
        return (
            obs,
            {n: self.reward(n) for n in acted},
            {n: x and n != 'b' for n, x in left.items()},
            {n: x and n == 'b' for n, x in left.items()},
            infos,
        )

    def reward(self, n):
        return self.number(n) / 4 + self.t * self.t

    def number(self, n):
        return 'abcdef'.index(n) + 1

    def one(self, n):
        return np.array([self.number(n), self.t], np.float32)

    def look(self, names):
        return {n: self.one(n) for n in names}, {
            n: dict(
                code=self.number(n) * 100 + self.t,
                action_mask=np.array([0, 1, 0, self.t % 2], np.int8),
            )
            for n in names
        }

    def close(self):
        self.closed = True


class Saved(Script):
    def state_dict(self):
        return dict(t=self.t, agents=list(self.agents), total=self.total)

    def load_state_dict(self, s):
        self.t, self.agents, self.total = s['t'], list(s['agents']), s['total']


def expected(plan, n_blocks, names='abc', first=0):
    """Work out the rows from the plan alone.

    (env_id, state, next_state, reward, terminated, truncated, episode, step, total, moment)"""
    blocks, t, episode, step, total = [], 0, {}, {}, {}
    last = ''
    for moment in range(n_blocks):
        if not plan[t]:
            t, last = 0, ''
        rows = []
        for n in plan[t]:
            if n not in last:
                episode[n], step[n], total[n] = episode.get(n, 0) + 1, 0, 0.0
        for n in sorted(plan[t], key=names.index):
            k = 'abcdef'.index(n) + 1
            step[n] += 1
            reward, over = k / 4 + (t + 1) ** 2, n not in plan[t + 1]
            total[n] += reward
            rows.append(
                (
                    first + names.index(n),
                    [k, t],
                    [k, t + 1],
                    reward,
                    over and n != 'b',
                    over and n == 'b',
                    episode[n],
                    step[n],
                    total[n],
                    moment,
                )
            )
        blocks.append(rows)
        last, t = plan[t], t + 1
    return blocks


def found(steps):
    names = 'env_id state next_state reward terminated truncated episode_n step_n total_reward'
    names = [*names.split(), 'moment']
    return [tuple(row[n].tolist() for n in names) for row in steps.rows]


@pytest.mark.parametrize(
    'plan', [('ab', 'a', 'abc', 'ac', ''), ('abc', 'abc', ''), ('abc', 'c', 'abc', 'b', '')]
)
def test_rows_of_agents_are_the_scripts_true_transitions(plan):
    env = Script()
    env.plan = plan
    blocks = take(GymStepper(env, seed=3), 11)
    assert [found(b) for b in blocks] == expected(plan, 11)
    assert all(b.rows['agent'].tolist() == b.rows['env_id'].tolist() for b in blocks)
    assert env.seeds == [3] + [None] * (len(env.seeds) - 1)
    for b, actions in zip(blocks, env.actions):
        assert b.rows['action'].tolist() == [*actions.values()]


def test_agents_of_several_environments_have_numbers_one_after_the_other():
    one, two = Script(), Script()
    two.plan = 'bc', 'abc', ''
    blocks = take(GymStepper([one, two], seed=0), 9)
    for b, first, second in zip(blocks, expected(one.plan, 9), expected(two.plan, 9, first=3)):
        assert found(b) == first + second


def test_an_agent_that_joins_begins_anew_for_a_recurrent_policy():
    class Policy:
        asked = []

        def initial_hidden(self, n):
            return torch.zeros(n)

        def __call__(self, state, hidden):
            self.asked.append(hidden.tolist())
            return torch.ones(len(state), dtype=torch.int64), hidden + 1

    stepper = GymStepper(Script(), Policy(), seed=0)
    rows = np.concatenate([b.rows for b in take(stepper, 12)])
    assert (
        rows['hidden'] == rows['step_n'] - 1
    ).all()  # the memory counts the steps of the episode


def test_agents_in_turn_are_refused_with_the_converters_name():
    class InTurn(Script):
        def agent_iter(self): ...

    for source in InTurn(), InTurn, [InTurn()]:
        with pytest.raises(TypeError, match='aec_to_parallel'):
            take(GymStepper(source), 1)


def test_agents_and_other_environments_are_not_mixed():
    class Single(gym.Env):
        observation_space, action_space = Script.obs, Script.acts

    with pytest.raises(ValueError, match='columns of environment 3'):
        take(GymStepper([Script(), Single()]), 1)
    env = Script()
    with pytest.raises(ValueError, match='same environment object twice'):
        take(GymStepper([env, env]), 1)


def test_info_and_masks_of_each_agent():
    seen = []

    def policy(state, mask):
        seen.append(mask.clone())
        return mask.int().argmax(1)

    env = Script()
    stepper = GymStepper(env, policy, seed=0, info=('code', 'action_mask'))
    for b in take(stepper, 9):
        number, t = b.rows['next_state'].T
        assert (
            b.rows['code'] == number * 100 + t
        ).all()  # of the next state, also of an agent that ends
    assert seen[1].tolist() == [
        [False, True, False, True],
        [True] * 4,
        [True] * 4,
    ]  # one that is not there may do anything
    assert all(
        b.rows['agent'].dtype == np.int32 for b in take(GymStepper(Script(), info={'agents': 0}), 1)
    )


@pytest.mark.parametrize('at', [0, 2, 5])
def test_environments_that_can_be_saved_go_on_exactly(at):
    def chain():
        return GymStepper([Saved(), Saved()], seed=5, info='code')

    whole, part, again = chain(), chain(), chain()
    want = take(whole, 14)
    take(part, at)
    assert not at or part.saves_exactly()
    again.load_state_dict(through_file(part.state_dict()))
    assert take(again, 14 - at) == want[at:]


def test_an_environment_that_cannot_be_saved_begins_new_episodes():
    class Opaque(Script):
        def __init__(self):
            super().__init__()
            self.handle = open(__file__)

    stepper, again = GymStepper(Opaque(), seed=1), GymStepper(Opaque(), seed=1)
    take(stepper, 2)
    with pytest.warns(UserWarning, match='could not be saved'):
        again.load_state_dict(through_file(stepper.state_dict()))
    rows = next(iter(again)).rows
    assert (
        rows['episode_n'].tolist() == [2, 2]
        and rows['step_n'].tolist() == [1, 1]
        and rows['moment'].tolist() == [2, 2]
    )


def test_after_an_error_of_the_environment_a_new_episode_begins():
    class Fails(Script):
        def step(self, actions):
            if self.total == 2:
                self.total += 1
                raise RuntimeError('broken')
            return super().step(actions)

    stepper = GymStepper(Fails(), seed=0)
    stream = iter(stepper)
    next(stream)
    next(stream)
    with pytest.raises(EnvError, match='broken'):
        next(stream)
    rows = next(iter(stepper)).rows
    assert rows['step_n'].tolist() == [1, 1] and rows['episode_n'].tolist() == [2, 2]


def test_what_was_opened_is_closed_and_what_was_given_is_not():
    made, given = [], Script()

    def make():
        made.append(Script())
        return made[-1]

    with GymStepper([make, given], seed=0) as stepper:
        take(stepper, 2)
    assert made[0].closed and not hasattr(given, 'closed')


def test_environments_of_pettingzoo():
    pettingzoo = pytest.importorskip('pettingzoo')

    def env():
        return pettingzoo.make(
            'parallel',
            'sisl/pursuit-v5',
            x_size=6,
            y_size=6,
            n_evaders=2,
            n_pursuers=3,
            max_cycles=8,
        )

    blocks = take(GymStepper([env, env], seed=0), 20)
    assert (
        all(len(b) == 6 for b in blocks)
        and blocks[7].rows['truncated'].all()
        and blocks[8].rows['step_n'].tolist() == [1] * 6
    )
    again = take(GymStepper([env, env], seed=0), 20)
    assert blocks == again


def test_agents_are_evaluated_by_their_episodes():
    class Pair(Script):
        plan = 'ab', 'ab', 'a', ''
        possible_agents = ['a', 'b']

    a, b = 3 / 4 + 1 + 4 + 9, 2 * 2 / 4 + 1 + 4
    assert evaluate(None, Pair(), episodes=6).tolist() == [a, b] * 3


def test_workers_give_agents_separate_numbers():
    stepper = GymStepper([Script, Script], seed=0).parallel(2, chunk=2, method='fork')
    with stepper.experience_replay(bs=4, max_sz=500, warmup=60, seed=0) as replay:
        take(replay, 20)
        ids = set(replay.memory[:].rows['env_id'].tolist())
    assert ids == set(range(12))


def test_agents_that_are_not_named_are_refused():
    class Guests(Script):
        plan = 'abc', 'abcd', ''

    with pytest.raises(EnvError, match="'d' is not in list"):
        take(GymStepper(Guests()), 3)

    class Unnamed(Script):
        possible_agents = None

    with pytest.raises(ValueError, match='possible_agents'):
        take(GymStepper(Unnamed()), 1)


@pytest.mark.parametrize('drop', [0, 3])
def test_an_agent_that_an_environment_leaves_out_is_named(drop):
    class Drops(Script):
        def step(self, actions):
            out = [*super().step(actions)]
            out[drop] = {n: x for n, x in out[drop].items() if n != 'b'}
            return tuple(out)

    with pytest.raises(EnvError, match="KeyError: 'b'"):
        take(GymStepper(Drops()), 1)
