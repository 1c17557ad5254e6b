"""NStep and SequenceChunker agree with a plain model on where episodes begin, on every stream."""

import numpy as np
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from strategies import cases

DTYPE = step_dtype(spaces.Discrete(9), spaces.Discrete(3))


def episodes_of(rows):
    "The plain model: return the numbers of the rows of each episode, in the order in which they begin"
    episodes = []
    running = {}
    for i, row in enumerate(rows):
        env = int(row['env_id'])
        last = rows[running[env][-1]] if env in running else None
        if (
            last is None
            or last['terminated']
            or last['truncated']
            or row['episode_n'] != last['episode_n']
            or row['step_n'] <= last['step_n']
        ):
            running[env] = []
            episodes.append(running[env])
        running[env].append(i)
    return episodes


def stream(events, start):
    """Return rows of (env, what) pairs: '.' a step, 't' and 'u' the flags, '!' a new episode that follows without a flag,
    '<' a step number that falls, '=' one that stands still, '+' a gap; steps count from `start`. A row's reward is its number."""
    rows = np.zeros(len(events), DTYPE)
    at = {}
    for i, (env, what) in enumerate(events):
        episode, step = at.get(env, (1, start - 1))
        if what == '!':
            episode, step = episode + 1, start - 1
        step = {'<': max(start, step - 2), '=': max(start, step), '+': step + 5}.get(what, step + 1)
        flags = what == 't', what == 'u'
        rows[i] = 0, 0, i, 0, *flags, env, episode, step, 0
        at[env] = (episode + 1, start - 1) if any(flags) else (episode, step)
    return rows


events = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 7, 4000]), st.sampled_from('......tu!!<=+')), max_size=60
)
sizes = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)


@cases(300)
@given(events, st.sampled_from([0, 1]), sizes)
def test_stages_agree_on_where_episodes_begin(events, start, sizes):
    "All rows of an episode are in one sequence, and in one chain of merged rows"
    rows = stream(events, start)
    last = 10**6
    envs = sorted(set(rows['env_id']))
    end = np.zeros(len(envs), DTYPE)  # a row of each environment that sends out what is left
    end['env_id'] = envs
    end['episode_n'] = end['reward'] = last
    end['terminated'] = True
    cuts = np.cumsum(sizes * (len(rows) // sum(sizes) + 1))
    blocks = [Steps(part) for part in np.split(rows, cuts[cuts < len(rows)])] + [Steps(end)]
    expected = episodes_of(rows)

    sequences = [s.reward[s.mask].int().tolist() for s in SequenceChunker(blocks, 64, tail='pad')]
    assert sorted(s for s in sequences if s[0] < last) == expected

    merged = [row for block in NStep(blocks, 2, gamma=1.0) for row in block.rows]
    sums = [int(row['reward']) for row in merged if row['episode_n'] < last]
    assert sorted(sums) == sorted(sum(e[i : i + 2]) for e in expected for i in range(len(e)))
