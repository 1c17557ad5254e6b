"""`RankTree` against a sorted list, and its shelves against what they promise, after stories that try to make them run out."""

import numpy as np, pytest
from hypothesis import given, strategies as st

from fastrl_replay.memory import ranktree
from fastrl_replay.memory.ranktree import SHELF, RankTree
from strategies import cases
from test_sumtree import fenced

# odd ones, and those around multiples of what a shelf holds (64), of thin neighbours (48), of a bay (16), of indices for a shelf (21)
SIZES = [
    1,
    2,
    3,
    15,
    16,
    17,
    20,
    21,
    22,
    39,
    40,
    41,
    42,
    47,
    48,
    49,
    63,
    64,
    65,
    80,
    84,
    96,
    105,
    127,
    128,
    129,
    147,
    168,
    169,
    192,
    256,
    320,
    336,
    337,
    480,
    640,
    999,
    1344,
    2688,
    5000,
]
capacities = st.sampled_from(SIZES) | st.integers(1, 5000)


def new(capacity):
    "A tree whose kernels can't write beside its arrays unnoticed"
    t = RankTree(capacity)
    t._tree, t.fences = zip(*[fenced(a) for a in t._tree])
    return t


class Sorted:
    "What the tree should be: priorities, times of birth, and numpy's sort"

    def __init__(self, capacity):
        self.p, self.born, self.here, self.clock = (
            np.zeros(capacity),
            np.zeros(capacity, int),
            np.zeros(capacity, bool),
            0,
        )

    def update(self, idx, p):
        first, at = np.unique(idx, return_index=True)
        come = idx[np.sort(at[~self.here[first]])]
        self.born[come], self.clock = self.clock + np.arange(len(come)), self.clock + len(come)
        self.here[idx], self.p[idx] = True, p

    def remove(self, idx):
        self.here[idx] = False

    def order(self):
        there = np.flatnonzero(self.here)
        return there[np.lexsort((self.born[there], -self.p[there]))]


def same(t, s):
    "Does the tree say what the sorted list says, of every one?"
    order = s.order()
    assert (
        len(t) == len(order) and t.select(np.arange(1, len(order) + 1)).tolist() == order.tolist()
    )
    assert (
        t.rank(order).tolist() == list(range(1, len(order) + 1)) and (t[order] == s.p[order]).all()
    )
    sound(t)


def sound(t):
    "What holds inside between any two calls"
    prio, who, labels, label_ages, slots, slot_of, free, counts, starts, where, ages = t._tree
    used, n = np.flatnonzero(slots >= 0), len(slot_of)
    assert sorted(slots[used].tolist() + free[: free[-1]].tolist()) == list(range(n)), (
        'shelves are in use or free'
    )
    assert (
        slots[0] >= 0
        and (slot_of[slots[used]] == used).all()
        and (slots[slots < 0] == -1).all()
        and 2 * len(used) <= len(slots)
    )
    c = counts[: len(slots)]
    assert c.min() >= 0 and c.max() <= SHELF and not c[slots < 0].any()
    for a, b, e in zip(starts, starts[1:], starts[2:]):
        sums = np.add.reduceat(counts[a:b], np.arange(0, b - a, 16))
        assert (
            counts[b : b + len(sums)].tolist() == sums.tolist()
            and not counts[b + len(sums) : e].any()
        ), 'counts'
    follows = np.searchsorted(used, np.arange(len(slots)))  # the next one in use, itself included
    l, a = np.append(labels[used], -np.inf)[follows], np.append(label_ages[used], 2**62)[follows]
    assert (labels == l).all() and (label_ages == a).all(), (
        'an empty slot carries the label of the next one in use'
    )
    assert labels[0] == np.inf and label_ages[0] == -1

    def ascending(p, age):
        return bool(((p[:-1] > p[1:]) | ((p[:-1] == p[1:]) & (age[:-1] < age[1:]))).all())

    assert ascending(labels[used], label_ages[used]), 'labels'
    shelf, slot = np.repeat(slots[used], c[used]), np.repeat(used, c[used])
    place = (
        shelf.astype(int) * SHELF
        + np.arange(len(shelf))
        - np.repeat(np.cumsum(c[used]) - c[used], c[used])
    )
    idx, p = who[place], prio[place]
    assert (
        len(np.unique(idx)) == len(idx) == (where >= 0).sum()
        and (where[idx] == shelf).all()
        and where.min(initial=-1) >= -1
    ), 'where'
    assert ascending(p, ages[idx]), 'order'
    assert ((p < labels[slot]) | ((p == labels[slot]) & (ages[idx] >= label_ages[slot]))).all(), (
        'nothing stands before its label'
    )
    l, a = np.append(labels, -np.inf)[slot + 1], np.append(label_ages, 2**62)[slot + 1]
    assert ((p > l) | ((p == l) & (ages[idx] < a))).all(), 'nothing stands after the next label'
    assert all(stand() for stand in getattr(t, 'fences', ())), 'a kernel wrote beside its array'


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
        around=rng.permutation(np.where(np.arange(n) % 2, -1.0, 1.0) * np.arange(n)),
        huge=rng.choice([1.7e308, -1.7e308, 1e308, -1e308], n) * rng.random(n),
    )[how]


HOW = 'ascending', 'descending', 'random', 'equal', 'few', 'signs', 'clustered', 'around', 'huge'
DO = (
    'update',
    'fill',
    'one by one',
    'thin',
    'empty',
    'stride',
    'cut',
    'between',
    'twice',
    'head',
    'tail',
)


def act(t, s, do, how, seed):
    "One step of a story, in the tree and in the sorted list"
    rng, capacity, order = np.random.default_rng(seed), len(s.p), s.order()
    n = int(rng.integers(1, capacity + 1))

    def put(idx, p):
        idx = np.asarray(idx, int)
        t.update(idx, p)
        s.update(idx, p)

    def take(idx):
        t.remove(idx)
        s.remove(np.asarray(idx, int))

    if do == 'update':
        idx = rng.integers(capacity, size=n)
        put(idx, values(rng, n, how))
    elif do == 'twice':
        idx = rng.integers(max(1, n // 20), size=n)
        put(idx, values(rng, n, how))
    elif do == 'fill':
        put(rng.permutation(capacity), values(rng, capacity, how))
    elif do == 'one by one':
        for i, p in zip(rng.permutation(capacity)[:300].tolist(), values(rng, capacity, how)):
            put([i], p)
    elif do == 'thin':
        take(order[rng.random(len(order)) < 0.95])
    elif do == 'empty':
        take(rng.permutation(order))
    elif do == 'stride':
        take(order[np.arange(len(order)) % rng.integers(2, 70) != 0])  # a few stay on each shelf
    elif do == 'cut':
        a = int(rng.integers(len(order) + 1))
        take(order[a : a + n][:: rng.choice([1, -1])])
    elif do == 'between' and len(order):  # many into one gap
        at, absent = s.p[order[rng.integers(len(order))]], np.flatnonzero(~s.here)
        put(
            absent,
            at
            if rng.random() < 0.5
            else at + np.sort(rng.random(len(absent)))[:: rng.choice([1, -1])] * 1e-3 * abs(at),
        )
    elif do in ('head', 'tail') and len(order):  # all of them overtake, or fall back
        p = (
            s.p[order].max() / 2 + np.arange(n)
            if do == 'head'
            else s.p[order].min() / 2 - np.arange(n)
        )
        put((order if do == 'tail' else order[::-1])[:n], p[: len(order)])


steps = st.tuples(st.sampled_from(DO), st.sampled_from(HOW), st.integers(0, 2**32))


@cases(200)
@given(capacities, st.lists(steps, min_size=1, max_size=10))
def test_story_of_updates_and_removals(capacity, story):
    "Whatever comes, changes and goes, in whatever order: ranks are a sorted list's, and the shelves are sound"
    t, s = new(capacity), Sorted(capacity)
    for step in story:
        act(t, s, *step)
        same(t, s)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(40))
def test_story_of_long_searches(seed):
    "The same at random, for longer"
    rng = np.random.default_rng(seed)
    for _ in range(25):
        capacity = int(rng.choice([rng.choice(SIZES), rng.integers(1, 5001), rng.integers(1, 400)]))
        t, s = new(capacity), Sorted(capacity)
        for _ in range(30):
            act(t, s, str(rng.choice(DO)), str(rng.choice(HOW)), int(rng.integers(2**32)))
            same(t, s)


@pytest.mark.parametrize('how', HOW)
@pytest.mark.parametrize('capacity', [1, 21, 48, 64, 65, 129, 336, 1344, 4999])
def test_story_of_filling_and_thinning(capacity, how):
    "Full, nearly empty, full again elsewhere: in blocks of every size, five times over, in opposite orders"
    t, s, rng = new(capacity), Sorted(capacity), np.random.default_rng(capacity)
    for turn in range(5):
        p, order = values(rng, capacity, how), rng.permutation(capacity)
        for a in range(0, capacity, size := int(rng.choice([7, 64, 300, 5000]))):
            idx = order[a : a + size]
            t.update(idx, p[a : a + size] - turn)
            s.update(idx, p[a : a + size] - turn)
        same(t, s)
        gone = s.order()
        gone = rng.permutation(gone)[:-2] if turn % 2 else gone[np.arange(len(gone)) % 25 > 0]
        t.remove(gone)
        s.remove(gone)
        same(t, s)


# ---- shelves never run out ----


def starve(t, s, rng, step):
    """One round of an enemy who sees the shelves: every second of the full ones keeps a single thing while its neighbours have too many to be joined with it;
    then those are thinned to where they just aren't looked at; what was won fills new shelves at one place"""
    who, slots, counts = (t._tree[i] for i in (1, 4, 7))
    full = [
        who[slots[x] * SHELF : slots[x] * SHELF + counts[x]].copy()
        for x in np.flatnonzero(slots >= 0)
        if counts[x] >= 48
    ]
    for gone in [x[1:] for x in full[1::2]] + [x[24:] for x in full[::2]]:
        t.remove(gone)
        s.remove(gone)
    absent, p, free = np.flatnonzero(~s.here), s.p[s.here], []
    start = p.min(initial=0.0) if rng.random() < 0.8 or not len(p) else float(rng.choice(p))
    p = start - np.arange(1, len(absent) + 1.0) * (1 if step % 2 else 1e-6)
    for a in range(0, len(absent), size := int(rng.choice([1, 8, 40, 9999]))):
        free.append(int(t._tree[6][-1]))
        t.update(absent[a : a + size], p[a : a + size])
        s.update(absent[a : a + size], p[a : a + size])
    return min(free, default=10**9)


def starved(capacity, seed, rounds):
    "The fewest shelves that were ever free"
    rng, t, s, least = np.random.default_rng(seed), new(capacity), Sorted(capacity), 10**9
    for step in range(rounds):
        least = min(least, starve(t, s, rng, step))
        same(t, s)
        if seed % 2 and rng.random() < 0.2:
            act(t, s, str(rng.choice(DO)), str(rng.choice(HOW)), int(rng.integers(2**32)))
            same(t, s)
    return least


@pytest.mark.parametrize('capacity', [65, 100, 130, 169, 256, 336, 500, 1344, 2688, 5000])
def test_story_of_shelves_that_run_out(capacity):
    "From 500 on the enemy's rounds do use up the pool (else this would test nothing); then thin neighbours make room"
    least = min(starved(capacity, seed, 12) for seed in range(4))
    assert least == 0 or capacity < 500


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(60))
def test_story_of_long_starvation(seed):
    rng = np.random.default_rng(seed)
    for _ in range(6):
        starved(int(rng.integers(1, 3000)), int(rng.integers(2**32)), 25)


@pytest.mark.parametrize('capacity', [65, 128, 200, 1000, 4000])
def test_story_of_one_gap(capacity):
    "All that comes goes to one place: in the middle of a full row, before it, after it, one by one and all at once"
    for seed in range(12):
        rng, t, s = np.random.default_rng(seed), new(capacity), Sorted(capacity)
        half = rng.permutation(capacity)
        a, b = half[: capacity // 2], half[capacity // 2 :]
        p = np.arange(len(a)) * 1.0
        t.update(a, p)
        s.update(a, p)
        gap = (rng.integers(len(a)) if seed % 3 else (-2, len(a) + 1)[seed % 2]) + rng.random(
            len(b)
        ) * 0.5
        gap = (
            gap
            if seed % 4 == 0
            else np.sort(gap)
            if seed % 4 == 1
            else np.sort(gap)[::-1]
            if seed % 4 == 2
            else np.full(len(b), gap[0])
        )
        for i in range(0, len(b), size := int(rng.choice([1, 5, 70, 9999]))):
            t.update(b[i : i + size], gap[i : i + size])
            s.update(b[i : i + size], gap[i : i + size])
        same(t, s)


@pytest.mark.slow
def test_a_million():
    "In random order with many equals, moved by batches, thinned to a thousandth and filled again: a full sort agrees"
    n, rng = 1_000_000, np.random.default_rng(0)
    t, s = new(n), Sorted(n)

    def put(idx, p):
        t.update(idx, p)
        s.update(idx, p)

    put(rng.permutation(n), rng.integers(0, 5000, n) * 1.0)
    same(t, s)
    for _ in range(200):
        put(rng.integers(n, size=256), rng.exponential(1000, 256))
    same(t, s)
    gone = rng.permutation(n)[:-1000]
    t.remove(gone)
    s.remove(gone)
    same(t, s)
    put(np.sort(gone), 7.0)
    put(np.arange(0, n, 3), np.arange(0, n, 3) * -1.0)
    same(t, s)


# ---- ties and ages ----


def test_older_ones_come_first():
    "Age is when an index came in: a new priority keeps it, also away and back; to be removed and come again renews it; in one update, the place in it"
    t = new(9)
    t.update([5, 2, 8], 1.0)
    t.update([0, 5], 1.0)
    assert t.select([1, 2, 3, 4]).tolist() == [5, 2, 8, 0]
    t.update([5, 2], [9, -9])
    t.update([2, 5], 1.0)
    assert t.select([1, 2, 3, 4]).tolist() == [5, 2, 8, 0]
    t.remove([5, 8])
    t.update([8, 5], 1.0)
    assert t.select([1, 2, 3, 4]).tolist() == [2, 0, 8, 5]
    t.update([7, 6, 7], [3.0, 1, 1])  # 7 came first, though its second priority counts
    assert t.select(range(1, 7)).tolist() == [2, 0, 8, 5, 7, 6]
    t.update([0, 2], [-0.0, 0.0])
    assert t.select([5, 6]).tolist() == [2, 0] and t.rank([2, 0]).tolist() == [
        5,
        6,
    ]  # plus and minus zero are equal


@pytest.mark.parametrize('n', [63, 64, 65, 200, 3000])
def test_equals_of_many_shelves_stand_by_age(n):
    "All equal, from then on each as they come and go: the order is that of the births"
    rng, t, s = np.random.default_rng(n), new(n), Sorted(n)
    for _ in range(30):
        idx = rng.permutation(n)[: rng.integers(1, n + 1)]
        t.update(idx, 4.0)
        s.update(idx, 4.0)
        gone = rng.permutation(np.flatnonzero(s.here))[: rng.integers(0, n)]
        if rng.random() < 0.6:
            t.remove(gone)
            s.remove(gone)
        if rng.random() < 0.3 and s.here.any():
            i = rng.permutation(np.flatnonzero(s.here))[:9]
            t.update(i, 5.0)
            t.update(i, 4.0)
        same(t, s)
        assert (np.diff(s.born[t.select(np.arange(1, len(t) + 1))]) > 0).all()


@pytest.mark.parametrize('n', [3, 64, 65, 700])
def test_the_last_of_duplicates_wins(n):
    "New ones and old ones, many times in one batch, often through shelves that fill and are divided meanwhile"
    for seed in range(20):
        rng, t, s = np.random.default_rng(seed), new(n), Sorted(n)
        for _ in range(4):
            idx, p = (
                rng.integers(n, size=5 * n),
                rng.integers(rng.choice([3, 10**6]), size=5 * n) * 1.0,
            )
            t.update(idx, p)
            s.update(idx, p)
            same(t, s)
            gone = rng.permutation(np.flatnonzero(s.here))[::2]
            t.remove(np.concatenate([gone, gone]))
            s.remove(gone)
            same(t, s)


# ---- refusals and shapes ----

NAN, INF = float('nan'), float('inf')
REFUSED = [
    (lambda t: t.update([0, 12], 1), IndexError, 'place 1; got 12; expected 0 to 11'),
    (lambda t: t.update([3, -1, 99], [1, 2, 3]), IndexError, 'place 1; got -1'),
    (lambda t: t.update([0, 9, 2], [1, NAN, INF]), ValueError, 'place 1, for index 9; got nan'),
    (lambda t: t.update(10, -INF), ValueError, 'index 10; got -inf'),
    (lambda t: t.update([1, 2], NAN), ValueError, 'place 0'),
    (lambda t: t.update([0, 1], [1, 2, 3]), ValueError, r'got \[3\]; expected \[2\]'),
    (lambda t: t.update(0, [1]), ValueError, 'priorities'),
    (lambda t: t.update([], [1]), ValueError, 'priorities'),
    (lambda t: t.update([[0, 1]], [1, 2]), ValueError, 'priorities'),
    (lambda t: t.update(1.5, 1), TypeError, 'integers'),
    (lambda t: t.update([True], 1), TypeError, 'integers'),
    (lambda t: t.update(2**32, 1), IndexError, 'got 4294967296'),
    (lambda t: t.update(np.uint64(2**63 + 5), 1), IndexError, 'got 9223372036854775813'),
    (lambda t: t.remove([0, 10]), KeyError, 'index 10 is not here'),
    (lambda t: t.remove([0, 12]), IndexError, 'place 1'),
    (lambda t: t.remove(-1), IndexError, 'got -1'),
    (lambda t: t.remove('a'), TypeError, 'integers'),
    (lambda t: t.rank(11), KeyError, 'index 11'),
    (lambda t: t.rank([[0], [10]]), KeyError, 'index 10'),
    (lambda t: t.rank(12), IndexError, 'got 12'),
    (lambda t: t.rank(0.5), TypeError, 'integers'),
    (lambda t: t[10], KeyError, 'index 10'),
    (lambda t: t[[0, 12]], IndexError, 'got 12'),
    (lambda t: t[0.0], TypeError, 'integers'),
    (lambda t: t.select(0), IndexError, 'got 0; expected 1 to 10'),
    (lambda t: t.select([1, 11, 0]), IndexError, 'got 11'),
    (lambda t: t.select(-1), IndexError, 'got -1'),
    (lambda t: t.select([[1], [2**40]]), IndexError, 'got'),
    (lambda t: t.select(1.0), TypeError, 'integers'),
    (lambda t: t.select([True]), TypeError, 'integers'),
]


@pytest.mark.parametrize('f,error,words', REFUSED)
def test_what_is_refused_changes_nothing(f, error, words):
    "The first offender is named; no array of the tree is another one afterwards, and the next age is the same"
    t = new(12)
    t.update(range(10), np.arange(10.0) % 4)
    before = [a.tobytes() for a in t._tree], t._age
    with pytest.raises(error, match=words):
        f(t)
    assert before == ([a.tobytes() for a in t._tree], t._age)


@pytest.mark.parametrize('capacity', [0, -1, 2**31, 2.5, '3', None, True])
def test_impossible_capacities(capacity):
    with pytest.raises(
        ValueError, match='RankTree: capacity; got .*; expected a whole number, 1 to 2147483647'
    ):
        RankTree(capacity)


def test_nothing_here():
    t = new(5)
    assert (
        len(t) == 0
        and 0 not in t
        and t.select([]).shape == (0,)
        and t.rank([]).shape == (0,)
        and t[[]].shape == (0,)
    )
    for f in (lambda: t.select(1), lambda: t.select([1])):
        with pytest.raises(IndexError, match='it is empty'):
            f()
    t.update([], 1.0)
    t.remove([])
    t.update(4, 1)
    t.remove(4)
    assert len(t) == 0 and 4 not in t
    same(t, Sorted(5))


def test_shapes_and_dtypes():
    "Scalars give numbers, arrays give arrays of their shape, of any integer dtype and layout, read-only ones too"
    t, p = new(24), np.random.default_rng(0).permutation(24) * 1.0
    t.update(range(24), p)
    ranks, order = np.argsort(np.argsort(-p)) + 1, np.argsort(-p)
    assert (
        type(t.rank(3)) is int
        and type(t.select(3)) is int
        and type(t[3]) is float
        and t[3] == p[3]
        and t.rank(np.uint8(3)) == ranks[3]
        and t.select(24) == order[23]
    )
    assert 23 in t and np.int64(0) in t and 24 not in t and -1 not in t and len(t) == 24
    for dtype in 'bBhHiIlLqQ':
        grid = np.arange(24, dtype=dtype).reshape(4, 6)
        for a in (
            grid,
            grid.T,
            grid[::2, ::-1],
            np.asfortranarray(grid),
            grid.astype(grid.dtype.newbyteorder()),
        ):
            assert (
                t.rank(a).tolist() == ranks[a].tolist()
                and t.select(a + 1).tolist() == order[a].tolist()
                and t[a].tolist() == p[a].tolist()
            )
            u = new(24)
            u.update(a, np.asfortranarray(p[a]))
            assert (
                len(u) == a.size
                and (u[a] == p[a]).all()
                and (np.diff(p[u.select(np.arange(1, a.size + 1))]) < 0).all()
            )
            u.remove(a.T)
            assert len(u) == 0
    for empty in [], np.empty((0, 3)), np.empty((2, 0), int):
        t.update(empty, 7.0)
        t.remove(empty)
        assert t.rank(empty).shape == t.select(empty).shape == t[empty].shape == np.shape(empty)
    fixed = np.arange(1, 4)
    fixed.flags.writeable = False
    assert (
        t.select(fixed).tolist() == order[:3].tolist()
        and t.rank(fixed).tolist() == ranks[1:4].tolist()
    )
    t.update(fixed, fixed * 100.0)
    t.remove(fixed[:1])
    assert fixed.tolist() == [1, 2, 3] and t.select([1, 2]).tolist() == [3, 2] and 1 not in t


@cases(100)
@given(
    st.integers(1, 300),
    st.lists(
        st.tuples(
            st.integers(0, 2**32),
            st.integers(0, 40),
            st.integers(0, 40),
            st.sampled_from([-1.0, 1.0, 5.0]),
        ),
        max_size=12,
    ),
)
def test_story_of_a_ring(capacity, story):
    "`_roll`: keys leave and come in slots, blocks as large as the ring among them; those that come get the largest priority left, or 1, or what is given"
    t, s, first, end = new(capacity), Sorted(capacity), 0, 0
    for seed, come, go, p in story:
        come = min(come, capacity)
        oldest = max(min(first + go, end), end + come - capacity)
        t._age = ranktree._roll(t._tree, capacity, first, oldest, end, end + come, p, t._age)
        s.remove(np.arange(first, oldest) % capacity)
        top = s.p[s.here].max(initial=0.0)
        s.update(np.arange(end, end + come) % capacity, p if p >= 0 else top if top > 0 else 1.0)
        first, end = oldest, end + come
        same(t, s)
        idx = np.random.default_rng(seed).permutation(np.arange(first, end) % capacity)[:20]
        x = np.random.default_rng(seed).integers(-2, 9, len(idx)) * (seed % 3 * 1.0)
        t.update(idx, x)
        s.update(idx, x)
        same(t, s)
