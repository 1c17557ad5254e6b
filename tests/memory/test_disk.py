"""Memories on disk, beside a plain memory.

Paths, one writer, damaged directories, readers beside writers, kills, interrupts, power cuts."""

import copy
import errno
import json
import os
import pickle
import random
import shutil
import signal
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.app.offline import recorded_rows
from fastrl_replay.memory.places import COMMITTED, RESERVED
from fastrl_replay.steps.errors import FastrlError, NoRoom
from fastrl_replay.steps.row_dtypes import extend_dtype
from fastrl_replay.testing import through_file
from bytecodes import interrupted
from kills import (
    KINDS,
    Stream,
    check,
    check_batch,
    check_rows,
    child,
    forked,
    has_frames,
    kill_writers,
    opened,
    stop,
    warm,
)
from scripted import numbered
from strategies import cases, story
from test_timeline import KINDS as COLUMNS

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='processes are forked and killed')
ROWS, PIXELS = Stream(5, False), Stream(5, True)


def stream_of(kind):
    return PIXELS if has_frames(kind) else ROWS


def block(first, n, stamp=1, stream=ROWS):
    return Steps(stream.rows(np.arange(first, first + n), np.full(n, stamp)))


def filled(path, n=20, max_sz=10, **kw):
    "A memory of rows in blocks of five"
    line = Timeline(max_sz, Rows(path, **kw))
    for first in range(0, n, 5):
        line.add(block(first, min(5, n - first)))
    return line


def leave(line):
    "Let go of a memory as a kill would: nothing is written or flushed"
    line.place.leave()


def contents(path):
    return {p: p.read_bytes() for p in path.rglob('*') if p.is_file()}


def span_of(line):
    "How many rows were added, and which is the oldest, whatever keys they have here"
    return line.added, line.oldest - line.base


def seen(line):
    "All that can be seen of rows and links"
    if not len(line):
        return span_of(line)
    ways = line.walk(line.keys, [-2, -1, 1, 3])
    ways[ways >= 0] -= line.base
    mask = line.windows(line.keys, 3).rows['mask']
    return span_of(line), line[:].rows.tobytes(), ways.tolist(), mask.tolist()


def whole(line, stream=ROWS):
    "Check that every row is what its key says"
    if len(line):
        check_rows(line[:].rows, stream, line.keys - line.base, np.ones(len(line), int))


@pytest.fixture
def tmp_path():
    "In main memory if possible: what is flushed needs no device here"
    where = tempfile.mkdtemp(dir='/dev/shm' if os.path.isdir('/dev/shm') else None)
    yield Path(where)
    shutil.rmtree(where)


# ---- paths ----


def test_relative_and_home_paths_stay_where_they_were_given(tmp_path, monkeypatch):
    (tmp_path / 'work').mkdir()
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.chdir(tmp_path / 'work')
    relative = Timeline(4, Rows('here'))
    monkeypatch.chdir(tmp_path)
    for line, place in (relative, 'work/here'), (Timeline(4, Rows('~/ö 漢')), 'home/ö 漢'):
        line.add(block(0, 6))
        line.close()
        whole(Timeline(4, Rows(tmp_path / place)))


@pytest.mark.parametrize('name', ['notes', 'meta.json', 'data-2024/run.csv'])
def test_a_foreign_directory_is_left_alone(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"name": "mine"}')
    before = contents(tmp_path)
    for mode in 'a', 'r':
        with pytest.raises(ArgumentError, match='path: '):
            Timeline(4, Rows(tmp_path, mode=mode))
    assert contents(tmp_path) == before


@pytest.mark.parametrize('path', [3, '', __file__])
def test_what_can_be_no_directory_is_named(path):
    with pytest.raises((ArgumentError, TypeError), match='[pP]ath|a directory'):
        Timeline(4, Rows(path))


@pytest.mark.parametrize('mode', ['a', 'r'])
@pytest.mark.parametrize(
    'name', ['writer', 'meta.json', 'data-*', 'data-*/rows', 'data-*/frames-0.*.raw']
)
def test_symbolic_links_to_other_places_are_not_followed(name, mode, tmp_path):
    kind = 'frames' if 'frames' in name else 'uniform'
    with opened(kind, tmp_path / 'm', 10) as replay:
        replay.add(block(0, 10, stream=stream_of(kind)))
    (tmp_path / 'yours').mkdir()
    path = min((tmp_path / 'm').glob(name))
    path.rename(tmp_path / 'yours' / 'thing')
    path.symlink_to(tmp_path / 'yours' / 'thing')
    before = contents(tmp_path / 'yours')
    if name == 'writer' and mode == 'r':
        whole(Timeline(10, Rows(tmp_path / 'm', mode='r')))  # a reader does not open it
    else:
        with pytest.raises(FastrlError, match='symbolic link'):
            opened(kind, tmp_path / 'm', 10, mode=mode).memory[:]
    assert contents(tmp_path / 'yours') == before


# ---- what is there ----


def test_other_columns_and_another_size_are_refused(tmp_path):
    filled(tmp_path).close()
    for max_sz, spare in (9, 0), (11, 0), (10, 1):
        with pytest.raises(
            ArgumentError, match='a different max_sz or spare; .* expected 10 and at most 0'
        ):
            len(Timeline(max_sz, Rows(tmp_path, spare=spare)))
    line = Timeline(10, Rows(tmp_path))
    before = seen(line)
    with pytest.raises(BlockError, match='columns'):
        line.add(numbered(3))
    assert seen(line) == before
    assert len(Timeline(100, Rows(tmp_path, mode='r'))) == 10  # a reader need not know the size


@pytest.mark.parametrize('kind', ['prioritized', 'frames'])
def test_a_full_disk_changes_nothing(kind, tmp_path, monkeypatch):
    "When the memory is made: whichever file finds no room"
    calls, stream = 0, stream_of(kind)

    def full(file, _, size):
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(file, size)

    for at in range(1, 20):
        path, calls = tmp_path / f'{at}', 0
        replay = opened(kind, path, 50)
        with monkeypatch.context() as m:
            m.setattr(os, 'posix_fallocate', full)
            try:
                replay.add(block(0, 4, stream=stream))
            except NoRoom as e:
                assert 'not enough disk space' in str(e) and 'free' in str(e)
            else:
                break
        replay.close()
        with opened(kind, path, 50) as again:
            assert again.memory.inserted in (0, 4)
            whole(again.memory, stream)
    assert at > 4


def test_a_place_that_can_only_be_read_is_named(tmp_path, monkeypatch):
    filled(tmp_path / 'm').close()
    real = os.open

    def read_only(name, flags, *args, **kw):
        if str(name).startswith(str(tmp_path)) and flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(name))
        return real(name, flags, *args, **kw)

    monkeypatch.setattr(os, 'open', read_only)
    with pytest.raises(ArgumentError, match="cannot be written; .*Remedy: use mode='r'"):
        Timeline(10, Rows(tmp_path / 'm'))
    whole(Timeline(10, Rows(tmp_path / 'm', mode='r')))


# ---- one writer ----


def test_a_second_writer_is_refused_until_the_first_one_ends(tmp_path):
    line = filled(tmp_path)
    with pytest.raises(ArgumentError, match='in use; got this process'):
        Timeline(10, Rows(tmp_path))
    leave(line)
    read, out = os.pipe()

    def hold():
        held = Timeline(10, Rows(tmp_path))
        len(held)
        os.write(out, b'.')
        signal.pause()

    pid = child(hold)
    os.read(read, 1)
    with pytest.raises(ArgumentError, match=f'in use; got process {pid} on .*since'):
        Timeline(10, Rows(tmp_path))
    whole(Timeline(10, Rows(tmp_path, mode='r')))
    stop(pid)
    whole(Timeline(10, Rows(tmp_path)))


@pytest.mark.parametrize('kind', ['prioritized', 'sequences'])
def test_a_forked_child_draws_and_writes_nothing(kind, tmp_path):
    replay = opened(kind, tmp_path, 30)
    replay.add(block(0, 20))
    replay.sample()
    replay.add(block(20, 7))
    before = contents(tmp_path)

    def use():
        batch = replay.sample()
        check_batch(batch, ROWS)
        errors = np.ones(1 if kind == 'prioritized' else (1, 5))
        for call in (lambda: replay.add(block(27, 3)), lambda: batch.update_priorities(errors)):
            with pytest.raises(ArgumentError, match='belongs to the process that opened it'):
                call()
        replay.memory.close()

    assert forked(use) == (0, None)
    assert contents(tmp_path) == before
    with pytest.raises(ArgumentError, match='in use'):
        opened(kind, tmp_path, 30)
    replay.add(block(27, 3))
    whole(replay.memory)


def test_a_closed_memory_reads_and_writes_nothing(tmp_path):
    line = filled(tmp_path)
    saved = line.state_dict()
    line.close()
    other = Timeline(10, Rows(tmp_path))
    other.add(block(20, 4))
    before = contents(tmp_path)
    for call in (lambda: line.add(block(20, 3))), (lambda: line.load_state_dict(saved)):
        with pytest.raises(ArgumentError, match='is closed'):
            call()
    line.flush()
    line.close()
    assert contents(tmp_path) == before
    whole(other)


def test_copies_of_a_reader_read_and_copies_of_a_writer_are_refused(tmp_path):
    line = pickle.loads(pickle.dumps(Timeline(10, Rows(tmp_path))))  # not opened yet
    line.add(block(0, 12))
    for copied in copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)):
        with pytest.raises(ArgumentError, match='in use'):
            copied(line)
        assert seen(copied(Timeline(10, Rows(tmp_path, mode='r')))) == seen(line)


# ---- damage ----


def used(kind, path, mode):
    "Use a memory in all ways; return the error"
    warnings.simplefilter('ignore')
    try:
        replay = opened(kind, path, 12, 4, mode)
        memory = replay.memory
        keys = memory.keys
        memory.take(keys)
        memory.windows(keys, 30)
        memory.walk(keys, [-30, 1, 30])
        if len(replay):
            replay.sample()
        replay.stats()
        saved = replay.state_dict()
        if mode == 'a':
            replay.add(block(21, 9, stream=stream_of(kind)))
            replay.load_state_dict(saved)
            replay.close()
            len(opened(kind, path, 12, 4).memory)
    except FastrlError as e:
        return f'{type(e).__name__}: {e}'
    return ''


@pytest.fixture(scope='module')
def sound():
    "A memory of each kind"
    where = Path(tempfile.mkdtemp(dir='/dev/shm' if os.path.isdir('/dev/shm') else None))
    for kind in KINDS:
        with opened(kind, where / kind, 12, 4) as replay:
            for first in 0, 5, 10, 15:
                replay.add(block(first, 5, stream=stream_of(kind)))
            replay.state_dict()
        for mode in 'a', 'r':
            assert used(kind, shutil.copytree(where / kind, where / f'{kind}-{mode}'), mode) == ''
    yield where
    shutil.rmtree(where)


def one_word(data, rng):
    at = 4 * rng.integers(max(len(data) // 4, 1))
    return data[:at] + rng.bytes(4) + data[at + 4 :]


CHANGES = dict(
    gone=None,
    shorter=lambda data, rng: data[:-8],
    empty=lambda data, rng: b'',
    ones=lambda data, rng: b'\xff' * len(data),
    noise=lambda data, rng: rng.bytes(len(data)),
    one_word=one_word,
)


ALL_CHANGES = [pytest.param(k, [*CHANGES], marks=pytest.mark.slow) for k in KINDS[2:]]


@pytest.mark.parametrize('kind, changes', [('prioritized', ['shorter']), *ALL_CHANGES])
def test_damaged_files_are_named_and_never_crash(kind, changes, sound, tmp_path):
    rng = np.random.default_rng(0)
    files = [p.relative_to(sound / kind) for p in sorted((sound / kind).rglob('*')) if p.is_file()]
    for name in files:
        for how in changes:
            change = CHANGES[how]
            path = tmp_path / f'{how}-{name.name}'
            shutil.copytree(sound / kind, path)
            if change:
                (path / name).write_bytes(change((path / name).read_bytes(), rng))
            else:
                (path / name).unlink()
            for mode in 'r', 'a':
                wrong, said = forked(used, kind, path, mode)
                assert not wrong, f'{name}, {how}, mode={mode!r}: {said}'
                if how in ('shorter', 'empty') and name.name in ('rows', 'link', 'counters'):
                    assert 'damaged' in said
            shutil.rmtree(path)


@pytest.mark.parametrize(
    'change',
    [
        dict(ring=-1),
        dict(ring=2**40),
        dict(data='data-1/../data-1'),
        dict(data='/etc'),
        dict(columns=['row', 8, []]),
        dict(store=None),
        dict(format='a memory of fastrl_replay, format 2'),
        dict(max_sz=None),
    ],
    ids=str,
)
def test_damaged_settings_are_named(change, sound, tmp_path):
    path = shutil.copytree(sound / 'prioritized', tmp_path / 'm')
    meta = json.loads((path / 'meta.json').read_text())
    (path / 'meta.json').write_text(json.dumps(dict(meta, **change)))
    for mode in 'r', 'a':
        wrong, said = forked(used, 'prioritized', path, mode)
        assert not wrong and said


def test_rows_without_their_settings_are_not_deleted(tmp_path):
    filled(tmp_path, 15, 100).close()
    settings = (tmp_path / 'meta.json').read_bytes()
    (tmp_path / 'meta.json').unlink()
    with pytest.raises(StateError, match='no meta.json'):
        Timeline(100, Rows(tmp_path)).add(block(15, 5))
    (tmp_path / 'meta.json').write_bytes(settings)
    assert len(Timeline(100, Rows(tmp_path))) == 15


def test_a_state_that_is_refused_leaves_an_empty_directory(tmp_path):
    plain = PrioritizedReplay(bs=1, max_sz=10)
    plain.add(block(0, 5))
    good, bad = plain.state_dict(), plain.state_dict()
    bad['own']['sampler']['priorities'] = bad['own']['sampler']['priorities'][:3]
    for state in bad, good:
        replay = PrioritizedReplay(bs=1, max_sz=10, store=Rows(tmp_path / f'{state is bad}'))
        with pytest.raises(StateError):
            replay.load_state_dict(bad)
        if state is good:
            replay.load_state_dict(good)
            assert seen(replay.memory) == seen(plain.memory)
        else:
            replay.add(numbered(3))  # other columns
            assert replay.memory[:] == numbered(3)
        replay.close()


# ---- readers ----


def test_a_reader_needs_a_memory_and_changes_nothing(tmp_path):
    with pytest.raises(ArgumentError, match='there is no memory to read'):
        Timeline(10, Rows(tmp_path, mode='r'))
    leave(filled(tmp_path, 23))
    before = contents(tmp_path)
    reader = ExperienceReplay(bs=4, max_sz=10, store=Rows(tmp_path, mode='r'))
    assert len(reader.memory.reward) == 10
    reader.sample()
    reader.load_state_dict(reader.state_dict())
    with pytest.raises(ArgumentError, match='open for reading'):
        reader.add(block(23, 1))
    reader.close()
    assert contents(tmp_path) == before
    assert reader.sample().index.min() >= 13  # it is opened again


def go_on(kind, path, max_sz):
    "Add for ever"
    rng = random.Random(0)
    with opened(kind, path, max_sz) as replay:
        while True:
            first = replay.memory.inserted
            replay.add(block(first, rng.choice([1, 7, 40]), stream=stream_of(kind)))


@pytest.mark.parametrize('kind', ['uniform', 'sequences', 'compressed'])
def test_rows_are_whole_while_another_process_writes(kind, tmp_path):
    "The ring is overwritten many times; the writer is killed and another one goes on"
    warm(kind, tmp_path / 'warm')
    max_sz, stream = 60, stream_of(kind)
    with opened(kind, tmp_path / 'm', max_sz) as writer:
        writer.add(block(0, 40, stream=stream))
    reader = opened(kind, tmp_path / 'm', max_sz, mode='r')
    last = until = 0
    for _ in range(2):
        pid = child(go_on, kind, tmp_path / 'm', max_sz)
        until += 20 * max_sz
        try:
            while last < until:
                end, oldest = reader.memory.span
                assert last <= end <= oldest + max_sz
                last = end
                try:
                    check_batch(reader.sample(), stream)
                    keys = np.arange(max(oldest, end - 6), end)
                    rows = reader.memory.take(keys).rows
                    check_rows(rows, stream, keys, np.ones(len(keys), int))
                    check_batch(reader.memory.windows(keys, 5), stream)
                except (StaleKey, NotEnoughRows):
                    pass  # overwritten by now
        finally:
            stop(pid)
    keys = reader.memory.keys
    check_rows(reader.memory[:].rows, stream, keys, np.ones(len(keys), int))


def test_a_reader_is_told_that_the_writer_replaced_its_folder(tmp_path):
    writer = opened('prioritized', tmp_path, 10)
    nothing = writer.state_dict()
    writer.add(block(0, 8))
    reader = opened('prioritized', tmp_path, 10, mode='r')
    reader.sample()
    writer.load_state_dict(nothing)
    with pytest.raises(StateError, match='was replaced'):
        reader.sample()
    writer.add(block(writer.memory.inserted, 9))
    reader.close()
    assert reader.sample()
    assert reader.memory.inserted == writer.memory.inserted


def test_a_saved_reader_continues(tmp_path):
    writer = opened('prioritized', tmp_path, 60)
    writer.add(block(0, 30))

    def drawn(replay, n):
        found = []
        for _ in range(n):
            batch = replay.sample()
            batch.update_priorities(batch.index % 5 + 1.0)
            found.append((batch.index.tolist(), batch.weight.tolist()))
        return found

    first, again = (opened('prioritized', tmp_path, 60, mode='r') for _ in range(2))
    drawn(first, 5)
    again.load_state_dict(through_file(first.state_dict()))
    assert drawn(again, 5) == drawn(first, 5)
    writer.add(block(30, 4))
    assert len(again) == 34


@pytest.mark.parametrize('kind', ['prioritized', 'sequences', 'frames'])
def test_a_reader_goes_back_with_the_writer(kind, tmp_path):
    "Errors of rows that are gone reach no other rows"
    stream = stream_of(kind)
    writer = opened(kind, tmp_path, 60, spare=40)
    writer.add(block(0, 30, stream=stream))
    saved = through_file(writer.state_dict())
    writer.add(block(30, 25, stream=stream))
    reader = opened(kind, tmp_path, 60, mode='r', bs=4)
    late = reader.sample()
    writer.load_state_dict(saved)
    assert seen(reader.memory) == seen(writer.memory)
    reader.update_priorities(late.index, np.ones((4, 5) if kind == 'sequences' else 4))
    assert reader.stats()['stale'] == 4
    writer.add(block(30, 20, 2, Stream(6, has_frames(kind))))  # other episodes than the first time
    fresh = opened(kind, tmp_path, 60, mode='r')
    assert seen(reader.memory) == seen(fresh.memory) == seen(writer.memory)
    for replay in reader, fresh:
        replay.sample(1)  # it looks
        assert len(replay) == len(writer)


def long_episode(first, n):
    "Rows of one environment whose episode does not end"
    rows = np.zeros(n, ROWS.dtype)
    rows['episode_n'] = 1
    rows['step_n'] = np.arange(first, first + n) + 1
    return Steps(rows)


def test_rows_over_those_that_were_undone_are_whole(tmp_path):
    writer = Timeline(6, Rows(tmp_path))
    writer.add(long_episode(0, 2))
    state = through_file(writer.state_dict())
    writer.add(long_episode(2, 8))  # rows before 4 are overwritten
    with pytest.warns(UserWarning, match='2 rows that were in'):
        writer.load_state_dict(state)
    writer.add(long_episode(2, 3))
    reader = Timeline(6, Rows(tmp_path, mode='r'))
    assert span_of(writer) == span_of(reader) == (5, 2)
    assert reader[:] == writer[:] == long_episode(2, 3)


def test_a_reader_that_missed_rows_draws_the_sequences_of_the_writer(tmp_path):
    def make(**kw):
        store = Rows(tmp_path, **kw)
        return SequenceReplay(bs=1, max_sz=12, length=4, burn_in=0, overlap=2, store=store)

    def firsts(replay):
        return sorted(replay.sample(len(replay)).index.tolist())

    writer = make()
    writer.add(long_episode(0, 5))
    reader = make(mode='r')
    assert firsts(reader) == [0]
    for first in range(5, 30, 5):
        writer.add(long_episode(first, 5))
    for replay in reader, make(mode='r'), writer:
        assert {*firsts(replay)} <= {18, 20, 22, 24, 26} and len(replay) == 5


def test_recorded_rows_of_a_memory_that_is_written_are_complete_or_an_error(tmp_path):
    for spare in 0, 6000:
        writer = Timeline(9000, Rows(tmp_path / f'{spare}', spare=spare))
        writer.add(block(0, 9000))
        parts = iter(recorded_rows(tmp_path / f'{spare}'))
        found = next(parts).total_reward.tolist()
        writer.add(block(9000, 5000))
        if spare:
            for part in parts:
                found += part.total_reward.tolist()
            assert found == [*range(9000)]
        else:
            with pytest.raises(StaleKey):
                list(parts)


def test_recorded_rows_fill_a_memory_to_the_end_or_not_at_all(tmp_path):
    Timeline(900, Rows(tmp_path / 'data')).add(block(0, 900))

    def chain(max_sz):
        replay = ExperienceReplay(bs=4, max_sz=max_sz, store=Rows(tmp_path / 'm'))
        return replay.offline(tmp_path / 'data')

    pipe = chain(500)
    with pytest.raises(NoRoom, match='more rows than the memory can hold'):
        pipe.fill()
    assert len(pipe.source.memory) == 0
    pipe.close()
    for _ in range(2):
        with chain(900) as pipe:
            pipe.fill()
            assert len(pipe.source.memory) == 900


# ---- kills, interrupts, power cuts ----


@pytest.mark.parametrize('n', [3, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize('kind', KINDS)
def test_a_killed_writer_loses_nothing_that_was_added(kind, n, tmp_path):
    kill_writers(kind, n, tmp_path, seed=n)


def test_the_check_after_kills_finds_what_is_wrong(tmp_path):
    "A row of another call, a torn row, a link, a priority, a row that is lost"
    for name, at, says in (
        ('rows', ROWS.dtype.fields['stamp'][1], 'stamp of key 40'),
        ('rows', ROWS.dtype.fields['noise'][1] + 30, 'noise of key 40'),
        ('link', 0, 'links|damaged'),
        ('priorities', 6, 'priority'),
    ):
        path = tmp_path / f'{name}-{at}'
        stream, expected = warm('prioritized', path)
        assert forked(check, 'prioritized', path, stream, expected, 'r') == (0, 45)
        [file] = path.glob(f'data-*/{name}')
        data = bytearray(file.read_bytes())
        if name == 'link':  # one within an episode
            at = 4 * int((np.frombuffer(data, np.int32) > 0).argmax())
        data[at] ^= 2  # key 40 is in the first slot
        file.write_bytes(data)
        wrong, said = forked(check, 'prioritized', path, stream, expected, 'r')
        assert wrong
        assert any(x in said for x in says.split('|')), said
    expected.ends = {46}
    assert '45 rows' in forked(check, 'prioritized', path, stream, expected, 'r')[1]


@pytest.mark.parametrize('kind', ['prioritized', 'sequences', 'compressed'])
def test_an_interrupted_call_has_happened_or_not(kind, tmp_path):
    "At random moments: the block is there or not; this object and the next to open it agree"

    def moment():
        return int(10 ** rng.uniform(0, 3.5))

    rng, stream, stamps, came = random.Random(0), stream_of(kind), [1] * 30, 0
    replay = opened(kind, tmp_path, 20, spare=30)
    replay.add(block(0, 30, stream=stream))
    saved = replay.state_dict()
    for stamp in range(2, 62):
        end, now = replay.memory.added, stamp % 4
        if now == 0:
            replay.load_state_dict(saved)
            del stamps[30:]
            end = 30
        elif now == 1:
            came += interrupted(replay.sample, moment())
            came += interrupted(lambda: replay.load_state_dict(saved), moment())
            assert replay.memory.added in (30, end)
            del stamps[replay.memory.added :]
        elif now == 2:
            rows = block(end, 3, stamp, stream)
            came += interrupted(lambda: replay.add(rows), moment())
            assert replay.memory.added in (end, end + 3)
            stamps += [stamp] * (replay.memory.added - end)
        else:
            came += interrupted(replay.close, moment())
            before, drawable = seen(replay.memory), len(replay)
            replay.close()
            replay = opened(kind, tmp_path, 20, spare=30)
            assert seen(replay.memory) == before
            assert len(replay) == drawable
        m = replay.memory
        check_rows(m[:].rows, stream, m.keys - m.base, np.array(stamps)[m.keys - m.base])
        if len(replay):
            check_batch(replay.sample(), stream)
            assert replay.sampler.probabilities().sum() == pytest.approx(1)
    assert came > 5


def cut_power(line):
    "As if the machine had been switched off, with all written bytes on the device"
    leave(line)
    writer = line.place.path / 'writer'
    writer.write_text(json.dumps(dict(json.loads(writer.read_text()), boot='another')))


def test_after_a_power_cut_flushed_rows_are_there_and_others_are_not(tmp_path):
    line = filled(tmp_path, 15, 100)
    line.flush()
    line.add(block(15, 6))
    saved = line.state_dict()
    cut_power(line)
    with pytest.warns(UserWarning, match='6 rows are lost'):
        again = Timeline(100, Rows(tmp_path))
        assert again.inserted == 15
    whole(again)
    again.add(block(15, 8, 2))
    with pytest.raises(StateError, match='replaced since'):
        again.load_state_dict(saved)
    leave(again)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert Timeline(100, Rows(tmp_path)).inserted == 23


def test_a_checkpoint_of_rows_that_a_power_cut_lost_is_refused(tmp_path):
    "Also if the counters on the device are those of the last flush"
    line = filled(tmp_path, 15, 100)
    line.flush()
    file = line.place.file('counters')
    flushed = file.read_bytes()
    line.add(block(15, 6))
    saved = line.state_dict()
    cut_power(line)
    file.write_bytes(flushed)
    with pytest.warns(UserWarning, match='rows are lost'):
        again = Timeline(100, Rows(tmp_path))
        again.add(block(15, 8, 2))
    leave(again)
    with pytest.raises(StateError, match='replaced since'):
        Timeline(100, Rows(tmp_path)).load_state_dict(saved)


@pytest.mark.parametrize('n, max_sz, oldest', [(3000, 2000, 1100), (30, 10, 30)])
def test_a_power_cut_loses_rows_whose_slots_may_have_been_written(n, max_sz, oldest, tmp_path):
    "Rows that come afterwards last, also where it loses all"
    line = filled(tmp_path, n, max_sz)
    line.flush()
    line.add(block(n, 100))
    cut_power(line)
    with pytest.warns(UserWarning, match='100 rows are lost'):
        again = Timeline(max_sz, Rows(tmp_path))
        assert again.inserted == n
    assert again.oldest >= oldest
    again.add(block(n, 5))
    again.close()
    again = Timeline(max_sz, Rows(tmp_path))
    assert len(again) >= 5
    whole(again)


def test_a_power_cut_brings_no_rows_back_that_were_undone(tmp_path):
    line = filled(tmp_path, 10, 100)
    saved = line.state_dict()
    line.add(block(10, 10))
    line.flush()
    line.load_state_dict(saved)
    line.add(block(10, 4, 2))
    cut_power(line)
    with pytest.warns(UserWarning, match='rows are lost'):
        again = Timeline(100, Rows(tmp_path))
        assert again.inserted == 10
    whole(again)


def test_closing_syncs_all_arrays(tmp_path, monkeypatch):
    order, real = [], os.fsync

    def fsync(file):
        order.append(Path(os.readlink(f'/proc/self/fd/{file}')).name)
        real(file)

    monkeypatch.setattr(os, 'fsync', fsync)
    filled(tmp_path).close()
    [data] = tmp_path.glob('data-*')
    assert {'rows', 'link', 'back', 'counters', data.name} <= {*order}


def test_a_checkpoint_whose_rows_were_overwritten_continues_without_them(tmp_path):
    line = filled(tmp_path, 20, spare=4)
    saved = line.state_dict()
    line.add(block(20, 9, 2))
    with pytest.warns(UserWarning, match='5 rows that were in'):
        line.load_state_dict(saved)
    assert span_of(line) == (20, 15)
    line.add(block(20, 2))
    leave(line)
    again = Timeline(10, Rows(tmp_path, spare=4))
    assert again.span == (22, 15)
    whole(again)


def test_a_moved_directory_loads_its_checkpoints(tmp_path):
    line = filled(tmp_path / 'a', 10)
    saved = through_file(line.state_dict())
    line.add(block(10, 3))
    line.close()
    shutil.move(tmp_path / 'a', tmp_path / 'b')
    line = Timeline(10, Rows(tmp_path / 'b'))
    with pytest.warns(UserWarning, match='3 rows that were in'):
        line.load_state_dict(saved)
    assert span_of(line) == (10, 3)
    whole(line)


# ---- beside a plain memory ----


class Saves:
    "Checkpoints of a memory on disk and a plain one, while the directory can go back to them"

    def __init__(self, spare):
        self.spare, self.saves = spare, []

    def added(self, n):
        self.saves = [(end, gone + n, states) for end, gone, states in self.saves]

    def save(self, end, *memories):
        self.saves.append((end, 0, [through_file(m.state_dict()) for m in memories]))

    def load(self, n, *memories):
        usable = [s for s in self.saves if s[1] <= self.spare]
        if not usable:
            return
        end, _, states = usable[n % len(usable)]
        for memory, state in zip(memories, states):
            memory.load_state_dict(state)
        for later in [s for s in self.saves if s[0] > end]:
            with pytest.raises(StateError):
                memories[0].load_state_dict(later[2][0])
        self.saves = [s for s in self.saves if s[0] <= end]


def operations(*names):
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 30)), max_size=30)


@pytest.mark.parametrize('kind', ['cartpole', 'nested', 'n_step'])
@cases(100)
@given(
    ops=operations('add', 'add', 'add', 'add', 'reopen', 'kill', 'save', 'load', 'flush'),
    program=st.binary(min_size=1, max_size=60),
    max_sz=st.integers(1, 12),
    spare=st.sampled_from([0, 1, 40]),
)
def test_a_directory_is_a_memory_in_main_memory(kind, ops, program, max_sz, spare, tmp_path):
    """Rows, links and windows agree after any operations.

    Environments have large numbers, and blocks more rows than the ring."""
    path = tmp_path / 'm'
    dtype = COLUMNS[kind] if kind != 'n_step' else extend_dtype(COLUMNS['cartpole'], n='i4')
    rows = story(program * (1 + 300 // len(program)), dtype)[0]
    rows['env_id'] = np.where(rows['env_id'] == 4000, 2**23 + 5, rows['env_id'])
    if kind == 'n_step':
        rows['n'] %= 4
    disk, plain, saves = Timeline(max_sz, Rows(path, spare=spare)), Timeline(max_sz), Saves(spare)
    try:
        for op, n in ops:
            at = plain.added
            if op == 'add' and at + n <= len(rows):
                for line in disk, plain:
                    keys = line.add(Steps(rows[at : at + n])) - line.base
                    assert keys.tolist() == [*range(at, at + n)]
                saves.added(n)
            elif op == 'kill' and disk.place is not None:
                leave(disk)
                disk = Timeline(max_sz, Rows(path, spare=spare))
            elif op == 'reopen':
                disk.close()
                disk = Timeline(max_sz, Rows(path, spare=spare))
            elif op == 'save' and at:
                saves.save(at, disk, plain)
            elif op == 'load':
                saves.load(n, disk, plain)
            elif op == 'flush':
                disk.flush()
            assert seen(disk) == seen(plain)
    finally:
        disk.close()
        shutil.rmtree(path, ignore_errors=True)


def replay_of(kind, max_sz, store):
    common = dict(bs=1, max_sz=max_sz, seed=3, store=store, eps=0.01)
    common['kind'] = 'rank' if 'rank' in kind else 'proportional'
    if 'sequences' in kind:
        return SequenceReplay(length=3, burn_in=0, overlap=1, **common)
    return PrioritizedReplay(**common)


def chances(replay):
    "Return the sorted probabilities of all rows or sequences"
    if not len(replay):
        return []
    return sorted(replay.drawable()['probability'].round(12).tolist())


@pytest.mark.parametrize('kind', ['proportional', 'rank', 'sequences', 'sequences rank'])
@cases(80)
@given(
    ops=operations('add', 'add', 'add', 'update', 'update', 'reopen', 'kill', 'save', 'load'),
    program=st.binary(min_size=1, max_size=60),
    max_sz=st.sampled_from([3, 8, 20]),
    spare=st.sampled_from([0, 60]),
)
def test_replays_on_disk_draw_as_in_main_memory(kind, ops, program, max_sz, spare, tmp_path):
    # no episode begins in its middle, and none has the number of the one before
    program = bytes(b & 239 if b & 12 else b for b in program)
    path, rows = tmp_path / 'm', story(program * (1 + 300 // len(program)), COLUMNS['cartpole'])[0]
    disk, plain = replay_of(kind, max_sz, Rows(path, spare=spare)), replay_of(kind, max_sz, None)
    saves = Saves(spare)
    try:
        for op, n in ops:
            at = plain.memory.added
            if op == 'add' and at + n <= len(rows):
                n = min(n, max_sz - 1)
                for replay in disk, plain:
                    replay.add(Steps(rows[at : at + n]))
                saves.added(n)
            elif op == 'update' and len(plain):
                key = int(plain.sample(1).index[0]) - plain.memory.base
                td = np.full((1, 3)[: 1 + ('sequences' in kind)], n + 0.5)
                for replay in disk, plain:
                    replay.update_priorities([key + replay.memory.base], td)
            elif op in ('reopen', 'kill') and at:
                if op == 'kill':
                    leave(disk.memory)
                else:
                    disk.close()
                disk = replay_of(kind, max_sz, Rows(path, spare=spare))
            elif op == 'save' and at:
                saves.save(at, disk, plain)
            elif op == 'load':
                saves.load(n, disk, plain)
            assert len(disk) == len(plain)
            assert chances(disk) == chances(plain)
            assert span_of(disk.memory) == span_of(plain.memory)
    finally:
        disk.close()
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize('n', [0, 10])
def test_a_power_cut_after_a_flush_leaves_no_row_of_another_key(n, tmp_path):
    "New rows reach the device before the counters that say that they count"
    line = filled(tmp_path, 25, 20)
    line.flush()
    if n:
        line.add(block(25, n))
    cut_power(line)
    [counters] = tmp_path.glob('data-*/counters')
    c = np.fromfile(counters, np.int64)
    c[[RESERVED, COMMITTED]] = 25
    c.tofile(counters)
    with pytest.warns(UserWarning, match='may have overwritten'):
        again = Timeline(20, Rows(tmp_path))
        whole(again)
    assert len(again) == (0 if n else 20)
    again.add(block(25, 10))
    whole(again)


@pytest.mark.parametrize('kind', [ExperienceReplay, partial(SequenceReplay, length=2)])
def test_the_length_of_a_reader_follows_the_writer(tmp_path, kind):
    writer = kind(bs=1, max_sz=100, store=Rows(tmp_path / 'm'))
    writer.add(numbered(6))
    reader = kind(bs=1, max_sz=100, store=Rows(tmp_path / 'm', mode='r'))
    for first in 6, 26:
        assert len(reader) == len(writer)
        writer.add(numbered(20, first))
    assert len(reader) == len(writer)
