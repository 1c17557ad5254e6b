"""Recorded data in and out, and mixtures of memories.

With the real libraries: Minari, Arrow, Hugging Face, Stable-Baselines3."""

import json
import pickle
import warnings
from inspect import signature

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from fastrl_replay.all import *
from fastrl_replay.cli import main
from fastrl_replay.testing import same, through_file

minari = pytest.importorskip('minari')
sb3 = pytest.importorskip('stable_baselines3')
pa = pytest.importorskip('pyarrow')
from pyarrow import parquet
from stable_baselines3.common import buffers
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from fastrl_replay.sb3 import ReplayBuffer

# before Minari 0.5.4 always
LOSSLESS = {}
if 'jpeg_encoding' in signature(minari.DataCollector).parameters:
    LOSSLESS['jpeg_encoding'] = False


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path / 'minari'))


def trained(data, tmp_path):
    "Exit status of a training on this data"
    out = str(tmp_path / 'run')
    return main(['train', 'cartpole-offline', '--data', str(data), '--out', out])


# ---- recorded episodes ----


@pytest.mark.slow
def test_tables_of_hugging_face():
    datasets = pytest.importorskip('datasets')
    flat = dict(
        obs=[[1.0, 1], [2, 4], [7, 7]],
        next_obs=[[2.0, 4], [3, 9], [8, 8]],
        action=[0, 2, 1],
        reward=[1.0, 10, 5],
        done=[False, True, False],
        timeout=[False, False, True],
    )
    (rows,) = Episodes(datasets.Dataset.from_dict(flat))
    assert rows.total_reward.tolist() == [1, 11, 5]
    assert rows.episode_n.tolist() == [1, 1, 2]
    assert rows.next_state.tolist() == flat['next_obs']


def test_many_rows_and_no_rows():
    n = 1000
    flat = dict(
        state=np.arange(n, dtype=np.float32),
        next_state=np.arange(1, n + 1, dtype=np.float32),
        action=np.zeros(n, np.int64),
        reward=np.ones(n),
        terminated=np.arange(n) % 10 == 9,
    )
    (rows,) = Episodes(flat)
    assert rows.episode_n[-1] == n // 10
    assert (rows.total_reward.numpy() == np.arange(n) % 10 + 1).all()
    (none,) = Episodes({k: v[:0] for k, v in flat.items()})
    assert len(none) == 0
    assert list(Episodes([])) == []


GOOD = dict(
    observations=np.zeros((6, 4), np.float32),
    actions=np.arange(5) % 2,
    rewards=np.ones(5),
    terminations=np.array([0, 0, 0, 0, 1]),
)
PICKLED = np.array([[0], [1, 2]] * 2 + [3], object)


@pytest.mark.parametrize(
    'change, says',
    [
        (dict(actions=PICKLED), "'action'; got Python objects; .*Remedy: save"),
        (dict(terminations=np.array([0, 0, 0, 0, 7])), "'terminated'; got 7 in step 5"),
        (dict(truncations=np.array([0, 0, np.nan, 0, 0])), "'truncated'; got nan in step 3"),
        (dict(terminations=np.ones((5, 1))), r"'terminated'; got shape \[5, 1\]"),
        (dict(actions=np.arange(3)), "'action'; got 3 rows; expected 5"),
        (dict(observations=np.zeros((6, 4), 'c8')), "'state'; got .*; expected"),
    ],
    ids=['pickle', 'flag', 'NaN', 'shape', 'short', 'complex'],
)
def test_wrong_arrays_and_pickles_are_named(change, says, tmp_path, capsys):
    "By the library, and by the command on one line, which advises nothing unsafe"
    path = tmp_path / 'log.npz'
    np.savez(path, **{**GOOD, **change})
    with pytest.raises(ValueError, match=says) as e:
        list(Episodes(path))
    assert str(path) in str(e.value)
    assert trained(path, tmp_path) == 2
    said = capsys.readouterr().err
    assert said.count('\n') == 1 and str(path) in said
    assert 'allow_pickle' not in said
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    'end, change, says',
    [
        ('.npz', lambda data: b'', 'got BadZipFile: .*; expected a complete file .npz'),
        ('.npz', lambda data: data[:400], 'got BadZipFile'),
        ('.npz', lambda data: data[:150] + b'?' + data[151:], 'got BadZipFile: Bad CRC'),
        ('.npz', lambda data: b't,x', 'got BadZipFile'),
        ('.parquet', lambda data: data[:-40], 'got ArrowInvalid'),
    ],
    ids=['empty', 'cut', 'damaged', 'text', 'table'],
)
def test_a_damaged_file_is_named(end, change, says, tmp_path, capsys):
    path = tmp_path / f'log{end}'
    if end == '.npz':
        np.savez(path, **GOOD)
    else:
        parquet.write_table(pa.table(dict(rewards=np.arange(99.0))), path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f'{path}.*; {says}'):
        list(Episodes(path))
    assert trained(path, tmp_path) == 2
    assert capsys.readouterr().err.count('\n') == 1


# ---- Minari ----


class Nested(gym.Env):
    "Dict observations with a tuple; infos; episodes of 1, 2, 3, … steps, every other one truncated"

    observation_space = spaces.Dict(
        b=spaces.Box(-9, 99, (2,), np.float32),
        a=spaces.Tuple((spaces.Discrete(50), spaces.Box(0, 255, (3, 3, 3), np.uint8))),
    )
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    episode = 0

    def _obs(self):
        return dict(
            b=np.float32([self.t, self.episode]),
            a=(np.int64(self.t), np.full((3, 3, 3), self.t * 7 % 256, np.uint8)),
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return self._obs(), dict(speed=0.0)

    def step(self, action):
        self.t += 1
        over = self.t == self.episode
        return (
            self._obs(),
            self.t / 4,
            over and self.episode % 2 == 1,
            over and self.episode % 2 == 0,
            dict(speed=self.t / 2),
        )


@pytest.mark.skipif(not LOSSLESS, reason='Minari before 0.5.4 stores images as JPEG')
def test_minari_both_ways_with_nested_observations():
    collector = minari.DataCollector(Nested(), record_infos=True, **LOSSLESS)
    for e in range(5):
        collector.reset(seed=10 + e)
        while not any(collector.step(np.float32([e / 5]))[2:4]):
            pass
    facts = dict(algorithm_name='x', author='x', author_email='x', code_permalink='x')
    collector.create_dataset('nested/one-v0', **facts)
    first = Steps.cat(list(read_minari('nested/one-v0', infos='speed')))
    assert first.seed.tolist() == [10] + [11] * 2 + [12] * 3 + [13] * 4 + [14] * 5
    assert first.speed.tolist() == [t / 2 for e in range(1, 6) for t in range(1, e + 1)]
    assert (
        first.next_state['a'][0].tolist() == [t for e in range(1, 6) for t in range(1, e + 1)]
        and first.state['b'][:, 1].tolist() == first.episode_n.tolist()
    )
    assert first.terminated.tolist() == [
        e % 2 == 1 and t == e for e in range(1, 6) for t in range(1, e + 1)
    ]
    made = write_minari(
        [first],
        'nested/two-v0',
        observation_space=Nested.observation_space,
        action_space=Nested.action_space,
    )
    assert Steps.cat(list(read_minari(made, infos='speed'))) == first
    assert minari.load_dataset('nested/two-v0').total_steps == 15 and made.total_episodes == 5


def test_rows_of_an_environment_go_there_and_back():
    rows = Steps.cat(list(GymStepper('CartPole-v1', seed=3).header(200)))
    memory = ExperienceReplay(bs=8, max_sz=150, seed=0)
    memory.add(rows)  # a full ring: the oldest episode has lost its beginning
    made = write_minari(memory, 'pole/mine-v0', 'CartPole-v1')
    back, held = Steps.cat(list(read_minari('pole/mine-v0'))), memory.memory[:]
    for n in ('state', 'action', 'reward', 'next_state', 'terminated'):
        assert torch.equal(back[n], held[n]), n
    assert back.truncated[:-1].tolist() == held.truncated[:-1].tolist() and back.done[-1]
    assert isinstance(made.recover_environment().unwrapped, type(gym.make('CartPole-v1').unwrapped))
    again = read_minari('pole/mine-v0')
    it = iter(again)
    for _ in range(3):
        next(it)
    twin = read_minari('pole/mine-v0')
    twin.load_state_dict(through_file(again.state_dict()))
    assert [*it] == [*twin]


def recorded_pole(name='pole/few-v0', n=60):
    return write_minari(GymStepper('CartPole-v1', seed=0).header(n), name, 'CartPole-v1')


def test_a_data_set_of_minari_is_data_for_offline():
    made = recorded_pole()

    def draws(data):
        pipe = ExperienceReplay(bs=8, max_sz=100, seed=0).offline(data, max_steps=5)
        return [b.index.tolist() for b in pipe]

    assert draws(made) == draws('minari:pole/few-v0')
    for wrong in 3, None, dict(GOOD), b'rows.npz':
        with pytest.raises(ArgumentTypeError, match='Offline: data .*Remedy: .*replay.add'):
            ExperienceReplay(bs=8, max_sz=100).offline(wrong)


def test_a_data_set_that_is_missing_or_damaged_is_named(tmp_path, capsys):
    recorded_pole()
    for name in 'pole/fwe-v0', '../..':
        with pytest.raises(ArgumentError, match="is not on this machine|cannot be read"):
            read_minari(name)
        assert trained(f'minari:{name}', tmp_path) == 2
        assert capsys.readouterr().err.count('\n') == 1
    for file in 'main_data.hdf5', 'metadata.json':
        (path,) = (tmp_path / 'minari').rglob(file)
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(ArgumentError, match="few-v0 cannot be read; got .*Remedy"):
            list(read_minari('pole/few-v0'))


def test_a_data_set_without_its_spaces_is_not_loaded(tmp_path):
    "Minari would call the function that its `env_spec` names"
    recorded_pole()
    (path,) = (tmp_path / 'minari').rglob('metadata.json')
    facts = json.loads(path.read_text())
    for name in 'observation_space', 'action_space':
        path.write_text(json.dumps({k: v for k, v in facts.items() if k != name}))
        with pytest.raises(ArgumentError, match='lacks the spaces'):
            read_minari('pole/few-v0')


@pytest.mark.parametrize('game', ['fastrl_replay/Catch-v0', 'fastrl_replay/BitFlip-v0'])
def test_our_games_are_written_and_recovered(game):
    rows = list(GymStepper(game, seed=0).header(30))
    for i, env in enumerate((game, gym.make(game))):
        made = write_minari(rows, f'games/written-v{i}', env)
        assert type(made.recover_environment().unwrapped) is type(gym.make(game).unwrapped)
        assert sum(map(len, read_minari(f'games/written-v{i}'))) == 30


def test_a_memory_on_disk_becomes_a_data_set(tmp_path):
    from fastrl_replay.app.offline import open_memory

    with ExperienceReplay(bs=1, max_sz=100, store=Rows(path=tmp_path / 'm')) as memory:
        for block in GymStepper('CartPole-v1', seed=0).header(60):
            memory.add(block)
        rows = memory.memory[:]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        write_minari(open_memory(tmp_path / 'm'), 'pole/mine-v3', gym.make('CartPole-v1'))
    back = Steps.cat(list(read_minari('pole/mine-v3')))
    for n in 'state', 'action', 'reward', 'next_state', 'terminated', 'step_n':
        assert torch.equal(back[n], rows[n])


# ---- Stable-Baselines3 ----


def pair(space, action=spaces.Discrete(2), n_envs=1, size=12, **kw):
    theirs = buffers.DictReplayBuffer if isinstance(space, spaces.Dict) else buffers.ReplayBuffer
    return ReplayBuffer(size, space, action, 'cpu', n_envs, **kw), theirs(
        size, space, action, 'cpu', n_envs
    )


def equal(a, b):
    for x, y in zip(a, b):
        if isinstance(x, dict):
            assert x.keys() == y.keys() and all(
                torch.equal(x[k], y[k]) and x[k].dtype == y[k].dtype for k in x
            )
        else:
            assert x is y is None or torch.equal(x, y) and x.dtype == y.dtype


SPACES = dict(
    box=spaces.Box(-5, 5, (3,)),
    double=spaces.Box(-5, 5, (2,), np.float64),
    discrete=spaces.Discrete(7),
    many=spaces.MultiDiscrete([3, 4]),
    binary=spaces.MultiBinary(3),
    pictures=spaces.Box(0, 255, (4, 36, 36), np.uint8),
    dict=spaces.Dict(eye=spaces.Box(0, 255, (4, 36, 36), np.uint8), touch=spaces.Box(-5, 5, (2,))),
)


def batch(space, n):
    "So many samples of a space"
    x = [space.sample() for _ in range(n)]
    return (
        {k: np.stack([v[k] for v in x]) for k in space.spaces}
        if isinstance(space, spaces.Dict)
        else np.stack(x)
    )


def add_to(buffers, space, action, n_envs=1, steps=20):
    "Add the same random steps to several buffers"
    space.seed(1)
    action.seed(2)
    rng, obs = np.random.default_rng(0), batch(space, n_envs)
    for t in range(steps):
        after, last, reward = batch(space, n_envs), batch(action, n_envs), rng.normal(size=n_envs)
        done, late = rng.random((2, n_envs)) < 0.3
        infos = [{'TimeLimit.truncated': bool(x)} for x in done & late]
        for b in buffers:
            b.add(obs, after, last, reward, done, infos)
        obs = after


def seeded(buffer, n=9, **kw):
    np.random.seed(3)
    return buffer.sample(n, **kw)


COLUMNS = 'observations', 'next_observations', 'actions', 'rewards', 'dones', 'timeouts'


def same_arrays(a, b):
    if isinstance(b, dict):
        assert a.keys() == b.keys()
        for k in b:
            same_arrays(a[k], b[k])
    else:
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


STORES = dict(
    rows=lambda: None,
    device=lambda: Rows(device='cpu'),
    frames=lambda: Frames(4, compress='zstd'),
    frames_there=lambda: Frames(4, device='cpu'),
)


@pytest.mark.parametrize(
    'name, store',
    [
        *((name, 'rows') for name in SPACES),
        ('box', 'device'),
        ('dict', 'frames'),
        ('dict', 'frames_there'),
    ],
)
@pytest.mark.parametrize('n_envs', [1, 3])
def test_the_buffer_draws_what_theirs_draws(name, store, n_envs):
    "Empty, full and not, with timeouts, copied and reset"
    space = SPACES[name]
    for action in spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float64):
        ours, theirs = pair(space, action, n_envs, store=STORES[store]())
        for steps in 0, 2, 18:
            add_to([ours, theirs], space, action, n_envs, steps)
            assert (ours.pos, ours.full, ours.size()) == (theirs.pos, theirs.full, theirs.size())
            for c in COLUMNS:
                same_arrays(getattr(ours, c), getattr(theirs, c))
            if steps:
                equal(seeded(ours), seeded(theirs))
        equal(seeded(pickle.loads(pickle.dumps(ours))), seeded(theirs))
        ours.reset()
        assert ours.size() == len(ours.memory) == 0


def test_normalized_samples():
    env = VecNormalize(DummyVecEnv([lambda: gym.make('Pendulum-v1')]))
    ours, theirs = pair(env.observation_space, env.action_space, size=60)
    add_to([ours, theirs], env.observation_space, env.action_space, steps=30)
    env.reset()
    for _ in range(9):
        env.step(np.stack([env.action_space.sample()]))
    equal(seeded(ours, env=env), seeded(theirs, env=env))


def test_their_columns_go_through_extend():
    "As Stable-Baselines3's own test of saving does"
    ours, theirs = pair(SPACES['box'], n_envs=3, size=30)
    add_to([ours, theirs], SPACES['box'], spaces.Discrete(2), 3, 9)
    for source in theirs, ours:
        fresh, want = pair(SPACES['box'], n_envs=3, size=30)
        for b in fresh, want:
            infos = [[{'TimeLimit.truncated': x}] for x in source.timeouts]
            b.extend(*(getattr(source, c) for c in COLUMNS[:-1]), infos)
        for c in COLUMNS:
            same_arrays(getattr(fresh, c), getattr(want, c))


def test_wrong_rows_leave_the_buffer_as_it_was():
    buffer = ReplayBuffer(10, SPACES['box'], spaces.Discrete(2), 'cpu')
    obs, action, reward, done = np.zeros((1, 3), np.float32), np.ones(1, int), np.ones(1), [True]
    buffer.add(obs, obs, action, reward, np.array([False]), [{}])
    with pytest.raises(ValueError, match='cannot reshape'):
        buffer.add(obs, obs, action, reward, [True, False], [{}])
    for infos in {}, None, [None], ['TimeLimit.truncated']:
        with pytest.raises(Exception):
            buffer.add(obs, obs, action, reward, np.array(done), infos)
    with pytest.raises(ValueError, match='NaN'):
        buffer.add(obs, obs * np.nan, action, reward, np.array(done), [{}])
    assert (buffer.pos, buffer.size(), len(buffer.memory)) == (1, 1, 1)
    buffer.add(obs, obs, action, reward, np.array(done), [{}])
    assert buffer.memory[-1].step_n == 2


def test_the_buffer_continues_with_a_directory(tmp_path):
    "Opened again, it draws all rows that are there; another number of environments is refused"

    def made(n=2):
        store = Rows(tmp_path)
        return ReplayBuffer(40, SPACES['box'], spaces.Discrete(2), 'cpu', n_envs=n, store=store)

    def add(buffer, first, end):
        for t in range(first, end):
            obs = np.full((2, 3), t / 100, np.float32)
            buffer.add(obs, obs, np.zeros((2, 1)), np.full(2, t), np.zeros(2, bool), [{}, {}])

    def drawn(buffer):
        return sorted({int(x) for x in buffer.sample(500).rewards.numpy().ravel()})

    first = 0
    for end, oldest in (12, 0), (25, 5), (26, 6):
        buffer = made()
        add(buffer, first, end)
        buffer.memory.close()
        buffer, first = made(), end
        assert (buffer.pos, buffer.full) == (end % 20, end > 20)
        assert drawn(buffer) == [*range(oldest, end)]
        buffer.memory.close()
    with pytest.raises(ValueError, match='n_envs=8; got 52 rows in .*expected the number of'):
        made(8)


# ---- mixtures ----


@pytest.mark.slow
def test_training_equals_theirs():
    weights = []
    for cls in None, ReplayBuffer:
        np.random.seed(0)
        model = sb3.SAC(
            'MlpPolicy',
            DummyVecEnv([lambda: gym.make('Pendulum-v1')] * 2),
            learning_starts=20,
            batch_size=8,
            buffer_size=60,
            policy_kwargs=dict(net_arch=[8]),
            train_freq=4,
            replay_buffer_class=cls,
            seed=1,
            device='cpu',
        )
        weights.append(model.learn(80).policy.state_dict())
    assert same(*weights)


def test_a_state_of_a_mixture_of_other_replays_is_refused():
    two, three = (Mixture({name: ExperienceReplay() for name in names}) for names in ('ab', 'abc'))
    with pytest.raises(ValueError):
        three.load_state_dict(two.state_dict())
