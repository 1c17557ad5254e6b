"""Worker processes: the same stream as without them, weights that arrive, crashes that are reported, and no process left."""

import os, pickle, random, signal, subprocess, sys, time
from collections import deque
from functools import partial
from itertools import islice
from pathlib import Path

import gymnasium as gym, numpy as np, pytest, torch
from hypothesis import given, strategies as st
from torch import multiprocessing as mp, nn
from torch.utils.data import DataLoader

from fastrl_replay.all import *
from fastrl_replay.parallel.engines import Filled, Served, Worker, Weights, outline
from fastrl_replay.parallel.stage import ENGINES
from fastrl_replay.pipe import as_worker
from fastrl_replay.testing import same, through_file
from strategies import cases
from workers import FORK, learns_the_same, no_process_is_left, scripted, short, zeros  # noqa: F401

BOX, TWO = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Discrete(2)
both = pytest.mark.parametrize('method', ['fork', 'spawn'])
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
    "was: a table was an array, which workers got once: they acted by the zeros of the beginning for ever"
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


@pytest.mark.parametrize(
    'chain',
    [
        lambda p: p.experience_replay(bs=4, max_sz=50, seed=0, return_idxs=True),
        lambda p: p.map(lambda b: dict(r=b.rows['reward'].mean(), s=b.rows['state'])),
    ],
    ids=['places', 'arrays'],
)
def test_states_with_other_things_than_blocks_are_plain_data(chain):
    "was: torch.load refused them, or so did whoever wanted to go on"

    def make():
        return chain(GymStepper(['CartPole-v1'] * 2, seed=0)).parallel(2, **FORK)

    with make() as one, make() as two:
        first = iter(one)
        for _ in range(5):
            next(first)
        two.load_state_dict(through_file(one.state_dict()))
        assert same([*islice(first, 20)], [*islice(two, 20)])


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


def test_global_generators_differ_and_follow_from_torchs_seed():
    def numbers(seed):
        torch.manual_seed(seed)
        pipe = GymStepper(short, Globally(), seed=0).parallel(2, **FORK)
        r = rows(islice(pipe, 16))
        pipe.close()
        return [r[n].tolist() for n in 'tnp']

    once = numbers(3)
    assert all(len(set(x)) == 16 for x in once)
    assert numbers(3) == once and numbers(4) != once


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
    ahead=st.integers(1, 3),
    chunk=st.integers(1, 5),
    lengths=st.lists(st.integers(-3, 3).filter(bool), min_size=1, max_size=3),
)
@cases(12)
def test_chunks_come_in_turn(workers, ahead, chunk, lengths):
    "Whatever the numbers, episodes of one step and truncations: each environment's rows in order, chunks in turn, ages within the bound"

    def chain():
        return GymStepper(partial(scripted, *lengths), zeros)

    n, pipe = (
        4 * chunk * workers + 1,
        chain().parallel(workers, ahead * workers * chunk, chunk, 'fork'),
    )
    blocks = list(islice(pipe, n))
    assert [int(b.env_id) for b in blocks] == [i // chunk % workers for i in range(n)]
    alone = rows(islice(chain(), n))
    for w in range(workers):
        mine = rows(b for b in blocks if int(b.env_id) == w)
        mine['env_id'] = 0
        assert (mine == alone[: len(mine)]).all()
    s = pipe.stats()
    assert (
        s['items'] == n
        and s['lag_max']
        <= s['lag_bound']
        == (ahead * workers + 1) * chunk - 1
        == pipe.ahead + chunk - 1
    )
    pipe.close()


@pytest.mark.parametrize(
    'ahead, ready', [(None, 8), (1, 8), (7, 8), (8, 8), (15, 8), (16, 16), (20, 16)]
)
def test_ahead_counts_items(ahead, ready):
    "As `ahead` of `prefetch`: no more items wait ready than it says, in whole chunks of each worker, one at least"
    pipe = GymStepper(partial(scripted, 3), zeros).parallel(2, ahead, 4, 'fork')
    next(iter(pipe))
    while sum(len(w.chunks) for w in pipe._workers) < ready // 4:
        [pipe._fetch(w) for w in pipe._workers if w.asked]
    assert [len(w.chunks) + len(w.asked) for w in pipe._workers] == [
        ready // 8
    ] * 2 and pipe.stats()['lag_bound'] == ready + 4 - 1
    pipe.close()


def test_finite_chains_end_and_begin_again():
    "A worker that is done first lets the others go on; a second pass is a whole one"
    pipe = GymStepper(short, zeros).header(5).parallel(2, chunk=2, **FORK)
    for _ in range(2):
        assert [int(b.env_id) for b in pipe] == [0, 0, 1, 1, 0, 0, 1, 1, 0, 1]
    assert len(list(islice(pipe, 3))) == 3 and len(list(pipe)) == 7  # broken off, and gone on with
    pipe.close()
    nothing = GymStepper(short, zeros).header(0).parallel(2, **FORK)
    assert list(nothing) == [] and list(nothing) == []
    nothing.close()


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


@pytest.mark.parametrize('every, copies', [(1, 4), (4, 3), (7, 3), (100, 2)])
def test_weights_are_written_no_oftener_than_asked(every, copies):
    "Their age keeps its bound, and no more versions lie there than may be in use"
    policy, ages = Versioned(), []
    with GymStepper(short, policy).parallel(3, chunk=2, weights_every=every, **FORK) as pipe:
        for k, block in enumerate(islice(pipe, 60)):
            ages.append(k - int(block.version))
            policy.bump(k + 1)
        stats, there = pipe.stats(), pipe._weights.copies
    assert (
        stats['weights_written'] <= 60 // every + 2
        and max(ages) == stats['lag_max'] <= stats['lag_bound'] == 7 + every - 1
    )
    assert there == copies


def test_a_learner_is_followed():
    "In-place updates by an optimizer, and weights that are loaded or replaced by .data"
    net, number = nn.Linear(1, 1, bias=False), lambda: net.weight.item()

    def policy(state):
        return dict(action=[0] * len(state), w=net.weight.detach()[0].expand(len(state)))

    opt = torch.optim.Adam(net.parameters(), lr=0.5, fused=True)
    pipe = GymStepper(short, policy).parallel(1, chunk=1, **FORK)

    def now():
        return [float(block.w) for block in islice(pipe, 3)][-1]

    assert now() == number()
    net(torch.ones(1, 1)).sum().backward()
    opt.step()
    assert now() == number()
    net.load_state_dict(dict(weight=torch.full((1, 1), 7.0)))
    assert now() == 7
    net.weight.data = torch.full((1, 1), 9.0)
    assert now() == 9
    pipe.close()


def test_recurrent_policies_keep_their_memory():
    net = RecurrentNet(BOX, TWO, 4)

    def stepper(n):
        return GymStepper(['CartPole-v1'] * n, EpsGreedy(net, 0, seed=0), seed=0)

    pipe = stepper(1).parallel(2, **FORK)
    for a, b in zip(by_env(pipe, 30, 2), by_env(stepper(2), 30, 2)):
        a, b = a[:28], b[:28]
        assert (a['step_n'] == b['step_n']).all() and (a['action'] == b['action']).all()
        for h in '[0]', '[1]':
            np.testing.assert_allclose(
                a['hidden'][h], b['hidden'][h], atol=1e-5
            )  # one row at a time, or two
    pipe.close()


def test_training_can_be_repeated_and_resumed():
    "Two workers, prioritized replay, a learner: the same losses to the last bit, also from a checkpoint"

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
        lambda: (
            GymStepper(['CartPole-v1'] * 2, seed=0)
            .n_step(3, 0.9)
            .parallel(2, ahead=12, chunk=3, **FORK)
        ),
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


def test_a_state_of_more_workers_is_told_by_its_settings():
    "Whichever worker's turn it was; not by a detail of the state"

    def chain(n):
        return GymStepper('CartPole-v1', seed=0).parallel(n, chunk=1, method='fork')

    for items in 1, 2:
        with chain(2) as a:
            list(islice(a, items))
            state = a.state_dict()
        with pytest.raises(
            ValueError, match="a checkpoint of other settings.*'num_workers': 2.*'num_workers': 1"
        ):
            chain(1).load_state_dict(state)


def test_states_of_other_chains_are_refused():
    def chain(n=2, **kw):
        return (
            GymStepper('CartPole-v1', seed=0)
            .n_step(n, 0.9)
            .parallel(**{**dict(num_workers=2, method='fork'), **kw})
        )

    a = chain()
    list(islice(a, 5))
    state = a.state_dict()
    a.close()
    for kw in dict(num_workers=3), dict(chunk=1), dict(ahead=40):
        with pytest.raises(ValueError, match='a checkpoint of other settings'):
            chain(**kw).load_state_dict(state)
    with pytest.raises(ValueError, match='another n or gamma'):
        chain(3).load_state_dict(state)
    twin = chain()
    twin.load_state_dict(state)
    assert (
        twin._workers == [] and through_file(twin.state_dict()).keys() == state.keys()
    )  # saved before it was used


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


def quits():
    sys.exit('enough')


def segfaults():
    import ctypes

    ctypes.string_at(0)


@spawn_is_slow
def test_an_exception_is_named_with_its_traceback(method):
    pipe, seen = GymStepper(partial(Fragile, fails), zeros).parallel(2, method=method), []
    with pytest.raises(WorkerError) as e:
        for block in pipe:
            seen.append((int(block.env_id), int(block.step_n)))
    text = str(e.value)
    assert text.startswith(
        'Parallel: worker 1 of 2 failed; got EnvError: GymStepper: environment 1 failed in episode 2, step 1; got ZeroDivisionError: the simulator'
    )
    assert 'Traceback (most recent call last)' in text and 'in fails' in text
    assert [s for s in seen if s[0] == 1] == [(1, 1), (1, 2), (1, 3)]  # what it made before
    assert pipe._workers == [] and not mp.active_children()
    assert [int(b.step_n) for b in islice(pipe, 3)] == [1, 2, 3]  # the next pass begins anew
    pipe.close()


@pytest.mark.parametrize(
    'how, said',
    [
        (killed, 'signal SIGKILL'),
        (leaves, 'exit code 3'),
        (quits, 'SystemExit: enough'),
        (segfaults, 'signal SIGSEGV'),
    ],
)
def test_a_death_is_named(how, said):
    pipe = GymStepper(partial(Fragile, how), zeros).parallel(2, chunk=1, **FORK)
    with pytest.raises(WorkerError, match='worker 1 of 2 failed') as e:
        for _ in pipe:
            pass
    assert said in str(e.value)


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
        match="the chain above it can't be sent to workers; got TypeError.*Remedy: give the stepper an id",
    ):
        next(iter(GymStepper(short, lambda s, c=(i for i in 'ab'): [0]).parallel(2, **FORK)))
    with pytest.raises(WorkerError, match='RuntimeError: stays here'):
        next(iter(GymStepper(short, zeros).map(unsendable).parallel(1, **FORK)))


def bomb():
    raise EOFError('not a real end')


class Bomb:
    def __reduce__(self):
        return bomb, ()


def to_bomb(block):
    return Bomb()


def test_an_answer_that_cannot_be_read_ends_its_worker():
    pipe = GymStepper(short, zeros).map(to_bomb).parallel(2, **FORK)
    with pytest.raises(WorkerError, match='worker 0 of 2 failed; got EOFError: not a real end'):
        next(iter(pipe))
    pipe.close()


@pytest.mark.parametrize('how', [fails, killed])
def test_restarts(how):
    "The other environment goes on; the new one has the old number and begins with its first episode; its seeds are others"
    pipe = GymStepper(partial(Fragile, how), zeros).parallel(2, chunk=2, restarts=2, **FORK)
    with (
        pytest.warns(RuntimeWarning, match='worker 1 of 2 failed, restart [12] of 2'),
        pytest.raises(WorkerError, match='worker 1 of 2'),
    ):
        found = []
        for b in pipe:
            found.append((int(b.env_id), int(b.episode_n), int(b.step_n)))
    mine = [f[1:] for f in found if f[0] == 1]
    whole = (
        [(1, 1), (1, 2), (1, 3)] if how is fails else [(1, 1), (1, 2)]
    )  # what a killed one had not yet sent is lost
    assert mine == whole * 3
    other = [f[1:] for f in found if f[0] == 0]
    assert other == [
        (1 + i // 5 * 2 + (i % 5 > 2), 1 + i % 5 - 3 * (i % 5 > 2)) for i in range(len(other))
    ]
    assert pipe.restarted == 2


class Mortal(gym.Wrapper):
    "CartPole that kills its process at the tenth step of its life"

    made = 0

    def step(self, action):
        self.made += 1
        if self.made == 10:
            killed()
        return self.env.step(action)


def mortal():
    return Mortal(gym.make('CartPole-v1'))


def test_a_new_life_is_another_one_and_memories_take_it():
    pipe = GymStepper(mortal, seed=0).parallel(2, chunk=1, restarts=5, **FORK)
    memory = SequenceReplay(bs=2, max_sz=100, length=4, burn_in=1, overlap=2, seed=0)
    merge, starts = NStep([], 3, 0.9), {}
    with pytest.warns(RuntimeWarning):
        for b in islice(pipe, 50):
            memory.add(b)
            merge.merge(b)
            if int(b.step_n) == 1:
                starts.setdefault(int(b.env_id), []).append(tuple(b.state[0].tolist()))
    assert pipe.stats()['restarts'] >= 2 and set(starts) == {0, 1}
    assert all(len(s) == len(set(s)) >= 2 for s in starts.values())
    batch = memory.sample(8)
    inside = batch.mask[:, 1:]
    assert (
        (batch.step_n[:, 1:] - batch.step_n[:, :-1])[inside] == 1
    ).all()  # no window goes over a crash
    pipe.close()


def test_saving_where_a_worker_has_failed():
    pipe = GymStepper(partial(Fragile, fails), zeros).parallel(2, chunk=2, **FORK)
    list(islice(pipe, 6))
    with pytest.raises(WorkerError, match='a worker failed'):
        pipe.state_dict()
    with pytest.raises(WorkerError, match='worker 1 of 2 failed'):
        list(pipe)  # and what was made before it is still handed on


def test_mistaken_arguments():
    s = GymStepper('CartPole-v1')
    for kw in (
        dict(num_workers=-1),
        dict(num_workers=True),
        dict(num_workers='2'),
        dict(num_workers=1 << 70),
        dict(num_workers=1 << 16 | 1),
        dict(ahead=0),
        dict(chunk=0),
        dict(chunk=1.5),
        dict(restarts=-1),
        dict(method='threads'),
    ):
        with pytest.raises(ValueError, match=f'Parallel: {[*kw][0]}; got'):
            s.parallel(**kw)
    with pytest.raises(ValueError, match='every worker would give these same items'):
        Items([]).n_step(2, 0.9).parallel(2)
    assert 'parallel(num_workers=3' in repr(s.parallel(3))


def test_no_workers_in_workers():
    loader = DataLoader(
        GymStepper('CartPole-v1').parallel(2, **FORK), batch_size=None, num_workers=1
    )
    it = iter(loader)
    with pytest.raises(RuntimeError, match="a worker process can't have workers"):
        next(it)
    del it


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
    pids = {str(w.process.pid) for w in pipe._workers}
    pipe.close()
    assert {p.name for p in tmp_path.iterdir()} == pids


SCRIPT = '''
import os, signal, sys, time
from fastrl_replay.all import *
class Slow(ScriptedEnv):
    def step(self, action): time.sleep({sleep}); return super().step(action)
def make(): return Slow(**script(3, -2))
def zeros(state): return [0]*len(state)
if __name__ == '__main__':
    pipe = GymStepper(make, zeros).parallel(2, chunk=1, method={method!r})
    it = iter(pipe)
    {first}
    print(*(w.process.pid for w in pipe._workers), flush=True)
    {then}
'''


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
    return p, [int(x) for x in p.stdout.readline().split()]


@pytest.mark.skipif(not Path('/proc/self/stat').exists(), reason='looks at processes in /proc')
@pytest.mark.parametrize(
    'method, sleep',
    [('fork', 0.001), ('fork', 60), pytest.param('spawn', 0.001, marks=pytest.mark.slow)],
)
def test_ctrl_c(tmp_path, method, sleep):
    "SIGINT for the whole group, as a terminal sends it: one KeyboardInterrupt, and all processes are gone, although an environment sleeps"
    first = 'next(it)' if sleep < 1 else 'pipe._start()'
    p, pids = start(tmp_path, method=method, sleep=sleep, first=first, then='for b in it: pass')
    time.sleep(0.3)
    os.killpg(p.pid, signal.SIGINT)
    out, err = p.communicate(timeout=30)
    assert (
        len(pids) == 2 and err.count('KeyboardInterrupt') == 1 and p.returncode == -signal.SIGINT
    ), err
    assert gone(pids)


@pytest.mark.skipif(not Path('/proc/self/stat').exists(), reason='looks at processes in /proc')
def test_ctrl_c_that_is_caught(tmp_path):
    "As in a notebook: the cell is interrupted, and run again"
    then = '''
    seen = []
    for _ in range(2):
        try:
            for b in pipe: seen.append((int(b.env_id), int(b.step_n), int(b.episode_n)))
        except KeyboardInterrupt: pass
    seen += [(int(b.env_id), int(b.step_n), int(b.episode_n)) for b, _ in zip(pipe, range(10))]
    for e in 0, 1:
        mine = [s[1:] for s in seen if s[0] == e]
        steps = [(3*(i % 5 > 2), i % 5 + 1, i//5*2 + 1) for i in range(1 - e, 1 - e + len(mine))]
        assert mine == [(s - off, ep + (off > 0)) for off, s, ep in steps], mine[:20]
    print('fine')
'''
    p, pids = start(tmp_path, method='fork', sleep=0.01, first='next(it)', then=then)
    for _ in range(2):
        time.sleep(0.4)
        os.killpg(p.pid, signal.SIGINT)
    out, err = p.communicate(timeout=30)
    assert out.strip() == 'fine', err
    assert gone(pids)


@pytest.mark.skipif(not Path('/proc/self/stat').exists(), reason='looks at processes in /proc')
@pytest.mark.parametrize(
    'method, sleep',
    [('fork', 0.001), ('fork', 60), pytest.param('spawn', 60, marks=pytest.mark.slow)],
)
def test_workers_do_not_outlive_their_process(tmp_path, method, sleep):
    "Not even where it is killed, and can't say good-bye, while an environment hangs"
    p, pids = start(
        tmp_path, method=method, sleep=sleep, first='pipe._start()', then='time.sleep(60)'
    )
    if method == 'spawn':
        time.sleep(4)  # they import
    p.kill()
    p.communicate()
    assert len(pids) == 2 and gone(pids)


@pytest.mark.skipif(not Path('/proc/self/stat').exists(), reason='looks at processes in /proc')
def test_workers_do_not_outlive_their_process_though_another_child_of_it_does(tmp_path):
    "Which holds what tells them of its end"
    child = 'os.fork() or (os.close(0), os.close(1), os.close(2), time.sleep(10), os._exit(0))'
    p, pids = start(
        tmp_path, method='fork', sleep=60, first='pipe._start()', then=f'{child}; time.sleep(60)'
    )
    time.sleep(0.5)
    p.kill()
    p.communicate()
    assert len(pids) == 2 and gone(pids, 6)


def test_a_tensor_is_found_wherever_it_is():
    "In closures, attributes, defaults and lists; once each; and put back there"
    t, net = torch.ones(2), nn.LSTM(2, 2)

    class Holder:
        pass

    h = Holder()
    h.list, h.f = [t, t], lambda x, d=t: x + t + d
    data, tensors = outline((h, net, partial(torch.add, t)))
    assert len(tensors) == 1 + len(list(net.parameters())) and any(x is t for x in tensors)


# ---- opening and closing ----


@pytest.mark.filterwarnings('ignore:Local function')
def test_a_chain_closes_its_workers_and_all_else():
    "From the last stage, through torch's own, wherever the workers are; a new pass begins with new ones"

    def chain():
        return (
            GymStepper(['CartPole-v1'] * 2, seed=0)
            .n_step(2, 0.9)
            .parallel(2, **FORK)
            .map(lambda b: b)
            .experience_replay(bs=4, max_sz=50, seed=0)
            .prefetch(1)
        )

    with chain() as pipe:
        first = [b.index.tolist() for b in islice(pipe, 5)]
        assert len(mp.active_children()) == 2
    assert not mp.active_children() and pipe._worker is None
    assert len(list(islice(pipe, 5))) == 5 and first  # the memory is still there
    pipe.close()
    pipe.close()
    assert not mp.active_children()


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


def test_a_restored_chain_that_is_opened_goes_on_as_one_that_is_not():
    "Also at the end of a pass"

    def chain():
        return GymStepper(short, zeros).header(5).parallel(2, chunk=2, **FORK)

    for k in 0, 3, 9, 10, 11:
        a, b, c = chain(), chain(), chain()
        it = iter(a)
        for _ in islice(it, k):
            pass
        state = a.state_dict()
        for p in b, c:
            p.load_state_dict(state)
        b.open()
        for _ in range(2):
            assert same(list(b), list(c))
        for p in a, b, c:
            p.close()


def test_workers_are_asked_for_by_chains_of_environments_only():
    assert (
        GymStepper(short).map(str).header(3).has_envs
        and GymStepper(short).parallel(2).has_envs
        and not Items('ab').header(2).has_envs
    )
    assert (
        Items([scripted(3)]).gym_step().parallel(2).source_elsewhere
        and not GymStepper(short).parallel(0).source_elsewhere
    )


# ---- engines ----


class Here:
    "An engine without processes: workers answer when they are waited for"

    def weights(self, tensors, copies):
        return Weights(tensors, copies)

    def worker(self, *args):
        return Local(*args)

    def wait(self, workers):
        pass

    def end(self, workers, owner):
        for w in workers:
            w.served.close()
        workers.clear()


class Local(Worker):
    def __init__(self, info, seed, data, weights, copy, chunk):
        super().__init__(info)

        def build():
            mine, seen = weights.private(copy), weights.bytes[copy].clone()
            chain = Filled(data, mine).load()
            chain.in_worker(info)
            return chain, lambda i: weights.refresh(mine, seen, i)

        self.served, self.requests, self.place = Served(build, chunk), deque(), info

    def request(self, *words):
        self.requests.append(words)

    def wait(self):
        pass

    def ready(self):
        return bool(self.requests)

    def alive(self):
        return True

    def receive(self):
        with as_worker(self.place):
            return pickle.loads(self.served.answer(*self.requests.popleft()))


def test_another_engine_needs_no_other_room():
    "Given as an object or by name; the same blocks as from processes, weights that change included; it is ended"

    def blocks(engine):
        policy = Versioned()
        pipe = GymStepper(short, policy).parallel(2, engine=engine, chunk=2, ahead=4)
        seen = []
        for i, block in enumerate(islice(pipe, 12)):
            seen.append(block)
            policy.bump(i)
        pipe.close()
        return seen

    ENGINES['here'] = lambda method: Here()
    try:
        assert blocks('process') == blocks('here') == blocks(Here())
    finally:
        del ENGINES['here']
    with pytest.raises(ValueError, match="Parallel: engine; got 'cloud'; expected .*process"):
        GymStepper(short, zeros).parallel(2, engine="cloud")


class Wordless(Exception):
    def __str__(self):
        return self.missing


class FailsWordlessly(gym.Wrapper):
    def step(self, action):
        raise Wordless


def wordless(state):
    raise Wordless


def fails_wordlessly():
    return FailsWordlessly(gym.make('CartPole-v1'))


@pytest.mark.parametrize(
    'source, policy',
    [('CartPole-v1', wordless), (fails_wordlessly, None)],
    ids=['policy', 'environment'],
)
def test_an_error_whose_text_fails_is_reported(source, policy):
    "By its class, from a worker and from an environment, which begins anew"
    with GymStepper(source, policy).parallel(1, **FORK) as pipe:
        with pytest.raises(WorkerError, match='Wordless: its __str__ raised AttributeError'):
            next(iter(pipe))
    if policy is None:
        stepper = GymStepper(source)
        for _ in range(2):
            with pytest.raises(EnvError, match='Wordless: its __str__ raised'):
                next(iter(stepper))
