"""Blocks: any memory layout is taken; a wrong block is refused by name and changes nothing."""

import pickle

import numpy as np
import pytest

from fastrl_replay.all import *
from fastrl_replay.steps.row_dtypes import extend_dtype
from fastrl_replay.testing import same
from scripted import elsewhere, numbered
from test_timeline import KINDS, episode

SMALL = dict(max_sz=8, seed=0)
TAKES = dict(  # a stage or a memory without a source, by what it does with a block
    NStep=lambda: NStep(None, 3, 0.5).merge,
    NSkip=lambda: NSkip(None, 2).skip,
    SequenceChunker=lambda: SequenceChunker(None, 3, 1).chunk,
    Timeline=lambda: Timeline(8).add,
    ExperienceReplay=lambda: ExperienceReplay(bs=2, **SMALL).add,
    PrioritizedReplay=lambda: PrioritizedReplay(bs=2, **SMALL).add,
    SequenceReplay=lambda: SequenceReplay(bs=1, length=3, burn_in=0, overlap=1, **SMALL).add,
)
MEMORIES = 'Timeline', 'ExperienceReplay', 'PrioritizedReplay', 'SequenceReplay'
COUNT = 'NStep', 'SequenceChunker', *MEMORIES  # environments and their episodes
STAMPED = [name for name in TAKES if name != 'Timeline']
SEQUENCES = 'SequenceChunker', 'SequenceReplay'


def seen(take):
    return take.__self__.state_dict(), getattr(take.__self__, 'nbytes', 0)


# ---- any memory layout ----

GUISES = dict(
    steps=lambda r: np.repeat(r, 2)[::2],
    backwards=lambda r: r[::-1].copy()[::-1],
    read_only=lambda r: np.frombuffer(r.tobytes(), r.dtype),
    misaligned=lambda r: np.frombuffer(b'x' + r.tobytes(), np.uint8)[1:].view(r.dtype),
    column=lambda r: np.stack([r, r], 1)[:, 1],
    record=lambda r: r.view(np.recarray),
    pickled=lambda r: pickle.loads(pickle.dumps(Steps(r))).rows,
    single=lambda r: r.reshape(()) if len(r) == 1 else r,
)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('name', TAKES)
def test_a_block_is_its_rows_whatever_its_memory_looks_like(name, kind):
    "What comes out, and what is held, is what comes of plain rows; a block of no rows is a block"
    if 'n' in KINDS[kind].names and name in ('NStep', 'SequenceChunker'):
        return  # for them it has a meaning
    rows = episode(9, KINDS[kind])
    for guise in GUISES:
        plain, other = TAKES[name](), TAKES[name]()
        for block in rows[:0], rows[:3], rows[3:4], rows[4:]:
            given = Steps(GUISES[guise](block) if len(block) else block)
            before = given.copy()
            assert same(other(given), plain(Steps(block))), guise
            assert given == before, guise
        assert same(seen(other), seen(plain)), guise


# ---- what is refused ----

DTYPE = numbered(1).dtype


def columns(**kinds):
    "The same rows with other types of columns, without some (None), or with more"
    dtype = np.dtype(
        [(n, kinds.get(n, DTYPE[n])) for n in DTYPE.names if kinds.get(n, 0) is not None],
        align=True,
    )
    return lambda rows: Steps(
        np.zeros(
            len(rows),
            extend_dtype(dtype, **{n: k for n, k in kinds.items() if n not in DTYPE.names}),
        )
    )


def values(**changes):
    "Other values in the third and fourth row"

    def spoilt(rows):
        rows = rows.copy()
        for n, x in changes.items():
            rows[n][2:] = np.reshape(x, (-1, *[1] * (rows[n].ndim - 1)))
        return Steps(rows)

    return spoilt


def objects(rows):
    return Steps(
        np.zeros(4, np.dtype([('o', object), *[(n, DTYPE[n]) for n in DTYPE.names]], align=True))
    )


def packed(rows):
    return Steps(np.zeros(4, [(n, DTYPE[n]) for n in DTYPE.names]))


BAD = {  # how a block is spoiled; what is said of it, and by whom if it is the first one
    'no step_n': (columns(step_n=None), "column 'step_n'; got no such .*step_dtype", TAKES),
    'no truncated': (columns(truncated=None), "column 'truncated'; got no such .*expected", TAKES),
    'no env_id': (columns(env_id=None), "column 'env_id'; got no such .*expected int32", COUNT),
    'no reward': (columns(reward=None), "column 'reward'; got no such .*expected", ['NStep']),
    'wide env_id': (columns(env_id='i8'), "column 'env_id'; got int64; expected int32", COUNT),
    'big ends': (columns(step_n='>i4'), "column 'step_n'.*; got >i4", TAKES),
    'bytes': (columns(terminated='u1'), "column 'terminated'; got uint8; expected bool", TAKES),
    'pairs': (columns(truncated=('?', (2,))), "column 'truncated'; .*expected bool", TAKES),
    'double reward': (columns(reward='f8'), "column 'reward'; got float64; expected", ['NStep']),
    'packed': (packed, 'the dtype of rows must be aligned', TAKES),
    'objects': (objects, 'not Python objects', TAKES),
    'other states': (columns(state=('f4', (3,))), None, []),
    'index': (
        columns(index='i8'),
        "rows that a replay sampled .*put it before the replay",
        STAMPED,
    ),
    'mask': (columns(mask='?'), "rows have a column 'mask' already", SEQUENCES),
    'discount': (columns(discount='f4'), 'its rows were merged by n_step already', ['NStep']),
    'n of floats': (columns(n='f4'), "column 'n'|n_skip before n_step", ['NStep', SEQUENCES[0]]),
    'two axes': (lambda r: Steps(r.reshape(2, 2)), r'got shape \[2, 2\]; expected', TAKES),
    'NaN in state': (values(state=np.nan), "row 2 .*NaN in column 'state'", MEMORIES),
    'NaN in reward': (values(reward=np.nan), "row 2 .*'reward'", ['NStep', *MEMORIES]),
    'infinite reward': (values(reward=-np.inf), 'got -inf; expected .*finite', ['NStep']),
    'env_id -1': (values(env_id=-1), "row 2 .*'env_id'; got -1; expected an integer from 0", COUNT),
    'env_id 2**24': (values(env_id=1 << 24), "row 2 .*'env_id'; got 16777216", COUNT),
    'far, then bad': (values(env_id=[900, -1]), 'row 3 .*got -1', COUNT),  # no room is made for 900
    'far, then NaN': (values(env_id=[900, 1], reward=[0, np.nan]), 'reward', ['NStep', *MEMORIES]),
}


@pytest.mark.parametrize('bad', BAD)
@pytest.mark.parametrize('name', TAKES)
def test_a_rejected_block_is_named_and_changes_nothing(name, bad):
    "As the first one, so that rows of other columns may follow, and in the middle of an episode"
    spoil, says, who = BAD[bad]
    block = spoil(numbered(4, 5).rows)
    fits = block.dtype == DTYPE and block.rows.ndim == 1
    for before, after in ([], Steps(episode(5, KINDS['odd']))), ([numbered(5)], numbered(4, 5)):
        if name not in who and (not before or fits or name == 'NSkip'):
            continue  # other columns than before are refused, too
        take, twin = TAKES[name](), TAKES[name]()
        for b in before:
            take(b)
            twin(b)
        said = says if fits or not before else ''
        with pytest.raises(BlockError, match=f'^{name}: .*({said})'):
            take(block)
        assert same(seen(take), seen(twin))
        assert same(take(after), twin(after))
        assert same(seen(take), seen(twin))


@pytest.mark.parametrize('name', TAKES)
def test_other_things_than_blocks_are_named(name):
    "Arrays, dicts, lists, and rows on another device"
    take, twin = TAKES[name](), TAKES[name]()
    for wrong in numbered(3).rows, dict(state=1), None, 'abc', [numbered(3)]:
        with pytest.raises(
            TypeError, match=f'^{name}: a block must be Steps; got {type(wrong).__name__}'
        ):
            take(wrong)
    with pytest.raises(RuntimeError, match='rows needs a block in RAM'):
        take(elsewhere(numbered(3)))
    assert same(seen(take), seen(twin)) and same(take(numbered(5)), twin(numbered(5)))
