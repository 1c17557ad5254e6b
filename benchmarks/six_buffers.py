"""This library next to the six buffers of seed 001, the experiment that it grew from."""
import random
from collections import deque, namedtuple

from harness import OURS, race

Transition = namedtuple('Transition', 'state action reward next_state done')


class HoldsDeque:
    def __init__(self, capacity, row):
        self.memory = deque(maxlen=capacity)
        self.row = row

    def append(self, *values):
        self.memory.append(self.row(values))

    def sample(self):
        return random.sample(self.memory, 50)


class IsDeque(deque):
    def __init__(self, capacity, row):
        super().__init__(maxlen=capacity)
        self.row = row

    def append(self, *values):
        super().append(self.row(values))

    def sample(self):
        return random.sample(self, 50)


class StackedDeque(HoldsDeque):
    def sample(self):
        import numpy as np
        return [np.array(column) for column in zip(*super().sample())]


class ObjectArray:
    def __init__(self, capacity, row):
        import numpy as np
        self.memory = np.empty(capacity, object)
        self.choice = np.random.default_rng(0).choice
        self.row = row
        self.index = 0

    def append(self, *values):
        self.memory[self.index] = self.row(values)
        self.index = (self.index + 1) % len(self.memory)

    def sample(self):
        return self.choice(self.memory, 50, replace=False)


class Ours:
    def __init__(self, capacity, row):
        from fastrl_replay.all import ExperienceReplay
        replay = ExperienceReplay(bs=50, max_sz=capacity, seed=0)
        self.append = replay.add_step
        self.sample = replay.sample


BUFFERS = {
    '1, holds a deque of named tuples': (HoldsDeque, Transition._make),
    '2, holds a deque of tuples': (HoldsDeque, tuple),
    '3, is a deque of tuples': (IsDeque, tuple),
    '4, is a deque of named tuples': (IsDeque, Transition._make),
    '5, holds an array of objects': (ObjectArray, Transition._make),
    '6, holds a deque of tuples and stacks batches': (StackedDeque, tuple),
    'fastrl_replay, add_step': (Ours, None),
}


def prepare(library, buffer, job, size):
    "Fill a buffer, then add a row or draw 50"
    import numpy as np
    make, row = BUFFERS[buffer]
    memory = make(size, row)
    state, after = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    for _ in range(size):
        memory.append(state, 0, 1., after, True)
    if job == 'draw 50 rows':
        return memory.sample, {}
    return lambda: memory.append(state, 0, 1., after, True), {}


def run(options):
    size, rounds, seconds = (2_000, 2, .005) if options.quick else (200_000, 9, .05)
    contests = {job: {name: (OURS, 'six_buffers', dict(buffer=name, job=job, size=size))
                      for name in BUFFERS}
                for job in ('insert a row', 'draw 50 rows')}
    return dict(race(contests, options.libraries, rounds, seconds), size=size)

