"""After an interrupt or an error in a call, a block is in a stage or a memory or it is not.

The sampler agrees with the rows."""

import multiprocessing
import random
import signal
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from fastrl_replay.all import *
from fastrl_replay.steps.row_dtypes import extend_dtype
from bytecodes import interrupted
from scripted import numbered
from strategies import bits
from test_sequence import naive

MAX_SZ, LENGTH = 8, 3


def stream():
    "Return rows in episodes of five steps; rewards and recurrent states are the keys"
    rows = np.zeros(30, extend_dtype(numbered(1).dtype, hidden=('f4', (1,))))
    key = np.arange(30)
    step = key // 2
    rows['env_id'] = key % 2
    rows['episode_n'] = step // 5 + 1
    rows['step_n'] = step % 5 + 1
    rows['reward'] = key
    rows['hidden'] = key[:, None]
    rows['terminated'] = rows['step_n'] == 5
    rows['state'] = key[:, None]
    rows['next_state'] = key[:, None] + 2
    return rows


ROWS = stream()
BLOCKS = [
    Steps(rows) for rows in np.split(ROWS, [6, 7, 13, 19, 22])
]  # the first ones fill the ring


class TinyFrames(Frames):
    "Frames of a few bytes"

    least = 1


SAME = dict(max_sz=MAX_SZ, bs=2, seed=0)
MAKE = dict(
    frames=lambda: ExperienceReplay(store=TinyFrames(), **SAME),
    proportional=lambda: PrioritizedReplay(alpha=1, eps=0, **SAME),
    rank=lambda: PrioritizedReplay(kind='rank', alpha=1, **SAME),
    sequences=lambda: SequenceReplay(length=LENGTH, burn_in=0, overlap=1, alpha=1, **SAME),
)


def prepared(kind):
    "Return a memory with two blocks, the first of which was sampled and answered"
    replay = MAKE[kind]()
    replay.add(BLOCKS[0])
    answer(replay, replay.sample().index, [7.0, 2.0])
    replay.add(BLOCKS[1])
    return replay


def answer(replay, keys, td):
    "Send the same error for each step of a sequence"
    if isinstance(replay, SequenceReplay):
        td = np.repeat(np.array(td)[:, None], LENGTH, 1)
    replay.update_priorities(keys, td)


def drawable(rows, oldest):
    "Return the first keys of the complete sequences among these rows"
    firsts = {numbers[0] for _, numbers in naive(rows, LENGTH, 1, 'shift')}
    return {key for key in firsts if key >= oldest}


def check(replay):
    "Compare memory and sampler with the rows that were added"
    n = replay.memory.inserted
    keys = replay.memory.keys.tolist()
    assert keys == [*range(max(0, n - MAX_SZ), n)]
    assert replay.memory[:].reward.tolist() == keys
    batch = replay.sample()
    first, known = batch.reward, {*keys}
    if isinstance(replay, SequenceReplay):
        first, known = batch.reward[:, 0], drawable(ROWS[:n], keys[0])
        assert batch.hidden[:, 0].tolist() == batch.index.tolist()
    assert first.tolist() == batch.index.tolist()
    assert {*batch.index.tolist()} <= known
    probabilities = replay.drawable()['probability']
    assert len(probabilities) == len(replay) == len(known)
    assert np.isclose(probabilities.sum(), 1)


def check_added_or_not(replay, block=2):
    "A block is in or not; the next ones can be added, without a look between"
    inserted = [BLOCKS[block].rows['reward'][0], BLOCKS[block + 1].rows['reward'][0]]
    assert replay.memory.inserted in inserted
    for later in BLOCKS[block + (replay.memory.inserted == inserted[1]) :]:
        replay.add(later)
    check(replay)


def moments(make, call, stride, *files):
    "Interrupt a call on a new object every `stride` bytecodes, from a random one; yield objects"
    at = random.Random(stride).randint(1, stride)
    while True:
        made = make()
        if not interrupted(lambda: call(made), at, *files):
            break
        yield made
        at += stride


@pytest.mark.parametrize('kind', MAKE)
def test_an_interrupt_of_add_leaves_the_memory_valid(kind):
    tried = 0
    for replay in moments(lambda: prepared(kind), lambda r: r.add(BLOCKS[2]), 19):
        check_added_or_not(replay)
        tried += 1
    assert tried > 3  # there are fewer moments in Python 3.10


@pytest.mark.parametrize('kind', MAKE)
def test_an_interrupt_of_sample_changes_no_probability(kind):
    def probabilities(replay):
        replay.sample()
        return replay.sampler.probabilities().round(12).tolist()

    want = probabilities(prepared(kind))
    for replay in moments(lambda: prepared(kind), lambda r: r.sample(), 97):
        assert probabilities(replay) == want
        check(replay)


@pytest.mark.parametrize('kind', ['proportional', 'rank', 'sequences'])
def test_an_interrupt_of_update_priorities_leaves_all_or_none(kind):
    def probabilities(replay):
        replay.sample()
        return replay.sampler.probabilities().round(12).tolist()

    def update(replay):
        keys = sorted(drawable(ROWS[:7], 0))[:2]
        answer(replay, keys, [90.0, 3.0])

    after = prepared(kind)
    update(after)
    wants = [probabilities(prepared(kind)), probabilities(after)]
    assert wants[0] != wants[1]
    for replay in moments(lambda: prepared(kind), update, 31):
        assert probabilities(replay) in wants
        check(replay)


# ---- stages ----

STAGES = dict(
    NStep=lambda: NStep(None, 3, 0.5),
    shift=lambda: SequenceChunker(None, 4, 1),
    pad=lambda: SequenceChunker(None, 3, 0, 'pad'),
)


def steps_of(*steps):
    "Return rows of (env_id, episode_n, step_n, terminated)"
    rows = ROWS[: len(steps)].copy()
    for row, step in zip(rows, steps):
        row['env_id'], row['episode_n'], row['step_n'], row['terminated'] = step
    return Steps(rows)


STAGE_BLOCKS = [  # in the second, a new environment gets the number of one that has no episode
    steps_of((0, 1, 1, False), (5, 1, 1, True), (0, 1, 2, False)),
    steps_of((9, 1, 1, False)),
    steps_of((5, 2, 1, False), (5, 2, 2, False)),
    steps_of(
        (9, 1, 2, False), (5, 2, 3, False), (0, 1, 3, False), (9, 1, 3, True), (5, 2, 4, True)
    ),
]


def feed(stage, block):
    "Return the bits of what a stage makes of a block"
    made = stage.merge(block) if isinstance(stage, NStep) else stage.chunk(block)
    return [bits(steps.rows) for steps in (made if isinstance(made, list) else [made])]


def half_fed(kind):
    stage = STAGES[kind]()
    feed(stage, STAGE_BLOCKS[0])
    return stage


def outputs(stage):
    return [feed(stage, block) for block in STAGE_BLOCKS[2:]]


def with_and_without(kind):
    "Return what a stage makes of the later blocks if it never had the second one, and if it had"
    fed = half_fed(kind)
    feed(fed, STAGE_BLOCKS[1])
    return [outputs(half_fed(kind)), outputs(fed)]


@pytest.mark.parametrize('kind', STAGES)
def test_an_interrupted_stage_has_taken_a_block_or_not(kind):
    wants = with_and_without(kind)
    call = lambda stage: feed(stage, STAGE_BLOCKS[1])  # noqa: E731
    seen = [outputs(stage) for stage in moments(lambda: half_fed(kind), call, 4, 'stages/')]
    assert all(got in wants for got in seen)
    assert wants[0] in seen


# ---- no memory ----


@contextmanager
def failing(at):
    "Let the array number `at` that this library asks numpy for fail"
    names = 'empty', 'zeros', 'full', 'array', 'arange', 'concatenate'
    asked = 0

    def replaced(make):
        def f(*args, **kwargs):
            nonlocal asked
            if 'fastrl_replay/' in sys._getframe(1).f_code.co_filename:
                asked += 1
                if asked == at:
                    raise MemoryError('none left')
            return make(*args, **kwargs)

        return f

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(np, name, replaced(getattr(np, name)))
        yield


def without_memory(make, call):
    "Let each allocation of a call fail once, and yield the objects"
    at = 1
    while True:
        made = make()
        try:
            with failing(at):
                call(made)
        except MemoryError:
            yield made
            at += 1
        else:
            break


@pytest.mark.parametrize('kind', MAKE)
def test_a_failed_allocation_in_add_leaves_the_memory_valid(kind):
    for replay in without_memory(MAKE[kind], lambda r: r.add(BLOCKS[0])):
        check_added_or_not(replay, 0)
    for replay in without_memory(lambda: prepared(kind), lambda r: r.add(BLOCKS[2])):
        check_added_or_not(replay)


@pytest.mark.parametrize('kind', STAGES)
def test_a_stage_without_memory_has_taken_a_block_or_not(kind):
    wants = with_and_without(kind)
    for stage in without_memory(lambda: half_fed(kind), lambda s: feed(s, STAGE_BLOCKS[1])):
        assert outputs(stage) in wants


# ---- signals ----


def signalled(kind, n):
    "Add and draw while a timer interrupts `n` times"
    rng = random.Random(n)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    replay = MAKE[kind]()
    replay.add(Steps(ROWS[:1]))
    came = 0
    while came < n:
        try:
            # again after a second, because Python drops one that comes in a finalizer
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-3), 1)
            while True:
                first = replay.memory.inserted
                rows = np.repeat(ROWS[:1], 400)
                rows['reward'] = first + np.arange(400)
                rows['step_n'] = rows['reward'] + 1
                replay.add(Steps(rows))
                batch = replay.sample()
                answer(replay, batch.index, [rng.random(), rng.random()])
        except KeyboardInterrupt:
            came += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert replay.memory[:].reward.tolist() == replay.memory.keys.tolist()
        if len(replay) >= 2:
            assert replay.memory.valid(replay.sample().index).all()
            assert np.isclose(replay.sampler.probabilities().sum(), 1)


@pytest.mark.parametrize('kind', ['proportional', 'sequences'])
def test_a_process_survives_interrupts_by_a_timer(kind):
    child = multiprocessing.get_context('fork').Process(target=signalled, args=(kind, 20))
    child.start()
    child.join(120)
    hangs = child.is_alive()
    child.kill()
    assert not hangs and child.exitcode == 0
