"""A memory as a data set of Minari, from the command line: without a warning, with its author, and with its environment."""

import warnings

import pytest

pytest.importorskip('minari')

from fastrl_replay.cli import main
from test_recipes import SET, says


@pytest.fixture
def rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path / 'minari'))
    assert main(['train', 'cartpole', '--memory', 'rows', '--out', 'r', *SET]) == 0
    capsys.readouterr()
    return tmp_path / 'rows'


def test_export_is_quiet_and_the_environment_comes_back(rows, capsys):
    import minari

    with warnings.catch_warnings():
        warnings.simplefilter('error')
        line = [
            'memory',
            'rows',
            '--export',
            'minari:pole/mine-v0',
            '--author',
            'Ada',
            '--email',
            'ada@example.org',
            '--permalink',
            'https://example.org/x',
            '--algorithm',
            'dqn',
            '--description',
            'Short',
        ]
        assert main(line) == 0
    assert capsys.readouterr().err == ''
    made = minari.load_dataset('pole/mine-v0')
    env, facts = made.recover_environment(), made.storage.metadata
    assert env.spec.id == 'CartPole-v1' and (made.observation_space, made.action_space) == (
        env.observation_space,
        env.action_space,
    )
    assert [
        facts[k]
        for k in ('author', 'author_email', 'code_permalink', 'algorithm_name', 'description')
    ] == [{'Ada'}, {'ada@example.org'}, 'https://example.org/x', 'dqn', 'Short']


def test_export_without_facts_is_quiet_too(rows, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert main(['memory', 'rows', '--export', 'minari']) == 0
    assert capsys.readouterr().err == ''


def test_an_environment_of_other_rows_is_left_out_and_said(rows, capsys):
    import minari

    assert main(['memory', 'rows', '--export', 'minari:pole/other-v0', '--env', 'Pendulum-v1']) == 0
    assert 'the environment is left out: its states are float32[3]' in capsys.readouterr().err
    assert minari.load_dataset('pole/other-v0').env_spec is None


@pytest.mark.parametrize(
    'line,said',
    [
        ('rows --export rows.npz --author Ada', '--export; got rows.npz; expected --export minari'),
        ('rows --author Ada', '--author'),
        ('rows --export minari:pole/x-v0 --env CartPol-v1', "did you mean 'CartPole-v1'"),
    ],
)
def test_facts_that_go_nowhere_are_refused(line, said, rows, capsys):
    assert said in says(capsys, 'memory', *line.split())
