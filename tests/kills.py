"""Kills a process that writes a memory on disk, again and again, and looks at what is there.

`python tests/kills.py --kills 1000` kills that often, in turn for each kind of memory; `--kind frames` only that one. A
process writes: it opens the directory, adds blocks, tells errors, goes back to checkpoints, closes, opens again. Before
and after each of these it says so in memory that it shares with this process, and that stays when it is killed. What
every row must be follows from its key and from the call that wrote it, so a row that was lost, torn or mixed with
another one is found; so are links, windows, priorities and sequences. Seeds repeat what is written and how long it
lasts until the kill, but not the very moment."""

import argparse, faulthandler, json, mmap, os, pickle, random, shutil, signal, sys, tempfile, time, traceback, warnings
from collections import Counter
from pathlib import Path

import numpy as np
from gymnasium.spaces import Box, Discrete

import fastrl_replay
import fastrl_replay.all as all_stages
from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.row_dtypes import step_dtype
from fastrl_replay.memory.frames import Frames
from fastrl_replay.memory.rows import Rows
from bytecodes import before_bytecodes

# ---- what rows must be ----

N, ENVS, LENGTH, BURN_IN, OVERLAP = 1 << 17, 7, 5, 0, 2  # rows that can come; sequences


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
    "Environment, episode and step of each key are fixed; all else follows from the key and the number of the call that wrote it"

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
    return 0.5 + (both(keys, stamp) % np.uint64(100_000)) / 8  # the errors of one call


# ---- kinds of memory ----


class SmallFrames(Frames):
    "Frames in small segments, of which many come and go"

    least, smallest_segment, raw_frames = 1, 16, 4


def opened(kind, path, max_sz, spare=0, mode='a', bs=1):
    "The replay in a directory"
    store = {
        'frames': SmallFrames,
        'compressed': lambda **kw: SmallFrames(compress='lz4', **kw),
    }.get(kind, Rows)
    common = dict(
        bs=bs,
        max_sz=max_sz,
        seed=0,
        store=store(path=path, **(dict(spare=spare) if mode == 'a' else dict(mode=mode))),
    )
    if kind == 'prioritized':
        return all_stages.PrioritizedReplay(alpha=1, eps=0, initial='td', **common)
    if kind == 'sequences':
        return all_stages.SequenceReplay(
            length=LENGTH, burn_in=BURN_IN, overlap=OVERLAP, alpha=1, eps=0, eta=1, **common
        )
    return all_stages.ExperienceReplay(**common)


KINDS = 'uniform', 'prioritized', 'sequences', 'frames', 'compressed'

# ---- what the writer says ----

OPS = NONE, OPEN, ADD, UPDATE, SAVE, REWIND, FLUSH, CLOSE = range(8)
NAMES = 'nothing opening add update checkpoint rewind flush close'.split()


class Said:
    "What was begun and what had returned, in memory that survives who wrote it"

    room = 1 << 14

    def __init__(self):
        self.memory = mmap.mmap(-1, 8 * (8 + 6 * self.room))
        words = np.frombuffer(self.memory, np.int64)
        self.begun, self.done, self.calls = words[0:1], words[1:2], words[8:].reshape(-1, 6)

    def begin(self, *call):
        i = int(self.begun[0])
        self.calls[i, : len(call)] = call
        self.begun[0] = i + 1

    def end(self):
        self.done[0] = self.begun[0]

    def clear(self):
        self.begun[0] = self.done[0] = 0


def killed_at(at):
    "Kill this process before bytecode number `at` of this library"
    seen, here = 0, str(Path(fastrl_replay.__file__).parent)

    def each():
        nonlocal seen
        seen += 1
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)

    before_bytecodes(lambda file: file.startswith(here), each)


def write(kind, path, stream, plan, said, rng):
    "Work on a directory until the kill comes"
    if plan['at'] and plan['early']:
        killed_at(plan['at'])

    def open_():
        said.begin(OPEN, plan['max_sz'], plan['spare'])
        replay = opened(kind, path, plan['max_sz'], plan['spare'])
        len(replay.memory)  # it is opened when it is asked
        said.end()
        return replay

    replay, saved, stamp = open_(), [], plan['stamp']
    if plan['at'] and not plan['early']:
        killed_at(plan['at'])
    chances = dict(
        work=[70, 20, 3, 2, 1, 1], close=[60, 10, 3, 2, 4, 20], rewind=[50, 10, 20, 20, 1, 1]
    )[plan['what']]
    while said.begun[0] < said.room - 2:
        stamp += 1
        memory, op = (
            replay.memory,
            rng.choices([ADD, UPDATE, SAVE, REWIND, FLUSH, CLOSE], chances)[0],
        )
        first = memory.inserted
        if op == ADD:
            n = rng.choice(
                [
                    1,
                    1,
                    2,
                    3,
                    5,
                    9,
                    20,
                    60,
                    plan['max_sz'] // 2 + 1,
                    plan['max_sz'] + rng.randrange(9),
                ]
            )
            if first + n > N:
                break
            block = Steps(stream.rows(np.arange(first, first + n), np.full(n, stamp)))
            said.begin(ADD, first, n, stamp)
            replay.add(block)
        elif op == UPDATE:
            keys = drawable(replay, kind)
            if not len(keys):
                continue
            keys = np.random.default_rng(stamp).choice(keys, 4)
            td = told(keys, stamp)
            check_batch(replay.sample(), stream)
            said.begin(UPDATE, stamp, *keys)
            replay.update_priorities(
                keys, np.repeat(td[:, None], LENGTH - BURN_IN, 1) if kind == 'sequences' else td
            )
        elif op == SAVE:
            said.begin(SAVE)
            saved = [*saved[-2:], (first, int(said.begun[0]) - 1, replay.state_dict())]
        elif op == REWIND:
            if not saved:
                continue
            end, which, state = saved.pop()
            said.begin(REWIND, end, which)
            replay.load_state_dict(state)
        elif op == FLUSH:
            said.begin(FLUSH)
            memory.flush()
        else:
            said.begin(CLOSE)
            memory.close()
            said.end()
            replay, saved = open_(), []
            continue
        said.end()
    signal.pause()  # all that can be written was: wait for the kill


def drawable(replay, kind):
    "First keys of what can be drawn"
    replay._catch_up()  # as each call does first
    if kind != 'sequences':
        return replay.memory.keys
    table = replay.table
    return np.zeros(0, int) if table is None else table.first[table.first >= 0]


def check_batch(batch, stream):
    "Every row that was drawn is what its key and its call say"
    rows = batch.rows.ravel()
    if 'mask' in rows.dtype.names:
        rows = rows[rows['mask']]
    check_rows(rows, stream, rows['total_reward'].astype(int), rows['stamp'])


def check_rows(rows, stream, keys, stamps):
    want = stream.rows(keys, stamps)
    if not len(keys):
        return
    for name in want.dtype.names:
        bad = np.flatnonzero((rows[name] != want[name]).reshape(len(rows), -1).any(1))
        assert not len(bad), (
            f'{name} of key {keys[bad[0]]} is {rows[name][bad[0]]}, not {want[name][bad[0]]}, and that of {len(bad)} rows of {len(rows)}'
        )


# ---- what must be there ----


class Expected:
    "What a directory must hold, found from what its writers said; where a call didn't return, also what it may hold instead"

    def __init__(self):
        self.stamps, self.inserted, self.reserved, self.floor = np.zeros(N, int), 0, 0, 0
        self.max_sz, self.ring, self.ends = 1, 1, {0}
        self.p = {}  # key → priorities that it may have; None: that of a new row

    def hear(self, said):
        "Take in what a writer said; what it was doing last"
        calls, done = said.calls[: said.begun[0]].tolist(), said.done[0]
        self.ends, saves = (
            {self.inserted},
            {},
        )  # how many rows there may be; priorities at checkpoints
        for i, (op, a, b, c, *more) in enumerate(calls):
            returned = i < done
            if op == OPEN and returned:
                self.opened(a, a + b)
            elif op == ADD:
                self.stamps[a : a + b], self.reserved = c, max(self.reserved, a + b)
                if returned:
                    for k in range(a, a + b):
                        self.p.pop(k, None)  # those of its column
                self.inserted = a + b if returned else self.inserted
                self.ends = {self.inserted, a + b}
            elif op == REWIND:
                self.ends = {a} if returned else {self.inserted, a}
                if returned:
                    self.inserted, self.p = a, saves[b]
                else:
                    self.p = {
                        k: self.p.get(k, {None}) | saves[b].get(k, {None})
                        for k in {*self.p, *saves[b]}
                    }
            elif op == SAVE:
                saves[i] = dict(self.p)
            elif op == UPDATE:
                for k, x in zip([b, c, *more], told(np.array([b, c, *more]), a).tolist()):
                    self.p[k] = {x} if returned else {x, *self.p.get(k, {None})}
        return calls[-1][0] if len(calls) > done else NONE

    def oldest(self, inserted):
        "The oldest row that must be there"
        return min(inserted, max(inserted - self.max_sz, self.reserved - self.ring, self.floor))

    def opened(self, max_sz, ring):
        "Where it was made larger, rows that were there are there, and no slot has been used by newer ones"
        if not self.reserved:
            self.max_sz, self.ring = max_sz, ring
        if ring > self.ring:
            self.floor, self.reserved = self.oldest(self.inserted), self.inserted
        self.max_sz, self.ring = max_sz, max(ring, self.ring)


def check(kind, path, stream, expected, mode, made):
    "Hold a directory against what must be there; how many rows there are"
    replay = opened(kind, path, expected.max_sz, expected.ring - expected.max_sz, mode)
    memory = replay.memory
    inserted, oldest = memory.span
    assert inserted in expected.ends, f'{inserted} rows have come, not {expected.ends}'
    assert oldest <= expected.oldest(inserted), (
        f'the oldest row is {oldest}, not {expected.oldest(inserted)}, of {inserted}'
    )
    assert (
        inserted - oldest <= expected.max_sz
        and memory.keys.tolist() == list(range(oldest, inserted))
        and len(memory) == inserted - oldest
    )
    if inserted == oldest:
        return inserted
    keys = memory.keys
    check_rows(memory.take(keys).rows, stream, keys, expected.stamps[keys])
    follows = stream.links(oldest, inserted, expected.max_sz)
    walked, at = memory.walk(keys, [1, -1, 2]), keys
    assert walked[:, 0].tolist() == follows.tolist(), 'links forward'
    before = np.full(len(keys), -1)
    before[follows[follows >= 0] - oldest] = keys[follows >= 0]
    assert walked[:, 1].tolist() == before.tolist(), 'links back'
    windows = memory.windows(keys, 4).rows
    for t in range(4):
        there = at >= 0
        assert windows['mask'][:, t].tolist() == there.tolist(), f'windows, row {t}'
        check_rows(windows[there, t], stream, at[there], expected.stamps[at[there]])
        at = np.where(there, np.r_[follows, -1][np.where(there, at - oldest, -1)], -1)
    if kind in ('prioritized', 'sequences'):
        check_priorities(replay, kind, expected, stream, follows, oldest)
    for n in 1, 3:
        if len(drawable(replay, kind)) >= n:
            check_batch(replay.sample(n), stream)
    if mode == 'a' and made % 3 == 0:
        memory.close()
    return inserted


def check_priorities(replay, kind, expected, stream, follows, oldest):
    "Priorities are those of the last update, or the one before where it didn't return"
    firsts = drawable(replay, kind)
    if kind == 'sequences':
        assert sorted(firsts.tolist()) == sequences(stream, follows, oldest), 'sequences'
    if not len(firsts):
        return
    if kind == 'sequences':
        table = replay.table
        p = replay.sampler.tree[np.flatnonzero(table.first >= 0)]
    else:
        p = replay.sampler.tree[firsts % len(replay.sampler.tree)]
    assert (p > 0).all() and np.isfinite(p).all(), 'a priority that is none'
    column = stream.rows(firsts, expected.stamps[firsts])['td']
    for key, x, td in zip(firsts.tolist(), p.tolist(), column.tolist()):
        may = expected.p.get(key, {None})
        assert x in may or None in may and (kind == 'sequences' or x == td), (
            f'the priority of key {key} is {x}, not {may}'
        )


def sequences(stream, follows, oldest):
    "First keys of the sequences that are complete"
    found, stride = [], LENGTH - OVERLAP
    for i in range(len(follows)):
        key, n, at = i + oldest, 1, i
        while n < LENGTH and follows[at] >= 0:
            at, n = follows[at] - oldest, n + 1
        step, ended = stream.step[key], stream.end[at + oldest]
        if n == LENGTH and (step % stride == 0 or ended) or n < LENGTH and ended and step == 0:
            found.append(key)
    return found


# ---- killing ----


def forked(call, *args):
    "Run in a process of its own; what it returns, or what went wrong"
    read, out = os.pipe()
    if not (pid := os.fork()):
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
    if not said:
        return 1, f'the process ended with {status}'
    return pickle.loads(said)


def child(call, *args):
    "Start a process that is going to be killed"
    if pid := os.fork():
        return pid
    try:
        faulthandler.disable()
        signal.alarm(60)  # where nobody kills it
        call(*args)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(1)


class Killer:
    "Kills writers of one kind of memory"

    def __init__(self, kind, seed, where):
        self.kind, self.seed, self.where, self.said = kind, seed, Path(where), Said()
        self.rounds, self.directories, self.counts, self.rows = 0, 0, Counter(), 0
        self.path = None

    def __repr__(self):
        e, done = self.expected, int(self.said.done[0])
        calls = [
            f'{NAMES[op]} {" ".join(map(str, a))}'
            for op, *a in self.said.calls[: self.said.begun[0]].tolist()
        ]
        return (
            f'max_sz {e.max_sz}, ring {e.ring}, {e.inserted} rows, {e.reserved} reserved, floor {e.floor}; calls that returned: '
            f'{calls[:3]} … {calls[:done][-9:]}, and that didn\'t: {calls[done:]}'
        )

    def begin(self, rng):
        "A new directory"
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)
        self.directories += 1
        self.path, self.stream = (
            self.where / f'{self.kind}-{self.directories}',
            Stream(rng.randrange(1 << 30), self.kind in ('frames', 'compressed')),
        )
        self.expected = Expected()
        self.max_sz, self.spare = (
            rng.choice(
                [1, 2, 9, 60, 300, 300, 1500, 1500]
                if self.kind != 'sequences'
                else [9, 60, 300, 300, 1500, 1500]
            ),
            rng.choice([0, 0, 3, 40, 500]),
        )

    def kill(self):
        "One process is killed, and what it left is looked at; what is wrong, or None"
        rng = random.Random(f'{self.seed} {self.kind} {self.rounds}')
        self.rounds += 1
        what = rng.choices(
            ['work', 'open', 'grow', 'first', 'close', 'rewind'], [52, 10, 10, 5, 10, 13]
        )[0]
        if (
            self.path is None
            or what == 'first'
            or self.expected.inserted > N * 3 // 4
            or rng.random() < 0.02
        ):
            self.begin(rng)
        if what == 'grow' and self.max_sz < 4000:
            self.max_sz, self.spare = (
                self.max_sz + rng.choice([1, self.max_sz]),
                self.spare + rng.choice([0, 5]),
            )
        early = what in ('open', 'grow', 'first')
        at = (
            int(10 ** rng.uniform(0, 4.5)) if rng.random() < 0.4 else 0
        )  # at a bytecode, or by the clock
        delay = (
            10 ** rng.uniform(-5, -2)
            if early
            else rng.choice([rng.uniform(0, 0.03), 10 ** rng.uniform(-5, -2)])
        )
        plan = dict(
            max_sz=self.max_sz,
            spare=self.spare,
            what=what if what in ('close', 'rewind') else 'work',
            stamp=self.rounds << 20,
            early=early,
            at=at,
        )
        self.said.clear()
        sys.stdout.flush()
        pid = child(write, self.kind, self.path, self.stream, plan, self.said, rng)
        if not at:
            began, until = self.said.begun if early else self.said.done, time.monotonic() + 30
            while not began[0] and time.monotonic() < until:
                time.sleep(1e-5)
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] != signal.SIGKILL:
            return f'a writer that failed: {self}'
        return self.look(rng)

    def look(self, rng):
        "What is there, in a process of its own"
        op = self.expected.hear(self.said)
        self.counts[NAMES[op]] += 1
        meta = self.path / 'meta.json'
        if not meta.exists():
            return None if not self.expected.inserted else 'there is no memory any more'
        said = json.loads(meta.read_text())
        self.expected.opened(said['max_sz'], said['ring'])
        for mode in rng.choice([['r'], ['a'], ['r', 'a'], ['a', 'a']]):
            wrong, got = forked(
                check, self.kind, self.path, self.stream, self.expected, mode, self.rounds
            )
            if wrong:
                return f'{self.kind}, killed in {NAMES[op]}, opened to {dict(a="write", r="read")[mode]}:\n{got}{self}'
            self.expected.inserted, self.expected.ends = got, {got}
        self.rows += min(self.expected.inserted, self.expected.max_sz)


def kills(kind, n, seed=0, where=None, tell=None):
    "Kill `n` writers of a memory; the killer, and what went wrong or None"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        killer = Killer(kind, seed, where)
        for i in range(n):
            if wrong := killer.kill():
                return killer, f'{wrong}\nround {killer.rounds}, seed {seed}: {killer.path}'
            if tell:
                tell(i + 1)
    shutil.rmtree(killer.path, ignore_errors=True)
    return killer, None


def warm(kind, where):
    "Compile what writers and checks use, so that they needn't"
    path, stream, expected = (
        Path(where) / f'warm-{kind}',
        Stream(0, kind in ('frames', 'compressed')),
        Expected(),
    )
    replay = opened(kind, path, 20)
    for a in range(0, 60, 15):
        replay.add(Steps(stream.rows(np.arange(a, a + 15), np.ones(15, int))))
    keys = drawable(replay, kind)[:2]
    if len(keys):
        replay.update_priorities(keys, np.ones((2, LENGTH - BURN_IN)[: 1 + (kind == 'sequences')]))
    replay.sample()
    replay.load_state_dict(replay.state_dict())
    replay.memory.close()
    opened(kind, path, 30).memory.close()
    expected.max_sz = 30
    shutil.rmtree(path)


def main(args):
    where = tempfile.mkdtemp(dir=args.dir)
    failed, names = False, KINDS if args.kind is None else [args.kind]
    for i, kind in enumerate(names):
        n, began = (args.kills + i) // len(names), time.monotonic()
        warm(kind, where)
        shown = (
            (lambda done: print(f'\r{kind}: {done} of {n} kills', end='', flush=True))
            if sys.stdout.isatty()
            else None
        )
        killer, wrong = kills(kind, n, args.seed, where, shown)
        said = ', '.join(f'{c} in {name}' for name, c in killer.counts.most_common())
        print(
            f'\r{kind}: {killer.rounds} kills of {killer.directories} memories, {killer.rows:_} rows looked at, in {time.monotonic() - began:.0f} s: {said}'
        )
        if wrong:
            print(wrong)
        failed = failed or wrong is not None
    if not failed:
        shutil.rmtree(where, ignore_errors=True)
    print('something is wrong' if failed else 'nothing was lost, torn or mixed')
    return int(failed)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__.split('\n\n')[0],
        epilog='exit status 1 where something is wrong; the directory is kept',
    )
    parser.add_argument('--kills', type=int, default=1000, help='how many, in turn for all kinds')
    parser.add_argument(
        '--seed', type=int, default=0, help='of what is written, and when kills come'
    )
    parser.add_argument(
        '--kind', choices=KINDS, help='one kind of memory; all of them unless given'
    )
    parser.add_argument('--dir', help='where memories lie meanwhile')
    sys.exit(main(parser.parse_args()))
