"""`Uniform` and its random numbers: every distribution that is promised, held against chi-square; and draws that continue to the bit."""
from itertools import permutations

import numpy as np, pytest
from hypothesis import given, strategies as st
from scipy.stats import binom, chi2

from fastrl_replay.core import NotEnoughRows
from fastrl_replay.memory.samplers import Uniform, random_bits, random_seed
from fastrl_replay.testing import through_file
from strategies import cases

# Seeds are fixed, so each test passes always or never; one fair sampler in 10,000 would miss this on either side.
SURE = 1e-4

def sampler(n, seed=0, first=0, replacement=False):
    "A sampler that holds keys first, …, first+n-1"
    s = Uniform(seed, replacement)
    s.added(0, first+n, first)
    return s

def draws(s, n, times): return np.stack([s.sample(n)[0] for _ in range(times)])

def fair(counts, scale=1.):
    "Are counts of equally likely things as even as chance would have them, neither less nor more? `scale`: variance as a part of a multinomial's"
    counts = np.asarray(counts).ravel()
    mean = counts.sum()/len(counts)
    x = ((counts-mean)**2/mean).sum()/scale
    p = chi2.sf(x, len(counts)-1)
    return SURE < p < 1-SURE

# n of N: below and above the half that decides between the two ways to draw without replacement, at it, and at the ends
SIZES = [(1,2), (1,100), (5,100), (30,100), (50,100), (51,100), (70,100), (99,100), (1,7), (3,7), (4,7), (6,7), (64,1000), (500,1000), (501,1000), (256,65537)]

@pytest.mark.parametrize('n,N', SIZES)
def test_every_key_is_as_likely_without_replacement(n, N):
    "Counts of N keys in batches of n distinct ones: variance is that of a binomial, N-1 degrees of freedom, as (1 - n/N)·N/(N-1) of a multinomial's"
    batches = draws(sampler(N, seed=N+n), n, max(2000, 20*N//n))
    assert all(len(np.unique(b)) == n for b in batches[:200]) and batches.min() >= 0 and batches.max() < N
    assert fair(np.bincount(batches.ravel(), minlength=N), (1-n/N)*N/(N-1))

@pytest.mark.parametrize('n,N', [*SIZES, (200,100), (100,100), (1000,3)])
def test_every_key_is_as_likely_with_replacement(n, N):
    batches = draws(sampler(N, seed=N+n, replacement=True), n, max(2000, 20*N//n))
    assert batches.min() >= 0 and batches.max() < N and fair(np.bincount(batches.ravel(), minlength=N))

@pytest.mark.parametrize('places', [(0,1), (0,-1), (-2,-1), (1,0)])
@pytest.mark.parametrize('n,N', [(2,7), (3,7), (4,7), (7,7), (2,4), (3,4), (5,20), (12,20)])
def test_pairs_in_a_batch_are_as_likely(n, N, places):
    "Any two places of a batch hold any ordered pair of different keys equally often, and never one key twice"
    batches = draws(sampler(N, seed=n*N), n, 20_000)
    table = np.zeros((N,N), int)
    np.add.at(table, (batches[:,places[0]], batches[:,places[1]]), 1)
    assert not table.diagonal().any() and fair(table[~np.eye(N, dtype=bool)])

@pytest.mark.parametrize('n,N', [(1,5), (2,5), (3,5), (2,12), (7,12)])
@pytest.mark.parametrize('replacement', [False, True])
def test_batches_are_independent(n, N, replacement):
    "A key of one batch says nothing of any key of the next ones; with replacement, nor of the same batch"
    batches = draws(sampler(N, seed=n+N, replacement=replacement), n, 20_000)
    for lag in 1,2,3: 
        for a,b in (0,0),(-1,0),(0,-1): assert fair(np.bincount(batches[:-lag,a]*N + batches[lag:,b], minlength=N*N))
    if replacement and n > 1: assert fair(np.bincount(batches[:,0]*N + batches[:,1], minlength=N*N))

@pytest.mark.parametrize('n,N', [(4,4), (3,6), (4,6), (2,8), (3,3), (5,5), (1,6)])
def test_every_order_is_as_likely(n, N):
    "All ordered batches of n out of N keys come up equally often"
    batches = draws(sampler(N, seed=10*n+N), n, 30_000)
    number = {p: i for i,p in enumerate(permutations(range(N), n))}
    assert fair(np.bincount([number[tuple(b)] for b in batches.tolist()], minlength=len(number)))

@pytest.mark.parametrize('N,groups', [(3*2**29, 3), (5*2**28, 5), (2**31-1, 7)])
@pytest.mark.parametrize('n,replacement', [(64,False), (64,True)])
def test_draws_from_huge_memories_are_even(N, groups, n, replacement):
    "32 random bits are no multiple of 3·2^29: without drawing again, keys 2, 5, 8, … would come up 3/4 as often as the others"
    batches = draws(sampler(N, seed=5, replacement=replacement), n, 1000)
    assert 0 <= batches.min() and batches.max() < N
    assert fair(np.bincount(batches.ravel() % groups, minlength=groups)) and fair(np.bincount(batches.ravel()*64//N, minlength=64))

@pytest.mark.parametrize('first', [0, 1, 1000, 2**31, 2**32-3, 2**40, 2**62])
@pytest.mark.parametrize('n,replacement', [(1,False), (3,False), (6,False), (7,False), (20,True)])
def test_keys_may_be_of_any_size(first, n, replacement):
    "Keys are serial numbers for ever: the same draws whatever the first key"
    a,b = sampler(7, 3, first, replacement),sampler(7, 3, 0, replacement)
    for _ in range(50):
        (keys,p),(plain,q) = a.sample(n),b.sample(n)
        assert keys.dtype == np.int64 and (keys - first).tolist() == plain.tolist() and p == q == 1/7

@pytest.mark.parametrize('first', [5, 2**31-20])
def test_only_keys_that_were_added_are_drawn(first):
    "`added(5, 8)`: keys 5, 6, 7 can be drawn from now on, says the table of the interface"
    s = Uniform(0, replacement=True)
    s.added(first, first+3)
    assert set(s.sample(60)[0].tolist()) <= {first, first+1, first+2}   # was: keys 0 to 4, which nobody added, are drawn (and from 2**32 on it never returns)

def test_all_of_them_and_one_of_one():
    "n == N is a permutation; one key is drawn whenever asked"
    for N in 1,2,3,10,257: assert all(sorted(b) == list(range(N)) for b in draws(sampler(N), N, 20).tolist())
    assert sampler(1, first=9).sample(1)[0].tolist() == [9] and sampler(1, first=9, replacement=True).sample(4)[0].tolist() == [9]*4

@pytest.mark.parametrize('N,n,replacement', [(0,1,False), (0,1,True), (3,4,False), (0,5,True)])
def test_too_few_keys_are_an_error_that_counts_them(N, n, replacement):
    s = sampler(N, replacement=replacement)
    before = s.state_dict()
    with pytest.raises(NotEnoughRows, match=f'got {N}; expected at least {1 if replacement else n}'): s.sample(n)
    assert s.state_dict() == before

@pytest.mark.parametrize('N,replacement', [(0,False), (0,True), (3,False), (3,True)])
def test_no_keys_of_anything(N, replacement):
    "A batch of none is empty, or refused in words"
    try: keys,_ = sampler(N, replacement=replacement).sample(0)
    except ValueError: return
    except ZeroDivisionError as e: raise AssertionError('a division by zero inside the kernel') from e   # was: for no keys in an empty memory
    assert keys.tolist() == []

def test_numpy_integers_count_too():
    "A batch size that was computed by numpy"
    assert len(sampler(100).sample(np.int64(5))[0]) == 5   # was: 'numpy.int64' object has no attribute 'bit_length'

# ---- a sampler beside a memory ----

@cases(300)
@given(st.lists(st.tuples(st.integers(0,9), st.integers(0,6)), max_size=20), st.integers(1,12), st.booleans(), st.integers(0,20))
def test_draws_are_of_keys_that_are_there(blocks, max_sz, replacement, stop):
    "Whatever is added and evicted: keys are in memory, distinct where promised, their probability is 1/len; saved anywhere, draws continue"
    s,end,oldest = Uniform(4, replacement),0,0
    for i,(size,n) in enumerate(blocks):
        first,end = end,end+size
        oldest = max(0, end-max_sz)
        s.added(first, end, oldest)
        assert len(s) == end-oldest
        if i == stop:
            twin = Uniform(None, replacement)
            twin.load_state_dict(through_file(s.state_dict()))
            s = twin
            plain,again = _replayed(blocks[:i], max_sz, replacement),s.state_dict()
            assert again == {**plain, 'end': end, 'first': oldest}, 'draws so far decide the state'
        if n and (end-oldest >= n or (replacement and end > oldest)):
            keys,p = s.sample(n)
            assert keys.min() >= oldest and keys.max() < end and p == 1/(end-oldest) and (replacement or len(set(keys.tolist())) == n)

def _replayed(blocks, max_sz, replacement):
    "The state after the same story without any saving"
    s,end,oldest = Uniform(4, replacement),0,0
    for size,n in blocks:
        first,end = end,end+size
        oldest = max(0, end-max_sz)
        s.added(first, end, oldest)
        if n and (end-oldest >= n or (replacement and end > oldest)): s.sample(n)
    return s.state_dict()

@pytest.mark.parametrize('replacement', [False, True])
@pytest.mark.parametrize('k', [0, 1, 5, 17])
def test_draws_continue_exactly(k, replacement):
    "Small, middle and large batches in turn, saved after k of them into a file: the other goes on with the same keys"
    sizes = [1, 30, 51, 100, 7, 64]*5
    s = sampler(100, 9, 50, replacement)
    for n in sizes[:k]: s.sample(n)
    twin = Uniform(1, replacement)
    twin.load_state_dict(through_file(s.state_dict()))
    assert all(s.sample(n)[0].tolist() == twin.sample(n)[0].tolist() for n in sizes[k:])
    for x in s,twin: x.added(150, 200, 100)
    assert s.sample(20)[0].tolist() == twin.sample(20)[0].tolist() and min(s.sample(100)[0]) == 100

def test_small_batches_are_the_same_after_large_ones():
    "What is kept for speed does not show in the draws"
    a,b = sampler(10_000, 1),sampler(10_000, 1)
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
        s.added(i*7, (i+1)*7, max(0, (i-9)*7))
        if i >= 9: places.append(s.sample(n)[0] - (s.end-70))
    assert fair(np.bincount(np.concatenate(places), minlength=70), 1 if replacement else (1-n/70)*70/69)

# ---- random numbers ----

def stream(seed, n=1<<15, start=0): return np.array([random_bits(np.uint64(seed), i) for i in range(start, start+n)], np.uint64)
BITS = {seed: stream(seed) for seed in (0, 1, 2**63, int(random_seed(0)), int(random_seed(1)))}
def even(ones, n): return SURE < binom.cdf(ones, n, .5) < 1-SURE

@pytest.mark.parametrize('seed', BITS)
def test_bits_are_as_often_one_as_zero(seed):
    "Each of the 64 bits alone; each with the same bit of the next number; each with its neighbour in the same number"
    b = np.unpackbits(BITS[seed].view(np.uint8).reshape(-1,8), axis=1)
    n,sure = len(b),SURE/64
    for x in b, b[1:]^b[:-1], b[:,1:]^b[:,:-1], b[2:]^b[:-2]: assert all(sure < binom.cdf(ones, len(x), .5) < 1-sure for ones in x.sum(0))
    assert even(int(b.sum()), n*64)

@pytest.mark.parametrize('seed', BITS)
def test_bytes_and_runs_are_even(seed):
    "All 256 bytes at each of 8 places; pairs of the top 4 bits of numbers in a row; runs of the top bit"
    x = BITS[seed]
    for place in x.view(np.uint8).reshape(-1,8).T: assert fair(np.bincount(place, minlength=256))
    top = (x >> np.uint64(60)).astype(int)
    assert fair(np.bincount(top[1:]*16+top[:-1], minlength=256))
    runs = int((top[1:]//8 != top[:-1]//8).sum())
    assert even(runs, len(x)-1)

def test_neighbouring_seeds_and_numbers_share_nothing():
    "About half the bits differ between neighbours, and no number comes twice"
    streams = [stream(random_seed(s), 2000) for s in range(20)]
    assert len(np.unique(np.concatenate(streams))) == 20*2000
    for a,b in zip(streams, streams[1:]):
        assert even(int(np.unpackbits((a^b).view(np.uint8)).sum()), 2000*64) and even(int(np.unpackbits((a[1:]^a[:-1]).view(np.uint8)).sum()), 1999*64)

def test_a_number_depends_on_seed_and_place_alone():
    "Far places too: the count of a sampler that runs for years"
    assert stream(7, 5, 100).tolist() == stream(7, 105)[100:].tolist()
    far = stream(7, 1000, 2**52)
    assert len(np.unique(far)) == 1000 and even(int(np.unpackbits(far.view(np.uint8)).sum()), 64_000)
    assert [int(x) for x in stream(1234567, 3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]   # published values

def test_seeds_are_distinct_and_repeat():
    "10,000 neighbouring seeds, and None several times, give as many different ones; the same seed gives the same, of any integer type"
    seeds = [int(random_seed(s)) for s in range(10_000)] + [int(random_seed()) for _ in range(10)]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**64 for s in seeds)
    assert even(int(np.unpackbits(np.array(seeds[:10_000], np.uint64).view(np.uint8)).sum()), 640_000)
    assert random_seed(3) == random_seed(np.int64(3)) == seeds[3] and random_seed(2**100) == random_seed(2**100)

def test_samplers_with_other_seeds_draw_other_keys():
    batches = {tuple(sampler(10**6, s).sample(8)[0].tolist()) for s in range(200)} | {tuple(sampler(10**6, None).sample(8)[0].tolist()) for _ in range(20)}
    assert len(batches) == 220 and sampler(100, 5).sample(9)[0].tolist() == sampler(100, 5).sample(9)[0].tolist()
