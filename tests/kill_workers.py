"""Makes actors and shards of a training run fail at random moments, and checks that it continues.

    python tests/kill_workers.py --kills 200 --out benchmarks/results/failures.json

The guide "Scaling out" shows the results. Actors and shards fail in all known ways. Checked:
batches keep coming, from both shards; none comes twice; the key of a row is never given to another
one; lost rows are counted and reported; no process is left in the end."""

import argparse, faulthandler, json, os, random, resource, signal, subprocess, time, warnings
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np, torch
from gymnasium.spaces import Box, Discrete

from fastrl_replay.all import *

LIMIT = 120  # seconds for what should take a few
KINDS = 'actor killed', 'shard killed', 'actor stopped', 'shard stopped', 'memory limit'


@contextmanager
def nothing_hangs():
    "What takes longer shows where it waits, and ends the program"
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def children(pid):
    "The processes that this one has started and that still run"
    found = []
    for task in Path(f'/proc/{pid}/task').glob('*/children'):
        found += [int(child) for child in task.read_text().split()]
    return found


def is_running(pid):
    try:
        return b'python' in Path(f'/proc/{pid}/cmdline').read_bytes()
    except OSError:
        return False


class Shard(Pipe):
    "Needs new memory for each batch, as one of pictures does, and adds its process"

    takes_any_item = True

    def __iter__(self):
        for batch in self.source:
            np.empty(4_000_000, np.uint8).fill(1)
            yield batch, os.getpid()


class Learner:
    "Draw batches of two shards with two actors each, check each, and measure the wait for it"

    def __init__(self, seed):
        net = value_net(Box(-np.inf, np.inf, (4,)), Discrete(2), (64,))
        steps = GymStepper('CartPole-v1', EpsGreedy(net, 0.5, seed=seed), seed=seed)
        actors = steps.parallel(2, chunk=1, restarts=10**6)
        replay = Shard(actors.prioritized_replay(bs=16, max_sz=400, seed=seed))
        self.pipe = replay.parallel(2, chunk=2, restarts=10**6, ordered=False, method='fork')
        self.batches = iter(self.pipe)
        self.rows, self.given, self.pids, self.longest = {}, Counter(), {}, 0.0

    def draw(self, n):
        for _ in range(n):
            began = time.monotonic()
            with nothing_hangs():
                batch, pid = next(self.batches)
            self.longest = max(self.longest, time.monotonic() - began)
            rows = zip(batch.index.tolist(), batch.state.tolist(), batch.step_n.tolist())
            for key, *row in rows:
                assert self.rows.setdefault(key, row) == row, f'key {key} has two rows'
            batch.update_priorities(torch.rand(len(batch)))
            shard = int(batch.index[0]) % 2
            self.given[shard] += 1
            self.pids[shard] = pid

    def until_both_give(self):
        "Draw until each shard has given a batch that it had not made before: four may wait"
        before, limit = Counter(self.given), time.monotonic() + LIMIT
        while any(self.given[s] < before[s] + 6 for s in (0, 1)):
            assert time.monotonic() < limit, f'a shard gives nothing any more: {self.given}'
            self.draw(2)

    def fail(self, kind, rng):
        "Let one process fail"
        pids = [pid for pid in self.pids.values() if is_running(pid)]
        if 'actor' in kind:
            pids = [child for pid in pids for child in children(pid) if is_running(child)]
        pid = rng.choice(pids)
        if 'killed' in kind:
            os.kill(pid, signal.SIGKILL)
        elif 'stopped' in kind:
            os.kill(pid, signal.SIGSTOP)
            subprocess.Popen(['sh', '-c', f'sleep 1; kill -CONT {pid}'])
        else:
            pages = int(Path(f'/proc/{pid}/statm').read_text().split()[0])
            now = pages * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_AS, (now, resource.RLIM_INFINITY))

    def mend(self):
        "Give back the memory"
        for pid in filter(is_running, self.pids.values()):
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)


def failure(learner, kind, rng, warned):
    "Make one failure, and return what the learner saw of it"
    before, said = learner.pipe.stats(), len(warned)
    learner.fail(kind, rng)
    began, learner.longest = time.monotonic(), 0.0
    learner.until_both_give()
    both = time.monotonic() - began
    learner.mend()
    learner.draw(rng.randrange(4, 40))
    after = learner.pipe.stats()
    restarts, lost = after['restarts'] - before['restarts'], after['lost'] - before['lost']
    assert len(warned) - said == restarts, f'{restarts} restarts, {len(warned) - said} warnings'
    return dict(wait=learner.longest, both=both, restarts=restarts, lost=lost)


def line(seen):
    "What was seen of one kind: how often, seconds (median, largest), and what was lost"
    times = {}
    for name in 'wait', 'both':
        seconds = [x[name] for x in seen]
        times[name] = [round(median(seconds), 3), round(max(seconds), 3)]
    sums = {name: sum(x[name] for x in seen) for name in ('restarts', 'lost')}
    return dict(n=len(seen), **times, **sums)


def kills(n, seed):
    "Make that many failures, and return what was counted"
    rng, found, began = random.Random(seed), defaultdict(list), time.monotonic()
    learner = Learner(seed)
    learner.draw(20)
    learner.until_both_give()
    with warnings.catch_warnings(record=True) as warned:
        warnings.filterwarnings('ignore')
        warnings.filterwarnings('always', message='Parallel: worker . of 2 failed')
        for _ in range(n):
            kind = rng.choice(KINDS)
            found[kind].append(failure(learner, kind, rng, warned))
    left = [c for s in learner.pids.values() for c in (s, *children(s))]
    batches = learner.pipe.stats()['items']
    with nothing_hangs():
        learner.pipe.close()
    limit = time.monotonic() + 15
    while any(map(is_running, left)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(map(is_running, left)), 'processes are left'
    return dict(
        seconds=round(time.monotonic() - began),
        batches=batches,
        failures=n,
        kinds={kind: line(seen) for kind, seen in found.items()},
    )


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--kills', type=int, default=50, help='how many')
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    parser.add_argument('--out', type=Path, help='a file for what was seen, beside what is there')
    args = parser.parse_args()
    seen = kills(args.kills, args.seed)
    print(json.dumps(seen, indent=1))
    if args.out:
        whole = json.loads(args.out.read_text()) if args.out.exists() else {}
        args.out.write_text(json.dumps({**whole, 'process': seen}, indent=1) + '\n')
