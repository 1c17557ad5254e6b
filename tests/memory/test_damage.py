"""Files of a memory with one wrong bit or reference are named.

There is never a loop, and rows are never gone without a word."""

import json

import numpy as np, pytest
from gymnasium import spaces

from fastrl_replay.all import *
from fastrl_replay.app.watching import Watch
from fastrl_replay.cli import main
from fastrl_replay.look.sample import memory_sample
from fastrl_replay.memory.frame_log import BITS, FRAME_SIZE
from fastrl_replay.memory.places import CHECK


def rows(n, first=0):
    block = np.zeros(
        n, step_dtype(spaces.Box(-np.inf, np.inf, (16,), np.float32), spaces.Discrete(2))
    )
    block['reward'] = block['state'][:, 0] = np.arange(first, first + n)
    block['next_state'][:, 0], block['step_n'], block['episode_n'] = (
        block['reward'] + 1,
        block['reward'] + 1,
        1,
    )
    return Steps(block)


def changed(folder, name, dtype, change):
    "Change an array of the memory in this folder"
    [path] = folder.glob(f'data-*/{name}')
    a = np.fromfile(path, dtype)
    change(a)
    a.tofile(path)


@pytest.fixture
def damaged(tmp_path):
    "A memory of which one row refers to a frame that never was"
    replay = ExperienceReplay(bs=12, max_sz=40, seed=0, store=Frames(path=tmp_path / 'm'))
    replay.add(rows(30))
    replay.close()

    def change(a):
        a[20] ^= 1 << 8

    changed(tmp_path / 'm', 'references', np.uint32, change)
    return tmp_path / 'm'


@pytest.mark.parametrize('mode', ['r', 'a'])
def test_a_wrong_reference_to_a_frame_is_named(damaged, mode):
    replay = ExperienceReplay(bs=12, max_sz=40, seed=0, store=Frames(path=damaged, mode=mode))
    for call in (
        lambda: [replay.sample() for _ in range(9)],
        lambda: replay.memory[:],
        lambda: memory_sample(replay),
        lambda: replay.memory.still_there(replay.memory.keys),
        lambda: replay.memory.windows(replay.memory.keys, 3),
    ):
        with pytest.raises(StateError, match=f'{damaged}.* is damaged'):
            call()
    replay.close()


def test_a_wrong_reference_to_a_frame_is_named_by_pages(damaged, capsys, tmp_path):
    assert main(['memory', str(damaged), '--html', str(tmp_path / 'page.html')]) == 2
    said = capsys.readouterr().err
    assert str(damaged) in said and 'is damaged' in said
    _, page = Watch([damaged])('data/0')
    assert b'is damaged' in page


def counted(tmp_path):
    replay = PrioritizedReplay(bs=4, max_sz=10, seed=0, store=Rows(tmp_path / 'm', spare=7))
    replay.add(rows(25))
    replay.close()


def has_damaged_counters(folder):
    "Readers and writers name them, and change nothing"
    [file] = folder.glob('data-*/counters')
    before = file.read_bytes()
    for mode in 'r', 'a':
        with pytest.raises(StateError, match='the counters are damaged'):
            len(PrioritizedReplay(max_sz=10, store=Rows(folder, mode=mode)))
    assert file.read_bytes() == before


@pytest.mark.parametrize('bit', range(0, 8 * 64, 37))
def test_one_wrong_bit_in_the_counters_is_named(bit, tmp_path):
    counted(tmp_path)

    def change(a):
        a[bit // 8] ^= 1 << bit % 8

    changed(tmp_path / 'm', 'counters', np.uint8, change)
    has_damaged_counters(tmp_path / 'm')
    changed(tmp_path / 'm', 'counters', np.uint8, change)
    replay = PrioritizedReplay(max_sz=10, store=Rows(tmp_path / 'm', mode='r'))
    assert replay.memory[:].reward.tolist() == [*range(15, 25)]


def test_counters_of_zeros_are_no_empty_memory(tmp_path):
    counted(tmp_path)
    [file] = (tmp_path / 'm').glob('data-*/counters')
    file.write_bytes(bytes(file.stat().st_size))
    has_damaged_counters(tmp_path / 'm')


@pytest.mark.parametrize('counter', [0, 1])
def test_a_count_that_was_never_allowed_is_named_after_a_kill(counter, tmp_path):
    "A killed writer leaves no checksum; reserved or counted rows can't exceed what was allowed"
    counted(tmp_path)

    def change(a):
        a[CHECK], a[counter] = 0, a[counter] ^ 1 << 40

    changed(tmp_path / 'm', 'counters', np.int64, change)
    has_damaged_counters(tmp_path / 'm')


@pytest.mark.parametrize('noise', [True, False])
def test_a_page_of_damaged_links_is_no_page_of_other_rows(noise, tmp_path):
    replay = ExperienceReplay(max_sz=40, store=Rows(tmp_path / 'm'))
    for i in range(100):
        replay.add_step(
            np.float32([i]), 0, 1.0, np.float32([i + (0.5 if i % 10 == 9 else 1)]), i % 10 == 9
        )
    replay.close()
    rng = np.random.default_rng(0)

    def change(a):
        a[:] = rng.integers(-(2**31), 2**31, a.size) if noise else 0

    changed(tmp_path / 'm', 'link', np.int32, change)
    with pytest.raises(StateError, match='links or counts of the replay buffer'):
        memory_sample(ExperienceReplay(max_sz=40, store=Rows(tmp_path / 'm', mode='r')))


def test_frames_of_another_size_are_refused(damaged):
    "Or they would be read from other memory"
    changed(damaged, 'frames', np.int64, lambda a: a.put(FRAME_SIZE, 1))
    with pytest.raises(StateError, match='the sizes of frames are damaged'):
        len(ExperienceReplay(max_sz=40, store=Frames(path=damaged)))


def test_an_open_reader_keeps_the_form_of_segments(damaged):
    with ExperienceReplay(max_sz=40, store=Frames(path=damaged, mode='r')) as replay:
        before = replay.memory[-5:]
        changed(damaged, 'frames', np.int64, lambda a: a.put(BITS, 2))
        assert replay.memory[-5:] == before


@pytest.mark.parametrize('name, kind, bad', [('drawn', 'i4', -1), ('priorities', 'f8', np.inf)])
def test_pages_name_damaged_counts_and_priorities(name, kind, bad, tmp_path, capsys):
    with PrioritizedReplay(max_sz=40, store=Rows(tmp_path / 'm')) as replay:
        replay.add(rows(30))
        replay.sample()
    changed(tmp_path / 'm', name, np.dtype(kind), lambda a: a.fill(bad))
    assert main(['memory', str(tmp_path / 'm')]) == 2
    assert 'damaged' in capsys.readouterr().err


# numpy adds the last ones and the size in 32 bits
@pytest.mark.parametrize('offset', [1, 2**31 - 1, 2**30])
def test_columns_that_overlap_or_lie_outside_of_the_row_are_refused(offset, tmp_path):
    with ExperienceReplay(max_sz=40, store=Rows(tmp_path / 'm')) as replay:
        replay.add(rows(30))
    meta = json.loads((tmp_path / 'm/meta.json').read_text())
    truncated = next(c for c in meta['columns'][2] if c[0] == 'truncated')
    truncated[1] = offset
    (tmp_path / 'm/meta.json').write_text(json.dumps(meta))
    for mode in 'a', 'r':
        with pytest.raises(StateError, match='columns that overlap|out of bounds|itemsize'):
            len(ExperienceReplay(max_sz=40, store=Rows(tmp_path / 'm', mode=mode)))


def test_a_reader_takes_no_goals_along_damaged_links(tmp_path):
    def obs(t):
        return {
            name: np.float32([x])
            for name, x in dict(observation=t, achieved_goal=t, desired_goal=1000).items()
        }

    def rewards(achieved, desired, info):
        return -(abs(achieved - desired)[..., 0] > 0.5).astype(np.float32)

    def made(mode):
        return HindsightReplay(
            bs=32,
            max_sz=400,
            seed=0,
            share=1.0,
            reward=rewards,
            store=Rows(tmp_path / 'm', mode=mode),
        )

    replay = made('a')
    for e in range(30):
        for t in range(6):
            replay.add_step(obs(e * 10 + t), 0, -1.0, obs(e * 10 + t + 1), False, t == 5)
    replay.close()
    rng = np.random.default_rng(0)

    def change(a):
        a[:180] = rng.permutation(a[:180])

    changed(tmp_path / 'm', 'back', np.int32, change)
    with pytest.raises(StateError, match='damaged'):
        for _ in range(20):
            made('r').sample()
