"""Stores, samplers and views that people write.

Also links against a plain model, and settings of memories."""

import copy
import pickle
import threading

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.memory.rows import OpenStore, Store
from fastrl_replay.replay.replay import Replay
from fastrl_replay.replay.views import Transitions
from fastrl_replay.steps.row_dtypes import extend_dtype
from fastrl_replay.testing import through_file
from strategies import cases, equal, numpy_leaves, same_memory
from test_timeline import links

PIXELS = step_dtype(Box(0, 255, (3, 3), np.uint8), Discrete(3), logp='f8')
REPLAYS = dict(
    uniform=lambda **kw: ExperienceReplay(None, 3, seed=5, **kw),
    errors=lambda **kw: PrioritizedReplay(None, 3, seed=5, weight_norm='memory', **kw),
    ranks=lambda **kw: PrioritizedReplay(None, 3, kind='rank', seed=5, **kw),
    sequence=lambda **kw: SequenceReplay(None, 2, length=3, burn_in=1, overlap=1, seed=5, **kw),
)


def story(program, dtype=PIXELS, first=1):
    """Return rows of four environments, one step for each byte.

    It goes on, terminates, is truncated, or breaks off; steps count from `first`."""
    rows, rng = np.zeros(len(program), dtype), np.random.default_rng(len(program))
    for a in numpy_leaves(rows):
        a[...] = rng.integers(0, 2 if a.dtype == bool else 4, a.shape)
    now = [[1, first] for _ in range(4)]
    for row, b in zip(rows, program):
        at, what = now[b & 3], b >> 2 & 3
        row['env_id'] = (0, 4000, 7, 300)[b & 3]
        row['episode_n'], row['step_n'] = at
        row['terminated'], row['truncated'] = what == 1, what == 2
        at[1] += 1 + (b >> 4 == 15)
        if what:
            at[:] = at[0] + 1, first
    return rows


def cut(rows, sizes):
    "Blocks of these sizes, and the rest"
    return map(Steps, np.split(rows, np.cumsum(sizes)))


programs = st.binary(min_size=1, max_size=60)
sizes = st.lists(st.integers(0, 20), max_size=8)

# ---- stores ----


class TurnedRows(OpenStore):
    "Rows with their bytes turned round; it only asks its place for an array"

    def __init__(self, dtype, n, place):
        super().__init__(dtype, n, place)
        self.mem = place.new('turned', (n, dtype.itemsize), np.uint8)

    @property
    def nbytes(self):
        return self.mem.nbytes

    def put(self, slots, rows):
        raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
        self.mem[slots] = raw[:, ::-1]

    def gather(self, slots, out, present=-1):
        slots = slots.reshape(-1)
        there = slots >= 0
        turned = self.mem[slots.clip(min=0)][:, ::-1]
        out[:, : self.dtype.itemsize] = np.where(there[:, None], turned, 0)
        if present >= 0:
            out[:, present] = there


class Turned(Store):
    def __init__(self, path=None, *, mode='a', spare=0):
        self.place_at(path, mode=mode, spare=spare)

    def open(self, dtype, n, place):
        return TurnedRows(dtype, n, place)


@pytest.mark.parametrize('make', [Turned, lambda: Rows(device='cpu')], ids=['own', 'device'])
@cases(20)
@given(program=programs, sizes=sizes, max_sz=st.integers(1, 12) | st.just(40), save=st.booleans())
def test_a_store_holds_what_rows_hold(make, program, sizes, max_sz, save):
    plain, line = Timeline(max_sz), Timeline(max_sz, make())
    for i, block in enumerate(cut(story(program), sizes)):
        assert plain.add(block).tolist() == line.add(block).tolist()
        if save:
            fresh = Timeline(max_sz, make())
            fresh.load_state_dict(through_file(line.state_dict()))
            line = fresh
        same_memory(line, plain, i)
    for twin in copy.deepcopy(line), pickle.loads(pickle.dumps(line)):
        twin.add(Steps(story(program)))
        assert line.inserted == len(program)


def test_a_store_of_ones_own_lasts_in_a_directory(tmp_path):
    "It is written, killed, opened again, rewound and read"
    rows = story(bytes(range(60)))
    plain, line = Timeline(10), Timeline(10, Turned(tmp_path, spare=10))
    for memory in plain, line:
        memory.add(Steps(rows[:30]))
    saved = through_file(line.state_dict())
    line.add(Steps(rows[30:35]))
    line.place.leave()
    line = Timeline(10, Turned(tmp_path, spare=10))
    line.load_state_dict(saved)
    equal(line[:], plain[:])
    line.close()
    line = Timeline(10, Turned(tmp_path, spare=10))
    for memory in line, plain:
        memory.add(Steps(rows[30:]))
    equal(line[:], plain[:])
    equal(Timeline(10, Turned(tmp_path, mode='r'))[:], plain[:])


def test_stores_and_samplers_are_templates():
    "Two replays and a timeline of one store and one sampler do not notice each other"
    store, rows, sampler = Turned(), story(bytes(range(60))), Uniform(3)
    a, b = (ExperienceReplay(None, 4, 9, store=store, sampler=sampler) for _ in range(2))
    line = Timeline(20, store)
    a.add(Steps(rows[:10]))
    b.add(Steps(rows[10:30]))
    line.add(Steps(rows))
    equal(a.memory[:], Steps(rows[1:10]))
    equal(b.memory[:], Steps(rows[21:30]))
    equal(line[:], Steps(rows[-20:]))
    assert (b.sample().index - b.memory.oldest).equal(a.sample().index - a.memory.oldest)
    assert len(sampler) == 0


class PickyRows(TurnedRows):
    "It accepts no negative rewards, and fails while it writes a reward of 3"

    def refuse(self, rows):
        if (rows['reward'] < 0).any():
            raise BlockError('Picky', 'reward', 'negative', 'positive')

    def put(self, slots, rows):
        super().put(slots[:1], rows[:1])
        if (rows['reward'] == 3).any():
            raise OSError('the disk is full')
        super().put(slots, rows)


class Picky(Turned):
    def open(self, dtype, n, place):
        return PickyRows(dtype, n, place)


@pytest.mark.parametrize('on_disk', [False, True])
def test_what_a_store_refuses_changes_nothing(on_disk, tmp_path):
    rows = story(bytes(27))
    rows['reward'] = np.where(np.arange(27) < 20, 1, -1)
    line = Timeline(20, Picky(tmp_path / 'm' if on_disk else None))
    with pytest.raises(BlockError, match='Picky: reward; got negative'):
        line.add(Steps(rows[20:]))
    assert line.dtype is None
    line.add(Steps(rows[:20]))
    with pytest.raises(BlockError, match='Picky: reward; got negative'):
        line.add(Steps(rows[20:]))
    assert tuple(line.span) == (20, 0)
    assert (line[:].rows == rows[:20]).all()


@pytest.mark.parametrize('kind', REPLAYS)
@pytest.mark.parametrize('n', [1, 9])
def test_a_store_that_fails_loses_only_rows_that_it_was_overwriting(kind, n):
    rows = story(bytes(6) + b'\1' * 40)
    rows['reward'] = 1
    replay = REPLAYS[kind](max_sz=6, store=Picky())
    replay.add(Steps(rows[:6]))
    replay.add(Steps(rows[6:10]))
    bad = rows[10 : 10 + n].copy()
    bad['reward'][-1] = 3
    with pytest.raises(OSError):
        replay.add(Steps(bad))
    memory, gone = replay.memory, min(n, 6)
    assert memory.inserted == 10
    assert memory.keys.tolist() == [*range(4 + gone, 10)]
    twin = REPLAYS[kind](max_sz=6, store=Picky())
    twin.load_state_dict(through_file(replay.state_dict()))
    for r in replay, twin:
        assert r.add(Steps(rows[10 : 10 + n])).tolist() == [*range(10, 10 + n)]
        equal(r.memory[:], Steps(rows[max(4 + gone, 4 + n) : 10 + n]))
        assert {*r.sample().index.tolist()} <= {*r.memory.keys.tolist()}


# ---- samplers ----


class Rewarded(Sampler):
    "Rows with rewards above 0"

    columns = ('reward',)

    def clear(self):
        super().clear()
        self.found = np.zeros(0, np.int64)

    def added(self, keys, columns=None):
        self.found = np.append(self.found, keys[columns['reward'] > 0])
        super().added(keys)

    def forget(self, oldest):
        super().forget(oldest)
        self.found = self.found[self.found >= self.first]

    def sample(self, n):
        return self.found[np.arange(n) % len(self.found)], 1 / len(self.found)


def test_a_sampler_sees_the_columns_that_it_asks_for():
    replay = ExperienceReplay(None, 1, 20, sampler=Rewarded())
    for block in cut(story(bytes(range(0, 250, 3))), [9, 1, 30, 0, 3]):
        replay.add(block)
        want = replay.memory.keys[replay.memory.reward.numpy() > 0]
        if len(replay) >= 20 and len(want):
            assert {*replay.sample(20).index.tolist()} == {*want.tolist()[:20]}


@pytest.mark.parametrize('how', ['load', 'copy', 'directory'])
@pytest.mark.parametrize('kind', ['uniform', 'sequence'])
def test_a_sampler_without_a_state_hears_of_all_rows_when_it_is_loaded(kind, how, tmp_path):
    "What it knows of their columns is not in a checkpoint, nor in a copy"

    class Updated(Rewarded):
        def update(self, keys, td=None):
            "All rows with rewards are drawn"

    store = Rows(tmp_path) if how == 'directory' else None
    replay = twin = REPLAYS[kind](max_sz=20, sampler=Updated(), store=store)
    for block in cut(story(bytes(range(0, 250, 3))), [25, 1]):
        replay.add(block)
    if how == 'copy':
        twin = copy.deepcopy(replay)
    else:
        if how == 'load':
            twin = REPLAYS[kind](max_sz=20, sampler=Updated())
        twin.load_state_dict(through_file(replay.state_dict()))
    found = replay.memory.keys[replay.memory.reward.numpy() > 0]
    assert twin.sampler.found.tolist() == found.tolist() != []
    replay.close()


def test_an_unknown_column_of_a_sampler_is_refused_before_a_row_is_taken():
    replay = ExperienceReplay(None, 1, 20, sampler=Rewarded())
    replay.sampler.columns = ('reward', 'novelty')
    with pytest.raises(BlockError, match="rows lack column 'novelty' of Rewarded.columns; got mis"):
        replay.add(Steps(story(bytes(9))))
    assert not replay.memory.inserted


def test_a_sampler_that_cannot_serve_is_refused_when_the_replay_is_made():
    with pytest.raises(
        TypeError, match='SequenceReplay: sampler; got Rewarded has no method update'
    ):
        SequenceReplay(None, 2, 100, sampler=Rewarded())
    with pytest.raises(TypeError, match='Sampler has no method sample'):
        ExperienceReplay(None, 2, 100, sampler=Sampler())
    with pytest.raises(TypeError, match='got Rewarded has no method update'):
        PrioritizedReplay(None, 2, 100, sampler=Rewarded(), initial='logp')
    for wrong in Uniform, 'uniform', 5:
        with pytest.raises(TypeError, match='sampler; got .*; expected a Sampler'):
            ExperienceReplay(None, 2, 100, sampler=wrong)


def test_settings_beside_a_sampler():
    "It takes the seed if it has none"

    def drawn(seed, own):
        replay = ExperienceReplay(None, 8, 60, seed=seed, sampler=Uniform(own))
        replay.add(Steps(story(bytes(50))))
        return replay.sample().index.tolist()

    assert drawn(3, None) == drawn(None, 3)
    assert drawn(3, 4) == drawn(5, 4) != drawn(3, None)


# ---- views ----


class NStepView(Transitions):
    "Sums of up to `n` rewards along the episode"

    adds = dict(index='i8', weight='f4', discount='f4')

    def __init__(self, n, gamma):
        self.n, self.gamma = n, gamma

    def batch(self, keys, weights):
        steps = self.memory.walk(keys, range(self.n))
        there = steps >= 0
        rows = self.memory.take(np.where(there, steps, keys[:, None])).rows
        out = np.zeros(len(keys), extend_dtype(self.memory.dtype, **self.adds))
        for name in self.memory.dtype.names:
            out[name] = rows[name][:, 0]
        out['next_state'] = rows['next_state'][np.arange(len(keys)), there.sum(1) - 1]
        out['reward'] = (rows['reward'] * there * self.gamma ** np.arange(self.n)).sum(1)
        out['discount'] = self.gamma ** there.sum(1)
        out['index'], out['weight'] = keys, weights
        return Steps(out)


def test_a_view_of_ones_own_makes_batches():
    "n-step returns, compared with plain loops over the rows; errors come back"
    rows = story(np.random.default_rng(1).bytes(90))
    rows['reward'] = np.arange(90) % 11
    sampler = Proportional(40, alpha=1, seed=0)
    replay = Replay(None, 16, 40, sampler=sampler, view=NStepView(3, 0.5), store=Turned())
    for block in cut(rows, [30, 5, 2, 41]):
        replay.add(block)
        batch = replay.sample()
        batch.update_priorities(batch.reward)
        after = links(rows[: replay.memory.inserted], 40, 0)[0]
        for b in batch.rows:
            way = [int(b['index'])]
            while way[-1] in after and len(way) < 3:
                way.append(after[way[-1]])
            assert b['reward'] == sum(0.5**t * float(r) for t, r in enumerate(rows['reward'][way]))
            assert b['discount'] == 0.5 ** len(way)
            assert (b['next_state'] == rows['next_state'][way[-1]]).all()


def test_columns_of_a_view_are_refused_in_rows():
    replay = Replay(None, 2, 9, sampler=Uniform(), view=NStepView(3, 0.5))
    with pytest.raises(
        BlockError, match="column 'discount' has the name of a column that batches add"
    ):
        replay.add(Steps(np.zeros(3, extend_dtype(PIXELS, discount='f8'))))


def test_environment_numbers_have_two_ends():
    rows = story(b'\0\1' * 10)
    rows['env_id'] = [0, 2**24 - 1] * 10
    line = Timeline(7)
    line.add(Steps(rows))
    assert line.walk([15, 16], [1, -1]).tolist() == [[17, 13], [18, 14]]


# ---- threads ----


class Small(Frames):
    "Frames of a few bytes count, in short segments"

    least, smallest_segment = 1, 2


THREADED = dict(
    rows=lambda path: Rows(),
    disk=lambda path: Rows(path / 'm'),
    packed=lambda path: Small(1, 'zstd'),
    device=lambda path: Small(3, device='cpu'),
)


@pytest.mark.parametrize('store', THREADED)
@pytest.mark.parametrize('kind', ['errors', 'sequence'])
def test_threads_add_draw_and_save(kind, store, tmp_path):
    "All rows are whole, and every key is given out once"
    replay = REPLAYS[kind](max_sz=300, store=THREADED[store](tmp_path))
    n, keys, errors = 40, [], []

    def adds(env):
        for i in range(n):
            rows = np.zeros(5, PIXELS)
            rows['env_id'], rows['episode_n'] = env, 1
            rows['step_n'] = np.arange(5 * i, 5 * i + 5) + 1
            rows['total_reward'] = env * 1e4 + rows['step_n']
            rows['state'] = rows['step_n'][:, None, None] + env
            keys.extend(replay.add(Steps(rows)).tolist())

    def draws():
        for i in range(n):
            try:
                batch = replay.sample()
            except NotEnoughRows:
                continue
            rows = batch.to('cpu').rows
            rows = rows if kind == 'errors' else rows[rows['mask']]
            assert (rows['total_reward'] == rows['env_id'] * 1e4 + rows['step_n']).all()
            assert (rows['state'][:, 0, 0] == rows['step_n'] + rows['env_id']).all()
            batch.update_priorities(np.ones(3 if kind == 'errors' else (2, 2)))
            if i % 10 == 0:
                replay.stats()
                replay.state_dict()

    def run(work, *args):
        try:
            work(*args)
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(adds, env)) for env in range(3)]
    threads += [threading.Thread(target=run, args=(draws,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(keys) == [*range(15 * n)]


# ---- settings of memories ----


@pytest.mark.parametrize('kind', ['errors', 'sequence'])
def test_errors_by_returned_keys_reach_the_rows_that_were_drawn(kind):
    "`return_idxs` gives the keys as an array"
    replay = REPLAYS[kind](max_sz=20, return_idxs=True, alpha=1.0, eps=0.0, stratified=False)
    rows = Steps(story(bytes(4 * i % 256 & 0xF3 for i in range(60))))
    replay.add(rows[:50])
    batch, keys = replay.sample()
    replay.add(rows[50:52])
    td = np.zeros(batch.train.shape if kind == 'sequence' else len(batch))
    td[-1] = 1e9
    replay.update_priorities(keys, td)
    assert replay.sample(1)[0].index.tolist() == batch.index[-1:].tolist()
    assert replay.stats()['stale'] == int((batch.index < replay.memory.oldest).sum())


def test_a_memory_that_can_never_fill_a_batch_is_an_error():
    "Eight environments with long episodes, in a memory that can't hold a sequence of any of them"

    def lives(n):
        rows = np.zeros((n, 8), PIXELS)
        rows['env_id'], rows['episode_n'] = np.arange(8), 1
        rows['step_n'] = np.arange(1, n + 1)[:, None]
        return map(Steps, rows)

    options = dict(bs=2, length=9, burn_in=0, overlap=0)
    with pytest.raises(
        NotEnoughRows, match='too few .* for a batch; .*Remedy: use a larger max_sz'
    ):
        next(iter(SequenceReplay(lives(200), max_sz=64, **options)))
    assert len(list(SequenceReplay(lives(30), max_sz=80, **options))) == 6


def test_bytes_between_columns_do_not_go_into_checkpoints():
    "Rows may lie in memory that held something else before"
    dtype = step_dtype(Box(-9, 9, (3,), np.float32), Discrete(3), flag='?', note='i8')
    rows = np.frombuffer(bytearray([0xAB]) * 9 * dtype.itemsize, dtype)
    for name in dtype.names:
        rows[name] = 0
    rows['step_n'], rows['episode_n'] = np.arange(1, 10), 1
    assert b'\xab\xab' in rows.tobytes()
    for kind in 'uniform', 'sequence':
        replay = REPLAYS[kind](max_sz=20)
        replay.add(Steps(rows))
        assert b'\xab\xab' not in pickle.dumps(through_file(replay.state_dict()))
