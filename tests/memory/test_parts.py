"""Parts that people may write: stores, arrays, samplers and views, held to the ones that are there; and memories under attack."""

import copy, os, pickle, re, tempfile, threading

import numpy as np, pytest, torch
from gymnasium import spaces
from gymnasium.spaces import Discrete
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.steps.core import pack
from fastrl_replay.steps.row_dtypes import extend_dtype
from fastrl_replay.memory.places import MainMemory
from fastrl_replay.memory.rows import Store
from fastrl_replay.replay.replay import Replay
from fastrl_replay.replay.views import Transitions, View
from fastrl_replay.testing import same, through_file
from strategies import bits, cases, equal, numpy_leaves
from test_blocks import GUISES

Box, Discrete = spaces.Box, spaces.Discrete
PIXELS = step_dtype(Box(0, 255, (3, 3), np.uint8), Discrete(3), logp='f8')
NESTED = step_dtype(
    spaces.Dict(
        a=Box(-9, 9, (3,), np.float16), b=spaces.Tuple([Box(-9, 9, (), np.float64), Discrete(5)])
    ),
    Discrete(2),
    n='i8',
)

# ---- stores ----


class InAList(Store):
    "Rows as bytes in a list"

    nbytes = property(lambda self: sum(len(r) for r in self.rows if r))

    def reserve(self, place):
        self.rows = [None] * self.max_sz

    def put(self, slots, rows):
        for slot, row in zip(slots, rows):
            self.rows[slot] = row.tobytes()

    def gather(self, slots, out, present=-1):
        out[:] = 0
        for dst, slot in zip(out, slots.ravel()):
            if slot >= 0:
                dst[: self.dtype.itemsize] = np.frombuffer(self.rows[slot], np.uint8)
            if present >= 0:
                dst[present] = slot >= 0


class Folder(MainMemory):
    "A place: arrays in files of a directory; each is a new file"

    def __init__(self, files, who):
        super().__init__(who)
        self.files = files

    def emptied(self):
        return Folder(self.files, self.who)

    def new(self, name, shape, dtype, fill=None, by=None, own=False):
        fd, file = tempfile.mkstemp('.npy', f'{name}-', self.files)
        os.close(fd)
        array = np.lib.format.open_memmap(
            file, 'w+', np.dtype(dtype), tuple(np.atleast_1d(shape).tolist())
        )
        if fill is not None:
            array[...] = fill
        return array


class RowsInFolder(Rows):
    "Whole rows in a directory"

    def __init__(self, files):
        self.files = str(files)

    def new_place(self, who):
        return Folder(self.files, who)


class SavesAPath(Rows):
    "Whole rows, of which a checkpoint holds a path"

    def __init__(self, path):
        self.path = str(path)

    def state_dict(self, slots):
        fd, file = tempfile.mkstemp('.npy', 'saved-', self.path)
        os.close(fd)
        np.save(file, super().state_dict(slots)['rows'].numpy())
        return dict(path=file)

    def load_state_dict(self, slots, state):
        super().load_state_dict(slots, dict(rows=torch.from_numpy(np.load(state['path']))))


class OnDevice(Store):
    "Rows as bytes of one tensor; what is drawn lies on the same device"

    def __init__(self, device='cpu'):
        self.device = device

    nbytes = property(lambda self: self.mem.nbytes)

    def reserve(self, place):
        self.mem = torch.zeros(
            self.max_sz, self.dtype.itemsize, dtype=torch.uint8, device=self.device
        )

    def put(self, slots, rows):
        raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1).copy()
        self.mem[torch.from_numpy(slots).to(self.device)] = torch.from_numpy(raw).to(self.device)

    def empty(self, n, size):
        return torch.empty(n, size, dtype=torch.uint8, device=self.device)

    def gather(self, slots, out, present=-1):
        slots = torch.from_numpy(slots.ravel()).to(self.device)
        out.zero_()
        out[:, : self.dtype.itemsize] = torch.where(
            (slots >= 0)[:, None], self.mem[slots.clamp(min=0)], 0
        )
        if present >= 0:
            out[:, present] = (slots >= 0).to(torch.uint8)


class EachOnce(Store):
    "Each distinct frame once, however many rows have it as `state` or `next_state`"

    columns = 'state', 'next_state'
    nbytes = property(lambda self: self.rest.nbytes + self.of.nbytes + sum(map(len, self.frames)))

    def reserve(self, place):
        d = self.dtype
        self.spans = [(d.fields[c][1], d[c].itemsize) for c in self.columns]
        self.rest = place.new('rest', (self.max_sz, d.itemsize), np.uint8, 0)
        self.of, self.frames, self.held = (
            np.full((self.max_sz, 2), None, object),
            {},
            {},
        )  # frames: bytes → how many have it

    def _let_go(self, frame):
        self.frames[frame] -= 1
        if not self.frames[frame]:
            del self.frames[frame], self.held[frame]

    def put(self, slots, rows):
        raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1).copy()
        for slot, row in zip(slots, raw):
            for i, (at, size) in enumerate(self.spans):
                if self.of[slot, i] is not None:
                    self._let_go(self.of[slot, i])
                frame = row[at : at + size].tobytes()
                self.frames[frame] = self.frames.get(frame, 0) + 1
                self.of[slot, i], row[at : at + size] = self.held.setdefault(frame, frame), 0
            self.rest[slot] = row

    def gather(self, slots, out, present=-1):
        out[:] = 0
        for dst, slot in zip(out, slots.ravel()):
            if present >= 0:
                dst[present] = slot >= 0
            if slot < 0:
                continue
            dst[: self.dtype.itemsize] = self.rest[slot]
            for i, (at, size) in enumerate(self.spans):
                dst[at : at + size] = np.frombuffer(self.of[slot, i], np.uint8)


class TinyFrames(Frames):
    "Frames of a few bytes, in segments of two"

    least, smallest_segment = 1, 2


@pytest.fixture(scope='module')
def stores(tmp_path_factory):
    path = tmp_path_factory.mktemp('stores')
    return dict(
        list=InAList,
        folder=lambda: RowsInFolder(path),
        path=lambda: SavesAPath(path),
        device=OnDevice,
        there=lambda: Rows(device='cpu'),
        frames=EachOnce,
        rows=Rows,
        **FRAMES,
    )


FRAMES = {
    'whole frames': lambda: TinyFrames(),
    'stacks': lambda: TinyFrames(3),
    'lz4': lambda: TinyFrames(3, 'lz4'),
    'zstd': lambda: TinyFrames(1, 'zstd'),
    'frames there': lambda: TinyFrames(device='cpu'),
    'stacks there': lambda: TinyFrames(3, device='cpu'),
}
STORES = 'list', 'folder', 'path', 'device', 'there', 'frames', *FRAMES
EACH = [
    pytest.param(n, marks=pytest.mark.slow) if n == 'stacks there' else n for n in STORES
]  # as test_device has them, too
OF_THE_STORE = 'row_bytes', 'row_frames', 'frames'  # of a replay's stats

# ---- stories ----


def story(program, dtype, first=0):
    "Rows of four environments, one for each byte: which goes on, terminates, is truncated, or breaks off; steps count from `first`"
    rows, rng = np.zeros(len(program), dtype), np.random.default_rng(len(program))
    for a in numpy_leaves(rows):
        a[...] = rng.integers(0, 2 if a.dtype == bool else 4, a.shape)
    now = [[1, first] for _ in range(4)]
    for r, b in zip(rows, program):
        env, what = now[b & 3], b >> 2 & 3
        r['env_id'], r['episode_n'], r['step_n'] = (0, 4000, 7, 300)[b & 3], *env
        r['terminated'], r['truncated'] = what == 1, what == 2
        if 'n' in dtype.names:
            r['n'] = 1 + (b >> 4 & 1)
        env[1] += 1 + (b >> 4 == 15)
        if what:
            env[:] = (
                [env[0] + 1, first] if what < 3 or b & 32 else [env[0], first]
            )  # 3: it breaks off; the same number may begin again
    return rows


def cut(rows, sizes):
    "Blocks of these sizes, and the rest"
    at = 0
    for n in sizes:
        yield rows[at : at + n]
        at += n
    yield rows[at:]


programs = st.binary(min_size=1, max_size=60)
sizes = st.lists(st.integers(0, 20), max_size=8)


@pytest.mark.parametrize('name', EACH)
@pytest.mark.parametrize('dtype', [PIXELS, NESTED], ids=['pixels', 'nested'])
@cases(40)
@given(
    program=programs,
    sizes=sizes,
    max_sz=st.integers(1, 12) | st.just(40),
    saves=st.integers(0, 255),
    first=st.integers(0, 1),
)
def test_a_store_holds_what_rows_hold(stores, name, dtype, program, sizes, max_sz, saves, first):
    "Under `Timeline`: blocks of any size, several environments, wraps; take, windows, walk, batch; saved and loaded, also from one store to another"
    make, rows = stores[name], story(program, dtype, first)
    a, b = Timeline(max_sz), Timeline(max_sz, make())
    for i, block in enumerate(cut(rows, sizes)):
        assert a.add(Steps(block)).tolist() == b.add(Steps(block)).tolist()
        if saves >> i & 1 and i < 8:
            fresh = Timeline(max_sz, make())
            fresh.load_state_dict(through_file(b.state_dict()))
            b = fresh
        assert a.keys.tolist() == b.keys.tolist() and a.dtype == b.dtype
        if not len(a):
            continue
        keys, rng = (
            a.keys[np.random.default_rng(i).integers(0, len(a), 7)],
            np.random.default_rng(i),
        )
        equal(b.take(keys), a.take(keys))
        equal(b[:], a[:])
        equal(b.windows(keys, 3), a.windows(keys, 3))
        assert b.windows(keys, 3).device.type == b.take(keys[:0]).device.type == 'cpu'
        assert (a.walk(keys, [-2, -1, 0, 1, 3]) == b.walk(keys, [-2, -1, 0, 1, 3])).all()
        weights = rng.random(7)
        equal(b.batch(keys, weights), a.batch(keys, weights))
        assert (a.times_drawn == b.times_drawn).all() and (a.ages == b.ages).all()
        assert same(a.state_dict()['links'], b.state_dict()['links'])
    if name not in ('path', *FRAMES):  # these save other things than rows
        twin = Timeline(max_sz)
        twin.load_state_dict(b.state_dict())
        if len(a):
            equal(twin[:], a[:])
    for twin in copy.deepcopy(b), pickle.loads(pickle.dumps(b)):
        assert twin.add(Steps(rows)).tolist() == list(
            range(len(rows), 2 * len(rows))
        ) and b.inserted == len(rows)
        if len(a):
            equal(b[:], a[:])


REPLAYS = dict(
    uniform=lambda **kw: ExperienceReplay(None, 3, seed=5, **kw),
    errors=lambda **kw: PrioritizedReplay(None, 3, seed=5, weight_norm='memory', **kw),
    ranks=lambda **kw: PrioritizedReplay(None, 3, kind='rank', seed=5, **kw),
    given=lambda **kw: PrioritizedReplay(None, 3, initial='logp', seed=5, **kw),
    sequence=lambda **kw: SequenceReplay(None, 2, length=3, burn_in=1, overlap=1, seed=5, **kw),
)


@pytest.mark.parametrize('name', EACH)
@pytest.mark.parametrize('kind', REPLAYS)
@cases(15)
@given(
    program=programs,
    sizes=sizes,
    max_sz=st.integers(3, 12) | st.just(40),
    saves=st.integers(0, 255),
)
def test_replays_draw_the_same_from_any_store(stores, name, kind, program, sizes, max_sz, saves):
    "The same seed gives the same batches, bit for bit, through errors that come back and checkpoints"
    make, rows, templates = REPLAYS[kind], story(program, PIXELS), (Rows(), stores[name]())
    replays = [make(max_sz=max_sz, store=s) for s in templates]
    for i, block in enumerate(cut(rows, sizes)):
        for r in replays:
            r.add(Steps(block))
        if saves >> i & 1 and i < 8:
            for j, s in enumerate(templates):
                fresh = make(max_sz=max_sz, store=s)
                fresh.load_state_dict(through_file(replays[j].state_dict()))
                replays[j] = fresh
        try:
            batches = [r.sample() for r in replays]
        except NotEnoughRows:
            continue
        equal(*batches)
        assert (batches[0].index == batches[1].index).all() and (
            batches[0].weight == batches[1].weight
        ).all()
        td = np.random.default_rng(i).standard_normal((2, 2) if kind == 'sequence' else 3)
        for b in batches:
            b.update_priorities(torch.from_numpy(td))
        assert replays[0].stats() == {
            k: v for k, v in replays[1].stats().items() if k not in OF_THE_STORE
        }
        for r in replays:
            assert r.nbytes >= r.memory.nbytes >= r.memory._parts[1].nbytes > 0


# ---- what goes wrong in a part ----


class Flaky(InAList):
    "A list that gives up while it writes"

    fails = False

    def put(self, slots, rows):
        super().put(slots[:1], rows[:1])
        if type(self).fails:
            raise OSError('the disk is full')
        super().put(slots, rows)


@pytest.mark.parametrize('kind', REPLAYS)
@pytest.mark.parametrize('n', [1, 4, 9])
def test_a_put_that_fails_leaves_the_memory_honest(kind, n):
    "Rows that were to be overwritten are gone, nothing else has changed; and replays go on, with a sampler that knows"
    rows = story(b'\0' * 6 + b'\1' * 40, PIXELS)
    replay = REPLAYS[kind](max_sz=6, store=Flaky())
    replay.add(Steps(rows[:6]))
    replay.add(Steps(rows[6:10]))  # keys 4 to 9
    before = replay.memory.state_dict()
    Flaky.fails = True
    try:
        with pytest.raises(OSError):
            replay.add(Steps(rows[10 : 10 + n]))
    finally:
        Flaky.fails = False
    m, gone = replay.memory, min(n, 6)
    assert (m.inserted, m.keys.tolist()) == (10, list(range(4 + gone, 10)))
    if gone < 6:
        equal(m[:], Steps(rows[4 + gone : 10]))
    after = m.state_dict()['links']
    for k in 'link', 'back', 'drawn':
        assert (after[k] == before['links'][k][gone:]).all()
    for k in 'last', 'last_key', 'env_ids':
        assert (after[k] == before['links'][k]).all()
    try:
        assert set(np.ravel(replay.sample().index)) <= set(m.keys.tolist())
    except NotEnoughRows:
        assert len(replay) < replay.bs
    twin = REPLAYS[kind](max_sz=6, store=Flaky())
    twin.load_state_dict(through_file(replay.state_dict()))
    for r in replay, twin:
        assert r.add(Steps(rows[10 : 10 + n])).tolist() == list(range(10, 10 + n))
        equal(r.memory[:], Steps(rows[max(4 + gone, 4 + n) : 10 + n]))
        seen = r.memory.windows(r.memory.keys, 4).mask.sum(1)
        later = [
            min(4, sum(k2 >= k and rows['env_id'][k2] == rows['env_id'][k] for k2 in r.memory.keys))
            for k in r.memory.keys
        ]
        assert seen.tolist() == later and set(r.sample().index.tolist()) <= set(
            r.memory.keys.tolist()
        )


def test_a_first_put_that_fails_leaves_an_empty_memory():
    Flaky.fails, line = True, Timeline(5, Flaky())
    try:
        with pytest.raises(OSError):
            line.add(Steps(story(b'\0' * 3, PIXELS)))
    finally:
        Flaky.fails = False
    assert (line.inserted, line.dtype, line.nbytes) == (0, None, 0)
    assert line.add(Steps(story(b'\0' * 3, NESTED))).tolist() == [0, 1, 2]


@pytest.mark.parametrize('name', (*STORES, 'rows'))
def test_templates_may_be_shared(stores, name):
    "One store and one sampler, used before, for two replays and a timeline: none of them notices the others"
    store, rows, sampler = stores[name](), story(bytes(range(60)), PIXELS), Uniform(3)
    sampler.added(0, 100)
    sampler.sample(9)
    a, b = (ExperienceReplay(None, 4, 9, store=store, sampler=sampler) for _ in range(2))
    line = Timeline(20, store)
    a.add(Steps(rows[:7]))
    b.add(Steps(rows[10:30]))
    line.add(Steps(rows))
    a.add(Steps(rows[7:10]))
    for r, want in (a, rows[1:10]), (b, rows[21:30]):
        equal(r.memory[:], Steps(want))
    equal(line[:], Steps(rows[-20:]))
    a.sample()
    a.sample()
    drawn = [r.sample().index.tolist() for r in (a, b)]
    fresh = Uniform(3)
    fresh.added(0, 20, 11)
    assert drawn[1] == fresh.sample(4)[0].tolist() != drawn[0] and len(sampler) == 100
    assert sampler._table is not a.sampler._table is not b.sampler._table


def test_a_state_of_one_memory_may_be_loaded_while_it_is_used(tmp_path):
    "A memory in a directory goes back to its own checkpoint; what it had then is there, to the bit"
    line, rows = Timeline(6, RowsInFolder(tmp_path)), story(bytes(range(40)), PIXELS)
    line.add(Steps(rows[:9]))
    state, want = line.state_dict(), line[:]
    line.add(Steps(rows[9:]))
    line.load_state_dict(state)
    equal(line[:], want)
    line.add(Steps(rows[9:]))
    equal(line[:], Steps(rows[-6:]))


# ---- samplers ----


class Recent(Sampler):
    "Only the newest `n` keys"

    counts_only = True

    def __init__(self, n, seed=None):
        self.n = n
        super().__init__(seed)

    def _here(self):
        return min(self.n, len(self))

    def sample(self, n):
        if not len(self):
            raise NotEnoughRows('Recent', 'keys to draw', 0, 'at least 1')
        return self.end - 1 - np.minimum(
            (self.random(n) * self._here()).astype(np.int64), self._here() - 1
        ), 1 / np.float64(self._here())

    def probabilities(self):
        return (np.arange(len(self)) >= len(self) - self._here()) / max(self._here(), 1)

    least = property(lambda self: 1 / max(self._here(), 1))


class Mixed(Sampler):
    "Each draw from one of two samplers"

    def __init__(self, a, b, share=0.5, seed=None):
        self.parts, self.share = (a, b), share
        super().__init__(seed)

    def clear(self):
        super().clear()
        self.parts = tuple(p.fresh() for p in self.parts)

    def added(self, first, end, oldest=0, p=None):
        super().added(first, end, oldest)
        for part in self.parts:
            part.added(first, end, oldest)

    def update(self, keys, td):
        for part in self.parts:
            part.update(keys, td)

    def sample(self, n):
        k = int((self.random(n) < self.share).sum())
        keys = np.concatenate([part.sample(m)[0] for part, m in zip(self.parts, (k, n - k)) if m])
        return keys, self.probabilities()[keys - self.first]

    def probabilities(self):
        return (
            self.share * self.parts[0].probabilities()
            + (1 - self.share) * self.parts[1].probabilities()
        )

    least = property(lambda self: self.probabilities().min())

    def state_dict(self):
        return dict(super().state_dict(), parts=[p.state_dict() for p in self.parts])

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for p, s in zip(self.parts, state['parts']):
            p.load_state_dict(s)


SAMPLERS = dict(
    recent=lambda: Recent(7, 1),
    mixed=lambda: Mixed(Recent(5, 2), Proportional(20, alpha=1, seed=3), 0.3, 1),
    mixed_uniform=lambda: Mixed(Uniform(2, replacement=True), Recent(4, 3), 0.5, 1),
)


@pytest.mark.parametrize('name', SAMPLERS)
@pytest.mark.parametrize('kind', ['uniform', 'errors'])
def test_a_sampler_of_ones_own(kind, name):
    "Draws have the probabilities that it says, weights follow from them; feedback, wraps, and a checkpoint in the middle"
    rows = story(bytes(range(0, 250, 3)), PIXELS)
    make = lambda: (ExperienceReplay if kind == 'uniform' else PrioritizedReplay)(
        None, 8, 20, sampler=SAMPLERS[name](), **({} if kind == 'uniform' else dict(beta=1.0))
    )
    replay, rng = make(), np.random.default_rng(0)
    for block in cut(rows, [9, 1, 30, 0, 3]):
        replay.add(Steps(block))
        batch = replay.sample()
        batch.update_priorities(rng.random(8))
        twin = make()
        twin.load_state_dict(through_file(replay.state_dict()))
        equal(replay.sample(), twin.sample())
        assert replay.stats() == twin.stats()
    p, counts = replay.sampler.probabilities(), np.zeros(20)
    assert p.sum() == pytest.approx(1) and len(p) == 20
    for _ in range(500):
        batch = replay.sample()
        counts += np.bincount(batch.index - replay.memory.oldest, minlength=20)
        if kind == 'errors':
            q = p[batch.index - replay.memory.oldest]
            assert (
                np.allclose(batch.weight, q.min() / q)
                or name == 'recent'
                and (batch.weight == 1).all()
            )
    assert ((counts - 4000 * p) ** 2 <= 36 * np.maximum(4000 * p, 1)).all() and not counts[
        p == 0
    ].any()


def test_a_sampler_that_cannot_serve_is_refused_at_once():
    with pytest.raises(
        TypeError, match='SequenceReplay: sampler; got Recent without use_places, insert, remove'
    ):
        SequenceReplay(None, 2, 100, sampler=Recent(3))
    with pytest.raises(
        ArgumentError, match='PrioritizedReplay: sampler; got Recent; expected one that turns'
    ):
        PrioritizedReplay(None, 2, 100, sampler=Recent(3), initial='logp')
    for wrong in Recent, 'uniform', 5:
        with pytest.raises(
            TypeError, match='ExperienceReplay: sampler; got .*; expected a Sampler'
        ):
            ExperienceReplay(None, 2, 100, sampler=wrong)


class Even(Sampler):
    "Every key in turn, at any speed"

    def __init__(self, capacity, seed=None, speed=1):
        self.capacity, self.speed = capacity, speed
        super().__init__(seed)

    def sample(self, n):
        return self.first + np.arange(n) * self.speed % len(self), np.full(n, 1 / len(self))


@pytest.mark.parametrize('make', [PrioritizedReplay, SequenceReplay])
def test_kind_takes_any_registered_sampler(make):
    "By its class or its name, with the settings that its constructor takes; was: 'proportional' and 'rank' alone"
    assert (
        PrioritizedReplay(None, 2, 100, kind=Ranked).kind == 'rank'
        and PrioritizedReplay(None, 2, 100, kind='uniform').sampler.kind == 'Uniform'
    )
    for kind in Even, 'Even':
        replay = PrioritizedReplay(None, 2, 100, kind=kind, seed=3)
        assert (
            replay.kind,
            replay.sampler.capacity,
            replay.sampler.seed,
            replay.sampler.speed,
        ) == ('Even', 100, 3, 1) and "kind='Even'" in repr(replay)
        replay.add(Steps(story(bytes(9), PIXELS)))
        assert replay.sample().index.tolist() == [0, 1] and replay.stats()['priority_counts'] == [9]
        twin = pickle.loads(pickle.dumps(replay))
        assert twin.sample().index.tolist() == [0, 1] and twin.kind == 'Even'
        with pytest.raises(
            TypeError, match='SequenceReplay: sampler; got Even without use_places, insert, remove'
        ):
            SequenceReplay(None, 2, 100, kind=kind)
    with pytest.raises(
        ArgumentError,
        match="kind; got 'evne'; expected one of 'proportional', 'rank', 'uniform', .*'Even'",
    ):
        make(None, 2, 100, kind='evne')
    with pytest.raises(ArgumentError, match="mean 'Even'"):
        make(None, 2, 100, kind='Evenn')
    with pytest.raises(
        ArgumentError,
        match=r'Replay: kind; got Recent; expected one that is made of capacity, alpha, .* Remedy: sampler=Recent\(n=…\)',
    ):
        make(None, 2, 100, kind=Recent)


def test_what_a_sampler_lacks_it_says():
    "And a replay that needs it is refused when it is made; was: an empty NotImplementedError with the first batch"
    with pytest.raises(TypeError, match='ExperienceReplay: sampler; got Sampler without sample'):
        ExperienceReplay(None, 2, 100, sampler=Sampler())
    with pytest.raises(
        ArgumentError,
        match="weight_norm='memory'; got Proportional that knows no smallest probability.*least=True",
    ):
        PrioritizedReplay(None, 2, 100, sampler=Proportional(100), weight_norm='memory')
    for method in 'use_places', 'insert', 'remove', 'priorities':
        with pytest.raises(NotImplementedError, match=f'Recent: it has no `{method}`'):
            getattr(Recent(3), method)(1)


# ---- views ----


class NStepView(Transitions):
    "Sums of up to `n` rewards along the episode"

    adds = dict(index='i8', weight='f4', discount='f4')

    def __init__(self, n, gamma):
        self.n, self.gamma = n, gamma

    def batch(self, keys, weights):
        m = self.memory
        steps = m.walk(keys, range(self.n))
        there = steps >= 0
        last = steps[np.arange(len(keys)), there.sum(1) - 1]
        rows = m.take(np.where(there, steps, keys[:, None])).to('cpu').rows
        out = np.zeros(len(keys), extend_dtype(m.dtype, **self.adds))
        for n in m.dtype.names:
            out[n] = rows[n][:, 0]
        for n in 'next_state', 'terminated', 'truncated':
            out[n] = m.take(last).to('cpu').rows[n]
        out['reward'] = (rows['reward'] * there * self.gamma ** np.arange(self.n)).sum(1)
        out['discount'], out['index'], out['weight'] = self.gamma ** there.sum(1), keys, weights
        m.count(keys)
        return Steps(out)


class Hindsight(Transitions):
    "Half of the rows as if a state that was reached later in the episode had been the goal"

    def __init__(self, most=8):
        self.most = most

    def batch(self, keys, weights):
        batch, m = self.memory.batch(keys, weights), self.memory
        later = m.walk(keys, range(1, self.most))
        far = (later >= 0).sum(1) * (np.arange(len(keys)) % 2)
        goals = m.take(np.where(far > 0, later[np.arange(len(keys)), far - 1], keys)).next_state
        batch['state'][:, 1] = goals[:, 0]
        batch['reward'][:] = (batch['next_state'][:, 0] == goals[:, 0]).float()
        return batch


class Last(View):
    "The last rows of episodes; the place of each is its slot; it lasts where the memory does"

    unit, follows = 'ends', True

    def clear(self):
        self.key, self.new, self.gone, self.followed = np.full(self.memory.max_sz, -1), [], [], 0

    def __len__(self):
        return len(self.places[1])

    places = property(lambda self: (len(self.key), np.flatnonzero(self.key >= 0)))

    def key_of(self, places):
        return self.key[places]

    def follow(self, steps, first):
        if first < self.followed:
            return
        self.new += (first + np.flatnonzero(steps.done)).tolist()
        self.followed = first + len(steps)

    def drawable(self):
        self.gone += np.flatnonzero((self.key >= 0) & (self.key < self.memory.oldest)).tolist()
        self.key[self.gone] = -1
        keys = np.array([k for k in self.new if k >= self.memory.oldest], int)
        self.key[keys % len(self.key)] = keys
        return (
            (len(self.key), np.array(self.gone, int), keys % len(self.key))
            if len(keys) or self.gone
            else None
        )

    def told(self):
        self.new, self.gone = [], []

    def batch(self, places, weights):
        return self.memory.batch(self.key[places], weights)

    def feedback(self, keys, td):
        keys, td, gone = Transitions.feedback(self, keys, td)
        return keys % len(self.key), td, gone

    def snapshot(self):
        return dict(key=torch.from_numpy(self.key.copy()))

    def restore(self, state):
        self.key[:], self.followed = state['key'].numpy(), self.memory.inserted


@pytest.mark.parametrize('where', ['main', 'directory'])
@pytest.mark.parametrize('sampler', [Proportional, Ranked])
def test_a_view_of_ones_own_that_draws_places(where, sampler, tmp_path):
    "What the base asks is all that a replay asks: through wraps, errors, checkpoints, and opened again"
    rows, td = (
        story(bytes(np.random.default_rng(2).integers(0, 256, 120, np.uint8)), PIXELS),
        np.random.default_rng(3),
    )
    store = None if where == 'main' else Rows(tmp_path / 'm')
    make = lambda store=store: Replay(
        None, 2, 30, sampler=sampler(30, alpha=1, eps=0, seed=1), view=Last(), store=store, beta=1.0
    )
    replay, priority = make(), {}
    for block in cut(rows, [9, 1, 0, 40, 3, 25]):
        replay.add(Steps(block))
        m = replay.memory
        ends = [
            k for k in range(m.oldest, m.inserted) if rows['terminated'][k] or rows['truncated'][k]
        ]
        top = max([p for k, p in priority.items() if k >= m.oldest], default=0) or 1
        priority = {k: priority.get(k, top) for k in ends}
        assert len(replay) == len(replay.sampler) == len(ends)
        if len(ends) < 2:
            continue
        batch = replay.sample(min(8, len(ends)))
        assert set(batch.index.tolist()) <= set(ends) and batch.done.all()
        batch.update_priorities(errors := td.random(len(batch)))
        priority |= dict(zip(batch.index.tolist(), errors))
        view = replay.view
        assert replay.sampler.kept().tolist() == [
            priority[k] for k in view.key[view.places[1]].tolist()
        ]
        if where == 'directory':
            replay.close()
            replay = make(Rows(tmp_path / 'm'))
            assert (
                dict(
                    zip(
                        replay.view.key[replay.view.places[1]].tolist(),
                        replay.sampler.kept().tolist(),
                    )
                )
                == priority
                if len(replay)
                else False
            )
        elif sampler is Proportional:
            twin = make()
            twin.load_state_dict(through_file(replay.state_dict()))
            equal(replay.sample(), twin.sample())
            assert (
                through_file(replay.state_dict())['own']['view']['key'].tolist()
                == twin.view.key.tolist()
            )


def test_a_view_that_cannot_serve_is_refused_at_once():
    "In words, when the replay is made; was: an AttributeError, or a NotImplementedError with the first batch"
    make = lambda view, **kw: Replay(None, 2, 30, sampler=Proportional(30), view=view)
    for wrong in Last, 5:
        with pytest.raises(TypeError, match='Replay: view; got .*; expected a View, such as'):
            make(wrong)
    with pytest.raises(TypeError, match='Replay: view; got Mine without feedback'):
        make(type('Mine', (View,), dict(batch=Last.batch))())
    with pytest.raises(TypeError, match='Replay: view; got Half without drawable, told'):
        make(
            type(
                'Half',
                (View,),
                dict(follows=True, batch=Last.batch, feedback=Last.feedback, follow=Last.follow),
            )()
        )
    with pytest.raises(TypeError, match='Replay: sampler; got Uniform without use_places'):
        Replay(None, 2, 30, sampler=Uniform(), view=Last())


@pytest.mark.parametrize(
    'name', [n for n in (*STORES, 'rows') if n not in ('stacks', 'lz4', 'stacks there')]
)  # these want stacks of three
def test_views_of_ones_own(stores, name):
    "n-step returns and goals in hindsight, held to plain loops over the rows, through wraps, from any store; errors come back"
    dtype, kinds = (
        step_dtype(Box(-99, 99, (2,)), Discrete(2)),
        dict(nstep=NStepView(3, 0.5), goals=Hindsight()),
    )
    rows = story(bytes(np.random.default_rng(1).integers(0, 256, 90, np.uint8)), dtype)
    rows['reward'] = np.arange(90) % 11
    for kind, view in kinds.items():
        replay = Replay(
            None,
            16,
            40,
            sampler=Proportional(40, alpha=1, seed=0),
            view=view,
            store=stores[name](),
            beta=1.0,
        )
        for block in cut(rows, [5, 30, 2, 41]):
            replay.add(Steps(block))
            if len(replay) < 16:
                continue
            batch = replay.sample()
            batch.update_priorities(batch.reward)
            follows = {
                int(k): [int(x) for x in replay.memory.walk([k], range(40))[0] if x >= 0]
                for k in batch.index
            }
            for i, b in enumerate(batch.to('cpu').rows):
                way = follows[b['index']]
                if kind == 'nstep':
                    part = rows[way[:3]]
                    assert b['reward'] == sum(
                        0.5**t * float(r) for t, r in enumerate(part['reward'])
                    ) and b['discount'] == 0.5 ** len(part)
                    assert (b['next_state'] == part['next_state'][-1]).all() and b[
                        'terminated'
                    ] == part['terminated'][-1]
                else:
                    goal = rows[way[min(7, len(way) - 1) if i % 2 else 0]]['next_state'][0]
                    assert b['state'][1] == goal and b['reward'] == (b['next_state'][0] == goal)
        assert replay.memory.times_drawn.sum() > 0
    with pytest.raises(BlockError, match="column 'discount' is one that a batch has"):
        Replay(None, 2, 9, sampler=Uniform(), view=NStepView(3, 0.5)).add(
            Steps(np.zeros(3, extend_dtype(dtype, discount='f8')))
        )


# ---- the memory against a plain model ----


def model(rows, max_sz, oldest):
    "What `next` and `before` of each row should be, by the rule as it is written"
    last, after, before = {}, {}, {}
    for key, r in enumerate(rows):
        env, old = int(r['env_id']), last.get(int(r['env_id']))
        if (
            old
            and not old[3]
            and old[1] == r['episode_n']
            and old[2] < r['step_n']
            and key - old[0] < max_sz
        ):
            after[old[0]], before[key] = key, old[0]
        ended = (r['terminated'] or r['truncated']) and ('n' not in rows.dtype.names or r['n'] <= 1)
        last[env] = key, int(r['episode_n']), int(r['step_n']), ended
    return after, {k: b for k, b in before.items() if b >= oldest}


def walked(after, before, key, offset):
    for _ in range(abs(offset)):
        key = (after if offset > 0 else before).get(key, -1)
    return key


@pytest.mark.parametrize('n', [None, 'i4', 'i8'])
@cases(150)
@given(
    program=programs,
    sizes=sizes,
    max_sz=st.integers(1, 12) | st.just(70),
    first=st.integers(0, 1),
    odd=st.integers(0, 2**16),
    save=st.booleans(),
)
def test_walks_and_windows_are_those_of_a_plain_model(n, program, sizes, max_sz, first, odd, save):
    "Steps from 0 or 1, gaps, steps that stand still or go back, episode numbers that change without an end, n-step rows, wraps, a checkpoint"
    dtype = step_dtype(Discrete(9), Discrete(2), **{} if n is None else dict(n=n))
    rows = story(program, dtype, first)
    for i, b in enumerate(program):
        if odd >> (b & 15) & 1:
            rows['step_n'][i] -= b >> 6
        if odd >> (b >> 4) & 1:
            rows['episode_n'][i] += b & 1
    if n:
        rows['n'] = np.frombuffer(program, np.uint8) % 3 * 256 ** (np.arange(len(rows)) % 2)
    line = Timeline(max_sz)
    for block in cut(rows, sizes):
        line.add(Steps(block))
        if save:
            twin = Timeline(max_sz)
            twin.load_state_dict(through_file(line.state_dict()))
            line = twin
        after, before = model(rows[: line.inserted], max_sz, line.oldest)
        keys = line.keys
        if not len(keys):
            continue
        offsets = [0, 1, -1, 2, -2, 5, -5, 10**6, -(10**6)]
        assert line.walk(keys, offsets).tolist() == [
            [walked(after, before, k, min(max(o, -99), 99)) for o in offsets] for k in keys.tolist()
        ]
        w = line.windows(keys, 4)
        assert w.mask.tolist() == [
            [walked(after, before, k, o) >= 0 for o in range(4)] for k in keys.tolist()
        ]
        want = line.walk(keys, range(4))
        assert all(
            bits(w.rows[c])
            == bits(np.where(want >= 0, rows[np.maximum(want, 0)][c], 0).astype(dtype[c]))
            for c in dtype.names
        )
        links = line.state_dict()['links']
        assert links['link'].tolist() == [after.get(k, k) - k for k in keys.tolist()]


# ---- attacks ----


@pytest.mark.parametrize('how', ['steps', 'backwards', 'read_only', 'misaligned', 'column'])
@pytest.mark.parametrize('name', (*STORES, 'rows'))
def test_blocks_of_any_memory_layout_go_into_any_store(stores, name, how):
    rows = story(bytes(range(30)), PIXELS)
    line = Timeline(12, stores[name]())
    line.add(Steps(rows[:0]))
    line.add(Steps(rows[:2]))
    for block in cut(rows[2:], [4, 1, 9]):
        line.add(Steps(GUISES[how](block)))  # was: the general path took no notice of strides
    after, _ = model(rows, 12, 18)
    equal(line[:], Steps(rows[18:]))
    assert line.walk(line.keys, [1])[:, 0].tolist() == [
        after.get(k, -1) for k in line.keys.tolist()
    ]


FLOATS = step_dtype(
    spaces.Dict(
        h=Box(-1, 1, (3,), np.float16),
        t=spaces.Tuple([Box(-1, 1, (2, 2), np.float64), Discrete(2)]),
    ),
    Box(-1, 1, (2,)),
    c=('f4', 2),
    z=('f8', (2, 2)),
)


@pytest.mark.parametrize('name', (*STORES, 'rows'))
def test_nan_is_refused_and_infinity_taken_whatever_the_store(stores, name):
    line, clean = Timeline(9, stores[name]()), np.zeros(3, FLOATS)
    clean['step_n'] = range(3)
    line.add(Steps(clean))
    for column in (
        'reward',
        'total_reward',
        'action',
        'c',
        'z',
        ('state', 'h'),
        ('next_state', 't', '[0]'),
    ):
        for bad in np.nan, -np.nan, np.inf, -np.inf:
            rows = clean.copy()
            a = rows
            for c in np.atleast_1d(column):
                a = a[c]
            a[2].reshape(-1)[-1:] = bad if a[2].ndim else 0
            if not a[2].ndim:
                a[2] = bad
            before = line.state_dict() if name != 'path' else line.inserted
            if np.isnan(bad):
                with pytest.raises(
                    BlockError,
                    match=re.escape(
                        f"row 2 of the block has a NaN in column '{'.'.join(np.atleast_1d(column))}'"
                    ),
                ):
                    line.add(Steps(rows))
                assert (
                    same(before, line.state_dict()) if name != 'path' else before == line.inserted
                )
            else:
                line.add(Steps(rows))
                assert bits(line[-1].to('cpu').rows['reward']) == bits(
                    rows['reward'][2]
                ) and line.take([line.inserted - 1]) == Steps(rows[2:])


def test_environment_numbers_at_both_ends():
    "Two environments with the smallest and the largest number; one more is refused and changes nothing"
    rows = story(b'\0\1' * 10, PIXELS)
    rows['env_id'] = [0, 2**24 - 1] * 10
    line = Timeline(7)
    line.add(Steps(rows))
    assert line.walk(line.keys, [1, -1]).tolist() == [
        [k + 2 if k < 18 else -1, k - 2 if k > 14 else -1] for k in range(13, 20)
    ]
    size = line.nbytes
    for wrong in 2**24, -1, -(2**31), 2**31 - 1:
        bad = rows[:2].copy()
        bad['env_id'][1] = wrong
        with pytest.raises(BlockError, match=f'row 1 of the block.*got {wrong}'):
            line.add(Steps(bad))
    assert (
        line.nbytes == size < 7 * (PIXELS.itemsize + 12) + 3000
    )  # was: 4 bytes for each number below the largest


@pytest.mark.parametrize('kind', REPLAYS)
def test_batches_with_places(kind):
    "`return_idxs` gives the places of the first rows in memory, in every replay"
    replay = REPLAYS[kind](max_sz=20, return_idxs=True)
    replay.add(Steps(story(bytes(4 * i % 256 & 0xF3 for i in range(50)), PIXELS)))
    batch, places = replay.sample()
    assert (places == batch.index.numpy() - 30).all()  # was: a KeyError where sequences are drawn
    rows = replay.memory[places]
    assert (rows.step_n == (batch.step_n if kind != 'sequence' else batch.step_n[:, 0])).all()


@pytest.mark.parametrize('wrong', [[0.5], ['a'], [None], np.array([1.0])], ids=str)
def test_offsets_are_integers(wrong):
    line = Timeline(9)
    line.add(Steps(story(bytes(9), PIXELS)))
    with pytest.raises(TypeError, match='offsets'):
        line.walk([0], wrong)


def damage(state, path, change):
    for p in path[:-1]:
        state = state[p]
    state[path[-1]] = change(state[path[-1]])


DAMAGE = dict(
    far_link=(('links', 'link'), lambda x: x + 10**6),
    back_link=(('links', 'back'), lambda x: x - 10**6),
    past_newest=(('links', 'link'), lambda x: x + 1),
    fewer_links=(('links', 'link'), lambda x: x[:-1]),
    wide_links=(('links', 'link'), lambda x: x.double()),
    fewer_rows=(('store', 'rows'), lambda x: x[:1]),
    short_rows=(('store', 'rows'), lambda x: x[:, :-1]),
    counters=(('links', 'counters'), lambda x: [x[0], x[0] + 5, *x[2:]]),
    many=(('links', 'counters'), lambda x: [x[0], -5, *x[2:]]),
    strange_env=(('links', 'env_ids'), lambda x: x - 1),
    same_env=(('links', 'env_ids'), lambda x: x * 0),
    future=(('links', 'last_key'), lambda x: x + 10**6),
    other_last=(('links', 'last'), lambda x: x[:, :2]),
)


@pytest.mark.parametrize('name', DAMAGE)
def test_a_damaged_state_is_refused_before_a_kernel_believes_it(name):
    line, rows = Timeline(9), story(bytes(range(0, 60, 4)) + b'\0\1\2\3', PIXELS)
    line.add(Steps(rows))
    state, before = copy.deepcopy(line.state_dict()), line.state_dict()
    damage(state, *DAMAGE[name])
    for memory in line, Timeline(9):
        with pytest.raises(ValueError, match=': a saved (memory with|state that)'):
            memory.load_state_dict(state)
    assert same(line.state_dict(), before)


@pytest.mark.parametrize('kind', REPLAYS)
def test_many_threads(kind):
    "Six threads add, draw, answer, look and save; all rows are whole, every key is given out once, and counters add up"
    replay, n, keys, errors = REPLAYS[kind](max_sz=300), 60, [], []
    dtype = PIXELS

    def adds(env):
        for i in range(n):
            rows = np.zeros(5, dtype)
            rows['env_id'], rows['episode_n'], rows['step_n'] = env, 1, np.arange(5 * i, 5 * i + 5)
            rows['total_reward'], rows['logp'] = env * 1e4 + rows['step_n'], 1
            keys.append(replay.add(Steps(rows)))

    def draws():
        for i in range(n):
            try:
                batch = replay.sample()
            except NotEnoughRows:
                continue
            rows = batch.rows if kind != 'sequence' else batch.rows[batch.rows['mask']]
            assert (rows['total_reward'] == rows['env_id'] * 1e4 + rows['step_n']).all()
            batch.update_priorities(np.ones((2, 2) if kind == 'sequence' else 3))
            if i % 10 == 0:
                replay.stats()
                replay.state_dict()

    def safe(f, *args):
        def run():
            try:
                f(*args)
            except Exception as e:
                errors.append(e)

        return threading.Thread(target=run)

    threads = [*(safe(adds, e) for e in range(3)), *(safe(draws) for _ in range(3))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (
        not errors
        and sorted(np.concatenate(keys).tolist()) == list(range(3 * 5 * n))
        and replay.memory.inserted == 15 * n
    )
    for k in keys:
        assert (np.diff(k) == 1).all()


def test_a_million_rows():
    "Two environments in blocks of 4,096, more than the memory holds: rows, links and draws at every corner"
    n, dtype = 1_200_000, step_dtype(Box(-1e9, 1e9, (1,)), Discrete(2))
    rows = np.zeros(n, dtype)
    rows['env_id'], rows['step_n'], rows['reward'] = (
        np.arange(n) % 2,
        np.arange(n) // 2 % 1000,
        np.arange(n) % 99991,
    )
    rows['episode_n'], rows['truncated'] = np.arange(n) // 2000, rows['step_n'] == 999
    replay = PrioritizedReplay(None, 256, 1_000_000, seed=0)
    for i in range(0, n, 4096):
        replay.add(Steps(rows[i : i + 4096]))
    keys = np.array([200_000, 200_001, 999_999, 1_000_000, 1_000_001, 1_199_999, 201_998])
    assert replay.memory.take(keys) == Steps(rows[keys]) and replay.memory.oldest == 200_000
    assert replay.memory.walk(keys, [1, -1]).tolist() == [
        [200_002, -1],
        [200_003, -1],
        [-1, 999_997],
        [1_000_002, -1],
        [1_000_003, -1],
        [-1, 1_199_997],
        [-1, 201_996],
    ]
    for _ in range(20):
        batch = replay.sample()
        assert (batch.reward == torch.from_numpy(rows['reward'][batch.index])).all()
        batch.update_priorities(batch.reward)
    with pytest.raises(KeyError, match='key 5 is stale: its row was overwritten 199995 rows ago'):
        replay.memory.take([5])
    replay.update_priorities([5, 200_000], [1.0, 2.0])
    assert replay.stats()['stale'] == 1
    for wrong in [-1], [n], [2**62]:
        with pytest.raises(KeyError, match='never given out'):
            replay.update_priorities(wrong, [1.0])


SEQUENCES = dict(
    place=(('view', 'table', 'first'), lambda x: x + 1000 * (x >= 0)),
    twice=(('view', 'table', 'first'), lambda x: torch.full_like(x, int(x.max()))),
    free=(('view', 'table', 'free'), lambda x: x + 10**6),
    no_place=(('view', 'table', 'free'), lambda x: x * 0),
    fewer=(('view', 'table', 'steps'), lambda x: x[:-1]),
    tracks=(('view', 'tracks', 'recent'), lambda x: x[:, :-1]),
    count=(('view', 'tracks', 'count'), lambda x: x - 99),
    wide=(('view', 'table', 'hidden'), lambda x: torch.zeros(len(x), 8, dtype=torch.uint8)),
    links=(('memory', 'links', 'back'), lambda x: x + 99),
    sampler=(('sampler', 'priorities'), lambda x: x * np.nan),
)


@pytest.mark.parametrize('name', SEQUENCES)
def test_a_replay_survives_a_damaged_state(name):
    "It is refused, wherever the damage is, and the replay goes on as if nobody had tried"
    rows = story(bytes(4 * i % 256 & 0xF3 for i in range(50)), PIXELS)
    replay, twin = (REPLAYS['sequence'](max_sz=20) for _ in range(2))
    for r in replay, twin:
        r.add(Steps(rows))
        r.sample()
    state = copy.deepcopy(replay.snapshot())
    damage(state, *SEQUENCES[name])
    with pytest.raises(StateError):
        replay.restore(replay.check_state(state))
    for r in replay, twin:
        r.add(Steps(rows[:7]))
    for _ in range(3):
        equal(replay.sample(), twin.sample())
    assert replay.stats() == twin.stats()


def test_half_known_environments_are_saved():
    "An environment whose first rows could not be written has a number and no rows; a checkpoint goes on from there"
    rows = story(b'\0' * 6 + b'\1' * 6, PIXELS)
    replay = REPLAYS['sequence'](max_sz=20, store=Flaky())
    replay.add(Steps(rows[:6]))
    Flaky.fails = True
    try:
        with pytest.raises(OSError):
            replay.add(Steps(rows[6:]))
    finally:
        Flaky.fails = False
    twin = REPLAYS['sequence'](max_sz=20, store=Flaky())
    twin.load_state_dict(through_file(replay.state_dict()))
    for r in replay, twin:
        r.add(Steps(rows[6:]))
    equal(replay.sample(), twin.sample())
    assert len(replay) == len(twin) == 4


# ---- settings, places, memories that are too small ----


@pytest.mark.parametrize('kind', REPLAYS)
def test_settings_that_are_built_in_cannot_be_changed_later(kind):
    "Each setting works when it is changed, or says that it can't be"
    replay = REPLAYS[kind](max_sz=20)
    fixed = dict(
        max_sz=5,
        seed=3,
        store=Rows(),
        **(
            {}
            if kind == 'uniform'
            else dict(
                alpha=0.1,
                eps=0.5,
                stratified=False,
                initial='reward',
                kind='uniform',
                weight_norm='neither',
            )
        ),
        **(
            dict(length=4, burn_in=2, overlap=2, eta=0.5, state='zero')
            if kind == 'sequence'
            else {}
        ),
    )
    for name, x in fixed.items():
        was = getattr(replay, name)
        with pytest.raises(ValueError, match=f'{type(replay).__name__}: {name} is fixed.*Remedy'):
            setattr(replay, name, x)
        assert getattr(replay, name) is was
    replay.bs, replay.ratio = 3, 0.5
    replay.add(Steps(story(bytes(4 * i % 256 & 0xF3 for i in range(50)), PIXELS)))
    assert len(replay.sample()) == 3


@pytest.mark.parametrize('kind', ['errors', 'sequence'])
def test_errors_by_place_reach_the_rows_that_were_drawn(kind):
    "Places look like keys; after a wrap they were other, stale keys, and errors were lost without a word"
    replay = REPLAYS[kind](max_sz=20, return_idxs=True, alpha=1.0, eps=0.0, stratified=False)
    rows = Steps(story(bytes(4 * i % 256 & 0xF3 for i in range(60)), PIXELS))
    replay.add(rows[:50])
    batch, places = replay.sample()
    replay.add(rows[50:52])  # all places move
    key = int(batch.index[-1])
    td = (
        np.zeros((len(places), replay.length - replay.burn_in))
        if kind == 'sequence'
        else np.zeros(len(places))
    )
    td[-1] = 1e9
    replay.update_priorities(places, td)
    assert replay.stats()['stale'] == int(
        (batch.index < replay.memory.oldest).sum()
    ) and replay.sample(1)[0].index.tolist() == [key]
    there = replay.memory.valid(batch.index)
    assert (
        there[-1]
        and replay.memory[places[there]] == replay.memory.take(batch.index[there])
        and pickle.loads(pickle.dumps(places)).keys.tolist() == batch.index.tolist()
    )


def test_a_memory_that_can_never_fill_a_batch_says_so():
    "Eight environments with long episodes share a memory in which none of them has room for a sequence: was an endless loop"

    def lives(n):
        return [
            Steps(
                np.array(
                    [(e, 1, t + 1) for e in range(8)],
                    [('env_id', 'i4'), ('episode_n', 'i4'), ('step_n', 'i4')],
                )
            )
            for t in range(n)
        ]

    def widened(block):
        rows = np.zeros(len(block), PIXELS)
        for n in block.rows.dtype.names:
            rows[n] = block.rows[n]
        return Steps(rows)

    replay = SequenceReplay(
        map(widened, lives(10_000)), bs=2, max_sz=64, length=9, burn_in=0, overlap=0
    )
    with pytest.raises(
        NotEnoughRows,
        match='SequenceReplay: a full memory is too small for a batch; got 0 sequences in 64 rows of 8 environments; expected 2 sequences. Remedy: a larger max_sz',
    ):
        next(iter(replay))
    assert replay.memory.inserted < 3 * 64
    enough = SequenceReplay(
        map(widened, lives(30)), bs=2, max_sz=80, length=9, burn_in=0, overlap=0
    )
    assert (
        len(list(enough)) == 6
    )  # the memory holds a sequence of each environment for two of each nine steps, thrice


def test_bytes_between_columns_do_not_go_into_checkpoints():
    "Rows on memory that was used before: their checkpoint is that of clean rows, whatever lay between the columns"
    dtype = step_dtype(spaces.Box(-9, 9, (3,), np.float32), spaces.Discrete(3), flag='?', note='i8')
    rows, dirty = np.zeros(9, dtype), np.frombuffer(bytearray([0xAB]) * 9 * dtype.itemsize, dtype)
    for i, x in enumerate((rows, dirty)):
        for n in dtype.names:
            x[n] = 0
        x['step_n'], x['episode_n'] = np.arange(1, 10), 1
    assert rows.tobytes() != dirty.tobytes() and (rows == dirty).all()

    def files(x):
        replays = [make(max_sz=20) for kind, make in REPLAYS.items() if kind != 'given']
        for r in replays:
            r.add(Steps(x))
        return [r.memory.state_dict()['store']['rows'].numpy().tobytes() for r in replays] + [
            pack(Steps(x[:4]))['bytes'].numpy().tobytes()
        ]

    assert files(rows) == files(dirty) and b'\xab' not in b''.join(files(dirty))


def test_more_burn_in_than_overlap_is_told(recwarn):
    "Steps that are never learned from, with their share; what is half of the length unless it is given"
    for kw, share in (
        (dict(overlap=0), '50%'),
        (dict(overlap=20), '33%'),
        (dict(burn_in=41), '2%'),
        (dict(length=10, burn_in=3, overlap=1), '22%'),
    ):
        with pytest.warns(
            UserWarning,
            match=f'SequenceReplay: overlap=.* less than burn_in=.*, so {share} of the steps .*Remedy',
        ):
            SequenceReplay(max_sz=100, **kw)
    recwarn.clear()
    for length, half in (80, 40), (4, 2), (5, 2), (1, 0):
        replay = SequenceReplay(max_sz=100, length=length)
        assert (replay.burn_in, replay.overlap) == (half, half)
    SequenceReplay(
        max_sz=100, length=4, overlap=3
    )  # was refused, for a burn-in that nobody had given
    assert not [w for w in recwarn if 'overlap' in str(w.message)]


def test_more_memory_than_there_is_is_named():
    "At the first block, which shows how large rows are; the memory stays as it was"
    wide = np.zeros(2, step_dtype(spaces.Box(0, 255, (84, 84, 400), np.uint8), spaces.Discrete(2)))
    replay = ExperienceReplay(max_sz=2**31 - 1)
    with pytest.raises(
        MemoryError,
        match=r'ExperienceReplay: no memory for max_sz=2_147_483_647 rows of 5_644_\d+ bytes; got a machine with \d+ GiB; expected 11,28\d,\d+ GiB. Remedy',
    ):
        replay.add(Steps(wide))
    assert len(replay) == 0 and replay.memory.dtype is None


# ---- found by a stranger who wrote a store and a sampler ----


class Picky(Rows):
    "Keeps no negative reward"

    add = Store.add

    def refuse(self, rows):
        if (rows['reward'] < 0).any():
            raise BlockError('Picky', 'reward', 'negative', 'positive')


@pytest.mark.parametrize('on_disk', [False, True])
def test_what_a_store_refuses_leaves_older_rows_where_they_are(on_disk, tmp_path):
    rows = np.zeros(27, step_dtype(Discrete(5), Discrete(3)))
    rows['step_n'], rows['terminated'], rows['episode_n'], rows['reward'] = (
        1,
        True,
        np.arange(27),
        np.where(np.arange(27) < 20, 1, -1),
    )
    line = Timeline(20, Picky(str(tmp_path / 'm') if on_disk else None))
    line.add(Steps(rows[:20]))
    with pytest.raises(BlockError, match='Picky: reward; got negative'):
        line.add(Steps(rows[20:]))
    assert tuple(line.span) == (20, 0) and (line[:].rows == rows[:20]).all()


class Taken(Sampler):
    "Draws places that are taken; what it says of itself is only what CONTRIBUTING asks for"

    def clear(self):
        super().clear()
        self.there = np.zeros(0, bool)

    def sample(self, n):
        at = np.flatnonzero(self.there)
        return at[(self.random(n) * len(at)).astype(int)], 1 / len(at)

    def probabilities(self):
        return np.full(int(self.there.sum()), 1 / self.there.sum())

    def use_places(self, capacity):
        self.there = np.zeros(capacity, bool)

    def insert(self, places):
        self.there[places] = True

    def remove(self, places):
        self.there[places] = False


def test_a_sampler_of_places_is_told_once_how_many_there_are():
    "Or it would forget them with each change"
    r = SequenceReplay(bs=3, max_sz=40, length=4, overlap=2, burn_in=0, sampler=Taken(seed=0))
    for b in scripted_steps([script(7, 5), script(9, env=1)], 15):
        r.add(b)
    assert len({k for _ in range(200) for k in r.sample().index.tolist()}) == len(r) > 5


@pytest.mark.parametrize('bad', [-1, 1])
def test_a_first_block_that_a_store_refuses_decides_no_columns(bad, tmp_path):
    rows = np.zeros(4, step_dtype(Discrete(5), Discrete(3)))
    rows['step_n'], rows['episode_n'], rows['reward'] = np.arange(4) + 1, 1, bad
    line, other = (
        Timeline(20, Picky(str(tmp_path / 'm'))),
        np.ones(3, step_dtype(Box(-1, 1, (2,)), Discrete(3))),
    )
    if bad > 0:
        line.add(Steps(rows))
    else:
        with pytest.raises(BlockError, match='Picky: reward; got negative'):
            line.add(Steps(rows))
        assert line.dtype is None and len(line) == 0
        other['step_n'] = np.arange(3) + 1
        line.add(Steps(other))
        line.close()
        assert (Timeline(20, Picky(str(tmp_path / 'm')))[:].rows == other).all()


@pytest.mark.parametrize(
    'name, kind, got',
    [
        ('link', np.int32, 'a file of the memory'),
        ('priorities', np.float32, 'an array of <f8'),
        ('mine', np.int64, 'an array of <i4'),
    ],
)
def test_an_array_of_a_memory_is_not_taken_for_another_one(name, kind, got, tmp_path):
    rows = np.zeros(4, step_dtype(Discrete(5), Discrete(3)))
    rows['step_n'], rows['episode_n'] = np.arange(4) + 1, 1
    replay = PrioritizedReplay(None, 2, 20, store=Rows(tmp_path / 'm'))
    replay.add(Steps(rows))
    place = replay.memory.place
    place.lasting('mine', np.int32)[:] = 7
    before = {f.name: f.read_bytes() for f in place.folder.iterdir() if f.is_file()}
    with pytest.raises(
        ArgumentError, match=rf"lasting\('{name}'\) of .*; got {got}.*Remedy: another name"
    ):
        place.lasting(name, kind)
    assert before == {f.name: f.read_bytes() for f in place.folder.iterdir() if f.is_file()}
    assert (place.lasting('mine', np.int32) == 7).all()


def test_a_sampler_that_is_given_takes_the_seed_where_it_has_none():
    rows = np.zeros(50, step_dtype(Discrete(5), Discrete(3)))
    rows['step_n'], rows['episode_n'] = np.arange(50) + 1, 1

    def drawn(seed, own):
        replay = ExperienceReplay(None, 8, 60, seed=seed, sampler=Uniform(own))
        replay.add(Steps(rows))
        return replay.sample()['index'].tolist()

    assert drawn(3, None) == drawn(3, None) == drawn(None, 3)
    assert drawn(3, 4) == drawn(5, 4) != drawn(3, None)


@pytest.mark.parametrize(
    'make, names',
    [
        (
            lambda: ExperienceReplay(None, 2, 20, replacement=True, sampler=Uniform()),
            'replacement=True',
        ),
        (
            lambda: PrioritizedReplay(None, 2, 20, kind='rank', alpha=0.5, sampler=Uniform()),
            "kind='rank', alpha=.?0.5",
        ),
    ],
)
def test_settings_that_a_sampler_will_not_ask_for_are_named(make, names):
    with pytest.warns(
        UserWarning, match=rf'{names} beside sampler=.*Remedy: leave it out, or give it to Uniform'
    ):
        make()


@pytest.mark.parametrize(
    'make, remedy',
    [
        (lambda: ExperienceReplay(seed=3, sampler=Uniform), r'sampler=Uniform\(…\)'),
        (lambda: PrioritizedReplay(kind=Uniform()), r'sampler=Uniform\(…\)'),
    ],
)
def test_a_class_for_an_object_and_the_reverse_say_what_to_type(make, remedy):
    with pytest.raises(ArgumentTypeError, match=f'Remedy: {remedy}'):
        make()
    assert Uniform.seed is None  # the class is as it was
