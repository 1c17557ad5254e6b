"""This library's jobs, by its public names only, so that `ab.py` runs them in other commits."""
from itertools import cycle, repeat

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from libraries import CHUNK, COLUMNS, LENGTH, td_errors

from fastrl_replay.all import (ExperienceReplay, GymStepper, OwnSteps, Pipe, PrioritizedReplay,
                               Rows, SequenceReplay, Steps, step_dtype)


def numbered_rows(rows, start, stop):
    "Return rows as eight environments give them in turn, each in one long episode"
    i = np.arange(start, stop)
    array = np.zeros(len(i), step_dtype(Box(0, 255, rows.shape, rows.dtype), Discrete(2)))
    for name, values in rows.columns(i).items():
        array[name] = values
    array['env_id'], array['step_n'], array['episode_n'] = i % 8, i//8 + 1, 1
    return array


def parts_of(rows):
    "Yield all rows, some at a time"
    step = 1000 if rows.pictures else CHUNK
    for start in range(0, rows.size, step):
        yield Steps(numbered_rows(rows, start, min(start + step, rows.size)))


class Blocks(Pipe):
    "All rows, some at a time, then endless blocks with a row of each of eight environments"
    def __init__(self, rows):
        super().__init__(None)
        self.rows = rows

    def __iter__(self):
        yield from parts_of(self.rows)
        block = numbered_rows(self.rows, 0, 8)
        step = self.rows.size//8
        while True:
            step += 1
            block = block.copy()
            block['step_n'] = step
            yield Steps(block)


class Pass(Pipe):
    "A stage that does nothing"
    def __iter__(self):
        yield from self.source


def added_steps(replay, n):
    "Return a function that adds a step of a loop with `n` environments, in episodes of 100 steps"
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(101, n, 4)).astype(np.float32)
    reward = rng.normal(size=(100, n))
    done = np.zeros((100, n), bool)
    done[-1] = True
    steps = [(obs[t], np.ones(n, int), reward[t], obs[t + 1], done[t], np.zeros(n, bool))
             for t in range(100)]
    if n == 1:
        steps = [tuple(x[0] if x[0].shape else x[0].item() for x in step) for step in steps]
    steps = cycle(steps)
    how = {} if n == 1 else {'autoreset_mode': 'disabled'}
    for _ in range(1000):
        replay.add_step(*next(steps), **how)
    return lambda: replay.add_step(*next(steps), **how)


def tensors(batch):
    for name in COLUMNS:
        batch[name]
    return batch


def ours(job, rows, n, folder=None):
    "Return a function that does a job and, if that draws, one that reads the result's columns"
    settings = dict(max_sz=rows.size, seed=0)
    if job == 'add_step':
        return added_steps(ExperienceReplay(**settings), n), None
    if job == 'add_step_sequences':
        return added_steps(SequenceReplay(bs=64, **settings), n), None
    if job == 'add_step_n_step':
        return added_steps(
            OwnSteps().n_step(3, gamma=.99).prioritized_replay(bs=256, **settings), n), None
    if job == 'stage':
        return iter(Pass(repeat(0))).__next__, None
    if job == 'env_step':
        actions = torch.arange(n) % 2
        return iter(GymStepper(
            gym.make_vec('CartPole-v1', n), lambda state: actions, seed=0)).__next__, None
    settings['bs'] = n
    if job == 'n_step':
        replay = Blocks(rows).n_step(3, gamma=.99).experience_replay(**settings)
        batches = iter(replay)
        while len(replay) < rows.size:
            next(batches)
        return batches.__next__, tensors
    if job == 'prioritized':
        replay = PrioritizedReplay(**settings)
    elif job == 'prioritized_by_rank':
        replay = PrioritizedReplay(kind='rank', alpha=.7, **settings)
    elif 'sequences' in job:
        replay = SequenceReplay(prioritized=job == 'prioritized_sequences', **settings)
    else:
        replay = ExperienceReplay(store=Rows(folder), **settings)
    for i, block in enumerate(parts_of(rows)):
        keys = replay.add(block)
        if 'prioritized' in job and 'sequences' not in job:
            replay.update_priorities(keys, td_errors(len(keys), i))
    if job == 'insert':
        block = Steps(numbered_rows(rows, 0, n))
        return lambda: replay.add(block), None
    if 'prioritized' not in job:
        return replay.sample, tensors
    errors = [torch.from_numpy(td_errors(n, i)) for i in range(4000)]
    if 'sequences' in job:
        errors = [torch.rand(n, LENGTH//2)]
    errors = cycle(errors)

    def step():
        batch = replay.sample()
        batch.update_priorities(next(errors))
        return batch
    return step, tensors


JOBS = ('insert uniform prioritized prioritized_by_rank sequences prioritized_sequences n_step '
        'stage env_step add_step add_step_sequences add_step_n_step disk')
