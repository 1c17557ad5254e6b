"""A memory as a service: programs that come, go and are killed, beside plain models of it."""

import asyncio, faulthandler, os, pickle, signal, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace

import numpy as np, pytest
from gymnasium.spaces import Box, Discrete

from fastrl_replay.look.sample import samples_of
from fastrl_replay.all import *
from fastrl_replay.parallel import service
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


def test_wrong_arguments_are_refused_without_a_cluster():
    for limit in np.inf, -1:
        with pytest.raises(ArgumentError, match=f'connect: limit; got {limit}'):
            connect('a', limit)


# ---- without Ray: actors in this process ----


class Local:
    "What a service needs of Ray and of an engine, with actors in this process"

    needs, patience, address = {}, 60.0, None
    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError, RayActorError=RuntimeError)

    def __init__(self):
        self.cluster = self.util = self
        self.made, self.actors, self.loop = {}, {}, asyncio.new_event_loop()

    def remote(self, **how):
        def options(name, **_):
            def make(*args):
                if name in self.made:
                    raise ValueError(name)
                self.made[name] = lambda: service.Shard(*args)
                self.actors[name] = self.made[name]()

            return SimpleNamespace(remote=make)

        return lambda kind: SimpleNamespace(options=options)

    def get_actor(self, name, namespace):
        if name not in self.made:
            raise ValueError(name)
        call = SimpleNamespace(remote=lambda *words: self.actors[name].call(*words))
        return SimpleNamespace(name=name, call=call)

    def list_named_actors(self, all_namespaces):
        return [dict(name=name, namespace='fastrl_replay') for name in self.made]

    def get(self, ref, timeout):
        return self.loop.run_until_complete(ref)

    def kill(self, actor, no_restart):
        del self.made[actor.name]

    def restart(self, name):
        "Kill an actor; Ray starts it again"
        self.actors[name] = self.made[name]()


@pytest.fixture
def local(monkeypatch):
    local = Local()
    monkeypatch.setattr(service, '_cluster', lambda address: local)
    return local


def serve(local, replay, shards=2, ahead=1000):
    "Serve a replay as 'm'; return its parts"
    replay.serve('m', shards, ahead, local)
    return [local.actors[f'm/{i}'].replay for i in range(shards)]


def link(limit=0.05):
    return connect('m', limit)


def plain(row):
    return {n: np.asarray(row[n]).tolist() for n in DTYPE.names}


def test_rows_that_come_out_are_those_that_went_in(local):
    "Beside a plain dict of key → row, with three collectors whose environments have equal numbers"
    serve(local, PrioritizedReplay(None, bs=4, max_sz=500, seed=0))
    model, envs, found = {}, {}, {}
    for who in (1, 2, 3):
        memory = link()
        for first in range(0, 40, 4):
            rows = block(first, who)
            for key, row in zip(memory.add(rows).tolist(), rows.rows):
                model[key] = plain(row)
    for _ in range(80):
        for row in memory.sample(32).rows:
            found[int(row['index'])] = plain(row)
    assert found.keys() == model.keys()
    for key, got in found.items():
        want = model[key]
        env = envs.setdefault((want['who'], want['env_id']), got['env_id'])
        assert got == dict(want, env_id=env)
    assert len({*envs.values()}) == 6  # each collector's environments stay apart


def test_a_look_into_the_shards(local, tmp_path):
    "Pages have the rows of each; one that was restarted without them is empty"
    serve(local, PrioritizedReplay(None, bs=4, max_sz=500, seed=0))
    memory, other = link(), link()
    memory.add(block(0, n=40))
    other.add(block(0, 2, n=40))
    memory.sample()
    seen = [(s['name'], s['rows']) for s in samples_of(memory)]
    assert seen == [('shard 0', 40), ('shard 1', 40)]
    page = memory.page(tmp_path / 'a.html').read_text(encoding='utf-8')
    assert page.count('40 of 500 rows') == 2
    local.restart('m/1')
    with pytest.warns(RuntimeWarning, match='shard 1 of 2 was restarted.*lost.*Remedy'):
        assert [s['rows'] for s in samples_of(memory)] == [40, 0]


def test_shards_are_drawn_from_in_turn(local):
    "With weights of their own memory"
    serve(local, PrioritizedReplay(None, bs=8, max_sz=100, alpha=1, eps=0, beta=1, seed=1))
    a, b = link(), link()
    keys = [a.add(block(0, 1, 24)), b.add(block(0, 2, 8))]
    td = np.linspace(0.5, 3, 24)
    a.update_priorities(keys[0], td)
    batches = [b.sample() for _ in range(20)]
    first = [batch for batch in batches if batch.index[0] % 2 == 0]
    assert len(first) == 10
    for batch in first:
        weight = 1 / td[np.searchsorted(keys[0], batch.index)]
        np.testing.assert_allclose(batch.weight.numpy(), weight / weight.max(), rtol=1e-5)


def test_updates_reach_their_row_and_stale_keys_are_counted(local):
    parts = serve(local, PrioritizedReplay(None, bs=4, max_sz=8, alpha=1, eps=0, seed=0))

    def priorities():
        return [part.sampler.kept().tolist() for part in parts]

    a, b = link(), link()
    mine, theirs = a.add(block(0, 1, 8)), b.add(block(0, 2, 8))
    a.update_priorities([mine[3], theirs[5]], [7.0, 9.0])
    assert [p.index(max(p)) for p in priorities()] == [3, 5]
    a.add(block(8, 1, 4))  # the first four are overwritten
    a.update_priorities([*mine[:2], theirs[0]], [50.0, 50.0, 60.0])
    assert a.stats()['stale'] == 2
    before = priorities()
    assert before[1][0] == 60
    assert 50 not in before[0]
    with pytest.raises(StaleKey, match='is unknown'):
        a.update_priorities([mine[0] + 1000], [1.0])
    for td, says in ([1.0, np.nan], 'got nan'), ([1.0], r'got \[1\]'):
        with pytest.raises(ValueError, match=says):
            a.update_priorities(theirs[:2], td)
    assert priorities() == before


def doubles():
    "A block whose rewards have another dtype"
    dtype = [(n, 'f8' if n == 'reward' else DTYPE[n]) for n in DTYPE.names]
    return Steps(block(0).rows.astype(np.dtype(dtype, align=True)))


@pytest.mark.parametrize('wrong', [doubles(), block(0, env_id=-1)], ids='dtype id'.split())
def test_wrong_blocks_are_refused(local, wrong):
    "All is as it was, and the call may be repeated"
    serve(local, PrioritizedReplay(None, bs=4, max_sz=100, seed=0), shards=1)
    a = link()
    a.add(block(0))
    for _ in range(2):
        with pytest.raises(BlockError):
            a.add(wrong)
    assert len(a) == 4
    assert np.diff(a.add(block(4))).tolist() == [1, 1, 1]
    assert len(a.add(block(8)[0])) == 1  # one row that is no block


def test_lost_rows_are_told(local):
    """A shard without a path begins empty, and each program is told once.

    Old keys are stale, and is unknown again."""
    serve(local, PrioritizedReplay(None, bs=4, max_sz=100, seed=0))
    a, b = link(), link()
    old = a.add(block(0))
    b.add(block(0, 2))
    local.restart('m/0')
    with pytest.warns(RuntimeWarning, match='m: shard 0 of 2 was restarted') as told:
        new = a.add(block(4))
        assert new.min() > old.max()
        assert len(a) == 8
    assert sum('restarted' in str(w.message) for w in told) == 1
    with pytest.warns(RuntimeWarning, match='its rows in RAM are lost'):
        b.stats()
    a.update_priorities(old, np.ones(4))
    assert a.stats()['stale'] == 4


def test_a_shard_with_a_path_has_its_rows_after_a_restart(local, tmp_path):
    "Environments go on under other numbers, and no sequence leads from an old row to a new one"
    store = Rows(tmp_path / 'm')
    (part,) = serve(local, PrioritizedReplay(None, bs=4, max_sz=100, seed=0, store=store), 1)
    a = link()
    a.add(block(0))
    part.close()
    local.restart('m/0')
    with pytest.warns(RuntimeWarning, match='whose rows are kept'):
        a.add(block(4))
    rows = local.actors['m/0'].replay.memory[:].rows
    assert rows['reward'].tolist() == [*range(8)]
    assert rows['env_id'].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert {*a.sample(8).reward.tolist()} <= {*range(8)}


def test_the_ratio_is_exact_while_many_wait(local):
    """Eight collectors and four learners at once, in random order.

    Neither side is ahead by more than it may be."""
    replay = ExperienceReplay(None, bs=4, max_sz=1000, ratio=0.5, warmup=8, seed=0)
    serve(local, replay, 1, ahead=24)
    shard, seen = local.actors['m/0'], []

    async def collect(k):
        for i in range(30):
            _, keys = await shard.call('add', 9.0, k, block(4 * i, k))
            assert len(keys) == 4
            seen.append((shard.rows, shard.batches))
            await asyncio.sleep(0)

    async def learn():
        while True:
            _, value = await shard.call('sample', 0.5, 4)
            if isinstance(value, NotEnoughRows):
                return
            seen.append((shard.rows, shard.batches))

    async def run():
        await asyncio.gather(*[collect(k) for k in range(8)], *[learn() for _ in range(4)])

    local.loop.run_until_complete(run())
    assert all(batches <= rows * 0.5 for rows, batches in seen)
    assert all(rows - batches / 0.5 <= 24 for rows, batches in seen)
    assert seen[-1] == (8 * 30 * 4 - 8, (8 * 30 * 4 - 8) // 2)


def test_limits_are_told_on_both_sides(local):
    replay = ExperienceReplay(None, bs=4, max_sz=100, ratio=1 / 4, warmup=6, seed=0)
    serve(local, replay, 1, ahead=8)
    a = link()
    with pytest.raises(
        NotEnoughRows, match=r'no batch of 4 became due; got 0 rows.*warmup=6.*Remedy'
    ):
        a.sample()
    for first in range(0, 12, 4):
        a.add(block(first))
    with pytest.raises(
        NotEnoughDraws,
        match=r'a block of 4 rows waited too long; got 12 rows; '
        r'6 rows allow 0 batches; expected ratio=0.25, warmup=6, ahead=8.*Remedy: make sure that',
    ):
        a.add(block(12))
    assert len(a) == 12
    a.sample()
    with pytest.raises(NotEnoughRows, match='6 rows allow 1 batches'):
        a.sample()
    a.add(block(12))
    a.sample()
    assert a.stats()['rows'] == 16


def test_a_shard_without_rows_holds_up_no_draw(local):
    "Two shards, and one collector"
    serve(local, ExperienceReplay(None, bs=4, max_sz=100, ratio=1, seed=0))
    a = link(limit=1)
    a.add(block(0))
    assert [len(a.sample()) for _ in range(4)] == [4] * 4
    with pytest.raises(NotEnoughRows):
        a.sample()


def test_steps_of_a_loop(local):
    "A step that has to wait for draws is not counted, and may be given again"
    replay = ExperienceReplay(None, bs=4, max_sz=100, seed=0, ratio=1, warmup=0)
    (part,) = serve(local, replay, 1, ahead=2)
    a = link()

    def step(i, end=False):
        a.add_step(np.float32([i, 0]), 1, float(i), np.float32([i + 1, 0]), end)

    for i in range(4):
        step(i, i == 3)
    with pytest.raises(NotEnoughDraws):
        step(4)
    for _ in range(4):
        a.sample()
    step(4)
    rows = part.memory[:].rows[['reward', 'episode_n', 'step_n']].tolist()
    assert rows == [(0, 1, 1), (1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 2, 1)]


def test_the_reset_after_a_refused_end_is_left_out(local):
    "The row that only resets does not become a step"
    (part,) = serve(local, ExperienceReplay(None, bs=4, max_sz=100, seed=0), 1)
    a = link()

    def step(i, reward, end=False):
        state, after = np.float32([[i, 0]]), np.float32([[i + 1, 0]])
        end = np.array([end])
        a.add_step(state, [1], np.array([reward]), after, end, autoreset_mode='next_step')

    step(0, 1.0)
    with pytest.raises(BlockError):
        step(1, np.nan, True)
    step(2, 0.0)  # from the last state of the episode to the first one of the next
    step(3, 1.0)
    rows = part.memory[:].rows
    assert rows['state'][:, 0].tolist() == [0, 3]
    assert rows[['episode_n', 'step_n']].tolist() == [(1, 1), (2, 1)]


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
            stop_service(name)
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


def rows_of(memory):
    "All rows: (who, reward)"
    parts = memory.ask_shards(
        lambda replay: (
            [(r['who'], r['reward']) for r in replay.memory[:].rows] if len(replay.memory) else []
        )
    )
    return [(int(who), float(x)) for part in parts for who, x in part]


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
    ratio = 1 / 4
    replay = PrioritizedReplay(None, bs=8, max_sz=10_000, ratio=ratio, warmup=16, seed=0)
    memory = served(replay, 'pong', shards=2, ahead=64)
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
    rows = rows_of(memory)
    assert len({*rows}) == len(rows)
    told = {}
    for program in killed, other, again:
        for who, start, keys in program.lines():
            told |= {key: (who, float(start + i)) for i, key in enumerate(keys)}
    assert {*told.values()} <= {*rows}
    assert 0 <= len(rows) - len(told) <= 4  # a block of the one that was killed
    assert sum(who == 3 for who, _ in told.values()) == 200
    stats = memory.stats()
    assert stats['inserted'] == len(rows)
    assert stats['batches'] == sum(int((s['inserted'] - 16) * ratio) for s in stats['shards'])
    got = [*first.lines(), *learner.lines()]
    assert 0 <= stats['batches'] - len(got) <= 1  # of the learner that was killed
    for batch in got:
        assert len({k % 2 for k in batch}) == 1


@pytest.mark.slow
@pytest.mark.parametrize('path', [True, False])
def test_an_actor_is_killed(served, tmp_path, path):
    "With a path all rows are back; without one, that is told"
    store = Rows(tmp_path / 'm') if path else None
    replay = PrioritizedReplay(None, bs=4, max_sz=1000, seed=0, store=store)
    memory, other = served(replay, 'pong', shards=2), connect('pong')
    for first in range(0, 40, 4):
        memory.add(block(first, 1))
        other.add(block(first, 2))
    before = {*rows_of(memory)}
    os.kill(pid_of('pong/0'), signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match='pong: shard 0 of 2 was restarted.*Remedy'):
        memory.add(block(40, 1))
    assert (before <= {*rows_of(memory)}) == path
    with pytest.warns(RuntimeWarning, match='shard 0 of 2 was restarted'):
        other.stats()
    assert len(memory) == (84 if path else 44)
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
        memory.add(block(0))
        assert actors() == ['pong/0', 'pong/1']
        with pytest.raises(
            ArgumentError,
            match='already a service of this name; got pong.*Remedy: use it with connect',
        ):
            ExperienceReplay(None).serve('pong')
        with pytest.raises(ArgumentError, match='no service has this name; got pang'):
            connect('pang')
        pids = [pid_of(name) for name in actors()]
    finally:
        memory.stop()
    assert actors() == []
    end = time.monotonic() + 20
    while any(Path(f'/proc/{p}').exists() for p in pids):
        assert time.monotonic() < end
        time.sleep(0.05)
    with pytest.raises(ServiceError, match='shard 0 ended.*Remedy'):
        memory.add(block(4))
    store = Rows(tmp_path / 'm')
    again = served(ExperienceReplay(None, bs=4, max_sz=100, store=store), 'pong', shards=2)
    assert sorted(again.sample(4).reward.tolist()) == [0, 1, 2, 3]


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
