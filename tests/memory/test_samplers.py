"""Samplers and their random numbers.

Each promised distribution, by chi-square and a plain dict; draws that continue bit for bit."""

import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import chi2

from fastrl_replay.all import *
from fastrl_replay.memory.draws import random_bits, random_seed
from fastrl_replay.memory.sumtree import LARGEST
from fastrl_replay.testing import through_file
from strategies import bits, cases

# Seeds are fixed, so each test passes always or never.
# One fair sampler in 10,000 would miss this on either side.
SURE = 1e-4


def sampler(n, seed=0, first=0, replacement=False):
    "A sampler that holds keys first, …, first+n-1"
    s = Uniform(seed, replacement)
    if n:
        s.added(np.array([first, first + n - 1]))  # all keys would fill 16 GB
    return s


def draws(s, n, times):
    return np.stack([s.sample(n)[0] for _ in range(times)])


def fair(counts, scale=1.0):
    """Return whether counts of equally likely things are as even as chance makes them.

    Neither less nor more even; `scale`: the variance as a part of a multinomial's."""
    counts = np.asarray(counts).ravel()
    mean = counts.sum() / len(counts)
    p = chi2.sf(((counts - mean) ** 2 / mean).sum() / scale, len(counts) - 1)
    return SURE < p < 1 - SURE


# ---- uniform draws ----

# n of N: below, at and above the half that decides how to draw without replacement, and the ends
SIZES = [
    (1, 2),
    (5, 100),
    (50, 100),
    (51, 100),
    (99, 100),
    (3, 7),
    (4, 7),
    (500, 1000),
    (501, 1000),
]


@pytest.mark.parametrize('n, N', SIZES)
def test_every_key_is_as_likely(n, N):
    batches = draws(sampler(N, seed=N + n), n, max(2000, 20 * N // n))
    assert all(len(np.unique(b)) == n for b in batches[:200])
    assert fair(np.bincount(batches.ravel(), minlength=N), (1 - n / N) * N / (N - 1))
    batches = draws(sampler(N, seed=N + n, replacement=True), n, max(2000, 20 * N // n))
    assert fair(np.bincount(batches.ravel(), minlength=N))


@pytest.mark.parametrize('n, N', [(4, 4), (3, 6), (4, 6), (2, 8), (1, 6)])
def test_every_order_is_as_likely(n, N):
    batches = draws(sampler(N, seed=10 * n + N), n, 20_000)
    number = {p: i for i, p in enumerate(permutations(range(N), n))}
    assert fair(np.bincount([number[tuple(b)] for b in batches.tolist()], minlength=len(number)))


@pytest.mark.parametrize('n, N', [(1, 5), (2, 5), (3, 5)])
@pytest.mark.parametrize('replacement', [False, True])
def test_batches_are_independent(n, N, replacement):
    batches = draws(sampler(N, seed=n + N, replacement=replacement), n, 20_000)
    for lag in 1, 2:
        for a, b in (0, 0), (-1, 0):
            assert fair(np.bincount(batches[:-lag, a] * N + batches[lag:, b], minlength=N * N))
    if replacement and n > 1:
        assert fair(np.bincount(batches[:, 0] * N + batches[:, 1], minlength=N * N))


@pytest.mark.parametrize('N, groups', [(3 * 2**29, 3), (2**31 - 1, 7)])
@pytest.mark.parametrize('replacement', [False, True])
def test_draws_from_huge_memories_are_even(N, groups, replacement):
    "32 random bits are no multiple of 3·2^29: keys 2, 5, 8, … could come 3/4 as often as others"
    batches = draws(sampler(N, seed=5, replacement=replacement), 64, 1000)
    assert 0 <= batches.min() and batches.max() < N
    assert fair(np.bincount(batches.ravel() % groups, minlength=groups))
    assert fair(np.bincount(batches.ravel() * 64 // N, minlength=64))


@pytest.mark.parametrize('first', [1, 2**31, 2**32 - 3, 2**62])
def test_keys_may_be_of_any_size(first):
    for n, replacement in (1, False), (6, False), (20, True):
        keys, p = sampler(7, 3, first, replacement).sample(n)
        plain, _ = sampler(7, 3, 0, replacement).sample(n)
        assert (keys - first).tolist() == plain.tolist()
        assert p.tolist() == [1 / 7] * n


def test_too_few_keys_are_an_error_that_counts_them():
    for N, n, replacement in (0, 1, False), (3, 4, False), (0, 5, True):
        s = sampler(N, replacement=replacement)
        before = s.state_dict()
        need = 1 if replacement else n
        with pytest.raises(NotEnoughRows, match=f'got {N}; expected at least {need}'):
            s.sample(n)
        assert s.state_dict() == before


@cases(100)
@given(
    blocks=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=20),
    max_sz=st.integers(1, 12),
    replacement=st.booleans(),
    stop=st.integers(0, 20),
)
def test_draws_are_of_keys_that_are_there(blocks, max_sz, replacement, stop):
    "Distinct if promised; saved anywhere, draws continue"
    s, end = Uniform(4, replacement).fresh(capacity=max_sz), 0
    twin = s
    for i, (size, n) in enumerate(blocks):
        if i == stop:
            twin = Uniform(None, replacement).fresh(capacity=max_sz)
            twin.load_state_dict(through_file(s.state_dict()))
        first, end = end, end + size
        oldest = max(0, end - max_sz)
        for x in {s, twin} if size else ():
            x.added(np.arange(max(first, oldest), end))
        assert len(s) == end - oldest
        if not n or len(s) < (1 if replacement else n):
            continue
        drawn = [x.sample(n) for x in dict.fromkeys([s, twin])]
        keys, p = drawn[0]
        assert keys.tolist() == drawn[-1][0].tolist()
        assert oldest <= keys.min() and keys.max() < end
        assert replacement or len({*keys.tolist()}) == n
        assert p.tolist() == [1 / len(s)] * n


# ---- random numbers ----


def stream(seed, n=1 << 15, start=0):
    return np.array([random_bits(np.uint64(seed), i) for i in range(start, start + n)], np.uint64)


def test_numbers_are_those_of_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(x) for x in stream(1234567, 3)] == published
    assert stream(7, 5, 100).tolist() == stream(7, 105)[100:].tolist()
    assert len(np.unique(stream(7, 1000, 2**52))) == 1000


def test_seeds_are_distinct_and_repeat():
    seeds = [int(random_seed(s)) for s in range(10_000)] + [int(random_seed()) for _ in range(10)]
    assert len(set(seeds)) == len(seeds)
    assert random_seed(3) == random_seed(np.int64(3)) == seeds[3]
    batches = {tuple(sampler(10**6, s).sample(8)[0].tolist()) for s in [*range(50), None, None]}
    assert len(batches) == 52


# ---- priorities ----


class Plain:
    "What a prioritized sampler should be: a dict of keys and priorities"

    def __init__(self, kind, capacity, alpha, eps, ever):
        self.kind, self.capacity, self.alpha, self.eps = kind, capacity, alpha, eps
        self.ever, self.p, self.top = ever, {}, 1.0

    def worth(self, td):
        return (abs(float(td)) + self.eps) ** (self.alpha if self.kind is Proportional else 1)

    def _set(self, keys, p):
        self.p.update(zip(keys, p))
        if self.ever:
            self.top = max(self.top, *self.p.values(), 0)

    def added(self, keys, td=None):
        "New keys, one at a time, which can be drawn at once; what was in their slots is gone"
        for i, key in enumerate(keys):
            self.forget(key + 1 - self.capacity)
            new = self.top if self.ever else max(self.p.values(), default=0) or 1.0
            self._set([key], [new if td is None else self.worth(td[i])])

    def forget(self, oldest):
        self.p = {k: x for k, x in self.p.items() if k >= oldest}

    def update(self, keys, td):
        self._set(keys, [self.worth(x) for x in td])

    def line(self):
        "Keys in the order in which they lie on the line, and the probability of each"
        if self.kind is Ranked:
            keys = sorted(self.p, key=lambda k: (-self.p[k], k % self.capacity))
            mass = np.arange(1.0, len(keys) + 1) ** -self.alpha
        elif any(self.p.values()):
            keys = sorted(self.p, key=lambda k: k % self.capacity)
            mass = np.array([self.p[k] for k in keys])
        else:
            keys = sorted(self.p, key=lambda k: k % self.capacity)
            mass = np.ones(len(keys))
        return np.array(keys, int), mass / max(mass.sum(), 1e-300)

    def probabilities(self):
        keys, p = self.line()
        return p[np.argsort(keys)]


def agree(s, plain):
    "Check keys, probabilities and priorities"
    assert len(s) == len(plain.p)
    if len(s):
        assert (s.first, s.end) == (min(plain.p), max(plain.p) + 1)
    p = plain.probabilities()
    np.testing.assert_allclose(s.probabilities(), p, rtol=1e-11)
    if len(s):
        assert np.isclose(s.least, min(p[p > 0]), rtol=1e-11)
    assert s.keys.tolist() == sorted(plain.p)
    want = [plain.p[k] for k in sorted(plain.p)]
    np.testing.assert_allclose(s.kept(), want, rtol=1e-12)
    if plain.ever:
        assert np.isclose(s.state_dict()['largest_ever'], plain.top, rtol=1e-12)


def darts_hit(s, plain, n):
    """Draw, and check that draw i is the key in whose piece of the line the i-th dart sticks.

    If stratified, one dart is in each part."""
    seed, count = np.uint64(s.state_dict()['seed']), s.state_dict()['count']
    keys, p = s.sample(n)
    darts = np.array([int(random_bits(seed, count + i)) >> 11 for i in range(n)]) * 2.0**-53
    if s.stratified:
        darts = (darts + np.arange(n)) / n
    order, mass = plain.line()
    place = {k: i for i, k in enumerate(order.tolist())}
    at, ends = np.array([place[k] for k in keys.tolist()], int), np.cumsum(mass)
    assert (mass[at] > 0).all()
    assert (ends[at] >= darts - 1e-9).all()
    assert ((ends - mass)[at] <= darts + 1e-9).all()
    np.testing.assert_allclose(p, mass[at], rtol=1e-11)
    assert s.state_dict()['count'] == count + n
    return keys, p


def make(kind, capacity, alpha=0.6, eps=1e-6, seed=0, **kw):
    return kind(capacity, alpha, eps, seed, **kw)


ACTS = 'added', 'added', 'update', 'update', 'sample', 'save', 'given', 'forget'


@pytest.mark.parametrize('kind', [Proportional, Ranked])
@cases(200)
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
    """Whatever is added, evicted, learned and drawn, the sampler agrees with the dict.

    Restored twins continue to the bit."""
    options = dict(alpha=alpha, eps=eps, stratified=stratified, max_ever=ever)
    alive, end = [make(kind, capacity, seed=7, **options)], start
    plain = Plain(kind, capacity, alpha, eps, ever)
    for do, seed in story:
        rng = np.random.default_rng(seed)
        if do in ('added', 'given'):
            keys = np.arange(end, end + min(rng.choice([1, 2, rng.integers(1, 99)]), capacity))
            end += len(keys)
            td = rng.choice([1.0, 10 ** rng.uniform(-6, 6), 0.0]) * rng.integers(-3, 4, len(keys))
            td = td if do == 'given' else None
            for s in alive:
                s.added(keys)
                s.update(keys, td)
            plain.added(keys.tolist(), td)
        elif do == 'forget':
            oldest = int(rng.integers(min(plain.p, default=end), end + 1))
            for s in alive:
                s.forget(oldest)
            plain.forget(oldest)
        elif do == 'save':
            twin = make(kind, capacity, seed=None, **options)
            twin.load_state_dict(through_file(alive[-1].state_dict()))
            alive = [*alive, twin][-3:]
        elif plain.p and do == 'sample':
            n = int(rng.integers(0, 3 * capacity + 1))
            keys, p = darts_hit(alive[0], plain, n)
            for s in alive[1:]:
                again = s.sample(n)
                assert [bits(x) for x in again] == [bits(keys), bits(p)]
        elif plain.p:
            size = int(rng.choice([0, 1, 5, rng.integers(3 * capacity)]))
            keys = rng.choice(sorted(plain.p), size=size)
            td = 10 ** rng.uniform(-6, 6) * rng.choice([rng.normal(size=size), np.zeros(size)])
            for s in alive:
                s.update(keys, td)
            plain.update(keys.tolist(), td.tolist())
        for s in alive:
            agree(s, plain)


@pytest.mark.parametrize('kind', [Proportional, Ranked])
def test_the_largest_priority_there_can_be(kind):
    s = make(kind, 40, alpha=1, eps=0)
    s.added(np.arange(40))
    s.update(np.arange(40), np.full(40, 1e308))
    assert s.kept().tolist() == [LARGEST] * 40
    assert np.isclose(s.probabilities().sum(), 1)
    assert len(s.sample(100)[0]) == 100


@pytest.mark.slow
def test_stories_again_with_bounds_checked(tmp_path):
    "With kernels that look at every place before they use it"
    env = {**os.environ, 'NUMBA_BOUNDSCHECK': '1', 'NUMBA_CACHE_DIR': str(tmp_path)}
    files = [Path(__file__).with_name(f'test_{x}.py') for x in ('sumtree', 'ranktree', 'samplers')]
    command = [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider']
    command += ['-k', 'story or shapes or draws', *map(str, files)]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=600)
    assert not done.returncode, done.stdout


# ---- samplers of one's own that are wrong ----


class Gives(Sampler):
    "Draws keys 0, 1, …, or whatever is wrong with them"

    def __init__(self, wrong):
        self.wrong = wrong
        super().__init__(0)

    def sample(self, n):
        return self.wrong(np.arange(n), np.full(n, 0.1))

    def update(self, keys, td=None):
        "All keys are drawn"


def replays_with(wrong):
    "Filled replays that draw by this sampler"
    kw = dict(bs=4, max_sz=40, sampler=Gives(wrong))
    made = dict(
        uniform=ExperienceReplay(**kw),
        errors=PrioritizedReplay(**kw),
        sequences=SequenceReplay(**kw, length=2, overlap=0, burn_in=0),
    )
    other = ExperienceReplay(bs=4, max_sz=40, seed=0)
    for replay in *made.values(), other:
        for block in scripted_steps([script(50)], 20):
            replay.add(block)
    made['mixture'] = Mixture(dict(a=made['uniform'], b=other), bs=8)
    return made


WRONG = {
    'keys only': (lambda k, p: k, 'sample returned a wrong type'),
    'nothing': (lambda k, p: None, 'sample returned a wrong type; got NoneType'),
    'keys of floats': (lambda k, p: (k * 1.0, p), 'sample returned wrong keys; got float64'),
    'fewer keys': (lambda k, p: (k[1:], p), r'.*got int64 \[3\]; expected integers \[4\]'),
    'keys of the future': (lambda k, p: (k + 10**6, p), '.* not in the buffer; got 1000000'),
    'negative keys': (lambda k, p: (k - 1, p), '.* not in the buffer; got -1'),
    'zero': (lambda k, p: (k, p * 0), '.*key 0; got 0.0; expected more than 0, at most 1'),
    'NaN': (lambda k, p: (k, p * np.nan), '.*key 0; got nan'),
    'priorities': (lambda k, p: (k, p * 30), '.*key 0; got 3.0'),
    'fewer probabilities': (lambda k, p: (k, p[1:]), 'sample returned a wrong type; got tuple'),
    'no probabilities': (lambda k, p: (k, None), '.*key 0; got nan'),
}


@pytest.mark.parametrize('name', WRONG)
def test_a_sampler_that_draws_nonsense_is_named(name):
    wrong, says = WRONG[name]
    for replay in replays_with(wrong).values():
        with pytest.raises((ArgumentError, ArgumentTypeError), match=rf'Gives\.sample: {says}'):
            replay.sample()
        assert not replay.batches


def test_a_sampler_may_give_one_probability_or_arrays_that_it_keeps():
    kept = np.array([0.1, 0.2, 0.3, 0.4])
    for p in 0.1, np.float64(0.1), kept, kept.tolist():
        replay = replays_with(lambda k, _: (k.tolist(), p))['errors']
        for _ in range(2):
            weights = (np.broadcast_to(p, 4) / 0.1) ** -0.4
            assert np.allclose(replay.sample().weight, weights)
    assert kept.tolist() == [0.1, 0.2, 0.3, 0.4]
