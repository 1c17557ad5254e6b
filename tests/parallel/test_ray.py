"""Workers as actors of Ray: the tests of shards once more, and what is lost with an actor or a machine."""

import faulthandler, os, signal, subprocess, sys, threading, time
from pathlib import Path
from itertools import islice

import pytest, torch

import test_shards
from fastrl_replay.all import *
from test_shards import Version
from workers import FORK, no_process_is_left, ray_cluster, short, zeros  # noqa: F401

ray = pytest.importorskip('ray')
pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning')


@pytest.fixture(scope='module')
def cluster():
    "Two machines beside the one of the learner, all of them on this one"
    with ray_cluster(0, 4, 4) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_hangs():
    "A test that takes three minutes is ended, with all that waits for it"
    faulthandler.dump_traceback_later(180, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


ON_RAY = dict(engine=RayEngine(num_cpus=0.5))
ENGINES = [
    pytest.param(FORK, id='processes'),
    pytest.param(ON_RAY, id='ray', marks=pytest.mark.slow),
]


@pytest.fixture
def engine(request):
    if request.param is ON_RAY:
        request.getfixturevalue('cluster')
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        'test_errors_reach_the_rows_that_they_are_for',
        'test_any_form_of_a_batch_answers',
        'test_what_is_told_is_copied',
        'test_wrong_feedback_that_only_a_shard_knows_ends_the_run',
        'test_feedback_never_waits',
        'test_learners_and_prefetch_follow',
        'test_unordered_passes_end_and_begin_again',
        'test_a_slow_worker_does_not_hold_up_the_others',
        'test_the_line_of_each_shard',
    ],
)
def test_as_with_processes(cluster, monkeypatch, name):
    monkeypatch.setattr(test_shards, 'FORK', ON_RAY)
    getattr(test_shards, name)()


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['prioritized', 'sequences'])
def test_as_a_local_replay(cluster, monkeypatch, kind):
    monkeypatch.setattr(test_shards, 'FORK', ON_RAY)
    test_shards.test_as_a_local_replay(kind)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['prioritized', 'sequences'])
def test_checkpoints_of_shards_on_disk_are_restored(cluster, monkeypatch, tmp_path, kind):
    monkeypatch.setattr(test_shards, 'FORK', ON_RAY)
    test_shards.test_checkpoints_of_shards_on_disk_are_restored(tmp_path, kind, 2)


@pytest.mark.slow
def test_the_same_stream_as_from_processes(cluster):
    "Blocks, weights and what is restored in the middle"

    def blocks(**kw):
        policy = Version()
        with GymStepper(['CartPole-v1'] * 2, policy, seed=0).parallel(2, chunk=2, **kw) as pipe:
            seen = []
            for b in islice(pipe, 20):
                seen.append(b)
                with torch.no_grad():
                    policy.version += 1
            state = pipe.state_dict()
            rest = list(islice(pipe, 10))
        with GymStepper(['CartPole-v1'] * 2, policy, seed=0).parallel(2, chunk=2, **kw) as twin:
            twin.load_state_dict(state)
            assert list(islice(twin, 10)) == rest
        return seen

    assert blocks(**ON_RAY) == blocks(method='forkserver')


def shards(**kw):
    return (
        GymStepper('CartPole-v1', seed=0)
        .parallel(2, chunk=1, restarts=99)
        .prioritized_replay(bs=8, max_sz=1000, seed=0)
        .parallel(2, chunk=2, restarts=9, **{**ON_RAY, **kw})
    )


def go_on(pipe, n):
    "Batches, told and seen: which shards they are of"
    found = []
    for batch in islice(pipe, n):
        batch.update_priorities(torch.rand(len(batch)))
        found.append(int(batch.index[0]) % 2)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Parallel')
def test_actors_of_shards_and_a_kill(cluster):
    "Processes in an actor; the actor is killed, and its processes with it"
    pipe = shards()
    assert go_on(pipe, 30).count(1) > 10
    pid = ray.get(pipe._workers[1].actor.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    assert {*go_on(pipe, 30)} == {0, 1}
    assert pipe.stats()['restarts'] == 1 and pipe.stats()['lost'] > 0
    pipe.close()


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Parallel')
def test_a_machine_is_lost(cluster):
    "The learner goes on with the other shard; the lost one lives again, as soon as a machine has room for it"
    cluster, nodes = cluster
    pipe = shards(ordered=False, engine=RayEngine(num_cpus=3))  # one for each machine
    go_on(pipe, 30)
    cluster.remove_node(nodes.pop())
    began = time.monotonic()
    while pipe.stats()['restarts'] < 1 and time.monotonic() - began < 60:
        go_on(pipe, 10)
    assert pipe.stats()['restarts'] == 1 and len({*go_on(pipe, 30)}) == 1
    nodes.append(cluster.add_node(num_cpus=4))
    while len({*go_on(pipe, 10)}) < 2 and time.monotonic() - began < 180:
        pass
    assert {*go_on(pipe, 300)} == {0, 1} and pipe.stats()['restarts'] == 1
    pipe.close()


class Heavy(Version):
    "With four MB that nothing is computed with"

    def __init__(self):
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros(1_000_000))


def stored():
    "Bytes that each node's object store has taken in so far, that of the learner first"
    from ray._private.internal_api import node_stats

    here = ray.get_runtime_context().get_node_id()
    return [
        node_stats(
            node['NodeManagerAddress'], node['NodeManagerPort'], include_memory_info=False
        ).store_stats.cumulative_created_bytes
        for node in sorted(ray.nodes(), key=lambda node: node['NodeID'] != here)
        if node['Alive']
    ]


@pytest.mark.slow
@pytest.mark.parametrize('n', [4, 32])
def test_weights_go_to_each_machine_once(cluster, n):
    "However many workers ask there, no oftener than asked for, and not at all where nothing has changed; how old they are is bounded, and told"
    faulthandler.dump_traceback_later(600, exit=True)  # 32 actors start
    policy, rounds = Heavy(), 6
    with GymStepper('CartPole-v1', policy, seed=0).parallel(
        n, chunk=1, weights_every=n, engine=RayEngine(num_cpus=8 / n)
    ) as pipe:
        items, seen = enumerate(pipe), []

        def go_on(rounds, changed):
            before, written = stored(), pipe.stats()['weights_written']
            for _ in range(rounds * n):
                k, block = next(items)
                seen.append(k - int(block.version.max()))
                if changed:
                    with torch.no_grad():
                        policy.version.fill_(k + 1)
            return [(b - a) / 4e6 for a, b in zip(before, stored())], pipe.stats()[
                'weights_written'
            ] - written

        go_on(2, True)
        copies, written = go_on(rounds, True)
        assert rounds - 1 <= written <= rounds + 1
        assert all(written - 1.1 <= c <= written + 1.1 for c in copies) and len(copies) == 3, (
            copies,
            written,
        )  # one may still be on its way
        go_on(2, False)
        assert max(go_on(rounds, False)[0]) < 0.5
        stats = pipe.stats()
        assert max(seen[: (2 + rounds) * n]) <= stats['lag_max'] <= stats['lag_bound'], (
            max(seen),
            stats,
        )
        assert len({w['items'] for w in stats['workers']}) <= 2  # all of them gave some


@pytest.mark.slow
def test_no_room_is_said(cluster):
    "Instead of waiting without end"
    pipe = GymStepper(short, zeros).parallel(1, engine=RayEngine(num_cpus=1000, patience=2))
    with pytest.raises(
        WorkerError, match='no machine of the cluster has started it within 2 seconds'
    ):
        next(iter(pipe))
    with pytest.raises(ArgumentError, match="method, with engine='ray'"):
        GymStepper(short, zeros).parallel(1, engine='ray', method='fork')


# ---- the engine alone ----


class OneThread:
    "What the engine asks of Ray, with actors that answer when they are looked at, in this process; one that is killed raises"

    class exceptions:
        pass

    def __init__(self):
        self.actors, self.killed = [], 0

    def is_initialized(self):
        return True

    def put(self, x):
        return x

    def remote(self, **resources):
        self.resources = resources
        return lambda kind: type(
            'Remote', (), dict(remote=lambda _, *args: self._actor(kind, args))
        )()

    def _actor(self, kind, args):
        made = kind(*args)

        class Method:
            def __init__(me, name):
                me.remote = lambda *given: (actor, name, given)

        actor = type(
            'Actor', (), dict(alive=True, made=made, answer=Method('answer'), close=Method('close'))
        )()
        self.actors.append(actor)
        return actor

    def wait(self, refs, timeout=None, num_returns=1):
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref):
        actor, name, given = ref
        if not actor.alive:
            raise RuntimeError('The actor died unexpectedly')
        return getattr(actor.made, name)(*given)

    def kill(self, actor, no_restart):
        actor.alive, self.killed = False, self.killed + 1


def test_the_engine_asks_ray(monkeypatch):
    "Requests, weights, errors told, an actor that dies, the end: all but Ray itself, in a second"
    from fastrl_replay.parallel import ray_engine

    fake, policy = OneThread(), Version()
    monkeypatch.setattr(ray_engine, '_ray', lambda: fake)
    pipe = (
        GymStepper('CartPole-v1', policy, seed=0)
        .prioritized_replay(bs=4, max_sz=100, alpha=1, eps=0, seed=0)
        .parallel(2, chunk=1, restarts=1, engine=RayEngine(num_cpus=0.5, resources=dict(disk=1)))
    )
    seen = []
    for batch in islice(pipe, 20):
        with torch.no_grad():
            policy.version += 1
        batch.update_priorities(torch.full((4,), 1 + float(batch.index[0] % 2)))
        seen.append((int(batch.index[0]) % 2, float(batch.version.max())))
    assert [s for s, _ in seen] == [0, 1] * 10 and seen[-1][1] > 10  # weights have arrived
    assert fake.resources == dict(
        num_cpus=0.5, num_gpus=0, resources=dict(disk=1), max_restarts=0, max_task_retries=0
    )
    told = [a.made.served.replay.sampler.tree[0] for a in fake.actors]
    assert 1.0 in told or 2.0 in told
    fake.actors[1].alive = False
    with pytest.warns(
        RuntimeWarning,
        match=r'worker 1 of 2 failed, restart 1 of 1, \d+ rows of its memory are lost; got RuntimeError: The actor died',
    ):
        list(islice(pipe, 4))
    assert len(fake.actors) == 3 and pipe.stats()['lost'] > 0
    fake.actors[2].alive = False
    with pytest.raises(WorkerError, match='The actor died'):
        list(islice(pipe, 4))
    assert pipe._workers == [] and fake.killed == 3


class Unreachable:
    "Ray, where a cluster has died of which a record is left: it tries on and on"

    def __init__(self):
        self.calls, self.reachable = 0, threading.Event()

    def is_initialized(self):
        return False

    def init(self, *args, **kw):
        self.calls += 1
        self.reachable.wait(30)


def test_a_cluster_that_does_not_answer_is_not_waited_for_without_end(monkeypatch, tmp_path):
    "The error says what was tried and how to start anew; Ctrl-C works, and what still tries is not begun again"
    from fastrl_replay.parallel import ray_engine

    fake = Unreachable()
    monkeypatch.setattr(ray_engine, '_ray', lambda: fake)
    monkeypatch.setattr(ray_engine, '_connecting', {})
    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    monkeypatch.setenv('RAY_TMPDIR', str(tmp_path))
    (tmp_path / 'ray').mkdir()
    (tmp_path / 'ray' / 'ray_current_cluster').write_text('10.0.0.1:6379')
    pipe = GymStepper(short, zeros).parallel(1, engine=RayEngine(patience=0.5))
    with pytest.raises(
        ArgumentError,
        match=r"no answer from '10.0.0.1:6379', from .*ray_current_cluster, within 0.5 seconds.*Remedy: `ray stop --force`, or remove that file, in a new process",
    ):
        next(iter(pipe))
    monkeypatch.setenv('RAY_ADDRESS', '10.0.0.2:6379')
    with pytest.raises(
        ArgumentError, match=r"no answer from '10.0.0.2:6379', from RAY_ADDRESS.*unset RAY_ADDRESS"
    ):
        next(iter(pipe))
    assert fake.calls == 1
    patient = GymStepper(short, zeros).parallel(1, engine='ray')
    began = time.monotonic()
    t = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    t.start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(patient))
    assert time.monotonic() - began < 10 and fake.calls == 1
    fake.reachable.set()


class Refuses:
    "As Ray does where a cluster wants a token and the program has none"

    def is_initialized(self):
        return False

    def init(self, *args, **kw):
        try:
            raise RuntimeError(
                'Failed to connect to GCS. Last connection error: AuthenticationError: RPC error: InvalidAuthToken: missing'
            )
        except RuntimeError as e:
            raise ConnectionError('Failed to connect to Ray cluster') from e


def test_a_cluster_that_wants_a_token(monkeypatch):
    "`ray start` asks for one as soon as there is one, but programs don't send it: Ray's error names another cause"
    from fastrl_replay.parallel import ray_engine

    monkeypatch.setattr(ray_engine, '_ray', lambda: Refuses())
    with pytest.raises(
        ArgumentError,
        match="'10.0.0.1:6379', as it was given, lets in no program without its token; .* Remedy: export RAY_AUTH_MODE=token",
    ):
        RayEngine(address='10.0.0.1:6379').cluster


class Connected:
    "As Ray is where a program is connected"

    def is_initialized(self):
        return True

    def get_runtime_context(self):
        return type('Context', (), dict(gcs_address='10.0.0.1:6379'))


def test_a_program_has_one_cluster_at_a_time(monkeypatch):
    "The address of another one was passed over, and a service of that name in the wrong cluster taken"
    from fastrl_replay.parallel import ray_engine

    ray = Connected()
    monkeypatch.setattr(ray_engine, '_ray', lambda: ray)
    for address in None, 'auto', '10.0.0.1:6379', 'localhost:6379':
        assert RayEngine(address=address).cluster is ray
    for address in '10.0.0.2:6379', '10.0.0.1:6380':
        with pytest.raises(
            ArgumentError,
            match=f"address '{address}'; got this program is connected to 10.0.0.1:6379",
        ):
            RayEngine(address=address).cluster
        with pytest.raises(ArgumentError, match='this program is connected to'):
            connect('pong', address=address)


def test_a_fork_of_a_program_with_ray_says_so(monkeypatch):
    "Where a call would wait without end"
    from fastrl_replay.parallel import ray_engine

    ray = Connected()
    monkeypatch.setattr(ray_engine, '_ray', lambda: ray)
    monkeypatch.setitem(sys.modules, 'ray', ray)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            RayEngine().cluster
        except RuntimeError as e:
            os.write(write, str(e).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as said:
        assert "Ray does not work in a fork of a process that uses it" in said.read()
    os.waitpid(pid, 0)
    assert RayEngine().cluster is ray


@pytest.mark.slow
def test_a_real_cluster_that_is_gone():
    "In a process of its own, which ends by itself"
    program = "from fastrl_replay.all import *\nnext(iter(GymStepper('CartPole-v1').parallel(1, engine=RayEngine(patience=3))))"
    ran = subprocess.run(
        [sys.executable, '-c', program],
        env={**os.environ, 'RAY_ADDRESS': '127.0.0.1:1'},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ran.returncode == 1 and "within 3 seconds" in ran.stderr, ran.stderr[-2000:]


@pytest.mark.slow  # smaller: `test_actors_of_shards_and_a_kill`, `test_a_machine_is_lost`
def test_kills():
    "Of actors, shards and machines, at random moments, on a cluster of the script's own"
    faulthandler.cancel_dump_traceback_later()  # it has its own
    script = Path(__file__).parents[1] / 'kill_workers.py'
    ran = subprocess.run(
        [sys.executable, script, '--engine', 'ray', '--kills', '20', '--seed', '1'],
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=script.parent.parent,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
