"""Videos of evaluations: what is in the file, and early errors for what can't work."""

import sys

import gymnasium as gym, numpy as np, pytest
from gymnasium import spaces

from fastrl_replay.all import evaluate
from fastrl_replay.cli import main


class Odd(gym.Env):
    "Draws 32 × 22 pixels, brighter with each step; episodes of 4 and 6 steps"

    metadata = dict(render_modes=['rgb_array'], render_fps=10)
    observation_space, action_space = spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode, self.n = render_mode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.n = 0, self.n + 1
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t >= 4, False, {}

    def render(self):
        return np.full((32, 22, 3), 20 * self.t, np.uint8)


gym.register('VideoOdd-v0', Odd)


def frames(path):
    from moviepy import VideoFileClip

    with VideoFileClip(str(path)) as clip:
        return [f.copy() for f in clip.iter_frames()], clip.fps, clip.size


@pytest.mark.slow
@pytest.mark.parametrize(
    'env',
    ['VideoOdd-v0', lambda: Odd('rgb_array'), Odd('rgb_array'), [Odd('rgb_array'), Odd()]],
    ids=['id', 'function', 'env', 'list'],
)
def test_the_first_episode_is_in_the_file_and_no_other(env, tmp_path):
    "5 pictures of 4 steps, the first one is the reset's; returns are those without a video"
    got = evaluate(None, env, 3, record=str(tmp_path / 'a.mp4'))
    assert (got == [4, 4, 4]).all()
    assert [*tmp_path.iterdir()] == [tmp_path / 'a.mp4']
    found, fps, _ = frames(tmp_path / 'a.mp4')
    assert len(found) == 5 and fps == 10
    assert np.allclose([f.mean() for f in found], [0, 20, 40, 60, 80], atol=4)


@pytest.mark.parametrize(
    'env,file,said',
    [
        (lambda: Odd(), 'a.mp4', 'rgb_array'),
        (lambda: gym.make_vec('VideoOdd-v0', 2), 'a.mp4', 'got TypeError: .*VectorEnv'),
        ('VideoOdd-v0', 'a.gif', 'a path that ends in .mp4'),
        ('VideoOdd-v0', 'no/a.mp4', 'in an existing directory'),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_a_policy_acts(env, file, said, tmp_path):
    def never(state):
        raise AssertionError('it was asked')

    with pytest.raises((ValueError, TypeError), match=said):
        evaluate(never, env, 2, record=tmp_path / file)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize('package', ['moviepy', 'pygame'])
def test_a_missing_package_is_named_with_its_extra(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    env = 'CartPole-v1' if package == 'pygame' else 'VideoOdd-v0'
    with pytest.raises(ValueError, match=r"pip install 'fastrl_replay\[video\]'"):
        evaluate(None, env, 1, record=tmp_path / 'a.mp4')


def test_an_error_leaves_the_older_file(tmp_path):
    (tmp_path / 'a.mp4').write_bytes(b'older')

    def fails(state):
        raise RuntimeError('the policy is gone')

    with pytest.raises(RuntimeError):
        evaluate(fails, 'VideoOdd-v0', 1, record=tmp_path / 'a.mp4')
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b'older']


def test_eval_record(whole, tmp_path, capsys):
    "The video has the steps of the first episode"

    def said(*more):
        assert main(['eval', str(whole), '--episodes', '3', *map(str, more)]) == 0
        return capsys.readouterr().out

    plain, out = said(), said('--record', tmp_path / 'pole.mp4')
    assert out.startswith(plain)
    assert str(tmp_path / 'pole.mp4') in out
    first = float(out.split('(return ')[1].split(')')[0])
    assert len(frames(tmp_path / 'pole.mp4')[0]) == first + 1
