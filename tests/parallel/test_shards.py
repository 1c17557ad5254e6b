"""Shards: batches from workers answer with errors as those of a local replay do, and their weights are right."""

import json, math, os, re, shutil, signal, subprocess, sys, tempfile, time, warnings
from itertools import islice
from pathlib import Path

import gymnasium as gym, numpy as np, pytest, torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from fastrl_replay.look.sample import samples_of
from fastrl_replay.all import *
from fastrl_replay.testing import through_file
from workers import FORK, learns_the_same, no_process_is_left, short, zeros  # noqa: F401

BOX, TWO = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Discrete(2)


def priorities(replay):
    "Of all rows, as the sampler has them"
    return replay.sampler.tree[np.arange(len(replay)) % replay.max_sz]


class Looks(Pipe):
    "Batches with the priorities of the rows of their shard, as they were when they were drawn"

    takes_any_item = True

    def __iter__(self):
        for batch in self.source:
            yield batch, torch.tensor(priorities(self.source))


def sharded(n=2, chunk=1, bs=4, max_sz=40, looks=True, kind='prioritized', env=short, **kw):
    pipe = GymStepper(env, zeros, seed=0)
    keys = ('ahead', 'ordered', 'restarts', 'engine')
    above = {k: kw.pop(k) for k in [*kw] if k in keys}
    if kind == 'prioritized':
        pipe = pipe.prioritized_replay(
            bs=bs, max_sz=max_sz, seed=0, **{**dict(alpha=1, eps=0), **kw}
        )
    else:
        pipe = pipe.sequence_replay(
            bs=bs, max_sz=max_sz, length=4, burn_in=1, overlap=2, seed=0, **kw
        )
    if looks:
        pipe = Looks(pipe)
    return pipe.parallel(n, chunk=chunk, **FORK, **above)


# ---- feedback ----


def test_errors_reach_the_rows_that_they_are_for():
    "Each row's error is its key and its shard: all that was told is found with the rows, and with no others"
    pipe, told = sharded(chunk=2), {}
    for i, (batch, p) in enumerate(islice(pipe, 24)):
        shard = int(batch.index[0]) % 2
        assert i // 2 % 2 == shard and (batch.index % 2 == shard).all()
        here = {k // 2: v for k, v in told.items() if k % 2 == shard}
        found = [here[k] for k in here if abs(p[k] - here[k]) < 1e-9]
        assert len(found) >= len(here) - 16  # all but what is on its way: the last four batches
        td = batch.index.double() + 10
        batch.update_priorities(td)
        told |= dict(zip(batch.index.tolist(), td.tolist()))
    pipe.close()


@pytest.mark.parametrize('kind', ['prioritized', pytest.param('sequences', marks=pytest.mark.slow)])
def test_as_a_local_replay(kind):
    "One worker gives the batches of a replay here that is told the same, each of it after one more batch"

    def errors(batch):
        shape = batch.train.shape if kind == 'sequences' else len(batch)
        return torch.rand(shape, generator=torch.Generator().manual_seed(int(batch.index.sum())))

    pipe, here = (sharded(n, kind=kind, looks=False) for n in (1, 0))
    mine, same, late = [], [], []
    for batch in islice(pipe, 25):
        mine.append((batch.index.tolist(), batch.weight.tolist()))
        batch.update_priorities(errors(batch))
    pipe.close()
    for batch in islice(here, 25):
        same.append((batch.index.tolist(), batch.weight.tolist()))
        late.append(batch)
        if len(late) == 2:
            late[0].update_priorities(errors(late.pop(0)))
    assert mine == same


def test_any_form_of_a_batch_answers():
    "Slices, copies, one row, batches that were joined, late ones and twice"
    pipe = sharded(looks=False)
    a, b, c = islice(pipe, 3)
    for batch, td in [
        (a[:2], [1, 2]),
        (a[torch.tensor([True, False, False, True])], [3, 4]),
        (b.copy(), [5, 6, 7, 8]),
        (Steps.cat([a, b]), range(8)),
        (c[1], 2.0),
        (c, torch.ones(4, dtype=torch.bfloat16)),
        (a, np.ones((4, 1), np.float32)),
        (a, torch.ones(4, requires_grad=True)),
    ]:
        batch.update_priorities(td)
    pipe.update_priorities([], [])
    assert [len(w.told) for w in pipe._workers] == [7, 2]
    list(islice(pipe, 4))
    assert pipe.stats()['stale'] == 0
    pipe.close()


def test_what_is_told_is_copied():
    "The learner may go on with its tensor"
    pipe = sharded()
    it = iter(pipe)
    batch, _ = next(it)
    td = torch.full((4,), 7.0, dtype=torch.float64)
    batch.update_priorities(td)
    td.zero_()
    seen = [p for b, p in islice(it, 5) if int(b.index[0]) % 2 == 0]
    assert all((seen[-1][batch.index // 2] == 7).tolist())
    pipe.close()


def test_wrong_feedback_is_refused_here():
    pipe = sharded(looks=False)
    batch = next(iter(pipe))
    for td in [1.0, 2.0], [np.nan] * 4, [1, 2, 3, np.inf]:
        with pytest.raises(ArgumentError, match='Parallel: .*TD error'):
            batch.update_priorities(td)
    for key in -1, 10**6:
        with pytest.raises(StaleKey, match='never given out'):
            pipe.update_priorities([key], [1.0])
    assert not any(w.told for w in pipe._workers)
    pipe.close()


WRONG = {  # errors for four rows, or four sequences: what is said of them
    'prioritized': {
        'two of each': (torch.ones(4, 2), 'got 8; expected 4, one for each key'),
        'three': ([1.0, 2.0, 3.0], 'got 3; expected 4, one for each key'),
        'no number, in a column': (
            [[1], [2], [np.nan], [4]],
            'TD error at place 2, for key .*; got nan; expected a finite number',
        ),
    },
    'sequences': {
        'one of each': (
            torch.ones(4),
            r'got \[4\]; expected \[4, 3\]: one for each step after the burn-in. Remedy: those of `batch.train`',
        ),
        'also of the burn-in': (torch.ones(4, 4), r'got \[4, 4\]; expected \[4, 3\]'),
        'three': (torch.ones(3, 3), r'got \[3, 3\]; expected \[4, …\]: as many as keys'),
    },
}
KINDS = {
    'complex': (
        torch.ones(4) * 1j,
        'got complex64; expected real numbers. Remedy: a tensor or an array of floats',
    ),
    'words': (['a'] * 4, 'got <U1; expected real numbers'),
    'objects': ([{}] * 4, r'got array\(\[\{\}, \{\}.*; expected real numbers'),
    'of several lengths': (
        [[1], [2, 3], [4], [5]],
        r'got \[\[1\], \[2, 3\].*; expected real numbers',
    ),
}


@pytest.mark.parametrize('kind', ['prioritized', 'sequences'])
def test_errors_that_no_shard_would_take_are_refused_here(kind):
    "Of another shape or dtype: at once, by the stage that was told, and no shard has been told anything; the run goes on"
    with sharded(kind=kind, looks=False) as pipe:
        batch = next(iter(pipe))
        for td, said in (WRONG[kind] | KINDS).values():
            with pytest.raises((ArgumentError, ArgumentTypeError), match=f'Parallel: .*{said}'):
                batch.update_priorities(td)
        with pytest.raises(
            ArgumentTypeError, match='Parallel: keys; got float32; expected integers'
        ):
            pipe.update_priorities(batch.index.float(), torch.ones(4))
        assert not any(w.told for w in pipe._workers) and pipe.stats()['stale'] == 0
        for b in islice(pipe, 8):
            b.update_priorities(torch.ones(b.train.shape if kind == 'sequences' else 4))


@pytest.mark.slow
def test_wrong_feedback_that_only_a_shard_knows_ends_the_run():
    "And no shard is restarted for it: the second row of an episode is the key of no sequence"
    pipe = sharded(kind='sequences', looks=False, restarts=5)
    next(iter(pipe))
    pipe.update_priorities([2], torch.ones(1, 3))
    with pytest.raises(WorkerError, match='key 1 is not the key of a sequence that was drawn'):
        list(islice(pipe, 8))
    assert pipe.restarted == 0


def test_a_sample_before_any_batch_was_received_says_so():
    "As other replays do; a loop, or a prefetch, gets what workers have drawn"
    with sharded(looks=False) as pipe:
        with pytest.raises(
            NotEnoughRows, match='Parallel: sample: .*got none; expected one. Remedy: iterate'
        ):
            pipe.sample()
        due = pipe.due_batches()
        next(due)
        assert len(pipe.sample()) == 4
        with pytest.raises(NotEnoughRows):
            pipe.sample()


def test_feedback_never_waits():
    "Far more than a pipe holds, for a shard that is busy; all of it arrives"
    pipe = sharded(looks=False, bs=40, ahead=8)
    it = iter(pipe)
    batch = next(it)
    for i in range(4000):
        batch.update_priorities(torch.full((40,), float(i)))
    list(islice(it, 12))
    pipe.close()


@pytest.mark.slow
def test_learners_and_prefetch_follow():
    "A DQN after two shards, whose batches are brought ahead: the same losses each time, also from a checkpoint"

    def chain():
        torch.manual_seed(0)
        net = value_net(BOX, TWO, [16])
        return (
            GymStepper(['CartPole-v1'] * 2, EpsGreedy(net, 0.2, seed=0), seed=0)
            .n_step(3, 0.99)
            .prioritized_replay(bs=8, max_sz=100, seed=0)
            .parallel(2, chunk=2, **FORK)
            .prefetch(2)
            .dqn(net)
        )

    learns_the_same(chain, 15, 15)


def test_restored_shards_go_on():
    "Priorities, weights and keys included, wherever they were saved"

    def run(pipe, n):
        found = []
        for batch in islice(pipe, n):
            batch.update_priorities(batch.index.double() * (1 + batch.index % 2 * 9) + 1)
            found.append((batch.index.tolist(), batch.weight.tolist()))
        return found

    for k in 0, 3:
        a, b = (sharded(looks=False, chunk=2, beta=0.5) for _ in range(2))
        run(a, k)
        b.load_state_dict(through_file(a.state_dict()))
        assert run(a, 16) == run(b, 16)
        a.close()
        b.close()


# ---- rates ----


@pytest.mark.parametrize(
    'ratio, ordered, envs',
    [(0.5, True, 2), (0.2, False, 3), pytest.param(2.5, False, 1, marks=pytest.mark.slow)],
)
def test_ratio_over_all_shards(ratio, ordered, envs):
    "Batches handed on are ratio times the rows beyond the warm-up, less at most a block's batches and a chunk of each shard; always"
    pipe = (
        GymStepper([short] * envs, lambda s: [0] * len(s), seed=0)
        .prioritized_replay(bs=4, max_sz=40, ratio=ratio, warmup=10, seed=0)
        .parallel(3, chunk=2, ordered=ordered, ahead=12, **FORK)
    )
    bound = 3 * (ratio * envs + 2)
    for i, batch in enumerate(islice(pipe, 150), 1):
        stats = pipe.stats()
        owed = ratio * stats['rows_counted'] - i
        assert stats['items'] == i and 0 <= owed <= bound, (i, owed, bound)
        assert stats['rows_in'] >= stats['rows_counted'] and stats['rows'] <= 120
    assert stats['rows_counted'] == stats['rows_in'] - 30 and stats['rows'] == min(
        120, sum(min(40, w['rows_in']) for w in stats['workers'])
    )
    pipe.close()


def test_the_line_of_each_shard():
    "What is seen of each, and where the learner waits"
    pipe = sharded(looks=False, ahead=16, chunk=2)  # four chunks of each may be under way
    it = iter(pipe)
    for batch in islice(it, 12):
        batch.update_priorities([1.0] * 4)
    for batch in islice(it, 4):
        pass
    after = pipe.stats()
    pipe.close()
    lines = after['workers']
    assert [w['items'] for w in lines] == [8, 8] and after['waiting'] == sum(
        w['waiting'] for w in lines
    ) == 0
    for k in 'rows', 'rows_in', 'rows_counted', 'lost':
        assert after[k] == sum(w[k] for w in lines)
    assert all(
        w['rows_in'] >= 8 and w['weights_age'] <= after['lag_bound'] and 0 < w['row_age'] < 40
        for w in lines
    )
    slow = (
        GymStepper(lambda: Slow(**script(3, -2)), zeros)
        .prioritized_replay(bs=2, max_sz=40, seed=0)
        .parallel(1, chunk=1, **FORK)
    )
    list(islice(slow, 6))
    stats = slow.stats()
    slow.close()
    assert stats['waited_s'] > 0.2  # the learner is too fast
    assert (
        stats['rows_in'] >= 6 and stats['seconds'] >= stats['waited_s']
    )  # also of one that is alone


# ---- weights ----


class Memory(Pipe):
    "A shard whose rows are there from the start: shard s has as many as `sizes[s]`, each with its number and an error"

    draws_batches = True

    def __init__(self, source, sizes, errors, **kw):
        super().__init__(source)
        self.sizes, self.errors, self.kw = sizes, errors, kw

    def _in_worker(self, info):
        first = sum(self.sizes[: info.rank])
        self.replay = filled(range(first, first + self.sizes[info.rank]), self.errors, self.kw)
        self.replay._in_worker(info)

    def __iter__(self):
        for batch in self.replay:
            batch._replay = self
            yield batch

    def facts(self, batch):
        return self.replay.facts(batch)

    def update_priorities(self, keys, td):
        self.replay.update_priorities(keys, td)


def filled(numbers, errors, kw):
    block = Steps.cat([*scripted_steps([script(50)], len(numbers))])
    block.rows['reward'] = [*numbers]
    replay = PrioritizedReplay(None, **{**dict(bs=4, max_sz=64, alpha=1, eps=0, seed=0), **kw})
    replay.add(block)
    replay.update_priorities(np.arange(len(numbers)), np.asarray(errors, float)[[*numbers]])
    return replay


SIZES, ERRORS = (4, 12), [1, 2, 3, 6] + [40] * 6 + [0.5] * 6  # 12 and 243


def drawn(n, sizes=SIZES, errors=ERRORS, ordered=True, **kw):
    pipe = Memory(GymStepper('CartPole-v1'), sizes, errors, **kw).parallel(
        len(sizes), chunk=4, ordered=ordered, **FORK
    )
    batches = [*islice(pipe, n)]
    pipe.close()
    return batches


@pytest.mark.parametrize(
    'beta, weight_norm',
    [
        (1.0, 'memory'),
        (0.5, 'batch'),
        pytest.param(1.0, 'batch', marks=pytest.mark.slow),
        pytest.param(0.5, 'memory', marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_all_rows(beta, weight_norm):
    "Each weight is (q)**-β for the probability q that it was drawn with, up to one factor; and so the weighted mean is that of all rows"
    batches = drawn(2000, beta=beta, weight_norm=weight_norm)
    errors, own = np.array(ERRORS), np.repeat([sum(ERRORS[:4]), sum(ERRORS[4:])], SIZES)
    q = errors / own / 2
    all = Steps.cat(batches)
    rows, weight = all.reward.long().numpy(), all.weight.double().numpy()
    counts = np.bincount(rows, minlength=16) / len(rows)
    assert np.abs(counts - q).max() < 0.008 and np.abs(counts - q).sum() < 0.03
    factor = weight * q[rows] ** beta
    if weight_norm == 'memory':
        np.testing.assert_allclose(factor, factor[0], rtol=1e-4)
        if (q.min(), beta) == (q[rows].min(), 1):
            np.testing.assert_allclose(weight.max(), 1, rtol=1e-4)
    else:
        for b in range(2, 2000):  # the largest of the last batches of both is 1
            assert weight[4 * b : 4 * b + 4].max() <= 1 + 1e-6
        f = factor.reshape(-1, 4)
        np.testing.assert_allclose(f, np.repeat(f[:, :1], 4, 1), rtol=1e-4)
    if beta == 1 and weight_norm == 'memory':
        off = weight * (
            rows - 7.5
        )  # the weighted mean less that of all rows, in units of its standard error
        assert abs(off.sum()) / np.sqrt((off**2).sum()) < 4


def test_shards_draw_different_numbers():
    "Though they have one seed"
    a, *_, b = drawn(5, (10, 10), [1] * 20)
    assert (a.reward % 10).tolist() != (b.reward % 10).tolist()


# ---- shards of shards, and their weights ----


class Version(nn.Module):
    "Says with each row which version of the weights it was made with"

    def __init__(self):
        super().__init__()
        self.version = nn.Parameter(torch.zeros(()))

    def forward(self, state):
        return dict(action=[0] * len(state), version=self.version.expand(len(state)))


def test_weights_reach_actors_of_shards():
    "Four actors of two shards: other environments and episodes each, and weights of a bounded age, counted in batches"
    policy = Version()
    pipe = (
        GymStepper('CartPole-v1', policy, seed=0)
        .parallel(2, chunk=1, **FORK)
        .experience_replay(bs=4, max_sz=4, seed=0)
        .parallel(2, chunk=1, **FORK)
    )  # a small memory: rows of the last blocks
    envs, ages, starts = set(), [], {}
    for i, batch in enumerate(islice(pipe, 60)):
        envs |= {*batch.env_id.tolist()}
        for b in batch:
            if b.step_n == 1:
                starts[int(b.env_id)] = b.state.tolist()
        newest = float(batch.version.max())
        if i > 10:
            ages.append(i - newest)
        with torch.no_grad():
            policy.version += 1
    assert envs == {0, 1, 2, 3} and len({str(s) for s in starts.values()}) == len(starts) >= 3
    outer, inner = (
        pipe.stats()['lag_bound'],
        2,
    )  # an inner block waits for two others, each of which is two batches here
    assert max(ages) <= outer + 2 * inner + 2, (max(ages), outer)
    assert max(ages) > outer - 2  # and not much younger
    pipe.close()


# ---- faults ----


def test_a_shard_that_is_killed():
    "It is restarted empty; the other one goes on; what is told of lost rows is stale; keys are never given out twice"
    pipe, seen, old = sharded(looks=False, restarts=9), {}, []
    with pytest.warns(
        RuntimeWarning,
        match=r'worker 1 of 2 failed, restart 1 of 9, \d+ rows of its memory are lost',
    ):
        for i, batch in enumerate(islice(pipe, 60)):
            for k, s in zip(
                batch.index.tolist(), zip(batch.episode_n.tolist(), batch.step_n.tolist())
            ):
                assert seen.setdefault(k, (i > 40, s))[1] == s
            if i < 20:
                old.append(batch)
            if i == 20:
                os.kill(pipe._workers[1].process.pid, signal.SIGKILL)
            if i == 50:
                for b in old:
                    b.update_priorities([1.0] * 4)
            batch.update_priorities([2.0] * 4)
    stats = pipe.stats()
    assert stats['restarts'] == 1 and stats['lost'] > 0 and stats['stale'] >= 40
    pipe.close()


def test_shards_on_disk_come_back_with_their_rows(tmp_path):
    "Each in its directory; after a kill, and in another run"

    def chain():
        return (
            GymStepper('CartPole-v1', seed=0)
            .prioritized_replay(bs=4, max_sz=100, seed=0, store=Rows(tmp_path / 'm'))
            .parallel(2, chunk=1, restarts=3, **FORK)
        )

    pipe = chain()
    list(islice(pipe, 40))
    rows = [w.facts['rows'] for w in pipe._workers]
    assert (
        sorted(p.name for p in (tmp_path / 'm').iterdir()) == ['shard-0', 'shard-1']
        and min(rows) >= 20
    )
    os.kill(pipe._workers[1].process.pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match='worker 1 of 2 failed, restart 1 of 3; got'):
        list(islice(pipe, 8))
    assert pipe._workers[1].facts['rows'] >= rows[1] and pipe.stats()['lost'] == 0
    pipe.close()
    again = chain()
    list(islice(again, 2))
    assert [w.facts['rows'] > r for w, r in zip(again._workers, rows)] == [True, True]
    again.close()


def test_rows_on_disk_that_are_gone_are_told(tmp_path):
    "As on Ray where a node is lost with its disk, and a shard begins anew on another one"
    replay = GymStepper('CartPole-v1', seed=0).prioritized_replay(
        bs=4, max_sz=100, seed=0, store=Rows(tmp_path / 'm')
    )
    pipe = replay.parallel(2, chunk=1, restarts=3, **FORK)
    list(islice(pipe, 40))
    before = pipe._workers[1].facts
    shutil.rmtree(tmp_path / 'm' / 'shard-1')
    os.kill(pipe._workers[1].process.pid, signal.SIGKILL)
    with pytest.warns(
        RuntimeWarning,
        match=r'worker 1 of 2, which was restarted, has lost \d+ rows: its path has none of them. Remedy',
    ):
        list(islice(pipe, 12))
    stats = pipe.stats()
    lost = stats['lost']
    assert (
        before['rows'] <= lost <= before['rows'] + 2
        and stats['workers'][1]['rows_in'] > before['inserted']
    )
    os.kill(pipe._workers[1].process.pid, signal.SIGKILL)  # this time the directory is there
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        list(islice(pipe, 8))
    told = [
        w for w in told if w.category is not DeprecationWarning
    ]  # that of Python 3.12 about forks
    assert len(told) == 1 and pipe.stats()['lost'] == lost
    pipe.close()


@pytest.mark.parametrize('kind, n', [('prioritized', 2), ('sequences', 2), ('prioritized', 1)])
def test_checkpoints_of_shards_on_disk_are_restored(tmp_path, kind, n):
    "Exactly: in another run, and over a chain that has gone on since; what doesn't fit is refused"

    def chain(store, n=n):
        pipe = GymStepper('CartPole-v1', seed=0)
        pipe = (
            pipe.prioritized_replay(bs=4, max_sz=100, seed=0, store=store)
            if kind == 'prioritized'
            else pipe.sequence_replay(
                bs=2, max_sz=100, length=4, burn_in=1, overlap=2, seed=0, store=store
            )
        )
        return pipe.parallel(n, chunk=2, **FORK)

    def some(pipe, m):
        seen = []
        for batch in islice(pipe, m):
            td = batch.reward + batch.step_n / 7
            batch.update_priorities(td[:, 1:] if kind == 'sequences' else td)
            seen.append(batch)
        return seen

    def alike(a, b):
        return all(
            torch.equal(x[n], y[n])
            for x, y in zip(a, b, strict=True)
            for n in ('state', 'reward', 'next_state', 'weight', 'step_n')
        )

    def on_disk():
        return Rows(tmp_path / 'm', spare=500)

    with chain(on_disk()) as pipe:
        some(pipe, 21)
        state = through_file(pipe.state_dict())
        want = some(pipe, 20)
        pipe.load_state_dict(state)
        assert alike(some(pipe, 20), want)  # with new keys: those of `want` were given out
    for _ in range(2):
        with chain(on_disk()) as again:
            again.load_state_dict(state)
            assert again.state_dict() is not None and some(again, 20) == want
    with chain(None) as alone:  # as in main memory
        some(alone, 21)
        assert some(alone, 20) == want
        with pytest.raises(StateError, match='rows lie in files'):
            alone.load_state_dict(state)
    with chain(Rows(tmp_path / 'elsewhere')) as other:
        other.load_state_dict(state)  # whether it fits is known where the files are
        with pytest.raises(
            WorkerError, match='worker 0 could not be restored; got StateError: .*is not the one in'
        ):
            some(other, 1)
    if n == 2:
        with pytest.raises(
            ArgumentError,
            match=r'is not a memory, and not empty; got shard-0, shard-1.*\.parallel\(n\) after the replay',
        ):
            len(ExperienceReplay(None, 4, 100, store=on_disk()))


# ---- on disk, in the workers of a DataLoader ----

METHODS = ['fork', pytest.param('spawn', marks=pytest.mark.slow)]


def loaded(source, n, method='fork', workers=2):
    "So many batches of a DataLoader, whose workers have left"
    batches = iter(
        DataLoader(
            source,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context=method if workers else None,
        )
    )
    try:
        return [*islice(batches, n)]
    finally:
        if workers:
            batches._shutdown_workers()  # now: an error that is kept keeps them, too


def in_loader(path, **kw):
    return GymStepper('CartPole-v1', seed=0).experience_replay(
        4, 200, seed=0, store=Rows(path, **kw)
    )


def shards_in(path):
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize('method', METHODS)
def test_each_worker_of_a_loader_has_its_shard(tmp_path, method):
    "And finds it again with its rows, whose keys go on"
    before = loaded(in_loader(tmp_path), 24, method)
    assert [{*b.env_id.tolist()} for b in before[:4]] == [{0}, {1}] * 2 and shards_in(tmp_path) == [
        'shard-0',
        'shard-1',
    ]
    rows = [Timeline(200, Rows(tmp_path / f'shard-{i}', mode='r'))[:] for i in (0, 1)]
    assert [{*r.env_id.tolist()} for r in rows] == [{0}, {1}] and min(map(len, rows)) >= 15
    loaded(in_loader(tmp_path), 8, method)
    for i, was in enumerate(rows):
        now = Timeline(200, Rows(tmp_path / f'shard-{i}', mode='r'))
        assert len(now) >= len(was) + 4 and now[: len(was)] == was


@pytest.mark.parametrize('method', METHODS)
def test_a_stateful_loader_goes_on_with_both_shards(tmp_path, method):
    "Each worker goes back to the row at which its state was saved, in its own directory"

    def loader():
        return StatefulDataLoader(
            in_loader(tmp_path, spare=500).stateful(),
            batch_size=None,
            num_workers=2,
            multiprocessing_context=method,
        )

    first = loader()
    it = iter(first)
    for _ in range(20):
        next(it)
    state, want = through_file(first.state_dict()), [*islice(it, 12)]
    del it, first  # its workers leave
    for _ in range(2):
        again = loader()
        again.load_state_dict(state)
        assert [*islice(again, 12)] == want


@pytest.mark.parametrize('method', METHODS)
def test_all_workers_of_a_loader_read_a_memory_that_is_there(tmp_path, method):
    "With mode='r', also while this process writes it; each draws other rows; one in shards is read by shard"
    writer = ExperienceReplay(None, 4, 100, store=Rows(tmp_path / 'm'))
    writer.add(Steps.cat([*scripted_steps([script(50)], 40)]))

    def reader(path):
        return ExperienceReplay(None, 4, 100, seed=0, store=Rows(path, mode='r'))

    batches = loaded(reader(tmp_path / 'm'), 8, method)
    assert shards_in(tmp_path / 'm') == ['data-1', 'meta.json', 'writer']
    assert all(b.step_n.tolist() == writer.memory.take(b.index).step_n.tolist() for b in batches)
    assert all(a.index.tolist() != b.index.tolist() for a, b in zip(batches[::2], batches[1::2]))
    writer.close()
    loaded(in_loader(tmp_path / 's'), 12, method)
    assert [{*b.env_id.tolist()} for b in loaded(reader(tmp_path / 's'), 4, method)] == [
        {0},
        {1},
    ] * 2


def test_a_loader_with_one_worker_or_none_has_no_shards(tmp_path):
    for i, workers in enumerate((0, 1)):
        assert len(loaded(in_loader(tmp_path / f'{i}'), 4, workers=workers)) == 4
        assert shards_in(tmp_path / f'{i}') == ['data-1', 'meta.json', 'writer']


def test_a_directory_that_is_no_place_for_shards_is_refused(tmp_path):
    "By the first batch: one that this process has open, and one with the rows of one writer"
    pipe = in_loader(tmp_path)
    assert len(pipe) == 0  # it is open now
    with pytest.raises(ArgumentError, match=r'is in use.*Remedy: close'):
        loaded(pipe, 1)
    pipe.close()
    loaded(pipe, 4)
    assert (
        shards_in(tmp_path) == ['shard-0', 'shard-1', 'writer']
        and len(loaded(in_loader(tmp_path), 4)) == 4
    )
    for rest in (
        in_loader(tmp_path / 'one'),
        in_loader(tmp_path / 'one').parallel(2, chunk=1, **FORK),
    ):
        with in_loader(tmp_path / 'one') as one:
            list(islice(one, 2))
        with pytest.raises(
            (ArgumentError, WorkerError),
            match="holds a memory, which several workers can't write; got worker 0.*Remedy: another path; mode='r'",
        ):
            loaded(rest, 1) if isinstance(rest, ExperienceReplay) else next(iter(rest))
        rest.close()


def test_an_open_memory_is_not_sent_to_a_worker_that_is_spawned(tmp_path):
    "It could not open it: said before the process starts"
    pipe = in_loader(tmp_path)
    next(iter(pipe))
    with pytest.raises(
        ArgumentError, match=r'is in use; got this process itself.*Remedy: close\(\) it here before'
    ):
        loaded(pipe, 1, 'spawn', workers=1)
    pipe.close()


@pytest.mark.parametrize('seed', [0, None])
def test_workers_of_a_loader_draw_other_rows(seed):
    "Of copies of one memory, with a seed and without"
    replay = ExperienceReplay(None, 4, 100, seed=seed)
    replay.add(Steps.cat([*scripted_steps([script(50)], 40)]))
    batches = loaded(replay, 8)
    assert all(a.index.tolist() != b.index.tolist() for a, b in zip(batches[::2], batches[1::2]))


# ---- from whichever is ready ----


class Slow(ScriptedEnv):
    def step(self, action):
        time.sleep(0.05)
        return super().step(action)


class Held(ScriptedEnv):
    "In one worker, its seventh step waits for a file"

    def __init__(self, gate, **kw):
        super().__init__(**kw)
        self.gate, self.left = gate, 6

    def step(self, action):
        from fastrl_replay.pipe import worker_info

        self.left -= 1
        while worker_info().rank == 0 and self.left < 0 and not os.path.exists(self.gate):
            time.sleep(0.01)
        return super().step(action)


def test_a_slow_worker_does_not_hold_up_the_others():
    with tempfile.TemporaryDirectory() as folder:
        held_up(os.path.join(folder, 'gate'))


def held_up(gate):
    pipe = GymStepper(lambda: Held(gate, **script(3, -2)), zeros).parallel(
        3, chunk=1, ordered=False, **FORK
    )
    seen = {e: [] for e in range(3)}
    it = iter(pipe)

    def go_on(n):
        for b in islice(it, n):
            seen[int(b.env_id)].append((int(b.episode_n), int(b.step_n)))
        return {e: len(s) for e, s in seen.items()}

    before = go_on(1)
    while min(before.values()) < 2:
        before = go_on(1)  # all have begun
    counts = {e: n - before[e] for e, n in go_on(90).items()}
    open(gate, 'w').close()
    while go_on(1)[0] < 8:
        pass  # it comes back
    stats = pipe.stats()
    pipe.close()
    assert 0 <= counts[0] <= 4 < min(counts[1], counts[2])
    given = [len(s) for s in seen.values()]
    assert (
        60 < stats['lag_max'] < stats['lag_bound'] == math.inf
    )  # what waited at the gate had been asked for long before
    assert (stats['least_given'], stats['most_given']) == (min(given), max(given)) and [
        w['items'] for w in stats['workers']
    ] == given
    for s in seen.values():
        assert s == [
            (1 + i // 5 * 2 + (i % 5 > 2), 1 + i % 5 - 3 * (i % 5 > 2)) for i in range(len(s))
        ]


def test_unordered_passes_end_and_begin_again():
    "All items of each pass, each once"
    pipe = GymStepper(short, zeros).header(5).parallel(2, chunk=2, ordered=False, **FORK)
    for _ in range(3):
        assert sorted(int(b.env_id) for b in pipe) == [0] * 5 + [1] * 5
    pipe.close()


@pytest.mark.slow
def test_unordered_shards_weigh_what_they_gave():
    "Their shares are those that turned out"
    all = Steps.cat(drawn(2000, ordered=False, beta=1.0, weight_norm='memory'))
    off = (all.weight * (all.reward - 7.5)).double()
    assert abs(off.sum()) / (off**2).sum().sqrt() < 5


@pytest.mark.parametrize('n', [4, pytest.param(50, marks=pytest.mark.slow)])
def test_kills(n):
    "Of actors and shards, at random moments: it goes on, no key is given twice, and no process is left; in a fresh process, as other tests leave threads behind, which can't be forked"
    script = Path(__file__).parents[1] / 'kill_workers.py'
    ran = subprocess.run(
        [sys.executable, script, '--kills', str(n), '--seed', '1'],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=script.parent.parent,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    restarts, lost = map(
        int, re.search(r'(\d+) shards restarted, (\d+) rows lost', ran.stdout).groups()
    )
    assert n < 50 or restarts > 5 and lost > 0


# ---- runs ----


def small(out, **kw):
    from fastrl_replay.app.recipe_settings import recipe
    from fastrl_replay.app.runs import start

    return start(
        recipe(
            'cartpole-apex',
            **{
                **dict(
                    steps=700,
                    warmup=100,
                    workers=2,
                    network='8',
                    bs=8,
                    eval_every=300,
                    eval_episodes=2,
                    save_every=10**6,
                    report_every=100,
                ),
                **kw,
            },
        ),
        out,
    )


def lines(out):
    from fastrl_replay.app.run_files import read_metrics

    def no_clock(x):
        return {k: v for k, v in x.items() if k not in ('wall_s', 'steps_per_s', 'waited_s')}

    return [no_clock(x) for x in read_metrics(out)]


@pytest.mark.parametrize(
    'kw',
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(dict(shards=0), marks=pytest.mark.slow),
        dict(workers=0, memory='uniform', n_step=1),
    ],
)
def test_a_learner_that_stops_finds_its_shards_again(tmp_path, kw):
    "A run of two shards with an actor each, stopped and resumed: all its lines are those of a run that was left alone"
    from fastrl_replay.app.runs import Silent, resume

    whole = small(tmp_path / 'whole', **kw)
    summary = whole.train()
    run = small(tmp_path / 'stopped', **kw)

    class Stop(Silent):
        def report(self, line):
            run.stop = line['env_steps'] >= 300

    assert run.train(Stop()) is None
    again = resume(tmp_path / 'stopped')
    assert 300 <= again.agent.journal.steps < 700 and again.agent.journal.returns
    assert again.train()['final_return'] == summary['final_return']
    assert (
        lines(tmp_path / 'stopped') == lines(tmp_path / 'whole')
        and again.agent.journal.returns == whole.agent.journal.returns
    )
    if kw:
        return
    last = lines(tmp_path / 'whole')[-2]
    assert [s['rows_in'] > 300 for s in last['shards']] == [True, True] and 0 < last['fill'] < 1
    assert (
        summary['updates']
        == sum(s['items'] for s in last['shards'])
        >= 0.5 * (700 - 100) - 2 * (0.5 + 4)
    )  # ratio, less what waits


# ---- a look into shards ----


def story(kind, engine='process', **kw):
    pipe = GymStepper(['CartPole-v1'] * 2, seed=0)
    if kind == 'uniform':
        pipe = pipe.experience_replay(bs=4, max_sz=80, seed=0)
    elif kind == 'sequences':
        pipe = pipe.sequence_replay(bs=4, max_sz=80, length=4, burn_in=1, seed=0)
    else:
        pipe = pipe.prioritized_replay(bs=4, max_sz=80, seed=0)
    return pipe.parallel(2, chunk=2, engine=engine, **(FORK if engine == 'process' else {}), **kw)


def rows_in(page):
    data = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    )
    return {p['name']: sorted(k for e in p['episodes'] for k in e['key']) for p in data['parts']}


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['prioritized', 'uniform', 'sequences'])
def test_what_is_in_shards_is_seen_and_changes_nothing(kind, tmp_path):
    "Figures and pages have the rows of each shard, and the batches that follow are those without a look"
    pipe, other = story(kind), story(kind)
    seen, expected = (
        [],
        [
            b.rows['index'].tolist() if kind != 'sequences' else b.index.tolist()
            for b in islice(other, 90)
        ],
    )
    for i, b in enumerate(islice(pipe, 90)):
        seen.append(b.rows['index'].tolist() if kind != 'sequences' else b.index.tolist())
        if i in (7, 41):
            pipe.page(tmp_path / 'page.html')
    assert seen == expected
    samples = samples_of(pipe)
    assert [(s['name'], s['environments'], s['rows']) for s in samples] == [
        ('shard 0', [0, 1], 80),
        ('shard 1', [2, 3], 80),
    ]
    pipe.page(tmp_path / 'page.html')
    of_page = rows_in((tmp_path / 'page.html').read_text(encoding='utf-8'))
    for s in samples:
        assert of_page[s['name']] and all(
            s['oldest'] <= k < s['inserted'] for k in of_page[s['name']]
        )
    pipe.close(), other.close()


@pytest.mark.slow
def test_a_look_where_there_are_no_shards(tmp_path):
    "Actors have no rows; without workers the replay is here; before the first batch the shards are empty"
    actors = GymStepper('CartPole-v1', seed=0).parallel(2, **FORK)
    with pytest.raises(ArgumentError, match='look; got no shards'):
        actors.page()
    here = GymStepper('CartPole-v1', seed=0).experience_replay(bs=4, max_sz=80, seed=0).parallel(0)
    [*islice(here, 5)]
    assert here.page(tmp_path / 'here.html') and 'ExperienceReplay' in (
        tmp_path / 'here.html'
    ).read_text(encoding='utf-8')
    assert here.show()._suptitle.get_text().startswith('ExperienceReplay')
    new = story('uniform')
    assert [s['rows'] for s in samples_of(new)] == [0, 0] and new.show() is not None
    new.close()


def kill_one(pipe):
    "The second shard, when it has answered all that it was asked"
    next(iter(pipe))
    for w in pipe._workers:
        while w.asked:
            pipe._fetch(w)
    os.kill(pipe._workers[1].process.pid, signal.SIGKILL)


LOOKS = dict(
    samples=lambda pipe, tmp: samples_of(pipe),
    show=lambda pipe, tmp: pipe.show(),
    page=lambda pipe, tmp: pipe.page(tmp / 'page.html'),
    state_dict=lambda pipe, tmp: pipe.state_dict(),
)


@pytest.mark.parametrize(
    'look',
    [
        'samples',
        *(pytest.param(name, marks=pytest.mark.slow) for name in ('show', 'page', 'state_dict')),
    ],
)
def test_a_look_into_a_shard_that_is_killed_restarts_it(look, tmp_path):
    "As a batch or a checkpoint does; where no restart is left, it is named"
    with story('prioritized', restarts=1) as pipe:
        kill_one(pipe)
        rows = pipe.stats()['rows']  # of what was handed on, and needs no worker
        with pytest.warns(RuntimeWarning, match='worker 1 of 2 failed, restart 1 of 1'):
            LOOKS[look](pipe, tmp_path)
        assert [s['rows'] > 0 for s in samples_of(pipe)] == [True, False]
        assert (
            len([*islice(pipe, 12)]) == 12
            and pipe.stats()['restarts'] == 1
            and pipe.stats()['rows'] > rows
        )
        kill_one(pipe)
        with pytest.raises(WorkerError, match='worker 1 of 2'):
            LOOKS[look](pipe, tmp_path)
