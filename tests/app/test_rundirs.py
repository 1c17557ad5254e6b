"""A run's directory, shared, damaged, or from a stranger: two processes, signals, flipped bits, files of other kinds, modules that are not yours."""

import errno, json, os, shutil, signal, sys

import numpy as np, pytest, torch

from fastrl_replay.app import commands
from fastrl_replay.cli import main
from fastrl_replay.app.named_envs import named_modules
from fastrl_replay.app.recipe_settings import recipe
from fastrl_replay.app.recipes import check_saved
from fastrl_replay.steps.settings import SettingsError
from fastrl_replay.app.saved_policies import load_checkpoint
from fastrl_replay.app.runs import Silent, lock_dir, reopen, resume
from test_cli import command, same_runs
from test_recipes import SET, Killed, says, stop, tiny


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / 'r')


def files(out):
    return {p.name: p.read_bytes() for p in out.iterdir()}


# ---- two processes in one directory ----


@pytest.mark.parametrize('line', ['train --resume', 'train cartpole --seed 5 --out'])
def test_a_second_process_is_refused_and_changes_nothing(line, tmp_path, capsys):
    "While the first one trains: its metrics, config and what it is writing stay, and it ends as if nothing had been"
    run, seen = tiny(tmp_path / 'r'), []

    class Second(Silent):
        def report(self, l):
            half = tmp_path / f'r/.checkpoint.pt.{os.getppid()}'  # of a process that lives
            half.write_bytes(b'half')
            before = files(tmp_path / 'r')
            (tmp_path / 'r/checkpoint.pt').rename(
                tmp_path / 'away'
            ) if '--out' in line else None  # as before its first one
            seen.append(says(capsys, *line.split(), tmp_path / 'r'))
            (tmp_path / 'away').rename(tmp_path / 'r/checkpoint.pt') if '--out' in line else None
            assert files(tmp_path / 'r') == before
            half.unlink()

    assert run.train(Second()) and seen and all('another process uses' in s for s in seen)


def test_the_lock_is_kept_from_the_beginning_and_given_back(tmp_path):
    "Between `start` and `train` too; a run that is forgotten, or couldn't begin, keeps none"
    run = tiny(tmp_path / 'r')
    for second in (lambda: tiny(tmp_path / 'r', seed=5)), (lambda: resume(tmp_path / 'r')):
        with pytest.raises(SettingsError, match='another process'):
            second()
    assert json.loads((tmp_path / 'r/config.json').read_text())['settings']['seed'] == 0
    stop(run, 150)
    with lock_dir(tmp_path / 'r'):
        pass
    resume(tmp_path / 'r')  # forgotten at once
    assert resume(tmp_path / 'r').train()
    with pytest.raises(SettingsError, match='has ended'):
        resume(tmp_path / 'r')
    with lock_dir(tmp_path / 'r'):
        pass


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    "As some networks': it doesn't say that another process is at work"
    import fcntl

    def none(fd, how):
        raise OSError(errno.EBADF, 'Bad file descriptor')

    monkeypatch.setattr(fcntl, 'flock', none)
    with pytest.warns(UserWarning, match="can't be locked"), lock_dir(tmp_path):
        pass


def test_only_stale_files_of_ours_are_deleted(tmp_path):
    "Those of other programs, of living processes and of other names stay"
    stop(tiny(tmp_path / 'r'), 150)
    stay = [
        '.env.1',
        '.env.999999999',
        '.checkpoint.pt.bak.999999999',
        f'.checkpoint.pt.{os.getppid()}',
        '.metrics.jsonl.1x',
        '.notes.txt.999999999',
    ]
    gone = [
        '.checkpoint.pt.999999999',
        f'.metrics.jsonl.{os.getpid()}',
        '.summary.json.99999999999999999999999',
    ]
    for name in stay + gone:
        (tmp_path / 'r' / name).write_text('x')
    resume(tmp_path / 'r')
    assert sorted(p.name for p in (tmp_path / 'r').glob('.*')) == sorted(stay)


class KilledAt(Silent):
    def __init__(self, run, step):
        self.run, self.step = run, step

    def tick(self, rows):
        if self.run.agent.journal.steps == self.step:
            raise Killed


@pytest.mark.parametrize('step', [1, 70])
def test_a_run_killed_before_it_was_due_to_save_can_be_resumed(step, whole, tmp_path):
    "There is a checkpoint from the start, and it goes on to the same end"
    run = tiny(tmp_path / 'r')
    with pytest.raises(Killed):
        run.train(KilledAt(run, step))
    resume(tmp_path / 'r').train()
    assert same_runs(whole, tmp_path / 'r')


@pytest.fixture
def hangups():
    "SIGHUP as a terminal's programs have it, also where these tests run under nohup"
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize('name,status', [('SIGINT', 130), ('SIGTERM', 143), ('SIGHUP', 129)])
def test_signals_save_and_say_which_it_was(name, status, whole, hangups, tmp_path, monkeypatch):
    "128 and the signal's number, as shells have it; a second SIGHUP, which closing terminals send, does no harm"
    number, before = getattr(signal, name), signal.getsignal(getattr(signal, name))

    class Signalled(commands.Bar):
        def tick(self, rows):
            if self.run.agent.journal.steps == 120:
                [signal.raise_signal(number) for _ in range(1 + (name == 'SIGHUP'))]

    monkeypatch.setattr(commands, 'Bar', Signalled)
    assert (
        main(['train', 'cartpole', '--out', str(tmp_path / 'r'), *SET]) == status
        and signal.getsignal(number) is before
    )
    monkeypatch.undo()
    run = resume(tmp_path / 'r')
    assert run.agent.journal.steps == 120 and run.train() and same_runs(whole, tmp_path / 'r')


def test_nohup_is_heeded(tmp_path, monkeypatch):
    "Where SIGHUP is ignored it stays so"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        class Closed(commands.Bar):
            def tick(self, rows):
                signal.raise_signal(signal.SIGHUP)

        monkeypatch.setattr(commands, 'Bar', Closed)
        assert main(['train', 'cartpole', '--out', str(tmp_path / 'r'), *SET]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow  # smaller: `test_signals_save_and_say_which_it_was`
def test_a_terminal_that_is_closed(hangups, tmp_path):
    "Status 129, though nothing can be printed any more, and a checkpoint of where it stood"
    import pty, select

    pid, fd = pty.fork()
    if pid == 0:
        os.execv(
            sys.executable,
            command(
                'train',
                'cartpole',
                '--out',
                tmp_path / 'r',
                '--set',
                'network=16',
                'report_every=200',
            ),
        )
    while not (tmp_path / 'r/metrics.jsonl').exists():
        if select.select([fd], [], [], 0.1)[0]:
            os.read(fd, 4096)
    os.close(fd)
    assert (
        os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129 and resume(tmp_path / 'r').saved > 0
    )


# ---- damaged files ----


def test_no_flipped_bit_is_loaded(whole, tmp_path):
    "Anywhere in a checkpoint: one line that names it; torch reads it as any other file"
    data, path, rng = (
        (whole / 'checkpoint.pt').read_bytes(),
        tmp_path / 'c.pt',
        np.random.default_rng(0),
    )
    torch.load(whole / 'checkpoint.pt', weights_only=True)
    for at in [
        *rng.integers(0, len(data) * 8, 60),
        *range(len(data) * 8 - 8 * 110, len(data) * 8, 37),
    ]:
        bad = bytearray(data)
        bad[at // 8] ^= 1 << at % 8
        path.write_bytes(bad)
        with pytest.raises(SettingsError, match="c.pt can't be read as a checkpoint"):
            load_checkpoint(path)
    path.write_bytes(data)
    assert load_checkpoint(path)


def make(path, kind):
    path.unlink(missing_ok=True)
    if kind == 'FIFO':
        os.mkfifo(path)
    elif kind == 'directory':
        path.mkdir()
    elif kind == 'device':
        path.symlink_to('/dev/zero')
    else:
        path.write_bytes(kind)


DEEP, DIGITS = b'[' * 100_000, b'9' * 5_000
NONE = (
    'FIFO',
    'directory',
    'device',
    b'\xff\xfe\x00',
    b'\x00',
    b'[1, 2]',
    b'"text"',
    b'5',
    DEEP,
    b'{"a": ' + DIGITS + b'}',
)
BROKEN = [
    *(
        ('checkpoint.pt', kind)
        for kind in (
            'FIFO',
            'directory',
            'device',
            b'',
            b'\x00',
            b'PK\x03\x04',
            b'PK\x05\x06' + bytes(18),
        )
    ),
    *(
        ('config.json', kind)
        for kind in (
            *NONE,
            b'',
            b'{}',
            b'{"recipe": "cartpole", "set',
            b'{"recipe": "cartpole"}',
            b'{"recipe": 5, "settings": {}}',
            b'{"recipe": "cartpole", "settings": {"learner": "dqn"}}',
            b'{"recipe": "cartpole", "settings": 5}',
        )
    ),
    *(
        ('metrics.jsonl', kind + b'\n' if isinstance(kind, bytes) else kind)
        for kind in NONE
        if kind != b'\x00'
    ),
    ('metrics.jsonl', b'{"env_steps": "x"}\n'),
    ('metrics.jsonl', b'{"env_steps": 1e999}\n'),
]


@pytest.mark.parametrize('name,kind', BROKEN, ids=lambda x: repr(x)[:24])
def test_a_broken_file_is_one_line_that_names_it(name, kind, copy, capsys):
    "For --resume and eval, and nothing is changed"
    make(copy / name, kind)
    lines = [
        ['train', '--resume', copy, '--steps', 400],
        *([['eval', copy]] if name != 'metrics.jsonl' else []),
    ]
    for line in lines:
        assert name in (said := says(capsys, *line)) and f'it has no {name}' not in said


@pytest.mark.parametrize(
    'key,value',
    [
        ('steps', 'many'),
        ('steps', 1e300),
        ('steps', 10**400),
        ('steps', -1),
        ('threads', 10**30),
        ('max_sz', 10**18),
        ('bs', [1]),
        ('network', ['a']),
        ('network', [10**30]),
        ('network', None),
        ('lr', 'x'),
        ('lr', float('inf')),
        ('lr', float('nan')),
        ('env', 5),
        ('env', 'a:b:c'),
        ('wrappers', [1]),
        ('observe', ['x']),
        ('observe', [10**9]),
        ('learner', []),
        ('learner', 'x'),
        ('seed', None),
        ('report_every', 0),
        ('solved', 'x'),
        ('device', 5),
        ('save_every', 1.5),
        ('gamma', {}),
    ],
)
def test_a_setting_that_was_edited_is_one_line(key, value, copy, capsys):
    "Of another type, or huge: config.json is named"
    config = json.loads((copy / 'config.json').read_text())
    config['settings'][key] = value
    (copy / 'config.json').write_text(json.dumps(config))
    for line in ['train', '--resume', copy], ['eval', copy]:
        assert 'config.json' in says(capsys, *line) or key == 'max_sz'


@pytest.mark.parametrize(
    'key',
    'learner env envs seed steps threads eval_every eval_episodes report_every save_every solved memory gamma bs network'.split(),
)
def test_a_setting_that_is_missing_is_one_line(key, copy, capsys):
    config = json.loads((copy / 'config.json').read_text())
    del config['settings'][key]
    (copy / 'config.json').write_text(json.dumps(config))
    assert 'config.json' in (said := says(capsys, 'eval', copy)) and key in said


@pytest.mark.parametrize(
    'state',
    [
        [1, 2],
        5,
        dict(weights=torch.zeros(3)),
        dict(agent=5, run={}),
        dict(agent={}, run={}),
        dict(agent=dict(pipe=[1], random=5), run=5),
        *(
            {'run': w}
            for w in (
                dict(last=dict(report='x', eval=0, save=0)),
                dict(last={}),
                dict(reported=(1,)),
                dict(evals=5),
                dict(wall='x'),
                dict(ended=[]),
                dict(solved='x'),
                dict(sums=5),
            )
        ),
    ],
    ids=str,
)
def test_a_checkpoint_of_other_things_is_one_line(state, copy, capsys):
    "Whatever somebody has saved: checkpoint.pt is named"
    path = copy / 'checkpoint.pt'
    if isinstance(state, dict) and set(state) == {'run'}:
        good = load_checkpoint(path)
        state = {**good, 'run': {**good['run'], **state['run']}}
    torch.save(state, path)
    for line in ['train', '--resume', copy, '--steps', 400], ['eval', copy]:
        assert 'checkpoint.pt' in says(capsys, *line)


@pytest.mark.parametrize(
    'name,kind',
    [
        ('summary.json', k)
        for k in (*NONE, b'{}', b'{"final_return": "x", "wall_s": 1, "solved_at_step": null}')
    ]
    + [('checkpoint.pt', 'FIFO'), ('config.json', b'[]')],
    ids=lambda x: repr(x)[:24],
)
def test_compare_names_the_broken_file(name, kind, whole, tmp_path, capsys):
    "Of a run that lies there"
    out = shutil.copytree(whole, tmp_path / 'c/cartpole-seed0')
    make(out / name, kind)
    assert name in says(capsys, 'compare', out)


@pytest.mark.parametrize(
    'data,said',
    [
        (b'[cartpole]\nnetwork = 8 1__0\n', 'network'),
        (b'[cartpole]\nnetwork = 8 ' + DIGITS + b'\n', 'network'),
        (b'[cartpole]\nsteps = ' + DIGITS + b'\n', None),
        (b'[cartp', 'section'),
        (b'[cartpole]\nlr = 1e999\n', None),
    ],
    ids=lambda x: repr(x)[:24],
)
def test_a_broken_settings_file_is_one_line(data, said, tmp_path, capsys):
    "Read, or trained with"
    path = tmp_path / 's.ini'
    path.write_bytes(data)
    if said:
        assert 's.ini' in (err := says(capsys, 'recipes', '--settings', path)) and said in err
    else:
        assert (
            'cartpole'
            in (
                err := says(
                    capsys, 'train', 'cartpole', '--settings', path, '--out', tmp_path / 'r'
                )
            )
            or 'setting' in err
        )


# ---- a directory from a stranger ----


@pytest.mark.parametrize(
    'changes',
    [
        dict(env='stranger_env:Thing'),
        dict(env='stranger_env:Thing-v0'),
        dict(wrappers='TimeLimit(9), stranger_env:Wrap'),
        dict(wrappers='TimeLimit("stranger_env:x")'),
        dict(env='stranger_env.sub:Thing'),
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
    assert (
        'stranger_env' in err
        and '--trust' in err
        and 'config.json' in err
        and not (tmp_path / 'executed').exists()
    )
    says(capsys, *line.split(), copy, '--trust')  # there is no such environment in it
    assert (tmp_path / 'executed').exists() == (
        'TimeLimit("' not in changes.get('wrappers', '')
    )  # in an argument it is only asked about
    for m in [m for m in sys.modules if m.startswith('stranger_env')]:
        del sys.modules[m]


def test_your_own_module_needs_no_flag_and_the_printed_lines_have_it(tmp_path, monkeypatch, capsys):
    "`train` imports what it is told; what it prints to type next has --trust"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    (tmp_path / 'my_own_env.py').write_text(
        'from test_recipes import Opaque\nclass Mine(Opaque):\n    def __init__(self): super().__init__(handle=False)\n'
    )
    assert (
        main(
            [
                'train',
                'cartpole',
                '--out',
                'r',
                *SET,
                'env=my_own_env:Mine',
                'wrappers=TimeLimit(50)',
            ]
        )
        == 0
    )
    assert 'fastrl-replay eval r --trust' in capsys.readouterr().out
    del sys.modules['my_own_env']
    assert '--trust' in says(capsys, 'eval', 'r')
    with pytest.raises(SettingsError, match='my_own_env'):
        reopen('r')
    assert (
        main(['eval', 'r', '--trust', '--episodes', '1']) == 0
        and main(['eval', 'r', '--episodes', '1']) == 0
    )  # now it is imported
    del sys.modules['my_own_env']


def test_what_names_a_module():
    assert named_modules('a:b-v0(x="c:d")', 'e:F, G(h:i), TimeLimit(5)') == [
        'a',
        'e',
        'c',
        'h',
    ] and not named_modules('ALE/Pong-v5')
    for r in ('cartpole', 'cartpole-blind', 'cartpole-r2d2', 'taxi'):
        check_saved(r, recipe(r).settings)
