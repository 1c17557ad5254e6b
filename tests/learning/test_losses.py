"""The pure functions of `losses`.

Against tables worked out on paper, naive loops, double precision and finite differences."""

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


def test_slopes():
    "Against finite differences; at 0, where |x| has none, h' = ½ + ε, and its inverse's is 1/h'"
    x = torch.cat([randn(20) * 100, tensor(1e-8, -1e-8)]).requires_grad_()
    assert torch.autograd.gradcheck(rescale, x) and torch.autograd.gradcheck(unrescale, x)
    for f, slope in (rescale, 0.5 + 1e-3), (unrescale, 1 / (0.5 + 1e-3)):
        zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        f(zero).backward()
        assert zero.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize('f', [rescale, unrescale])
def test_values_keep_their_kind(f):
    "NaN stays NaN"
    for dtype in torch.float16, torch.bfloat16, torch.float32, torch.float64:
        x = torch.ones(2, 3, dtype=dtype)
        assert f(x).dtype == dtype and f(x).shape == (2, 3)
        assert (x == 1).all()
    assert f(tensor(nan)).isnan()


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
    """A step whose successor is no step bootstraps at once.

    Values at places without a step have no effect, not even on gradients."""
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


def test_rows_of_a_batch_are_alone():
    "Any leading axes"
    r, d, v = (randn(3, 2, 6, seed=i) for i in range(3))
    m = randn(3, 2, 6, seed=9) > -1
    got = n_step_targets(r, d, v, 3, m)
    for i in np.ndindex(3, 2):
        assert torch.equal(got[i], n_step_targets(r[i], d[i], v[i], 3, m[i]))


def test_targets_can_be_differentiated():
    "With respect to all three"
    inputs = [randn(2, 5, seed=i).requires_grad_() for i in range(3)]
    assert torch.autograd.gradcheck(lambda *a: n_step_targets(*a, 3), inputs)


# ---- two networks ----


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


# ---- priorities ----


@cases(100)
@given(st.integers(0, 5), st.integers(1, 7), st.floats(0, 1), st.integers(0, 999))
def test_priorities_are_a_loops(B, L, eta, seed):
    "Only steps that count have an effect; a row without any gives 0"
    td, mask = randn(B, L, seed=seed), randn(B, L, seed=seed + 1000) > 0
    want = []
    for row, m in zip(td.abs().tolist(), mask.tolist()):
        counted = [x for x, k in zip(row, m) if k]
        want.append(eta * max(counted) + (1 - eta) * np.mean(counted) if counted else 0)
    spoiled = torch.where(mask, td, nan)
    got = mixed_priority(spoiled, eta, mask)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_r2d2s_eta_is_the_default():
    "0.9"
    assert mixed_priority(tensor([10, 0])).item() == pytest.approx(0.9 * 10 + 0.1 * 5)
