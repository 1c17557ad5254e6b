"""Memories on a device, by tensors on the CPU: the code that a GPU runs. What comes out is what memories in main memory give."""

import copy, pickle, threading

import numpy as np, pytest, torch
from gymnasium import spaces

from fastrl_replay.all import *
from fastrl_replay.steps.errors import NoRoom
from fastrl_replay.memory import on_device
from fastrl_replay.steps import machine as machine_module
from fastrl_replay.memory.rows import Store
from fastrl_replay.testing import through_file
from strategies import equal
from test_frames import REPLAYS, SPACES, Small, steps, stream


class Short(Frames):
    smallest_segment = 8


@pytest.mark.parametrize(
    'make',
    [
        lambda: Rows(device='cpu'),
        lambda: Short(4, device='cpu'),
        lambda: Short(device=torch.device('cpu')),
    ],
    ids=['rows', 'stacks', 'frames'],
)
@pytest.mark.parametrize('kind', REPLAYS)
def test_replays_give_the_same_batches(kind, make):
    "From a stream, with errors that come back as tensors; a copy that was saved in the middle goes on alike"
    with REPLAYS[kind](steps(), store=Rows()) as a, REPLAYS[kind](steps(), store=make()) as b:
        n = 0
        for x, y in zip(a, b):
            assert type(y) is type(x) and y._block is not None and x._block is None
            equal(x, y)
            if kind == 'sequence':
                assert isinstance(y, Sequences) and y._each == x._each
            td = torch.rand(
                x.shape if kind != 'sequence' else (2, 3),
                generator=torch.Generator().manual_seed(n),
            )
            x.update_priorities(td)
            y.update_priorities(td)
            n += 1
    assert n > 20


def test_old_segments_leave_main_memory():
    "Frames that are too old to be compared with are on the device only; what is there follows the rows"
    rng, dtype = (
        np.random.default_rng(0),
        step_dtype(spaces.Box(0, 255, (100,), np.uint8), spaces.Discrete(2)),
    )
    frames = rng.integers(0, 256, (20_001, 100), np.uint8)
    rows = np.zeros(20_000, dtype)
    rows['state'], rows['next_state'], rows['step_n'] = (
        frames[:-1],
        frames[1:],
        np.arange(20_000) + 1,
    )
    line = Timeline(4000, Short(device='cpu'))
    for i in range(0, 20_000, 50):
        line.add(Steps(rows[i : i + 50]))
    assert line[:] == Steps(rows[-4000:])
    [log] = line._parts[1]._logs
    held = sum(s.nbytes for s in [*log.segments.values(), *log.free])
    assert (
        len(log.segments) * 8 < 200
        and held < 40_000
        and log.there.nbytes < 1.15 * 4000 * 100
        and len(log._where) * 8 < 4100
    )


def test_more_frames_than_were_expected():
    "Rows without a frame in common: twice as many as rows; the device's memory grows, and what is in it stays"
    rng, dtype = (
        np.random.default_rng(0),
        step_dtype(spaces.Box(0, 255, (100,), np.uint8), spaces.Discrete(2)),
    )
    rows = np.zeros(3000, dtype)
    for n in 'state', 'next_state':
        rows[n] = rng.integers(0, 256, (3000, 100), np.uint8)
    rows['step_n'] = np.arange(3000) + 1
    line = Timeline(500, Short(device='cpu'))
    for i in range(0, 3000, 70):
        line.add(Steps(rows[i : i + 70]))
        end = min(i + 70, 3000)
        assert line[:] == Steps(rows[max(0, end - 500) : end])
    assert line._parts[1]._logs[0].there.nbytes >= 1000 * 100


def test_a_large_block_goes_in_at_once():
    rows = stream(*SPACES['stack'], bytes(range(250)) * 8, 1, False)
    for store in Rows(device='cpu'), Small(3, device='cpu'), Small(device='cpu'):
        line, plain = Timeline(70, store), Timeline(70)
        for block in rows[:5], rows[5:1800], rows[1800:]:
            for m in line, plain:
                m.add(Steps(block))
            equal(line[:], plain[:])


def test_blocks_are_sent_in_parts(monkeypatch):
    "Pinned memory is not to be had without end"
    monkeypatch.setattr(on_device.Device, 'part', 200)
    rows = stream(*SPACES['stack'], bytes(range(250)), 1, False)
    line, plain = Timeline(70, Rows(device='cpu')), Timeline(70)
    for m in line, plain:
        m.add(Steps(rows))
    equal(line[:], plain[:])
    fresh = Timeline(70, Rows(device='cpu'))
    fresh.load_state_dict(through_file(line.state_dict()))
    equal(fresh[:], plain[:])


# ---- what a block that is refused, or fails, leaves ----


@pytest.mark.parametrize(
    'make', [lambda: Rows(device='cpu'), lambda: Small(3, device='cpu')], ids=['rows', 'frames']
)
@pytest.mark.parametrize('at', range(4))
def test_a_copy_that_fails_leaves_a_whole_memory(make, at, monkeypatch):
    "The block was added or it was not; where it was, what is still to be sent is sent by the next call"
    rows = stream(*SPACES['stack'], bytes(range(90)), 1, False)
    line = Timeline(30, make())
    line.add(Steps(rows[:40]))
    count, there = [0], on_device.staged

    def fails(*args):
        count[0] += 1
        if count[0] > at:
            raise RuntimeError('CUDA error: out of memory')
        return there(*args)

    monkeypatch.setattr(on_device, 'staged', fails)
    try:
        line.add(Steps(rows[40:60]))
    except RuntimeError:
        pass
    monkeypatch.undo()
    assert line.inserted in (40, 60)
    equal(line[:], Steps(rows[line.inserted - 30 : line.inserted]))
    line.add(Steps(rows[line.inserted : 60]))
    line.add(Steps(rows[60:70]))
    equal(line[:], Steps(rows[40:70]))


def test_a_device_that_is_full_is_told(monkeypatch):
    monkeypatch.setattr(machine_module, 'machine_memory', lambda: 2**20)
    row = Steps(stream(*SPACES['stack'], b'\0', 1, False))
    with pytest.raises(
        NoRoom,
        match=r'Timeline: no memory for max_sz=1_000_000 rows of 128 bytes; got cpu with 1.0 MiB; expected 122 MiB. Remedy: max_sz=6_553, or smaller rows',
    ):
        Timeline(1_000_000, Rows(device='cpu')).add(row)
    line = Timeline(5000, Rows(device='cpu'))
    line.add(row)

    def full(*a, **k):
        raise torch.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(torch, 'empty', full)
    with pytest.raises(NoRoom, match='Rows: no memory on cpu; got 1.0 MiB; expected 12 KiB'):
        Timeline(100, Rows(device='cpu')).add(row)


# ---- what it is and is not ----


@pytest.mark.parametrize('make', [Rows, lambda **kw: Frames(4, **kw)], ids=['rows', 'frames'])
def test_devices_are_checked_at_once(make):
    for wrong in 'meta', 'cuda:99', 'gpu', '':
        with pytest.raises(
            ArgumentError, match=f'device; got {wrong!r}; expected a device that torch has here'
        ):
            make(device=wrong)
    for wrong in 0, ['cpu']:
        with pytest.raises(ArgumentTypeError, match="the name of a device, such as 'cuda'"):
            make(device=wrong)
    with pytest.raises(
        ArgumentError, match="path and device; got 'x', 'cpu'; expected one of them"
    ):
        make(path='x', device='cpu')
    assert make(device='auto').device == ('cuda' if torch.cuda.is_available() else None)


def test_frames_on_a_device_are_not_packed():
    with pytest.raises(ArgumentError, match="compress and device; got 'lz4', 'cpu'"):
        Frames(4, 'lz4', device='cpu')
    line = Timeline(9, Small(3, device='cpu'))
    saved = Timeline(9, Small(3, 'lz4'))
    saved.add(Steps(stream(*SPACES['stack'], bytes(range(20)), 1, False)))
    with pytest.raises(StateError):
        line.load_state_dict(saved.state_dict())


def test_settings_travel():
    store = Small(3, device='cpu')
    assert (
        repr(store) == "Frames(3, device='cpu')"
        and repr(Rows(device=torch.device('cpu'))) == "Rows(device='cpu')"
    )
    for twin in copy.deepcopy(store), pickle.loads(pickle.dumps(Rows(device='cpu'))):
        assert twin.device == 'cpu'


class Turned(Rows):
    "Whole rows whose bytes lie the other way round"

    add, batch = Store.add, Store.batch

    def put(self, slots, rows):
        super().put(
            slots,
            rows.view(np.uint8).reshape(len(rows), -1)[:, ::-1].copy().reshape(-1).view(rows.dtype),
        )

    def gather(self, slots, out, present=-1):
        super().gather(slots, out, present)
        front = out[:, : self.dtype.itemsize]
        front[:] = torch.as_tensor(front).flip(1)


class Counted(Small):
    "Frames that count their batches"

    drawn = 0

    def batch(self, *args):
        self.drawn += 1
        return super().batch(*args)


@pytest.mark.parametrize('device', [None, 'cpu'])
def test_a_subclass_keeps_its_own_methods_on_a_device(device):
    "Was: the class for devices came before that of the user, whose `put`, `gather` and `batch` were not called"
    rows = stream(*SPACES['stack'], bytes(range(60)), 1, False)
    turned, counted, plain = (
        Timeline(30, s) for s in (Turned(device=device), Counted(3, device=device), Rows())
    )
    for line in plain, turned, counted:
        for block in rows[:25], rows[25:]:
            line.add(Steps(block))
        assert type(line.parts[1]) is type(line.store)
        for a, b in (
            (line[:], plain[:]),
            (line.windows(line.keys, 3), plain.windows(line.keys, 3)),
            (line.batch(line.keys, np.ones(30)), plain.batch(line.keys, np.ones(30))),
        ):
            equal(a, b)
        fresh = Timeline(30, line.store)
        fresh.load_state_dict(through_file(line.state_dict()))
        equal(fresh[:], plain[:])
    assert counted.parts[1].drawn == 1
    out = turned.parts[1].empty(1, rows.itemsize)
    Rows.gather(turned.parts[1], turned.keys[:1] % 30, out)
    assert np.asarray(out).tobytes()[::-1] == rows[-30:][:1].tobytes()


@pytest.mark.parametrize('make', [Rows, lambda **kw: Small(3, **kw)], ids=['rows', 'frames'])
def test_columns_and_episodes_come_from_a_device(make):
    "Was: AttributeError, as if rows on a device lay in an array"
    rows, lines = stream(*SPACES['stack'], bytes(range(60)), 1, False), []
    for device in None, 'cpu':
        lines.append(Timeline(30, make(device=device)))
        lines[-1].add(Steps(rows))
    here, there = (line.parts[1] for line in lines)
    slots = np.array([3, 29, 0, 3])
    assert (there.episodes(slots) == here.episodes(slots)).all()
    for name in here.columns.dtype.names:
        assert (there.columns[name] == here.columns[name]).all()


def test_a_saved_memory_is_loaded_where_its_device_has_room(monkeypatch):
    "Was: main memory was asked, and named"
    line = Timeline(1000, Rows(device='cpu'))
    line.add(Steps(stream(*SPACES['stack'], b'\0', 1, False)))
    saved = through_file(line.state_dict())
    assert line.place.emptied().device == 'cpu'
    monkeypatch.setattr(machine_module, 'machine_memory', lambda: 2**16)
    with pytest.raises(NoRoom, match='got cpu with 64 KiB'):
        Timeline(1000, Rows(device='cpu')).load_state_dict(saved)


def test_a_batch_stays_as_it_is():
    rows = stream(*SPACES['stack'], bytes(range(200)), 1, False)
    line = Timeline(20, Small(3, device='cpu'))
    line.add(Steps(rows[:20]))
    batch = line.batch(line.keys, np.ones(20))
    line.add(Steps(rows[20:]))
    assert batch.state.tolist() == Steps(rows[:20]).state.tolist()


def test_prefetch_and_threads_that_draw():
    "A thread draws while another adds: each batch has rows as they came"
    rows = stream(
        *SPACES['stack'], bytes(np.random.default_rng(0).integers(0, 256, 3000, np.uint8)), 1, False
    )
    replay = PrioritizedReplay(None, 16, 100, seed=1, store=Small(3, device='cpu'))
    replay.add(Steps(rows[:100]))
    drawn, over = [], threading.Event()

    def draw():
        while not over.is_set():
            batch = replay.sample()
            drawn.append(batch)
            batch.update_priorities(torch.rand(16))

    thread = threading.Thread(target=draw)
    thread.start()
    for i in range(100, 3000, 10):
        replay.add(Steps(rows[i : i + 10]))
    over.set()
    thread.join()
    for batch in drawn[::7]:
        assert batch.state.tolist() == Steps(rows[batch.index.numpy()]).state.tolist()
    assert drawn


# ---- streams, with stand-ins for those of a GPU ----


class Stream:
    "Writes down who waits for whom"

    def __init__(self, name, told):
        self.name, self.told = name, told

    def wait_stream(self, other):
        self.told.append(f'{self.name} waits for {other.name}')

    def __enter__(self):
        self.told.append(f'on {self.name}')

    def __exit__(self, *e):
        self.told.append(f'off {self.name}')


@pytest.mark.parametrize('fails', [False, True])
def test_work_on_another_stream_is_put_in_order(monkeypatch, fails):
    told = []
    mine, theirs = Stream('store', told), Stream('caller', told)

    class Tensor:
        def record_stream(self, s):
            told.append(f'used on {s.name}')

    monkeypatch.setattr(torch.cuda, 'current_stream', lambda device: theirs)
    monkeypatch.setattr(torch.cuda, 'stream', lambda s: s)
    place = on_device.Device('cpu')
    place.stream = mine
    try:
        with place.in_order(Tensor()):
            told.append('work')
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert told == [
        'store waits for caller',
        'on store',
        'work',
        'off store',
        *([] if fails else ['caller waits for store', 'used on store']),
    ]
    told.clear()
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda device: mine)
    with place.in_order(Tensor()):
        told.append('work')
    assert told == ['work']


# ---- errors that come back ----


@pytest.mark.parametrize('kind', ['errors', 'sequence'])
def test_errors_come_back_by_one_copy_and_are_looked_at(kind, monkeypatch):
    with REPLAYS[kind](steps(), store=Rows(device='cpu')) as replay:
        for _ in replay:
            pass
        batch = replay.sample()  # the last one of the pass may be stale by now
        shape = (len(batch),) if kind == 'errors' else batch.train.shape
        copies, cpu = [], torch.Tensor.cpu
        monkeypatch.setattr(torch.Tensor, 'cpu', lambda x: copies.append(x.shape) or cpu(x))
        batch.update_priorities(torch.rand(shape, requires_grad=True))
        assert len(copies) == 1
        before = replay.sampler.probabilities().tolist()
        for wrong in float('nan'), float('inf'):
            td = torch.full(shape, wrong)
            with pytest.raises(ArgumentError, match='TD error'):
                batch.update_priorities(td)
        with pytest.raises(ArgumentError, match='TD errors'):
            batch.update_priorities(torch.ones(3, 3))
        assert replay.sampler.probabilities().tolist() == before
