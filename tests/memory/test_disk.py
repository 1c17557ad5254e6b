"""Memories on disk: writers that are killed, damaged and foreign directories, readers beside writers, interrupts, power cuts, and a plain memory beside it."""

import copy, errno, functools, json, os, pathlib, pickle, shutil, signal, subprocess, sys, tempfile, threading, time, warnings, zipfile
from pathlib import Path

import numpy as np, pytest
from hypothesis import given, strategies as st

from fastrl_replay.look import sample
from fastrl_replay.all import *
from fastrl_replay.steps.errors import Explained, NoRoom
from fastrl_replay.steps.row_dtypes import extend_dtype
from fastrl_replay.memory import directory as files
from fastrl_replay.steps import files as whole_files
from fastrl_replay.memory.directory import CHECK, COMMITTED, FLUSHED, RESERVED, Directory
from fastrl_replay.memory.rows import Store
from fastrl_replay.app.offline import open_memory, recorded_rows
from fastrl_replay.data.datasets import _blocks
from fastrl_replay.testing import through_file
from kills import (
    KINDS,
    NAMES,
    Stream,
    child,
    check_batch,
    check_rows,
    drawable,
    forked,
    kills,
    opened,
    warm,
)
from scripted import numbered, with_columns
from strategies import cases
from test_boundaries import interrupted
from test_interrupts import stream
from test_timeline import KINDS as COLUMNS, story

pytestmark = pytest.mark.skipif(
    not hasattr(os, 'fork'), reason='processes are forked and killed here'
)
STREAM, PIXELS = Stream(5, False), Stream(5, True)


def block(first, n, stamp=1, stream=STREAM):
    return Steps(stream.rows(np.arange(first, first + n), np.full(n, stamp)))


def filled(path, n=20, max_sz=10, stamp=1, **kw):
    "A memory of rows in blocks of five"
    line = Timeline(max_sz, Rows(path, **kw))
    for first in range(0, n, 5):
        line.add(block(first, min(5, n - first), stamp))
    return line


def leave(line):
    "Let go of a memory as a kill would: nothing is written, flushed or told"
    line.place.leave()


def contents(path):
    return {p: p.read_bytes() for p in path.rglob('*') if p.is_file()}


def seen(line):
    "All that can be seen of rows and links"
    if not len(line):
        return span_of(line)
    keys, ways = line.keys, line.walk(line.keys, [-2, -1, 1, 3])
    ways[ways >= 0] -= line.base
    return (
        span_of(line),
        line[:].rows.tobytes(),
        ways.tolist(),
        line.windows(keys, 3).rows['mask'].tolist(),
    )


def whole(line, stamp=1):
    "Every row is what its key says"
    check_rows(line[:].rows, STREAM, line.keys - line.base, np.full(len(line), stamp))


@pytest.fixture
def tmp_path():
    "In main memory where that can be: what is flushed needs no device here"
    where = tempfile.mkdtemp(dir='/dev/shm' if os.path.isdir('/dev/shm') else None)
    yield Path(where)
    shutil.rmtree(where)


# ---- kills ----


@pytest.mark.parametrize('n', [6, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize('kind', KINDS)
def test_kills(kind, n, tmp_path):
    "Nothing that was committed is lost, torn or mixed, wherever the writer is killed"
    warm(kind, tmp_path)
    killer, wrong = kills(kind, n, seed=n, where=tmp_path)
    assert not wrong, wrong
    assert killer.rounds == n == sum(killer.counts.values()) and set(killer.counts) <= {*NAMES}


def test_the_check_finds_what_is_wrong(tmp_path):
    "A row of another call, a link, a priority: each is found"

    def damaged(kind, name, change, dtype=np.uint8):
        from kills import Expected, check

        path, expected = tmp_path / f'{kind}-{name}', Expected()
        replay = opened(kind, path, 20)
        replay.add(block(0, 15))
        expected.stamps[:15], expected.inserted, expected.ends, expected.reserved = 1, 15, {15}, 15
        expected.opened(20, 20)
        replay.memory.close()
        assert forked(check, kind, path, STREAM, expected, 'r', 1) == (0, 15)
        a = np.fromfile(path / 'data-1' / name, dtype)
        change(a)
        a.tofile(path / 'data-1' / name)
        wrong, said = forked(check, kind, path, STREAM, expected, 'r', 1)
        return bool(wrong) and said

    def of_another_call(a):
        a.view(STREAM.dtype)['stamp'][7] = 2

    def torn(a):
        a.view(STREAM.dtype)['noise'][7, 30] ^= 1

    def cut(a):
        a[np.flatnonzero(a)[0]] = 0

    def other(a):
        a[3] += 1

    def lost(a):
        a[COMMITTED], a[CHECK] = a[COMMITTED] - 1, 0  # as if the writer had been killed

    assert 'of key 7' in damaged('uniform', 'rows', of_another_call)
    assert 'noise of key 7' in damaged('prioritized', 'rows', torn)
    assert 'links' in damaged('uniform', 'link', cut, np.int32)
    assert '14 rows have come' in damaged('uniform', 'counters', lost, np.int64)
    assert 'priority of key 3' in damaged('prioritized', 'priorities', other, float)


@pytest.mark.slow
def test_the_command(tmp_path):
    "It says what it did, and its exit status says how it went"
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path)
    here = Path(__file__).parents[1] / 'kills.py'
    said = run([sys.executable, here, '--kills', '3', '--kind', 'uniform', '--dir', tmp_path])
    assert (
        said.returncode == 0
        and 'uniform: 3 kills' in said.stdout
        and 'nothing was lost' in said.stdout
    ), said
    assert not [*tmp_path.glob('tmp*')]


# ---- paths ----


def test_paths(tmp_path, monkeypatch):
    "Relative ones, those of the home directory, objects, and any letters; a relative one stays where it was when it was given"
    (tmp_path / 'work').mkdir()
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.chdir(tmp_path / 'work')
    relative = Timeline(4, Rows('here'))
    monkeypatch.chdir(tmp_path / 'elsewhere')
    for line, place in (
        (relative, 'work/here'),
        (Timeline(4, Rows('~/memory')), 'home/memory'),
        (Timeline(4, Rows(tmp_path / 'ö 漢')), 'ö 漢'),
        (Timeline(4, Rows(f'{tmp_path}/a/b/../c')), 'a/c'),
    ):
        line.add(block(0, 6))
        line.close()
        again = Timeline(4, Rows(tmp_path / place))
        whole(again)
        assert again.span == (6, 2)
    assert not os.listdir(tmp_path / 'elsewhere')


def foreign(path):
    (path / 'notes').write_text('mine')


def foreign_data(path):
    (path / 'data-2024').mkdir()
    (path / 'data-2024' / 'run.csv').write_text('mine')


def foreign_names(path):
    (path / 'data-train').mkdir()


def other_meta(path):
    (path / 'meta.json').write_text('{"name": "mine"}')


@pytest.mark.parametrize('make', [foreign, foreign_data, foreign_names, other_meta])
def test_a_foreign_directory_is_left_alone(make, tmp_path):
    make(tmp_path)
    before = contents(tmp_path)
    for mode in 'a', 'r':
        with pytest.raises(ArgumentError, match='is not a memory'):
            Timeline(4, Rows(tmp_path, mode=mode))
        with pytest.raises(ArgumentError, match='is not a memory'):
            Directory(tmp_path, mode)
    assert contents(tmp_path) == before


@pytest.mark.parametrize('path', [3, b'bytes', ['a'], '', 'a\0b', '~nobody-of-this-name/x'])
def test_what_can_be_no_path(path):
    with pytest.raises(ArgumentError if isinstance(path, str) else ArgumentTypeError, match='path'):
        Rows(path)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(ArgumentError, match='a directory'):
        Timeline(4, Rows(tmp_path / 'file'))
    with pytest.raises(Explained, match='file'):
        Timeline(4, Rows(tmp_path / 'file' / 'below')).add(block(0, 1))
    assert (tmp_path / 'file').read_text() == ''


def links_elsewhere(name):
    def make(path, victim):
        if name in ('writer', 'meta.json'):
            target = path / name
        else:
            target = path / 'data-1' / name if name else path / 'data-1'
        if target.is_dir():
            shutil.copytree(target, victim.with_name('folder'))
            shutil.rmtree(target)
            target.symlink_to(victim.with_name('folder'))
        else:
            victim.write_bytes(target.read_bytes())
            target.unlink()
            target.symlink_to(victim)

    return make


@pytest.mark.parametrize('mode', ['a', 'r'])
@pytest.mark.parametrize('name', ['writer', 'meta.json', 'rows', 'link', 'counters', ''])
def test_nothing_outside_is_read_or_written(name, mode, tmp_path):
    "A stranger's directory may have links to files of yours"
    filled(tmp_path / 'm').close()
    victim = tmp_path / 'victim'
    victim.write_text('mine')
    links_elsewhere(name)(tmp_path / 'm', victim)
    before = victim.read_bytes()
    if name == 'writer' and mode == 'r':
        whole(Timeline(10, Rows(tmp_path / 'm', mode='r')))  # it isn't read
    else:
        with pytest.raises(Explained, match='symbolic link'):
            len(Timeline(10, Rows(tmp_path / 'm', mode=mode)))
    assert victim.read_bytes() == before


# ---- going on with what is there ----


def test_other_columns_and_sizes(tmp_path):
    filled(tmp_path / 'm').close()
    with pytest.raises(ArgumentError, match='max_sz'):
        len(Timeline(9, Rows(tmp_path / 'm')))
    line = Timeline(10, Rows(tmp_path / 'm'))
    before = seen(line)
    with pytest.raises(BlockError, match='columns'):
        line.add(numbered(3))
    assert seen(line) == before
    line.add(block(20, 3))
    line.close()
    assert (
        len(Timeline(100, Rows(tmp_path / 'm', mode='r'))) == 10
    )  # a reader needn't know how large it is


@pytest.mark.parametrize('spare', [0, 4, 50])
@pytest.mark.parametrize('larger', [(10, 0), (11, 0), (10, 7), (14, 3), (60, 0)], ids=str)
def test_a_larger_memory_goes_on(spare, larger, tmp_path):
    "All rows are there, and none that had ceased to count comes back"
    line = filled(tmp_path, 33, spare=spare)
    before = seen(line)
    leave(line)
    grown, plain = Timeline(larger[0], Rows(tmp_path, spare=larger[1])), Timeline(larger[0])
    assert seen(grown) == before and grown.place.ring >= sum(larger)
    small = Timeline(10)
    for first in range(0, 33, 5):
        small.add(block(first, min(5, 33 - first)))
    plain.load_state_dict(small.state_dict())
    for n in 3, 30, 1, 70:
        for t in grown, plain:
            t.add(block(grown.inserted if t is grown else plain.inserted, n))
        assert seen(grown) == seen(plain)
    assert {p.name for p in tmp_path.glob('data-*')} == {grown.place.folder.name}


@pytest.mark.parametrize('larger', [(20, 60), (30, 0), (30, 60)], ids=str)
@pytest.mark.parametrize(
    'kind', ['uniform', 'prioritized', 'sequences', pytest.param('frames', marks=pytest.mark.slow)]
)
def test_a_checkpoint_from_before_there_were_more_slots(kind, larger, tmp_path):
    "All its rows are there, and its priorities: with a larger max_sz, rows that had ceased to count were gone for it, too"

    def make(max_sz, spare):
        return opened(kind, tmp_path, max_sz, spare, bs=2)

    replay, stream = make(20, 10), PIXELS if kind == 'frames' else STREAM
    for first in range(0, 40, 5):
        replay.add(block(first, 5, stream=stream))
    state, before, likely = (
        through_file(replay.state_dict()),
        seen(replay.memory),
        replay.sampler.probabilities(),
    )
    replay.add(block(40, 8, 2, stream))
    leave(replay.memory)
    again = make(*larger)
    assert again.memory.span == (48, 28)
    again.load_state_dict(state)
    assert seen(again.memory) == before and np.array_equal(again.sampler.probabilities(), likely)
    again.close()


def test_growth_that_fails(tmp_path, monkeypatch):
    "No room for the larger one: the memory is as it was"
    line = filled(tmp_path)
    before = seen(line)
    line.close()
    count = 0

    def full(*_):
        nonlocal count
        count += 1
        if count == at:
            raise OSError(errno.ENOSPC, 'full')

    for at in range(1, 9):
        count = 0
        with monkeypatch.context() as m:
            m.setattr(os, 'posix_fallocate', full)
            try:
                len(Timeline(50, Rows(tmp_path)))
            except NoRoom:
                pass
            else:
                break
        again = Timeline(10, Rows(tmp_path))
        assert seen(again) == before
        leave(again)
    assert at > 4


def test_the_first_row_finds_no_room(tmp_path, monkeypatch):
    "Each array that can't be had: an error, and as soon as there is room it goes on"

    def full(file, _, n):
        nonlocal count
        count += 1
        if count == at:
            raise OSError(errno.ENOSPC, 'full')
        os.ftruncate(file, n)

    for at in range(1, 9):
        count, replay = 0, opened('prioritized', tmp_path / f'{at}', 10)
        monkeypatch.setattr(os, 'posix_fallocate', full)
        try:
            replay.add(block(0, 4))
        except NoRoom as e:
            assert 'no room on the disk' in str(e) and 'free' in str(e)
        else:
            break
        finally:
            monkeypatch.undo()
        if not replay.memory.inserted:
            replay.add(block(0, 4))  # with the priorities it was in memory already
        assert replay.memory.inserted == 4
        whole(replay.memory)
        replay.memory.close()
    assert at > 5


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, 'geteuid') or os.geteuid() != 0, reason='mounts a small file system'
)
def test_a_disk_that_is_full(tmp_path):
    "Of one megabyte: NoRoom when it is made or made larger; what is there goes on, in rings that have their room"
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', tmp_path]).returncode:
        pytest.skip('no mount')
    try:
        with pytest.raises(NoRoom, match='no room on the disk'):
            Timeline(100_000, Rows(tmp_path / 'a')).add(block(0, 5))
        line = filled(tmp_path / 'b', 500, 300)
        leave(line)
        with pytest.raises(NoRoom, match='no room on the disk'):
            len(Timeline(9000, Rows(tmp_path / 'b')))
        again = Timeline(300, Rows(tmp_path / 'b'))
        assert seen(again) == seen(line)
        saved = again.state_dict()
        try:
            (tmp_path / 'rest').write_bytes(bytes(1 << 20))
        except OSError:
            pass
        again.add(block(500, 200))
        whole(again)
        with pytest.raises(NoRoom, match='meta.json'):
            again.load_state_dict(saved)  # it notes that it went back
        assert again.added in (500, 700)  # it may go back when there is room
        whole(again)
        os.remove(tmp_path / 'rest')
        again.load_state_dict(saved)
        assert again.added == 500
        whole(again)
        again.close()
    finally:
        subprocess.run(['umount', '-l', tmp_path])


def test_a_limit_on_the_size_of_files_is_called_that(tmp_path):
    "No figures of a disk that has room: what the system said, for each thing that is written; what was there goes on"
    for name in 'there', 'compiled':  # kernels are on disk before there is a limit
        filled(tmp_path / name, 20, 10).close()
    line = Timeline(20, Rows(tmp_path / 'compiled'))
    line.add(block(20, 5))
    line.close()

    def limited():
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python begins
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(
            NoRoom,
            match=r'rows: File too large; expected .*Remedy: a smaller max_sz, or a higher limit on the size of files',
        ) as e:
            Timeline(1000, Rows(tmp_path / 'new')).add(block(0, 5))
        assert 'free' not in str(e.value)
        line = Timeline(10, Rows(tmp_path / 'there'))
        line.add(block(20, 5))
        line.close()
        with pytest.raises(NoRoom, match='File too large'):
            len(Timeline(1000, Rows(tmp_path / 'there')))
        os._exit(0)  # as `child` does with 1

    assert os.waitpid(child(limited), 0)[1] == 0
    whole(Timeline(10, Rows(tmp_path / 'there')))


@pytest.mark.parametrize(
    'what, says',
    [
        ('EFBIG', 'File too large'),
        ('EDQUOT', 'quota exceeded'),
        ('ENOSPC', 'No space left on device; got .* free'),
    ],
)
def test_whatever_finds_no_room_says_what_the_system_said(what, says, tmp_path, monkeypatch):
    "The arrays, meta.json, priorities that are put aside, states of sequences"
    code = getattr(errno, what)

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    replay, stateful = (
        opened('prioritized', tmp_path / 'm', 60),
        opened('sequences', tmp_path / 'states', 60),
    )
    replay.add(block(0, 40))
    rows = with_columns(replay.memory[:], hidden=np.zeros((40, 2), np.float32))
    len(stateful.memory)  # it is open
    calls = (
        ('posix_fallocate', os, lambda: opened('uniform', tmp_path / 'new', 10).add(block(0, 4))),
        ('copyfile', shutil, replay.state_dict),
        ('fsync', os, lambda: replay.memory.place._write_meta(replay.memory.place.meta)),
        ('pwrite', os, lambda: stateful.add(rows)),
        ('pwrite', os, lambda: len(Timeline(10, Rows(tmp_path / 'other')))),
    )
    for name, module, call in calls:
        with monkeypatch.context() as m:
            m.setattr(module, name, refuse)
            with pytest.raises(NoRoom, match=f'no room on the disk for .*{says}') as e:
                call()
            assert ('free' in str(e.value)) == (what == 'ENOSPC')


def refuses_to_write(path, code):
    "A context in which nothing below a path may be opened for writing, or made, as on a disk that is mounted read-only"
    real, below = {k: getattr(os, k) for k in ('open', 'mkdir')}, str(path)

    def opens(name, flags, *args, **kw):
        if str(name).startswith(below) and flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(code, os.strerror(code), str(name))
        return real['open'](name, flags, *args, **kw)

    def makes(name, *args, **kw):
        if str(name).startswith(below) and not os.path.exists(name):
            raise OSError(code, os.strerror(code), str(name))
        return real['mkdir'](name, *args, **kw)

    m = pytest.MonkeyPatch()
    m.setattr(os, 'open', opens)
    m.setattr(os, 'mkdir', makes)
    if accessor := getattr(pathlib, '_NormalAccessor', None):
        m.setattr(accessor, 'mkdir', staticmethod(makes))  # Python 3.10's paths
    return m


def check_read_only(path, says):
    "A memory below a path that can't be changed is read; to write it is refused where it is named, and how to read it is said"
    for make in (
        (lambda: Timeline(10, Rows(path / 'm'))),
        (lambda: opened('prioritized', path / 'm', 10)),
    ):
        with pytest.raises(
            ArgumentError,
            match=f"path: {path}/m can't be written; got {says} .*Remedy: mode='r' to read what is there",
        ):
            make()
    with pytest.raises(
        ArgumentError,
        match=f"path: {path}/new can't be written; got {says} \\({path}\\).*Remedy: a path elsewhere",
    ):
        Timeline(10, Rows(path / 'new')).add(block(0, 2))
    reader = opened('prioritized', path / 'm', 10, mode='r', bs=2)
    whole(reader.memory)
    check_batch(reader.sample(), STREAM)
    saved = reader.state_dict()
    reader.load_state_dict(saved)
    reader.close()


@pytest.mark.parametrize('code', ['EROFS', 'EACCES'])
def test_a_place_that_can_only_be_read_is_named(code, tmp_path):
    replay = opened('prioritized', tmp_path / 'm', 10)
    replay.add(block(0, 20))
    replay.close()
    m = refuses_to_write(tmp_path, getattr(errno, code))
    try:
        check_read_only(tmp_path, os.strerror(getattr(errno, code)))
    finally:
        m.undo()


@pytest.mark.skipif(not hasattr(os, 'geteuid') or os.geteuid() != 0, reason='mounts a directory')
def test_a_file_system_that_is_mounted_read_only(tmp_path):
    replay = opened('prioritized', tmp_path / 'disk' / 'm', 10)
    replay.add(block(0, 20))
    replay.close()
    (tmp_path / 'seen').mkdir()
    if subprocess.run(
        ['mount', '--bind', tmp_path / 'disk', tmp_path / 'seen'], capture_output=True
    ).returncode:
        pytest.skip('no mount')
    try:
        if subprocess.run(
            ['mount', '-o', 'remount,bind,ro', tmp_path / 'seen'], capture_output=True
        ).returncode:
            pytest.skip('no mount')
        check_read_only(tmp_path / 'seen', 'Read-only file system')
    finally:
        subprocess.run(['umount', '-l', tmp_path / 'seen'])


# ---- one writer ----


def test_another_writer(tmp_path):
    "In this process, in another one whose number is said, and after it was killed nobody's"
    line = filled(tmp_path)
    for make in (
        (lambda: Timeline(10, Rows(tmp_path))),
        (lambda: ExperienceReplay(max_sz=10, bs=2, store=Rows(tmp_path))),
    ):
        with pytest.raises(ArgumentError, match='in use; got this process itself'):
            make()
    leave(line)
    read, out = os.pipe()

    def hold_it():
        held = Timeline(10, Rows(tmp_path))
        len(held)
        os.write(out, b'.')
        signal.pause()

    pid = child(hold_it)
    os.read(read, 1)
    with pytest.raises(ArgumentError, match=f'in use; got process {pid} on .*since'):
        Timeline(10, Rows(tmp_path))
    whole(Timeline(10, Rows(tmp_path, mode='r')))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    whole(Timeline(10, Rows(tmp_path)))
    for f in read, out:
        os.close(f)


def test_a_forked_child(tmp_path):
    "It reads, and can't write; when it ends, its parent's memory is still the parent's"
    line = filled(tmp_path)
    saved = line.state_dict()
    line.add(block(20, 2))
    before = seen(line)

    def use():
        assert seen(line) == before
        for call in (lambda: line.add(block(22, 3))), (lambda: line.load_state_dict(saved)):
            with pytest.raises(ArgumentError, match='by the process that opened it'):
                call()
        line.flush()
        line.close()
        with pytest.raises(ArgumentError, match=f'process {os.getppid()}'):
            Timeline(10, Rows(tmp_path))
        return 'used'

    assert forked(use) == (0, 'used')
    assert seen(line) == before
    with pytest.raises(ArgumentError, match='in use'):
        Timeline(10, Rows(tmp_path))
    line.add(block(22, 3))
    whole(line)


def test_priorities_are_written_by_the_process_that_opened_them(tmp_path):
    "A forked child is refused, and the priorities stay, here and in the file"

    def make():
        return PrioritizedReplay(None, bs=2, max_sz=8, store=Rows(tmp_path), seed=0)

    replay = make()
    replay.add(block(0, 8))
    replay.update_priorities(np.arange(8), np.arange(1.0, 9))
    before = replay.sampler.kept().tolist()

    def use():
        with pytest.raises(ArgumentError, match='by the process that opened it'):
            replay.update_priorities([1, 2], [99.0, 99.0])
        assert replay.sampler.kept().tolist() == before
        return 'used'

    assert forked(use) == (0, 'used')
    replay.close()
    again = make()
    again.sample()
    assert again.sampler.kept().tolist() == before
    again.close()


@pytest.mark.parametrize('kind', ['uniform', 'prioritized', 'sequences', 'compressed'])
@pytest.mark.parametrize('drawn', [False, True])
def test_what_may_not_write_draws_and_changes_nothing(kind, drawn, tmp_path):
    "A forked child, and one that was closed: no count, no priority, no recurrent state, also of rows that its parent's sampler was not told of"

    def use():
        for _ in range(20):
            replay.sample()
        assert replay.stats()['batches'] >= 20 and len(replay.state_dict())
        replay.memory.count(replay.memory.keys)
        return 'used'

    replay = opened(kind, tmp_path, 30, bs=4)
    replay.add(hidden(block(0, 20), kind))
    if drawn:
        replay.sample()
    replay.add(hidden(block(20, 7), kind))
    before, counts = contents(tmp_path), replay.memory.times_drawn.tolist()
    assert forked(use) == (0, 'used')
    assert contents(tmp_path) == before and replay.memory.times_drawn.tolist() == counts
    replay.sample()
    assert replay.memory.times_drawn.sum() > sum(counts)
    line = replay.memory
    replay.close()
    before = contents(tmp_path)
    line.batch(line.keys, np.ones(27))
    assert contents(tmp_path) == before and line.ages[0]


def hidden(steps, kind):
    "With recurrent states, for sequences"
    if kind != 'sequences':
        return steps
    return with_columns(
        steps, hidden=np.float32([1, 0]) * (1 + steps.rows['step_n'][:, None]).astype(np.float32)
    )


def test_after_close(tmp_path):
    "What was closed reads, and writes nothing any more, also when another one has made the memory larger meanwhile"
    line = filled(tmp_path)
    saved = line.state_dict()
    line.close()
    line.close()
    other = Timeline(20, Rows(tmp_path))
    other.add(block(20, 4))
    before = contents(tmp_path)
    for call in (lambda: line.add(block(20, 3))), (lambda: line.load_state_dict(saved)):
        with pytest.raises(ArgumentError, match='is closed'):
            call()
    line.flush()
    line.close()
    line.state_dict()
    assert contents(tmp_path) == before
    whole(line)
    whole(other)


def test_copies(tmp_path):
    "One that was never opened can be sent elsewhere; one that writes can't be in two places; one that reads can"
    line = pickle.loads(pickle.dumps(Timeline(10, Rows(tmp_path))))
    line.add(block(0, 12))
    for copied in copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)):
        with pytest.raises(ArgumentError, match='in use'):
            copied(line)
    reader = Timeline(10, Rows(tmp_path, mode='r'))
    assert seen(pickle.loads(pickle.dumps(reader))) == seen(copy.deepcopy(reader)) == seen(line)
    replay = ExperienceReplay(bs=2, max_sz=10, store=Rows(tmp_path, mode='r'))
    check_batch(copy.deepcopy(replay).sample(), STREAM)


def test_moved(tmp_path):
    "The directory may be moved, and a checkpoint finds its memory there; one of a memory that was empty, too"
    empty = Timeline(10, Rows(tmp_path / 'a'))
    nothing = empty.state_dict()
    len(empty)
    line, nothing_yet = empty, through_file(empty.state_dict())
    for first in 0, 5:
        line.add(block(first, 5))
    saved = through_file(line.state_dict())
    line.add(block(10, 3))
    line.close()
    shutil.move(tmp_path / 'a', tmp_path / 'b')
    line = Timeline(10, Rows(tmp_path / 'b'))
    line.load_state_dict(saved)
    assert line.span == (10, 3)  # three are gone
    whole(line)
    for state in nothing, nothing_yet:
        new = Timeline(10, Rows(tmp_path / 'c'))
        new.load_state_dict(state)
        new.add(block(0, 4))
        whole(new)
        new.close()
        shutil.rmtree(tmp_path / 'c')


# ---- damage ----


def used(kind, path, mode):
    "Do all that can be done with a memory; what error came of it"
    stream = PIXELS if kind in ('frames', 'compressed') else STREAM
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            replay = opened(kind, path, 12, 4, mode)
            memory = replay.memory
            keys = memory.keys
            memory.take(keys)
            memory.windows(keys, 30)
            memory.walk(keys, [-30, -1, 1, 30])
            if len(drawable(replay, kind)):
                replay.sample()
            memory.times_drawn, memory.ages, replay.stats(), replay.state_dict()
            if mode == 'a':
                saved = replay.state_dict()
                replay.add(block(21, 9, stream=stream))
                replay.load_state_dict(saved)
                replay.add(block(21, 9, stream=stream))
                memory.close()
                opened(kind, path, 40).memory.keys  # larger
        except Explained as e:
            return f'{type(e).__name__}: {e}'
    return 'nothing'


def shorter(data, rng):
    return data[:-8]


def longer(data, rng):
    return data + b'\0'


def empty(data, rng):
    return b''


def ones(data, rng):
    return b'\xff' * len(data)


def large(data, rng):
    return np.full(len(data) + 7 >> 3, 0x4000000040000000).tobytes()[: len(data)]


def noise(data, rng):
    return rng.bytes(len(data))


def one_word(data, rng):
    at = 4 * rng.integers(max(len(data) // 4, 1))
    return data[:at] + rng.bytes(4) + data[at + 4 :]


def one_bit(data, rng):
    data, at = bytearray(data), rng.integers(max(len(data), 1))
    if data:
        data[at] ^= 1 << rng.integers(8)
    return bytes(data)


@pytest.fixture(scope='module')
def sound():
    "A memory of each kind"
    made, where = {}, Path(tempfile.mkdtemp(dir='/dev/shm' if os.path.isdir('/dev/shm') else None))
    for kind in KINDS:
        path = made[kind] = where / kind
        replay = opened(kind, path, 12, 4)
        stream = PIXELS if kind in ('frames', 'compressed') else STREAM
        for first in 0, 5, 10, 15:
            replay.add(block(first, 5, stream=stream))
        replay.state_dict()
        replay.add(block(20, 1, stream=stream))
        replay.memory.close()
        assert (
            used(kind, shutil.copytree(path, f'{path}-copy'), 'a')
            == used(kind, f'{path}-copy', 'r')
            == 'nothing'
        )
    yield made
    shutil.rmtree(where)


@pytest.mark.parametrize(
    'kind,times',
    [
        ('sequences', 1),
        ('compressed', 1),
        *(pytest.param(kind, 6, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_damaged_files(kind, times, sound, tmp_path):
    "Each file in many ways: a named error or none, and never a crash"
    names = sorted(p.relative_to(sound[kind]) for p in sound[kind].rglob('*') if p.is_file())
    assert len(names) >= 6
    told = set()
    for i in range(times):
        for name in names:
            for j, change in enumerate(
                (None, shorter, longer, empty, ones, large, noise, one_word, one_bit)
            ):
                for mode in 'ar' if times > 1 else 'ar'[(j + len(name.name)) % 2]:
                    path = tmp_path / 'm'
                    shutil.rmtree(path, ignore_errors=True)
                    shutil.copytree(sound[kind], path)
                    rng = np.random.default_rng([i, j, len(str(name))])
                    data = (path / name).read_bytes()
                    if change:
                        (path / name).write_bytes(change(data, rng))
                    else:
                        (path / name).unlink()
                    wrong, said = forked(used, kind, path, mode)
                    assert not wrong, f'{name}, {change and change.__name__}, mode {mode}: {said}'
                    told.add((name.name, said != 'nothing'))
                    if kind in ('frames', 'compressed'):
                        continue  # a segment that is no more needed may look as it likes
                    if (
                        change in (shorter, longer, empty)
                        and name.parent.name.startswith('data-')
                        and (name.name != 'drawn' or mode == 'a')
                    ):
                        assert 'is damaged' in said or 'bytes' in said, (name, change, said)
    for name in 'meta.json', 'counters', 'link', 'back':
        assert (name, True) in told


META = dict(
    id=[None, 3, ''],
    ring=[0, -1, 2**40, '16', True],
    max_sz=[0, 99, 2.5, None],
    data=['data-2', 'data-1/../data-1', '/etc', '..', 3, 'data-x'],
    columns=[None, [], {}, ['row'], 'f8', ['row', 8, []]],
    rewound=[None, ['a'], {}, [1.5]],
    rings=[None, ['a'], {}, [1.5]],
    episodes=[None, [1], {'0': -1}, {'0': '1'}, {'0': 2**31}],
    version=[0, 2, '1', None],
    format=['x', None],
    store=[None, {}, 'Rows'],
)


@pytest.mark.parametrize('name', META)
def test_damaged_meta(name, sound, tmp_path):
    "A word of meta.json that is missing, or another one"
    for i, value in enumerate([..., *META[name]]):
        for mode in 'a', 'r':
            path = tmp_path / f'{i}{mode}'
            shutil.copytree(sound['prioritized'], path)
            meta = json.loads((path / 'meta.json').read_text())
            if value is ...:
                meta.pop(name, None)
            else:
                meta[name] = value
            (path / 'meta.json').write_text(json.dumps(meta))
            wrong, said = forked(used, 'prioritized', path, mode)
            assert not wrong, f'{name}={value}, mode {mode}: {said}'
            if name in ('ring', 'data', 'columns', 'version', 'format', 'store'):
                assert said != 'nothing', f'{name}={value}, mode {mode}'


def test_another_version(tmp_path):
    filled(tmp_path).close()
    meta = json.loads((tmp_path / 'meta.json').read_text())
    (tmp_path / 'meta.json').write_text(json.dumps(dict(meta, version=2)))
    with pytest.raises(
        StateError,
        match='another version.*got 2; expected 1.*the release that wrote it: fastrl_replay',
    ):
        Timeline(10, Rows(tmp_path))


def test_a_state_that_is_refused_leaves_room_for_a_good_one(tmp_path):
    "Into an empty directory go the rows of a memory that was in main memory"
    plain = Timeline(10)
    plain.add(block(0, 14))
    good = plain.state_dict()
    bad = dict(good, store=dict(rows=good['store']['rows'][:3]))
    line = Timeline(10, Rows(tmp_path))
    with pytest.raises(StateError):
        line.load_state_dict(bad)
    line.load_state_dict(good)
    assert seen(line) == seen(plain)
    for t in line, plain:
        t.add(block(14, 9))
    leave(line)
    assert seen(Timeline(10, Rows(tmp_path))) == seen(plain)


def test_a_state_that_is_refused_leaves_an_empty_directory(tmp_path):
    "Priorities of fewer rows than it has: other columns can come then; they were taken for those of the state. And nothing is locked, though the error lives on"
    plain = PrioritizedReplay(bs=1, max_sz=10)
    plain.add(block(0, 5))
    bad = plain.state_dict()
    bad['own']['sampler'] = dict(
        bad['own']['sampler'], priorities=bad['own']['sampler']['priorities'][:3]
    )
    for known in True, False:
        replay = PrioritizedReplay(bs=1, max_sz=10, store=Rows(tmp_path / f'{known}'))
        if known:
            len(replay)
        with pytest.raises(StateError) as error:
            replay.load_state_dict(bad)
        replay.add(numbered(3))
        assert replay.memory[:] == numbered(3) and error
        replay.close()
        assert PrioritizedReplay(bs=1, max_sz=10, store=Rows(tmp_path / f'{known}')).memory[
            :
        ] == numbered(3)


# ---- readers ----


@pytest.mark.parametrize('how', ['larger', 'anew'])
def test_a_reader_is_told_that_its_folder_is_gone(how, tmp_path):
    "Where the writer made the memory larger, or went back to before its first row: it drew the old rows, or none, for ever"

    def make(max_sz=10, **kw):
        return PrioritizedReplay(bs=2, max_sz=max_sz, seed=0, store=Rows(tmp_path, **kw))

    writer = make()
    nothing = writer.state_dict()
    writer.add(block(0, 8))
    reader = make(mode='r')
    batch = reader.sample()
    if how == 'larger':
        writer.close()
        writer = make(30)
        len(writer)
    else:
        writer.load_state_dict(nothing)
    for call in reader.sample, reader.stats, lambda: batch.update_priorities([1.0, 2.0]):
        with pytest.raises(
            StateError, match='was made larger, or anew, since it was opened for reading'
        ):
            call()
    writer.add(block(writer.memory.inserted, 9))
    reader.close()
    assert reader.sample() and reader.memory.inserted == writer.memory.inserted
    writer.close()


def go_on(path, max_sz, spare, sizes, stamp=1):
    "Add for ever"
    line, rng = Timeline(max_sz, Rows(path, spare=spare)), np.random.default_rng(0)
    while line.inserted < len(STREAM.env) - 100:
        line.add(block(line.inserted, rng.choice(sizes), stamp))
    signal.pause()


def stop(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def read_along(readers, until):
    "Draw while another process writes; every row is whole, and none is older than it says"
    last, n = 0, 0
    while last < until:
        for reader in readers:
            m = reader.memory
            end, oldest = m.span
            assert end >= last and 0 <= end - oldest <= m.max_sz and len(m) <= m.max_sz
            last, n = end, n + 1
            if len(m) < 8:
                continue
            batch = reader.sample(4)
            check_batch(batch, STREAM)
            assert (batch.index >= oldest).all()
            try:
                keys = np.arange(max(oldest, end - 6), end)
                check_rows(m.take(keys).rows, STREAM, keys, np.ones(len(keys), int))
                seen = m.windows(keys[:2], 5).rows
                check_batch(Steps(seen), STREAM)
                walked = m.walk(keys, [1])[:, 0]
                assert (STREAM.env[walked[walked >= 0]] == STREAM.env[keys[walked >= 0]]).all()
                for k, w in zip(keys, seen):
                    assert (
                        w['total_reward'][0] == k and (np.diff(w['step_n'][w['mask']]) == 1).all()
                    )
            except StaleKey:
                pass  # overwritten by now
    return n


@pytest.mark.parametrize(
    'max_sz,spare,sizes', [(20, 0, [1]), (50, 200, [1, 7]), (300, 0, [40, 120])], ids=str
)
def test_reading_while_another_process_writes(max_sz, spare, sizes, tmp_path):
    "The ring is overwritten many times meanwhile; two readers; the writer is killed and another one goes on"
    line = filled(tmp_path, 30, max_sz, spare=spare)
    leave(line)
    readers = [
        ExperienceReplay(bs=4, max_sz=max_sz, store=Rows(tmp_path, mode='r'), seed=i)
        for i in range(2)
    ]
    until = 0
    for _ in range(2):
        pid = child(go_on, tmp_path, max_sz, spare, sizes)
        until += 30 * max_sz
        try:
            assert read_along(readers, until) > 2
        finally:
            stop(pid)
        until = readers[0].memory.inserted
    whole(readers[1].memory)


def test_a_reader_that_counted_while_all_was_overwritten_counts_again(tmp_path, monkeypatch):
    "Once too few, then enough; where there never are enough it says so"
    leave(filled(tmp_path, 23))
    reader = ExperienceReplay(bs=4, max_sz=10, store=Rows(tmp_path, mode='r'), seed=0)
    counted, asked, real = [0, 3], [], ExperienceReplay._catch_up

    def catch_up(self):
        asked.append(real(self))
        return counted.pop(0) if counted else asked[-1]

    monkeypatch.setattr(ExperienceReplay, '_catch_up', catch_up)
    assert len(reader.sample()) == 4 and len(asked) == 3
    with pytest.raises(NotEnoughRows, match='990 are missing'):
        reader.sample(1000)


@pytest.mark.parametrize('kind', ['uniform', 'prioritized', 'sequences', 'frames'])
def test_a_batch_that_a_reader_draws_again_counts_once(kind, tmp_path, monkeypatch):
    "Its rows were overwritten while they were copied: their ages and counts are those of the batch that it got"
    stream = PIXELS if kind == 'frames' else STREAM
    writer = opened(kind, tmp_path, 40)
    for first in range(0, 40, 5):
        writer.add(block(first, 5, stream=stream))
    reader = opened(kind, tmp_path, 40, mode='r', bs=4)
    batches, real, memory = [reader.sample()], Timeline.were_there, reader.memory

    def overwritten(self, *keys):
        if self is memory and writer.memory.inserted == 40:
            for first in range(40, 80, 5):
                writer.add(block(first, 5, stream=stream))
        return real(self, *keys)

    monkeypatch.setattr(Timeline, 'were_there', overwritten)
    batches.append(reader.sample())
    assert batches[1].index.min() >= 40
    ages = np.concatenate([end - b.index.numpy() for end, b in zip((40, 80), batches)])
    assert memory.ages.tolist() == [ages.sum(), ages.max()] and memory.times_drawn.sum() == 4
    writer.close(), reader.close()


@pytest.mark.parametrize('make', [ExperienceReplay, functools.partial(SequenceReplay, length=3)])
def test_recorded_rows_fill_a_memory_on_disk_to_the_end_or_not_at_all(make, tmp_path):
    "After an error nothing is there, however often it is tried; what a killed process has left is refused"
    Timeline(9000, Rows(tmp_path / 'data')).add(block(0, 9000))

    def chain(max_sz, name='m'):
        return make(bs=4, max_sz=max_sz, store=Rows(tmp_path / name)).offline(tmp_path / 'data')

    pipe = chain(5000)
    for _ in range(2):
        with pytest.raises(NoRoom, match='more rows in'):
            pipe.fill()
        assert len(pipe.source.memory) == 0
    pipe.close()
    with chain(9000) as pipe:
        assert pipe.fill() == 9000 and len(next(iter(pipe))) == 4
    with chain(9000) as pipe:
        assert pipe.fill() == 9000
    pipe = chain(9000, 'k')

    def killed(steps):
        type(pipe.source).add(pipe.source, steps)
        leave(pipe.source.memory)
        raise MemoryError

    pipe.source.add = killed
    with pytest.raises(Exception):
        pipe.fill()
    with pytest.raises(StateError, match='not filled to the end'):
        chain(9000, 'k').fill()


def test_ages_are_those_of_what_this_replay_has_drawn(tmp_path):
    "Of one that is opened again, of one that was closed and goes on, and of one that goes on from a checkpoint"

    def make():
        return ExperienceReplay(bs=8, max_sz=50, seed=0, store=Rows(tmp_path, spare=50))

    def mean(batches, inserted):
        return pytest.approx(np.mean([inserted - k for b in batches for k in b.index.tolist()]))

    first = make()
    first.add(block(0, 60))
    seen = [first.sample() for _ in range(20)]
    saved = through_file(first.state_dict())
    first.close()
    seen += [first.sample() for _ in range(3)]
    assert first.stats()['age_mean'] == mean(seen, 60)
    first.close()
    again = make()
    assert len(again) and again.stats()['age_mean'] == again.stats()['age_max'] == 0
    again.close()  # it has drawn nothing, and says nothing of ages
    assert sample.contents(open_memory(tmp_path))['numbers']['age_max'] == max(
        60 - int(b.index.min()) for b in seen
    )
    again = make()
    assert again.stats() and mean([again.sample()], 60) == again.stats()['age_mean']
    again.load_state_dict(saved)
    assert again.stats()['age_mean'] == mean(seen[:20], 60)


def test_an_environment_whose_rows_are_all_gone_begins_the_next_episode(tmp_path):
    "Its first one again would be the second with this number; also in a larger memory; a new one begins its first"

    def make(max_sz):
        return ExperienceReplay(bs=1, max_sz=max_sz, store=Rows(tmp_path))

    def step(env_id, end=False):
        replay.add_step([0.0], 1, 1.0, [0.0], end, env_id=env_id)

    def last():
        return replay.memory[-1].rows[['env_id', 'episode_n', 'step_n']].item()

    replay = make(10)
    for end in True, True, False:
        step(7, end)
    for _ in range(20):
        step(1, True)
    replay.close()
    for n, max_sz in (4, 10), (5, 10), (6, 20):
        replay = make(max_sz)
        step(7)
        assert last() == (7, n, 1)
        step(7)
        assert last() == (7, n, 2)
        for _ in range(20):
            step(1, True)
        replay.memory.flush()
        leave(replay.memory)
    replay = make(20)
    step(8)
    assert last() == (8, 1, 1)
    step(1)
    assert last() == (1, 81, 1)
    replay.close()


@pytest.mark.parametrize('spare', [0, 6000])
def test_recorded_rows_of_a_memory_that_is_written(spare, tmp_path):
    "None is left out in silence: with rows to spare all of them come, in order; without, it is an error"
    writer = Timeline(9000, Rows(tmp_path, spare=spare))
    writer.add(block(0, 9000))
    for begin in (
        lambda: iter(recorded_rows(tmp_path)),
        lambda: iter(_blocks(open_memory(tmp_path))),
    ):
        first, parts = writer.oldest, begin()
        seen = next(parts).total_reward.tolist()
        writer.add(block(writer.inserted, 5000))
        if spare:
            assert seen + [x for part in parts for x in part.total_reward.tolist()] == [
                *range(first, first + 9000)
            ]
        else:
            with pytest.raises(StaleKey):
                list(parts)


@pytest.mark.parametrize('n', [3, 30])
def test_rows_that_come_while_a_reader_looks_for_their_priorities(n, tmp_path):
    "A few more, or so many that those it asks for are gone"

    def make(**kw):
        return PrioritizedReplay(
            bs=4,
            max_sz=20,
            initial='total_reward',
            alpha=1,
            eps=0,
            seed=0,
            store=Rows(tmp_path, **kw),
        )

    writer = make()
    writer.add(block(0, 8))
    reader = make(mode='r')
    asks = reader._initial_priorities

    def late(*args):
        writer.add(block(writer.memory.inserted, n))
        return asks(*args)

    reader._initial_priorities = late
    for _ in range(5):
        reader._look()
    del reader._initial_priorities
    reader._look()
    assert (
        reader.sampler.kept().tolist()
        == writer.sampler.kept().tolist()
        == reader.memory.keys.tolist()
    )


def test_a_reader_changes_nothing(tmp_path):
    line = filled(tmp_path, 23)
    leave(line)
    before = contents(tmp_path)
    reader = ExperienceReplay(bs=4, max_sz=10, store=Rows(tmp_path, mode='r'))
    reader.sample()
    saved = reader.state_dict()
    reader.sample()
    reader.load_state_dict(saved)
    reader.memory.flush()
    for call in (lambda: reader.add(block(23, 1))), (lambda: reader.memory.add(block(23, 1))):
        with pytest.raises(ArgumentError, match='open for reading'):
            call()
    reader.close()
    assert contents(tmp_path) == before
    assert reader.sample().index.min() >= 13  # it is opened again


@pytest.mark.parametrize('kind', ['uniform', 'prioritized'])
def test_a_reader_that_is_saved_goes_on(kind, tmp_path):
    "With its draws and priorities; where the writer has gone on meanwhile, with what is there"
    writer = opened(kind, tmp_path, 60)
    writer.add(block(0, 30))

    def reader():
        return opened(kind, tmp_path, 60, mode='r')

    def some(replay, n):
        seen = []
        for _ in range(n):
            batch = replay.sample()
            replay.update_priorities(batch.index, batch.index % 5 + 1.0)
            seen.append((batch.index.tolist(), batch.weight.tolist()))
        return seen

    first = reader()
    some(first, 5)
    saved = through_file(first.state_dict())
    want, again = some(first, 5), reader()
    again.load_state_dict(saved)
    assert some(again, 5) == want
    writer.add(block(30, 4))
    again = reader()
    again.load_state_dict(saved)
    assert len(again) == 34 and len(some(again, 5)) == 5


@pytest.mark.parametrize('kind', ['uniform', 'prioritized', 'rank', 'sequences', 'frames'])
def test_a_reader_goes_back_with_the_writer(kind, tmp_path):
    "It draws what is there then, as one that is opened then; errors of batches from before are left out where their rows are gone"

    def make(mode, **kw):
        if kind == 'rank':
            return PrioritizedReplay(
                bs=4, max_sz=60, kind='rank', seed=0, store=Rows(tmp_path, mode=mode, **kw)
            )
        return opened(kind, tmp_path, 60, mode=mode, bs=4, **kw)

    def there(replay):
        base = replay.memory.base
        keys = sorted(k - base for k in drawable(replay, kind))
        table = kind == 'sequences' and sorted(
            (k - base, n)
            for k, n in zip(replay.table.first.tolist(), replay.table.steps.tolist())
            if k >= 0
        )
        return keys, table, replay.sampler.probabilities().sum()

    writer = make('a', spare=40)
    writer.add(block(0, 30))
    saved = through_file(writer.state_dict())
    writer.add(block(30, 25))
    reader = make('r')
    late = [reader.sample() for _ in range(9)]
    assert max(b.index.max() for b in late) >= 30
    writer.load_state_dict(saved)
    for _ in range(9):
        assert reader.sample().index.max() - reader.memory.base < 30
    for b in late:
        reader.update_priorities(b.index, np.ones((4, 5) if kind == 'sequences' else 4))
    assert reader.stale == 36 and there(reader)[0] == there(make('r'))[0]
    writer.add(block(30, 20, 2, Stream(6, False)))  # other episodes than the first time
    assert there(reader)[:2] == there(make('r'))[:2] and there(reader)[2] == pytest.approx(1)
    with pytest.raises(StaleKey):
        make('r').update_priorities([99], [1.0] if kind != 'sequences' else np.ones((1, 5)))


@pytest.mark.parametrize('kind', ['uniform', 'prioritized', 'sequences'])
@pytest.mark.parametrize('mode', ['a', 'r'])
def test_no_row_is_whole(kind, mode, tmp_path):
    "The writer was killed in a block as large as the ring: nothing is there, and it goes on"
    replay = opened(kind, tmp_path, 60)
    replay.add(block(0, 20))
    replay.memory.place.intend(80)
    leave(replay.memory)
    again = opened(kind, tmp_path, 60, mode=mode)
    assert again.memory.span == (20, 20) and len(again) == 0
    with pytest.raises(NotEnoughRows):
        again.sample()
    assert not len(drawable(again, kind))
    writer = again if mode == 'a' else opened(kind, tmp_path, 60)
    writer.add(block(20, 100))
    assert again.memory.span == (120, 60)
    check_batch(again.sample(), STREAM)
    whole(again.memory)


def test_a_memory_that_can_only_be_read(tmp_path):
    "There is none yet; then there is one"
    with pytest.raises(ArgumentError, match='there is no memory to read'):
        Timeline(4, Rows(tmp_path, mode='r'))
    Timeline(4, Rows(tmp_path)).add(block(0, 3))
    whole(Timeline(4, Rows(tmp_path, mode='r')))


def test_a_column_is_an_attribute_before_anything_else_was_asked(tmp_path):
    "A memory on disk is opened by whatever is asked first: a column by its name, as well as by its brackets"
    leave(filled(tmp_path))
    for mode in 'r', 'a':
        replay = ExperienceReplay(bs=2, max_sz=10, store=Rows(tmp_path, mode=mode))
        assert (
            not replay.memory.is_open
            and replay.memory.reward.tolist() == replay.memory['reward'].tolist()
        )
        for make in (
            (lambda: Timeline(10, Rows(tmp_path, mode='r'))),
            (lambda: pickle.loads(pickle.dumps(Timeline(10, Rows(tmp_path, mode='r'))))),
        ):
            assert (
                not hasattr(make(), 'rewad')
                and not hasattr(make(), '_reward')
                and len(make().state) == 10
            )
        replay.close()
    empty = Timeline(10, Rows(tmp_path / 'new'))
    with pytest.raises(AttributeError, match="no attribute or column 'reward'"):
        empty.reward
    with pytest.raises(AttributeError, match="no attribute or column 'reward'"):
        Timeline.__new__(Timeline).reward  # a copy that isn't filled


# ---- threads ----


def test_threads(tmp_path):
    "One adds, others draw and answer"
    replay, errors, done = opened('prioritized', tmp_path, 50, bs=4), [], threading.Event()
    replay.add(block(0, 40))

    def run(work):
        try:
            while not done.is_set():
                work()
        except BaseException as e:
            errors.append(e)

    def draw():
        batch = replay.sample()
        check_batch(batch, STREAM)
        replay.update_priorities(batch.index, batch.td)

    threads = [threading.Thread(target=run, args=(w,)) for w in (draw, draw, replay.flush)]
    for t in threads:
        t.start()
    for first in range(40, 3000, 5):
        replay.add(block(first, 5))
    done.set()
    for t in threads:
        t.join()
    assert not errors, errors[0]
    replay.memory.place.leave()
    whole(Timeline(50, Rows(tmp_path)))


# ---- interrupts ----

STEPS = pytest.mark.parametrize('every', [37, pytest.param(5, marks=pytest.mark.slow)])


def everywhere(every, prepare, call, then, tmp_path):
    "Interrupt a call before each of its bytecodes, or before every so many"
    at, n = 1 + every // 2, 0
    while True:
        path = tmp_path / f'{n}'
        line = prepare(path)
        came = interrupted(lambda: call(line), at)
        try:
            then(line, path)
        except BaseException as e:
            e.add_note(f'interrupted before bytecode {at}')
            raise
        leave(line) if line.is_open and line.place else None
        shutil.rmtree(path)
        at, n = at + every, n + 1
        if not came:
            return n


@STEPS
@pytest.mark.parametrize('n', [0, 20])
def test_add_interrupted(n, every, tmp_path):
    "The block is there or not; this object and who opens the directory next see the same, and go on alike"
    stopped = 0

    def then(line, path):
        nonlocal stopped
        end, before, stopped = line.inserted, seen(line), stopped + 1
        assert end in (n, n + 4)
        if stopped % 2:
            line.close()
        elif line.place is not None:
            leave(line)  # killed: what hadn't returned may be there or not
        again = Timeline(10, Rows(path))
        assert again.inserted in (end, n if stopped % 2 == 0 else end)
        if again.inserted:
            assert again.oldest == max(
                again.inserted - 10, again.place.oldest_whole(), 0
            )  # slots that it meant to use are lost
        if again.inserted == end > n:
            assert seen(again) == before
        again.add(block(again.inserted, 3))
        whole(again)
        leave(again)

    assert (
        everywhere(
            every * (1 if n else 11),
            lambda path: filled(path, n),
            lambda line: line.add(block(line.inserted, 4)),
            then,
            tmp_path,
        )
        > 3
    )


@STEPS
def test_close_and_flush_interrupted(every, tmp_path):
    for i, call in enumerate((lambda line: line.close(), lambda line: line.flush())):

        def then(line, path):
            whole(line)
            assert line.span == (20, 10)
            line.close()
            again = Timeline(10, Rows(path))
            assert seen(again) == seen(line)
            leave(again)

        everywhere(every, filled, call, then, tmp_path / f'{i}')


@pytest.mark.slow
@STEPS
def test_load_interrupted(every, tmp_path):
    "It stands at the checkpoint or where it was, goes on, and refuses what was replaced since"
    states = {}

    def prepare(path):
        line = filled(path, 10, spare=20)
        states[path] = [line.state_dict()]
        line.add(block(10, 5))
        states[path].append(line.state_dict())
        return line

    def then(line, path):
        end = line.added
        assert end in (10, 15)
        whole(line)
        line.add(block(end, 3, 2))
        leave(line)
        again = Timeline(10, Rows(path, spare=20))
        assert seen(again) == seen(line) and again.inserted == end + 3
        check_rows(again[:].rows, STREAM, again.keys, np.where(again.keys < end, 1, 2))
        if end == 15:
            again.load_state_dict(states[path][1])
        else:
            with pytest.raises(StateError, match='replaced since'):
                again.load_state_dict(states[path][1])
            again.load_state_dict(states[path][0])
        whole(again)
        leave(again)

    everywhere(
        every * 3,
        prepare,
        lambda line: line.load_state_dict([*states.values()][-1][0]),
        then,
        tmp_path,
    )


@pytest.mark.slow
@STEPS
def test_growth_interrupted(every, tmp_path):
    def prepare(path):
        filled(path, 23).close()
        return Timeline(25, Rows(path, spare=3))

    def then(line, path):
        try:
            assert line.span == (23, 13)
        except ArgumentError as e:
            assert 'in use' in str(e)
        whole(line)
        if line.place is not None:
            leave(line)
        again = Timeline(25, Rows(path))
        assert again.span == (23, 13)
        whole(again)
        leave(again)

    everywhere(every * 11, prepare, len, then, tmp_path)


def raw(replay):
    "Key → priority of what can be drawn"
    replay._catch_up()
    if not isinstance(replay, SequenceReplay):
        return dict(
            zip(
                replay.memory.keys.tolist(),
                replay.sampler.tree[replay.memory.keys % len(replay.sampler.tree)].tolist(),
            )
        )
    here = [] if replay.table is None else np.flatnonzero(replay.table.first >= 0)
    return (
        dict(zip(replay.table.first[here].tolist(), replay.sampler.tree[here].tolist()))
        if len(here)
        else {}
    )


CALLS = dict(
    add=lambda r: r.add(Steps(stream(5)[19:22])),
    sample=lambda r: r.sample(),
    flush=lambda r: r.flush(),
    update=lambda r: r.update_priorities(
        [*raw(r)][-2:], np.full((2, 3) if isinstance(r, SequenceReplay) else 2, 9.0)
    ),
)


@STEPS
@pytest.mark.parametrize('call', CALLS)
@pytest.mark.parametrize('kind', ['proportional', 'rank', 'sequences'])
def test_replays_interrupted(kind, call, every, tmp_path):
    "The call has happened or not; after a kill, each priority is the last one or the one before, and what can be drawn is what rows say"

    def prepare(path):
        replay = replay_of(kind, 8, Rows(path))
        for i, part in enumerate(np.split(stream(5)[:19], [1, 6, 7, 13])):
            replay.add(Steps(part))
            if len(raw(replay)) > 1:
                replay.update_priorities(
                    [*raw(replay)][:2], np.full((2, 3) if kind == 'sequences' else 2, 2.0 + i)
                )
        return replay

    before, after = prepare(tmp_path / 'before'), prepare(tmp_path / 'after')
    CALLS[call](after)
    was, came, n = raw(before), raw(after), 0
    at = 1 + every // 2
    while True:
        path = tmp_path / f'{at}'
        replay = prepare(path)
        stopped = interrupted(lambda: CALLS[call](replay), at)
        got, here = raw(replay), replay.memory.inserted
        assert got in (was, came), at
        if n % 2:
            replay.close()
        else:
            leave(replay.memory)
        again = replay_of(kind, 8, Rows(path))
        end, oldest = again.memory.span
        assert end in (19, 22) and (end == here or n % 2 == 0)
        for key, p in raw(again).items():
            assert p in (was.get(key), came.get(key)), (at, key)
        assert {*raw(again)} == {k for k in (was if end == 19 else came) if k >= oldest}, at
        assert (again.memory[:].rows['reward'] == again.memory.keys).all()
        leave(again.memory)
        shutil.rmtree(path)
        at, n = at + every, n + 1
        if not stopped:
            break
    assert n > 1
    for r in before, after:
        r.close()


# ---- power cuts ----


def cut_power(line):
    "As if the machine had been switched off, with all written bytes on the device"
    leave(line)
    writer = line.place.path / 'writer'
    said = json.loads(writer.read_text())
    writer.write_text(json.dumps(dict(said, boot='another')))


def test_a_power_cut(tmp_path):
    "What was flushed is there, the rest is not, and it is said once"
    line = filled(tmp_path, 15, 100)
    line.flush()
    line.add(block(15, 6))
    saved = line.state_dict()
    cut_power(line)
    with pytest.warns(UserWarning, match='6 rows are lost'):
        assert (again := Timeline(100, Rows(tmp_path))).inserted == 15
    whole(again)
    again.add(block(15, 8, 2))
    with pytest.raises(StateError, match='replaced since'):
        again.load_state_dict(saved)
    with pytest.raises(StateError, match='not the one'):
        again.load_state_dict(dict(saved, store=dict(saved['store'], id='0' * 32)))
    assert again.inserted == 23
    leave(again)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert Timeline(100, Rows(tmp_path)).inserted == 23


def test_a_power_cut_of_an_overwritten_ring(tmp_path):
    "Rows whose slots may have been written don't count, whichever of the counters reached the device"
    line = filled(tmp_path, 3000, 2000)
    line.flush()
    line.add(block(3000, 100))
    cut_power(line)
    with pytest.warns(UserWarning, match='100 rows are lost'):
        again = Timeline(2000, Rows(tmp_path))
        end = again.inserted
    assert end == 3000 and again.oldest >= 1100
    whole(again)


def test_a_power_cut_after_going_back(tmp_path):
    "What was flushed before and was replaced since is not what counts"
    line = filled(tmp_path, 10, 100)
    saved = line.state_dict()
    line.add(block(10, 10))
    line.flush()
    line.load_state_dict(saved)
    line.add(block(10, 4, 2))
    cut_power(line)
    with pytest.warns(UserWarning, match='rows are lost'):
        assert (again := Timeline(100, Rows(tmp_path))).inserted == 10
    whole(again)


def test_a_power_cut_is_not_forgotten(tmp_path):
    "A kill while the memory is opened again: the next one still knows"
    line = filled(tmp_path, 15, 100)
    line.flush()
    line.add(block(15, 5))
    cut_power(line)
    for at in range(5, 2000, 97):

        def open_again():
            from kills import killed_at

            killed_at(at)
            len(Timeline(100, Rows(tmp_path)))

        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            status = os.waitpid(child(open_again), 0)[1]
        reader = Timeline(100, Rows(tmp_path, mode='r'))
        assert reader.inserted in (15, 20)
        if status != signal.SIGKILL:
            break
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        again = Timeline(100, Rows(tmp_path))
        assert again.inserted == 15
    whole(again)


def test_what_is_flushed_is_flushed(tmp_path, monkeypatch):
    "Also the arrays of a larger memory, before it takes the place of the smaller one; meta.json and its folder"
    order = []
    sync = files.sync
    for module in (files, whole_files):
        monkeypatch.setattr(module, 'sync', lambda p: (order.append(p.name), sync(p)))
    filled(tmp_path).close()
    assert {'rows', 'link', 'back', 'counters', 'data-1', tmp_path.name} <= {*order}
    order.clear()
    line = Timeline(30, Rows(tmp_path))
    replace = os.replace
    monkeypatch.setattr(
        os, 'replace', lambda a, b: (order.append(f'replace {b.name}'), replace(a, b))
    )
    len(line)
    before = order[: order.index('replace meta.json')]
    assert {'rows', 'link', 'back', 'counters'} <= {*before}
    assert tmp_path.name in order[order.index('replace meta.json') :]
    assert line.place.counters[FLUSHED] == 20 <= line.place.counters[RESERVED]


# ---- checkpoints ----


def test_rows_that_are_missing(tmp_path):
    "It says how many, and goes on without them"
    line = filled(tmp_path, 20, spare=4)
    saved = line.state_dict()
    line.add(block(20, 9, 2))
    with pytest.warns(UserWarning, match='5 of the rows'):
        line.load_state_dict(saved)
    assert span_of(line) == (20, 15)
    whole(line)
    line.add(block(20, 2, 1))
    leave(line)
    again = Timeline(10, Rows(tmp_path, spare=4))
    assert again.span == (22, 15)
    whole(again)


# ---- beside a plain memory ----

ops = st.lists(
    st.tuples(
        st.sampled_from(['add'] * 6 + ['reopen', 'killed', 'save', 'load', 'grow', 'flush']),
        st.integers(0, 30),
    ),
    max_size=30,
)


@pytest.mark.parametrize('kind', ['cartpole', 'nested', 'n_step'])
@cases(400)
@given(
    ops=ops,
    program=st.binary(min_size=1, max_size=60),
    max_sz=st.integers(1, 12),
    spare=st.sampled_from([0, 1, 40]),
)
def test_on_disk_as_in_main_memory(kind, ops, program, max_sz, spare, tmp_path):
    "Whatever is done, both are alike; environments have large numbers, episodes one step, blocks more rows than the ring"
    path = tmp_path / 'm'
    dtype = COLUMNS[kind] if kind != 'n_step' else extend_dtype(COLUMNS['cartpole'], n='i4')
    rows = story(program * (1 + 300 // len(program)), dtype)[0]
    rows['env_id'] = np.where(rows['env_id'] == 4000, 2**23 + 5, rows['env_id'])
    if kind == 'n_step':
        rows['n'] %= 4
    disk, plain, saves = Timeline(max_sz, Rows(path, spare=spare)), Timeline(max_sz), []
    try:
        for op, n in ops:
            at = plain.added
            if op == 'add':
                if at + n > len(rows):
                    break
                keys = [t.add(Steps(rows[at : at + n])) - t.base for t in (disk, plain)]
                assert np.array_equal(*keys)
                saves = [(e, m + n, s) for e, m, s in saves]
            elif op in ('reopen', 'killed', 'grow'):
                if op == 'grow':
                    max_sz += n % 5
                    larger = Timeline(max_sz)
                    if plain.inserted:
                        larger.load_state_dict(plain.state_dict())
                    plain = larger
                if op == 'killed' and disk.place is not None:
                    leave(disk)
                else:
                    disk.close()
                disk = Timeline(max_sz, Rows(path, spare=spare))
            elif op == 'save' and at:
                saves.append((at, 0, [through_file(t.state_dict()) for t in (disk, plain)]))
            elif op == 'load' and saves:
                end, gone, states = saves[n % len(saves)]
                if gone > spare:
                    continue  # some would be missing
                later = [s for s in saves if s[0] > end]
                saves = [(e, g, s) for e, g, s in saves if e <= end]
                for t, state in zip((disk, plain), states):
                    t.load_state_dict(state)
                for _, _, (state, _) in later:
                    with pytest.raises(StateError):
                        disk.load_state_dict(state)
            elif op == 'flush':
                disk.flush()
            assert seen(disk) == seen(plain)
            if plain.added:
                for t in disk, plain:
                    t.batch(t.keys, np.ones(len(t)))
    finally:
        disk.close()
        shutil.rmtree(path, ignore_errors=True)


def beside_ops():
    return st.lists(
        st.tuples(
            st.sampled_from(
                ['add'] * 4 + ['update'] * 3 + ['sample', 'reopen', 'killed', 'save', 'load']
            ),
            st.integers(0, 40),
        ),
        max_size=25,
    )


def replay_of(kind, max_sz, store):
    "One with the same settings, wherever its rows are"
    common = dict(bs=1, max_sz=max_sz, seed=3, store=store)
    common['initial'] = 'max_ever' if 'ever' in kind else 'largest'
    by = 'rank' if 'rank' in kind else 'proportional'
    if 'sequences' not in kind:
        return PrioritizedReplay(kind=by, alpha=0.6, eps=0.01, **common)
    return SequenceReplay(kind=by, length=3, burn_in=0, overlap=1, eps=0.01, **common)


def chances(replay):
    "Row → its probability, and the recurrent state of a sequence"
    replay._catch_up()
    if not len(replay):
        return {}
    p = replay.sampler.probabilities().round(12).tolist()
    base = replay.memory.base
    if not isinstance(replay, SequenceReplay):
        return dict(zip((replay.memory.keys - base).tolist(), p))
    here = np.flatnonzero(replay.table.first >= 0)
    return dict(
        zip((replay.table.first[here] - base).tolist(), zip(p, replay.table.hidden[here].tolist()))
    )


def same_chances(got, want, reopened):
    "Of a sequence that was under way when the memory was opened again, the first state is not known"
    assert got.keys() == want.keys()
    for key, x in want.items():
        if not isinstance(x, tuple):
            assert got[key] == x, key
        else:
            assert got[key][0] == x[0] and (
                got[key][1] == x[1] or reopened and not any(got[key][1])
            ), key


@pytest.mark.parametrize(
    'kind',
    [
        'proportional',
        'rank',
        'sequences',
        'sequences_rank',
        'rank_ever',
        'ever',
        'sequences_rank_ever',
        'sequences_ever',
    ],
)
@cases(160)
@given(
    ops=beside_ops(),
    lasts=st.integers(1, 9),
    envs=st.integers(1, 3),
    max_sz=st.sampled_from([3, 8, 20]),
    spare=st.sampled_from([0, 60]),
)
def test_replays_on_disk_as_in_main_memory(kind, ops, lasts, envs, max_sz, spare, tmp_path):
    "Priorities, sequences and recurrent states are those of a replay in main memory, whatever is done, and whoever is killed"
    path, rows, saves = tmp_path / 'm', stream(lasts, envs), []
    rows = np.concatenate([rows] * 8)  # episodes of other numbers, or the same again
    disk, plain, reopened = (
        replay_of(kind, max_sz, Rows(path, spare=spare)),
        replay_of(kind, max_sz, None),
        False,
    )
    try:
        for op, n in ops:
            at = plain.memory.added
            if op == 'add':
                n = min(n, max_sz - 1)  # what comes and goes in one block was never anybody's
                if at + n > len(rows):
                    break
                for r in disk, plain:
                    r.add(Steps(rows[at : at + n]))
                saves = [(e, m + n, s) for e, m, s in saves]
            elif op == 'update' and len(plain):
                keys = np.random.default_rng(n).choice(sorted(chances(plain)), 2)
                for r in disk, plain:
                    r.update_priorities(
                        keys + r.memory.base,
                        np.repeat([[n + 0.5], [n + 2.25]], 3, 1)
                        if 'seq' in kind
                        else [n + 0.5, n + 2.25],
                    )
            elif op == 'sample' and len(plain) and len(disk):
                disk.sample()
            elif op in ('reopen', 'killed') and at:
                if op == 'killed':
                    leave(disk.memory)
                else:
                    disk.close()
                disk = replay_of(kind, max_sz, Rows(path, spare=spare))
            elif op == 'save':
                saves = [
                    *saves[-1:],
                    (at, 0, [through_file(r.state_dict()) for r in (disk, plain)]),
                ]
            elif op == 'load' and saves:
                end, gone, states = saves[n % len(saves)]
                if gone > spare:
                    continue
                saves = [s for s in saves if s[0] <= end]
                for r, state in zip((disk, plain), states):
                    r.load_state_dict(state)
            reopened = reopened or op in ('reopen', 'killed')
            same_chances(chances(disk), chances(plain), reopened)
            assert span_of(disk.memory) == span_of(plain.memory)
    finally:
        disk.close()
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize('link', ['saved', 'saved/7'])
def test_what_was_put_aside_is_no_link_to_another_place(link, tmp_path):
    "Older folders are removed there: a stranger's directory could name yours"
    yours = tmp_path / 'yours'
    for name in '7', '8', '9':
        (yours / name).mkdir(parents=True)
        (yours / name / 'priorities').write_bytes(b'precious')
    replay = PrioritizedReplay(bs=1, max_sz=10, store=Rows(tmp_path / 'm'))
    replay.add(Steps(stream(5)[:3]))
    saved = replay.state_dict()
    link = link.replace('saved', f"saved-{saved['own']['memory']['store']['id']}")
    place = tmp_path / 'm' / link.split('/')[0]
    shutil.rmtree(place)
    (tmp_path / 'm' / link).parent.mkdir(exist_ok=True)
    (tmp_path / 'm' / link).symlink_to(yours / '7' if '/' in link else yours)
    name = '7'
    with pytest.raises(StateError, match='symbolic link'):
        replay.memory.place.aside(name, 'priorities', float)
    if '/' not in link:
        with pytest.raises(StateError, match='symbolic link'):
            replay.state_dict()
    assert (
        sorted(p.name for p in yours.iterdir()) == ['7', '8', '9']
        and (yours / '7' / 'priorities').read_bytes() == b'precious'
    )
    assert saved['own']['memory']['store']['directory'] == str(tmp_path / 'm')


# ---- what earlier versions wrote, and stores of one's own ----


def first_version(path):
    "Memories that were written by the code before places, and what was seen of them then"
    with zipfile.ZipFile(Path(__file__).with_name('version_1.zip')) as z:
        z.extractall(path)
    return dict(np.load(path / 'expected.npz'))


def in_first_version(kind, path, max_sz=30, **kw):
    store = (
        Frames(path=path / kind, compress='lz4', **kw)
        if kind == 'frames'
        else Rows(path / kind, spare=5, **kw)
    )
    make = dict(
        prioritized=PrioritizedReplay,
        sequences=functools.partial(SequenceReplay, length=4, burn_in=1),
    ).get(kind, ExperienceReplay)
    return make(bs=2, max_sz=max_sz, seed=0, store=store)


@pytest.mark.parametrize('max_sz', [30, 41])
@pytest.mark.parametrize('kind', ['rows', 'prioritized', 'sequences', 'frames'])
def test_what_the_first_version_wrote_goes_on(kind, max_sz, tmp_path):
    "Rows, links, draws, priorities, sequences and their states, also in a larger memory"
    want = {
        k.partition('/')[2]: a
        for k, a in first_version(tmp_path).items()
        if k.startswith(f'{kind}/')
    }
    with in_first_version(kind, tmp_path, max_sz) as replay:
        m, n = replay.memory, len(replay)
        assert (
            m.keys.tolist() == want['keys'].tolist()
            and m.times_drawn.tolist() == want['drawn'].tolist()
        )
        assert (m.walk(m.keys, [-1, 1, 2]) == want['walk']).all()
        if kind == 'frames':
            assert (m[:].rows['state'] == want['state']).all()
        else:
            assert (m[:].rows.view(np.uint8).reshape(len(m), -1) == want['rows']).all()
        if kind == 'prioritized':
            assert (replay.sampler.probabilities() == want['p']).all()
        if kind == 'sequences':
            table = replay.view.table
            at = np.flatnonzero(table.first >= 0)
            at = at[np.argsort(table.first[at])]
            assert (
                n == len(want['first'])
                and (table.first[at] == want['first']).all()
                and (table.steps[at] == want['steps']).all()
            )
            assert (replay.sampler.tree[at] == want['p']).all()
            if max_sz == 30:
                assert (
                    table.hidden[at] == want['hidden']
                ).all()  # the first version lost them when a memory grew
        last = m[-4:]
        if kind == 'sequences':
            last = with_columns(last, hidden=np.ones((4, 2), np.float32))
        rows = last.rows.copy()
        rows['episode_n'] += 5
        replay.add(Steps(rows))
        assert (m.oldest, m.inserted) == (54 - min(max_sz, 34), 54) and m[-4:].rows[
            'episode_n'
        ].tolist() == rows['episode_n'].tolist()
        replay.sample()


class Turned(Store):
    "Rows with their bytes turned round: a store of one's own, which asks the place for an array and knows nothing else of it"

    nbytes = property(lambda self: self._mem.nbytes)

    def __init__(self, path=None, *, mode='a', spare=0):
        self.lies(path, mode=mode, spare=spare)

    def reserve(self, place):
        self._mem = place.new('turned', (self.max_sz, self.dtype.itemsize), np.uint8, by='slot')

    def put(self, slots, rows):
        self._mem[slots] = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)[:, ::-1]

    def gather(self, slots, out, present=-1):
        slots, size = slots.reshape(-1), self.dtype.itemsize
        out[:, :size] = np.where((slots >= 0)[:, None], self._mem[slots.clip(min=0)][:, ::-1], 0)
        if present >= 0:
            out[:, present] = slots >= 0


class Named(Rows):
    "A subclass that is nothing but another name"


@pytest.mark.parametrize('kind', [Turned, Named])
def test_a_store_of_ones_own_lasts(kind, tmp_path):
    "It is written, killed, opened again, made larger, gone back, read by its name: a class that knows no place"
    plain, line = Timeline(10), Timeline(10, kind(tmp_path, spare=10))
    for t in plain, line:
        for first in range(0, 30, 5):
            t.add(block(first, 5))
    assert seen(line) == seen(plain)
    saved = through_file(line.state_dict())
    line.add(block(30, 5))
    leave(line)
    line = Timeline(10, kind(tmp_path, spare=10))
    line.load_state_dict(saved)
    assert seen(line) == seen(plain)
    leave(line)
    line, larger = Timeline(25, kind(tmp_path, spare=10)), Timeline(25)
    larger.load_state_dict(plain.state_dict())
    for t in larger, line:
        t.add(block(30, 7))
    assert seen(line) == seen(larger)
    reader = open_memory(tmp_path)
    assert type(reader.store) is kind and seen(reader) == seen(larger)
    line.close()


def test_a_larger_memory_keeps_states(tmp_path):
    "Recurrent states from which sequences start are not lost when the memory is made larger"
    first_version(tmp_path)
    with in_first_version('sequences', tmp_path) as replay:
        rows = with_columns(
            replay.memory[-20:], hidden=np.arange(40).reshape(20, 2).astype(np.float32)
        ).rows
        rows['episode_n'] += 5
        replay.add(Steps(rows))
        t = replay.view.table
        before = {k: t.hidden[p].tolist() for p, k in enumerate(t.first) if k >= 50}
    with in_first_version('sequences', tmp_path, 45) as replay:
        len(replay)
        t = replay.view.table
        assert (
            before and {k: t.hidden[p].tolist() for p, k in enumerate(t.first) if k >= 50} == before
        )


def with_states(first, n):
    "Rows with a recurrent state each, which is one more than the key"
    return with_columns(
        block(first, n), hidden=np.arange(first + 1, first + n + 1, dtype=np.float32)[:, None]
    )


def states_of(replay):
    "By the first keys of the sequences that can be drawn"
    replay._look()
    t = replay.table
    at = np.flatnonzero(t.first >= 0)
    return dict(zip(t.first[at].tolist(), t.hidden[at].view(np.float32)[:, 0].tolist()))


def long_episode(first, n):
    "Rows of one environment whose episode does not end"
    rows = np.zeros(n, STREAM.dtype)
    rows['episode_n'], rows['step_n'] = 1, np.arange(first, first + n) + 1
    return Steps(rows)


def sequences_in(replay):
    "The first rows of those that can be drawn"
    replay._look()
    return sorted((replay.table.first[replay.table.first >= 0] - replay.memory.base).tolist())


def span_of(line):
    "How many rows have come, and which of them is the oldest, whatever keys they have here"
    return line.added, line.oldest - line.base


def test_a_reader_has_all_rows_that_came_after_going_back(tmp_path):
    "Rows that were written over those that no longer counted are whole, whatever the keys of these were"

    def make(**kw):
        return ExperienceReplay(bs=1, max_sz=6, seed=0, store=Rows(tmp_path, **kw))

    writer = make()
    writer.add(long_episode(0, 2))
    state = through_file(writer.state_dict())
    writer.add(long_episode(2, 8))  # rows before 4 are overwritten
    with pytest.warns(UserWarning, match='2 of the rows'):
        writer.load_state_dict(state)
    writer.add(long_episode(2, 3))
    assert span_of(writer.memory) == make(mode='r').memory.span == (5, 2)
    assert np.array_equal(make(mode='r').memory[:].rows, writer.memory[:].rows)
    writer.add(long_episode(5, 4))
    assert span_of(writer.memory) == make(mode='r').memory.span == (9, 3)


def test_a_reader_that_missed_rows_begins_anew(tmp_path):
    "Its sequences begin where those of the writer do: it went on counting steps as if none had come between"

    def make(**kw):
        return SequenceReplay(
            bs=1, max_sz=12, length=4, burn_in=0, overlap=2, seed=0, store=Rows(tmp_path, **kw)
        )

    writer = make()
    writer.add(long_episode(0, 5))
    reader = make(mode='r')
    assert sequences_in(reader) == [0]
    for first in range(5, 30, 5):
        writer.add(long_episode(first, 5))
    assert (
        sequences_in(reader)
        == sequences_in(make(mode='r'))
        == sequences_in(writer)
        == [18, 20, 22, 24, 26]
    )
    writer.add(long_episode(30, 2))
    assert sequences_in(reader) == [20, 22, 24, 26, 28]


def test_sequences_are_saved_where_all_rows_are_lost(tmp_path):
    "Back at a checkpoint whose rows were overwritten, with an episode under way: an IndexError"
    replay = SequenceReplay(
        bs=1, max_sz=10, length=4, burn_in=0, overlap=2, seed=0, store=Rows(tmp_path)
    )
    replay.add(long_episode(0, 10))
    state = through_file(replay.state_dict())
    replay.add(long_episode(10, 10))
    with pytest.warns(UserWarning, match='10 of the rows'):
        replay.load_state_dict(state)
    replay.load_state_dict(through_file(replay.state_dict()))
    assert len(replay) == len(replay.memory) == 0 and replay.memory.added == 10


def test_sequences_of_an_episode_whose_first_rows_are_lost_begin_where_step_n_tells(tmp_path):
    "Of the writer that went back, of readers, and where the memory is opened again: the writer counted from the first row that came"

    def make(**kw):
        return SequenceReplay(
            bs=1, max_sz=10, length=4, burn_in=0, overlap=1, seed=0, store=Rows(tmp_path, **kw)
        )

    writer = make()
    writer.add(long_episode(0, 10))
    state = through_file(writer.state_dict())
    writer.add(long_episode(10, 10))
    with pytest.warns(UserWarning, match='10 of the rows'):
        writer.load_state_dict(state)
    reader = make(mode='r')
    writer.add(long_episode(10, 4))
    assert sequences_in(reader) == sequences_in(writer) == []  # those at 6 and 9 have no first row
    writer.add(long_episode(14, 5))
    assert sequences_in(reader) == sequences_in(make(mode='r')) == sequences_in(writer) == [12, 15]
    leave(writer.memory)
    assert sequences_in(make()) == [12, 15]


def test_a_reader_follows_rows_when_their_states_are_there(tmp_path):
    "It looks whenever rows count and the states of their sequences are not written, from the first block on; their slots hold older ones"

    def make(**kw):
        return SequenceReplay(
            bs=2, max_sz=60, length=5, burn_in=0, overlap=2, seed=0, store=Rows(tmp_path, **kw)
        )

    writer, reader = make(), None
    for first in range(0, 300, 20):
        follow = writer.view.follow

        def late(*args):
            nonlocal reader
            if reader is None:
                reader = make(mode='r')
            reader._look()
            follow(*args)

        writer.view.follow = late
        writer.add(with_states(first, 20))
        del writer.view.follow
    want = states_of(writer)
    assert want == {k: k + 1 for k in want} and states_of(reader) == want


def test_states_that_were_not_written_are_zeros(tmp_path):
    "The writer is killed when its rows are there: not what was written for older rows, and a reader gets these sequences, too"

    def make(**kw):
        return SequenceReplay(
            bs=2, max_sz=60, length=5, burn_in=0, overlap=2, seed=0, store=Rows(tmp_path, **kw)
        )

    def killed(*args):
        raise RuntimeError

    writer = make()
    for first in range(0, 200, 20):
        writer.add(with_states(first, 20))
    writer.view.came = killed
    with pytest.raises(RuntimeError):
        writer.add(with_states(200, 20))
    leave(writer.memory)
    reader = make(mode='r')
    before = states_of(reader)
    assert before and all(x == k + 1 for k, x in before.items())
    time.sleep(1.1)
    for replay in reader, make():
        found = states_of(replay)
        new = found.keys() - before.keys()
        assert new and all(found[k] == (0 if k in new else k + 1) for k in found)


def test_another_worker_makes_its_shard_while_one_looks(tmp_path, monkeypatch):
    "Between two looks at a directory that isn't there, a worker that is faster made its own in it"
    look, path = files._others, tmp_path / 'memory'

    def others(of):
        found = look(of)
        (path / 'shard-0').mkdir(parents=True, exist_ok=True)
        return found

    monkeypatch.setattr(files, '_others', others)
    files.check_path(path, 'a', 'Rows')
    with pytest.raises(ArgumentError, match='is not a memory, and not empty; got shard-0'):
        Directory(path)
