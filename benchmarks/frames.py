"""Keep rows of pixels, on frames of Atari games: bytes a row, time to add one, time to draw 32.

Each row is checked: a frame that comes back differently is an error.
"""
import gc
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from harness import OURS, Worker, WorkerError, comparison, markdown_table, time_in_turns
from rows import start_workers

STACK = 4
GAMES = ('Pong', 'Breakout', 'MsPacman', 'Seaquest')
STORES = {'Rows()': {}, 'Frames(4)': dict(stack=STACK), "Frames(4, compress='lz4')": dict(stack=STACK, compress='lz4'),
          "Frames(4, compress='zstd')": dict(stack=STACK, compress='zstd')}
MEMORIES = {name: (OURS, settings) for name, settings in STORES.items()} | {
    'stable-baselines3, optimize_memory_usage': ('stable-baselines3', dict(optimize_memory_usage=True)),
    'cpprb, next_of': ('cpprb', {}),
    'cpprb, next_of, stack_compress': ('cpprb', dict(stack_compress='obs'))}
figures = {}    # of the buffer in this process


# ---- in the worker ----

def play(path, game, rows):
    "Play at random; save all frames, with STACK - 1 copies of the first before each episode, and where rows begin"
    import ale_py
    import gymnasium as gym
    import numpy as np
    gym.register_envs(ale_py)
    env = gym.wrappers.AtariPreprocessing(gym.make(f'ALE/{game}-v5', frameskip=1))
    env.action_space.seed(0)
    frames, starts, ends = [], [], []
    done = True
    while len(starts) < rows:
        if done:
            first, _ = env.reset(seed=len(starts))
            frames += [first]*STACK
        starts.append(len(frames) - STACK)
        frame, _, terminated, truncated, _ = env.step(env.action_space.sample())
        frames.append(frame)
        done = terminated or truncated
        ends.append(done)
    ends[-1] = True
    np.savez(path, frames=frames, starts=starts, ends=ends)


class Ours:
    def __init__(self, size, settings):
        import numpy as np
        from gymnasium.spaces import Box, Discrete

        from fastrl_replay.all import ExperienceReplay, Frames, Rows, Steps, step_dtype
        store = Frames(**settings) if settings else Rows()
        self.row = np.zeros(1, step_dtype(Box(0, 255, (STACK, 84, 84), np.uint8), Discrete(18)))
        self.row['episode_n'] = 1
        self.replay = ExperienceReplay(bs=32, max_sz=size, store=store, seed=0)
        self.steps = Steps(self.row)

    def add(self, state, after, reward, end):
        row = self.row
        row['state'], row['next_state'], row['reward'], row['terminated'] = state, after, reward, end
        row['step_n'] += 1
        start = perf_counter()
        self.replay.add(self.steps)
        seconds = perf_counter() - start
        if end:
            row['episode_n'] += 1
            row['step_n'] = 0
        return seconds

    def draw(self):
        batch = self.replay.sample()
        batch.action, batch.terminated
        return batch.state, batch.next_state, batch.reward

    def nbytes(self):
        return self.replay.memory.nbytes


class StableBaselines3:
    def __init__(self, size, settings):
        import numpy as np
        from gymnasium.spaces import Box, Discrete
        from stable_baselines3.common.buffers import ReplayBuffer
        space = Box(0, 255, (STACK, 84, 84), np.uint8)
        self.buffer = ReplayBuffer(size, space, Discrete(18), 'cpu', handle_timeout_termination=False, **settings)

    def add(self, state, after, reward, end):
        import numpy as np
        row = state[None], after[None], np.zeros((1, 1), int), np.float32([reward]), np.array([end]), [{}]
        start = perf_counter()
        self.buffer.add(*row)
        return perf_counter() - start

    def draw(self):
        batch = self.buffer.sample(32)
        return batch.observations, batch.next_observations, batch.rewards


class Cpprb:
    def __init__(self, size, settings):
        import cpprb
        import numpy as np
        columns = dict(obs=dict(shape=(84, 84, STACK), dtype=np.uint8), act=dict(dtype=np.int64),
                       rew=dict(dtype=np.float32), done=dict(dtype=bool))
        self.buffer = cpprb.ReplayBuffer(size, columns, next_of='obs', **settings)

    def add(self, state, after, reward, end):
        import numpy as np
        state, after = (np.ascontiguousarray(np.moveaxis(x, 0, -1)) for x in (state, after))
        start = perf_counter()
        self.buffer.add(obs=state, act=0, rew=reward, next_obs=after, done=end)
        if end:
            self.buffer.on_episode_end()
        return perf_counter() - start

    def draw(self):
        import torch
        batch = {name: torch.from_numpy(x) for name, x in self.buffer.sample(32).items()}
        return batch['obs'].permute(0, 3, 1, 2), batch['next_obs'].permute(0, 3, 1, 2), batch['rew']


CLASSES = {OURS: Ours, 'stable-baselines3': StableBaselines3, 'cpprb': Cpprb}


def resident():
    return int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')


def prepare(library, path, settings):
    "Add all rows twice, check 3,200 drawn rows, and return the function that draws"
    import numpy as np
    data = np.load(path)
    frames, starts, ends = data['frames'], data['starts'], data['ends']

    def row(i):
        start = starts[i]
        return frames[start:start + STACK], frames[start + 1:start + STACK + 1]

    before = resident()
    buffer = CLASSES[library](len(starts), settings)
    seconds = []
    for n in range(2*len(starts)):
        i = n % len(starts)
        seconds.append(buffer.add(*row(i), i, bool(ends[i])))
    gc.collect()
    figures.update(add_us=float(np.mean(seconds[len(starts):]))*1e6, worst_add_ms=max(seconds[len(starts):])*1e3,
                   resident=resident() - before, nbytes=buffer.nbytes() if library == OURS else None)
    seen, wrong = set(), set()
    for _ in range(100):
        for state, after, reward in zip(*buffer.draw()):
            i = int(reward)
            seen.add(i)
            if not all(np.array_equal(x, y) for x, y in zip((state, after), row(i))):
                wrong.add(i)
    figures['checked'] = dict(rows=len(seen), wrong=len(wrong), ends=int(ends[list(seen)].sum()),
                              wrong_ends=int(ends[list(wrong)].sum()))
    return buffer.draw


def result():
    return figures


# ---- in the runner ----

def run(options):
    rows, rounds = (200, 2) if options.quick else (10_000, 9)
    found = dict(rows=rows, games={}, contests={}, faults={})
    pythons = {OURS: sys.executable} | {name: python for name, (python, _) in options.libraries.items()}
    with tempfile.TemporaryDirectory() as folder:
        for game in GAMES[:1] if options.quick else GAMES:
            path = f'{folder}/{game}.npz'
            player = Worker(OURS)
            player.call('play', 'frames', path=path, game=game, rows=rows)
            player.close()
            workers, memories = {}, {}
            for name, (library, settings) in MEMORIES.items():
                if library not in pythons:
                    continue
                worker = Worker(library, pythons[library])
                try:
                    worker.call('prepare', 'frames', path=path, settings=settings)
                    workers[name], memories[name] = worker, worker.call('result', 'frames')
                except WorkerError as error:
                    found['faults'][f'{game}, {name}'] = str(error)
                    worker.close()
            times = time_in_turns(workers, rounds, .05, found['faults'])
            for worker in workers.values():
                worker.close()
            for name, us in times.items():
                memories[name]['draw_us'] = sorted(us)[len(us)//2]
            found['games'][game] = dict(memories=memories)
            found['contests'][f'draw 32 rows of {game}'] = times
    return found


def report(results):
    lines = []
    for game, found in results['games'].items():
        for name, x in found['memories'].items():
            size = (x['nbytes'] or x['resident'])/results['rows']
            lines.append([game, name, size, x['add_us'], x['worst_add_ms'],
                          f'{x["checked"]["wrong"]} of {x["checked"]["rows"]}'])
    heads = ['game', 'memory', 'bytes a row', 'add 1, microseconds', 'longest add, ms', 'wrong rows']
    return comparison(results['contests']) + '\n\n' + markdown_table(heads, lines)
