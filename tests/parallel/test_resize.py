"""Workers that join and leave a chain that runs, and weights that are written now and then."""
import os, signal, time, warnings
from itertools import islice

import numpy as np, pytest, torch

from fastrl_replay.all import *
from fastrl_replay.testing import through_file
from test_parallel import BOX, TWO
from workers import FORK, no_process_is_left, ray_cluster, scripted, short, zeros  # noqa: F401

class Versioned(torch.nn.Module):
    "Says with which version of its weight it acted"
    def __init__(self):
        super().__init__()
        self.version = torch.nn.Parameter(torch.zeros(()))
    def forward(self, state): return dict(action=[0]*len(state), version=self.version.expand(len(state)))
    @torch.no_grad()
    def bump(self, k): self.version.fill_(k + 1)

def slow_start():
    "An environment that the second worker makes late"
    from fastrl_replay.pipe import worker_info
    if worker_info().rank: time.sleep(1)
    return short()

def envs(blocks): return [b.env_id.item() for b in blocks]

@pytest.mark.parametrize('kw', [{}, dict(ahead=8), dict(ordered=False), pytest.param(dict(chunk=3, weights_every=5), marks=pytest.mark.slow)], ids=str)
def test_no_step_is_lost_or_given_twice(kw):
    "Each life of an environment is a stream without gaps from its first step; numbers are unique; ages keep their bound"
    policy, sizes = Versioned(), iter([3, 1, 2, 4, 1, 3, 2, 1, 1, 4])
    with GymStepper(short, policy).parallel(2, **{**FORK, 'chunk': 2, **kw}) as pipe:
        seen = []
        for k, block in enumerate(islice(pipe, 200)):
            seen.append(block.rows[0])
            policy.bump(k)
            if k % 20 == 11: pipe.resize(next(sizes))
            if k % 20 == 15: assert pipe.num_workers <= len(pipe.stats()['workers'])
        s = pipe.stats()
    assert s['items'] == 200 and (s['lag_max'] <= s['lag_bound'] or not kw.get('ordered', True))   # who is slow then has old weights
    for e in range(4):
        mine = [(int(r['episode_n']), int(r['step_n'])) for r in seen if r['env_id'] == e]
        if not (mine or kw.get('ordered', True)): continue   # others were always ready before it
        assert mine[0] == (1, 1)
        for a, b in zip(mine, mine[1:]): assert b == (1, 1) or b == (a[0], a[1]+1) or b == (a[0]+1, 1) and a[1] == (3 if a[0] % 2 else 2)
    numbers = {int(r['env_id']) for r in seen}
    assert numbers == {0, 1, 2, 3} if kw.get('ordered', True) else numbers <= {0, 1, 2, 3}

def test_ordered_streams_are_the_same_each_time():
    def stream():
        torch.manual_seed(0)
        net = value_net(BOX, TWO, [8])
        with GymStepper('CartPole-v1', EpsGreedy(net, .5, seed=0), seed=0).parallel(1, chunk=2, **FORK) as pipe:
            seen = []
            for k, b in enumerate(islice(pipe, 60)):
                seen.append(b.rows)
                with torch.no_grad(): next(net.parameters()).add_(.01)
                if k in (9, 30): pipe.resize(3 if k == 9 else 2)
        return np.concatenate(seen)
    assert (stream() == stream()).all()

def test_states_after_a_resize():
    "Goes on as the chain that was saved, chunks of workers that have left included; another number is told"
    def chain(): return GymStepper('CartPole-v1', seed=0).parallel(3, chunk=2, **FORK)
    with chain() as a:
        list(islice(a, 7))
        a.resize(2)
        state = through_file(a.state_dict())
        assert len(a.snapshot()['workers']) == 3
        with chain() as b:
            with pytest.raises(ValueError, match='a checkpoint of other settings.*`resize` it'): b.load_state_dict(state)
            b.resize(2)
            b.load_state_dict(state)
            assert list(islice(b, 30)) == list(islice(a, 30))
            b.resize(3); a.resize(3)
            assert list(islice(b, 20)) == list(islice(a, 20))

def test_what_has_not_begun_holds_nobody_up():
    "It joins when it is there; a state leaves it out; it may leave again before it has come"
    with GymStepper(slow_start, zeros).parallel(1, chunk=1, ordered=False, **FORK) as pipe:
        list(islice(pipe, 3))
        pipe.resize(2)
        began = time.monotonic()
        assert envs(islice(pipe, 3)) == [0]*3
        state = pipe.state_dict()
        pipe.resize(1)
        assert time.monotonic() - began < .9 and envs(islice(pipe, 3)) == [0]*3
        pipe.resize(2)
        while pipe.stats()['least_given'] < 2: next(iter(pipe))
    with GymStepper(short, zeros).parallel(2, chunk=1, ordered=False, **FORK) as again:
        again.load_state_dict(through_file(state))
        assert {*envs(islice(again, 20))} == {0, 1}

def test_one_that_crashed_may_leave_and_others_are_restarted():
    with GymStepper(short, zeros).parallel(3, chunk=1, ordered=False, restarts=5, **FORK) as pipe, warnings.catch_warnings():
        warnings.simplefilter('ignore')
        list(islice(pipe, 9))
        for w in pipe._workers[1:]: os.kill(w.process.pid, signal.SIGKILL)
        list(islice(pipe, 9))
        pipe.resize(2)
        list(islice(pipe, 10))   # what the one that has left had given
        began, seen = time.monotonic(), set()
        while seen != {0, 1} and time.monotonic() - began < 60: seen |= {*envs(islice(pipe, 5))}   # worker 1 is only being restarted
        assert seen | {*envs(islice(pipe, 20))} == {0, 1}

def test_passes_that_end():
    "A worker that joins has the pass before it, too"
    with GymStepper(short, zeros).header(4).parallel(1, chunk=2, **FORK) as pipe:
        seen = []
        for k, b in enumerate(pipe):
            seen.append(b.env_id.item())
            if k == 1: pipe.resize(2)
        assert sorted(seen) == [0]*4 + [1]*4
        pipe.resize(1)
        assert envs(pipe) == [0]*4

@pytest.mark.parametrize('make, message', [(lambda: GymStepper(short).parallel(0), 'num_workers=0'), (lambda: GymStepper(short).experience_replay().parallel(2), 'shards of a memory.*save the rows'),
    (lambda: Items([short()]).gym_step().parallel(1), 'environments that come through a pipe')])
def test_what_cannot_be_resized(make, message):
    with pytest.raises(ValueError, match=message): make().resize(3)
    with pytest.raises(ValueError, match='a whole number, 1 to 65536'): GymStepper(short).parallel(2).resize(0)

# ---- weights now and then ----

@pytest.mark.parametrize('every', [1, 4, 7, 100])
def test_weights_are_written_no_oftener_than_asked(every):
    policy = Versioned()
    with GymStepper(short, policy).parallel(3, chunk=2, weights_every=every, **FORK) as pipe:
        ages = []
        for k, b in enumerate(islice(pipe, 60)):
            ages.append(k - int(b.version))
            policy.bump(k)
        s, copies = pipe.stats(), pipe._weights.copies
    assert s['weights_written'] <= 60//every + 2 and max(ages) == s['lag_max'] <= s['lag_bound'] == 7 + every - 1
    assert copies == {1: 4, 4: 3, 7: 3, 100: 2}[every]

def test_rounded_on_the_wire_and_computed_as_before():
    class Tells(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(1 + 1/256))
            self.register_buffer('exact', torch.tensor(1 + 1/256))
        def forward(self, state): return dict(action=[0]*len(state), w=self.w.expand(len(state)), b=self.exact.expand(len(state)))
    policy = Tells()
    with GymStepper(short, policy).parallel(1, chunk=1, weights_dtype='bfloat16', **FORK) as pipe:
        first = next(iter(pipe))
        assert (first.w.item(), first.b.item(), first.w.dtype) == (1., 1 + 1/256, torch.float32)
        with torch.no_grad(): policy.w.fill_(3 + 1/512)
        assert [*islice(pipe, 3)][-1].w.item() == 3
    with pytest.raises(ValueError, match="weights_dtype; got 'int8'"): GymStepper(short).parallel(1, weights_dtype='int8')

@pytest.mark.parametrize('restarts', [0, 1])
def test_eps_of_an_environment_stays_when_workers_join_and_leave(restarts):
    "Workers 0 and 2 always explore, worker 1 never does; where there are more workers than values, one that joins is refused"
    torch.manual_seed(0)
    net = value_net(BOX, TWO, [8])
    with torch.no_grad(): net[-1].weight.zero_(); net[-1].bias.copy_(torch.tensor([0., 1.]))
    explores = {0: True, 1: False, 2: True}
    with GymStepper('CartPole-v1', EpsGreedy(net, [1., 0., 1.], seed=0), seed=0).parallel(1, chunk=1, restarts=restarts, **FORK) as pipe:
        seen = {}
        def go_on(n):
            for b in islice(pipe, n): seen.setdefault(b.env_id.item(), set()).add(b.action.item())
        for n in (2, 3, 1, 2):
            pipe.resize(n)
            go_on(60)
        assert seen == {e: {0, 1} if always else {1} for e, always in explores.items()}
        if restarts:
            pipe.resize(1)
            go_on(10)
            os.kill(pipe._workers[0].process.pid, signal.SIGKILL)
            with pytest.warns(RuntimeWarning, match='worker 0 of 1 failed'): go_on(10)
        else:
            pipe.resize(4)
            with pytest.raises(WorkerError, match=r'(?s)worker 2 of 4 failed.*eps; got shape \[3\]'): go_on(60)

# ---- on Ray ----

@pytest.fixture
def cluster():
    "A machine beside the one of the learner, with room for one actor"
    with ray_cluster(0, 1) as found: yield found

def until(pipe, what, seconds=120):
    "Take items until this is so"
    began = time.monotonic()
    for block in pipe:
        if what(block): return
        assert time.monotonic() - began < seconds

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_actors_on_ray_join_and_leave_with_machines(cluster):
    "One that waits for a machine holds nobody up, nor a state; a machine that goes is done without; weights reach all"
    cluster, nodes = cluster
    policy = Versioned()
    with GymStepper(short, policy).parallel(1, chunk=1, ordered=False, restarts=9, engine=RayEngine(num_cpus=1), weights_every=4) as pipe:
        list(islice(pipe, 5))
        pipe.resize(2)   # there is room for one
        assert envs(islice(pipe, 30)) == [0]*30
        assert [w['state'] is None for w in pipe.snapshot()['workers']] == [False, True]
        nodes.append(cluster.add_node(num_cpus=1))
        until(pipe, lambda b: b.env_id == 1)
        policy.bump(6)
        for e in 0, 1: until(pipe, lambda b: b.env_id == e and b.version == 7)
        cluster.remove_node(nodes.pop())   # preempted
        until(pipe, lambda b: pipe.restarted == 1)
        assert envs(islice(pipe, 30)) == [0]*30
        nodes.append(cluster.add_node(num_cpus=1))
        until(pipe, lambda b: b.env_id == 1)
        pipe.resize(1)
        assert envs([*islice(pipe, 12)][2:]) == [0]*10
        assert pipe.stats()['weights_written'] <= pipe.stats()['items']//4 + 2

def test_more_workers_than_any_machine_has_are_refused_before_anything_changes():
    pipe = GymStepper(short, zeros).parallel(1, **FORK)
    for wrong in 1 << 70, 1 << 16 | 1:
        with pytest.raises(ArgumentError, match='num_workers; got .*; expected a whole number, 1 to 65536'): pipe.resize(wrong)
        with pytest.raises(ArgumentError, match='num_workers'): GymStepper('CartPole-v1').parallel(wrong)
    assert pipe.num_workers == 1
    with pipe: assert len(next(iter(pipe)))
