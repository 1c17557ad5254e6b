"""Recipes, runs and the command, attacked: odd settings files, runs killed at every moment, environments that can't be saved, words of errors."""

import errno, json, math, os, random, signal, sys, threading
from io import BytesIO, TextIOWrapper
from pathlib import Path

import fastrl_replay, gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.app import commands
from fastrl_replay.cli import main
from fastrl_replay.steps.errors import EnvError, NoRoom
from fastrl_replay.app.named_envs import read_calls
from fastrl_replay.app.offline import open_memory
from fastrl_replay.app.recipe_settings import recipe, recipes
from fastrl_replay.app.recipes import Agent, evaluate
from fastrl_replay.steps.settings import SettingsError, as_value
from fastrl_replay.steps.settings import parse
from fastrl_replay.app.run_reports import MemorySamples
from fastrl_replay.app.run_files import read_config, read_metrics
from fastrl_replay.app.runs import Silent, interruptible, resume, start
from test_cli import no_clock, same_runs

TINY = dict(
    steps=300,
    warmup=100,
    network=(8,),
    bs=8,
    train_every=1,
    eval_every=150,
    eval_episodes=2,
    save_every=100,
    report_every=50,
)
SET = ['--set', *(f'{k}={v[0] if isinstance(v, tuple) else v}' for k, v in TINY.items())]
SLEEPS = 'everything is done with a record: where there are no updates nothing is reported, evaluated, saved or stopped; do it in `Journal`, before the next block is pulled'
END = 'a run whose steps are all made but whose last updates, evaluation or summary are missing is refused by `resume`'
STUCK = '--resume says start it again, --out says --resume: no way out but rm'


def once(wrong, *cases):
    return cases  # what was wrong with them once


def tiny(out, name='cartpole', **changes):
    return start(recipe(name, **{**TINY, **changes}), out)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch, request):
    "A picture is a third of a tiny run; test_cli.py looks at some"
    if 'matplotlib' not in request.node.name:
        monkeypatch.setattr('fastrl_replay.app.runs.charts_png', lambda *args: b'\x89PNG')


# ---- environments that make trouble ----


class Opaque(gym.Env):
    "Random episodes, four numbers to see, and a handle that can't be saved"

    observation_space, action_space = spaces.Box(0, 1, (4,), np.float32), spaces.Discrete(2)

    def __init__(self, lengths=(), handle=True):
        self.lengths, self.n = lengths, 0
        if handle:
            self.handle = threading.Lock()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.n = 0, self.n + 1
        self.length = (
            self.lengths[min(self.n, len(self.lengths)) - 1]
            if self.lengths
            else int(self.np_random.integers(3, 12))
        )
        return self._look(), {}

    def _look(self):
        return self.np_random.random(4, np.float32)

    def step(self, action):
        self.t += 1
        obs = self._look()
        return obs, float(obs[0] + action), self.t >= self.length, False, {}


class NanReward(Opaque):
    "A reward that is no number"

    def step(self, action):
        return *super().step(action)[:1], math.nan, self.t >= self.length, False, {}


class Fails(Opaque):
    "Breaks at its 150th step"

    made = 0

    def step(self, action):
        Fails.made += 1
        if Fails.made == 150:
            raise RuntimeError('the simulator is gone')
        return super().step(action)


class Global(Opaque):
    "Draws from the generators of the process"

    def __init__(self):
        super().__init__(handle=False)

    def _look(self):
        return np.float32(np.random.random(4) * random.random())


class Boxes(Opaque):
    action_space = spaces.Box(-1, 1, (2,), np.float32)


for cls in Opaque, NanReward, Fails, Global, Boxes:
    gym.register(f'Test{cls.__name__}-v0', cls)
gym.register('TestForever-v0', Opaque, kwargs=dict(lengths=(10**9,), handle=False))
gym.register(
    'TestOdd-v0', Opaque, kwargs=dict(lengths=(3, 4))
)  # ends at steps 3, 7, 11, …: never a multiple of 4
gym.register('TestPlain-v0', Opaque, kwargs=dict(handle=False))

# ---- what a settings file may hold ----


@pytest.mark.parametrize(
    'text,value',
    [
        ('1e5', 1e5),
        ('-3', -3),
        ('-2.5e-3', -0.0025),
        ('50_000', 50_000),
        ('yes', True),
        ('No', False),
        ('true', True),
        ('FALSE', False),
        ('none', 'none'),
        ('', ''),
        ('64 64', (64, 64)),
        ('64, 32', (64, 32)),
        ('64,32,16', (64, 32, 16)),
        ('0', 0),
        ('1.0', 1.0),
        ('a=b', 'a=b'),
        ('é …', 'é …'),
        ('1_000 2', (1000, 2)),
        ('1,000', (1, 0)),
    ],
)  # several numbers; where one is wanted, that is an error
def test_values(text, value):
    "What is meant"
    assert as_value(text) == value and type(as_value(text)) is type(value)


UNCHECKED = "a user's section of a shipped recipe isn't checked or converted; a recipe that is like it is blamed, and even `lr = 1` breaks every command"


@pytest.mark.parametrize(
    'line,key,value',
    [
        ('LR = 0.5', 'lr', 0.5),
        ('network = 8', 'network', 8),
        ('dueling = YES', 'dueling', True),
        ('env : Taxi-v4', 'env', 'Taxi-v4'),
        ('solved = -110', 'solved', -110.0),
        ('env = a#b  # ε: this, # and that = so', 'env', 'a#b'),
        ('env = x=y', 'env', 'x=y'),
        ('env = %(no)s', 'env', '%(no)s'),
        ('bs = 8\nbs = 9', None, 'already exists'),
        ('bs = 8\n[cartpole]', None, 'already exists'),
        ('bs', None, 'parsing errors'),
        ('gama = 1', None, "did you mean 'gamma'"),
        *once(
            UNCHECKED,
            ('bs=1e2', 'bs', 100),
            ('lr = 1', 'lr', 1.0),
            ('ratio = 1', 'ratio', 1.0),
            ('bs = 8   ; 9', None, "got '8   ; 9'"),
            ('bs = 0.5', None, 'a whole number'),
            ('bs =', None, "got ''"),
            ('dueling = 1', None, 'yes or no'),
            ('lr = fast', None, "got 'fast'; expected a number"),
            ('bs = 8\n  9', None, 'a whole number'),
            ('bs = none', None, 'a whole number'),
            ('network = 8 x', None, 'whole numbers'),
            ('bs = 8 9', None, 'a whole number'),
        ),
    ],
)
@pytest.mark.parametrize('end', ['\n', '\r\n'])
def test_a_line_of_a_users_file(line, key, value, end, tmp_path):
    "It changes the recipe and those that are like it, or is one line that says what is wrong"
    path = tmp_path / 'mine.ini'
    path.write_bytes(f'# mine: é\n[cartpole]\n{line}\n'.replace('\n', end).encode())
    if key is None:
        with pytest.raises(SettingsError) as e:
            recipes(path)
        assert (
            value in str(e.value)
            and '\n' not in str(e.value)
            and ('mine.ini' in str(e.value) or 'cartpole' in str(e.value))
        )
    else:
        own = {
            r.settings[key]
            for r in recipes(path).values()
            if r.name in ('cartpole', 'cartpole-blind')
        }
        assert own == {value} and all(type(v) is type(value) for v in own)


def test_comments_stay_with_their_keys():
    "Capitals, colons and a # inside a value don't lose a key's comment"
    found = parse(
        '[a]  # what it is\nLR = 1  # fast\nenv = a#b  # where # it is\nbs: 8  # many\nx = 1\n'
    )['a']
    assert found.about == 'what it is' and found.comments == dict(
        lr='fast', env='where # it is', bs='many'
    )


def test_a_recipe_as_text_is_the_recipe():
    "What `fastrl-replay recipes NAME` prints can be put into a file"
    for r in recipes().values():
        again = parse(r.text())[r.name]
        assert (again.settings, again.comments, again.about) == (r.settings, r.comments, r.about)


@pytest.mark.parametrize(
    'names',
    [
        'ab',
        *once(
            '`on_top` goes through the file in order, so `like` finds only what stands above', 'ba'
        ),
    ],
)
def test_own_recipes_like_own_recipes_in_any_order(names, tmp_path):
    "`like` is by name, so the place in the file doesn't matter"
    parts = dict(a='[a]\nlike = cartpole\nlr = 0.5\n', b='[b]\nlike = a\nbs = 7\n')
    (tmp_path / 's.ini').write_text('\n'.join(parts[n] for n in names))
    found = recipes(tmp_path / 's.ini')['b']
    assert (found.settings['lr'], found.settings['bs'], found.settings['gamma']) == (0.5, 7, 0.99)


def test_what_a_shipped_recipe_is_like_can_be_changed(tmp_path):
    "Then those that are like it have the change, unless they say otherwise; a circle is told"
    (tmp_path / 's.ini').write_text('[cartpole]\nn_step = 2\nlr = 0.5\n')
    found = recipes(tmp_path / 's.ini')
    assert [
        found[n].settings[k]
        for n, k in (
            ('cartpole', 'n_step'),
            ('cartpole-per', 'n_step'),
            ('cartpole-rank', 'lr'),
            ('cartpole-blind', 'n_step'),
        )
    ] == [2, 3, 0.5, 2]
    (tmp_path / 's.ini').write_text('[cartpole]\nlike = cartpole-rank\n')
    with pytest.raises(SettingsError, match='leads back to it'):
        recipes(tmp_path / 's.ini')


def test_files_that_belong_to_other_programs(tmp_path, monkeypatch):
    "nbdev 2's and GTK's settings.ini in the working directory are none of our business"
    monkeypatch.chdir(tmp_path)
    for text in (
        '[DEFAULT]\nlib_name = x\nmin_python = 3.9\ndescription = 100% é\nlicense = apache2\nkeywords = a b\n',
        '[Settings]\ngtk-theme-name = Adwaita\n',
        '',
    ):
        (tmp_path / 'settings.ini').write_text(text)
        assert list(recipes()) == list(
            recipes(Path(fastrl_replay.__file__).parent / 'settings.ini')
        )


def says(capsys, *args, status=2):
    "What a mistake says: one line on stderr, nothing on stdout"
    try:
        got = main([str(a) for a in args])
    except SystemExit as e:
        got = e.code
    out, err = capsys.readouterr()
    assert got == status and err.count('\n') == 1 and 'Traceback' not in err, err
    return err


@pytest.mark.parametrize(
    'data,said',
    [
        (None, 'no such file'),
        (b'[mine]\nlike = cartpoel\n', "did you mean 'cartpole'"),
        (b'[mine]\nlearner = dqn\n', 'like ='),
        (b'lr = 1\n', 'no section headers'),
        (b'[cartpol]\nlr = 1\n', 'like ='),
        (b'\x00\x01', 'no section headers'),
        *once(
            "Notepad's mark is taken for text; read with utf-8-sig",
            (b'\xef\xbb\xbf[cartpole]\nlr = 0.5\n', None),
        ),
        *once(
            'UnicodeDecodeError is a traceback',
            ('[cartpole]  # schön\n'.encode('latin-1'), 'UTF-8'),
        ),
        *once(
            '`like` may have become a number or a bool: TypeError in difflib',
            (b'[mine]\nlike = 5\n', "'5'"),
            (b'[mine]\nlike = yes\n', 'yes'),
        ),
    ],
)
def test_a_whole_users_file(data, said, tmp_path, capsys):
    "One that Notepad wrote with its mark is read; others are one line (None: a directory)"
    path = tmp_path / 'mine.ini'
    path.mkdir() if data is None else path.write_bytes(data)
    if said:
        assert said in says(capsys, 'recipes', '--settings', path)
    else:
        assert recipes(path)['cartpole'].settings['lr'] == 0.5


# ---- words: one line, status 2, nothing left behind ----

MISTAKES = [  # (line, what it should say)
    ('trian cartpole', "did you mean 'train'"),
    ('train cartpoel', "did you mean 'cartpole'"),
    ('train cartpole --set gama=1', "did you mean 'gamma'"),
    ('train cartpole --set lr=slow', 'expected a number'),
    ('train cartpole --set lr', "got 'lr'; expected key=value, such as lr=0.0023"),
    ('train taxi --set gamma .9', "got 'gamma'; expected key=value, such as gamma=0.99"),
    ('train --set lr=1 taxi', 'taxi --set'),
    ('train cartpole --set =1', "got '=1'"),
    ('train cartpole --set network', 'such as network=256,256'),
    ('train', 'no recipe was named'),
    ('train --resume nowhere', 'no config.json'),
    ('eval nowhere', 'no config.json'),
    ('recipes taxy', "did you mean 'taxi'"),
    ('train cartpole --settings no.ini', 'no such file'),
    ('train cartpole --steps 100', 'more than the warmup'),
    ('train cartpole --set env=CartPole-v7', 'CartPole-v7'),
    ('train cartpole --set memory=rank', 'begin with cartpole-per'),
    ('train cartpole --set envs=0', 'from 1 to'),
    ('train cartpole --set observe=7', "places in a flat observation"),
    ('train cartpole --set bs=8.5', 'a whole number'),
    ('train cartpole --set dueling=1', 'yes or no'),
    ('train cartpole --set like=taxi', "no setting 'like'"),
    *once(
        'only SettingsError becomes a line; what stages, torch and gymnasium refuse while the agent is built is a traceback',
        ('train cartpole --set gamma=2', 'gamma'),
        ('train cartpole --set bs=0', 'bs'),
        ('train cartpole --set bs=200000', 'max_sz'),
        ('train cartpole --set ratio=-1', 'ratio'),
        ('train cartpole --set warmup=-5', 'warmup'),
        ('train cartpole --set eps_start=2', 'eps'),
        ('train cartpole --set eps_steps=0', 'steps'),
        ('train cartpole --set target_every=0', 'target_every'),
        ('train cartpole --set tau=0', 'tau'),
        ('train cartpole --set lr=nan', 'lr'),
        ('train cartpole --set network=-4', 'network'),
        ('train cartpole --set device=gpu', "setting 'device'"),
        ('train cartpole --set learner=table', 'observation space'),
        ('train taxi --set learner=dqn', 'network'),
        ('train cartpole-r2d2 --set burn_in=40', 'burn_in'),
        ('train cartpole-r2d2 --set state=kept', 'state'),
        ('train cartpole-r2d2 --set overlap=40', 'overlap'),
        ('train cartpole --set env=nowhere:Thing-v0', 'nowhere'),
        ('train cartpole --set env=TestBoxes-v0', 'Discrete'),
        ('train cartpole --seed -1', 'seed'),
        ('train cartpole --seed 99999999999999999999999', 'seed'),
        ('train cartpole --set seed=-1', 'seed'),
    ),
    *once(
        'a tuple passes for any whole number, and then breaks something',
        ('train cartpole --set steps=1_000,2', 'steps'),
        ('train cartpole --set seed=1,2', 'seed'),
    ),
    *once(
        'collides with the parameters of `recipe`: TypeError',
        ('train cartpole --set name=x', 'name'),
        ('train cartpole --set file=x', 'file'),
    ),
    *once(
        'the remedy is cartpole-per, which has no sequences either',
        ('train cartpole --set learner=r2d2 memory=sequences', 'cartpole-r2d2'),
    ),
    *once(
        'it asks for one size of the network, and then is a KeyError for length',
        ('train cartpole-per --set learner=r2d2 memory=sequences', 'cartpole-r2d2'),
    ),
    *once(
        'taken in silence: n_step=0 and -3 are 1, a network of no neurons trains, no episodes are a run of no steps; lr_end=-1 breaks in the middle of the run',
        ('train cartpole --set n_step=0', 'n_step'),
        ('train cartpole --set n_step=-3', 'n_step'),
        ('train cartpole --set network=0', 'network'),
        ('train taxi --set episodes=0', 'episodes'),
        ('train cartpole --set lr_end=-1', 'lr'),
    ),
    *once(
        'argparse speaks for itself: several lines of usage, `invalid _count value`, no nearest option',
        ('train cartpole --steps abc', "'abc'"),
        ('train cartpole --steps 0', 'at least 1'),
        ('train cartpole --steps -5', 'at least 1'),
        ('train cartpole --steps 1.5', "'1.5'"),
        ('train cartpole --seed x', "'x'"),
        ('train cartpole --stps 5', '--steps'),
        ('eval', 'DIR'),
        ('compare', 'RUN'),
        ('compare nowhere', 'no config.json'),
        ('--hlep', '--help'),
    ),
    *once(
        'a weak reference that does not pickle, or a setting warmup that is missing',
        (
            'train taxi --workers 2',
            "setting 'workers'; got 2; expected 0 where exploring goes by episodes",
        ),
        ('train taxi --shards 2', "setting 'shards'; got 2"),
    ),
    *once(
        'an OSError is a traceback',
        ('train cartpole --out /dev/null', 'this is not a directory; got /dev/null'),
        ('train cartpole --out /dev/null/x', '/dev/null/x: Not a directory'),
    ),
    *once(
        'a list with a space is taken for another setting, and the remedy speaks of recipes',
        ('train cartpole --set network=8 8', 'network=8,8'),
    ),
]


@pytest.mark.parametrize('line,said', MISTAKES)
def test_a_mistake_is_one_line(line, said, capsys, tmp_path, monkeypatch):
    "Whichever stage finds it, and whether argparse or we do: one line that names the setting; nothing is left behind"
    monkeypatch.chdir(tmp_path)
    if '--steps' not in line and 'steps=' not in line and line.startswith('train'):
        line += ' --steps 2000'
    assert said in says(capsys, *line.split()) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'env',
    [
        *once(
            'the error about `observe` has no remedy', 'MountainCar-v0', 'FrozenLake-v1', 'Taxi-v4'
        ),
        *once('four of six numbers are seen, in silence', 'Acrobot-v1'),
    ],
)
def test_another_environment_is_seen_whole_or_says_how(env):
    "`observe` is CartPole's; with another environment it must not hide numbers in silence, and the error names what to type"
    try:
        agent = Agent(recipe('cartpole', env=env).settings)
    except SettingsError as e:
        assert 'observe' in str(e) and 'Remedy' in str(e)
    else:
        assert agent.model[0].size == spaces.flatdim(gym.make(env).observation_space)


@pytest.mark.parametrize(
    'env,observe',
    [
        ('MountainCar-v0', ['0 1']),
        ('Acrobot-v1', ['0 1 2 3 4 5']),
        *once(
            '`observe` can be changed but not left out',
            ('FrozenLake-v1', ['all', 'none', '']),
            ('Taxi-v4', ['all', 'none', '']),
        ),
    ],
)
def test_dqn_on_other_environments(env, observe, tmp_path):
    "There is a way to learn any environment with discrete actions with --set alone"

    def fits(o):
        try:
            return recipe('cartpole', env=env, observe=o)
        except SettingsError:
            return None

    assert any(
        tiny(tmp_path / 'r', env=env, observe=o, solved=10_000, wrappers='TimeLimit(50)').train()[
            'env_steps'
        ]
        == 300
        for o in observe
        if fits(o)
    )


@pytest.mark.parametrize(
    'args', [['--help'], *([c, '--help'] for c in ('train', 'recipes', 'eval', 'compare'))]
)
def test_help(args, capsys):
    "Every command says what it takes, and calls itself by the name that was typed"
    with pytest.raises(SystemExit) as e:
        main(args)
    said = capsys.readouterr().out
    assert e.value.code == 0 and said.startswith('usage: fastrl-replay') and len(said) > 200


def test_steps_may_be_written_as_people_write_them(tmp_path, monkeypatch, capsys):
    "1_000 and 1,000, with --steps and with --set; a relative directory below one that isn't there; the next of the same name"
    monkeypatch.chdir(tmp_path)
    for i, how in enumerate((['--steps', '1_000'], ['--steps', '1,000'])):
        assert main(['train', 'cartpole', '--out', f'a/b/{i}', *SET, 'ratio=0.05', *how]) == 0
        assert json.loads((tmp_path / f'a/b/{i}/summary.json').read_text())['env_steps'] == 1000
    for d in 'cartpole-seed0', 'cartpole-seed0-2':
        assert (
            main(['train', 'cartpole', *SET]) == 0
            and (tmp_path / 'runs' / d / 'summary.json').exists()
        )
    capsys.readouterr()
    assert 'there is a run already' in says(capsys, 'train', 'cartpole', '--out', 'a/b/0', *SET)


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is CUDA')
def test_cuda_that_is_not_there_is_one_line(capsys, tmp_path, monkeypatch):
    "Whether torch was built without it, finds no driver, lacks its module or can't compute there; nothing is left behind"
    monkeypatch.chdir(tmp_path)
    for name, device in (
        ('cartpole', 'cuda'),
        ('cartpole-r2d2', 'cuda:0'),
        ('cartpole', 'meta'),
        ('cartpole', 'hpu'),
        ('cartpole', 'cuda:-1'),
    ):
        err = says(capsys, 'train', name, '--set', f'device={device}')
        assert (
            f"setting 'device'; got '{device}'" in err
            and '--set device=cpu' in err
            and not list(tmp_path.iterdir())
        )


# ---- your own environments ----

MINE = """
import gymnasium as gym, numpy as np
from gymnasium import spaces

class Maze(gym.Env):
    def __init__(self, size=3):
        self.size = size
        self.observation_space, self.action_space = spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(2)
    def look(self): return np.float32([self.t/20, self.np_random.random()])
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}
    def step(self, action):
        self.t += 1
        return self.look(), 1., self.t >= self.size, False, {}

class Breaks(Maze):
    def step(self, action): return {}['gone']

class NoDisplay(Maze):
    def __init__(self): raise AssertionError('no display')

class Bare(gym.Env): pass

class Scale(gym.RewardWrapper):
    def __init__(self, env, factor, by=(1, 1)):
        super().__init__(env)
        self.factor = factor*by[0]*by[1]
    def reward(self, reward): return self.factor*reward

class Reversed(gym.ActionWrapper):
    def __init__(self, env, n=3):
        super().__init__(env)
        self.action_space = spaces.Discrete(n)
    def action(self, action): return int(action == 0)

class Smooth(gym.ActionWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

def make(): return Maze()

gym.register('OwnMaze-v0', Maze)
gym.register('OwnShort-v0', Maze, max_episode_steps=2)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    "The name of a module in the working directory, which isn't among Python's paths"
    name = f'own{abs(hash(tmp_path))}'
    (tmp_path / f'{name}.py').write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [p for p in sys.path if p not in ('', '.')])
    before = dict(gym.registry)
    yield name
    for key in [k for k in sys.modules if k.startswith(('own', 'broken_'))]:
        del sys.modules[key]
    for key in gym.registry.keys() - before:
        del gym.registry[key]


def wrote(out):
    return json.loads((Path(out) / 'summary.json').read_text())


def test_an_environment_from_the_working_directory(mine, capsys):
    "In train, --resume and eval, from a file and from --set; all results name it with its wrappers"
    Path('settings.ini').write_text(
        f'[maze]  # my own\nlike = cartpole\nenv = {mine}:OwnMaze-v0(size=4)\n'
        f'wrappers = TimeLimit(max_episode_steps=9),\n    {mine}:Scale(factor=2, by=(3, 1))\n'
    )
    title = f'maze on {mine}:OwnMaze-v0(size=4) with TimeLimit(max_episode_steps=9), {mine}:Scale(factor=2, by=(3, 1)), seed 0'
    assert (
        main(['train', 'maze', '--out', 'r', *SET]) == 0
        and capsys.readouterr().out.count(title) == 2
    )
    s, config = wrote('r'), json.loads(Path('r/config.json').read_text())
    assert s['final_return'] == 24.0 and s['env'] == config['env'] == f'{mine}:OwnMaze-v0(size=4)'
    assert (
        s['wrappers']
        == config['wrappers']
        == ['TimeLimit(max_episode_steps=9)', f'{mine}:Scale(factor=2, by=(3, 1))']
    )
    del sys.modules[mine]
    assert (
        main(['train', '--resume', 'r', '--trust', '--steps', '400']) == 0
        and wrote('r')['env_steps'] == 400
    )
    del sys.modules[mine]
    assert (
        main(['eval', 'r', '--trust', '--episodes', '2']) == 0
        and f'{title}, after 400 steps\nmean return of 2 episodes without exploring: 24.0'
        in capsys.readouterr().out
    )


def test_a_picture_names_what_was_run(mine, monkeypatch, tmp_path):
    "In its title"
    monkeypatch.setattr('fastrl_replay.app.runs.charts_png', lambda *args: args[-1].encode())
    tiny(tmp_path / 'r', env='CartPole', wrappers='TimeLimit(20)').train()
    assert (
        tmp_path / 'r/returns.png'
    ).read_text() == 'cartpole on CartPole-v1 with TimeLimit(20), seed 0' and wrote(tmp_path / 'r')[
        'env'
    ] == 'CartPole-v1'


@pytest.mark.parametrize(
    'env, episode',
    [
        ('Maze', 3),
        ('Maze(5)', 5),
        ('Maze(size=5)', 5),
        ('OwnMaze-v0', 3),
        ('OwnShort-v0', 2),
        ('OwnMaze-v0(max_episode_steps=1)', 1),
    ],
)
def test_names_of_environments(env, episode, mine):
    "A class, or an id, with or without arguments"
    assert (
        evaluate(Agent(recipe('cartpole', **TINY, env=f'{mine}:{env}').settings), 2).tolist()
        == [episode] * 2
    )


@pytest.mark.parametrize(
    'changes, actions',
    [
        (dict(wrappers='{}:Reversed'), 3),
        (dict(wrappers='{}:Reversed(5), {}:Reversed(n=4)'), 4),
        (dict(env='Pendulum-v1', wrappers='DiscretizeAction(bins=5), TimeLimit(20)'), 5),
    ],
)
def test_wrappers_that_change_the_action_space(changes, actions, mine, tmp_path):
    "The agent sees what the last wrapper gives; stopped and resumed it is the same run"
    changes = {k: v.replace('{}', mine) for k, v in changes.items()}
    tiny(tmp_path / 'whole', **changes).train()
    run = tiny(tmp_path / 'parts', **changes)
    assert run.agent.model[-1].out_features == actions
    stop(run, 170)
    resume(tmp_path / 'parts').train()
    assert same_runs(tmp_path / 'whole', tmp_path / 'parts')


@pytest.mark.parametrize(
    'setting, said',
    [
        (
            'env={}x:Maze',
            "setting 'env': there is no module '{}x' (did you mean '{}'?); expected a module in the working directory",
        ),
        ('env={}.py:Maze', "(did you mean '{}'?)"),
        ('env=./{}:Maze', "(did you mean '{}'?)"),
        ('env={}:Maz', "there is no env 'Maz' in module '{}'"),
        ('env={}:Maz', "(did you mean 'Maze'?)"),
        ('env={}:OwnMazy-v0', "(did you mean 'OwnMaze-v0'?)"),
        ('env={}:OwnMaze-v7', "(did you mean 'OwnMaze-v0'?)"),
        ('env={}:make', 'expected a class derived from gymnasium.Env'),
        ('env=os:system(touch executed)', "there is no env 'system'"),
        ('env={}:Scale', "there is no env 'Scale'"),
        ('env={}:', 'not a name with arguments'),
        (
            'env=CartPol-v1',
            "gymnasium has no environment 'CartPol-v1' (did you mean 'CartPole-v1'?)",
        ),
        ('env=OwnMaze-v0', 'such as my_module:Name-v0'),
        ('env=NES/Pong-v5', 'Namespace NES not found'),
        (
            'env={}:Maze(sze=2)',
            "unexpected keyword argument 'sze' (did you mean 'size'?); expected Maze(size)",
        ),
        ('env={}:OwnMaze-v0(3)', 'an argument without a name; got 3'),
        ('env={}:NoDisplay', "can't be made; got AssertionError: no display ({}.py, line"),
        ('env={}:Bare', 'must specify an action space'),
        ('env={}:Maze, CartPole-v1', 'expected one environment'),
        ('env=', "setting 'env'; got ''"),
        ('env={}:Maze(', ') is missing'),
        ('env={}:Maze)', ') closes nothing'),
        (
            'wrappers=TimeLimt(9)',
            "gymnasium.wrappers has no 'TimeLimt' (did you mean 'TimeLimit'?)",
        ),
        ('wrappers={}:Scal(2)', "there is no wrapper 'Scal' in module '{}'"),
        ('wrappers={}:Scal(2)', "(did you mean 'Scale'?)"),
        ('wrappers={}:Scale', "missing a required argument: 'factor'; expected Scale(factor, by)"),
        ('wrappers=nowhere:Scale', "setting 'wrappers': there is no module 'nowhere'"),
        ('wrappers={}:Maze', "there is no wrapper 'Maze'"),
        ('wrappers=TimeLimit(x)', "TimeLimit(x) can't be made"),
        ('wrappers=TimeLimit(9), ,TimeLimit(8', ') is missing'),
        ('wrappers=vector', "gymnasium.wrappers has no 'vector'"),
        ('wrappers={}:Smooth', 'Box'),
        ('wrappers=7', 'a word, as none'),
    ],
)
def test_a_name_that_is_not_there_is_one_line(setting, said, mine, capsys):
    "What was looked for, where, the nearest name; nothing is left behind and nothing is called that is no environment"
    assert said.replace('{}', mine) in says(
        capsys, 'train', 'cartpole', *SET, setting.replace('{}', mine)
    ) and [p.name for p in Path().iterdir() if p.name != '__pycache__'] == [f'{mine}.py']


@pytest.mark.parametrize(
    'option, value',
    [
        ('data', 'rows.npz'),
        ('workers', '2'),
        ('shards', '2'),
        ('engine', 'ray'),
        ('address', 'auto'),
        ('seed', '3'),
        ('out', 'x'),
        ('settings', 'x'),
    ],
)
def test_a_run_that_is_resumed_keeps_its_settings_and_says_so(option, value, whole, capsys):
    "An option that would change nothing is refused, --data too, which was taken and forgotten"
    said = says(capsys, 'train', '--resume', whole, f'--{option}', value)
    assert (
        option in said and 'with --resume' in said and 'Remedy: a run goes on as it began' in said
    )


_WORDS = st.text('abzAZ09_-./+*~é€', min_size=1, max_size=8).filter(
    lambda w: isinstance(as_value(w), str) and w.lower() != 'none'
)
_VALUES = st.recursive(
    st.integers(0, 10**6)
    | st.floats(-9, 9).filter(lambda x: not x.is_integer())
    | st.booleans()
    | st.none()
    | _WORDS,
    lambda v: st.lists(v, max_size=3).map(tuple),
    max_leaves=6,
)


def as_typed(value):
    if isinstance(value, tuple):
        return '[' + ', '.join(map(as_typed, value)) + ']'
    return (
        {True: 'yes', False: 'no', None: 'none'}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


@given(
    st.lists(
        st.tuples(
            _WORDS,
            st.lists(_VALUES, max_size=3),
            st.dictionaries(st.text('abc_', min_size=1, max_size=4), _VALUES, max_size=3),
        ),
        max_size=4,
    ),
    st.booleans(),
)
def test_names_with_arguments_are_read_as_they_were_written(calls, module):
    "Words of any characters but brackets, quotes, commas and equals signs; arguments in brackets of any depth"
    texts = []
    for name, args, kwargs in calls:
        given = ', '.join(
            [*map(as_typed, args), *(f'{k} = {as_typed(v)}' for k, v in kwargs.items())]
        )
        texts.append('m.n:' * module + name + (f'({given})' if given else ''))
    found = read_calls('wrappers', ' , '.join(texts))
    assert found == [
        (text, 'm.n' if module else None, name, args, kwargs)
        for text, (name, args, kwargs) in zip(texts, calls)
    ]


@pytest.mark.parametrize(
    'code, said',
    [
        ('1/0', 'ZeroDivisionError: division by zero (broken_{}.py, line 2)'),
        ('import nothing_like_it', "No module named 'nothing_like_it' (broken_{}.py, line 2)"),
        ('if', 'SyntaxError: '),
        ('raise SystemExit(3)', 'SystemExit: 3'),
        ('"\xff"', None),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(code, said, mine, capsys):
    "It is there, and its error is shown with its place"
    path = Path(f'broken_{mine}.py')
    path.write_bytes(f'import os\n{code}\n'.encode('latin-1'))
    err = says(capsys, 'train', 'cartpole', *SET, f'env=broken_{mine}:Maze')
    assert (
        f"module 'broken_{mine}' can't be imported; got" in err
        and (said or 'utf-8').replace('{}', mine) in err
    )


def test_a_fault_in_your_environment_comes_with_its_place(mine, capsys):
    "An error while it steps"
    line = MINE.splitlines().index("    def step(self, action): return {}['gone']") + 1
    assert f"KeyError: 'gone' ({mine}.py, line {line})" in says(
        capsys, 'train', 'cartpole', '--out', 'r', *SET, f'env={mine}:Breaks'
    )


@pytest.mark.parametrize('command', ['eval', 'train --resume'])
def test_a_run_whose_module_is_gone(command, mine, tmp_path, capsys, monkeypatch):
    "One line that names it, and where the run began; the run stays as it was"
    tiny('r', env=f'{mine}:Maze').train()
    files = {p.name: p.read_bytes() for p in Path('r').iterdir()}
    (tmp_path / 'other').mkdir()
    monkeypatch.chdir(tmp_path / 'other')
    del sys.modules[mine]
    monkeypatch.setattr(sys, 'path', [p for p in sys.path if p != str(tmp_path)])
    err = says(capsys, *command.split(), '../r', '--trust')
    assert f"there is no module '{mine}'" in err and f'the run began in {tmp_path}' in err
    assert {p.name: p.read_bytes() for p in (tmp_path / 'r').iterdir()} == files


# ---- a run on another machine ----


def test_a_run_moves_to_another_device(whole, tmp_path, capsys, monkeypatch):
    "A run from a GPU can be looked at and gone on with where there is none: what the message says can be typed"
    import shutil

    out = shutil.copytree(whole, tmp_path / 'r')
    config = json.loads((out / 'config.json').read_text())
    config['settings']['device'] = 'meta'  # a device that can't compute anywhere
    (out / 'config.json').write_text(json.dumps(config))
    for line in ['eval', str(out)], ['train', '--resume', str(out), '--steps', '320']:
        err = says(capsys, *line)
        assert "setting 'device'; got 'meta'" in err and 'Remedy: --set device=cpu' in err
        assert main([*line, '--set', 'device=cpu']) == 0
    assert read_config(out)['settings']['device'] == 'cpu' and main(['eval', str(out)]) == 0


@pytest.mark.parametrize(
    'line',
    [
        'eval {} --set lr=1',
        'train --resume {} --set lr=1',
        'train --resume {} --set device=cpu lr=1',
        'eval {} --set device',
    ],
)
def test_nothing_else_of_a_run_can_be_set(line, whole, capsys):
    assert 'device=' in says(capsys, *line.replace('{}', str(whole)).split())


# ---- learners that others bring ----


class ByTurns:
    "A policy without ε, and without anything to report"

    def __init__(self, values):
        self.values, self.turn = values, 0

    def __call__(self, state):
        self.turn += 1
        return np.full(len(state), self.turn % 2)

    def state_dict(self):
        return dict(turn=self.turn)

    def load_state_dict(self, state):
        self.turn = state['turn']


@pytest.fixture
def brought(monkeypatch, tmp_path):
    "A learner with a policy, settings and ranges, whose record has something now and then; and a file with a recipe"
    from fastrl_replay.learning.learners import LEARNERS, Builder, DQNLearner, builds
    from fastrl_replay.learning.networks import value_net

    class Sometimes(DQNLearner):
        def learn(self, batch):
            return {**super().learn(batch), **({'rare': 6.0} if self.updates % 4 == 0 else {})}

    monkeypatch.setattr('fastrl_replay.learning.registry.LEARNERS', LEARNERS)
    monkeypatch.setitem(LEARNERS, 'brought', None)
    del LEARNERS['brought']

    @builds('brought')
    class BroughtBuilder(Builder):
        memories, settings, ranges = (
            dict(uniform=()),
            dict(speed=(0.5, 'how fast')),
            dict(speed=(0, 1)),
        )

        def model(self, s, observations, actions):
            return value_net(observations, actions, (8,))

        def policy(self, model, s, episodes):
            return ByTurns(model)

        def chain(self, steps, model, s):
            return Sometimes(
                steps.experience_replay(
                    s['bs'], s['max_sz'], ratio=s['ratio'], warmup=s['warmup'], seed=0
                ),
                model,
                lr=s['speed'],
            )

    (tmp_path / 's.ini').write_text(
        '[mine]  # brought\nlike = cartpole\nlearner = brought\nspeed = 0.25\n[faster]\nlike = mine\nspeed = 1\n'
    )
    return tmp_path / 's.ini'


def test_a_learner_that_others_bring(brought, tmp_path, capsys):
    "By the command: trained, reported without ε, each number a mean over the records that have it, stopped, resumed, evaluated"
    from fastrl_replay.stages.journal import Journal

    assert (
        recipe('faster', brought).settings['speed'] == 1.0
        and recipe('cartpole', learner='brought').settings['speed'] == 0.5
    )
    assert (
        'speed = 0.25' in recipe('mine', brought).text()
        and 'how fast' in recipe('mine', brought).text()
    )
    for d in 'whole', 'parts':
        run = start(recipe('mine', brought, **TINY), tmp_path / d)
        if d == 'whole':
            run.train()
        else:
            stop(run, 200)
            resume(tmp_path / d).train()
    assert same_runs(tmp_path / 'whole', tmp_path / 'parts')
    lines = [m for m in read_metrics(tmp_path / 'whole') if 'fill' in m]
    assert not any('eps' in m for m in lines) and {m['rare'] for m in lines if 'rare' in m} == {6.0}
    assert isinstance(run.agent.journal, Journal) and run.agent.pipe.lr == 0.25
    assert main(['eval', str(tmp_path / 'whole'), '--episodes', '2']) == 0
    assert (
        main(['train', 'mine', '--settings', str(brought), '--out', str(tmp_path / 'shown'), *SET])
        == 0
    )
    said = capsys.readouterr().err
    assert 'loss' in said and 'ε' not in said


def test_what_a_brought_learner_refuses(brought):
    "Misspelt settings, values out of its ranges or of another kind, a memory that it doesn't take; recipes of others don't have its settings"
    for changes, said in (
        (dict(sped=1), "did you mean 'speed'"),
        (dict(speed='fast'), 'expected a number, as 0.25'),
    ):
        with pytest.raises(SettingsError, match=said):
            recipe('mine', brought, **changes)
    for changes, said in (
        (dict(speed=2), "setting 'speed'; got 2.0; expected from 0 to 1"),
        (dict(memory='rank'), "no memory 'rank'; expected one of uniform"),
    ):
        with pytest.raises(SettingsError, match=said):
            Agent(recipe('mine', brought, **changes).settings)
    with pytest.raises(SettingsError, match="no setting 'speed'"):
        recipe('cartpole', speed=1)


# ---- how many steps, how many updates ----


@pytest.mark.parametrize(
    'changes,steps,updates',
    [
        ({}, 300, 100),
        (dict(ratio=1.0), 300, 200),
        (dict(ratio=2.5), 300, 500),
        (dict(ratio=0.0), 300, 0),
        (dict(ratio=1 / 3), 300, 66),
        (dict(train_every=64), 300, 100),
        (dict(train_every=10**6), 300, 100),
        (dict(envs=7), 301, 100),
        (dict(envs=7, train_every=50), 301, 100),
        (dict(envs=8, train_every=4), 304, 102),
        (dict(n_step=3, envs=3, train_every=40), 300, None),
        (dict(warmup=250, max_sz=60), 300, 25),
        (dict(bs=200), 300, 100),
        (dict(bs=290, max_sz=290), 300, 100),
        (dict(steps=333, train_every=100), 333, 116),
    ],
)
def test_steps_and_updates_are_as_promised(changes, steps, updates, tmp_path):
    "`ratio` updates for each step beyond the warm-up, however steps are gathered; steps up to a whole block"
    run = tiny(tmp_path / 'r', **changes)
    s = run.train()
    assert s['env_steps'] == steps and (updates is None or s['updates'] == updates)
    if updates is None:
        assert 100 - 3 * 3 <= s['updates'] <= 100  # at most two rows wait in each environment


def test_no_updates_is_still_a_run(tmp_path):
    "ratio = 0, for those who want to see what chance does: evaluated, reported and saved on the way"
    run = tiny(tmp_path / 'r', ratio=0.0)
    run.train()
    lines = read_metrics(run.out)
    assert [m['env_steps'] for m in lines if 'eps' in m][:1] == [50] and len(
        [m for m in lines if 'eval_return' in m]
    ) == 2


def test_episodes_are_a_limit(tmp_path):
    "It ends with the episode, not with a burst or the last step"
    run = start(
        recipe('taxi', episodes=3, eval_every=10_000, memory='none', wrappers='TimeLimit(20)'),
        tmp_path / 'r',
    )
    s = run.train()
    assert s['episodes'] == 3 and s['env_steps'] == run.agent.journal.ends[-1] < 250_000


def test_warmup_is_reported(tmp_path):
    "A long warm-up has lines of metrics too, not one at its end for all of it"
    run = tiny(tmp_path / 'r', warmup=250)
    run.train()
    assert [m['env_steps'] for m in read_metrics(run.out) if 'eps' in m][:2] == [50, 100]


# ---- what is written is true ----


def by_hand(out, episodes=20):
    "Greedy episodes, from the checkpoint's weights alone: matrices, gymnasium, nothing of ours"
    config = json.loads((out / 'config.json').read_text())['settings']
    w = torch.load(out / 'checkpoint.pt', weights_only=True)['agent']['pipe']['own']['model']
    weights = [w[k].double().numpy() for k in w]
    env, returns = gym.make(config['env']), []
    for i in range(episodes):
        x, total, over = env.reset(seed=1_000_003 * (config['seed'] + 1) + i)[0], 0.0, False
        while not over:
            h = x.astype(float)
            for m, b in zip(weights[::2], weights[1::2]):
                h = m @ h + b
                h = np.maximum(h, 0) if m is not weights[-2] else h
            x, reward, terminated, truncated, _ = env.step(int(h.argmax()))
            total, over = total + reward, terminated or truncated
        returns.append(total)
    return np.array(returns)


def test_final_return_is_the_mean_of_20_greedy_episodes(tmp_path):
    "Played again by a second implementation"
    s, returns = (
        tiny(tmp_path / 'r', seed=7, steps=900, network=(16,)).train(),
        by_hand(tmp_path / 'r'),
    )
    assert (
        s['final_return'] == pytest.approx(returns.mean())
        and s['final_std'] == pytest.approx(returns.std())
        and len(set(returns)) > 2
    )


@pytest.mark.parametrize('solved,ever', [(5, True), (10_000, False)])
def test_solved_at_step(solved, ever, tmp_path):
    "The step of the first evaluation whose mean reaches it; after a resumption still the first"
    run = tiny(tmp_path / 'r', solved=solved, steps=500)
    stop(run, 320)
    s = resume(tmp_path / 'r').train()
    evals = [
        (m['env_steps'], m['eval_return'])
        for m in read_metrics(tmp_path / 'r')
        if 'eval_return' in m
    ]
    assert (
        s['solved_at_step'] == (evals[0][0] if ever else None)
        and [s for s, _ in evals][-1] == 500
        and len(evals) == 4
    )


def test_reports_are_means_and_only_grow(tmp_path):
    "Each line's loss is the mean of the records since the line before; counts never fall; all is valid JSON"
    run, losses = tiny(tmp_path / 'r', steps=700), []
    learn = run.agent.pipe.learn
    run.agent.pipe.learn = lambda batch: (losses.append(record := learn(batch)), record)[1]
    run.train()
    lines = [
        json.loads(t, parse_constant=lambda c: pytest.fail(c))
        for t in (tmp_path / 'r/metrics.jsonl').read_text().splitlines()
    ]
    done = 0
    for m in (
        m for m in lines if 'eps' in m
    ):  # a line is written with the first record at its step
        if m['updates'] == done:
            assert 'loss' not in m
            continue  # nothing was learned yet
        np.testing.assert_allclose(
            [m[k] for k in losses[0]],
            np.mean([[r[k] for k in losses[0]] for r in losses[done : m['updates']]], 0),
        )
        done = m['updates']
    for k in 'env_steps', 'updates', 'episodes', 'wall_s':
        assert (v := [m[k] for m in lines if k in m]) == sorted(v)
    assert [m['eps'] for m in lines if 'eps' in m] == sorted(
        (m['eps'] for m in lines if 'eps' in m), reverse=True
    )


def test_evaluation_says_when_episodes_do_not_end():
    "Without a time limit, returns of episodes that were broken off aren't passed off as whole ones"
    agent = Agent(recipe('cartpole', **TINY, env='TestForever-v0').settings)
    with pytest.warns(UserWarning):
        evaluate(agent, 1)


def test_a_reward_that_is_no_number_is_one_line(tmp_path, capsys):
    "The learner's error and its remedy reach the person, not a traceback"
    assert "'reward'" in says(
        capsys, 'train', 'cartpole', '--out', tmp_path / 'r', *SET, 'env=TestNanReward-v0'
    )


def test_an_environment_that_fails_is_one_line(tmp_path, capsys, monkeypatch):
    "With what it said, and with how to go on from the last checkpoint"
    monkeypatch.setattr(Fails, 'made', 0)
    try:
        status = main(
            [
                'train',
                'cartpole',
                '--out',
                str(tmp_path / 'r'),
                *SET,
                'env=TestFails-v0',
                'eval_every=1000',
                'save_every=1',
            ]
        )
    except EnvError:
        pytest.fail('a traceback')
    err = capsys.readouterr().err
    assert status != 0 and 'the simulator is gone' in err and f'--resume {tmp_path / "r"}' in err


# ---- stopped, and taken up again ----


class AskedAt(Silent):
    "Someone types Ctrl-C at a step"

    def __init__(self, run, step):
        self.run, self.step = run, step

    def tick(self, rows):
        if self.run.agent.journal.steps >= self.step:
            self.run.stop = True


def stop(run, step):
    "Train until someone stops it; the step where it stood then"
    assert run.train(AskedAt(run, step)) is None
    return run.agent.journal.steps


@pytest.mark.parametrize(
    'name,changes',
    [
        ('cartpole', {}),
        ('cartpole', dict(train_every=64)),
        ('cartpole', dict(env='TestOpaque-v0')),
        ('cartpole', dict(env='TestGlobal-v0')),
        ('cartpole-per', dict(n_step=3, envs=3, train_every=20)),
        ('cartpole-rank', dict(env='TestOpaque-v0', n_step=3)),
        (
            'cartpole-r2d2',
            dict(
                network=8,
                bs=4,
                length=8,
                burn_in=2,
                overlap=4,
                ratio=0.5,
                env='TestOpaque-v0',
                envs=1,
            ),
        ),
        ('cartpole-blind', dict(envs=2, max_sz=50)),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in ('taxi', 'taxi-online')),
    ],
)
def test_stopped_twice_is_as_never_stopped(name, changes, tmp_path):
    "Three pieces make the same lines, weights, memory and RNG state as one; an environment that can't be saved waits for its episode's end"
    short = dict(
        steps=900,
        save_every=300,
        eval_every=450,
        eval_episodes=2,
        report_every=50,
        wrappers='TimeLimit(20)',
    )

    def begin(out):
        return start(recipe(name, **short), out) if changes is None else tiny(out, name, **changes)

    begin(tmp_path / 'whole').train()
    first, last = stop(begin(tmp_path / 'parts'), 130), tmp_path / 'parts'
    second = stop(resume(last), first + 30)
    assert first < second < (900 if changes is None else 300)
    resume(last).train()
    assert same_runs(tmp_path / 'whole', last)
    a, b = (json.loads((tmp_path / d / 'summary.json').read_text()) for d in ('whole', 'parts'))
    assert no_clock([a]) == no_clock([b])


@pytest.mark.parametrize('when', [*once(SLEEPS, 20), *once(END, 300)])
def test_stopped_early_or_in_the_last_burst(when, tmp_path):
    "Ctrl-C works during the warm-up, long before the first record, and while the last burst is learned; each goes on to the same end"
    tiny(tmp_path / 'whole', train_every=50).train()
    run = tiny(tmp_path / 'parts', train_every=50)
    if when < 300:
        assert stop(run, when) < when + 50
        resume(tmp_path / 'parts').train()
    else:
        assert run.train(AskedAt(run, when))  # all steps are made: what is left is done
    assert same_runs(tmp_path / 'whole', tmp_path / 'parts')


def test_stopped_without_updates(tmp_path):
    "Ctrl-C is heard where nothing is learned, too"
    run = tiny(tmp_path / 'r', ratio=0.0, steps=2_000)
    assert stop(run, 150) < 200


def test_stop_between_bursts_where_episodes_end_elsewhere(tmp_path):
    "An environment that can't be saved, whose episodes never end with a burst: Ctrl-C is still heard, and checkpoints are still written"
    run = tiny(tmp_path / 'r', env='TestOdd-v0', train_every=4, steps=600)
    assert stop(run, 200) < 250


def test_several_environments_that_cannot_be_saved(tmp_path):
    "A stop is heard soon; the resumed run begins new episodes, each environment's rows count on, and no window crosses the break"
    run = tiny(tmp_path / 'r', env='TestOpaque-v0', envs=3, steps=600)
    assert stop(run, 200) < 215
    again = resume(tmp_path / 'r')
    again.train()
    rows = again.agent.memory.memory.take(np.arange(again.agent.memory.memory.inserted)).rows
    for e in range(3):
        mine = rows[rows['env_id'] == e]
        new = np.r_[True, mine['episode_n'][1:] != mine['episode_n'][:-1]]
        assert (mine['step_n'][new] == 1).all() and (
            np.diff(mine['episode_n'])[new[1:]] == 1
        ).all()  # numbers go on, and each episode begins with step 1
        assert np.array_equal(mine['state'][1:][~new[1:]], mine['next_state'][:-1][~new[1:]])
        broken = np.flatnonzero(new[1:] & ~(mine['terminated'] | mine['truncated'])[:-1])
        assert len(broken) <= 1
    m = again.agent.memory.memory
    w = m.windows(np.arange(m.inserted), 5)
    inside = w.mask[:, 1:].numpy()
    assert (w.rows['episode_n'][:, 1:] == w.rows['episode_n'][:, :-1])[
        inside
    ].all()  # no window goes over the break


class Killed(BaseException):
    "kill -9, as far as this process can tell"


def killed(out, monkeypatch, name, nth, after, **changes):
    "A run that is killed before or after it renames its `nth` new file `name`; what was written beside stays"
    real, count = os.replace, [0]

    def replace(a, b):
        count[0] += (mine := Path(b).name == name)
        if mine and count[0] == nth and not after:
            raise Killed
        real(a, b)
        if mine and count[0] == nth:
            raise Killed

    with monkeypatch.context() as m:
        m.setattr(os, 'replace', replace)
        m.setattr(Path, 'unlink', lambda self, missing_ok=False: None)
        with pytest.raises(Killed):
            tiny(out, **changes).train()


def go_on(out, capsys):
    "Do what the command says, at most three times, until there is a summary"
    commands, seen = [['train', '--resume', str(out)]] if (out / 'config.json').exists() else [], []
    for _ in range(3):
        if (out / 'summary.json').exists():
            return
        again = ['train', 'cartpole', '--out', str(out), *SET]
        status = main(commands.pop() if commands else again)
        seen.append(capsys.readouterr().err)
        if status and '--resume' in seen[-1]:
            commands = [['train', '--resume', str(out)]]
    assert (out / 'summary.json').exists(), seen


@pytest.mark.parametrize(
    'name,nth,after',
    [
        ('config.json', 1, False),
        ('checkpoint.pt', 1, True),
        ('checkpoint.pt', 2, False),
        ('checkpoint.pt', 2, True),
        ('checkpoint.pt', 3, False),
        ('summary.json', 1, True),
        *once(STUCK, ('config.json', 1, True), ('checkpoint.pt', 1, False)),
        *once(
            END,
            ('checkpoint.pt', 3, True),
            ('checkpoint.pt', 4, False),
            ('checkpoint.pt', 4, True),
            ('returns.png', 1, False),
            ('summary.json', 1, False),
        ),
    ],
)
def test_killed_at_any_file(name, nth, after, whole, tmp_path, monkeypatch, capsys):
    "Doing what the messages say leads to the same end, and to no more files"
    killed(tmp_path / 'r', monkeypatch, name, nth, after)
    go_on(tmp_path / 'r', capsys)
    assert same_runs(whole, tmp_path / 'r')


def test_leftovers_are_cleared(tmp_path):
    "What a killed process left half-written under a temporary name is gone when the next one has ended"
    stop(tiny(tmp_path / 'r'), 200)
    (tmp_path / 'r/.checkpoint.pt.123456789').write_bytes(b'half')
    resume(tmp_path / 'r').train()
    assert not [p for p in (tmp_path / 'r').iterdir() if p.name.startswith('.')]


@pytest.mark.parametrize('call', ['fsync', 'replace'])
def test_a_full_disk_leaves_the_last_whole_checkpoint(call, whole, tmp_path, monkeypatch, capsys):
    "The second checkpoint can't be written: one line that says so and how to go on, and going on gives the same run"
    out, real, count = tmp_path / 'r', getattr(os, call), [0]

    def full(*args):
        count[0] += 1
        if count[0] == (5 if call == 'fsync' else 3):  # of each file and of its folder
            raise OSError(errno.ENOSPC, 'No space left on device')
        return real(*args)

    with monkeypatch.context() as m:
        m.setattr(os, call, full)
        m.setattr(
            MemorySamples, 'is_due', lambda self, rows: False
        )  # the first file after these is the checkpoint
        with pytest.raises(OSError):
            tiny(out).train()
    assert sorted(p.name for p in out.iterdir()) == [
        'checkpoint.pt',
        'config.json',
        'metrics.jsonl',
    ]
    resume(out).train()
    assert same_runs(whole, out)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, capsys):
    "Not a traceback"

    def full(fd):
        raise OSError(errno.ENOSPC, 'No space left on device')

    with monkeypatch.context() as m:
        m.setattr(os, 'fsync', full)
        assert 'No space left' in says(capsys, 'train', 'cartpole', '--out', tmp_path / 'r', *SET)


@pytest.mark.parametrize('what', ['half a line', 'no metrics', 'half a line in the middle'])
def test_metrics_that_were_cut(what, whole, tmp_path):
    "The half line is dropped, the rest goes on; without a file there is a new one"
    stop(tiny(tmp_path / 'r'), 170)
    path = tmp_path / 'r/metrics.jsonl'
    lines = path.read_text().splitlines(True)
    if what == 'no metrics':
        path.unlink()
    else:
        path.write_text(
            ''.join([*lines, '{"env_steps": 170, "upd'])
            if what == 'half a line'
            else ''.join([lines[0][:20] + '\n', *lines[1:]])
        )
    resume(tmp_path / 'r').train()
    expected, got = no_clock(read_metrics(whole)), no_clock(read_metrics(tmp_path / 'r'))
    assert got == expected[{'half a line': 0, 'no metrics': len(lines)}.get(what, 1) :]


def test_unknown_keys_in_config_do_no_harm(whole, tmp_path):
    "A later version may write more"
    config = json.loads((whole / 'config.json').read_text())
    config['settings']['later'], config['also'] = 3, {}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    (tmp_path / 'checkpoint.pt').write_bytes((whole / 'checkpoint.pt').read_bytes())
    assert resume(tmp_path, 400).train()['env_steps'] == 400


def test_more_steps_and_a_rate_that_ends(tmp_path):
    "The schedule is stretched to the new end: the rate is what a run of that length has, and never leaves its range"
    tiny(tmp_path / 'r', 'cartpole-per', lr=1e-2, lr_end=1e-4).train()
    run = resume(tmp_path / 'r', 500)
    total = round(400 * 0.5)
    assert run.agent.pipe.rate() == pytest.approx(
        1e-2 + (1e-4 - 1e-2) * run.agent.pipe.updates / total
    )
    run.train()
    assert (
        run.agent.pipe.opt.param_groups[0]['lr'] == pytest.approx(1e-4, rel=1)
        and read_config(tmp_path / 'r')['settings']['steps'] == 500
    )


def test_a_longer_run_has_no_summary_of_the_shorter(tmp_path):
    "While it is under way, nothing says that it has ended"
    tiny(tmp_path / 'r').train()
    stop(resume(tmp_path / 'r', 500), 400)
    assert not (tmp_path / 'r/summary.json').exists()


def test_a_run_that_ended_by_episodes(tmp_path):
    "More --steps don't help where episodes are the limit, so they aren't the remedy"
    start(
        recipe('taxi', episodes=2, memory='none', wrappers='TimeLimit(20)'), tmp_path / 'r'
    ).train()
    with pytest.raises(SettingsError) as e:
        resume(tmp_path / 'r')
    assert 'more --steps' not in str(e.value) and 'episodes' in str(e.value)


def test_two_at_once_in_one_directory(tmp_path):
    "The second is refused: together they would mix their lines and checkpoints"
    stop(tiny(tmp_path / 'r'), 150)
    one = resume(tmp_path / 'r')
    with pytest.raises(SettingsError, match='another process'):
        resume(tmp_path / 'r')
    assert one.train()


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    "Status 130 where the run was saved, where it was broken off, and where it came to its end meanwhile"

    def twice(self, rows):
        if self.run.agent.journal.steps == 250:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    def late(self, line):
        if line.get('eval_episodes') == 20:
            signal.raise_signal(signal.SIGINT)

    for name, tick, report, said in (
        ('once', lambda self, rows: signal.raise_signal(signal.SIGINT), None, 'go on:'),
        ('twice', twice, None, 'from its last checkpoint:'),
        ('late', lambda self, rows: None, late, 'mean return'),
    ):
        monkeypatch.setattr(
            commands,
            'Bar',
            type('Bar', (commands.Bar,), {'tick': tick, **({'report': report} if report else {})}),
        )
        assert main(['train', 'cartpole', '--out', str(tmp_path / name), *SET]) == 130
        told = ''.join(capsys.readouterr())
        assert said in told and (
            name == 'late' or f'fastrl-replay train --resume {tmp_path / name}' in told
        )
        assert (tmp_path / name / 'checkpoint.pt').exists() and (
            tmp_path / name / 'summary.json'
        ).exists() == (name == 'late')


def test_a_second_ctrl_c_breaks_off_and_the_checkpoint_stays(whole, tmp_path, capfd):
    "The first asks, the second raises at once; the run goes on from the last whole checkpoint; the handlers are as before"
    run, before = tiny(tmp_path / 'r'), signal.getsignal(signal.SIGINT)

    class Twice(Silent):
        def tick(self, rows):
            if run.agent.journal.steps == 250:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), interruptible(run):
        run.train(Twice())
    assert (
        capfd.readouterr().err.count('Ctrl-C again') == 1
        and signal.getsignal(signal.SIGINT) is before
    )
    resume(tmp_path / 'r').train()
    assert same_runs(whole, tmp_path / 'r')


def test_ctrl_c_at_the_very_end_is_no_loss(whole, tmp_path):
    "During the last evaluation the run simply ends"
    run = tiny(tmp_path / 'r')

    class Late(Silent):
        def report(self, line):
            if 'eval_return' in line and line['eval_episodes'] == 20:
                run.stop = True

    assert run.train(Late()) and same_runs(whole, tmp_path / 'r')


# ---- the command, from the outside of a run ----


@pytest.mark.parametrize(
    'args', [['train', 'cartpole', '--out', ''], ['train', '--resume', ''], ['compare', '']]
)
def test_a_directory_that_is_no_word(args, capsys):
    "As of a variable that isn't set: it isn't taken for the default"
    assert "'': expected a directory" in says(capsys, *args)


def test_a_directory_where_nothing_can_be_written(tmp_path, capsys, monkeypatch):
    "One line that names it, before anything is trained"

    def refuse(self, *args, **kw):
        raise PermissionError(errno.EACCES, 'Permission denied', str(self))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, 'mkdir', refuse)
    assert says(capsys, 'train', 'cartpole', *SET) == 'runs/cartpole-seed0: Permission denied\n'


@pytest.mark.parametrize(
    'data', [b'lr = 1\n', b'\xff\xfe[\x00', b'{"json": 1}', b'[cartpole\nlr = 1']
)
def test_a_broken_file_in_the_working_directory(data, tmp_path, capsys, monkeypatch):
    "Each command says which file it is, and what to do where it is another program's"
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'settings.ini').write_bytes(data)
    for line in ['recipes'], ['train', 'cartpole'], ['train', 'cartpole', '--set', 'lr']:
        err = says(capsys, *line)
        assert (
            f'Remedy: fix {tmp_path / "settings.ini"}, or read another file: --settings FILE' in err
        )
    (tmp_path / 'mine.ini').write_text('')
    assert main(['recipes', '--settings', 'mine.ini']) == 0 and len(list(tmp_path.iterdir())) == 2


def test_a_recipe_in_other_letters(tmp_path, capsys, monkeypatch):
    "Its name is that of a directory, a title and a section; a value may go on in the next line, and is one line again in what is shown"
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'settings.ini').write_text(
        '[größe]  # schön\nlike = cartpole\nwrappers = TimeLimit(30),\n    TimeLimit(20)\n',
        encoding='utf-8',
    )
    assert (
        main(['train', 'größe', *SET]) == 0
        and 'größe on CartPole-v1 with TimeLimit(30), TimeLimit(20), seed 0, into runs/größe-seed0'
        in capsys.readouterr().out
    )
    assert main(['recipes', 'größe']) == 0
    shown = parse(capsys.readouterr().out)['größe']
    assert (
        shown.settings == recipe('größe').settings
        and shown.settings['wrappers'] == 'TimeLimit(30), TimeLimit(20)'
    )


def test_the_printed_lines_can_be_typed(tmp_path, monkeypatch, capsys):
    "Also where the directory has a space in its name"
    import re, shlex

    out = tmp_path / 'my run'
    monkeypatch.setattr(
        commands,
        'Bar',
        type('Bar', (commands.Bar,), dict(tick=lambda self, rows: setattr(self.run, 'stop', True))),
    )
    assert main(['train', 'cartpole', '--out', str(out), *SET]) == 130
    monkeypatch.undo()
    typed = re.search(r'fastrl-replay (train --resume .*)', capsys.readouterr().out)[1]
    assert shlex.split(typed) == ['train', '--resume', str(out)] and main(shlex.split(typed)) == 0
    typed = re.search(r'fastrl-replay (eval .*)', capsys.readouterr().out)[1]
    assert main(shlex.split(typed)) == 0


def test_eval_of_an_unfinished_run(tmp_path, capsys):
    "It plays what there is, and says how far that was"
    run = tiny(tmp_path / 'r')
    at = stop(run, 200)
    assert (
        main(['eval', str(tmp_path / 'r'), '--episodes', '2']) == 0
        and f'after {at} steps' in capsys.readouterr().out
    )


def test_eval_with_a_seed_that_is_none(whole, capsys):
    assert 'seed' in says(capsys, 'eval', whole, '--seed', -1)


def test_a_run_without_a_checkpoint_can_be_begun_again(tmp_path, capsys):
    "It was killed early: --resume says to start it again, and so does eval; then starting it again must be possible"
    tiny(tmp_path / 'r')
    assert 'start it again' in says(
        capsys, 'train', '--resume', tmp_path / 'r'
    ) and 'start it again' in says(capsys, 'eval', tmp_path / 'r')
    assert main(['train', 'cartpole', '--out', str(tmp_path / 'r'), *SET]) == 0


def test_without_tensorboard(tmp_path, monkeypatch, capsys):
    "One line, and no directory that would be in the way of the next try"
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    assert 'pip install tensorboard' in says(
        capsys, 'train', 'cartpole', '--out', tmp_path / 'r', '--tensorboard', *SET
    )
    assert not (tmp_path / 'r').exists()


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    "Everything but the picture"
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    assert main(['train', 'cartpole', '--out', str(tmp_path / 'r'), *SET]) == 0
    assert 'pip install matplotlib' in capsys.readouterr().out and sorted(
        p.name for p in (tmp_path / 'r').iterdir()
    ) == [
        'best.pt',
        'checkpoint.pt',
        'config.json',
        'memory.json',
        'metrics.jsonl',
        'report.html',
        'summary.json',
    ]


@pytest.mark.parametrize(
    'line',
    once("an UnicodeEncodeError for … or ±, after all the training", 'recipes cartpole', 'train'),
)
def test_where_output_has_no_such_letters(line, tmp_path, monkeypatch):
    "A file on Windows, an old terminal: a letter is replaced, and nothing breaks"
    monkeypatch.setattr(sys, 'stdout', TextIOWrapper(BytesIO(), encoding='ascii'))
    assert (
        main(
            ['train', 'cartpole', '--out', str(tmp_path / 'r'), *SET]
            if line == 'train'
            else line.split()
        )
        == 0
    )


# ---- compare ----


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "Directories of two finished runs"
    out = tmp_path_factory.mktemp('finished')
    for seed in range(2):
        tiny(out / f'seed{seed}', seed=seed).train()
    return out


def test_compare_prints_a_table_of_finished_runs_and_draws_them(
    finished, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(['compare', str(finished / 'seed0'), str(finished / 'seed1')]) == 0
    rows = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(f'| {finished}')
    ]
    for row, seed in zip(rows, (0, 1), strict=True):
        s = wrote(finished / f'seed{seed}')
        name, final, best, _, steps, seconds = (
            cell.strip().replace(',', '') for cell in row.strip('|').split('|')
        )
        assert (
            name == str(finished / f'seed{seed}')
            and int(steps) == s['env_steps']
            and float(seconds) == pytest.approx(s['wall_s'], abs=0.51)
        )
        assert float(final) == pytest.approx(s['final_return'], abs=0.51) and float(
            best
        ) == pytest.approx(s['best_return'], abs=0.51)
    assert (tmp_path / 'compare.png').read_bytes().startswith(b'\x89PNG')


def test_compare_refuses_what_is_no_finished_run(finished, tmp_path, capsys):
    "Each with what is missing, before anything is drawn; a run that was stopped is named with the command that ends it"
    picture = tmp_path / 'c.png'
    stop(tiny(tmp_path / 'stopped'), 200)
    for name, said in {
        'nowhere': 'config.json',
        'stopped': f'train --resume {tmp_path / "stopped"}',
    }.items():
        err = says(capsys, 'compare', finished / 'seed0', tmp_path / name, '--plot', picture)
        assert str(tmp_path / name) in err and said in err
    assert not picture.exists()


def test_offline_runs_are_compared_by_their_evaluations(recordings, tmp_path):
    start(
        recipe('cartpole-offline', data=str(recordings / 'rows.npz'), **OFFLINE), tmp_path / 'r'
    ).train()
    assert (
        main(['compare', str(tmp_path / 'r'), '--plot', str(tmp_path / 'c.png')]) == 0
        and (tmp_path / 'c.png').exists()
    )


# ---- recorded rows ----


@pytest.fixture(scope='module')
def recordings(tmp_path_factory):
    "A memory on disk with 400 rows, and the same rows in a file"
    out = tmp_path_factory.mktemp('recorded')
    start(recipe('cartpole', **{**TINY, 'memory_path': str(out / 'rows')}), out / 'run').train()
    rows = open_memory(out / 'rows')[:].rows
    np.savez(
        out / 'rows.npz',
        **{
            k: rows[k]
            for k in ('state', 'action', 'reward', 'next_state', 'terminated', 'truncated')
        },
    )
    return out


OFFLINE = dict(
    steps=60, network=(8,), bs=8, eval_every=30, eval_episodes=2, save_every=20, report_every=10
)


def test_recorded_rows_are_read_from_memory_and_file_alike(recordings, tmp_path):
    found = []
    for data in 'rows', 'rows.npz':
        run = start(
            recipe('cartpole-offline', data=str(recordings / data), **OFFLINE), tmp_path / data
        )
        assert run.train()['updates'] == 60 and len(run.agent.memory.memory) == len(
            open_memory(recordings / 'rows')
        )
        found.append(no_clock(read_metrics(tmp_path / data)))
    assert found[0] == found[1] and 'eps' not in found[0][0]


@pytest.mark.parametrize('name', ['sac', 'td3'])
def test_learners_of_continuous_actions_leave_rows_on_disk_and_learn_from_them(tmp_path, name):
    settings = {**OFFLINE, 'env': 'Pendulum-v1'}
    start(
        recipe(name, **settings, warmup=20, memory_path=str(tmp_path / 'rows')), tmp_path / 'online'
    ).train()
    run = start(recipe(name, **settings, data=str(tmp_path / 'rows')), tmp_path / 'offline')
    assert run.train()['updates'] == 60 and np.array_equal(
        run.agent.memory.memory[:].rows, open_memory(tmp_path / 'rows')[:].rows
    )


@pytest.mark.parametrize('name', ['cartpole-offline', 'cartpole-per'])
def test_an_offline_run_that_is_stopped_goes_on_without_its_data(recordings, tmp_path, name):
    "The rows are in its checkpoint, and it ends as one that was left alone"
    (tmp_path / 'rows.npz').write_bytes((recordings / 'rows.npz').read_bytes())

    def new(out):
        return start(recipe(name, data=str(tmp_path / 'rows.npz'), **OFFLINE), out)

    whole = new(tmp_path / 'whole')
    whole.train()

    class Stops(Silent):
        def report(self, line):
            if line['env_steps'] == 30:
                run.stop = True

    run = new(tmp_path / 'two')
    assert run.train(Stops()) is None
    (tmp_path / 'rows.npz').unlink()
    assert resume(tmp_path / 'two').train()['updates'] == 60
    assert same_runs(tmp_path / 'whole', tmp_path / 'two')


@pytest.mark.parametrize(
    'data, said',
    [
        ('nothing', 'there is nothing of this name'),
        ('minari:no/such-v0', 'no/such'),
        ('acrobot.npz', "column 'state'"),
        ('empty.npz', 'it has no rows'),
    ],
)
def test_what_is_no_data_is_said_before_a_run_begins(tmp_path, monkeypatch, data, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path))
    n = 0 if data.startswith('empty') else 4
    some = dict(
        state=np.zeros((n, 6), np.float32),
        next_state=np.zeros((n, 6), np.float32),
        action=np.zeros(n, int),
        reward=np.zeros(n),
        terminated=np.zeros(n, bool),
    )
    for name in 'acrobot', 'empty':
        np.savez(f'{name}.npz', **some)
    with pytest.raises(Exception, match=said) as e:
        start(recipe('cartpole-offline', data=data, **OFFLINE), tmp_path / 'run')
    assert not (tmp_path / 'run').exists() and '\n' not in str(e.value)[:200]


def test_more_recorded_rows_than_room_are_refused(recordings, tmp_path):
    with pytest.raises(
        NoRoom,
        match='more rows in .*rows than the memory has room for; got max_sz=50. Remedy: a larger max_sz',
    ):
        start(
            recipe('cartpole-offline', data=str(recordings / 'rows'), max_sz=50, **OFFLINE),
            tmp_path / 'run',
        )
    assert not (tmp_path / 'run').exists()


def test_train_from_recorded_rows_by_the_command(recordings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(recordings)
    assert (
        main(
            [
                'train',
                'cartpole-offline',
                '--data',
                'rows',
                '--out',
                str(tmp_path / 'r'),
                '--set',
                *(f'{k}={v[0] if isinstance(v, tuple) else v}' for k, v in OFFLINE.items()),
            ]
        )
        == 0
    )
    assert '60 steps and 60 updates' in capsys.readouterr().out
    assert main(['eval', str(tmp_path / 'r')]) == 0  # from any directory: the data isn't read
    assert (
        main(['train', 'cartpole-offline', '--data', 'rwos', '--out', str(tmp_path / 's')])
        and 'there is nothing of this name' in capsys.readouterr().err
    )
