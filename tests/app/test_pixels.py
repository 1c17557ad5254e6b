"""Pixels end to end: networks for images, settings, lives and saved games of Atari, recipes."""

import pickle, subprocess, sys
from copy import deepcopy
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces

from fastrl_replay.all import *
from fastrl_replay.learning.settings import recipe, recipes
from fastrl_replay.app.recipes import Agent, play_episodes
from fastrl_replay.app.runs import resume, start
from fastrl_replay.cli import main
from fastrl_replay.envs.atari import EpisodicLife, atari, register_games
from fastrl_replay.envs.catch import Catch
from fastrl_replay.envs.envstate import decode, encode
from fastrl_replay.testing import same, through_file
from test_cli import same_runs
from test_recipes import stop


def pixels(*shape, high=255, dtype=np.uint8):
    return spaces.Box(0, high, shape, dtype)


def of_space(space, n):
    return torch.from_numpy(np.stack([space.sample() for _ in range(n)]))


VECTOR, TWO = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
TINY = dict(
    steps=300,
    warmup=100,
    network='conv 8',
    bs=8,
    train_every=1,
    eval_every=150,
    eval_episodes=2,
    save_every=100,
    report_every=50,
)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr('fastrl_replay.app.runs.charts_png', lambda *args: b'\x89PNG')


# ---- networks ----

IMAGES = [  # (space, channels that a convolution sees, sides)
    (pixels(4, 84, 84), 4, (84, 84)),
    (pixels(84, 84, 3), 3, (84, 84)),
    (pixels(36, 36), 1, (36, 36)),
    (pixels(4, 40, 50, 3), 12, (40, 50)),
    (pixels(10, 10, 6, high=1, dtype=bool), 6, (10, 10)),
    (pixels(5, 5, 5, dtype=np.float32), 5, (5, 5)),
]


@pytest.mark.parametrize('space,channels,sides', IMAGES, ids=lambda x: str(x))
def test_any_image(space, channels, sides):
    """One state, or many in any order and leading shape, give the same values.

    Gradients reach each weight, and copies are alike."""
    torch.manual_seed(0)
    net = conv_net(space, spaces.Discrete(3), (7,), True)
    states = of_space(space, 6)
    first = net[0].layers[0]
    assert first.in_channels == channels and first(torch.zeros(1, channels, *sides)).shape[-1] >= 1
    q = net(states)
    assert q.shape == (6, 3) and q.dtype == torch.float32
    torch.testing.assert_close(net(states.reshape(2, 3, *space.shape)), q.reshape(2, 3, 3))
    torch.testing.assert_close(net(states[4]), q[4])
    torch.testing.assert_close(net(states.flip(0)), q.flip(0))
    assert net(states[:0]).shape == (0, 3)
    q.square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    for copy in deepcopy(net), pickle.loads(pickle.dumps(net)):
        assert torch.equal(copy(states), q)


def test_bytes_are_scaled_and_floats_are_not():
    "By 255, once; the same from a row's column, whose images don't lie next to each other"
    torch.manual_seed(0)
    as_bytes, as_floats = (
        conv_net(pixels(2, 12, 12), TWO),
        conv_net(pixels(2, 12, 12, high=1.0, dtype=np.float32), TWO),
    )
    as_floats.load_state_dict(as_bytes.state_dict())
    rows = np.zeros(3, step_dtype(pixels(2, 12, 12), TWO))
    rows['state'] = np.random.default_rng(0).integers(256, size=(3, 2, 12, 12))
    state = Steps(rows).state
    assert state.dtype == torch.uint8 and not state.is_contiguous()
    torch.testing.assert_close(as_bytes(state), as_floats(state / 255))
    torch.testing.assert_close(as_bytes[0](state), as_floats[0](state.float() / 255))
    assert not torch.allclose(as_floats(state.float()), as_bytes(state))


def test_dqns_network_is_the_papers():
    "Layer by layer, against torch's own words"
    net, x = conv_net(pixels(4, 84, 84), spaces.Discrete(6)), of_space(pixels(4, 84, 84), 2)
    a, _, b, _, c, *_ = net[0].layers
    h = x.float() / 255
    for conv in a, b, c:
        h = torch.relu(torch.nn.functional.conv2d(h, conv.weight, conv.bias, conv.stride))
    torch.testing.assert_close(net(x), net[3](torch.relu(net[1](h.flatten(1)))))
    assert [tuple(l.weight.shape) for l in (a, b, c, net[1], net[3])] == [
        (32, 4, 8, 8),
        (64, 32, 4, 4),
        (64, 64, 3, 3),
        (512, 3136),
        (6, 512),
    ]


def error(f, *args, kind=ValueError, **kwargs):
    with pytest.raises(kind) as e:
        f(*args, **kwargs)
    return str(e.value)


def test_networks_name_each_other():
    "Who wants numbers refuses images and names conv_net"
    for space in pixels(4, 84, 84), spaces.Dict(eye=pixels(2, 12, 12), speed=VECTOR):
        assert 'network = conv' in error(value_net, space, TWO)


# ---- settings ----

CATCH = dict(env='fastrl_replay/Catch-v0(size=6, scale=2)', wrappers='none')


@pytest.mark.parametrize(
    'name,changes,said',
    [
        ('catch', dict(network='con 512'), "setting 'network'; got 'con 512'"),
        ('catch', dict(network='8 8'), 'value_net: the observation space has images'),
        ('catch', dict(store='Frame(2)'), "no store 'Frame' (did you mean 'Frames'?)"),
        ('catch', dict(store='Frames(stakc=2)'), "unexpected keyword argument 'stakc'"),
        ('catch', dict(store='Frames(2'), "setting 'store'"),
        ('catch', dict(store='Rows(mine)'), "multiple values for argument 'path'"),
        ('catch', dict(store='os:system(1)'), "there is no store 'os:system'"),
        ('catch', dict(store='Frames(stack=0)'), 'Frames: stack; got 0'),
        ('catch', dict(eval_eps='1.5'), "setting 'eval_eps'; got 1.5; expected from 0 to 1"),
        ('pong', dict(env='ALE/Pong-v5'), 'Disable frame-skipping'),
        ('pong', dict(env='ALE/Pon-v5(frameskip=1)'), "Did you mean: `Pong`"),
        ('pong', dict(wrappers='atari(noops=-1)'), 'the `noop_max` to be non-negative'),
    ],
)
def test_settings_that_cant_be_built(name, changes, said):
    "One line, that names the setting"
    message = error(lambda: Agent(recipe(name, **changes).settings))
    assert said in message and '\n' not in message, message


@pytest.mark.slow
def test_each_builder_uses_the_store():
    "All recipes, whatever they learn with"
    for name, r in recipes().items():
        if r.settings['memory'] != 'none' and not r.settings['shards']:
            agent = Agent(recipe(name, max_sz=1_000, store='Rows()').settings)
            assert repr(agent.memory.store) == 'Rows()', name
    pong = Agent(recipe('pong').settings)
    assert repr(pong.memory.store) == "Frames(4, compress='lz4')"


@pytest.mark.slow
def test_what_is_learned_doesnt_depend_on_the_store():
    "The same records to the last digit"
    stores = 'Rows()', 'Frames(2, compress=lz4)'
    whole, frames = (Agent(recipe('catch', **TINY, store=s).settings) for s in stores)
    assert list(whole.pipe) == list(frames.pipe) and whole.pipe.updates > 20


# ---- a scripted emulator ----


class Emulator:
    "What the preparation asks of one: a screen, lives"

    def __init__(self, game):
        self.game = game

    def lives(self):
        return max(3 - self.game.t // 20, 0)

    def getScreenGrayscale(self, out):
        out[:] = self.game.t % 2 * 100 + self.game.t  # odd pictures are brighter: it flickers


class Scripted(gym.Env):
    "A game of three lives of 20 pictures; each picture is worth 3"

    observation_space, action_space = pixels(210, 160, 3), spaces.Discrete(4)

    def __init__(self, frameskip=1):
        self._frameskip, self.t, self.games, self.noops, self.ale = (
            frameskip,
            0,
            0,
            0,
            Emulator(self),
        )

    def get_action_meanings(self):
        return ['NOOP', 'FIRE', 'LEFT', 'RIGHT']

    def _answer(self):
        return np.zeros((210, 160, 3), np.uint8), dict(lives=self.ale.lives())

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.games = 0, self.games + 1
        obs, info = self._answer()
        return obs, info

    def step(self, action):
        self.t, self.noops = self.t + 1, self.noops + (action == 0)
        obs, info = self._answer()
        return obs, 3.0, info['lives'] == 0, False, info


gym.register('TestScripted-v0', Scripted)
SCRIPTED = {
    **TINY,
    'max_sz': 400,
    'env': 'TestScripted-v0',
    'wrappers': 'atari(noops=0, size=20)',
    'threads': 1,
}


def test_what_a_network_sees():
    "Actions are repeated, the brighter of two pictures is seen, four of these; points add up"
    game = Scripted()
    env = atari(game, noops=0)
    obs, _ = env.reset(seed=0)
    assert obs.shape == (4, 84, 84) and obs.dtype == np.uint8 and (obs == 0).all()
    seen = []
    for t in 4, 8, 12, 16:
        obs, reward, *_ = env.step(2)
        seen.append(100 + t - 1)  # the odd one of the last two
        assert game.t == t and reward == 12.0 and (obs[-1] == seen[-1]).all()
    assert [int(o[0, 0]) for o in obs] == seen and game.noops == 0


def test_noops_begin_a_game():
    "From 1 to so many, by the environment's own generator; the same seed, as many"
    counts = []
    for seed in [*range(40), 3]:
        game = Scripted()
        atari(game, noops=5, skip=1).reset(seed=seed)
        assert game.noops == game.t
        counts.append(game.t)
    assert set(counts) == {1, 2, 3, 4, 5} and counts[3] == counts[-1]


def play(env, n):
    "Steps of each episode and its points, for n episodes"
    found = []
    for _ in range(n):
        env.reset()
        points, steps, over = 0.0, 0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(1)
            points, steps, over = points + reward, steps + 1, terminated or truncated
        found.append((steps, points))
    return found


def test_lives_end_episodes_but_not_the_game():
    "A life takes 20 frames, four a step; three lives are one game; unwrapped, it is one episode"
    game = Scripted()
    assert play(EpisodicLife(atari(game, noops=0)), 6) == [(5, 60.0)] * 6 and game.games == 2
    assert play(atari(Scripted(), noops=0), 2) == [(15, 180.0)] * 2


def test_lives_and_a_limit_of_time():
    "Truncated in the step that costs a life: the game is over, and the next one is another"
    game = Scripted()
    env = EpisodicLife(gym.wrappers.TimeLimit(atari(game, noops=0), 5))
    assert play(env, 3) == [(5, 60.0)] * 3 and game.games == 3


def test_a_life_that_is_left_in_its_middle():
    "By a new pass of a stepper, or by a seed: a new game"
    game = Scripted()
    env = EpisodicLife(atari(game, noops=0))
    env.reset()
    env.step(1)
    env.reset()
    assert game.games == 2
    for _ in range(5):
        last, _, over, *_ = env.step(1)
    assert over and (env.reset()[0] == last).all() and game.games == 2
    for _ in range(5):
        env.step(1)
    env.reset(seed=1)
    assert game.games == 3


def test_rows_of_lives_follow_each_other():
    "In a stepper, each life begins with the frame that ended the last one; rows count episodes"
    env = gym.wrappers.ClipReward(EpisodicLife(atari(Scripted(), noops=0)), -1, 1)
    rows = Steps.cat(list(islice(GymStepper(env, seed=0), 15)))
    assert rows.episode_n.tolist() == [1] * 5 + [2] * 5 + [3] * 5
    assert rows.terminated.nonzero().flatten().tolist() == [4, 9, 14]
    assert rows.reward.tolist() == [1.0] * 15
    assert torch.equal(rows.next_state[4], rows.state[5]) and rows.state[5].any()


def test_evaluations_count_whole_games():
    "Unclipped, all lives: 60 pictures of 3; training sees lives of 5 steps, of 1 each"
    agent = Agent(recipe('pong', **SCRIPTED).settings)
    next(iter(agent.pipe))
    assert (
        set(agent.journal.returns) == {5.0} and play_episodes(agent, 3)[0].tolist() == [180.0] * 3
    )
    assert agent.greedy().eps == 0.001


@pytest.mark.filterwarnings('ignore:.*could not be saved')
def test_a_game_that_cant_be_saved_goes_on_between_two():
    "The scripted emulator is no plain data: then a run is saved between two episodes, and goes on"
    settings = recipe('pong', **SCRIPTED).settings
    agent = Agent(settings)
    stream = iter(agent.pipe)
    next(stream)
    assert not agent.stepper.saves_exactly()
    while not agent.resumable:
        next(stream)
    again = Agent(settings)
    again.load_state_dict(through_file(agent.state_dict()))
    assert len(list(islice(again.pipe, 30))) == 30


# ---- Atari's own ----


def game(name='Breakout', late=0, **kwargs):
    register_games()
    return atari(
        gym.make(f'ALE/{name}-v5', frameskip=1, repeat_action_probability=late),
        size=20,
        sticky=0.25,
        **kwargs,
    )


@pytest.mark.slow
def test_saved_games_go_on_exactly():
    "Between lives, in the middle of one, and after a game is over; late actions are drawn alike"
    a, b = (EpisodicLife(game()) for _ in 'ab')
    a.action_space.seed(1)
    a.reset(seed=5)
    for t in range(250):
        if t % 57 == 0:
            b = EpisodicLife(game())
            decode(through_file(encode(a)), b)
        action = a.action_space.sample()
        x, y = a.step(action), b.step(action)
        assert same(x, y), t
        if x[2] or x[3]:
            if t % 2:
                decode(through_file(encode(a)), b)
            assert same(a.reset()[0], b.reset()[0])


def test_games_that_make_actions_late_themselves_arent_saved():
    "The emulator's bytes don't say which action is under way: better not at all than almost"
    for late, saves in (0, True), (0.25, False):
        stepper = GymStepper(game(late=late), seed=0)
        next(iter(stepper))
        assert stepper.saves_exactly() is saves


@pytest.mark.parametrize('module', ['ale_py', 'cv2'])
def test_without_the_extra(module, monkeypatch, capsys, tmp_path):
    "A line that says what to install; nothing is left behind"
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    assert main(['train', 'pong']) == 2
    err = capsys.readouterr().err
    assert (
        module in err
        and "pip install 'fastrl_replay[atari]'" in err
        and err.count('\n') == 1
        and not list(tmp_path.iterdir())
    )


@pytest.mark.slow
def test_the_library_works_without_the_extra():
    "All names, the command, and the recipes that don't need it"
    code = (
        "import sys; sys.modules.update(ale_py=None, cv2=None)\nfrom fastrl_replay.all import *\n"
        "from fastrl_replay.learning.settings import recipe\n"
        "from fastrl_replay.app.recipes import Agent\n"
        "Agent(recipe('catch').settings); import fastrl_replay.cli; print('fine')"
    )
    assert (
        subprocess.run(
            [sys.executable, '-c', code], capture_output=True, text=True, timeout=120
        ).stdout
        == 'fine\n'
    )


# ---- Catch ----


@pytest.mark.parametrize(
    'kwargs',
    [dict(), dict(size=5, scale=1, fruits=1, speed=1), dict(size=9, scale=2, fruits=3, speed=8)],
)
def test_catch_is_an_environment(kwargs):
    "As gymnasium wants one; a fruit stays in the field, and each ends with 1 or -1"
    from gymnasium.utils.env_checker import check_env

    env = Catch(**kwargs)
    check_env(env, skip_render_check=True)
    env.reset(seed=0)
    env.action_space.seed(0)
    rewards, over = [], False
    while not over:
        obs, reward, over, _, _ = env.step(env.action_space.sample())
        assert 0 <= env.x < env.size and 0 <= env.y < env.size and 255 in obs
        if env.y == env.size - 1:
            rewards.append(reward)
        else:
            assert reward == 0
    assert len(rewards) == env.fruits and set(rewards) <= {1.0, -1.0}


# ---- recipes ----

SMALL = {**TINY, 'max_sz': 500, 'threads': 1}


@pytest.mark.filterwarnings('ignore:.*episodes were left')
@pytest.mark.slow
@pytest.mark.parametrize('name', ['catch', 'pong'])
def test_a_resumed_run_is_the_run(name, tmp_path, monkeypatch):
    "A small run, stopped in mid-episode and resumed, equals the uninterrupted one bit for bit"
    monkeypatch.setattr(  # whole games of Atari take a minute
        'fastrl_replay.learning.evaluation.islice', lambda it, n: islice(it, min(n, 130))
    )
    changes = dict(SMALL, store='Rows()')
    if name == 'pong':
        changes |= dict(wrappers='atari(size=20)', eval_every=1_000)
    summary = start(recipe(name, **changes), tmp_path / 'whole').train()
    assert summary['env_steps'] == 300 and summary['updates'] > 20
    assert stop(start(recipe(name, **changes), tmp_path / 'parts'), 170) < 180
    resume(tmp_path / 'parts').train()
    assert same_runs(tmp_path / 'whole', tmp_path / 'parts')


def test_recurrent_from_pixels(tmp_path):
    "The recipe of another learner, on the small game"
    small = {**TINY, 'envs': 2, 'length': 8, 'burn_in': 2, 'overlap': 4}
    more = {**CATCH, 'wrappers': 'FrameStackObservation(1)', 'store': 'Frames(1)'}
    assert start(recipe('cartpole-r2d2', **small, **more), tmp_path / 'r').train()['updates'] > 5


@pytest.mark.slow
def test_catch_learns(tmp_path):
    "Solved, in a minute or two"
    assert start(recipe('catch'), tmp_path / 'r').train()['final_return'] >= 9
