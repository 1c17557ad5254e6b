"""A memory as a service: programs that come, go and are killed, beside plain models of it."""

import asyncio, faulthandler, os, pickle, signal, subprocess, sys, time
from concurrent.futures import Future
from pathlib import Path

import cloudpickle, numpy as np, pytest
from gymnasium.spaces import Box, Discrete

from fastrl_replay.look.sample import samples_of
from fastrl_replay.all import *
from fastrl_replay.parallel.coordinator import Coordinator, Shard, ShardLog
from fastrl_replay.testing import same
from workers import PLACES, no_process_is_left, ray_cluster  # noqa: F401

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning')

DTYPE = step_dtype(Box(-np.inf, np.inf, (2,), np.float32), Discrete(3), who='i8')


def block(first, who=1, n=4, envs=2, **columns):
    "Rows of `envs` environments in turn, the i-th of all with reward i: episodes of five steps"
    i = np.arange(first, first + n)
    rows = np.zeros(n, DTYPE)
    rows['env_id'], step = i % envs, i // envs
    rows['episode_n'], rows['step_n'], rows['terminated'] = (
        step // 5 + 1,
        step % 5 + 1,
        step % 5 == 4,
    )
    rows['reward'], rows['who'], rows['state'], rows['next_state'] = (
        i,
        who,
        step[:, None],
        step[:, None] + 1,
    )
    for k, x in columns.items():
        rows[k] = x
    return Steps(rows)


@pytest.mark.parametrize(
    'args, says',
    [
        ((3,), "connect: name; got 3; expected a text"),
        (('a/b',), 'connect: name'),
        (('a', np.inf), 'connect: limit; got inf; expected a number'),
        (('a', -1), 'connect: limit'),
    ],
)
def test_wrong_arguments_are_refused_without_a_cluster(args, says):
    with pytest.raises(ArgumentError, match=says):
        connect(*args)


# ---- without Ray: shards and a coordinator in this process ----

LOOP = asyncio.new_event_loop()


class LocalActor:
    "As a handle of an actor, in this process"

    def __init__(self, make):
        self.make, self.made, self.call = make, make(False), self

    def remote(self, *args):
        future = Future()
        future.set_result(self.made.call(*args))
        return type('Ref', (), dict(future=lambda me: future))()

    def kill(self):
        self.made = self.make(True)


def coordinator_of(replay, n=2, ahead=1000):
    data = cloudpickle.dumps(replay)
    parts = [LocalActor(lambda again, i=i: Shard(data, i, n, again)) for i in range(n)]
    return Coordinator('m', data, parts, ahead), parts


class Local(Service):
    "A service whose coordinator is in this process"

    def __init__(self, coordinator, limit=0.05):
        self.coordinator, self.limit, self.name, self.news = coordinator, limit, 'm', []
        Pipe.__init__(self)
        self._fresh()
        self.shards, self.bs = self._ask('settings')

    def _ask(self, what, *args):
        value, self._losses_seen, news = LOOP.run_until_complete(
            self.coordinator.call(what, self._losses_seen, self.limit, *args)
        )
        self.news += news
        if isinstance(value, Exception):
            raise value
        return value


def plain(row):
    return {n: np.asarray(row[n]).tolist() for n in DTYPE.names}


def by_key(memory, bs=64, draws=40):
    "What is drawn: key → row"
    found = {}
    for _ in range(draws):
        b = memory.sample(bs)
        for row in b.rows:
            assert found.setdefault(int(row['index']), plain(row)) == plain(row)
    return found


def test_rows_that_come_out_are_those_that_went_in():
    "Beside a plain dict of key → row, with three collectors whose environments have equal numbers"
    coordinator, _ = coordinator_of(PrioritizedReplay(None, bs=4, max_sz=500, seed=0))
    model, envs = {}, {}
    for who in (1, 2, 3):
        memory = Local(coordinator)
        for first in range(0, 40, 4):
            rows = block(first, who)
            for key, row in zip(memory.add(rows).tolist(), rows.rows):
                model[key] = plain(row)
    found = by_key(Local(coordinator))
    assert found.keys() == model.keys()
    for key, got in found.items():
        want = model[key]
        env = envs.setdefault((want['who'], want['env_id']), got['env_id'])
        assert got == dict(want, env_id=env)
    assert len({*envs.values()}) == 6  # each collector's environments stay apart


def test_sequences_of_two_collectors():
    "Links, as sequences have them, over shards"
    coordinator, _ = coordinator_of(
        SequenceReplay(None, bs=4, max_sz=500, length=5, burn_in=1, overlap=1, seed=0)
    )
    a, b = Local(coordinator), Local(coordinator)
    for first in range(0, 40, 4):
        a.add(block(first, 1))
        b.add(block(first, 2))
    batch = Local(coordinator).sample(16)
    for rows, mask in zip(batch.rows, batch.mask.numpy()):
        assert len({*rows['who'][mask]}) == 1
        assert (np.diff(rows['reward'][mask]) == 2).all()
    batch.update_priorities(np.ones((16, 4)))


def test_a_look_into_the_shards_changes_nothing(tmp_path):
    "Pages have the rows of each; one that was restarted without them is empty"
    coordinator, parts = coordinator_of(PrioritizedReplay(None, bs=4, max_sz=500, seed=0))
    memory = Local(coordinator)
    other = Local(coordinator)
    memory.add(block(0, n=40))
    other.add(block(0, 2, n=40))
    memory.sample()
    before = [pickle.loads(pickle.dumps(p.made.replay.state_dict())) for p in parts]
    assert [(s['name'], s['rows']) for s in samples_of(memory)] == [
        ('shard 0', 40),
        ('shard 1', 40),
    ]
    page = memory.page(tmp_path / 'a.html').read_text(encoding='utf-8')
    assert page.count('40 of 500 rows') == 2
    assert all(same(p.made.replay.state_dict(), state) for p, state in zip(parts, before))
    parts[1].kill()
    assert [s['rows'] for s in samples_of(memory)] == [40, 0]


@pytest.mark.parametrize('norm', ['batch', 'memory'])
def test_weights_are_those_of_one_memory(norm):
    "w = (N·P)^-β, over the largest of the batch, or of all rows; and draws as often as P says"
    beta, alpha, n = 0.7, 0.8, 24
    coordinator, _ = coordinator_of(
        PrioritizedReplay(
            None, bs=8, max_sz=100, alpha=alpha, eps=0, beta=beta, weight_norm=norm, seed=1
        )
    )
    a, b = Local(coordinator), Local(coordinator)
    keys = np.concatenate([a.add(block(0, 1, 16)), b.add(block(0, 2, 8))])
    td = np.linspace(0.5, 3, n)
    a.update_priorities(keys, td)
    P = dict(zip(keys.tolist(), td**alpha / (td**alpha).sum()))
    count = dict.fromkeys(P, 0)
    for _ in range(400):
        batch = b.sample()
        drawn = batch.index.tolist()
        w = np.array([(n * P[k]) ** -beta for k in drawn])
        top = w.max() if norm == 'batch' else (n * min(P.values())) ** -beta
        np.testing.assert_allclose(batch.weight.numpy(), w / top, rtol=1e-5)
        for k in drawn:
            count[k] += 1
    expected = np.array([P[k] * 3200 for k in P])
    chi2 = ((np.array([count[k] for k in P]) - expected) ** 2 / expected).sum()
    assert chi2 < 60  # 23 degrees of freedom: p < .0001; stratified draws vary less


def test_uniform_draws_are_without_replacement():
    "All 24 rows of two shards in a batch of 24: each once"
    coordinator, _ = coordinator_of(ExperienceReplay(None, bs=24, max_sz=100, seed=1))
    a, b = Local(coordinator), Local(coordinator)
    keys = [*a.add(block(0, 1, 16)), *b.add(block(0, 2, 8))]
    batch = a.sample()
    assert sorted(batch.index.tolist()) == sorted(keys)
    assert (batch.weight == 1).all()


def test_updates_reach_their_row_and_stale_keys_are_counted():
    coordinator, parts = coordinator_of(
        PrioritizedReplay(None, bs=4, max_sz=8, alpha=1, eps=0, seed=0)
    )

    def priorities():
        return [part.made.replay.sampler.kept().tolist() for part in parts]

    a, b = Local(coordinator), Local(coordinator)
    mine, theirs = a.add(block(0, 1, 8)), b.add(block(0, 2, 8))
    a.update_priorities([mine[3], theirs[5]], [7.0, 9.0])
    assert [p.index(max(p)) for p in priorities()] == [3, 5]
    a.add(block(8, 1, 4))  # the first four are overwritten
    a.update_priorities([*mine[:2], theirs[0]], [50.0, 50.0, 60.0])
    assert a.stats()['stale'] == 2
    before = priorities()
    assert before[1][0] == 60
    assert 50 not in before[0]
    with pytest.raises(StaleKey, match='was never given out'):
        a.update_priorities([mine[0] + 1000, theirs[0]], [1.0, 1.0])
    for td, says in ([1.0, np.nan], 'finite'), ([1.0], r'got \[1\]'):
        with pytest.raises(ValueError, match=says):
            a.update_priorities(theirs[:2], td)
    assert priorities() == before


def doubles():
    "A block whose rewards have another dtype"
    dtype = [(n, 'f8' if n == 'reward' else DTYPE[n]) for n in DTYPE.names]
    return Steps(block(0).rows.astype(np.dtype(dtype, align=True)))


@pytest.mark.parametrize(
    'wrong', [doubles(), block(0, env_id=-1), block(0).rows], ids='dtype id raw'.split()
)
def test_wrong_blocks_are_refused(wrong):
    "By a shard with rows and by one without; both stay as they were, and the call may be repeated"
    coordinator, parts = coordinator_of(PrioritizedReplay(None, bs=4, max_sz=100, seed=0))
    a, b = Local(coordinator), Local(coordinator)
    a.add(block(0))
    for memory in (a, b):
        for _ in range(2):
            with pytest.raises((BlockError, TypeError)):
                memory.add(wrong)
    assert len(a) == 4
    assert b.add(block(4, 2)).tolist() == [1, 3, 5, 7]
    assert len(a.add(block(8)[0])) == 1  # one row that is no block


@pytest.mark.parametrize('when', ['before', 'after'])
def test_a_call_that_is_repeated_adds_nothing_twice(tmp_path, when):
    "The shard is killed before or after it adds the rows; Ray asks again, with others in between"
    replay = ExperienceReplay(None, bs=4, max_sz=100, seed=0, store=Rows(tmp_path / 'm'))
    data = cloudpickle.dumps(replay)
    shard = Shard(data, 0, 1, False)
    shard.call('add', 5, 1, 0, pickle.dumps(block(0)))
    if when == 'after':
        shard.call('add', 5, 2, 0, pickle.dumps(block(4)))
    else:
        shard.log.record(5, 2, first=4, rows=4)  # and killed
    shard.replay.close()
    shard = Shard(data, 0, 1, True)
    shard.call('add', 6, 1, 0, pickle.dumps(block(0, 2)))
    for call in range(2, 1_200):  # of the log's 1,024 entries these need one
        shard.call('add', 6, call, 0, pickle.dumps(block(0)[:0]))
    assert shard.call('add', 5, 2, 0, pickle.dumps(block(4)))[0] == dict(before=8, after=4)[when]
    rows = shard.replay.memory[:].rows[['who', 'reward']].tolist()
    wanted = [(1, float(i)) for i in range(8)] + [(2, float(i)) for i in range(4)]
    assert sorted(rows) == wanted


def test_a_call_that_its_client_has_given_up():
    """A client got no reply to its second call, and made a third.

    The second, repeated after it, adds nothing any more."""
    shard = Shard(cloudpickle.dumps(ExperienceReplay(None, bs=4, max_sz=100, seed=0)), 0, 1, False)
    for call in 1, 2, 3, 2:
        shard.call('add', 5, call, 0, pickle.dumps(block(4 * call)))
    assert shard.replay.memory.inserted == 12


def test_lost_rows_are_told():
    """A shard without a path begins empty, and each program is told once.

    Old keys are stale, and never given out again."""
    coordinator, parts = coordinator_of(PrioritizedReplay(None, bs=4, max_sz=100, seed=0))
    a, b = Local(coordinator), Local(coordinator)
    old = a.add(block(0))
    b.add(block(0, 2))
    parts[0].kill()
    new = a.add(block(4))  # its environments get new numbers
    assert new.min() > old.max()
    assert len(a) == 8
    for memory in (a, b):
        memory.stats()
        (said,) = memory.news
        assert 'shard 0 of 2' in said
        assert '4 rows of its memory are lost' in said
    assert Local(coordinator).news == []
    a.update_priorities(old, np.ones(4))
    stats = a.stats()
    assert (stats['stale'], stats['restarts'], stats['losses'], stats['rows_in']) == (4, 1, 1, 12)


def test_a_shard_with_a_path_goes_on(tmp_path):
    store = Rows(tmp_path / 'm')
    coordinator, parts = coordinator_of(
        PrioritizedReplay(None, bs=4, max_sz=100, seed=0, ratio=1, store=store)
    )
    a, b = Local(coordinator), Local(coordinator)
    old = [*a.add(block(0)), *b.add(block(0, 2))]
    for _ in range(3):
        a.sample()
    for part in parts:
        part.made.replay.close()
        part.kill()
    a.add(block(4))  # as if nothing had happened: the same episodes of the same environments
    stats = a.stats()
    assert not a.news
    assert (stats['restarts'], stats['batches'], stats['rows']) == (2, 3, 12)
    assert {*old} <= by_key(a, 12, 9).keys()
    windows = parts[0].made.replay.memory.windows([2], 2)
    assert windows.reward.tolist() == [[2, 4]]


def test_a_coordinator_that_is_killed_knows_it_again():
    coordinator, parts = coordinator_of(
        PrioritizedReplay(None, bs=4, max_sz=100, ratio=1 / 4, warmup=4, seed=0)
    )
    a = Local(coordinator)
    a.add(block(0, n=20))
    for _ in range(2):
        a.sample()
    again = Local(Coordinator('m', parts[0].made.data, parts))
    assert again.stats()['batches'] == 2
    for _ in range(2):
        again.sample()
    with pytest.raises(NotEnoughRows):
        again.sample()


def test_the_ratio_is_exact_while_many_wait():
    """Eight collectors and four learners at once, in random order.

    Neither side is ahead by more than it may be, plus what is under way."""
    coordinator, parts = coordinator_of(
        ExperienceReplay(None, bs=4, max_sz=1000, ratio=0.5, warmup=8, seed=0), ahead=24
    )

    async def collect(k):
        rank, first_key, number = (await coordinator.call('number_envs', 0, 9.0, None, 2))[0]
        for i in range(30):
            data = block(4 * i, k)
            data.rows['env_id'] += number * 2 + rank
            assert isinstance(
                (
                    await coordinator.call(
                        'add', 0, 9.0, rank, 4, k + 1, i, first_key, pickle.dumps(data)
                    )
                )[0],
                int,
            )
            seen.append(coordinator.counts())
            await asyncio.sleep(0)

    async def learn():
        while True:
            value, *_ = await coordinator.call('sample', 0, 0.5, None)
            if isinstance(value, NotEnoughRows):
                return
            seen.append(coordinator.counts())

    async def run():
        await asyncio.gather(*[collect(k) for k in range(8)], *[learn() for _ in range(4)])

    seen = []
    LOOP.run_until_complete(run())
    assert all(batches <= rows * 0.5 for rows, batches in seen)
    assert all(
        rows - batches / 0.5 <= 24 + 4 / 0.5 for rows, batches in seen
    )  # four draws were under way
    assert seen[-1] == (8 * 30 * 4 - 8, (8 * 30 * 4 - 8) // 2)


def test_limits_are_told_on_both_sides():
    coordinator, _ = coordinator_of(
        ExperienceReplay(None, bs=4, max_sz=100, ratio=1 / 4, warmup=6, seed=0), ahead=8
    )
    a = Local(coordinator)
    with pytest.raises(
        NotEnoughRows,
        match=r'0 rows can be drawn.*expected 4 rows, and 6 rows of warm-up'
        r'.*Remedy: see that a collector',
    ):
        a.sample()
    for first in range(0, 12, 4):
        a.add(block(first))
    with pytest.raises(
        NotEnoughDraws,
        match=r'too few batches were drawn within 0.05 seconds for 4 more rows; '
        r'got 6 rows, 0 batches, a ratio of 0.25.*ahead=8.*Remedy: see that a learner',
    ):
        a.add(block(12))
    assert len(a) == 12
    a.sample()
    with pytest.raises(
        NotEnoughRows, match='6 rows count for 1 batches; expected 8 rows, for batch 2'
    ):
        a.sample()
    a.add(block(12))
    a.sample()
    assert a.stats()['rows'] == 16


def test_steps_of_a_loop():
    "A step that has to wait for draws is not counted, and may be given again"
    coordinator, parts = coordinator_of(
        ExperienceReplay(None, bs=4, max_sz=100, seed=0, ratio=1, warmup=0), n=1, ahead=2
    )
    a = Local(coordinator)

    def step(i, end=False):
        a.add_step(np.float32([i, 0]), 1, float(i), np.float32([i + 1, 0]), end)

    for i in range(4):
        step(i, i == 3)
    with pytest.raises(NotEnoughDraws):
        step(4)
    for _ in range(4):
        a.sample()
    step(4)
    rows = parts[0].made.replay.memory[:].rows[['reward', 'episode_n', 'step_n']].tolist()
    assert rows == [(0, 1, 1), (1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 2, 1)]


def test_the_reset_after_a_refused_end_is_left_out():
    "The row that only resets does not become a step"
    coordinator, parts = coordinator_of(ExperienceReplay(None, bs=4, max_sz=100, seed=0), n=1)
    a = Local(coordinator)

    def step(i, reward, end=False):
        state, after = np.float32([[i, 0]]), np.float32([[i + 1, 0]])
        end = np.array([end])
        a.add_step(state, [1], np.array([reward]), after, end, autoreset_mode='next_step')

    step(0, 1.0)
    with pytest.raises(BlockError):
        step(1, np.nan, True)
    step(2, 0.0)  # from the last state of the episode to the first one of the next
    step(3, 1.0)
    rows = parts[0].made.replay.memory[:].rows
    assert rows['state'][:, 0].tolist() == [0, 3]
    assert rows[['episode_n', 'step_n']].tolist() == [(1, 1), (2, 1)]


def test_a_log_that_is_damaged_is_refused(tmp_path):
    ShardLog(tmp_path, 0)
    good = (tmp_path / 'service').read_bytes()
    for bad in b'', good[:-1], good[:8] + b'\xff' * 8 + good[16:]:
        (tmp_path / 'service').write_bytes(bad)
        with pytest.raises(StateError, match='damaged'):
            ShardLog(tmp_path, 0)


# ---- on a cluster ----

NAMESPACE = 'fastrl_replay'


@pytest.fixture(scope='module')
def cluster():
    "One machine, and programs beside this one"
    with ray_cluster(4) as (found, _):
        yield found


@pytest.fixture
def served(cluster):
    "What serves a replay, and stops it after the test; nothing hangs"
    names = []
    faulthandler.dump_traceback_later(240, exit=True)

    def serve(replay, name, **kw):
        names.append(name)
        return replay.serve(name, engine=RayEngine(num_cpus=0.5), **kw)

    yield serve
    for name in names:
        try:
            stop(name)
        except ArgumentError:
            pass  # it was stopped
    assert not actors()
    faulthandler.cancel_dump_traceback_later()


def actors():
    import ray

    return sorted(
        a['name']
        for a in ray.util.list_named_actors(all_namespaces=True)
        if a['namespace'] == NAMESPACE
    )


def inside(name, f):
    "What a function says of an actor"
    import ray

    return ray.get(ray.get_actor(name, namespace=NAMESPACE).__ray_call__.remote(f), timeout=60)


def pid_of(name):
    return inside(name, lambda self: os.getpid())


def rows_of(name, shards):
    "All rows: (key, who, reward)"
    found = []
    for i in range(shards):
        part = inside(
            f'{name}/{i}',
            lambda self: (
                [(r['who'], r['reward']) for r in self.replay.memory[:].rows]
                if len(self.replay.memory)
                else []
            ),
        )
        first_key = inside(f'{name}/{i}', lambda self: int(self.log.counts['first_key']))
        found += [
            ((k + first_key) * shards + i, int(who), float(x)) for k, (who, x) in enumerate(part)
        ]
    return found


PROGRAM = '''
import json, sys
from fastrl_replay.all import *
from test_service import block
kind, address, who, total = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
memory = connect('pong', limit=60. if kind == 'collect' else 25., address=address)
print('begun', flush=True)
if kind == 'collect':
    for first in range(0, total, 4):
        keys = memory.add(block(first, who)).tolist()
        print(json.dumps([who, first, keys]), flush=True)
else:
    try:
        for batch in memory:
            batch.update_priorities(1 + batch.reward.abs())
            print(json.dumps(batch.index.tolist()), flush=True)
    except NotEnoughRows: print('over', flush=True)
'''


class Program:
    "A program of its own, whose lines are read from a file"

    def __init__(self, path, kind, address, who=0, total=0):
        self.path = path / f'{kind}-{who}-{time.monotonic_ns()}'
        env = {**os.environ, 'PYTHONPATH': PLACES}
        with open(self.path, 'w') as out:
            self.process = subprocess.Popen(
                [sys.executable, '-c', PROGRAM, kind, address, str(who), str(total)],
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )

    def lines(self):
        whole, *_ = self.path.read_text().rpartition('\n')
        return [eval(x) for x in whole.split('\n') if x[:1] == '[']

    def wait_for(self, n):
        end = time.monotonic() + 90
        while len(self.lines()) < n:
            assert self.process.poll() is None and time.monotonic() < end, (
                self.process.stderr.read() if self.process.poll() is not None else self.lines()
            )
            time.sleep(0.02)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def end(self):
        assert self.process.wait(150) == 0, self.process.stderr.read()[-3000:]


@pytest.mark.slow
def test_programs_that_are_killed_and_begun_again(served, cluster, tmp_path):
    "No acknowledged row is lost or twice there; the ratio is exact but for what was in flight"
    ratio, shards = 1 / 4, 2
    served(
        PrioritizedReplay(None, bs=8, max_sz=10_000, ratio=ratio, warmup=16, seed=0),
        'pong',
        shards=shards,
        ahead=64,
    )
    at = cluster.address
    killed = Program(tmp_path, 'collect', at, 1, 4000)
    other = Program(tmp_path, 'collect', at, 2, 400)
    first = Program(tmp_path, 'learn', at)
    killed.wait_for(30)
    killed.kill()
    again = Program(tmp_path, 'collect', at, 3, 200)
    first.wait_for(20)
    first.kill()
    learner = Program(tmp_path, 'learn', at)
    for program in other, again, learner:
        program.end()
    rows = rows_of('pong', shards)
    there = {key: (who, x) for key, who, x in rows}
    assert len({*there.values()}) == len(rows)
    told = {}
    for program in killed, other, again:
        for who, start, keys in program.lines():
            told |= {key: (who, float(start + i)) for i, key in enumerate(keys)}
    assert told.items() <= there.items()
    assert 0 <= len(rows) - len(told) <= 4  # a block of the one that was killed
    assert sum(who == 3 for who, _ in told.values()) == 200
    stats = connect('pong').stats()
    assert stats['rows_in'] == len(rows)
    assert stats['batches'] == int((len(rows) - 16) * ratio)
    got = [*first.lines(), *learner.lines()]
    assert 0 <= stats['batches'] - len(got) <= 1  # of the learner that was killed
    assert {k for batch in got for k in batch} <= there.keys()


@pytest.mark.slow
@pytest.mark.parametrize('path', [True, False])
def test_an_actor_is_killed(served, tmp_path, path):
    "With a path all rows are back; without one, that is told. The coordinator may be killed, too"
    store = Rows(tmp_path / 'm') if path else None
    replay = PrioritizedReplay(None, bs=4, max_sz=1000, seed=0, store=store)
    memory, other = served(replay, 'pong', shards=2), connect('pong')
    for first in range(0, 40, 4):
        memory.add(block(first, 1))
        other.add(block(first, 2))
    before = {*rows_of('pong', 2)}
    os.kill(pid_of('pong/0'), signal.SIGKILL)
    if path:
        memory.add(block(40, 1))
        assert before <= {*rows_of('pong', 2)}
    else:
        says = 'pong: shard 0 of 2 was restarted, and 40 rows of its memory are lost.*Remedy'
        with pytest.warns(RuntimeWarning, match=says):
            memory.add(block(40, 1))
        with pytest.warns(RuntimeWarning, match='40 rows of its memory are lost'):
            other.stats()
    rows = 84 if path else 44
    assert len(memory) == rows
    os.kill(pid_of('pong'), signal.SIGKILL)
    assert memory.stats()['rows'] == rows
    memory.add(block(44, 1))
    assert len(other) == rows + 4
    assert len(other.sample(8)) == 8


@pytest.mark.slow
def test_it_outlives_its_program_and_leaves_nothing(served, cluster, tmp_path):
    "It outlives its program; stopped by name, it leaves no process, and can be served again"
    replay = f'ExperienceReplay(None, bs=4, max_sz=100, store=Rows({str(tmp_path / "m")!r}))'
    engine = f'RayEngine(num_cpus=.5, address={cluster.address!r})'
    program = f"from fastrl_replay.all import *\n{replay}.serve('pong', shards=2, engine={engine})"
    env = {**os.environ, 'PYTHONPATH': PLACES}
    subprocess.run([sys.executable, '-c', program], env=env, timeout=120, check=True)
    memory = connect('pong')
    try:
        keys = memory.add(block(0))
        assert actors() == ['pong', 'pong/0', 'pong/1']
        with pytest.raises(ArgumentError, match="the name 'pong' is taken.*Remedy: connect"):
            ExperienceReplay(None).serve('pong')
        with pytest.raises(ArgumentError, match="the name 'pang' .did you mean 'pong'"):
            connect('pang')
        pids = [pid_of(name) for name in actors()]
    finally:
        memory.stop()
    assert actors() == []
    end = time.monotonic() + 20
    while any(Path(f'/proc/{p}').exists() for p in pids):
        assert time.monotonic() < end
        time.sleep(0.05)
    with pytest.raises(ServiceError, match='the service ended.*Remedy'):
        memory.add(block(4))
    store = Rows(tmp_path / 'm')
    again = served(ExperienceReplay(None, bs=4, max_sz=100, store=store), 'pong', shards=2)
    assert sorted(again.sample(4).index.tolist()) == sorted(keys.tolist())


@pytest.mark.slow
def test_a_chain_after_it(served):
    "Batches through `.prefetch`, whose feedback arrives; a copy by pickle connects by itself"
    memory = served(PrioritizedReplay(None, bs=4, max_sz=100, alpha=1, eps=0, seed=0), 'pong')
    keys = memory.add(block(0, n=8))
    for i, batch in enumerate(memory.prefetch()):
        batch.update_priorities([0.01] * 4)  # the others are drawn the sooner
        if i == 20:
            break
    assert set(inside('pong/0', lambda self: self.replay.sampler.kept().tolist())) == {0.01}
    assert len(pickle.loads(pickle.dumps(memory))) == 8 == len(keys)
