"""Export a memory as a Minari data set: no warning, with its author and its environment."""

import warnings

import gymnasium as gym, pytest

from fastrl_replay.all import ExperienceReplay, GymStepper, write_minari
from fastrl_replay.data.datasets import env_facts

minari = pytest.importorskip('minari')


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path / 'minari'))
    replay = ExperienceReplay(bs=1, max_sz=100)
    for block in GymStepper('CartPole-v1', seed=0).header(60):
        replay.add(block)
    return replay.memory


def test_export_is_quiet_and_the_environment_comes_back(memory):
    env = gym.make('CartPole-v1')
    facts, why = env_facts(memory[:1].rows, env)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        made = write_minari(memory, 'pole/mine-v0', **facts, author='Ada', author_email='a@b.org')
    again = minari.load_dataset('pole/mine-v0').recover_environment()
    assert not why and again.spec.id == 'CartPole-v1'
    assert made.observation_space == env.observation_space
    assert made.storage.metadata['author'] == {'Ada'}


def test_an_environment_of_other_rows_is_named():
    rows = next(iter(GymStepper('CartPole-v1', seed=0))).rows
    facts, why = env_facts(rows, gym.make('Pendulum-v1'))
    assert 'its states are float32[3]' in why and 'environment' not in facts
