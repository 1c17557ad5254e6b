"""A process that writes a memory on disk and is killed repeatedly, and what must be there then.

Each value of a row follows from its key and from the call that wrote it, so a row that is lost,
torn or mixed with another one is found; so are links, windows, sequences and priorities. The
writer logs each call, before it begins and after it returned, in memory that it shares with its
parent. Seeds repeat what is written, but not the moment of a kill."""

import faulthandler
import mmap
import os
import pickle
import random
import signal
import time
import traceback
from pathlib import Path

import numpy as np
from gymnasium.spaces import Box, Discrete

from fastrl_replay.all import ExperienceReplay, Frames, PrioritizedReplay, Rows, SequenceReplay
from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.row_dtypes import step_dtype

# ---- what rows must be ----

N, LENGTH, BURN_IN, OVERLAP = 1 << 17, 5, 0, 2  # rows that can come; sequences


def mixed(x):
    "Other numbers of 64 bits, for each number another one (splitmix64)"
    x = np.asarray(x).astype(np.uint64)
    with np.errstate(over='ignore'):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def both(a, b):
    return mixed(mixed(b) ^ np.asarray(a).astype(np.uint64))


def noise(x, n):
    "`n` bytes for each number"
    words = -(-n // 8)
    return both(np.asarray(x)[:, None], np.arange(1, words + 1)).view(np.uint8)[:, :n]


class Stream:
    """Environment, episode and step of each key are fixed.

    All else follows from the key and the number of the call that wrote it."""

    def __init__(self, seed, pixels):
        rng, self.pixels = np.random.default_rng(seed), pixels
        ids = np.array([0, 1, 2, 3, 255, 256, 1 << 23])
        self.env = rng.choice(ids, N, p=[0.3, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02])
        self.episode, self.step, self.end = np.zeros(N, int), np.zeros(N, int), np.zeros(N, bool)
        for e in ids:
            at = np.flatnonzero(self.env == e)
            ends = np.cumsum(rng.choice([1, 2, 3, 5, 8, 40], len(at) + 1))
            self.episode[at] = number = np.searchsorted(ends, np.arange(len(at)), 'right')
            self.step[at] = np.arange(len(at)) - np.r_[0, ends][number]
            self.end[at] = np.isin(np.arange(len(at)) + 1, ends)
        state = Box(0, 255, (6, 5), np.uint8) if pixels else Box(-np.inf, np.inf, (3,))
        self.dtype = step_dtype(state, Discrete(9), stamp='i8', td='f4', noise=('u1', (37,)))

    def frames(self, keys, later, stamps):
        "Frames follow each other as long as one process writes"
        return noise(
            self.env[keys] * (1 << 40)
            + self.episode[keys] * (1 << 16)
            + self.step[keys]
            + later
            + (stamps >> 20 << 50),
            30,
        ).reshape(-1, 6, 5)

    def rows(self, keys, stamps):
        "The rows with these keys, as these calls wrote them"
        rows, h = np.zeros(len(keys), self.dtype), both(keys, stamps)
        odd = h % np.uint64(2) == 1
        rows['env_id'], rows['episode_n'], rows['step_n'] = (
            self.env[keys],
            self.episode[keys] + 1,
            self.step[keys] + 1,
        )
        rows['terminated'], rows['truncated'] = self.end[keys] & odd, self.end[keys] & ~odd
        rows['stamp'], rows['noise'], rows['td'] = (
            stamps,
            noise(h, 37),
            1 + (h >> np.uint64(8)) % np.uint64(1000),
        )
        rows['reward'], rows['total_reward'], rows['action'] = (
            (h >> np.uint64(20)) % np.uint64(5000),
            keys,
            h % np.uint64(9),
        )
        for column, later in ('state', 0), ('next_state', 1):
            rows[column] = (
                self.frames(keys, later, stamps)
                if self.pixels
                else ((mixed(h + np.uint64(later)) >> np.uint64(40)) / 8)[:, None] + [0, 1, 2]
            )
        return rows

    def links(self, oldest, inserted, reach):
        "For each key that is there, the next key of its episode, or -1"
        last, follows = {}, np.full(inserted - oldest, -1)
        for key in range(oldest, inserted):
            was = last.get(self.env[key])
            if was is not None and key - was < reach and not self.end[was]:
                follows[was - oldest] = key
            last[self.env[key]] = key
        return follows


def told(keys, stamp):
    "The TD errors that one call gives these keys"
    return 0.5 + (both(keys, stamp) % np.uint64(100_000)) / 8


def check_rows(rows, stream, keys, stamps):
    "Compare rows with what these keys and calls must have written"
    want = stream.rows(keys, stamps)
    for name in want.dtype.names if len(rows) else ():
        wrong = (rows[name] != want[name]).reshape(len(rows), -1).any(1)
        assert not wrong.any(), f'{name} of key {keys[wrong.argmax()]}, and {wrong.sum()} rows'


def check_batch(batch, stream):
    "Compare a batch with what its keys and calls must have written"
    rows = batch.rows.ravel()
    if 'mask' in rows.dtype.names:
        rows = rows[rows['mask']]
    check_rows(rows, stream, rows['total_reward'].astype(int), rows['stamp'])


# ---- kinds of memory ----

KINDS = 'uniform', 'prioritized', 'sequences', 'frames', 'compressed'


class SmallFrames(Frames):
    "Frames in small segments, of which many come and go"

    least, smallest_segment, raw_frames = 1, 4, 4


def opened(kind, path, max_sz, spare=0, mode='a', bs=1):
    "The replay in a directory"
    options = dict(mode=mode) if mode == 'r' else dict(spare=spare)
    if kind == 'frames':
        store = SmallFrames(path=path, **options)
    elif kind == 'compressed':
        store = SmallFrames(compress='lz4', path=path, **options)
    else:
        store = Rows(path, **options)
    common = dict(bs=bs, max_sz=max_sz, seed=0, store=store)
    if kind == 'prioritized':
        return PrioritizedReplay(alpha=1, eps=0, initial='td', **common)
    if kind == 'sequences':
        return SequenceReplay(
            length=LENGTH, burn_in=BURN_IN, overlap=OVERLAP, alpha=1, eps=0, eta=1, **common
        )
    return ExperienceReplay(**common)


def has_frames(kind):
    return kind in ('frames', 'compressed')


# ---- the writer ----

OPEN, ADD, UPDATE, CLOSE = range(4)


class Log:
    "Calls that were begun and how many of them returned, in memory that outlives its writer"

    size = 1 << 14

    def __init__(self):
        words = np.frombuffer(mmap.mmap(-1, 8 * (8 + 6 * self.size)), np.int64)
        self.begun, self.done = words[0:1], words[1:2]
        self.calls = words[8:].reshape(-1, 6)

    def begin(self, *call):
        self.calls[self.begun[0], : len(call)] = call
        self.begun[0] += 1

    def end(self):
        self.done[0] = self.begun[0]


def write(kind, path, stream, max_sz, spare, log, stamp, rng):
    "Open, add, update and close until the kill comes"
    replay = None
    while log.begun[0] < log.size:
        stamp += 1
        op = OPEN if replay is None else rng.choices([ADD, UPDATE, CLOSE], [75, 20, 5])[0]
        if op == OPEN:
            log.begin(OPEN)
            replay = opened(kind, path, max_sz, spare)
            len(replay.memory)  # it is opened when it is asked
        elif op == ADD:
            first, n = replay.memory.inserted, rng.choice([1, 2, 3, 9, 20, 60, max_sz + 3])
            if first + n > N:
                break
            block = Steps(stream.rows(np.arange(first, first + n), np.full(n, stamp)))
            log.begin(ADD, first, n, stamp)
            replay.add(block)
        elif op == UPDATE and len(replay):
            batch = replay.sample()
            check_batch(batch, stream)
            key = int(batch.index[0])
            log.begin(UPDATE, key, stamp)
            replay.update_priorities(
                [key], np.full((1, LENGTH)[: 1 + (kind == 'sequences')], told(key, stamp))
            )
        elif op == CLOSE:
            log.begin(CLOSE)
            replay.close()
            replay = None
        log.end()
    signal.pause()


# ---- what must be there ----


class Expected:
    """What a directory must hold, by the log of its writers.

    After a call that did not return, also what it may hold instead."""

    def __init__(self, max_sz, spare=0):
        self.stamps, self.inserted, self.ends = np.zeros(N, int), 0, {0}
        self.reserved, self.max_sz, self.ring = 0, max_sz, max_sz + spare
        self.priorities = {}  # key → those that it may have; None: that of a new row

    def follow(self, log):
        calls, done = log.calls[: log.begun[0]].tolist(), log.done[0]
        for i, (op, a, b, c, *_) in enumerate(calls):
            returned = i < done
            if op == ADD:
                self.stamps[a : a + b] = c
                self.reserved = max(self.reserved, a + b)
                self.ends = {a + b} if returned else {self.inserted, a + b}
                if returned:
                    self.inserted = a + b
            elif op == UPDATE:
                before = set() if returned else self.priorities.get(a, {None})
                self.priorities[a] = {float(told(a, b)), *before}

    def oldest(self, inserted):
        "The oldest row that must be there"
        return min(inserted, max(inserted - self.max_sz, self.reserved - self.ring, 0))


def check(kind, path, stream, expected, mode):
    "Compare an opened directory with what must be there; return how many rows were added to it"
    replay = opened(kind, path, expected.max_sz, expected.ring - expected.max_sz, mode)
    memory = replay.memory
    inserted, oldest = memory.span
    assert inserted in expected.ends, f'{inserted} rows, not {expected.ends}'
    assert oldest <= expected.oldest(inserted), f'{oldest} is the oldest row'
    keys = memory.keys
    assert keys.tolist() == list(range(oldest, inserted))
    assert len(keys) <= expected.max_sz
    if not len(keys):
        return inserted
    check_rows(memory.take(keys).rows, stream, keys, expected.stamps[keys])
    follows = stream.links(oldest, inserted, expected.max_sz)
    before = np.full(len(keys), -1)
    before[follows[follows >= 0] - oldest] = keys[follows >= 0]
    assert memory.walk(keys, [1, -1]).tolist() == np.stack([follows, before], 1).tolist(), 'links'
    check_windows(memory.windows(keys, 4).rows, stream, keys, follows, expected)
    if len(replay):
        check_batch(replay.sample(), stream)
    if kind == 'prioritized':
        new = stream.rows(keys, expected.stamps[keys])['td'].tolist()
        for key, priority, td in zip(keys.tolist(), replay.sampler.kept(), new, strict=True):
            allowed = {td if p is None else p for p in expected.priorities.get(key, {None})}
            assert priority in allowed, f'priority {priority} of key {key}, not {allowed}'
    if kind == 'sequences':
        firsts = sequences(stream, follows, oldest)
        assert len(replay) == len(firsts), 'sequences'
        if firsts:
            assert {*replay.sample(len(firsts)).index.tolist()} <= {*firsts}, 'sequences'
    return inserted


def check_windows(windows, stream, keys, follows, expected):
    at, oldest = keys, keys[0]
    for t in range(4):
        there = at >= 0
        assert windows['mask'][:, t].tolist() == there.tolist(), f'windows, row {t}'
        check_rows(windows[there, t], stream, at[there], expected.stamps[at[there]])
        at = np.where(there, np.r_[follows, -1][np.where(there, at - oldest, -1)], -1)


def sequences(stream, follows, oldest):
    "The first keys of all whole sequences"
    found = []
    for i in range(len(follows)):
        key, n, at = i + oldest, 1, i
        while n < LENGTH and follows[at] >= 0:
            at, n = follows[at] - oldest, n + 1
        step, ended = stream.step[key], stream.end[at + oldest]
        full = n == LENGTH and (step % (LENGTH - OVERLAP) == 0 or ended)
        if full or n < LENGTH and ended and step == 0:
            found.append(key)
    return found


# ---- killing ----


def forked(call, *args):
    "Call in a process of its own; return 0 and what it returned, or 1 and what went wrong"
    read, out = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            said = 0, call(*args)
        except BaseException:
            said = 1, traceback.format_exc()
        with os.fdopen(out, 'wb') as f:
            pickle.dump(said, f)
        os._exit(0)
    os.close(out)
    with os.fdopen(read, 'rb') as f:
        said = f.read()
    status = os.waitpid(pid, 0)[1]
    return pickle.loads(said) if said else (1, f'the process ended with {status}')


def child(call, *args):
    "Start a process that is going to be killed"
    pid = os.fork()
    if pid:
        return pid
    try:
        faulthandler.disable()
        signal.alarm(120)  # if nobody kills it
        call(*args)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(1)


def stop(pid):
    "Kill a child; return how it ended"
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def warm(kind, path):
    "Compile what writers and checks use, so that each child need not"
    stream, expected = Stream(0, has_frames(kind)), Expected(20)
    expected.stamps[:45], expected.reserved, expected.ends = 1, 45, {45}
    with opened(kind, path, 20) as replay:
        for first in 0, 15, 30:
            replay.add(Steps(stream.rows(np.arange(first, first + 15), np.ones(15, int))))
        if kind != 'sequences':
            replay.update_priorities([44], [told(44, 1)])
            expected.priorities[44] = {float(told(44, 1))}
    for mode in 'r', 'a':
        check(kind, path, stream, expected, mode)
    return stream, expected


def kill_writers(kind, n, where, seed=0):
    "Kill `n` writers at random moments, and check the directory after each"
    rng, log = random.Random(f'{kind} {seed}'), Log()
    warm(kind, Path(where) / 'warm')
    for i in range(n):
        if i % 6 == 0:
            path, stream = Path(where) / f'{i}', Stream(i, has_frames(kind))
            max_sz, spare = rng.choice([9, 60, 300]), rng.choice([0, 3, 500])
            expected = Expected(max_sz, spare)
        log.begun[0] = log.done[0] = 0
        pid = child(write, kind, path, stream, max_sz, spare, log, i << 20, rng)
        calls, until = rng.choice([0, 1, 40]), time.monotonic() + 60
        while log.done[0] < calls and time.monotonic() < until:
            time.sleep(1e-4)
        time.sleep(rng.choice([0, rng.uniform(0, 0.03)]))
        assert stop(pid) == signal.SIGKILL, 'the writer failed'
        expected.follow(log)
        if not (path / 'meta.json').exists():
            assert not expected.inserted
            continue
        for mode in 'r', 'a':
            wrong, got = forked(check, kind, path, stream, expected, mode)
            assert not wrong, f'kill {i} of {kind}, opened with mode={mode!r}: {got}'
            expected.inserted, expected.ends = got, {got}
