"""The learners, against a second implementation of every update: one row, one step, one weight at a time."""

import math, pickle
from copy import deepcopy
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from torch import nn

from fastrl_replay.all import *
from fastrl_replay.replay.sequence_table import find_place
from fastrl_replay.learning.learners import Follows, Learned, Learner, discounts
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
    "What both networks share: weights, those of the target network, when that is refreshed, and Adam"

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


@pytest.mark.parametrize(
    'columns',
    [{}, dict(weight='f4'), dict(discount='f4'), dict(discount='f4', weight='f4')],
    ids=' '.join,
)
@pytest.mark.parametrize('scheduled', [False, True])
@cases(25)
@given(
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
            td = (
                float(r['reward'])
                + d * max(q[int(r['next_state']), a] for a in range(3))
                - q[int(r['state']), int(r['action'])]
            )
            q[int(r['state']), int(r['action'])] += (
                step * (r['weight'] if 'weight' in columns else 1) * td
            )
            tds.append(abs(td))
        assert record == pytest.approx(
            dict(td=np.mean(tds), q=np.mean([q[int(r['state']), int(r['action'])] for r in rows])),
            rel=1e-5,
            abs=1e-6,
        )
    close(table.values.ravel(), list(q.values()), 1e-6)
    states = torch.arange(start, start + 5)
    assert torch.equal(table(states), torch.from_numpy(table.values)) and learner.updates == batches


@pytest.mark.parametrize('kind', ['proportional', 'rank'])
def test_a_table_and_a_replay(kind):
    "The absolute errors become the priorities; a chain that is saved and loaded goes on with the same numbers"

    def make():
        return PrioritizedReplay(
            [Steps(fill(4, Discrete(5), seed=i)) for i in range(30)],
            bs=6,
            max_sz=40,
            kind=kind,
            alpha=1.0,
            eps=0.0,
            seed=1,
        ).q_learn(QTable(Discrete(5), Discrete(3)), lr=LinearSchedule(0.5, 0.1, 20))

    replay, table, seen = make().source, QTable(Discrete(5), Discrete(3)), []
    replay.update_priorities = lambda keys, td: seen.append((keys.copy(), td.copy()))
    replay.add(Steps(fill(40, Discrete(5))))
    batch = replay.sample(20)
    QLearner([], table, lr=0.0).learn(batch)
    close(seen[0][1], batch.reward.double(), 1e-6)
    assert np.array_equal(seen[0][0], batch.rows['index'])  # of an empty table
    a, b = make(), make()
    running = iter(a)
    list(islice(running, 11))
    b.load_state_dict(state_of(a))
    assert (
        list(running) == list(b)
        and np.array_equal(a.table.values, b.table.values)
        and a.updates == b.updates
    )


@pytest.mark.parametrize('place', ['state', 'next_state', 'action'])
@pytest.mark.parametrize('wrong', [-1, 5, 8, -(10**9), 2**62, -(2**63)])
@pytest.mark.parametrize('start', [0, 3, -3])
def test_nothing_is_written_beside_the_table(place, wrong, start):
    "One bad row among good ones: it is named, the table is as it was, and so is the memory around it"
    table = QTable(Discrete(5, start=start), Discrete(3))
    around = np.full((15, 3), 7.0)
    table.values = around[5:10]
    rows = fill(6, Discrete(5))
    rows['state'] += start
    rows['next_state'] += start
    rows[place][4] = wrong + start if abs(wrong) < 10 and place != 'action' else wrong
    learner = QLearner([], table)
    with pytest.raises(ValueError, match=r'^QLearner: row 4 is outside the table.*; got state'):
        learner.learn(Steps(rows))
    assert (around == 7).all() and learner.updates == 0


@pytest.mark.parametrize('kind', ['int32', 'uint8', 'int8', 'uint64'])
def test_numbers_of_any_kind_are_actions(kind):
    "For a table and for a network: as int64"
    rows, net = fill(9), mlp()
    other = fill(9, action=Box(0, 2, (), np.dtype(kind).type))
    other['action'] = rows['action']
    a, b = (DQNLearner([], deepcopy(net)) for _ in 'ab')
    assert a.learn(Steps(rows)) == b.learn(Steps(other)) and same(
        weights(a.model), weights(b.model)
    )
    rows, other = (
        fill(9, Discrete(5), action=space)
        for space in (Discrete(3), Box(0, 2, (), np.dtype(kind).type))
    )
    other['action'] = rows['action']
    a, b = (QLearner([], QTable(Discrete(5), Discrete(3))) for _ in 'ab')
    assert a.learn(Steps(rows)) == b.learn(Steps(other)) and np.array_equal(
        a.table.values, b.table.values
    )


def test_what_a_table_refuses():
    "Spaces that are no numbers, actions that don't begin at 0, a checkpoint of another size"
    with pytest.raises(TypeError, match='QTable: the observation space; got Box'):
        QTable(WIDE, Discrete(3))
    for actions in WIDE, Discrete(3, start=1), spaces.MultiDiscrete([3]):
        with pytest.raises(TypeError, match='the action space; got .*; expected Discrete, from 0'):
            QTable(Discrete(3), actions)
    a, b = (QLearner([], QTable(Discrete(n), Discrete(3))) for n in (5, 6))
    with pytest.raises(
        ValueError,
        match=r'QLearner: the checkpoint is of another model: table; got \[5, 3\]; expected \[6, 3\]',
    ):
        b.load_state_dict(state_of(a))


@pytest.mark.parametrize(
    'rows',
    [
        pytest.param(fill(1, Discrete(5))[0:1].reshape(()), id='one row'),
        pytest.param(fill(6, Discrete(5)).reshape(2, 3), id='sequences'),
        pytest.param(fill(6), id='box'),
        pytest.param(fill(6, spaces.MultiDiscrete([5])), id='multidiscrete'),
        pytest.param(fill(6, Discrete(5), Box(0, 2, ())), id='float actions'),
    ],
)
def test_rows_that_no_table_can_learn_from(rows):
    "Are refused by name"
    with pytest.raises((TypeError, ValueError), match='^QLearner: '):
        QLearner([], QTable(Discrete(5), Discrete(3))).learn(Steps(rows))


def test_a_table_refuses_nan():
    "As networks do: before anything is written"
    rows, table = fill(6, Discrete(5)), QTable(Discrete(5), Discrete(3))
    rows['reward'][3] = nan
    with pytest.raises(ValueError, match='^QLearner: '):
        QLearner([], table).learn(Steps(rows))
    assert not table.values.any()


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


@pytest.mark.parametrize(
    'columns',
    [{}, dict(weight='f4'), dict(discount='f4'), dict(discount='f4', weight='f4')],
    ids=' '.join,
)
@cases(20)
@given(settings_of_dqn, st.integers(1, 7), st.integers(0, 9999), st.sampled_from([1.0, 10.0]))
def test_a_network_learns_row_by_row(columns, settings, n, seed, size):
    "Nine updates in double precision: every record, every weight, those of the target network too"
    net = mlp(seed)
    learner = DQNLearner([], net, **settings)
    gamma, double = settings.pop('gamma'), settings.pop('double')
    plain = PlainDQN(net, **settings)
    for k in range(9):
        rows = fill(n, seed=seed + k, size=size, **columns)
        batch, before = Steps(rows), rows.copy()
        record = learner.learn(batch)
        expected, _ = plain.learn(rows, gamma, double)
        assert record == pytest.approx(expected, rel=1e-8, abs=1e-10) and batch == Steps(before)
        close(arrays(net), plain.w)
        close(arrays(learner.target), plain.target)
    assert learner.updates == 9


@pytest.mark.parametrize('kind', ['proportional', 'rank'])
@pytest.mark.parametrize('alpha,beta', [(0.6, 0.4), (1.0, LinearSchedule(0.4, 1, 5))])
def test_what_the_replay_hears_is_what_the_loop_says(kind, alpha, beta):
    "Weights of a real replay, errors with their sign, in the order of the batch; then the priorities themselves"
    replay, heard = PrioritizedReplay(None, 8, 50, kind=kind, alpha=alpha, beta=beta, seed=0), []
    replay.add(Steps(fill(50)))
    tell = replay.update_priorities
    replay.update_priorities = lambda keys, td: (
        heard.append((keys.copy(), td.clone())),
        tell(keys, td),
    )
    learner, plain = (
        DQNLearner([], mlp(), lr=1e-2, target_every=3),
        PlainDQN(mlp(), 1e-2, 3, 1.0, 10.0),
    )
    for _ in range(6):
        batch = replay.sample()
        learner.learn(batch)
        _, td = plain.learn(batch.rows, 0.99, True)
        keys, told = heard.pop()
        close(told, td)
        assert np.array_equal(keys, batch.rows['index']) and not told.requires_grad
        close(arrays(learner.model), plain.w)
        if kind == 'proportional':
            close(
                [replay.sampler.tree[int(k) % 50] for k in keys],
                [(abs(dict(zip(keys, td))[k]) + 1e-6) ** alpha for k in keys],
                1e-6,
            )


@pytest.mark.parametrize('every', [1, 2, 3, 7])
@pytest.mark.parametrize('tau', [1.0, 0.25])
def test_when_the_target_is_refreshed(every, tau):
    "After every `every` updates, by the model as it is then; also after a checkpoint in between"

    def make():
        return DQNLearner(
            [Steps(fill(5, seed=k)) for k in range(16)], mlp(), lr=0.05, target_every=every, tau=tau
        )

    for stop in 0, 1, every, every + 1:
        learner = make()
        target = arrays(learner.target)
        for k, _ in enumerate(islice(learner, 16)):
            if (k + 1) % every == 0:
                target = [a + tau * (b - a) for a, b in zip(target, arrays(learner.model))]
            close(arrays(learner.target), target, 1e-12)
            if k == stop:
                saved = state_of(learner)
        other = make()
        other.load_state_dict(saved)
        list(other)
        assert same(weights(other.target), weights(learner.target)) and same(
            weights(other.model), weights(learner.model)
        )


def test_truncated_goes_on_and_terminated_does_not():
    "Only the next state of what has terminated has no effect on values and weights: table, network, recurrent network"
    for flag, matters in (None, True), ('truncated', True), ('terminated', False):

        def learned(after, learner, space):
            rows = fill(1, space)
            rows['terminated'] = rows['truncated'] = False
            if flag:
                rows[flag] = True
            rows['next_state'] = after
            learner.learn(Steps(rows))
            return learner

        table = [QTable(Discrete(5), Discrete(3)) for _ in 'ab']
        for t, after in zip(table, (3, 4)):
            t.values[:] = np.arange(15).reshape(5, 3) ** 2
            learned(after, QLearner([], t), Discrete(5))
        assert np.array_equal(table[0].values, table[1].values) != matters
        nets = [
            learned(after, DQNLearner([], mlp(), optimizer=sgd()), WIDE).model
            for after in (0.5, -2)
        ]
        assert same(*map(weights, nets)) != matters
        ends = []
        for after in 0.5, -2:
            rows = fill(3)
            rows['terminated'] = rows['truncated'] = False
            if flag:
                rows[flag][-1] = True
            rows['next_state'][:-1], rows['next_state'][-1] = rows['state'][1:], after
            replay = SequenceReplay(None, 1, 10, length=3, burn_in=1, overlap=0, seed=0)
            replay.add(Steps(rows))
            ends.append(R2D2Learner([], recurrent(), optimizer=sgd(), n=9))
            ends[-1].learn(replay.sample())
        assert same(*(weights(l.model) for l in ends)) != matters


def test_plain_q_learning_where_both_look():
    "One row at a time without hidden layers: a network on ones at their places, learned by SGD with errors below 1, is a table"
    rows = fill(200, Discrete(5), seed=3, size=0.1)
    rows['reward'] = rows['reward'].clip(-0.3, 0.3)
    net = nn.Sequential(FlattenSpace(Discrete(5)), nn.Linear(5, 3, bias=False))
    net[1].weight.data.zero_()
    dqn = DQNLearner(
        [Steps(rows[i : i + 1]) for i in range(200)],
        net,
        gamma=0.5,
        target_every=1,
        double=False,
        optimizer=sgd(0.25),
    )
    table = QTable(Discrete(5), Discrete(3))
    q = QLearner([Steps(rows)], table, 0.5, 0.25)
    list(dqn)
    list(q)
    np.testing.assert_allclose(net[1].weight.detach().T, table.values, atol=1e-6)
    assert abs(table.values).max() > 0.05


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

    def learn(self, batch, gamma, n, rescaled):
        w, old, gamma = (
            [torch.tensor(x, requires_grad=True) for x in self.w],
            [torch.tensor(x) for x in self.target],
            float(np.float32(gamma)),
        )
        rows, burn, total, tds, qs = batch.rows, batch._split, 0, [], []
        for b in range(len(rows)):
            steps = int(rows['mask'][b].sum())
            start = (
                [torch.as_tensor(x[b].clone()).double() for x in batch.hidden]
                if 'hidden' in dir(batch)
                else [torch.zeros(self.w[3].shape[1]).double()] * 2
            )
            mine, theirs, td = start, start, []
            with torch.no_grad():
                for t in range(min(burn, steps)):
                    mine, theirs = (
                        self.cell(w, rows['state'][b, t], *mine)[1:],
                        self.cell(old, rows['state'][b, t], *theirs)[1:],
                    )
            if steps > burn:
                q, judged = [], []
                for s in [*rows['state'][b, burn:steps], rows['next_state'][b, steps - 1]]:
                    out, *mine = self.cell(w, s, *mine)
                    q.append(out)
                    with torch.no_grad():
                        out, *theirs = self.cell(old, s, *theirs)
                        judged.append(out)
                for t in range(burn, steps):
                    goal, weight = 0.0, 1.0
                    for k in range(t, min(t + n, steps)):
                        goal += weight * float(rows['reward'][b, k])
                        weight *= 0.0 if rows['terminated'][b, k] else gamma
                    best = int(np.argmax(q[k + 1 - burn].detach().numpy()))
                    value = judged[k + 1 - burn][best].item()
                    goal += weight * (exact_back(value) if rescaled else value)
                    if rescaled:
                        goal = exact_h(goal)
                    guess = q[t - burn][int(rows['action'][b, t])]
                    error = goal - guess
                    loss = error * error / 2 if abs(error.item()) <= 1 else error.abs() - 0.5
                    total = total + float(batch.weight[b]) * loss
                    td.append(error.item())
                    qs.append(guess.item())
            tds.append(td)
        count = max(len(qs), 1)
        if len(qs):
            (total / count).backward()
        grads = [np.zeros(p.shape) if p.grad is None else p.grad.numpy() for p in w]
        loss = total.item() / count if len(qs) else 0.0
        return dict(
            loss=loss,
            norm=self.step(grads),
            td=sum(abs(x) for td in tds for x in td) / count,
            q=sum(qs) / count,
        ), tds


def test_the_plain_scales_are_inverse():
    "What the loop below believes of h"
    for x in 0.0, 0.3, -7.0, 1e4:
        assert exact_back(exact_h(x)) == pytest.approx(x, rel=1e-9, abs=1e-9)


@st.composite
def stories(draw):
    length = draw(st.integers(1, 6))
    return dict(
        length=length,
        burn_in=draw(st.integers(0, length - 1)),
        overlap=draw(st.integers(0, length - 1)),
    ), draw(st.lists(st.integers(1, 9) | st.integers(-9, -1), min_size=4, max_size=8))


@pytest.mark.parametrize('start', ['stored', 'zero', 'none'])
@pytest.mark.parametrize('rescaled', [True, False])
@cases(12)
@given(
    stories(),
    st.integers(1, 7),
    st.sampled_from([0.997, 0.5, 1.0]),
    st.integers(0, 9999),
    st.sampled_from([(1, 1.0), (2, 1.0), (2, 0.25)]),
    st.sampled_from([0.05, 40.0]),
    st.sampled_from([0.0, 0.9, 1.0]),
)
def test_a_recurrent_network_learns_step_by_step(
    start, rescaled, story, n, gamma, seed, target, max_norm, eta
):
    "Real sequences of a replay, padded ones and those shorter than the burn-in too: records, weights, and the priorities that come of it"
    settings, lengths = story
    replay = SequenceReplay(
        None,
        3,
        200,
        eta=eta,
        alpha=0.7,
        beta=0.6,
        eps=1e-3,
        state='zero' if start == 'zero' else 'stored',
        seed=seed,
        **settings,
    )
    replay.add(Steps(tale(lengths, seed, hidden=start != 'none', reward=3.0)))
    net = recurrent(seed)
    common = dict(
        lr=LinearSchedule(0.03, 0.01, 3), target_every=target[0], tau=target[1], max_norm=max_norm
    )
    learner = R2D2Learner([], net, gamma, n, rescaled=rescaled, **common)
    plain = PlainR2D2(net, **common)
    plain.w, plain.target = (
        [net.state_dict()[k].numpy().copy() for k in plain.names] for _ in 'ab'
    )
    plain.adam = Adam(plain.w)
    for k in range(4):
        batch = replay.sample(min(3, len(replay)))
        before = batch.copy()
        record = learner.learn(batch)
        expected, tds = plain.learn(batch, gamma, n, rescaled)
        assert record == pytest.approx(expected, rel=1e-7, abs=1e-9) and batch == before
        close([net.state_dict()[k] for k in plain.names], plain.w, 1e-7)
        close([learner.target.state_dict()[k] for k in plain.names], plain.target, 1e-7)
        at = np.array(
            [find_place(k, replay.table.first, replay.table.where) for k in batch.index.numpy()]
        )
        mixed = [
            eta * max(map(abs, td)) + (1 - eta) * sum(map(abs, td)) / len(td) if td else 0.0
            for td in tds
        ]
        close(replay.sampler.tree[at], [(m + 1e-3) ** 0.7 for m in mixed], 1e-7)


def test_no_gradient_comes_from_the_burn_in():
    "What only the burn-in sees has no slope; with two networks that differ, each warms up its own memory"
    rows = tale([-6], seed=5)
    rows['state'][:3, 0], rows['state'][3:, 0] = (
        1.0,
        0.0,
    )  # the first input is there in the burn-in alone
    rows['next_state'][:-1] = rows['state'][1:]
    rows['next_state'][-1, 0] = 0.0
    replay = SequenceReplay(None, 1, 10, length=6, burn_in=3, overlap=0, seed=0)
    replay.add(Steps(rows))
    batch, (model, target) = replay.sample(), (recurrent(1), recurrent(2))
    learner = R2D2Learner([], model, optimizer=sgd(0.0))
    learner.learn(batch)
    assert not model.encoder[1].weight.grad[:, 0].any() and model.encoder[1].weight.grad[:, 1].any()

    def goals(model, target):
        return r2d2_errors(model, target, batch, 0.9, 2)[1]

    plain = goals(model, target)
    blind = deepcopy(target)
    blind.encoder[1].weight.data[:, 0] += (
        1  # another memory after the burn-in, the same eyes after it
    )
    assert not torch.allclose(plain, goals(model, blind))
    choosy = deepcopy(model)
    choosy.head.bias.data[:] = torch.tensor([99.0, 0, 0])
    assert torch.allclose(goals(choosy, target), goals(choosy, target)) and not torch.allclose(
        plain, goals(choosy, target)
    )


def test_sequences_without_anything_to_learn():
    "All shorter than the burn-in: no loss, no gradient, no change, the smallest priority"
    replay = SequenceReplay(None, 2, 50, length=6, burn_in=4, overlap=0, alpha=1.0, seed=0)
    replay.add(Steps(tale([2, -3, 1])))
    learner = R2D2Learner([], recurrent(), lr=1.0)
    before = weights(learner.model)
    assert learner.learn(replay.sample()) == dict(loss=0, norm=0, td=0, q=0) and same(
        weights(learner.model), before
    )
    assert sorted(replay.sampler.tree[np.flatnonzero(replay.table.first >= 0)])[0] == pytest.approx(
        1e-6
    )


def test_padding_has_no_effect():
    "Whatever stands in it"
    replay = SequenceReplay(None, 3, 50, length=6, burn_in=1, overlap=0, seed=0)
    replay.add(Steps(tale([4, -3, 2, 5])))
    batch, out = replay.sample(), []
    for scribble in 0, 1e3, -7:
        b = batch.copy()
        b._replay = None
        for c in 'state', 'next_state', 'reward', 'action', 'terminated':
            b.rows[c][~b.rows['mask']] = (
                abs(scribble) % 2 if c in ('action', 'terminated') else scribble
            )
        learner = R2D2Learner([], recurrent())
        out.append((learner.learn(b), weights(learner.model)))
    assert not batch.rows['mask'].all() and same(out[0], out[1]) and same(out[0], out[2])


def test_dueling_and_other_memories():
    "A dueling head learns; a network with one tensor of memory, and rows without stored memory, begin at zero"

    class Gru(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.gru, self.head = nn.GRU(2, 4, batch_first=True).double(), nn.Linear(4, 3).double()

        def initial_hidden(self, n):
            return torch.zeros(n, 4).double()

        def forward(self, s, h):
            y, h = self.gru(s, h[None].contiguous())
            return self.head(y), h[0]

    replay = SequenceReplay(None, 2, 50, length=4, burn_in=2, overlap=2, seed=0)
    replay.add(Steps(tale([9, -9], hidden=False)))
    for net in Gru(), recurrent(dueling=True):
        before, learner = weights(net), R2D2Learner([], net, lr=1e-2)
        for _ in range(30):
            record = learner.learn(replay.sample())
        assert not any(
            torch.equal(before[k], v) for k, v in net.state_dict().items() if 'bias_hh' not in k
        ) and math.isfinite(record['loss'])


@pytest.mark.parametrize(
    'space',
    [Discrete(4, start=2), Discrete(4, start=-9), spaces.MultiDiscrete([3, 3], start=[1, 1])],
)
def test_padded_states_of_any_space(space):
    "An episode shorter than a sequence, in a space without a 0"
    rows = np.zeros(3, step_dtype(space, Discrete(3)))
    rows['state'] = rows['next_state'] = space.start
    rows['episode_n'], rows['step_n'], rows['terminated'][2] = 1, [1, 2, 3], True
    replay = SequenceReplay(None, 1, 10, length=4, burn_in=1, overlap=0, seed=0)
    replay.add(Steps(rows))
    R2D2Learner([], RecurrentNet(space, Discrete(3), 4)).learn(replay.sample())


# ---- whole chains ----


def cartpoles(seed, tau=1.0, optimizer=None, tail=None):
    torch.manual_seed(seed)
    net = value_net(Box(-9, 9, (4,)), Discrete(2), (16,), dueling=True)
    if tail:
        net.append(tail())
    policy = EpsGreedy(net, LinearSchedule(1, 0.1, 60), seed=seed)
    pipe = (
        GymStepper(['CartPole-v1'] * 3, policy, seed=seed)
        .n_step(3, 0.9)
        .prioritized_replay(8, 60, ratio=0.5, warmup=12, beta=LinearSchedule(0.4, 1, 20), seed=seed)
        .dqn(net, lr=LinearSchedule(1e-2, 1e-3, 30), target_every=4, tau=tau, optimizer=optimizer)
    )
    return pipe, policy


def scripted(seed, tau=1.0, optimizer=None, state='stored'):
    torch.manual_seed(seed)
    envs = [ScriptedEnv(**script(3, -5, 1, 4, env=0)), ScriptedEnv(**script(-2, 7, env=1))]
    net = RecurrentNet(envs[0].observation_space, envs[0].action_space, 4)
    policy = EpsGreedy(net, LinearSchedule(1, 0.1, 60), seed=seed)
    pipe = (
        GymStepper(envs, policy, seed=seed)
        .sequence_replay(3, 40, length=4, burn_in=1, overlap=2, state=state, seed=seed)
        .r2d2(net, n=2, lr=1e-2, target_every=4, tau=tau, optimizer=optimizer)
    )
    return pipe, policy


CHAINS = dict(
    dqn=cartpoles,
    r2d2=scripted,
    soft=lambda seed: cartpoles(seed, 0.1),
    soft_r2d2=lambda seed: scripted(seed, 0.1, state='zero'),
    momentum=lambda seed: cartpoles(seed, optimizer=sgd(1e-2, momentum=0.9)),
    rms=lambda seed: scripted(seed, optimizer=lambda p: torch.optim.RMSprop(p, 1e-3)),
    adamw=lambda seed: cartpoles(
        seed, optimizer=lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True)
    ),
    norm=lambda seed: cartpoles(seed, 0.5, tail=lambda: nn.BatchNorm1d(2)),
)


@pytest.mark.parametrize('kind', CHAINS)
def test_a_chain_goes_on_from_a_file(kind):
    "Saved after a few updates, loaded into a chain of another seed: every record and every weight to the last bit"
    for stop in 1, 2, 7, 23:
        (a, policy), (b, other) = CHAINS[kind](0), CHAINS[kind](1)
        running = iter(a)
        list(islice(running, stop))
        saved = through_file(dict(pipe=a.state_dict(), policy=policy.state_dict()))
        b.load_state_dict(saved['pipe'])
        other.load_state_dict(saved['policy'])
        assert same(weights(a.model), weights(b.model)) and b.updates == stop
        assert list(islice(running, 15)) == list(islice(b, 15))
        for x, y in (a.model, b.model), (a.target, b.target):
            assert same(weights(x), weights(y))
        assert same(a.opt.state_dict(), b.opt.state_dict())


@pytest.mark.parametrize('kind', ['dqn', 'r2d2'])
def test_one_state_dict_is_enough(kind):
    "As learning/base and the contract say: the whole of training is one chain, saved by one state_dict"
    (a, _), (b, _) = CHAINS[kind](0), CHAINS[kind](0)
    running = iter(a)
    list(islice(running, 9))
    b.load_state_dict(state_of(a))
    assert list(islice(running, 15)) == list(islice(b, 15))


@pytest.mark.parametrize('kind', CHAINS)
def test_one_seed_one_result(kind):
    "Twice the same chain, while someone else draws from the global generators; another seed gives other weights"

    def run(seed):
        pipe, _ = CHAINS[kind](seed)
        out = []
        for record in islice(pipe, 25):
            out.append(record)
            torch.rand(3)
            np.random.rand(2)
        return out, weights(pipe.model)

    assert same(run(3), run(3)) and not same(run(3), run(4))


@pytest.mark.parametrize('kind', ['dqn', 'r2d2'])
def test_a_chain_pickles_whole(kind):
    "The policy's network is still the learner's; target and optimizer are left behind, and made anew; rows come along"
    a, policy = CHAINS[kind](0)
    fresh = len(pickle.dumps(a))
    first = list(islice(a, 12))
    rows = len(pickle.dumps(a.source)) - len(pickle.dumps(CHAINS[kind](0)[0].source))
    assert len(pickle.dumps(a)) < fresh + rows + 2000
    twin = pickle.loads(pickle.dumps(CHAINS[kind](0)[0]))
    source = twin
    while not isinstance(source, GymStepper):
        source = source.source
    assert source.policy.values is twin.model and not any(
        p.requires_grad for p in twin.target.parameters()
    )
    assert list(islice(twin, 12)) == first and same(weights(twin.model), weights(a.model))
    used = pickle.loads(pickle.dumps(a))
    assert (
        same(weights(used.model), weights(a.model))
        and same(weights(used.target), weights(a.model))
        and used.updates == 0
        and not used.opt.state_dict()['state']
    )


@pytest.mark.parametrize('optimizer', [None, sgd(momentum=0.9)])
def test_a_state_is_a_copy(optimizer):
    "What was saved stays as it was while the learner goes on, and while others that loaded it do"

    def learners():
        replay = SequenceReplay(None, 2, 50, length=3, burn_in=1, overlap=0, seed=0)
        replay.add(Steps(tale([9, -9])))
        return (
            (QLearner([], QTable(Discrete(5), Discrete(3))), Steps(fill(5, Discrete(5)))),
            (DQNLearner([], mlp(), lr=0.1, optimizer=optimizer), Steps(fill(5))),
            (R2D2Learner([], recurrent(), lr=0.1, optimizer=optimizer), replay.sample()),
        )

    for (a, batch), (b, _) in zip(learners(), learners()):
        a.learn(batch)
        state = a.state_dict()
        kept = through_file(state)
        a.learn(batch)
        assert same(state, kept) and not same(a.state_dict(), kept)
        b.load_state_dict(state)
        assert b.learn(batch) and same(state, kept) and same(b.state_dict(), a.state_dict())


def test_a_checkpoint_of_another_model():
    "Names the tensor, and changes nothing in the whole chain"

    def chain(hidden, extra=False):
        net = mlp(hidden=hidden)
        if extra:
            net.append(nn.Linear(3, 3).double())
        return PrioritizedReplay([Steps(fill(9, seed=i)) for i in range(9)], 4, 30, seed=0).dqn(net)

    for saved, mine, says in [
        ((5,), (6,), r'0.weight; got \[5, 2\]; expected \[6, 2\]'),
        ((5, True), (5,), r'3.weight; got \[3, 3\]; expected no such tensor'),
        ((5,), (5, True), r'3.weight; got not there; expected \[3, 3\]'),
    ]:
        a, b = chain(*saved), chain(*mine)
        list(a)
        list(islice(b, 2))
        before = state_of(b)
        with pytest.raises(
            ValueError, match=f'^DQNLearner: the checkpoint is of another model: {says}'
        ):
            b.load_state_dict(state_of(a))
        assert same(state_of(b), before)
    with pytest.raises(
        ValueError, match='R2D2Learner: this state belongs to another stage; got DQNLearner'
    ):
        R2D2Learner([], recurrent()).load_state_dict(state_of(DQNLearner([], mlp())))


@pytest.mark.parametrize('case', ['sgd', 'frozen'])
def test_a_checkpoint_of_another_optimizer(case):
    "Is refused when it is loaded, and nothing has changed"
    a, b = (
        DQNLearner([Steps(fill(5))] * 3, mlp(), optimizer=sgd() if case == 'sgd' else None),
        mlp(1),
    )
    if case == 'frozen':
        b[0].requires_grad_(False)
    b = DQNLearner([Steps(fill(5))] * 3, b)
    list(a)
    before = state_of(b)
    with pytest.raises(ValueError, match='^DQNLearner: '):
        b.load_state_dict(state_of(a))
    assert same(state_of(b), before)


def test_a_schedule_of_numpys_floats_can_be_saved():
    "As all others"
    learner = DQNLearner([Steps(fill(5))] * 3, mlp(), lr=lambda k: 1e-3 * np.exp(-k / 10))
    list(learner)
    DQNLearner([], mlp()).load_state_dict(state_of(learner))


# ---- attacks ----


def test_nothing_comes_of_nothing():
    "An empty source; blocks that are none; a single row"
    for source in None, []:
        for learner in (
            QLearner(source, QTable(Discrete(5), Discrete(3))),
            DQNLearner(source, mlp()),
            R2D2Learner(source, recurrent()),
        ):
            assert list(learner) == []
    for wrong in [('batch', 1)], [1], [fill(3)]:
        with pytest.raises(
            TypeError, match='DQNLearner: an item of its source; got .*; expected Steps'
        ):
            list(DQNLearner(wrong, mlp()))
    (record,) = DQNLearner([Steps(fill(1))], mlp())
    assert all(map(math.isfinite, record.values()))


@pytest.mark.parametrize('optimizer', [None, sgd()])
@pytest.mark.parametrize('spoil', [nan, inf, -inf, 3e38])
def test_what_is_no_number_leaves_everything_untouched(spoil, optimizer):
    "NaN, and errors whose sum is beyond single precision: weights, target, optimizer, count, priorities; and then it goes on"
    learner = DQNLearner([], mlp(dtype=torch.float32), optimizer=optimizer)
    rows = fill(8, Box(-9, 9, (2,)))
    learner.learn(Steps(rows))
    before = state_of(learner)
    bad = rows.copy()
    bad['reward'][:4] = spoil
    with pytest.raises(
        ValueError, match=r'^DQNLearner: update 1: loss and norm of the gradient; got (nan|inf)'
    ):
        learner.learn(Steps(bad))
    assert (
        same(state_of(learner), before)
        and math.isfinite(learner.learn(Steps(rows))['loss'])
        and learner.updates == 2
    )
    replay = PrioritizedReplay(None, 4, 20, seed=0)
    replay.add(Steps(rows))
    if spoil != spoil:
        with pytest.raises(BlockError, match='reward'):
            replay.add(Steps(bad))
    sequence = SequenceReplay(None, 1, 20, length=4, burn_in=0, overlap=0, seed=0)
    sequence.add(Steps(tale([8])))
    learner, batch = (
        R2D2Learner([], recurrent(), optimizer=optimizer, rescaled=False),
        sequence.sample(),
    )
    batch.rows['reward'][0, 1] = spoil
    before, tree = state_of(learner), sequence.sampler.tree[:].copy()
    if spoil == 3e38:
        learner.learn(batch)  # no trouble in double precision
    else:
        with pytest.raises(ValueError, match='^R2D2Learner: update 0: loss'):
            learner.learn(batch)
        assert same(state_of(learner), before) and np.array_equal(tree, sequence.sampler.tree[:])


def test_huge_errors_that_are_numbers_are_learned():
    "Huber's slope is 1, however far"
    learner, rows = DQNLearner([], mlp(), max_norm=1.0), fill(8)
    rows['reward'] = 1e30
    replay = PrioritizedReplay(None, 8, 8, seed=0)
    replay.add(Steps(rows))
    for _ in range(3):
        record = learner.learn(replay.sample())
    assert record['td'] == pytest.approx(1e30, rel=1e-5) and all(
        torch.isfinite(v).all() for v in learner.model.state_dict().values()
    )


def test_a_refused_batch_was_never_there():
    "With a soft target too: those that met it learn as those that did not"
    a, b = (DQNLearner([], mlp(), target_every=1, tau=0.5, lr=0.1) for _ in 'ab')
    good, bad = fill(5), fill(5)
    bad['reward'][0] = nan
    for l in a, b:
        l.learn(Steps(good))
    with pytest.raises(ValueError):
        a.learn(Steps(bad))
    assert a.learn(Steps(good)) == b.learn(Steps(good)) and same(
        weights(a.target), weights(b.target)
    )


def test_a_schedule_that_is_no_number():
    "Is refused before it reaches the weights"
    learner = DQNLearner([], mlp(), lr=lambda k: nan if k else 1e-3)
    learner.learn(Steps(fill(5)))
    before = weights(learner.model)
    with pytest.raises(ValueError, match='^DQNLearner: '):
        learner.learn(Steps(fill(5)))
    assert same(weights(learner.model), before)


def test_lr_0_learns_nothing_and_tells_all():
    "The same weights, true records, new priorities"
    replay = PrioritizedReplay(None, 8, 30, seed=0)
    replay.add(Steps(fill(30)))
    learner = DQNLearner([], mlp(), lr=0.0)
    before = weights(learner.model)
    for _ in range(5):
        record = learner.learn(replay.sample())
    assert (
        same(weights(learner.model), before)
        and record['loss'] > 0
        and len(set(replay.sampler.probabilities())) > 5
    )


@pytest.mark.parametrize('seed', range(3))
def test_frozen_parameters_stay(seed):
    "And the others learn as if they were alone; a network without any to learn is refused"
    net = mlp(seed)
    net[0].requires_grad_(False)
    learner, before = (
        DQNLearner([Steps(fill(5, seed=i)) for i in range(6)], net, lr=0.1),
        weights(net),
    )
    saved = [state_of(learner) for _ in learner][2]
    assert torch.equal(net[0].weight, before['0.weight']) and not torch.equal(
        net[2].weight, before['2.weight']
    )
    other = mlp(9)
    other[0].requires_grad_(False)
    other = DQNLearner([Steps(fill(5, seed=i)) for i in range(6)], other)
    other.lr = learner.lr
    other.load_state_dict(saved)
    list(other)
    assert same(weights(other.model), weights(net))
    with pytest.raises(
        ValueError, match='DQNLearner: the model has no parameters to learn; got Sequential'
    ):
        DQNLearner([], mlp().requires_grad_(False))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (
            nn.Linear(2, 2).double(),
            nn.Linear(2, 2).double(),
            nn.Linear(2, 3).double(),
        )
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize('tau', [1.0, 0.25])
def test_shared_parameters(tau):
    "Are moved once, in the model and in its copy, and stay shared"
    learner = DQNLearner([], Tied(), lr=0.1, tau=tau, target_every=1)
    for k in range(4):
        before = arrays(learner.target)
        learner.learn(Steps(fill(5, seed=k)))
        expected = [a + tau * (b - a) for a, b in zip(before, arrays(learner.model))]
        close(arrays(learner.target), expected)
    assert (
        learner.target.a.weight is learner.target.b.weight
        and learner.model.a.weight is learner.model.b.weight
    )


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


def test_the_target_stands_still_between_refreshes():
    "Its buffers too"
    learner = DQNLearner([], with_norm(nn.BatchNorm1d(5)), target_every=100)
    learner.learn(Steps(fill(6, Box(-9, 9, (2,)))))
    before = weights(learner.target)
    learner.learn(Steps(fill(6, Box(-9, 9, (2,)), seed=1)))
    assert same(weights(learner.target), before)


def test_the_target_has_no_dice():
    "A network with Dropout is asked twice"
    learner, rows = (
        DQNLearner([], with_norm(nn.Dropout(0.5)), double=False),
        Steps(fill(6, Box(-9, 9, (2,)))),
    )
    a, b = (dqn_errors(learner.model, learner.target, rows, 0.99, False)[1] for _ in 'ab')
    assert torch.equal(a, b)


def test_two_learners_of_one_model():
    "Each has its own target and its own optimizer; both move the same weights"
    net = mlp()
    a, b = (
        DQNLearner([], net, lr=0.1, target_every=2),
        DQNLearner([], net, lr=0.01, target_every=3, double=False),
    )
    plain = [PlainDQN(net, 0.1, 2, 1.0, 10.0), PlainDQN(net, 0.01, 3, 1.0, 10.0)]
    for k in range(8):
        for learner, p, double in (a, plain[0], True), (b, plain[1], False):
            rows = fill(5, seed=k)
            learner.learn(Steps(rows))
            p.learn(rows, 0.99, double)
            for other in plain:
                other.w = p.w
            close(arrays(net), p.w)
            close(arrays(learner.target), p.target)


def test_a_failing_model_or_source_leaves_weights():
    "The error comes through; the learner can go on"

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.asked = mlp(), 0

        def forward(self, x):
            self.asked += 1
            if self.asked in (5, 6):
                raise RuntimeError('no luck')
            return self.net(x)

    learner, plain = DQNLearner([], Fails(), lr=0.1), DQNLearner([], mlp(), lr=0.1)
    for k in range(4):
        for _ in range(2):
            before = state_of(learner)
            try:
                record = learner.learn(Steps(fill(5, seed=k)))
                break
            except RuntimeError as e:
                assert 'no luck' in str(e) and same(state_of(learner), before)
        else:
            record = learner.learn(Steps(fill(5, seed=k)))
        assert record == plain.learn(Steps(fill(5, seed=k)))

    def source():
        yield Steps(fill(5))
        raise OSError('disk')

    learner = DQNLearner(source(), mlp())
    it = iter(learner)
    next(it)
    before = state_of(learner)['own']
    with pytest.raises(OSError):
        next(it)
    assert same(state_of(learner)['own'], before)


@pytest.mark.parametrize('kind', ['uint8', 'float16', 'float64', 'int64'])
def test_states_of_any_kind(kind):
    "`value_net` sees floats"
    space = Box(0, 9, (2,), np.dtype(kind).type)
    rows, other = fill(6, space), fill(6, Box(0, 9, (2,)))
    for name in 'state', 'next_state':
        rows[name] = other[name] = np.arange(12).reshape(6, 2) % 5
    for name in 'reward', 'action', 'terminated', 'truncated':
        other[name] = rows[name]
    out = []
    for s, r in (space, rows), (Box(0, 9, (2,)), other):
        torch.manual_seed(0)
        learner = DQNLearner([], value_net(s, Discrete(3), (4,)))
        out.append((learner.learn(Steps(r)), weights(learner.model)))
    assert same(*out)


class Says(nn.Module):
    "A model whose answer is bent"

    def __init__(self, bend):
        super().__init__()
        self.net, self.bend = mlp(), bend

    def forward(self, x):
        return self.bend(self.net(x))


WRONG = dict(
    one_number=(lambda q: q[:, 0], {}),
    an_axis_more=(lambda q: q[:, None], {}),
    a_tuple=(lambda q: (q, q), {}),
    too_few=(lambda q: q[:, :1], {}),
    no_gradient=(lambda q: q.detach(), {}),
    action_as_a_list=(lambda q: q, dict(action=Box(0, 2, (1,), np.int64))),
    a_row_less=(lambda q: q[:-1], {}),
    a_fractional_action=(lambda q: q, dict(action=Box(0, 2, ()))),
    whole_numbers=(lambda q: q.long(), {}),
)


@pytest.mark.parametrize('case', [k for k in WRONG])
def test_a_wrong_model_is_told_by_name(case):
    "What the model gave, and what was expected; fractions are no actions"
    bend, kw = WRONG[case]
    with pytest.raises((TypeError, ValueError), match='^(DQNLearner|dqn_errors): .*got .*expected'):
        DQNLearner([], Says(bend)).learn(Steps(fill(6, **kw)))


@pytest.mark.parametrize('action', [3, -1, 10**12])
def test_an_action_that_the_model_does_not_have(action):
    "Stage, action, how many there are"
    rows = fill(6)
    rows['action'][2] = action
    with pytest.raises((IndexError, ValueError), match='^(DQNLearner|dqn_errors): '):
        DQNLearner([], mlp()).learn(Steps(rows))


@pytest.mark.parametrize(
    'rows',
    [
        pytest.param(lambda: Steps(fill(6))[0], id='one row'),
        *(
            pytest.param(lambda T=T: Steps(fill(4 * T).reshape(4, T)), id=f'[4, {T}]')
            for T in (1, 2, 3, 5)
        ),
        pytest.param(lambda: Steps(fill(0)), id='no rows'),
    ],
)
def test_dqn_wants_a_batch_of_rows(rows):
    "Sequences, a single row and no row at all are refused by name"
    batch = rows()
    if batch.shape:
        batch.rows['action'] = 0  # any action is inside
    with pytest.raises((TypeError, ValueError), match='^DQNLearner: a batch'):
        DQNLearner([], mlp()).learn(batch)


def test_dqn_refuses_a_replay_of_sequences():
    "By name, before the first update"
    pipe = SequenceReplay(
        [Steps(tale([9, -9]))], 2, 50, length=3, burn_in=0, overlap=0, seed=0
    ).dqn(mlp())
    with pytest.raises(TypeError, match='^DQNLearner: '):
        list(pipe)


def test_what_r2d2_refuses():
    "Networks without memory, batches of rows, rows of several steps"
    with pytest.raises(
        TypeError, match='R2D2Learner: the model; got Sequential; expected one with initial_hidden'
    ):
        R2D2Learner([], mlp())
    learner = R2D2Learner([], recurrent())
    for rows in Steps(fill(6)), Steps(fill(6).reshape(2, 3)), Steps(fill(6))[0]:
        with pytest.raises(
            TypeError,
            match=r'R2D2Learner: a batch; got Steps \[.*expected Sequences \[B, length\].*sequence_replay',
        ):
            learner.learn(rows)
    replay = SequenceReplay(None, 2, 50, length=3, burn_in=0, overlap=0, seed=0)
    replay.add(Steps(tale([9])))
    with pytest.raises(TypeError, match='R2D2Learner: a batch; got Steps'):
        learner.learn(replay.sample()[0])
    merged = (
        NStep([Steps(tale([9, -9], hidden=False))], 2, 0.9)
        .sequence_replay(1, 50, length=3, burn_in=0, overlap=0)
        .r2d2(recurrent())
    )
    with pytest.raises(
        ValueError, match=r"^R2D2Learner: rows of several steps; got a column 'discount'.*n=5"
    ):
        list(merged)
    with pytest.raises(TypeError, match='R2D2Learner: a batch'):
        list(PrioritizedReplay([Steps(fill(9))], 2, 20).r2d2(recurrent()))


@pytest.mark.parametrize('case', ['size', 'answer', 'alone'])
def test_a_recurrent_model_that_does_not_fit_is_told_by_name(case):
    "Another size than the policy's; values of another shape; values without a memory"

    class Bent(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = recurrent()
            self.initial_hidden = self.net.initial_hidden

        def forward(self, s, h):
            q, h = self.net(s, h)
            return (q[..., 0], h) if case == 'answer' else q

    replay = SequenceReplay(None, 2, 50, length=3, burn_in=1, overlap=0, seed=0)
    replay.add(Steps(tale([9, -9])))
    with pytest.raises((TypeError, ValueError), match='^(R2D2Learner|r2d2_errors): '):
        R2D2Learner([], recurrent(size=7) if case == 'size' else Bent()).learn(replay.sample())


@pytest.mark.parametrize(
    'kw',
    [
        dict(target_every=0),
        dict(target_every=nan),
        dict(tau=0.0),
        dict(tau=1.1),
        dict(tau=nan),
        dict(lr=-1.0),
        *(
            kw
            for kw in (
                dict(target_every=1.5),
                dict(gamma=nan),
                dict(gamma=-1.0),
                dict(max_norm=-1.0),
                dict(max_norm=nan),
                dict(max_norm=None),
            )
        ),
    ],
    ids=str,
)
def test_settings_are_checked_early(kw):
    "When the stage is made; a negative norm would turn every gradient around"
    for make in (lambda: DQNLearner([], mlp(), **kw)), (lambda: R2D2Learner([], recurrent(), **kw)):
        with pytest.raises((TypeError, ValueError)):
            make()


@pytest.mark.parametrize('n', [0, -1, 1.5, None])
def test_n_is_checked_early(n):
    "When the stage is made"
    with pytest.raises((TypeError, ValueError), match='^R2D2Learner: n'):
        R2D2Learner([], recurrent(), n=n)


def test_discounts_are_a_column_or_gamma():
    "The column counts even where it is 0 or where the row is truncated; else γ where nothing has terminated"
    rows = fill(50, discount='f4')
    assert torch.equal(discounts(Steps(rows), 0.3), torch.from_numpy(rows['discount']))
    got = discounts(Steps(fill(50)), 0.3)
    assert got.dtype == torch.float32 and got.tolist() == [
        0.0 if t else float(np.float32(0.3)) for t in rows['terminated']
    ]


def test_the_targets_have_no_gradient():
    "Of either network, however the errors are asked for"
    a, b = mlp(0), mlp(1)
    for double in True, False:
        q, goal = dqn_errors(a, b, Steps(fill(5)), 0.9, double)
        assert q.requires_grad and not goal.requires_grad
    q.sum().backward()
    assert all(p.grad is None for p in b.parameters()) and not torch.equal(
        a[2].weight.grad, torch.zeros(3, 5)
    )
    learner = DQNLearner([], a)
    assert not any(p.requires_grad for p in learner.target.parameters()) and all(
        p.requires_grad for p in a.parameters()
    )


# ---- learners of several models, as a soft actor-critic and a delayed one are ----


class Actor(nn.Module):
    "Mean and log of the standard deviation of one action"

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    def forward(self, state, noise):
        mean, log_std = self.net(state).unbind(-1)
        return torch.tanh(mean + log_std.exp() * noise), -0.5 * noise**2 - log_std


class Twins(nn.Module):
    "Two judges of a state and an action"

    def __init__(self):
        super().__init__()
        self.a, self.b = (
            nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double() for _ in 'ab'
        )

    def forward(self, state, action):
        return torch.stack(
            [net(torch.cat([state, action[:, None]], 1))[:, 0] for net in (self.a, self.b)]
        )


class SmallSAC(Learner):
    "Three models, three optimizers, soft targets, a generator; the policy may wait"

    learned = dict(
        critics=Learned(),
        policy=Learned(lr='policy_lr', max_norm=0.05),
        temperature=Learned(lr='policy_lr', max_norm=inf),
    )
    follows = dict(target=Follows('critics', every='delay'))

    def __init__(
        self,
        source,
        seed=0,
        lr=1e-2,
        policy_lr=1e-2,
        gamma=0.9,
        tau=0.1,
        delay=1,
        max_norm=10.0,
        optimizer=None,
    ):
        torch.manual_seed(seed)
        super().__init__(
            source,
            policy=Actor(),
            critics=Twins(),
            temperature=nn.ParameterDict(dict(log=nn.Parameter(torch.tensor(-1.0).double()))),
            seed=seed,
            lr=lr,
            policy_lr=policy_lr,
            gamma=gamma,
            tau=tau,
            delay=delay,
            max_norm=max_norm,
            optimizer=optimizer,
        )

    def learn(self, batch):
        there, noise = (
            batch.to(self.device),
            torch.randn(2, len(batch), generator=self.generator, dtype=torch.float64),
        )
        losses, td = sac_losses(
            self.policy, self.critics, self.target, self.temperature, there, self.gamma, noise
        )
        if (self.updates + 1) % self.delay:
            losses = dict(critics=losses['critics'])
        record = self.step(losses, td=td.abs().mean())
        self.feedback(batch, td)
        return record


def sac_losses(policy, critics, target, temperature, batch, gamma, noise):
    alpha = temperature['log'].exp()
    with torch.no_grad():
        action, log_p = policy(batch.next_state, noise[0])
        goal = batch.reward + discounts(batch, gamma) * (
            target(batch.next_state, action).amin(0) - alpha * log_p
        )
    q = critics(batch.state, batch.action)
    action, log_p = policy(batch.state, noise[1])
    policy_loss = (alpha.detach() * log_p - critics(batch.state, action).amin(0)).mean()
    return dict(
        critics=((q - goal) ** 2).mean(),
        policy=policy_loss,
        temperature=-(temperature['log'] * (log_p.detach() - 1)).mean(),
    ), (goal - q.detach()).mean(0)


STEERED = Box(-1, 1, (), np.float64)


def steered(n, seed=0):
    rows = fill(n, action=STEERED, seed=seed)
    rows['action'] = np.random.default_rng(seed).uniform(-1, 1, n)
    return Steps(rows)


@pytest.mark.parametrize('delay', [1, 2, 3])
@pytest.mark.parametrize('optimizer', [None, sgd(0.1, momentum=0.5)])
def test_three_models_learn_as_a_plain_loop_does(delay, optimizer):
    "Each loss moves its own model, norms are limited apart, targets follow softly, delayed ones wait: against a loop with torch's own calls"
    learner = SmallSAC([], delay=delay, lr=LinearSchedule(1e-2, 1e-3, 5), optimizer=optimizer)
    nets = {name: deepcopy(getattr(learner, name)) for name in learner.learned}
    target, generator = deepcopy(learner.target), torch.Generator().manual_seed(0)
    opts = {
        name: (optimizer or (lambda p: torch.optim.Adam(p, 1e-2)))(list(net.parameters()))
        for name, net in nets.items()
    }
    limits = dict(critics=10.0, policy=0.05, temperature=inf)
    for k in range(7):
        batch = steered(6, k)
        record = learner.learn(batch)
        losses, td = sac_losses(
            nets['policy'],
            nets['critics'],
            target,
            nets['temperature'],
            batch,
            0.9,
            torch.randn(2, 6, generator=generator, dtype=torch.float64),
        )
        if (k + 1) % delay:
            losses = dict(critics=losses['critics'])
        grads = {
            name: torch.autograd.grad(loss, list(nets[name].parameters()), retain_graph=True)
            for name, loss in losses.items()
        }
        for g in opts['critics'].param_groups:
            g['lr'] = 1e-2 + (1e-3 - 1e-2) * min(k / 5, 1)
        for name, gs in grads.items():
            norm = math.sqrt(sum(float((g**2).sum()) for g in gs))
            for p, g in zip(nets[name].parameters(), gs):
                p.grad = g * min(1, limits[name] / norm) if norm else g
            opts[name].step()
            assert record[f'{name}_norm'] == pytest.approx(norm) and record[
                f'{name}_loss'
            ] == pytest.approx(losses[name].item())
        if (k + 1) % delay == 0:
            with torch.no_grad():
                for old, new in zip(target.parameters(), nets['critics'].parameters()):
                    old += 0.1 * (new - old)
        assert set(record) == {f'{name}_{what}' for name in losses for what in ('loss', 'norm')} | {
            'td'
        } and record['td'] == pytest.approx(td.abs().mean().item())
        for name, net in nets.items():
            close(arrays(getattr(learner, name)), arrays(net))
        close(arrays(learner.target), arrays(target))


@pytest.mark.parametrize('delay', [1, 3])
def test_three_models_go_on_from_a_file(delay):
    "Every model, optimizer, target and the generator; also into a learner of another seed"
    blocks = [steered(5, k) for k in range(12)]
    for stop in 1, 4, 7:
        a, b = SmallSAC(blocks, 0, delay=delay), SmallSAC(blocks, 1, delay=delay)
        running = iter(a)
        list(islice(running, stop))
        b.load_state_dict(state_of(a))
        assert list(running) == list(b) and same(state_of(a), state_of(b))
    twin = pickle.loads(pickle.dumps(SmallSAC(blocks, 0, delay=delay)))
    assert list(twin) == list(SmallSAC(blocks, 0, delay=delay))


def test_of_three_models_none_has_moved_where_one_can_not():
    "A policy whose loss is NaN: the critics' step, which would have been fine, isn't made either"
    learner = SmallSAC([])
    learner.learn(steered(5))
    learner.temperature['log'].data.fill_(nan)
    before = weights(learner.critics)
    with pytest.raises(ValueError, match='^SmallSAC: update 1: loss and norm of the gradient'):
        learner.learn(steered(5))
    assert same(weights(learner.critics), before) and learner.updates == 1


def test_three_models_and_a_replay():
    "Errors go back as priorities"
    replay = PrioritizedReplay([steered(8, k) for k in range(9)], 4, 40, alpha=1.0, seed=0)
    assert len(list(SmallSAC(replay))) > 5 and len(set(replay.sampler.probabilities().round(9))) > 5


def test_a_compiled_model_loads_a_plain_one_and_the_other_way():
    "torch.compile's prefix isn't in a checkpoint, of several models neither"

    class Compiled(nn.Module):
        def __init__(self, net):
            super().__init__()
            self._orig_mod = net

        def forward(self, *x):
            return self._orig_mod(*x)

    a, b = SmallSAC([], 0), SmallSAC([], 1)
    b.critics = Compiled(b.critics)
    b._fresh()
    for l in a, b:
        l.learn(steered(5))
    assert not any('_orig_mod' in k for k in b.snapshot()['critics'])
    for x, y in (a, b), (b, a):
        x.learn(steered(5, 3))
        y.load_state_dict(dict(state_of(x), stage='SmallSAC'))
        assert x.learn(steered(5, 4)) == y.learn(steered(5, 4))


def test_continuous_actions_are_named_as_the_cause():
    "Not the model's output; before the model is asked"

    class Unasked(nn.Linear):
        def forward(self, x):
            raise AssertionError('asked')

    with pytest.raises(
        ValueError, match=r"column 'action': the action space; got a Box \(float64 in each row\)"
    ):
        DQNLearner([], Unasked(1, 1)).learn(steered(5))
    rows = fill(5, action=Box(-1, 1, (2,)))
    with pytest.raises(
        ValueError,
        match=r"got a Box \(float32\[2\] in each row\); expected Discrete .*TransformAction",
    ):
        DQNLearner([], Unasked(1, 1)).learn(Steps(rows))


SPACES = [
    (Box(-1, 1, (1,)), 'a Box'),
    (Box(-1, 1, ()), 'a Box'),
    (Box(0, 5, (2,), np.int64), 'MultiDiscrete, MultiBinary or a Box'),
    (spaces.MultiDiscrete([2, 3]), 'MultiDiscrete'),
    (spaces.MultiBinary(3), 'MultiDiscrete, MultiBinary'),
    (spaces.Dict(arm=Discrete(2)), 'a Dict'),
    (spaces.Tuple([Discrete(2), Discrete(2)]), 'a Tuple'),
]


@pytest.mark.parametrize('space,name', SPACES, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    'chain',
    [
        lambda p: p.dqn(nn.Linear(3, 2)),
        lambda p: p.experience_replay(bs=4, max_sz=50).dqn(nn.Linear(3, 2)),
        lambda p: p.q_learn(QTable(Discrete(4), Discrete(2))),
        lambda p: p.sequence_replay(bs=2, max_sz=50, length=3, burn_in=1, overlap=0).r2d2(
            RecurrentNet(Box(-1, 1, (3,)), Discrete(2), 4)
        ),
    ],
    ids=['dqn', 'replay', 'table', 'r2d2'],
)
def test_the_action_space_is_named(space, name, chain):
    "Whatever it is; was: 'what the model gives' of several whole numbers, an AttributeError of nested ones"

    class Env(gym.Env):
        observation_space, action_space = Box(-1, 1, (3,)), space

        def reset(self, **kw):
            super().reset(**kw)
            return np.zeros(3, 'f4'), {}

        def step(self, action):
            return np.ones(3, 'f4'), 1.0, False, False, {}

    numbered = lambda s: Steps.from_columns(
        dict(s.asdict(), state=s.env_id.long(), next_state=s.env_id.long())
    )
    steps = GymStepper([Env, Env], seed=0)
    if 'QTable' in chain.__code__.co_names:
        steps = steps.map(numbered)
    with pytest.raises(
        ValueError,
        match=f"column 'action': the action space; got {name}.*; expected Discrete .one whole number in each row.. Remedy: let it choose",
    ):
        next(iter(chain(steps)))


def test_what_the_error_says_to_do_with_continuous_actions_works():
    few = [np.array([x], 'f4') for x in (-2, 0, 2)]
    env = gym.wrappers.TransformAction(gym.make('Pendulum-v1'), few.__getitem__, Discrete(len(few)))
    torch.manual_seed(0)
    net = value_net(env.observation_space, env.action_space, (8,))
    pipe = (
        GymStepper(env, EpsGreedy(net, 0.5, seed=0), seed=0)
        .experience_replay(bs=4, max_sz=50, seed=0)
        .dqn(net)
    )
    assert len(list(islice(pipe, 5))) == 5 and set(pipe.source.memory[:].action.tolist()) <= {
        0,
        1,
        2,
    }


def test_a_table_of_other_states_names_the_observation_space():
    steps = scripted_steps([script(3)], 1)
    with pytest.raises(
        ValueError,
        match=r"QLearner: column 'state': the observation space; got a Box \(float32\[2\] in each row\); expected Discrete .* Remedy: a network",
    ):
        list(QLearner(steps, QTable(Discrete(5), Discrete(3))))
    with pytest.raises(ValueError, match=r'QLearner: a batch; got shape \[1, 1\]'):
        QLearner([], QTable(Discrete(5), Discrete(3))).learn(steps[0][None])


@pytest.mark.parametrize(
    'states',
    [np.zeros(4, 'f4'), np.array([3]), torch.tensor(3), 3, [3], None, {}, dict(a=3), ()],
    ids=repr,
)
def test_a_policy_names_states_that_are_no_tensors(states):
    "What an environment gives, without the stepper"  # was: IndexError: invalid index to scalar variable
    with pytest.raises(
        TypeError,
        match='^EpsGreedy: states; got .*; expected a tensor with a state for each environment.* Remedy: .*torch.as_tensor',
    ):
        EpsGreedy(QTable(Discrete(5), Discrete(2)))(states)


def test_a_table_names_states_that_it_does_not_have():
    "Boxes, whole numbers outside, negative ones: not numpy's IndexError, and not the values of another state"
    table = QTable(Discrete(3, start=2), Discrete(2))
    table.values[:] = [[1, 2], [3, 4], [5, 6]]
    assert EpsGreedy(table, 0)(torch.tensor([4, 2])).tolist() == [1, 1] and table(
        torch.tensor([4, 2])
    ).tolist() == [[5, 6], [1, 2]]
    for wrong in [1], [5], [2, -1], [-(2**62)]:
        with pytest.raises(ValueError, match='^QTable: states; got .*; expected 2 to 4'):
            table(torch.tensor(wrong))
    for wrong in (
        torch.zeros(2, 4),
        torch.zeros(2),
        torch.zeros(2, 2, dtype=torch.int64),
        dict(a=torch.zeros(2, dtype=torch.int64)),
    ):
        with pytest.raises(
            TypeError,
            match='^QTable: states; got .*; expected one whole number for each environment',
        ):
            table(wrong)
    with pytest.raises(TypeError, match='^QTable: states'):
        next(iter(GymStepper(['CartPole-v1'] * 2, EpsGreedy(table, 0))))


@pytest.mark.parametrize(
    'learner',
    [
        lambda s: QLearner(s, QTable(Discrete(5), Discrete(3))),
        lambda s: DQNLearner(s, mlp()),
        SmallSAC,
    ],
)
def test_an_error_above_comes_through(learner):
    "torch reads every attribute of a stage to describe it when an error passes: none may raise, whatever the learner has"

    def source():
        yield from ()
        raise OSError('disk')

    with pytest.raises(OSError, match='disk'):
        list(learner(source()))


# ---- how networks are computed ----


@pytest.mark.parametrize('name', ['cartpole', 'cartpole-r2d2', 'pendulum-sac', 'pendulum-td3'])
def test_networks_in_bfloat16_learn_nearly_the_same(name):
    "Weights, targets, optimizers and checkpoints stay as they are; losses are near those of float32"
    from fastrl_replay.app.recipe_settings import recipe
    from fastrl_replay.app.recipes import Agent

    def records(**given):
        s = {
            **recipe(name).settings,
            'network': 16 if 'r2d2' in name else (16, 16),
            'warmup': 100,
            'steps': 400,
            'bs': 8,
            **given,
        }
        agent = Agent({**s, 'train_every': 1, 'ratio': 0.25})
        return [r for r, _ in zip(agent.pipe, range(3))], agent.pipe

    (a, plain), (b, half) = records(), records(precision='bfloat16')
    assert a[0].keys() == b[0].keys() and a[0] != b[0]
    for k in a[0]:
        assert abs(a[0][k] - b[0][k]) < 0.1 * abs(a[0][k]) + 0.05, k
    assert {
        k: (v.dtype, v.shape)
        for m in half._saved_models().values()
        for k, v in m.state_dict().items()
    } == {
        k: (v.dtype, v.shape)
        for m in plain._saved_models().values()
        for k, v in m.state_dict().items()
    }
    plain.load_state_dict(half.state_dict())
    with pytest.raises(ValueError, match="precision; got 'half'"):
        records(precision='half')
