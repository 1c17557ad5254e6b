"""A run's directory: shared, damaged, or from a stranger.

Two processes, signals, flipped bits, files of other kinds, and modules of others."""

import errno, json, os, shutil, signal, sys

import numpy as np, pytest, torch

from fastrl_replay.app import commands
from fastrl_replay.app.named_envs import reaches_outside
from fastrl_replay.app.recipes import Agent, check_saved
from fastrl_replay.app.runs import Silent, lock_dir, outside, reopen, resume
from fastrl_replay.app.saved_policies import load_checkpoint, write_checkpoint
from fastrl_replay.cli import main
from fastrl_replay.learning.settings import SettingsError, recipes
from test_cli import same_runs
from test_recipes import SET, says, stop, tiny


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / 'r')


def files(out):
    return {p.name: p.read_bytes() for p in out.iterdir()}


# ---- two processes in one directory ----


def test_a_second_process_is_refused_and_changes_nothing(tmp_path, capsys):
    "While a run trains, a second process changes none of its files, and the run ends as usual"
    run = tiny(tmp_path / 'r')
    seen = []

    class Second(Silent):
        def report(self, line):
            half = tmp_path / f'r/.checkpoint.ckpt.{os.getppid()}'  # of a process that lives
            half.write_bytes(b'half')
            before = files(tmp_path / 'r')
            seen.append(says(capsys, 'train', '--resume', tmp_path / 'r'))
            assert files(tmp_path / 'r') == before
            half.unlink()

    assert run.train(Second()) and seen and all('another process uses' in s for s in seen)


def test_the_lock_is_kept_from_the_beginning_and_given_back(tmp_path):
    "Between `start` and `train` too; a run that is forgotten, or couldn't begin, keeps none"
    run = tiny(tmp_path / 'r')
    with pytest.raises(SettingsError, match='not empty'):
        tiny(tmp_path / 'r', seed=5)
    with pytest.raises(SettingsError, match='another process'), lock_dir(tmp_path / 'r'):
        pass
    stop(run, 150)
    with lock_dir(tmp_path / 'r'):
        pass
    resume(tmp_path / 'r')  # forgotten at once
    assert resume(tmp_path / 'r').train()
    with pytest.raises(SettingsError, match='has ended'):
        resume(tmp_path / 'r')
    with lock_dir(tmp_path / 'r'):
        pass


def test_a_memory_has_a_directory_of_its_own(tmp_path):
    with pytest.raises(SettingsError, match='out and memory_path must be different'):
        tiny(tmp_path / 'r', memory_path=str(tmp_path / 'x' / '..' / 'r'))
    assert files(tmp_path) == {}


def test_files_that_come_while_a_run_opens_are_kept(tmp_path, monkeypatch):
    "Those of a run that another process began meanwhile"
    out = tmp_path / 'r'

    def slow(self):
        out.mkdir()
        (out / 'best.ckpt').write_text('precious')

    monkeypatch.setattr(Agent, 'open_memory', slow)
    with pytest.raises(SettingsError, match='not empty'):
        tiny(out)
    assert files(out) == {'best.ckpt': b'precious'}


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    "As some networks': it doesn't say that another process is at work"
    import fcntl

    def none(fd, how):
        raise OSError(errno.EBADF, 'Bad file descriptor')

    monkeypatch.setattr(fcntl, 'flock', none)
    with pytest.warns(UserWarning, match='cannot be locked'), lock_dir(tmp_path):
        pass


def test_only_stale_files_of_ours_are_deleted(tmp_path):
    "Those of other programs, of living processes and of other names stay"
    stop(tiny(tmp_path / 'r'), 150)
    stay = ['.env.999999999', f'.checkpoint.ckpt.{os.getppid()}', '.notes.txt.999999999']
    gone = ['.checkpoint.ckpt.999999999', f'.metrics.jsonl.{os.getpid()}']
    for name in stay + gone:
        (tmp_path / 'r' / name).write_text('x')
    resume(tmp_path / 'r')
    assert sorted(p.name for p in (tmp_path / 'r').glob('.*')) == sorted(stay)


@pytest.mark.slow
@pytest.mark.parametrize('name,status', [('SIGINT', 130), ('SIGTERM', 143)])
def test_signals_save_and_say_which_it_was(name, status, whole, tmp_path, monkeypatch):
    "The status is 128 + the signal's number"
    number, before = getattr(signal, name), signal.getsignal(getattr(signal, name))

    class Signalled(commands.Bar):
        def tick(self, rows):
            if self.run.agent.journal.steps == 120:
                signal.raise_signal(number)

    monkeypatch.setattr(commands, 'Bar', Signalled)
    assert (
        main(['train', 'cartpole', '--out', str(tmp_path / 'r'), *SET]) == status
        and signal.getsignal(number) is before
    )
    monkeypatch.undo()
    run = resume(tmp_path / 'r')
    assert run.agent.journal.steps == 120 and run.train() and same_runs(whole, tmp_path / 'r')


# ---- damaged files ----


def test_no_flipped_bit_is_loaded(whole, tmp_path):
    "Anywhere in a checkpoint: one line that names it"
    data = (whole / 'checkpoint.ckpt').read_bytes()
    path = tmp_path / 'c.pt'
    last = range(len(data) * 8 - 8 * 110, len(data) * 8, 37)
    for at in [*np.random.default_rng(0).integers(0, len(data) * 8, 40), *last]:
        bad = bytearray(data)
        bad[at // 8] ^= 1 << at % 8
        path.write_bytes(bad)
        with pytest.raises(SettingsError, match="c.pt cannot be read as a checkpoint"):
            load_checkpoint(path)


DEEP = b'[' * 100_000
DIGITS = b'{"a": ' + b'9' * 5_000 + b'}'
BROKEN = [
    *(('checkpoint.ckpt', kind) for kind in (b'', b'PK\x03\x04', b'PK\x05\x06' + bytes(18))),
    *(
        ('config.json', kind)
        for kind in (
            b'\xff\xfe\x00',
            b'[1, 2]',
            DEEP,
            DIGITS,
            b'',
            b'{"recipe": "cartpole"}',
            b'{"recipe": 5, "settings": {}}',
            b'{"recipe": "cartpole", "settings": {"learner": "dqn"}}',
        )
    ),
    *(
        ('metrics.jsonl', kind + b'\n')
        for kind in (b'[1, 2]', DEEP, DIGITS, b'{"env_steps": 1e999}')
    ),
]


@pytest.mark.parametrize('name,data', BROKEN, ids=lambda x: repr(x)[:24])
def test_a_broken_file_is_one_line_that_names_it(name, data, copy, capsys):
    "For --resume and eval"
    (copy / name).write_bytes(data)
    assert name in says(capsys, 'train', '--resume', copy, '--steps', 400)
    if name != 'metrics.jsonl':
        assert name in says(capsys, 'eval', copy)


@pytest.mark.parametrize(
    'key,value',
    [
        ('steps', 'many'),
        ('steps', 10**400),
        ('steps', -1),
        ('threads', 10**30),
        ('bs', [1]),
        ('network', ['a']),
        ('network', [10**30]),
        ('lr', float('nan')),
        ('env', 5),
        ('env', 'a:b:c'),
        ('wrappers', [1]),
        ('wrappers', '(' * 9_999),
        ('learner', []),
        ('seed', None),
        ('report_every', 0),
        ('device', 5),
        ('gamma', {}),
    ],
)
def test_a_setting_that_was_edited_is_one_line(key, value, copy, capsys):
    "Of another type, or huge: config.json is named"
    config = json.loads((copy / 'config.json').read_text())
    config['settings'][key] = value
    (copy / 'config.json').write_text(json.dumps(config))
    for line in ['train', '--resume', copy], ['eval', copy]:
        assert 'config.json' in says(capsys, *line)


def test_other_environments_than_the_saved_ones_leave_the_results(copy, capsys):
    config = json.loads((copy / 'config.json').read_text())
    config['settings']['envs'] += 1
    (copy / 'config.json').write_text(json.dumps(config))
    before = files(copy)
    more = config['settings']['steps'] + 100
    assert 'environments' in says(capsys, 'train', '--resume', copy, '--steps', more)
    assert files(copy) == before


@pytest.mark.parametrize('key', ['learner', 'env', 'seed', 'save_every', 'gamma', 'network'])
def test_a_setting_that_is_missing_is_one_line(key, copy, capsys):
    config = json.loads((copy / 'config.json').read_text())
    del config['settings'][key]
    (copy / 'config.json').write_text(json.dumps(config))
    said = says(capsys, 'eval', copy)
    assert 'config.json' in said and key in said


@pytest.mark.parametrize(
    'state',
    [
        [1, 2],
        dict(weights=torch.zeros(3)),
        dict(agent=dict(pipe=[1], random=5), run=5),
        *({'run': w} for w in (dict(saves='x'), dict(sums=5), dict(wall=[1]))),
    ],
    ids=str,
)
def test_a_checkpoint_of_other_things_is_one_line(state, copy, capsys):
    "Whatever somebody has saved: checkpoint.ckpt is named"
    path = copy / 'checkpoint.ckpt'
    if isinstance(state, dict) and set(state) == {'run'}:
        good = load_checkpoint(path)
        state = {**good, 'run': {**good['run'], **state['run']}}
    write_checkpoint(path, state)
    assert 'checkpoint.ckpt' in says(capsys, 'train', '--resume', copy, '--steps', 400)


@pytest.mark.parametrize(
    'name,data',
    [
        ('summary.json', b'[1, 2]'),
        ('summary.json', DEEP),
        ('summary.json', b'{"final_return": "x", "wall_s": 1, "solved_at_step": null}'),
        ('config.json', b'[]'),
    ],
    ids=lambda x: repr(x)[:24],
)
def test_compare_names_the_broken_file(name, data, copy, capsys):
    (copy / name).write_bytes(data)
    assert name in says(capsys, 'compare', copy)


# ---- a directory from a stranger ----


@pytest.mark.parametrize(
    'changes',
    [
        dict(env='stranger_env:Thing'),
        dict(wrappers='TimeLimit(9), stranger_env:Wrap'),
        dict(train_wrappers='stranger_env:Wrap'),
        dict(env='stranger_env.sub:Thing-v0'),
    ],
)
@pytest.mark.parametrize('line', ['eval', 'train --resume'])
def test_a_strangers_run_imports_nothing(line, changes, copy, tmp_path, capsys, monkeypatch):
    "It says which module it would be; nothing of it is executed, and --trust does it"
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'stranger_env.py').write_text(f'open({str(tmp_path / "executed")!r}, "w")')
    monkeypatch.setattr(sys, 'path', [*sys.path])
    config = json.loads((copy / 'config.json').read_text())
    config['settings'].update(changes)
    (copy / 'config.json').write_text(json.dumps(config))
    err = says(capsys, *line.split(), copy)
    assert 'stranger_env' in err and '--trust' in err and 'config.json' in err
    assert not (tmp_path / 'executed').exists()
    says(capsys, *line.split(), copy, '--trust')  # there is no such environment in it
    assert (tmp_path / 'executed').exists()
    for m in [m for m in sys.modules if m.startswith('stranger_env')]:
        del sys.modules[m]


def test_your_own_module_needs_no_flag_and_the_printed_lines_have_it(tmp_path, monkeypatch, capsys):
    "`train` imports what it is told; what it prints to type next has --trust"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    (tmp_path / 'my_own_env.py').write_text(
        'from test_recipes import Opaque\n'
        'class Mine(Opaque):\n    def __init__(self): super().__init__(handle=False)\n'
    )
    more = 'env=my_own_env:Mine', 'wrappers=TimeLimit(50)'
    assert main(['train', 'cartpole', '--out', 'r', *SET, *more]) == 0
    assert 'fastrl-replay eval r --trust' in capsys.readouterr().out
    assert '--trust' in says(capsys, 'eval', 'r')
    with pytest.raises(SettingsError, match='my_own_env'):
        reopen('r')
    assert main(['eval', 'r', '--trust', '--episodes', '1']) == 0
    del sys.modules['my_own_env']


def test_recipes_stay_inside():
    for r in recipes().values():
        check_saved(r.name, r.settings)
        found = outside(r.settings)
        assert bool(found) == (r.name == 'cartpole-offline'), r.name
        assert 'bs' in outside(r.settings | dict(learner='r2d2', length=10**5))
    large = (
        'F([1])',
        'F(65)',
        'FrameStackObservation(9), FrameStackObservation(9)',
        'TimeLimit(1e9)',
    )
    for text in 'a:b-v0', 'A(x="c:d")', 'TimeLimit(5), G(h)', 'F(64), F(64), F(64)', *large:
        assert reaches_outside(text), text
