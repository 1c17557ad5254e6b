"Memory of batches is used again, and never while any part of it is in use"

import os
import numpy as np, pytest, torch
from gymnasium.spaces import Box, Discrete
from fastrl_replay.all import *
from fastrl_replay.steps.recycled import LEAST, batch_bytes


def replays():
    wide = step_dtype(Box(-1, 1, (2000,)), Discrete(3))
    pixels = step_dtype(Box(0, 255, (2, 64, 64), np.uint8), Discrete(3))
    for kind, dtype, made in (
        ('rows', wide, lambda: PrioritizedReplay(None, 16, 400, seed=0)),
        ('sequences', wide, lambda: SequenceReplay(None, 4, 400, length=8, seed=0)),
        ('frames', pixels, lambda: ExperienceReplay(None, 16, 400, seed=0, store=Frames())),
    ):
        rows = np.zeros(300, dtype)
        rows['state'] = np.random.default_rng(0).integers(0, 100, rows['state'].shape)
        rows['next_state'][:-1] = rows['state'][1:]
        rows['step_n'], rows['episode_n'] = np.arange(300) + 1, 1
        yield pytest.param(made, rows, id=kind)


PARTS = (
    lambda b: b.state,
    lambda b: b.state[1:2, ..., ::2],
    lambda b: b['next_state'].numpy(),
    lambda b: b[2:3].state,
    lambda b: b.rows['state'][-1],
)


@pytest.mark.parametrize('made, rows', [*replays()])
def test_what_is_held_of_a_batch_stays_as_it_was(made, rows):
    replay = made()
    replay.add(Steps(rows))
    held, copies = [], []
    for i in range(60):
        part = PARTS[i % len(PARTS)](replay.sample())
        held.append(part)
        copies.append(torch.as_tensor(part).clone())
        replay.sample().rows.view(np.uint8)[:] = 255  # drawn, written to, and let go at once
    for part, copy in zip(held, copies):
        assert torch.equal(torch.as_tensor(part), copy)


def test_a_child_has_its_own():
    a = batch_bytes(LEAST)
    a[:] = 1
    child = os.fork()
    if not child:
        b = batch_bytes(LEAST)
        b[:] = 2
        os._exit(int((a != 1).any()))
    assert os.waitpid(child, 0)[1] == 0 and (a == 1).all()
