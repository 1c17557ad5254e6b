"""Frames in files: bit for bit what rows in main memory hold.

`test_disk.py` has kills, readers and damage of all kinds of memories."""

import shutil

import pytest
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.memory import frames as frames_module
from fastrl_replay.testing import through_file
from strategies import cases, same_memory
from test_frames import SPACES, episode, stream

CODECS = [None, 'lz4', 'zstd']


class Tiny(Frames):
    "Frames of a few bytes count, in short segments, and few stay raw"

    least, smallest_segment, raw_frames = 4, 2, 1


class Middle(Frames):
    "As many segments as in main memory"

    smallest_segment = 16


def add(line, rows, size=10):
    for i in range(0, len(rows), size):
        line.add(Steps(rows[i : i + size]))


def files_of(path, kind='*'):
    found = path.glob(f'data-*/frames-0.[0-9]*.{kind}')
    return sorted(found, key=lambda p: int(p.name.split('.')[1]))


FAST = [('stack', 'lz4'), ('dict', None)]
SLOW = [(k, c) for k in SPACES for c in CODECS if (k, c) not in FAST]


@pytest.mark.parametrize(
    'kind, compress', FAST + [pytest.param(*x, marks=pytest.mark.slow) for x in SLOW]
)
@cases(12)
@given(
    program=st.binary(min_size=1, max_size=150),
    sizes=st.lists(st.integers(1, 30), max_size=14),
    max_sz=st.integers(1, 40),
    repeats=st.booleans(),
    spare=st.integers(0, 60),
    what=st.lists(st.sampled_from(['', 'close', 'save', 'load', 'reader']), max_size=14),
    stack=st.sampled_from([1, 3]),
)
def test_a_directory_of_frames_is_a_memory_of_rows(
    tmp_path_factory, kind, compress, program, sizes, max_sz, repeats, spare, what, stack
):
    "Whatever is added, closed and rewound, for the writer and for a reader"
    rows, path = stream(*SPACES[kind], program, 0, repeats), tmp_path_factory.mktemp('m') / 'm'

    def opened():
        return Timeline(max_sz, Tiny(stack, compress, path, spare=spare))

    plain, line, at, saved, reader = Timeline(max_sz), opened(), 0, None, None
    for i, n in enumerate([*sizes, len(rows)]):
        if at >= len(rows):
            break
        for memory in plain, line:
            memory.add(Steps(rows[at : at + n].copy()))
        at += n
        do = what[i] if i < len(what) else ''
        if do == 'close':
            line.close()
            line = opened()
        elif do == 'save':
            saved = plain.inserted, *(through_file(m.state_dict()) for m in (plain, line))
        elif do == 'load' and saved and plain.inserted - saved[0] <= spare:
            plain.load_state_dict(saved[1])
            line.load_state_dict(saved[2])
        elif do == 'reader':
            reader = Timeline(max_sz, Tiny(stack, compress, path, mode='r'))
        for memory in line, reader or line:
            same_memory(memory, plain, i)
    line.close()
    shutil.rmtree(path.parent)


@pytest.mark.parametrize('compress', [None, pytest.param('lz4', marks=pytest.mark.slow)])
def test_frames_that_no_row_needs_leave_the_disk(tmp_path, compress):
    "A memory of 500 rows has as many files after 5,000 as after 1,500, also if reopened often"
    rows, counts = episode(5000), []
    for first in range(0, 5000, 1000):
        line = Timeline(500, Middle(1, compress, tmp_path, spare=50))
        for i in range(first, first + 1000, 50):
            line.add(Steps(rows[i : i + 50]))
            counts.append(len(files_of(tmp_path)))
        assert line[:] == Steps(rows[first + 500 : first + 1000])
        line.close()
    assert max(counts[30:]) <= 1.25 * max(counts[:30])
    assert not compress or len(files_of(tmp_path, 'packed')) > 4 * len(files_of(tmp_path, 'raw'))


def test_other_settings_are_refused(tmp_path):
    line = Timeline(50, Frames(1, None, tmp_path))
    line.add(Steps(episode(20)))
    line.close()
    for other in Frames(1, 'lz4', tmp_path), Rows(tmp_path):
        with pytest.raises(ArgumentError, match='was made with a different'):
            len(Timeline(50, other))
    assert len(Timeline(50, Frames(path=tmp_path))) == 20
    for wrong in dict(path=5), dict(mode='r'), dict(spare=3), dict(path=tmp_path, mode='w'):
        with pytest.raises((ArgumentError, TypeError)):
            Frames(**wrong)


@pytest.mark.parametrize('compress', CODECS)
def test_a_memory_in_main_memory_is_put_on_disk(tmp_path, compress):
    rows, ram = episode(700), Timeline(300, Tiny(1, compress))
    add(ram, rows[:600])
    line = Timeline(300, Tiny(1, compress, tmp_path / 'm'))
    line.load_state_dict(through_file(ram.state_dict()))
    same_memory(line, ram)
    add(line, rows[600:])
    line.close()
    assert Timeline(300, Tiny(1, compress, tmp_path / 'm'))[:] == Steps(rows[400:])


@pytest.mark.parametrize('kind', ['raw', 'packed'])
@pytest.mark.parametrize('mode', ['a', 'r'])
def test_a_damaged_file_is_named_and_others_can_be_read(tmp_path, kind, mode):
    rows, line = episode(1000), Timeline(800, Middle(1, 'lz4', tmp_path))
    add(line, rows)
    line.close()
    files = files_of(tmp_path, kind)
    file = files[0 if kind == 'raw' else len(files) // 2]
    data = file.read_bytes()
    for change in data[:-1], b'', None:
        file.unlink()
        if change is not None:
            file.write_bytes(change)
        twin = Timeline(800, Middle(1, 'lz4', tmp_path, mode=mode))
        with pytest.raises(StateError, match=f'{file.stem}.*damaged'):
            twin[:]
        assert twin[-1:] == Steps(rows[-1:])
        twin.close()
        file.write_bytes(data)


@pytest.mark.parametrize('compress', [None, 'lz4'])
def test_a_memory_that_outgrows_main_memory_gives_the_same_rows(tmp_path, monkeypatch, compress):
    rows, line = episode(1500), Timeline(1000, Middle(1, compress, tmp_path))
    add(line, rows[:500])
    monkeypatch.setattr(frames_module, 'outgrows', lambda nbytes: nbytes > 100_000)
    add(line, rows[500:])
    assert line[:] == Steps(rows[500:])
    line.close()
    for mode in 'a', 'r':
        assert Timeline(1000, Middle(1, compress, tmp_path, mode=mode))[:] == Steps(rows[500:])
