"Memory of batches is used again, and never while any part of it is in use"

import os, resource, subprocess, sys
import numpy as np, pytest, torch
from gymnasium.spaces import Box, Discrete
from fastrl_replay.all import *
from fastrl_replay.steps.recycled import LEAST, batch_bytes


def replays():
    wide, pixels = (
        step_dtype(Box(-1, 1, (2000,)), Discrete(3)),
        step_dtype(Box(0, 255, (2, 64, 64), np.uint8), Discrete(3)),
    )
    for kind, dtype, made in (
        ('rows', wide, lambda: ExperienceReplay(None, 16, 400, seed=0)),
        ('priority', wide, lambda: PrioritizedReplay(None, 16, 400, seed=0)),
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
        batch = replay.sample()
        assert batch.rows.nbytes >= LEAST
        part = PARTS[i % len(PARTS)](batch)
        held.append(part)
        copies.append(torch.as_tensor(part).clone())
        del batch
        assert (
            np.asarray(replay.sample().state).reshape(-1)[:5] < 100
        ).all()  # drawn, written to, and let go at once
    for part, copy in zip(held, copies):
        assert torch.equal(torch.as_tensor(part), copy)


@pytest.mark.parametrize('made, rows', [*replays()])
def test_a_draw_takes_no_new_pages(made, rows):
    replay = made()
    replay.add(Steps(rows))
    batch = None
    for _ in range(10):
        batch = replay.sample()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        batch = replay.sample()
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        < 50 * batch.rows.nbytes / 4096 / 8
    )  # an eighth of those that it has


@pytest.mark.parametrize('made, rows', [*replays()])
def test_batches_that_are_drawn_ahead_take_no_new_pages(made, rows):
    "Two lie ready, one is on its way, one is in use"
    replay = made()
    replay.add(Steps(rows))
    with replay.prefetch(2) as ahead:
        batches, batch = iter(ahead), None
        for _ in range(20):
            batch = next(batches)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(50):
            batch = next(batches)
        assert (
            resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            < 50 * batch.rows.nbytes / 4096 / 8
        )


def test_a_draw_takes_no_new_pages_where_malloc_gives_all_back():
    here = os.path.dirname(__file__)
    run = subprocess.run(
        [
            sys.executable,
            '-m',
            'pytest',
            '-q',
            '-p',
            'no:cacheprovider',
            '-n',
            '0',
            __file__,
            '-k',
            'new_pages and not gives_all_back',
        ],
        env=dict(os.environ, MALLOC_MMAP_THRESHOLD_='65536'),
        capture_output=True,
        text=True,
        cwd=here,
    )
    assert ' passed' in run.stdout and run.returncode == 0, run.stdout


def test_a_child_has_its_own():
    a = batch_bytes(LEAST)
    a[:] = 1
    child = os.fork()
    if not child:
        b = batch_bytes(LEAST)
        b[:] = 2
        os._exit(int((a != 1).any()))
    assert os.waitpid(child, 0)[1] == 0 and (a == 1).all()
