"""Frames that are kept once: bit for bit what plain rows hold, whatever repeats and whatever does not."""
import gc, os, sys, threading, warnings
import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given, strategies as st

import fastrl_replay.all   # noqa: F401, all stages
from fastrl_replay.core import ArgumentError, BlockError, NoRoom, StateError, Steps, step_dtype
from fastrl_replay.envs import GymStepper
from fastrl_replay.memory import frames as frames_module, timeline as timeline_module
from fastrl_replay.memory.frame_log import Packed
from fastrl_replay.memory.frames import Frames
from fastrl_replay.memory.rows import Rows
from fastrl_replay.memory.timeline import Timeline
from fastrl_replay.pipe import Items
from fastrl_replay.replay.experience import ExperienceReplay
from fastrl_replay.testing import through_file
from strategies import cases

STACK = spaces.Box(0, 255, (3,4,4), np.uint8)
KIND = step_dtype(STACK, spaces.Discrete(3))
BOTH = step_dtype(spaces.Dict(view=STACK, map=spaces.Box(0, 1, (4,4), bool), far=spaces.Box(-9, 9, (3,2,2), np.float32), speed=spaces.Box(-1, 1, (2,), np.float32)), spaces.Discrete(3))

class Small(Frames):
    "Frames of a few bytes count, in short segments"
    least,smallest_segment = 4,2

def leaf(rng, shape, dtype, repeats):
    "A picture out of a few, or out of many"
    few = rng.integers(0, 2 if dtype.kind == 'b' else 3 if repeats else 256)
    return np.full(shape, few, dtype) if repeats or dtype.kind == 'b' else rng.integers(0, 256, shape).astype(dtype)

def observation(rng, space, stack, repeats):
    "The next observation: stacks shift by one frame"
    def nxt(s, old):
        if isinstance(s, spaces.Dict): return {k: nxt(v, old and old[k]) for k,v in s.spaces.items()}
        if len(s.shape) < 3: return leaf(rng, s.shape, s.dtype, repeats)
        new = leaf(rng, s.shape[1:], s.dtype, repeats)
        return np.stack([new]*len(s.shape) if old is None else [*old[1:], new])
    return nxt(space, stack)

def put(field, value):
    if isinstance(value, dict):
        for k,v in value.items(): put(field[k], v)
    else: field[...] = value

def stream(space, kind, program, seed, repeats, n_envs=3):
    "Rows of several environments; each byte says which one goes on, and whether its episode ends, or its pictures are drawn over"
    rng,rows,now = np.random.default_rng(seed),np.zeros(len(program), kind),[None]*n_envs
    for row,b in zip(rows, program):
        env,what = b % n_envs,b // n_envs % 8
        stack,episode,step = now[env] or (observation(rng, space, None, repeats),1,0)
        after = observation(rng, space, stack, repeats)
        put(row['state'], stack); put(row['next_state'], after)
        row['env_id'],row['episode_n'],row['step_n'],row['reward'] = (0,7,300)[env],episode,step+1,b
        row['terminated'],row['truncated'] = what == 1,what == 2
        if what == 3: put(row['state'], observation(rng, space, None, False))      # a wrapper drew over it
        if what == 4: after = observation(rng, space, after, repeats)              # the next state isn't the state to come
        now[env] = (observation(rng, space, None, repeats),episode+1,0) if what in (1,2) else (after,episode,step+1)
    return rows

SPACES = {'stack': (STACK,KIND), 'dict': (spaces.Dict({k: spaces.Box(-9, 9, KIND_.shape, KIND_.base) if KIND_.base.kind == 'f' else spaces.Box(0, 1 if KIND_.base.kind == 'b' else 255, KIND_.shape, KIND_.base)
    for k,KIND_ in ((n, BOTH['state'][n]) for n in BOTH['state'].names)}),BOTH)}

@pytest.mark.parametrize('compress', [None,'lz4','zstd'])
@pytest.mark.parametrize('kind', SPACES)
@cases(40)
@given(program=st.binary(min_size=1, max_size=120), sizes=st.lists(st.integers(1, 30), max_size=12), max_sz=st.integers(1, 40), seed=st.integers(0, 9), repeats=st.booleans(), saves=st.integers(0, 255), stack=st.sampled_from([1,3]))
def test_what_comes_out_is_what_went_in(kind, compress, program, sizes, max_sz, seed, repeats, saves, stack):
    "Interleaved environments, ends, truncation, wraps, frames that repeat or don't, pictures that are drawn over, checkpoints"
    space,dtype = SPACES[kind]
    rows,store = stream(space, dtype, program, seed, repeats),Small(stack, compress)
    plain,line,at = Timeline(max_sz),Timeline(max_sz, store),0
    for i,n in enumerate([*sizes, len(rows)]):
        block = rows[at:at+n]
        at += n
        if not len(block): break
        for m in plain,line: m.add(Steps(block.copy()))
        if saves>>i & 1 and i < 8:
            fresh = Timeline(max_sz, store)
            fresh.load_state_dict(through_file(line.state_dict()))
            line = fresh
        assert (line.keys == plain.keys).all()
        keys = np.random.default_rng(i).choice(plain.keys, 9)
        assert line[:] == plain[:] and line.take(keys) == plain.take(keys) and line.windows(keys, 4) == plain.windows(keys, 4)
        assert line.batch(keys, np.ones(9)) == plain.batch(keys, np.ones(9))

class Pictures(gym.Env):
    "A counter, shown as pictures; episodes of `length` steps end or are truncated"
    observation_space,action_space = spaces.Box(0, 255, (8,8), np.uint8),spaces.Discrete(2)
    def __init__(self, length=7, truncates=False): self.length,self.truncates = length,truncates
    def _obs(self): return np.full((8,8), self.t, np.uint8) + np.arange(8, dtype=np.uint8)*self.np_random.integers(3, dtype=np.uint8)
    def reset(self, *, seed=None, options=None): super().reset(seed=seed); self.t = 0; return self._obs(),{}
    def step(self, action):
        self.t += 1
        over = self.t >= self.length
        return self._obs(),1.,over and not self.truncates,over and self.truncates,{}

def envs(*lengths): return [lambda n=n, i=i: FrameStackObservation(Pictures(n, i%2 == 0), 4) for i,n in enumerate(lengths)]
def steps(n=60): return GymStepper(envs(7,1,4), lambda s: np.zeros(3, np.int64), 0).header(n)

REPLAYS = dict(
    uniform  = lambda source, **kw: source.experience_replay(bs=8, max_sz=50, seed=1, **kw),
    errors   = lambda source, **kw: source.prioritized_replay(bs=8, max_sz=50, seed=1, **kw),
    n_step   = lambda source, **kw: source.n_step(3, .9).prioritized_replay(bs=8, max_sz=50, seed=1, **kw),
    sequence = lambda source, **kw: source.sequence_replay(bs=2, max_sz=60, length=4, burn_in=1, overlap=2, seed=1, **kw),
    prefetch = lambda source, **kw: source.experience_replay(bs=8, max_sz=50, seed=1, **kw).prefetch(2))

@pytest.mark.parametrize('compress', [None,'zstd'])
@pytest.mark.parametrize('kind', REPLAYS)
def test_replays_draw_from_frames_what_they_draw_from_rows(kind, compress):
    class Seg(Frames): smallest_segment = 8
    with REPLAYS[kind](steps(), store=Rows()) as a, REPLAYS[kind](steps(), store=Seg(4, compress)) as b:
        n = 0
        for x,y in zip(a, b):
            assert x == y
            if kind != 'uniform': y.update_priorities(np.ones(y.shape if kind != 'sequence' else (2,3))); x.update_priorities(np.ones(x.shape if kind != 'sequence' else (2,3)))
            n += 1
    assert n > 20

def test_a_row_costs_a_frame_in_every_replay():
    "One new frame a step and one an episode, also in rows of three steps; the rest is shared"
    for kind in 'uniform','n_step','sequence':
        replay = REPLAYS[kind](steps(1000), store=Frames(4))
        for _ in replay: pass
        stats = replay.stats()
        episodes = replay.memory.inserted*(1/7 + 1/1 + 1/4)/3   # of three environments that take turns
        assert stats['row_frames'] <= (replay.memory.inserted + episodes)/replay.memory.inserted + .05, kind
        assert replay.stats()['row_bytes'] == replay.memory.nbytes/len(replay.memory)

def test_checkpoints_go_on_exactly():
    "A replay that is saved and loaded in the middle draws the same as one that was not, through a file"
    blocks = [b.copy() for b in steps(80)]
    def replay(): return Items(blocks).experience_replay(bs=8, max_sz=30, seed=3, store=Frames(4, 'zstd'))
    want,first,second = [b.copy() for b in replay()],replay(),replay()
    some = [b.copy() for _,b in zip(range(len(want)//2), first)]
    second.load_state_dict(through_file(first.state_dict()))
    assert some + [b.copy() for b in second] == want

def test_frames_in_worker_processes():
    "A replay with frames runs in worker processes, packing thread and all"
    pipe = steps(40).experience_replay(bs=4, max_sz=40, seed=1, store=Frames(4, 'lz4')).parallel(2)
    with pipe: got = [b for b in pipe]
    assert got and all(b.state.shape == (4,4,8,8) for b in got)

# ---- what goes, what is packed ----

def episode(n, env=0, seed=0, start=0):
    "One long episode in single frames of 256 bytes"
    kind = step_dtype(spaces.Box(0, 255, (256,), np.uint8), spaces.Discrete(2))
    rng,rows = np.random.default_rng(seed),np.zeros(n, kind)
    pictures = rng.integers(0, 256, (n+1,256), np.uint8)
    rows['state'],rows['next_state'],rows['step_n'],rows['env_id'] = pictures[:-1],pictures[1:],start + np.arange(n),env
    return rows

@pytest.mark.parametrize('compress', [None,'lz4','zstd'])
def test_memory_is_bounded_however_long_it_goes_on(compress):
    "Frames go when the last row that needs them goes: a memory of 1,000 rows is as large after 10,000 as after 3,000"
    line,sizes,rows = Timeline(1000, Frames(1, compress)),[],episode(10_000)
    for i in range(0, 10_000, 50):
        line.add(Steps(rows[i:i+50]))
        sizes.append(line.nbytes)
    log = line._parts[1]._logs[0]
    assert max(sizes[60:]) <= 1.25*sizes[59] and len(log) <= 1000 + 8*32 and log.frames == 10_001
    assert line[:] == Steps(rows[-1000:])

def test_a_slow_environment_keeps_no_more_than_its_rows():
    "One that gives a row in a thousand doesn't hold the frames of the others for longer than the memory's rows"
    fast,slow = episode(20_000),episode(40, env=1, seed=1)
    line = Timeline(500, Frames())
    for i in range(40):
        for j in range(0, 500, 50): line.add(Steps(fast[i*500+j:i*500+j+50]))
        line.add(Steps(slow[i:i+1]))
        keys = line.keys
        assert line.take(keys[-1:]) == Steps(slow[i:i+1])
    assert len(line._parts[1]._logs[0]) <= 500 + 4*32

@pytest.mark.parametrize('compress', [None,'zstd'])
@pytest.mark.parametrize('n_envs', [1, 64])
def test_many_environments_share_their_own_frames(n_envs, compress):
    "However many take turns: frames are raw for long enough to be found again"
    streams = [episode(100, env=e, seed=e) for e in range(n_envs)]
    line = Timeline(100*n_envs, Frames(1, compress))
    for i in range(100): line.add(Steps(np.concatenate([s[i:i+1] for s in streams])))
    assert line._parts[1]._logs[0].frames == 101*n_envs
    assert line[:] == Steps(np.concatenate([s[i:i+1] for i in range(100) for s in streams]))

def test_packed_frames_are_drawn_while_others_are_packed():
    "Threads that draw and one that adds: every row is what it was"
    rows = episode(6000)
    rows['reward'] = np.arange(6000)
    replay = ExperienceReplay(None, 16, 2000, store=Frames(1, 'zstd'), seed=0)
    replay.add(Steps(rows[:100]))
    wrong,done = [],threading.Event()
    def draw():
        while not done.is_set():
            b = replay.sample().rows
            i = b['reward'].astype(int)
            if (b['state'] != rows['state'][i]).any() or (b['next_state'] != rows['next_state'][i]).any(): wrong.append(i)
    threads = [threading.Thread(target=draw) for _ in range(3)]
    for t in threads: t.start()
    for i in range(100, 6000, 10): replay.add(Steps(rows[i:i+10]))
    done.set()
    for t in threads: t.join()
    assert not wrong and any(isinstance(s, Packed) for s in replay.memory._parts[1]._logs[0]._segments.values())

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork here')
def test_a_forked_process_packs_its_own_frames():
    "The packing thread is not there after a fork; what it had not done is asked for again"
    line,rows = Timeline(3000, Frames(1, 'lz4')),episode(3000)
    for i in range(0, 1500, 10): line.add(Steps(rows[i:i+10]))
    pid = os.fork()
    if not pid:
        try:
            for i in range(1500, 3000, 10): line.add(Steps(rows[i:i+10]))
            good = line[:] == Steps(rows) and sum(isinstance(s, Packed) for s in line._parts[1]._logs[0]._segments.values()) > 50
            os._exit(0 if good else 1)
        except BaseException: os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for i in range(1500, 3000, 10): line.add(Steps(rows[i:i+10]))
    assert line[:] == Steps(rows)

def test_a_memory_that_goes_leaves_nothing():
    "No cycle keeps its gigabytes, and its thread ends"
    gc.disable()
    try:
        import weakref
        line = Timeline(3000, Frames(1, 'lz4'))
        line.add(Steps(episode(2000)))
        gone = weakref.ref(line._parts[1]._logs[0])
        del line
        assert gone() is None
    finally: gc.enable()

# ---- refusals ----

def test_stacks_that_are_not_there_are_named():
    for shape,want in ((84,84,4), "stack=4; got state: uint8\\[84, 84, 4\\]; expected an observation whose first axis is 4 long"),((6,), 'observations without frames'):
        with pytest.raises(BlockError, match=want):
            Timeline(10, Frames(4)).add(Steps(np.zeros(1, step_dtype(spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(2)))))
    for wrong in dict(stack=0),dict(stack='4'),dict(compress='zip'),dict(compress=True):
        with pytest.raises((ArgumentError,TypeError,ValueError)): Frames(**wrong)
    with pytest.raises(ArgumentError, match="'state.vew'"): Timeline(9, Frames(3, columns='state.vew')).add(Steps(np.zeros(1, BOTH)))

def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'lz4.block', None)
    with pytest.raises(ArgumentError, match=r"pip install 'fastrl_replay\[compress\]'"): Frames(4, 'lz4')

def test_a_block_that_is_refused_leaves_the_memory_as_it_was():
    rows = np.concatenate([episode(20), episode(20, env=1, seed=1)])
    line = Timeline(60, Frames())
    line.add(Steps(rows[:30]))
    before = through_file(line.state_dict()),line.nbytes
    bad = rows[30:].copy(); bad['reward'][3] = np.nan
    with pytest.raises(BlockError, match='NaN'): line.add(Steps(bad))
    assert str(before[0]) == str(through_file(line.state_dict())) and line.nbytes == before[1]
    line.add(Steps(rows[30:]))
    assert line[:] == Steps(rows)

def test_a_memory_that_cannot_fit_is_refused_at_its_first_row(monkeypatch):
    "With what it needs, what there is, and what Frames would need"
    monkeypatch.setattr(timeline_module, 'machine_memory', lambda: 20*2**30)
    row = Steps(np.zeros(1, step_dtype(spaces.Box(0, 255, (4,84,84), np.uint8), spaces.Discrete(6))))
    replay = ExperienceReplay(None, 32)
    with pytest.raises(NoRoom, match=r'ExperienceReplay: no memory for max_sz=1_000_000 rows of 56_480 bytes; got a machine with 20 GiB; expected 53 GiB. Remedy: store=Frames\(4\), which needs 6.6 GiB; or max_sz=304_176'): replay.add(row)
    assert len(replay) == 0
    ExperienceReplay(None, 32, store=Frames(4)).add(row)
    with pytest.raises(NoRoom, match='10_000_000 rows'): ExperienceReplay(None, 32, 10_000_000, store=Frames(4)).add(row)
    ExperienceReplay(None, 32, 10_000_000, store=Frames(4, 'zstd')).add(row)

def test_growth_ends_where_the_machine_does(monkeypatch):
    "An error before anything is changed; the memory goes on being drawn from"
    rows = episode(8000)
    rows['state'] ^= np.random.default_rng(1).integers(0, 256, rows['state'].shape, np.uint8)
    line = Timeline(100_000, Frames())
    line.add(Steps(rows[:100]))
    limit = line.nbytes + 2**20
    monkeypatch.setattr(frames_module, 'machine_memory', lambda: limit)
    with pytest.raises(NoRoom, match='Frames: [0-9_]+ rows fill the machine'), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for i in range(100, 8000, 100): line.add(Steps(rows[i:i+100]))
    n = len(line)
    assert 100 <= n < 8000 and line._parts[1].nbytes <= limit and line[:] == Steps(rows[:n])

@pytest.mark.parametrize('what, why', [('noise', 'no frame comes again'), ('order', 'the state is rarely'), ('old', 'something draws over them')])
def test_what_does_not_repeat_is_said_once(what, why):
    rng,kind = np.random.default_rng(0),step_dtype(spaces.Box(0, 255, (4,8,8), np.uint8), spaces.Discrete(2))
    rows = np.zeros(1500, kind)
    pictures = rng.integers(0, 256, (1504,8,8), np.uint8)
    for i,row in enumerate(rows): row['state'],row['next_state'] = pictures[i:i+4],pictures[i+1:i+5]
    rows['step_n'] = np.arange(1500)
    if what == 'noise':
        for c in 'state','next_state': rows[c] ^= rng.integers(0, 256, rows[c].shape, np.uint8)
    if what == 'order': rows = rows[rng.permutation(1500)]; rows['step_n'] = np.arange(1500)
    if what == 'old':   # each stack is drawn anew, and handed on as the state that comes
        rows['next_state'] ^= rng.integers(0, 256, rows['next_state'].shape, np.uint8)
        rows['state'][1:] = rows['next_state'][:-1]
    line = Timeline(1500, Frames(4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        for i in range(0, 1500, 10): line.add(Steps(rows[i:i+10]))
    assert len(said) == 1 and why in str(said[0].message) and "'state'" in str(said[0].message)
    assert line[:] == Steps(rows) and len(line) == 1500

# ---- saved states that were tampered with ----

def saved_of(compress):
    line = Timeline(300, Small(1, compress))
    line.add(Steps(episode(300)))
    for _ in range(3): line.add(Steps(episode(100, seed=2)))
    return line,through_file(line.state_dict())

@pytest.mark.parametrize('compress', [None,'lz4','zstd'])
def test_damaged_frames_are_refused(compress):
    line,state = saved_of(compress)
    def damaged(**kw): return dict(state, store=dict(state['store'], **kw))
    def log(**kw): return damaged(frames=[dict(state['store']['frames'][0], **kw)])
    store,frames = state['store'],state['store']['frames'][0]
    cases = [damaged(references=store['references'] + 400), damaged(references=-store['references'] - 1), damaged(rest=store['rest'][:-1]),
        damaged(rest=torch.full_like(store['rest'], 255)), damaged(frames=[]), damaged(compress='other'),
        log(raw=frames['raw'][:, :-1]), log(raw=frames['raw'][:0]), log(lengths=frames['lengths'] + 1 if compress else torch.ones(3, dtype=torch.int64))]
    if compress: cases += [log(packed=frames['packed'].flip(0)), log(packed=frames['packed'][:-1]), log(lengths=frames['lengths'][:-1]), log(lengths=-frames['lengths'])]
    before = str(line.state_dict())
    for bad in cases:
        with pytest.raises(StateError): line.load_state_dict(bad)
        assert str(line.state_dict()) == before
    line.load_state_dict(state)
    assert str(line.state_dict()['store']['rest']) == str(store['rest'])

def test_frames_of_floats_and_flags_are_looked_at():
    for space,bad in (spaces.Box(-9, 9, (40,), np.float32), np.nan), (spaces.Box(0, 1, (100,), bool), 2):
        kind = step_dtype(space, spaces.Discrete(2))
        line = Timeline(9, Frames())
        line.add(Steps(np.zeros(3, kind)))
        state = through_file(line.state_dict())
        raw = state['store']['frames'][0]['raw']
        raw.numpy().reshape(-1).view(np.float32 if bad is np.nan else np.uint8)[:] = bad
        with pytest.raises(StateError): line.load_state_dict(state)
    with pytest.raises(BlockError, match='NaN'): line = Timeline(9, Frames()); rows = np.zeros(1, step_dtype(spaces.Box(-9, 9, (40,)), spaces.Discrete(2))); rows['next_state'][0,3] = np.nan; line.add(Steps(rows))
