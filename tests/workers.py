"What tests of worker processes share."

import gc, os, signal, time
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
import torch.utils.data._utils
from torch import multiprocessing as mp

from fastrl_replay.all import ScriptedEnv, script
from fastrl_replay.testing import through_file

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = (
    0.5  # so long a DataLoader waits for a worker that has failed; else 5 seconds
)

FORK = dict(method='fork')


def zeros(state):
    return [0] * len(state)


def scripted(*lengths, env=0):
    return ScriptedEnv(**script(*lengths, env=env))


def short():
    return scripted(3, -2)


@pytest.fixture(autouse=True)
def no_process_is_left():
    "After each test, every process that it started is gone"
    yield
    if not mp.active_children():
        return  # to look for cycles takes long
    gc.collect()
    deadline = time.monotonic() + 5
    while mp.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not mp.active_children()


class Late(BaseException):
    "No `Exception`: nothing takes it for the error of a worker"


@contextmanager
def within(seconds):
    "End what takes longer, so that a test that hangs fails"

    def late(*_):
        raise Late(f'{seconds} seconds')

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


TESTS = Path(__file__).parent
PLACES = os.pathsep.join(
    map(str, (TESTS / 'parallel', TESTS, TESTS.parent))
)  # where processes find these modules


def learns_the_same(chain, first, then):
    "Check the losses of a chain, of an equal one, and of one that continues its saved state"

    def losses(pipe, n):
        return [r['loss'] for r in islice(pipe, n)]

    a, b, c = chain(), chain(), chain()
    seen, state = losses(a, first), through_file(a.state_dict())
    rest = losses(a, then)
    assert losses(b, first + then) == seen + rest  # saving changed nothing
    c.load_state_dict(state)
    assert losses(c, then) == rest
    for pipe in a, b, c:
        pipe.close()


@contextmanager
def ray_cluster(head, *nodes):
    "Machines with so many CPUs, all of them on this one: the cluster, and those beside the first"
    ray = pytest.importorskip('ray')
    os.environ.update(
        RAY_USAGE_STATS_ENABLED='0', RAY_raylet_start_wait_time_s='120'
    )  # on a busy machine
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args=dict(num_cpus=head, include_dashboard=False)
    )
    nodes = [cluster.add_node(num_cpus=n) for n in nodes]
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        logging_level='ERROR',
        runtime_env=dict(env_vars=dict(PYTHONPATH=PLACES)),
    )
    yield cluster, nodes
    ray.shutdown()
    cluster.shutdown()
