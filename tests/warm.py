"""Compile what most tests use, so that test processes find it on disk instead of compiling it."""

import sys

import numpy as np

from fastrl_replay.all import *


def replays():
    "Yield replays with their source, about equally long to compile if every second one is left out"
    blocks = Items(scripted_steps([script(10), script(8, env=1)], 40))
    common = dict(max_sz=60, seed=0)
    for kind in 'proportional', 'rank':
        yield blocks.n_step(3, 0.9).prioritized_replay(
            bs=8, kind=kind, initial='max_ever', **common
        )
    for kind in 'rank', 'proportional':
        lengths = dict(length=4, burn_in=1, overlap=2)
        yield blocks.sequence_replay(bs=2, kind=kind, initial='max_ever', **lengths, **common)
    yield blocks.experience_replay(bs=8, **common)
    yield blocks.chunk_sequences(4, 1)


def use(replay):
    "Draw, answer, save and load"
    for batch in replay:
        if hasattr(replay, 'update_priorities'):
            batch.update_priorities(np.ones(getattr(batch, 'train', batch).shape))
    replay.load_state_dict(replay.state_dict())


if __name__ == '__main__':
    part = int(sys.argv[1])  # 0 or 1
    for replay in [*replays()][part::2]:
        use(replay)
