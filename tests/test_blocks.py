"""Blocks, wherever rows are taken in: any memory layout is taken, and a wrong block is refused by name and changes nothing."""

import copy, pickle

import numpy as np, pytest

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


def seen(take):
    return take.__self__.state_dict(), getattr(take.__self__, 'nbytes', 0)


# ---- any memory layout ----

GUISES = dict(
    steps=lambda r: np.repeat(r, 2)[::2],
    backwards=lambda r: r[::-1].copy()[::-1],
    reversed_=lambda r: np.ascontiguousarray(r[::-1])[::-1],
    read_only=lambda r: np.frombuffer(r.tobytes(), r.dtype),
    misaligned=lambda r: np.frombuffer(b'x' + r.tobytes(), np.uint8)[1:].view(r.dtype),
    column=lambda r: np.stack([r, r], 1)[:, 1],
    fortran=lambda r: np.asfortranarray(r),
    record=lambda r: r.view(np.recarray),
    masked=lambda r: np.ma.array(r),
    pickled=lambda r: pickle.loads(pickle.dumps(Steps(r))).rows,
    deepcopied=lambda r: copy.deepcopy(r),
    window=lambda r: np.lib.stride_tricks.as_strided(r, r.shape, r.strides),
    single=lambda r: r.reshape(()) if len(r) == 1 else r,
)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('name', TAKES)
def test_a_block_is_its_rows_whatever_its_memory_looks_like(name, kind):
    "What comes out, and what is held, is what comes of plain rows; the block stays as it is; one of no rows is a block, too"
    if 'n' in KINDS[kind].names and name in ('NStep', 'SequenceChunker'):
        return  # for them it has a meaning
    rows = episode(9, KINDS[kind])
    for guise in GUISES:
        plain, other = TAKES[name](), TAKES[name]()
        for block in rows[:0], rows[:3], rows[3:4], rows[4:]:
            given = Steps(GUISES[guise](block) if len(block) else block)
            before = given.copy()
            assert same(other(given), plain(Steps(block))) and given == before, guise
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


BAD = {  # how a block is spoilt; what is said of it, and by whom, where it is the first one
    **{
        f'no {n}': (
            columns(**{n: None}),
            f"column '{n}'; got no such column; expected .*step_dtype",
            TAKES,
        )
        for n in ('step_n', 'terminated', 'truncated')
    },
    **{
        f'no {n}': (
            columns(**{n: None}),
            f"column '{n}'; got no such column; expected int32.*step_dtype",
            COUNT,
        )
        for n in ('env_id', 'episode_n')
    },
    **{
        f'no {n}': (
            columns(**{n: None}),
            f"column '{n}'; got no such column; expected (float32|any kind)",
            ['NStep'],
        )
        for n in ('reward', 'next_state')
    },
    'wide env_id': (columns(env_id='i8'), "column 'env_id'; got int64; expected int32", COUNT),
    'long step_n': (columns(step_n='i8'), "column 'step_n'; got int64; expected int32", TAKES),
    'step_n of big ends': (columns(step_n='>i4'), "column 'step_n'; got >i4", TAKES),
    'bytes for flags': (
        columns(terminated='u1'),
        "column 'terminated'; got uint8; expected bool",
        TAKES,
    ),
    'pairs of flags': (
        columns(truncated=('?', (2,))),
        "column 'truncated'; got .*; expected bool",
        TAKES,
    ),
    'double reward': (
        columns(reward='f8'),
        "column 'reward'; got float64; expected float32",
        ['NStep'],
    ),
    'packed': (packed, 'a packed dtype; expected an aligned one', TAKES),
    'objects': (objects, 'no Python objects', TAKES),
    'other states': (columns(state=('f4', (3,))), None, []),
    'one column more': (columns(logp='f4'), None, []),
    'index': (
        columns(index='i8'),
        "column 'index'; got one that is there already",
        [n for n in TAKES if n != 'Timeline'],
    ),
    'weight': (
        columns(weight='f4'),
        "column 'weight'; got one that is there already",
        ['SequenceReplay'],
    ),
    'mask': (
        columns(mask='?'),
        "column 'mask'; got one that is there already",
        ['SequenceChunker', 'SequenceReplay'],
    ),
    'discount': (
        columns(discount='f4'),
        r"columns of an n_step already; got \['discount'\]",
        ['NStep'],
    ),
    **{
        f'n {k}': (
            columns(n=k),
            r"put n_skip before n_step|column 'n'; got .*; expected int32 or int64",
            ['NStep', 'SequenceChunker'],
        )
        for k in ('f4', 'i2', '?', ('i4', (2,)))
    },
    'n': (columns(n='i8'), 'put n_skip before n_step', ['NStep']),
    'two axes': (
        lambda r: Steps(r.reshape(2, 2)),
        r'got shape \[2, 2\]; expected shape \[n\]',
        TAKES,
    ),
    'one sequence': (
        lambda r: Steps(r[:1].reshape(1, 1)),
        r'got shape \[1, 1\]; expected shape \[n\]',
        TAKES,
    ),
    **{
        f'NaN in {n}': (
            values(**{n: np.nan}),
            f"row 2 of the block has a NaN in column '{n}'",
            MEMORIES,
        )
        for n in ('state', 'next_state', 'total_reward')
    },
    'NaN in reward': (
        values(reward=np.nan),
        r"row 2 of the block(, column 'reward' \(env_id 0\); got nan| has a NaN in column 'reward')",
        ['NStep', *MEMORIES],
    ),
    'infinite reward': (values(reward=-np.inf), 'got -inf; expected a finite number', ['NStep']),
    **{
        f'env_id {e}': (
            values(env_id=e),
            f"row 2 of the block, column 'env_id'; got {e}; expected a number from 0 to 16777215",
            COUNT,
        )
        for e in (-1, -(2**31), 1 << 24, 2**31 - 1)
    },
    'far, then bad': (
        values(env_id=[900, -1]),
        'row 3 .*got -1',
        COUNT,
    ),  # was: room is made for 900 before -1 is seen, and stays
    'far, then huge': (values(env_id=[900, 1 << 24]), 'row 3 .*got 16777216', COUNT),
    'far, then NaN': (
        values(env_id=[900, 0], state=[0, np.nan]),
        "row 3 .*NaN in column 'state'",
        MEMORIES,
    ),
}


@pytest.mark.parametrize('bad', BAD)
@pytest.mark.parametrize('name', TAKES)
def test_a_wrong_block_is_refused_by_name_and_changes_nothing(name, bad):
    "As the first one, so that good rows of other columns may follow, and in the middle of an episode: state, bytes, what comes then"
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
        with pytest.raises(BlockError, match=f'^{name}: .*({says if fits or not before else ""})'):
            take(block)
        assert (
            same(seen(take), seen(twin))
            and same(take(after), twin(after))
            and same(seen(take), seen(twin))
        )


@pytest.mark.parametrize('name', TAKES)
def test_what_is_no_block_is_named(name):
    "Arrays, dicts, lists, and rows on another device"
    take, twin = TAKES[name](), TAKES[name]()
    for wrong in numbered(3).rows, dict(state=1), None, 'abc', [numbered(3)]:
        with pytest.raises(
            TypeError, match=f'^{name}: a block of rows; got {type(wrong).__name__}; expected Steps'
        ):
            take(wrong)
    with pytest.raises(RuntimeError, match='expected one in main memory'):
        take(elsewhere(numbered(3)))
    assert same(seen(take), seen(twin)) and same(take(numbered(5)), twin(numbered(5)))
