"""Frames that are kept once: bit for bit what plain rows hold, whatever repeats and whatever does not."""

import gc, os, sys, threading, warnings
import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.steps.errors import NoRoom
from fastrl_replay.steps import machine as machine_module
from fastrl_replay.memory.device_frames import DeviceLog
from fastrl_replay.memory.frame_log import FrameLog, Packed
from fastrl_replay.memory.frame_segments import FrameFiles
from fastrl_replay.testing import through_file
from kills import forked
from strategies import cases, equal

STACK = spaces.Box(0, 255, (3, 4, 4), np.uint8)
KIND = step_dtype(STACK, spaces.Discrete(3))
BOTH = step_dtype(
    spaces.Dict(
        view=STACK,
        map=spaces.Box(0, 1, (4, 4), bool),
        far=spaces.Box(-9, 9, (3, 2, 2), np.float32),
        speed=spaces.Box(-1, 1, (2,), np.float32),
    ),
    spaces.Discrete(3),
)


class Small(Frames):
    "Frames of a few bytes count, in short segments"

    least, smallest_segment = 4, 2


def leaf(rng, shape, dtype, repeats):
    "A picture out of a few, or out of many"
    few = rng.integers(0, 2 if dtype.kind == 'b' else 3 if repeats else 256)
    return (
        np.full(shape, few, dtype)
        if repeats or dtype.kind == 'b'
        else rng.integers(0, 256, shape).astype(dtype)
    )


def observation(rng, space, stack, repeats):
    "The next observation: stacks shift by one frame"

    def nxt(s, old):
        if isinstance(s, spaces.Dict):
            return {k: nxt(v, old and old[k]) for k, v in s.spaces.items()}
        if len(s.shape) < 3:
            return leaf(rng, s.shape, s.dtype, repeats)
        new = leaf(rng, s.shape[1:], s.dtype, repeats)
        return np.stack([new] * len(s.shape) if old is None else [*old[1:], new])

    return nxt(space, stack)


def put(field, value):
    if isinstance(value, dict):
        for k, v in value.items():
            put(field[k], v)
    else:
        field[...] = value


def stream(space, kind, program, seed, repeats, n_envs=3):
    "Rows of several environments; each byte says which one goes on, and whether its episode ends, or its pictures are drawn over"
    rng, rows, now = np.random.default_rng(seed), np.zeros(len(program), kind), [None] * n_envs
    for row, b in zip(rows, program):
        env, what = b % n_envs, b // n_envs % 8
        stack, episode, step = now[env] or (observation(rng, space, None, repeats), 1, 0)
        after = observation(rng, space, stack, repeats)
        put(row['state'], stack)
        put(row['next_state'], after)
        row['env_id'], row['episode_n'], row['step_n'], row['reward'] = (
            (0, 7, 300)[env],
            episode,
            step + 1,
            b,
        )
        row['terminated'], row['truncated'] = what == 1, what == 2
        if what == 3:
            put(row['state'], observation(rng, space, None, False))  # a wrapper drew over it
        if what == 4:
            after = observation(
                rng, space, after, repeats
            )  # the next state isn't the state to come
        now[env] = (
            (observation(rng, space, None, repeats), episode + 1, 0)
            if what in (1, 2)
            else (after, episode, step + 1)
        )
    return rows


SPACES = {
    'stack': (STACK, KIND),
    'dict': (
        spaces.Dict(
            {
                k: spaces.Box(-9, 9, KIND_.shape, KIND_.base)
                if KIND_.base.kind == 'f'
                else spaces.Box(0, 1 if KIND_.base.kind == 'b' else 255, KIND_.shape, KIND_.base)
                for k, KIND_ in ((n, BOTH['state'][n]) for n in BOTH['state'].names)
            }
        ),
        BOTH,
    ),
}


@pytest.mark.parametrize(
    'kw',
    [{}, dict(compress='lz4'), dict(compress='zstd'), dict(device='cpu')],
    ids=['raw', 'lz4', 'zstd', 'device'],
)
@pytest.mark.parametrize('kind', SPACES)
@cases(40)
@given(
    program=st.binary(min_size=1, max_size=120),
    sizes=st.lists(st.integers(1, 30), max_size=12),
    max_sz=st.integers(1, 40),
    seed=st.integers(0, 9),
    repeats=st.booleans(),
    saves=st.integers(0, 255),
    stack=st.sampled_from([1, 3]),
)
def test_what_comes_out_is_what_went_in(
    kind, kw, program, sizes, max_sz, seed, repeats, saves, stack
):
    "Interleaved environments, ends, truncation, wraps, frames that repeat or don't, pictures that are drawn over, checkpoints; from a device to main memory and back"
    space, dtype = SPACES[kind]
    rows, stores, at = (
        stream(space, dtype, program, seed, repeats),
        [Small(stack, **kw), Small(stack, **{**kw, 'device': None})],
        0,
    )
    plain, line = Timeline(max_sz), Timeline(max_sz, stores[0])
    for i, n in enumerate([*sizes, len(rows)]):
        block = rows[at : at + n]
        at += n
        if not len(block):
            break
        for m in plain, line:
            m.add(Steps(block.copy()))
        if saves >> i & 1 and i < 8:
            fresh = Timeline(max_sz, stores[i % 2])
            fresh.load_state_dict(through_file(line.state_dict()))
            line = fresh
        assert (line.keys == plain.keys).all()
        keys = np.random.default_rng(i).choice(plain.keys, 9)
        for of in (
            lambda m: m[:],
            lambda m: m.take(keys),
            lambda m: m.windows(keys, 4),
            lambda m: m.batch(keys, np.ones(9)),
        ):
            equal(of(line), of(plain))


class Pictures(gym.Env):
    "A counter, shown as pictures; episodes of `length` steps end or are truncated"

    observation_space, action_space = spaces.Box(0, 255, (8, 8), np.uint8), spaces.Discrete(2)

    def __init__(self, length=7, truncates=False):
        self.length, self.truncates = length, truncates

    def _obs(self):
        return np.full((8, 8), self.t, np.uint8) + np.arange(
            8, dtype=np.uint8
        ) * self.np_random.integers(3, dtype=np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        over = self.t >= self.length
        return self._obs(), 1.0, over and not self.truncates, over and self.truncates, {}


def envs(*lengths):
    return [
        lambda n=n, i=i: FrameStackObservation(Pictures(n, i % 2 == 0), 4)
        for i, n in enumerate(lengths)
    ]


def steps(n=60):
    return GymStepper(envs(7, 1, 4), lambda s: np.zeros(3, np.int64), 0).header(n)


REPLAYS = dict(
    uniform=lambda source, **kw: source.experience_replay(bs=8, max_sz=50, seed=1, **kw),
    errors=lambda source, **kw: source.prioritized_replay(bs=8, max_sz=50, seed=1, **kw),
    n_step=lambda source, **kw: source.n_step(3, 0.9).prioritized_replay(
        bs=8, max_sz=50, seed=1, **kw
    ),
    sequence=lambda source, **kw: source.sequence_replay(
        bs=2, max_sz=60, length=4, burn_in=1, overlap=2, seed=1, **kw
    ),
    prefetch=lambda source, **kw: source.experience_replay(bs=8, max_sz=50, seed=1, **kw).prefetch(
        2
    ),
)


def test_a_row_costs_a_frame_in_every_replay():
    "One new frame a step and one an episode, also in rows of three steps; the rest is shared"
    for kind in 'uniform', 'n_step', 'sequence':
        replay = REPLAYS[kind](steps(1000), store=Frames(4))
        for _ in replay:
            pass
        stats = replay.stats()
        episodes = (
            replay.memory.inserted * (1 / 7 + 1 / 1 + 1 / 4) / 3
        )  # of three environments that take turns
        assert (
            stats['row_frames']
            <= (replay.memory.inserted + episodes) / replay.memory.inserted + 0.05
        ), kind
        assert replay.stats()['row_bytes'] == replay.memory.nbytes / len(replay.memory)


# ---- what goes, what is packed ----


def episode(n, env=0, seed=0, start=0):
    "One long episode in single frames of 256 bytes"
    kind = step_dtype(spaces.Box(0, 255, (256,), np.uint8), spaces.Discrete(2))
    rng, rows = np.random.default_rng(seed), np.zeros(n, kind)
    pictures = rng.integers(0, 256, (n + 1, 256), np.uint8)
    rows['state'], rows['next_state'], rows['step_n'], rows['env_id'] = (
        pictures[:-1],
        pictures[1:],
        start + np.arange(n),
        env,
    )
    return rows


@pytest.mark.parametrize('compress', [None, 'lz4', 'zstd'])
def test_memory_is_bounded_however_long_it_goes_on(compress):
    "Frames go when the last row that needs them goes: a memory of 1,000 rows is as large after 10,000 as after 3,000"
    line, sizes, rows = Timeline(1000, Frames(1, compress)), [], episode(10_000)
    for i in range(0, 10_000, 50):
        line.add(Steps(rows[i : i + 50]))
        sizes.append(line.nbytes)
    log = line._parts[1]._logs[0]
    assert (
        max(sizes[60:]) <= 1.25 * sizes[59] and len(log) <= 1000 + 8 * 32 and log.frames == 10_001
    )
    assert line[:] == Steps(rows[-1000:])


def test_a_slow_environment_keeps_no_more_than_its_rows():
    "One that gives a row in a thousand doesn't hold the frames of the others for longer than the memory's rows"
    fast, slow = episode(20_000), episode(40, env=1, seed=1)
    line = Timeline(500, Frames())
    for i in range(40):
        for j in range(0, 500, 50):
            line.add(Steps(fast[i * 500 + j : i * 500 + j + 50]))
        line.add(Steps(slow[i : i + 1]))
        keys = line.keys
        assert line.take(keys[-1:]) == Steps(slow[i : i + 1])
    assert len(line._parts[1]._logs[0]) <= 500 + 4 * 32


@pytest.mark.parametrize('compress', [None, 'zstd'])
@pytest.mark.parametrize('n_envs', [1, 64])
def test_many_environments_share_their_own_frames(n_envs, compress):
    "However many take turns: frames are raw for long enough to be found again"
    streams = [episode(100, env=e, seed=e) for e in range(n_envs)]
    line = Timeline(100 * n_envs, Frames(1, compress))
    for i in range(100):
        line.add(Steps(np.concatenate([s[i : i + 1] for s in streams])))
    assert line._parts[1]._logs[0].frames == 101 * n_envs
    assert line[:] == Steps(np.concatenate([s[i : i + 1] for i in range(100) for s in streams]))


def test_packed_frames_are_drawn_while_others_are_packed():
    "Threads that draw and one that adds: every row is what it was"
    rows = episode(6000)
    rows['reward'] = np.arange(6000)
    replay = ExperienceReplay(None, 16, 2000, store=Frames(1, 'zstd'), seed=0)
    replay.add(Steps(rows[:100]))
    wrong, done = [], threading.Event()

    def draw():
        while not done.is_set():
            b = replay.sample().rows
            i = b['reward'].astype(int)
            if (b['state'] != rows['state'][i]).any() or (
                b['next_state'] != rows['next_state'][i]
            ).any():
                wrong.append(i)

    threads = [threading.Thread(target=draw) for _ in range(3)]
    for t in threads:
        t.start()
    for i in range(100, 6000, 10):
        replay.add(Steps(rows[i : i + 10]))
    done.set()
    for t in threads:
        t.join()
    replay.memory._parts[1]._logs[0].take_packed(wait=True)
    assert not wrong and any(
        isinstance(s, Packed) for s in replay.memory._parts[1]._logs[0].segments.values()
    )


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork here')
def test_a_forked_process_packs_its_own_frames():
    "The packing thread is not there after a fork; what it had not done is asked for again"
    line, rows = Timeline(3000, Frames(1, 'lz4')), episode(3000)
    for i in range(0, 1500, 10):
        line.add(Steps(rows[i : i + 10]))

    def pack():
        for i in range(1500, 3000, 10):
            line.add(Steps(rows[i : i + 10]))
        return (
            line[:] == Steps(rows)
            and sum(isinstance(s, Packed) for s in line._parts[1]._logs[0].segments.values()) > 50
        )

    assert forked(pack) == (0, True)
    for i in range(1500, 3000, 10):
        line.add(Steps(rows[i : i + 10]))
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
    finally:
        gc.enable()


# ---- refusals ----


def test_stacks_that_are_not_there_are_named():
    for shape, want in (
        (
            (84, 84, 4),
            "stack=4; got state: uint8\\[84, 84, 4\\]; expected an observation whose first axis is 4 long",
        ),
        ((6,), 'observations without frames'),
    ):
        with pytest.raises(BlockError, match=want):
            Timeline(10, Frames(4)).add(
                Steps(
                    np.zeros(1, step_dtype(spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(2)))
                )
            )
    for wrong in dict(stack=0), dict(stack='4'), dict(compress='zip'), dict(compress=True):
        with pytest.raises((ArgumentError, TypeError, ValueError)):
            Frames(**wrong)
    with pytest.raises(ArgumentError, match="'state.vew'"):
        Timeline(9, Frames(3, columns='state.vew')).add(Steps(np.zeros(1, BOTH)))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'lz4.block', None)
    with pytest.raises(ArgumentError, match=r"pip install 'fastrl_replay\[compress\]'"):
        Frames(4, 'lz4')


def test_a_memory_that_cannot_fit_is_refused_at_its_first_row(monkeypatch):
    "With what it needs, what there is, and what Frames would need"
    monkeypatch.setattr(machine_module, 'machine_memory', lambda: 20 * 2**30)
    row = Steps(
        np.zeros(1, step_dtype(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6)))
    )
    replay = ExperienceReplay(None, 32)
    with pytest.raises(
        NoRoom,
        match=r'ExperienceReplay: no memory for max_sz=1_000_000 rows of 56_480 bytes; got a machine with 20 GiB; expected 53 GiB. Remedy: store=Frames\(4\), which needs 6.6 GiB; or max_sz=304_176',
    ):
        replay.add(row)
    assert len(replay) == 0
    ExperienceReplay(None, 32, store=Frames(4)).add(row)
    with pytest.raises(NoRoom, match='10_000_000 rows'):
        ExperienceReplay(None, 32, 10_000_000, store=Frames(4)).add(row)
    ExperienceReplay(None, 32, 10_000_000, store=Frames(4, 'zstd')).add(row)


def test_growth_ends_where_the_machine_does(monkeypatch):
    "An error before anything is changed; the memory goes on being drawn from"
    rows = episode(8000)
    rows['state'] ^= np.random.default_rng(1).integers(0, 256, rows['state'].shape, np.uint8)
    line = Timeline(100_000, Frames())
    line.add(Steps(rows[:100]))
    limit = line.nbytes + 2**20
    monkeypatch.setattr(machine_module, 'machine_memory', lambda: limit)
    with (
        pytest.raises(
            NoRoom,
            match='Frames: no memory for more frames; got [0-9.]+ MiB for [0-9_]+ rows, 2.0 frames a row; expected at most',
        ),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter('ignore')
        for i in range(100, 8000, 100):
            line.add(Steps(rows[i : i + 100]))
    n = len(line)
    assert 100 <= n < 8000 and line._parts[1].nbytes <= limit and line[:] == Steps(rows[:n])


@pytest.mark.parametrize(
    'what, why',
    [
        ('noise', 'no frame comes again'),
        ('order', 'states are rarely'),
        ('old', 'something draws over them'),
    ],
)
def test_what_does_not_repeat_is_said_once(what, why):
    rng, kind = (
        np.random.default_rng(0),
        step_dtype(spaces.Box(0, 255, (4, 8, 8), np.uint8), spaces.Discrete(2)),
    )
    rows = np.zeros(1500, kind)
    pictures = rng.integers(0, 256, (1504, 8, 8), np.uint8)
    for i, row in enumerate(rows):
        row['state'], row['next_state'] = pictures[i : i + 4], pictures[i + 1 : i + 5]
    rows['step_n'] = np.arange(1500)
    if what == 'noise':
        for c in 'state', 'next_state':
            rows[c] ^= rng.integers(0, 256, rows[c].shape, np.uint8)
    if what == 'order':
        rows = rows[rng.permutation(1500)]
        rows['step_n'] = np.arange(1500)
    if what == 'old':  # each stack is drawn anew, and handed on as the state that comes
        rows['next_state'] ^= rng.integers(0, 256, rows['next_state'].shape, np.uint8)
        rows['state'][1:] = rows['next_state'][:-1]
    line = Timeline(1500, Frames(4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        for i in range(0, 1500, 10):
            line.add(Steps(rows[i : i + 10]))
    assert len(said) == 1 and why in str(said[0].message) and "'state'" in str(said[0].message)
    assert line[:] == Steps(rows) and len(line) == 1500


# ---- saved states that were tampered with ----


def saved_of(compress):
    line = Timeline(300, Small(1, compress))
    for rows in episode(300), episode(300, seed=2):
        for i in range(0, 300, 10):
            line.add(Steps(rows[i : i + 10]))
            line._parts[1]._logs[0].take_packed(wait=True)
    return line, through_file(line.state_dict())


@pytest.mark.parametrize('compress', [None, 'lz4', 'zstd'])
def test_damaged_frames_are_refused(compress):
    line, state = saved_of(compress)

    def damaged(**kw):
        return dict(state, store=dict(state['store'], **kw))

    def log(**kw):
        return damaged(frames=[dict(state['store']['frames'][0], **kw)])

    store, frames = state['store'], state['store']['frames'][0]
    cases = [
        damaged(references=store['references'] + 400),
        damaged(references=-store['references'] - 1),
        damaged(rest=store['rest'][:-1]),
        damaged(rest=torch.full_like(store['rest'], 255)),
        damaged(frames=[]),
        damaged(compress='other'),
        log(raw=frames['raw'][:, :-1]),
        log(raw=frames['raw'][:0]),
        log(lengths=frames['lengths'] + 1 if compress else torch.ones(3, dtype=torch.int64)),
    ]
    if compress:
        cases += [
            log(packed=frames['packed'].flip(0)),
            log(packed=frames['packed'][:-1]),
            log(lengths=frames['lengths'][:-1]),
            log(lengths=-frames['lengths']),
        ]
    before = str(line.state_dict())
    for bad in cases:
        with pytest.raises(StateError):
            line.load_state_dict(bad)
        assert str(line.state_dict()) == before
    line.load_state_dict(state)
    assert str(line.state_dict()['store']['rest']) == str(store['rest'])


def test_frames_of_floats_and_flags_are_looked_at():
    for space, bad in (
        (spaces.Box(-9, 9, (40,), np.float32), np.nan),
        (spaces.Box(0, 1, (100,), bool), 2),
    ):
        kind = step_dtype(space, spaces.Discrete(2))
        line = Timeline(9, Frames())
        line.add(Steps(np.zeros(3, kind)))
        state = through_file(line.state_dict())
        raw = state['store']['frames'][0]['raw']
        raw.numpy().reshape(-1).view(np.float32 if bad is np.nan else np.uint8)[:] = bad
        with pytest.raises(StateError):
            line.load_state_dict(state)
    with pytest.raises(BlockError, match='NaN'):
        line = Timeline(9, Frames())
        rows = np.zeros(1, step_dtype(spaces.Box(-9, 9, (40,)), spaces.Discrete(2)))
        rows['next_state'][0, 3] = np.nan
        line.add(Steps(rows))


# ---- what a stranger found ----


def test_a_frame_that_unpacks_to_another_size_is_refused():
    "One byte was spread over the frame, and later bytes were read that belong to others; and a bomb is not unpacked"
    import lz4.block, zstandard

    for compress, pack in (
        ('lz4', lambda b: lz4.block.compress(b, store_size=False)),
        ('zstd', zstandard.ZstdCompressor().compress),
    ):
        line, state = saved_of(compress)
        frames = state['store']['frames'][0]
        n = len(frames['lengths'])
        for content in bytes(1), b'', bytes(255), bytes(257), bytes(2**26):
            one = pack(content)
            damaged = dict(
                frames,
                packed=torch.frombuffer(bytearray(one * n), dtype=torch.uint8),
                lengths=torch.full((n,), len(one)),
                raw=frames['raw'][:0],
            )
            with pytest.raises(StateError):
                Timeline(300, Small(1, compress)).load_state_dict(
                    dict(state, store=dict(state['store'], frames=[damaged]))
                )


@pytest.mark.parametrize('compress', [None, 'lz4'])
@pytest.mark.parametrize('at', [1000, 1001, 1300, 1999])
def test_a_loaded_memory_is_as_large_as_one_that_never_was_saved(compress, at):
    rows, lines = episode(4000), [Timeline(1000, Frames(1, compress)) for _ in range(2)]
    lines[0].add(Steps(rows[: at - 500]))
    lines[0].add(Steps(rows[at - 500 : at]))
    lines[1].load_state_dict(through_file(lines[0].state_dict()))
    most = [0, 0]
    for i in range(at, 3500, 5):
        for k, line in enumerate(lines):
            line.add(Steps(rows[i : i + 5]))
            if i > at + 200:
                most[k] = max(
                    most[k], len(line._parts[1]._logs[0])
                )  # what was needed for a large block has gone
    assert (
        abs(most[0] - most[1]) <= 64 and max(most) <= 1000 + 5 * 32 and lines[0][:] == lines[1][:]
    )


class Cut(__import__('collections').deque):
    "An interrupt just after a job was handed over"

    n = 0

    def append(self, x):
        super().append(x)
        Cut.n += 1
        if Cut.n == 5:
            raise KeyboardInterrupt


@pytest.mark.parametrize('compress', ['lz4', 'zstd'])
def test_no_segment_is_packed_twice(compress):
    class Early(Small):
        raw_frames = 2

    rows, line, i, cuts = episode(400), Timeline(64, Early(1, compress)), 0, 0
    while i < 300:
        log = line._parts[1]._logs[0] if line._parts else None
        if log and not isinstance(log._jobs, Cut):
            Cut.n, log._jobs = 0, Cut()
        try:
            line.add(Steps(rows[i : i + 2]))
        except KeyboardInterrupt:
            cuts += 1
        if log:
            log.take_packed(wait=True)
        i = line.inserted
        assert line[:] == Steps(rows[line.oldest : i])
    assert cuts == 1


@pytest.mark.parametrize('compress', ['lz4', 'zstd'])
def test_an_error_of_the_packing_thread_is_told_and_nothing_is_lost(compress):
    line, rows = Timeline(3000, Frames(1, compress)), episode(3000)
    for i in range(0, 1200, 10):
        line.add(Steps(rows[i : i + 10]))
    log = line._parts[1]._logs[0]
    good = log.codec.pack

    def once(frames):
        log.codec.pack = good
        raise MemoryError('for a moment')

    log.take_packed(wait=True)
    log.codec.pack = once
    with pytest.warns(
        UserWarning, match='frames could not be packed, and stay as they are: MemoryError'
    ):
        for i in range(1200, 3000, 10):
            line.add(Steps(rows[i : i + 10]))
        state = through_file(line.state_dict())
    kinds = [isinstance(s, Packed) for s in log.segments.values()]
    assert line[:] == Steps(rows) and False in kinds[: kinds.index(True) + sum(kinds)]
    twin = Timeline(3000, Frames(1, compress))
    twin.load_state_dict(state)
    assert twin[:] == Steps(rows)


def test_large_frames_are_not_learned_from_for_long():
    "A dictionary of 16 KB is of no use to them, and a thousand of them would be copied"
    kind = step_dtype(spaces.Box(0, 255, (400, 800), np.uint8), spaces.Discrete(2))
    line, row = Timeline(100, Frames(1, 'zstd')), np.zeros(1, kind)
    for i in range(100):
        row['state'], row['next_state'], row['step_n'] = i, i + 1, i
        line.add(Steps(row.copy()))
    log = line._parts[1]._logs[0]
    assert log.segment_bytes <= 2**24 and not log.codec.dictionary
    log.take_packed(wait=True)
    assert (
        any(isinstance(s, Packed) for s in log.segments.values())
        and line[5].next_state.float().mean() == 6
    )


@pytest.mark.parametrize('n, envs', [(1, 1), (9, 2), (14, 2), (12, 4)])
@pytest.mark.parametrize('compress', [None, 'lz4'])
def test_rows_of_many_steps_share_their_frames(n, envs, compress):
    rng, kind = (
        np.random.default_rng(0),
        step_dtype(spaces.Box(0, 255, (4, 8, 8), np.uint8), spaces.Discrete(2)),
    )
    pictures, rows = rng.integers(0, 256, (envs, 404, 8, 8), np.uint8), np.zeros(400 * envs, kind)
    for i, row in enumerate(rows):
        e, t = i % envs, i // envs
        row['state'], row['next_state'], row['env_id'], row['step_n'] = (
            pictures[e, t : t + 4],
            pictures[e, t + 1 : t + 5],
            e,
            t,
        )
    replay = (
        Items([Steps(rows[i : i + 10].copy()) for i in range(0, len(rows), 10)])
        .n_step(n, 0.99)
        .experience_replay(bs=8, max_sz=5000, store=Frames(4, compress))
    )
    for _ in replay:
        pass
    assert replay.stats()['row_frames'] < 1.2


def test_rows_of_another_store_share_their_frames():
    streams = [episode(300, env=e, seed=e) for e in range(32)]
    rows = np.concatenate([s[i : i + 1] for i in range(300) for s in streams])
    old, new = Timeline(9600), Timeline(9600, Frames())
    old.add(Steps(rows))
    new.load_state_dict(through_file(old.state_dict()))
    assert new[:] == old[:] and new._parts[1].stats()['row_frames'] < 1.01


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork here')
def test_a_process_that_is_forked_while_it_learns_learns_by_itself():
    rows = np.concatenate([episode(1)] * 3000)
    rng = np.random.default_rng(0)
    texture = rng.integers(0, 256, 256, np.uint8)
    pictures = np.stack([texture] * 3001)
    pictures[:, :8] = rng.integers(0, 256, (3001, 8), np.uint8)
    rows['state'], rows['next_state'], rows['step_n'] = pictures[:-1], pictures[1:], np.arange(3000)
    line, i = Timeline(6000, Frames(1, 'zstd')), 0
    log = None
    while log is None or log.learning is None:
        line.add(Steps(rows[i : i + 10]))
        i += 10
        log = line._parts[1]._logs[0]
    log.codec.dictionary = b''  # as it is before the thread is done

    def learn():
        for k in range(i, 3000, 10):
            line.add(Steps(rows[k : k + 10]))
        log.take_packed(wait=True)
        return line[:] == Steps(rows) and bool(log.codec.dictionary)

    assert forked(learn) == (0, True)


def test_a_machine_that_is_just_large_enough_is_enough(monkeypatch):
    "What was admitted at the first row is not refused at the last"
    rows = episode(6000)
    need = Frames().needs(rows.dtype, 5000)
    monkeypatch.setattr(machine_module, 'machine_memory', lambda: int(1.03 * need))
    line = Timeline(5000, Frames())
    for i in range(0, 6000, 10):
        line.add(Steps(rows[i : i + 10]))
    assert line[:] == Steps(rows[1000:])


def test_large_frames_may_be_packed(monkeypatch):
    "Their first segment is no reason for a refusal"
    monkeypatch.setattr(machine_module, 'machine_memory', lambda: 2**30)
    row = np.zeros(1, step_dtype(spaces.Box(0, 255, (1080, 1920, 3), np.uint8), spaces.Discrete(2)))
    Timeline(300_000, Frames(1, 'zstd')).add(Steps(row))


def test_a_large_block_is_packed_little_by_little():
    "The next row doesn't wait for all of it"
    line = Timeline(30_000, Frames(1, 'lz4'))
    line.add(Steps(episode(20_000)))
    log = line._parts[1]._logs[0]
    assert len(log._jobs) <= 2
    for i in range(300):
        line.add(Steps(episode(300, seed=1)[i : i + 1]))
    log.take_packed(wait=True)
    assert sum(isinstance(s, Packed) for s in log.segments.values()) >= 8


@pytest.mark.parametrize(
    'columns',
    [
        5,
        [['state']],
        b'state',
        ('state', 'state'),
        [],
        ('state', 'next_state'),
        np.array(['a', 'b']),
    ],
    ids=repr,
)
def test_names_of_columns_are_checked(columns):
    with pytest.raises(ArgumentError, match='Frames: columns'):
        Timeline(9, Frames(1, columns=columns)).add(Steps(episode(1)))


def test_the_warning_points_at_the_caller():
    rows = episode(2000)
    rows['state'] = np.random.default_rng(5).integers(0, 256, rows['state'].shape, np.uint8)
    line = Timeline(2000, Frames())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        for i in range(0, 2000, 10):
            line.add(Steps(rows[i : i + 10]))
    assert (
        len(said) == 1
        and said[0].filename == __file__
        and 'no frame comes again' in str(said[0].message)
    )


@pytest.mark.parametrize(
    'store',
    [None, 5, torch.zeros(3), dict(frames=[None])],
    ids=['none', 'five', 'tensor', 'frames'],
)
def test_states_of_other_kinds_are_refused(store):
    line, state = saved_of(None)
    if isinstance(store, dict):
        store = dict(state['store'], **store)
    with pytest.raises(StateError):
        line.load_state_dict(dict(state, store=store))
    with pytest.raises(StateError):
        line.load_state_dict(dict(state, links=dict(state['links'], env_ids=None)))


def test_memory_that_the_machine_does_not_give_is_named(monkeypatch):
    line, rows = Timeline(300, Frames(1, 'lz4')), episode(300)
    line.add(Steps(rows[:100]))
    log = line._parts[1]._logs[0]

    class None_:
        def new(self, *a):
            raise MemoryError

    arrays, log.arrays = log.arrays, None_()
    with pytest.raises(NoRoom, match='Frames: no memory for more frames'):
        for i in range(100, 300):
            line.add(Steps(rows[i : i + 1]))
    n = len(line)
    log.arrays = arrays
    line.add(Steps(rows[n:]))
    assert line[:] == Steps(rows)


@pytest.mark.parametrize('compress', ['lz4', 'zstd'])
def test_segments_that_went_before_they_were_packed_are_not_waited_for(compress):
    "A large block pushes all others out, and the next rows go on as ever"
    line, rows = Timeline(40, Small(1, compress)), episode(600)
    for a, b in (0, 10), (10, 300), (300, 305), (305, 600):
        line.add(Steps(rows[a:b]))
    for i in range(0, 100, 3):
        line.add(Steps(rows[i : i + 3]))
    twin = Timeline(40, Small(1, compress))
    twin.load_state_dict(through_file(line.state_dict()))
    for i in range(0, 300, 3):
        for m in line, twin:
            m.add(Steps(rows[i : i + 3]))
        assert line[:] == twin[:]


@pytest.mark.parametrize('kind', [FrameFiles, DeviceLog])
def test_logs_elsewhere_do_otherwise_only_what_a_log_says_in_public(kind):
    "What the base calls behind its public methods can be changed without a look at files and devices"
    base = {n for c in FrameLog.__mro__[:-1] for n in vars(c)}
    assert not [n for n in vars(kind) if n in base and n.startswith('_') and not n.startswith('__')]
