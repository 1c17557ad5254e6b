"""The six buffers of seed 001, the experiment that this library grew from, and this library next to them."""
import random
from collections import deque, namedtuple

from harness import OURS, Worker, comparison, time_in_turns

Transition = namedtuple('Transition', 'state action reward next_state done')


class TupleDeque:
    "Holds a deque of tuples"
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def append(self, *row):
        self.memory.append(row)

    def sample(self, n):
        return random.sample(self.memory, n)


class NamedTupleDeque(TupleDeque):
    "Holds a deque of named tuples"
    def append(self, *row):
        self.memory.append(Transition(*row))


class IsDeque(deque):
    "Is a deque of tuples"
    def __init__(self, capacity):
        super().__init__(maxlen=capacity)

    def append(self, *row):
        super().append(row)

    def sample(self, n):
        return random.sample(self, n)


class IsNamedDeque(IsDeque):
    "Is a deque of named tuples"
    def append(self, *row):
        deque.append(self, Transition(*row))


class ObjectArray:
    "Holds a numpy array of objects"
    def __init__(self, capacity):
        import numpy as np
        self.data = np.empty(capacity, object)
        self.choice = np.random.default_rng(0).choice
        self.index = 0
        self.size = 0

    def append(self, *row):
        self.data[self.index] = Transition(*row)
        self.index = (self.index + 1) % len(self.data)
        self.size = min(self.size + 1, len(self.data))

    def sample(self, n):
        return self.choice(self.data[:self.size], n, replace=False)


class StackedDeque(TupleDeque):
    "Holds a deque of tuples, and stacks its batches"
    def sample(self, n):
        import numpy as np
        return [np.array(column) for column in zip(*random.sample(self.memory, n))]


def ours(capacity):
    "This library, a row at a time"
    from fastrl_replay.all import ExperienceReplay
    replay = ExperienceReplay(max_sz=capacity, seed=0)
    replay.append = lambda state, action, reward, after, done: replay.add_step(state, action, reward, after, done)
    return replay


BUFFERS = {'1': NamedTupleDeque, '2': TupleDeque, '3': IsDeque, '4': IsNamedDeque, '5': ObjectArray,
           '6': StackedDeque, OURS: ours}


def prepare(library, buffer, job, size):
    "Fill a buffer; return the function that adds a row, or that draws 50"
    import numpy as np
    memory = BUFFERS[buffer](size)
    state = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    row = state[0], 0, 1., state[1], True
    for _ in range(size):
        memory.append(*row)
    if job == 'insert':
        return lambda: memory.append(*row)
    return lambda: memory.sample(50)


def run(options):
    size, rounds, seconds = (2_000, 2, .005) if options.quick else (200_000, 9, .05)
    contests = {}
    workers = {name: Worker(OURS) for name in BUFFERS}
    for title, job in {'insert a row': 'insert', 'draw 50 rows': 'draw'}.items():
        for name, worker in workers.items():
            worker.call('prepare', 'six_buffers', buffer=name, job=job, size=size)
        contests[title] = time_in_turns(workers, rounds, seconds)
    for worker in workers.values():
        worker.close()
    return dict(size=size, contests=contests)


def report(results):
    return comparison(results['contests'])
