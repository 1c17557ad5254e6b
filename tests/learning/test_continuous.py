"""Continuous actions: stepper, policies for boxes, SAC and TD3.

Against second implementations, and with odd spaces."""

import pickle
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, strategies as st
from torch import nn

from fastrl_replay.all import *
from fastrl_replay.testing import ScriptedEnv, same, script, through_file
from strategies import cases
from test_learners import COLUMNS, Adam, arrays, close, fill

Box, Discrete, nan, inf = spaces.Box, spaces.Discrete, float('nan'), float('inf')
torch.set_num_threads(1)


def take(pipe, n):
    return list(islice(pipe, n))


# ---- what the stepper takes ----


def steered(space, answer, **kw):
    stepper = GymStepper(ScriptedEnv(**script(9), action_space=space), lambda s: answer, **kw)
    return take(stepper, 1)[0].rows['action'][0]


ULP = 2.0**-23


@pytest.mark.parametrize(
    'answer,rounding,all',
    [
        (0.0, 0, 0),
        (1 + 2 * ULP, 1, 1),
        (-1 - 2 * ULP, -1, -1),
        (1.5, None, 1),
        (-inf, None, -1),
        (nan, None, None),
    ],
)
def test_actions_that_are_clipped(answer, rounding, all):
    "clip=None clips rounding errors, True all numbers, False none"
    for clip, want in (None, rounding), (True, all), (False, 0 if answer == 0 else None):
        given = np.float32([[0, answer]])
        if want is None:
            with pytest.raises(ActionError, match='clip it in the policy'):
                steered(Box(-1, 1, (2,)), given, clip=clip)
        else:
            assert steered(Box(-1, 1, (2,)), given, clip=clip).tolist() == [0, want]
        assert np.array_equal(given, np.float32([[0, answer]]), equal_nan=True)


def test_only_boxes_are_clipped():
    "Floats are clipped; whole numbers are not"
    whole = Box(0, 8, (1,), np.int64), [[11]]
    for space, wrong in whole, (Discrete(2), [2]), (spaces.MultiDiscrete([2, 3]), [[0, 3]]):
        with pytest.raises(ActionError, match='clip it in the policy'):
            steered(space, wrong, clip=True)
    nested = spaces.Dict(a=spaces.Tuple([Box(-1, 1, (2,)), Discrete(2)]))
    got = steered(nested, dict(a=(np.float32([[5, -5]]), [1])), clip=True)['a']
    assert got['[0]'].tolist() == [1, -1]


# ---- observations of float64 ----


class Double(gym.Env):
    "Observations of float64 in a dict, as some simulators give them"

    observation_space = spaces.Dict(arm=Box(-inf, inf, (2,), np.float64), gear=Discrete(3))
    action_space = Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._look(), {}

    def step(self, action):
        self.t += 1
        return self._look(), float(action[0]), self.t == 3, False, {}

    def _look(self):
        return dict(arm=np.array([np.pi * self.t, 1 + 2.0**-40]), gear=self.t % 3)


@pytest.mark.parametrize('mode', [None, *AutoresetMode])
def test_float64_as_float32(mode):
    "Also in final observations, in every reset mode"

    def steps(float32):
        env = Double() if mode is None else SyncVectorEnv([Double] * 2, autoreset_mode=mode)
        return Steps.cat(take(GymStepper(env, seed=0, float32=float32), 9))

    wide, small = steps(False), steps(True)
    for name in 'state', 'next_state':
        assert small[name]['arm'].dtype == torch.float32
        assert torch.equal(small[name]['arm'], wide[name]['arm'].float())
        assert torch.equal(small[name]['gear'], wide[name]['gear'])


# ---- bounds ----


@st.composite
def bounded(draw):
    "A box with any finite bounds, of any shape and kind of float, and its dtype"
    dtype, shape = (
        draw(st.sampled_from([np.float16, np.float32, np.float64])),
        draw(st.sampled_from([(), (1,), (3,), (2, 2)])),
    )
    width = {np.float16: 16, np.float32: 32, np.float64: 64}[dtype]
    number = st.floats(width=width, allow_nan=False, allow_infinity=False) | st.floats(
        -8, 8, width=width
    )
    n = int(np.prod(shape))
    pairs = [sorted(draw(st.tuples(number, number))) for _ in range(n)]
    low, high = (np.array([p[i] for p in pairs], dtype).reshape(shape) for i in (0, 1))
    return Box(low, high, shape, dtype)


ANSWERS = st.sampled_from([0.0, 1e-9, 0.3, 1.0, 5.0, 9.0, 20.0, 400.0, 1e30]) | st.floats(-20, 20)


@cases(200)
@given(bounded(), st.integers(1, 3), st.integers(0, 99), st.data())
def test_no_action_leaves_its_space(space, n, seed, data):
    "Whatever the actor says, for any bounds"
    bounds = BoxBounds(space)
    signs = st.sampled_from([-1, 1])
    numbers = torch.tensor(
        [[data.draw(ANSWERS) * data.draw(signs) for _ in range(2 * bounds.size)] for _ in range(n)]
    )
    for policy in (
        SquashedGaussian(lambda s: numbers, space, seed=seed),
        SquashedGaussian(lambda s: numbers, space, greedy=True),
        SquashedGaussian(None, space, random=9, seed=seed),
        GaussianNoise(lambda s: numbers[:, : bounds.size], space, 0.5, seed=seed),
    ):
        action = policy(torch.zeros(n, 2))
        assert action.dtype == space.dtype
        assert action.shape == (n, *space.shape)
        assert all(map(space.contains, action))
        unit = bounds.to_unit(torch.from_numpy(action), torch.float64)
        assert unit.shape == (n, bounds.size)
        assert (abs(unit) <= 1).all()


# ---- policies ----

ARM = Box(np.float32([0, -1]), np.float32([8, 3]))


def policies(seed, **kw):
    torch.manual_seed(3)
    seen = Box(-1, 1, (3,))
    return [
        SquashedGaussian(actor_net(seen, ARM, (4,), True), ARM, seed=seed, **kw),
        GaussianNoise(
            actor_net(seen, ARM, (4,)), ARM, LinearSchedule(0.5, 0.1, 30), seed=seed, **kw
        ),
    ]


def states(n, k=0):
    return torch.from_numpy(np.random.default_rng(k).normal(size=(n, 3))).float()


@pytest.mark.parametrize('i', [0, 1])
@pytest.mark.parametrize('stop', [0, 1, 4])
def test_a_policy_is_saved_and_goes_on(i, stop):
    "The state goes through a file, or the policy is pickled, also among the random actions"
    a, c = (policies(seed, random=5)[i] for seed in (7, 8))
    for k in range(stop):
        a(states(2, k))
    c.load_state_dict(through_file(a.state_dict()))
    d = pickle.loads(pickle.dumps(a))
    for k in range(5):
        want = a(states(2, k))
        assert same(want, c(states(2, k)))
        assert same(want, d(states(2, k)))
    assert a.asked == c.asked == 2 * stop + 10


@pytest.mark.parametrize('bend', [lambda x: x[:, :1], lambda x: x[:1], lambda x: x.numpy()])
@pytest.mark.parametrize('i', [0, 1])
def test_what_no_actor_should_say(bend, i):
    "It is refused, and the policy draws as if it had not been asked"
    policy, good = policies(7)[i], policies(7)[i]
    actor = policy.actor
    policy.actor = lambda s: bend(actor(s))
    with pytest.raises(ValueError, match='the output of the actor; got '):
        policy(states(3))
    policy.actor = actor
    assert same(policy(states(3)), good(states(3)))


# ---- SAC, row by row ----


def actor_of(seed, outputs):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


class Pair(nn.Module):
    "Two critics that share nothing"

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double() for _ in range(2)
        )

    def forward(self, s, a):
        return torch.stack([net(torch.cat([s, a], -1))[:, 0] for net in self.nets])


def steering(n, seed=0, **extra):
    "Random rows with actions within the bounds of ARM"
    rows = fill(n, action=ARM, seed=seed, **extra)
    rows['action'] = np.random.default_rng(seed + 1).uniform([0, -1], [8, 3], (n, 2))
    return rows


def unit(action):
    return [(float(action[0]) - 4) / 4, (float(action[1]) - 1) / 2]


def forward(w, x):
    "Two layers, for one row"
    hidden = torch.tanh(
        w[0] @ torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in x]) + w[1]
    )
    return w[2] @ hidden + w[3]


def drawn(w, s, noise):
    "An action, and the logarithm of its density by torch's own distributions"
    mean, log_std = forward(w, s).chunk(2)
    normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
    u = mean + log_std.clamp(-20, 2).exp() * noise
    a = torch.tanh(u)
    return a, (normal.log_prob(u) - torch.log(1 - a**2)).sum()


class PlainActorCritic:
    "What SAC and TD3 share: weights as arrays, slow ones, Adam for each"

    def __init__(self, actor, critics, lr, tau, max_norm):
        self.w = dict(actor=arrays(actor), critics=arrays(critics))
        self.slow = {k: [x.copy() for x in v] for k, v in self.w.items()}
        self.adam = {k: Adam(v) for k, v in self.w.items()}
        self.lr, self.tau, self.max_norm, self.updates = lr, tau, max_norm, 0

    def rate(self):
        return self.lr(self.updates) if callable(self.lr) else self.lr

    def tensors(self, grad=True):
        return {k: [torch.tensor(x, requires_grad=grad) for x in v] for k, v in self.w.items()}

    def both(self, w, s, a):
        return [forward(w[k : k + 4], [*s, *a])[0] for k in (0, 4)]

    def discount(self, r, gamma):
        return (
            float(r['discount'])
            if 'discount' in r.dtype.names
            else 0.0
            if r['terminated']
            else float(np.float32(gamma))
        )

    def weight(self, r):
        return float(r['weight']) if 'weight' in r.dtype.names else 1.0

    def move(self, w, losses, follow, **record):
        "One step along each gradient; slow ones follow"
        slopes = {
            k: [g.numpy() for g in torch.autograd.grad(loss, w[k], retain_graph=True)]
            for k, loss in losses.items()
        }
        for k, grads in slopes.items():
            record |= {
                f'{k}_loss': losses[k].item(),
                f'{k}_norm': self.adam[k].step(self.w[k], grads, self.rate(), self.max_norm),
            }
        self.updates += 1
        self.slow.update(
            {
                k: [old + self.tau * (new - old) for old, new in zip(self.slow[k], self.w[k])]
                for k in follow
            }
        )
        return record


class PlainSAC(PlainActorCritic):
    def learn(self, rows, gamma, log_alpha, now, later):
        w, slow, alpha, B = (
            self.tensors(),
            [torch.tensor(x) for x in self.slow['critics']],
            np.exp(log_alpha),
            len(rows),
        )
        critics_loss, actor_loss, logps, tds, qs = 0, 0, [], [], []
        for r, n, l in zip(rows, now, later):
            a, logp = drawn(w['actor'], r['next_state'], l)
            goal = float(r['reward']) + self.discount(r, gamma) * (
                min(x.item() for x in self.both(slow, r['next_state'], a)) - alpha * logp.item()
            )
            q = self.both(w['critics'], r['state'], unit(r['action']))
            critics_loss = critics_loss + self.weight(r) * sum((goal - x) ** 2 for x in q) / 2 / B
            tds.append(sum(abs(goal - x.item()) for x in q) / 2)
            qs += [x.item() for x in q]
            a, logp = drawn(w['actor'], r['state'], n)
            actor_loss = (
                actor_loss
                + (alpha * logp - torch.minimum(*self.both(w['critics'], r['state'], a))) / B
            )
            logps.append(logp.item())
        told = dict(td=np.mean(tds), q=np.mean(qs), temperature=alpha, entropy=-np.mean(logps))
        return self.move(
            w, dict(critics=critics_loss, actor=actor_loss), ['critics'], **told
        ), np.mean(logps)


settings_of_sac = st.fixed_dictionaries(
    dict(
        gamma=st.floats(0, 1),
        tau=st.sampled_from([1.0, 0.5, 0.005]),
        max_norm=st.sampled_from([0.05, 1.0, inf]),
        lr=st.sampled_from([1e-2, 0.0, LinearSchedule(0.05, 0.01, 3)]),
        temperature=st.sampled_from([1.0, 0.1, 3.0]),
        entropy=st.sampled_from([None, -0.5]),
    )
)


@cases(20)
@given(COLUMNS, settings_of_sac, st.integers(1, 5), st.integers(0, 9999))
def test_sac_learns_row_by_row(columns, settings, n, seed):
    "In double precision: every record and every weight, the slow ones and the temperature too"
    actor, critics = actor_of(seed, 4), Pair(seed + 1)
    learner = SACLearner([], actor, critics, ARM, seed=seed, temperature_lr=0.1, **settings)
    numbers = torch.Generator().manual_seed(seed)
    plain = PlainSAC(actor, critics, settings['lr'], settings['tau'], settings['max_norm'])
    log_alpha = np.log([settings['temperature']]).astype(np.float32).astype(np.float64)
    adam = Adam([log_alpha])
    for k in range(4):
        rows = steering(n, seed + k, **columns)
        noise = torch.randn(2, n, 2, generator=numbers, dtype=torch.float64)
        before = rows.copy()
        record = learner.learn(Steps(rows))
        expected, logp = plain.learn(rows, settings['gamma'], float(log_alpha[0]), *noise)
        slope = logp + (-2 if settings['entropy'] is None else settings['entropy'])
        expected['temperature_loss'] = -float(log_alpha[0]) * slope
        expected['temperature_norm'] = adam.step(
            [log_alpha], [np.array([-slope])], 0.1, settings['max_norm']
        )
        assert record == pytest.approx(expected, rel=1e-7, abs=1e-9)
        assert np.array_equal(rows, before)
        close(arrays(actor), plain.w['actor'], 1e-7)
        close(arrays(critics), plain.w['critics'], 1e-7)
        close(arrays(learner.target), plain.slow['critics'], 1e-7)
        close([learner.temperature.log.item()], log_alpha, 1e-7)


class PlainTD3(PlainActorCritic):
    def learn(self, rows, gamma, noise, every):
        w, slow, target, B = (
            self.tensors(),
            [torch.tensor(x) for x in self.slow['critics']],
            [torch.tensor(x) for x in self.slow['actor']],
            len(rows),
        )
        critics_loss, actor_loss, tds, qs = 0, 0, [], []
        for r, e in zip(rows, noise):
            a = torch.clamp(torch.tanh(forward(target, r['next_state'])) + e, -1, 1)
            goal = float(r['reward']) + self.discount(r, gamma) * min(
                x.item() for x in self.both(slow, r['next_state'], a)
            )
            q = self.both(w['critics'], r['state'], unit(r['action']))
            critics_loss = critics_loss + self.weight(r) * sum((goal - x) ** 2 for x in q) / 2 / B
            tds.append(sum(abs(goal - x.item()) for x in q) / 2)
            qs += [x.item() for x in q]
            actor_loss = (
                actor_loss
                - self.both(w['critics'], r['state'], torch.tanh(forward(w['actor'], r['state'])))[
                    0
                ]
                / B
            )
        losses = dict(critics=critics_loss, actor=actor_loss)
        last = self.updates % every == every - 1
        return self.move(
            w,
            losses if last else dict(critics=critics_loss),
            losses if last else (),
            td=np.mean(tds),
            q=np.mean(qs),
        )


settings_of_td3 = st.fixed_dictionaries(
    dict(
        gamma=st.floats(0, 1),
        tau=st.sampled_from([1.0, 0.5, 0.005]),
        max_norm=st.sampled_from([0.05, 1.0, inf]),
        lr=st.sampled_from([1e-2, 0.0, LinearSchedule(0.05, 0.01, 3)]),
        smoothing=st.sampled_from([0.0, 0.2, 3.0]),
        noise_clip=st.sampled_from([0.0, 0.5, 9.0]),
        actor_every=st.integers(1, 3),
    )
)


@cases(20)
@given(COLUMNS, settings_of_td3, st.integers(1, 5), st.integers(0, 9999))
def test_td3_learns_row_by_row(columns, settings, n, seed):
    "In double precision: each record, each weight, also of the slow models, and when each moves"
    actor, critics = actor_of(seed, 2), Pair(seed + 1)
    learner = TD3Learner([], actor, critics, ARM, seed=seed, **settings)
    numbers = torch.Generator().manual_seed(seed)
    plain = PlainTD3(actor, critics, settings['lr'], settings['tau'], settings['max_norm'])
    for k in range(5):
        rows = steering(n, seed + k, **columns)
        noise = torch.randn(n, 2, generator=numbers, dtype=torch.float64) * settings['smoothing']
        noise = noise.clip(-settings['noise_clip'], settings['noise_clip'])
        before = rows.copy()
        record = learner.learn(Steps(rows))
        expected = plain.learn(rows, settings['gamma'], noise, settings['actor_every'])
        assert record == pytest.approx(expected, rel=1e-7, abs=1e-9)
        assert np.array_equal(rows, before)
        close(arrays(actor), plain.w['actor'], 1e-7)
        close(arrays(critics), plain.w['critics'], 1e-7)
        close(arrays(learner.target), plain.slow['critics'], 1e-7)
        close(arrays(learner.targets['target_actor']), plain.slow['actor'], 1e-7)


def chains(kind, seed=0, **kw):
    "Pendulum, n-step rows by priority, a learner"
    o, a = Box(-8, 8, (3,)), Box(-2, 2, (1,))
    torch.manual_seed(seed)
    actor, critics = actor_net(o, a, (8,), kind == 'sac'), Critics(o, a, (8,))
    policy = (SquashedGaussian if kind == 'sac' else GaussianNoise)(actor, a, random=20, seed=seed)
    batches = (
        GymStepper('Pendulum-v1', policy, seed=seed)
        .n_step(2, 0.9)
        .prioritized_replay(bs=8, max_sz=100, warmup=20, seed=seed)
    )
    return getattr(batches, kind)(
        actor, critics, a, seed=seed, lr=LinearSchedule(1e-2, 1e-3, 50), **kw
    )


KINDS = ['sac', 'td3']


def models(kind):
    return actor_of(0, 4 if kind == 'sac' else 2), Pair(1)


@pytest.mark.parametrize('kind', KINDS)
def test_a_chain_goes_on_bit_for_bit(kind):
    "Steps, policy, memory, priorities, models, temperature, noise: a file between two updates"
    a, b = chains(kind), chains(kind, 1)
    stream = iter(a)
    take(stream, 30)
    b.load_state_dict(through_file(a.state_dict()))
    assert take(stream, 40) == take(b, 40)
    assert same(through_file(a.state_dict()), through_file(b.state_dict()))


@pytest.mark.parametrize('kind', KINDS)
def test_actors_in_workers_get_what_was_learned(kind):
    "Two processes act with the learner's weights; the same seeds give the same training"

    def trained(lr):
        learner = chains(kind)
        actor, space = learner.actor, learner.space
        policy = (SquashedGaussian if kind == 'sac' else GaussianNoise)(actor, space, seed=0)
        steps = GymStepper('Pendulum-v1', policy, seed=0).parallel(2, chunk=2, method='fork')
        replay = steps.experience_replay(bs=8, max_sz=100, warmup=8, seed=0)
        with getattr(replay, kind)(actor, learner.critics, space, lr=lr, seed=0) as pipe:
            return take(pipe, 40), replay.memory[:40].action

    (a, x), (b, y), (_, z) = trained(0.05), trained(0.05), trained(0.0)
    assert a == b and torch.equal(x, y)
    assert torch.equal(x[:4], z[:4]) and not torch.equal(x, z)


@pytest.mark.parametrize('shape', [(), (2, 2)])
@pytest.mark.parametrize('kind', KINDS)
def test_actions_of_any_shape(kind, shape):
    "A single number or a matrix is stepped, stored and learned from"
    space = Box(np.full(shape, -1, np.float32), np.full(shape, 3, np.float32))
    env = ScriptedEnv(**script(4), action_space=space)
    seen = env.observation_space
    actor, critics = actor_net(seen, space, (4,), kind == 'sac'), Critics(seen, space, (4,))
    policy = (SquashedGaussian if kind == 'sac' else GaussianNoise)(actor, space, seed=0)
    replay = GymStepper(env, policy, clip=False).experience_replay(bs=2, max_sz=9, seed=0)
    for record in take(getattr(replay, kind)(actor, critics, space, seed=0), 5):
        assert np.isfinite([*record.values()]).all()


def test_a_temperature_that_stays():
    blocks = [Steps(steering(3, k)) for k in range(4)]
    learner = SACLearner(
        blocks, actor_of(0, 4), Pair(1), ARM, temperature=0.25, temperature_lr=0, seed=0
    )
    assert [r['temperature'] for r in learner] == pytest.approx([0.25] * 4)


class Aim(gym.Env):
    "Rewards actions that are near to the observation"

    observation_space, action_space = Box(-1, 1, (1,)), Box(-2, 2, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.goal, {}

    def step(self, action):
        return self.goal, -float(abs(action - self.goal)[0]), True, False, {}


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_actor_critics_learn(kind):
    "Random actions are off by more than 1"
    seen, space = Aim.observation_space, Aim.action_space
    torch.manual_seed(0)
    actor, critics = actor_net(seen, space, (32,), kind == 'sac'), Critics(seen, space, (32,))
    kw = dict(random=200, seed=0)
    if kind == 'sac':
        policy = SquashedGaussian(actor, space, **kw)
        greedy = SquashedGaussian(actor, space, greedy=True)
    else:
        policy = GaussianNoise(actor, space, **kw)
        greedy = GaussianNoise(actor, space, 0.0)
    steps = GymStepper([Aim] * 8, policy, seed=0)
    replay = steps.experience_replay(bs=64, max_sz=5000, warmup=200, seed=0)
    take(getattr(replay, kind)(actor, critics, space, lr=3e-3, seed=0), 500)
    assert evaluate(greedy, Aim, 50).mean() > -0.2
