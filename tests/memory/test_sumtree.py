"""`SumTree` against numpy and exact sums: no update leaves a trace, no dart finds what is 0, a refusal changes nothing."""

import math

import numpy as np, pytest
from hypothesis import given, strategies as st
from scipy.stats import chi2

from fastrl_replay.memory.sumtree import LARGEST, SumTree, levels
from strategies import bits, cases

SURE = 1e-4
# odd ones, and those around powers of eight, where a level begins or ends
SIZES = [1, 2, 3, 7, 8, 9, 13, 63, 64, 65, 71, 511, 512, 513, 577, 4095, 4096, 4097, 4999, 5000]
capacities = st.sampled_from(SIZES) | st.integers(1, 5000)


def fenced(a, mark=-77):
    "The same array inside a larger one full of marks, and a function that says whether they still stand"
    n, pad = len(a), 64
    whole = np.full(n + 2 * pad, mark, a.dtype)
    whole[pad : pad + n] = a
    return whole[
        pad : pad + n
    ], lambda: (whole[:pad] == mark).all() and (whole[pad + n :] == mark).all()


def new(capacity, smallest=True):
    "A tree whose kernels can't write beside its arrays unnoticed"
    t = SumTree(capacity, smallest)
    fences, t.fences = [fenced(a) for a in (t.nodes, t._peaks, t._lows)], []
    (t.nodes, a), (t._peaks, b), (t._lows, c) = fences
    t.fences = [a, b, c]
    return t


def filled(p, **kw):
    t = new(len(p), **kw)
    t.update(np.arange(len(p)), p)
    return t


def built(p):
    "All nodes above these leaves, by numpy: eight columns added in pairs, from left to right"
    rows, nodes = p, []
    while True:
        width = -(-len(rows) // 8) * 8 if len(rows) > 1 or not nodes else 1
        rows = np.concatenate([rows, np.zeros(width - len(rows))])
        nodes.append(rows)
        if len(rows) == 1:
            return np.concatenate(nodes)
        pairs = rows.reshape(-1, 4, 2).sum(2).T
        rows = ((pairs[0] + pairs[1]) + pairs[2]) + pairs[3]


def check(t, p):
    "Is this the tree of these leaves, to the last bit, with its largest and smallest?"
    assert bits(t.nodes + 0.0) == bits(built(p)), 'nodes'
    assert t.total == t.nodes[-1] and abs(t.total - math.fsum(p)) <= 4 * (
        len(levels(len(p))) - 2
    ) * 2**-53 * math.fsum(p)
    assert t.largest == p.max() and bits(t[:]) == bits(p)
    if len(t._lows):
        assert t.smallest == min(p[p > 0], default=np.inf)
    assert all(stand() for stand in getattr(t, 'fences', ())), 'a kernel wrote beside its array'


def wide(rng, n, low=-12, high=12):
    "Priorities of very different sizes, some of them 0, some whole numbers"
    p = 10 ** rng.uniform(low, high, n) * (rng.random(n) < rng.choice([0.1, 0.9, 1]))
    return np.where(rng.random(n) < 0.2, rng.integers(0, 4, n), p)


# ---- updates ----


@cases(150)
@given(
    capacities,
    st.lists(
        st.tuples(
            st.integers(0, 2**32),
            st.sampled_from(['some', 'range', 'one', 'same', 'none', 'zeros', 'grid', 'bad']),
        ),
        max_size=8,
    ),
)
def test_story_of_updates(capacity, story):
    "After each of any updates, duplicates among them and refused ones between, nodes, total, largest and smallest are those of the leaves"
    t, p = new(capacity), np.zeros(capacity)
    for seed, kind in story:
        rng = np.random.default_rng(seed)
        n = dict(one=1, none=0, grid=12).get(kind, int(rng.integers(1, 2 * capacity + 2)))
        idx, x = rng.integers(capacity, size=n), wide(rng, n)
        if kind == 'range':
            idx, x = np.arange(capacity)[-n:], x[: len(np.arange(capacity)[-n:])]
        if kind == 'same':
            idx[:] = idx[0]
        if kind == 'zeros':
            idx, x = np.arange(capacity), np.zeros(capacity)
        if kind == 'bad':
            at, before = int(rng.integers(n)), [bits(a) for a in (t.nodes, t._peaks, t._lows)]
            if rng.random() < 0.5:
                idx[at] = rng.choice([-1, capacity, -capacity, 2**40, -(2**63)])
            else:
                x[at] = rng.choice(
                    [np.nan, -1, -5e-324, np.inf, -np.inf, np.nextafter(LARGEST, np.inf)]
                )
            with pytest.raises((IndexError, ValueError), match=f'at place {at}[,;]'):
                t.update(idx, x)
            assert before == [bits(a) for a in (t.nodes, t._peaks, t._lows)]
            continue
        if kind == 'grid':
            idx, x = idx.reshape(3, 4), x.reshape(3, 4)
        t.update(idx, x)
        p[idx.ravel()] = x.ravel()
        check(t, p)


@pytest.mark.slow
def test_ten_million_leaves():
    "Whole priorities, so that sums are exact: darts find what numpy's running sum finds, also after a million updates; the last index is found"
    n, rng = 10_000_019, np.random.default_rng(1)
    p = rng.integers(0, 8, n).astype(float)
    t = SumTree(n)
    t.update(np.arange(n), p)
    idx, x = rng.integers(n, size=1_000_000), rng.integers(0, 8, 1_000_000).astype(float)
    t.update(idx, x)
    p[idx], p[-1] = x, 1
    t.update(n - 1, 1)
    ends = np.cumsum(p)
    darts = np.concatenate(
        [
            rng.random(200_000) * ends[-1],
            rng.integers(0, ends[-1], 100_000),
            [0, ends[-1] - 1, ends[-1] - 0.5],
        ]
    )
    assert (t.find(darts) == np.searchsorted(ends, darts, side='right')).all()
    assert t.total == ends[-1] and t.largest == 7 and t.find(t.total) == n - 1
    assert bits(t.nodes) == bits(built(p))


@pytest.mark.parametrize('n', [1, 8, 9, 65, 600])
def test_largest_and_smallest_come_and_go(n):
    "One leaf up and down at a time: also when the largest or smallest shrinks, grows, vanishes, or has an equal"
    rng, t, p = np.random.default_rng(n), new(n), np.zeros(n)
    for i in range(1500):
        at = int(rng.choice([rng.integers(n), p.argmax(), np.where(p > 0, p, np.inf).argmin()]))
        p[at] = rng.choice([0, 1, 2, rng.random(), 5e-324, LARGEST, p.max(), p[at] / 2])
        t.update(at, p[at])
        assert t.largest == p.max() and t.smallest == min(p[p > 0], default=np.inf)
    check(t, p)
    with pytest.raises(AttributeError, match='smallest=True'):
        SumTree(3).smallest


def test_extreme_priorities():
    "The largest allowed at every leaf, the smallest there is, minus zero"
    t = filled(np.full(5000, LARGEST))
    assert np.isfinite(t.total) and t.find([0, t.total * 0.9999999, t.total]).tolist() == [
        0,
        4999,
        4999,
    ]
    t = filled(np.full(70, 5e-324))
    assert (
        t.total == 70 * 5e-324
        and t.find(np.arange(71) * 5e-324).tolist() == [*range(70), 69]
        and t.smallest == 5e-324
    )
    t = filled(np.array([-0.0, 3, -0.0]))
    assert t.total == 3 and t.find([0, -0.0, 3]).tolist() == [1] * 3 and t.smallest == 3
    t.update(1, -0.0)
    assert t.total == t.largest == 0 and t.smallest == np.inf


# ---- refusals ----

NAN, INF = float('nan'), float('inf')
REFUSED = [
    ([0, 12], [1, 1], IndexError, 'index at place 1; got 12; expected 0 to 11'),
    ([3, -1], [1, 1], IndexError, 'index at place 1; got -1;'),
    (-13, 1, IndexError, 'got -13'),
    ([0, 1, 2, 3], [1, NAN, -1, INF], ValueError, 'place 1, for index 1; got nan'),
    ([0, 1, 99, 2], [1, 1, 1, NAN], IndexError, 'place 2; got 99'),
    ([5, 6, 99], [1, -1, 1], ValueError, 'place 1, for index 6; got -1.0'),
    ([7, 4], [INF, 1], ValueError, 'place 0, for index 7; got inf'),
    (4, -INF, ValueError, 'got -inf'),
    ([4, 4, 4], [1, 2, 1e299], ValueError, r'place 2, for index 4; got 1e\+299'),
    ([0, 1], NAN, ValueError, 'place 0'),
    ([[1, 2], [3, 12]], [[1, 1], [1, 1]], IndexError, 'place 3; got 12'),
    (2**40, 1, IndexError, 'got 1099511627776'),
    (2**32, 1, IndexError, 'got 4294967296'),
    (np.uint64(2**63 + 5), 1, IndexError, 'got 9223372036854775813'),
    ([0, 1], [1, 2, 3], ValueError, r'got \[3\]; expected \[2\]'),
    (0, [1], ValueError, 'priorities'),
    ([[0, 1]], [1, 2], ValueError, 'priorities'),
    ([0, 1], [1], ValueError, 'priorities'),
    ([], [1], ValueError, 'priorities'),
    ([0.5], [1], TypeError, 'integers'),
    ([1.0], [1], TypeError, 'integers'),
    ([True, False], [1, 1], TypeError, 'integers'),
    (['1'], 1, TypeError, 'integers'),
    (None, 1, TypeError, 'integers'),
]


@pytest.mark.parametrize('idx,p,error,words', REFUSED)
def test_what_is_refused_changes_nothing(idx, p, error, words):
    "The first offender is named, by place, index and value; no bit of the tree is another one afterwards"
    t = filled(np.arange(12.0))
    before = [bits(a) for a in (t.nodes, t._peaks, t._lows)]
    with pytest.raises(error, match=words):
        t.update(idx, p)
    assert before == [bits(a) for a in (t.nodes, t._peaks, t._lows)]


@pytest.mark.parametrize('capacity', [0, -1, 2**31, 2.5, '3', None, True, 3.0])
def test_impossible_capacities(capacity):
    with pytest.raises(
        ValueError, match='SumTree: capacity; got .*; expected a whole number, 1 to 2147483647'
    ):
        SumTree(capacity)


@pytest.mark.parametrize(
    'idx,error',
    [
        (12, IndexError),
        (-1, IndexError),
        ([0, 12], IndexError),
        ([[0], [-1]], IndexError),
        (2**63, IndexError),
        (1.0, TypeError),
        ([0.5], TypeError),
        (True, TypeError),
        (np.ones(12, bool), TypeError),
        (None, TypeError),
    ],
)
def test_getitem_refuses(idx, error):
    with pytest.raises(error):
        filled(np.ones(12))[idx]


def test_find_and_sample_refuse():
    t = filled(np.ones(3))
    for mass, words in (
        (-1, 'got -1.0'),
        ([1, NAN, -1], 'got nan'),
        ([[1, 2], [-5e-324, -2]], 'got -5e-324'),
        (-INF, 'got -inf'),
    ):
        with pytest.raises(ValueError, match=words):
            t.find(mass)
    for f in (
        lambda: SumTree(3).find(0),
        lambda: SumTree(3).sample(2, np.random.default_rng(0)),
        lambda: SumTree(3).find([1, 2]),
    ):
        with pytest.raises(ValueError, match='all priorities are 0'):
            f()


# ---- shapes ----


def test_shapes_and_dtypes():
    "Scalars give numbers, arrays give arrays of their shape, of any integer dtype and layout, read-only ones too; nothing stays nothing"
    p = np.arange(1.0, 25)
    t = filled(p)
    assert (
        type(t[3]) is float
        and type(t.find(2.5)) is int
        and t[np.int8(3)] == t[3] == 4
        and t.find(2.5) == 1
    )
    assert (
        len(t) == 24
        and t[5:2].shape == (0,)
        and t[-3:].tolist() == [22, 23, 24]
        and t[::-5].tolist() == p[::-5].tolist()
    )
    for dtype in 'bBhHiIlLqQ':
        grid = np.arange(24, dtype=dtype).reshape(4, 6)
        for a in (
            grid,
            grid.T,
            grid[::2, ::-1],
            np.asfortranarray(grid),
            grid.astype(grid.dtype.newbyteorder()),
        ):
            assert t[a].shape == a.shape and (t[a] == p[a]).all()
            u = new(24)
            u.update(a, np.asfortranarray(p[a]))
            q = np.zeros(24)
            q[a] = p[a]
            check(u, q)
    for empty in [], np.empty((0, 3)), np.empty((2, 0), int):
        t.update(empty, 7.0)
        t.update(empty, np.empty(np.shape(empty)))
        assert (
            t[empty].shape == np.shape(empty)
            and t.find(empty).shape == np.shape(empty)
            and t.find(empty).dtype == np.int64
        )
    darts = np.arange(0, 300, 0.5).reshape(2, 3, 100)
    assert t.find(darts).tolist() == np.searchsorted(
        np.cumsum(p), darts, side='right'
    ).tolist() and t.find(darts[:, ::-1].T).shape == (100, 3, 2)
    fixed, again = np.arange(3), darts.copy()
    fixed.flags.writeable = darts.flags.writeable = False
    t.update(fixed, fixed)
    t.find(darts)
    assert (darts == again).all() and t[fixed].tolist() == [0, 1, 2] and t.find(0) == 1
    slice_ = t[2:5]
    slice_[:] = 99
    listed = t[[2, 3]]
    listed[:] = 99
    check(t, np.concatenate([[0, 1, 2], p[3:]]))


# ---- darts ----


@cases(150)
@given(capacities, st.integers(0, 2**32), st.sampled_from([0.01, 0.3, 1]))
def test_story_of_darts_on_whole_numbers(capacity, seed, share):
    "Sums are exact, so every dart finds what numpy's running sum says: on, just below and between all edges"
    rng = np.random.default_rng(seed)
    p = rng.integers(1, rng.choice([2, 10, 10**6]), capacity) * (rng.random(capacity) < share) * 1.0
    p[rng.integers(capacity)] = 1
    t, ends = filled(p), np.cumsum(p)
    darts = np.concatenate([[0], ends[:-1], np.nextafter(ends, 0), rng.random(100) * ends[-1]])
    darts = darts[darts < ends[-1]]
    assert t.find(darts).tolist() == np.searchsorted(ends, darts, side='right').tolist()
    assert (
        t.find([ends[-1], ends[-1] * 2, INF]).tolist() == [np.flatnonzero(p)[-1]] * 3
        and t.find(0) == np.flatnonzero(p)[0]
    )


@cases(300)
@given(
    capacities,
    st.integers(0, 2**32),
    st.sampled_from([(-3, 3), (-12, 12), (-320, 290), (-323, -300), (280, 298)]),
    st.sampled_from([0.02, 0.3, 1]),
)
def test_story_of_darts_whatever_the_rounding(capacity, seed, orders, share):
    "Nothing of priority 0, nothing outside, never out of order; within rounding of its piece; what has a trillionth of the mass is found in its middle, the last one at the end"
    rng = np.random.default_rng(seed)
    p = np.minimum(10 ** rng.uniform(*orders, capacity), LARGEST) * (rng.random(capacity) < share)
    p[rng.integers(capacity)] = 10.0 ** orders[1] * 0.99
    t, ends = filled(p), np.cumsum(p)
    darts = np.concatenate(
        [
            ends,
            np.nextafter(ends, 0),
            np.nextafter(ends, INF),
            rng.random(300) * t.total,
            [0, -0.0, t.total, np.nextafter(t.total, 0), INF, 5e-324],
        ]
    )
    darts = np.sort(np.abs(darts))
    found = t.find(darts)
    assert (
        0 <= found.min()
        and found.max() < capacity
        and (p[found] > 0).all()
        and (np.diff(found) >= 0).all()
    )
    loose = t.total * 1e-12 + 1e-320
    inside = darts < t.total
    assert (ends[found] >= darts - loose)[inside].all() and (
        (ends - p)[found] <= darts + loose
    ).all()
    large = np.flatnonzero(p > 1e-11 * t.total + 1e-318)
    assert t.find((ends - p / 2)[large]).tolist() == large.tolist()
    if p[np.flatnonzero(p)[-1]] > loose * 10:
        assert t.find(t.total) == np.flatnonzero(p)[-1]


@pytest.mark.parametrize('n', SIZES)
def test_each_index_alone_and_the_last(n):
    "Only one index has a priority: every dart finds it, first and last one included"
    t = new(n)
    for i in {0, n - 1, n // 2, n - 2 if n > 1 else 0}:
        t.update(i, 0.1)
        assert (
            set(t.find([0, 0.05, np.nextafter(0.1, 0), 0.1, 7]).tolist()) == {i}
            and t.largest == t.smallest == t.total == 0.1
        )
        t.update(i, 0)


# ---- draws ----


def fair(counts, mean, upper=False):
    "Chi-square of counts; what is rare is put together"
    often = mean >= 5
    counts, mean = ([*x[often], x[~often].sum()] if (~often).any() else x for x in (counts, mean))
    p = chi2.sf(sum((c - m) ** 2 / max(m, 1e-12) for c, m in zip(counts, mean)), len(counts) - 1)
    return p > SURE and (upper or p < 1 - SURE)


@pytest.mark.parametrize('n,N', [(1, 5), (4, 30), (32, 30), (64, 1000)])
@pytest.mark.parametrize('stratified', [True, False])
def test_draws_are_in_proportion(n, N, stratified):
    "Over six orders of magnitude; independent draws scatter as a multinomial's do, stratified ones no more"
    rng = np.random.default_rng(n)
    p = 10 ** rng.uniform(-4, 2, N)
    p[::7] = 0
    t, times = filled(p), 60_000 // n
    drawn = [t.sample(n, rng, stratified) for _ in range(times)]
    idx = np.stack([d[0] for d in drawn])
    assert (
        idx.dtype == np.int64
        and (np.stack([d[1] for d in drawn]) == p[idx]).all()
        and (p[idx] > 0).all()
    )
    assert fair(
        np.bincount(idx.ravel(), minlength=N), p / p.sum() * n * times, stratified and n > 1
    )


@pytest.mark.parametrize('n', [1, 2, 7, 256])
def test_one_draw_from_each_part(n):
    "Draw i of a stratified batch lies in part i of the mass, and moves about in it"
    rng, p = np.random.default_rng(n), np.random.default_rng(0).integers(0, 5, 999) * 1.0
    t, ends = filled(p), np.cumsum(p)
    idx = np.stack([t.sample(n, rng)[0] for _ in range(300)])
    low, high = np.arange(n) / n * ends[-1], (np.arange(n) + 1) / n * ends[-1]
    assert (ends[idx] > low - 1e-9).all() and ((ends - p)[idx] < high + 1e-9).all()
    assert (ends[idx].min(0) <= low + 0.05 * (high - low) + 5).all() and (
        (ends - p)[idx].max(0) >= high - 0.05 * (high - low) - 5
    ).all()


def test_draws_repeat_with_a_generator_only():
    t = filled(np.random.default_rng(0).random(1000))
    for stratified in True, False:
        a, b, c = (t.sample(50, np.random.default_rng(s), stratified) for s in (3, 3, 4))
        assert (
            bits(a[0]) == bits(b[0]) and bits(a[1]) == bits(b[1]) and a[0].tolist() != c[0].tolist()
        )
        assert (
            t.sample(50, None, stratified)[0].tolist() != t.sample(50, None, stratified)[0].tolist()
        )
    rng = np.random.default_rng(3)
    assert t.sample(5, rng)[0].tolist() != t.sample(5, rng)[0].tolist()  # it goes on


@pytest.mark.parametrize('stratified', [True, False])
def test_a_batch_of_none(stratified):
    "Empty, or refused in words"
    try:
        idx, p = filled(np.ones(3)).sample(0, np.random.default_rng(0), stratified)
    except ValueError:
        return
    assert idx.tolist() == p.tolist() == []
