"""Compiles what most tests use, so that the processes of a test run find it on disk and don't compile it three times."""

import sys

import numpy as np
from gymnasium import spaces

import fastrl_replay.all  # noqa: F401, all stages
from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.row_dtypes import step_dtype
from fastrl_replay.memory.frames import Frames
from fastrl_replay.memory.rows import Rows
from fastrl_replay.pipe import Items


def blocks():
    "Two environments in turn, episodes of ten steps, in blocks of 1, 2, 3, … rows"
    rows = np.zeros(300, step_dtype(spaces.Box(-9, 9, (20,)), spaces.Discrete(2)))
    step = np.arange(300) // 2
    rows['env_id'], rows['episode_n'], rows['step_n'] = (
        np.arange(300) % 2,
        step // 10 + 1,
        step % 10 + 1,
    )
    rows['terminated'], rows['state'], rows['next_state'] = (
        rows['step_n'] == 10,
        step[:, None],
        step[:, None] + 1,
    )
    return [Steps(b) for b in np.split(rows, np.cumsum(range(1, 24)))]


def replays(store):
    common = dict(max_sz=200, seed=0, store=store)

    def source():
        return Items(blocks()).n_step(3, 0.9)

    yield source().experience_replay(bs=8, **common)
    yield source().experience_replay(bs=8, replacement=True, **common)
    for kind in 'proportional', 'rank':
        yield source().prioritized_replay(bs=8, kind=kind, initial='max_ever', **common)
        yield Items(blocks()).sequence_replay(
            bs=2, kind=kind, length=4, burn_in=1, overlap=2, **common
        )


def use(replay):
    "Draw, tell errors, save and load"
    for batch in replay:
        batch.update_priorities(np.ones(getattr(batch, 'train', batch).shape))
    replay.memory.walk(replay.memory.keys, [-1, 1])
    replay.memory.windows(replay.memory.keys, 3)
    replay.load_state_dict(replay.state_dict())
    replay.stats()


def jobs():
    "About equally long, if every second one is left out"
    by_rows = [*replays(Rows())]
    yield from (by_rows[i] for i in (3, 2, 5, 4, 0, 1))
    yield from [*replays(Frames())][:1]


if __name__ == '__main__':
    part = int(sys.argv[1])  # 0 or 1
    if part:
        for _ in Items(blocks()).chunk_sequences(4, 1):
            pass
    for replay in [*jobs()][part::2]:
        use(replay)
