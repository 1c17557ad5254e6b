"""Batches that travel packed: what arrives is what a shard would have made, whoever unpacks it, and what has frames elsewhere is made there."""

import itertools
from itertools import islice

import numpy as np, pytest
from gymnasium import spaces

from fastrl_replay.all import *
from fastrl_replay.memory.frames import PackedBatch
from fastrl_replay.testing import through_file
from test_ray import ENGINES, ON_RAY, cluster, engine, ray  # noqa: F401
from workers import FORK, no_process_is_left  # noqa: F401


class Pictures(Pipe):
    "Endless blocks of rows with stacks of pictures, in episodes of 200 steps"

    steps_envs = True

    def __init__(self, envs):
        super().__init__(None)
        self.rows = np.zeros(
            envs, step_dtype(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6))
        )
        self.rows['env_id'] = np.arange(envs)

    def _in_worker(self, info):
        self.rows['env_id'] += info.rank * len(self.rows)

    def __iter__(self):
        frames = np.random.default_rng(0).integers(0, 4, (204, 84, 84), np.uint8) * 60
        frames[:, :60] = 0
        k = 0
        while True:
            t, rows = k % 200, self.rows.copy()
            rows['state'], rows['next_state'] = frames[t : t + 4], frames[t + 1 : t + 5]
            rows['step_n'], rows['episode_n'], rows['reward'], rows['truncated'] = (
                t + 1,
                k // 200 + 1,
                t,
                t == 199,
            )
            k += 1
            yield Steps(rows)


class Made(Pipe):
    "After a replay: batches are made before they travel"

    takes_any_item = True

    def __iter__(self):
        yield from self.source


def shards(store, made=False, n=2, engine=FORK, **kw):
    replay = PrioritizedReplay(Pictures(2), bs=6, max_sz=300, warmup=280, store=store, seed=0)
    return (Made(replay) if made else replay).parallel(n, chunk=2, **engine, **kw)


def some(pipe, n=16):
    "So many batches, each of which is answered"
    seen = []
    for batch in islice(pipe, n):
        batch.update_priorities(1 + (batch.index % 7).double())
        seen.append(batch)
    return seen


@pytest.mark.parametrize('engine', ENGINES, indirect=True)
@pytest.mark.parametrize('compress', [None, 'lz4'])
def test_batches_are_those_of_shards_that_make_them(engine, compress):
    with (
        shards(Frames(4, compress), engine=engine) as pipe,
        shards(Frames(4, compress), made=True, engine=engine) as plain,
    ):
        assert some(pipe) == some(plain)
        assert pipe.stats()['stale'] == 0


def test_on_disk_and_prefetched(tmp_path):
    with (
        shards(Frames(4, 'lz4', path=tmp_path / 'a')).prefetch(2) as pipe,
        shards(Frames(4, 'lz4', path=tmp_path / 'b'), made=True).prefetch(2) as plain,
    ):
        assert some(pipe) == some(plain)


def test_a_checkpoint_has_what_waits():
    with shards(Frames(4, 'lz4')) as pipe:
        some(pipe, 5)
        state = through_file(pipe.state_dict())
        want = some(pipe, 8)
    with shards(Frames(4, 'lz4')) as again:
        again.load_state_dict(state)
        assert some(again, 8) == want


def test_an_interrupt_while_it_is_unpacked_loses_nothing(monkeypatch):
    with shards(Frames(4, 'lz4')) as plain:
        want = [*islice(plain, 8)]
    real, calls = PackedBatch.unpacked, itertools.count()

    def every_second_time(self):
        if next(calls) % 2 == 0:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(PackedBatch, 'unpacked', every_second_time)
    with shards(Frames(4, 'lz4')) as pipe:
        seen = []
        while len(seen) < 8:
            try:
                seen += islice(pipe, 1)
            except KeyboardInterrupt:
                pass
    assert seen == want


def test_sequences_of_frames_are_made_in_their_shard():
    replay = SequenceReplay(
        Pictures(2), 4, 100, length=4, burn_in=1, overlap=2, store=Frames(4, 'lz4'), seed=0
    )
    with replay.parallel(1, chunk=2, **FORK) as pipe:
        for batch in islice(pipe, 6):
            assert isinstance(batch, Sequences)
            assert batch.state.shape == (4, 4, 4, 84, 84)
