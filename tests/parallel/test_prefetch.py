"""Drawing in a thread: the same batches whatever its speed, nothing lost, nothing written where it doesn't belong, nothing that hangs."""

import gc, multiprocessing, pickle, random, signal, subprocess, sys, threading, time
from concurrent.futures import Future
from itertools import islice

import numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from fastrl_replay.all import *
from fastrl_replay.memory.sumtree import _add_up
from fastrl_replay.steps.locks import DrawOrderLock
from fastrl_replay.testing import _Echo, same, through_file
from scripted import take
from strategies import cases
from test_boundaries import interrupted
from workers import short, zeros

BOX, ACTIONS = spaces.Box(-9, 9, (2,)), spaces.Discrete(3)

# ---- helpers ----


def rows_of(n, first=0):
    "Rows of one environment, whose reward is their key"
    rows = np.zeros(n, step_dtype(BOX, ACTIONS))
    rows['reward'] = rows['step_n'] = np.arange(first, first + n)
    rows['step_n'] += 1
    return Steps(rows)


def blocks(n, size=1):
    return [rows_of(size, i * size) for i in range(n)]


def keys(items):
    return [i.index.tolist() for i in items]


def threads():
    return [t for t in threading.enumerate() if t.name.startswith('prefetch')]


KINDS = {
    'uniform': lambda source, **kw: ExperienceReplay(
        source, **{**dict(bs=2, max_sz=20, seed=0), **kw}
    ),
    'proportional': lambda source, **kw: PrioritizedReplay(
        source, **{**dict(bs=2, max_sz=20, seed=0), **kw}
    ),
    'rank': lambda source, **kw: PrioritizedReplay(
        source, **{**dict(bs=2, max_sz=20, seed=0, kind='rank'), **kw}
    ),
    'sequences': lambda source, **kw: SequenceReplay(
        source, **{**dict(bs=2, max_sz=30, seed=0, length=4, burn_in=1, overlap=2), **kw}
    ),
}


def uneven(replay, longest=0.003):
    "The same replay, whose draws take a random time"

    class Uneven(type(replay)):
        def sample(self, bs=None):
            time.sleep(random.random() * longest)
            return super().sample(bs)

    replay.__class__ = Uneven
    return replay


def answered(pipe, n=10**9, wait=0):
    "Batches, each answered with errors that depend on its keys"
    for item in islice(pipe, n):
        batch = item[0] if isinstance(item, tuple) else item
        time.sleep(random.random() * wait)
        td = batch.index.double().numpy() % 7 + 0.5
        batch.update_priorities(
            td if len(batch.shape) == 1 else np.repeat(td[:, None], batch.train.shape[1], 1)
        )
        yield item


# ---- the order ----


def by_hand(replay, ahead, source, n=10**9):
    "What `Prefetch` must give, without a thread: draw, keep `ahead` back, answer"
    due, drawn, out = replay.due_batches(), [], []
    while len(out) < n:
        while len(drawn) <= ahead and next(due, 0) is None:
            drawn.append(replay.sample())
        if not drawn:
            break
        out += list(answered(drawn[:1]))
        del drawn[:1]
    return out


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('ahead', [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))])
@pytest.mark.parametrize(
    'kw',
    [dict(), dict(ratio=0.7, warmup=5), pytest.param(dict(ratio=1.5), marks=pytest.mark.slow)],
    ids=str,
)
def test_the_order_is_that_of_the_calls(kind, ahead, kw):
    "However fast the thread and the learner are, batches are those of a queue without a thread"
    want = by_hand(KINDS[kind](blocks(40, 3), **kw), ahead, blocks)
    replay = uneven(KINDS[kind](blocks(40, 3), **kw), 0.002)
    got = list(answered(replay.prefetch(ahead), wait=0.002))
    assert len(got) == len(want) > 10 and same(got, want)


def test_rows_wait_for_draws():
    "A draw that was begun sees the memory as it was then, however late the thread is"
    gate = threading.Event()

    class Gated(ExperienceReplay):
        def sample(self, bs=None):
            gate.wait(60)
            return super().sample(bs)

    replay = Gated(bs=1, max_sz=1, seed=0)
    pipe = replay.prefetch()
    replay.add(rows_of(1))
    replay._counted = 1
    pipe._begin()
    other = threading.Thread(target=replay.add, args=(rows_of(1, 1),))
    other.start()
    other.join(0.1)
    assert other.is_alive() and replay.memory.inserted == 1
    gate.set()
    other.join(60)
    assert replay.memory.inserted == 2 and keys([pipe._drawn[0].result()]) == [[0]]


def test_everything_that_touches_the_memory_waits():
    "Answers, statistics, saving, restoring, calling `sample`"
    for name, call in dict(
        update=lambda r: r.update_priorities([0], [1.0]),
        stats=lambda r: r.stats(),
        save=lambda r: r.snapshot(),
        load=lambda r: r.restore(r.check_state(r._state)),
        draw=lambda r: r.sample(1),
    ).items():
        for kind in KINDS:
            replay = KINDS[kind](None)
            replay.add(rows_of(20))
            replay._state = replay.snapshot()
            args = ([0], np.ones((1, 3))) if kind == 'sequences' else ([0], [1.0])
            if name == 'update':
                call = lambda r: r.update_priorities(*args)
            replay.lock.acquire()
            t = threading.Thread(target=call, args=(replay,), daemon=True)
            t.start()
            t.join(0.02)
            assert t.is_alive(), (name, kind)
            replay.lock.release()
            t.join(60)
            assert not t.is_alive()


def test_a_holder_of_the_lock_does_not_wait():
    "A schedule that asks its replay, in the thread; and a second stage on the same replay"
    replay = PrioritizedReplay(
        blocks(20),
        bs=1,
        max_sz=9,
        seed=0,
        beta=lambda n: min(1.0, ExperienceReplay.stats(replay)['fill']),
    )
    a, b = replay.prefetch(2), replay.prefetch(3)
    assert len(take(a, 5)) == 5 and len(take(b, 5)) == 5 and len(take(a, 5)) == 5


# ---- two threads, any callers ----


def test_threads_that_add_draw_and_answer():
    "One thread adds and draws, the other answers: each priority is that of its row, and sums are exact"
    n, batches, errors, done = 300, [], [], threading.Event()
    replay = PrioritizedReplay(
        bs=16, max_sz=64, alpha=1, eps=0, initial='reward', seed=0
    )  # new rows: the priority 1/2

    def block(i):
        b = rows_of(8, i * 8)
        b.reward.fill_(0.5)
        return b

    answers = set()

    def answer():
        try:
            while not done.is_set() or batches:
                if not batches:
                    continue
                batch = batches.pop(0)
                batch.update_priorities(batch.index.double() + 1)  # the answer says whose it is
                answers.update(batch.index.tolist())
        except BaseException as e:
            errors.append(e)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        t = threading.Thread(target=answer)
        t.start()
        for i in range(n):
            replay.add(block(i))
            if len(replay) >= 16:
                batches.append(replay.sample())
        done.set()
        t.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not errors and not t.is_alive()
    p, here = replay.sampler.tree[np.arange(n * 8 - 64, n * 8) % 64], range(n * 8 - 64, n * 8)
    # was (without the lock): StaleKey, for keys that went between check and writing, or their errors in the rows that came
    assert p.tolist() == [k + 1.0 if k in answers else 0.5 for k in here]
    tree = replay.sampler.tree
    fresh = tree.nodes.copy()
    _add_up(fresh, tree.starts, np.arange(64))
    assert np.array_equal(fresh, tree.nodes)
    assert replay.stats()['inserted'] == n * 8


@pytest.mark.parametrize('kind', KINDS)
def test_threads_that_do_everything(kind):
    "All methods at once: no error, counters add up"
    replay, errors = KINDS[kind](None, max_sz=40), []
    replay.add(rows_of(40))

    def forever(f, n=150):
        def go():
            try:
                for _ in range(n):
                    f()
            except BaseException as e:
                errors.append(e)

        return threading.Thread(target=go)

    at = iter(range(40, 10**6, 3))
    ts = [
        forever(f)
        for f in (
            lambda: replay.add(rows_of(3, next(at))),
            lambda: list(answered([replay.sample()])),
            replay.stats,
            replay.snapshot,
            lambda: list(answered([replay.sample()])),
        )
    ]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for t in ts:
            t.start()
        for t in ts:
            t.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not errors and replay.batches == 300 and replay.memory.inserted == 40 + 450


def test_under_the_prefetcher_of_torchdata():
    "A whole pipe in its thread, answers from the main thread"
    nodes = pytest.importorskip('torchdata.nodes')
    for make in (
        lambda: KINDS['proportional'](blocks(200, 2), max_sz=16),
        lambda: KINDS['proportional'](blocks(200, 2), max_sz=16).prefetch(2),
    ):
        pipe = make()
        n = 0
        for batch in nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(pipe), prefetch_factor=4)):
            batch.update_priorities(torch.ones(2))
            n += 1
        assert n == 200


# ---- the stage ----


def test_arguments_are_checked_early():
    "With a remedy"
    with pytest.raises(
        TypeError,
        match=r'Prefetch: its source; got Header; expected a replay\. Remedy: .*\.parallel\(1\) or torchdata',
    ):
        KINDS['uniform'](None).header(3).prefetch()
    for source in None, blocks(3), KINDS['uniform'](None).prefetch():
        with pytest.raises(TypeError, match='Prefetch'):
            Prefetch(source)
    for ahead in 0, -1, 1.5, True, None, '2':
        with pytest.raises(ValueError, match='Prefetch: ahead'):
            KINDS['uniform'](None).prefetch(ahead)
    with pytest.raises(RuntimeError):
        KINDS['uniform'](None).prefetch(device='nowhere')
    assert KINDS['uniform'](None).prefetch(np.int64(2)).ahead == 2
    assert repr(KINDS['uniform'](None).prefetch(3, torch.device('cpu'))).endswith(
        "\n  .prefetch(ahead=3, device='cpu')"
    )


@pytest.mark.parametrize('ahead', [1, 2, 50])
@pytest.mark.parametrize('n', [0, 1, 2, 3, 7])
def test_a_finite_source_gives_all(ahead, n):
    "Also fewer batches than are drawn ahead; and again in the second pass"
    pipe = KINDS['uniform'](blocks(n), bs=1).prefetch(ahead)
    assert [len(list(pipe)) for _ in range(3)] == [n] * 3


@cases(30)
@given(
    st.lists(st.integers(0, 6), max_size=4), st.integers(1, 4), st.sampled_from([None, 0.7, 1.5])
)
def test_broken_passes_lose_nothing(breaks, ahead, ratio):
    "What one pass leaves, the next one gives; batches come out in the order in which they were drawn"

    class Noted(ExperienceReplay):
        def sample(self, bs=None):
            batch = super().sample(bs)
            drawn.append(batch)
            return batch

    drawn, got = [], []
    pipe = Noted(blocks(9), bs=1, max_sz=50, seed=0, ratio=ratio).prefetch(ahead)
    for n in breaks:
        got += take(pipe, n)
    got += list(pipe)
    assert len(got) == len(drawn) and all(a is b for a, b in zip(got, drawn))


def test_an_error_comes_with_its_batch():
    "The batches before it, then the error with its type; the next pass goes on"

    class Fails(ExperienceReplay):
        def sample(self, bs=None):
            if self.batches == 3 and not self.failed:
                self.failed = True
                raise ZeroDivisionError('third')
            return super().sample(bs)

    replay = Fails(blocks(8), bs=1, max_sz=50, seed=0)
    replay.failed = False
    got, pipe = [], replay.prefetch(3)
    with pytest.raises(ZeroDivisionError, match='third'):
        for batch in pipe:
            got.append(batch)
    assert len(got) == 3
    through_file(pipe.state_dict())  # a failed draw can't be saved, and isn't missed
    assert len(take(pipe, 3)) == 3


def test_an_error_of_the_memory_keeps_its_type():
    "NotEnoughRows, from a frozen memory"
    with pytest.raises(NotEnoughRows, match='frozen'):
        next(iter(KINDS['uniform'](blocks(3), freeze_memory=True).prefetch()))
    pipe = KINDS['uniform'](None).prefetch()
    pipe._begin()
    with pytest.raises(NotEnoughRows, match='2 are missing'):
        next(iter(pipe))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    'device',
    [
        'cpu',
        pytest.param(
            'cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
        ),
    ],
)
def test_batches_are_brought_to_a_device(kind, device):
    "And can still be answered there"
    a, b = KINDS[kind](blocks(30, 2)).prefetch(2), KINDS[kind](blocks(30, 2)).prefetch(2, device)
    for x, y in zip(a, b):
        assert (
            y.device.type == y['index'].device.type == device
            and y._replay is b.source
            and same(x, y.to('cpu'))
        )
        td = torch.ones(2) if kind != 'sequences' else torch.ones(2, 3)
        x.update_priorities(td)
        y.update_priorities(td.to(device))
    assert a.source.stats() == b.source.stats()


def test_return_idxs_goes_along():
    "(batch, places), also to a device and through a file"

    def make():
        return ExperienceReplay(blocks(30, 2), bs=3, max_sz=50, seed=0, return_idxs=True).prefetch(
            2, 'cpu'
        )

    a, b = make(), make()
    it = iter(a)
    batch, places = next(it)
    assert isinstance(places, np.ndarray) and np.array_equal(places, batch.rows['index'])
    b.load_state_dict(through_file(a.state_dict()))
    assert same(take(it, 9), take(b, 9))
    small = ExperienceReplay(blocks(30, 2), bs=3, max_sz=8, seed=0, return_idxs=True).prefetch(2)
    list(take(small, 20))
    twin = ExperienceReplay(blocks(30, 2), bs=3, max_sz=8, seed=0, return_idxs=True).prefetch(2)
    twin.load_state_dict(through_file(small.state_dict()))
    for batch, places in take(twin, 2):
        assert (
            places.keys.tolist() == batch.index.tolist() and places.max() < 8
        )  # places know their rows after a file, too


# ---- saving ----


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('k', [0, 1, 4, 9, 12])
def test_a_restored_chain_goes_on(kind, k):
    "With answers, and draws in flight when it is saved; k=9: the source has ended, batches are left; 12: all are out"

    def make(seed=0):
        return uneven(KINDS[kind](blocks(12, 4), seed=seed, warmup=4)).prefetch(3)

    a, b = make(), make(seed=9)
    n = len(list(make()))
    it = answered(a)
    for _ in range(min(k, n)):
        next(it)
    b.load_state_dict(through_file(a.state_dict()))
    x, y = list(it), list(answered(b))
    assert same(x, y) and len(x) == n - min(k, n) and a.source.stats() == b.source.stats()
    assert all(i._replay is b.source for i in y)


def test_a_state_may_be_loaded_over_another():
    "What was drawn before is gone, and another `ahead` is no obstacle"
    a, b = (
        KINDS['uniform'](blocks(20), bs=1).prefetch(3),
        KINDS['uniform'](blocks(20), bs=1, seed=5).prefetch(1),
    )
    it = iter(a)
    x = [next(it) for _ in range(4)]
    take(b, 2)
    b.load_state_dict(through_file(a.state_dict()))
    assert same(list(it), list(b)) and len(x) == 4
    with pytest.raises(ValueError, match='another stage'):
        b.load_state_dict(b.source.state_dict())


@pytest.mark.parametrize('left', range(1, 18, 2))
def test_a_pass_that_was_left_is_over_in_a_restored_chain_too(left):
    "Also where the source had ended, and only what was drawn was left: the next pass has begun, and has not asked yet"
    a, b = (_Echo(KINDS['proportional'](blocks(10)).prefetch(3)) for _ in 'ab')
    for _ in islice(a, left):
        pass
    it = iter(a)
    assert next(it) == 'again'
    b.load_state_dict(through_file(a.state_dict()))
    want = list(it)
    assert (
        same(list(b), want) and len(want) > 9
    )  # was: the restored chain took the source's pass for over, and gave what was left


def test_pickles_hold_no_batches_and_no_thread():
    "Neither the stage nor its replay's lock"
    pipe = KINDS['proportional'](blocks(20)).prefetch(2)
    take(pipe, 5)
    size = len(pickle.dumps(pipe.source))
    copy = pickle.loads(pickle.dumps(pipe))
    assert (
        len(pickle.dumps(pipe)) < size + 500
        and copy._worker is None
        and not copy._drawn
        and len(copy.source.memory) == len(pipe.source.memory) > 0
    )
    assert not isinstance(copy.source.__class__(None).lock, DrawOrderLock)


# ---- threads and processes ----


def test_the_thread_ends_with_the_stage():
    "One thread a stage, none before the first draw, none after it is collected; a replay that is kept doesn't hold it"
    gc.collect()
    before = threads()
    replay = KINDS['uniform'](blocks(20))
    pipe = replay.prefetch(2)
    assert set(threads()) <= set(before)
    take(pipe, 3)
    take(pipe, 3)
    mine = [t for t in threads() if t not in before]
    assert len(mine) == 1
    del pipe
    gc.collect()
    mine[0].join(60)
    assert not mine[0].is_alive() and replay.sample() is not None


def test_a_fork_waits_for_draws_and_makes_a_thread():
    "The child's batches are the parent's"
    replay = uneven(KINDS['proportional'](blocks(40)), 0.05)
    pipe = replay.prefetch(3)
    take(pipe, 3)
    fork = multiprocessing.get_context('fork')
    out = fork.Queue()
    child = fork.Process(target=lambda: out.put(keys(answered(pipe, 9))))
    child.start()
    assert out.get(timeout=60) == keys(answered(pipe, 9))
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('used', [False, True])
def test_in_a_dataloader(workers, used):
    "In the main process and in a worker; also where the stage has drawn already"

    def make():
        return KINDS['proportional'](blocks(30)).prefetch(2)

    a, b = make(), make()
    if used:
        take(a, 3)
        take(b, 3)
    assert same(list(DataLoader(a, batch_size=None, num_workers=workers)), list(b))


SCRIPT = """
import sys, time, numpy as np
from gymnasium import spaces
from fastrl_replay.all import *
rows = Steps(np.zeros(1, step_dtype(spaces.Box(-9, 9, (2,)), spaces.Discrete(3))))
class Slow(PrioritizedReplay):
    def sample(self, bs=None):
        time.sleep({draw})
        return super().sample(bs)
def forever():
    while True: yield rows
for i, batch in enumerate(Slow(forever(), bs=1, max_sz=9, seed=0).prefetch(2)):
    batch.update_priorities([1.])
    if i == 2: print('ready', flush=True)
    {learn}
"""


@pytest.mark.parametrize(
    'draw,learn',
    [
        pytest.param(0.3, 'pass', marks=pytest.mark.slow, id='while it waits'),
        pytest.param(0, 'time.sleep(.3)', marks=pytest.mark.slow, id='while it learns'),
        pytest.param(0, 'pass', id='while both run'),
    ],
)
def test_ctrl_c_ends_it(draw, learn):
    "KeyboardInterrupt, and the program ends"
    p = subprocess.Popen(
        [sys.executable, '-c', SCRIPT.format(draw=draw, learn=learn)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert p.stdout.readline() == 'ready\n', p.stderr.read()
        p.send_signal(signal.SIGINT)
        _, err = p.communicate(timeout=60)
    finally:
        p.kill()
    assert 'KeyboardInterrupt' in err and p.returncode not in (0, None)


@pytest.mark.slow
def test_a_program_ends_with_draws_in_flight():
    "Whether it leaves the loop or fails in it"
    for learn, code in ('if i == 5: break', 0), ('if i == 5: 1/0', 1):
        p = subprocess.run(
            [sys.executable, '-c', SCRIPT.format(draw=0.01, learn=learn)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (
            p.returncode == code
            and p.stdout == 'ready\n'
            and ('ZeroDivisionError' in p.stderr) == bool(code)
        )


def test_an_interrupt_loses_no_batch():
    "While the main thread waits for a draw"

    class Waits(ExperienceReplay):
        def sample(self, bs=None):
            if self.batches == 2:
                gate.wait(60)
            return super().sample(bs)

    gate, got = threading.Event(), []
    replay, alone = (
        Waits(blocks(9), bs=1, max_sz=50, seed=0, freeze_memory=True),
        KINDS['uniform'](blocks(9), bs=1, max_sz=50, freeze_memory=True),
    )
    for r in replay, alone:
        r.add(rows_of(30))
    pipe = replay.prefetch(1)

    def interrupt():
        while len(got) < 2 or len(pipe._drawn) < 2:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    t = threading.Thread(target=interrupt)
    t.start()
    with pytest.raises(KeyboardInterrupt):
        for batch in pipe:
            got.append(batch)
    gate.set()
    t.join(60)
    assert len(got) == 2 and same(got + take(pipe, 5), take(alone, 7))


def ends(f, timeout=60):
    "Run it in a process that is forked; it must end well, and soon"
    child = multiprocessing.get_context('fork').Process(target=f)
    child.start()
    child.join(timeout)
    if hung := child.is_alive():
        child.kill()
    assert not hung and child.exitcode == 0


def in_another_thread(f, timeout=20):
    "What it returns, if it does in time"
    found = []
    thread = threading.Thread(target=lambda: found.append(f()), daemon=True)
    thread.start()
    thread.join(timeout)
    return found[0]


def is_free(lock):
    return in_another_thread(lambda: lock.acquire(timeout=5) and (lock.release() or True))


@pytest.mark.parametrize('held', [False, True])
@pytest.mark.parametrize('begun', [False, True])
def test_an_interrupt_on_the_way_in_leaves_the_lock_free(held, begun):
    "At any bytecode of entering, waiting and leaving; was: held for ever, or released once too often"
    at = 1
    while True:
        lock = DrawOrderLock()
        if begun:
            lock.last = Future()
            lock.last.set_result(None)

        def enter():
            with lock:
                pass

        if held:
            lock.lock.acquire()
        cut = interrupted(enter, at)
        if held:
            assert lock.is_mine() and not is_free_now(lock.lock)
            lock.lock.release()
        assert is_free(lock.lock), at
        if not cut:
            break
        at += 1
    assert at > (10 if not begun else 15)


def is_free_now(lock):
    return in_another_thread(lambda: lock.acquire(blocking=False) and (lock.release() or True))


@pytest.mark.parametrize('every', [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize('k', [0, 3])
def test_an_interrupt_at_any_bytecode_of_a_pass(k, every):
    "Others can use the replay afterwards, the pass can be begun again, and no batch is lost but one that was on its way out"

    def all_of_it():
        at, lost = 1, 0
        while True:
            replay = KINDS['proportional'](blocks(12))
            pipe = replay.prefetch(2)
            got = take(pipe, k)
            cut = interrupted(
                lambda: got.extend(take(pipe, 1)),
                at,
                'fastrl_replay/parallel/prefetch.py',
                'fastrl_replay/steps/locks.py',
            )
            in_another_thread(lambda: replay.add(rows_of(1, 99)))
            got += list(pipe)
            in_another_thread(lambda: replay.update_priorities(got[-1].index, [1.0, 2.0]))
            lost += replay.batches - len(got)
            assert not pipe._drawn and 11 <= len(got), at
            if not cut:
                break
            at += every
            pipe.close()
        assert at > 150 and lost <= (4 if every == 1 else 2), (
            at,
            lost,
        )  # four bytecodes from `del` to `yield`, where no signal comes

    ends(all_of_it, 120)


@pytest.mark.parametrize('ordered', [False, True])
def test_a_fork_finds_replays_that_can_be_used(ordered):
    "While a thread adds, or holds the lock for good: in the child the lock is free, and no row is half there"
    replay, over, held = (
        KINDS['proportional'](None, max_sz=3000),
        threading.Event(),
        threading.Event(),
    )
    if ordered:
        replay.order_draws()
    replay.add(rows_of(3000))

    def add():
        while not over.is_set():
            replay.add(rows_of(2000, replay.memory.inserted))

    def hold():
        with replay.lock:
            held.set()
            over.wait()

    def child():
        assert replay.memory[:].reward.tolist() == replay.memory.keys.tolist()
        windows = replay.memory.windows(replay.memory.keys[-5:], 9)
        assert windows.mask.sum(1).tolist() == [5, 4, 3, 2, 1]
        replay.add(rows_of(2, replay.memory.inserted))
        batch = replay.sample(64)
        assert batch.reward.tolist() == batch.index.tolist()
        batch.update_priorities(np.ones(64))

    thread = threading.Thread(target=add)
    thread.start()
    for _ in range(5):
        ends(child)  # was: hung, as often as the thread was in `add`
    over.set()
    thread.join()
    over.clear()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    ends(child)
    over.set()
    thread.join()
    replay.add(
        rows_of(1, replay.memory.inserted)
    )  # in this process the lock is the one it was, and free


# ---- training ----


def losses(ahead, slow):
    torch.manual_seed(0)
    env = spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2)
    model = value_net(*env, (16,))
    replay = (
        GymStepper(['CartPole-v1'] * 2, EpsGreedy(model, 0.2, seed=0), seed=0)
        .n_step(3, 0.99)
        .prioritized_replay(bs=16, max_sz=100, ratio=0.5, seed=0)
    )
    return [
        r['loss']
        for r in take(
            (uneven(replay) if slow else replay).prefetch(ahead).dqn(model, target_every=9), 60
        )
    ]


def test_the_same_training_run():
    "Twice, and with a thread that dawdles"
    first = losses(2, False)
    assert first == losses(2, False) == losses(2, True) and len(set(first)) == 60
    assert first != losses(1, False)  # another order is another run


def test_closing_ends_the_thread_and_loses_no_batch():
    pipe, twin = (
        PrioritizedReplay(blocks(20), bs=2, max_sz=9, seed=0).prefetch(2) for _ in range(2)
    )
    first, whole = take(pipe, 5), take(twin, 5)
    thread = pipe._worker.thread
    pipe.close()
    assert not thread.is_alive() and pipe._worker is None and len(pipe._drawn) == 2
    assert same(first + take(pipe, 5), whole + take(twin, 5))


@pytest.mark.parametrize('ahead', [1, 2])
def test_passes_over_shards_that_are_broken_off(ahead):
    "As one pass: what an earlier one began to draw is not drawn twice"

    def made():
        return (
            GymStepper(short, zeros, seed=0)
            .experience_replay(bs=2, max_sz=80, seed=0)
            .parallel(2, chunk=1, method='fork')
            .prefetch(ahead)
        )

    with made() as one, made() as several:
        whole = keys(islice(one, 30))
        assert sum((keys(islice(several, 5)) for _ in range(6)), []) == whole
