"""The jobs of this library in several processes. The page "Many machines" uses them, too."""
import json
import pickle
import sys
import time
from itertools import islice
from statistics import median
from time import perf_counter

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from fastrl_replay.all import (GymStepper, Parallel, Pipe, PrioritizedReplay, Ranks, RayEngine,
                               Steps, step_dtype)

CARTPOLE = step_dtype(Box(-1, 1, (4,)), Discrete(2))


class ReadyRows(Pipe):
    "Endless blocks with a row of each environment, in episodes of 100 steps"
    steps_envs = True   # each worker has its own environments

    def __init__(self, dtype=CARTPOLE, envs=64):
        super().__init__(None)
        self.rows = np.zeros(envs, dtype)
        self.rows['env_id'] = np.arange(envs)

    def _in_worker(self, info):
        self.rows['env_id'] += info.rank*len(self.rows)

    def __iter__(self):
        step = 0
        while True:
            rows = self.rows.copy()
            rows['episode_n'], rows['step_n'] = step//100 + 1, step % 100 + 1
            rows['truncated'] = step % 100 == 99
            step += 1
            yield Steps(rows)


class Waits(gym.Wrapper):
    def step(self, action):
        time.sleep(.005)
        return super().step(action)


def waiting():
    "Make an environment whose step takes 5 ms of waiting"
    return Waits(gym.make('CartPole-v1'))


def engine(kind, cpus=.5):
    "Return the arguments of `Parallel`, and start Ray where it is needed"
    if kind == 'process':
        return {}
    import ray
    ray.init('local', num_cpus=16, log_to_driver=False, include_dashboard=False,
             ignore_reinit_error=True)
    return dict(engine=RayEngine(num_cpus=cpus))


def prepare(library, size, shards, kind='process'):
    "Draw a batch from shards, or from this process, and report its errors"
    torch.set_num_threads(1)
    replay = PrioritizedReplay(ReadyRows(), 256, size, warmup=size, seed=0)
    items, td = iter(Parallel(replay, shards, chunk=16, **engine(kind))), torch.rand(256)
    return lambda: next(items).update_priorities(td), {}


def actors_a_second(n, seconds=3., chunk=4, **settings):
    "Return the steps a second of `n` actors whose environment waits; settings: of `Parallel`"
    with Parallel(GymStepper(waiting, lambda state: [0]*len(state)), n,
                  chunk=chunk, **settings) as pipe:
        items = iter(pipe)
        for _ in range(2*chunk*n):
            next(items)
        steps, start = 0, perf_counter()
        while perf_counter() - start < seconds:
            steps += len(list(islice(items, chunk*n)))
        return steps/(perf_counter() - start)


def microseconds(f):
    times = []
    for _ in range(50):
        start = perf_counter()
        f()
        times.append((perf_counter() - start)*1e6)
    return median(times)


def parts(dtype=CARTPOLE, rows=20_000, bs=256):
    "Return microseconds to add a row, draw and pickle a batch, and the bytes of batch and row"
    replay = PrioritizedReplay(None, bs, rows, seed=0)
    blocks, td = iter(ReadyRows(dtype)), torch.rand(bs)
    while len(replay) < rows:
        replay.add(next(blocks))
    batch, steps = replay.sample(), iter([next(blocks) for _ in range(50)])
    return dict(add_row=microseconds(lambda: replay.add(next(steps)))/64,
                draw=microseconds(lambda: replay.sample().update_priorities(td)),
                pickle_batch=microseconds(lambda: pickle.loads(pickle.dumps(batch.rows))),
                batch_bytes=len(pickle.dumps(batch.rows)), row_bytes=dtype.itemsize)


def message(**settings):
    "Return the microseconds until a small block that is asked for arrives"
    with Parallel(ReadyRows(envs=1), 1, chunk=1, **settings) as pipe:
        return microseconds(iter(pipe).__next__)


def measure(kind, counts, seconds):
    "Return the steps a second of actors, and the costs of parts"
    actors = {n: actors_a_second(n, seconds, **engine(kind, .1)) for n in counts}
    return actors, {f'message_{kind}': message(**engine(kind)), **parts()}


def learner(actors, updates):
    "Be one of torchrun's learners: an update has 64 rows, waits 4 ms, and comes every four steps"
    with Ranks() as ranks:
        n, gradients = ranks.size, [torch.zeros(250_000)]
        steps = GymStepper(waiting, lambda state: [0]*len(state), seed=0).parallel(actors//n)
        replay = (steps.rounds(ranks, rows=4)
                  .prioritized_replay(64//n, 10_000, ratio=n/4, warmup=100, seed=0))
        for i, batch in zip(range(40 + updates), ranks.sync(replay.rank_weights(ranks))):
            if i == 40:
                start = perf_counter()
            time.sleep(.004/n)
            ranks.average(gradients)
            batch.update_priorities(torch.ones(64//n))
        seconds = perf_counter() - start
        replay.close()
        if ranks.leads:
            print(json.dumps(4*updates/seconds), flush=True)


if __name__ == '__main__':
    import ours_parallel    # workers get what belongs to a module, not to __main__
    ours_parallel.learner(int(sys.argv[1]), int(sys.argv[2]))
