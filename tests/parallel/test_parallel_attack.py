"""Workers under attack: Ctrl-C at any moment, passes that break off at any item, tensors that are no weights, and processes that die while something else is done."""

import fcntl, os, random, re, signal, subprocess, sys, termios, threading, time, warnings
from collections import Counter
from contextlib import contextmanager
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from torch import nn
from torch.utils.data import DataLoader

from fastrl_replay.all import *
from fastrl_replay.parallel.processes import Processes
from fastrl_replay.testing import same, through_file
from workers import FORK, no_process_is_left, short, zeros  # noqa: F401


def three():
    return ScriptedEnv(**script(2, -1, 4))


def steps(blocks):
    return [(int(b.env_id), int(b.episode_n), int(b.step_n)) for b in blocks]


# ---- passes that end ----


def finite(workers=2, chunks=1, chunk=2, n=5, env=three):
    return (
        GymStepper(env, zeros).header(n).parallel(workers, chunks * workers * chunk, chunk, 'fork')
    )


@pytest.mark.parametrize('workers, ahead, chunk', [(1, 1, 4), (2, 1, 2), (2, 2, 2), (2, 3, 4)])
def test_a_pass_that_is_broken_off_anywhere_is_gone_on_with(workers, ahead, chunk):
    "Also in its last chunks, or just at its end: the rest comes first, then a whole pass, in the same order as ever"
    whole = finite(workers, ahead, chunk)
    first, second = steps(whole), steps(whole)
    whole.close()
    for k in range(1, 5 * workers + 1):
        pipe = finite(workers, ahead, chunk)
        got = steps(islice(pipe, k))
        if k < 5 * workers:
            got += steps(pipe)
        assert got == first and steps(pipe) == second, f'broken off after {k}'
        pipe.close()


def test_a_header_of_just_a_pass_can_be_cycled():
    pipe = finite().header(10).cycle(3)
    assert len(steps(pipe)) == 30
    pipe.source.source.close()


@pytest.mark.parametrize(
    'ahead, chunk',
    [
        pytest.param(1, 2, marks=pytest.mark.slow),
        (2, 2),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(2, 5, marks=pytest.mark.slow),
    ],
)
def test_restored_in_the_middle_of_passes_whatever_is_ahead(ahead, chunk):
    "The rest of this pass, and the two that follow"
    for k in range(11):
        a, b = finite(2, ahead, chunk), finite(2, ahead, chunk)
        it = iter(a)
        for _ in range(k):
            next(it)
        b.load_state_dict(through_file(a.state_dict()))
        assert [steps(p) for p in (it, a, a)] == [steps(p) for p in (b, b, b)], f'after {k} items'
        a.close()
        b.close()


def test_passes_of_random_lengths():
    "Workers whose passes end at different items, and which may be empty"

    class Ragged(Pipe):
        "A new number of items in each pass, and in each worker"

        takes_any_item, passes = True, 0

        def __iter__(self):
            self.passes += 1
            n = (self.passes * 5 + worker_info().rank * 3) % 4 if worker_info() else 1
            yield from islice(self.source, n)

    pipe = Ragged(GymStepper(short, zeros)).parallel(2, chunk=1, **FORK)
    lengths = [Counter(e for e, *_ in steps(pipe)) for _ in range(6)]
    assert [(c[0], c[1]) for c in lengths] == [((p * 5) % 4, (p * 5 + 3) % 4) for p in range(1, 7)]
    pipe.close()


# ---- Ctrl-C ----


class Slowly(ScriptedEnv):
    "Takes its time where its state is taken or given"

    def state_dict(self):
        time.sleep(0.3)
        return super().state_dict()

    def load_state_dict(self, state):
        time.sleep(0.3)
        super().load_state_dict(state)


def slowly():
    return Slowly(**script(3, -2))


def interrupted(f, seconds):
    "Was it?"
    t = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    t.start()
    try:
        f()
        t.cancel()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        t.join()


FIRST = [(e, 1, s) for s, e in ((1, 0), (2, 0), (1, 1), (2, 1))] + [
    (0, 1, 3),
    (0, 2, 1),
    (1, 1, 3),
    (1, 2, 1),
]


def test_interrupted_while_saving():
    "The answer that is no longer waited for is not taken for the next chunk, nor for the next state"
    pipe = GymStepper(slowly, zeros).parallel(2, chunk=2, **FORK)
    seen = steps(islice(pipe, 3))
    interrupted(pipe.state_dict, 0.1)
    seen += steps(islice(pipe, 2))
    interrupted(pipe.state_dict, 0.4)
    state = through_file(pipe.state_dict())
    seen += steps(islice(pipe, 3))
    assert seen == FIRST
    twin = GymStepper(slowly, zeros).parallel(2, chunk=2, **FORK)
    twin.load_state_dict(state)
    assert steps(islice(twin, 3)) == FIRST[5:]
    pipe.close()
    twin.close()


def test_interrupted_while_restoring():
    "What was loaded is not lost"
    pipe = GymStepper(slowly, zeros).parallel(2, chunk=2, **FORK)
    list(islice(pipe, 3))
    state = through_file(pipe.state_dict())
    pipe.close()
    twin = GymStepper(slowly, zeros).parallel(2, chunk=2, **FORK)
    twin.load_state_dict(state)
    if not interrupted(lambda: next(iter(twin)), 0.15):
        twin.load_state_dict(state)  # it was too quick for us
    assert steps(islice(twin, 5)) == FIRST[3:]
    twin.close()


class Counts(gym.Env):
    "Says how many steps were made, in a large observation"

    observation_space, action_space, t = (
        gym.spaces.Box(-np.inf, np.inf, (20_000,)),
        gym.spaces.Discrete(2),
        0,
    )

    def reset(self, *, seed=None, options=None):
        return np.zeros(20_000, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(20_000, self.t, np.float32), 1.0, False, False, {}


def test_interrupted_at_any_moment():
    "At the start, between the two halves of an answer, anywhere: it goes on, in order, and nothing comes twice. The item that was just coming out may be lost"
    rng, seen, came = random.Random(0), {0: [], 1: []}, 0

    def tick(*_):
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGALRM, tick)
    pipe = GymStepper(Counts, zeros).parallel(2, chunk=2, **FORK)
    try:
        for k in range(60):
            try:
                try:
                    signal.setitimer(
                        signal.ITIMER_REAL, 1e-4 + rng.random() * 0.02, 0.5
                    )  # again, where a callback of the garbage collector got it
                    if k % 10 == 9:
                        pipe.state_dict()
                    for b in pipe:
                        seen[int(b.env_id)].append((int(b.step_n), came))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                came += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    for b in islice(pipe, 8):
        seen[int(b.env_id)].append((int(b.step_n), came))
    pipe.close()
    lost = [(b - a - 1, now - then) for s in seen.values() for (a, then), (b, now) in zip(s, s[1:])]
    assert (
        came > 50
        and all(0 <= n <= interrupts for n, interrupts in lost)
        and sum(n for n, _ in lost) <= came
    ), lost


def test_a_second_ctrl_c_does_not_wait_for_a_hung_environment():
    class Hung(ScriptedEnv):
        def step(self, action):
            time.sleep(60)

    pipe = GymStepper(lambda: Hung(**script(3)), zeros).parallel(2, **FORK)
    pipe._start()
    processes = [w.process for w in pipe._workers]
    assert interrupted(pipe.close, 0.3)
    for p in processes:
        p.join(5)
    assert not any(p.is_alive() for p in processes) and pipe._workers == []


START = '''
import sys
from itertools import islice
from fastrl_replay.all import *
if __name__ == '__main__':
    pipe = GymStepper('CartPole-v1').parallel(1, method='spawn')
    pipe._start()
    print('started', flush=True)
    try:
        for b in pipe: pass
    except KeyboardInterrupt: pass
    print(len(list(islice(pipe, 5))), flush=True)
    pipe.close()
'''


@pytest.mark.slow
def test_ctrl_c_while_workers_import(tmp_path):
    "Spawned processes are deaf to it from the first"
    (tmp_path / 's.py').write_text(START)
    p = subprocess.Popen(
        [sys.executable, tmp_path / 's.py'],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert p.stdout.readline() == 'started\n'
    time.sleep(0.1)
    os.killpg(p.pid, signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert (out, err) == ('5\n', '')


# ---- tensors that are no weights ----


class Walks(gym.Env):
    "Keeps where it is in a tensor"

    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (1,)), gym.spaces.Discrete(2)

    def __init__(self):
        self.pos = torch.zeros(1)

    def reset(self, *, seed=None, options=None):
        self.pos.zero_()
        return self.pos.numpy().copy(), {}

    def step(self, action):
        self.pos += 1
        return self.pos.numpy().copy(), 1.0, False, False, {}


class Sways(nn.Module):
    "Has a noise that goes on by itself, and a weight"

    def __init__(self):
        super().__init__()
        self.noise, self.weight = torch.zeros(()), nn.Parameter(torch.zeros(()))

    def forward(self, state):
        self.noise += 1
        return dict(
            action=[0] * len(state),
            noise=self.noise.expand(len(state)).clone(),
            w=self.weight.expand(len(state)),
        )


def test_what_did_not_change_here_is_left_alone_there():
    "The state of an environment that was given as it is, and of a policy; the weights come all the same"
    policy = Sways()
    pipe, seen = GymStepper(Walks(), policy).parallel(1, chunk=2, **FORK), []
    for b in islice(pipe, 9):
        seen.append((float(b.next_state), float(b.noise)))
        with torch.no_grad():
            policy.weight += 1
    assert seen == [(i, i) for i in range(1, 10)] and float(b.w) > 3
    pipe.close()


ODD = dict(
    meta=lambda: torch.zeros(3, device='meta'),
    bfloat=lambda: torch.ones(3, dtype=torch.bfloat16),
    conj=lambda: torch.ones(3, dtype=torch.complex64).conj(),
    sparse=lambda: torch.eye(3).to_sparse(),
    expanded=lambda: torch.ones(1).expand(3, 1),
    empty=lambda: torch.zeros(0, 3),
    nan=lambda: torch.full((3,), torch.nan),
)


@pytest.mark.parametrize('kind', ODD)
def test_tensors_of_all_kinds_travel(kind):
    t = ODD[kind]()

    def policy(state):
        return dict(
            action=[0] * len(state),
            x=torch.full(
                (len(state),),
                -1.0 if t.is_meta else float(t.to_dense().to(torch.complex64).sum().real),
            ),
        )

    pipe = GymStepper(short, policy).parallel(1, chunk=1, **FORK)
    want = dict(meta=-1, empty=0, nan=np.nan).get(kind, 3)
    np.testing.assert_equal([float(b.x) for b in islice(pipe, 3)], [want] * 3)
    pipe.close()


def test_views_of_one_storage_follow():
    base = torch.zeros(4)
    part = base[:2]

    def policy(state):
        return dict(action=[0] * len(state), x=(base.sum() + 10 * part.sum()).expand(len(state)))

    pipe = GymStepper(short, policy).parallel(1, chunk=1, **FORK)
    assert [float(x.x) for x in islice(pipe, 2)] == [0, 0]
    base.fill_(1)
    assert [float(x.x) for x in islice(pipe, 3)][-1] == 24
    pipe.close()


# ---- items ----


def tensor(block):
    return block.next_state.clone()


def test_tensors_come_by_value():
    "No file stays open for each; those of a worker that has gone can still be read"
    pipe = GymStepper(short, zeros).map(tensor).parallel(2, **FORK)
    next(iter(pipe))
    before = len(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else 0
    kept = list(islice(pipe, 200))
    if before:
        assert len(os.listdir('/proc/self/fd')) <= before + 5
    assert all(k.shape == (1, 2) for k in kept)
    pipe.close()


def pair(b):
    return (b, 1)


def nested(b):
    return dict(s=[b, (b, None)], t=b.state.clone())


def nothing(b):
    return None


@pytest.mark.parametrize('fn', [pair, nested, nothing])
def test_items_of_all_kinds_are_saved(fn):
    a, b = (GymStepper(short, zeros).map(fn).parallel(2, chunk=2, **FORK) for _ in range(2))
    list(islice(a, 3))
    b.load_state_dict(through_file(a.state_dict()))
    x, y = list(islice(a, 7)), list(islice(b, 7))
    assert x[0] is None or same(x, y)
    assert x[0] is not None or x == y
    a.close()
    b.close()


def test_items_share_no_memory_with_a_state():
    a, b = (GymStepper(short, zeros).parallel(2, **FORK) for _ in range(2))
    list(islice(a, 5))
    state, then = (through_file(a.state_dict()) for _ in range(2))
    b.load_state_dict(state)
    for block in islice(b, 7):
        block.rows['reward'] = -7
    assert same(state, then)
    a.close()
    b.close()


# ---- other processes, other iterators ----


def test_a_copy_of_this_process_leaves_its_workers_alone():
    "A DataLoader that forks while they run"
    pipe = GymStepper(short, zeros).parallel(2, chunk=2, **FORK)
    seen = steps(islice(pipe, 3))
    with pytest.raises(RuntimeError, match="a worker process can't have workers"):
        next(iter(DataLoader(pipe, batch_size=None, num_workers=1, multiprocessing_context='fork')))
    assert seen + steps(islice(pipe, 5)) == FIRST
    pipe.close()


@pytest.mark.parametrize('how', ['closed', 'loaded'])
def test_a_pass_whose_workers_are_gone_says_so(how):
    pipe = GymStepper(short, zeros).parallel(2, chunk=2, **FORK)
    it = iter(pipe)
    next(it)
    state = pipe.state_dict()
    pipe.close() if how == 'closed' else pipe.load_state_dict(state)
    with pytest.raises(
        RuntimeError,
        match='Parallel: its workers were ended, or others restored, in the middle of a pass.*Remedy: begin another',
    ):
        next(it)
    assert steps(islice(pipe, 2)) == (FIRST[:2] if how == 'closed' else FIRST[1:3])
    pipe.close()


def test_two_at_once_and_two_iterators():
    a, b = (GymStepper('CartPole-v1', seed=0).parallel(2, **FORK) for _ in range(2))
    assert all(x == y for x, y in islice(zip(a, b), 20))
    processes = [w.process for w in a._workers]
    a.close()
    assert [p.exitcode for p in processes] == [0, 0] and len(list(islice(b, 9))) == 9
    old, new = iter(b), iter(b)
    next(old)
    next(new)
    with pytest.raises(RuntimeError):
        next(old)  # torch allows one
    b.close()


@pytest.fixture
def gate(tmp_path):
    "A file that is there until the test is over"
    (tmp_path / 'gate').touch()
    yield tmp_path / 'gate'
    (tmp_path / 'gate').unlink()


def have_child(gate):
    "A process that has all open that this one has, until the test is over"
    if os.fork() == 0:
        while os.path.exists(gate):
            time.sleep(0.1)
        os._exit(0)


class Orphaning(ScriptedEnv):
    def __init__(self, gate, **kw):
        super().__init__(**kw)
        self.gate = gate

    def step(self, action):
        have_child(self.gate)
        os.kill(os.getpid(), signal.SIGKILL)


class Parent(ScriptedEnv):
    "Has a child that outlives it, and with it all that was open"

    def step(self, action):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_death_of_a_worker_with_children_is_noticed():
    pipe = GymStepper(lambda: Parent(**script(3)), zeros).parallel(1, **FORK)
    with pytest.raises(WorkerError, match='worker 0 of 1 failed.*signal SIGKILL'):
        next(iter(pipe))


@pytest.mark.parametrize('kw', [{}, dict(ordered=False), dict(ordered=False, restarts=3)])
def test_the_death_of_workers_with_children_is_noticed_in_any_order(gate, kw):
    with (
        within(120),
        pytest.raises(WorkerError, match='worker . of 2 failed.*signal SIGKILL'),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter('ignore')
        next(
            iter(GymStepper(lambda: Orphaning(gate, **script(3)), zeros).parallel(2, **kw, **FORK))
        )


# ---- answers that stop in the middle ----


class Late(BaseException):
    "No `Exception`: nothing takes it for the error of a worker"


@contextmanager
def within(seconds):
    "What takes longer is ended, and fails: nothing hangs"

    def late(*_):
        raise Late(f'{seconds} seconds')

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Large(gym.Env):
    "Observations of 4 MB that say how many steps were made; where asked, a child has all open that the worker had"

    observation_space, action_space, t = (
        gym.spaces.Box(-np.inf, np.inf, (1_000_000,)),
        gym.spaces.Discrete(2),
        0,
    )

    def __init__(self, gate=None):
        self.gate = gate

    def reset(self, *, seed=None, options=None):
        if self.gate:
            have_child(self.gate)
        return np.zeros(1_000_000, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1_000_000, self.t, np.float32), 1.0, False, False, {}


def large(gate=None, patience=300, **kw):
    return GymStepper(lambda: Large(gate), zeros).parallel(
        2, chunk=1, engine=Processes('fork', patience), **kw
    )


def numbers(blocks):
    "Of steps, by worker; blocks are whole"
    found = {0: [], 1: []}
    for b in blocks:
        assert (b.next_state[0, [0, 999_999]] == b.step_n).all()
        found[int(b.env_id)].append(int(b.step_n))
    return found


def in_the_middle(pipe, it, seen, *ranks):
    "The processes of workers, as soon as of each a part of an answer has been sent and the rest can't be; what is taken before is added to `seen`"

    def sent(r):
        return int.from_bytes(
            fcntl.ioctl(pipe._workers[r].conn.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder
        )

    def all_sent():
        return all(50_000 < sent(r) < 1_000_000 for r in ranks)

    while (
        True
    ):  # a worker that has not been heard yet, or whose answers lie here, has been asked for none
        limit = time.monotonic() + 2
        while not all_sent() and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(0.1)
        if all_sent():
            return [pipe._workers[r].process.pid for r in ranks]
        add(seen, numbers(islice(it, 1)))


@contextmanager
def running(n=2, **kw):
    "The chain, its pass, and the steps of the first blocks; all of it within two minutes"
    with within(120):
        pipe = large(**kw)
        it = iter(pipe)
        yield pipe, it, numbers(islice(it, n))
        pipe.close()


def add(seen, found):
    for k, v in found.items():
        seen[k] += v


@pytest.mark.parametrize('restarts', [3, 0])
@pytest.mark.parametrize('child', [True, False])
@pytest.mark.parametrize('ordered', [True, False])
def test_a_worker_is_killed_in_the_middle_of_an_answer(gate, ordered, child, restarts):
    "Also where a process that its environment has started holds the pipe"
    with running(2, gate=gate if child else None, ordered=ordered, restarts=restarts) as (
        pipe,
        it,
        seen,
    ):
        os.kill(*in_the_middle(pipe, it, seen, 1), signal.SIGKILL)
        if restarts:
            with pytest.warns(
                RuntimeWarning,
                match='worker 1 of 2 failed, restart 1 of 3; got process .* signal SIGKILL',
            ):
                while pipe.restarted == 0:
                    next(it)
            found = {0: [], 1: []}
            while not (found[0] and found[1]):
                add(found, numbers(islice(it, 4)))
            assert found[1][0] == 1
        else:
            with pytest.raises(WorkerError, match='worker 1 of 2 failed.*signal SIGKILL'):
                list(islice(it, 1000))


@pytest.mark.parametrize('child, restarts', [(True, 3), (False, 0)])
def test_a_worker_that_is_stopped_is_passed_over(gate, child, restarts):
    "In the middle of an answer; when it goes on, the rest of it comes"
    with running(2, gate=gate if child else None, ordered=False, restarts=restarts) as (
        pipe,
        it,
        before,
    ):
        [pid] = in_the_middle(pipe, it, before, 1)
        os.kill(pid, signal.SIGSTOP)
        assert [len(n) for n in numbers(islice(it, 12)).values()] == [12, 0]
        os.kill(pid, signal.SIGCONT)
        later = []
        while not later:
            later = numbers(islice(it, 2))[1]
        assert later[0] == len(before[1]) + 1 and pipe.restarted == 0


@pytest.mark.parametrize('ordered', [True, False])
def test_a_worker_that_is_stopped_is_named_where_it_is_waited_for(ordered):
    "With what can be done; it goes on where it was stopped"
    with running(4, ordered=ordered, patience=0.5) as (pipe, it, seen):
        pids = in_the_middle(pipe, it, seen, 0, 1)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        t = threading.Timer(2.5, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids])
        t.start()
        with pytest.warns(
            RuntimeWarning,
            match=r'worker [01] of 2 has given no answer for \d+ seconds; got process \d+ is stopped: `kill -CONT \d+` lets it go on; [\d_]+ of [\d_]+ bytes of its answer have come',
        ):
            add(seen, numbers(islice(it, 8)))
        t.join()
        assert all(n == [*range(1, len(n) + 1)] for n in seen.values())


ORPHANS = """
import ctypes, os, sys, threading
from fastrl_replay.all import *
from workers import zeros
class Keeps(ScriptedEnv):
    "Hangs in C, and keeps the GIL"
    def step(self, action):
        if self.made == 5: ctypes.PyDLL(None).sleep(300)
        self.made = getattr(self, 'made', 0) + 1
        return super().step(action)
    made = 0
def main():
    pipe = GymStepper(lambda: Keeps(**script(3, -2)), zeros).parallel(2, chunk=1, method=sys.argv[1])
    it = iter(pipe)
    for _ in range(8): next(it)
    print(*[w.process.pid for w in pipe._workers], flush=True)
    for _ in it: pass
if __name__ == '__main__': main()
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='only Linux ends processes with their parent')
@pytest.mark.parametrize('method', ['fork', pytest.param('spawn', marks=pytest.mark.slow)])
def test_workers_that_hang_in_c_end_with_a_killed_learner(tmp_path, method):
    "Their thread that looks for it can't run. (A fork server lives as long as its children, and they as long as it.)"
    (tmp_path / 'orphans.py').write_text(ORPHANS)
    p = subprocess.Popen(
        [sys.executable, tmp_path / 'orphans.py', method],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    pids = [int(x) for x in p.stdout.readline().split()]
    time.sleep(0.5)
    p.kill()
    p.wait()
    end = time.monotonic() + 10

    def left():
        return [
            pid
            for pid in pids
            if os.path.exists(f'/proc/{pid}')
            and open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] != 'Z'
        ]

    while left() and time.monotonic() < end:
        time.sleep(0.05)
    found = left()
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    assert len(pids) == 2 and not found


def test_a_worker_that_is_stopped_is_named_where_others_go_on():
    "Else nothing says that a part of the memory is not drawn from"
    with within(120):
        source = GymStepper('CartPole-v1', seed=0).prioritized_replay(bs=4, max_sz=100, seed=0)
        pipe = source.parallel(2, chunk=1, ordered=False, engine=Processes('fork', patience=2.0))
        it = iter(pipe)
        for _ in range(9):
            next(it)
        pid = pipe._workers[1].process.pid
        os.kill(pid, signal.SIGSTOP)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter('always')
            end = time.monotonic() + 4.5
            while time.monotonic() < end:
                next(it)
                time.sleep(0.01)
        assert [re.sub(r'\d+', 'N', str(w.message))[:103] for w in told] in (
            [
                'Parallel: worker N of N has given no answer for N seconds; got process N is stopped: `kill -CONT N` let'
            ]
            * k
            for k in (1, 2)
        ), told
        os.kill(pid, signal.SIGCONT)
        pipe.close()


@pytest.mark.parametrize('child, ordered', [(True, True), (False, False)])
@pytest.mark.parametrize('what', [next, 'state_dict'])
def test_ctrl_c_works_while_a_stopped_worker_is_waited_for(gate, what, child, ordered):
    "And nothing is lost by it"
    with running(4, gate=gate if child else None, ordered=ordered) as (pipe, it, seen):
        pids = in_the_middle(pipe, it, seen, 0, 1)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for _ in range(2):
            began = time.monotonic()
            assert (
                interrupted((lambda: next(iter(pipe))) if what is next else pipe.state_dict, 0.5)
                and time.monotonic() - began < 5
            )
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        add(seen, numbers(islice(pipe, 8)))
        assert all(n == [*range(1, len(n) + 1)] for n in seen.values())


def test_stopped_workers_are_replaced_when_they_are_killed_and_don_t_hold_up_the_end(gate):
    with running(2, gate=gate, restarts=3) as (pipe, it, seen):
        [pid] = in_the_middle(pipe, it, seen, 0)
        os.kill(pid, signal.SIGSTOP)
        t = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
        t.start()
        with pytest.warns(RuntimeWarning, match='worker 0 of 2 failed, restart 1 of 3'):
            assert [len(n) for n in numbers(islice(it, 4)).values()] == [2, 2]
        os.kill(*in_the_middle(pipe, it, seen, 1), signal.SIGSTOP)


# ---- bad input ----


def test_a_state_of_other_environments_gives_no_item():
    "It is refused when it is loaded; where functions make the environments, before a block of it is handed on, and again"
    known = GymStepper(['CartPole-v1'] * 2, seed=0).parallel(2, **FORK)
    a, b = (
        GymStepper([lambda: gym.make('CartPole-v1')] * n, seed=0).parallel(2, **FORK)
        for n in (1, 2)
    )
    list(islice(a, 5))
    with pytest.raises(
        StateError, match='environments are others; got 1 environments; expected 2 environments'
    ):
        known.load_state_dict(a.state_dict())
    b.load_state_dict(a.state_dict())
    for _ in range(2):
        with pytest.raises(
            WorkerError,
            match='worker 0 could not be restored; got StateError: GymStepper: the saved environments are others',
        ):
            next(iter(b))
    assert b._workers == []
    a.close()


class Mortal(ScriptedEnv):
    made = 0

    def step(self, action):
        self.made += 1
        if self.made == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_a_warning_that_is_an_error_leaves_a_new_worker():
    pipe, told = (
        GymStepper(lambda: Mortal(**script(3, -2)), zeros).parallel(1, chunk=1, restarts=3, **FORK),
        0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        seen = []
        for _ in range(3):
            try:
                for b in islice(pipe, 3):
                    seen.append(int(b.step_n))
            except RuntimeWarning:
                told += 1
    assert told == 3 and seen == [1, 2] * 3
    pipe.close()


def test_numbers_of_numpy():
    "They are taken, and a state with them can be read"
    a, b = (
        GymStepper('CartPole-v1', seed=0).parallel(np.int64(2), np.int64(1), np.int32(2), **FORK)
        for _ in range(2)
    )
    list(islice(a, 3))
    b.load_state_dict(through_file(a.state_dict()))
    assert list(islice(a, 5)) == list(islice(b, 5))
    a.close()
    b.close()


def test_killed_at_any_moment():
    "Large blocks are under way; with restarts it goes on, and whatever comes is whole and in order"
    rng, seen = random.Random(1), {0: [], 1: []}
    pipe = GymStepper(Counts, zeros).parallel(2, ahead=8, chunk=2, restarts=100, **FORK)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for _ in range(12):
            for b in islice(pipe, rng.randrange(1, 9)):
                assert (b.next_state == b.step_n[:, None]).all()
                seen[int(b.env_id)].append(int(b.step_n))
            os.kill(rng.choice(pipe._workers).process.pid, signal.SIGKILL)
            if rng.random() < 0.3:
                pipe.state_dict()
    assert pipe.restarted >= 6 and pipe.stats()['lag_max'] <= pipe.stats()['lag_bound']
    assert all(b in (a + 1, 1) for s in seen.values() for a, b in zip(s, s[1:]))
    pipe.close()
