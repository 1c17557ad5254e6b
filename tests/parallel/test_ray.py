"""Workers as Ray actors: the tests of shards again, and what is lost with an actor or machine."""

import faulthandler, multiprocessing, os, signal, sys, time
from itertools import islice

import gymnasium as gym, pytest, torch

import test_shards
from fastrl_replay.all import *
from fastrl_replay.parallel import ray_engine
from fastrl_replay.parallel.engines import ChainCopy, outline
from fastrl_replay.pipe import WorkerInfo
from test_shards import Told, Version
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
    'name, args',
    [
        ('test_errors_reach_the_rows_that_they_are_for', ()),
        ('test_as_a_local_replay', ('sequences',)),
        ('test_wrong_feedback_that_only_a_shard_knows_ends_the_run', ()),
        ('test_learners_and_prefetch_follow', ()),
    ],
)
def test_as_with_processes(cluster, monkeypatch, name, args):
    monkeypatch.setattr(test_shards, 'FORK', ON_RAY)
    getattr(test_shards, name)(*args)


@pytest.mark.slow
def test_checkpoints_of_shards_on_disk_are_restored(cluster, monkeypatch, tmp_path):
    monkeypatch.setattr(test_shards, 'FORK', ON_RAY)
    test_shards.test_checkpoints_of_shards_on_disk_are_restored(tmp_path, 'prioritized')


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
    actors = GymStepper('CartPole-v1', seed=0).parallel(2, chunk=1, restarts=99)
    replay = Told(actors.prioritized_replay(bs=8, max_sz=1000, seed=0))
    return replay.parallel(2, chunk=2, restarts=9, **{**ON_RAY, **kw})


def answered(pipe, n):
    "Answer so many batches; the newest process of each shard that gave some"
    found = {}
    for batch, pid in islice(pipe, n):
        batch.update_priorities(torch.rand(len(batch)))
        found[int(batch.index[0]) % 2] = pid
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Parallel')
def test_actors_of_shards_and_a_kill(cluster):
    "Processes in an actor; the actor is killed, and its processes with it"
    with shards() as pipe:
        os.kill(answered(pipe, 30)[1], signal.SIGKILL)
        assert {*answered(pipe, 30)} == {0, 1}
        stats = pipe.stats()
    assert stats['restarts'] == 1
    assert stats['lost'] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Parallel')
def test_a_machine_is_lost(cluster):
    "The learner continues with the other shard; the lost one restarts once a machine has room"
    cluster, nodes = cluster
    until = time.monotonic() + 400  # no hang
    with shards(ordered=False, engine=RayEngine(num_cpus=3)) as pipe:  # one for each machine
        answered(pipe, 30)
        cluster.remove_node(nodes.pop())
        while pipe.stats()['restarts'] < 1:
            answered(pipe, 10)
            assert time.monotonic() < until
        assert len(answered(pipe, 30)) == 1
        nodes.append(cluster.add_node(num_cpus=4))
        while len(answered(pipe, 10)) < 2:
            assert time.monotonic() < until
        assert pipe.stats()['restarts'] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings('error::RuntimeWarning')
def test_no_room_is_said(cluster):
    pipe = GymStepper(short, zeros).parallel(1, engine=RayEngine(num_cpus=1000, patience=2))
    with pytest.raises(RuntimeWarning, match='no machine of the cluster has room for it'):
        next(iter(pipe))
    pipe.close()


# ---- the engine alone ----


class OneThread:
    """What the engine needs of Ray, in this process: actors that answer when they are looked at.

    One that is killed raises."""

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
    "Requests, weights, errors, an actor that dies, the end: all but Ray itself"
    fake, policy = OneThread(), Version()
    monkeypatch.setattr(ray_engine, '_ray', lambda: fake)
    engine = RayEngine(num_cpus=0.5, resources=dict(disk=1))
    steps = GymStepper('CartPole-v1', policy, seed=0)
    pipe = steps.prioritized_replay(bs=4, max_sz=100, seed=0).parallel(
        2, chunk=1, restarts=1, engine=engine
    )
    seen = []
    for batch in islice(pipe, 20):
        with torch.no_grad():
            policy.version += 1
        batch.update_priorities(torch.ones(4))
        seen.append((int(batch.index[0]) % 2, float(batch.version.max())))
    assert [shard for shard, _ in seen] == [0, 1] * 10
    assert seen[-1][1] > 10  # weights have arrived
    assert fake.resources['num_cpus'] == 0.5
    assert fake.resources['resources'] == dict(disk=1)
    fake.actors[1].alive = False
    says = (
        r'worker 1 of 2 failed, restart 1 of 1, \d+ rows of its buffer are lost; .*The actor died'
    )
    with pytest.warns(RuntimeWarning, match=says):
        list(islice(pipe, 4))
    assert pipe.stats()['lost'] > 0
    fake.actors[2].alive = False
    with pytest.raises(WorkerError, match='The actor died'):
        list(islice(pipe, 4))
    assert fake.killed == 3


@pytest.mark.filterwarnings('error::RuntimeWarning')
def test_an_actor_that_is_stuck_is_named(monkeypatch):
    fake = OneThread()
    monkeypatch.setattr(ray_engine, '_ray', lambda: fake)
    pipe = GymStepper(short, zeros).parallel(1, chunk=1, engine=RayEngine(patience=0.2))
    blocks = iter(pipe)
    next(blocks)
    fake.wait = lambda refs, **kw: ([], refs)
    with pytest.raises(RuntimeWarning, match=r'worker 0 of 1 has not answered for 0 seconds'):
        list(islice(blocks, 3))
    pipe.close()


def test_the_environments_of_an_actor_are_closed(monkeypatch, tmp_path):
    "In a call of its own, in which the chain must know which worker it is"
    fake = OneThread()
    monkeypatch.setattr(ray_engine, '_ray', lambda: fake)

    def make():
        env = gym.make('CartPole-v1')
        env.close = (tmp_path / 'closed').touch
        return env

    data, tensors = outline(ChainCopy(GymStepper(make, zeros)))
    engine = RayEngine()
    worker = engine.start(WorkerInfo(0, 2), 0, data, engine.weights(tensors), 1)
    _, chunk, error = worker.result(worker.request('next', [], tensors, 0))
    assert error is None and len(chunk['items']) == 1
    assert not [*tmp_path.iterdir()]
    fake.get(worker.actor.close.remote())
    assert [*tmp_path.iterdir()]


class Connected:
    "As Ray is in a program that is connected"

    def is_initialized(self):
        return True


def test_a_fork_of_a_program_with_ray_says_so(monkeypatch):
    "Where a call would wait without end"
    ray = Connected()
    monkeypatch.setattr(ray_engine, '_ray', lambda: ray)
    monkeypatch.setitem(sys.modules, 'ray', ray)

    def child():
        with pytest.raises(RuntimeError, match='Ray does not work in a fork'):
            RayEngine().cluster

    process = multiprocessing.get_context('fork').Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
