"""Drawing in a thread: the same batches at any speed; nothing is lost, misplaced, or hangs."""

import gc, multiprocessing, queue, random, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from fastrl_replay.all import *
from fastrl_replay.testing import same, through_file
from scripted import take
from strategies import cases
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
@pytest.mark.parametrize(
    'ahead, kw', [(1, dict(ratio=0.7, warmup=5)), (2, {}), (5, dict(ratio=1.5))], ids=str
)
def test_the_order_is_that_of_the_calls(kind, ahead, kw):
    "However fast the thread and the learner are, batches are those of a queue without a thread"
    want = by_hand(KINDS[kind](blocks(20, 3), **kw), ahead, blocks)
    replay = uneven(KINDS[kind](blocks(20, 3), **kw), 0.002)
    got = list(answered(replay.prefetch(ahead), wait=0.002))
    assert len(got) == len(want) > 10
    assert same(got, want)


# ---- two threads, any callers ----


def run_together(*calls):
    "Run each in a thread, all at once; an error of one is raised"
    with ThreadPoolExecutor(len(calls)) as pool:
        waiting = [pool.submit(call) for call in calls]
        for w in waiting:
            w.result(60)


@pytest.fixture
def busy():
    "Threads change places as often as possible"
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_that_add_draw_and_answer(busy):
    "One thread adds and draws, the other answers: each row has its priority; the sum is exact"
    n, drawn, answers = 300, queue.Queue(), set()
    replay = PrioritizedReplay(bs=16, max_sz=64, alpha=1, eps=0, initial='reward', seed=0)

    def learn():
        while (batch := drawn.get(timeout=60)) is not None:
            batch.update_priorities(batch.index.double() + 1)  # the answer says whose it is
            answers.update(batch.index.tolist())

    def add():
        for i in range(n):
            block = rows_of(8, i * 8)
            block.reward.fill_(0.5)  # the priority of new rows
            replay.add(block)
            if len(replay) >= 16:
                drawn.put(replay.sample())
        drawn.put(None)

    run_together(learn, add)
    tree, newest = replay.sampler.tree, np.arange(n * 8 - 64, n * 8)
    assert tree[newest % 64].tolist() == [k + 1.0 if k in answers else 0.5 for k in newest]
    assert tree.total == tree[np.arange(64)].sum()
    assert replay.stats()['inserted'] == n * 8


@pytest.mark.parametrize('kind', KINDS)
def test_threads_that_do_everything(kind, busy):
    "All methods at once: no error, counters add up"
    replay = KINDS[kind](None, max_sz=40)
    replay.add(rows_of(40))
    later = iter(range(40, 10**6, 3))

    def often(call):
        return lambda: [call() for _ in range(100)]

    answer = often(lambda: list(answered([replay.sample()])))
    add = often(lambda: replay.add(rows_of(3, next(later))))
    run_together(add, answer, answer, often(replay.stats), often(replay.state_dict))
    assert replay.batches == 200
    assert replay.memory.inserted == 340


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


def test_wrong_arguments_are_refused_early():
    with pytest.raises(
        TypeError, match=r'Prefetch: its source must be a replay; got Header.*Remedy: .*parallel'
    ):
        KINDS['uniform'](None).header(3).prefetch()
    for ahead in 0, 1.5, True, '2':
        with pytest.raises(ValueError, match='Prefetch: ahead'):
            KINDS['uniform'](None).prefetch(ahead)
    with pytest.raises(RuntimeError):
        KINDS['uniform'](None).prefetch(device='nowhere')


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
    "What one pass leaves, the next one gives; batches come in the order in which they were drawn"

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


@pytest.mark.parametrize('kind', ['proportional', 'sequences'])
@pytest.mark.parametrize('device', ['cpu', 'cuda'])
def test_batches_are_brought_to_a_device(kind, device):
    "And can still be answered there"
    if device == 'cuda' and not torch.cuda.is_available():
        pytest.skip('no GPU')
    a, b = KINDS[kind](blocks(30, 2)).prefetch(2), KINDS[kind](blocks(30, 2)).prefetch(2, device)
    for x, y in zip(a, b):
        assert y.device.type == y['index'].device.type == device
        assert same(x, y.to('cpu'))
        td = torch.ones(2) if kind != 'sequences' else torch.ones(2, 3)
        x.update_priorities(td)
        y.update_priorities(td.to(device))
    assert a.source.stats() == b.source.stats()


# ---- saving ----


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('k', [0, 4, 9])
def test_a_restored_chain_goes_on(kind, k):
    "With answers, and draws in flight at saving; k=9: the source has ended, batches are left"

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


# ---- threads and processes ----


def test_the_thread_ends_with_the_stage():
    "One thread per stage, from the first draw until it is collected, even if its replay is kept"
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


@pytest.mark.parametrize('workers', [0, 1])
def test_in_a_dataloader(workers):
    a, b = (KINDS['proportional'](blocks(30)).prefetch(2) for _ in range(2))
    take(a, 3)
    take(b, 3)
    assert same(list(DataLoader(a, batch_size=None, num_workers=workers)), list(b))


SCRIPT = """
import numpy as np
from gymnasium import spaces
from fastrl_replay.all import *
rows = Steps(np.zeros(1, step_dtype(spaces.Box(-9, 9, (2,)), spaces.Discrete(3))))
def forever():
    while True: yield rows
for i, batch in enumerate(PrioritizedReplay(forever(), bs=1, max_sz=9, seed=0).prefetch(2)):
    batch.update_priorities([1.])
    if i == 2: print('ready', flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_ends_it():
    p = subprocess.Popen(
        [sys.executable, '-c', SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert p.stdout.readline() == 'ready\n'
        p.send_signal(signal.SIGINT)
        _, err = p.communicate(timeout=60)
    finally:
        p.kill()
    assert 'KeyboardInterrupt' in err


def test_an_interrupt_loses_no_batch():
    "While the main thread waits for a draw"
    gate, waits = threading.Event(), threading.Event()

    class Waits(ExperienceReplay):
        def sample(self, bs=None):
            if self.batches == 2:
                waits.set()
                gate.wait(60)
            return super().sample(bs)

    how = dict(bs=1, max_sz=50, seed=0, freeze_memory=True)
    replay, alone = Waits(blocks(9), **how), ExperienceReplay(blocks(9), **how)
    for r in replay, alone:
        r.add(rows_of(30))
    pipe, got = replay.prefetch(1), []

    def interrupt():
        waits.wait(60)
        while len(got) < 2:
            time.sleep(0.001)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        for batch in pipe:
            got.append(batch)
    gate.set()
    thread.join(60)
    assert len(got) == 2
    assert same(got + take(pipe, 5), take(alone, 7))


def ends(f, timeout=60):
    "Run it in a process that is forked; it must end well, and soon"
    child = multiprocessing.get_context('fork').Process(target=f)
    child.start()
    child.join(timeout)
    if hung := child.is_alive():
        child.kill()
    assert not hung and child.exitcode == 0


def test_a_fork_finds_a_replay_that_can_be_used():
    "While a thread adds: in the child the lock is free, and no row is half there"
    replay, over = KINDS['proportional'](None, max_sz=3000), threading.Event()
    replay.add(rows_of(3000))

    def add():
        while not over.is_set():
            replay.add(rows_of(2000, replay.memory.inserted))

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
        ends(child)
    over.set()
    thread.join()


# ---- training ----


def test_closing_ends_the_thread_and_loses_no_batch():
    before = set(threads())
    pipe, twin = (
        PrioritizedReplay(blocks(20), bs=2, max_sz=9, seed=0).prefetch(2) for _ in range(2)
    )
    first, whole = take(pipe, 5), take(twin, 10)
    twin.close()
    pipe.close()
    assert set(threads()) <= before
    assert same(first + take(pipe, 5), whole)


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
