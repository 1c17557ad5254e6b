"""Videos of evaluations: what is in the file, and that what can't work is told before an episode begins."""

import sys
from contextlib import suppress
from pathlib import Path

import gymnasium as gym, numpy as np, pytest
from gymnasium import spaces

from fastrl_replay.all import evaluate
from fastrl_replay.cli import main
from test_recipes import says


class Odd(gym.Env):
    "Draws 33 × 21 pixels, brighter with each step; episodes of 4 and 6 steps"

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
        return np.full((33, 21, 3), 20 * self.t, np.uint8)


class Gray(Odd):
    def render(self):
        return np.zeros((33, 21), np.uint8)


for cls in Odd, Gray:
    gym.register(f'Video{cls.__name__}-v0', cls)
gym.register('VideoSilent-v0', 'test_recipes:Opaque', kwargs=dict(handle=False))


def frames(path):
    from moviepy import VideoFileClip

    with VideoFileClip(str(path)) as clip:
        return [f.copy() for f in clip.iter_frames()], clip.fps, clip.size


def pictures(path):
    from PIL import Image

    with Image.open(path) as im:
        found = []
        for i in range(im.n_frames):
            im.seek(i)
            found.append(int(np.asarray(im.convert('RGB')).mean()))
        return found


@pytest.mark.parametrize(
    'env',
    ['VideoOdd-v0', lambda: Odd('rgb_array'), Odd('rgb_array'), [Odd('rgb_array'), Odd()]],
    ids=['id', 'function', 'env', 'list'],
)
def test_the_first_episode_is_in_the_file_and_no_other(env, tmp_path):
    "5 pictures of 4 steps, of which the first is the reset's; returns are those without a video"
    got = evaluate(None, env, 3, record=tmp_path / 'a.gif')
    assert (
        (got == [4, 4, 4]).all()
        and pictures(tmp_path / 'a.gif') == [0, 20, 40, 60, 80]
        and [*tmp_path.iterdir()] == [tmp_path / 'a.gif']
    )


def test_mp4_has_every_picture_and_even_sides(tmp_path):
    evaluate(None, 'VideoOdd-v0', 2, record=str(tmp_path / 'a.mp4'))
    found, fps, size = frames(tmp_path / 'a.mp4')
    assert len(found) == 5 and fps == 10 and list(size) == [22, 34]
    assert np.allclose([f.mean() for f in found], [0, 20, 40, 60, 80], atol=4)


@pytest.mark.parametrize(
    'env,file,said',
    [
        ('VideoSilent-v0', 'a.gif', 'VideoSilent-v0 gives no pictures'),
        ('VideoGray-v0', 'a.mp4', r'uint8 \[33, 21\]; expected uint8 \[height, width, 3\]'),
        (lambda: Odd(), 'a.gif', "render_mode = None; expected 'rgb_array'"),
        (lambda: gym.make_vec('VideoOdd-v0', 2), 'a.gif', 'got a VectorEnv'),
        ('VideoOdd-v0', 'a.avi', r'a file .mp4 or .gif'),
        ('VideoOdd-v0', 'a', r'a file .mp4 or .gif'),
        ('VideoOdd-v0', 'no/a.gif', 'a file in a directory that is there'),
    ],
)
def test_what_cant_be_recorded_is_told_before_a_policy_acts(env, file, said, tmp_path):
    def never(state):
        raise AssertionError('it was asked')

    with pytest.raises((ValueError, TypeError), match=said):
        evaluate(never, env, 2, record=tmp_path / file)
    assert not [*tmp_path.iterdir()]


def test_a_vector_environment_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match='a VectorEnv; expected an id'):
        evaluate(None, gym.make_vec('CartPole-v1', 2), 2, record=tmp_path / 'a.gif')


@pytest.mark.parametrize('package,file', [('moviepy', 'a.mp4'), ('PIL', 'a.gif')])
def test_a_missing_package_is_named_with_its_extra(package, file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ValueError, match=r"is not installed. Remedy: pip install 'fastrl_replay\[video\]'"
    ):
        evaluate(None, 'VideoOdd-v0', 1, record=tmp_path / file)


def test_missing_pygame_is_named_with_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pygame', None)
    with pytest.raises(
        ValueError, match=r"CartPole-v1 gives no pictures.*pip install 'fastrl_replay\[video\]'"
    ):
        evaluate(None, 'CartPole-v1', 1, record=tmp_path / 'a.gif')


def writing(path):
    "Processes, where the system shows them, whose command names a path"
    found = []
    for p in Path('/proc').glob('[0-9]*/cmdline'):
        with suppress(OSError):
            found += [p] * (str(path) in p.read_text(errors='replace'))  # it has ended meanwhile
    return found


def test_an_error_leaves_no_half_of_a_file(tmp_path):
    (tmp_path / 'a.mp4').write_bytes(b'older')

    def fails(state):
        raise RuntimeError('the policy is gone')

    with pytest.raises(RuntimeError) as held:
        evaluate(
            fails, 'VideoOdd-v0', 1, record=tmp_path / 'a.mp4'
        )  # with all that its frames hold
    assert held and not writing(tmp_path), 'ffmpeg runs on'
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b'older']


def test_eval_record(whole, tmp_path, capsys):
    "The command: the same returns as without, of which it names the first one; the video has its steps"

    def said(*more):
        assert main(['eval', str(whole), '--episodes', '3', *map(str, more)]) == 0
        return capsys.readouterr().out

    plain, out = said(), said('--record', tmp_path / 'pole.mp4')
    assert (
        out.startswith(plain)
        and 'video of the first one' in out
        and str(tmp_path / 'pole.mp4') in out
    )
    first = float(out.split('with a return of ')[1].split(':')[0])
    assert len(frames(tmp_path / 'pole.mp4')[0]) == first + 1
    assert 'a file .mp4 or .gif' in says(capsys, 'eval', whole, '--record', tmp_path / 'pole.webm')


def test_eval_record_of_an_environment_that_takes_no_render_mode(tmp_path, capsys, monkeypatch):
    from test_recipes import SET

    (tmp_path / 'plainroom.py').write_text(
        'from test_recipes import Opaque\nclass Room(Opaque):\n    def __init__(self): super().__init__(handle=False)\n'
    )
    monkeypatch.chdir(tmp_path)
    assert main(['train', 'cartpole', '--out', 'r', *SET, 'env=plainroom:Room', 'steps=120']) == 0
    capsys.readouterr()
    err = says(capsys, 'eval', 'r', '--trust', '--record', 'a.gif')
    assert 'render_mode' in err and not Path('a.gif').exists()
