"""Recipes by learner: `train dqn --env ID`, what a run is called, what a learner can't take, and environments without a threshold."""

import json
from pathlib import Path

import gymnasium as gym, numpy as np, pytest
from gymnasium import spaces

from fastrl_replay.app.recipe_settings import recipe, recipes
from fastrl_replay.app.recipes import BY_LEARNER, Agent, fitting
from fastrl_replay.steps.settings import SettingsError
from fastrl_replay.cli import main
from test_recipes import SET, says

SMALL = [*SET, 'eval_every=200', 'max_sz=1000']
NETS = dict(r2d2=['network=8', 'length=10', 'burn_in=2', 'overlap=5'])


@pytest.mark.parametrize(
    'name,env',
    [
        ('dqn', 'Acrobot-v1'),
        ('r2d2', 'Acrobot-v1'),
        ('sac', 'MountainCarContinuous-v0'),
        ('td3', 'MountainCarContinuous-v0'),
    ],
)
def test_trains_on_another_environment_and_is_named_by_it(name, env, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(['train', name, '--env', env, *SMALL, *NETS.get(name, [])]) == 0, (
            capsys.readouterr().err
        )
    out = Path(f'runs/{name}-{env}-seed0')
    assert (
        out.is_dir()
        and Path(f'{out}-2').is_dir()
        and f'{name} on {env}, seed 0, into {out}' in capsys.readouterr().out
    )
    s = json.loads((out / 'summary.json').read_text())
    assert (s['env'], s['solved']) == (env, gym.spec(env).reward_threshold)


@pytest.mark.parametrize(
    'line,said',
    [
        ('dqn --env Pendulum-v1', 'train sac --env Pendulum-v1'),
        ('r2d2 --env Pendulum-v1', 'train sac --env Pendulum-v1'),
        ('sac --env CartPole-v1', 'train dqn --env CartPole-v1'),
        ('td3 --env CartPole-v1', 'train dqn --env CartPole-v1'),
        ('taxi --env CartPole-v1', 'train dqn --env CartPole-v1'),
        ('cartpole --env Pendulum-v1', 'train sac --env Pendulum-v1'),
    ],
)
def test_an_environment_that_a_learner_cant_take_names_a_recipe_that_fits(
    line, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    err = says(capsys, 'train', *line.split())
    assert f"can't learn in {line.split()[-1]}" in err and said in err and not [*tmp_path.iterdir()]
    for name in fitting(
        tuple(getattr(gym.make(line.split()[-1]), f'{k}_space') for k in ('observation', 'action'))
    ):
        Agent(recipe(name, env=line.split()[-1]).settings).pipe.close()


def test_spaces_that_no_learner_takes_name_no_recipe():
    assert fitting((spaces.Box(-1, 1, (3,), np.float32), spaces.MultiBinary(3))) == [
        'dqn'
    ]  # a value for each part
    assert (
        fitting((spaces.Box(-1, 1, (3,), np.float32), spaces.Tuple([spaces.Discrete(2)] * 2))) == []
    )
    assert (
        fitting(
            (spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-np.inf, np.inf, (3,), np.float32))
        )
        == []
    )  # no bounds


def test_names_of_directories(tmp_path, monkeypatch, capsys):
    "Where the recipe says the environment, as before; where it was changed, with it"
    monkeypatch.chdir(tmp_path)
    for more in [], ['--env', 'Acrobot-v1'], ['env=MountainCar-v0']:
        line = [
            'train',
            'cartpole',
            '--steps',
            '120',
            *(more if '--env' in more else []),
            *SMALL[:-2],
            *(more if '--env' not in more else []),
        ]
        assert main(line) == 0, capsys.readouterr().err
    assert sorted(p.name for p in Path('runs').iterdir()) == [
        'cartpole-Acrobot-v1-seed0',
        'cartpole-MountainCar-v0-seed0',
        'cartpole-seed0',
    ]


def test_an_environment_without_a_threshold_is_never_solved(tmp_path, capsys):
    "Pendulum has none: said so, written as null, drawn and compared without a line"
    line = ['--env', 'Pendulum-v1', *SMALL, 'eval_episodes=1']
    assert main(['train', 'sac', '--out', str(tmp_path / 'r'), *line]) == 0, capsys.readouterr().err
    assert 'no return counts as solved here' in capsys.readouterr().out
    s = json.loads((tmp_path / 'r/summary.json').read_text())
    assert s['solved'] is None and s['solved_at_step'] is None
    assert main(['compare', str(tmp_path / 'r'), '--plot', str(tmp_path / 'c.png')]) == 0, (
        capsys.readouterr().err
    )


def test_a_number_takes_the_place_of_the_threshold_and_back():
    assert (
        recipe('dqn', solved='90').settings['solved'] == 90.0
        and recipe('cartpole', solved='threshold').settings['solved'] == 'threshold'
    )
    with pytest.raises(SettingsError, match='solved'):
        recipe('dqn', solved='often')


def test_recipes_by_learner_name_every_learner_that_takes_any_environment():
    known = recipes()
    assert [known[n].settings['learner'] for n in BY_LEARNER] == list(BY_LEARNER)
    assert all(known[n].settings['solved'] == 'threshold' for n in BY_LEARNER)


def test_env_of_a_resumed_run_is_refused(whole, capsys):
    assert 'env = Acrobot-v1 with --resume' in says(
        capsys, 'train', '--resume', whole, '--env', 'Acrobot-v1'
    )
