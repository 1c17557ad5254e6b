"Recorded data in and out, with the real libraries: Minari, Arrow, Hugging Face, Stable-Baselines3."

import pickle, warnings
from inspect import signature
from itertools import islice
import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from fastrl_replay.all import *
from fastrl_replay.cli import main
from fastrl_replay.testing import through_file

minari, sb3, pa = (
    pytest.importorskip('minari'),
    pytest.importorskip('stable_baselines3'),
    pytest.importorskip('pyarrow'),
)
from stable_baselines3.common import buffers
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecFrameStack,
    VecNormalize,
    VecTransposeImage,
)
from fastrl_replay.sb3 import ReplayBuffer

LOSSLESS = {
    n: False for n in ('jpeg_encoding',) if n in signature(minari.DataCollector).parameters
}  # before Minari 0.5.4 always


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path / 'minari'))


@pytest.fixture(autouse=True)
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


# ---- data that ends ----


def test_a_stepper_that_is_left_keeps_what_waits():
    pipe = GymStepper('CartPole-v1', seed=0).n_step(3, 0.9)
    a, b = list(pipe.header(4)), list(pipe.header(4))
    steps = torch.cat([x.step_n for x in a + b]).tolist()
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]


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
    assert (
        rows.total_reward.tolist() == [1, 11, 5]
        and rows.episode_n.tolist() == [1, 1, 2]
        and rows.next_state.tolist() == flat['next_obs']
    )
    each = datasets.Dataset.from_dict(
        dict(
            observations=[[[1.0], [2], [3]], [[4.0], [5]]],
            actions=[[0, 1], [1]],
            rewards=[[1.0, 2], [3]],
            terminated=[[False, True], [True]],
        )
    )
    assert [b.total_reward.tolist() for b in Items(each).episodes()] == [[1, 3], [3]]


@pytest.mark.parametrize('n', [1000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_rows_and_an_empty_block(n):
    flat = dict(
        state=np.arange(n, dtype=np.float32),
        next_state=np.arange(1, n + 1, dtype=np.float32),
        action=np.zeros(n, np.int64),
        reward=np.ones(n),
        terminated=np.arange(n) % 10 == 9,
    )
    (rows,) = Episodes(flat)
    assert (
        len(rows) == n
        and rows.episode_n[-1] == n // 10
        and (rows.total_reward.numpy() == np.arange(n) % 10 + 1).all()
    )
    (none,) = Episodes({k: v[:0] for k, v in flat.items()})
    assert len(none) == 0 and list(Episodes([])) == []


GOOD = dict(
    observations=np.zeros((6, 4), np.float32),
    actions=np.arange(5) % 2,
    rewards=np.ones(5),
    terminations=np.array([0, 0, 0, 0, 1]),
)


def _truncated(path):
    np.savez(path, **GOOD)
    path.write_bytes(path.read_bytes()[:400])


def _damaged(path):
    np.savez(path, **GOOD)
    data = bytearray(path.read_bytes())
    data[150] ^= 255
    path.write_bytes(data)


def _single(path):
    with open(path, 'wb') as f:
        np.save(f, np.zeros(3))


def _objects(path):
    np.savez(path, **{**GOOD, 'actions': np.array([[0], [1, 2]] * 2 + [3], object)})


def _odd_flag(path):
    np.savez(path, **{**GOOD, 'terminations': np.array([0, 0, 0, 0, 7])})


def _no_flag(path):
    np.savez(path, **{**GOOD, 'truncations': np.array([0, 0, np.nan, 0, 0])})


def _odd_bool(path):
    np.savez(path, **{**GOOD, 'terminations': np.array([0, 0, 0, 2, 1], np.uint8).view(bool)})


def _wide_flag(path):
    np.savez(path, **{**GOOD, 'terminations': GOOD['terminations'][:, None]})


def _short(path):
    np.savez(path, **{**GOOD, 'actions': GOOD['actions'][:3]})


def _cut_table(path):
    from pyarrow import parquet

    parquet.write_table(pa.table(dict(rewards=np.arange(99.0))), path)
    path.write_bytes(path.read_bytes()[:-40])


BROKEN = {  # how it is made → (end of its name, what is said of it)
    '0 bytes': (
        lambda p: p.touch(),
        '.npz',
        "can't be read; got an empty file; expected a whole file .npz. Remedy: write it again, with numpy.savez",
    ),
    'truncated': (
        _truncated,
        '.npz',
        "can't be read; got BadZipFile: .*; expected a whole file .npz. Remedy",
    ),
    'damaged': (_damaged, '.npz', "can't be read; got BadZipFile: Bad CRC"),
    'text': (
        lambda p: p.write_text('t,x\n0,1\n'),
        '.npz',
        "can't be read; got a file that begins with b't,'",
    ),
    'one array': (_single, '.npz', "can't be read; got a file that begins with"),
    'objects': (
        _objects,
        '.npz',
        "array 'actions'; got Python objects; expected numbers. Remedy: save",
    ),
    'a flag of 7': (_odd_flag, '.npz', "episode 1, 'terminated'; got 7 in step 5; expected 0 or 1"),
    'a flag of NaN': (
        _no_flag,
        '.npz',
        "episode 1, 'truncated'; got nan in step 3; expected 0 or 1",
    ),
    'a bool of 2': (_odd_bool, '.npz', "episode 1, 'terminated'; got 2 in step 4"),
    'flags in a column': (
        _wide_flag,
        '.npz',
        r"episode 1, 'terminated'; got shape \[5, 1\]; expected a number a step",
    ),
    'other lengths': (_short, '.npz', "episode 1, 'action'; got 3 rows; expected 5"),
    'no table': (lambda p: p.touch(), '.parquet', "can't be read; got an empty file"),
    'a cut table': (
        _cut_table,
        '.parquet',
        "can't be read; got ArrowInvalid: .*Remedy: write it again, with pyarrow",
    ),
}


@pytest.mark.parametrize('what', BROKEN)
def test_a_broken_file_is_named_on_one_line(what, tmp_path, capsys):
    "With what came, what was expected and what to do; by the library and by the command, which advises nothing unsafe"
    make, end, says = BROKEN[what]
    path = tmp_path / f'log{end}'
    make(path)
    with pytest.raises(ValueError, match=says) as e:
        list(Episodes(path))
    assert e.value.__cause__ is None and str(path) in str(e.value)
    assert (
        main(['train', 'cartpole-offline', '--data', str(path), '--out', str(tmp_path / 'run')])
        == 2
    )
    said = capsys.readouterr()
    assert (
        said.err.count('\n') == 1
        and str(path) in said.err
        and 'pickle' not in said.err + str(e.value)
        and not (tmp_path / 'run').exists()
    )


def test_an_open_archive_with_objects_is_named_too(tmp_path):
    _objects(tmp_path / 'a.npz')
    with (
        np.load(tmp_path / 'a.npz') as archive,
        pytest.raises(ArgumentError, match="a.npz, array 'actions'; got Python objects"),
    ):
        list(Episodes(archive))


def test_what_is_there_and_no_recording_is_not_said_to_be_missing(tmp_path, capsys):
    (tmp_path / 'log.csv').write_text('0,1')
    for path, says in (
        (tmp_path / 'log.csv', 'a file of another kind'),
        (tmp_path / 'lag.csv', 'there is nothing of this name'),
    ):
        assert (
            main(['train', 'cartpole-offline', '--data', str(path), '--out', str(tmp_path / 'run')])
            == 2
            and says in capsys.readouterr().err
        )


@pytest.mark.parametrize('kind', ['c8', 'f16', '>f4', 'O', 'U3', 'M8[s]'])
@pytest.mark.parametrize('column', ['observations', 'actions', 'rewards'])
def test_recorded_numbers_that_not_every_stage_knows_are_refused(kind, column):
    if column == 'rewards' and kind in ('f16', '>f4'):
        return  # what can be a float32 becomes one
    some = (
        np.ones(GOOD[column].shape).astype('i8').astype(kind)
        if kind != 'O'
        else np.full(GOOD[column].shape, None)
    )
    with pytest.raises(
        ValueError,
        match=r"Episodes: episode 1, '(state|action|reward)'; got .*; expected (bool, int8|an array of numbers|numbers)",
    ):
        list(Episodes({**GOOD, column: some}))


# ---- Minari ----


class Nested(gym.Env):
    "Observations that are a dict with a tuple in it; infos; episodes of 1, 2, 3, … steps, every other one truncated"

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
    "The object as well as its name: the same batches; what is neither is refused where it is given"
    made = recorded_pole()

    def draws(data):
        return [
            b.index.tolist()
            for b in ExperienceReplay(bs=8, max_sz=100, seed=0).offline(data, max_steps=5)
        ]

    assert draws(made) == draws('minari:pole/few-v0') and len(draws(made)) == 5
    pipe = ExperienceReplay(bs=8, max_sz=100, seed=0).offline(
        made, max_steps=3, n_step=2, gamma=0.9
    )
    assert len(list(pipe)) == 3 and repr(pipe)
    for wrong in 3, None, dict(GOOD), [made], b'rows.npz':
        with pytest.raises(
            ArgumentTypeError,
            match=r"Offline: data; got \w+; expected a path, minari:NAME, or a data set of Minari. Remedy: replay.add",
        ):
            ExperienceReplay(bs=8, max_sz=100).offline(wrong)


@pytest.mark.parametrize(
    'name, says',
    [
        (
            'pole/fwe-v0',
            r"there is no data set 'pole/fwe-v0' on this machine \(did you mean 'pole/few-v0'\?\); expected one in .*minari. Remedy: minari download pole/fwe-v0",
        ),
        ('', "there is no data set ''"),
        ('pole', "there is no data set 'pole'|can't be read"),
        ('../..', "there is no data set|can't be read"),
    ],
)
def test_a_data_set_that_is_missing_is_named_on_one_line(name, says, tmp_path, capsys):
    recorded_pole()
    with pytest.raises(ArgumentError, match=says):
        read_minari(name)
    assert (
        main(
            [
                'train',
                'cartpole-offline',
                '--data',
                f'minari:{name}',
                '--out',
                str(tmp_path / 'run'),
            ]
        )
        == 2
    )
    assert capsys.readouterr().err.count('\n') == 1


@pytest.mark.parametrize('file', ['main_data.hdf5', 'metadata.json'])
@pytest.mark.parametrize('size', [0, 100])
def test_a_data_set_that_is_damaged_is_named_on_one_line(file, size, tmp_path, capsys):
    recorded_pole()
    (path,) = (tmp_path / 'minari').rglob(file)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        ArgumentError,
        match=r"read_minari: the data set in .*few-v0 can't be read; got .*; expected a whole one. Remedy",
    ):
        list(read_minari('pole/few-v0'))
    assert (
        main(
            [
                'train',
                'cartpole-offline',
                '--data',
                'minari:pole/few-v0',
                '--out',
                str(tmp_path / 'run'),
            ]
        )
        == 2
    )
    assert capsys.readouterr().err.count('\n') == 1


@pytest.mark.parametrize('game', ['fastrl_replay/Catch-v0', 'fastrl_replay/BitFlip-v0'])
def test_our_games_are_recorded_and_recovered(game):
    "By Minari's collector, and from a memory: the data set names the game, and makes it anew"
    facts = dict(algorithm_name='x', author='x', author_email='x', code_permalink='x')
    collector = minari.DataCollector(gym.make(game), **LOSSLESS)
    for seed in 3, 4:
        collector.reset(seed=seed)
        while not any(collector.step(collector.action_space.sample())[2:4]):
            pass
    recorded = collector.create_dataset('games/recorded-v0', **facts)
    rows = list(GymStepper(game, seed=0).header(30))
    written = write_minari(rows, 'games/written-v0', game)
    for made in recorded, written, write_minari(rows, 'games/object-v0', gym.make(game)):
        assert type(made.recover_environment().unwrapped) is type(gym.make(game).unwrapped)
    assert (
        sum(map(len, read_minari('games/written-v0'))) == 30
        and len(list(read_minari('games/recorded-v0'))) == 2
    )


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


@pytest.mark.parametrize('n_envs', [1, 3])
@pytest.mark.parametrize('name', SPACES)
@pytest.mark.parametrize(
    'action',
    [spaces.Discrete(3), pytest.param(spaces.Box(-1, 1, (2,), np.float64), marks=pytest.mark.slow)],
    ids=['discrete', 'box'],
)
def test_the_buffer_draws_what_theirs_draws(name, n_envs, action):
    "All spaces, timeouts, full and not, normalized, saved and loaded, whole rows and frames"
    space = SPACES[name]
    kw = dict(store=Frames(4, compress='zstd')) if name in ('pictures', 'dict') else {}
    ours, theirs = pair(space, action, n_envs, **kw)
    space.seed(1)
    action.seed(2)
    rng, obs = np.random.default_rng(0), batch(space, n_envs)
    for t in range(20):
        after, done = batch(space, n_envs), rng.random(n_envs) < 0.3
        infos = [{'TimeLimit.truncated': bool(d and rng.random() < 0.5)} for d in done]
        last, reward = batch(action, n_envs), rng.normal(size=n_envs)
        for b in (ours, theirs):
            b.add(obs, after, last, reward, done, infos)
        obs = after
        assert (ours.pos, ours.full, ours.size()) == (theirs.pos, theirs.full, theirs.size())
        drawn = []
        for b in (ours, theirs):
            np.random.seed(t)
            drawn.append(b.sample(9))
        equal(*drawn)
    copy = pickle.loads(pickle.dumps(ours))
    drawn = []
    for b in (copy, theirs):
        np.random.seed(99)
        drawn.append(b.sample(9))
    equal(*drawn)
    ours.reset()
    assert ours.size() == 0 and len(ours.memory) == 0


def add_to(buffers, space, action, n_envs=1, steps=20, normal=False):
    "The same random steps into several buffers; what was added last"
    space.seed(1)
    action.seed(2)
    rng, obs = np.random.default_rng(0), batch(space, n_envs)
    for t in range(steps):
        after, done, late, last, reward = (
            batch(space, n_envs),
            rng.random(n_envs) < 0.3,
            rng.random(n_envs) < 0.5,
            batch(action, n_envs),
            rng.normal(size=n_envs),
        )
        for b in buffers:
            b.add(
                obs,
                after,
                last,
                reward,
                done,
                [{'TimeLimit.truncated': bool(x)} for x in done & late],
            )
        obs = after


def seeded(buffer, n=9, seed=3, **kw):
    np.random.seed(seed)
    return buffer.sample(n, **kw)


@pytest.mark.parametrize('n_envs', [1, 3])
@pytest.mark.parametrize('name', ['box', 'pictures', 'dict', 'double', 'discrete', 'binary'])
def test_the_buffer_over_a_device(name, n_envs):
    "Rows and frames, by tensors on the CPU: draws, columns, pickles, reset; was: taken in, and then an error about blocks at each draw"
    space, action = SPACES[name], spaces.Box(-1, 1, (2,), np.float64)
    stores = [Rows(device='cpu')] + [Frames(4, device='cpu')] * (name in ('pictures', 'dict'))
    for store in stores:
        ours, theirs = pair(space, action, n_envs, store=store)
        for steps in 2, 18:
            add_to([ours, theirs], space, action, n_envs, steps)
            equal(seeded(ours), seeded(theirs))
            for c in 'observations', 'next_observations', 'actions', 'rewards', 'dones', 'timeouts':
                same_arrays(getattr(ours, c), getattr(theirs, c))
        batch = seeded(ours)
        assert all(x.is_contiguous() for x in (batch.actions, batch.rewards, batch.dones))
        copy = pickle.loads(pickle.dumps(ours))
        equal(seeded(copy), seeded(theirs))
        ours.reset()
        assert ours.size() == 0
        add_to([ours], space, action, n_envs, 3)
        assert len(ours.memory) == 3 * n_envs


def same_arrays(a, b):
    if isinstance(b, dict):
        assert a.keys() == b.keys()
        for k in b:
            same_arrays(a[k], b[k])
    else:
        assert a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)


def test_normalized_samples_over_a_device():
    env = VecNormalize(DummyVecEnv([lambda: gym.make('Pendulum-v1')]))
    ours, theirs = pair(env.observation_space, env.action_space, size=60, store=Rows(device='cpu'))
    add_to([ours, theirs], env.observation_space, env.action_space, steps=30)
    env.reset()
    for _ in range(9):
        env.step(np.stack([env.action_space.sample()]))
    equal(seeded(ours, env=env), seeded(theirs, env=env))


COLUMNS = 'observations', 'next_observations', 'actions', 'rewards', 'dones', 'timeouts'


def test_the_buffers_arrays_where_rows_are_missing(tmp_path):
    "Zeros, as where no row has come: a pickle of a buffer on disk goes back, and the oldest rows were overwritten; was: an error of a stale key"
    space = spaces.Box(-5, 5, (3,))
    ours, theirs = pair(space, n_envs=2, size=8, store=Rows(tmp_path))
    add_to([ours, theirs], space, spaces.Discrete(2), 2, 6)
    saved = pickle.dumps(ours)
    add_to([ours], space, spaces.Discrete(2), 2, 1)
    ours.memory.close()
    with pytest.warns(UserWarning, match='2 of the rows'):
        again = pickle.loads(saved)
    for c in COLUMNS:
        want = getattr(theirs, c).copy()
        want[2] = 0  # the oldest position
        assert np.array_equal(getattr(again, c), want)


@pytest.mark.parametrize('name', SPACES)
@pytest.mark.parametrize(
    'action',
    [
        spaces.Discrete(3),
        spaces.Box(-1, 1, (2,), np.float64),
        spaces.Box(-1, 1, (2,), np.float16),
        spaces.MultiBinary(3),
        spaces.MultiDiscrete([3, 4]),
    ],
    ids=['discrete', 'double', 'half', 'binary', 'many'],
)
def test_columns_are_there_before_the_first_row(name, action):
    "As large as theirs, of the same kinds, zeros where nothing is; was: an error before the first row and after reset"
    for n_envs in 1, 3:
        ours, theirs = pair(SPACES[name], action, n_envs)
        for steps in 0, 2:
            if steps:
                add_to([ours, theirs], SPACES[name], action, n_envs, steps)
            for c in COLUMNS:
                same_arrays(getattr(ours, c), getattr(theirs, c))
        ours.reset()
        for c in COLUMNS:
            same_arrays(getattr(ours, c), getattr(pair(SPACES[name], action, n_envs)[1], c))


@pytest.mark.parametrize(
    'kind', [bool, np.bool_, np.float32, np.float64, np.int8, np.uint8, np.int64, int, float]
)
@pytest.mark.parametrize('n_envs', [1, 3])
def test_timeouts_of_any_kind(kind, n_envs):
    "As numbers, and through `extend` as the columns that a buffer has, their own included; was: numpy's TypeError about a cast"
    ours, theirs = pair(SPACES['box'], n_envs=n_envs)
    obs, done, late = (
        np.zeros((n_envs, 3), np.float32),
        np.arange(n_envs) % 3 < 2,
        np.arange(n_envs) % 3 == 0,
    )
    for b in ours, theirs:
        b.add(
            obs,
            obs,
            np.zeros(n_envs, np.int64),
            np.ones(n_envs),
            done.astype(kind),
            [{'TimeLimit.truncated': kind(x)} for x in late],
        )
    for c in COLUMNS:
        same_arrays(getattr(ours, c), getattr(theirs, c))


@pytest.mark.parametrize('n_envs', [1, 3])
def test_their_columns_go_through_extend(n_envs):
    "What Stable-Baselines3's own test of saving does: one dict of all environments' timeouts a step, as float32"
    ours, theirs = pair(SPACES['box'], n_envs=n_envs, size=30)
    add_to([ours, theirs], SPACES['box'], spaces.Discrete(2), n_envs, 9)
    for source in theirs, ours:
        fresh, want = pair(SPACES['box'], n_envs=n_envs, size=30)
        for b in fresh, want:
            b.extend(
                source.observations,
                source.next_observations,
                source.actions,
                source.rewards,
                source.dones,
                [[{'TimeLimit.truncated': x}] for x in source.timeouts],
            )
        for c in COLUMNS:
            same_arrays(getattr(fresh, c), getattr(want, c))
        equal(seeded(fresh), seeded(want))


NONSENSE = [
    0.5,
    2,
    -1,
    np.nan,
    np.inf,
    'yes',
    None,
    [True, False],
    np.zeros((2, 2)),
    1j,
    object(),
    [[1], [1, 0]],
]


@pytest.mark.parametrize('x', NONSENSE, ids=lambda x: type(x).__name__)
def test_ends_that_are_neither_yes_nor_no(x):
    "Named, and the buffer is as it was; was: any number but 0 was an end"
    buffer = ReplayBuffer(10, SPACES['box'], spaces.Discrete(2), 'cpu')
    good = (
        np.zeros((1, 3), np.float32),
        np.zeros((1, 3), np.float32),
        np.array([1]),
        np.array([2.0]),
    )
    with pytest.raises(
        ValueError,
        match=r"(?s)sb3.ReplayBuffer: infos: 'TimeLimit.truncated'; got .*expected True or False, or 1 or 0, for each of 1 environments",
    ):
        buffer.add(*good, np.array([True]), [{'TimeLimit.truncated': x}])
    with pytest.raises(ValueError, match='sb3.ReplayBuffer: done; got'):
        buffer.add(*good, x, [{}])
    assert (buffer.pos, len(buffer.memory), buffer.counts.tolist(), buffer.totals.tolist()) == (
        0,
        0,
        [[1, 0, 0]],
        [0.0],
    )


@pytest.mark.parametrize(
    'infos', [{}, None, [None], 'x', {'final_obs': 1}, ['TimeLimit.truncated']], ids=repr
)
def test_infos_that_are_no_list_of_dicts(infos):
    "As vector environments of gymnasium give them: said, with what to do; was: 'str' has no attribute 'get'"
    buffer = ReplayBuffer(10, SPACES['box'], spaces.Discrete(2), 'cpu')
    row = (
        np.zeros((1, 3), np.float32),
        np.zeros((1, 3), np.float32),
        np.array([1]),
        np.array([2.0]),
        np.array([True]),
    )
    with pytest.raises(
        TypeError, match='sb3.ReplayBuffer: infos; .*Remedy: handle_timeout_termination=False'
    ):
        buffer.add(*row, infos)
    ReplayBuffer(
        10, SPACES['box'], spaces.Discrete(2), 'cpu', handle_timeout_termination=False
    ).add(*row, infos)


def test_normalized_samples():
    env = VecNormalize(DummyVecEnv([lambda: gym.make('Pendulum-v1')]))
    ours, theirs = pair(env.observation_space, env.action_space, size=60)
    obs = env.reset()
    for _ in range(50):
        action = np.stack([env.action_space.sample()])
        after, reward, done, infos = env.step(action)
        for b in (ours, theirs):
            b.add(
                env.unnormalize_obs(obs),
                env.unnormalize_obs(after),
                action,
                env.get_original_reward(),
                done,
                infos,
            )
        obs = after
    drawn = []
    for b in (ours, theirs):
        np.random.seed(5)
        drawn.append(b.sample(20, env))
    equal(*drawn)


class Screens(gym.Env):
    "Random pictures, time limit of 13"

    observation_space, action_space = spaces.Box(0, 255, (36, 36, 1), np.uint8), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._picture(), {}

    def _picture(self):
        return self.np_random.integers(0, 256, (36, 36, 1), np.uint8)

    def step(self, action):
        self.t += 1
        return self._picture(), float(action), self.t == 9 and bool(action), self.t == 13, {}


def weights(model):
    return {k: v.clone() for k, v in model.policy.state_dict().items()}


def train(algo, policy, env, steps, cls=None, kwargs=None, **kw):
    np.random.seed(0)
    return getattr(sb3, algo)(
        policy,
        env(),
        seed=1,
        device='cpu',
        replay_buffer_class=cls,
        replay_buffer_kwargs=kwargs,
        **kw,
    ).learn(steps)


def check_same_training(*args, kwargs=None, **kw):
    a, b = train(*args, **kw), train(*args, ReplayBuffer, kwargs, **kw)
    x, y = weights(a), weights(b)
    assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
    return b


@pytest.mark.parametrize('algo', [pytest.param(a, marks=pytest.mark.slow) for a in ('SAC', 'TD3')])
def test_training_equals_theirs(algo):
    def env():
        return DummyVecEnv([lambda: gym.make('Pendulum-v1')] * 2)

    check_same_training(
        algo,
        'MlpPolicy',
        env,
        80,
        learning_starts=20,
        batch_size=8,
        buffer_size=60,
        policy_kwargs=dict(net_arch=[8]),
        train_freq=4,
    )


def test_training_on_pictures_equals_theirs(tmp_path):
    "Two lines: frames that are kept once, packed; then saved and loaded"

    def env():
        return VecTransposeImage(VecFrameStack(DummyVecEnv([Screens] * 2), 4))

    model = check_same_training(
        'DQN',
        'CnnPolicy',
        env,
        60,
        kwargs=dict(store=Frames(4, compress='zstd')),
        learning_starts=20,
        batch_size=4,
        buffer_size=40,
        train_freq=8,
        policy_kwargs=dict(features_extractor_kwargs=dict(features_dim=8)),
    )
    model.save_replay_buffer(tmp_path / 'buffer')
    np.random.seed(3)
    x = model.replay_buffer.sample(9)
    model.load_replay_buffer(tmp_path / 'buffer')
    np.random.seed(3)
    equal(x, model.replay_buffer.sample(9))
    model.learn(20, reset_num_timesteps=False)
    assert isinstance(model.replay_buffer.memory.store, Frames)


# ---- mixtures ----


def test_shares_follow_their_schedule_and_draws_their_priorities():
    from scipy.stats import chisquare

    def filled(by, seed):
        r = PrioritizedReplay(bs=4, max_sz=50, alpha=1.0, beta=1.0, seed=seed, stratified=False)
        rows = Steps.cat(scripted_steps([script(99)], 30)).copy()
        rows.rows['reward'] = by + np.arange(30)
        r.add(rows)
        r.update_priorities(np.arange(30), np.arange(1, 31))
        return r

    m = Mixture({'a': filled(0, 1), 'b': filled(100, 2)}, lambda i: dict(a=1, b=min(i, 1)), bs=30)
    batches = [m.sample() for _ in range(100)]
    assert [b.replay.sum().item() for b in batches] == [0] + [15] * 99
    rewards = np.concatenate([b.reward.numpy() for b in batches])
    for by in 0, 100:
        mine = rewards[(rewards >= by) & (rewards < by + 50)] - by
        assert (
            chisquare(
                np.bincount(mine.astype(int), minlength=30), len(mine) * np.arange(1, 31) / 465
            ).pvalue
            > 1e-4
        )
    for b in batches[:20]:  # weights: 1/p, on one scale
        p = (b.reward.numpy() % 100 + 1) / 465
        assert np.allclose(b.weight, p.min() / p, rtol=1e-5)
    one, mean = Mixture(m.replays, dict(a=1, b=0), bs=30), []
    for b in (one.sample() for _ in range(100)):
        mean.append(np.mean(b.reward.numpy() / (30 * (b.reward.numpy() + 1) / 465)))
    assert abs(np.mean(mean) - 14.5) < 1  # 1/(N p) gives the mean of the memory


def test_errors_of_overwritten_rows_are_counted_where_they_belong():
    rows = scripted_steps([script(9)], 30)
    m = Mixture({n: PrioritizedReplay(bs=2, max_sz=5, seed=i) for i, n in enumerate('ab')}, bs=4)
    for r in rows[:5]:
        m.add(r, 'a')
        m.add(r, 'b')
    batch = m.sample()
    for r in rows[5:]:
        m.add(r, 'a')
    batch.update_priorities(torch.ones(4))
    assert (m.replays['a'].stale, m.replays['b'].stale) == (2, 0) and m.stats()['a']['stale'] == 2
    with pytest.raises(KeyError):
        m.update_priorities([10**9], [1.0])


def mixed(seed=0):
    "Demonstrations beside rows that come in"
    demos = PrioritizedReplay(bs=4, max_sz=60, seed=seed + 1)
    for block in scripted_steps([script(3, env=7)], 25):
        demos.add(block)
    return Mixture(
        dict(
            online=Items(scripted_steps([script(9)], 200)).prioritized_replay(
                bs=4, max_sz=50, warmup=20, seed=seed
            ),
            demos=demos,
        ),
        shares=lambda batches: dict(online=1, demos=1 + batches % 3),
        bs=8,
    )


def test_a_thread_draws_from_a_mixture():
    "The same batches each time; without errors told the same as without a thread; saved in the middle, it goes on"

    def learned(pipe, n=60, tell=True):
        found = []
        for batch in islice(pipe, n):
            found.append((batch.index.tolist(), batch.weight.tolist()))
            if tell:
                batch.update_priorities(batch.reward + 1)
        return found

    assert learned(mixed().prefetch(2)) == learned(mixed().prefetch(2))
    assert [b.index.tolist() for b in islice(mixed().prefetch(3), 100)] == [
        b.index.tolist() for b in islice(mixed(), 100)
    ]
    one, two = mixed().prefetch(2), mixed().prefetch(2)
    it = iter(one)
    for _ in range(7):
        next(it).update_priorities(np.ones(8))
    two.load_state_dict(through_file(one.state_dict()))
    for a, b in zip(islice(it, 30), two):
        assert a == b
        for batch in a, b:
            batch.update_priorities(batch.reward)


# ---- memories on disk ----


def test_a_memory_on_disk_becomes_a_data_set(tmp_path):
    from fastrl_replay.app.offline import open_memory
    from fastrl_replay.data.datasets import spaces_of

    with ExperienceReplay(bs=1, max_sz=100, store=Rows(path=tmp_path / 'm')) as memory:
        for block in GymStepper('CartPole-v1', seed=0).header(60):
            memory.add(block)
        rows = memory.memory[:]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        write_minari(open_memory(tmp_path / 'm'), 'pole/mine-v3', **spaces_of(rows.rows))
    back = Steps.cat(list(read_minari('pole/mine-v3')))
    for n in 'state', 'action', 'reward', 'next_state', 'terminated', 'step_n':
        assert torch.equal(back[n], rows[n])


# ---- attacks ----


def test_copies_of_a_mixture_and_graphs_of_it(tmp_path):
    "Pickles and checkpoints keep the rows; torch's walk over the graph doesn't copy them"
    from torch.utils.data.graph import traverse_dps

    def make(path):
        return Mixture(
            {
                'a': Items(scripted_steps([script(9)], 40)).prioritized_replay(
                    bs=2, max_sz=20, seed=0
                ),
                'b': ExperienceReplay(
                    bs=2, max_sz=30, seed=1, store=Rows(path=path) if path else None
                ),
            },
            bs=4,
        )

    m = make(None)
    for block in scripted_steps([script(3, env=7)], 25):
        m.add(block, 'b')
    it = iter(m)
    for _ in range(5):
        next(it).update_priorities(np.ones(4))
    saved = []

    def spy(self):
        saved.append(self)
        return {}

    ExperienceReplay.snapshot = spy
    try:
        assert len(traverse_dps(m)) == 1 and not saved
    finally:
        del ExperienceReplay.snapshot
    twin = pickle.loads(pickle.dumps(m))
    assert len(twin) == len(m) and twin.replays['a'] is twin.fed and twin.sample() == m.sample()
    other = make(None)
    other.load_state_dict(through_file(m.state_dict()))
    assert other.sample() == m.sample()
    with pytest.raises(ValueError):
        Mixture({**m.replays, 'c': ExperienceReplay()}).load_state_dict(m.state_dict())
    with make(str(tmp_path / 'b')) as disk:
        for block in scripted_steps([script(3, env=7)], 25):
            disk.add(block, 'b')
        assert next(iter(disk)).replay.tolist() == [0, 0, 1, 1]


def test_the_sb3_buffer_goes_on_with_a_directory(tmp_path):
    "Opened again, it draws all rows that are there, before and after the ring is full; another number of environments is refused"

    def made(n=2):
        return ReplayBuffer(
            40, SPACES['box'], spaces.Discrete(2), 'cpu', n_envs=n, store=Rows(tmp_path)
        )

    def add(buffer, first, n):
        for t in range(first, first + n):
            obs = np.full((2, *SPACES['box'].shape), t / 100, np.float32)
            buffer.add(obs, obs, np.zeros((2, 1)), np.full(2, t), np.zeros(2, bool), [{}, {}])

    def drawn(buffer):
        return sorted({int(x) for x in buffer.sample(500).rewards.numpy().ravel()})

    a = made()
    add(a, 0, 12)
    a.memory.close()
    b = made()
    assert (b.pos, b.full, b.size(), drawn(b)) == (12, False, 12, [*range(12)])
    add(b, 12, 3)
    assert drawn(b) == [*range(15)]
    add(b, 15, 10)
    assert (b.pos, b.full) == (5, True) and drawn(b) == [*range(5, 25)]
    b.memory.close()
    c = made()
    assert (c.pos, c.full, drawn(c)) == (5, True, [*range(5, 25)])
    add(c, 25, 1)
    assert drawn(c) == [*range(6, 26)]
    c.memory.place.intend(54)  # as if killed in the next one
    c.memory.close()
    assert drawn(made()) == [*range(7, 26)]
    with pytest.raises(
        ValueError,
        match='n_envs=8; got 52 rows in .*expected as many environments as they came from',
    ):
        made(8)


def test_bad_rows_leave_the_sb3_buffer_as_it_was():
    buffer = ReplayBuffer(10, SPACES['box'], spaces.Discrete(2), 'cpu')
    good = np.zeros((1, 3), np.float32)
    buffer.add(good, good, np.array([1]), np.array([2.0]), np.array([False]), [{}])
    with pytest.raises(ValueError, match='NaN'):
        buffer.add(good, good * np.nan, np.array([1]), np.array([2.0]), np.array([True]), [{}])
    assert (
        buffer.pos,
        buffer.size(),
        len(buffer.memory),
        buffer.counts.tolist(),
        buffer.totals.tolist(),
    ) == (1, 1, 1, [[1, 1, 0]], [2.0])
    with pytest.raises(ValueError):
        ReplayBuffer(10, SPACES['box'], spaces.Discrete(2), 'cpu').sample(1)
