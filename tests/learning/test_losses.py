"""The pure functions of `losses`: against tables worked out on paper, naive loops, double precision and finite differences."""

from fractions import Fraction

import numpy as np, pytest, torch
from hypothesis import given, strategies as st

from fastrl_replay.learning.losses import (
    double_q_target,
    mixed_priority,
    n_step_targets,
    rescale,
    unrescale,
)
from fastrl_replay.stages.nstep import NStep
from fastrl_replay.testing import script, scripted_steps
from fastrl_replay.steps.core import Steps
from strategies import cases

nan, inf, T, F = float('nan'), float('inf'), True, False


def tensor(*x, **kw):
    return torch.tensor(x, **{'dtype': torch.float64, **kw})


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the scale of values ----


def exact_h(x, eps):
    "h in double precision, without any difference: log1p and expm1 know small numbers"
    return np.sign(x) * np.expm1(0.5 * np.log1p(np.abs(x))) + eps * x


@pytest.mark.parametrize('x,y', [(0, 0), (3, 1), (8, 2), (-15, -3), (99, 9), (-1e6 + 1, -999)])
def test_roots_by_hand(x, y):
    "Without ε"
    assert rescale(tensor(x), 0).item() == y and unrescale(tensor(y), 0).item() == x


@pytest.mark.parametrize('eps', [0, 1e-6, 1e-3, 0.01, 1, 50])
@cases(300)
@given(st.floats(-1e6, 1e6, width=32))
def test_there_and_back_in_single_precision(eps, x):
    "To a millionth of the value, however small it is; and each way against double precision"
    t = torch.tensor([x])
    if abs(x) < 1e-30:  # where float32 runs out of digits
        assert abs(unrescale(rescale(t, eps), eps).item()) <= 1e-29
        return
    y = exact_h(x, eps)
    assert abs(rescale(t, eps).item() - y) <= 5e-7 * abs(y)
    assert abs(unrescale(rescale(t, eps), eps).item() - x) <= 1e-6 * abs(x)
    assert abs(unrescale(tensor(y), eps).item() - x) <= 1e-12 * abs(x)


def test_the_whole_range():
    "A million values on each side, from a billionth to a million, and in order"
    x = torch.logspace(-9, 6, 1_000_000)
    y = rescale(x)
    back = unrescale(y)
    assert ((back.double() - x.double()).abs() / x).max() < 1e-6
    assert (
        bool((y[10:] > y[:-10]).all())
        and torch.equal(rescale(-x), -y)
        and torch.equal(unrescale(-y), -back)
    )


def test_slopes():
    "Against finite differences, and at 0, where |x| has none: h' = ½ + ε, and the inverse's is 1 over that"
    x = torch.cat([randn(20) * 100, tensor(1e-8, -1e-8)]).requires_grad_()
    assert torch.autograd.gradcheck(rescale, x) and torch.autograd.gradcheck(unrescale, x)
    for f, slope in (rescale, 0.5 + 1e-3), (unrescale, 1 / (0.5 + 1e-3)):
        zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        f(zero).backward()
        assert zero.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize('f', [rescale, unrescale])
def test_values_keep_their_kind(f):
    "dtype, shape, nothing changed; infinite stays infinite in h, NaN stays NaN"
    for dtype in torch.float16, torch.bfloat16, torch.float32, torch.float64:
        for shape in (), (0,), (2, 3):
            x = torch.ones(shape, dtype=dtype)
            assert f(x).dtype == dtype and f(x).shape == shape and bool((x == 1).all())
    assert f(tensor(nan)).isnan().item()
    with pytest.raises(
        ValueError, match=f'{f.__name__}: x; got torch.int64; expected floating point'
    ):
        f(torch.tensor([1]))
    with pytest.raises(TypeError, match=f'{f.__name__}: x; got float; expected a tensor'):
        f(1.0)
    for eps in -1e-3, nan, None, True:
        with pytest.raises(ValueError, match='eps; got .*0 or more'):
            f(tensor(1), eps)


# ---- several steps ----


def judge(reward, discount, value, n, mask):
    "One start at a time, in fractions"
    frac = lambda x: [Fraction(v) for v in x]
    reward, discount, value, out = frac(reward), frac(discount), frac(value), []
    for t in range(len(reward)):
        total, weight = Fraction(0), Fraction(1)
        for k in range(t, len(reward)):
            if not mask[k]:
                break
            total, weight = total + weight * reward[k], weight * discount[k]
            if k == t + n - 1 or k + 1 == len(reward) or not mask[k + 1]:
                total += weight * value[k]
                break
        out.append(float(total))
    return out


@pytest.mark.parametrize(
    'n,want',
    [
        (1, [5, 14, 100, 1004, 6]),
        (2, [8, 60, 100, 1003, 6]),
        (3, [31, 60, 100, 1003, 6]),
        (4, [31, 60, 100, 1003, 6]),
        (10**9, [31, 60, 100, 1003, 6]),
    ],
)
def test_the_table_of_targets(n, want):
    "γ = ½, all values 8, the third step terminates"
    r, d, v = tensor(1, 10, 100, 1000, 2), tensor(0.5, 0.5, 0, 0.5, 0.5), tensor(*[8] * 5)
    assert n_step_targets(r, d, v, n).tolist() == want
    assert n_step_targets(
        r[None, None], d[None, None], v[None, None], n, torch.ones(1, 1, 5).bool()
    ).tolist() == [[want]]


@pytest.mark.parametrize(
    'mask,want',
    [
        ([T] * 5, [8, 60, 100, 1003, 6]),
        ([T, T, T, T, F], [8, 60, 100, 1004, 0]),
        ([T, F, T, T, T], [5, 0, 100, 1003, 6]),
        ([F, F, F, F, F], [0] * 5),
        ([F, T, F, F, T], [0, 14, 0, 0, 6]),
    ],
)
def test_masked_targets(mask, want):
    "A step whose successor is no step bootstraps at once; what stands where no step is has no effect, not even on gradients"
    m = torch.tensor(mask)
    r, d, v = (
        torch.where(m, x, nan).requires_grad_()
        for x in (tensor(1, 10, 100, 1000, 2), tensor(0.5, 0.5, 0, 0.5, 0.5), tensor(*[8] * 5))
    )
    target = n_step_targets(r, d, v, 2, m)
    assert target.tolist() == want
    target.sum().backward()
    for x in r, d, v:
        assert x.grad.isfinite().all() and bool((x.grad[~m] == 0).all())


rows = st.lists(
    st.tuples(
        st.integers(-9, 9), st.sampled_from([0, 0.25, 0.5, 1]), st.integers(-9, 9), st.booleans()
    ),
    min_size=1,
    max_size=9,
)


@cases(300)
@given(rows, st.integers(1, 12), st.booleans())
def test_targets_are_the_judges(rows, n, masked):
    "In fractions: these numbers are exact in double precision"
    r, d, v, m = zip(*rows)
    if not masked:
        m = [True] * len(m)
    got = n_step_targets(tensor(*r), tensor(*d), tensor(*v), n, torch.tensor(m) if masked else None)
    assert got.tolist() == judge(r, d, v, n, m)


@cases(40)
@given(st.integers(0, 4), st.integers(0, 3), st.integers(1, 6), st.integers(1, 8))
def test_rows_of_a_batch_are_alone(B, C, L, n):
    "Any leading axes, none of them of any effect"
    r, d, v = (randn(B, C, L, seed=i) for i in range(3))
    m = randn(B, C, L, seed=9) > -1
    got = n_step_targets(r, d, v, n, m)
    assert got.shape == (B, C, L)
    for b in range(B):
        for c in range(C):
            assert torch.equal(got[b, c], n_step_targets(r[b, c], d[b, c], v[b, c], n, m[b, c]))


def test_targets_can_be_differentiated():
    "With respect to all three; and nothing is changed"
    r, d, v = (randn(2, 5, seed=i).requires_grad_() for i in range(3))
    before = [x.detach().clone() for x in (r, d, v)]
    assert torch.autograd.gradcheck(lambda *a: n_step_targets(*a, 3), (r, d, v))
    assert all(torch.equal(a.detach(), b) for a, b in zip((r, d, v), before))


@pytest.mark.parametrize('n', [1, 2, 3, 5, 50])
def test_the_stage_and_the_function_agree(n):
    "Episodes merged row by row, and whole: the same targets"
    for length in 1, 4, -4, -9:
        rows = Steps.cat(scripted_steps([script(length)], abs(length)))
        value = randn(len(rows))
        merged = Steps.cat(list(NStep([rows], n, 0.9))).rows
        ends = merged['step_n'] - 1 + merged['n'] - 1
        discount = 0.9 * (~rows.terminated).double()
        want = merged['reward'] + merged['discount'] * value.numpy()[ends]
        np.testing.assert_allclose(
            n_step_targets(rows.reward.double(), discount, value, n), want, rtol=1e-6
        )


def test_what_targets_refuse():
    "Shapes that would be broadcast, kinds that would be converted, and what is no number of steps; no steps at all are fine"
    r = torch.zeros(2, 3)
    bad = [
        (
            (r[:, :2], r, r, 1),
            ValueError,
            r'discount; got shape \[2, 3\]; expected \[2, 2\], the shape of reward',
        ),
        ((r, r, r[..., None], 1), ValueError, r'value; got shape \[2, 3, 1\]'),
        ((r, r > 0, r, 1), ValueError, 'discount; got torch.bool; expected floating point'),
        ((r.numpy(), r, r, 1), TypeError, 'reward; got ndarray; expected a tensor'),
        (
            (r[0, 0], r[0, 0], r[0, 0], 1),
            ValueError,
            r'reward; got a single number; expected shape \[..., T\]',
        ),
        ((r, r, r, 2, r), ValueError, 'mask; got torch.float32; expected a tensor of bool'),
        ((r, r, r, 2, [True]), TypeError, 'mask; got list; expected a tensor of bool'),
        (
            (r, r, r, 2, r[0] > 0),
            ValueError,
            r'mask; got shape \[3\]; expected \[2, 3\], the shape of reward',
        ),
    ]
    bad += [
        ((r, r, r, n), ValueError, 'n; got .*a whole number, at least 1')
        for n in (0, -1, 1.5, True, None)
    ]
    for args, error, says in bad:
        with pytest.raises(error, match=f'n_step_targets: {says}'):
            n_step_targets(*args)
    assert n_step_targets(r[:, :0], r[:, :0], r[:, :0], 3).shape == (2, 0)


# ---- two networks ----


def test_double_q_by_hand():
    "The online network chooses, the target network says what that is worth; ties go to the first; gradients reach the value only"
    online, target = (
        tensor([1, 5, 2], [7, 0, 7], [-3, -2, -1]),
        tensor([20, 10, 30], [4, 6, 8], [1, 2, -16]),
    )
    r, d = tensor(3, 1, 2), tensor(0.5, 0.25, 0)
    assert double_q_target(r, d, online, target).tolist() == [8, 2, 2]
    for x in online, target:
        x.requires_grad_()
    double_q_target(r, d, online, target).sum().backward()
    assert online.grad is None and target.grad.tolist() == [[0, 0.5, 0], [0.25, 0, 0], [0, 0, 0]]


@cases(60)
@given(st.lists(st.integers(0, 4), max_size=3), st.integers(1, 5), st.integers(0, 99))
def test_double_q_in_any_shape(shape, actions, seed):
    "A loop over all places"
    r, d = (randn(*shape, seed=seed + i) for i in (0, 1))
    online, target = (randn(*shape, actions, seed=seed + i) for i in (2, 3))
    got = double_q_target(r, d, online, target)
    assert got.shape == r.shape
    for i in np.ndindex(*shape):
        assert got[i] == r[i] + d[i] * target[i][max(range(actions), key=lambda a: online[i][a])]


def test_what_double_q_refuses():
    "Above all what would be broadcast"
    r, q = torch.zeros(4), torch.zeros(4, 2)
    for args, says in [
        (
            (r, r[:, None], q, q),
            r'discount; got shape \[4, 1\]; expected \[4\], the shape of reward',
        ),
        (
            (r[:, None], r[:, None], q, q),
            r'q_online_next; got shape \[4, 2\]; expected \[4, 1, actions\]',
        ),
        (
            (r, r, q, q[:, :1]),
            r'q_target_next; got shape \[4, 1\]; expected \[4, 2\], the shape of q_online_next',
        ),
        ((r, r, q[:, :0], q[:, :0]), r'q_online_next; got shape \[4, 0\]'),
        ((r, r, r[0], r[0]), r'q_online_next; got shape \[\]'),
        ((r.long(), r, q, q), 'reward; got torch.int64'),
    ]:
        with pytest.raises(ValueError, match=f'double_q_target: {says}'):
            double_q_target(*args)


# ---- priorities ----


@pytest.mark.parametrize(
    'eta,want', [(1, [5, 0.5]), (0.75, [4.25, 0.5]), (0.5, [3.5, 0.5]), (0, [2, 0.5])]
)
def test_priorities_by_hand(eta, want):
    "1, -5, 0 and three halves"
    assert mixed_priority(tensor([1, -5, 0], [-0.5, 0.5, 0.5]), eta).tolist() == want


@cases(200)
@given(st.integers(0, 5), st.integers(1, 7), st.floats(0, 1), st.integers(0, 999))
def test_priorities_are_a_loops(B, L, eta, seed):
    "Over the steps that count; what stands elsewhere has no effect; a row without any gives 0; numpy's arrays the same"
    td, mask = randn(B, L, seed=seed), randn(B, L, seed=seed + 1000) > 0
    want = []
    for row, m in zip(td.abs().tolist(), mask.tolist()):
        there = [x for x, k in zip(row, m) if k]
        want.append(eta * max(there) + (1 - eta) * sum(there) / len(there) if there else 0)
    spoiled = torch.where(mask, td, nan)
    got = mixed_priority(spoiled, eta, mask)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert got.shape == (B,) and got.dtype == td.dtype
    for m in mask, mask.numpy():
        same = mixed_priority(spoiled.numpy(), eta, m)
        assert isinstance(same, np.ndarray) and np.array_equal(same, got.numpy())
    np.testing.assert_allclose(
        mixed_priority(td, eta), mixed_priority(td, eta, torch.ones(B, L).bool()), rtol=1e-12
    )


def test_r2d2s_eta_is_the_default():
    "0.9"
    assert mixed_priority(tensor([10, 0])).item() == pytest.approx(0.9 * 10 + 0.1 * 5)


def test_what_priorities_refuse():
    "And what they don't: arrays of any make; NaN goes through, where the memory will refuse it"
    td = torch.zeros(2, 3)
    for args, error, says in [
        ((td[0],), ValueError, r'td; got shape \[3\]; expected \[B, T\]'),
        ((td[:, :0],), ValueError, r'td; got shape \[2, 0\]'),
        ((td.long(),), ValueError, 'td; got torch.int64'),
        ((td.tolist(),), TypeError, 'td; got list; expected a tensor'),
        ((td, 1.1), ValueError, 'eta; got 1.1'),
        ((td, -0.1), ValueError, 'eta'),
        ((td, nan), ValueError, 'eta'),
        (
            (td, 0.9, td[0] > 0),
            ValueError,
            r'mask; got shape \[3\]; expected \[2, 3\], the shape of td',
        ),
        ((td, 0.9, td), ValueError, 'mask; got torch.float32'),
    ]:
        with pytest.raises(error, match=f'mixed_priority: {says}'):
            mixed_priority(*args)
    reverse = np.arange(6.0).reshape(2, 3)[:, ::-1]
    assert mixed_priority(reverse, 1).tolist() == [2, 5]  # whatever numpy did to it
    assert (
        mixed_priority(torch.tensor([[nan, 1]])).isnan().item()
    )  # a learner that went wrong is not hushed up
