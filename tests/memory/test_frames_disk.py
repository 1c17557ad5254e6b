"""Frames in files: bit for bit what rows in main memory hold, through endings, kills, rewinding, growth and damage."""

import errno, gc, os, shutil, signal, time, traceback
from pathlib import Path
import numpy as np, pytest
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.steps.errors import NoRoom
from fastrl_replay.memory import directory as directory_module
from fastrl_replay.memory.directory import OF_STORE
from fastrl_replay.testing import through_file
from strategies import cases
from test_frames import SPACES, episode, stream


class Tiny(Frames):
    "Frames of a few bytes count, in short segments, and few stay raw"

    least, smallest_file, raw_frames = 4, 2, 1


class Short(Tiny):
    "Segments of which there are not so many that a test waits for the disk"

    smallest_file = 16


class Middle(Frames):
    "As many segments as in main memory"

    smallest_file = 16


CODECS = [None, 'lz4', 'zstd']
SOME = [
    None,
    *(pytest.param(c, marks=pytest.mark.slow) for c in ('lz4', 'zstd')),
]  # where each takes seconds
PER_FRAME = step_dtype(spaces.Box(0, 255, (2, 8, 8), np.uint8), spaces.Discrete(2))


def logs(line):
    return line._parts[1]._logs if line._parts else []


def killed(line):
    "As if the process had ended just now: nothing is put in place that the packing thread has done"
    if line.is_open:
        for log in logs(line):
            if log._worker:
                log._worker.shutdown()
        line.place.leave()


def same(line, plain, seed=0):
    "Do both hold the same rows, and give the same batches, windows and steps along episodes?"
    assert (line.keys == plain.keys).all()
    if not len(plain):
        return
    keys = np.random.default_rng(seed).choice(plain.keys, 9)
    assert (
        line[:] == plain[:]
        and line.take(keys) == plain.take(keys)
        and line.windows(keys, 4) == plain.windows(keys, 4)
    )
    assert (
        line.batch(keys, np.ones(9)) == plain.batch(keys, np.ones(9))
        and (line.walk(keys, [1, -1]) == plain.walk(keys, [1, -1])).all()
    )


def of_rows(max_sz, rows):
    "A memory of whole rows"
    line = Timeline(max_sz)
    line.add(Steps(rows))
    return line


def per_file(line):
    "How many segments there are in files, raw and packed"
    names = [p.name for p in line.place.folder.glob('frames-*/*')]
    return sum(n.endswith('.raw') for n in names), sum(n.endswith('.packed') for n in names)


class TwoDisks(directory_module.Directory):
    "Large arrays, and files that come and go, lie elsewhere"

    def file(self, name):
        return (
            self.path.parent / 'large' / f'{self.folder.name}.{name}'
            if name in ('rows', 'frames-0', 'priorities')
            else super().file(name)
        )


class RowsOnTwo(Rows):
    def new_place(self, who):
        return TwoDisks(self.folder, self.mode, who)


class FramesOnTwo(Middle):
    def new_place(self, who):
        return TwoDisks(self.folder, self.mode, who)


@pytest.mark.parametrize('kind', [RowsOnTwo, FramesOnTwo])
def test_a_place_on_two_disks(tmp_path, kind, monkeypatch):
    "One method says where arrays lie: opened again, read beside, flushed, made larger and resumed as any other"
    rows, path, large, synced = episode(90), tmp_path / 'm', tmp_path / 'large', []
    large.mkdir()

    def opened(max_sz, **kw):
        return PrioritizedReplay(None, bs=4, max_sz=max_sz, store=kind(path=path, **kw), seed=0)

    def check(replay, end, n):
        assert replay.memory.inserted == end and replay.memory[:] == Steps(rows[end - n : end])

    replay = opened(20, spare=20)
    replay.add(Steps(rows[:50]))
    replay.update_priorities(np.arange(40, 50), np.arange(1.0, 11))
    saved, p = through_file(replay.state_dict()), replay.sampler.kept().tolist()
    replay.add(Steps(rows[50:55]))
    replay.sample()
    with monkeypatch.context() as m:
        m.setattr(directory_module, 'sync', synced.append)
        replay.close()
    assert {*large.iterdir(), large} <= {*synced} and {p.name[:6] for p in large.iterdir()} == {
        'data-1'
    }
    replay, reader = opened(20, spare=20), opened(20, mode='r')
    replay.load_state_dict(saved)
    assert replay.sampler.kept().tolist() == p
    for r in replay, reader:
        check(r, 50, 20)
    replay.close()
    replay = opened(60)
    check(replay, 50, 20)
    replay.add(Steps(rows[50:]))
    check(replay, 90, 60)
    replay.sample()
    assert {p.name[:6] for p in large.iterdir()} == {'data-2'}
    replay.close()


@pytest.mark.parametrize('kind', [RowsOnTwo, FramesOnTwo])
@pytest.mark.parametrize(
    'dies, stands',
    [('_copy_to', 20), ('replace_by', 20), ('_discard', 60)],
    ids=['while it copies', 'before it counts', 'before the old one is removed'],
)
def test_what_a_killed_growth_leaves_on_the_other_disk(tmp_path, kind, dies, stands, monkeypatch):
    "It counts as bytes of the memory, and the next writer removes it"
    rows, path, large, place = (
        episode(50),
        tmp_path / 'm',
        tmp_path / 'large',
        directory_module.Directory,
    )
    large.mkdir()

    def opened(max_sz):
        return PrioritizedReplay(None, bs=4, max_sz=max_sz, store=kind(path=path), seed=0)

    def numbers():
        return {p.name.lstrip('.')[:6] for p in large.iterdir()}

    with opened(20) as replay:
        replay.add(Steps(rows))
        replay.sample()
        before = replay.memory.place.nbytes

    def killed(self, *args, **kw):
        raise SystemExit

    def allocate_all(self, new, *args):
        copy(self, new, *args)
        (large / '.data-2.priorities').write_bytes(b'begun')  # as `allocate` leaves it
        raise SystemExit

    with monkeypatch.context() as m:
        copy = place._copy_to
        m.setattr(place, dies, allocate_all if dies == '_copy_to' else killed)
        if dies == '_copy_to':
            m.setattr(place, '_tidy', lambda self: None)
        with pytest.raises(SystemExit):
            len(opened(60))
    assert numbers() == {'data-1', 'data-2'}
    reader = PrioritizedReplay(None, bs=4, max_sz=stands, store=kind(path=path, mode='r'), seed=0)
    assert len(reader) == 20 and reader.memory.place.nbytes > before
    with opened(stands) as replay:
        assert replay.memory[:] == Steps(rows[-20:])
        assert numbers() == {'data-1' if stands == 20 else 'data-2'} and not [*large.glob('.*')]
        if stands == 20:
            assert replay.memory.place.nbytes == before


def test_what_a_kill_leaves_before_the_first_row_is_removed_on_both_disks(tmp_path):
    "Of a memory that was made and holds no row, of whatever number"
    large = tmp_path / 'large'
    large.mkdir()
    for number, publishes in (1, True), (3, True), (3, False):
        place = TwoDisks(tmp_path / 'm')
        place.begin(8, number)
        place.new('rows', 8, np.int64)
        place.new_folder('frames-0')
        if publishes:
            place.publish(max_sz=8)
        assert len([*large.iterdir()]) == 2
        place.leave()
        place = TwoDisks(tmp_path / 'm')
        if not publishes:
            place.begin(8)
        assert not [*large.iterdir()]
        place.leave()


@pytest.mark.parametrize(
    'kind,compress',
    [
        (k, c) if (k, c) == ('stack', 'lz4') else pytest.param(k, c, marks=pytest.mark.slow)
        for k in SPACES
        for c in CODECS
    ],
)
@cases(60)
@given(
    program=st.binary(min_size=1, max_size=150),
    sizes=st.lists(st.integers(1, 30), max_size=14),
    max_sz=st.integers(1, 40),
    seed=st.integers(0, 9),
    repeats=st.booleans(),
    spare=st.integers(0, 60),
    what=st.lists(
        st.sampled_from(['', '', 'close', 'kill', 'save', 'load', 'grow', 'reader']), max_size=14
    ),
    stack=st.sampled_from([1, 3]),
)
def test_a_directory_of_frames_is_a_memory_of_rows(
    tmp_path_factory, kind, compress, program, sizes, max_sz, seed, repeats, spare, what, stack
):
    "Whatever is added, closed, killed, rewound and made larger"
    space, dtype = SPACES[kind]
    rows, path = stream(space, dtype, program, seed, repeats), tmp_path_factory.mktemp('m')

    def opened(max_sz, spare):
        return Timeline(max_sz, Tiny(stack, compress, path / 'm', spare=spare))

    plain, line, at, saved, reader = Timeline(max_sz), opened(max_sz, spare), 0, None, None
    try:
        for i, n in enumerate([*sizes, len(rows)]):
            block = rows[at : at + n]
            at += n
            if not len(block):
                break
            for m in plain, line:
                m.add(Steps(block.copy()))
            same(line, plain, i)
            do = what[i] if i < len(what) else ''
            if do in ('close', 'kill'):
                line.close() if do == 'close' else killed(line)
                line = opened(max_sz, spare)
                if (
                    do == 'kill'
                ):  # rows that were being overwritten are those of the last block, which all came
                    assert line.inserted == plain.inserted
            if do == 'grow':
                line.close()
                max_sz += 7
                larger = Timeline(max_sz)
                larger.load_state_dict(plain.state_dict())
                plain, line, saved, reader = larger, opened(max_sz, spare), None, None
            if do == 'save':
                saved = (
                    plain.inserted,
                    through_file(plain.state_dict()),
                    through_file(line.state_dict()),
                )
            if do == 'load' and saved and plain.inserted - saved[0] <= spare:
                plain.load_state_dict(saved[1])
                line.load_state_dict(saved[2])
            if do == 'reader' and reader is None:
                reader = Timeline(max_sz, Tiny(stack, compress, path / 'm', mode='r'))
            if reader is not None:
                same(reader, plain, i)
            same(line, plain, i)
    finally:
        for m in line, reader:
            if m is not None:
                m.close()
        shutil.rmtree(path)


@pytest.mark.parametrize('compress', SOME)
def test_frames_that_no_row_needs_leave_the_disk(tmp_path, compress):
    "A memory of 1,000 rows has as many files after 10,000 as after 3,000, also when it is opened again and again"
    rows, counts = episode(10_000), []
    line = Timeline(1000, Middle(1, compress, tmp_path, spare=100))
    for i in range(0, 10_000, 50):
        line.add(Steps(rows[i : i + 50]))
        counts.append(sum(per_file(line)))
        if i % 2000 == 1950:
            killed(line) if i % 4000 == 1950 else line.close()
            line = Timeline(1000, Middle(1, compress, tmp_path, spare=100))
    assert max(counts[60:]) <= 1.25 * max(counts[:60]) and line[:] == Steps(rows[-1000:])
    raw, packed = per_file(line)
    assert not compress or packed > 4 * raw
    sizes = sum(p.stat().st_size for p in line.place.folder.glob('frames-*/*.*'))
    assert sizes <= line._parts[1]._logs[0].nbytes <= sizes + 2**16
    line.close()


def test_settings_are_said_and_must_be_the_same(tmp_path):
    path = str(tmp_path / 'm')
    store = Frames(4, 'lz4', path, columns='state', spare=7)
    assert repr(store) == f"Frames(4, compress='lz4', columns=('state',), path={path!r}, spare=7)"
    assert (
        store.settings()
        == through_file(store.settings())
        == dict(kind='Frames', stack=4, compress='lz4', columns=['state'])
    )
    line = Timeline(50, Frames(1, None, path))
    line.add(Steps(episode(20)))
    line.close()
    for other in Frames(1, 'lz4', path), Rows(path), Frames(1, None, path, columns='state'):
        with pytest.raises(ArgumentError, match='was made with another one'):
            len(Timeline(50, other))
    assert len(Timeline(50, Frames(path=path))) == 20
    for wrong in dict(path=5), dict(mode='r'), dict(spare=3), dict(path=path, mode='w'):
        with pytest.raises((ArgumentError, TypeError)):
            Frames(**wrong)


def test_kinds_of_frames_have_a_limit(tmp_path):
    space = spaces.Dict({f'c{i:02}': spaces.Box(0, 255, (8, 8), np.uint8) for i in range(52)})
    row = Steps(np.zeros(1, step_dtype(space, spaces.Discrete(2))))
    with pytest.raises(
        ArgumentError, match='no room for so many kinds of frames; got 52; expected at most 51'
    ):
        Timeline(9, Frames(path=tmp_path)).add(row)
    line = Timeline(9, Frames(path=tmp_path, columns=[f'state.c{i:02}' for i in range(51)]))
    line.add(row)
    assert line[0] == row[0]


# ---- rows that come from a checkpoint, and rewinding to nothing ----


@pytest.mark.parametrize('compress', CODECS)
def test_a_memory_in_ram_is_put_on_disk(tmp_path, compress):
    rows, ram = episode(700), Timeline(300, Tiny(1, compress))
    for i in range(0, 600, 10):
        ram.add(Steps(rows[i : i + 10]))
        ram._parts[1]._logs[0].take_packed(wait=True)
    for j, state in enumerate((ram.state_dict(), of_rows(300, rows[:600]).state_dict())):
        line = Timeline(300, Tiny(1, compress, tmp_path / str(j)))
        line.load_state_dict(through_file(state))
        same(line, ram)
        for again in range(2):
            killed(line)
            line = Timeline(300, Tiny(1, compress, tmp_path / str(j)))
            same(line, ram)
        for i in range(600, 700, 10):
            line.add(Steps(rows[i : i + 10]))
        assert line[:] == Steps(rows[400:])
        line.close()


@pytest.mark.parametrize('compress', CODECS)
def test_back_to_the_beginning(tmp_path, compress):
    rows, line = episode(400), Timeline(100, Tiny(1, compress, tmp_path, spare=500))
    empty = line.state_dict()
    for i in range(0, 300, 10):
        line.add(Steps(rows[i : i + 10]))
    line.load_state_dict(empty)
    assert len(line) == 0
    for i in range(0, 400, 10):
        line.add(Steps(rows[i : i + 10]))
    assert line[:] == Steps(rows[300:])
    line.close()
    line = Timeline(100, Tiny(1, compress, tmp_path, spare=500))
    assert line[:] == Steps(rows[300:])
    line.close()


@pytest.mark.slow
def test_frames_of_rows_that_were_undone_do_not_stay_for_ever(tmp_path):
    rows, line = episode(3000), Timeline(200, Tiny(1, None, tmp_path, spare=100))
    for i in range(0, 200, 10):
        line.add(Steps(rows[i : i + 10]))
    counts = []
    for i in range(0, 2000, 20):
        state = line.state_dict()
        for _ in range(3):
            line.add(Steps(rows[i : i + 20]))
            line.load_state_dict(state)
        line.add(Steps(rows[i : i + 20]))
        counts.append(sum(per_file(line)))
    assert max(counts[60:]) <= 1.25 * max(counts[:60])
    line.close()


# ---- refusals ----


def state_of(line):
    return line.keys.tolist(), line[:], line.place.counters.tolist()


@pytest.mark.parametrize('compress', [None, 'lz4'])
def test_a_full_disk_changes_nothing(tmp_path, monkeypatch, compress):
    rows, line = episode(1000), Timeline(200, Tiny(1, compress, tmp_path, spare=20))
    for i in range(0, 300, 10):
        line.add(Steps(rows[i : i + 10]))
    good = os.posix_fallocate

    def full(*a):
        raise OSError(errno.ENOSPC, 'full')

    for k in range(300, 700, 40):
        (log,) = logs(line)
        log.free.clear()
        before = state_of(line)
        monkeypatch.setattr(os, 'posix_fallocate', full)
        with pytest.raises(NoRoom, match='no room on the disk for .*raw'):
            line.add(Steps(rows[k : k + 100]))
        assert str(state_of(line)) == str(before) and not [
            p
            for p in log.folder.iterdir()
            if p.name.startswith('.')
            and not p.name.startswith('.dict')
            and '.packed.' not in p.name
        ]
        monkeypatch.setattr(os, 'posix_fallocate', good)
        line.add(Steps(rows[k : k + 40]))
        if k % 80 == 60:
            killed(line)
            line = Timeline(200, Tiny(1, compress, tmp_path, spare=20))
        assert line[:] == Steps(rows[k - 160 : k + 40])
    line.close()


def test_a_disk_that_is_full_while_frames_are_packed_leaves_them_raw(tmp_path, monkeypatch):
    from fastrl_replay.memory import frame_segments

    rows, line = episode(1000), Timeline(500, Tiny(1, 'lz4', tmp_path))

    def full(*a):
        raise OSError(errno.ENOSPC, 'full')

    monkeypatch.setattr(frame_segments, 'write_whole', full)
    with pytest.warns(UserWarning, match='frames could not be packed, and stay as they are'):
        for i in range(0, 300, 10):
            line.add(Steps(rows[i : i + 10]))
    assert (
        line[:] == Steps(rows[:300]) and not per_file(line)[1]
    )  # while it is full: a packer may try again
    monkeypatch.undo()
    killed(line)
    line = Timeline(500, Tiny(1, 'lz4', tmp_path))
    for i in range(300, 600, 10):
        line.add(Steps(rows[i : i + 10]))
    assert line[:] == Steps(rows[100:600]) and per_file(line)[1] > 10
    line.close()


def test_a_refused_block_costs_no_rows(tmp_path):
    rows, line = episode(500), Timeline(100, Tiny(1, None, tmp_path))
    line.add(Steps(rows[:150]))
    bad = rows[150:400].copy()
    bad['reward'][3] = np.nan
    before = state_of(line)
    with pytest.raises(BlockError, match='NaN'):
        line.add(Steps(bad))
    assert str(state_of(line)) == str(before)
    killed(line)
    line = Timeline(100, Tiny(1, None, tmp_path))
    assert line[:] == Steps(rows[50:150])
    line.close()
    with pytest.raises(ArgumentError, match='is closed'):
        line.add(Steps(rows[150:160]))
    assert line[:] == Steps(rows[50:150])


@pytest.mark.slow
def test_files_are_let_go_with_the_memory(tmp_path):
    "No descriptor stays open, and the next one may open it at once"
    descriptors, before = Path('/proc/self/fd'), None
    if not descriptors.exists():
        pytest.skip('no /proc here')
    gc.collect()
    before = len([*descriptors.iterdir()])
    line = Timeline(5000, Tiny(1, 'lz4', tmp_path))
    for i in range(0, 4000, 50):
        line.add(Steps(episode(50, seed=i)))
    assert len(logs(line)[0].segments) > 60 and len([*descriptors.iterdir()]) - before < 12
    line.close()
    del line
    gc.collect()
    assert len([*descriptors.iterdir()]) <= before + 1


# ---- damage ----


def damaged_cases(folder):
    "What may have happened to the files of a log, and what is said of it"

    def cut(p):
        p.write_bytes(p.read_bytes()[:-1])

    def longer(p):
        p.write_bytes(p.read_bytes() + b'x')

    def empty(p):
        p.write_bytes(b'')

    def gone(p):
        p.unlink()

    def noise(p):
        p.write_bytes(
            np.random.default_rng(0).integers(0, 256, p.stat().st_size, np.uint8).tobytes()
        )

    def a_folder(p):
        p.unlink()
        p.mkdir()

    def a_link(p):
        p.rename(p.with_name('elsewhere'))
        p.symlink_to(p.with_name('elsewhere'))

    return cut, longer, empty, gone, noise, a_folder, a_link


@pytest.mark.parametrize('mode', ['a', 'r'])
@pytest.mark.parametrize('compress', SOME)
def test_damaged_files_are_named(tmp_path, compress, mode):
    rows, line = episode(2000), Timeline(1500, Middle(1, compress, tmp_path / 'm'))
    for i in range(0, 2000, 10):
        line.add(Steps(rows[i : i + 10]))
    line.close()
    folder = line.place.folder / 'frames-0'
    for kind in ['raw', 'packed'] if compress else ['raw']:
        which = sorted(
            (p.name for p in folder.glob(f'*.{kind}')), key=lambda n: int(n.split('.')[0])
        )
        name = which[0] if kind == 'raw' else which[len(which) // 2]
        for damage in damaged_cases(folder):
            if damage.__name__ == 'noise' and kind == 'raw':
                continue  # any bytes may be frames
            shutil.rmtree(tmp_path / 'copy', ignore_errors=True)
            shutil.copytree(tmp_path / 'm', tmp_path / 'copy')
            damage(tmp_path / 'copy' / folder.relative_to(tmp_path / 'm') / name)
            twin = Timeline(1500, Middle(1, compress, tmp_path / 'copy', mode=mode))
            with pytest.raises(StateError, match='damaged') as said:
                twin[:]
            assert f'frames-0/{name.split(".")[0]}.' in str(said.value), damage
            assert (
                twin[-1:] == Steps(rows[-1:]) and len(twin) == 1500
            )  # the others are as they were
            if mode == 'a':
                for i in range(0, 200, 50):
                    twin.add(Steps(rows[i : i + 50]))
                assert twin[-200:] == Steps(rows[:200])
            twin.close()


@pytest.mark.parametrize('mode', ['r', pytest.param('a', marks=pytest.mark.slow)])
def test_damaged_numbers_never_lead_astray(tmp_path, mode):
    "References, counters and lowest references of a stranger: an error or other frames of this memory, never foreign bytes"
    rows, line = episode(600), Timeline(500, Short(1, 'lz4', tmp_path / 'm'))
    for i in range(0, 600, 10):
        line.add(Steps(rows[i : i + 10]))
    line.close()
    folder, rng, errors = line.place.folder.relative_to(tmp_path / 'm'), np.random.default_rng(0), 0

    def values(n):
        return rng.choice(
            [0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, -1, -(2**63), 600, 601, 700], n
        )

    for k in range(40):
        shutil.rmtree(tmp_path / 'copy', ignore_errors=True)
        shutil.copytree(tmp_path / 'm', tmp_path / 'copy')
        at = tmp_path / 'copy' / folder
        if k % 4 == 0:
            (at / 'references').write_bytes(rng.integers(0, 2**32, 1000, np.uint32).tobytes())
        if k % 4 == 1:
            (at / 'lowest').write_bytes(
                values(1024)[: (at / 'lowest').stat().st_size // 8].astype(np.int64).tobytes()
            )
        if k % 4 == 2:
            c = np.fromfile(at / 'counters', np.int64)
            c[OF_STORE] = values(1)[0]
            c.tofile(at / 'counters')
        if k % 4 == 3:
            (at / 'frames-0.form').write_bytes(values(2).astype(np.int64).tobytes())
        try:
            twin = Timeline(500, Short(1, 'lz4', tmp_path / 'copy', mode=mode))
            len(twin)
        except StateError:
            errors += 1
            continue
        try:
            twin[:]
        except (StateError, StaleKey):
            errors += 1
        if mode == 'a':
            twin.add(Steps(rows[:10]))
            assert twin[-10:] == Steps(rows[:10])
        twin.close()
    assert errors > 20


def test_a_folder_that_leads_elsewhere_is_refused(tmp_path):
    line = Timeline(50, Tiny(1, None, tmp_path / 'm'))
    line.add(Steps(episode(20)))
    line.close()
    folder = line.place.folder / 'frames-0'
    folder.rename(tmp_path / 'elsewhere')
    with pytest.raises(StateError, match='no such folder'):
        len(Timeline(50, Tiny(1, None, tmp_path / 'm')))
    folder.symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(StateError, match='symbolic link'):
        len(Timeline(50, Tiny(1, None, tmp_path / 'm')))


def test_a_dictionary_that_is_missing_is_named(tmp_path):
    rows, line = episode(1500), Timeline(1500, Tiny(1, 'zstd', tmp_path))
    for i in range(0, 1500, 10):
        line.add(Steps(rows[i : i + 10]))
    line.close()
    (line.place.folder / 'frames-0' / 'dictionary').unlink()
    for mode in 'ar':
        with pytest.raises(StateError, match='dictionary is damaged; got no such file'):
            Timeline(1500, Tiny(1, 'zstd', tmp_path, mode=mode))[:]


# ---- larger than main memory ----


@pytest.mark.parametrize('compress', CODECS)
def test_pages_are_asked_for_where_main_memory_is_too_small(tmp_path, monkeypatch, compress):
    "What comes is the same; and it is not asked for before it is too small"
    rows, line = episode(3000), Timeline(2500, Short(1, compress, tmp_path))
    for i in range(0, 1000, 10):
        line.add(Steps(rows[i : i + 10]))
    assert not line._parts[1]._outgrows
    monkeypatch.setattr(directory_module, 'outgrows', lambda nbytes: nbytes > 100_000)
    for i in range(1000, 3000, 10):
        line.add(Steps(rows[i : i + 10]))
    assert line._parts[1]._outgrows and logs(line)[0]._at_random
    same(line, of_rows(2500, rows))
    line.close()
    for mode in 'ar':
        line = Timeline(2500, Short(1, compress, tmp_path, mode=mode))
        assert line[:] == Steps(rows[500:]) and line._parts[1]._outgrows
        line.close()


# ---- another process ----


def row_of(keys):
    "A row from which its key can be seen, in each of its parts"
    rows = np.zeros(len(keys), PER_FRAME)
    rows['reward'], rows['step_n'], rows['episode_n'] = keys, keys % 1000 + 1, keys // 1000 + 1
    for name, first in ('state', 0), ('next_state', 1):
        for j in range(2):
            rows[name][:, j] = picture(keys + first + j)
    return rows


def picture(number):
    seed = (np.asarray(number) * 2654435761 % 2**32)[:, None, None]
    return (
        seed // np.array([1, 256, 65536, 2**24]).repeat(16).reshape(8, 8)
        + np.arange(64).reshape(8, 8) * (seed % 7 == 0)
    ).astype(np.uint8)


class Writer:
    "A forked process that adds rows, and says after each block how many there are; what it said last may be asked for"

    def __init__(self, path, compress, seed, until=10**9, pause=0.0):
        self.read, write = os.pipe()
        self.pid, self.said = os.fork(), 0
        if self.pid:
            os.close(write)
            os.set_blocking(self.read, False)
            return
        try:
            line, rng = (
                Timeline(600, Short(2, compress, path, spare=50)),
                np.random.default_rng(seed),
            )
            at = line.inserted
            while at < until:
                n = int(rng.integers(1, 40))
                line.add(Steps(row_of(np.arange(at, at + n))))
                at += n
                os.write(write, at.to_bytes(8, 'little'))
                time.sleep(pause)
            line.close()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def inserted(self):
        try:
            while text := os.read(self.read, 8):
                self.said = int.from_bytes(text, 'little')
        except BlockingIOError:
            pass
        return self.said

    def wait(self, kill=False):
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.inserted()
        os.close(self.read)
        return status


def until(what):
    "Wait for a while"
    end = time.time() + 60
    while not what():
        assert time.time() < end
        time.sleep(0.001)


forks = pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork here')


def are_what_they_were(steps, keys):
    return steps == Steps(row_of(keys))


@forks
@pytest.mark.parametrize('compress', CODECS)
def test_a_reader_beside_a_writer(tmp_path, compress):
    "Rows are whole and their own, or their keys are stale; new ones are seen"
    writer = Writer(tmp_path, compress, 0, pause=0.0005)
    until(lambda: writer.inserted() > 700)
    line, rng, seen, stale, read = (
        Timeline(600, Short(2, compress, tmp_path, mode='r')),
        np.random.default_rng(0),
        set(),
        0,
        0,
    )
    while len(seen) < 60 or read < 60:
        keys = rng.choice(line.keys, 16)
        seen.add(line.inserted)
        try:
            assert are_what_they_were(line.take(keys), keys)
            windows, theirs = line.windows(keys, 3).rows, keys[:, None] + np.arange(3)
            there = windows['mask']
            assert (windows['reward'][there] == theirs[there]).all() and (
                windows['state'][there] == row_of(theirs[there])['state']
            ).all()
            read += 1
        except StaleKey:
            stale += 1
    assert writer.wait(kill=True) == -signal.SIGKILL and line.inserted >= writer.said > 600
    assert are_what_they_were(line[:], line.keys)
    [log] = logs(line)
    gone = [
        n
        for n in log.segments
        if not 0
        <= n - log.first * log.size // log.segment_bytes
        <= len(log) * log.size // log.segment_bytes
    ]
    assert log.segments and not gone  # what has gone was given back
    line.close()


@forks
@pytest.mark.parametrize(
    'compress', ['lz4', *(pytest.param(c, marks=pytest.mark.slow) for c in (None, 'zstd'))]
)
def test_kills_tear_nothing(tmp_path, compress):
    "A writer is killed two dozen times; each row whose add had returned is there, and is what it was"
    rng, at = np.random.default_rng(0), 0
    for kill in range(24):
        writer = Writer(tmp_path, compress, kill)
        until(lambda: writer.inserted() > at)
        time.sleep(rng.uniform(0, 0.05))
        assert writer.wait(kill=True) == -signal.SIGKILL
        assert writer.said > at
        for mode in 'ra':
            line = Timeline(
                600, Short(2, compress, tmp_path, mode=mode, spare=50 if mode == 'a' else 0)
            )
            assert writer.said <= line.inserted <= writer.said + 40 and len(line) == min(
                line.inserted, 600
            )  # spare rows were under the new ones
            assert are_what_they_were(line[:], line.keys)
            keys = line.keys[:-1]
            assert (line.walk(keys, [1])[:, 0] == np.where(keys % 1000 == 999, -1, keys + 1)).all()
            at = line.inserted
            line.close() if kill % 2 else killed(line)
    assert at > 600  # the ring has been written more than once
