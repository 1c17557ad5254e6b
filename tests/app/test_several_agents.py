"""PettingZoo's environments by name: the recipe `pursuit`, `train dqn --env pettingzoo/…`, resuming, evaluations, and what is said when one can't be had."""

import json, sys

import numpy as np, pytest

from fastrl_replay.app.named_envs import named_env
from fastrl_replay.app.recipe_settings import recipe
from fastrl_replay.app.recipes import Agent, evaluate, make_env
from fastrl_replay.steps.settings import SettingsError
from fastrl_replay.app.run_files import read_metrics
from fastrl_replay.app.runs import resume, start
from fastrl_replay.cli import main
from test_recipes import SET, TINY, says

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
    assert len(evaluate(agent, 5)) == 5  # of two environments of four
    agent.pipe.close()


def test_evaluations_play_as_many_episodes_as_asked_for_and_make_no_more_environments_than_needed(
    monkeypatch,
):
    agent, made = Agent(recipe('dqn', env=ENV, **SMALL).settings), []
    monkeypatch.setattr(
        'fastrl_replay.app.recipes.make_env', lambda *a, **k: made.append(1) or make_env(*a, **k)
    )
    for n, envs in (1, 1), (3, 1), (4, 2), (7, 3):
        made.clear()
        returns = evaluate(agent, n)
        assert (len(returns), len(made)) == (n, envs) and (returns == evaluate(agent, n)).all()
    agent.pipe.close()


def test_dqn_trains_in_an_environment_of_agents_from_the_command_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(['train', 'dqn', '--env', ENV, *SET, 'network=conv 8', 'max_sz=1000']) == 0, (
        capsys.readouterr().err
    )
    (out,) = (tmp_path / 'runs').iterdir()
    s = json.loads((out / 'summary.json').read_text())
    assert out.name == 'dqn-pursuit-v5-seed0' and (s['env'], s['env_steps'], s['solved']) == (
        ENV,
        300,
        None,
    )
    assert s['episodes'] == 18  # six of 15 steps, of three agents
    assert (
        main(['eval', str(out), '--episodes', '4']) == 0
        and 'mean return of 4 episodes' in capsys.readouterr().out
    )


def test_it_can_be_saved_between_any_two_steps_and_goes_on(tmp_path):
    "Agents' episodes end together or not: waiting for a moment at which all are between two episodes could take for ever"
    r = recipe('dqn', env=ENV, **SMALL)
    run = start(r, tmp_path / 'a')
    assert run.agent.resumable

    def stop(rows):
        run.stop = run.agent.journal.steps >= 150

    run.show = type('Show', (), dict(tick=staticmethod(stop), report=lambda self, line: None))()
    assert run.train(run.show) is None and 150 <= run.agent.journal.steps < 250
    again = resume(tmp_path / 'a')
    assert again.train()['env_steps'] >= 300 and read_metrics(tmp_path / 'a')


@pytest.mark.parametrize(
    'args,said',
    [
        (
            ['--env', 'pettingzoo/sisl/pursut-v5'],
            "PettingZoo has no parallel environment 'sisl/pursut-v5' (did you mean 'sisl/pursuit-v5'?)",
        ),
        (['--env', 'pettingzoo/classic/chess-v6'], 'one whose agents act at the same time'),
        (['--env', 'pettingzoo/sisl/pursuit-v5(7)'], 'has an argument without a name'),
        (['--env', 'pettingzoo/sisl/pursuit-v5(n_pursuit=7)'], "can't be made"),
        (
            ['--env', 'pettingzoo/sisl/multiwalker-v9'],
            'train sac --env pettingzoo/sisl/multiwalker-v9',
        ),
        (['--env', ENV, '--set', 'wrappers=TimeLimit(9)'], "setting 'wrappers'"),
        (['--env', ENV, '--set', 'observe=0 1'], "setting 'observe'; got (0, 1); expected all"),
    ],
)
def test_what_cant_be_had_is_named_in_a_line(args, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert said in says(capsys, 'train', 'dqn', *args) and not [*tmp_path.iterdir()]


def test_a_missing_pettingzoo_is_named_with_its_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'pettingzoo', None)
    assert "pip install 'fastrl_replay[pettingzoo]'" in says(capsys, 'train', 'pursuit')
    with pytest.raises(SettingsError, match='needs PettingZoo'):
        named_env(ENV)


def test_a_video_of_several_agents_is_refused_before_anything_is_played(tmp_path, capsys):
    start(recipe('dqn', env=ENV, **SMALL), tmp_path / 'r').train()
    assert (
        'record' in says(capsys, 'eval', tmp_path / 'r', '--record', tmp_path / 'v.gif')
        and not (tmp_path / 'v.gif').exists()
    )
