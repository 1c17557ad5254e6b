"""Replay buffers of this and of other libraries, each called in the fastest way that it documents.

A class is one library, a method is one job: it fills a buffer and returns a function that does the
job once. Drawing ends when the columns of a learner are torch tensors; `tensors` makes them.
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

    def state(self, i):
        numbers = (i % self.period).astype(self.dtype).reshape(-1, *[1]*len(self.shape))
        return np.ascontiguousarray(np.broadcast_to(numbers, (len(i), *self.shape)))

    def part(self, start, stop):
        "Return the columns of rows `start` to `stop`"
        i = np.arange(start, stop)
        return dict(state=self.state(i), action=i % 2, reward=(i % 7).astype(np.float32),
                    next_state=self.state(i + 1), terminated=np.zeros(len(i), bool))

    def parts(self):
        "Yield the number of the first row and the columns, for all rows"
        step = 500 if self.pictures else CHUNK
        for start in range(0, self.size, step):
            yield start, self.part(start, min(start + step, self.size))

    def wrong(self, columns, n):
        "Return how many of `n` rows, or sequences of rows, are missing or not as they were put in"
        state, after, action, reward = (np.asarray(columns[name]) for name in
                                        ('state', 'next_state', 'action', 'reward'))
        shape = state.shape[:state.ndim - len(self.shape)]
        state = state.reshape(*shape, -1).astype(np.int64)
        after = after.reshape(*shape, -1).astype(np.int64)
        i = state[..., :1]
        good = (state == i).all(-1) & (after == (i + 1) % self.period).all(-1)
        i = i[..., 0]
        if not self.pictures:
            good &= (action.reshape(shape) == i % 2) & (reward.reshape(shape) == i % 7)
        if len(shape) == 2:     # rows of a sequence follow each other at one distance
            distance = np.diff(i, axis=1)
            good &= (distance == distance[:, :1]).all(1)[:, None]
            n *= LENGTH
        return abs(good.size - n) + int((~good).sum())


def td_errors(n, seed=0):
    return np.abs(np.random.default_rng(seed).normal(size=n)).astype(np.float32)


def as_tensors(columns, names=COLUMNS):
    "Return the five columns as torch tensors that share their memory"
    import torch
    tensors = {}
    for name, theirs in zip(COLUMNS, names):
        x = columns[theirs]
        if isinstance(x, np.ndarray):
            x = torch.from_numpy(np.ascontiguousarray(x))
        elif not isinstance(x, torch.Tensor):
            x = torch.from_dlpack(x)
        tensors[name] = x
    return tensors


class Library:
    "One library; `rows` are in the buffer, `n` rows are added or drawn"
    def __init__(self, rows, n):
        self.rows = rows
        self.n = n

    def tensors(self, batch):
        return as_tensors(batch)

    def uniform(self):
        buffer = self.full()
        return lambda: buffer.sample(self.n)


class Deque(Library):
    def full(self):
        buffer = deque(maxlen=self.rows.size)
        for _, part in self.rows.parts():
            buffer.extend(zip(*part.values()))
        return buffer

    def insert(self):
        buffer = self.full()
        rows = list(zip(*self.rows.part(0, self.n).values()))

        def step():
            for row in rows:
                buffer.append(row)
        return step

    def uniform(self):
        buffer = self.full()
        return lambda: zip(*random.sample(buffer, self.n))

    def tensors(self, batch):
        return as_tensors(dict(zip(COLUMNS, map(np.array, batch))))


class StableBaselines3(Library):
    def full(self, envs=1, name='ReplayBuffer', **settings):
        from gymnasium.spaces import Box, Discrete
        from stable_baselines3.common import buffers
        rows = self.rows
        space = Box(-np.inf, np.inf, rows.shape, np.float32)
        if rows.pictures:
            space = Box(0, 255, rows.shape, np.uint8)
        buffer = getattr(buffers, name)(rows.size//envs*envs, space, Discrete(2), device='cpu', n_envs=envs,
                                        handle_timeout_termination=False, **settings)
        for name, theirs in zip(COLUMNS, ('observations', 'actions', 'rewards', 'next_observations')):
            array = getattr(buffer, theirs)
            array = array.reshape(buffer.buffer_size*envs, *array.shape[2:])
            for start, part in rows.parts():
                values = array[start:start + len(part[name])]
                values[:] = part[name][:len(values)].reshape(values.shape)
        buffer.full = True
        return buffer

    def row(self, n):
        part = self.rows.part(0, n)
        return (part['state'], part['next_state'], part['action'].reshape(-1, 1), part['reward'],
                part['terminated'], [{}]*n)

    def insert(self):
        buffer, row = self.full(self.n), self.row(self.n)
        return lambda: buffer.add(*row)

    add_step = insert

    def n_step(self):
        buffer, row = self.full(8, 'NStepReplayBuffer', n_steps=3, gamma=1.), self.row(8)

        def step():
            buffer.add(*row)
            return buffer.sample(self.n)
        return step

    def tensors(self, batch):
        return dict(zip(COLUMNS, (batch.observations, batch.actions, batch.rewards,
                                  batch.next_observations, batch.dones)))


class Cpprb(Library):
    def full(self, name='ReplayBuffer', **settings):
        import cpprb
        columns = {k: dict(shape=v.shape[1:] or 1, dtype=v.dtype) for k, v in self.rows.part(0, 1).items()}
        buffer = getattr(cpprb, name)(self.rows.size, columns, **settings)
        for _, part in self.rows.parts():
            buffer.add(**part)
        return buffer

    def insert(self):
        buffer, part = self.full(), self.rows.part(0, self.n)
        return lambda: buffer.add(**part)

    add_step = insert

    def prioritized(self):
        buffer, td = self.full('PrioritizedReplayBuffer', alpha=.6), td_errors(self.n)
        buffer.update_priorities(np.arange(self.rows.size), td_errors(self.rows.size, 1))

        def step():
            batch = buffer.sample(self.n, beta=.4)
            buffer.update_priorities(batch['indexes'], td)
            return batch
        return step


class Tianshou(Library):
    def batch(self, n, **columns):
        from tianshou.data import Batch
        part = self.rows.part(0, n)
        return Batch(obs=part['state'], act=part['action'], rew=part['reward'], obs_next=part['next_state'],
                     terminated=part['terminated'], truncated=part['terminated'].copy(), **columns)

    def full(self, name='ReplayBuffer', **settings):
        from tianshou import data
        size = self.rows.size
        buffer = getattr(data, name)(size, **settings)
        buffer.set_batch(self.batch(size, done=np.zeros(size, bool)))
        buffer._size = size
        buffer.last_index[0] = size - 1
        return buffer

    def insert(self):
        from tianshou.data import VectorReplayBuffer
        buffer = VectorReplayBuffer(self.rows.size//self.n*self.n, self.n)
        row, envs = self.batch(self.n), np.arange(self.n)
        return lambda: buffer.add(row, buffer_ids=envs)

    add_step = insert

    def prioritized(self):
        buffer = self.full('PrioritizedReplayBuffer', alpha=.6, beta=.4)
        td = td_errors(self.n)
        buffer.update_weight(np.arange(self.rows.size), td_errors(self.rows.size, 1))

        def step():
            batch, index = buffer.sample(self.n)
            buffer.update_weight(index, td)
            return batch, index
        return step

    def tensors(self, batch):
        return as_tensors(vars(batch[0]), ('obs', 'act', 'rew', 'obs_next', 'terminated'))


class Torchrl(Library):
    sequences_drawn = False

    def tensordict(self, part):
        import torch
        from tensordict import TensorDict
        return TensorDict({k: torch.from_numpy(v) for k, v in part.items()}, [len(part['reward'])])

    def full(self, name='ReplayBuffer', **settings):
        from torchrl import data
        storage = data.LazyTensorStorage(self.rows.size)
        buffer = getattr(data, name)(storage=storage, **settings)
        for start, part in self.rows.parts():
            if self.sequences_drawn:
                part['trajectory'] = np.arange(start, start + len(part['reward']))//1000
            buffer.extend(self.tensordict(part))
        return buffer

    def insert(self):
        buffer, rows = self.full(), self.tensordict(self.rows.part(0, self.n))
        return lambda: buffer.extend(rows)

    add_step = insert

    def uniform(self):
        return self.full(batch_size=self.n).sample

    def prioritized(self):
        return self.updated(self.full('PrioritizedReplayBuffer', batch_size=self.n, alpha=.6, beta=.4), self.n)

    def updated(self, buffer, n):
        import torch
        td = torch.from_numpy(td_errors(n))
        buffer.update_priority(torch.arange(self.rows.size), torch.from_numpy(td_errors(self.rows.size, 1)))

        def step():
            batch, info = buffer.sample(return_info=True)
            buffer.update_priority(info['index'], td)
            return batch
        return step

    def slices(self, name, *args, **settings):
        from torchrl.data.replay_buffers import samplers
        self.sequences_drawn = True
        sampler = getattr(samplers, name)(*args, slice_len=LENGTH, traj_key='trajectory',
                                          strict_length=True, **settings)
        return self.full(batch_size=self.n*LENGTH, sampler=sampler)

    def sequences(self):
        return self.slices('SliceSampler', cache_values=True).sample

    def prioritized_sequences(self):
        buffer = self.slices('PrioritizedSliceSampler', self.rows.size, alpha=.9, beta=.6)
        return self.updated(buffer, self.n*LENGTH)

    def ray(self):
        "Draw from a buffer in an actor of Ray"
        from functools import partial

        from torchrl.data import LazyTensorStorage, RayReplayBuffer
        buffer = RayReplayBuffer(storage=partial(LazyTensorStorage, self.rows.size), batch_size=self.n,
                                 remote_config=dict(num_cpus=.5))
        buffer.extend(self.tensordict(self.rows.part(0, self.rows.size)))
        return buffer.sample

    def tensors(self, batch):
        columns = {name: batch[name] for name in COLUMNS}
        if self.sequences_drawn:
            columns = {name: x.view(-1, LENGTH, *x.shape[1:]) for name, x in columns.items()}
        return columns


class Flashbax(Library):
    def filled(self, make, envs=1):
        import jax
        state = make.init({k: jax.numpy.asarray(v[0]) for k, v in self.rows.part(0, 1).items()})
        add = jax.jit(make.add, donate_argnums=0)
        for _, part in self.rows.parts():
            if envs > 1:
                part = {k: np.moveaxis(v[:len(v)//envs*envs].reshape(-1, envs, *v.shape[1:]), 1, 0)
                        for k, v in part.items()}
            state = add(state, jax.tree.map(jax.numpy.asarray, part))
        return state

    def items(self, n, **settings):
        import flashbax
        make = flashbax.make_prioritised_item_buffer if settings else flashbax.make_item_buffer
        return make(self.rows.size, 1, n, add_sequences=True, **settings)

    def full(self):
        return self.filled(self.items(1))

    def keys(self):
        import jax
        return cycle(jax.random.split(jax.random.PRNGKey(0), 100))

    def drawn(self, make, envs=1):
        import jax
        state, draw, keys = self.filled(make, envs), jax.jit(make.sample), self.keys()
        return lambda: jax.block_until_ready(draw(state, next(keys))).experience

    def insert(self):
        import jax
        make = self.items(1)
        state, part = self.full(), self.rows.part(0, self.n)
        add = jax.jit(make.add, donate_argnums=0)

        def step():
            nonlocal state
            state = jax.block_until_ready(add(state, part))
        return step

    add_step = insert

    def uniform(self):
        return self.drawn(self.items(self.n))

    def prioritized(self):
        import jax
        size, keys, td = self.rows.size, self.keys(), jax.numpy.asarray(td_errors(self.n))
        make = self.items(self.n, priority_exponent=.6)
        update = jax.jit(make.set_priorities, donate_argnums=0)
        state = update(self.filled(make), jax.numpy.arange(size), jax.numpy.asarray(td_errors(size, 1)))

        @jax.jit
        def draw(state, key):
            sample = make.sample(state, key)
            weight = (sample.probabilities*size)**-.4
            return sample.experience, sample.indices, weight/weight.max()

        def step():
            nonlocal state
            batch, index, weight = draw(state, next(keys))
            state = update(state, index, td)
            jax.block_until_ready((batch, weight, state))
            return batch
        return step

    def sequences(self):
        import flashbax
        make = flashbax.make_trajectory_buffer(add_batch_size=8, sample_batch_size=self.n,
                                               sample_sequence_length=LENGTH, period=40, min_length_time_axis=LENGTH,
                                               max_length_time_axis=self.rows.size//8)
        return self.drawn(make, 8)


class Rlox(Library):
    "Its states and actions are float32"
    def full(self):
        import rlox
        buffer = rlox.ReplayBuffer(self.rows.size, 4, 1)
        for _, part in self.rows.parts():
            buffer.push_batch(*self.flat(part))
        return buffer

    def flat(self, part):
        flags = np.zeros(len(part['reward']), np.uint8)
        return (part['state'].ravel(), part['next_state'].ravel(), part['action'].astype(np.float32),
                part['reward'], flags, flags)

    def insert(self):
        buffer, part = self.full(), self.rows.part(0, self.n)
        if self.n > 1:
            rows = self.flat(part)
            return lambda: buffer.push_batch(*rows)
        obs, after, action = part['state'][0], part['next_state'][0], part['action'].astype(np.float32)
        return lambda: buffer.push(obs, action, 1., False, False, after)

    add_step = insert

    def uniform(self):
        buffer, seeds = self.full(), count()
        return lambda: buffer.sample(self.n, next(seeds))

    def prioritized(self):
        import rlox
        buffer, seeds = rlox.PrioritizedReplayBuffer(self.rows.size, 4, 1, .6, .4), count()
        for start, part in self.rows.parts():
            columns = (part['state'], part['action'].astype(np.float32).reshape(-1, 1), part['reward'].tolist(),
                       part['next_state'], td_errors(len(part['reward']), start).tolist())
            for obs, action, reward, after, priority in zip(*columns):
                buffer.push(obs, action, reward, False, False, after, priority)
        td = td_errors(self.n).astype(np.float64)

        def step():
            batch = buffer.sample(self.n, next(seeds))
            buffer.update_priorities(batch['indices'], td)
            return batch
        return step

    def tensors(self, batch):
        return as_tensors(batch, ('obs', 'actions', 'rewards', 'next_obs', 'terminated'))


CLASSES = {'deque': Deque, 'stable-baselines3': StableBaselines3, 'cpprb': Cpprb, 'tianshou': Tianshou,
           'torchrl': Torchrl, 'flashbax': Flashbax, 'rlox': Rlox}
