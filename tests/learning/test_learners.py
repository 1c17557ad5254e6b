"""The learners, against a second implementation of every update: by row, step and weight."""

import math, pickle
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from torch import nn

from fastrl_replay.all import *
from fastrl_replay.testing import same, through_file
from strategies import cases

Box, Discrete, nan, inf = spaces.Box, spaces.Discrete, float('nan'), float('inf')
WIDE = Box(-np.inf, np.inf, (2,), np.float64)
torch.set_num_threads(1)


def sgd(lr=0.1, **kw):
    return lambda params: torch.optim.SGD(params, lr=lr, **kw)


# ---- rows, networks, and what is easy to say about them ----


def fill(n, observation=WIDE, action=Discrete(3), seed=0, size=1.0, **extra):
    "Random rows that mean nothing: each ends as it likes"
    rng, rows = np.random.default_rng(seed), np.zeros(n, step_dtype(observation, action, **extra))
    for name in 'state', 'next_state':
        rows[name] = (
            rng.normal(size=rows[name].shape)
            if rows.dtype[name].base.kind == 'f'
            else rng.integers(0, 5, rows[name].shape)
        )
    rows['reward'], rows['action'], rows['episode_n'], rows['step_n'] = (
        rng.normal(size=n) * size,
        rng.integers(0, 3, rows['action'].shape),
        1,
        np.arange(n) + 1,
    )
    end = rng.integers(0, 3, n)
    rows['terminated'], rows['truncated'] = end == 1, end == 2
    if 'weight' in extra:
        rows['weight'] = rng.random(n)
    if 'discount' in extra:
        rows['discount'] = rng.random(n) * rng.integers(0, 2, n)
    return rows


def mlp(seed=0, hidden=5, actions=3, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, actions)).to(dtype)


def weights(net):
    return {k: v.clone() for k, v in net.state_dict().items()}


def arrays(net):
    return [p.detach().double().numpy().copy() for p in net.parameters()]


def close(ours, theirs, tolerance=1e-9):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def state_of(learner):
    return through_file(learner.state_dict())


class Adam:
    "As in the paper, on a list of arrays; before it, gradients are scaled down to a norm"

    def __init__(self, w):
        self.m, self.v, self.t = [x * 0 for x in w], [x * 0 for x in w], 0

    def step(self, w, grads, lr, max_norm):
        norm = math.sqrt(math.fsum(float(x) ** 2 for g in grads for x in g.ravel()))
        if norm > max_norm:
            grads = [g * (max_norm / norm) for g in grads]
        self.t += 1
        for x, g, m, v in zip(w, grads, self.m, self.v):
            m[...], v[...] = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            x -= lr * (m / (1 - 0.9**self.t)) / (np.sqrt(v / (1 - 0.999**self.t)) + 1e-8)
        return norm


def huber(x):
    return (x * x / 2, x) if abs(x) <= 1 else (abs(x) - 0.5, math.copysign(1, x))


class Plain:
    "What both networks share: weights, target weights, when those are refreshed, and Adam"

    def __init__(self, net, lr, target_every, tau, max_norm):
        self.w, self.target, self.updates = arrays(net), arrays(net), 0
        self.lr, self.target_every, self.tau, self.max_norm, self.adam = (
            lr,
            target_every,
            tau,
            max_norm,
            Adam(self.w),
        )

    def refresh(self):
        if self.updates in range(0, 1000, self.target_every):
            self.target = [old + self.tau * (new - old) for old, new in zip(self.target, self.w)]

    def step(self, grads):
        norm = self.adam.step(
            self.w, grads, self.lr(self.updates) if callable(self.lr) else self.lr, self.max_norm
        )
        self.updates += 1
        self.refresh()
        return norm


# ---- a table ----


COLUMNS = st.sampled_from(
    [{}, dict(weight='f4'), dict(discount='f4'), dict(discount='f4', weight='f4')]
)


@cases(100)
@given(
    COLUMNS,
    st.booleans(),
    st.integers(-9, 9),
    st.integers(1, 4),
    st.integers(0, 12),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 9999),
)
def test_a_table_learns_row_by_row(columns, scheduled, start, batches, n, gamma, lr, seed):
    "A dict of floats and a loop: errors, records, values; spaces that begin anywhere"
    table = QTable(Discrete(5, start=start), Discrete(3))
    learner = QLearner([], table, gamma, lr=LinearSchedule(lr, 0, 3) if scheduled else lr)
    q = {(s, a): 0.0 for s in range(start, start + 5) for a in range(3)}
    for k in range(batches):
        rows, tds = fill(n + 1, Discrete(5, start=start), seed=seed + k, **columns), []
        rows['state'] += start
        rows['next_state'] += start
        record = learner.learn(Steps(rows))
        step = lr * (1 - min(k / 3, 1)) if scheduled else lr
        for r in rows:
            d = r['discount'] if 'discount' in columns else 0.0 if r['terminated'] else gamma
            at = int(r['state']), int(r['action'])
            td = float(r['reward']) + d * max(q[int(r['next_state']), a] for a in range(3)) - q[at]
            q[at] += step * (r['weight'] if 'weight' in columns else 1) * td
            tds.append(abs(td))
        values = [q[int(r['state']), int(r['action'])] for r in rows]
        assert record == pytest.approx(dict(td=np.mean(tds), q=np.mean(values)), rel=1e-5, abs=1e-6)
    close(table.values.ravel(), list(q.values()), 1e-6)
    assert torch.equal(table(torch.arange(start, start + 5)), torch.from_numpy(table.values))
    assert learner.updates == batches


# ---- a network ----


class PlainDQN(Plain):
    "Two layers, their values and their gradient, row by row"

    def values(self, w, s):
        hidden = [
            math.tanh(math.fsum(x * y for x, y in zip(row, s)) + b) for row, b in zip(w[0], w[1])
        ]
        return hidden, [
            math.fsum(x * y for x, y in zip(row, hidden)) + b for row, b in zip(w[2], w[3])
        ]

    def learn(self, rows, gamma, double):
        grads, loss, tds, qs, B = [x * 0 for x in self.w], 0.0, [], [], len(rows)
        for r in rows:
            a, s = int(r['action']), r['state'].tolist()
            theirs, mine = (
                self.values(self.target, r['next_state'])[1],
                self.values(self.w, r['next_state'])[1],
            )
            best = max(range(3), key=lambda i: (mine if double else theirs)[i])
            discount = (
                float(r['discount'])
                if 'discount' in rows.dtype.names
                else 0.0
                if r['terminated']
                else float(np.float32(gamma))
            )
            hidden, q = self.values(self.w, s)
            td = float(r['reward']) + discount * theirs[best] - q[a]
            weight = float(r['weight']) if 'weight' in rows.dtype.names else 1.0
            value, slope = huber(td)
            loss += weight * value / B
            out = -weight * slope / B
            grads[3][a] += out
            for i, h in enumerate(hidden):
                inner = out * self.w[2][a, i] * (1 - h * h)
                grads[2][a, i] += out * h
                grads[1][i] += inner
                for j in range(2):
                    grads[0][i, j] += inner * s[j]
            tds.append(td)
            qs.append(q[a])
        return dict(loss=loss, norm=self.step(grads), td=np.abs(tds).mean(), q=np.mean(qs)), tds


settings_of_dqn = st.fixed_dictionaries(
    dict(
        gamma=st.floats(0, 1),
        double=st.booleans(),
        target_every=st.integers(1, 4),
        tau=st.sampled_from([1.0, 0.5, 0.01]),
        max_norm=st.sampled_from([0.01, 0.1, 10.0]),
        lr=st.sampled_from([1e-2, 0.0, LinearSchedule(0.05, 0.01, 3)]),
    )
)


@cases(24)
@given(
    COLUMNS, settings_of_dqn, st.integers(1, 7), st.integers(0, 9999), st.sampled_from([1.0, 10.0])
)
def test_a_network_learns_row_by_row(columns, settings, n, seed, size):
    "In double precision: every record, every weight, those of the target network too"
    net = mlp(seed)
    learner = DQNLearner([], net, **settings)
    gamma, double = settings.pop('gamma'), settings.pop('double')
    plain = PlainDQN(net, **settings)
    for k in range(6):
        rows = fill(n, seed=seed + k, size=size, **columns)
        batch, before = Steps(rows), rows.copy()
        record = learner.learn(batch)
        expected, _ = plain.learn(rows, gamma, double)
        assert record == pytest.approx(expected, rel=1e-8, abs=1e-10)
        assert batch == Steps(before)
        close(arrays(net), plain.w)
        close(arrays(learner.target), plain.target)


def test_the_replay_gets_the_errors_of_the_plain_loop():
    "Weights come from a real replay, and errors become priorities"
    replay = PrioritizedReplay(
        None, 8, 50, alpha=1.0, beta=LinearSchedule(0.4, 1, 5), eps=0, seed=0
    )
    replay.add(Steps(fill(50)))
    learner = DQNLearner([], mlp(), lr=1e-2, target_every=3)
    plain = PlainDQN(mlp(), 1e-2, 3, 1.0, 10.0)
    priorities = np.ones(50)
    for _ in range(6):
        batch = replay.sample()
        learner.learn(batch)
        _, td = plain.learn(batch.rows, 0.99, True)
        priorities[batch.index] = np.abs(td)
        close(arrays(learner.model), plain.w)
        close(replay.sampler.probabilities(), priorities / priorities.sum())


# ---- a recurrent network ----


class Doubled(nn.Module):
    def forward(self, x):
        return x.double()


def recurrent(seed=0, size=3, dueling=False):
    "A `RecurrentNet` in double precision"
    torch.manual_seed(seed)
    net = RecurrentNet(WIDE, Discrete(3), size, dueling)
    net.encoder[0] = Doubled()
    return net.double()


def tale(lengths, seed=0, size=3, hidden=True, reward=1.0):
    "Episodes of these lengths as rows, negative ones cut off, with random hidden states"
    H = np.dtype([('[0]', 'f8', (size,)), ('[1]', 'f8', (size,))], align=True)
    rows, at, rng = (
        fill(sum(map(abs, lengths)), seed=seed, size=reward, **dict(hidden=H) if hidden else {}),
        0,
        np.random.default_rng(seed),
    )
    rows['terminated'] = rows['truncated'] = False
    for e, length in enumerate(lengths, 1):
        part = rows[at : at + abs(length)]
        at += abs(length)
        part['next_state'][:-1] = part['state'][1:]
        part['episode_n'], part['step_n'] = e, np.arange(len(part)) + 1
        part['terminated' if length > 0 else 'truncated'][-1] = True
    if hidden:
        for h in '[0]', '[1]':
            rows['hidden'][h] = rng.normal(size=(len(rows), size))
    return rows


def exact_h(x):
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x


def exact_back(y, e=1e-3):
    return math.copysign(((math.sqrt(1 + 4 * e * (abs(y) + 1 + e)) - 1) / (2 * e)) ** 2 - 1, y)


class PlainR2D2(Plain):
    "One sequence after another, one step after another; only slopes come from torch"

    names = (
        'encoder.1.weight',
        'encoder.1.bias',
        'lstm.weight_ih_l0',
        'lstm.weight_hh_l0',
        'lstm.bias_ih_l0',
        'lstm.bias_hh_l0',
        'head.weight',
        'head.bias',
    )

    def cell(self, w, s, h, c):
        We, be, Wi, Wh, bi, bh, Wo, bo = w
        x = torch.clamp(We @ torch.as_tensor(s.copy()) + be, min=0)
        i, f, g, o = (Wi @ x + bi + Wh @ h + bh).chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return Wo @ h + bo, h, c

    def values(self, w, start, states, burn):
        "Values of each state; no gradient comes from the first ones"
        memory, out = start, []
        for t, s in enumerate(states):
            with torch.set_grad_enabled(t >= burn):
                q, *memory = self.cell(w, s, *memory)
            out.append(q)
        return out

    def learn(self, batch, gamma, n, rescaled):
        w = [torch.tensor(x, requires_grad=True) for x in self.w]
        old = [torch.tensor(x) for x in self.target]
        gamma = float(np.float32(gamma))
        rows, burn = batch.rows, batch.burn_in.shape[1]
        total, tds, qs = 0, [], []
        for b in range(len(rows)):
            steps = int(rows['mask'][b].sum())
            start = [torch.zeros(self.w[3].shape[1]).double()] * 2
            if 'hidden' in dir(batch):
                start = [x[b].double() for x in batch.hidden]
            states = [*rows['state'][b, :steps], rows['next_state'][b, steps - 1]]
            q = self.values(w, start, states, burn)
            judged = self.values(old, start, states, burn)
            tds.append([])
            for t in range(burn, steps):
                end = min(t + n, steps)
                goal, weight = 0.0, 1.0
                for k in range(t, end):
                    goal += weight * float(rows['reward'][b, k])
                    weight *= 0.0 if rows['terminated'][b, k] else gamma
                value = judged[end][q[end].argmax()].item()
                if rescaled:
                    goal = exact_h(goal + weight * exact_back(value))
                else:
                    goal += weight * value
                guess = q[t][int(rows['action'][b, t])]
                error = goal - guess
                loss = error * error / 2 if abs(error.item()) <= 1 else error.abs() - 0.5
                total = total + float(batch.weight[b]) * loss
                tds[-1].append(error.item())
                qs.append(guess.item())
        count = max(len(qs), 1)
        loss = total / count
        grads = [np.zeros(x.shape) for x in w]
        if qs:
            grads = [g.numpy() for g in torch.autograd.grad(loss, w)]
        td = sum(abs(x) for td in tds for x in td) / count
        return dict(loss=float(loss), norm=self.step(grads), td=td, q=sum(qs) / count), tds


@st.composite
def stories(draw):
    length = draw(st.integers(1, 6))
    return dict(
        length=length,
        burn_in=draw(st.integers(0, length - 1)),
        overlap=draw(st.integers(0, length - 1)),
    ), draw(st.lists(st.integers(1, 9) | st.integers(-9, -1), min_size=4, max_size=8))


@cases(24)
@given(
    st.sampled_from(['stored', 'zero', 'none']),
    st.booleans(),
    stories(),
    st.integers(1, 7),
    st.sampled_from([0.997, 0.5, 1.0]),
    st.integers(0, 9999),
    st.sampled_from([(1, 1.0), (2, 1.0), (2, 0.25)]),
    st.sampled_from([0.05, 40.0]),
)
def test_a_recurrent_network_learns_step_by_step(
    start, rescaled, story, n, gamma, seed, target, max_norm
):
    """Real sequences of a replay, also padded ones and those shorter than the burn-in.

    Compares records, weights, and the errors that the replay gets."""
    settings, lengths = story
    state = 'zero' if start == 'zero' else 'stored'
    replay = SequenceReplay(None, 3, 200, state=state, seed=seed, **settings)
    replay.add(Steps(tale(lengths, seed, hidden=start != 'none', reward=3.0)))
    heard = []
    replay.update_priorities = lambda keys, td: heard.append(td.numpy())
    net = recurrent(seed)
    common = dict(
        lr=LinearSchedule(0.03, 0.01, 3), target_every=target[0], tau=target[1], max_norm=max_norm
    )
    learner = R2D2Learner([], net, gamma, n, rescaled=rescaled, **common)
    plain = PlainR2D2(net, **common)
    plain.w = [net.state_dict()[k].numpy().copy() for k in plain.names]
    plain.target = [w.copy() for w in plain.w]
    plain.adam = Adam(plain.w)
    for _ in range(4):
        batch = replay.sample(min(3, len(replay)))
        before = batch.copy()
        record = learner.learn(batch)
        expected, tds = plain.learn(batch, gamma, n, rescaled)
        assert record == pytest.approx(expected, rel=1e-7, abs=1e-9)
        assert batch == before
        close([net.state_dict()[k] for k in plain.names], plain.w, 1e-7)
        close([learner.target.state_dict()[k] for k in plain.names], plain.target, 1e-7)
        for got, want in zip(heard.pop(), tds):
            close(got[: len(want)], want, 1e-7)


def test_sequences_without_anything_to_learn():
    "If all are shorter than the burn-in, there is no loss, no gradient and no change"
    replay = SequenceReplay(None, 2, 50, length=6, burn_in=4, overlap=0, alpha=1.0, seed=0)
    replay.add(Steps(tale([2, -3, 1])))
    learner = R2D2Learner([], recurrent(), lr=1.0)
    before = weights(learner.model)
    assert learner.learn(replay.sample()) == dict(loss=0, norm=0, td=0, q=0)
    assert same(weights(learner.model), before)


def test_padded_states_of_a_space_without_0():
    "An episode is shorter than a sequence"
    space = Discrete(4, start=2)
    rows = np.zeros(3, step_dtype(space, Discrete(3)))
    rows['state'] = rows['next_state'] = space.start
    rows['episode_n'] = 1
    rows['step_n'] = [1, 2, 3]
    rows['terminated'][2] = True
    replay = SequenceReplay(None, 1, 10, length=4, burn_in=1, overlap=0, seed=0)
    replay.add(Steps(rows))
    R2D2Learner([], RecurrentNet(space, Discrete(3), 4)).learn(replay.sample())


# ---- whole chains ----


def cartpoles(seed, tau=1.0, optimizer=None):
    torch.manual_seed(seed)
    net = value_net(Box(-9, 9, (4,)), Discrete(2), (16,), dueling=True)
    policy = EpsGreedy(net, LinearSchedule(1, 0.1, 60), seed=seed)
    return (
        GymStepper(['CartPole-v1'] * 3, policy, seed=seed)
        .n_step(3, 0.9)
        .prioritized_replay(8, 60, ratio=0.5, warmup=12, beta=LinearSchedule(0.4, 1, 20), seed=seed)
        .dqn(net, lr=LinearSchedule(1e-2, 1e-3, 30), target_every=4, tau=tau, optimizer=optimizer)
    )


def scripted(seed):
    torch.manual_seed(seed)
    envs = [ScriptedEnv(**script(3, -5, 1, 4, env=0)), ScriptedEnv(**script(-2, 7, env=1))]
    net = RecurrentNet(envs[0].observation_space, envs[0].action_space, 4)
    policy = EpsGreedy(net, LinearSchedule(1, 0.1, 60), seed=seed)
    return (
        GymStepper(envs, policy, seed=seed)
        .sequence_replay(3, 40, length=4, burn_in=1, overlap=2, seed=seed)
        .r2d2(net, n=2, lr=1e-2, target_every=4, tau=0.1)
    )


CHAINS = dict(
    dqn=cartpoles,
    r2d2=scripted,
    momentum=lambda seed: cartpoles(seed, 0.1, sgd(1e-2, momentum=0.9)),
)


@pytest.mark.parametrize('stop', [1, 2, 23])
@pytest.mark.parametrize('kind', CHAINS)
def test_a_chain_goes_on_from_a_file(kind, stop):
    "Saved after a few updates, loaded into another seed's chain: records and weights bit for bit"
    a, b = CHAINS[kind](0), CHAINS[kind](1)
    running = iter(a)
    list(islice(running, stop))
    b.load_state_dict(state_of(a))
    assert same(weights(a.model), weights(b.model))
    assert b.updates == stop
    assert list(islice(running, 15)) == list(islice(b, 15))
    assert same(weights(a.model), weights(b.model))
    assert same(weights(a.target), weights(b.target))
    assert same(a.opt.state_dict(), b.opt.state_dict())


@pytest.mark.parametrize('kind', ['dqn', 'r2d2'])
def test_a_chain_pickles_whole(kind):
    "The policy's network is still the learner's; the target and the optimizer begin again"
    a = CHAINS[kind](0)
    twin = pickle.loads(pickle.dumps(a))
    assert list(islice(twin, 12)) == list(islice(a, 12))
    assert same(weights(twin.model), weights(a.model))
    source = twin
    while not isinstance(source, GymStepper):
        source = source.source
    assert source.policy.values is twin.model
    used = pickle.loads(pickle.dumps(a))
    assert same(weights(used.model), weights(a.model))
    assert same(weights(used.target), weights(a.model))
    assert used.updates == 0


def test_a_state_is_a_copy():
    "It stays the same while the learner goes on, and while another one that loaded it does"
    table = lambda: QLearner([], QTable(Discrete(5), Discrete(3)))
    net = lambda: DQNLearner([], mlp(), lr=0.1)
    for make, batch in (table, Steps(fill(5, Discrete(5)))), (net, Steps(fill(5))):
        a, b = make(), make()
        a.learn(batch)
        state = a.state_dict()
        kept = through_file(state)
        a.learn(batch)
        assert same(state, kept)
        assert not same(a.state_dict(), kept)
        b.load_state_dict(state)
        b.learn(batch)
        assert same(state, kept)
        assert same(b.state_dict(), a.state_dict())


def test_a_checkpoint_of_another_model():
    "The error names the tensor, and nothing in the whole chain has changed"

    def chain(net):
        return PrioritizedReplay([Steps(fill(9, seed=i)) for i in range(9)], 4, 30, seed=0).dqn(net)

    longer = mlp()
    longer.append(nn.Linear(3, 3).double())
    for saved, says in (
        (mlp(hidden=6), r'0.weight; got a tensor \[6, 2\] of float64; expected .* \[5, 2\]'),
        (longer, r'3.weight; got a tensor \[3, 3\] of float64; expected no such tensor'),
    ):
        a, b = chain(saved), chain(mlp())
        list(a)
        list(islice(b, 2))
        before = state_of(b)
        with pytest.raises(ValueError, match=f'a different model: {says}'):
            b.load_state_dict(state_of(a))
        assert same(state_of(b), before)
    with pytest.raises(ValueError, match='R2D2Learner: .*a different stage; got DQNLearner'):
        R2D2Learner([], recurrent()).load_state_dict(state_of(DQNLearner([], mlp())))


# ---- attacks ----


@pytest.mark.parametrize('optimizer', [None, sgd()])
@pytest.mark.parametrize('spoil', [nan, -inf, 3e38])
def test_what_is_no_number_leaves_everything_untouched(spoil, optimizer):
    "After NaN, or errors whose sum overflows single precision, the learner continues unaffected"
    space = Box(-9, 9, (2,))
    rows, bad = fill(8, space), fill(8, space)
    bad['reward'][:4] = spoil
    a, b = (
        DQNLearner([], mlp(dtype=torch.float32), optimizer=optimizer, target_every=1, tau=0.5)
        for _ in 'ab'
    )
    for learner in a, b:
        learner.learn(Steps(rows))
    before = state_of(a)
    with pytest.raises(ValueError, match=r'^DQNLearner: loss or gradient norm of update 1'):
        a.learn(Steps(bad))
    assert same(state_of(a), before)
    assert a.learn(Steps(rows)) == b.learn(Steps(rows))
    assert same(state_of(a), state_of(b))


def test_frozen_parameters_stay():
    "The others learn"
    net = mlp()
    net[0].requires_grad_(False)
    before = weights(net)
    list(DQNLearner([Steps(fill(5, seed=i)) for i in range(6)], net, lr=0.1))
    assert torch.equal(net[0].weight, before['0.weight'])
    assert not torch.equal(net[2].weight, before['2.weight'])


def test_shared_parameters():
    "They move once in the target network, and stay shared"
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(2, 3)).double()
    learner = DQNLearner([], net, lr=0.1, tau=0.25, target_every=1)
    for k in range(4):
        before = arrays(learner.target)
        learner.learn(Steps(fill(5, seed=k)))
        expected = [a + 0.25 * (b - a) for a, b in zip(before, arrays(learner.model))]
        close(arrays(learner.target), expected)
    assert learner.target[0] is learner.target[2]


def with_norm(tail):
    net = mlp(dtype=torch.float32)
    net.insert(1, tail)
    return net


def test_buffers_follow_the_model():
    "Statistics of a BatchNorm go to the target network with the weights, counts as they are"
    for tau in 1.0, 0.5:
        learner = DQNLearner(
            [Steps(fill(6, Box(-9, 9, (2,)), seed=i)) for i in range(9)],
            with_norm(nn.BatchNorm1d(5)),
            target_every=1,
            tau=tau,
        )
        for _ in learner:
            pass
        mine, theirs = learner.model[1], learner.target[1]
        assert theirs.num_batches_tracked == mine.num_batches_tracked == 18
        assert torch.equal(theirs.running_mean, mine.running_mean) == (tau == 1)


def test_the_target_has_no_dice():
    "A network with Dropout is asked twice"
    learner, rows = (
        DQNLearner([], with_norm(nn.Dropout(0.5)), double=False),
        Steps(fill(6, Box(-9, 9, (2,)))),
    )
    a, b = (dqn_errors(learner.model, learner.target, rows, 0.99, False)[1] for _ in 'ab')
    assert torch.equal(a, b)


class Says(nn.Module):
    "A model whose answer is bent"

    def __init__(self, bend):
        super().__init__()
        self.net, self.bend = mlp(), bend

    def forward(self, x):
        return self.bend(self.net(x))


WRONG = dict(one_number=lambda q: q[:, 0], a_tuple=lambda q: (q, q), a_row_less=lambda q: q[:-1])


@pytest.mark.parametrize('case', WRONG)
def test_a_wrong_model_is_named(case):
    "The error says what the model gave, and what was expected"
    with pytest.raises((TypeError, ValueError), match='^(DQNLearner|dqn_errors): .*got .*expected'):
        DQNLearner([], Says(WRONG[case])).learn(Steps(fill(6)))


# ---- learners of several models, as a soft actor-critic and a delayed one are ----


def test_an_error_above_comes_through():
    "torch reads every attribute of a stage to describe it when an error passes"

    def source():
        yield from ()
        raise OSError('disk')

    with pytest.raises(OSError, match='disk'):
        list(DQNLearner(source(), mlp()))


# ---- how networks are computed ----


@pytest.mark.parametrize('name', ['cartpole', 'cartpole-r2d2', 'pendulum-sac'])
def test_networks_in_bfloat16_learn_nearly_the_same(name):
    "A checkpoint stays in single precision; losses are near those of float32"
    from fastrl_replay.learning.settings import recipe
    from fastrl_replay.app.recipes import Agent

    def records(**given):
        small = dict(network=16, warmup=100, steps=400, bs=8, train_every=1, ratio=0.25)
        agent = Agent({**recipe(name).settings, **small, **given})
        return [r for r, _ in zip(agent.pipe, range(3))], agent.pipe

    (a, plain), (b, half) = records(), records(precision='bfloat16')
    assert a[0].keys() == b[0].keys() and a[0] != b[0]
    for k in a[0]:
        assert abs(a[0][k] - b[0][k]) < 0.1 * abs(a[0][k]) + 0.05, k
    plain.load_state_dict(half.state_dict())
    with pytest.raises(ValueError, match="precision; got 'half'"):
        records(precision='half')


# ---- they learn ----


class Recall(gym.Env):
    "Shows a number, then nothing, and rewards the action that repeats the number"

    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cue = 0, int(self.np_random.integers(2))
        return np.float32([0, 2 * self.cue - 1]), {}

    def step(self, action):
        self.t += 1
        reward = float(self.t == 2 and action == self.cue)
        return np.float32([1, 0]), reward, self.t == 2, False, {}


@pytest.mark.slow
def test_r2d2_learns_to_remember():
    torch.manual_seed(0)
    net = RecurrentNet(Recall.observation_space, Recall.action_space, 8)
    steps = GymStepper([Recall] * 8, EpsGreedy(net, 0.3, seed=0), seed=0)
    replay = steps.sequence_replay(32, 2000, length=2, burn_in=0, overlap=0, seed=0)
    list(islice(replay.r2d2(net, n=1, lr=1e-2, target_every=10), 300))
    assert evaluate(EpsGreedy(net, 0.0), Recall, 50, 1).mean() == 1


@pytest.mark.parametrize('kind', CHAINS)
def test_one_seed_one_result(kind):
    "Numbers from the global generators change nothing; another seed gives other weights"

    def run(seed):
        pipe = CHAINS[kind](seed)
        out = []
        for record in islice(pipe, 25):
            out.append(record)
            torch.rand(3)
            np.random.rand(2)
        return out, weights(pipe.model)

    assert same(run(3), run(3))
    assert not same(run(3), run(4))
