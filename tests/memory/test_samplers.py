"""Samplers and their random numbers: every distribution that is promised, held against chi-square and against a plain dict; and draws that continue to the bit."""

import os, subprocess, sys
from itertools import permutations
from pathlib import Path

import numpy as np, pytest
from hypothesis import given, strategies as st
from scipy.stats import binom, chi2

from fastrl_replay.steps.errors import ArgumentError, ArgumentTypeError, NotEnoughRows
from fastrl_replay.memory.draws import random_bits, random_seed
from fastrl_replay.memory.priorities import Proportional, Ranked, _ranks
from fastrl_replay.memory.samplers import Sampler, Uniform
from fastrl_replay.memory.sumtree import LARGEST
from fastrl_replay.testing import through_file
from strategies import bits, cases
import test_ranktree, test_sumtree

# Seeds are fixed, so each test passes always or never; one fair sampler in 10,000 would miss this on either side.
SURE = 1e-4


def sampler(n, seed=0, first=0, replacement=False):
    "A sampler that holds keys first, …, first+n-1"
    s = Uniform(seed, replacement)
    s.added(0, first + n, first)
    return s


def draws(s, n, times):
    return np.stack([s.sample(n)[0] for _ in range(times)])


def fair(counts, scale=1.0):
    "Are counts of equally likely things as even as chance would have them, neither less nor more? `scale`: variance as a part of a multinomial's"
    counts = np.asarray(counts).ravel()
    mean = counts.sum() / len(counts)
    x = ((counts - mean) ** 2 / mean).sum() / scale
    p = chi2.sf(x, len(counts) - 1)
    return SURE < p < 1 - SURE


# n of N: below and above the half that decides between the two ways to draw without replacement, at it, and at the ends
SIZES = [
    (1, 2),
    (1, 100),
    (5, 100),
    (30, 100),
    (50, 100),
    (51, 100),
    (70, 100),
    (99, 100),
    (1, 7),
    (3, 7),
    (4, 7),
    (6, 7),
    (64, 1000),
    (500, 1000),
    (501, 1000),
    (256, 65537),
]


@pytest.mark.parametrize('n,N', SIZES)
def test_every_key_is_as_likely_without_replacement(n, N):
    "Counts of N keys in batches of n distinct ones: variance is that of a binomial, N-1 degrees of freedom, as (1 - n/N)·N/(N-1) of a multinomial's"
    batches = draws(sampler(N, seed=N + n), n, max(2000, 20 * N // n))
    assert (
        all(len(np.unique(b)) == n for b in batches[:200])
        and batches.min() >= 0
        and batches.max() < N
    )
    assert fair(np.bincount(batches.ravel(), minlength=N), (1 - n / N) * N / (N - 1))


@pytest.mark.parametrize('n,N', [*SIZES, (200, 100), (100, 100), (1000, 3)])
def test_every_key_is_as_likely_with_replacement(n, N):
    batches = draws(sampler(N, seed=N + n, replacement=True), n, max(2000, 20 * N // n))
    assert (
        batches.min() >= 0 and batches.max() < N and fair(np.bincount(batches.ravel(), minlength=N))
    )


@pytest.mark.parametrize('places', [(0, 1), (0, -1), (-2, -1), (1, 0)])
@pytest.mark.parametrize('n,N', [(2, 7), (3, 7), (4, 7), (7, 7), (2, 4), (3, 4), (5, 20), (12, 20)])
def test_pairs_in_a_batch_are_as_likely(n, N, places):
    "Any two places of a batch hold any ordered pair of different keys equally often, and never one key twice"
    batches = draws(sampler(N, seed=n * N), n, 20_000)
    table = np.zeros((N, N), int)
    np.add.at(table, (batches[:, places[0]], batches[:, places[1]]), 1)
    assert not table.diagonal().any() and fair(table[~np.eye(N, dtype=bool)])


@pytest.mark.parametrize('n,N', [(1, 5), (2, 5), (3, 5), (2, 12), (7, 12)])
@pytest.mark.parametrize('replacement', [False, True])
def test_batches_are_independent(n, N, replacement):
    "A key of one batch says nothing of any key of the next ones; with replacement, nor of the same batch"
    batches = draws(sampler(N, seed=n + N, replacement=replacement), n, 20_000)
    for lag in 1, 2, 3:
        for a, b in (0, 0), (-1, 0), (0, -1):
            assert fair(np.bincount(batches[:-lag, a] * N + batches[lag:, b], minlength=N * N))
    if replacement and n > 1:
        assert fair(np.bincount(batches[:, 0] * N + batches[:, 1], minlength=N * N))


@pytest.mark.parametrize('n,N', [(4, 4), (3, 6), (4, 6), (2, 8), (3, 3), (5, 5), (1, 6)])
def test_every_order_is_as_likely(n, N):
    "All ordered batches of n out of N keys come up equally often"
    batches = draws(sampler(N, seed=10 * n + N), n, 30_000)
    number = {p: i for i, p in enumerate(permutations(range(N), n))}
    assert fair(np.bincount([number[tuple(b)] for b in batches.tolist()], minlength=len(number)))


@pytest.mark.parametrize('N,groups', [(3 * 2**29, 3), (5 * 2**28, 5), (2**31 - 1, 7)])
@pytest.mark.parametrize('n,replacement', [(64, False), (64, True)])
def test_draws_from_huge_memories_are_even(N, groups, n, replacement):
    "32 random bits are no multiple of 3·2^29: without drawing again, keys 2, 5, 8, … would come up 3/4 as often as the others"
    batches = draws(sampler(N, seed=5, replacement=replacement), n, 1000)
    assert 0 <= batches.min() and batches.max() < N
    assert fair(np.bincount(batches.ravel() % groups, minlength=groups)) and fair(
        np.bincount(batches.ravel() * 64 // N, minlength=64)
    )


@pytest.mark.parametrize('first', [0, 1, 1000, 2**31, 2**32 - 3, 2**40, 2**62])
@pytest.mark.parametrize(
    'n,replacement', [(1, False), (3, False), (6, False), (7, False), (20, True)]
)
def test_keys_may_be_of_any_size(first, n, replacement):
    "Keys are serial numbers for ever: the same draws whatever the first key"
    a, b = sampler(7, 3, first, replacement), sampler(7, 3, 0, replacement)
    for _ in range(50):
        (keys, p), (plain, q) = a.sample(n), b.sample(n)
        assert (
            keys.dtype == np.int64
            and (keys - first).tolist() == plain.tolist()
            and p.tolist() == q.tolist() == [1 / 7] * len(keys)
        )


@pytest.mark.parametrize('first', [5, 2**31 - 20])
def test_only_keys_that_were_added_are_drawn(first):
    "`added(5, 8)`: keys 5, 6, 7 can be drawn from now on, says the table of the interface"
    s = Uniform(0, replacement=True)
    s.added(first, first + 3)
    assert set(s.sample(60)[0].tolist()) <= {
        first,
        first + 1,
        first + 2,
    }  # was: keys 0 to 4, which were never added, are drawn (and from 2**32 on it never returns)


def test_all_of_them_and_one_of_one():
    "n == N is a permutation; one key is drawn whenever asked"
    for N in 1, 2, 3, 10, 257:
        assert all(sorted(b) == list(range(N)) for b in draws(sampler(N), N, 20).tolist())
    assert (
        sampler(1, first=9).sample(1)[0].tolist() == [9]
        and sampler(1, first=9, replacement=True).sample(4)[0].tolist() == [9] * 4
    )


@pytest.mark.parametrize(
    'N,n,replacement', [(0, 1, False), (0, 1, True), (3, 4, False), (0, 5, True)]
)
def test_too_few_keys_are_an_error_that_counts_them(N, n, replacement):
    s = sampler(N, replacement=replacement)
    before = s.state_dict()
    with pytest.raises(
        NotEnoughRows, match=f'got {N}; expected at least {1 if replacement else n}'
    ):
        s.sample(n)
    assert s.state_dict() == before


@pytest.mark.parametrize('N,replacement', [(0, False), (0, True), (3, False), (3, True)])
def test_no_keys_of_anything(N, replacement):
    "A batch of none is empty, or refused in words"
    try:
        keys, _ = sampler(N, replacement=replacement).sample(0)
    except ValueError:
        return
    except ZeroDivisionError as e:
        raise AssertionError(
            'a division by zero inside the kernel'
        ) from e  # was: for no keys in an empty memory
    assert keys.tolist() == []


def test_numpy_integers_count_too():
    "A batch size that was computed by numpy"
    assert (
        len(sampler(100).sample(np.int64(5))[0]) == 5
    )  # was: 'numpy.int64' object has no attribute 'bit_length'


# ---- a sampler beside a memory ----


@cases(300)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=20),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 20),
)
def test_draws_are_of_keys_that_are_there(blocks, max_sz, replacement, stop):
    "Whatever is added and evicted: keys are in memory, distinct where promised, the probability of each is 1/len; saved anywhere, draws continue"
    s, end, oldest = Uniform(4, replacement), 0, 0
    for i, (size, n) in enumerate(blocks):
        first, end = end, end + size
        oldest = max(0, end - max_sz)
        s.added(first, end, oldest)
        assert len(s) == end - oldest
        if i == stop:
            twin = Uniform(None, replacement)
            twin.load_state_dict(through_file(s.state_dict()))
            s = twin
            plain, again = _replayed(blocks[:i], max_sz, replacement), s.state_dict()
            assert again == {**plain, 'end': end, 'first': oldest}, 'draws so far decide the state'
        if n and (end - oldest >= n or (replacement and end > oldest)):
            keys, p = s.sample(n)
            assert (
                keys.min() >= oldest
                and keys.max() < end
                and p.tolist() == [1 / (end - oldest)] * n
                and (replacement or len(set(keys.tolist())) == n)
            )


def _replayed(blocks, max_sz, replacement):
    "The state after the same story without any saving"
    s, end, oldest = Uniform(4, replacement), 0, 0
    for size, n in blocks:
        first, end = end, end + size
        oldest = max(0, end - max_sz)
        s.added(first, end, oldest)
        if n and (end - oldest >= n or (replacement and end > oldest)):
            s.sample(n)
    return s.state_dict()


@pytest.mark.parametrize('replacement', [False, True])
@pytest.mark.parametrize('k', [0, 1, 5, 17])
def test_draws_continue_exactly(k, replacement):
    "Small, middle and large batches in turn, saved after k of them into a file: the other goes on with the same keys"
    sizes = [1, 30, 51, 100, 7, 64] * 5
    s = sampler(100, 9, 50, replacement)
    for n in sizes[:k]:
        s.sample(n)
    twin = Uniform(1, replacement)
    twin.load_state_dict(through_file(s.state_dict()))
    assert all(s.sample(n)[0].tolist() == twin.sample(n)[0].tolist() for n in sizes[k:])
    for x in s, twin:
        x.added(150, 200, 100)
    assert s.sample(20)[0].tolist() == twin.sample(20)[0].tolist() and min(s.sample(100)[0]) == 100


def test_small_batches_are_the_same_after_large_ones():
    "What is kept for speed does not show in the draws"
    a, b = sampler(10_000, 1), sampler(10_000, 1)
    b.sample(4000)
    b.load_state_dict(a.state_dict())
    assert a.sample(50)[0].tolist() == b.sample(50)[0].tolist()


@pytest.mark.parametrize('replacement', [False, True])
@pytest.mark.parametrize('n', [5, 50])
def test_eviction_leaves_the_rest_as_likely(n, replacement):
    "A memory that slides on between batches: each key is drawn equally often by its place"
    s = Uniform(3, replacement)
    places = []
    for i in range(4000):
        s.added(i * 7, (i + 1) * 7, max(0, (i - 9) * 7))
        if i >= 9:
            places.append(s.sample(n)[0] - (s.end - 70))
    assert fair(
        np.bincount(np.concatenate(places), minlength=70),
        1 if replacement else (1 - n / 70) * 70 / 69,
    )


# ---- random numbers ----


def stream(seed, n=1 << 15, start=0):
    return np.array([random_bits(np.uint64(seed), i) for i in range(start, start + n)], np.uint64)


BITS = {seed: stream(seed) for seed in (0, 1, 2**63, int(random_seed(0)), int(random_seed(1)))}


def even(ones, n):
    return SURE < binom.cdf(ones, n, 0.5) < 1 - SURE


@pytest.mark.parametrize('seed', BITS)
def test_bits_are_as_often_one_as_zero(seed):
    "Each of the 64 bits alone; each with the same bit of the next number; each with its neighbour in the same number"
    b = np.unpackbits(BITS[seed].view(np.uint8).reshape(-1, 8), axis=1)
    n, sure = len(b), SURE / 64
    for x in b, b[1:] ^ b[:-1], b[:, 1:] ^ b[:, :-1], b[2:] ^ b[:-2]:
        assert all(sure < binom.cdf(ones, len(x), 0.5) < 1 - sure for ones in x.sum(0))
    assert even(int(b.sum()), n * 64)


@pytest.mark.parametrize('seed', BITS)
def test_bytes_and_runs_are_even(seed):
    "All 256 bytes at each of 8 places; pairs of the top 4 bits of numbers in a row; runs of the top bit"
    x = BITS[seed]
    for place in x.view(np.uint8).reshape(-1, 8).T:
        assert fair(np.bincount(place, minlength=256))
    top = (x >> np.uint64(60)).astype(int)
    assert fair(np.bincount(top[1:] * 16 + top[:-1], minlength=256))
    runs = int((top[1:] // 8 != top[:-1] // 8).sum())
    assert even(runs, len(x) - 1)


def test_neighbouring_seeds_and_numbers_share_nothing():
    "About half the bits differ between neighbours, and no number comes twice"
    streams = [stream(random_seed(s), 2000) for s in range(20)]
    assert len(np.unique(np.concatenate(streams))) == 20 * 2000
    for a, b in zip(streams, streams[1:]):
        assert even(int(np.unpackbits((a ^ b).view(np.uint8)).sum()), 2000 * 64) and even(
            int(np.unpackbits((a[1:] ^ a[:-1]).view(np.uint8)).sum()), 1999 * 64
        )


def test_a_number_depends_on_seed_and_place_alone():
    "Far places too: the count of a sampler that runs for years"
    assert stream(7, 5, 100).tolist() == stream(7, 105)[100:].tolist()
    far = stream(7, 1000, 2**52)
    assert len(np.unique(far)) == 1000 and even(
        int(np.unpackbits(far.view(np.uint8)).sum()), 64_000
    )
    assert [int(x) for x in stream(1234567, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]  # published values


def test_seeds_are_distinct_and_repeat():
    "10,000 neighbouring seeds, and None several times, give as many different ones; the same seed gives the same, of any integer type"
    seeds = [int(random_seed(s)) for s in range(10_000)] + [int(random_seed()) for _ in range(10)]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**64 for s in seeds)
    assert even(
        int(np.unpackbits(np.array(seeds[:10_000], np.uint64).view(np.uint8)).sum()), 640_000
    )
    assert random_seed(3) == random_seed(np.int64(3)) == seeds[3] and random_seed(
        2**100
    ) == random_seed(2**100)


def test_samplers_with_other_seeds_draw_other_keys():
    batches = {tuple(sampler(10**6, s).sample(8)[0].tolist()) for s in range(200)} | {
        tuple(sampler(10**6, None).sample(8)[0].tolist()) for _ in range(20)
    }
    assert (
        len(batches) == 220
        and sampler(100, 5).sample(9)[0].tolist() == sampler(100, 5).sample(9)[0].tolist()
    )


# ---- priorities ----


class Plain:
    "What a prioritized sampler should be: a dict of keys and priorities"

    def __init__(self, kind, capacity, alpha, eps, ever):
        self.kind, self.capacity, self.alpha, self.eps, self.ever, self.p, self.top = (
            kind,
            capacity,
            alpha,
            eps,
            ever,
            {},
            1.0,
        )

    def worth(self, td):
        return (abs(float(td)) + self.eps) ** (self.alpha if self.kind is Proportional else 1)

    def _set(self, keys, p):
        for k, x in zip(keys, p):
            self.p[k] = x
        if self.ever:
            self.top = max(
                [self.top, *self.p.values()]
            )  # what a key had for a moment, as its own twin, doesn't count

    def added(self, first, end, oldest, p=None):
        oldest = max(oldest, end - self.capacity)
        self.p = {k: x for k, x in self.p.items() if k >= oldest}
        new = self.top if self.ever else max(self.p.values(), default=0) or 1.0
        self.p.update({k: new for k in range(max(first, oldest), end)})
        if p is not None:
            self._set(range(max(first, oldest), end), p[max(first, oldest) - first :])

    def update(self, keys, td):
        self._set(keys, [self.worth(x) for x in td])

    def line(self):
        "Keys in the order in which they lie on the line, and the probability of each"
        if self.kind is Ranked:
            keys = sorted(self.p, key=lambda k: (-self.p[k], k))
            mass = np.arange(1.0, len(keys) + 1) ** -self.alpha
        else:
            none = not any(self.p.values())
            keys = sorted(self.p, key=lambda k: k if none else k % self.capacity)
            mass = np.array([1.0 if none else self.p[k] for k in keys])
        return np.array(keys, int), mass / max(mass.sum(), 1e-300)

    def probabilities(self):
        keys, p = self.line()
        return p[np.argsort(keys)]


def insides(s):
    "All that a sampler's tree holds"
    return [
        bits(a)
        for a in (
            s.tree._tree if isinstance(s, Ranked) else (s.tree.nodes, s.tree._peaks, s.tree._lows)
        )
    ]


def agree(s, plain):
    "Keys, probabilities, priorities; and the tree is sound"
    assert len(s) == len(plain.p) and (
        not len(s) or (s.first, s.end) == (min(plain.p), max(plain.p) + 1)
    )
    p, q = s.probabilities(), plain.probabilities()
    np.testing.assert_allclose(p, q, rtol=1e-11)
    if len(s):
        assert np.isclose(s.least, min(q[q > 0]), rtol=1e-11)
    state = s.state_dict()
    np.testing.assert_allclose(
        state['priorities'].numpy(), [plain.p[k] for k in sorted(plain.p)], rtol=1e-12
    )
    if plain.ever:
        assert np.isclose(state['largest_ever'], plain.top, rtol=1e-12)
    if isinstance(s, Ranked):
        test_ranktree.sound(s.tree)
    else:
        test_sumtree.check(s.tree, s.tree[:])
    if isinstance(s, Proportional):
        there = np.zeros(s.capacity, bool)
        there[np.arange(s.first, s.end) % s.capacity] = True
        assert not s.tree[:][~there].any(), 'evicted keys lose their priorities'


def darts_hit(s, plain, n):
    "Draw, and see that draw i is the key in whose piece of the line the i-th dart sticks, one in each part if stratified; keys and probabilities"
    seed, count = np.uint64(s.state_dict()['seed']), s.state_dict()['count']
    keys, p = s.sample(n)
    x = np.array([int(random_bits(seed, count + i)) >> 11 for i in range(n)]) * 2.0**-53
    darts = (x + np.arange(n)) / n if s.stratified else x
    order, mass = plain.line()
    place = {k: i for i, k in enumerate(order.tolist())}
    at, ends = np.array([place[k] for k in keys.tolist()], int), np.cumsum(mass)
    assert (
        keys.dtype == np.int64
        and (mass[at] > 0).all()
        and (ends[at] >= darts - 1e-9).all()
        and ((ends - mass)[at] <= darts + 1e-9).all()
    )
    np.testing.assert_allclose(p, mass[at], rtol=1e-11)
    assert s.state_dict()['count'] == count + n
    return keys, p


def make(kind, capacity, alpha=0.6, eps=1e-6, seed=0, **kw):
    return kind(
        capacity, alpha, eps, seed, **kw, **({'least': True} if kind is Proportional else {})
    )


def fence(s):
    s.tree = (
        test_ranktree.new(s.capacity) if isinstance(s, Ranked) else test_sumtree.new(s.capacity)
    )
    return s


ACTS = 'added', 'added', 'update', 'update', 'sample', 'save', 'refused', 'given'


@pytest.mark.parametrize('kind', [Proportional, Ranked])
@cases(300)
@given(
    st.integers(1, 40),
    st.sampled_from([0, 0.3, 0.6, 1, 2]),
    st.sampled_from([0, 1e-6, 0.5]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 1, 39, 10**6, 2**40]),
    st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 2**32)), min_size=6, max_size=25),
)
def test_story_of_priorities(kind, capacity, alpha, eps, stratified, ever, start, story):
    "Whatever is added, evicted, learned and drawn: as the dict says; a refused update changes nothing, and restored twins go on beside their original to the bit"
    options = dict(alpha=alpha, eps=eps, stratified=stratified, max_ever=ever)
    alive, plain, end = (
        [fence(make(kind, capacity, seed=7, **options))],
        Plain(kind, capacity, alpha, eps, ever),
        start,
    )
    for do, seed in story:
        rng = np.random.default_rng(seed)
        if do in ('added', 'given'):
            first, end = end, end + int(rng.choice([0, 1, 2, rng.integers(2 * capacity + 2)]))
            oldest = int(
                rng.choice(
                    [
                        0,
                        min(plain.p, default=first),
                        rng.integers(min(plain.p, default=first), end + 1),
                    ]
                )
            )
            td = rng.choice([1.0, 10 ** rng.uniform(-6, 6), 0.0]) * rng.integers(-3, 4, end - first)
            p = (alive[0].priorities(td),) if do == 'given' else ()
            if p:
                np.testing.assert_allclose(p[0], [plain.worth(x) for x in td], rtol=1e-12)
            for s in alive:
                s.added(first, end, oldest, *p)
            plain.added(first, end, oldest, *p)
        elif do == 'save':
            twin = make(kind, capacity, seed=None, **options)
            twin.load_state_dict(through_file(alive[-1].state_dict()))
            alive = [*alive, twin][-3:]
        elif not plain.p:
            continue
        elif do == 'sample':
            n = int(rng.integers(0, 3 * capacity + 1))
            keys, p = darts_hit(alive[0], plain, n)
            for s in alive[1:]:
                again = s.sample(n)
                assert keys.tolist() == again[0].tolist() and p.tolist() == again[1].tolist(), (
                    'to the bit'
                )
        else:
            keys = rng.choice(
                sorted(plain.p), size=int(rng.choice([0, 1, 5, rng.integers(3 * capacity)]))
            )
            td = rng.choice([1.0, 10 ** rng.uniform(-6, 6)]) * rng.choice(
                [rng.normal(size=len(keys)), rng.integers(-3, 4, len(keys)), np.zeros(len(keys))]
            )
            if do == 'refused' and len(keys) and alpha:
                at, s = int(rng.integers(len(keys))), alive[0]
                td[at:] = rng.choice(
                    [
                        np.nan,
                        np.inf,
                        -np.inf,
                        *[1.1e298, 1.7e308][: 2 * (alpha >= 1 or kind is Ranked)],
                    ]
                )
                before, state = insides(s), s.state_dict()
                with (
                    pytest.raises(ValueError, match=f'{kind.__name__}: TD error at place {at};'),
                    np.errstate(over='ignore'),
                ):
                    s.update(keys, td)
                after = s.state_dict()
                assert (
                    before == insides(s)
                    and bits(state.pop('priorities')) == bits(after.pop('priorities'))
                    and state == after
                )
                continue
            if do == 'refused':
                continue
            for s in alive:
                s.update(keys, td)
            plain.update(keys.tolist(), td.tolist())
        for s in alive:
            agree(s, plain)


def prioritized(kind, td, first=0, **kw):
    "A sampler whose keys from `first` on have these TD errors"
    s = make(kind, len(td), **kw)
    s.added(first, first + len(td), first)
    s.update(np.arange(first, first + len(td)), np.asarray(td, float))
    return s


def test_darts_at_the_edges_of_ranks():
    "On, just below and just above each edge, at the end and beyond, for every number of keys: as numpy's search says, never a rank that isn't there"
    ends = np.cumsum(np.arange(1.0, 131) ** -0.7)
    for n in range(1, 131):
        darts = np.concatenate(
            [[0], ends[:n], np.nextafter(ends[:n], 0), np.nextafter(ends[:n], 9), [ends[n - 1] * 2]]
        )
        ranks = np.empty(len(darts), np.int64)
        _ranks(ends, n, darts, ranks)
        assert (
            ranks.tolist()
            == np.minimum(np.searchsorted(ends[:n], darts, side='right') + 1, n).tolist()
        )


@pytest.mark.parametrize('kind', [Proportional, Ranked])
def test_nothing_to_choose_by(kind):
    "All priorities 0, one key, no key, none drawn: defined"
    s = make(kind, 5, eps=0)
    assert s.probabilities().tolist() == [] and len(s) == 0 and 0 <= s.least <= 1
    before = s.state_dict()
    for n in 0, 1:
        with pytest.raises(NotEnoughRows, match=f'{kind.__name__}: keys to draw; got 0'):
            s.sample(n)
    assert s.state_dict()['count'] == before['count'] == 0
    s.added(13, 14, 13)
    for td in 0.0, 5.0, 1e-300:
        s.update(np.array([13]), np.array([td]))
        keys, p = s.sample(4)
        assert (
            keys.tolist() == [13] * 4
            and p.tolist() == [1] * 4 == s.probabilities().tolist() * 4
            and s.least == 1
        )
    s.added(14, 17, 13)
    s.update(np.arange(13, 17), np.zeros(4))
    if kind is Proportional:
        assert (
            s.probabilities().tolist() == [0.25] * 4
            and s.least == 0.25
            and s.sample(8)[1].tolist() == [0.25] * 8
        )
        assert s.sample(8)[0].tolist() == [13, 13, 14, 14, 15, 15, 16, 16]
        s.stratified = False
        assert fair(
            np.bincount(np.concatenate([s.sample(10)[0] for _ in range(3000)]) - 13, minlength=4)
        )
    else:
        np.testing.assert_allclose(
            s.probabilities(), np.arange(1, 5) ** -0.6 / sum(np.arange(1, 5) ** -0.6)
        )
    for x in s.sample(0):
        assert len(x) == 0
    s.added(17, 17, 17)  # all gone again
    with pytest.raises(NotEnoughRows):
        s.sample(1)
    s.added(17, 19, 17)
    assert len(s) == 2 and set(s.sample(50)[0].tolist()) == {17, 18}


@pytest.mark.parametrize('kind', [Proportional, Ranked])
def test_a_restored_sampler_of_much_goes_on_to_the_bit(kind):
    "3,000 keys, many of them equal, after eviction; saved twice, then both learn and draw"
    a, rng = make(kind, 3000, 0.7), np.random.default_rng(0)
    a.added(0, 2500)
    a.update(rng.integers(2500, size=4000), rng.integers(0, 50, 4000) * 0.1)
    a.added(2500, 4100, 1100)
    for k in range(3):
        b = make(kind, 3000, 0.7, seed=None)
        b.load_state_dict(through_file(a.state_dict()))
        for i in range(30):
            x, y = a.sample(64), b.sample(64)
            assert (
                all(bits(u) == bits(v) for u, v in zip(x, y))
                and bits(a.probabilities()) == bits(b.probabilities())
                and a.least == b.least
            )
            td = rng.integers(0, 50, 64) * 0.1
            for s in a, b:
                s.update(x[0], td)
                s.added(a.end if s is a else b.end, s.end + 5)
        assert (
            insides(a) == insides(b)
            if kind is Proportional
            else a.tree.select(np.arange(1, 3001)).tolist()
            == b.tree.select(np.arange(1, 3001)).tolist()
        )
        if k == 1:
            a = b


@pytest.mark.parametrize('kind', [Proportional, Ranked])
@pytest.mark.parametrize('alpha', [0, 0.5, 1])
@pytest.mark.parametrize('td', [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(kind, alpha, td):
    "Whatever alpha; in `update` and in `priorities`; the first one is named"
    s = prioritized(kind, [1, 2, 3], alpha=alpha)
    before = insides(s)
    for f in (
        lambda: s.update(np.array([2, 0, 1]), np.array([5.0, td, np.nan])),
        lambda: s.priorities([5.0, td, np.nan]),
    ):
        with pytest.raises(ValueError, match=f'place 1; got {td}'):
            f()
    assert before == insides(s)


@pytest.mark.parametrize('kind', [Proportional, Ranked, Uniform])
@pytest.mark.parametrize(
    'do',
    [lambda s: s.sample(np.int64(5)), lambda s: s.added(np.int64(9), np.int64(10), np.int64(1))],
    ids=['sample', 'added'],
)
def test_counts_of_numpy_can_be_saved(kind, do):
    "A batch size or keys that numpy computed leave a state that a stranger can read"
    s, twin = (
        (Uniform(0), Uniform(1)) if kind is Uniform else (make(kind, 9), make(kind, 9, seed=1))
    )
    s.added(0, 9)
    do(s)
    twin.load_state_dict(through_file(s.state_dict()))
    assert s.sample(9)[0].tolist() == twin.sample(9)[0].tolist()


@pytest.mark.parametrize('kind', [Proportional, Ranked])
@pytest.mark.parametrize(
    'options',
    [
        dict(alpha=-1),
        dict(alpha=np.nan),
        dict(alpha=np.inf),
        dict(eps=-1e-9),
        dict(eps=np.nan),
        dict(eps=np.inf),
        dict(capacity=0),
        dict(capacity=2.5),
    ],
)
def test_impossible_options(kind, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        kind(**{'capacity': 5, **options})


@pytest.mark.parametrize('kind', [Proportional, Ranked])
def test_the_largest_priority_there_can_be(kind):
    "At every key, and just above it: refused"
    s = prioritized(kind, [LARGEST] * 40, alpha=1, eps=0)
    assert np.isclose(s.probabilities().sum(), 1) and len(s.sample(100)[0]) == 100
    with pytest.raises(ValueError, match='place 0'):
        s.update(np.array([3]), np.array([np.nextafter(LARGEST, np.inf)]))
    s.added(40, 45, 5)
    assert s.state_dict()['priorities'].tolist() == [LARGEST] * 40


def test_uniform_says_its_probabilities():
    s = Uniform(0)
    assert s.probabilities().tolist() == [] and s.least == 1
    s.added(0, 10, 6)
    assert s.probabilities().tolist() == [0.25] * 4 and s.least == 0.25


@pytest.mark.slow
def test_stories_again_with_bounds_checked(tmp_path):
    "All stories of the trees and the samplers, with kernels that look at every place before they use it"
    env = {**os.environ, 'NUMBA_BOUNDSCHECK': '1', 'NUMBA_CACHE_DIR': str(tmp_path)}
    files = [
        str(Path(__file__).parent / f'test_{x}.py') for x in ('sumtree', 'ranktree', 'samplers')
    ]
    r = subprocess.run(
        [
            sys.executable,
            '-m',
            'pytest',
            '-q',
            '-x',
            '-p',
            'no:cacheprovider',
            '-k',
            'story or shapes or draws',
            *files,
        ],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert not r.returncode, r.stdout


# ---- samplers of one's own that are wrong ----


class Gives(Sampler):
    "Draws keys 0, 1, …, or whatever is wrong with them"

    def __init__(self, wrong):
        self.wrong = wrong
        super().__init__(0)

    def sample(self, n):
        return self.wrong(np.arange(n), np.full(n, 0.1))

    def use_places(self, capacity):
        self.end = capacity

    def insert(self, places):
        "All places are drawn"

    def remove(self, places):
        "All places are drawn"


def with_p(x, dtype=float):
    def wrong(keys, p):
        p = p.astype(dtype)
        p[1] = x
        return keys, p

    return wrong


WRONG = {
    'keys only': (lambda k, p: k, 'what it gives'),
    'keys only, a list': (lambda k, p: k.tolist(), 'what it gives'),
    'nothing': (lambda k, p: None, 'what it gives; got NoneType'),
    'three things': (lambda k, p: (k, p, p), 'what it gives; got tuple'),
    'ragged': (lambda k, p: ([[1], [2, 3]], p), 'what it gives'),
    'keys of floats': (lambda k, p: (k * 1.0, p), 'keys; got float64'),
    'a mask': (lambda k, p: (k > 0, p), 'keys; got bool'),
    'fewer keys': (lambda k, p: (k[1:], p), r'keys; got int64 \[3\]; expected whole numbers \[4\]'),
    'a column of keys': (lambda k, p: (k[:, None], p), r'keys; got int64 \[4, 1\]'),
    'keys of the future': (lambda k, p: (k + 10**6, p), 'a key that was not added; got 1000000'),
    'negative keys': (lambda k, p: (k - 1, p), 'a key that was not added; got -1'),
    '0': (with_p(0), 'the probability of key 1; got 0.0; expected more than 0, at most 1'),
    'negative': (with_p(-0.1), 'key 1; got -0.1'),
    'NaN': (with_p(np.nan), 'key 1; got nan'),
    'infinite': (with_p(np.inf), 'key 1; got inf'),
    'priorities': (with_p(3, np.int64), 'key 0; got 0.0'),
    'fewer probabilities': (lambda k, p: (k, p[1:]), r'probabilities; got float64 \[3\]'),
    'rows of them': (lambda k, p: (k, p[:, None]), r'probabilities; got float64 \[4, 1\]'),
    'no probabilities': (lambda k, p: (k, None), 'probabilities; got object'),
    'text': (lambda k, p: (k, p.astype(str)), 'probabilities; got <U'),
    'complex': (lambda k, p: (k, p * 1j), 'probabilities; got complex128'),
    'bools': (lambda k, p: (k, p > 0), 'probabilities; got bool'),
}


def replays_with(wrong):
    "Replays of all kinds, filled, that draw by this sampler"
    from fastrl_replay.replay.experience import ExperienceReplay
    from fastrl_replay.replay.mixture import Mixture
    from fastrl_replay.replay.prioritized import PrioritizedReplay
    from fastrl_replay.replay.sequences import SequenceReplay
    from fastrl_replay.testing import script, scripted_steps

    rows = scripted_steps([script(50)], 20)
    kw = dict(bs=4, max_sz=40, sampler=Gives(wrong))
    made = dict(
        uniform=ExperienceReplay(**kw),
        errors=PrioritizedReplay(**kw),
        sequences=SequenceReplay(**kw, length=2, overlap=0, burn_in=0),
        others=ExperienceReplay(bs=4, max_sz=40, seed=0),
    )
    for r in made.values():
        for block in rows:
            r.add(block)
    made['mixture'] = Mixture(dict(a=made['uniform'], b=made.pop('others')), bs=8)
    return made


@pytest.mark.parametrize('name', WRONG)
def test_a_sampler_that_draws_nonsense_is_named(name):
    "In replays of all kinds, uniform ones too; was: 'too many values to unpack', weights of NaN, or nothing. It changes nothing"
    wrong, words = WRONG[name]
    for kind, replay in replays_with(wrong).items():
        with pytest.raises(
            (ArgumentError, ArgumentTypeError),
            match=r'Gives\.sample: '
            + ('(the probability of )?' if words[:3] == 'key' else '')
            + words,
        ):
            replay.sample()
        assert not replay.batches and not getattr(replay, 'sampled', 0), kind


@pytest.mark.parametrize(
    'right',
    [
        lambda k, p: (k, 0.1),
        lambda k, p: [k.tolist(), p.tolist()],
        lambda k, p: (k.astype(np.uint8), p.astype(np.float32)),
        lambda k, p: (k, 1),
        lambda k, p: (k, np.float64(0.1)),
    ],
    ids=['one number', 'lists', 'small kinds', 'certain', 'one of numpy'],
)
def test_what_a_sampler_may_give(right):
    for kind, replay in replays_with(right).items():
        batch = replay.sample()
        assert (
            kind == 'mixture'
            or batch.index.tolist() == [i * (2 if kind == 'sequences' else 1) for i in range(4)]
            and batch.weight.tolist() == [1] * 4
        )


def test_probabilities_that_a_sampler_keeps_are_left_alone():
    "Weights are written into a copy; was: into the sampler's array, so that the next batch had others"
    p = np.array([0.1, 0.2, 0.3, 0.4])
    replay = replays_with(lambda k, _: (k, p))['errors']
    for _ in range(3):
        assert np.allclose(replay.sample().weight, (p / 0.1) ** -0.4) and p.tolist() == [
            0.1,
            0.2,
            0.3,
            0.4,
        ]


def test_a_place_without_a_sequence_is_named():
    replay = replays_with(lambda k, p: (k + len(replay), p))['sequences']
    with pytest.raises(KeyError, match='SequenceReplay: .*-1'):
        replay.sample()
