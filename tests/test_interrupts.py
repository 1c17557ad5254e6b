"""An interrupt at any bytecode of `add`, `sample` and `update_priorities` loses nothing: the call has happened or not, and replays go on."""

import multiprocessing, random, signal, sys
from contextlib import contextmanager
from functools import partial

import numpy as np, pytest

from fastrl_replay.all import *
from fastrl_replay.steps.compiled import interrupts_wait, njit
from fastrl_replay.steps.row_dtypes import extend_dtype
from scripted import Remember, Witness, by_env, numbered, take
from test_boundaries import MAKE as STAGES, feed, in_the_middle, interrupted

MAX_SZ, LENGTH = 8, 3


def stream(lasts, envs=2):
    "Rows of environments in turn, in episodes of `lasts` steps, in blocks; rewards are the keys; with TD errors, and recurrent states"
    rows = np.zeros(60, extend_dtype(numbered(1).dtype, td='f4', hidden=('f4', (2,))))
    key = np.arange(60)
    step = key // envs
    rows['env_id'], rows['episode_n'], rows['step_n'] = (
        key % envs,
        step // lasts + 1,
        step % lasts + 1,
    )
    rows['reward'], rows['td'], rows['terminated'] = key, 1 + key % 5, rows['step_n'] == lasts
    rows['hidden'] = key[:, None] + [0, 100]
    for column, later in ('state', 0), ('next_state', envs):
        rows[column] = np.reshape(key + later, (-1, *[1] * (rows[column].ndim - 1)))
    return rows


def blocks(lasts):
    return [
        Steps(b) for b in np.split(stream(lasts), [1, 6, 7, 13, 19, 22])
    ]  # the first ones fill the ring


class TinyFrames(Frames):
    "Frames of a few bytes, in segments of two"

    least, smallest_segment, raw_frames = 1, 2, 2


SAME = dict(max_sz=MAX_SZ, bs=2, seed=0)
MAKE = dict(
    uniform=lambda: ExperienceReplay(**SAME),
    proportional=lambda: PrioritizedReplay(alpha=1, eps=0, weight_norm='memory', **SAME),
    ever=lambda: PrioritizedReplay(alpha=1, eps=0, initial='max_ever', **SAME),
    column=lambda: PrioritizedReplay(alpha=1, eps=0, initial='td', **SAME),
    rank=lambda: PrioritizedReplay(kind='rank', alpha=1, **SAME),
    rank_column=lambda: PrioritizedReplay(kind='rank', initial='td', alpha=1, eps=0, **SAME),
    frames=lambda: PrioritizedReplay(alpha=1, eps=0, store=TinyFrames(1, 'lz4'), **SAME),
    rows_there=lambda: PrioritizedReplay(alpha=1, eps=0, store=Rows(device='cpu'), **SAME),
    frames_there=lambda: ExperienceReplay(store=TinyFrames(device='cpu'), **SAME),
    sequences=lambda: SequenceReplay(
        length=LENGTH, burn_in=0, overlap=1, alpha=1, eps=0, eta=1, **SAME
    ),
    sequences_rank=lambda: SequenceReplay(
        length=LENGTH, burn_in=1, overlap=2, kind='rank', initial='max_ever', **SAME
    ),
)

KINDS = [
    pytest.param(k, marks=pytest.mark.slow) if k.endswith('_there') else k for k in MAKE
]  # smaller siblings: test_device


def answer(replay, batch, td):
    "The same error for each step of a sequence"
    replay.update_priorities(
        batch.index,
        np.broadcast_to(np.reshape(td, (-1, 1)), batch.train.shape)
        if isinstance(replay, SequenceReplay)
        else td,
    )


def prepared(kind, lasts, n):
    "A replay after `n` blocks, with draws and errors between them"
    replay = MAKE[kind]()
    for i, b in enumerate(blocks(lasts)[:n]):
        replay.add(b)
        if len(replay) >= 2:
            answer(replay, replay.sample(), [7.0 - i, 2.0 + i])
    return replay


def view_of(replay):
    "All that can be seen: key → (probability, rows), the keys in memory, where it would go on; drawing counts aside"
    replay._catch_up()  # as each call does first
    if not isinstance(replay, SequenceReplay):
        keys = replay.memory.keys
    else:
        t = replay.table
        taken = np.arange(0) if t is None else np.flatnonzero(t.first >= 0)
        keys = t.first[taken] if len(taken) else taken
    p = replay.sampler.probabilities()
    assert len(keys) == len(p) == len(replay) == len(replay.sampler)
    return (
        dict(zip(keys.tolist(), p.round(12).tolist())),
        replay.memory.keys.tolist(),
        replay.memory[:].reward.tolist() if len(replay.memory) else [],
    )


def sequences_of(rows, oldest):
    "The plain model: first key → keys of each sequence that is complete among these rows and still there"
    running, found = {}, {}
    for key, r in enumerate(rows):
        keys = running.setdefault(int(r['env_id']), [])
        keys.append(key)
        found[(int(r['env_id']), int(r['episode_n']))] = (list(keys), bool(r['terminated']))
        if r['terminated']:
            running[int(r['env_id'])] = []
    return {k: v for k, v in found.items()}


def plain(kind, rows, oldest):
    "First keys of what can be drawn after these rows"
    if not kind.startswith('sequences'):
        return set(range(oldest, len(rows)))
    stride, firsts = LENGTH - (1 if kind == 'sequences' else 2), set()
    for keys, ended in sequences_of(rows, oldest).values():
        starts = set(range(0, len(keys) - LENGTH + 1, stride))
        if ended:
            starts.add(max(0, len(keys) - LENGTH))
        firsts |= {keys[s] for s in starts}
    return {k for k in firsts if k >= oldest}


def check(replay, kind, lasts):
    "Draw, learn, add, and compare with what rows say"
    rows = stream(lasts)[: replay.memory.inserted]
    probabilities, keys, rewards = view_of(replay)
    assert rewards == keys == list(range(max(0, len(rows) - MAX_SZ), len(rows)))
    assert set(probabilities) == plain(kind, rows, keys[0] if keys else 0)
    assert not probabilities or abs(sum(probabilities.values()) - 1) < 1e-9
    if len(replay) < 2:
        return
    batch = replay.sample()
    for key, b in zip(batch.index.tolist(), batch.to('cpu').rows):
        if not isinstance(replay, SequenceReplay):
            assert b['reward'] == key
            continue
        part = b[b['mask']]
        assert (
            part['reward'][0] == key
            and (np.diff(part['step_n']) == 1).all()
            and len({*part['env_id']}) == len({*part['episode_n']}) == 1
        )
        assert len(part) == LENGTH or part['terminated'][-1] and part['step_n'][0] == 1
    if isinstance(replay, SequenceReplay):
        assert batch.hidden[:, 0].tolist() == batch.index.tolist()


def future(replay, kind, lasts, done):
    "What is seen while the other blocks come, whatever was drawn before"
    seen = []
    for b in blocks(lasts)[done:]:
        replay.add(b)
        check(replay, kind, lasts)
        seen.append(view_of(replay))
    return seen


STEPS = pytest.mark.parametrize(
    'every',
    [
        23,
        pytest.param(7, marks=pytest.mark.slow),
        pytest.param(1, id='each_one', marks=pytest.mark.slow),
    ],
)


def everywhere(every, prepare, call, then):
    "Interrupt a call before each of its bytecodes, or before every so many; where its end is"
    at = 1
    while True:
        replay = prepare()
        if not interrupted(lambda: call(replay), at):
            return at - 1
        try:
            then(replay)
        except BaseException as e:
            e.add_note(f'interrupted before bytecode {at}')
            raise
        at += every


def added_or_not(stop, prepare, block, look, future):
    "Wherever `add` is stopped: the block was added or not, and what follows is what follows in either case; in how many places it was"
    before, after = prepare(), prepare()
    after.add(block)
    wants, rest = (view_of(before), view_of(after)), future(after)

    def then(replay):
        got = view_of(replay)
        assert got in wants
        look(replay)
        if got != wants[1]:
            replay.add(block)
        assert future(replay) == rest

    return stop(prepare, lambda r: r.add(block), then)


def add_stopped(stop, kind, lasts, n):
    "The same for block number `n`"
    return added_or_not(
        stop,
        lambda: prepared(kind, lasts, n),
        blocks(lasts)[n],
        lambda r: check(r, kind, lasts),
        lambda r: future(r, kind, lasts, n + 1),
    )


@STEPS
@pytest.mark.parametrize('lasts', [1, 5])
@pytest.mark.parametrize('kind', KINDS)
def test_add(kind, lasts, every):
    "The first block, one that fills the ring, one that turns it over; the next blocks bring what they bring in either case"
    if kind == 'frames_there':
        every = max(every, 7)  # it has many of them
    for n in (0, 3) if lasts == 1 else (2, 4):
        assert (
            add_stopped(partial(everywhere, every if n else every * 29), kind, lasts, n) > 100
        )  # the first one takes 13,000


@STEPS
@pytest.mark.parametrize('kind', KINDS)
def test_sample(kind, every):
    "Probabilities are as before, counts those before or after; also where the sampler has to catch up first"
    prepare = lambda: prepared(kind, 5, 5)
    before, want = prepare(), view_of(prepare())
    after = prepare()
    after.sample()

    def then(replay):
        assert view_of(replay) == want
        for r in 'sampled', 'batches':
            assert getattr(replay, r) in (getattr(before, r), getattr(after, r))
        assert replay.memory.times_drawn.sum() in (
            before.memory.times_drawn.sum(),
            after.memory.times_drawn.sum(),
        )
        check(replay, kind, 5)

    assert everywhere(every, prepare, lambda r: r.sample(), then) > 20


@STEPS
@pytest.mark.parametrize('kind', KINDS)
def test_update_priorities(kind, every):
    "All errors have arrived or none has, and the largest there ever was is not forgotten"

    def prepare():
        replay = prepared(kind, 5, 4)
        replay.stats()
        return replay

    keys = sorted(view_of(prepare())[0])[:3]
    keys, td = (
        np.array([0, *keys]),
        np.array([4.0, 90.0, 3.0, 2.0][: len(keys) + 1]),
    )  # the first is stale

    def call(replay):
        replay.update_priorities(
            keys,
            np.repeat(td[:, None], replay.length - replay.burn_in, 1)
            if isinstance(replay, SequenceReplay)
            else td,
        )

    before, after = prepare(), prepare()
    call(after)
    wants = view_of(before), view_of(after)
    ends = {}
    for replay, want in zip((before, after), wants):
        ends[str(want)] = future(replay, kind, 5, 4)

    def then(replay):
        got = view_of(replay)
        assert got in wants and replay.stale in (before.stale, after.stale)
        check(replay, kind, 5)
        assert future(replay, kind, 5, 4) == ends[str(got)]

    assert everywhere(every, prepare, call, then) > 20


# ---- no memory ----


@contextmanager
def failing(at):
    "The `at`-th array that this library asks numpy for can't be had"
    names, count = (
        ('empty', 'zeros', 'full', 'ones', 'array', 'arange', 'concatenate', 'empty_like'),
        0,
    )
    before = {n: getattr(np, n) for n in names}

    def asked(make):
        def f(*args, **kwargs):
            nonlocal count
            if 'fastrl_replay/' in sys._getframe(1).f_code.co_filename:
                count += 1
                if count == at:
                    raise MemoryError('none left')
            return make(*args, **kwargs)

        return f

    for n, make in before.items():
        setattr(np, n, asked(make))
    try:
        yield
    finally:
        for n, make in before.items():
            setattr(np, n, make)


def without_memory(prepare, call, then):
    "Let each allocation of a call fail once; how many there are"
    at = 1
    while True:
        made = prepare()
        try:
            with failing(at):
                call(made)
        except MemoryError:
            pass
        else:
            return at - 1
        try:
            then(made)
        except BaseException as e:
            e.add_note(f'allocation {at} failed')
            raise
        at += 1


@pytest.mark.parametrize('kind', KINDS)
def test_add_without_memory(kind):
    "The first block, and one that turns the ring over"
    for lasts, n in (1, 0), (5, 4):
        assert add_stopped(without_memory, kind, lasts, n) > (30 if n == 0 else 0)


@pytest.mark.parametrize('kind', ['proportional', 'rank', 'sequences', 'sequences_rank'])
def test_growth_without_memory(kind):
    "Tables of environments, of sequences and places grow, and each allocation of that fails once"
    rows = np.repeat(stream(1, 1), 4)

    def of(first, n, envs):  # episodes of one step each
        r = rows[first : first + n].copy()
        r['env_id'], r['episode_n'], r['step_n'], r['terminated'] = (
            np.arange(n) % envs,
            first + np.arange(n),
            1,
            True,
        )
        r['reward'] = first + np.arange(n)
        return Steps(r)

    same = dict(max_sz=90, bs=2, seed=0, alpha=1)

    def prepare():
        replay = (
            PrioritizedReplay(kind='rank' if kind == 'rank' else 'proportional', **same)
            if 'seq' not in kind
            else SequenceReplay(
                length=LENGTH,
                burn_in=0,
                overlap=0,
                kind='rank' if 'rank' in kind else 'proportional',
                **same,
            )
        )
        replay.add(of(0, 5, 1))
        replay.sample()
        return replay

    def seen(replay):
        found = [view_of(replay)]
        for first in 85, 95, 130:
            replay.add(of(first, 10, 50))
            found.append(view_of(replay))
            replay.sample(4)
        assert replay.memory[:].reward.tolist() == replay.memory.keys.tolist()[:-10] + list(
            range(130, 140)
        )
        return found

    assert added_or_not(without_memory, prepare, of(5, 80, 40), len, seen) > 4


@pytest.mark.parametrize('which', ['first', 'new', 'larger'])
@pytest.mark.parametrize('kind', STAGES)
def test_stages_without_memory(kind, which):
    "The block was taken or not, and the next ones bring what they bring then"
    prepare, block, future = in_the_middle(kind, which)
    after = prepare()
    feed(after, block)
    wants = future(prepare()), future(after)

    def then(stage):
        assert future(stage) in wants

    assert without_memory(prepare, lambda s: feed(s, block), then) >= 1


# ---- real interrupts ----


def signalled(n, seed, kind):
    "Add, draw, answer and step, while a timer interrupts `n` times"
    rng, came = random.Random(seed), 0
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    replay, pipe, made = MAKE[kind](), GymStepper([Witness(3, 7), Witness(2, 40)], Remember()), []
    replay.add(Steps(stream(5)[:1]))  # its reward is 0, its key

    def work():
        while True:
            first = replay.memory.inserted
            rows = np.zeros(400, stream(5).dtype)
            rows['reward'], rows['td'], rows['episode_n'], rows['step_n'] = (
                first + np.arange(400),
                1,
                1,
                1 + first + np.arange(400),
            )
            rows['hidden'] = rows['reward'][:, None] + [0, 100]
            replay.add(Steps(rows))
            batch = replay.sample()
            answer(replay, batch, [rng.random(), rng.random()])
            made.extend(take(pipe, 3))

    while came < n:
        try:  # the timer, too: on a busy machine it may be over before the next line
            signal.setitimer(
                signal.ITIMER_REAL, rng.uniform(1e-5, 4e-3), 1
            )  # again: Python drops one that comes in a finalizer
            work()
        except KeyboardInterrupt:
            came += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        keys = replay.memory.keys.tolist()
        assert replay.memory[:].reward.tolist() == keys
        if len(replay) < 2:
            continue
        batch = replay.sample()
        assert replay.memory.valid(batch.index).all()
        assert np.isclose(replay.sampler.probabilities().sum(), 1)
        if not isinstance(replay, SequenceReplay):
            assert batch.reward.tolist() == batch.index.tolist()
    for rows in by_env(made + take(pipe, 9)):
        assert (
            (rows['state'][:, 1] == rows['step_n'] - 1)
            & (rows['next_state'][:, 1] == rows['step_n'])
        ).all()


@pytest.mark.parametrize('n', [5, pytest.param(75, marks=pytest.mark.slow)])
@pytest.mark.parametrize('kind', ['uniform', 'proportional', 'rank', 'sequences'])
def test_signals(kind, n):
    "In a process of its own, which must neither hang nor crash"
    child = multiprocessing.get_context('fork').Process(target=signalled, args=(n, n, kind))
    child.start()
    child.join(60 + 2 * n)
    if hung := child.is_alive():
        child.kill()
    assert not hung and child.exitcode == 0


def test_an_interrupt_waits_for_the_compiler():
    "It comes when the kernel is there; a second one doesn't wait"

    def double(x):
        return x * 2

    kernel, compiled = njit(double), []
    own = kernel.compile

    def compile_(sig):
        signal.raise_signal(signal.SIGINT)
        compiled.append(own(sig))
        return compiled[0]

    kernel.compile = compile_
    with pytest.raises(KeyboardInterrupt):
        kernel(3)
    assert compiled and len(kernel.signatures) == 1 and kernel(3) == 6
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        compiled.clear()
        signal.raise_signal(signal.SIGINT)
        compiled.append(1)
    assert not compiled and signal.getsignal(signal.SIGINT) is signal.default_int_handler
