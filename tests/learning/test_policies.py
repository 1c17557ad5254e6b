"""Schedules, the policy that explores, and the networks: against plain loops, statistics, and gymnasium."""

import math, pickle
from copy import deepcopy
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from torch import nn

from fastrl_replay.all import *
from fastrl_replay.learning.networks import n_actions
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


@cases(100)
@given(st.floats(-10, 10), st.floats(-10, 10), st.integers(1, 50))
def test_a_line(start, end, steps):
    "Even steps, and then the end; never beyond either"
    line = LinearSchedule(start, end, steps)
    for i in range(steps):
        assert line(i) == pytest.approx(start + (end - start) * i / steps, abs=1e-12)
    for i in steps, steps + 1, 10 * steps, 10**12:
        assert line(i) == pytest.approx(end, abs=1e-12)


def test_a_line_ends_at_its_end():
    "“and `end` ever after”: not beside it"
    assert [LinearSchedule(1.0, 0.05, 10)(i) for i in (10, 11)] == [0.05, 0.05]


@pytest.mark.parametrize('steps', [0, -1, nan])
def test_lines_without_length(steps):
    "Are refused"
    with pytest.raises(
        ValueError, match=f'LinearSchedule: steps; got {steps}; expected more than 0'
    ):
        LinearSchedule(1, 0, steps)


@pytest.mark.parametrize(
    'start,factor,end,at,expected',
    [
        (8, 0.5, 1.0, 3, 1.0),
        (8, 0.5, 1.0, 2, 2.0),
        (8, 0.5, 3.0, 2, 3.0),
        (8, 0.5, 0.0, 40, 8 * 0.5**40),
        (1, 2, 9.0, 3, 8.0),
        (1, 2, 9.0, 4, 9.0),
        (1, 2, 0.0, 5, 32.0),
        (5, 1.0, 0.0, 9, 5.0),
        pytest.param(0.5, 1.0, 0.1, 9, 0.5),
    ],
)
def test_geometric_by_hand(start, factor, end, at, expected):
    "Falling, growing, standing"
    assert GeometricSchedule(start, factor, end)(at) == pytest.approx(expected)


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
    st.sampled_from([0.0, 0.3, 1.0, 'array', 'list', 'schedule']),
    st.integers(0, 9999),
    st.integers(1, 12),
)
def test_it_throws_the_plain_dice(n, actions, eps, seed, calls):
    "Action for action, whatever eps is, with any number of environments, none too"
    rng = np.random.default_rng(seed)
    given = dict(
        array=rng.random(n), list=rng.integers(0, 2, n).tolist(), schedule=LinearSchedule(1, 0, 9)
    ).get(eps, eps)
    asked, plain = [], Plain(seed)
    policy = EpsGreedy(lambda s: asked.append(len(s)) or q, given, seed)
    for _ in range(calls):
        q = torch.randn(n, actions)
        e = given(plain.asked) if eps == 'schedule' else given
        got = policy(states(n))
        assert (
            got.tolist() == plain(q.tolist(), e)
            and got.dtype == np.int64
            and got.shape == (n,)
            and policy.asked == plain.asked
        )
    if eps == 1.0 and n:
        assert len(asked) == 1  # once, to see how many actions there are


@pytest.mark.parametrize('eps', [0.0, 0.1, 0.5, 1.0, np.array([0.0, 0.2, 1.0])])
def test_each_action_has_its_probability(eps):
    "1-ε+ε/5 for the best, ε/5 for each other, in each environment: five standard deviations"
    n, best, policy = 20_000, (2, 0, 4), EpsGreedy(prefers(2, 0, 4), eps, seed=5)
    taken = np.stack([policy(states(3)) for _ in range(n)])
    for e, each in enumerate(np.broadcast_to(eps, 3)):
        for a in range(5):
            p = each / 5 + (1 - each) * (a == best[e])
            assert abs((taken[:, e] == a).mean() - p) <= 5 * math.sqrt(p * (1 - p) / n) + 1e-12, (
                e,
                a,
            )


def test_environments_explore_on_their_own():
    "Pairs of environments, whether and what, and one call after another: no correlation"
    n, policy = 20_000, EpsGreedy(prefers(2, 0, 4, 1), 0.5, seed=6)
    taken = np.stack([policy(states(4)) for _ in range(n)])
    for what in (taken != [2, 0, 4, 1]).astype(float), (taken == 3).astype(float):
        columns = np.concatenate([what[1:], what[:-1]], 1)
        c = np.corrcoef(columns.T) - np.eye(8)
        assert abs(c).max() < 5 / math.sqrt(n)


def test_the_same_dice_whatever_the_schedule():
    "Who explores with a small eps explores the same with a large one; in between, others may differ"
    lots = [
        np.stack(
            [p(states(3)) for p in [EpsGreedy(prefers(2, 0, 4), eps, seed=1)] for _ in range(300)]
        )
        for eps in (0.0, 0.2, 0.6, LinearSchedule(1, 0.6, 500), 1.0)
    ]
    for few, many in zip(lots, lots[1:]):
        explored = few != lots[0]
        assert (few[explored] == many[explored]).all()
    ends = []
    for eps in 0.0, 0.5, 1.0, LinearSchedule(1, 0, 40):
        p = EpsGreedy(prefers(2, 0, 4), eps, seed=1)
        for _ in range(20):
            p(states(3))
        ends.append(p.state_dict())
    assert all(e == ends[0] for e in ends)


def test_no_other_code_changes_it():
    "Global generators, another policy; seeds differ, and no seed is another one each time"

    def play(seed, disturb=False):
        p, other, out = EpsGreedy(prefers(2, 0, 4), 0.7, seed), EpsGreedy(prefers(1), 0.7, 3), []
        for _ in range(60):
            if disturb:
                np.random.rand(3)
                torch.rand(2)
                other(states(1))
            out.append(p(states(3)).tolist())
        return out

    assert play(1) == play(1, True) and play(1) != play(2) and play(None) != play(None)


@pytest.mark.parametrize(
    'eps',
    [
        -0.01,
        1.01,
        nan,
        inf,
        np.array([0.5, nan, 0.5]),
        np.array([0.5, 0.5, -1]),
        lambda k: 2.0,
        lambda k: nan,
    ],
)
def test_what_is_no_probability(eps):
    "Numbers, arrays, what a schedule says: refused at the call, by name"
    with pytest.raises(ValueError, match='^EpsGreedy: eps; got .*; expected a probability'):
        EpsGreedy(prefers(2, 0, 4), eps)(states(3))


@pytest.mark.parametrize(
    'eps',
    [
        0,
        1,
        0.0,
        1.0,
        True,
        np.float32(0.5),
        np.array(0.5),
        np.array([0.5]),
        torch.tensor(0.5).item(),
    ],
)
def test_what_is_a_probability(eps):
    "The ends, and numbers of any make"
    assert EpsGreedy(prefers(2, 0, 4), eps, seed=0)(states(3)).shape == (3,)


@pytest.mark.parametrize('eps', [-0.1, 1.5, nan, np.array([2.0]), None, 'half'])
def test_eps_is_checked_early(eps):
    "What is wrong for sure is refused when the policy is made"
    with pytest.raises((TypeError, ValueError), match='^EpsGreedy: eps'):
        EpsGreedy(prefers(2, 0, 4), eps)


@pytest.mark.parametrize(
    'n,eps', [(3, np.zeros(4)), (3, np.zeros((3, 1))), (1, np.zeros(4)), (2, np.ones((2, 1)))]
)
def test_an_eps_for_each_environment(n, eps):
    "Neither more nor fewer"
    with pytest.raises(ValueError, match='^EpsGreedy: eps'):
        EpsGreedy(prefers(2, 0, 4), eps)(states(n))


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


@pytest.mark.parametrize('eps', [LinearSchedule(1, 0.1, 50), 0.5, np.array([0.2, 0.9, 1.0])])
@pytest.mark.parametrize('calls', [0, 1, 13])
def test_dice_through_a_file(eps, calls):
    "A policy of another seed goes on with the same actions; the saved one isn't disturbed, pickles and copies neither"
    a, b = (EpsGreedy(nn.Linear(2, 4), eps, seed) for seed in (1, 2))
    b.values = a.values
    for _ in range(calls):
        a(torch.randn(3, 2))
    state = through_file(a.state_dict())
    copies = [b, pickle.loads(pickle.dumps(a)), deepcopy(a)]
    b.load_state_dict(state)
    for _ in range(20):
        s = torch.randn(3, 2)
        expected = a(s).tolist()
        for c in copies:
            assert c(s).tolist() == expected and c.asked == a.asked and c.eps_now is not None
    b.load_state_dict(state)
    assert b.asked == 3 * calls and same(b.state_dict(), state)  # loading took a copy


@pytest.mark.parametrize(
    'space',
    [
        spaces.Dict(b=Discrete(4), a=Box(-1, 1, (2, 3))),
        spaces.Tuple([spaces.Dict(x=spaces.MultiBinary(3)), Discrete(3, start=2)]),
    ],
)
@pytest.mark.parametrize('n', [1, 3])
def test_nested_states(space, n):
    "The number of environments is seen; the action is the one that the network finds best"
    torch.manual_seed(0)
    net = value_net(space, Discrete(3), (8,))

    class Env(gym.Env):
        observation_space, action_space = space, Discrete(3)

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            space.seed(seed)
            return space.sample(), {}

        def step(self, action):
            return space.sample(), 1.0, self.np_random.random() < 0.3, False, {}

    policy = EpsGreedy(net, 0.3, seed=0)
    assert all(len(block) == n for block in islice(GymStepper([Env] * n, policy, seed=0), 12))
    assert policy.asked == 12 * n
    greedy = EpsGreedy(net, 0.0)
    for block in islice(GymStepper([Env] * n, greedy, seed=0), 12):
        assert torch.equal(block.action, net(block.state).argmax(-1))


def test_a_table_is_a_policy_too():
    "States in, values out"
    table = QTable(Discrete(4, start=-1), Discrete(3))
    table.values[:] = np.random.default_rng(0).normal(size=(4, 3))
    assert (
        EpsGreedy(table, 0.0)(torch.tensor([2, -1, 0])).tolist()
        == table.values[[3, 0, 1]].argmax(1).tolist()
    )


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


@pytest.mark.parametrize('kind', ['single', 'vector', 'NextStep', 'SameStep'])
@pytest.mark.parametrize('eps', [0.0, 0.5])
def test_memory_is_forgotten_where_an_episode_ended(kind, eps):
    "Three environments whose episodes end at different times: each row's memory and greedy action are those of a loop over its own episode"
    scripts = [script(3, -5, 1, 4, env=0), script(-2, 7, env=1), script(1, 1, -6, 2, env=2)]
    for s in scripts:
        s['states'] = [[math.sin(a), math.cos(b)] for a, b in s['states']]
    source = (
        [ScriptedEnv(**s) for s in scripts]
        if kind == 'single'
        else [ScriptedVectorEnv(scripts[:2]), ScriptedEnv(**scripts[2])]
        if kind == 'vector'
        else ScriptedVectorEnv(scripts, kind)
    )
    torch.manual_seed(1)
    net = RecurrentNet(Box(-9, 9, (2,)), Discrete(3), 5, dueling=eps > 0)
    for p in net.parameters():
        p.data *= 3
    memory, seen, agree = {}, 0, 0
    for block in islice(GymStepper(source, EpsGreedy(net, eps, seed=0)), 40):
        for i, r in enumerate(block.rows):
            e = int(r['env_id'])
            if r['step_n'] == 1:
                memory[e] = (torch.zeros(5).double(),) * 2
            for mine, stored in zip(memory[e], block.hidden):
                np.testing.assert_allclose(stored[i], mine, atol=1e-5)
            q, *memory[e] = cell(net, block.state[i], *memory[e])
            top = q.sort().values
            if top[-1] - top[-2] > 1e-4:
                seen, agree = seen + 1, agree + (int(r['action']) == int(q.argmax()))
    assert seen > 60 and (agree == seen) == (eps == 0) and agree > 0.5 * seen


@pytest.mark.parametrize('dueling', [False, True])
@cases(40)
@given(st.integers(1, 4), st.integers(0, 6), st.integers(0, 6), st.integers(0, 999))
def test_a_step_and_a_sequence_agree(dueling, n, T, split, seed):
    "With each other, with a loop over the cell, and with the sequence in two parts; nothing that is given is changed"
    torch.manual_seed(seed)
    net = RecurrentNet(Box(-9, 9, (2,)), Discrete(3), 4, dueling)
    s, hidden = torch.randn(n, T, 2), (torch.randn(n, 4), torch.randn(n, 4))
    before = [h.clone() for h in hidden]
    with torch.no_grad():
        whole, end = net(s, hidden)
        a, middle = net(s[:, :split], hidden)
        b, end2 = net(s[:, split:], middle)
        h, one = hidden, []
        for t in range(T):
            q, h = net(s[:, t], h)
            one.append(q)
    assert whole.shape == (n, T, 3) and all(torch.equal(x, y) for x, y in zip(hidden, before))
    for other in torch.cat([a, b], 1), torch.stack(one, 1) if T else whole:
        torch.testing.assert_close(whole, other, atol=1e-5, rtol=1e-5)
    for x, y in zip((*end, *end), (*end2, *h)):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    for i in range(n):
        plain = [x[i].double() for x in hidden]
        for t in range(T):
            q, *plain = cell(net, s[i, t], *plain)
            torch.testing.assert_close(q, whole[i, t].double(), atol=1e-5, rtol=1e-5)


def test_memory_begins_at_zero_and_belongs_to_the_asker():
    "For any number of environments, of any kind of states; memory in double precision is taken too"
    net = RecurrentNet(spaces.Dict(a=Box(-1, 1, (2, 2)), b=Discrete(3)), Discrete(2), 6)
    for n in 0, 1, 5:
        hidden = net.initial_hidden(n)
        assert [list(h.shape) for h in hidden] == [[n, 6]] * 2 and not any(h.any() for h in hidden)
        q, new = net(
            dict(a=torch.ones(n, 2, 2), b=torch.zeros(n, dtype=torch.long)),
            tuple(h.double() for h in hidden),
        )
        assert (
            q.shape == (n, 2)
            and new[0].dtype == torch.float32
            and [list(h.shape) for h in new] == [[n, 6]] * 2
        )
    policy = EpsGreedy(net, 1.0, seed=0)  # all explore, and it must be asked still: for the memory
    for _ in range(3):
        action, hidden = policy(
            dict(a=torch.ones(4, 2, 2), b=torch.zeros(4, dtype=torch.long)),
            policy.initial_hidden(4),
        )
    assert (
        action.shape == (4,)
        and hidden[0].any()
        and not hasattr(EpsGreedy(prefers(1)), 'initial_hidden')
    )


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


@pytest.mark.parametrize('start', [[1, -2], [0, 0], [7, 100]])
def test_many_numbers_that_begin_anywhere(start):
    "A one at its place, for each number"
    space = spaces.MultiDiscrete([2, 3], start=start)
    for a in range(2):
        for b in range(3):
            got = FlattenSpace(space)(torch.tensor([[a + start[0], b + start[1]]]))
            assert got.tolist() == [
                [float(a == i) for i in range(2)] + [float(b == i) for i in range(3)]
            ]


@pytest.mark.parametrize(
    'space', [spaces.Text(3), spaces.Sequence(Discrete(3)), spaces.Graph(Discrete(2), None), 4]
)
def test_what_cannot_be_flat(space):
    "Is refused by name"
    with pytest.raises(
        TypeError,
        match='^FlattenSpace: a .* space has no fixed size; got .*; expected Box, Discrete',
    ):
        FlattenSpace(space)


@pytest.mark.parametrize(
    'space',
    [
        spaces.Dict(a=Box(-1, 1), b=spaces.OneOf([Discrete(3), Discrete(4)])),
        spaces.Tuple([spaces.OneOf([Discrete(2), Discrete(4)])]),
    ],
)
def test_parts_that_cannot_be_flat(space):
    "Are refused when the layer is made"
    with pytest.raises(TypeError, match="^FlattenSpace.*: a OneOf space has no fixed size"):
        FlattenSpace(space)


# ---- heads and networks ----


@cases(40)
@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 99),
)
def test_dueling_is_a_loop(size, actions, lead, seed):
    "Value plus advantage less the mean advantage; so the mean of the values is the state's value"
    torch.manual_seed(seed)
    head = Dueling(size, actions).double()
    x = torch.randn(*lead, size).double()
    got = head(x)
    assert got.shape == (*lead, actions)
    head.requires_grad_(False)
    for i in np.ndindex(*lead):
        v = float(head.value.weight[0] @ x[i] + head.value.bias[0])
        a = [
            float(head.advantage.weight[k] @ x[i] + head.advantage.bias[k]) for k in range(actions)
        ]
        assert got[i].tolist() == pytest.approx([v + y - sum(a) / actions for y in a], abs=1e-12)
        assert got[i].mean().item() == pytest.approx(v, abs=1e-12)


@pytest.mark.parametrize('dueling', [False, True])
@pytest.mark.parametrize('hidden', [(), (4,), (4, 3, 2)])
def test_a_value_net_is_layers(hidden, dueling):
    "Sizes, ReLUs between and none at the end, the head; against plain numpy"
    torch.manual_seed(0)
    net = value_net(spaces.Dict(a=Box(-1, 1, (2,)), b=Discrete(3)), Discrete(4), hidden, dueling)
    linear = [m for m in net if isinstance(m, nn.Linear)]
    assert [m.out_features for m in linear] == [*hidden, *([] if dueling else [4])] and isinstance(
        net[-1], Dueling if dueling else nn.Linear
    )
    a, b = torch.randn(5, 2), torch.tensor([0, 1, 2, 0, 1])
    x = np.concatenate([a.numpy(), np.eye(3)[b]], 1)
    for m in linear[: len(hidden)]:
        x = np.maximum(x @ m.weight.detach().numpy().T + m.bias.detach().numpy(), 0)
    np.testing.assert_allclose(
        net(dict(a=a, b=b)).detach(), net[-1](torch.tensor(x).float()).detach(), atol=1e-5
    )


@pytest.mark.parametrize(
    'space',
    [
        Discrete(3, start=1),
        Discrete(3, start=-1),
        Box(-1, 1, (1,)),
        spaces.MultiDiscrete([3]),
        spaces.MultiBinary(2),
        spaces.Tuple([Discrete(2)]),
    ],
)
def test_actions_are_numbers_from_0(space):
    "Or the networks and the table are not made"
    several = isinstance(
        space, (spaces.MultiDiscrete, spaces.MultiBinary)
    )  # of these `value_net` has a value for each part
    for make in (
        n_actions,
        (lambda s: RecurrentNet(Discrete(3), s)),
        (lambda s: QTable(Discrete(3), s)),
        *([] if several else [lambda s: value_net(Discrete(3), s)]),
    ):
        with pytest.raises(
            TypeError, match='the action space; got .*expected Discrete, from 0.*TransformAction'
        ):
            make(space)
    assert n_actions(Discrete(7)) == 7


@pytest.mark.parametrize(
    'bend',
    [
        lambda q: q[:, 0],
        lambda q: q[0],
        lambda q: q[:, None],
        lambda q: (q, q),
        lambda q: q[:2],
        lambda q: q.numpy(),
        lambda q: q * nan,
    ],
    ids=['[n]', '[actions]', '[n, 1, actions]', 'tuple', '[2, actions]', 'array', 'nan'],
)
def test_values_of_another_shape(bend):
    "Are refused by name, with what came and what was expected"
    with pytest.raises((TypeError, ValueError), match='^EpsGreedy: '):
        EpsGreedy(lambda s: bend(torch.ones(len(s), 4)), 0.0)(states(3))


# ---- names ----


def test_the_star_import_shadows_nothing_of_torch_nn():
    "`from torch.nn import *` and ours, in either order, give the same layers"
    import fastrl_replay.all as everything, fastrl_replay.learning.learners as learners

    assert not set(everything.__all__) & set(vars(nn)) and not set(learners.__all__) & set(vars(nn))


def test_what_a_policy_reports():
    "How likely it is to explore: of a schedule now, of many environments on average"
    assert EpsGreedy(prefers(1), 0.25).report() == dict(eps=0.25)
    policy = EpsGreedy(prefers(1, 2), LinearSchedule(1, 0, 4))
    policy(states(2))
    assert policy.report() == dict(eps=0.5) and EpsGreedy(
        prefers(1, 2), np.array([0.5, 0.25])
    ).report() == dict(eps=0.375)
