"""The jobs of this library. They use its public names only, so that `ab.py` runs them in other commits."""
from itertools import cycle, repeat

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from libraries import CHUNK, COLUMNS, LENGTH, Library, td_errors

from fastrl_replay.all import (ExperienceReplay, GymStepper, NStep, OwnSteps, Pipe, PrioritizedReplay, SequenceChunker,
                               SequenceReplay, Steps, step_dtype)

ACTIONS = np.tile([0, 1], 4)    # of eight environments


def numbered_rows(rows, start, stop):
    "Return rows as eight environments give them in turn, each in one long episode"
    low, high = (0, 255) if rows.pictures else (-1, 1)
    array = np.zeros(stop - start, step_dtype(Box(low, high, rows.shape, rows.dtype), Discrete(2)))
    for name, values in rows.part(start, stop).items():
        array[name] = values
    i = np.arange(start, stop)
    array['env_id'] = i % 8
    array['step_n'] = i//8 + 1
    array['episode_n'] = 1
    return array


class Blocks(Pipe):
    "Large blocks with the first rows, then endless blocks with a row of each environment"
    def __init__(self, rows, envs, first=0):
        super().__init__(None)
        self.rows = rows
        self.envs = envs
        self.first = first

    def __iter__(self):
        for start in range(0, self.first, CHUNK):
            yield Steps(numbered_rows(self.rows, start, min(start + CHUNK, self.first)))
        block = numbered_rows(self.rows, 0, self.envs)
        block['env_id'] = np.arange(self.envs)
        step = self.first//self.envs
        while True:
            step += 1
            block = block.copy()
            block['step_n'] = step
            yield Steps(block)


class Pass(Pipe):
    "A stage that does nothing"
    def __iter__(self):
        yield from self.source


def advance(items):
    "Return a function that takes the next item and returns nothing"
    items = iter(items)

    def step():
        next(items)
    return step


class Ours(Library):
    def tensors(self, batch):
        for name in COLUMNS:
            batch[name]
        return batch

    def filled(self, replay, prioritized=False):
        step = 1000 if self.rows.pictures else CHUNK
        for start in range(0, self.rows.size, step):
            block = numbered_rows(self.rows, start, min(start + step, self.rows.size))
            keys = replay.add(Steps(block))
            if prioritized:
                replay.update_priorities(keys, td_errors(len(keys), start))
        return replay

    def full(self):
        return self.filled(ExperienceReplay(bs=self.n, max_sz=self.rows.size, seed=0))

    def insert(self):
        replay, steps = self.full(), Steps(numbered_rows(self.rows, 0, self.n))

        def step():
            replay.add(steps)
        return step

    def uniform(self):
        return self.full().sample

    def updated(self, replay, errors):
        errors = cycle(errors)

        def step():
            batch = replay.sample()
            batch.update_priorities(next(errors))
            return batch
        return step

    def prioritized(self, **settings):
        replay = PrioritizedReplay(bs=self.n, max_sz=self.rows.size, seed=0, **settings)
        errors = [torch.from_numpy(td_errors(self.n, i)) for i in range(4000)]
        return self.updated(self.filled(replay, True), errors)

    def prioritized_by_rank(self):
        return self.prioritized(kind='rank', alpha=.7)

    def sequences(self):
        replay = SequenceReplay(bs=self.n, max_sz=self.rows.size, seed=0, prioritized=False)
        return self.filled(replay).sample

    def prioritized_sequences(self):
        replay = SequenceReplay(bs=self.n, max_sz=self.rows.size, seed=0)
        return self.updated(self.filled(replay), [torch.rand(self.n, LENGTH//2)])

    def drawn_from(self, source):
        "Return a function that gives the batches of a chain whose buffer is full"
        batches = iter(source.experience_replay(bs=self.n, max_sz=self.rows.size, seed=0))
        for _ in range(self.rows.size//CHUNK + 1):
            next(batches)
        return batches.__next__

    def n_step(self):
        return self.drawn_from(Blocks(self.rows, 8, self.rows.size).n_step(3, gamma=.99))

    def n_step_block(self):
        return advance(NStep(Blocks(self.rows, self.n), 3, .99))

    def chunk_block(self):
        return advance(SequenceChunker(Blocks(self.rows, self.n), LENGTH, LENGTH//2))

    def stage(self):
        return advance(Pass(repeat(0)))

    def env_step(self):
        env = gym.make_vec('CartPole-v1', self.n) if self.n > 1 else 'CartPole-v1'
        actions = torch.arange(self.n) % 2
        return advance(GymStepper(env, lambda state: actions, seed=0))

    def added_steps(self, replay):
        "Return a function that gives the buffer a step of a loop, in episodes of 100 steps"
        rng = np.random.default_rng(0)
        obs = rng.normal(size=(101, self.n, 4)).astype(np.float32)
        reward = rng.normal(size=(100, self.n))
        done = np.zeros((100, self.n), bool)
        done[-1] = True
        action = rng.integers(0, 2, (100, self.n))
        never = np.zeros(self.n, bool)
        steps = [(obs[t], action[t], reward[t], obs[t+1], done[t], never) for t in range(100)]
        if self.n == 1:
            steps = [(s[0], int(a[0]), float(r[0]), after[0], bool(d[0]), False) for s, a, r, after, d, _ in steps]
        steps = cycle(steps)

        def step():
            replay.add_step(*next(steps))
        for _ in range(1000):
            step()
        return step

    def add_step(self):
        return self.added_steps(ExperienceReplay(bs=256, max_sz=self.rows.size, seed=0))

    def add_step_prioritized(self):
        return self.added_steps(PrioritizedReplay(bs=256, max_sz=self.rows.size, seed=0))

    def add_step_sequences(self):
        return self.added_steps(SequenceReplay(bs=64, max_sz=self.rows.size, seed=0))

    def add_step_n_step(self):
        chain = OwnSteps().n_step(3, gamma=.99)
        return self.added_steps(chain.prioritized_replay(bs=256, max_sz=self.rows.size, seed=0))


class Bare(Library):
    "The same work with numpy or gymnasium alone"
    def full(self):
        return numbered_rows(self.rows, 0, self.rows.size)

    def insert(self):
        array = self.full()
        rows = array[:self.n].copy()

        def step():
            array[5:5 + self.n] = rows
        return step

    def uniform(self):
        array, rng = self.full(), np.random.default_rng(0)
        return lambda: array.take(rng.integers(0, self.rows.size, self.n))

    def sequences(self):
        array, rng = self.full(), np.random.default_rng(0)
        steps = np.arange(LENGTH)
        return lambda: array.take(rng.integers(0, self.rows.size - LENGTH, self.n)[:, None] + steps)

    def stage(self):
        return advance(x for x in repeat(0))

    def env_step(self):
        env = gym.make_vec('CartPole-v1', self.n) if self.n > 1 else gym.make('CartPole-v1')
        env.reset(seed=0)
        actions = np.arange(self.n) % 2

        def step():
            if self.n > 1:
                env.step(actions)
            elif any(env.step(1)[2:4]):
                env.reset()
        return step
