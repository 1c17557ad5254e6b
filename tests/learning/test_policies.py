"""Schedules, the exploring policy and networks, against plain loops, statistics and gymnasium."""

import math, pickle
from copy import deepcopy
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from torch import nn

from fastrl_replay.all import *
from fastrl_replay.testing import same, through_file
from strategies import any_space, cases

Box, Discrete, nan, inf = spaces.Box, spaces.Discrete, float('nan'), float('inf')
torch.set_num_threads(1)


def prefers(*best, actions=5):
    "Values whose best action is known, for each environment"
    q = torch.zeros(len(best), actions)
    q[range(len(best)), best] = 1.0
    return lambda s: q[: len(s)]


def states(n):
    return torch.zeros(n, 2)


# ---- schedules ----


# ---- chance ----


class Plain:
    "What it says: two numbers for each environment and call; one says whether, the other what"

    def __init__(self, seed):
        self.rng, self.asked = np.random.default_rng(seed), 0

    def __call__(self, q, eps):
        n, A, out = len(q), len(q[0]) if len(q) else 0, []
        whether, what = [self.rng.random() for _ in range(n)], [self.rng.random() for _ in range(n)]
        for i in range(n):
            out.append(
                math.floor(what[i] * A)
                if whether[i] < (eps[i] if np.ndim(eps) else eps)
                else max(range(A), key=lambda a: q[i][a])
            )
        self.asked += n
        return out


@cases(80)
@given(
    st.integers(0, 6),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.3, 1.0, 'array', 'schedule']),
    st.integers(0, 9999),
    st.integers(1, 12),
)
def test_it_throws_the_plain_dice(n, actions, eps, seed, calls):
    "Action for action, whatever eps is, with any number of environments"
    if eps == 'array':
        eps = np.random.default_rng(seed).random(n)
    elif eps == 'schedule':
        eps = LinearSchedule(1, 0, 9)
    plain, policy = Plain(seed), EpsGreedy(lambda s: q, eps, seed)
    for _ in range(calls):
        q = torch.randn(n, actions)
        e = eps(plain.asked) if callable(eps) else eps
        assert policy(states(n)).tolist() == plain(q.tolist(), e)
        assert policy.asked == plain.asked


def test_no_seed_is_another_one_each_time():
    a, b = (EpsGreedy(prefers(*range(5)), 1.0) for _ in range(2))
    assert [a(states(5)).tolist() for _ in range(9)] != [b(states(5)).tolist() for _ in range(9)]


@pytest.mark.parametrize('wrong', ['eps', 'values'])
def test_a_failed_call_was_never_made(wrong):
    "Neither RNG state nor count have moved"

    def fails(s):
        raise RuntimeError('no luck')

    policy = EpsGreedy(fails, (lambda asked: 2.0) if wrong == 'eps' else 0.5, seed=0)
    before = policy.state_dict()
    with pytest.raises((ValueError, RuntimeError)):
        policy(states(3))
    assert policy.state_dict() == before


@pytest.mark.parametrize('eps', [LinearSchedule(1, 0.1, 50), np.array([0.2, 0.9, 1.0])])
def test_dice_through_a_file(eps):
    "A policy of another seed, and copies, continue alike; saving does not disturb the original"
    a, b = (EpsGreedy(nn.Linear(2, 4), eps, seed) for seed in (1, 2))
    b.values = a.values
    for _ in range(13):
        a(torch.randn(3, 2))
    state = through_file(a.state_dict())
    b.load_state_dict(state)
    copies = [b, pickle.loads(pickle.dumps(a)), deepcopy(a)]
    for _ in range(20):
        s = torch.randn(3, 2)
        expected = a(s).tolist()
        assert all(c(s).tolist() == expected for c in copies)
    b.load_state_dict(state)
    assert b.asked == 39
    assert same(b.state_dict(), state)


def test_nested_states():
    "The policy sees the number of environments; the greedy action is the network's best one"
    space = spaces.Tuple(
        [spaces.Dict(x=spaces.MultiBinary(3), a=Box(-1, 1, (2, 3))), Discrete(3, start=2)]
    )

    class Env(gym.Env):
        observation_space, action_space = space, Discrete(3)

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return space.sample(), {}

        def step(self, action):
            return space.sample(), 1.0, self.np_random.random() < 0.3, False, {}

    torch.manual_seed(0)
    net = value_net(space, Discrete(3), (8,))
    policy = EpsGreedy(net, 0.0)
    for block in islice(GymStepper([Env] * 3, policy, seed=0), 12):
        assert torch.equal(block.action, net(block.state).argmax(-1))
    assert policy.asked == 36


# ---- policies that remember ----


def cell(net, x, h, c):
    "One step of one environment, without a chain"
    w = {k: v.double() for k, v in net.state_dict().items()}
    x = torch.clamp(w['encoder.1.weight'] @ x.double() + w['encoder.1.bias'], min=0)
    i, f, g, o = (
        w['lstm.weight_ih_l0'] @ x
        + w['lstm.bias_ih_l0']
        + w['lstm.weight_hh_l0'] @ h
        + w['lstm.bias_hh_l0']
    ).chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    if 'head.weight' in w:
        return w['head.weight'] @ h + w['head.bias'], h, c
    a = w['head.advantage.weight'] @ h + w['head.advantage.bias']
    return w['head.value.weight'] @ h + w['head.value.bias'] + a - sum(a) / len(a), h, c


@pytest.mark.parametrize('mode', [None, 'NextStep', 'SameStep'])
def test_memory_is_forgotten_where_an_episode_ended(mode):
    """Three environments whose episodes end at different times.

    Each row's memory and action are those of a loop over its own episode."""
    scripts = [script(3, -5, 1, 4, env=0), script(-2, 7, env=1), script(1, 1, -6, 2, env=2)]
    for s in scripts:
        s['states'] = [[math.sin(a), math.cos(b)] for a, b in s['states']]
    source = ScriptedVectorEnv(scripts, mode) if mode else [ScriptedEnv(**s) for s in scripts]
    torch.manual_seed(1)
    net = RecurrentNet(Box(-9, 9, (2,)), Discrete(3), 5)
    for p in net.parameters():
        p.data *= 3
    memory, seen = {}, 0
    for block in islice(GymStepper(source, EpsGreedy(net, 0.0)), 40):
        for i, r in enumerate(block.rows):
            e = int(r['env_id'])
            if r['step_n'] == 1:
                memory[e] = (torch.zeros(5).double(),) * 2
            for mine, stored in zip(memory[e], block.hidden):
                np.testing.assert_allclose(stored[i], mine, atol=1e-5)
            q, *memory[e] = cell(net, block.state[i], *memory[e])
            top = q.sort().values
            if top[-1] - top[-2] > 1e-4:
                seen += 1
                assert int(r['action']) == int(q.argmax())
    assert seen > 60


@pytest.mark.parametrize('dueling', [False, True])
@cases(25)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 6), st.integers(0, 999))
def test_a_step_and_a_sequence_agree(dueling, n, T, split, seed):
    "With each other, with a loop over the cell, and with the sequence in two parts"
    torch.manual_seed(seed)
    net = RecurrentNet(Box(-9, 9, (2,)), Discrete(3), 4, dueling)
    s, hidden = torch.randn(n, T, 2), (torch.randn(n, 4), torch.randn(n, 4))
    with torch.no_grad():
        whole, end = net(s, hidden)
        a, middle = net(s[:, :split], hidden)
        b, end_of_parts = net(s[:, split:], middle)
        h, one = hidden, []
        for t in range(T):
            q, h = net(s[:, t], h)
            one.append(q)
    near = dict(atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole, torch.cat([a, b], 1), **near)
    torch.testing.assert_close(whole, torch.stack(one, 1), **near)
    torch.testing.assert_close(end, end_of_parts, **near)
    torch.testing.assert_close(end, h, **near)
    for i in range(n):
        plain = [x[i].double() for x in hidden]
        for t in range(T):
            q, *plain = cell(net, s[i, t], *plain)
            torch.testing.assert_close(q, whole[i, t].double(), **near)


# ---- states as numbers ----


def tensors(space, samples):
    if isinstance(space, spaces.Dict):
        return {k: tensors(s, [x[k] for x in samples]) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(tensors(s, [x[i] for x in samples]) for i, s in enumerate(space.spaces))
    return torch.from_numpy(np.array(samples, space.dtype).reshape(len(samples), *space.shape))


def deeper(x, f):
    return (
        {k: deeper(v, f) for k, v in x.items()}
        if isinstance(x, dict)
        else tuple(deeper(v, f) for v in x)
        if isinstance(x, tuple)
        else f(x)
    )


@cases(250)
@given(any_space, st.integers(0, 99), st.sampled_from([1, 2, 6]))
def test_flat_as_gymnasium_has_it(space, seed, n):
    "Any nested space: the same numbers in the same order; leading axes stay, whatever they are"
    space.seed(seed)
    samples, flat = [space.sample() for _ in range(n)], FlattenSpace(space)
    x, expected = (
        tensors(space, samples),
        np.stack([spaces.flatten(space, s) for s in samples]).astype(np.float32),
    )
    got = flat(x)
    assert (
        got.dtype == torch.float32
        and got.shape == (n, flat.size)
        and flat.size == spaces.flatdim(space)
    )
    np.testing.assert_array_equal(got, expected)
    for lead in (n, 1), (1, n), (1, 1, n):
        assert torch.equal(
            flat(deeper(x, lambda t: t.reshape(*lead, *t.shape[1:]))), got.reshape(*lead, -1)
        )
    assert torch.equal(flat(deeper(x, lambda t: t[0])), got[0]) and flat(
        deeper(x, lambda t: t[:0])
    ).shape == (0, flat.size)


# ---- heads and networks ----


@pytest.mark.parametrize('dueling', [False, True])
@pytest.mark.parametrize('hidden', [(), (4, 3)])
def test_a_value_net_is_layers(hidden, dueling):
    "With ReLUs between and none at the end, against plain numpy"
    torch.manual_seed(0)
    net = value_net(Box(-1, 1, (2,)), Discrete(4), hidden, dueling)
    assert isinstance(net[-1], Dueling if dueling else nn.Linear)
    x = inputs = np.random.default_rng(0).normal(size=(5, 2)).astype('f4')
    layers = [m for m in net if isinstance(m, nn.Linear)][: len(hidden)]
    assert [m.out_features for m in layers] == [*hidden]
    with torch.no_grad():
        for m in layers:
            x = np.maximum(x @ m.weight.numpy().T + m.bias.numpy(), 0)
        got = net(torch.from_numpy(inputs))
        torch.testing.assert_close(got, net[-1](torch.from_numpy(x)))


# ---- names ----


def test_the_star_import_shadows_nothing_of_torch_nn():
    "`from torch.nn import *` and ours, in either order, give the same layers"
    import fastrl_replay.all as everything

    assert not set(everything.__all__) & set(vars(nn))
