"""`SumTree` against numpy and exact sums.

No update leaves a trace, no dart finds what is 0, and a refusal changes nothing."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import chi2

from fastrl_replay.memory.sumtree import LARGEST, SumTree
from strategies import bits, cases

SURE = 1e-4
INF = float('inf')
# odd ones, and those around powers of eight, where a level begins or ends
SIZES = [1, 2, 3, 7, 8, 9, 13, 63, 64, 65, 71, 511, 512, 513, 577, 4095, 4096, 4097, 4999, 5000]
capacities = st.sampled_from(SIZES) | st.integers(1, 5000)


def filled(p):
    t = SumTree(len(p))
    t.update(np.arange(len(p)), p)
    return t


def check(t, p):
    "Check that this is the tree of these leaves, to the last bit"
    assert bits(t[:]) == bits(p)
    assert abs(t.total - math.fsum(p)) <= 1e-14 * math.fsum(p)
    assert t.total == filled(p).total
    assert t.largest == p.max()


def wide(rng, n):
    "Priorities of very different sizes, some of them 0, some whole numbers"
    p = 10 ** rng.uniform(-12, 12, n) * (rng.random(n) < rng.choice([0.1, 0.9, 1]))
    return np.where(rng.random(n) < 0.2, rng.integers(0, 4, n), p)


# ---- updates ----

ACTS = 'some', 'one', 'same', 'zeros', 'grid', 'bad'


@cases(150)
@given(capacities, st.lists(st.tuples(st.integers(0, 2**32), st.sampled_from(ACTS)), max_size=8))
def test_story_of_updates(capacity, story):
    "Duplicates among them, and refused ones between, which change nothing"
    t, p = SumTree(capacity), np.zeros(capacity)
    for seed, act in story:
        rng = np.random.default_rng(seed)
        n = dict(one=1, grid=12).get(act, int(rng.integers(1, 2 * capacity + 2)))
        idx, x = rng.integers(capacity, size=n), wide(rng, n)
        if act == 'same':
            idx[:] = idx[0]
        elif act == 'zeros':
            idx, x = np.arange(capacity), np.zeros(capacity)
        elif act == 'grid':
            idx, x = idx.reshape(3, 4), x.reshape(3, 4)
        if act == 'bad':
            at = int(rng.integers(n))
            if rng.random() < 0.5:
                idx[at] = rng.choice([-1, capacity, 2**40, -(2**63)])
            else:
                x[at] = rng.choice([np.nan, -1, -5e-324, INF, np.nextafter(LARGEST, INF)])
            with pytest.raises((IndexError, ValueError), match=f'at position {at}[, ]'):
                t.update(idx, x)
        else:
            t.update(idx, x)
            p[idx.ravel()] = x.ravel()
        check(t, p)


@pytest.mark.parametrize('n', [1, 8, 9, 65, 600])
def test_the_largest_comes_and_goes(n):
    "One leaf up and down: also if the largest shrinks, grows, vanishes or has an equal"
    rng, t, p = np.random.default_rng(n), SumTree(n), np.zeros(n)
    for i in range(500):
        at = int(rng.choice([rng.integers(n), p.argmax(), np.where(p > 0, p, INF).argmin()]))
        p[at] = rng.choice([0, 1, 2, rng.random(), 5e-324, LARGEST, p.max(), p[at] / 2])
        t.update(at, p[at])
        assert t.largest == p.max()
    check(t, p)


def test_extreme_priorities():
    "The largest allowed at every leaf, the smallest there is, minus zero"
    t = filled(np.full(5000, LARGEST))
    assert t.find([0, t.total * 0.9999999, t.total]).tolist() == [0, 4999, 4999]
    t = filled(np.full(70, 5e-324))
    assert t.find(np.arange(71) * 5e-324).tolist() == [*range(70), 69]
    t = filled(np.array([-0.0, 3, -0.0]))
    assert t.find([0, -0.0, 3]).tolist() == [1] * 3
    t.update(1, -0.0)
    assert t.total == t.largest == 0


@pytest.mark.slow
def test_ten_million_leaves():
    "Whole priorities, so that sums are exact, also after a million updates"
    n, rng = 10_000_019, np.random.default_rng(1)
    p = rng.integers(0, 8, n).astype(float)
    t = SumTree(n)
    t.update(np.arange(n), p)
    idx, x = rng.integers(n, size=1_000_000), rng.integers(0, 8, 1_000_000).astype(float)
    t.update(idx, x)
    p[idx] = x
    ends = np.cumsum(p)
    darts = rng.random(200_000) * ends[-1]
    assert (t.find(darts) == np.searchsorted(ends, darts, side='right')).all()
    assert t.total == ends[-1]


# ---- refusals ----


def test_other_calls_refuse_what_is_not_there():
    t = filled(np.ones(12))
    for idx, error in (12, IndexError), ([0, -1], IndexError), (1.0, TypeError), (True, TypeError):
        with pytest.raises(error):
            t[idx]
        with pytest.raises(error):
            t.update(idx, 1)
    for mass in -1, [1, np.nan]:
        with pytest.raises(ValueError, match='got -1.0|got nan'):
            t.find(mass)
    for call in lambda: SumTree(3).find(0), lambda: SumTree(3).sample(2, np.random.default_rng(0)):
        with pytest.raises(ValueError, match='all priorities are 0'):
            call()
    for capacity in 0, 2**31, 2.5, '3', None, True:
        with pytest.raises(ValueError, match='SumTree: capacity; got .*; expected an integer'):
            SumTree(capacity)


def test_shapes_and_dtypes():
    "Scalars give numbers, arrays give arrays of their shape, of any integer dtype and layout"
    p = np.arange(1.0, 25)
    t = filled(p)
    assert type(t[3]) is float and type(t.find(2.5)) is int
    assert t[-3:].tolist() == [22, 23, 24]
    for dtype in 'bHiQ':
        grid = np.arange(24, dtype=dtype).reshape(4, 6)
        for a in grid, grid.T, grid[::2, ::-1], grid.astype(grid.dtype.newbyteorder()):
            assert (t[a] == p[a]).all()
            u, q = SumTree(24), np.zeros(24)
            u.update(a, np.asfortranarray(p[a]))
            q[a] = p[a]
            check(u, q)
    for empty in [], np.empty((0, 3)):
        t.update(empty, 7.0)
        assert t[empty].shape == t.find(empty).shape == np.shape(empty)
    darts = np.arange(0, 300, 0.5).reshape(2, 3, 100)
    darts.flags.writeable = False
    assert (t.find(darts) == np.searchsorted(np.cumsum(p), darts, side='right')).all()
    taken = t[2:5]
    taken[:] = 99
    check(t, p)


# ---- darts ----


@cases(150)
@given(capacities, st.integers(0, 2**32), st.sampled_from([0.01, 0.3, 1]))
def test_story_of_darts_on_whole_numbers(capacity, seed, share):
    "Sums are exact, so darts on, just below and between all edges find what numpy's sum says"
    rng = np.random.default_rng(seed)
    p = rng.integers(1, rng.choice([2, 10, 10**6]), capacity) * (rng.random(capacity) < share) * 1.0
    p[rng.integers(capacity)] = 1
    t, ends = filled(p), np.cumsum(p)
    darts = np.concatenate([[0], ends[:-1], np.nextafter(ends, 0), rng.random(100) * ends[-1]])
    darts = darts[darts < ends[-1]]
    assert t.find(darts).tolist() == np.searchsorted(ends, darts, side='right').tolist()
    assert t.find([ends[-1], INF]).tolist() == [np.flatnonzero(p)[-1]] * 2


@cases(200)
@given(
    capacities,
    st.integers(0, 2**32),
    st.sampled_from([(-3, 3), (-12, 12), (-320, 290), (280, 298)]),
    st.sampled_from([0.02, 0.3, 1]),
)
def test_story_of_darts_whatever_the_rounding(capacity, seed, orders, share):
    "Nothing of priority 0, never out of order, within rounding of its piece"
    rng = np.random.default_rng(seed)
    p = np.minimum(10 ** rng.uniform(*orders, capacity), LARGEST) * (rng.random(capacity) < share)
    p[rng.integers(capacity)] = 10.0 ** orders[1] * 0.99
    t, ends = filled(p), np.cumsum(p)
    near = [ends, np.nextafter(ends, 0), np.nextafter(ends, INF)]
    darts = np.sort(np.concatenate([*near, rng.random(300) * t.total, [0, t.total, INF]]))
    found = t.find(darts)
    assert (p[found] > 0).all()
    assert (np.diff(found) >= 0).all()
    loose = t.total * 1e-12 + 1e-320
    assert (ends[found] >= darts - loose)[darts < t.total].all()
    assert ((ends - p)[found] <= darts + loose).all()
    large = np.flatnonzero(p > 1e-11 * t.total + 1e-318)
    assert t.find((ends - p / 2)[large]).tolist() == large.tolist()


# ---- draws ----


def fair(counts, mean, upper=False):
    "Chi-square of counts; what is rare is put together"
    often = mean >= 5
    if not often.all():
        counts = np.append(counts[often], counts[~often].sum())
        mean = np.append(mean[often], mean[~often].sum())
    p = chi2.sf(((counts - mean) ** 2 / np.maximum(mean, 1e-12)).sum(), len(counts) - 1)
    return p > SURE and (upper or p < 1 - SURE)


@pytest.mark.parametrize('n, N', [(1, 5), (4, 30), (64, 1000)])
@pytest.mark.parametrize('stratified', [True, False])
def test_draws_are_in_proportion(n, N, stratified):
    "Over six orders of magnitude; independent draws vary as a multinomial's, stratified no more"
    rng = np.random.default_rng(n)
    p = 10 ** rng.uniform(-4, 2, N)
    p[::7] = 0
    t, times, counts = filled(p), 12_000 // n, np.zeros(N)
    for _ in range(times):
        idx, priority = t.sample(n, rng, stratified)
        assert (priority == p[idx]).all()
        np.add.at(counts, idx, 1)
    assert not counts[p == 0].any()
    assert fair(counts, p / p.sum() * n * times, stratified and n > 1)


@pytest.mark.parametrize('n', [1, 7, 256])
def test_one_draw_from_each_part(n):
    "Draw i of a stratified batch lies in part i of the mass"
    rng, p = np.random.default_rng(n), np.random.default_rng(0).integers(0, 5, 999) * 1.0
    t, ends = filled(p), np.cumsum(p)
    idx = np.stack([t.sample(n, rng)[0] for _ in range(200)])
    low, high = np.arange(n) / n * ends[-1], (np.arange(n) + 1) / n * ends[-1]
    assert (ends[idx] > low - 1e-9).all()
    assert ((ends - p)[idx] < high + 1e-9).all()
    assert (idx.min(0) < idx.max(0)).any()


def test_draws_repeat_with_the_same_generator():
    t = filled(np.random.default_rng(0).random(1000))
    for stratified in True, False:
        a, b, c = (t.sample(50, np.random.default_rng(s), stratified) for s in (3, 3, 4))
        assert bits(a[0]) == bits(b[0]) != bits(c[0])
        assert bits(t.sample(50, None, stratified)[0]) != bits(t.sample(50, None, stratified)[0])
