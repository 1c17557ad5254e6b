"""Continuous actions: what the stepper takes, policies for boxes, SAC and TD3, against second implementations and odd spaces."""

import pickle
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, strategies as st
from torch import nn

from fastrl_replay.all import *
from fastrl_replay.envs.actions import check_action
from fastrl_replay.app.recipe_settings import recipe
from fastrl_replay.app.recipes import Agent, step_env
from fastrl_replay.steps.settings import SettingsError
from fastrl_replay.app.runs import start
from fastrl_replay.testing import ScriptedEnv, same, script, through_file
from strategies import cases
from test_learners import WIDE, Adam, arrays, close, fill

Box, Discrete, nan, inf = spaces.Box, spaces.Discrete, float('nan'), float('inf')
torch.set_num_threads(1)


def take(pipe, n):
    return list(islice(pipe, n))


# ---- what the stepper takes ----


def steered(space, answer, **kw):
    return take(
        GymStepper(ScriptedEnv(**script(9), action_space=space), lambda s: answer, **kw), 1
    )[0].rows['action'][0]


ULP = 2.0**-23


@pytest.mark.parametrize(
    'answer,rounding,all',
    [
        (0.0, 0, 0),
        (1 + 2 * ULP, 1, 1),
        (-1 - 2 * ULP, -1, -1),
        (1.5, None, 1),
        (-9.0, None, -1),
        (inf, None, 1),
        (-inf, None, -1),
        (nan, None, None),
    ],
)
def test_actions_that_are_clipped(answer, rounding, all):
    "clip=None: rounding errors; True: all that is a number; False: none"
    space = Box(-1, 1, (2,))
    for clip, want in (None, rounding), (True, all), (False, 0 if answer == 0 else None):
        given = np.float32([[0, answer]])
        if want is not None:
            assert steered(space, given, clip=clip).tolist() == [0, want]
        else:
            with pytest.raises(ActionError, match='outside its space'):
                steered(space, given, clip=clip)
        assert np.array_equal(
            given, np.float32([[0, answer]]), equal_nan=True
        )  # the policy's own array is as it was


def test_only_boxes_are_clipped():
    "Whole numbers in a box are; actions that are names of something are not, and the remedy says so"
    assert (
        steered(Box(0, 8, (1,), np.int64), [[11]], clip=True) == 8
        and steered(Box(0, 8, (1,), np.uint8), [[-1]], clip=True) == 0
    )
    for space, wrong in (
        (Discrete(2), [2]),
        (spaces.MultiDiscrete([2, 3]), [[0, 3]]),
        (spaces.MultiBinary(2), [[0, 2]]),
    ):
        with pytest.raises(ActionError, match='Remedy: clip it in the policy$'):
            steered(space, wrong, clip=True)
    nested = spaces.Dict(a=spaces.Tuple([Box(-1, 1, (2,)), Discrete(2)]))
    got = steered(nested, dict(a=(np.float32([[5, -5]]), [1])), clip=True)['a']
    assert got['[0]'].tolist() == [1, -1] and got['[1]'] == 1
    with pytest.raises(ActionError, match=r"action\['a'\]\[1\]"):
        steered(nested, dict(a=(np.float32([[5, -5]]), [2])), clip=True)


@pytest.mark.parametrize('clip', ['yes', 1, 0, 2.0])
def test_clip_is_one_of_three(clip):
    with pytest.raises(
        ValueError, match=r'^GymStepper: clip; got .*; expected True, False or None'
    ):
        GymStepper('Pendulum-v1', clip=clip)


@pytest.mark.parametrize('clip', [None, True, False])
def test_a_stepper_that_clips_is_printed_pickled_and_saved(clip):
    "As any other argument"
    pipe = GymStepper('Pendulum-v1', seed=0, clip=clip, float32=True)
    other = pickle.loads(pickle.dumps(pipe))
    take(pipe, 5)
    other.load_state_dict(through_file(pipe.state_dict()))
    assert (
        ('clip=' in repr(pipe)) == (clip is not None)
        and 'float32=True' in repr(pipe)
        and take(pipe, 5) == take(other, 5)
    )


# ---- observations of float64 ----


class Double(gym.Env):
    "Observations of float64 in a dict, as some simulators give them, with numbers that float32 doesn't have"

    observation_space = spaces.Dict(
        arm=Box(-inf, inf, (2,), np.float64),
        gear=Discrete(3),
        pair=spaces.Tuple([Box(0, 1e300, (), np.float64), Box(0, 255, (2,), np.uint8)]),
    )
    action_space = Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._look(), {}

    def step(self, action):
        self.t += 1
        return self._look(), float(action[0]), self.t == 3, self.t == 5, {}

    def _look(self):
        return dict(
            arm=np.array([np.pi * self.t, 1 + 2.0**-40]),
            gear=self.t % 3,
            pair=(np.float64(1e-3), np.array([self.t, 7], np.uint8)),
        )


@pytest.mark.parametrize('mode', [None, *AutoresetMode])
def test_float64_as_float32(mode):
    "Every leaf, also of final observations, in every reset mode: the same rows, rounded"

    def source():
        return Double() if mode is None else SyncVectorEnv([Double] * 2, autoreset_mode=mode)

    wide, small = (
        Steps.cat(take(GymStepper(source(), seed=0, float32=f), 9)) for f in (False, True)
    )

    def leaves(rows, dtype, path=()):
        if dtype.names:
            return [l for n in dtype.names for l in leaves(rows[n], dtype[n], (*path, n))]
        return [(path, dtype.base, rows)]

    seen = set()
    for (path, kind, a), (other, now, b) in zip(
        leaves(wide.rows, wide.rows.dtype), leaves(small.rows, small.rows.dtype), strict=True
    ):
        assert (
            path == other
            and now == (np.float32 if kind == np.float64 else kind)
            and np.array_equal(a.astype(now), b)
        )
        seen.add(kind.name)
    assert 'float64' in seen and 'float64' not in {
        k.name for _, k, _ in leaves(small.rows, small.rows.dtype)
    }
    assert Double.observation_space['arm'].dtype == np.float64


def test_a_checkpoint_with_other_rows_is_refused():
    "float64 and float32 don't mix in one stream"
    a, b = GymStepper(Double(), seed=0), GymStepper(Double(), seed=0, float32=True)
    take(a, 2)
    with pytest.raises(StateError, match='the saved environments are others'):
        b.load_state_dict(through_file(a.state_dict()))
        take(b, 1)


def test_networks_that_meet_float64_say_what_to_do():
    "Policies and learners, by their names; a network in float64 takes it"
    space, rows = (
        Box(-inf, inf, (2,), np.float64),
        np.zeros(4, step_dtype(Box(-inf, inf, (2,), np.float64), Discrete(2))),
    )
    remedy = r'what the model is given; got states of float64; expected torch.float32, as its weights are. Remedy: GymStepper\(…, float32=True\)'
    with pytest.raises(ValueError, match='^EpsGreedy: ' + remedy):
        EpsGreedy(nn.Linear(2, 2), 0.0)(torch.zeros(3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match='^dqn_errors: ' + remedy):
        DQNLearner([], nn.Linear(2, 2)).learn(Steps(rows))

    class Recurrent(nn.GRU):
        def initial_hidden(self, n):
            return torch.zeros(n, 2)

        def forward(self, x, h):
            x, h = super().forward(x, h[None])
            return x, h[0]

    replay = SequenceReplay(bs=1, max_sz=9, length=2, burn_in=0, overlap=1)
    rows['step_n'], rows['episode_n'] = range(1, 5), 1
    replay.add(Steps(rows))
    with pytest.raises(ValueError, match='^r2d2_errors: ' + remedy):
        R2D2Learner([], Recurrent(2, 2, batch_first=True)).learn(replay.sample())
    R2D2Learner([], RecurrentNet(space, Discrete(2), 4)).learn(replay.sample())
    DQNLearner([], nn.Linear(2, 2).double()).learn(Steps(rows))
    DQNLearner([], nn.Sequential(FlattenSpace(space), nn.Linear(2, 2))).learn(Steps(rows))
    with pytest.raises(RuntimeError, match='cannot be multiplied'):
        DQNLearner([], nn.Linear(3, 2)).learn(
            Steps(rows.astype(step_dtype(Box(-inf, inf, (2,)), Discrete(2))))
        )


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


@cases(400)
@given(bounded(), st.integers(1, 3), st.integers(0, 99), st.data())
def test_no_action_leaves_its_space(space, n, seed, data):
    "Whatever the actor says, however sure it is, for any bounds: in the space by its own judgment, and by the stepper's strictest"
    bounds = BoxBounds(space)
    numbers = torch.tensor(
        [
            [
                data.draw(ANSWERS) * data.draw(st.sampled_from([-1, 1]))
                for _ in range(2 * bounds.size)
            ]
            for _ in range(n)
        ]
    )
    for policy in (
        SquashedGaussian(lambda s: numbers, space, seed=seed),
        SquashedGaussian(lambda s: numbers, space, greedy=True),
        SquashedGaussian(None, space, random=9, seed=seed),
        GaussianNoise(lambda s: numbers[:, : bounds.size], space, 0.5, seed=seed),
        GaussianNoise(lambda s: numbers[:, : bounds.size], space, 0.0),
    ):
        action = policy(torch.zeros(n, 2))
        assert (
            action.dtype == space.dtype
            and action.shape == (n, *space.shape)
            and all(map(space.contains, action))
        )
        assert np.array_equal(check_action(action, space, n, clip=False), action)
        unit = bounds.to_unit(torch.from_numpy(action), torch.float64)
        assert unit.shape == (n, bounds.size) and (abs(unit) <= 1).all()
        again = bounds.to_space(unit.numpy()).astype(
            np.float64
        )  # a unit has 52 bits for a range that may be much wider than the number
        wide = np.maximum(abs(space.low.astype(np.float64)), abs(space.high.astype(np.float64)))
        assert (
            abs(again - action.astype(np.float64))
            <= 2 * np.finfo(space.dtype).eps * wide + np.finfo(space.dtype).tiny
        ).all()


@cases(60)
@given(bounded())
def test_a_sure_actor_gets_the_bounds(space):
    "-1 and 1 are the bounds themselves, the middle is 0"
    bounds = BoxBounds(space)
    low, middle, high = bounds.to_space(
        np.array([[-1.0] * bounds.size, [0.0] * bounds.size, [1.0] * bounds.size])
    ).astype(np.float64)
    wide = np.maximum(abs(bounds.low), abs(bounds.high)).reshape(space.shape)
    eps = 2 * np.finfo(space.dtype).eps * wide + np.finfo(space.dtype).tiny
    for got, want in (
        (low, bounds.low),
        (middle, bounds.low / 2 + bounds.high / 2),
        (high, bounds.high),
    ):
        assert (abs(got - want.reshape(space.shape)) <= eps).all()


@pytest.mark.parametrize(
    'space,kind,said',
    [
        (Discrete(3), TypeError, r'got Discrete\(3\); expected a Box of floats. Remedy: .dqn'),
        (spaces.MultiDiscrete([2, 3]), TypeError, 'expected a Box of floats'),
        (Box(0, 9, (2,), np.int64), TypeError, 'expected a Box of floats'),
        (spaces.Dict(a=Box(-1, 1)), TypeError, 'expected a Box of floats'),
        (Box(-1, 1, (0,)), TypeError, 'expected a Box of floats'),
        (
            Box(-inf, inf, (2,)),
            ValueError,
            'the bounds of the action space; got .*; expected finite numbers, the lower one first. Remedy: another environment, or gymnasium.wrappers.TransformAction',
        ),
        (
            Box(np.float32([0, 0]), np.float32([1, inf])),
            ValueError,
            'the bounds of the action space',
        ),
    ],
)
def test_spaces_without_bounds(space, kind, said):
    "Are refused by who asks, before anything is learned"
    seen = Box(-1, 1, (2,))
    for who, make in (
        ('BoxBounds', lambda: BoxBounds(space)),
        ('SquashedGaussian', lambda: SquashedGaussian(None, space)),
        ('GaussianNoise', lambda: GaussianNoise(None, space)),
        ('actor_net', lambda: actor_net(seen, space)),
        ('Critics', lambda: Critics(seen, space)),
        ('SACLearner', lambda: SACLearner([], nn.Linear(2, 2), nn.Linear(2, 2), space)),
        ('TD3Learner', lambda: TD3Learner([], nn.Linear(2, 2), nn.Linear(2, 2), space)),
    ):
        with pytest.raises(kind, match=f'^{who}: the .*action space; got .*'):
            make()
        with pytest.raises(kind, match=said):
            make()


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
@pytest.mark.parametrize('random', [0, 5])
def test_a_policy_is_saved_and_goes_on(i, random):
    "The same seeds, the same actions; the state through a file, and pickled, in the middle of the random ones too"
    for stop in 0, 1, 4:
        a, b, c = (
            policies(7, random=random)[i],
            policies(7, random=random)[i],
            policies(8, random=random)[i],
        )
        for k in range(stop):
            assert np.array_equal(a(states(2, k)), b(states(2, k)))
        c.load_state_dict(through_file(a.state_dict()))
        d = pickle.loads(pickle.dumps(a))
        for k in range(5):
            assert same(a(states(2, k)), c(states(2, k))) and same(b(states(2, k)), d(states(2, k)))
        assert a.asked == c.asked == 2 * stop + 10


@pytest.mark.parametrize('i', [0, 1])
def test_others_draw_nothing_from_it(i):
    "Global generators are neither used nor disturbed"
    a, b = (policies(7)[i] for _ in 'ab')
    torch.manual_seed(1)
    before = torch.get_rng_state()
    x = [a(states(2, k)) for k in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    np.random.rand(3)
    assert same(x, [b(states(2, k)) for k in range(3)])


@pytest.mark.parametrize(
    'damage',
    [
        dict(asked=-1),
        dict(asked=1.5),
        dict(rng={}),
        dict(rng=np.random.Generator(np.random.MT19937(0)).bit_generator.state),
        dict(more=1),
    ],
)
def test_a_policy_refuses_a_damaged_state(damage):
    "By its name; and acts as it would have acted"
    for i, who in enumerate(['SquashedGaussian', 'GaussianNoise']):
        a, b = (policies(7)[i] for _ in 'ab')
        with pytest.raises(StateError, match=f'^{who}: '):
            a.load_state_dict({**a.state_dict(), **damage})
        assert same(a(states(2)), b(states(2)))


@pytest.mark.parametrize('i', [0, 1])
def test_copies_in_workers(i):
    "The first goes on with the numbers it has, others draw others; a schedule counts the steps of all"
    copies = [policies(7)[i] for _ in range(3)]
    for rank, policy in enumerate(copies):
        policy.in_worker(WorkerInfo(rank, 3))
    drawn = [p(states(2)) for p in copies]
    assert (
        same(drawn[0], policies(7)[i](states(2)))
        and not same(drawn[0], drawn[1])
        and not same(drawn[1], drawn[2])
    )
    assert [p.asked for p in copies] == [6] * 3


@pytest.mark.parametrize('i', [0, 1])
def test_policies_in_worker_processes(i):
    "Two processes with the same chain: the same stream each time, and each environment has another course"

    def rows():
        policy = policies(7, random=4)[i]
        policy.bounds = BoxBounds(Box(-2, 2, (1,)))
        policy.actor[-1] = nn.Linear(4, 2 - i)
        for p in policy.actor.parameters():
            nn.init.constant_(p, 0.1)
        with GymStepper('Pendulum-v1', policy, seed=0).parallel(2, chunk=2, method='fork') as pipe:
            return take(pipe, 12)

    a = rows()
    assert a == rows() and len({float(b.action[0]) for b in a}) == 12


@pytest.mark.parametrize(
    'bend',
    [
        lambda x: x[:, :1],
        lambda x: x[0],
        lambda x: x[:1],
        lambda x: x.numpy(),
        lambda x: x.long(),
        lambda x: (x,),
        lambda x: x * nan,
        lambda x: x + inf,
    ],
)
@pytest.mark.parametrize('i', [0, 1])
def test_what_no_actor_should_say(bend, i):
    "Is refused with what came and what was expected, and the policy draws as if it had not been asked"
    policy, good = policies(7)[i], policies(7)[i]
    who, actor = type(policy).__name__, policy.actor
    policy.actor = lambda s: bend(actor(s))
    with pytest.raises(ValueError, match=f'^{who}: what the actor gives; got '):
        policy(states(3))
    policy.actor = actor
    assert same(policy(states(3)), good(states(3))) and policy.asked == 3


def test_an_actor_of_images():
    "Convolutions for the actor, and for the critics"
    image = Box(0, 255, (2, 12, 12), np.uint8)
    actor, critics = actor_net(image, ARM, (8,), True), Critics(image, ARM, (8,))
    rows = np.zeros(5, step_dtype(image, ARM))
    rows['state'] = np.random.default_rng(0).integers(0, 256, rows['state'].shape)
    before = actor[-1].weight.detach().clone()
    SACLearner([], actor, critics, ARM).learn(Steps(rows))
    assert not torch.equal(before, actor[-1].weight) and SquashedGaussian(actor, ARM)(
        Steps(rows).state
    ).shape == (5, 2)


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


@pytest.mark.parametrize(
    'columns',
    [{}, dict(weight='f4'), dict(discount='f4'), dict(discount='f4', weight='f4')],
    ids=' '.join,
)
@cases(8)
@given(settings_of_sac, st.integers(1, 5), st.integers(0, 9999))
def test_sac_learns_row_by_row(columns, settings, n, seed):
    "Five updates in double precision: every record and every weight, the slow ones and the temperature too"
    actor, critics = actor_of(seed, 4), Pair(seed + 1)
    learner, numbers = (
        SACLearner([], actor, critics, ARM, seed=seed, temperature_lr=0.1, **settings),
        torch.Generator().manual_seed(seed),
    )
    plain, log_alpha = (
        PlainSAC(actor, critics, settings['lr'], settings['tau'], settings['max_norm']),
        np.log([settings['temperature']]).astype(np.float32).astype(np.float64),
    )
    adam = Adam([log_alpha])
    for k in range(5):
        rows = steering(n, seed + k, **columns)
        noise = torch.randn(2, n, 2, generator=numbers, dtype=torch.float64)
        record, before = learner.learn(Steps(rows)), rows.copy()
        expected, logp = plain.learn(rows, settings['gamma'], float(log_alpha[0]), *noise)
        wanted = -2 if settings['entropy'] is None else settings['entropy']
        expected['temperature_loss'] = -float(log_alpha[0]) * (logp + wanted)
        expected['temperature_norm'] = adam.step(
            [log_alpha], [np.array([-(logp + wanted)])], 0.1, inf
        )
        assert record == pytest.approx(expected, rel=1e-7, abs=1e-9) and np.array_equal(
            rows, before
        )
        close(arrays(actor), plain.w['actor'], 1e-7)
        close(arrays(critics), plain.w['critics'], 1e-7)
        close(arrays(learner.target), plain.slow['critics'], 1e-7)
        assert learner.temperature.log.item() == pytest.approx(
            float(log_alpha[0]), rel=1e-7, abs=1e-9
        )


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
        most=st.sampled_from([0.0, 0.5, 9.0]),
        actor_every=st.integers(1, 3),
    )
)


@pytest.mark.parametrize(
    'columns',
    [{}, dict(weight='f4'), dict(discount='f4'), dict(discount='f4', weight='f4')],
    ids=' '.join,
)
@cases(8)
@given(settings_of_td3, st.integers(1, 5), st.integers(0, 9999))
def test_td3_learns_row_by_row(columns, settings, n, seed):
    "Seven updates in double precision: every record and every weight, of the slow models too, and when each moves"
    actor, critics = actor_of(seed, 2), Pair(seed + 1)
    learner, numbers = (
        TD3Learner([], actor, critics, ARM, seed=seed, **settings),
        torch.Generator().manual_seed(seed),
    )
    plain = PlainTD3(actor, critics, settings['lr'], settings['tau'], settings['max_norm'])
    for k in range(7):
        rows = steering(n, seed + k, **columns)
        noise = np.clip(
            torch.randn(n, 2, generator=numbers, dtype=torch.float64).numpy()
            * settings['smoothing'],
            -settings['most'],
            settings['most'],
        )
        record, before = learner.learn(Steps(rows)), rows.copy()
        expected = plain.learn(
            rows, settings['gamma'], torch.from_numpy(noise), settings['actor_every']
        )
        assert record == pytest.approx(expected, rel=1e-7, abs=1e-9) and np.array_equal(
            rows, before
        )
        close(arrays(actor), plain.w['actor'], 1e-7)
        close(arrays(critics), plain.w['critics'], 1e-7)
        close(arrays(learner.target), plain.slow['critics'], 1e-7)
        close(arrays(learner.targets['target_actor']), plain.slow['actor'], 1e-7)


@pytest.mark.parametrize(
    'wrong',
    [
        dict(smoothing=-1),
        dict(most=-0.1),
        dict(actor_every=0),
        dict(actor_every=1.5),
        dict(smoothing=nan),
    ],
)
def test_settings_of_td3(wrong):
    "Are checked when the chain is built"
    with pytest.raises(ValueError, match=f'^TD3Learner: {next(iter(wrong))}; got '):
        TD3Learner([], actor_of(0, 2), Pair(1), ARM, **wrong)


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


@pytest.mark.parametrize('kind', KINDS)
def test_a_chain_goes_on_bit_for_bit(kind):
    "Steps, policy, memory, priorities, models, temperature, noise: saved between two updates, through a file"
    a, b, c, other = chains(kind), chains(kind), chains(kind, 1), chains(kind, 1)
    stream = iter(a)
    first = take(stream, 30)
    assert first == take(b, 30) and first != take(other, 30)
    c.load_state_dict(through_file(a.state_dict()))
    assert list(islice(stream, 40)) == take(c, 40)
    assert same(through_file(a.state_dict()), through_file(c.state_dict()))


@pytest.mark.parametrize('kind', KINDS)
def test_errors_become_priorities(kind):
    "The mean over both critics of the size of the error, in the order of the batch"
    learner, heard = chains(kind), []
    replay = learner.source
    tell = replay.update_priorities
    replay.update_priorities = lambda keys, td: (
        heard.append((keys.copy(), td.clone())),
        tell(keys, td),
    )
    for record, _ in zip(learner, range(10)):
        keys, td = heard.pop()
        assert (
            td.shape == (8,)
            and (td >= 0).all()
            and td.mean().item() == pytest.approx(record['td'], rel=1e-5)
        )
        told = dict(zip(keys.tolist(), td.tolist()))
        for key, x in told.items():
            assert replay.sampler.tree[key % 100] == pytest.approx((x + 1e-6) ** 0.6, rel=1e-5)


@pytest.mark.parametrize('kind', KINDS)
def test_terminated_ends_and_truncated_goes_on(kind):
    "The next state of what has terminated has no effect; a column `discount` of 0 says the same"

    def learned(after, **flags):
        rows = steering(3, **({'discount': 'f4'} if 'discount' in flags else {}))
        rows['terminated'] = rows['truncated'] = False
        for k, v in flags.items():
            rows[k] = v
        rows['next_state'] = after
        learner = getattr(Items([Steps(rows)]), kind)(
            actor_of(0, 4 if kind == 'sac' else 2), Pair(1), ARM, lr=0.1, seed=0
        )
        list(learner)
        return arrays(learner.critics)

    for flags, matters in (
        (dict(), True),
        (dict(truncated=True), True),
        (dict(terminated=True), False),
        (dict(discount=0.5), True),
        (dict(discount=0.0), False),
    ):
        assert same(learned(0.5, **flags), learned(-2.0, **flags)) != matters


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    'rows,said',
    [
        (
            lambda: steering(3).astype(step_dtype(WIDE, Discrete(3)))[:0],
            r'a batch; got shape \[0\]',
        ),
        (lambda: steering(4).reshape(2, 2), r'a batch; got shape \[2, 2\]'),
        (
            lambda: fill(3),
            r"column 'action'; got int64 in each row; expected float32\[2\], as Box.*Remedy: give the learner the action space of the environments",
        ),
        (
            lambda: fill(3, action=Box(-1, 1, (3,))),
            r"column 'action'; got float32\[3\] in each row",
        ),
        (lambda: fill(3, action=Box(0, 3, (2,), np.int64)), r"column 'action'; got int64\[2\]"),
    ],
)
def test_rows_that_cannot_be_learned_from(kind, rows, said):
    "Are refused by the learner's name and the column, and nothing has changed"
    learner = getattr(Items([]), kind)(actor_of(0, 4 if kind == 'sac' else 2), Pair(1), ARM, seed=0)
    before = through_file(learner.state_dict())
    with pytest.raises(ValueError, match=f'^{type(learner).__name__}: {said}'):
        learner.learn(Steps(rows()))
    assert same(before, through_file(learner.state_dict()))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    'part,bend,said',
    [
        (
            'actor',
            lambda x: x[:, :1],
            r'what the actor gives; got torch.float64 \[3, 1\]; expected floats \[3, .\]. Remedy: actor_net',
        ),
        ('actor', lambda x: x[0], 'what the actor gives'),
        ('actor', lambda x: x.long(), 'what the actor gives; got torch.int64'),
        ('actor', lambda x: None, 'what the actor gives; got a NoneType'),
        (
            'critics',
            lambda x: x[0],
            r'what the critics give; got torch.float64 \[3\]; expected floats \[n, 3\]. Remedy: a row of values for each critic',
        ),
        ('critics', lambda x: x.T, 'what the critics give'),
        ('critics', lambda x: x[:0], 'what the critics give'),
        ('critics', lambda x: x[..., None], 'what the critics give'),
        ('critics', lambda x: x * nan, 'update 0: loss and norm of the gradient; got nan'),
    ],
)
def test_models_of_another_shape(kind, part, bend, said):
    "What came, what was expected, what to do; nothing has changed but the noise that was drawn"

    class Bent(type(actor_of(0, 4)) if part == 'actor' else Pair):
        def forward(self, *x):
            return bend(super().forward(*x))

    actor, critics = actor_of(0, 4 if kind == 'sac' else 2), Pair(1)
    if part == 'actor':
        actor = Bent(*actor)
    else:
        critics = Bent(1)
    learner = getattr(Items([]), kind)(actor, critics, ARM, seed=0)
    before = learner.snapshot()
    with pytest.raises(ValueError, match=said):
        learner.learn(Steps(steering(3)))
    after = learner.snapshot()
    del before['generator'], after['generator']
    assert same(before, after)


@pytest.mark.parametrize('kind', KINDS)
def test_learners_that_meet_float64_say_what_to_do(kind):
    "Networks in float32 that don't convert; those of actor_net and Critics do"
    outputs, rows = 4 if kind == 'sac' else 2, Steps(steering(3))
    with pytest.raises(
        ValueError,
        match=f'^{kind}.*: what the model is given; got states of float64; expected torch.float32, as its weights are. Remedy: GymStepper',
    ):
        getattr(Items([]), kind)(actor_of(0, outputs).float(), Critics(WIDE, ARM, (4,)), ARM).learn(
            rows
        )
    with pytest.raises(ValueError, match='states of float64'):
        getattr(Items([]), kind)(
            actor_net(WIDE, ARM, (4,), kind == 'sac'), Pair(1).float(), ARM
        ).learn(rows)
    getattr(Items([]), kind)(
        actor_net(WIDE, ARM, (4,), kind == 'sac'), Critics(WIDE, ARM, (4,)), ARM
    ).learn(rows)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    'wrong', [dict(gamma=1.5), dict(tau=0.0), dict(max_norm=-1), dict(lr=-1.0)]
)
def test_settings_that_make_no_sense(kind, wrong):
    "As for all learners: when the chain is built"
    with pytest.raises(ValueError, match=f'^{kind.upper()}Learner: {next(iter(wrong))}'):
        getattr(Items([]), kind)(actor_of(0, 4), Pair(1), ARM, **wrong)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('part', ['actor', 'critics'])
def test_models_without_parameters(kind, part):
    "Can't be learned, and are named"
    models = {'actor': actor_of(0, 4), 'critics': Pair(1), part: nn.Tanh()}
    with pytest.raises(
        ValueError, match=f'^{kind.upper()}Learner: the {part} has no parameters to learn; got Tanh'
    ):
        getattr(Items([]), kind)(*models.values(), ARM)


@pytest.mark.parametrize('kind', KINDS)
def test_actors_in_workers_get_what_was_learned(kind):
    "Two processes act with the learner's weights; the same seeds, the same training"

    def trained(lr):
        learner = chains(kind)
        actor, critics = learner.actor, learner.critics
        policy = (SquashedGaussian if kind == 'sac' else GaussianNoise)(
            actor, learner.space, seed=0
        )
        steps = GymStepper('Pendulum-v1', policy, seed=0).parallel(2, chunk=2, method='fork')
        with getattr(steps.experience_replay(bs=8, max_sz=100, warmup=8, seed=0), kind)(
            actor, critics, learner.space, lr=lr, seed=0
        ) as pipe:
            return take(pipe, 40), pipe.source.memory.take(np.arange(40)).action

    (a, x), (b, y), (_, z) = trained(0.05), trained(0.05), trained(0.0)
    assert a == b and torch.equal(x, y) and torch.equal(x[:4], z[:4]) and not torch.equal(x, z)


@pytest.mark.parametrize('shape', [(), (1,), (2, 2)])
@pytest.mark.parametrize('kind', KINDS)
def test_actions_of_any_shape(kind, shape):
    "A single number, a row, a matrix: stepped, stored, learned from"
    space, seen = (
        Box(np.full(shape, -1, np.float32), np.full(shape, 3, np.float32)),
        ScriptedEnv(**script(4)).observation_space,
    )
    actor, critics = actor_net(seen, space, (4,), kind == 'sac'), Critics(seen, space, (4,))
    policy = (SquashedGaussian if kind == 'sac' else GaussianNoise)(actor, space, seed=0)
    pipe = getattr(
        GymStepper(
            ScriptedEnv(**script(4), action_space=space), policy, clip=False
        ).experience_replay(bs=2, max_sz=9, seed=0),
        kind,
    )(actor, critics, space, seed=0)
    assert all(np.isfinite(list(r.values())).all() for r in take(pipe, 5))


def test_a_temperature_that_stays():
    "temperature_lr=0"
    learner = SACLearner(
        [Steps(steering(3, k)) for k in range(4)],
        actor_of(0, 4),
        Pair(1),
        ARM,
        temperature=0.25,
        temperature_lr=0,
        lr=0.01,
        seed=0,
    )
    assert [r['temperature'] for r in learner] == pytest.approx(
        [0.25] * 4
    ) and learner.temperature().item() == pytest.approx(0.25)


# ---- recipes ----


@pytest.mark.parametrize(
    'changes',
    [{}, dict(memory='rank', n_step=3, alpha=0.7, beta=0.5, like='')],
    ids=['uniform', 'rank'],
)
@pytest.mark.parametrize('name', [f'pendulum-{k}' for k in KINDS])
def test_a_recipe_goes_on_bit_for_bit(name, changes, tmp_path):
    "An agent that is saved in the middle, and another that goes on"
    file = tmp_path / 'mine.ini'
    file.write_text(f'[mine]\nlike = {name}\n')
    settings = {
        **recipe('mine', file, warmup=30, network='8', bs=8).settings,
        **{k: v for k, v in changes.items() if k != 'like'},
    }
    a, b = (Agent(settings) for _ in 'ab')
    stream = iter(a.pipe)
    take(stream, 40)
    b.load_state_dict(through_file(a.state_dict()))
    assert list(islice(stream, 20)) == take(b.pipe, 20)
    assert np.array_equal(evaluate(a, 2), evaluate(b, 2))


@pytest.mark.parametrize('name', ['hopper-sac', 'halfcheetah-sac'])
def test_mujoco_is_kept_as_float32(name, tmp_path, monkeypatch):
    "A short training: rows are float32, a checkpoint goes on, and evaluations see the same"
    monkeypatch.chdir(tmp_path)  # MuJoCo writes MUJOCO_LOG.TXT where it has a warning
    settings = recipe(name, steps=60, warmup=20, network='8', bs=8).settings
    a, b = (Agent(settings) for _ in 'ab')
    assert (
        len(take(a.pipe, 20)) == 20
        and a.memory.memory[:].state.dtype == a.memory.memory[:].next_state.dtype == torch.float32
    )
    b.load_state_dict(through_file(a.state_dict()))
    stepper = step_env(settings, gym.make(settings['env']), b.greedy(), 0)
    assert (
        take(stepper, 3)[0].state.dtype == torch.float32
        and recipe(name).settings['steps'] == 1_000_000
    )


@pytest.mark.parametrize('clip,seen', [('rounding', None), ('none', None), ('all', 2.0)])
def test_a_recipe_says_what_is_clipped(clip, seen):
    "An actor that is no `SquashedGaussian` may leave the bounds; what is none of the words is one line"
    agent = Agent(recipe('pendulum-sac', clip=clip).settings)
    agent.stepper.policy = lambda states: np.float32([[7.0]])
    if seen:
        assert next(iter(agent.stepper)).action.item() == seen
    else:
        with pytest.raises(ActionError, match='outside its space'):
            next(iter(agent.stepper))
    with pytest.raises(SettingsError, match="there is no way to clip 'al' .did you mean 'all'"):
        Agent(recipe('pendulum-sac', clip='al').settings)


@pytest.mark.slow
@pytest.mark.parametrize('name', [f'pendulum-{k}' for k in KINDS])
def test_pendulum_learns(name, tmp_path):
    "At least -200 in five of five seeds, after 10,000 steps"
    returns = [
        start(recipe(name, seed=s), tmp_path / f'{s}').train()['final_return'] for s in range(5)
    ]
    assert min(returns) >= -200, returns
