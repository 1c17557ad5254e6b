"""Memories on a device, by tensors on the CPU: a GPU's code gives what main memory gives."""

import numpy as np
import pytest
import torch

from fastrl_replay.all import *
from fastrl_replay.memory import on_device
from fastrl_replay.memory.rows import OpenStore
from fastrl_replay.steps import machine as machine_module
from fastrl_replay.steps.errors import NoRoom
from fastrl_replay.testing import through_file
from strategies import equal
from test_frames import REPLAYS, SPACES, Small, steps, stream


@pytest.mark.parametrize(
    'make',
    [
        lambda: Rows(device='cpu'),
        lambda: Small(4, device='cpu'),
        lambda: Small(device=torch.device('cpu')),
    ],
    ids=['rows', 'stacks', 'frames'],
)
@pytest.mark.parametrize('kind', REPLAYS)
def test_replays_give_the_same_batches(kind, make):
    "From a stream, with errors that return as tensors; a copy saved midway continues alike"
    with REPLAYS[kind](steps(), store=Rows()) as a, REPLAYS[kind](steps(), store=make()) as b:
        n = 0
        for x, y in zip(a, b):
            equal(x, y)
            shape = (2, 3) if kind == 'sequence' else x.shape
            td = torch.rand(shape, generator=torch.Generator().manual_seed(n))
            for batch in x, y:
                batch.update_priorities(td)
            n += 1
    assert n > 20


@pytest.mark.parametrize(
    'store', [Rows(device='cpu'), Small(3, device='cpu'), Small(device='cpu')], ids=str
)
def test_large_blocks_and_frames_that_never_repeat(store, monkeypatch):
    "Memory on the device grows, and blocks are sent in parts, because pinned memory is limited"
    monkeypatch.setattr(OpenStore, 'part', 2000)
    rows = stream(*SPACES['stack'], bytes(range(250)) * 8, 1, False)
    line, plain = Timeline(70, store), Timeline(70)
    for block in rows[:5], rows[5:1800], rows[1800:1803], rows[1803:]:
        for memory in line, plain:
            memory.add(Steps(block))
        equal(line[:], plain[:])


# ---- what a block that is refused, or fails, leaves ----


@pytest.mark.parametrize(
    'make', [lambda: Rows(device='cpu'), lambda: Small(3, device='cpu')], ids=['rows', 'frames']
)
@pytest.mark.parametrize('at', range(4))
def test_a_copy_that_fails_leaves_a_whole_memory(make, at, monkeypatch):
    "The block was added or it was not; only rows that it was going to overwrite may be gone"
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
    assert len(line) >= 10
    equal(line[:], Steps(rows[line.oldest : line.inserted]))
    line.add(Steps(rows[line.inserted : 60]))
    line.add(Steps(rows[60:70]))
    equal(line[:], Steps(rows[40:70]))


def test_a_device_that_is_full_is_told(monkeypatch):
    monkeypatch.setattr(machine_module, 'machine_memory', lambda: 2**20)
    row = Steps(stream(*SPACES['stack'], b'\0', 1, False))
    with pytest.raises(
        NoRoom,
        match=r'not enough memory for max_sz=1_000_000 rows of 128 bytes; got cpu with 1.0 MiB; '
        r'expected 122 MiB. Remedy: use max_sz=6_553, smaller rows, or store=Frames',
    ):
        Timeline(1_000_000, Rows(device='cpu')).add(row)
    line = Timeline(5000, Rows(device='cpu'))
    line.add(row)

    def full(*a, **k):
        raise torch.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(torch, 'empty', full)
    with pytest.raises(
        NoRoom, match='Rows: not enough memory on cpu; got 1.0 MiB; expected 12 KiB'
    ):
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
        ArgumentError, match="on disk or on a device; got 'x', 'cpu'; expected path or device"
    ):
        make(path='x', device='cpu')
    assert make(device='auto').device == ('cuda' if torch.cuda.is_available() else None)


def test_a_saved_memory_is_loaded_where_its_device_has_room(monkeypatch):
    "Was: main memory was asked, and named"
    line = Timeline(1000, Rows(device='cpu'))
    line.add(Steps(stream(*SPACES['stack'], b'\0', 1, False)))
    saved = through_file(line.state_dict())
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
