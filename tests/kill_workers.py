"""Kills actors and shards of a training run at random moments, and looks whether it goes on.

    python tests/kill_workers.py                 # 50 kills: four actors, two shards, as processes
    python tests/kill_workers.py --engine ray    # on a Ray cluster of three machines, all of them on this one; machines are lost, too

Looked at: that batches go on coming, from both shards; that none comes twice; that the key of a row is never given to another one;
that what is told of lost rows is counted; that no process is left in the end."""
import argparse, faulthandler, os, random, signal, subprocess, sys, time, uuid, warnings
from collections import Counter
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch

from fastrl_replay.all import *
from torch import nn

def zeros(state): return [0]*len(state)

def children(pid):
    "The processes that this one has started and that still run"
    found = []
    for task in Path(f'/proc/{pid}/task').glob('*/children'):
        try: found += [int(c) for c in task.read_text().split()]
        except OSError: pass
    return found

def is_actor(pid):
    try: return b'python' in Path(f'/proc/{pid}/cmdline').read_bytes() and b'resource_tracker' not in Path(f'/proc/{pid}/cmdline').read_bytes()
    except OSError: return False

@contextmanager
def nothing_hangs(seconds):
    "What takes longer shows where it waits, and ends the program"
    faulthandler.dump_traceback_later(seconds, exit=True)
    try: yield
    finally: faulthandler.cancel_dump_traceback_later()

class Local:
    "Two shards as processes, with two actors each"
    limit = 120   # seconds for forty batches
    def __init__(self): self.engine = dict(method='fork')
    def shards(self, pipe): return [w.process.pid for w in pipe._workers]
    def lose(self, rng): return False
    def close(self): pass

class OnRay:
    "The same on machines of a cluster"
    limit = 600   # a busy machine takes a minute for a new actor
    def __init__(self):
        os.environ['RAY_USAGE_STATS_ENABLED'] = '0'
        import ray
        from ray.cluster_utils import Cluster
        self.cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=0, include_dashboard=False))
        self.nodes = []
        for _ in range(2): self.add()
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level='ERROR')
        self.engine, self.ray = dict(engine=RayEngine(num_cpus=1)), ray
    def shards(self, pipe):
        asked = [w.actor.__ray_call__.remote(lambda self: os.getpid()) for w in pipe._workers]
        return [pid for ref in self.ray.wait(asked, num_returns=len(asked), timeout=10)[0] if (pid := self.pid(ref))]
    def pid(self, ref):
        try: return self.ray.get(ref)
        except self.ray.exceptions.RayError: return None   # it has died meanwhile
    def lose(self, rng):
        with nothing_hangs(self.limit):
            self.cluster.remove_node(self.nodes.pop(rng.randrange(2)))
            self.add()
    def add(self, tries=5):
        "A machine; on a busy one, Ray gives up after half a minute"
        for k in range(tries):
            try: return self.nodes.append(self.cluster.add_node(wait=False, num_cpus=2))   # the run notices when it is there
            except Exception as e:
                if k == tries - 1: raise
                print(f'a machine did not start: {e}', file=sys.stderr)
    def close(self):
        self.ray.shutdown()
        self.cluster.shutdown()

def kills(where, n, seed, say=print):
    "Make that many; what was counted"
    rng, counts, rows, given = random.Random(seed), Counter(), {}, Counter()
    torch.manual_seed(seed)
    net = nn.Linear(4, 2)
    pipe = (GymStepper('CartPole-v1', EpsGreedy(net, .5, seed=seed), seed=seed).parallel(2, chunk=1, restarts=10**6)
        .prioritized_replay(bs=16, max_sz=400, seed=seed).parallel(2, chunk=2, restarts=10**6, ordered=False, **where.engine))
    it, began, silent, longest = iter(pipe), time.monotonic(), [0, 0], 0
    def batches(n):
        "Some, each looked at"
        nonlocal longest
        for batch in islice(it, n):
            columns = zip(batch.index.tolist(), batch.state.tolist(), batch.step_n.tolist())
            for key, state, step in columns: assert rows.setdefault(key, (state, step)) == (state, step), f'key {key} has two rows'
            batch.update_priorities(torch.rand(len(batch)))
            shard = int(batch.index[0]) % 2
            given[shard] += 1
            silent[shard], silent[1-shard] = 0, silent[1-shard] + 1   # how many batches the other one has given since
            longest = max(longest, *silent)
            with torch.no_grad(): net.weight += .01
    while counts['kills'] < n:
        with nothing_hangs(where.limit): batches(rng.randrange(4, 40))
        if rng.random() < .1 and where.lose(rng) is not False: counts['machines'] += 1
        else:
            shards = where.shards(pipe)
            actors = [c for s in shards for c in children(s) if is_actor(c)]
            what = 'actors' if actors and rng.random() < .5 else 'shards'
            if not (actors if what == 'actors' else shards): continue
            try: os.kill(rng.choice(actors if what == 'actors' else shards), signal.SIGKILL)
            except ProcessLookupError: continue
            counts[what] += 1
        counts['kills'] += 1
    before = Counter(given)   # a shard that begins anew takes a second or two, and the other one gives hundreds meanwhile
    limit = time.monotonic() + where.limit   # from here on: the kills may have taken longer
    while any(given[s] <= before[s] for s in (0, 1)) and time.monotonic() < limit:
        with nothing_hangs(where.limit): batches(20)
    assert all(given[s] > before[s] for s in (0, 1)), f'a shard gives nothing any more: {before}, {given}'
    stats = pipe.stats()
    left = [c for s in where.shards(pipe) for c in (s, *children(s))]
    with nothing_hangs(where.limit): pipe.close()
    limit = time.monotonic() + 15
    while any(map(is_actor, left)) and time.monotonic() < limit: time.sleep(.1)
    assert not any(map(is_actor, left)), 'processes are left'
    say(f'{counts["kills"]} kills ({counts["actors"]} actors, {counts["shards"]} shards, {counts["machines"]} machines) in {time.monotonic() - began:.0f} s: '
        f'{stats["items"]} batches, {min(given.values())} of the shard that gave least, at most {longest} in a row from one; {stats["restarts"]} shards restarted, {stats["lost"]} rows lost, {stats["stale"]} errors stale; no key given twice')
    return stats

def end_marked(mark):
    "End all processes that have this in their environment"
    for p in Path('/proc').glob('[0-9]*/environ'):
        try:
            if mark in p.read_bytes().split(b'\0'): os.kill(int(p.parent.name), signal.SIGKILL)
        except OSError: pass

def in_a_child():
    "The same program in a process of its own: however it ends, no part of its cluster is left. Its exit status"
    mark = f'KILL_WORKERS={uuid.uuid4().hex}'
    child = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **dict([mark.split('=')])})
    try: return child.wait()
    finally: end_marked(mark.encode())

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--kills', type=int, default=50, help='how many')
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    parser.add_argument('--engine', choices=('process', 'ray'), default='process', help='what runs the shards')
    args = parser.parse_args()
    if args.engine == 'ray' and 'KILL_WORKERS' not in os.environ: sys.exit(in_a_child())
    warnings.simplefilter('ignore')
    where = Local() if args.engine == 'process' else OnRay()
    try: kills(where, args.kills, args.seed)
    finally: where.close()
