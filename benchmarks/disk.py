"""Keep rows of Atari's size on the disk: write them, and draw with nothing and with all of it in main memory."""
import ctypes
import os
import re
import tempfile
from pathlib import Path
from time import perf_counter

from harness import OURS, WorkerError, comparison, markdown_table, time_in_turns
from rows import start_workers

DONT_NEED = 4       # MADV_DONTNEED
COLD_DRAWS = 20
state = {}          # of this process


# ---- in the worker ----

def blocks(size):
    "Yield columns of 256 rows; the reward is the number of the row"
    import numpy as np
    noise = np.random.default_rng(0).integers(0, 2**62, 4*84*84//8)
    for start in range(0, size, 256):
        i = np.arange(start, min(start + 256, size))
        pixels = (i[:, None] ^ noise).view(np.uint8).reshape(-1, 4, 84, 84)
        yield dict(state=pixels, next_state=pixels, action=i % 18, reward=i.astype(np.float32),
                   terminated=i % 1000 == 999)


def forget(folder):
    "Drop the files of a folder from main memory"
    libc = ctypes.CDLL(None)
    maps = re.findall(r'^(\w+)-(\w+)(?: +\S+){4} +(/.*)$', Path('/proc/self/maps').read_text(), re.M)
    for start, end, path in maps:
        if path.startswith(folder):
            start, end = int(start, 16), int(end, 16)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), DONT_NEED)
    for path in Path(folder).rglob('*'):
        if path.is_file():
            with open(path, 'rb') as file:
                os.fsync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def our_buffer(folder, size):
    import numpy as np
    from gymnasium.spaces import Box, Discrete

    from fastrl_replay.all import ExperienceReplay, Rows, Steps, step_dtype
    dtype = step_dtype(Box(0, 255, (4, 84, 84), np.uint8), Discrete(18))
    replay = ExperienceReplay(bs=32, max_sz=size, store=Rows(folder), seed=0)

    def add(block):
        rows = np.zeros(len(block['reward']), dtype)
        for name, values in block.items():
            rows[name] = values
        i = block['reward'].astype(int)
        rows['episode_n'], rows['step_n'] = i//1000 + 1, i % 1000 + 1
        start = perf_counter()
        replay.add(Steps(rows))
        return perf_counter() - start
    return add, replay.sample


def torchrl_buffer(folder, size):
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, ReplayBuffer
    buffer = ReplayBuffer(storage=LazyMemmapStorage(size, scratch_dir=folder), batch_size=32)

    def add(block):
        rows = TensorDict({k: torch.from_numpy(v) for k, v in block.items()}, [len(block['reward'])])
        start = perf_counter()
        buffer.extend(rows)
        return perf_counter() - start
    return add, buffer.sample


def prepare(library, folder, size):
    "Fill files, draw a few cold batches, and return the function that draws"
    add, draw = (our_buffer if library == OURS else torchrl_buffer)(folder, size)
    seconds = sum(map(add, blocks(size)))
    cold = []
    for _ in range(COLD_DRAWS):
        forget(folder)
        start = perf_counter()
        batch = draw()
        batch['state'].sum()
        cold.append((perf_counter() - start)*1e6)
    if (batch['state'] != batch['next_state']).any():
        raise ValueError('wrong rows')
    state.update(write_us=seconds/size*1e6, cold=cold)

    def step():
        draw()['state'].sum()
    return step


def result():
    return state


# ---- in the runner ----

def run(options):
    size, rounds = (1_000, 2) if options.quick else (40_000, 9)
    found = dict(rows=size, write_us={}, contests={'draw 32 rows, cold': {}}, faults={})
    libraries = {k: v for k, v in options.libraries.items() if k == 'torchrl'}
    workers = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for name, worker in start_workers(libraries).items():
            try:
                worker.call('prepare', 'disk', folder=f'{folder}/{name}', size=size)
                workers[name], x = worker, worker.call('result', 'disk')
                found['write_us'][name] = x['write_us']
                found['contests']['draw 32 rows, cold'][name] = x['cold']
            except WorkerError as error:
                found['faults'][name] = str(error)
                worker.close()
        found['contests']['draw 32 rows, warm'] = time_in_turns(workers, rounds, .05, found['faults'])
        for worker in workers.values():
            worker.close()
    return found


def report(results):
    rows = [[name, us] for name, us in results['write_us'].items()]
    return comparison(results['contests']) + '\n\n' + markdown_table(['library', 'microseconds to write a row'], rows)
