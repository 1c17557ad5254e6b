"""`RankTree` against a sorted list, after stories that try to make its shelves run out."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fastrl_replay.memory.ranktree import RankTree
from strategies import cases

# odd ones, and those around multiples of what a shelf holds (64, or 48 after a refill),
# of a bay (16), of indices for a shelf (21)
SIZES = [1, 2, 3, 15, 16, 17, 21, 42, 47, 48, 49, 63, 64, 65, 84, 128, 129, 336, 999, 1344, 5000]
capacities = st.sampled_from(SIZES) | st.integers(1, 5000)


class Sorted:
    "A tree and what it should be: priorities, and numpy's sort"

    def __init__(self, capacity):
        self.tree = RankTree(capacity)
        self.p, self.here = np.zeros(capacity), np.zeros(capacity, bool)

    def update(self, idx, p):
        self.tree.update(idx, p)
        idx = np.asarray(idx, int)
        self.here[idx], self.p[idx] = True, p

    def remove(self, idx):
        self.tree.remove(idx)
        self.here[np.asarray(idx, int)] = False

    def order(self):
        there = np.flatnonzero(self.here)
        return there[np.argsort(-self.p[there], kind='stable')]

    def check(self):
        order, t = self.order(), self.tree
        ranks = np.arange(1, len(order) + 1)
        assert len(t) == len(order)
        assert t.select(ranks).tolist() == order.tolist()
        assert t.rank(order).tolist() == ranks.tolist()
        assert (t[order] == self.p[order]).all()


# ---- stories ----


def values(rng, n, how):
    "Priorities in some order or other"
    x = np.sort(rng.normal(size=n)) * 10.0 ** rng.integers(-300, 300)
    return dict(
        ascending=x,
        descending=x[::-1],
        random=rng.permutation(x),
        equal=np.full(n, rng.choice([1, 0.0, -0.0, -7, 1e308])),
        few=rng.integers(-1, 2, n) * 1.0,
        signs=rng.choice([0.0, -0.0, 5e-324, -5e-324], n),
        clustered=rng.integers(3) + rng.random(n) * 1e-9,
    )[how]


HOW = 'ascending', 'descending', 'random', 'equal', 'few', 'signs', 'clustered'
DO = 'update', 'fill', 'one by one', 'thin', 'empty', 'stride', 'cut', 'between', 'twice', 'head'


def act(s, do, how, seed):
    "One step of a story"
    rng, capacity, order = np.random.default_rng(seed), len(s.p), s.order()
    n = int(rng.integers(1, capacity + 1))
    if do == 'update':
        s.update(rng.integers(capacity, size=n), values(rng, n, how))
    elif do == 'twice':
        s.update(rng.integers(max(1, n // 20), size=n), values(rng, n, how))
    elif do == 'fill':
        s.update(rng.permutation(capacity), values(rng, capacity, how))
    elif do == 'one by one':
        for i, p in zip(rng.permutation(capacity)[:100].tolist(), values(rng, capacity, how)):
            s.update([i], p)
    elif do == 'thin':
        s.remove(order[rng.random(len(order)) < 0.95])
    elif do == 'empty':
        s.remove(rng.permutation(order))
    elif do == 'stride':
        s.remove(order[np.arange(len(order)) % rng.integers(2, 70) != 0])
    elif do == 'cut':
        first = int(rng.integers(len(order) + 1))
        s.remove(order[first : first + n])
    elif do == 'between' and len(order):  # many into one gap
        at, absent = s.p[order[rng.integers(len(order))]], np.flatnonzero(~s.here)
        s.update(absent, at + np.sort(rng.random(len(absent))) * 1e-3 * abs(at))
    elif do == 'head' and len(order):  # all of them overtake
        n = min(n, len(order))
        s.update(order[::-1][:n], s.p[order].max() / 2 + np.arange(n))


steps = st.tuples(st.sampled_from(DO), st.sampled_from(HOW), st.integers(0, 2**32))


@cases(200)
@given(capacities, st.lists(steps, min_size=1, max_size=10))
def test_story_of_updates_and_removals(capacity, story):
    s = Sorted(capacity)
    for step in story:
        act(s, *step)
        s.check()


@pytest.mark.parametrize('capacity', [65, 336, 1344, 5000])
def test_story_of_shelves_that_run_out(capacity):
    """One thing stays of each shelf, and all that are gone come to one place.

    No shelf is given back, so after some turns all are in use and are refilled."""
    rng, s = np.random.default_rng(1), Sorted(capacity)
    s.update(range(capacity), np.arange(capacity) * -1.0)
    for turn in range(30):
        order = s.order()
        s.remove(order[np.arange(len(order)) % 32 > 0])
        absent, size = np.flatnonzero(~s.here), int(rng.choice([8, 40, 9999]))
        step = 1 if turn % 2 else 1e-6
        p = s.p[s.here].min(initial=0.0) - step * np.arange(1, len(absent) + 1)
        for first in range(0, len(absent), size):
            s.update(absent[first : first + size], p[first : first + size])
        s.check()


@pytest.mark.parametrize('capacity', [65, 200, 1000])
@pytest.mark.parametrize('order', ['up', 'down', 'any', 'equal'])
def test_story_of_one_gap(capacity, order):
    "All that comes goes to one place, one by one or at once"
    for size in 1, 5, 9999:
        rng, s, half = np.random.default_rng(size), Sorted(capacity), capacity // 2
        s.update(np.arange(half), np.arange(half) * 1.0)
        gap = half // 3 + rng.random(capacity - half) * 0.5
        if order == 'equal':
            gap[:] = gap[0]
        elif order != 'any':
            gap = np.sort(gap)[:: 1 if order == 'up' else -1]
        for first in range(0, len(gap), size):
            here = gap[first : first + size]
            s.update(half + first + np.arange(len(here)), here)
        s.check()


@pytest.mark.slow
def test_a_million():
    "With many equals, moved by batches, thinned to a thousandth and filled again"
    n, rng = 1_000_000, np.random.default_rng(0)
    s = Sorted(n)
    s.update(rng.permutation(n), rng.integers(0, 5000, n) * 1.0)
    for _ in range(200):
        s.update(rng.integers(n, size=256), rng.exponential(1000, 256))
    s.check()
    gone = rng.permutation(n)[:-1000]
    s.remove(gone)
    s.check()
    s.update(np.sort(gone), 7.0)
    s.check()


# ---- refusals and shapes ----


@pytest.mark.parametrize(
    'call, error, says',
    [
        (lambda t: t.update(2**32, 1), IndexError, 'got 4294967296'),
        (lambda t: t.update(10, -np.inf), ValueError, 'index 10, is out of range; got -inf'),
        (lambda t: t.update([0, 1], [1, 2, 3]), ValueError, r'got \[3\]; expected \[2\]'),
        (lambda t: t.update([True], 1), TypeError, 'integers'),
        (lambda t: t.remove([0, 10]), KeyError, 'index 10 is not in the tree'),
        (lambda t: t.remove(-1), IndexError, 'got -1'),
        (lambda t: t.rank([[0], [10]]), KeyError, 'index 10'),
        (lambda t: t.rank(0.5), TypeError, 'integers'),
        (lambda t: t[[0, 12]], IndexError, 'got 12'),
        (lambda t: t[10], KeyError, 'index 10'),
    ],
)
def test_a_refused_call_changes_nothing(call, error, says):
    "The first offender is named"
    s = Sorted(12)
    s.update(range(10), np.arange(10.0) % 4)
    with pytest.raises(error, match=says):
        call(s.tree)
    s.update([11, 10], 3.0)
    s.check()


@pytest.mark.parametrize('capacity', [0, 2**31, 2.5, '3', None, True])
def test_impossible_capacities(capacity):
    with pytest.raises(ValueError, match='RankTree: capacity; got .*; expected an integer'):
        RankTree(capacity)


def test_shapes_and_dtypes():
    "Scalars give numbers, arrays give arrays of their shape, of any integer dtype and layout"
    p = np.random.default_rng(0).permutation(24) * 1.0
    t = RankTree(24)
    t.update(range(24), p)
    ranks, order = np.argsort(np.argsort(-p)) + 1, np.argsort(-p)
    assert type(t.rank(3)) is type(t.select(3)) is int
    assert type(t[3]) is float
    assert 23 in t and 24 not in t and -1 not in t
    for dtype in 'bHiQ':
        grid = np.arange(24, dtype=dtype).reshape(4, 6)
        for a in grid, grid.T, grid[::2, ::-1], grid.astype(grid.dtype.newbyteorder()):
            assert t.rank(a).tolist() == ranks[a].tolist()
            assert t.select(a + 1).tolist() == order[a].tolist()
            assert t[a].tolist() == p[a].tolist()
            u = RankTree(24)
            u.update(a, np.asfortranarray(p[a]))
            assert len(u) == a.size
            u.remove(a.T)
            assert len(u) == 0
    for empty in [], np.empty((0, 3)):
        t.update(empty, 7.0)
        t.remove(empty)
        assert t.rank(empty).shape == t.select(empty).shape == t[empty].shape == np.shape(empty)
