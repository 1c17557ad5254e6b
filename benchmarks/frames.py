"""Keep frames of Atari games: bytes a row, time to add one and to draw 32, and wrong rows."""
import tempfile
from time import perf_counter

from harness import OURS, Worker, comparison, markdown_table, race, resident

STACK = 4
GAMES = ('Pong', 'Breakout', 'MsPacman', 'Seaquest')
MEMORIES = {
    'Rows()': (OURS, {}),
    'Frames(4)': (OURS, dict(stack=STACK)),
    "Frames(4, compress='lz4')": (OURS, dict(stack=STACK, compress='lz4')),
    "Frames(4, compress='zstd')": (OURS, dict(stack=STACK, compress='zstd')),
    'stable-baselines3, optimize_memory_usage': ('stable-baselines3', {}),
    'cpprb, next_of, stack_compress': ('cpprb', {}),
}


# ---- in the worker: each function returns `add(state, next_state, reward, end)` and `draw()` ----

def play(path, game, rows):
    "Play at random, and save both states of each row; return which rows end an episode"
    import ale_py
    import gymnasium as gym
    import numpy as np
    gym.register_envs(ale_py)
    env = gym.wrappers.AtariPreprocessing(gym.make(f'ALE/{game}-v5', frameskip=1))
    env = gym.wrappers.FrameStackObservation(env, STACK)
    env.action_space.seed(0)
    states, ends = np.zeros((rows, 2, STACK, 84, 84), np.uint8), [True]
    for i in range(rows):
        if ends[-1]:
            after, _ = env.reset(seed=i)
        states[i, 0] = after
        after, _, terminated, truncated, _ = env.step(env.action_space.sample())
        states[i, 1] = after
        ends.append(terminated or truncated)
    np.save(path, states)
    return ends[1:-1] + [True]


def ours(size, settings):
    import numpy as np
    from gymnasium.spaces import Box, Discrete

    from fastrl_replay.all import ExperienceReplay, Frames, Rows, Steps, step_dtype
    row = np.zeros(1, step_dtype(Box(0, 255, (STACK, 84, 84), np.uint8), Discrete(18)))
    row['episode_n'] = 1
    replay = ExperienceReplay(
        bs=32, max_sz=size, store=Frames(**settings) if settings else Rows(), seed=0)

    def add(state, after, reward, end):
        row['state'], row['next_state'] = state, after
        row['reward'], row['terminated'] = reward, end
        row['step_n'] += 1
        replay.add(Steps(row))
        if end:
            row['episode_n'] += 1
            row['step_n'] = 0

    def draw():
        batch = replay.sample()
        return batch.state, batch.next_state, batch.reward, batch.action, batch.terminated
    return add, draw, replay


def stable_baselines3(size, settings):
    import numpy as np
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import ReplayBuffer
    buffer = ReplayBuffer(size, Box(0, 255, (STACK, 84, 84), np.uint8), Discrete(18), 'cpu',
                          optimize_memory_usage=True, handle_timeout_termination=False)

    def add(state, after, reward, end):
        buffer.add(state[None], after[None], np.zeros((1, 1), int),
                   np.float32([reward]), np.array([end]), [{}])

    def draw():
        batch = buffer.sample(32)
        return batch.observations, batch.next_observations, batch.rewards
    return add, draw, None


def cpprb(size, settings):
    import cpprb
    import numpy as np
    import torch
    kinds = dict(obs=np.uint8, act=np.int64, rew=np.float32, done=bool)
    columns = {name: dict(dtype=dtype) for name, dtype in kinds.items()}
    columns['obs']['shape'] = 84, 84, STACK
    buffer = cpprb.ReplayBuffer(size, columns, next_of='obs', stack_compress='obs')

    def add(state, after, reward, end):
        buffer.add(obs=state.transpose(1, 2, 0), act=0, rew=reward,
                   next_obs=after.transpose(1, 2, 0), done=end)
        if end:
            buffer.on_episode_end()

    def draw():
        batch = {name: torch.from_numpy(x) for name, x in buffer.sample(32).items()}
        return batch['obs'].permute(0, 3, 1, 2), batch['next_obs'].permute(0, 3, 1, 2), batch['rew']
    return add, draw, None


def prepare(library, path, ends, settings):
    "Add all rows twice, and check 3,200 drawn rows"
    import numpy as np
    states, size = np.load(path, mmap_mode='r'), len(ends)
    make = {OURS: ours, 'cpprb': cpprb}.get(library, stable_baselines3)
    add, draw, replay = make(size, settings)
    before, seconds = resident(), []
    for i in [*range(size)]*2:
        state, after = np.array(states[i])
        start = perf_counter()
        add(state, after, i, ends[i])
        seconds.append(perf_counter() - start)
    nbytes = replay.memory.nbytes if replay else resident() - before
    wrong = set()
    for _ in range(100):
        for state, after, reward, *_ in zip(*draw()):
            if not np.array_equal((state, after), states[int(reward)]):
                wrong.add(int(reward))
    return draw, dict(nbytes=nbytes, add_us=sum(seconds[size:])/size*1e6, wrong=len(wrong))


# ---- in the runner ----

def run(options):
    rows, rounds, games = (200, 2, GAMES[:1]) if options.quick else (5_000, 9, GAMES)
    contests = {}
    with tempfile.TemporaryDirectory() as folder:
        player = Worker(OURS)
        for game in games:
            path = f'{folder}/{game}.npy'
            ends = player.call('play', 'frames', path=path, game=game, rows=rows)
            contests[f'draw 32 rows of {game}'] = {
                name: (library, 'frames', dict(path=path, ends=ends, settings=settings))
                for name, (library, settings) in MEMORIES.items()}
        player.close()
        return dict(race(contests, options.libraries, rounds, .05), rows=rows)


def report(results):
    lines = [[title, name, x['nbytes']/results['rows'], x['add_us'], x['wrong']]
             for title, figures in results['figures'].items() for name, x in figures.items()]
    heads = ['contest', 'memory', 'bytes a row', 'microseconds to add one', 'wrong rows']
    return comparison(results['contests']) + '\n\n' + markdown_table(heads, lines)
