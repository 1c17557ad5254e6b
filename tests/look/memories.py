"""Memories that tests look into."""

import numpy as np
from gymnasium import spaces

from fastrl_replay.all import *

FEW = spaces.Box(-9, 9, (3,))
PIXELS = spaces.Box(0, 255, (2, 12, 12), np.uint8)
GOALS = spaces.Dict(
    {k: spaces.Box(-9, 9, (2,)) for k in ('observation', 'achieved_goal', 'desired_goal')}
)


def rows_of(n, envs=2, length=15, space=FEW, action=spaces.Discrete(4), first=0, **extra):
    """Return rows of environments in turn; episodes have this length, and states count steps."""
    rows = np.zeros(n, step_dtype(space, action, **extra))
    key = np.arange(first, first + n)
    step = key // envs % length
    rows['env_id'] = key % envs
    rows['step_n'] = step + 1
    rows['episode_n'] = key // envs // length + 1
    rows['reward'] = np.where(step == length - 1, key // envs // length % 7 + key % envs, 0)
    rows['total_reward'] = rows['reward']
    rows['terminated'] = step == length - 1
    rows['action'] = step % 4 if action.shape == () else 0
    if space is PIXELS:
        noise = np.random.default_rng(0).integers(0, 255, (first + n + 9, 12, 12)).astype(np.uint8)
        for j in range(2):
            rows['state'][:, j] = noise[key + envs * (j + 2) - 4]
            rows['next_state'][:, j] = noise[key + envs * (j + 3) - 4]
    elif space is not GOALS:
        wide = (slice(None), *[None] * len(space.shape))
        rows['state'] = step[wide] + 0.25
        rows['next_state'] = step[wide] + 1.25
    return Steps(rows)


def goal_rows(n):
    steps = rows_of(n, space=GOALS)
    steps.rows['next_state']['achieved_goal'] = steps.rows['step_n'][:, None]
    steps.rows['reward'] = -2.0 * steps.rows['step_n']
    return steps


def sampled(replay, steps, n=5):
    replay.add(steps)
    rng = np.random.default_rng(0)
    for _ in range(n):
        batch = replay.sample()
        if isinstance(replay, PrioritizedReplay):
            replay.update_priorities(batch.index, rng.random(len(batch)) + 0.1)
    return replay


def memory(kind, path=None):
    """Return a small memory of a kind, which was full and from which batches were sampled."""
    store = Rows(path=path, spare=13) if path else Rows()
    kw = dict(bs=4, max_sz=60, seed=0)
    if kind == 'timeline':
        timeline = Timeline(60, store)
        timeline.add(rows_of(102))
        return timeline
    if kind == 'frames':
        return sampled(ExperienceReplay(**kw, store=Frames(2)), rows_of(102, space=PIXELS))
    if kind == 'device':
        return sampled(PrioritizedReplay(**kw, store=Rows(device='cpu')), rows_of(102))
    if kind == 'sequences':
        replay = sampled(
            SequenceReplay(**kw, length=6, burn_in=2, overlap=3, store=store), rows_of(102)
        )
        replay.update_priorities(replay.sample().index, np.random.default_rng(0).random((4, 4)))
        return replay
    if kind == 'hindsight':
        reward = lambda achieved, desired, info: -np.abs(achieved - desired).sum(-1)  # noqa: E731
        return sampled(HindsightReplay(**kw, reward=reward, store=store), goal_rows(102))
    if kind == 'mixture':
        parts = dict(a=memory('proportional'), b=memory('uniform'))
        return Mixture(parts, dict(a=0.5, b=0.5), bs=4)
    if kind == 'uniform':
        return sampled(ExperienceReplay(**kw, store=store), rows_of(102))
    return sampled(PrioritizedReplay(**kw, kind=kind, store=store), rows_of(102))
