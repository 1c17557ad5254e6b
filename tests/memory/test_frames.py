"""Frames that are kept once: bit for bit what plain rows hold, whatever repeats."""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.steps import machine as machine_module
from fastrl_replay.steps.errors import NoRoom
from fastrl_replay.testing import through_file
from strategies import cases, equal, same_memory

STACK = spaces.Box(0, 255, (3, 4, 4), np.uint8)
KIND = step_dtype(STACK, spaces.Discrete(3))
VIEWS = spaces.Dict(
    view=STACK,
    map=spaces.Box(0, 1, (4, 4), bool),
    far=spaces.Box(-9, 9, (3, 2, 2), np.float32),
    speed=spaces.Box(-1, 1, (2,), np.float32),
)
BOTH = step_dtype(VIEWS, spaces.Discrete(3))


class Small(Frames):
    "Frames of a few bytes count, in short segments"

    least, smallest_segment = 4, 2


def leaf(rng, shape, dtype, repeats):
    "A picture out of a few, or out of many"
    few = rng.integers(0, 2 if dtype.kind == 'b' else 3 if repeats else 256)
    return (
        np.full(shape, few, dtype)
        if repeats or dtype.kind == 'b'
        else rng.integers(0, 256, shape).astype(dtype)
    )


def observation(rng, space, stack, repeats):
    "The next observation: stacks shift by one frame"

    def nxt(s, old):
        if isinstance(s, spaces.Dict):
            return {k: nxt(v, old and old[k]) for k, v in s.spaces.items()}
        if len(s.shape) < 3:
            return leaf(rng, s.shape, s.dtype, repeats)
        new = leaf(rng, s.shape[1:], s.dtype, repeats)
        return np.stack([new] * len(s.shape) if old is None else [*old[1:], new])

    return nxt(space, stack)


def put(field, value):
    if isinstance(value, dict):
        for k, v in value.items():
            put(field[k], v)
    else:
        field[...] = value


def stream(space, kind, program, seed, repeats, n_envs=3):
    """Return rows of several environments.

    Each byte says which one steps, and whether its episode ends or its pictures are drawn over."""
    rng, rows, now = np.random.default_rng(seed), np.zeros(len(program), kind), [None] * n_envs
    for row, b in zip(rows, program):
        env, what = b % n_envs, b // n_envs % 8
        stack, episode, step = now[env] or (observation(rng, space, None, repeats), 1, 0)
        after = observation(rng, space, stack, repeats)
        put(row['state'], stack)
        put(row['next_state'], after)
        row['env_id'], row['episode_n'], row['step_n'], row['reward'] = (
            (0, 7, 300)[env],
            episode,
            step + 1,
            b,
        )
        row['terminated'], row['truncated'] = what == 1, what == 2
        if what == 3:
            put(row['state'], observation(rng, space, None, False))  # a wrapper drew over it
        if what == 4:
            after = observation(
                rng, space, after, repeats
            )  # the next state isn't the state to come
        now[env] = (
            (observation(rng, space, None, repeats), episode + 1, 0)
            if what in (1, 2)
            else (after, episode, step + 1)
        )
    return rows


SPACES = {'stack': (STACK, KIND), 'dict': (VIEWS, BOTH)}


@pytest.mark.parametrize(
    'kw',
    [{}, dict(compress='lz4'), dict(compress='zstd'), dict(device='cpu')],
    ids=['raw', 'lz4', 'zstd', 'device'],
)
@pytest.mark.parametrize('kind', SPACES)
@cases(40)
@given(
    program=st.binary(min_size=1, max_size=120),
    sizes=st.lists(st.integers(1, 30), max_size=12),
    max_sz=st.integers(1, 40),
    seed=st.integers(0, 9),
    repeats=st.booleans(),
    saves=st.integers(0, 255),
    stack=st.sampled_from([1, 3]),
)
def test_what_comes_out_is_what_went_in(
    kind, kw, program, sizes, max_sz, seed, repeats, saves, stack
):
    """Interleaved environments, ends, truncation, wraps, checkpoints, frames that repeat or don't.

    Also pictures that are drawn over, and a move from a device to main memory and back."""
    space, dtype = SPACES[kind]
    rows, stores, at = (
        stream(space, dtype, program, seed, repeats),
        [Small(stack, **kw), Small(stack, **{**kw, 'device': None})],
        0,
    )
    plain, line = Timeline(max_sz), Timeline(max_sz, stores[0])
    for i, n in enumerate([*sizes, len(rows)]):
        block = rows[at : at + n]
        at += n
        if not len(block):
            break
        for m in plain, line:
            m.add(Steps(block.copy()))
        if saves >> i & 1 and i < 8:
            fresh = Timeline(max_sz, stores[i % 2])
            fresh.load_state_dict(through_file(line.state_dict()))
            line = fresh
        same_memory(line, plain, i)


class Pictures(gym.Env):
    "A counter, shown as pictures; episodes of `length` steps end or are truncated"

    observation_space, action_space = spaces.Box(0, 255, (8, 8), np.uint8), spaces.Discrete(2)

    def __init__(self, length=7, truncates=False):
        self.length, self.truncates = length, truncates

    def _obs(self):
        return np.full((8, 8), self.t, np.uint8) + np.arange(
            8, dtype=np.uint8
        ) * self.np_random.integers(3, dtype=np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        over = self.t >= self.length
        return self._obs(), 1.0, over and not self.truncates, over and self.truncates, {}


def envs(*lengths):
    if not hasattr(gym.wrappers, 'FrameStackObservation'):
        pytest.skip('gymnasium before 1.0 has no FrameStackObservation')
    return [
        lambda n=n, i=i: gym.wrappers.FrameStackObservation(Pictures(n, i % 2 == 0), 4)
        for i, n in enumerate(lengths)
    ]


def steps(n=60):
    return GymStepper(envs(7, 1, 4), lambda s: np.zeros(3, np.int64), 0).header(n)


REPLAYS = dict(
    uniform=lambda source, **kw: source.experience_replay(bs=8, max_sz=50, seed=1, **kw),
    errors=lambda source, **kw: source.prioritized_replay(bs=8, max_sz=50, seed=1, **kw),
    n_step=lambda source, **kw: source.n_step(3, 0.9).prioritized_replay(
        bs=8, max_sz=50, seed=1, **kw
    ),
    sequence=lambda source, **kw: source.sequence_replay(
        bs=2, max_sz=60, length=4, burn_in=1, overlap=2, seed=1, **kw
    ),
    prefetch=lambda source, **kw: source.experience_replay(bs=8, max_sz=50, seed=1, **kw).prefetch(
        2
    ),
)


def test_a_row_costs_a_frame_in_every_replay():
    "One new frame a step and one an episode, also in rows of three steps; the rest is shared"
    for kind in 'uniform', 'n_step', 'sequence':
        replay = REPLAYS[kind](steps(1000), store=Frames(4))
        for _ in replay:
            pass
        stats = replay.stats()
        episodes = (
            replay.memory.inserted * (1 / 7 + 1 / 1 + 1 / 4) / 3
        )  # of three environments that take turns
        assert (
            stats['row_frames']
            <= (replay.memory.inserted + episodes) / replay.memory.inserted + 0.05
        ), kind
        assert replay.stats()['row_bytes'] == replay.memory.nbytes / len(replay.memory)


# ---- how much memory they take ----


def episode(n, env=0, seed=0, start=0):
    "One long episode in single frames of 256 bytes"
    kind = step_dtype(spaces.Box(0, 255, (256,), np.uint8), spaces.Discrete(2))
    rows = np.zeros(n, kind)
    pictures = np.random.default_rng(seed).integers(0, 256, (n + 1, 256), np.uint8)
    rows['state'], rows['next_state'] = pictures[:-1], pictures[1:]
    rows['step_n'], rows['env_id'] = start + np.arange(n), env
    return rows


@pytest.mark.parametrize('compress', [None, 'lz4'])
def test_memory_is_bounded_however_long_it_goes_on(compress):
    "A frame goes with the last row that needs it, also for an environment with 1 row in a hundred"
    line, most, newest = Timeline(1000, Frames(1, compress)), [], []
    rows, slow = episode(6000), episode(60, env=1, seed=1)
    for i in range(60):
        line.add(Steps(rows[100 * i : 100 * i + 50]))
        line.add(Steps(rows[100 * i + 50 : 100 * i + 100]))
        line.add(Steps(slow[i : i + 1]))
        newest += [*rows[100 * i : 100 * i + 100], slow[i]]
        most.append(line.nbytes)
    assert max(most[30:]) <= 1.25 * max(most[:30])
    assert line[:] == Steps(np.array(newest[-1000:], rows.dtype))


@pytest.mark.parametrize('compress', [None, 'zstd'])
def test_many_environments_share_their_own_frames(compress):
    streams = [episode(100, env=e, seed=e) for e in range(64)]
    replay = ExperienceReplay(max_sz=6400, store=Frames(1, compress))
    for i in range(100):
        replay.add(Steps(np.concatenate([s[i : i + 1] for s in streams])))
    assert replay.stats()['row_frames'] == pytest.approx(1.01)
    equal(replay.memory[-64:], Steps(np.concatenate([s[99:] for s in streams])))


@pytest.mark.parametrize('n, envs', [(9, 2), (12, 4)])
def test_rows_of_many_steps_share_their_frames(n, envs):
    kind = step_dtype(spaces.Box(0, 255, (4, 8, 8), np.uint8), spaces.Discrete(2))
    pictures = np.random.default_rng(0).integers(0, 256, (envs, 404, 8, 8), np.uint8)
    rows = np.zeros(400 * envs, kind)
    for i, row in enumerate(rows):
        e, t = i % envs, i // envs
        row['state'], row['next_state'] = pictures[e, t : t + 4], pictures[e, t + 1 : t + 5]
        row['env_id'], row['step_n'] = e, t + 1
    blocks = Items([Steps(rows[i : i + 10].copy()) for i in range(0, len(rows), 10)])
    replay = blocks.n_step(n, 0.99).experience_replay(bs=8, max_sz=5000, store=Frames(4))
    for _ in replay:
        pass
    assert replay.stats()['row_frames'] < 1.2


# ---- packed frames ----


@pytest.mark.parametrize('compress', ['lz4', 'zstd'])
def test_large_blocks_push_segments_out_before_they_are_packed(compress):
    line, plain, rows = Timeline(40, Small(1, compress)), Timeline(40), episode(700)
    for first, end in (0, 10), (10, 300), (300, 305), (305, 600), (600, 603), (603, 700):
        line.add(Steps(rows[first:end]))
        plain.add(Steps(rows[first:end]))
        equal(line[:], plain[:])
        twin = Timeline(40, Small(1, compress))
        twin.load_state_dict(through_file(line.state_dict()))
        equal(twin[:], plain[:])


# ---- refusals ----


def test_settings_that_do_not_fit_the_rows_are_named(monkeypatch):
    row = Steps(
        np.zeros(1, step_dtype(spaces.Box(0, 255, (84, 84, 4), np.uint8), spaces.Discrete(2)))
    )
    with pytest.raises(
        BlockError, match='stack=4; .*expected frames of at least 64 bytes, 4 along'
    ):
        Timeline(10, Frames(4)).add(row)
    for wrong in dict(stack=0), dict(stack='4'), dict(compress='zip'):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            Frames(**wrong)
    monkeypatch.setitem(sys.modules, 'lz4.block', None)
    with pytest.raises(ArgumentError, match=r"pip install 'fastrl_replay\[compress\]'"):
        Frames(4, 'lz4')


def test_a_memory_that_cannot_fit_is_refused_at_its_first_row(monkeypatch):
    "With what it needs, what there is, and what would fit"
    monkeypatch.setattr(machine_module, 'machine_memory', lambda: 20 * 2**30)
    row = Steps(
        np.zeros(1, step_dtype(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6)))
    )
    replay = ExperienceReplay(None, 32)
    says = r'got a machine with 20 GiB; expected 53 GiB. Remedy: use max_sz=.*, or store=Frames'
    with pytest.raises(NoRoom, match=says):
        replay.add(row)
    assert len(replay) == 0
    ExperienceReplay(None, 32, store=Frames(4)).add(row)
    with pytest.raises(NoRoom, match='10_000_000 rows'):
        ExperienceReplay(None, 32, 10_000_000, store=Frames(4)).add(row)
    ExperienceReplay(None, 32, 10_000_000, store=Frames(4, 'zstd')).add(row)


def test_growth_ends_where_the_machine_does(monkeypatch):
    "A block is added or it is not, and the memory can still be drawn from"
    rows = episode(8000)
    rows['state'] ^= np.random.default_rng(1).integers(0, 256, rows['state'].shape, np.uint8)
    line = Timeline(100_000, Frames())
    line.add(Steps(rows[:100]))
    limit = line.nbytes + 2**20
    monkeypatch.setattr(machine_module, 'machine_memory', lambda: limit)
    with pytest.raises(NoRoom, match='not enough memory for more frames; .*2.0 frames a row'):
        for i in range(100, 8000, 100):
            line.add(Steps(rows[i : i + 100]))
    assert 100 <= len(line) < 8000
    assert line[:] == Steps(rows[: len(line)])


# ---- saved states that were tampered with ----


def saved_of(rows, compress=None):
    line = Timeline(300, Small(1, compress))
    for i in range(0, 600, 10):
        line.add(Steps(rows[i : i + 10]))
    return line, through_file(line.state_dict())


@pytest.mark.parametrize('compress', ['lz4', 'zstd'])
def test_a_frame_that_unpacks_to_another_size_is_refused(compress):
    "It would be spread over others; and a bomb is not unpacked"
    import lz4.block
    import zstandard

    def pack(content):
        if compress == 'lz4':
            return lz4.block.compress(content, store_size=False)
        return zstandard.ZstdCompressor().compress(content)

    line, state = saved_of(episode(600), compress)
    frames = state['store']['frames'][0]
    n = 1 << frames['bits']
    for content in bytes(1), b'', bytes(257), bytes(2**26), bytes(256):
        one = pack(content)
        ends = 8 * n + torch.arange(1, n + 1) * len(one)
        other = torch.cat(
            [ends.view(torch.uint8), torch.frombuffer(bytearray(one * n), dtype=torch.uint8)]
        )
        damaged = dict(frames, packed=[other.clone() for _ in frames['packed']])
        bad = dict(state, store=dict(state['store'], frames=[damaged]))
        twin = Timeline(300, Small(1, compress))
        twin.load_state_dict(bad)
        if len(content) == 256:
            twin[:]  # frames of zeros
        else:
            with pytest.raises(StateError, match='is damaged'):
                twin[:]
        assert twin[-1:] == line[-1:]


@pytest.mark.parametrize('what', ['references', 'ends', 'rest', 'reward'])
def test_damaged_frames_are_refused(what):
    "References beyond the frames, fewer frames, and numbers that no row may hold"
    rows = np.zeros(600, step_dtype(spaces.Box(-9, 9, (40,), np.float32), spaces.Discrete(2)))
    rows['state'][:, 0], rows['next_state'][:, 0] = np.arange(600), np.arange(1, 601)
    rows['step_n'] = np.arange(600)
    line, state = saved_of(rows)
    store = state['store']
    frames = store['frames'][0]
    if what == 'references':
        store['references'] += 400
    elif what == 'ends':
        frames['raw'] = frames['raw'][:, :-1]
    elif what == 'rest':
        store['rest'] = store['rest'][:-1]
    else:
        store['rest'].numpy()[:] = 255
    with pytest.raises(StateError):
        line.load_state_dict(state)
    assert line[:] == Steps(rows[-300:])
