"""Replay buffers of other libraries, each called in the fastest way that it documents.

A function is one library: it fills a buffer for a job, and returns a function that does the job
once, and, if that draws, one that makes the columns of a learner as torch tensors of the result.
"""
import random
from collections import deque
from itertools import count, cycle

import numpy as np

COLUMNS = ('state', 'action', 'reward', 'next_state', 'terminated')
LENGTH = 80     # rows of a sequence
CHUNK = 100_000


class Rows:
    "Rows of CartPole's size, or with pictures, which can be told apart by their states"
    def __init__(self, size, pictures=False):
        self.size = size
        self.pictures = pictures
        self.shape = (84, 84, 4) if pictures else (4,)
        self.dtype = np.uint8 if pictures else np.float32
        self.period = 251 if pictures else 1 << 24

    def block(self, n):
        "Return the columns of the first rows"
        return self.columns(np.arange(n))

    def columns(self, i):
        "Return the columns of the rows with these numbers"
        def state(i):
            states = np.empty((len(i), *self.shape), self.dtype)
            states.T[:] = i % self.period
            return states
        i = i % self.period
        return dict(state=state(i), action=i % 2, reward=(i % 7).astype(np.float32),
                    next_state=state(i + 1), terminated=np.zeros(len(i), bool))

    def parts(self):
        "Yield the columns of all rows, some at a time"
        step = 500 if self.pictures else CHUNK
        for start in range(0, self.size, step):
            yield self.columns(np.arange(start, min(start + step, self.size)))

    def wrong(self, batch, n):
        "Return how many of `n` rows, or sequences of rows, are missing or not as they were put in"
        state = np.asarray(batch['state'])
        axes = state.ndim - len(self.shape)
        i = state.reshape(*state.shape[:axes], -1)[..., 0].astype(int)
        good = np.ones(i.size, bool)
        for name, expected in self.columns(i.ravel()).items():
            column = np.asarray(batch[name]).reshape(i.size, -1)
            good &= (column == expected.reshape(i.size, -1)).all(1)
        if axes == 2:   # rows of a sequence follow each other at one distance
            n *= LENGTH
            distance = np.diff(i, axis=1)
            good &= (distance == distance[:, :1]).all(1).repeat(i.shape[1])
        return abs(good.size - n) + int((~good).sum())


def td_errors(n, seed=0):
    return np.abs(np.random.default_rng(seed).normal(size=n)).astype(np.float32)


def as_tensors(*names):
    "Return a function that returns the five columns as torch tensors that share their memory"
    import torch

    def tensors(batch):
        columns = {}
        for name, theirs in zip(COLUMNS, names or COLUMNS):
            x = batch[theirs]
            if isinstance(x, np.ndarray):
                x = torch.from_numpy(np.ascontiguousarray(x))
            elif not isinstance(x, torch.Tensor):
                x = torch.from_dlpack(x)
            columns[name] = x
        return columns
    return tensors


def updating(draw, update, td):
    "Return a function that draws a batch and its keys, and updates their priorities"
    def step():
        batch, keys = draw()
        update(keys, td)
        return batch
    return step


def plain_deque(job, rows, n):
    buffer = deque(maxlen=rows.size)
    for part in rows.parts():
        buffer.extend(zip(*part.values()))
    if job == 'uniform':
        tensors = as_tensors()
        return lambda: zip(*random.sample(buffer, n)), lambda batch: tensors(
            dict(zip(COLUMNS, map(np.array, batch))))
    new = list(zip(*rows.block(n).values()))

    def step():
        for row in new:
            buffer.append(row)
    return step, None


def stable_baselines3(job, rows, n):
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import ReplayBuffer
    envs = n if job == 'insert' else 1
    low, high = (0, 255) if rows.pictures else (-np.inf, np.inf)
    space = Box(low, high, rows.shape, rows.dtype)
    buffer = ReplayBuffer(rows.size, space, Discrete(2), device='cpu', n_envs=envs,
                          handle_timeout_termination=False)

    def add(part, i=0):
        state, action, reward, after, done = (values[i:i + envs] for values in part.values())
        buffer.add(state, after, action.reshape(-1, 1), reward, done, [{}]*envs)

    for part in rows.parts():
        for i in range(0, len(part['reward']) - envs + 1, envs):
            add(part, i)
    block = rows.block(envs)
    if job == 'insert':
        return lambda: add(block), None

    def tensors(s):
        return dict(zip(
            COLUMNS, (s.observations, s.actions, s.rewards, s.next_observations, s.dones)))
    return lambda: buffer.sample(n), tensors


def cpprb(job, rows, n):
    import cpprb as library
    block = rows.block(n)
    columns = {k: dict(shape=v.shape[1:] or 1, dtype=v.dtype) for k, v in block.items()}
    if job == 'prioritized':
        buffer = library.PrioritizedReplayBuffer(rows.size, columns, alpha=.6)
    else:
        buffer = library.ReplayBuffer(rows.size, columns)
    for part in rows.parts():
        buffer.add(**part)
    if job == 'insert':
        return lambda: buffer.add(**block), None
    if job == 'uniform':
        return lambda: buffer.sample(n), as_tensors()
    buffer.update_priorities(np.arange(rows.size), td_errors(rows.size))

    def draw():
        batch = buffer.sample(n, beta=.4)
        return batch, batch['indexes']
    return updating(draw, buffer.update_priorities, td_errors(n)), as_tensors()


def tianshou(job, rows, n):
    from tianshou import data

    def batch(n):
        state, action, reward, after, done = rows.block(n).values()
        return data.Batch(obs=state, act=action, rew=reward, obs_next=after,
                          terminated=done, truncated=done)

    size = rows.size
    if job == 'insert':
        buffer, row, envs = data.VectorReplayBuffer(size//n*n, n), batch(n), np.arange(n)
        return lambda: buffer.add(row, buffer_ids=envs), None
    if job == 'uniform':
        buffer = data.ReplayBuffer(size)
    else:
        buffer = data.PrioritizedReplayBuffer(size, alpha=.6, beta=.4)
    full = batch(size)
    full.done = full.terminated
    buffer.set_batch(full)
    buffer._size, buffer.last_index[0] = size, size - 1
    tensors = as_tensors('obs', 'act', 'rew', 'obs_next', 'terminated')
    if job == 'uniform':
        return lambda: buffer.sample(n)[0], lambda batch: tensors(vars(batch))
    buffer.update_weight(np.arange(size), td_errors(size))
    return (updating(lambda: buffer.sample(n), buffer.update_weight, td_errors(n)),
            lambda batch: tensors(vars(batch)))


def torchrl(job, rows, n, folder=None):
    import torch
    from tensordict import TensorDict
    from torchrl import data
    from torchrl.data.replay_buffers import samplers
    length = LENGTH if 'sequences' in job else 1
    settings = dict(batch_size=n*length)
    slices = dict(slice_len=LENGTH, traj_key='trajectory', strict_length=True)
    make, storage = data.ReplayBuffer, data.LazyTensorStorage(rows.size)
    if job == 'disk':
        storage = data.LazyMemmapStorage(rows.size, scratch_dir=folder)
    elif job == 'prioritized':
        make = data.PrioritizedReplayBuffer
        settings.update(alpha=.6, beta=.4)
    elif job == 'sequences':
        settings['sampler'] = samplers.SliceSampler(cache_values=True, **slices)
    elif job == 'prioritized_sequences':
        settings['sampler'] = samplers.PrioritizedSliceSampler(
            rows.size, alpha=.9, beta=.6, **slices)
    buffer = make(storage=storage, **settings)

    def rows_of(part, first=0):
        columns = {k: torch.from_numpy(v) for k, v in part.items()}
        if length > 1:
            columns['trajectory'] = torch.arange(first, first + len(part['reward']))//1000
        return TensorDict(columns, [len(part['reward'])])

    for i, part in enumerate(rows.parts()):
        buffer.extend(rows_of(part, i*CHUNK))
    if job == 'insert':
        block = rows_of(rows.block(n))
        return lambda: buffer.extend(block), None

    def tensors(batch):
        return {k: batch[k] if length == 1 else batch[k].view(-1, length, *batch[k].shape[1:])
                for k in COLUMNS}
    if 'prioritized' not in job:
        return buffer.sample, tensors
    buffer.update_priority(torch.arange(rows.size), torch.from_numpy(td_errors(rows.size)))

    def draw():
        batch, info = buffer.sample(return_info=True)
        return batch, info['index']
    return updating(draw, buffer.update_priority, torch.from_numpy(td_errors(n*length))), tensors


def flashbax(job, rows, n):
    import flashbax as library
    import jax
    envs, size = 1, rows.size
    if job == 'sequences':
        envs = 8
        make = library.make_trajectory_buffer(
            add_batch_size=envs, sample_batch_size=n, sample_sequence_length=LENGTH, period=40,
            min_length_time_axis=LENGTH, max_length_time_axis=size//envs)
    elif job == 'prioritized':
        make = library.make_prioritised_item_buffer(
            size, 1, n, add_sequences=True, priority_exponent=.6)
    else:
        make = library.make_item_buffer(size, 1, n, add_sequences=True)
    block, keys = rows.block(n), cycle(jax.random.split(jax.random.PRNGKey(0), 100))
    add, sample = jax.jit(make.add, donate_argnums=0), jax.jit(make.sample)
    state = make.init({k: jax.numpy.asarray(v[0]) for k, v in block.items()})
    for part in rows.parts():
        if envs > 1:
            part = {k: np.moveaxis(v.reshape(-1, envs, *v.shape[1:]), 1, 0)
                    for k, v in part.items()}
        state = add(state, jax.tree.map(jax.numpy.asarray, part))
    if job == 'prioritized':
        update, td = jax.jit(make.set_priorities, donate_argnums=0), jax.numpy.asarray(td_errors(n))
        state = update(state, jax.numpy.arange(size), jax.numpy.asarray(td_errors(size)))

        @jax.jit
        def weights_of(probabilities):
            weights = (probabilities*size)**-.4
            return weights/weights.max()

    def step():
        nonlocal state
        if job == 'insert':
            state = jax.block_until_ready(add(state, block))
            return
        batch = sample(state, next(keys))
        if job == 'prioritized':
            weights = weights_of(batch.probabilities)
            state = update(state, batch.indices, td)
            jax.block_until_ready((weights, state))
        return jax.block_until_ready(batch.experience)
    return step, as_tensors() if job != 'insert' else None


def rlox(job, rows, n):
    "Its states and actions are float32"
    import rlox as library

    def flat(part):
        state, action, reward, after, done = part.values()
        done = done.view(np.uint8)
        return state.ravel(), after.ravel(), action.astype(np.float32), reward, done, done

    seeds, tensors = count(), as_tensors('obs', 'actions', 'rewards', 'next_obs', 'terminated')
    block = flat(rows.block(n))
    if job == 'prioritized':
        buffer = library.PrioritizedReplayBuffer(rows.size, 4, 1, .6, .4)
        for part in rows.parts():
            for state, action, reward, after, _ in zip(*part.values()):
                buffer.push(state, np.float32([action]), reward, False, False, after)
        keys = np.arange(rows.size, dtype=np.uint64)
        buffer.update_priorities(keys, td_errors(rows.size).astype(float))

        def draw():
            batch = buffer.sample(n, next(seeds))
            return batch, batch['indices']
        return updating(draw, buffer.update_priorities, td_errors(n).astype(float)), tensors
    buffer = library.ReplayBuffer(rows.size, 4, 1)
    for part in rows.parts():
        buffer.push_batch(*flat(part))
    if job == 'uniform':
        return lambda: buffer.sample(n, next(seeds)), tensors
    if n > 1:
        return lambda: buffer.push_batch(*block), None
    state, after, action, *_ = block
    return lambda: buffer.push(state, action, 1., False, False, after), None


JOBS = {
    'deque': (plain_deque, 'insert uniform'),
    'stable-baselines3': (stable_baselines3, 'insert uniform'),
    'cpprb': (cpprb, 'insert uniform prioritized'),
    'tianshou': (tianshou, 'insert uniform prioritized'),
    'torchrl': (torchrl, 'insert uniform prioritized sequences prioritized_sequences disk'),
    'flashbax': (flashbax, 'insert uniform prioritized sequences'),
    'rlox': (rlox, 'insert uniform prioritized'),
}
