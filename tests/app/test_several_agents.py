"""PettingZoo's environments by name.

The recipe `pursuit`, `train dqn --env pettingzoo/…`, resuming, and errors for missing ones."""

import json, sys

import numpy as np, pytest

from fastrl_replay.learning.settings import recipe
from fastrl_replay.app.recipes import Agent, play_episodes
from fastrl_replay.app.runs import resume, start
from fastrl_replay.cli import main
from test_recipes import SET, TINY, says, stop

pytest.importorskip('pettingzoo')
ENV = 'pettingzoo/sisl/pursuit-v5(x_size=6, y_size=6, n_evaders=2, n_pursuers=3, max_cycles=15)'
SMALL = {**TINY, 'network': 'conv 8', 'max_sz': 1_000, 'eps_steps': 100}


def test_the_recipe_steps_all_agents_with_one_network():
    agent = Agent(recipe('pursuit', **SMALL).settings)
    assert (agent.agents, agent.policy.__class__.__name__) == (4, 'EpsGreedy') and agent.spaces[
        0
    ].shape == (7, 7, 3)
    for _, record in zip(range(20), agent.pipe):
        assert np.isfinite(record['loss'])
    rows = agent.memory.memory[:].rows
    assert {*rows['env_id'].tolist()} == {*range(8)} and {*rows['agent'].tolist()} == {*range(4)}
    assert len(play_episodes(agent, 5)[0]) == 5  # of two environments of four
    agent.pipe.close()


@pytest.mark.slow
def test_dqn_trains_in_an_environment_of_agents_from_the_command_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(['train', 'dqn', '--env', ENV, *SET, 'network=conv 8', 'max_sz=1000']) == 0, (
        capsys.readouterr().err
    )
    (out,) = (tmp_path / 'runs').iterdir()
    s = json.loads((out / 'summary.json').read_text())
    assert out.name == 'dqn-seed0' and (s['env'], s['env_steps'], s['solved']) == (ENV, 300, None)
    assert s['episodes'] == 18  # six of 15 steps, of three agents
    assert (
        main(['eval', str(out), '--episodes', '4']) == 0
        and 'mean return of 4 episodes' in capsys.readouterr().out
    )


def test_it_can_be_saved_between_any_two_steps_and_goes_on(tmp_path):
    "Waiting for a moment at which all agents are between two episodes could take for ever"
    run = start(recipe('dqn', env=ENV, **SMALL), tmp_path / 'a')
    assert run.agent.resumable and 150 <= stop(run, 150) < 250
    assert resume(tmp_path / 'a').train()['env_steps'] >= 300


@pytest.mark.parametrize(
    'args,said',
    [
        (['--env', 'pettingzoo/sisl/pursut-v5'], 'cannot be made'),
        (['--env', 'pettingzoo/sisl/pursuit-v5(n_pursuit=7)'], 'cannot be made'),
        (['--env', 'pettingzoo/sisl/multiwalker-v9'], 'a recipe with sac or td3'),
        (['--env', ENV, '--set', 'wrappers=TimeLimit(9)'], "setting 'wrappers'"),
    ],
)
def test_what_cant_be_had_is_named_in_a_line(args, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert said in says(capsys, 'train', 'dqn', *args) and not [*tmp_path.iterdir()]


def test_a_missing_pettingzoo_is_named_with_its_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'pettingzoo', None)
    assert "pip install 'fastrl_replay[pettingzoo]'" in says(capsys, 'train', 'pursuit')
