"""Recipes by learner: `train dqn --env ID`, and environments without a threshold."""

import json

import gymnasium as gym, pytest

from fastrl_replay.app.recipes import Agent
from fastrl_replay.cli import main
from fastrl_replay.learning.settings import SettingsError, recipe
from test_recipes import SET

SMALL = [*SET, 'eval_every=200', 'max_sz=1000']
NETS = dict(r2d2=['network=8', 'length=10', 'burn_in=2', 'overlap=5'])


@pytest.mark.slow
@pytest.mark.parametrize(
    'name,env',
    [
        ('dqn', 'Acrobot-v1'),
        ('r2d2', 'Acrobot-v1'),
        ('sac', 'MountainCarContinuous-v0'),
        ('td3', 'MountainCarContinuous-v0'),
    ],
)
def test_a_learner_trains_on_another_environment(name, env, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(['train', name, '--env', env, *SMALL, *NETS.get(name, [])]) == 0
    out = f'runs/{name}-seed0'
    assert f'{name} on {env}, seed 0, into {out}' in capsys.readouterr().out
    s = json.loads((tmp_path / out / 'summary.json').read_text())
    assert (s['env'], s['solved']) == (env, gym.spec(env).reward_threshold)


def test_an_environment_without_a_threshold_is_never_solved(tmp_path, capsys):
    "Pendulum has none: said so, written as null, drawn and compared without a line"
    line = ['--env', 'Pendulum-v1', *SMALL, 'eval_episodes=1']
    assert main(['train', 'sac', '--out', str(tmp_path / 'r'), *line]) == 0, capsys.readouterr().err
    assert 'this environment has no target return' in capsys.readouterr().out
    s = json.loads((tmp_path / 'r/summary.json').read_text())
    assert s['solved'] is None and s['solved_at_step'] is None
    assert main(['compare', str(tmp_path / 'r'), '--plot', str(tmp_path / 'c.png')]) == 0, (
        capsys.readouterr().err
    )


def test_a_number_takes_the_place_of_the_threshold_and_back():
    assert Agent(recipe('dqn', solved='90').settings).solved == 90.0
    assert Agent(recipe('cartpole', solved='threshold').settings).solved == 475.0
    with pytest.raises(SettingsError, match='solved'):
        Agent(recipe('dqn', solved='often').settings)
