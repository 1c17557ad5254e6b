"""The parallel jobs of this library, and a learner that torchrun starts several times."""
import json
import os
import pickle
import sys
import time
from itertools import count, islice
from statistics import median
from time import perf_counter

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from fastrl_replay.all import (GymStepper, Parallel, Pipe, PrioritizedReplay, Ranks, RayEngine, Steps, step_dtype)

BS = 256
CARTPOLE = step_dtype(Box(-1, 1, (4,)), Discrete(2))
RATIO = .25     # updates a step, with several learners
LEARN = .004    # seconds of an update, with several learners


class ReadyRows(Pipe):
    "Endless blocks with a row of each of 64 environments, in episodes of 100 steps"
    steps_envs = True   # each worker has its own environments

    def __init__(self, dtype=CARTPOLE, envs=64):
        super().__init__(None)
        self.dtype = dtype
        self.envs = envs
        self.first = 0

    def _in_worker(self, info):
        self.first = info.rank*self.envs

    def __iter__(self):
        for k in count():
            rows = np.zeros(self.envs, self.dtype)
            rows['env_id'] = self.first + np.arange(self.envs)
            rows['episode_n'], rows['step_n'] = k//100 + 1, k % 100 + 1
            rows['truncated'] = k % 100 == 99
            yield Steps(rows)


class Waits(gym.Wrapper):
    "A step takes 5 ms of waiting"
    def step(self, action):
        time.sleep(.005)
        return super().step(action)


def waiting():
    return Waits(gym.make('CartPole-v1'))


class Zeros(torch.nn.Module):
    "A policy with so many megabytes of weights, which it does not use"
    def __init__(self, megabytes):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(250_000)) for _ in range(megabytes))

    def forward(self, state):
        return [0]*len(state)


def engine(name, cpus=.5):
    "Return the arguments of `Parallel`; Ray is started if it is not"
    if name != 'ray':
        return {}
    import ray
    if not ray.is_initialized():
        ray.init('local', num_cpus=16, log_to_driver=False, include_dashboard=False, logging_level='ERROR')
    return dict(engine=RayEngine(num_cpus=cpus))


def prepare(library, shards, size, chunk=8, kind='process'):
    "Return the function that draws a batch from shards and reports its errors; without shards, from this process"
    torch.set_num_threads(1)
    replay = PrioritizedReplay(ReadyRows(), BS, size, warmup=size, seed=0)
    items, td = iter(Parallel(replay, shards, chunk=chunk, **engine(kind))), torch.rand(BS)

    def step():
        next(items).update_priorities(td)
    return step


def rows_a_second(seconds, kind):
    "Return how many rows two shards take from an actor each"
    actors = Parallel(ReadyRows(), 1, chunk=16)
    replay = PrioritizedReplay(actors, BS, 100_000, ratio=1/640, warmup=1_000, seed=0)
    with Parallel(replay, 2, chunk=4, **engine(kind)) as pipe:
        batches, td = iter(pipe), torch.rand(BS)

        def learn(n):
            for batch in islice(batches, n):
                batch.update_priorities(td)
        learn(40)
        before, start = pipe.stats()['rows_in'], perf_counter()
        while perf_counter() - start < seconds:
            learn(20)
        return (pipe.stats()['rows_in'] - before)/(perf_counter() - start)


def actors_a_second(n, seconds=3., chunk=4, **settings):
    "Return the steps a second of so many actors with an environment that waits; settings are those of `Parallel`"
    with Parallel(GymStepper(waiting, lambda state: [0]*len(state)), n, chunk=chunk, **settings) as pipe:
        items = iter(pipe)
        steps = sum(1 for _ in islice(items, 2*chunk*n))
        steps, start = 0, perf_counter()
        while perf_counter() - start < seconds:
            steps += sum(1 for _ in islice(items, chunk*n))
        return steps/(perf_counter() - start)


def actors(n, seconds, kind):
    return actors_a_second(n, seconds, **engine(kind, .1))


def microseconds(f, calls=50):
    times = []
    for _ in range(calls):
        start = perf_counter()
        f()
        times.append((perf_counter() - start)*1e6)
    return median(times)


def parts(dtype=CARTPOLE, rows=20_000, bs=BS):
    "Return the microseconds of adding a row, of drawing, and of sending a batch, and the bytes of a batch"
    replay, blocks = PrioritizedReplay(None, bs, rows, seed=0), iter(ReadyRows(dtype))
    while len(replay) < rows:
        replay.add(next(blocks))
    td, batch = torch.rand(bs), replay.sample()
    ready = islice(blocks, 51)
    ready = iter(list(ready))
    return dict(add_row=microseconds(lambda: replay.add(next(ready)))/64,
                draw=microseconds(lambda: replay.sample().update_priorities(td)),
                pickle_batch=microseconds(lambda: pickle.loads(pickle.dumps(batch.rows))),
                batch_bytes=len(pickle.dumps(batch.rows)), row_bytes=dtype.itemsize)


def message(**settings):
    "Return the microseconds until a small block that is asked for arrives; settings are those of `Parallel`"
    with Parallel(ReadyRows(envs=1), 1, chunk=1, **settings) as pipe:
        items = iter(pipe)
        return microseconds(lambda: next(items))


def message_of(kind):
    return message(**engine(kind))


def weights(workers, megabytes, kind, rounds=5):
    "Return the ms of a round of all workers with the same weights and with new ones"
    policy, times = Zeros(megabytes), dict(same=[], new=[])
    stepper = GymStepper('CartPole-v1', policy, seed=0)
    with Parallel(stepper, workers, chunk=1, weights_every=workers, **engine(kind, .1)) as pipe:
        items = iter(pipe)
        for _ in islice(items, 2*workers):
            pass
        for k in range(4*rounds):
            name = ('same', 'new')[k//2 % 2]
            if name == 'new':
                with torch.no_grad():
                    for weight in policy.weights:
                        weight.add_(1)
            start = perf_counter()
            for _ in islice(items, workers):
                pass
            if k % 2:   # the first round has items of the round before
                times[name].append((perf_counter() - start)*1e3)
        stats = pipe.stats()
    return dict({k: min(v) for k, v in times.items()}, written=stats['weights_written'], rounds=4*rounds + 2,
                mb=megabytes, most=stats['lag_max'], bound=stats['lag_bound'])


def learner(actors, seconds):
    "Be one of several learners that share the work of an update; print the figures"
    with Ranks() as ranks:
        n, gradients = ranks.size, [torch.zeros(250_000)]
        found = dict(average=0., gather=0.)
        if n > 1:
            found = dict(average=microseconds(lambda: ranks.average(gradients)),
                         gather=microseconds(lambda: ranks.gather(1.)))
        steps = Parallel(GymStepper(waiting, lambda state: [0]*len(state), seed=0), actors//n)
        replay = PrioritizedReplay(steps, 64//n, 10_000, ratio=RATIO*n, warmup=100, seed=0)
        batches = iter(ranks.join(replay, rows=4))

        def learn(k):
            for batch in islice(batches, k):
                time.sleep(LEARN/n)
                ranks.average(gradients)
                batch.update_priorities(torch.ones(64//n))
        learn(40)
        updates = int(seconds*min(actors*200*RATIO, 1/LEARN))
        start = perf_counter()
        learn(updates)
        found['steps'] = updates/RATIO/(perf_counter() - start)
        replay.close()
        if ranks.leads:
            print(json.dumps(found), flush=True)


if __name__ == '__main__':
    import ours_parallel    # what is sent to workers belongs to the module, not to __main__
    ours_parallel.learner(int(sys.argv[1]), float(sys.argv[2]))
