"""Worker processes: the same stream as without, new weights, reported crashes, none left over."""

import os, random, signal, subprocess, sys, time
from functools import partial
from itertools import islice
from pathlib import Path

import gymnasium as gym, numpy as np, pytest, torch
from hypothesis import given, strategies as st
from torch import multiprocessing as mp, nn

from fastrl_replay.all import *
from fastrl_replay.testing import same, through_file
from strategies import cases
from workers import FORK, learns_the_same, no_process_is_left, scripted, short, within, zeros  # noqa: F401

BOX, TWO = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Discrete(2)
spawn_is_slow = pytest.mark.parametrize(
    'method', ['fork', pytest.param('spawn', marks=pytest.mark.slow)]
)


def rows(blocks):
    return np.concatenate([b.rows for b in blocks])


def by_env(pipe, n, envs):
    "The first `n` rows of each environment"
    all = rows(islice(pipe, n * envs))
    return [all[all['env_id'] == e][:n] for e in range(envs)]


def same_envs(a, b):
    return len(a) == len(b) and all(len(x) == len(y) and (x == y).all() for x, y in zip(a, b))


# ---- the same as without workers ----


@spawn_is_slow
def test_workers_make_what_one_process_makes(method):
    "Numbers, seeds and rows, as if all environments were here; n-step rows too"
    alone = GymStepper(['CartPole-v1'] * 4, seed=5).n_step(3, 0.9)
    pipe = GymStepper(['CartPole-v1'] * 2, seed=5).n_step(3, 0.9).parallel(2, method=method)
    assert same_envs(by_env(pipe, 40, 4), by_env(alone, 40, 4))
    pipe.close()


def test_vector_environments_have_their_numbers_and_seeds():
    def vector(n):
        return gym.vector.SyncVectorEnv(
            [partial(gym.make, 'CartPole-v1')] * n, autoreset_mode='SameStep'
        )

    alone = GymStepper(partial(vector, 6), seed=1)
    pipe = GymStepper([partial(vector, 1), partial(vector, 1)], seed=1).parallel(3, **FORK)
    assert same_envs(by_env(pipe, 30, 6), by_env(alone, 30, 6))
    pipe.close()


def test_one_worker_gives_the_very_stream():
    "Also with a policy that draws random numbers"

    def stepper():
        return GymStepper(['CartPole-v1'] * 3, EpsGreedy(net, 0.5, seed=1), seed=0)

    net = value_net(BOX, TWO, [8])
    pipe = stepper().parallel(1, chunk=3, **FORK)
    assert list(islice(pipe, 50)) == list(islice(stepper(), 50))
    assert list(islice(stepper().parallel(0), 20)) == list(islice(stepper(), 20))
    pipe.close()


def test_workers_act_by_the_table_that_is_learned():
    "was: a table was an array that workers got once, so they always acted by its initial zeros"
    table = QTable(gym.spaces.Discrete(16), gym.spaces.Discrete(4))
    pipe = GymStepper(['FrozenLake-v1'] * 2, EpsGreedy(table, 0.0), seed=0).parallel(
        2, chunk=1, **FORK
    )
    blocks = iter(pipe)
    assert next(blocks).action.tolist() == [0, 0]
    table.values[:, 2] = 1
    for _ in range(2 * pipe.stats()['lag_bound'] + 2):
        block = next(blocks)
    assert block.action.tolist() == [2, 2]
    pipe.close()


def test_dice_differ_between_workers_and_follow_from_the_seed():
    def actions(seed):
        pipe = GymStepper(
            short, EpsGreedy(lambda s: torch.zeros(len(s), 3), 1.0, seed=seed)
        ).parallel(2, **FORK)
        found = by_env(pipe, 40, 2)
        pipe.close()
        return [r['action'].tolist() for r in found]

    a, b = actions(0)
    assert a != b and actions(0) == [a, b] and actions(1) != [a, b]


class Globally:
    "A policy that uses the generators of the whole process"

    def __call__(self, state):
        return dict(
            action=[0] * len(state),
            t=torch.rand(len(state)),
            n=np.random.rand(len(state)),
            p=np.array([random.random() for _ in range(len(state))]),
        )


def test_environments_without_a_seed_differ():
    "Even where each worker has a copy of one environment that was seeded and stepped before"
    env = gym.make('CartPole-v1')
    env.reset(seed=0)
    pipe = GymStepper(env).parallel(2, **FORK)
    a, b = by_env(pipe, 5, 2)
    assert (a['state'][:4] != b['state'][:4]).any()
    pipe.close()


@given(
    workers=st.integers(1, 3),
    chunk=st.integers(1, 5),
    lengths=st.lists(st.integers(-3, 3).filter(bool), min_size=1, max_size=3),
)
@cases(12)
def test_chunks_come_in_turn(workers, chunk, lengths):
    """Rows of each environment in order, chunks in turn, and ages within the bound.

    Whatever the numbers, also with episodes of one step and truncations."""

    def chain():
        return GymStepper(partial(scripted, *lengths), zeros)

    n, pipe = (4 * chunk * workers + 1, chain().parallel(workers, chunk, 'fork'))
    blocks = list(islice(pipe, n))
    assert [int(b.env_id) for b in blocks] == [i // chunk % workers for i in range(n)]
    alone = rows(islice(chain(), n))
    for w in range(workers):
        mine = rows(b for b in blocks if int(b.env_id) == w)
        mine['env_id'] = 0
        assert (mine == alone[: len(mine)]).all()
    s = pipe.stats()
    assert s['items'] == n
    assert s['lag_max'] <= s['lag_bound'] == (workers + 1) * chunk - 1
    pipe.close()


# ---- weights ----


class Versioned(nn.Module):
    "Says with each action the sum of all its weights, of many kinds"

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3, 2).T)  # not contiguous
        self.register_buffer('b', torch.zeros((), dtype=torch.int64))
        self.register_buffer('none', torch.zeros(0))
        self.register_buffer('flags', torch.zeros(3, dtype=torch.bool))
        self.tied = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.tied[1].weight = self.tied[0].weight
        self.bump(0)

    def bump(self, v):
        with torch.no_grad():
            self.a.fill_(v)
            self.b.fill_(v)
            self.flags.fill_(v % 2 == 1)
            for l in self.tied:
                l.weight.fill_(v)
                l.bias.zero_()

    def forward(self, state):
        n, tied = len(state), self.tied[1].weight is self.tied[0].weight
        assert self.flags.all() == (self.b % 2 == 1) and tied and self.none.numel() == 0
        v = (self.a.sum() + self.b + self.tied[1](torch.ones(1, 1)).sum()) / 8
        return dict(action=[0] * n, version=v.expand(n))


@spawn_is_slow
def test_weights_arrive_whole_and_in_time(method):
    policy = Versioned()
    pipe, seen = GymStepper(short, policy).parallel(2, chunk=2, method=method), []
    for i, block in enumerate(islice(pipe, 30)):
        seen.append(float(block.version))
        policy.bump(i + 1)
    at = [0] * 4 + [
        2 * (i // 2) - 4 for i in range(4, 30)
    ]  # asked for when its worker's chunk before it began: two chunks, 4 items, earlier
    assert seen == at
    assert pipe.stats()['lag_max'] == 5 == pipe.stats()['lag_bound']
    pipe.close()


def test_a_learner_is_followed():
    "Updates by an optimizer, and weights that are loaded or replaced by .data"
    net = nn.Linear(1, 1, bias=False)

    def policy(state):
        return dict(action=[0] * len(state), w=net.weight.detach()[0].expand(len(state)))

    pipe = GymStepper(short, policy).parallel(1, chunk=1, **FORK)

    def now():
        return [float(block.w) for block in islice(pipe, 3)][-1]

    assert now() == net.weight.item()
    net(torch.ones(1, 1)).sum().backward()
    torch.optim.Adam(net.parameters(), lr=0.5, fused=True).step()
    assert now() == net.weight.item()
    net.load_state_dict(dict(weight=torch.full((1, 1), 7.0)))
    assert now() == 7
    net.weight.data = torch.full((1, 1), 9.0)
    assert now() == 9
    pipe.close()


def test_training_can_be_repeated_and_resumed():
    "Two workers, prioritized replay, a learner: equal losses bit for bit, also from a checkpoint"

    def chain():
        torch.manual_seed(0)
        net = value_net(BOX, TWO, [16])
        return (
            GymStepper(
                ['CartPole-v1'] * 2, EpsGreedy(net, LinearSchedule(1, 0.1, 300), seed=0), seed=0
            )
            .n_step(3, 0.99)
            .parallel(2, chunk=3, **FORK)
            .prioritized_replay(bs=16, max_sz=200, warmup=40, seed=0)
            .dqn(net)
        )

    learns_the_same(chain, 35, 40)


# ---- saved and restored ----


def exact(chain, cuts, n=25):
    "A restored chain gives what the saved one gives"
    for k in cuts:
        a, b = chain(), chain()
        it = iter(a)
        for _ in range(k):
            next(it)
        state = through_file(a.state_dict())
        b.load_state_dict(state)
        x, y = list(islice(it, n)), list(islice(b, n))  # the same pass: it may be at its end
        assert x == y, f'after {k} items'
        assert through_file(b.state_dict()).keys() == state.keys()
        a.close()
        b.close()


@pytest.mark.parametrize(
    'after',
    [range(0, 14, 3), pytest.param(range(0, 14), marks=pytest.mark.slow)],
    ids=['some', 'all'],
)
def test_restored_in_the_middle_of_chunks(after):
    exact(
        lambda: GymStepper(['CartPole-v1'] * 2, seed=0).n_step(3, 0.9).parallel(2, chunk=3, **FORK),
        after,
    )


def test_restored_with_policies_of_all_kinds():
    def globally():
        torch.manual_seed(0)
        return GymStepper(['CartPole-v1'] * 2, Globally(), seed=0).parallel(2, **FORK)

    net = RecurrentNet(BOX, TWO, 4)
    exact(globally, [7])
    exact(
        lambda: GymStepper(['CartPole-v1'] * 2, EpsGreedy(net, 0.3, seed=0), seed=0).parallel(
            2, **FORK
        ),
        [7],
    )


def test_states_of_other_chains_are_refused():
    def chain(n=2, **kw):
        steps = GymStepper('CartPole-v1', seed=0).n_step(n, 0.9)
        return steps.parallel(**{**dict(num_workers=2, method='fork'), **kw})

    with chain() as saved:
        list(islice(saved, 5))
        state = saved.state_dict()
    for kw in dict(num_workers=3), dict(chunk=1):
        (name,) = kw
        with pytest.raises(ValueError, match=rf"is invalid, in \['{name}'\]"):
            chain(**kw).load_state_dict(state)
    with pytest.raises(ValueError, match=r'NStep: .*arguments.*got .2, 0.9'):
        chain(3).load_state_dict(state)
    twin = chain()
    twin.load_state_dict(state)
    assert same(twin.state_dict(), state)  # saved before it was used


def test_items_of_all_kinds_are_saved():
    def nested(block):
        return dict(s=[block, (block, None)], t=block.state.clone(), n=block.rows['reward'].mean())

    a, b = (GymStepper(short, zeros).map(nested).parallel(2, chunk=2, **FORK) for _ in range(2))
    list(islice(a, 3))
    b.load_state_dict(through_file(a.state_dict()))
    assert same(list(islice(a, 7)), list(islice(b, 7)))
    a.close()
    b.close()


# ---- failures ----


class Fragile(ScriptedEnv):
    "Ends in some way at its fourth step, in one worker"

    def __init__(self, how, worker=1):
        super().__init__(**script(3, -2))
        self.how, self.worker, self.made = how, worker, 0

    def step(self, action):
        from fastrl_replay.pipe import worker_info

        self.made += 1
        if self.made == 4 and worker_info().rank == self.worker:
            self.how()
        return super().step(action)


def fails():
    raise ZeroDivisionError('the simulator')


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves():
    os._exit(3)


@spawn_is_slow
def test_an_exception_is_named_with_its_traceback(method):
    pipe, seen = GymStepper(partial(Fragile, fails), zeros).parallel(2, method=method), []
    with pytest.raises(WorkerError) as e:
        for block in pipe:
            seen.append((int(block.env_id), int(block.step_n)))
    text = str(e.value)
    assert text.startswith(
        'Parallel: worker 1 of 2 failed; got EnvError: GymStepper: environment 1 '
    )
    assert 'ZeroDivisionError: the simulator' in text
    assert 'Traceback (most recent call last)' in text
    assert [s for s in seen if s[0] == 1] == [(1, 1), (1, 2), (1, 3)]  # what it made before
    assert not mp.active_children()
    assert [int(b.step_n) for b in islice(pipe, 3)] == [1, 2, 3]  # the next pass begins anew
    pipe.close()


@pytest.mark.parametrize('how, said', [(killed, 'signal SIGKILL'), (leaves, 'exit code 3')])
def test_a_death_is_named(how, said):
    pipe = GymStepper(partial(Fragile, how), zeros).parallel(2, chunk=1, **FORK)
    with within(60), pytest.raises(WorkerError, match=f'worker 1 of 2 failed.*{said}'):
        list(pipe)


@pytest.mark.parametrize('how', [fails, killed])
def test_a_worker_is_restarted_as_often_as_it_may_be(how):
    "The other environment continues; the new one keeps its number and begins with episode 1"
    pipe = GymStepper(partial(Fragile, how), zeros).parallel(2, chunk=2, restarts=2, **FORK)
    found = {0: [], 1: []}
    with pytest.warns(RuntimeWarning, match='worker 1 of 2 failed, restart [12] of 2'):
        with pytest.raises(WorkerError, match='worker 1 of 2'):
            for b in islice(pipe, 500):
                found[int(b.env_id)].append((int(b.episode_n), int(b.step_n)))
    given = 3 if how is fails else 2  # what a killed one had not yet sent is lost
    assert found[1] == [(1, 1), (1, 2), (1, 3)][:given] * 3
    whole = [(e, n) for e in range(1, 99) for n in ((1, 2, 3) if e % 2 else (1, 2))]
    assert found[0] == whole[: len(found[0])]
    assert pipe.stats()['restarts'] == 2


class Mortal(gym.Wrapper):
    "CartPole that kills its process at the tenth step of its life"

    made = 0

    def step(self, action):
        self.made += 1
        if self.made == 10:
            killed()
        return self.env.step(action)


def test_a_restarted_environment_has_other_seeds_and_memories_take_its_rows():
    def mortal():
        return Mortal(gym.make('CartPole-v1'))

    pipe = GymStepper(mortal, seed=0).parallel(2, chunk=1, restarts=5, **FORK)
    memory = SequenceReplay(bs=2, max_sz=100, length=4, burn_in=1, overlap=2, seed=0)
    starts = {0: [], 1: []}
    with pytest.warns(RuntimeWarning):
        for b in islice(pipe, 50):
            memory.add(b)
            if int(b.step_n) == 1:
                starts[int(b.env_id)].append(tuple(b.state[0].tolist()))
    pipe.close()
    assert all(len(s) == len({*s}) >= 2 for s in starts.values())
    batch = memory.sample(8)
    steps = batch.step_n[:, 1:] - batch.step_n[:, :-1]
    assert (steps[batch.mask[:, 1:]] == 1).all()  # no window goes over a crash


class Unsendable:
    def __reduce__(self):
        raise RuntimeError('stays here')


def unsendable(block):
    return Unsendable()


def nowhere():
    raise FileNotFoundError('no such simulator')


def test_what_fails_at_the_start():
    with pytest.raises(
        WorkerError, match='worker 0 of 2 failed; got FileNotFoundError: no such simulator'
    ):
        next(iter(GymStepper(nowhere).parallel(2, **FORK)))
    with pytest.raises(
        TypeError,
        match="the chain above it cannot be sent to workers; got TypeError.*Remedy: pass an id",
    ):
        next(iter(GymStepper(short, lambda s, c=(i for i in 'ab'): [0]).parallel(2, **FORK)))
    with pytest.raises(WorkerError, match='RuntimeError: stays here'):
        next(iter(GymStepper(short, zeros).map(unsendable).parallel(1, **FORK)))


def test_saving_where_a_worker_has_failed():
    pipe = GymStepper(partial(Fragile, fails), zeros).parallel(2, chunk=2, **FORK)
    list(islice(pipe, 6))
    with pytest.raises(WorkerError, match='a worker failed'):
        pipe.state_dict()
    with pytest.raises(WorkerError, match='worker 1 of 2 failed'):
        list(pipe)  # and what was made before it is still handed on


@pytest.mark.parametrize(
    'kw', [dict(num_workers=-1), dict(num_workers=True), dict(chunk=1.5), dict(method='x')], ids=str
)
def test_mistaken_arguments(kw):
    with pytest.raises(ValueError, match=f'Parallel: {[*kw][0]}; got'):
        GymStepper('CartPole-v1').parallel(**kw)


# ---- nothing hangs, no process stays ----


def test_a_pipe_that_is_forgotten_takes_its_workers_along():
    pipe = GymStepper('CartPole-v1').parallel(2, **FORK)
    next(iter(pipe))
    assert len(mp.active_children()) == 2
    del pipe  # the fixture looks


def test_environments_are_closed(tmp_path):
    class Closing(ScriptedEnv):
        def close(self):
            (tmp_path / f'{os.getpid()}').touch()

    pipe = GymStepper(lambda: Closing(**script(2)), zeros).parallel(2, **FORK)
    next(iter(pipe))
    pids = {str(p.pid) for p in mp.active_children()}
    pipe.close()
    assert {p.name for p in tmp_path.iterdir()} == pids


def test_a_chain_closes_its_workers_and_all_else():
    "From the last stage, wherever the workers are; a new pass begins with new ones"
    chain = GymStepper(['CartPole-v1'] * 2, seed=0).n_step(2, 0.9).parallel(2, **FORK)
    with chain.map(rows_only).experience_replay(bs=4, max_sz=50, seed=0).prefetch(1) as pipe:
        assert len(list(islice(pipe, 5))) == 5
        assert len(mp.active_children()) == 2
    assert not mp.active_children()
    assert len(list(islice(pipe, 5))) == 5  # the memory is still there
    pipe.close()
    pipe.close()
    assert not mp.active_children()


def rows_only(block):
    return block


SCRIPT = '''
import ctypes, os, sys, time
from torch import multiprocessing as mp
from fastrl_replay.all import *
class Slow(ScriptedEnv):
    def step(self, action): {sleep}; return super().step(action)
def make(): return Slow(**script(3, -2))
def zeros(state): return [0]*len(state)
pipe = GymStepper(make, zeros).parallel(2, chunk=1, method='fork')
pipe.open()
print(*(p.pid for p in mp.active_children()), flush=True)
for b in pipe: pass
'''
HANGS = ['time.sleep(60)', pytest.param('ctypes.PyDLL(None).sleep(60)', id='keeps the GIL')]
in_proc = pytest.mark.skipif(sys.platform != 'linux', reason='looks at processes in /proc')


def alive(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'
    except OSError:
        return False


def gone(pids, seconds=15):
    limit = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    return not any(map(alive, pids))


def start(tmp_path, **kw):
    (tmp_path / 's.py').write_text(SCRIPT.format(**kw))
    p = subprocess.Popen(
        [sys.executable, tmp_path / 's.py'],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = [int(x) for x in p.stdout.readline().split()]
    assert len(pids) == 2
    return p, pids


@pytest.mark.slow
@in_proc
def test_ctrl_c(tmp_path):
    """SIGINT for the whole group, as a terminal sends it, gives one KeyboardInterrupt.

    All processes are gone, although an environment sleeps."""
    p, pids = start(tmp_path, sleep='time.sleep(60)')
    time.sleep(0.5)
    os.killpg(p.pid, signal.SIGINT)
    _, err = p.communicate(timeout=60)
    assert err.count('KeyboardInterrupt') == 1, err
    assert p.returncode == -signal.SIGINT
    assert gone(pids)


@pytest.mark.slow
@in_proc
@pytest.mark.parametrize('sleep', HANGS)
def test_workers_do_not_outlive_their_process(tmp_path, sleep):
    "Not even if it is killed while an environment hangs"
    p, pids = start(tmp_path, sleep=sleep)
    time.sleep(0.5)
    p.kill()
    p.communicate()
    assert gone(pids)


# ---- opening and closing ----


def test_opening_starts_workers_and_no_environments_here():
    made = []

    def make():
        made.append(1)
        return scripted(3, -2)

    pipe = GymStepper(make, zeros).parallel(2, chunk=2, **FORK).header(8)
    pipe.open()
    assert len(mp.active_children()) == 2 and not made
    pipe.open()
    assert len(mp.active_children()) == 2
    rest = [int(b.step_n) for b in pipe]
    pipe.close()
    assert rest == [1, 2, 1, 2, 3, 1, 3, 1] and not made


# ---- engines ----
