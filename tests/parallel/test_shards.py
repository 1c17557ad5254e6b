"""Shards: workers' batches take errors as a local replay's do, and their weights are right."""

import json, math, os, re, signal, subprocess, sys, time
from itertools import islice
from pathlib import Path

import gymnasium as gym, numpy as np, pytest, torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from fastrl_replay.look.sample import samples_of
from fastrl_replay.all import *
from fastrl_replay.learning.settings import recipe
from fastrl_replay.app.run_files import read_metrics
from fastrl_replay.app.runs import Silent, resume, start
from fastrl_replay.pipe import worker_info
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
    keys = ('ordered', 'restarts', 'engine')
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
    "Each row's error is its key and shard; told errors are with these rows, and no others"
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


@pytest.mark.parametrize('kind', ['prioritized', 'sequences'])
def test_as_a_local_replay(kind):
    "One worker gives the batches of a local replay that is told the same, one batch later"

    def errors(batch):
        shape = batch.train.shape if kind == 'sequences' else len(batch)
        return torch.rand(shape, generator=torch.Generator().manual_seed(int(batch.index.sum())))

    def drawn_from(batches, late):
        seen, waiting = [], []
        for batch in islice(batches, 25):
            seen.append((batch.index.tolist(), batch.weight.tolist()))
            waiting.append(batch)
            if len(waiting) > late:
                first = waiting.pop(0)
                first.update_priorities(errors(first))
        return seen

    with sharded(1, kind=kind, looks=False) as pipe:
        got = drawn_from(pipe, 0)
    assert got == drawn_from(sharded(0, kind=kind, looks=False), 1)


WRONG = {
    'prioritized': [
        (torch.ones(4, 2), 'got 8; expected 4, one for each key'),
        ([1.0, 2.0, np.nan, 4.0], 'TD error at position 2, for key .*; got nan'),
        (['a'] * 4, 'must be real numbers; got <U1'),
    ],
    'sequences': [
        (torch.ones(4), r'got \[4\]; expected \[4, 3\]: one error for each step after the burn-in'),
        (torch.ones(3, 3), r'got \[3, 3\]; expected 4, one for each key'),
    ],
}


@pytest.mark.parametrize('kind', WRONG)
def test_wrong_feedback_is_refused_here(kind):
    "At once, by the stage that was told; the run goes on"
    with sharded(kind=kind, looks=False) as pipe:
        batch = next(iter(pipe))
        for td, says in WRONG[kind]:
            with pytest.raises((ArgumentError, ArgumentTypeError), match=f'Parallel: .*{says}'):
                batch.update_priorities(td)
        good = torch.ones(batch.train.shape if kind == 'sequences' else 4)
        for b in islice(pipe, 8):
            b.update_priorities(good)
        assert pipe.stats()['stale'] == 0


@pytest.mark.slow
def test_wrong_feedback_that_only_a_shard_knows_ends_the_run():
    "And no shard is restarted for it: the second row of an episode is the key of no sequence"
    pipe = sharded(kind='sequences', looks=False, restarts=5)
    next(iter(pipe))
    pipe.update_priorities([2], torch.ones(1, 3))
    with pytest.raises(WorkerError, match='key 1 is not the key of a sequence that was drawn'):
        list(islice(pipe, 8))
    assert pipe.restarted == 0


@pytest.mark.slow
def test_learners_and_prefetch_follow():
    "A DQN after two shards with prefetch: the same losses each time, also from a checkpoint"

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


@pytest.mark.parametrize('ratio, ordered, envs', [(0.5, True, 2), (0.2, False, 3)])
def test_ratio_over_all_shards(ratio, ordered, envs):
    """Batches number ratio times the rows beyond the warm-up.

    At most a block's batches and a chunk of each shard are missing."""
    steps = GymStepper([short] * envs, lambda s: [0] * len(s), seed=0)
    replay = steps.prioritized_replay(bs=4, max_sz=40, ratio=ratio, warmup=10, seed=0)
    bound = 3 * (ratio * envs + 2)
    with replay.parallel(3, chunk=2, ordered=ordered, **FORK) as pipe:
        for i, batch in enumerate(islice(pipe, 100), 1):
            stats = pipe.stats()
            assert stats['items'] == i
            assert 0 <= ratio * stats['rows_counted'] - i <= bound
    assert stats['rows_counted'] == stats['rows_in'] - 30
    assert stats['rows'] == sum(min(40, w['rows_in']) for w in stats['workers'])


def test_stats_have_a_line_for_each_shard():
    with sharded(looks=False, chunk=2) as pipe:
        for batch in islice(pipe, 16):
            batch.update_priorities([1.0] * 4)
        stats = pipe.stats()
    lines = stats['workers']
    assert [w['items'] for w in lines] == [8, 8]
    for name in 'rows', 'rows_in', 'rows_counted', 'lost':
        assert stats[name] == sum(w[name] for w in lines)
    for w in lines:
        assert w['rows_in'] >= 8
        assert w['weights_age'] <= stats['lag_bound']
        assert 0 < w['row_age'] < 40


# ---- weights ----


class Memory(PrioritizedReplay):
    "A shard with rows from the start: shard s has `sizes[s]`, each with its number and an error"

    def __init__(self, source, sizes, errors, **kw):
        super().__init__(source, **{**dict(bs=4, max_sz=64, alpha=1, eps=0, seed=0), **kw})
        self.sizes, self.errors = sizes, errors

    def _in_worker(self, info):
        super()._in_worker(info)
        n, first = self.sizes[info.rank], sum(self.sizes[: info.rank])
        block = Steps.cat([*scripted_steps([script(50)], n)])
        block.rows['reward'] = first + np.arange(n)
        self.add(block)
        self.update_priorities(np.arange(n), np.asarray(self.errors, float)[first : first + n])

    def __iter__(self):
        while True:
            yield self.sample()


SIZES, ERRORS = (4, 12), [1, 2, 3, 6] + [40] * 6 + [0.5] * 6  # 12 and 243


def drawn(n, sizes=SIZES, errors=ERRORS, ordered=True, **kw):
    pipe = Memory(GymStepper('CartPole-v1'), sizes, errors, **kw).parallel(
        len(sizes), chunk=4, ordered=ordered, **FORK
    )
    batches = [*islice(pipe, n)]
    pipe.close()
    return batches


@pytest.mark.parametrize(
    'beta, weight_norm, ordered',
    [(1.0, 'memory', True), (0.5, 'batch', True), (1.0, 'memory', False)],
)
def test_weights_are_those_of_all_rows(beta, weight_norm, ordered):
    """Each weight is q**-β for the probability q that the row is drawn, up to one factor.

    So the weighted mean is that of all rows."""
    batches = drawn(2000, ordered=ordered, beta=beta, weight_norm=weight_norm)
    every = Steps.cat(batches)
    rows, weight = every.reward.long().numpy(), every.weight.double().numpy()
    if beta == 1:
        off = weight * (rows - 7.5)  # less the mean of all rows, in units of its standard error
        assert abs(off.sum()) / np.sqrt((off**2).sum()) < 5
    if not ordered:
        return  # the shares of the shards are those that turned out
    own = np.repeat([sum(ERRORS[:4]), sum(ERRORS[4:])], SIZES)
    q = np.array(ERRORS) / own / 2
    counts = np.bincount(rows, minlength=16) / len(rows)
    assert np.abs(counts - q).max() < 0.008
    factor = (weight * q[rows] ** beta).reshape(-1, 4)
    whole = factor[:1, :1] if weight_norm == 'memory' else factor[:, :1]
    np.testing.assert_allclose(factor, np.broadcast_to(whole, factor.shape), rtol=1e-4)
    assert weight.max() <= 1 + 1e-4


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
    "Four actors of two shards: other environments each, weights of a bounded age in batches"
    policy = Version()
    actors = GymStepper('CartPole-v1', policy, seed=0).parallel(2, chunk=1, **FORK)
    replay = actors.experience_replay(bs=4, max_sz=4, seed=0)  # rows of the last blocks
    envs, ages = set(), []
    with replay.parallel(2, chunk=1, **FORK) as pipe:
        for i, batch in enumerate(islice(pipe, 60)):
            envs |= {*batch.env_id.tolist()}
            if i > 10:
                ages.append(i - float(batch.version.max()))
            with torch.no_grad():
                policy.version += 1
        outer = pipe.stats()['lag_bound']
    assert envs == {0, 1, 2, 3}
    inner = 2  # an inner block waits for two others, each of which is two batches here
    assert max(ages) <= outer + 2 * inner + 2


# ---- faults ----


class Told(Pipe):
    "Batches with the process of their shard"

    takes_any_item = True

    def __iter__(self):
        for batch in self.source:
            yield batch, os.getpid()


def test_a_shard_that_is_killed():
    "It restarts empty; the other continues; errors of lost rows are stale; keys are never reused"
    steps = GymStepper(short, zeros, seed=0)
    replay = Told(steps.prioritized_replay(bs=4, max_sz=40, seed=0))
    seen, old = {}, []
    says = r'worker 1 of 2 failed, restart 1 of 9, \d+ rows of its buffer are lost'
    with replay.parallel(2, chunk=1, restarts=9, **FORK) as pipe, pytest.warns(match=says):
        for i, (batch, pid) in enumerate(islice(pipe, 60)):
            names = zip(batch.episode_n.tolist(), batch.step_n.tolist())
            for key, name in zip(batch.index.tolist(), names):
                assert seen.setdefault(key, name) == name
            if i < 20:
                old.append(batch)
            if i == 21:
                assert batch.index[0] % 2 == 1
                os.kill(pid, signal.SIGKILL)
            if i == 50:
                for b in old:
                    b.update_priorities([1.0] * 4)
            batch.update_priorities([2.0] * 4)
        stats = pipe.stats()
    assert stats['restarts'] == 1
    assert stats['lost'] > 0
    assert stats['stale'] >= 40


def test_keys_of_a_batch_that_a_killed_shard_left_are_not_given_again():
    "The batch is saved, and loaded after other batches"
    steps = GymStepper(short, zeros, seed=0)
    replay = Told(steps.prioritized_replay(bs=4, max_sz=40, seed=0))
    seen = {}

    def draw(n):
        for batch, pid in islice(pipe, n):
            names = zip(batch.episode_n.tolist(), batch.step_n.tolist())
            for key, name in zip(batch.index.tolist(), names):
                assert seen.setdefault(key, name) == name
        return pid

    with replay.parallel(2, chunk=1, restarts=9, **FORK) as pipe, pytest.warns(match='are lost'):
        pid = draw(20)
        time.sleep(0.5)  # its next batch has come
        os.kill(pid, signal.SIGKILL)
        state = pipe.state_dict()
        draw(20)
        pipe.load_state_dict(state)
        draw(20)


def test_shards_on_disk_come_back_with_their_rows(tmp_path):
    "After a kill, and in another run"

    def chain():
        replay = GymStepper('CartPole-v1', seed=0).prioritized_replay(
            bs=4, max_sz=100, seed=0, store=Rows(tmp_path / 'm')
        )
        return Told(replay).parallel(2, chunk=1, restarts=3, **FORK)

    with chain() as pipe:
        for batch, pid in islice(pipe, 40):
            pass
        assert batch.index[0] % 2 == 1
        assert sorted(p.name for p in (tmp_path / 'm').iterdir()) == ['shard-0', 'shard-1']
        rows = [w['rows'] for w in pipe.stats()['workers']]
        assert min(rows) >= 18
        os.kill(pid, signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match='worker 1 of 2.*restart 1 of 3; got'):
            list(islice(pipe, 12))
        stats = pipe.stats()
        assert stats['lost'] == 0
        assert stats['workers'][1]['rows'] >= rows[1]
    with chain() as again:
        list(islice(again, 2))
        assert all(w['rows'] > n for w, n in zip(again.stats()['workers'], rows))


@pytest.mark.parametrize('kind', ['prioritized', 'sequences'])
def test_checkpoints_of_shards_on_disk_are_restored(tmp_path, kind):
    "Exactly: in another run, and over a chain that has gone on since; what doesn't fit is refused"

    def chain(store):
        steps, kw = GymStepper('CartPole-v1', seed=0), dict(max_sz=100, seed=0, store=store)
        if kind == 'prioritized':
            replay = steps.prioritized_replay(bs=4, **kw)
        else:
            replay = steps.sequence_replay(bs=2, length=4, burn_in=1, overlap=2, **kw)
        return replay.parallel(2, chunk=2, **FORK)

    def some(pipe, m):
        seen = []
        for batch in islice(pipe, m):
            td = batch.reward + batch.step_n / 7
            batch.update_priorities(td[:, 1:] if kind == 'sequences' else td)
            seen.append(batch)
        return seen

    def on_disk():
        return Rows(tmp_path / 'm', spare=500)

    with chain(on_disk()) as pipe:
        some(pipe, 21)
        state = through_file(pipe.state_dict())
        want = some(pipe, 20)
        pipe.load_state_dict(state)
        for a, b in zip(some(pipe, 20), want):  # with new keys: those of `want` were given out
            assert torch.equal(a.state, b.state)
            assert torch.equal(a.weight, b.weight)
    with chain(on_disk()) as again:
        again.load_state_dict(state)
        assert some(again, 20) == want
    with chain(None) as alone:  # as in main memory
        some(alone, 21)
        assert some(alone, 20) == want
        with pytest.raises(StateError, match='the rows of the saved buffer are in files'):
            alone.load_state_dict(state)
    with chain(Rows(tmp_path / 'elsewhere')) as other:
        other.load_state_dict(state)  # whether it fits is known where the files are
        with pytest.raises(WorkerError, match="could not answer 'load'.*is not the one in"):
            some(other, 1)


# ---- on disk, in the workers of a DataLoader ----


def loaded(source, n):
    "So many batches of a DataLoader, whose workers have left"
    batches = iter(
        DataLoader(source, batch_size=None, num_workers=2, multiprocessing_context='fork')
    )
    try:
        return [*islice(batches, n)]
    finally:
        batches._shutdown_workers()  # now: an error that is kept keeps them, too


def in_loader(path, **kw):
    return GymStepper('CartPole-v1', seed=0).experience_replay(
        4, 200, seed=0, store=Rows(path, **kw)
    )


def shards_in(path):
    return sorted(p.name for p in path.iterdir())


def shard(path, i):
    return Timeline(200, Rows(path / f'shard-{i}', mode='r'))


def test_each_worker_of_a_loader_has_its_shard(tmp_path):
    "And finds it again with its rows, whose keys go on"
    before = loaded(in_loader(tmp_path), 24)
    assert [{*b.env_id.tolist()} for b in before[:4]] == [{0}, {1}] * 2
    assert shards_in(tmp_path) == ['shard-0', 'shard-1']
    rows = [shard(tmp_path, i)[:] for i in (0, 1)]
    loaded(in_loader(tmp_path), 8)
    for i, was in enumerate(rows):
        now = shard(tmp_path, i)
        assert {*was.env_id.tolist()} == {i}
        assert len(now) >= len(was) + 4
        assert now[: len(was)] == was


def test_a_stateful_loader_goes_on_with_both_shards(tmp_path):
    "Each worker goes back to the row at which its state was saved, in its own directory"

    def loader():
        chain = in_loader(tmp_path, spare=500).stateful()
        return StatefulDataLoader(
            chain, batch_size=None, num_workers=2, multiprocessing_context='fork'
        )

    first = loader()
    batches = iter(first)
    for _ in range(20):
        next(batches)
    state = through_file(first.state_dict())
    want = [*islice(batches, 12)]
    del batches, first  # its workers leave
    for _ in range(2):
        again = loader()
        again.load_state_dict(state)
        assert [*islice(again, 12)] == want


def test_all_workers_of_a_loader_read_a_memory_that_is_there(tmp_path):
    """With mode='r', also while this process writes it.

    Each worker draws other rows; a memory in shards is read by shard."""

    def reader(path):
        return ExperienceReplay(None, 4, 100, seed=0, store=Rows(path, mode='r'))

    writer = ExperienceReplay(None, 4, 100, store=Rows(tmp_path / 'm'))
    writer.add(Steps.cat([*scripted_steps([script(50)], 40)]))
    batches = loaded(reader(tmp_path / 'm'), 8)
    for b in batches:
        assert b.step_n.tolist() == writer.memory.take(b.index).step_n.tolist()
    for a, b in zip(batches[::2], batches[1::2]):
        assert a.index.tolist() != b.index.tolist()
    writer.close()
    loaded(in_loader(tmp_path / 's'), 12)
    batches = loaded(reader(tmp_path / 's'), 4)
    assert [{*b.env_id.tolist()} for b in batches] == [{0}, {1}] * 2


def test_a_directory_that_is_no_place_for_shards_is_refused(tmp_path):
    "One that this process has open, and one with the rows of one writer"
    with in_loader(tmp_path) as pipe:
        assert len(pipe) == 0  # it is open now
        with pytest.raises(ArgumentError, match='is in use.*Remedy: close'):
            loaded(pipe, 1)
        list(islice(pipe, 2))
    says = "several workers cannot write the memory in .*Remedy: use a different path; mode='r'"
    with pytest.raises(ArgumentError, match=says):
        loaded(in_loader(tmp_path), 1)
    with in_loader(tmp_path).parallel(2, **FORK) as pipe, pytest.raises(WorkerError, match=says):
        next(iter(pipe))


@pytest.mark.parametrize('seed', [0, None])
def test_workers_of_a_loader_draw_other_rows(seed):
    "Of copies of one memory, with a seed and without"
    replay = ExperienceReplay(None, 4, 100, seed=seed)
    replay.add(Steps.cat([*scripted_steps([script(50)], 40)]))
    batches = loaded(replay, 8)
    assert all(a.index.tolist() != b.index.tolist() for a, b in zip(batches[::2], batches[1::2]))


# ---- from whichever is ready ----


class Held(ScriptedEnv):
    "In one worker, its seventh step waits for a file"

    def __init__(self, gate):
        super().__init__(**script(3, -2))
        self.gate, self.left = gate, 6

    def step(self, action):
        self.left -= 1
        while worker_info().rank == 0 and self.left < 0 and not self.gate.exists():
            time.sleep(0.01)
        return super().step(action)


def test_a_slow_worker_does_not_hold_up_the_others(tmp_path):
    gate, seen = tmp_path / 'gate', {e: [] for e in range(3)}

    def take(n):
        for b in islice(pipe, n):
            seen[int(b.env_id)].append((int(b.episode_n), int(b.step_n)))
        return [len(s) for s in seen.values()]

    with GymStepper(lambda: Held(gate), zeros).parallel(3, chunk=1, ordered=False, **FORK) as pipe:
        while min(take(1)) < 2:
            pass  # all have begun
        before = take(0)
        given = np.subtract(take(90), before)
        gate.touch()
        while take(1)[0] < 8:
            pass  # it comes back
        stats = pipe.stats()
    assert 0 <= given[0] <= 4 < min(given[1:])
    assert 60 < stats['lag_max'] < stats['lag_bound'] == math.inf
    assert [w['items'] for w in stats['workers']] == [len(s) for s in seen.values()]
    whole = [(e, n) for e in range(1, 9999) for n in ((1, 2, 3) if e % 2 else (1, 2))]
    assert all(s == whole[: len(s)] for s in seen.values())


@pytest.mark.slow
def test_kills():
    """Actors and shards fail at random moments.

    In a fresh process, as other tests leave threads behind, which can't be forked."""
    script = Path(__file__).parents[1] / 'kill_workers.py'
    command = [sys.executable, script, '--kills', '5', '--seed', '1']
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=900, cwd=script.parent.parent
    )
    assert ran.returncode == 0, ran.stderr[-5000:]


# ---- runs ----


def small(out):
    settings = dict(workers=2, network='8', bs=8, eval_every=300, eval_episodes=2)
    rates = dict(steps=700, warmup=100, save_every=10**6, report_every=100)
    return start(recipe('cartpole-apex', **settings, **rates), out)


def lines(out):
    times = 'wall_s', 'steps_per_s', 'waited_s'
    return [{k: v for k, v in line.items() if k not in times} for line in read_metrics(out)]


@pytest.mark.slow
def test_a_learner_that_stops_finds_its_shards_again(tmp_path):
    "A run of two shards with an actor each, stopped and resumed, has the lines of a whole run"
    whole = small(tmp_path / 'whole')
    summary = whole.train()
    run = small(tmp_path / 'stopped')

    class Stop(Silent):
        def report(self, line):
            run.stop = line['env_steps'] >= 300

    assert run.train(Stop()) is None
    again = resume(tmp_path / 'stopped')
    assert 300 <= again.agent.journal.steps < 700
    assert again.train()['final_return'] == summary['final_return']
    assert lines(tmp_path / 'stopped') == lines(tmp_path / 'whole')
    assert again.agent.journal.returns == whole.agent.journal.returns
    last = lines(tmp_path / 'whole')[-2]
    assert [s['rows_in'] > 300 for s in last['shards']] == [True, True]
    assert summary['updates'] == sum(s['items'] for s in last['shards'])


# ---- a look into shards ----


def rows_in(page):
    data = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    )
    return {p['name']: sorted(k for e in p['episodes'] for k in e['key']) for p in data['parts']}


def test_a_look_into_shards_changes_nothing(tmp_path):
    "Pages have the rows of each shard, and the batches that follow are those without a look"

    def chain():
        steps = GymStepper(['CartPole-v1'] * 2, seed=0)
        return steps.prioritized_replay(bs=4, max_sz=80, seed=0).parallel(2, chunk=2, **FORK)

    with chain() as pipe, chain() as other:
        expected = [b.index.tolist() for b in islice(other, 90)]
        seen = []
        for i, b in enumerate(islice(pipe, 90)):
            seen.append(b.index.tolist())
            if i == 41:
                pipe.page(tmp_path / 'page.html')
        assert seen == expected
        samples = samples_of(pipe)
        pipe.page(tmp_path / 'page.html')
        pipe.show()
    assert [(s['name'], s['environments'], s['rows']) for s in samples] == [
        ('shard 0', [0, 1], 80),
        ('shard 1', [2, 3], 80),
    ]
    of_page = rows_in((tmp_path / 'page.html').read_text(encoding='utf-8'))
    for s in samples:
        keys = of_page[s['name']]
        assert keys
        assert all(s['oldest'] <= k < s['inserted'] for k in keys)
