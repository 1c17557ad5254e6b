"""Batches that travel packed: what arrives is what a shard would have made, whoever unpacks it, and what has frames elsewhere is made there."""

import pickle
from itertools import islice
from threading import current_thread

import numpy as np, pytest
from gymnasium import spaces

from fastrl_replay.all import *
from fastrl_replay.memory.frames import PackedBatch, unpacked
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


def waiting(pipe):
    return {
        type(item)
        for chunk in [*(c for w in pipe._workers for c in w.chunks), pipe._now]
        if chunk
        for item in chunk['items']
    }


@pytest.mark.parametrize('engine', ENGINES, indirect=True)
@pytest.mark.parametrize('compress', [None, 'lz4', pytest.param('zstd', marks=pytest.mark.slow)])
def test_the_same_batches(engine, compress):
    "As from shards that make them; the second one of a chunk waits packed, where frames are"
    with (
        shards(Frames(4, compress), engine=engine) as pipe,
        shards(Frames(4, compress), made=True, engine=engine) as plain,
    ):
        [first] = some(pipe, 1)
        assert waiting(pipe) == {PackedBatch if compress else Steps} and type(first) is Steps
        assert [first, *some(pipe, 15)] == some(plain, 16)
        assert pipe.stats()['stale'] == 0


def test_on_disk(tmp_path):
    with (
        shards(Frames(4, 'lz4', path=tmp_path / 'a')) as pipe,
        shards(Frames(4, 'lz4', path=tmp_path / 'b'), made=True) as plain,
    ):
        assert some(pipe) == some(plain)


def test_prefetch_unpacks_in_its_thread(monkeypatch):
    threads = []

    def noted(item):
        threads.append(current_thread().name)
        return unpacked(item)

    from fastrl_replay.parallel import stage

    monkeypatch.setattr(stage, 'unpacked', noted)
    with (
        shards(Frames(4, 'lz4')).prefetch(2) as pipe,
        shards(Frames(4, 'lz4'), made=True).prefetch(2) as plain,
    ):
        seen = some(pipe)
        assert {*threads} == {'prefetch'} and len(threads) >= 16
        assert seen == some(plain)


def test_a_checkpoint_has_them_unpacked():
    with shards(Frames(4, 'lz4')) as pipe:
        some(pipe, 5)
        assert waiting(pipe) == {PackedBatch}
        state = through_file(pipe.state_dict())
        want = some(pipe, 8)
    with shards(Frames(4, 'lz4')) as again:
        again.load_state_dict(state)
        assert some(again, 8) == want


@pytest.mark.parametrize('ahead', [False, True])
def test_an_interrupt_while_it_is_unpacked_loses_nothing(monkeypatch, ahead):
    with shards(Frames(4, 'lz4')) as plain:
        want = [*islice(plain, 8)]
    with shards(Frames(4, 'lz4')) as pipe:

        def items():
            return pipe if not ahead else (pipe.sample() for _ in pipe.due_batches())

        seen, real, again = [], PackedBatch.unpacked, True

        def once(self):
            nonlocal again
            again = not again
            if not again:
                raise KeyboardInterrupt
            return real(self)

        monkeypatch.setattr(PackedBatch, 'unpacked', once)
        while len(seen) < 8:
            try:
                for batch in items():
                    seen.append(batch)
                    if len(seen) == 8:
                        break
            except KeyboardInterrupt:
                pass
        assert seen == want


def test_rows_of_several_kinds_of_frames():
    "Of odd sizes, with parts that are no frames, in rows that come in any order; what is damaged on the way is an error"
    space = spaces.Dict(
        camera=spaces.Box(0, 255, (2, 9, 9), np.uint8),
        depth=spaces.Box(0, 1, (7, 5), np.float32),
        speed=spaces.Box(-1, 1, (3,)),
    )
    rng, rows = (
        np.random.default_rng(0),
        np.zeros(1500, step_dtype(space, spaces.Discrete(3), discount='f4')),
    )
    shown = rng.integers(0, 4, (1501, 9, 9)).repeat(2, 0).reshape(1501, 2, 9, 9)
    for part, first in ('state', 0), ('next_state', 1):
        rows[part]['camera'], rows[part]['depth'] = (
            shown[first : first + 1500],
            np.arange(first, first + 1500)[:, None, None] % 17 / 17,
        )
        rows[part]['speed'] = rng.uniform(-1, 1, (1500, 3))
    rows['step_n'], rows['episode_n'], rows['discount'] = np.arange(1, 1501), 1, rng.random(1500)
    memory = Timeline(1200, Frames(compress='zstd'))
    for i in range(0, 1500, 25):
        memory.add(Steps(rows[i : i + 25]))
    for log in memory.parts[1]._logs:
        log.take_packed(wait=True)
    keys, weights = rng.integers(300, 1500, 64), rng.random(64)
    packed = memory.batch(keys, weights, packed=True)
    assert isinstance(packed, PackedBatch) and len(packed._beside.frames) == 2
    assert unpacked(pickle.loads(pickle.dumps(packed))) == memory.batch(keys, weights)
    assert (memory.times_drawn.sum()) == 128
    some = packed._beside.frames[0]
    for bad in (
        some._replace(bytes=some.bytes[:-1]),
        some._replace(lengths=some.lengths[:-1]),
        some._replace(size=some.size + 1),
    ):
        with pytest.raises(Exception):
            PackedBatch(
                packed.rows, packed._beside._replace(frames=[bad, packed._beside.frames[1]])
            ).unpacked()


class Looks(PrioritizedReplay):
    "Looks at what it has drawn"

    def sample(self, bs=None):
        batch = super().sample(bs)
        assert batch.state.shape[1:] == (4, 84, 84)
        return batch


@pytest.mark.parametrize(
    'make',
    [
        Looks,
        lambda *args, **kw: PrioritizedReplay(*args, return_idxs=True, **kw),
        lambda *args, **kw: SequenceReplay(*args, length=4, burn_in=1, overlap=2, **kw),
    ],
    ids=['own sample', 'with places', 'sequences'],
)
def test_what_needs_its_frames_makes_them(make):
    with make(Pictures(2), 4, 100, store=Frames(4, 'lz4'), seed=0).parallel(
        1, chunk=2, **FORK
    ) as pipe:
        for item in islice(pipe, 6):
            assert type(item[0] if isinstance(item, tuple) else item).__name__ in (
                'Steps',
                'Sequences',
            )
        assert PackedBatch not in waiting(pipe)


def test_other_replays_of_a_process_are_as_they_were():
    "The template of views is that of all"
    one, other = (
        PrioritizedReplay(Pictures(2), 4, 100, store=Frames(4, 'lz4'), seed=0) for _ in range(2)
    )
    one.send_packed()
    assert (type(next(iter(one))), type(next(iter(other)))) == (PackedBatch, Steps)
    one.clear()
    assert type(next(iter(one))) is PackedBatch
