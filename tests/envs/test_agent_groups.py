"""Groups of agents: one stepping for several chains, in whichever order they are read, with errors and checkpoints between."""
import pickle

import numpy as np, pytest, torch
from gymnasium import spaces
from scripted import through_file
from fastrl_replay.all import *

AGENTS = dict(a=['a0', 'a1'], b=['b0'], c=['c0', 'c1'])
LIFE = dict(a0=3, a1=5, b0=2, c0=5, c1=1)

class Zoo:
    possible_agents = [n for names in AGENTS.values() for n in names]
    def __init__(self): self.agents, self.seeds, self.steps, self.fail, self.t = [], [], 0, (), 0
    def observation_space(self, agent): return spaces.Box(-np.inf, np.inf, ('abc'.index(agent[0]) + 1,), np.float32)
    def action_space(self, agent): return spaces.Discrete('abc'.index(agent[0]) + 2)
    def look(self, agents): return {n: np.full(self.observation_space(n).shape, self.steps, np.float32) for n in agents}
    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.t, self.agents = 0, list(self.possible_agents)
        return self.look(self.agents), {}
    def step(self, actions):
        assert {*actions} == {*self.agents}
        self.steps, self.t = self.steps + 1, self.t + 1
        if self.steps in self.fail: raise RuntimeError('broken')
        ended = {n: self.t == LIFE[n] for n in actions}
        self.agents = [n for n in self.agents if not ended[n]]
        return self.look(actions), {n: float(self.steps) for n in actions}, ended, dict.fromkeys(actions, False), {}
    def close(self): self.closed = True

def rows_of(pipe, n): return np.concatenate([s.rows for s, _ in zip(pipe, range(n))])

@pytest.mark.parametrize('order', ['abc', 'cba', 'bac'])
def test_groups_see_one_stepping_in_whichever_order_they_are_read(order):
    env = Zoo()
    groups = AgentGroups(env, AGENTS, seed=1)
    found = {}
    for name in order: found[name] = rows_of(groups[name], 8)
    want = {n: [] for n in AGENTS}   # moments with rows, of a script of five steps
    for moment in range(60):
        for name, agents in AGENTS.items():
            alive = [i for i, n in enumerate(agents) if moment % 5 < LIFE[n]]
            if alive: want[name].append((moment, alive))
    for name, rows in found.items():
        got = {}
        for m, a in zip(rows['moment'].tolist(), rows['agent'].tolist()): got.setdefault(m, []).append(a)
        assert [*got.items()] == want[name][:8]
        assert (rows['reward'] == rows['moment'] + 1).all() and (rows['next_state'][:, 0] == rows['moment'] + 1).all()
    assert env.seeds[0] == 1 and set(env.seeds[1:]) == {None}

@pytest.mark.parametrize('name', [*AGENTS])
def test_after_an_error_all_groups_begin_a_new_episode(name):
    env = Zoo(); env.fail = (3,)
    groups = AgentGroups(env, AGENTS, seed=1)
    pipes = {n: iter(groups[n]) for n in AGENTS}
    for _ in range(2): next(pipes[name])
    with pytest.raises(EnvError, match='broken'):
        for _ in range(3): next(pipes[name])
    for n in AGENTS:   # what waited is given first
        rows = rows_of(groups[n], 6)
        first = rows[rows['moment'] >= 2][0] if (rows['moment'] >= 2).any() else None
        assert first is None or first['step_n'] == 1

def test_an_error_of_one_policy_ends_the_episode_of_all_and_names_its_group():
    calls = []
    def policy(state):
        calls.append(1)
        if len(calls) == 3: raise RuntimeError('the policy of b')
        return torch.zeros(len(state), dtype=torch.int64)
    groups = AgentGroups(Zoo(), AGENTS, policies=dict(b=policy), seed=1)
    with pytest.raises(Exception, match='the policy of b'): rows_of(groups['a'], 5)
    rows = rows_of(groups['a'], 2)
    assert rows['step_n'].tolist() == [1, 1, 2, 2]
    b = rows_of(groups['b'], 3)
    assert b['step_n'].tolist() == [1, 2, 1]

@pytest.mark.parametrize('at', [0, 1, 4, 7])
def test_states_of_all_groups_go_on_together(at):
    def make(): return AgentGroups(Zoo(), AGENTS, seed=2)
    one, two = make(), make()
    streams = {n: iter(one[n]) for n in AGENTS}
    for i in range(at):
        for n in 'aabc' if i % 2 else 'abc': next(streams[n])   # some blocks wait
    states = {n: through_file(one[n].state_dict()) for n in AGENTS}
    for n in AGENTS: two[n].load_state_dict(states[n])
    for _ in range(9):
        for n in AGENTS: assert next(iter(two[n])) == next(iter(one[n]))

def test_a_chain_that_is_not_read_is_named():
    groups = AgentGroups(Zoo(), AGENTS, seed=1)
    groups['b'].most = 20
    with pytest.raises(Exception, match="blocks of 'b' that wait"): rows_of(groups['a'], 100)

def test_groups_learn_each_in_its_chain_and_are_closed():
    made = []
    def env(): made.append(Zoo()); return made[0]
    groups = AgentGroups(env, AGENTS, seed=0)
    learners = []
    for n in AGENTS:
        zoo = Zoo()
        net = value_net(zoo.observation_space(AGENTS[n][0]), zoo.action_space(AGENTS[n][0]), (8,))
        learners.append(groups[n].n_step(2, .9).prioritized_replay(bs=4, max_sz=100, seed=0).dqn(net))
    for i, records in zip(range(20), zip(*learners)): assert all(np.isfinite(r['loss']) for r in records)
    groups.close()
    assert made[0].closed

def test_a_copy_of_a_groups_pipe_goes_on_by_itself():
    groups = AgentGroups(Zoo(), AGENTS, seed=1)
    copy = pickle.loads(pickle.dumps(groups['a']))
    assert [s for s, _ in zip(copy, range(6))] == [s for s, _ in zip(groups['a'], range(6))]

# ---- what is saved, and what is forgotten ----

class Paid(Zoo):
    "Rewards by a function that a user chose"
    def __init__(self, f): super().__init__(); self.f = f
    def step(self, actions):
        obs, rewards, *others = super().step(actions)
        return obs, {n: self.f(r) for n, r in rewards.items()}, *others

def twice(x): return 2*x
def thrice(x): return 3*x

class Closed(Zoo):
    def __init__(self): super().__init__(); self.handle = object()

def states_of(groups, n):
    for name in AGENTS: rows_of(groups[name], n)
    return {n: through_file(groups[n].state_dict()) for n in AGENTS}

def load(groups, states):
    for n in AGENTS: groups[n].load_state_dict(states[n])
    for n in AGENTS: rows_of(groups[n], 1)   # taken up when they are first stepped

def test_an_environment_with_another_function_begins_a_new_episode():
    one, two = (AgentGroups(Paid(f), AGENTS, seed=2) for f in (twice, thrice))
    with pytest.warns(UserWarning, match=r"its parallel.env.f is another one; got .*thrice .*expected .*twice"): load(two, states_of(one, 2))
    assert two.shared.parallel.seeds[0] > 1_000_000

@pytest.mark.parametrize('before', [None, 0, 2, 4])
def test_what_cannot_be_saved_begins_a_new_episode_with_another_seed(before):
    "Also in groups that were stepped before, in the middle of an episode"
    one, two = (AgentGroups(Closed(), AGENTS, seed=2) for _ in range(2))
    states = states_of(one, 3)
    if before is None: two = one
    elif before:
        for n in AGENTS: rows_of(two[n], before)
    played = len(two.shared.parallel.seeds)
    with pytest.warns(UserWarning, match='could not be saved'):
        for n in AGENTS: two[n].load_state_dict(states[n])
        rows = {n: rows_of(two[n], 12) for n in AGENTS}
    for n in AGENTS: assert (rows[n]['next_state'][:, 0] == rows[n]['state'][:, 0] + 1).all()
    new, *later = two.shared.parallel.seeds[played:]
    assert new > 1_000_000 and set(later) <= {None}

class Counting:
    "Actions that count the steps since it began anew"
    def __init__(self): self.seen = []
    def initial_hidden(self, n): return torch.zeros(n)
    def __call__(self, state, hidden):
        self.seen.append(hidden.tolist())
        return torch.zeros(len(state), dtype=torch.int64), hidden + 1, dict(before=hidden)

@pytest.mark.parametrize('at', [1, 3, 4])
@pytest.mark.parametrize('first', ['a', 'b', 'c'])
def test_policies_forget_a_game_that_another_groups_error_ended(at, first):
    calls = []
    def fails(state):
        calls.append(1)
        if len(calls) == at: raise RuntimeError('of b')
        return torch.zeros(len(state), dtype=torch.int64)
    groups = AgentGroups(Zoo(), AGENTS, policies=dict(a=Counting(), b=fails, c=Counting()), seed=1)
    with pytest.raises(Exception, match='of b'):
        while True: next(iter(groups['c']))
    rows = {n: rows_of(groups[n], 12) for n in dict.fromkeys(first + 'abc')}
    for n in 'ac': assert (rows[n]['before'] == rows[n]['step_n'] - 1).all()
    for n in 'abc':   # a row's states are of one game
        assert (rows[n]['next_state'][:, 0] == rows[n]['state'][:, 0] + 1).all()

class Late(Zoo):
    "Forgets a reward in its second step"
    def step(self, actions):
        out = super().step(actions)
        if self.steps == 2: del out[1]['a0']
        return out

@pytest.mark.parametrize('first', ['a', 'b', 'c'])
def test_what_a_group_cannot_write_ends_the_episode_of_all(first):
    groups = AgentGroups(Late(), AGENTS, seed=1)
    with pytest.raises(EnvError, match="'a0' acted, and is missing in rewards"): rows_of(groups['a'], 2)
    for n in dict.fromkeys(first + 'abc'):
        rows = rows_of(groups[n], 8)
        assert (rows['next_state'][:, 0] == rows['state'][:, 0] + 1).all()
    assert groups.shared.parallel.seeds[:2] == [1, None]

@pytest.mark.parametrize('name', ['stale', 'over', 'broken', 'ready'])
def test_an_environment_may_have_attributes_of_any_name(name):
    class Named(Zoo):
        def observation_space(self, agent): return spaces.Box(-np.inf, np.inf, (1,))
        def action_space(self, agent): return spaces.Discrete(2)
    for value in True, False:
        env = Named()
        setattr(env, name, value)
        rows = rows_of(GymStepper(env), 7)
        assert [rows['step_n'][rows['env_id'] == i].tolist() for i in (0, 4)] == [[1, 2, 3, 1, 2], [1, 1]]

# ---- random programs ----

class Games(Zoo):
    "Each observation says in which game and at which time it was made; refuses actions that were chosen in another state; fails now and then"
    def __init__(self, fails, handle): super().__init__(); self.fails, self.handle, self.game = fails, handle, 0
    def look(self, agents): return {n: np.full(self.observation_space(n).shape, 1000*self.game + self.t, np.float32) for n in agents}
    def reset(self, seed=None, options=None): self.game += 1; return super().reset(seed)
    def step(self, actions):
        for n, a in actions.items(): assert a == (1000*self.game + self.t) % self.action_space(n).n
        failed = self.fails.get(self.steps + 1)
        if failed == 'env': self.steps += 1; raise RuntimeError('it failed')
        _, _, *others = super().step(actions)
        return self.look(actions), {n: 1000.*self.game + self.t for n in actions if n != failed}, *others

class Chooses:
    def __init__(self, k, fails): self.k, self.fails, self.calls = k, fails, 0
    def initial_hidden(self, n): return torch.zeros(n)
    def __call__(self, state, hidden):
        self.calls += 1
        if self.calls in self.fails: raise RuntimeError('it failed')
        return state[:, 0].long() % self.k, hidden + 1, dict(before=hidden)

@pytest.mark.filterwarnings('ignore:GymStepper')
@pytest.mark.parametrize('seed', range(24))
def test_each_row_is_of_one_game_whatever_fails_and_is_loaded(seed):
    "Reads in any order, errors of policies, of the environment, and of what it returns, states loaded in place and into others"
    rng = np.random.default_rng(seed)
    fails = {int(rng.integers(1, 40)): str(rng.choice(['env', *Zoo.possible_agents])) for _ in range(int(rng.integers(4)))}
    fail_at = {n: rng.integers(1, 60, int(rng.integers(3))) for n in AGENTS}
    def make(): return AgentGroups(Games(fails, object() if seed % 4 == 0 else None), AGENTS, policies={n: Chooses(k + 2, fail_at[n]) for k, n in enumerate(AGENTS)}, seed=3)
    groups, stands, saved = make(), {}, []
    for _ in range(100):
        x, name = rng.random(), str(rng.choice([*AGENTS]))
        if x < .05: saved.append(({n: through_file(groups[n].state_dict()) for n in AGENTS}, dict(stands)))
        elif x < .1 and saved:
            states, stands = saved[int(rng.integers(len(saved)))]
            groups, stands = groups if x < .075 else make(), dict(stands)
            for n in AGENTS: groups[n].load_state_dict(states[n])
        else:
            try: rows = next(iter(groups[name])).rows
            except RuntimeError as e: assert 'it failed' in str(e) or 'is missing in rewards' in str(e); continue
            at = rows['state'][:, 0]
            assert (rows['next_state'][:, 0] == at + 1).all() and (rows['reward'] == at + 1).all() and (rows['step_n'] == at % 1000 + 1).all()
            assert (rows['before'] == rows['step_n'] - 1).all()
            for r in rows:
                e, ep, step = name + str(r['env_id']), *r[['episode_n', 'step_n']].tolist()
                last, n = stands.get(e, (0, 0))
                assert (ep, step) == (last, n + 1) or ep > last and step == 1
                stands[e] = ep, step
