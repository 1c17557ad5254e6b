"Actions of several parts: values, targets and exploration of each; and random actions first."

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from hypothesis import given, strategies as st
from torch import nn

from fastrl_replay.all import (
    DQNLearner,
    EpsGreedy,
    PrioritizedReplay,
    RecurrentNet,
    SquashedGaussian,
    Steps,
    conv_net,
    dqn_errors,
    step_dtype,
    value_net,
)
from fastrl_replay.learning.settings import recipe
from fastrl_replay.app.recipes import Agent, play_episodes
from fastrl_replay.learning.networks import part_sizes
from fastrl_replay.testing import through_file
from strategies import cases

SPACE = MultiDiscrete([2, 3, 4])


class Locks(gym.Env):
    "Three locks that show the number that opens each: a reward per lock, episodes of five steps"

    def __init__(self, action_space=SPACE):
        self.action_space, self.sizes = action_space, part_sizes(action_space)
        self.observation_space = Box(0, 1, (sum(self.sizes),), np.float32)

    def _show(self):
        self.number = self.np_random.integers(self.sizes)
        return np.concatenate(
            [np.eye(n, dtype=np.float32)[i] for n, i in zip(self.sizes, self.number)]
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._show(), {}

    def step(self, action):
        self.t += 1
        opened = float((np.asarray(action) == self.number).sum())
        return self._show(), opened, False, self.t == 5, {}


def rows(n, space=SPACE, **extra):
    rng, new = np.random.default_rng(n), np.zeros(n, step_dtype(Box(-9, 9, (2,)), space, **extra))
    for k in 'state', 'next_state':
        new[k] = rng.normal(size=(n, 2))
    new['action'], new['reward'], new['terminated'] = (
        rng.integers(part_sizes(space), size=(n, len(part_sizes(space)))),
        rng.normal(size=n),
        rng.random(n) < 0.3,
    )
    return new


@pytest.mark.parametrize('double,dueling', [(False, False), (True, True)])
@pytest.mark.parametrize('space', [SPACE, MultiBinary(3)], ids=str)
def test_targets_are_those_of_a_plain_loop(space, double, dueling):
    "Row by row, part by part"
    torch.manual_seed(0)
    model, target = (value_net(Box(-9, 9, (2,)), space, (8,), dueling) for _ in 'ab')
    batch = Steps(rows(20, space))
    q, goal = dqn_errors(model, target, batch, 0.9, double)
    for i, row in enumerate(batch):
        own = model(row.state[None])[0]
        later = target(row.next_state[None])[0]
        chooser = model(row.next_state[None])[0] if double else later
        worth = []
        for p, n in enumerate(part_sizes(space)):
            assert torch.isfinite(own[p, :n]).all() and (own[p, n:] == -torch.inf).all()
            worth.append(later[p, chooser[p, :n].argmax()])
            torch.testing.assert_close(q[i, p], own[p, row.action[p]])
        expected = row.reward + (0 if row.terminated else 0.9) * sum(worth) / len(worth)
        torch.testing.assert_close(goal[i], expected.expand(len(worth)))


def test_one_part_learns_as_a_single_number_does():
    "The same weights after ten updates with weights, priorities and the conservative term"
    box = Box(-9, 9, (2,))
    torch.manual_seed(0)
    one, parted = value_net(box, Discrete(3), (8,)), value_net(box, MultiDiscrete([3]), (8,))
    parted.load_state_dict(
        {k.replace('3.', '3.advantage.'): v for k, v in one.state_dict().items()}
    )
    a, b = rows(40, MultiDiscrete([3])), np.zeros(40, step_dtype(box, Discrete(3)))
    for k in b.dtype.names:
        b[k] = a[k][:, 0] if k == 'action' else a[k]
    records = []
    for net, block in (one, b), (parted, a):
        learner = DQNLearner([], net, lr=1e-2, conservative=0.5, target_every=3)
        replay = PrioritizedReplay(bs=8, max_sz=40, seed=0)
        replay.add(Steps(block))
        records.append([list(learner.learn(replay.sample()).values()) for _ in range(10)])
    np.testing.assert_allclose(*records, rtol=1e-5)


@cases(30)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 4),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_each_part_explores_for_itself(sizes, n, eps, seed):
    "In its part's range; random numbers don't depend on eps, nor on whether the network was asked"
    torch.manual_seed(0)
    net = value_net(Box(-9, 9, (2,)), MultiDiscrete(sizes), (4,))
    a, b = EpsGreedy(net, eps, seed), EpsGreedy(net, 1.0, seed)
    for _ in range(5):
        actions = a(torch.zeros(n, 2))
        b(torch.zeros(n, 2))
        assert actions.shape == (n, len(sizes)) and (0 <= actions).all() and (actions < sizes).all()
    assert a.rng.random() == b.rng.random() and a.asked == 5 * n
    twin = EpsGreedy(net, eps, seed + 1)
    twin.load_state_dict(through_file(a.state_dict()))
    assert (twin(torch.ones(n, 2)) == a(torch.ones(n, 2))).all()


@pytest.mark.slow
def test_a_recipe_solves_an_environment_of_several_parts():
    "Its best return is 15; random actions have about 5.4"
    settings = dict(steps=2500, warmup=200, eps_steps=1000, eps_end=0.05, network=64, gamma=0.5)
    agent = Agent(recipe('cartpole', env='ThreeLocks-v1', train_every=1, **settings).settings)
    for _ in agent.pipe:
        pass
    assert play_episodes(agent, 20)[0].mean() > 14.5


def test_images_go_with_parts():
    "Convolutions come before the branches"
    image = Box(0, 255, (2, 12, 12), np.uint8)
    states = torch.zeros(5, 2, 12, 12, dtype=torch.uint8)
    assert conv_net(image, SPACE, (8,))(states).shape == (5, 3, 4)


def test_what_does_not_go_with_parts_is_refused_by_name():
    "R2D2, continuous actions, masks, a model without branches"
    box = Box(-9, 9, (2,))
    with pytest.raises(TypeError, match='the action space must be discrete; got MultiDiscrete'):
        RecurrentNet(box, SPACE)
    with pytest.raises(
        TypeError, match='got MultiDiscrete.*expected a Box of floats. Remedy: use .dqn'
    ):
        SquashedGaussian(lambda s: s, SPACE)
    net = value_net(box, SPACE, (4,))
    masked = Steps(rows(4, action_mask=('?', (9,))))
    masked.rows['action_mask'] = True
    with pytest.raises(ValueError, match='masked_values: mask; got'):
        dqn_errors(net, net, masked, 0.9)
    with pytest.raises(ValueError, match=r'got shape \[4, 9\]; expected \[4, 3, actions\]'):
        dqn_errors(nn.Linear(2, 9), nn.Linear(2, 9), Steps(rows(4)), 0.9)


gym.register('ThreeLocks-v1', Locks)

# ---- random actions first ----


def actor(size):
    return lambda s: torch.zeros(len(s), size)


BOX = Box(np.float32([-2, 0]), np.float32([2, 5]))
