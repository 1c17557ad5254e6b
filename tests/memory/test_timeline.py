"""`Timeline` against a list of dicts and plain loops, and at every edge that a ring of rows has."""
import copy, pickle

import numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.errors import BlockError, StaleKey
from fastrl_replay.steps.row_dtypes import extend_dtype, leaves, step_dtype
from fastrl_replay.envs.nans import NaNSearch, first_nan, has_nan
from fastrl_replay.memory.timeline import Timeline
from fastrl_replay.testing import same, through_file
from strategies import bits, cases, numbers, numpy_leaves

Box,Discrete = spaces.Box,spaces.Discrete
KINDS = dict(
    cartpole = step_dtype(Box(-1, 1, (4,)), Discrete(2)),
    odd      = step_dtype(Box(0, 255, (9,), np.uint8), Box(0, 1, (), np.int8)),      # 4 × an odd number of bytes
    nested   = step_dtype(spaces.Dict(a=Box(-1, 1, (3,), np.float16), b=spaces.Tuple([Box(-1, 1, (), np.float64), Box(0, 9, (5,), np.uint8)])),
                          spaces.Tuple([Discrete(3), spaces.MultiBinary(3)]), logp='f8', hidden=('f2',(2,))),
    wide     = step_dtype(Box(0, 255, (7,11), np.uint8), Discrete(2), n='i2'))
assert KINDS['odd'].itemsize % 8 == 4

def episode(n, dtype=KINDS['cartpole'], env=0, ends=False, number=1, start=1):
    "Rows of one episode of one environment; `total_reward` counts them from `start`"
    rows = numbers(n, dtype)
    rows['env_id'],rows['episode_n'],rows['step_n'] = env,number,np.arange(1, n+1)
    rows['terminated'],rows['truncated'],rows['total_reward'] = False,False,np.arange(start, start+n)
    if ends and n: rows['terminated'][-1] = True
    return rows

def filled(n=8, max_sz=5, **kw):
    line = Timeline(max_sz)
    line.add(Steps(episode(n, **kw)))
    return line

def frozen(line):
    "All that can be seen of a timeline, saved"
    return dict(state=line.state_dict(), size=len(line), nbytes=line.nbytes, dtype=str(line.dtype), keys=line.keys)

# ---- the reference ----

ENVS = [0, 3, 15, 4000]   # the last one needs more places than there are at first

def story(program, dtype):
    """What a string of bytes tells: (rows, lives, cuts). A byte is a step of one of four environments, which goes on, terminates, is truncated,
    or is never heard of again (and another may come with its number); it may also end a block, followed by an empty block, a save or a bad block."""
    n = len(program)
    rows,lives,cuts = numbers(n, dtype, n),np.zeros(n, int),[]
    place = [dict(life=None, episode=0, step=0) for _ in ENVS]
    for i,b in enumerate(program):
        env,what = place[b & 3],b>>2 & 3
        if env['life'] is None: env.update(life=i, episode=env['episode']+1, step=0)
        env['step'] += 1
        lives[i],r = env['life'],rows[i]
        r['env_id'],r['episode_n'],r['step_n'],r['total_reward'] = ENVS[b & 3],env['episode'],env['step'],i+1
        r['terminated'],r['truncated'] = what == 1,what == 2
        if what: env['life'] = None
        if what == 3 and b & 128: env['episode'] = 0   # another environment takes the number, and counts from 1 again
        if b & 16: cuts.append((i+1, bool(b & 32), bool(b & 64), bool(b & 128)))
    return rows,lives,cuts + [(n, False, True, False)]

class Naive:
    "A list of dicts"
    def __init__(self, max_sz): self.rows,self.max_sz = [],max_sz
    def add(self, lives): self.rows += [dict(key=len(self.rows)+i, life=life) for i,life in enumerate(lives)]
    def alive(self): return [r['key'] for r in self.rows][-self.max_sz:]
    def window(self, key, length):
        later = [r['key'] for r in self.rows[key:] if r['life'] == self.rows[key]['life']]
        return later[:length]

def agrees(line, naive, rows, length, rng):
    "Hold all that a timeline says against the list"
    n,keys = len(naive.rows),naive.alive()
    assert len(line) == len(keys) and line.inserted == n and line.keys.tolist() == keys
    asked = np.arange(-2, n+3)
    assert line.valid(asked).tolist() == [k in set(keys) for k in asked]
    if not keys: return
    order = rng.permutation(keys)
    assert line.take(order) == Steps(rows[order]) and line[:] == Steps(rows[keys])
    seen = line.windows(order, length)
    want = [naive.window(k, length) for k in order]
    assert seen.shape == (len(order), length)
    assert seen.total_reward.tolist() == [[k+1 for k in w] + [0]*(length-len(w)) for w in want]
    assert seen.mask.tolist() == [[True]*len(w) + [False]*(length-len(w)) for w in want]

@pytest.mark.parametrize('kind', KINDS)
@cases(500)
@given(program=st.binary(max_size=40), max_sz=st.integers(1,12) | st.just(60))
def test_timeline_is_a_list_of_dicts(kind, program, max_sz):
    """Random interleavings, endings, block sizes and capacities: len, keys, valid, take and windows agree with the list after every block;
    a save and load in between changes nothing, and neither does a refused block"""
    rows,lives,cuts = story(program, KINDS[kind])
    line,naive,at,rng = Timeline(max_sz),Naive(max_sz),0,np.random.default_rng(0)
    for cut,empty,save,bad in cuts:
        if bad:
            wrong = rows[at:cut].copy()
            wrong['reward'][-1:] = np.nan
            if len(wrong):
                with pytest.raises(BlockError): line.add(Steps(wrong))
        assert line.add(Steps(rows[at:cut])).tolist() == list(range(at, cut))
        naive.add(lives[at:cut])
        if empty: assert line.add(Steps(rows[cut:cut])).tolist() == []
        if save:
            twin = Timeline(max_sz)
            twin.load_state_dict(through_file(line.state_dict()))
            line = twin
        at = cut
        agrees(line, naive, rows, 1 + (cut*5)%9, rng)
    if len(line):   # windows hold whole rows, and nothing but zeros after them
        seen = line.windows(line.keys, 4)
        for key,w in zip(line.keys, seen):
            want = naive.window(key, 4)
            assert all(bits(w.rows[n][:len(want)]) == bits(rows[n][want]) for n in rows.dtype.names if rows.dtype[n].names is None)
            assert not any(np.asarray(a[len(want):]).any() for a in numpy_leaves(w.rows))

@pytest.mark.slow
@cases(10_000)
@given(program=st.binary(max_size=120), max_sz=st.integers(1,40))
def test_timeline_is_a_list_of_dicts_for_long(program, max_sz): test_timeline_is_a_list_of_dicts.hypothesis.inner_test('cartpole', program, max_sz)

@pytest.mark.parametrize('max_sz', [1, 2, 3, 7, 64])
@pytest.mark.parametrize('size', [1, 2, 5, 64, 200])
def test_windows_over_many_wraps(max_sz, size):
    "One endless episode through a ring that wraps many times: every window is the next numbers up to the newest row"
    line,rows = Timeline(max_sz),episode(600)
    for i in range(0, 600, size): line.add(Steps(rows[i:i+size]))
    seen = line.windows(line.keys, 10)
    want = [[k+1+t if k+t < 600 else 0 for t in range(10)] for k in range(600-max_sz, 600)]
    assert seen.total_reward.tolist() == want

# ---- where episodes end ----

def linked(first, second, max_sz=9):
    "Does a window go from the first row to the second?"
    line = Timeline(max_sz)
    for r in first,second: line.add(Steps(r))
    return bool(line.windows([0], 2).mask[0,1])

@pytest.mark.parametrize('change,want', [
    (dict(), True), (dict(terminated=True), False), (dict(truncated=True), False), (dict(terminated=True, truncated=True), False)], ids=str)
def test_nothing_follows_an_end(change, want):
    a,b = episode(1),episode(2)[1:]
    for n,v in change.items(): a[n] = v
    assert linked(a, b) == want

@pytest.mark.parametrize('change,want', [
    (dict(), True), (dict(env_id=1), False), (dict(episode_n=2), False), (dict(step_n=1), False), (dict(episode_n=2, step_n=1), False), (dict(terminated=True), True),
    (dict(step_n=5), True)], ids=str)   # the last: NSkip leaves steps out
def test_what_follows_belongs_to_the_same_episode(change, want):
    a,b = episode(1),episode(2)[1:]
    for n,v in change.items(): b[n] = v
    assert linked(a, b) == want

@pytest.mark.parametrize('others', [0, 1, 5, 6, 7, 8, 20])
def test_links_span_as_many_rows_as_are_kept(others):
    "The next step of an environment may come much later; when the row before it is gone, there is nothing to link"
    line,rows = Timeline(8),episode(2)
    line.add(Steps(rows[:1]))
    if others: line.add(Steps(episode(others, env=1)))
    key = line.add(Steps(rows[1:]))[0]
    assert line.valid([0])[0] == (others < 7) and line.windows([key], 3).mask.tolist() == [[True,False,False]]
    if others < 7: assert line.windows([0], 3).total_reward.tolist() == [[1,2,0]]
    assert line.windows(line.keys, 3).mask.sum() >= len(line)

# ---- blocks in every guise ----

@pytest.mark.parametrize('n', [1, 2, 3])
@pytest.mark.parametrize('env', ['Pendulum-v1', 'MountainCarContinuous-v0', 'CartPole-v1'])
def test_rows_of_real_environments_can_be_taken(env, n):
    "Continuous actions give rows whose size is no multiple of 8; any number of them can be taken"
    import gymnasium as gym
    env = gym.make(env)
    line,rows = Timeline(5),episode(3, step_dtype(env.observation_space, env.action_space))
    line.add(Steps(rows))
    assert line.take(range(n)) == Steps(rows[:n])   # was: numba's "size must be a divisor"

GUISES = dict(
    steps      = lambda r: np.repeat(r, 2)[::2],
    backwards  = lambda r: r[::-1].copy()[::-1],
    reversed_  = lambda r: np.ascontiguousarray(r[::-1])[::-1],
    read_only  = lambda r: np.frombuffer(r.tobytes(), r.dtype),
    misaligned = lambda r: np.frombuffer(b'x' + r.tobytes(), np.uint8)[1:].view(r.dtype),
    column     = lambda r: np.stack([r, r], 1)[:,1],
    fortran    = lambda r: np.asfortranarray(r),
    record     = lambda r: r.view(np.recarray),
    masked     = lambda r: np.ma.array(r),
    pickled    = lambda r: pickle.loads(pickle.dumps(Steps(r))).rows,
    deepcopied = lambda r: copy.deepcopy(r),
    window     = lambda r: np.lib.stride_tricks.as_strided(r, r.shape, r.strides))

# was: kind `odd` is red with every guise, and in the test against the list: `_gather` looks at its output as int64, which fails where rows × itemsize is no multiple of 8
# (Pendulum's row has 52 bytes). `record` is red for all: a recarray's dtype says alignment 1, and windows' longer dtype does not fit it.
@pytest.mark.parametrize('guise', GUISES)
@pytest.mark.parametrize('kind', KINDS)
def test_a_block_is_its_rows_whatever_its_memory_looks_like(kind, guise):
    rows = episode(7, KINDS[kind])
    line = Timeline(20)
    for block in rows[:3],rows[3:]: line.add(Steps(GUISES[guise](block)))
    assert line[:] == Steps(rows) and line.windows([0], 7).mask.all()

def test_rows_from_a_file_are_taken(tmp_path):
    "numpy's own file keeps offsets but forgets that they were aligned; the rows are the same"
    np.save(tmp_path/'rows.npy', episode(3))
    rows = np.load(tmp_path/'rows.npy', mmap_mode='r')
    line = Timeline(5)
    line.add(Steps(rows))   # was: "a packed dtype" is refused, though every offset is aligned and equal to step_dtype's
    assert line[:].total_reward.tolist() == [1,2,3]

def test_broadcast_rows_are_as_many_rows():
    line = Timeline(9)
    assert line.add(Steps(np.broadcast_to(episode(1), (4,)))).tolist() == [0,1,2,3] and line[:].total_reward.tolist() == [1]*4

def test_single_steps_and_empty_blocks():
    line,steps = Timeline(4),Steps(episode(3))
    assert line.add(steps[:0]).tolist() == [] and len(line) == 0 and line.keys.tolist() == [] and list(line) == []
    assert [line.add(s).tolist() for s in steps] == [[0],[1],[2]] and line[:] == steps
    assert line.take([]).shape == (0,) and line.windows([], 3).shape == (0,3) and line.valid([]).tolist() == []

def test_adding_what_was_taken_from_itself():
    "What a memory gives are copies, so they may be put in again, more of them than it holds"
    line = filled(5)
    line.add(line[:])
    assert line[:].total_reward.tolist() == [1,2,3,4,5] and line.keys.tolist() == [5,6,7,8,9]
    line.add(Steps.cat([line[:]]*3))
    assert line[:].total_reward.tolist() == [1,2,3,4,5] and line.inserted == 25

def test_memory_is_apart_from_blocks():
    "Neither the block that went in nor one that came out is the memory's own"
    rows,line = episode(3),Timeline(5)
    line.add(Steps(rows))
    rows['reward'],line[:].rows['reward'],line.take([0]).rows['reward'],line.windows([0],2).rows['reward'] = 1e9,1e9,1e9,1e9
    assert line[:].reward.max() < 1e9

# ---- blocks that are refused ----

@pytest.mark.parametrize('kind', ['c8', ('c16', (2,)), 'f16', '>f4', 'M8[s]', 'U3', 'V3'])
def test_columns_that_not_every_stage_knows_are_refused_by_name(kind):
    "Of rows that were made without `step_dtype`; the next block decides what the columns are"
    line, pole = Timeline(9), KINDS['cartpole']
    rows = np.zeros(3, np.dtype([*((n, pole[n]) for n in pole.names), ('mine', kind)], align=True))
    with pytest.raises(BlockError, match=r"Timeline: column 'mine'; got .*; expected bool, int8 to int64, uint8 to uint64, float16, float32 or float64"): line.add(Steps(rows))
    assert line.add(Steps(episode(3))).tolist() == [0, 1, 2]

FLOATS = step_dtype(spaces.Dict(h=Box(-1, 1, (3,), np.float16), t=spaces.Tuple([Box(-1, 1, (2,2), np.float64), Discrete(2), Box(-1, 1, (), np.float16)])),
                    Box(-1, 1, (2,), np.float64), logp='f4', c=('f4',2), z=('f8',(2,2)), pad='u1')
NANS  = {2: [0x7e00, 0x7c01, 0xffff, 0xfc01], 4: [0x7fc00000, 0x7f800001, 0xffffffff, 0xff800001],
         8: [0x7ff8<<48, (0x7ff0<<48)+1, 2**64-1, (0xfff0<<48)+1, (0x7ff0<<48)+(1<<32), (0x7ff0<<48)+(1<<31)]}
FINE  = {2: [0x7c00, 0xfc00, 0x8000, 1, 0x7bff], 4: [0x7f800000, 0xff800000, 1<<31, 1, 0x7f7fffff], 8: [0x7ff0<<48, 0xfff0<<48, 1<<63, 1, (0x7ff0<<48)-1, 0x7fefffff_ffffffff]}

def float_spots(rows):
    "(column, the numbers of one row as unsigned integers) of each float field, real and imaginary parts apart"
    for name,a in leaves(rows):
        if a.dtype.kind in 'fc':
            width = a.dtype.itemsize//(1 + (a.dtype.kind == 'c'))
            yield name,width,[(at,part) for at in np.ndindex(a.shape[1:]) for part in range(a.dtype.itemsize//width)]

SPOTS = [(name,width,at,part) for name,width,spots in float_spots(np.zeros(1, FLOATS)) for at,part in spots]

def write_bits(rows, i, name, width, at, part, pattern):
    "Put a bit pattern into one float of row i"
    a = rows
    for n in name.split('.'): a = a[n]
    address = a[i:i+1].__array_interface__['data'][0] + sum(x*s for x,s in zip(at, a.strides[1:])) + part*width - rows.__array_interface__['data'][0]
    rows.view(np.uint8)[address:address+width] = np.frombuffer(int(pattern).to_bytes(width, 'little'), np.uint8)

@pytest.mark.parametrize('name,width,at,part', SPOTS, ids=str)
def test_any_nan_in_any_float_is_refused(name, width, at, part):
    "Quiet and signalling, of both signs, in any float of any type, in the first, a middle or the last row: refused by name, and all is as it was"
    line = filled(7, dtype=FLOATS)
    before = frozen(line)
    for i in 0,2,4:
        for pattern in NANS[width]:
            rows = episode(5, FLOATS, start=8)
            write_bits(rows, i, name, width, at, part, pattern)
            with pytest.raises(BlockError) as e: line.add(Steps(rows))
            assert f'row {i} ' in str(e.value) and repr(name) in str(e.value) and same(frozen(line), before)

@pytest.mark.parametrize('name,width,at,part', SPOTS, ids=str)
def test_infinities_and_the_like_are_taken(name, width, at, part):
    "What is no NaN goes in: infinities, minus zero, the smallest and the largest number, to the bit"
    for pattern in FINE[width]:
        rows,line = episode(3, FLOATS),Timeline(3)
        write_bits(rows, 1, name, width, at, part, pattern)
        line.add(Steps(rows))
        assert bits(line[:].rows) == bits(rows)

def test_bits_of_other_columns_are_no_nan():
    "Integers, bytes and padding whose bits would be a NaN are none"
    rows = episode(3, FLOATS)
    rows.view(np.uint8)[:] = 0xff
    clean = episode(3, FLOATS)
    for (n,kind) in [(n, FLOATS[n]) for n in FLOATS.names]:
        if n in ('env_id','episode_n','step_n','terminated','truncated') or kind.names or kind.base.kind in 'fc': rows[n] = clean[n]
    rows['state']['t']['[1]'],rows['pad'] = -1,0xff   # an int64 of ones between floats
    assert Timeline(5).add(Steps(rows)).tolist() == [0,1,2]

@pytest.mark.parametrize('pixels', [0, 3000])
def test_the_search_for_nan_says_what_numpy_says(pixels):
    "In rows whose floats lie under a mask, and in those where they are few; also where only the lower half of a float64 tells it"
    dtype = np.dtype([('env_id', 'i4'), ('a', 'f8', (3,)), ('b', 'f2', (5,)), ('c', 'c16'), ('d', 'f4'), ('e', [('f', 'c8'), ('g', 'f2')]), ('h', 'u1', (pixels,))], align=True)
    search, rng, found = NaNSearch(dtype), np.random.default_rng(0), []
    spots = [(name, width, at, part) for name, width, places in float_spots(np.zeros(1, dtype)) for at, part in places]
    for n in rng.integers(1, 40, 300):
        rows = np.frombuffer(rng.bytes(n*dtype.itemsize), dtype).copy()   # random bits, in padding and whole numbers too
        for _, x in leaves(rows):
            if x.dtype.kind in 'fc': x[...] = rng.normal(size=x.shape)
        for _ in range(rng.integers(4)):
            spot = spots[rng.integers(len(spots))]
            patterns = [*FINE[spot[1]], *NANS[spot[1]]]
            write_bits(rows, rng.integers(n), *spot, patterns[rng.integers(len(patterns))])
        found.append(first_nan(rows) is not None)
        assert has_nan(rows.ctypes.data, n, search.at) == found[-1]
    assert 30 < sum(found) < 270

OTHER = step_dtype(Box(-1, 1, (5,)), Discrete(2))
PACKED = np.dtype([('flag','?'), *[(n, KINDS['cartpole'][n]) for n in KINDS['cartpole'].names]])
def with_env(*ids, n=3):
    rows = episode(n)
    rows['env_id'] = ids
    return rows

BAD = {
    'negative env':   lambda: with_env(0,0,-1),
    'first env':      lambda: with_env(-5,0,0),
    'huge env':       lambda: with_env(0,1<<24,0),
    'largest env':    lambda: with_env(0,2**31-1,0),
    'far, then bad':  lambda: with_env(900,0,-1),                    # was: room is made for 900 before -1 is seen, and stays: nbytes and the saved state grow
    'far, then NaN':  lambda: _nan_behind(with_env(900,0,0)),        # was: the same
    'far, then huge': lambda: with_env(900,2**24,0),                 # was: the same
    'other columns':  lambda: episode(3, OTHER),
    'more columns':   lambda: episode(3, extend_dtype(KINDS['cartpole'], n='i4')),
    'packed':         lambda: np.zeros(3, PACKED),
    'sequences':      lambda: episode(6).reshape(2,3),
    'one sequence':   lambda: episode(3).reshape(1,3),
    'no env_id':      lambda: np.zeros(3, np.dtype([('reward','f4')], align=True)),
    'wide env_id':    lambda: np.zeros(3, np.dtype([(n, 'i8' if n == 'env_id' else KINDS['cartpole'][n]) for n in KINDS['cartpole'].names], align=True)),
    'objects':        lambda: np.zeros(3, np.dtype([*[(n, KINDS['cartpole'][n]) for n in KINDS['cartpole'].names], ('x','O')], align=True)),
}
def _nan_behind(rows): rows['state'][2,1] = np.nan; return rows

@pytest.mark.parametrize('bad', BAD)
def test_a_bad_block_changes_nothing(bad):
    "Refused whole: all that was there, all links and all counts are as before, and good blocks go on being taken"
    line = filled(7)
    line.batch(np.array([3,3,5]), np.ones(3, np.float32))
    before = frozen(line)
    with pytest.raises((BlockError, TypeError)): line.add(Steps(BAD[bad]()))
    assert same(frozen(line), before)
    assert line.add(Steps(episode(9, start=1)[7:])).tolist() == [7,8] and line.windows([4], 9).mask.sum() == 5

@pytest.mark.parametrize('bad', BAD)   # was: red where the first block fails late ('sequences', 'objects'): its columns and its memory stay
def test_a_bad_first_block_leaves_an_empty_memory(bad):
    "Not even its columns stay: a memory that has taken nothing takes any good block next"
    if bad in ('other columns','more columns'): return
    line = Timeline(5)
    with pytest.raises((BlockError, TypeError)): line.add(Steps(BAD[bad]()))
    assert (len(line), line.inserted, line.dtype, line.nbytes) == (0, 0, None, 0)
    assert line.add(Steps(episode(2, KINDS['odd']))).tolist() == [0,1]

def test_a_memory_that_cannot_be_reserved_stays_empty():
    "A first block whose memory the machine doesn't have: an error, and a smaller row fits next"
    line = Timeline(2**31-1)
    with pytest.raises(MemoryError): line.add(Steps(np.zeros(1, step_dtype(Box(0, 1, (1<<20,)), Discrete(2)))))
    assert line.dtype is None and line.nbytes == 0   # was: dtype stays, and all that follows fails with "no attribute or column '_mem'"

@pytest.mark.parametrize('what', [episode(2), None, [1], {}], ids=lambda w: type(w).__name__)
def test_what_is_no_block_is_named(what):
    with pytest.raises(TypeError, match='Timeline'): Timeline(5).add(what)   # was: AttributeError: 'numpy.ndarray' object has no attribute 'rows'

def test_other_columns_are_told_apart():
    with pytest.raises(BlockError, match=r"'state' is .*5.*, not .*4"): filled().add(Steps(episode(3, OTHER)))
    with pytest.raises(BlockError, match="'n' is int32, not there"): filled().add(Steps(episode(3, extend_dtype(KINDS['cartpole'], n='i4'))))

# ---- keys that are not there ----

STALE = [2, 0, -1, -2**63, 8, 9, 2**40, 2**63-1, np.uint8(200), 2**63, 2**64-1]   # was: the last two are named as the negative numbers with the same bits

@pytest.mark.parametrize('key', STALE, ids=str)
@pytest.mark.parametrize('ask', ['take','windows','draw'])
def test_keys_that_are_gone_or_never_were_are_named(ask, key):
    "In a memory of 5 after 8 rows, keys 3 to 7 are there; any other is a KeyError that names it, wherever it stands among good ones"
    line = filled(8, 5)
    call = dict(take=line.take, windows=lambda k: line.windows(k, 2), draw=lambda k: line.batch(k, np.ones(len(k), np.float32)))[ask]
    drawn = frozen(line)
    for keys in [key], [3, key], [key, 3], [7, key, 4]:
        keys = np.array(keys, np.uint64 if int(key) >= 2**63 else None)   # numpy would make floats of them
        if ask == 'draw' and keys.dtype != np.int64: continue
        assert not line.valid(keys).all()
        with pytest.raises(KeyError) as e: call(keys)
        assert isinstance(e.value, StaleKey) and f' {key} ' in str(e.value) and '3 to 7' in str(e.value)
    assert same(frozen(line), drawn), 'a draw that failed was counted'

@pytest.mark.parametrize('key,ago', [(2,1), (1,2), (0,3)])
def test_stale_keys_say_how_old_they_are(key, ago):
    with pytest.raises(StaleKey, match=f'overwritten {ago} rows ago'): filled(8, 5).take([3, key])

@pytest.mark.parametrize('keys', [[1.], ['a'], [None], [True], np.array([3.]), torch.tensor([3.])], ids=str)
def test_keys_are_integers(keys):
    line = filled()
    for call in line.take, line.valid, lambda k: line.windows(k, 2):
        with pytest.raises(TypeError, match='integers'): call(keys)

@pytest.mark.parametrize('keys', [5, np.int32(5), [5,3], (4,), range(3,8), np.array([[3,4],[5,6]], np.uint16), torch.tensor([7,3]), np.arange(3,8)[::-2],
                                  np.array([7,7,7]), np.array(6), np.frombuffer(np.array([3,4]).tobytes(), np.int64), np.arange(3,8).astype('>i8')], ids=str)
def test_keys_of_any_integer_kind_and_shape(keys):
    "take gives rows in the shape of the keys; valid too"
    line = filled(8, 5)
    want = np.asarray(keys).astype(int)
    assert line.take(keys).shape == want.shape and line.take(keys).total_reward.tolist() == (want+1).tolist() and np.all(line.valid(keys)) and np.shape(line.valid(keys)) == want.shape
    assert line.windows(keys, 2).shape == (want.size, 2) and line.windows(keys, 2).total_reward[:,0].tolist() == (want.ravel()+1).tolist()

def test_an_empty_memory_has_no_rows_to_give():
    line = Timeline(3)
    for call in line.take, lambda k: line.windows(k, 2):
        with pytest.raises(KeyError, match='key 0 was never given out'): call([0])
        with pytest.raises(BlockError, match='nothing was ever added'): call([])
    assert line.valid([-1,0,1]).tolist() == [False]*3 and list(line) == [] and line.nbytes == 0 and 'empty' in repr(line)

@pytest.mark.parametrize('length', [0, -1])
def test_windows_have_a_length(length):
    with pytest.raises(ValueError, match='length'): filled().windows([3], length)

# ---- batches ----

def test_batches_hold_rows_keys_and_weights_and_are_counted():
    "Each drawn row is whole, beside its key and its weight; draws are counted by row, ages over all draws; overwriting a row ends its count"
    for dtype in KINDS.values():
        line = filled(8, 5, dtype=dtype)
        keys,weights = np.array([7,3,3,5]),np.array([.5,1,2,.25], np.float32)
        batch = line.batch(keys, weights)
        rows = episode(8, dtype)
        assert all(bits(batch.rows[n]) == bits(rows[n][keys]) for n in dtype.names if not dtype[n].names)
        assert batch.index.tolist() == keys.tolist() and batch.weight.tolist() == weights.tolist() and batch.index.dtype == torch.int64
        assert line._parts[0].drawn[line.keys % 5].tolist() == [2,0,1,0,1] and line.ages.tolist() == [1+5+5+3, 5]
        line.add(Steps(episode(2, dtype)))
        assert line._parts[0].drawn[line.keys % 5].tolist() == [1,0,1,0,0]

def test_take_and_windows_are_no_draws():
    line = filled()
    line.take(line.keys); line.windows(line.keys, 3); line[:]; list(line)
    assert not line._parts[0].drawn.any() and not line.ages.any()

def test_rows_that_are_batches_of_another_memory_can_be_kept_and_drawn():
    "By a memory that no replay owns: its rows have `index` and `weight` already, and the new batch says its own. (A replay refuses them: test_replay)"
    line = Timeline(9)
    line.add(filled().batch(np.array([3,4,6]), np.ones(3, np.float32)))
    batch = line.batch(np.array([0,2]), np.full(2, .5, np.float32))   # was: numpy's "name already used as a name or title"
    assert batch.index.tolist() == [0,2]

def test_windows_of_rows_that_have_a_mask():
    "Rows of padded sequences carry `mask`; windows on them say what they mean, or refuse them by name"
    line = Timeline(9)
    line.add(filled().windows([3], 3)[0])
    try: line.windows([0], 2)
    except ValueError as e: assert 'mask' in str(e)   # was: numpy's "name already used as a name or title" names nothing

# ---- size ----

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('max_sz', [10_000, 100_000])
def test_nbytes_is_rows_and_twelve_bytes_each(kind, max_sz):
    "Within 1% of max_sz × (row + 12), from the first row on, and what is reserved is what it says"
    line = Timeline(max_sz)
    assert line.nbytes == 0
    for env in range(20): line.add(Steps(episode(1, KINDS[kind], env=env)))
    assert 1 <= line.nbytes/(max_sz*(KINDS[kind].itemsize+12)) < 1.01
    held = {a.ctypes.data: a.nbytes for p in line._parts[:2] for a in vars(p).values() if isinstance(a, np.ndarray)}   # once each
    assert sum(held.values()) <= line.nbytes + 1000

def test_capacity_is_exact():
    "max_sz rows, no more, no fewer, whatever the blocks and episodes"
    for max_sz in 1,2,3,10,31:
        line,rng,total = Timeline(max_sz),np.random.default_rng(max_sz),0
        for _ in range(60):
            n = int(rng.integers(0, 12))
            line.add(Steps(episode(n, env=int(rng.integers(3)), ends=True, start=total+1)))
            total += n
            assert len(line) == min(total, max_sz) and (not total or line[:].total_reward.tolist() == list(range(max(0, total-max_sz)+1, total+1)))

@pytest.mark.parametrize('max_sz', [0, -1, 2**31, float('nan'), 1.5, '3', None, True], ids=str)   # was: 1.5 and True become 1; '3' and None raise '<' not supported
def test_max_sz_is_a_whole_number_of_rows(max_sz):
    with pytest.raises((ValueError, TypeError), match='max_sz'): Timeline(max_sz)

def test_many_environments():
    "Room for environments grows with their numbers, and earlier links hold"
    line = Timeline(3000)
    for env in 0,15,16,17,1000,70_000: line.add(Steps(episode(1, env=env)))
    for env in 0,15,16,17,1000,70_000: line.add(Steps(episode(2, env=env)[1:]))
    assert line.windows(range(6), 3).mask.sum(1).tolist() == [2]*6 and (line.windows(range(6), 2).env_id[:,0] == line.windows(range(6), 2).env_id[:,1]).all()

# ---- saving ----

def test_state_is_plain_and_apart():
    "What is saved does not change with the memory, and a restored memory does not share with what was saved"
    line = filled(8, 5)
    state = line.state_dict()
    before = copy.deepcopy(state)
    line.add(Steps(episode(3)))
    assert same(state, before)
    twin = Timeline(5)
    twin.load_state_dict(state)
    twin.add(Steps(episode(4)))
    twin.batch(twin.keys, np.ones(5, np.float32))
    assert same(state, before)

def test_a_used_memory_becomes_the_saved_one():
    "Whatever it held, columns included"
    line,other = filled(3, 5),filled(9, 5, dtype=KINDS['odd'])
    other.load_state_dict(line.state_dict())
    assert other[:] == line[:] and other.dtype == line.dtype and other.inserted == 3
    other.load_state_dict(Timeline(5).state_dict())
    assert len(other) == 0 and other.dtype is None
    with pytest.raises(ValueError, match='more rows than this one has room for; got 3; expected at most max_sz=2'): Timeline(2).load_state_dict(line.state_dict())

def test_counts_of_draws_are_saved():
    line = filled(8, 5)
    line.batch(np.array([3,7,7]), np.ones(3, np.float32))
    twin = Timeline(5)
    twin.load_state_dict(through_file(line.state_dict()))
    assert twin._parts[0].drawn[twin.keys % 5].tolist() == [1,0,0,0,2] and twin.ages.tolist() == line.ages.tolist()

def test_copies_of_a_memory_go_their_own_ways():
    line = filled(8, 5)
    for twin in copy.deepcopy(line), pickle.loads(pickle.dumps(line)):
        twin.add(Steps(episode(9, start=1)[8:]))
        assert line.keys.tolist() == [3,4,5,6,7] and twin.windows([7], 2).total_reward.tolist() == [[8,9]] and line.windows([7], 2).mask.sum() == 1

# ---- read like a block ----

@pytest.mark.parametrize('i', [0, -1, 4, slice(None), slice(1,-1), slice(None,None,-1), [0,2], [], np.array([True,False,True,False,True]), torch.tensor([4,0]), torch.tensor([True,False,False,False,True]), 'reward'], ids=str)
def test_places_count_from_the_oldest(i):
    line,rows = filled(8, 5),episode(8)[3:]
    want = rows[i.numpy() if isinstance(i, torch.Tensor) else i]
    assert bits(line[i]) == bits(want) if isinstance(i, str) else bits(line[i].total_reward) == bits(np.asarray(want)['total_reward'])

def test_places_that_are_not_there():
    for i in 5,-6,[0,5]:
        with pytest.raises(IndexError): filled(8, 5)[i]
    with pytest.raises(AttributeError, match='nothing'): filled().nothing
    assert filled().total_reward.tolist() == [4,5,6,7,8]

def test_iteration_gives_every_row_once():
    line = filled(5000, 3000)
    assert [s.total_reward.item() for s in line] == list(range(2001, 5001)) and next(iter(line)).shape == ()
