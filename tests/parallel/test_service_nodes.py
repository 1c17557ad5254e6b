"""A served memory on a cluster whose nodes are lost, or pre-empted: with a path nothing is lost, without one that is told."""

import faulthandler, re, time, warnings
from concurrent.futures import ThreadPoolExecutor

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


def node_of(cluster, name):
    "Where an actor runs; None: where this program is"
    there = node_id(name)
    return next((n for n in cluster.worker_nodes if n.node_id == there), None)


def served(path, **kw):
    replay = PrioritizedReplay(None, bs=4, max_sz=1000, seed=0, store=path and Rows(path))
    return replay.serve('pong', shards=2, engine=RayEngine(num_cpus=1), **kw)


def said(caught):
    return [str(w.message) for w in caught if 'pong' in str(w.message)]


@pytest.mark.parametrize('preempted', [True, False], ids=['pre-empted', 'lost'])
@pytest.mark.parametrize('path', [True, False], ids=['path', 'memory'])
def test_a_node_under_a_service(nodes, tmp_path, path, preempted):
    "Its shard begins on another node: with all rows where they lie in files that this one sees, else without them; then there is no room, until a node comes"
    memory = served(tmp_path / 'm' if path else None)
    other, keys = connect('pong'), []
    for first in range(0, 40, 4):
        keys += [*memory.add(block(first, 1)), *other.add(block(first, 2))]
    before = {*rows_of('pong', 2)}
    assert {k for k, *_ in before} == {*keys} and len(before) == 80
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for i in (0, 1):  # for the first shard there is room, for the second one there will be
            there, alone = (
                node_of(nodes, f'pong/{i}'),
                node_of(nodes, 'pong') is not node_of(nodes, f'pong/{i}'),
            )  # without the coordinator
            rows = sum(k % 2 == i for k, *_ in rows_of('pong', 2))
            nodes.remove_node(there, allow_graceful=preempted)
            with ThreadPoolExecutor(1) as waits:
                added = waits.submit(
                    lambda: (
                        len(memory.add(block(40 + 4 * i, 1))),
                        memory.stats(),
                        len(memory.sample(4)),
                    )
                )
                if i == 1:
                    time.sleep(5)
                    nodes.add_node(wait=False, num_cpus=1)
                rows_in, _, drawn = added.result()
            assert rows_in == drawn == 4
            while node_id(f'pong/{i}') == there.node_id:
                time.sleep(0.2)  # a process may outlive its raylet for some seconds
            memory.stats()
            told = [m for m in said(caught) if f'shard {i} of 2 was restarted' in m]
            assert len(told) == (not path), said(caught)
            if not told:
                continue
            found = re.search(
                '([0-9]+) rows of its memory are lost.*serve a store with a path', told[0]
            )
            assert (
                int(found[1]) in (rows, rows + 4)
                if alone
                else 'the rows that it had are lost' in told[0]
            ), told  # 4 of before its process ended
    stats, now = memory.stats(), rows_of('pong', 2)
    assert (
        len(memory) == len(now) == len({*now}) == stats['rows']
        and (before <= {*now}) == path
        and (len(now) == 88) == path
    )
    memory.stop()
    assert not actors()
