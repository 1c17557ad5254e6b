"""Export a memory as a Minari data set: no warning, with its author and its environment."""

import warnings

import gymnasium as gym, pytest

from fastrl_replay.all import ExperienceReplay, GymStepper, write_minari

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
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        made = write_minari(memory, 'pole/mine-v0', env, author='Ada', author_email='a@b.org')
    again = minari.load_dataset('pole/mine-v0').recover_environment()
    assert again.spec.id == 'CartPole-v1'
    assert made.observation_space == env.observation_space
    assert made.storage.metadata['author'] == {'Ada'}
