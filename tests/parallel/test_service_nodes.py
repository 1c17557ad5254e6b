"""A served memory on a cluster whose nodes are lost or preempted.

With a path nothing is lost; without one, that is told."""

import faulthandler, time, warnings

import pytest

from fastrl_replay.all import *
from test_service import actors, block, inside, rows_of
from workers import no_process_is_left, ray_cluster  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning'),
]


@pytest.fixture
def nodes():
    "Three nodes with room for a shard each, beside the one of this program"
    faulthandler.dump_traceback_later(400, exit=True)
    with ray_cluster(0, 1, 1, 1) as (cluster, _):
        yield cluster
    faulthandler.cancel_dump_traceback_later()


def node_id(name):
    return inside(name, lambda self: __import__('ray').get_runtime_context().get_node_id())


def served(path, **kw):
    replay = PrioritizedReplay(None, bs=4, max_sz=1000, seed=0, store=path and Rows(path))
    return replay.serve('pong', shards=2, engine=RayEngine(num_cpus=1), **kw)


@pytest.mark.parametrize('path, preempted', [(True, True), (False, False)])
def test_a_node_under_a_service(nodes, tmp_path, path, preempted):
    """Its shard begins on another node.

    It has all rows if they are in files that this node sees; otherwise the loss is told."""
    memory = served(tmp_path / 'm' if path else None)
    other = connect('pong')
    for first in range(0, 40, 4):
        memory.add(block(first, 1))
        other.add(block(first, 2))
    before = {*rows_of(memory)}
    assert len(before) == 80
    there = node_id('pong/0')
    (node,) = [n for n in nodes.worker_nodes if n.node_id == there]
    nodes.remove_node(node, allow_graceful=preempted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert len(memory.add(block(40, 1))) == 4
        while node_id('pong/0') == there:
            time.sleep(0.2)  # a process may outlive its raylet for some seconds
        assert len(memory.sample(4)) == 4
        memory.stats()
    told = [w for w in caught if 'shard 0 of 2 was restarted' in str(w.message)]
    assert len(told) == 1
    now = {*rows_of(memory)}
    assert (before <= now) == path
    assert len(memory) == len(now)
    memory.stop()
    assert not actors()
