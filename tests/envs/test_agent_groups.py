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
