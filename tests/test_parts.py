"""Parts that people may write: stores, arrays, samplers and views, held to the ones that are there; and memories under attack."""
import copy, os, pickle, tempfile, threading

import numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.core import ArgumentError, BlockError, NotEnoughRows, StaleKey, Steps, extend_dtype, leaves, step_dtype
from fastrl_replay.memory.rows import Rows, Store
from fastrl_replay.memory.samplers import Proportional, Sampler, Uniform
from fastrl_replay.memory.timeline import Timeline
from fastrl_replay.replay.experience import ExperienceReplay
from fastrl_replay.replay.prioritized import PrioritizedReplay
from fastrl_replay.replay.replay import Replay
from fastrl_replay.replay.sequences import SequenceReplay
from fastrl_replay.replay.views import Transitions
from fastrl_replay.testing import same, through_file
from strategies import bits, cases, numpy_leaves

Box,Discrete = spaces.Box,spaces.Discrete
PIXELS = step_dtype(Box(0, 255, (3,3), np.uint8), Discrete(3), logp='f8')
NESTED = step_dtype(spaces.Dict(a=Box(-9, 9, (3,), np.float16), b=spaces.Tuple([Box(-9, 9, (), np.float64), Discrete(5)])), Discrete(2), n='i8')

# ---- stores ----

class InAList(Store):
    "Rows as bytes in a list"
    nbytes = property(lambda self: sum(len(r) for r in self.rows if r))
    def reserve(self, arrays): self.rows = [None]*self.max_sz
    def put(self, slots, rows):
        for slot,row in zip(slots, rows): self.rows[slot] = row.tobytes()
    def gather(self, slots, out, present=-1):
        out[:] = 0
        for dst,slot in zip(out, slots.ravel()):
            if slot >= 0: dst[:self.dtype.itemsize] = np.frombuffer(self.rows[slot], np.uint8)
            if present >= 0: dst[present] = slot >= 0

class Folder:
    "Arrays in files of a directory; each is a new file"
    def __init__(self, path): self.path = str(path)
    def new(self, name, shape, dtype, fill=None):
        fd,file = tempfile.mkstemp('.npy', f'{name}-', self.path)
        os.close(fd)
        array = np.lib.format.open_memmap(file, 'w+', np.dtype(dtype), tuple(np.atleast_1d(shape).tolist()))
        if fill is not None: array[...] = fill
        return array

class RowsInFolder(Rows):
    "Whole rows in a directory"
    def __init__(self, path): self.arrays = Folder(path)

class SavesAPath(Rows):
    "Whole rows, of which a checkpoint holds a path"
    def __init__(self, path): self.path = str(path)
    def state_dict(self, slots):
        fd,file = tempfile.mkstemp('.npy', 'saved-', self.path)
        os.close(fd)
        np.save(file, super().state_dict(slots)['rows'].numpy())
        return dict(path=file)
    def load_state_dict(self, slots, state): super().load_state_dict(slots, dict(rows=torch.from_numpy(np.load(state['path']))))

class OnDevice(Store):
    "Rows as bytes of one tensor; what is drawn lies on the same device"
    def __init__(self, device='cpu'): self.device = device
    nbytes = property(lambda self: self.mem.nbytes)
    def reserve(self, arrays): self.mem = torch.zeros(self.max_sz, self.dtype.itemsize, dtype=torch.uint8, device=self.device)
    def put(self, slots, rows):
        raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1).copy()
        self.mem[torch.from_numpy(slots).to(self.device)] = torch.from_numpy(raw).to(self.device)
    def empty(self, n, size): return torch.empty(n, size, dtype=torch.uint8, device=self.device)
    def gather(self, slots, out, present=-1):
        slots = torch.from_numpy(slots.ravel()).to(self.device)
        out.zero_()
        out[:, :self.dtype.itemsize] = torch.where((slots >= 0)[:, None], self.mem[slots.clamp(min=0)], 0)
        if present >= 0: out[:, present] = (slots >= 0).to(torch.uint8)

class EachOnce(Store):
    "Each distinct frame once, however many rows have it as `state` or `next_state`"
    columns = 'state','next_state'
    nbytes = property(lambda self: self.rest.nbytes + self.of.nbytes + sum(map(len, self.frames)))
    def reserve(self, arrays):
        d = self.dtype
        self.spans = [(d.fields[c][1], d[c].itemsize) for c in self.columns]
        self.rest = arrays.new('rest', (self.max_sz, d.itemsize), np.uint8, 0)
        self.of,self.frames,self.held = np.full((self.max_sz,2), None, object),{},{}   # frames: bytes → how many have it
    def _let_go(self, frame):
        self.frames[frame] -= 1
        if not self.frames[frame]: del self.frames[frame],self.held[frame]
    def put(self, slots, rows):
        raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1).copy()
        for slot,row in zip(slots, raw):
            for i,(at,size) in enumerate(self.spans):
                if self.of[slot,i] is not None: self._let_go(self.of[slot,i])
                frame = row[at:at+size].tobytes()
                self.frames[frame] = self.frames.get(frame, 0) + 1
                self.of[slot,i],row[at:at+size] = self.held.setdefault(frame, frame),0
            self.rest[slot] = row
    def gather(self, slots, out, present=-1):
        out[:] = 0
        for dst,slot in zip(out, slots.ravel()):
            if present >= 0: dst[present] = slot >= 0
            if slot < 0: continue
            dst[:self.dtype.itemsize] = self.rest[slot]
            for i,(at,size) in enumerate(self.spans): dst[at:at+size] = np.frombuffer(self.of[slot,i], np.uint8)

@pytest.fixture(scope='module')
def stores(tmp_path_factory):
    path = tmp_path_factory.mktemp('stores')
    return dict(list=InAList, folder=lambda: RowsInFolder(path), path=lambda: SavesAPath(path), device=OnDevice, frames=EachOnce, rows=Rows)

STORES = 'list','folder','path','device','frames'

# ---- stories ----

def story(program, dtype, first=0):
    "Rows of four environments, one for each byte: which goes on, terminates, is truncated, or breaks off; steps count from `first`"
    rows,rng = np.zeros(len(program), dtype),np.random.default_rng(len(program))
    for a in numpy_leaves(rows): a[...] = rng.integers(0, 2 if a.dtype == bool else 4, a.shape)
    now = [[1,first] for _ in range(4)]
    for r,b in zip(rows, program):
        env,what = now[b & 3],b>>2 & 3
        r['env_id'],r['episode_n'],r['step_n'] = (0, 2**24-1, 7, 300)[b & 3],*env
        r['terminated'],r['truncated'] = what == 1,what == 2
        if 'n' in dtype.names: r['n'] = 1 + (b>>4 & 1)
        env[1] += 1 + (b>>4 == 15)
        if what: env[:] = [env[0] + 1, first] if what < 3 or b & 32 else [env[0], first]   # 3: it breaks off; the same number may begin again
    return rows

def cut(rows, sizes):
    "Blocks of these sizes, and the rest"
    at = 0
    for n in sizes:
        yield rows[at:at+n]
        at += n
    yield rows[at:]

def equal(a, b):
    "The same rows, bit for bit, wherever they lie"
    assert type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
    for x,y in zip(numpy_leaves(a.to('cpu').rows), numpy_leaves(b.to('cpu').rows)): assert bits(x) == bits(y)
    if hasattr(type(a), 'burn_in'): assert a._each == b._each

programs = st.binary(min_size=1, max_size=60)
sizes = st.lists(st.integers(0, 20), max_size=8)

@pytest.mark.parametrize('name', STORES)
@pytest.mark.parametrize('dtype', [PIXELS,NESTED], ids=['pixels','nested'])
@cases(40)
@given(program=programs, sizes=sizes, max_sz=st.integers(1, 12) | st.just(40), saves=st.integers(0, 255), first=st.integers(0, 1))
def test_a_store_holds_what_rows_hold(stores, name, dtype, program, sizes, max_sz, saves, first):
    "Under `Timeline`: blocks of any size, several environments, wraps; take, windows, walk, batch; saved and loaded, also from one store to another"
    make,rows = stores[name],story(program, dtype, first)
    a,b = Timeline(max_sz),Timeline(max_sz, make())
    for i,block in enumerate(cut(rows, sizes)):
        assert a.add(Steps(block)).tolist() == b.add(Steps(block)).tolist()
        if saves>>i & 1 and i < 8:
            fresh = Timeline(max_sz, make())
            fresh.load_state_dict(through_file(b.state_dict()))
            b = fresh
        assert a.keys.tolist() == b.keys.tolist() and a.dtype == b.dtype
        if not len(a): continue
        keys,rng = a.keys[np.random.default_rng(i).integers(0, len(a), 7)],np.random.default_rng(i)
        equal(b.take(keys), a.take(keys)); equal(b[:], a[:]); equal(b.windows(keys, 3), a.windows(keys, 3))
        assert b.windows(keys, 3).device.type == b.take(keys[:0]).device.type == 'cpu'
        assert (a.walk(keys, [-2,-1,0,1,3]) == b.walk(keys, [-2,-1,0,1,3])).all()
        weights = rng.random(7)
        equal(b.batch(keys, weights), a.batch(keys, weights))
        assert (a.times_drawn == b.times_drawn).all() and (a.ages == b.ages).all()
        assert same(a.state_dict()['links'], b.state_dict()['links'])
    if name != 'path': 
        twin = Timeline(max_sz)
        twin.load_state_dict(b.state_dict())
        if len(a): equal(twin[:], a[:])
    for twin in copy.deepcopy(b),pickle.loads(pickle.dumps(b)):
        assert twin.add(Steps(rows)).tolist() == list(range(len(rows), 2*len(rows))) and b.inserted == len(rows)
        if len(a): equal(b[:], a[:])

REPLAYS = dict(
    uniform  = lambda **kw: ExperienceReplay(None, 3, seed=5, **kw),
    errors   = lambda **kw: PrioritizedReplay(None, 3, seed=5, weight_norm='memory', **kw),
    ranks    = lambda **kw: PrioritizedReplay(None, 3, kind='rank', seed=5, **kw),
    given    = lambda **kw: PrioritizedReplay(None, 3, initial='logp', seed=5, **kw),
    sequence = lambda **kw: SequenceReplay(None, 2, length=3, burn_in=1, overlap=1, seed=5, **kw))

@pytest.mark.parametrize('name', STORES)
@pytest.mark.parametrize('kind', REPLAYS)
@cases(15)
@given(program=programs, sizes=sizes, max_sz=st.integers(3, 12) | st.just(40), saves=st.integers(0, 255))
def test_replays_draw_the_same_from_any_store(stores, name, kind, program, sizes, max_sz, saves):
    "The same seed gives the same batches, bit for bit, through errors that come back and checkpoints"
    make,rows,templates = REPLAYS[kind],story(program, PIXELS),(Rows(),stores[name]())
    replays = [make(max_sz=max_sz, store=s) for s in templates]
    for i,block in enumerate(cut(rows, sizes)):
        for r in replays: r.add(Steps(block))
        if saves>>i & 1 and i < 8:
            for j,s in enumerate(templates):
                fresh = make(max_sz=max_sz, store=s)
                fresh.load_state_dict(through_file(replays[j].state_dict()))
                replays[j] = fresh
        try: batches = [r.sample() for r in replays]
        except NotEnoughRows: continue
        equal(*batches)
        assert (batches[0].index == batches[1].index).all() and (batches[0].weight == batches[1].weight).all()
        td = np.random.default_rng(i).standard_normal((2,2) if kind == 'sequence' else 3)
        for b in batches: b.update_priorities(torch.from_numpy(td))
        assert replays[0].stats() == replays[1].stats()
        for r in replays: assert r.nbytes >= r.memory.nbytes >= r.memory._parts[1].nbytes > 0

def test_frames_are_held_once():
    "A long episode of large frames costs a frame a row, and what is overwritten is let go"
    dtype = step_dtype(Box(0, 255, (1000,), np.uint8), Discrete(2))
    rows,rng = np.zeros(50, dtype),np.random.default_rng(0)
    frames = rng.integers(0, 256, (51,1000), np.uint8)
    rows['state'],rows['next_state'],rows['step_n'] = frames[:-1],frames[1:],np.arange(50)
    line = Timeline(20, EachOnce())
    for i in range(0, 50, 7): line.add(Steps(rows[i:i+7]))
    assert line[:] == Steps(rows[30:]) and sum(map(len, line._parts[1].frames)) == 21*1000
