"""Workers under attack: Ctrl-C anywhere, passes left at any item, processes killed or stopped."""

import os, random, signal, threading, time, warnings
from itertools import islice

import gymnasium as gym, numpy as np, pytest
from torch import multiprocessing as mp
from torch.utils.data import DataLoader

from fastrl_replay.all import *
from fastrl_replay.parallel.processes import Processes
from fastrl_replay.testing import through_file
from workers import FORK, no_process_is_left, short, within, zeros  # noqa: F401

pytestmark = pytest.mark.slow


def steps(blocks):
    return [(int(b.env_id), int(b.episode_n), int(b.step_n)) for b in blocks]


# ---- passes that end ----


def three():
    return ScriptedEnv(**script(2, -1, 4))


def finite(workers, chunk):
    return GymStepper(three, zeros).header(5).parallel(workers, chunk, 'fork')


@pytest.mark.parametrize('workers, chunk', [(1, 4), (2, 2)])
def test_a_pass_that_is_broken_off_anywhere_is_gone_on_with(workers, chunk):
    "Also in its last chunks, or just at its end: the rest comes first, then a whole pass"
    whole = finite(workers, chunk)
    first, second = steps(whole), steps(whole)
    whole.close()
    for k in range(1, 5 * workers + 1):
        pipe = finite(workers, chunk)
        got = steps(islice(pipe, k))
        if k < 5 * workers:
            got += steps(pipe)
        assert got == first
        assert steps(pipe) == second, f'broken off after {k}'
        pipe.close()


def test_a_chain_that_is_restored_in_the_middle_of_a_pass_ends_it_first():
    for k in range(0, 11, 2):
        a, b = finite(2, 2), finite(2, 2)
        batches = iter(a)
        for _ in range(k):
            next(batches)
        b.load_state_dict(through_file(a.state_dict()))
        assert [steps(p) for p in (batches, a, a)] == [steps(p) for p in (b, b, b)], k
        a.close()
        b.close()


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
    "Send Ctrl-C after so many seconds, and again if a callback got it; did it come while this ran?"
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    came = False
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
        f()
    except KeyboardInterrupt:
        came = True
    while signal.getitimer(signal.ITIMER_REAL)[0]:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            came = True
    signal.signal(signal.SIGALRM, before)
    return came


FIRST = [(0, 1, 1), (0, 1, 2), (1, 1, 1), (1, 1, 2), (0, 1, 3), (0, 2, 1), (1, 1, 3), (1, 2, 1)]


def test_interrupted_while_saving():
    "An answer no longer waited for is not taken for the next chunk, nor for the next state"
    pipe = GymStepper(slowly, zeros).parallel(2, chunk=2, **FORK)
    seen = steps(islice(pipe, 3))
    interrupted(pipe.state_dict, 0.1)
    seen += steps(islice(pipe, 2))
    interrupted(pipe.state_dict, 0.4)
    state = through_file(pipe.state_dict())
    seen += steps(islice(pipe, 3))
    pipe.close()
    assert seen == FIRST
    twin = GymStepper(slowly, zeros).parallel(2, chunk=2, **FORK)
    twin.load_state_dict(state)
    assert steps(islice(twin, 3)) == FIRST[5:]
    twin.close()


class Counts(gym.Env):
    "Show the number of steps in an observation larger than a pipe; the reward is its process"

    observation_space = gym.spaces.Box(-np.inf, np.inf, (500_000,))
    action_space = gym.spaces.Discrete(2)
    t = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(500_000, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(500_000, self.t, np.float32), float(os.getpid()), False, False, {}


def counted(pipe, n, seen):
    "Take n blocks, which are whole; add the numbers of their steps to those of each worker"
    for block in islice(pipe, n):
        assert (block.next_state[0, [0, -1]] == block.step_n).all()
        seen[int(block.env_id)].append(int(block.step_n))
    return seen


def test_interrupted_at_any_moment():
    "It goes on, in order, and nothing comes twice. The item that was just coming out may be lost"
    rng, seen, interrupts = random.Random(0), {0: [], 1: []}, 0
    pipe = GymStepper(Counts, zeros).parallel(2, chunk=2, **FORK)
    for k in range(40):
        what = pipe.state_dict if k % 10 == 9 else lambda: counted(pipe, 10**6, seen)
        interrupts += interrupted(what, 1e-3 + rng.random() * 0.05)
    counted(pipe, 8, seen)
    pipe.close()
    lost = [b - a - 1 for s in seen.values() for a, b in zip(s, s[1:])]
    assert interrupts > 20
    assert min(lost) == 0
    assert sum(lost) <= interrupts


def test_a_second_ctrl_c_does_not_wait_for_a_hung_environment():
    class Hung(ScriptedEnv):
        def step(self, action):
            time.sleep(60)

    pipe = GymStepper(lambda: Hung(**script(3)), zeros).parallel(2, **FORK)
    assert interrupted(lambda: next(iter(pipe)), 0.3)
    assert interrupted(pipe.close, 0.3)
    until = time.monotonic() + 5
    while mp.active_children() and time.monotonic() < until:
        time.sleep(0.05)
    assert not mp.active_children()


# ---- other processes ----


def test_a_copy_of_this_process_leaves_its_workers_alone():
    "A DataLoader that forks while they run"
    pipe = GymStepper(short, zeros).parallel(2, chunk=2, **FORK)
    seen = steps(islice(pipe, 3))
    with pytest.raises(AssertionError, match='daemonic processes are not allowed'):
        next(iter(DataLoader(pipe, batch_size=None, num_workers=1, multiprocessing_context='fork')))
    assert seen + steps(islice(pipe, 5)) == FIRST
    pipe.close()


@pytest.mark.parametrize('how', ['closed', 'loaded'])
def test_a_pass_whose_workers_are_gone_is_over(how):
    pipe = GymStepper(short, zeros).parallel(2, chunk=2, **FORK)
    batches = iter(pipe)
    next(batches)
    if how == 'closed':
        pipe.close()
    else:
        pipe.load_state_dict(pipe.state_dict())
    with pytest.raises(RuntimeError, match='its workers were ended.*Remedy: begin a new'):
        next(batches)
    assert steps(islice(pipe, 2)) == (FIRST[:2] if how == 'closed' else FIRST[1:3])
    pipe.close()


class Parent(ScriptedEnv):
    "Has a child that outlives it, and with it all that was open"

    def step(self, action):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize('ordered', [True, False])
def test_the_death_of_a_worker_with_children_is_noticed(ordered):
    env = lambda: Parent(**script(3))
    pipe = GymStepper(env, zeros).parallel(2, ordered=ordered, **FORK)
    with within(60), pytest.raises(WorkerError, match='worker . of 2 failed.*signal SIGKILL'):
        next(iter(pipe))


# ---- workers that are killed or stopped ----


@pytest.mark.parametrize('ordered', [True, False])
def test_killed_at_any_moment(ordered):
    "In the middle of large answers, too; whatever comes is whole and in order"
    rng, seen = random.Random(1), {0: [], 1: []}
    pipe = GymStepper(Counts, zeros).parallel(2, chunk=2, ordered=ordered, restarts=100, **FORK)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for _ in range(10):
            counted(pipe, rng.randrange(1, 9), seen)
            os.kill(rng.choice(mp.active_children()).pid, signal.SIGKILL)
            if rng.random() < 0.3:
                pipe.state_dict()
    stats = pipe.stats()
    pipe.close()
    assert stats['restarts'] >= 5
    assert stats['lag_max'] <= stats['lag_bound']
    assert all(b in (a + 1, 1) for s in seen.values() for a, b in zip(s, s[1:]))


def stoppable(ordered):
    "A chain whose workers are given half a second, and the process of each"
    engine = Processes('fork', patience=0.5)
    pipe = GymStepper(Counts, zeros).parallel(2, chunk=1, ordered=ordered, engine=engine)
    pids = {}
    while len(pids) < 2:
        (block,) = islice(pipe, 1)
        pids[int(block.env_id)] = int(block.reward)
    return pipe, pids


def test_workers_that_are_stopped_are_named_where_they_are_waited_for():
    "They continue where they were stopped"
    pipe, pids = stoppable(ordered=True)
    seen = counted(pipe, 2, {0: [], 1: []})
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(2.5, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids.values()])
    timer.start()
    says = r'worker [01] of 2 has not answered for \d+ seconds; got process \d+'
    with pytest.warns(RuntimeWarning, match=says):
        counted(pipe, 20, seen)
    timer.join()
    pipe.close()
    assert all(np.diff(n).tolist() == [1] * (len(n) - 1) for n in seen.values())


def test_a_worker_that_is_stopped_is_named_and_passed_over_where_another_is_ready():
    pipe, pids = stoppable(ordered=False)
    seen = counted(pipe, 2, {0: [], 1: []})
    os.kill(pids[1], signal.SIGSTOP)
    counted(pipe, 12, seen)
    before, last = seen[1][:], len(seen[0])
    until = time.monotonic() + 60
    with pytest.warns(RuntimeWarning, match=f'got process {pids[1]}'):
        while len(seen[0]) < last + 10 or time.monotonic() < until - 57:
            counted(pipe, 1, seen)
    assert seen[1] == before
    os.kill(pids[1], signal.SIGCONT)
    while seen[1] == before and time.monotonic() < until:
        counted(pipe, 1, seen)
    stats = pipe.stats()
    pipe.close()
    assert stats['restarts'] == 0
    assert all(np.diff(n).tolist() == [1] * (len(n) - 1) for n in seen.values())
