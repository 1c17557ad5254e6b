"""Recipes and runs, and the commands that use them.

Settings files, environments by name, stopping, killing, comparing, recorded rows."""

import errno, json, math, os, random, shutil, signal, sys, threading
from io import BytesIO, TextIOWrapper
from pathlib import Path

import gymnasium as gym, numpy as np, pytest
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.app import commands
from fastrl_replay.app.named_envs import read_calls
from fastrl_replay.app.offline import open_memory
from fastrl_replay.app.recipes import Agent
from fastrl_replay.app.run_files import read_config, read_metrics
from fastrl_replay.app.saved_policies import load_checkpoint
from fastrl_replay.app.runs import Silent, interruptible, resume, start
from fastrl_replay.cli import main
from fastrl_replay.steps.errors import StateError
from fastrl_replay.learning.settings import SettingsError, recipe, recipes
from fastrl_replay.memory.rows import Rows
from fastrl_replay.replay.experience import ExperienceReplay
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


def tiny(out, name='cartpole', **changes):
    return start(recipe(name, **{**TINY, **changes}), out)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch, request):
    "A picture is a third of a tiny run; test_cli.py looks at some"
    if 'matplotlib' not in request.node.name:
        monkeypatch.setattr('fastrl_replay.app.runs.charts_png', lambda *args: b'\x89PNG')


def says(capsys, *args, status=2):
    "What a mistake says: one line on stderr, nothing on stdout"
    try:
        got = main([str(a) for a in args])
    except SystemExit as e:
        got = e.code
    out, err = capsys.readouterr()
    assert got == status and err.count('\n') == 1 and 'Traceback' not in err, err
    return err


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


for cls in Opaque, NanReward, Fails, Global:
    gym.register(f'Test{cls.__name__}-v0', cls)
# ends at steps 3, 7, 11, …: never a multiple of 4
gym.register('TestOdd-v0', Opaque, kwargs=dict(lengths=(3, 4)))

# ---- what a settings file may hold ----


@pytest.mark.parametrize(
    'line,key,value',
    [
        ('LR = 0.5', 'lr', 0.5),
        ('network = 8', 'network', '8'),
        ('lr = 1', 'lr', 1.0),
        ('env = a#b  # ε: this, # and that = so', 'env', 'a#b'),
        ('bs = 8\nbs = 9', None, 'already exists'),
        ('gama = 1', None, "did you mean 'gamma'"),
        ('bs = 0.5', None, 'an integer'),
        ('dueling = 1', None, 'yes or no'),
        ('lr = fast', None, "got 'fast'; expected a number"),
    ],
)
def test_a_line_of_a_users_file(line, key, value, tmp_path):
    "It changes the recipe and those that are like it, or is one line that says what is wrong"
    path = tmp_path / 'mine.ini'
    path.write_text(f'# mine: é\n[cartpole]\n{line}\n', encoding='utf-8')
    if key is None:
        with pytest.raises(SettingsError) as e:
            recipes(path)
        assert value in str(e.value) and '\n' not in str(e.value)
        return
    for name in 'cartpole', 'cartpole-blind':
        found = recipes(path)[name].settings[key]
        assert found == value and type(found) is type(value)


def test_a_recipe_as_text_is_the_recipe(tmp_path):
    "What `fastrl-replay recipes NAME` prints can be put into a file"
    for r in recipes().values():
        (tmp_path / 's.ini').write_text(r.text(), encoding='utf-8')
        assert recipes(tmp_path / 's.ini')[r.name].settings == r.settings


def test_recipes_that_are_like_a_changed_one_change_with_it(tmp_path):
    "Unless they say otherwise; a circle is an error"
    path = tmp_path / 's.ini'
    path.write_text('[cartpole]\nn_step = 2\nlr = 0.5\n')
    found = recipes(path)
    assert [found[n].settings['n_step'] for n in ('cartpole', 'cartpole-per')] == [2, 3]
    assert found['cartpole-rank'].settings['lr'] == 0.5
    path.write_text('[cartpole]\nlike = cartpole-rank\n')
    with pytest.raises(SettingsError, match='leads back to this recipe'):
        recipes(path)


@pytest.mark.parametrize(
    'data,said',
    [
        (None, 'a regular file'),
        (b'[mine]\nlike = cartpoel\n', "did you mean 'cartpole'"),
        (b'lr = 1\n', 'no section headers'),
        (b'[mine]\nlike = 5\n', "'5'"),
        ('[cartpole]  # schön\n'.encode('latin-1'), 'UTF-8'),
    ],
)
def test_a_whole_users_file(data, said, tmp_path, capsys):
    "One that is wrong is one line (None: a directory)"
    path = tmp_path / 'mine.ini'
    path.mkdir() if data is None else path.write_bytes(data)
    assert said in says(capsys, 'recipes', '--settings', path)


def test_a_file_with_notepads_mark_is_read(tmp_path):
    (tmp_path / 'mine.ini').write_bytes(b'\xef\xbb\xbf[cartpole]\nlr = 0.5\n')
    assert recipes(tmp_path / 'mine.ini')['cartpole'].settings['lr'] == 0.5


# ---- mistakes: one line, status 2, nothing left behind ----

MISTAKES = [  # (line, what it should say)
    ('trian cartpole', "did you mean 'train'"),
    ('train cartpoel', "did you mean 'cartpole'"),
    ('train cartpole --set gama=1', "did you mean 'gamma'"),
    ('train', 'the name of a recipe is missing'),
    ('train --resume nowhere', 'no config.json'),
    ('eval nowhere', 'no config.json'),
    ('compare nowhere', 'no config.json'),
    ('recipes taxy', "did you mean 'taxi'"),
    ('train cartpole --settings no.ini', 'No such file'),
    ('train cartpole --steps 100', 'more than the warmup'),
    ('train cartpole --set envs=0', 'from 1 to'),
    ('train cartpole --set like=taxi', "no setting 'like'"),
    ('train cartpole --set gamma=2', 'gamma'),
    ('train cartpole --set bs=200000', 'max_sz'),
    ('train cartpole --set eps_start=2', 'eps'),
    ('train cartpole --set lr=nan', 'lr'),
    ('train cartpole --set learner=table', 'observation space'),
    ('train taxi --set learner=dqn memory=none', "no memory 'none'"),
    ('train cartpole-r2d2 --set burn_in=40', 'burn_in'),
    ('train cartpole --set network=0', 'network'),
    ('train cartpole --set steps=1_000,2', 'steps'),
    ('train taxi --set workers=2', "setting 'workers' with eps_factor"),
    ('train cartpole --set steps=1.5', "'1.5'"),
    ('train cartpole --seed -1', 'seed'),
    ('train cartpole --out /dev/null', '/dev/null: Not a directory'),
    ('train cartpole --out /dev/null/x', '/dev/null/x: Not a directory'),
    ('train dqn --env Pendulum-v1', 'a recipe with sac or td3'),
    ('train sac --env CartPole-v1', '.dqn for discrete actions'),
    ('train cartpole --set device=gpu', "setting: device; got 'gpu'"),
]


@pytest.mark.parametrize('line,said', MISTAKES)
def test_a_mistake_is_one_line(line, said, capsys, tmp_path, monkeypatch):
    "Whichever stage finds it; nothing is left behind"
    monkeypatch.chdir(tmp_path)
    if '--steps' not in line and 'steps=' not in line and line.startswith('train'):
        line += ' --steps 2000'
    assert said in says(capsys, *line.split()) and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_directories_of_runs(tmp_path, monkeypatch, capsys):
    "A new one for each run; or --out, once"
    monkeypatch.chdir(tmp_path)
    for more in [], ['env=Acrobot-v1']:
        assert main(['train', 'cartpole', *SET, 'ratio=0.05', *more]) == 0
    names = ['cartpole-seed0', 'cartpole-seed0-2']
    assert sorted(p.name for p in Path('runs').iterdir()) == names
    line = ['train', 'cartpole', '--out', 'a/b', *SET, 'ratio=0.05', '--steps', '1_000']
    assert main(line) == 0
    assert wrote('a/b')['env_steps'] == 1000
    capsys.readouterr()
    assert '--resume a/b' in says(capsys, 'train', 'cartpole', '--out', 'a/b', *SET)


def wrote(out):
    return json.loads((Path(out) / 'summary.json').read_text())


# ---- your own environments ----

MINE = """
import gymnasium as gym, numpy as np
from gymnasium import spaces

class Maze(gym.Env):
    def __init__(self, size=3):
        self.size = size
        self.observation_space = spaces.Box(0, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
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

gym.register('OwnMaze-v0', Maze)
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


def test_an_environment_from_the_working_directory(mine, capsys):
    "In train, --resume and eval, from a file and from --set; all results name it with its wrappers"
    around = f'TimeLimit(max_episode_steps=9), {mine}:Scale(factor=2, by=(3, 1))'
    Path('mine.ini').write_text(
        f'[maze]\nlike = cartpole\nenv = {mine}:OwnMaze-v0(size=4)\nwrappers = {around}\n'
    )
    title = f'maze on {mine}:OwnMaze-v0(size=4) with {around}, seed 0'
    assert main(['train', 'maze', '--settings', 'mine.ini', '--out', 'r', *SET]) == 0
    assert capsys.readouterr().out.count(title) == 2
    assert wrote('r')['final_return'] == 24.0
    del sys.modules[mine]
    assert main(['train', '--resume', 'r', '--trust', '--steps', '400']) == 0
    assert wrote('r')['env_steps'] == 400
    del sys.modules[mine]
    capsys.readouterr()
    assert main(['eval', 'r', '--trust', '--episodes', '2']) == 0
    said = capsys.readouterr().out
    assert f'{title}, after 400 steps' in said
    assert 'mean return of 2 episodes without exploration: 24 ' in said


def test_a_wrapper_that_changes_the_action_space(tmp_path):
    "The agent sees what the last wrapper gives; stopped and resumed it is the same run"
    changes = dict(env='Pendulum-v1', wrappers='DiscretizeAction(bins=5), TimeLimit(20)')
    tiny(tmp_path / 'whole', **changes).train()
    run = tiny(tmp_path / 'parts', **changes)
    assert run.agent.model[-1].out_features == 5
    stop(run, 170)
    resume(tmp_path / 'parts').train()
    assert same_runs(tmp_path / 'whole', tmp_path / 'parts')


@pytest.mark.parametrize(
    'setting, said',
    [
        ('env={}x:Maze', "No module named '{}x'"),
        ('env={}:OwnMazy-v0', "Environment `OwnMazy` doesn't exist. Did you mean: `OwnMaze`?"),
        ('env=os:system(touch)', "Environment `system` doesn't exist"),
        ('env=CartPol-v1', "Environment `CartPol` doesn't exist. Did you mean: `CartPole`?"),
        ('env={}:Maze(sze=2)', "unexpected keyword argument 'sze'"),
        ('env={}:NoDisplay', "cannot be made; got AssertionError: no display"),
        ('env={}:Bare', 'must specify an action space'),
        ('env={}:Maze, CartPole-v1', 'expected one environment'),
        ('env={}:Maze(', "setting 'env'; got '{}:Maze('"),
        ('env={}:Maze(open("x"))', "setting 'env'; got"),
        ('wrappers=TimeLimt(9)', "has no attribute 'TimeLimt'"),
        ('wrappers={}:Scal(2)', "has no attribute 'Scal'"),
        ('wrappers={}:Scale', "missing 1 required positional argument: 'factor'"),
        ('wrappers=Observe([0, 9])', 'Observe([0, 9]) cannot be made'),
        ('wrappers=7', "has no attribute '7'"),
    ],
)
def test_a_name_that_is_not_there_is_one_line(setting, said, mine, capsys):
    "Nothing is left behind"
    err = says(capsys, 'train', 'cartpole', *SET, setting.replace('{}', mine))
    assert said.replace('{}', mine) in err
    assert [p.name for p in Path().iterdir() if p.name != '__pycache__'] == [f'{mine}.py']


LITERALS = st.recursive(
    st.integers(-9, 9)
    | st.floats(-9, 9)
    | st.booleans()
    | st.none()
    | st.text('ab/:, =-', max_size=5),
    lambda x: st.lists(x, max_size=3),
    max_leaves=4,
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(['A', 'ALE/Pong-v5', 'b_2']),
            st.lists(LITERALS, max_size=2).map(tuple),
            st.dictionaries(st.sampled_from('abc'), LITERALS),
        ),
        max_size=3,
    )
)
def test_names_with_literal_arguments_are_read_as_they_were_written(calls):
    texts = []
    for name, args, kwargs in calls:
        given = [repr(a) for a in args]
        given += [f'{k} = {v!r}' for k, v in kwargs.items()]
        texts.append(f'm.n:{name}({", ".join(given)})')
    found = read_calls('wrappers', ' , '.join(texts))
    assert found == [('m.n', *call) for call in calls]


def test_a_fault_in_your_environment_comes_with_its_traceback(mine, capsys):
    "An error while it steps"
    assert main(['train', 'cartpole', '--out', 'r', *SET, f'env={mine}:Breaks']) == 2
    err = capsys.readouterr().err
    assert f'{mine}.py", line' in err and "KeyError: 'gone'" in err


@pytest.mark.parametrize('command', ['eval', 'train --resume'])
def test_a_run_whose_module_is_gone(command, mine, tmp_path, capsys, monkeypatch):
    "One line that names it; the run stays as it was"
    tiny('r', env=f'{mine}:Maze').train()
    files = {p.name: p.read_bytes() for p in Path('r').iterdir()}
    (tmp_path / 'other').mkdir()
    monkeypatch.chdir(tmp_path / 'other')
    del sys.modules[mine]
    monkeypatch.setattr(sys, 'path', [p for p in sys.path if p != str(tmp_path)])
    err = says(capsys, *command.split(), '../r', '--trust')
    assert f"No module named '{mine}'" in err and 'config.json' in err
    assert {p.name: p.read_bytes() for p in (tmp_path / 'r').iterdir()} == files


# ---- what may change of a run ----


@pytest.mark.parametrize('option, value', [('data', 'x.npz'), ('seed', '2'), ('out', 'x')])
def test_a_run_that_is_resumed_keeps_its_settings_and_says_so(option, value, whole, capsys):
    said = says(capsys, 'train', '--resume', whole, f'--{option}', value)
    assert option in said and 'with --resume' in said


def test_a_run_moves_to_another_device(whole, tmp_path, capsys):
    "A run from a GPU can be evaluated and continued without one, by the option in the message"
    out = shutil.copytree(whole, tmp_path / 'r')
    config = json.loads((out / 'config.json').read_text())
    config['settings']['device'] = 'meta'  # a device that can't compute anywhere
    (out / 'config.json').write_text(json.dumps(config))
    for line in ['eval', str(out)], ['train', '--resume', str(out), '--steps', '320']:
        err = says(capsys, *line)
        assert "device; got 'meta'" in err and "'cpu', or 'auto'" in err
        assert main([*line, '--device', 'cpu']) == 0
    assert read_config(out)['settings']['device'] == 'cpu' and main(['eval', str(out)]) == 0


def test_nothing_else_of_a_run_can_be_set(whole, capsys):
    said = says(capsys, 'train', '--resume', whole, '--set', 'device=cpu', 'lr=1')
    assert 'change only steps, device' in said


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
    """Register a learner with its own settings whose records have something only now and then.

    Also writes a file with a recipe."""
    from fastrl_replay.learning.learners import LEARNERS, Builder, DQNLearner, builds
    from fastrl_replay.learning.networks import value_net

    class Sometimes(DQNLearner):
        def learn(self, batch):
            return {**super().learn(batch), **({'rare': 6.0} if self.updates % 4 == 0 else {})}

    monkeypatch.setitem(LEARNERS, 'brought', None)
    del LEARNERS['brought']

    @builds('brought')
    class BroughtBuilder(Builder):
        memories = ('uniform',)
        settings = dict(speed=0.5)

        def model(self, s, observations, actions):
            return value_net(observations, actions, (8,))

        def policy(self, model, s, episodes):
            return ByTurns(model)

        def batches(self, steps, model, s):
            return steps.experience_replay(
                s['bs'], s['max_sz'], ratio=s['ratio'], warmup=s['warmup'], seed=0
            )

        def learner(self, batches, model, s):
            return Sometimes(batches, model, lr=s['speed'])

    (tmp_path / 's.ini').write_text(
        '[mine]\nlike = cartpole\nlearner = brought\nspeed = 0.25  # how fast\n'
        '[faster]\nlike = mine\nspeed = 1\n'
    )
    return tmp_path / 's.ini'


def test_a_learner_that_others_bring(brought, tmp_path, capsys):
    "Train, report without ε and by means over the records with a value, stop, resume, evaluate"
    assert recipe('faster', brought).settings['speed'] == 1.0
    assert recipe('cartpole', learner='brought').settings['speed'] == 0.5
    assert 'how fast' in recipe('mine', brought).text()
    start(recipe('mine', brought, **TINY), tmp_path / 'whole').train()
    stop(start(recipe('mine', brought, **TINY), tmp_path / 'parts'), 200)
    resume(tmp_path / 'parts').train()
    assert same_runs(tmp_path / 'whole', tmp_path / 'parts')
    lines = [m for m in read_metrics(tmp_path / 'whole') if 'fill' in m]
    assert not any('eps' in m for m in lines) and {m['rare'] for m in lines if 'rare' in m} == {6.0}
    assert main(['eval', str(tmp_path / 'whole'), '--episodes', '2']) == 0
    capsys.readouterr()


def test_what_a_brought_learner_refuses(brought):
    "Misspelt settings, values of another kind, a memory that it doesn't take"
    for changes, said in (
        (dict(sped=1), "did you mean 'speed'"),
        (dict(speed='fast'), 'expected a number, such as 0.25'),
        (dict(memory='rank'), "no memory 'rank'; expected one of uniform"),
    ):
        with pytest.raises(SettingsError, match=said):
            Agent(recipe('mine', brought, **changes).settings)
    with pytest.raises(SettingsError, match="no setting 'speed'"):
        recipe('cartpole', speed=1)


# ---- how many steps, how many updates ----


@pytest.mark.slow
@pytest.mark.parametrize(
    'changes,steps,updates',
    [
        (dict(ratio=2.5), 300, 500),
        (dict(ratio=0.0), 300, 0),
        (dict(ratio=1 / 3, train_every=64), 300, 66),
        (dict(train_every=10**6), 300, 100),
        (dict(envs=7, train_every=50), 301, 100),
        (dict(envs=8, train_every=4), 304, 102),
        (dict(warmup=250, max_sz=60), 300, 25),
        (dict(steps=333, train_every=100), 333, 116),
    ],
)
def test_steps_and_updates_are_as_promised(changes, steps, updates, tmp_path):
    "Make `ratio` updates per step beyond the warm-up, with any settings; round steps up to a block"
    s = tiny(tmp_path / 'r', **changes).train()
    assert (s['env_steps'], s['updates']) == (steps, updates)


def test_episodes_are_a_limit(tmp_path):
    "It ends with the episode; then more --steps are no remedy"
    few = dict(episodes=3, eval_every=10_000, memory='none', wrappers='TimeLimit(20)')
    run = start(recipe('taxi', **few), tmp_path / 'r')
    s = run.train()
    assert s['episodes'] == 3 and s['env_steps'] == run.agent.journal.ends[-1] < 250_000
    with pytest.raises(SettingsError) as e:
        resume(tmp_path / 'r')
    assert 'more --steps' not in str(e.value) and 'episodes' in str(e.value)


# ---- what is written is true ----


def by_hand(out, episodes=20):
    "Greedy episodes, from the checkpoint's weights alone: matrices, gymnasium, nothing of ours"
    config = json.loads((out / 'config.json').read_text())['settings']
    w = load_checkpoint(out / 'checkpoint.ckpt')['agent']['pipe']['own']['model']
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


@pytest.mark.slow
def test_final_return_is_the_mean_of_20_greedy_episodes(tmp_path):
    "Played again by a second implementation"
    s = tiny(tmp_path / 'r', seed=7, steps=900, network=(16,)).train()
    returns = by_hand(tmp_path / 'r')
    assert s['final_return'] == pytest.approx(returns.mean())
    assert s['final_std'] == pytest.approx(returns.std()) and len(set(returns)) > 2


@pytest.mark.parametrize('solved,ever', [(5, True), (10_000, False)])
def test_solved_at_step(solved, ever, tmp_path):
    "The step of the first evaluation whose mean reaches it; after a resumption still the first"
    stop(tiny(tmp_path / 'r', solved=solved, steps=500), 320)
    s = resume(tmp_path / 'r').train()
    steps = [m['env_steps'] for m in read_metrics(tmp_path / 'r') if 'eval_return' in m]
    assert s['solved_at_step'] == (steps[0] if ever else None)
    assert steps[-1] == 500 and len(steps) == 4


def test_reports_are_means_and_only_grow(tmp_path, monkeypatch):
    "Each line's loss is the mean since the line before; counts never fall; all is valid JSON"
    from fastrl_replay.learning.dqn import DQNLearner

    losses = []
    learn = DQNLearner.learn

    def kept(self, batch):
        losses.append(learn(self, batch)['loss'])
        return dict(loss=losses[-1])

    monkeypatch.setattr(DQNLearner, 'learn', kept)
    tiny(tmp_path / 'r', steps=700).train()
    lines = [
        json.loads(t, parse_constant=lambda c: pytest.fail(c))
        for t in (tmp_path / 'r/metrics.jsonl').read_text().splitlines()
    ]
    done = 0
    for m in (m for m in lines if m.get('updates', 0) and 'eps' in m):
        assert m['loss'] == pytest.approx(np.mean(losses[done : m['updates']]))
        done = m['updates']
    for k in 'env_steps', 'updates', 'episodes', 'wall_s':
        values = [m[k] for m in lines if k in m]
        assert values == sorted(values)


def test_a_reward_that_is_no_number_is_one_line(tmp_path, capsys):
    "The learner's error and its remedy reach the person, not a traceback"
    assert "'reward'" in says(
        capsys, 'train', 'cartpole', '--out', tmp_path / 'r', *SET, 'env=TestNanReward-v0'
    )


def test_an_environment_that_fails_names_what_it_said_and_the_last_checkpoint(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Fails, 'made', 0)
    more = 'env=TestFails-v0', 'eval_every=1000', 'save_every=1'
    assert main(['train', 'cartpole', '--out', str(tmp_path / 'r'), *SET, *more]) == 2
    err = capsys.readouterr().err
    assert 'the simulator is gone' in err and f'--resume {tmp_path / "r"}' in err


# ---- stopped, and continued ----


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
        ('cartpole', dict(train_every=64)),
        pytest.param('cartpole', dict(env='TestOpaque-v0'), marks=pytest.mark.slow),
        pytest.param('cartpole', dict(env='TestGlobal-v0'), marks=pytest.mark.slow),
        ('cartpole-per', dict(n_step=3, envs=3, train_every=20)),
        ('cartpole-r2d2', dict(network=8, bs=4, length=8, burn_in=2, overlap=4, ratio=0.5, envs=1)),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in ('taxi', 'taxi-online')),
    ],
)
def test_stopped_twice_is_as_never_stopped(name, changes, tmp_path):
    """Three pieces give the lines, weights, memory and RNG state of one run.

    If an environment can't be saved, the run stops at the end of its episode."""
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
    last = tmp_path / 'parts'
    first = stop(begin(last), 130)
    second = stop(resume(last), first + 30)
    assert first < second
    resume(last).train()
    assert same_runs(tmp_path / 'whole', last)
    assert no_clock([wrote(tmp_path / 'whole')]) == no_clock([wrote(last)])


def test_stopped_in_the_last_burst(whole, tmp_path):
    "All steps are made: what is left is done"
    run = tiny(tmp_path / 'r')
    assert run.train(AskedAt(run, 300)) and same_runs(whole, tmp_path / 'r')


def test_stop_between_bursts_where_episodes_end_elsewhere(tmp_path):
    "Ctrl-C works although the environment can't be saved and no episode ends with a burst"
    run = tiny(tmp_path / 'r', env='TestOdd-v0', train_every=4, steps=600)
    assert stop(run, 200) < 250


def test_several_environments_that_cannot_be_saved(tmp_path):
    """A stop takes effect soon.

    The resumed run begins new episodes with consecutive numbers; no window crosses the break."""
    run = tiny(tmp_path / 'r', env='TestOpaque-v0', envs=3, steps=600)
    assert stop(run, 200) < 215
    again = resume(tmp_path / 'r')
    again.train()
    m = again.agent.memory.memory
    rows = m.take(np.arange(m.inserted)).rows
    for e in range(3):
        mine = rows[rows['env_id'] == e]
        new = np.r_[True, mine['episode_n'][1:] != mine['episode_n'][:-1]]
        assert (mine['step_n'][new] == 1).all()
        assert np.array_equal(mine['state'][1:][~new[1:]], mine['next_state'][:-1][~new[1:]])
    w = m.windows(np.arange(m.inserted), 5)
    inside = w.mask[:, 1:].numpy()
    assert (w.rows['episode_n'][:, 1:] == w.rows['episode_n'][:, :-1])[inside].all()


class Killed(BaseException):
    "kill -9, as far as this process can tell"


def killed(out, monkeypatch, name, nth, after, **changes):
    "Kill a run before or after it renames its `nth` new file `name`; files written beside it stay"
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


@pytest.mark.slow
@pytest.mark.parametrize(
    'name,nth,after',
    [
        ('checkpoint.ckpt', 1, True),
        ('checkpoint.ckpt', 2, False),
        ('checkpoint.ckpt', 3, True),
        ('checkpoint.ckpt', 4, True),
        ('returns.png', 1, False),
        ('summary.json', 1, False),
    ],
)
def test_killed_at_any_file(name, nth, after, whole, tmp_path, monkeypatch, capsys):
    "Doing what the messages say leads to the same end"
    killed(tmp_path / 'r', monkeypatch, name, nth, after)
    go_on(tmp_path / 'r', capsys)
    assert same_runs(whole, tmp_path / 'r')
    assert not [p for p in (tmp_path / 'r').iterdir() if p.name.startswith('.')]


def test_a_full_disk_leaves_the_last_whole_checkpoint(whole, tmp_path, monkeypatch, capsys):
    "The second checkpoint can't be written: a line says so, and going on gives the same run"
    real = os.replace

    def full(a, b):
        if Path(b).name == 'checkpoint.ckpt' and Path(b).exists():
            raise OSError(errno.ENOSPC, 'No space left on device')
        return real(a, b)

    with monkeypatch.context() as m:
        m.setattr(os, 'replace', full)
        assert main(['train', 'cartpole', '--out', str(tmp_path / 'r'), *SET]) == 2
    last = capsys.readouterr().err.splitlines()[-2:]
    assert f'train --resume {tmp_path / "r"}' in last[0] and 'No space left' in last[1]
    resume(tmp_path / 'r').train()
    assert same_runs(whole, tmp_path / 'r')


@pytest.mark.parametrize('what', ['half a line', 'half a line in the middle'])
def test_metrics_that_were_cut(what, whole, tmp_path):
    "The half line is dropped, the rest goes on"
    stop(tiny(tmp_path / 'r'), 170)
    path = tmp_path / 'r/metrics.jsonl'
    lines = path.read_text().splitlines(True)
    if what == 'half a line':
        lines.append('{"env_steps": 170, "upd')
    else:
        lines[0] = lines[0][:20] + '\n'
    path.write_text(''.join(lines))
    resume(tmp_path / 'r').train()
    first = 0 if what == 'half a line' else 1
    assert no_clock(read_metrics(tmp_path / 'r')) == no_clock(read_metrics(whole))[first:]


def test_more_steps_and_a_rate_that_ends(tmp_path):
    "The schedule is stretched to the new end; while it trains, nothing says that it has ended"
    tiny(tmp_path / 'r', 'cartpole-per', lr=1e-2, lr_end=1e-4).train()
    run = resume(tmp_path / 'r', dict(steps=500))
    assert not (tmp_path / 'r/summary.json').exists()
    part = run.agent.pipe.updates / round(400 * 0.5)
    assert run.agent.pipe.rate() == pytest.approx(1e-2 + (1e-4 - 1e-2) * part)
    run.train()
    assert read_config(tmp_path / 'r')['settings']['steps'] == 500


def test_a_second_ctrl_c_breaks_off_and_the_checkpoint_stays(whole, tmp_path, capfd):
    """The first Ctrl-C asks, the second raises at once.

    The run continues from the last whole checkpoint, and the old handlers are back."""
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


# ---- the command, from the outside of a run ----


def test_the_printed_lines_can_be_typed(tmp_path, monkeypatch, capsys):
    "Also if the directory has a space in its name, and its environment wants --trust"
    import re, shlex

    out = tmp_path / 'my run'
    stopped = dict(tick=lambda self, rows: setattr(self.run, 'stop', True))
    with monkeypatch.context() as m:
        m.setattr(commands, 'Bar', type('Bar', (commands.Bar,), stopped))
        assert main(['train', 'cartpole', '--out', str(out), *SET]) == 130
    typed = re.search(r'fastrl-replay (train --resume .*)', capsys.readouterr().out)[1]
    assert shlex.split(typed) == ['train', '--resume', str(out)] and main(shlex.split(typed)) == 0
    typed = re.search(r'fastrl-replay (eval .*)', capsys.readouterr().out)[1]
    assert main(shlex.split(typed)) == 0


def test_eval_of_an_unfinished_run(tmp_path, capsys):
    "It plays what there is, and says how far that was"
    at = stop(tiny(tmp_path / 'r'), 200)
    assert main(['eval', str(tmp_path / 'r'), '--episodes', '2']) == 0
    assert f'after {at} steps' in capsys.readouterr().out


def test_a_run_without_a_checkpoint_says_so(tmp_path, capsys):
    "Killed before a checkpoint"
    tiny(tmp_path / 'r')
    for line in ['train', '--resume'], ['eval']:
        assert 'start the run again' in says(capsys, *line, tmp_path / 'r')


def test_without_matplotlib_or_tensorboard(tmp_path, monkeypatch, capsys):
    "Everything but the picture; a missing tensorboard leaves no directory behind"
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    line = ['train', 'cartpole', '--out', tmp_path / 'r', *SET]
    board = ['train', 'cartpole', '--out', tmp_path / 'b', *SET, '--steps', 310, '--tensorboard']
    assert "pip install 'fastrl_replay[tensorboard]'" in says(capsys, *board)
    assert main([str(a) for a in line]) == 0
    assert (tmp_path / 'r/summary.json').exists() and not (tmp_path / 'r/returns.png').exists()


def test_where_output_has_no_such_letters(tmp_path, monkeypatch):
    "A file on Windows, an old terminal: a letter is replaced, and nothing breaks"
    monkeypatch.setattr(sys, 'stdout', TextIOWrapper(BytesIO(), encoding='ascii'))
    assert main(['recipes', 'cartpole']) == 0


# ---- compare ----


def test_compare_prints_a_table_of_finished_runs_and_draws_them(
    whole, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tiny('other', seed=1).train()
    assert main(['compare', str(whole), 'other']) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith('| ')][1:]
    for row, out in zip(rows, (whole, 'other'), strict=True):
        s = wrote(out)
        cells = [cell.strip().replace(',', '') for cell in row.strip('|').split('|')]
        assert cells[0] == str(out) and int(cells[4]) == s['env_steps']
        assert float(cells[1]) == pytest.approx(s['final_return'], abs=0.51)
        assert float(cells[2]) == pytest.approx(s['best_return'], abs=0.51)
    assert (tmp_path / 'compare.png').read_bytes().startswith(b'\x89PNG')


def test_compare_refuses_what_is_no_finished_run(whole, tmp_path, capsys):
    "A run that was stopped is named with the command that ends it"
    stop(tiny(tmp_path / 'stopped'), 200)
    err = says(capsys, 'compare', whole, tmp_path / 'stopped', '--plot', tmp_path / 'c.png')
    assert f'train --resume {tmp_path / "stopped"}' in err and not (tmp_path / 'c.png').exists()


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
        r = recipe('cartpole-offline', data=str(recordings / data), **OFFLINE)
        run = start(r, tmp_path / data)
        assert run.train()['updates'] == 60
        assert len(run.agent.memory.memory) == len(open_memory(recordings / 'rows'))
        found.append(no_clock(read_metrics(tmp_path / data)))
    assert found[0] == found[1] and 'eps' not in found[0][0]
    assert main(['compare', str(tmp_path / 'rows'), '--plot', str(tmp_path / 'c.png')]) == 0


def test_learners_of_continuous_actions_leave_rows_on_disk_and_learn_from_them(tmp_path):
    settings = {**OFFLINE, 'env': 'Pendulum-v1'}
    rows = str(tmp_path / 'rows')
    start(recipe('sac', **settings, warmup=20, memory_path=rows), tmp_path / 'online').train()
    run = start(recipe('sac', **settings, data=rows), tmp_path / 'offline')
    assert run.train()['updates'] == 60
    assert np.array_equal(run.agent.memory.memory[:].rows, open_memory(rows)[:].rows)


@pytest.mark.slow
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
    assert resume(tmp_path / 'two', trust=True).train()['updates'] == 60
    assert same_runs(tmp_path / 'whole', tmp_path / 'two')


@pytest.mark.parametrize(
    'data, said',
    [
        ('nothing', "'data': not found"),
        ('minari:no/such-v0', 'no/such'),
        ('acrobot.npz', "column 'state'"),
        ('empty.npz', 'there are no rows'),
    ],
)
def test_what_is_no_data_is_said_before_a_run_begins(tmp_path, monkeypatch, data, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path))
    n, wide = (0, 4) if data.startswith('empty') else (4, 6)
    some = dict(
        state=np.zeros((n, wide), np.float32),
        next_state=np.zeros((n, wide), np.float32),
        action=np.zeros(n, int),
        reward=np.zeros(n),
        terminated=np.zeros(n, bool),
    )
    for name in 'acrobot', 'empty':
        np.savez(f'{name}.npz', **some)
    with pytest.raises(Exception, match=said) as e:
        start(recipe('cartpole-offline', data=data, **OFFLINE), tmp_path / 'run')
    assert not (tmp_path / 'run').exists() and '\n' not in str(e.value)[:200]


def test_a_memory_that_was_not_filled_to_the_end_is_not_taken(recordings, tmp_path):
    "A process was killed while it filled it: a copy of the directory from then"

    def chain(name):
        replay = ExperienceReplay(bs=4, max_sz=500, store=Rows(tmp_path / name))
        return replay.offline(recordings / 'rows')

    whole = chain('whole')
    add = whole.source.add

    def copied(block):
        add(block)
        shutil.copytree(tmp_path / 'whole', tmp_path / 'killed')

    whole.source.add = copied
    whole.fill()
    whole.close()
    chain('whole').fill()
    with pytest.raises(StateError, match='killed was not filled completely'):
        chain('killed').fill()


def test_train_from_recorded_rows_by_the_command(recordings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(recordings)
    changes = [f'{k}={v[0] if isinstance(v, tuple) else v}' for k, v in OFFLINE.items()]
    line = ['train', 'cartpole-offline', '--data', 'rows', '--out', str(tmp_path / 'r')]
    assert main([*line, '--set', *changes]) == 0
    assert '60 steps and 60 updates' in capsys.readouterr().out
    assert main(['eval', str(tmp_path / 'r')]) == 0
    capsys.readouterr()
    assert 'not found' in says(
        capsys, 'train', 'cartpole-offline', '--data', 'rwos', '--out', tmp_path / 's'
    )
