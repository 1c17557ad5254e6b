"""Makes actors and shards of a training run fail at random moments, in all ways that are known here, and looks whether it goes on.

    python tests/kill_workers.py                 # 50 failures: four actors, two shards, as processes
    python tests/kill_workers.py --engine ray    # on a Ray cluster of three nodes, all of them on this machine
    python tests/kill_workers.py --engine ray --network   # and a fourth, in a network namespace whose link is cut (needs root)
    python tests/kill_workers.py --kills 200 --out benchmarks/results/failures.json   # what the page "What it survives" shows

Looked at: that batches go on coming, from both shards; that none comes twice; that the key of a row is never given to another one;
that lost rows are counted and reported; that no process is left in the end."""

import argparse, faulthandler, json, os, random, resource, signal, subprocess, sys, time, uuid, warnings
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np, torch

from fastrl_replay.all import *
from torch import nn


def zeros(state):
    return [0] * len(state)


def children(pid):
    "The processes that this one has started and that still run"
    found = []
    for task in Path(f'/proc/{pid}/task').glob('*/children'):
        try:
            found += [int(c) for c in task.read_text().split()]
        except OSError:
            pass
    return found


def is_actor(pid):
    try:
        return (
            b'python' in Path(f'/proc/{pid}/cmdline').read_bytes()
            and b'resource_tracker' not in Path(f'/proc/{pid}/cmdline').read_bytes()
        )
    except OSError:
        return False


@contextmanager
def nothing_hangs(seconds):
    "What takes longer shows where it waits, and ends the program"
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


STOPPED = 1  # seconds that a process is stopped


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def stop(pid, seconds=STOPPED):
    "Stop a process; another one lets it go on after so many seconds"
    os.kill(pid, signal.SIGSTOP)
    subprocess.Popen(['sh', '-c', f'sleep {seconds}; kill -CONT {pid}'])


def limit_memory(pid):
    "Let it have no more memory than it has now"
    now = int(Path(f'/proc/{pid}/statm').read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (now, resource.RLIM_INFINITY))


class Picture(Pipe):
    "Needs new memory for each batch, as one of pictures does"

    takes_any_item = True

    def __iter__(self):
        for batch in self.source:
            np.empty(4_000_000, np.uint8).fill(1)
            yield batch


class Local:
    "Two shards as processes, with two actors each"

    limit = 120  # seconds for what should take a few
    kinds = 'actor killed', 'shard killed', 'actor stopped', 'shard stopped', 'memory limit'

    def __init__(self, network=False):
        self.engine, self.above = dict(method='fork'), Picture

    def shards(self, pipe):
        return [w.process.pid for w in pipe._workers]

    def fail(self, kind, pipe, rng):
        "Let one thing fail; False: there was nothing that could"
        shards = self.shards(pipe)
        pids = (
            [c for s in shards for c in children(s) if is_actor(c)] if 'actor' in kind else shards
        )
        if not pids:
            return False
        try:
            (kill if 'killed' in kind else stop if 'stopped' in kind else limit_memory)(
                rng.choice(pids)
            )
        except (ProcessLookupError, FileNotFoundError):
            return False

    def mend(self, kind, pipe):
        "What must be undone before the next failure"
        if kind == 'memory limit':
            for pid in self.shards(pipe):
                resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)

    def close(self):
        pass


class Namespace:
    "A network namespace with an address, joined to this one by a link that can be cut"

    name, ours, theirs, here, there = (
        'replay-kills',
        'rk-here',
        'rk-there',
        '10.77.0.1',
        '10.77.0.2',
    )

    def __init__(self):
        self.close()
        self.ip('netns add', self.name)
        self.ip('link add', self.ours, 'type veth peer name', self.theirs, 'netns', self.name)
        self.ip('addr add', f'{self.here}/24', 'dev', self.ours)
        self.ip('link set', self.ours, 'up')
        for words in (
            f'addr add {self.there}/24 dev {self.theirs}',
            'link set lo up',
            f'link set {self.theirs} up',
        ):
            self.ip('-n', self.name, words)

    def ip(self, *words, check=True):
        subprocess.run(['ip', *' '.join(words).split()], check=check, capture_output=True)

    def cut(self, seconds):
        self.ip('-n', self.name, 'link set', self.theirs, 'down')
        subprocess.Popen(
            ['sh', '-c', f'sleep {seconds}; ip -n {self.name} link set {self.theirs} up']
        )

    def run(self, *words):
        return subprocess.Popen(
            ['nsenter', f'--net=/var/run/netns/{self.name}', *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def close(self):
        self.ip('netns delete', self.name, check=False)
        self.ip('link delete', self.ours, check=False)


class OnRay(Local):
    "The same on nodes of a cluster"

    limit = 600  # a busy machine takes a minute for a new actor
    kinds = (
        'actor killed',
        'shard killed',
        'shard stopped',
        'node removed',
        'node added',
        'object store full',
        'GCS stopped',
    )

    def __init__(self, network=False):
        os.environ['RAY_USAGE_STATS_ENABLED'] = '0'
        import ray
        from ray.cluster_utils import Cluster

        self.namespace, self.far = Namespace() if network else None, None
        self.here = dict(node_ip_address=Namespace.here) if network else {}
        if network:
            self.kinds += 'link cut for a second', 'link cut for a minute'
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args=dict(num_cpus=0, include_dashboard=False, **self.here),
        )
        self.nodes = []
        for _ in range(2):
            self.add()
        if network:
            self.join()
        ray.init(
            address=self.cluster.address,
            log_to_driver=False,
            logging_level='ERROR',
            **{f'_{k}': v for k, v in self.here.items()},
        )
        self.engine, self.above, self.ray, self.held = (
            dict(engine=RayEngine(num_cpus=1)),
            lambda pipe: pipe,
            ray,
            [],
        )

    def join(self):
        "A node in the namespace, if there is none"
        if self.far is None or self.far.poll() is not None:
            self.far = self.namespace.run(
                sys.executable,
                '-m',
                'ray.scripts.scripts',
                'start',
                f'--address={self.cluster.address}',
                f'--node-ip-address={Namespace.there}',
                '--num-cpus=1',
                '--object-store-memory=150000000',
                '--block',
            )

    def places(self, pipe):
        "Of each shard that answers: its process, and the address of its node"
        asked = [
            w.actor.__ray_call__.remote(
                lambda self: (os.getpid(), __import__('ray').util.get_node_ip_address())
            )
            for w in pipe._workers
        ]
        return [
            place
            for ref in self.ray.wait(asked, num_returns=len(asked), timeout=10)[0]
            if (place := self.place(ref))
        ]

    def shards(self, pipe):
        return [pid for pid, _ in self.places(pipe)]

    def place(self, ref):
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayError:
            return None  # it has died meanwhile

    def add(self, tries=5):
        "A node; on a busy machine, Ray gives up after half a minute"
        for k in range(tries):
            try:
                return self.nodes.append(
                    self.cluster.add_node(wait=False, num_cpus=1, **self.here)
                )  # the run notices when it is there
            except Exception as e:
                if k == tries - 1:
                    raise
                print(f'a node did not start: {e}', file=sys.stderr)

    def fail(self, kind, pipe, rng):
        if kind == 'node removed':
            self.cluster.remove_node(self.nodes.pop(rng.randrange(2)))
            self.add()
        elif kind == 'node added':
            self.add()
            self.cluster.remove_node(self.nodes.pop(0))  # a third one, and then two again
        elif kind == 'object store full':
            self.held = [self.ray.put(np.ones(20_000_000, np.uint8)) for _ in range(9)]  # of 150 MB
        elif kind == 'GCS stopped':
            stop(self.cluster.head_node.all_processes['gcs_server'][0].process.pid, 3)
        elif 'link' in kind:
            if not any(ip == Namespace.there for _, ip in self.places(pipe)):
                return False  # no shard is there
            self.namespace.cut(1 if 'second' in kind else 60)
        else:
            return super().fail(kind, pipe, rng)

    def mend(self, kind, pipe):
        self.held = []
        if self.namespace:
            self.join()

    def close(self):
        self.ray.shutdown()
        self.cluster.shutdown()
        if self.namespace:
            self.far.terminate()
            self.far.wait()
            self.namespace.close()


class Learner:
    "Draws batches, looks at each, and measures how long it waits for one"

    def __init__(self, where, seed):
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 2)
        )  # too large for a message of Ray's
        shard = (
            GymStepper('CartPole-v1', EpsGreedy(self.net, 0.5, seed=seed), seed=seed)
            .parallel(2, chunk=1, restarts=10**6)
            .prioritized_replay(bs=16, max_sz=400, seed=seed)
        )
        self.pipe = where.above(shard).parallel(
            2, chunk=2, restarts=10**6, ordered=False, **where.engine
        )
        self.it, self.where, self.rows, self.given, self.longest = (
            iter(self.pipe),
            where,
            {},
            Counter(),
            0.0,
        )

    def draw(self, n):
        for _ in range(n):
            began = time.monotonic()
            with nothing_hangs(self.where.limit):
                batch = next(self.it)
            self.longest = max(self.longest, time.monotonic() - began)
            columns = zip(batch.index.tolist(), batch.state.tolist(), batch.step_n.tolist())
            for key, state, step in columns:
                assert self.rows.setdefault(key, (state, step)) == (state, step), (
                    f'key {key} has two rows'
                )
            batch.update_priorities(torch.rand(len(batch)))
            self.given[int(batch.index[0]) % 2] += 1
            with torch.no_grad():
                self.net[0].weight += 0.001

    def until_both_give(self):
        "Draw until each shard has given a batch that it had not made before: four may wait"
        before, limit = Counter(self.given), time.monotonic() + self.where.limit
        while any(self.given[s] < before[s] + 6 for s in (0, 1)):
            assert time.monotonic() < limit, (
                f'a shard gives nothing any more: {before}, {self.given}'
            )
            self.draw(2)


def failure(learner, where, kind, rng, warned):
    "One failure, and what the learner saw of it; None: there was nothing that could fail"
    before, said = learner.pipe.stats(), len(warned)
    if where.fail(kind, learner.pipe, rng) is False:
        return None
    made, learner.longest = time.monotonic(), 0.0
    learner.until_both_give()
    both = time.monotonic() - made
    where.mend(kind, learner.pipe)
    learner.draw(rng.randrange(4, 40))
    after = learner.pipe.stats()
    restarts, lost = after['restarts'] - before['restarts'], after['lost'] - before['lost']
    assert len(warned) - said == restarts, (
        f'{restarts} shards restarted, and {len(warned) - said} warnings'
    )  # each is reported, and nothing else
    return dict(wait=learner.longest, both=both, restarts=restarts, lost=lost)


def table(found):
    "What was seen of each kind: how often, seconds (median, largest), and what was lost"

    def seconds(xs):
        return [round(median(xs), 3), round(max(xs), 3)]

    return {
        kind: dict(
            n=len(xs),
            wait=seconds([x['wait'] for x in xs]),
            both=seconds([x['both'] for x in xs]),
            restarts=sum(x['restarts'] for x in xs),
            lost=sum(x['lost'] for x in xs),
        )
        for kind, xs in found.items()
    }


def together(a, b):
    "Two runs as one; of the medians of a kind the larger one, which that of both runs does not exceed"

    def line(x, y):
        if not (x and y):
            return x or y
        return {k: [*map(max, x[k], y[k])] if k in ('wait', 'both') else x[k] + y[k] for k in x}

    kinds = {
        kind: line(a['kinds'].get(kind), b['kinds'].get(kind))
        for kind in {**a['kinds'], **b['kinds']}
    }
    return {k: kinds if k == 'kinds' else a[k] + b[k] for k in a}


def read(path):
    return json.loads(path.read_text()) if path and path.exists() else {}


def save(path, engine, **result):
    "Write it into a file beside that of the other engine"
    whole = read(path)
    write_whole(path, (json.dumps({**whole, engine: result}, indent=1) + '\n').encode())


def kills(where, n, seed, out=None, engine='process', seconds=float('inf'), before=None, say=print):
    "Make that many, or as many as there is time for; what was counted, and written beside what an earlier run has found"
    rng, found, began, done = random.Random(seed), defaultdict(list), time.monotonic(), 0
    learner = Learner(where, seed)
    pipe = learner.pipe
    learner.draw(20)
    with warnings.catch_warnings(record=True) as warned:
        warnings.filterwarnings('ignore')
        warnings.filterwarnings('always', message='Parallel: worker . of 2 failed')
        while done < n and time.monotonic() - began < seconds:
            kind = rng.choice(where.kinds)
            seen = failure(learner, where, kind, rng, warned)
            if seen is None:
                learner.draw(4)
                continue
            found[kind].append(seen)
            done += 1
            seen = dict(
                seconds=round(time.monotonic() - began),
                batches=pipe.stats()['items'],
                failures=done,
                kinds=table(found),
            )
            if out:
                save(out, engine, **(together(before, seen) if before else seen))
    stats = pipe.stats()
    left = [c for s in where.shards(pipe) for c in (s, *children(s))]
    with nothing_hangs(where.limit):
        pipe.close()
    limit = time.monotonic() + 15
    while any(map(is_actor, left)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(map(is_actor, left)), 'processes are left'
    for kind, line in table(found).items():
        say(f'{kind}: {line}')
    say(
        f'{done} failures in {time.monotonic() - began:.0f} s: {stats["items"]} batches, {min(learner.given.values())} of the shard that gave least; '
        f'{stats["restarts"]} shards restarted, {stats["lost"]} rows lost, {stats["stale"]} errors stale; each restart reported, no key given twice'
    )
    return stats


def end_marked(mark):
    "End all processes that have this in their environment"
    for p in Path('/proc').glob('[0-9]*/environ'):
        try:
            if mark in p.read_bytes().split(b'\0'):
                os.kill(int(p.parent.name), signal.SIGKILL)
        except OSError:
            pass


def in_a_child():
    "The same program in a process of its own: however it ends, no part of its cluster is left. Its exit status"
    mark = f'KILL_WORKERS={uuid.uuid4().hex}'
    child = subprocess.Popen(
        [sys.executable, *sys.argv], env={**os.environ, **dict([mark.split('=')])}
    )
    try:
        return child.wait()
    finally:
        end_marked(mark.encode())


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--kills', type=int, default=50, help='how many')
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    parser.add_argument(
        '--engine', choices=('process', 'ray'), default='process', help='what runs the shards'
    )
    parser.add_argument(
        '--network', action='store_true', help='a node of its own network, whose link is cut'
    )
    parser.add_argument('--seconds', type=float, default=float('inf'), help='how long at most')
    parser.add_argument('--out', type=Path, help='a file for what was seen')
    parser.add_argument(
        '--more', action='store_true', help='add it to what the file has of this engine'
    )
    args = parser.parse_args()
    if args.engine == 'ray' and 'KILL_WORKERS' not in os.environ:
        sys.exit(in_a_child())
    where = Local() if args.engine == 'process' else OnRay(args.network)
    try:
        kills(
            where,
            args.kills,
            args.seed,
            args.out,
            args.engine,
            args.seconds,
            read(args.out).get(args.engine) if args.more else None,
        )
    finally:
        where.close()
