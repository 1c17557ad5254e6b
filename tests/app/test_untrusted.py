"""Untrusted files.

What the library did not create stays as it is; a foreign directory reaches nothing outside it."""

import hashlib, json, os, pickle, resource, shutil, socket, sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np, pytest, torch
from gymnasium import spaces

from fastrl_replay.all import *
from fastrl_replay.cli import main
from fastrl_replay.app.named_envs import named_env
from fastrl_replay.app.recipes import Agent, play_episodes
from fastrl_replay.app.run_files import read_metrics
from fastrl_replay.app.runs import reopen, resume, start
from fastrl_replay.app.saved_policies import load_checkpoint, write_checkpoint
from fastrl_replay.app.watching import Watch
from fastrl_replay.envs.envstate import decode, encode
from fastrl_replay.parallel.engines import checked_generators, generators
from fastrl_replay.steps.errors import FastrlError, StateError
from fastrl_replay.steps.files import write_whole
from fastrl_replay.learning.settings import SettingsError, recipe
from test_cli import here
from test_recipes import OFFLINE, SET, says, stop, tiny
from workers import within


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    "A picture is a third of a tiny run"
    monkeypatch.setattr('fastrl_replay.app.runs.charts_png', lambda *args: b'\x89PNG')


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / 'r')


def contents(folder):
    "All files below a folder with their bytes, links with their targets"
    found = {}
    for path in sorted(folder.rglob('*')):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            found[name] = None
    return found


def change(out, **settings):
    "Write other settings into a run's config.json"
    config = json.loads((out / 'config.json').read_text())
    config['settings'].update(settings)
    (out / 'config.json').write_text(json.dumps(config))


# ---- issue 46, item 9: --out ----


@pytest.mark.parametrize(
    'name', ['config.json', 'best.ckpt', 'notes.txt', 'ranks/mine/precious.txt', '.hidden']
)
def test_a_directory_that_held_no_run_is_refused(name, tmp_path, capsys):
    "Before anything is written"
    path = tmp_path / 'yours' / name
    path.parent.mkdir(parents=True)
    path.write_text('{"model": "mine"}')
    before = contents(tmp_path)
    said = says(capsys, 'train', 'cartpole', '--out', tmp_path / 'yours', *SET)
    assert 'not empty' in said and '--out' in said and contents(tmp_path) == before


def test_a_run_that_names_no_module_imports_none_of_its_directory(copy, monkeypatch, capsys):
    "The working directory is no place of modules, unless a setting names one; then it is the last"
    monkeypatch.chdir(copy)
    monkeypatch.setattr('sys.path', [p for p in sys.path if p not in ('', str(copy))])
    here(capsys, 'eval', '.', '--episodes', 1)
    assert str(copy) not in sys.path
    (copy / 'a_module_of_mine.py').write_text('from gymnasium.envs.classic_control import *')
    named_env('a_module_of_mine:CartPoleEnv').close()
    assert sys.path.index(str(copy)) == len(sys.path) - 1


def test_a_link_of_the_name_of_an_unfinished_file_is_not_followed(tmp_path):
    "Names of unfinished files can be guessed"
    import threading

    (tmp_path / 'victim').write_text('precious')
    (tmp_path / f'.f.{os.getpid()}.{threading.get_ident()}').symlink_to(tmp_path / 'victim')
    write_whole(tmp_path / 'f', 'new')
    assert (tmp_path / 'victim').read_text() == 'precious' and (tmp_path / 'f').read_text() == 'new'


# ---- item 10: --resume of a run of somebody else ----


def test_a_strangers_run_joins_no_cluster(copy, capsys, monkeypatch):
    "The error names the settings, and the words that allow them"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        s.listen()
        s.settimeout(0.1)
        monkeypatch.setenv('RAY_ADDRESS', f'127.0.0.1:{s.getsockname()[1]}')
        change(copy, engine='ray', threads=300, workers=1, steps=400)
        with within(60):
            said = says(capsys, 'train', '--resume', copy)
        for word in '--set engine=ray threads=300', '--trust', 'config.json':
            assert word in said
        said = says(capsys, 'train', '--resume', copy, '--set', 'engine=ray')  # one of the two
        assert '--set threads' in said and 'engine=' not in said
        assert 'expected 300' in says(
            capsys, 'train', '--resume', copy, '--set', 'engine=ray', 'threads=2'
        )
        with pytest.raises(TimeoutError):
            s.accept()
    with pytest.raises(SettingsError):
        resume(copy)


def test_settings_that_are_given_again_count(copy, capsys):
    "An engine as it was; other values stay refused"
    change(copy, engine='ray', steps=400)  # there are no workers, so no cluster is joined
    assert '--set engine=ray' in says(capsys, 'train', '--resume', copy)
    assert 'mean return' in here(capsys, 'train', '--resume', copy, '--set', 'engine=ray')
    change(copy, engine='ray', steps=500)
    assert 'mean return' in here(capsys, 'train', '--resume', copy, '--trust')


@pytest.mark.parametrize(
    'key, value',
    [
        ('wrappers', 'RecordVideo("{}/videos")'),
        ('env', 'CartPole-v1(sutton_barto_reward=no, x="{}/x.xml")'),
        ('train_wrappers', 'TimeLimit(50), RecordVideo(videos)'),
        ('train_wrappers', 'FrameStackObservation(9999)'),
        ('env', 'fastrl_replay/Catch-v0(size=400)'),
        ('env', 'pettingzoo/sisl/pursuit-v5(obs_range=501)'),
        ('n_step', 30_000_000),
        ('envs', 60_000),
        ('max_sz', 400_000_000),
    ],
)
@pytest.mark.parametrize('line', ['eval', 'train --resume'])
def test_a_strangers_environment_names_no_path_and_no_large_number(
    line, key, value, copy, tmp_path, capsys, monkeypatch
):
    "RecordVideo writes files anywhere; a large space takes gigabytes before it is compared"
    monkeypatch.chdir(tmp_path)
    value = value.format(tmp_path) if isinstance(value, str) else value
    change(copy, **{'wrappers': 'FrameStackObservation(400)', key: value}, steps=400)
    before = contents(tmp_path)
    said = says(capsys, *line.split(), copy)
    assert '--trust' in said and contents(tmp_path) == before


def with_memory(tmp_path, name='mine', **changes):
    "A run whose memory is on disk, stopped early"
    run = tiny(tmp_path / name, memory_path=str(tmp_path / f'{name}-rows'), **changes)
    stop(run, 150)
    return tmp_path / name, tmp_path / f'{name}-rows'


def test_a_run_reaches_no_memory_outside_of_it_that_is_not_named_again(tmp_path, capsys):
    out, rows = with_memory(tmp_path)
    before = contents(rows)
    said = says(capsys, 'train', '--resume', out)
    assert f'memory_path={rows}' in said and contents(rows) == before
    assert 'mean return' in here(capsys, 'train', '--resume', out, '--memory', rows)


def test_a_memory_within_the_run_is_its_own(tmp_path, capsys, monkeypatch):
    "Whatever directory the run was moved to; but not through a link"
    monkeypatch.chdir(tmp_path)
    stop(tiny(Path('a'), memory_path='a/rows'), 150)
    Path('a').rename('b')
    assert 'mean return' in here(capsys, 'train', '--resume', 'b', '--memory', 'b/rows')


def test_a_strangers_run_reads_no_rows_of_mine(tmp_path, capsys):
    "They are named again"
    rows = with_memory(tmp_path)[1]
    out = tmp_path / 'offline'
    run = start(recipe('cartpole-offline', data=str(rows), **OFFLINE), out)
    stop(run, 5)
    assert f'data={rows}' in says(capsys, 'train', '--resume', out)
    assert 'mean return' in here(capsys, 'train', '--resume', out, '--data', rows)


def test_code_in_a_checkpoint_is_not_executed(copy, tmp_path, capsys):
    class Bad:
        def __reduce__(self):
            return os.system, ('touch ' + str(tmp_path / 'executed'),)

    data = pickle.dumps(Bad())
    for name in 'checkpoint.ckpt', 'best.ckpt':
        (copy / name).write_bytes(data + hashlib.sha256(data).digest())
    for line in (
        ['train', '--resume', copy, '--steps', 400],
        ['eval', copy],
        ['eval', copy, '--best'],
    ):
        assert 'cannot be read as a checkpoint' in says(capsys, *line)
    assert not (tmp_path / 'executed').exists()


def test_a_tensor_is_not_larger_than_its_file(copy):
    "Nor is what follows the tensors left unread"
    files = [
        (b'["tensor", "float64", 1000000000]', b''),
        (b'["tensor", "uint8", 3000000000, "a"]', b''),
        (b'["tensor", "uint8", 300000000, [0]]', b''),
        (b'["list"]', b'0'),
    ]
    for text, more in files:
        data = len(text).to_bytes(8, 'little') + text + more
        (copy / 'best.ckpt').write_bytes(data + hashlib.sha256(data).digest())
        with small(), pytest.raises(FastrlError, match='cannot be read'):
            load_policy(copy)


def test_saved_arrays_and_positions_reach_nothing_else():
    "Neither the bytes beside an array nor the numbers beside a generator's"
    array = encode(np.zeros(1))
    array['dtype'] = dict(names=['a'], formats=['<u8'], offsets=[2**31 - 4], itemsize=8)
    with pytest.raises(ValueError):
        decode(array)
    numpy = np.random.get_state(legacy=False)
    numpy['state']['pos'] = 1000
    with pytest.raises(StateError, match='generator'):
        checked_generators('A run', dict(generators(), numpy=encode(numpy)))


# ---- item 11: a memory's directory ----


def rows(n, first=0):
    made = np.zeros(n, step_dtype(spaces.Box(-1, 1, (2,)), spaces.Discrete(2)))
    made['step_n'], made['episode_n'], made['reward'] = (
        np.arange(1, n + 1) + first,
        1,
        np.arange(n) + first,
    )
    return Steps(made)


@pytest.mark.parametrize(
    'name',
    [
        'saved/1/photo.jpg',
        'run',
        'writer',
        'service',
        'data-1/counters',
        f'data-{1:032}.fastrl/counters',
    ],
)
def test_a_directory_of_yours_is_no_memory(name, tmp_path):
    "Though its names are those that memories have"
    path = tmp_path / 'm' / name
    path.parent.mkdir(parents=True)
    path.write_text('precious')
    before = contents(tmp_path)
    with pytest.raises(FastrlError, match='no memory'):
        replay = PrioritizedReplay(bs=1, max_sz=10, store=Rows(tmp_path / 'm'))
        replay.add(rows(3))
        replay.state_dict()
    assert contents(tmp_path) == before


def test_a_folder_of_yours_in_a_memory_stays(tmp_path):
    "Older copies of priorities are removed: those that this memory has made"
    replay = PrioritizedReplay(bs=1, max_sz=10, store=Rows(tmp_path / 'm'))
    replay.add(rows(3))
    for i in range(1, 5):
        (tmp_path / f'm/saved/{i}').mkdir(parents=True)
        (tmp_path / f'm/saved/{i}/photo.jpg').write_text('precious')
    for i in range(5):
        replay.state_dict()
    assert sorted(contents(tmp_path / 'm/saved')) == sorted(
        f'{i}{name}' for i in range(1, 5) for name in ('', '/photo.jpg')
    )
    replay.memory.close()


def test_files_of_yours_that_look_like_left_over_ones_stay(tmp_path):
    "A writer that opens a memory removes what a killed one has left"

    def write():
        line = Timeline(40, Rows(tmp_path / 'm'))
        line.add(rows(3))
        line.close()

    write()
    names = f'data-{7:032}/thesis.txt', 'saved-7/thesis.txt', '.meta.json.bak'
    for name in names:
        (tmp_path / 'm' / name).parent.mkdir(exist_ok=True)
        (tmp_path / 'm' / name).write_text('precious')
    write()
    assert all((tmp_path / 'm' / name).read_text() == 'precious' for name in names)


@pytest.mark.slow
def test_a_shard_is_no_link_to_another_memory(tmp_path):
    "It would be written, or emptied"
    mine = Timeline(50, Rows(tmp_path / 'mine'))
    mine.add(rows(20))
    mine.close()
    before = contents(tmp_path / 'mine')
    (tmp_path / 'm').mkdir()
    (tmp_path / 'm/shard-0').symlink_to(tmp_path / 'mine')
    pipe = (
        GymStepper('CartPole-v1', seed=0)
        .experience_replay(bs=4, max_sz=100, warmup=8, store=Rows(tmp_path / 'm'))
        .parallel(2, engine='process')
    )
    with within(100), pytest.raises(FastrlError, match='link'):
        next(iter(pipe))
    pipe.close()
    assert contents(tmp_path / 'mine') == before


def test_a_file_that_lasts_is_made_through_no_link(tmp_path):
    "A name under which a file is made may be there already"
    line = Timeline(50, Rows(tmp_path / 'm'))
    line.add(rows(20))
    line.close()
    (tmp_path / 'victim').write_text('precious')
    [data] = (tmp_path / 'm').glob('data-*')
    (data / '.priorities').symlink_to(tmp_path / 'victim')
    replay = PrioritizedReplay(bs=2, max_sz=50, store=Rows(tmp_path / 'm'))
    replay.add(rows(3, 20))
    replay.sample()
    replay.memory.close()
    assert (tmp_path / 'victim').read_text() == 'precious'


def test_what_meta_json_names_lies_in_its_directory(tmp_path):
    line = Timeline(50, Rows(tmp_path / 'm'))
    line.add(rows(20))
    ring = line.place.ring
    line.close()
    (tmp_path / 'victim').write_bytes(b'precious' * ring)
    before = (tmp_path / 'victim').read_bytes()
    meta = json.loads((tmp_path / 'm/meta.json').read_text())
    (tmp_path / 'm/meta.json').write_text(
        json.dumps(meta | dict(data=f'data-{1:032}.fastrl/../../victim'))
    )
    with pytest.raises(FastrlError, match='meta.json'):
        Timeline(50, Rows(tmp_path / 'm')).add(rows(3, 20))
    assert (tmp_path / 'victim').read_bytes() == before


# ---- item 14: FIFOs, links, and files of 3 GB without content ----


def spoil(path, kind):
    path.unlink(missing_ok=True)
    if kind == 'FIFO':
        os.mkfifo(path)
    elif kind == 'link':
        path.symlink_to('/etc/passwd')
    else:
        with open(path, 'wb') as f:
            f.truncate(3 * 2**30)


RUN_FILES = ['config.json', 'metrics.jsonl', 'summary.json', 'checkpoint.ckpt', 'best.ckpt']


@contextmanager
def small():
    "In this process no gigabyte may be read"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


@pytest.mark.parametrize(
    'name, kind',
    [(name, 'FIFO') for name in RUN_FILES]
    + [(name, kind) for name in ('config.json', 'checkpoint.ckpt') for kind in ('sparse', 'link')],
)
def test_a_file_of_a_run_that_is_no_plain_file(name, kind, copy, capsys, tmp_path):
    "Watched, compared, played or resumed: an error, or it is left out"
    spoil(copy / name, kind)
    with within(60), small():
        try:
            Watch([copy])('')
        except FastrlError as e:
            assert name == 'config.json' and name in str(e)
        for line in (
            ['compare', copy, '--plot', tmp_path / 'c.png'],
            ['eval', copy, '--episodes', 1],
            ['eval', copy, '--best', '--episodes', 1],
            ['train', '--resume', copy, '--steps', 400],
        ):
            capsys.readouterr()
            status, (_, err) = main([str(a) for a in line]), capsys.readouterr()
            assert status == 0 or name in err


@pytest.mark.parametrize(
    'name, kind',
    [(name, 'FIFO') for name in ('writer', 'meta.json', 'data/counters', 'data/rows')]
    + [('meta.json', 'sparse'), ('data/counters', 'link'), ('data/.rows', 'link')],
)
def test_a_file_of_a_memory_that_is_no_plain_file(name, kind, tmp_path, capsys):
    "Told, watched, read and written: an error, or it is left out"
    run, folder = with_memory(tmp_path)
    [data] = folder.glob('data-*')
    spoil(folder / name.replace('data/', f'{data.name}/'), kind)
    with within(60), small():
        here_or_said = main(['memory', str(folder)])
        assert here_or_said == 0 or name.split('/')[-1].lstrip('.') in capsys.readouterr().err
        try:
            Watch([folder])('')
        except FastrlError as e:
            assert name.split('/')[-1] in str(e)
        for mode in 'ra':
            try:
                Timeline(400, Rows(folder, mode=mode)).take(np.arange(1))
            except FastrlError:
                pass
        main(['train', '--resume', str(run), '--trust'])


# ---- item 15: sizes ----


def test_a_network_is_not_larger_than_its_file(copy):
    "20,000 × 20,000 from a file of a few kB, in the settings"
    best = load_checkpoint(copy / 'best.ckpt')
    for network in '20_000 20_000', '8 ' * 101:
        best['settings']['network'] = network
        write_checkpoint(copy / 'large.pt', best)
        with small(), pytest.raises(FastrlError, match='large.pt'):
            load_policy(copy / 'large.pt')
    change(copy, network='20_000 20_000')
    for look in resume, reopen:
        with small(), pytest.raises(FastrlError):
            look(copy)


def test_a_space_is_not_larger_than_its_file(copy):
    best = load_checkpoint(copy / 'best.ckpt')
    for n in torch.tensor(10**9), torch.zeros(10**8, 0, dtype=torch.int64):
        best['observation_space'] = dict(kind='MultiBinary', n=n)
        write_checkpoint(copy / 'large.pt', best)
        with small(), pytest.raises(FastrlError, match='large.pt'):
            load_policy(copy / 'large.pt')


def test_tensors_that_share_numbers_are_not_larger_than_their_file():
    "Each is small"
    one = torch.zeros(1)
    state = [one.expand(2**18) for _ in range(3000)]
    with small(), pytest.raises(StateError, match='less shared memory'):
        ExperienceReplay(bs=1).load_state_dict(
            dict(stage='ExperienceReplay', own=state, above=None)
        )


def nested(levels):
    "Lists that contain each other: 2**levels entries in a few bytes"
    x = [1]
    for _ in range(levels):
        x = [x, x]
    return x


def test_lists_that_contain_each_other_are_refused():
    circle = []
    circle.append(circle)
    endless = dict(stage='ExperienceReplay', own=[1])
    endless['above'] = endless
    states = [dict(endless, own=bad, above=None) for bad in (nested(60), circle)]
    for state in *states, endless:
        with within(20), pytest.raises(StateError):
            ExperienceReplay(bs=1).load_state_dict(state)


# ---- item 16: the terminal ----

ESCAPE = '\x1b]0;owned\x07\x1b[31m\x9b2J\u202e'


def harmless(text):
    return all(c.isprintable() or c in '\n\r\t' for c in text) and '\u202e' not in text


def test_escape_sequences_of_files_do_not_reach_the_terminal(copy, tmp_path, capsys):
    "In names of recipes, environments and directories, in errors, in warnings"
    config = json.loads((copy / 'config.json').read_text())
    (copy / 'config.json').write_text(json.dumps({**config, 'recipe': f'cart{ESCAPE}pole'}))
    for line in ['eval', copy, '--episodes', 1], ['train', '--resume', copy, '--steps', 350]:
        said = here(capsys, *line)
        assert harmless(said) and 'pole' in said
    change(copy, device=ESCAPE)
    said = says(capsys, 'eval', copy)
    assert harmless(said) and 'owned' in said
    (tmp_path / f'no{ESCAPE}').mkdir()
    assert harmless(says(capsys, 'eval', tmp_path / f'no{ESCAPE}'))


def test_what_a_memory_says_of_itself_does_not_reach_the_terminal(tmp_path, capsys):
    "In its writer and its columns"
    run, folder = with_memory(tmp_path)
    said = json.loads((folder / 'writer').read_text())
    (folder / 'writer').write_text(json.dumps({k: f'{v}{ESCAPE}' for k, v in said.items()}))
    meta = json.loads((folder / 'meta.json').read_text())
    (folder / 'meta.json').write_text(json.dumps({**meta, 'made': ESCAPE, 'written_by': ESCAPE}))
    said = here(capsys, 'memory', folder)
    assert harmless(said)


# ---- smaller ones ----


def test_a_run_that_is_looked_at_can_be_evaluated(copy):
    "It writes nothing"
    before = contents(copy)
    agent, step = reopen(copy)
    assert len(play_episodes(agent, 3)[0]) == 3 and step == 300 and contents(copy) == before


@pytest.mark.parametrize('line', ['eval', 'train --resume'])
def test_an_environment_that_is_not_that_of_the_model_is_refused(line, copy, capsys):
    "Before a network for it takes memory"
    change(copy, wrappers='FrameStackObservation(16), FlattenObservation', steps=400)
    said = says(capsys, *line.split(), copy)
    assert 'the checkpoint has a different environment' in said and '(64,)' in said


def test_a_memory_on_disk_for_a_mixture_is_refused(tmp_path, monkeypatch):
    "It was an AttributeError"
    from fastrl_replay.learning.learners import LEARNERS

    class Mixed(type(LEARNERS['dqn'])):
        def batches(self, steps, model, s):
            replays = dict(a=ExperienceReplay(bs=8), b=ExperienceReplay(bs=8))
            return Mixture(replays, dict(a=0.5, b=0.5))

    monkeypatch.setitem(LEARNERS, 'mixed', Mixed())
    with pytest.raises(SettingsError, match='memory_path'):
        Agent(
            {**recipe('cartpole').settings, 'learner': 'mixed', 'memory_path': str(tmp_path / 'm')}
        )


def test_metrics_of_many_names_are_refused(copy):
    (copy / 'metrics.jsonl').write_text(
        ''.join(f'{{"env_steps":{i},"k{i}":1.0}}\n' for i in range(20_000))
    )
    with pytest.raises(FastrlError, match='too many names of metrics'):
        read_metrics(copy)
    with within(20):
        assert Watch([copy])('')


def test_a_run_plays_no_millions_of_episodes(copy, capsys):
    change(copy, eval_episodes=300_000_000, eval_every=1, steps=400)
    with within(20):
        assert 'eval_episodes' in says(capsys, 'train', '--resume', copy)
