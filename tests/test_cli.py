"""The command fastrl-replay, as a person or a script meets it: what it prints, leaves behind, survives and repeats."""

import io, json, multiprocessing, os, re, shlex, shutil, signal, subprocess, sys, time, types

import numpy as np, pytest, torch

from fastrl_replay import cli
from fastrl_replay.app import commands
from fastrl_replay.cli import main
from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.row_dtypes import spec_dtype
from fastrl_replay.pipe import upstream
from fastrl_replay.app.recipe_settings import recipe, recipes
from fastrl_replay.app.recipes import evaluate
from fastrl_replay.steps.settings import SettingsError
from fastrl_replay.app.saved_policies import load_checkpoint
from fastrl_replay.app.run_files import read_metrics
from fastrl_replay.app.runs import resume, start
from fastrl_replay.testing import same

SMALL = dict(
    steps=1_600,
    warmup=200,
    train_every=1,
    network=(16, 16),
    eval_every=700,
    eval_episodes=3,
    save_every=300,
    report_every=200,
)
SET = [
    '--set',
    *(f'{k}={" ".join(map(str, v)) if isinstance(v, tuple) else v}' for k, v in SMALL.items()),
]
FILES = [
    'best.pt',
    'checkpoint.pt',
    'config.json',
    'memory.json',
    'metrics.jsonl',
    'report.html',
    'returns.png',
    'summary.json',
]
FIELDS = 'recipe env wrappers seed env_steps updates wall_s steps_per_s final_return solved_at_step'.split()


def command(*args):
    return [sys.executable, '-m', 'fastrl_replay', *map(str, args)]


def typed(*args):
    "What a command printed; its errors too"
    r = subprocess.run(
        command(*args), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300
    )
    assert r.returncode == 0, r.stdout
    return r.stdout


def here(capsys, *args, status=0):
    "The same in this process"
    capsys.readouterr()
    assert main([str(a) for a in args]) == status, capsys.readouterr().err
    return ''.join(capsys.readouterr())


def no_clock(lines):
    return [
        {k: v for k, v in d.items() if k not in ('wall_s', 'steps_per_s', 'spent')} for d in lines
    ]


def everything(out):
    "All that a checkpoint holds; rows as columns, since the bytes between columns mean nothing"
    stage = top = load_checkpoint(out / 'checkpoint.pt')['agent']['pipe']
    while stage:
        for m in stage['own'], stage['own'].get('memory', {}):
            if 'rows' in m and m.get('dtype'):
                m['rows'] = Steps(m['rows'].numpy().reshape(-1).view(spec_dtype(m['dtype'])))
        if stage['stage'] == 'NStep' and stage['own']['dtype']:  # in any order of environments
            rows = stage['own']['rows'].rows
            stage['own']['rows'] = Steps(rows[np.lexsort((rows['step_n'], rows['env_id']))])
        stage = stage['above']
    return top


def same_runs(a, b):
    "Are two runs the same in everything but the clock?"
    return no_clock(read_metrics(a)) == no_clock(read_metrics(b)) and same(
        everything(a), everything(b)
    )


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    "A run that has ended; whoever changes its files takes a copy"
    run = start(recipe('cartpole-per', **SMALL), tmp_path_factory.mktemp('trained') / 'r')
    run.train()
    return run


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained.out, tmp_path / 'r')


def test_what_is_a_device_on_no_machine_is_refused_before_anything_is_imported(tmp_path):
    "By train and eval, in one line with the remedy; what torch may have is left to torch"
    program = """
import sys
from fastrl_replay.cli import main
for line in sys.argv[1:]:
    try: status = main(line.split())
    except SystemExit as e: status = e.code
    assert status == 2 and not {'torch', 'numba'} & {*sys.modules}, line"""
    lines = [
        'train cartpole --set lr=.1 device=foo',
        f'train --resume {tmp_path} --set device=cuda:x',
        f'eval {tmp_path} --set device=foo',
    ]
    r = subprocess.run(
        [sys.executable, '-c', program, *lines], text=True, capture_output=True, timeout=300
    )
    said = r.stderr.splitlines()
    assert r.returncode == 0 and len(said) == len(lines) and not r.stdout, r.stderr
    assert all(
        "recipe: setting 'device'; got '" in line and 'Remedy: --set device=cpu' in line
        for line in said
    )


def test_torch_knows_no_other_kinds_of_devices():
    from fastrl_replay.steps.settings import DEVICES

    with pytest.raises(RuntimeError) as e:
        torch.device('foo')
    assert {*re.search(r'one of (.*?) device type', str(e.value))[1].split(', ')} <= {*DEVICES}


# ---- what a run leaves ----

# As the script in bin/ starts: without the working directory among Python's paths.
SCRIPT = [
    sys.executable,
    '-c',
    'import sys; sys.path.pop(0); from fastrl_replay.cli import main; sys.exit(main())',
]


def test_a_run_from_the_outside(tmp_path, monkeypatch, capsys):
    "The files, the summary's fields, what is said at the end, and that eval plays the same episodes"
    (tmp_path / 'outside.py').write_text(
        "import gymnasium as gym\ngym.register('Outside-v0', 'gymnasium.envs.classic_control.cartpole:CartPoleEnv')"
    )
    line = [
        'train',
        'cartpole',
        '--seed',
        '3',
        '--out',
        'here',
        *SET,
        'env=outside:Outside-v0',
        'wrappers=TimeLimit(max_episode_steps=200)',
    ]
    r = subprocess.run(
        SCRIPT + line,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    out, said = tmp_path / 'here', r.stdout
    assert r.returncode == 0 and said.startswith(
        'cartpole on outside:Outside-v0 with TimeLimit(max_episode_steps=200), seed 3, into here\n'
    ), said
    assert sorted(p.name for p in out.iterdir()) == FILES
    s, lines = json.loads((out / 'summary.json').read_text()), read_metrics(out)
    assert set(FIELDS) <= set(s) and (s['recipe'], s['seed'], s['env_steps'], s['updates']) == (
        'cartpole',
        3,
        1600,
        700,
    )
    assert (
        f'{s["final_return"]:.1f}' in said
        and 'here/returns.png' in said
        and 'fastrl-replay eval here' in said
    )
    assert s['final_return'] == lines[-1]['eval_return'] and lines[-1]['eval_episodes'] == 20
    assert (out / 'returns.png').read_bytes().startswith(b'\x89PNG')
    config = json.loads((out / 'config.json').read_text())
    assert (
        config['recipe'] == 'cartpole'
        and config['settings']['network'] == [16, 16]
        and config['settings']['gamma'] == 0.99
    )
    assert config['env'] == s['env'] == 'outside:Outside-v0' and config['wrappers'] == s[
        'wrappers'
    ] == ['TimeLimit(max_episode_steps=200)']
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    assert f'{s["final_return"]:.1f} ± {s["final_std"]:.1f}' in here(
        capsys, 'eval', 'here', '--trust'
    )
    assert f'{s["final_return"]:.1f} ±' not in here(
        capsys, 'eval', 'here', '--trust', '--episodes', 3, '--seed', 5
    )
    del sys.modules['outside']


def test_metrics_say_what_happened(trained):
    "Reports and evaluations at their steps; means of what was learned; every number finite"
    run, lines = trained, read_metrics(trained.out)
    reports, evals = [m for m in lines if 'eps' in m], [m for m in lines if 'eval_return' in m]
    assert [m['env_steps'] // 200 for m in reports] == [1, 2, 3, 4, 5, 6, 7, 8] and [
        m['env_steps'] // 700 for m in evals
    ] == [1, 2, 2]
    assert [m['env_steps'] for m in lines] == sorted(m['env_steps'] for m in lines)
    assert {
        'loss',
        'td',
        'q',
        'norm',
        'fill',
        'age_mean',
        'age_max',
        'return_mean',
        'steps_per_s',
        'wall_s',
        'updates',
        'episodes',
    } <= set(reports[1])  # the first is of the warm-up
    assert all(np.isfinite(v) for m in lines for v in m.values() if v is not None)
    j = run.agent.journal
    weights, means = (
        np.diff([0, *(m['episodes'] for m in reports)]),
        [m['return_mean'] or 0 for m in reports],
    )
    np.testing.assert_allclose(weights @ means, sum(j.returns[: reports[-1]['episodes']]))
    assert sum(j.returns) <= j.steps == 1600  # each step of CartPole gives 1


@pytest.mark.parametrize(
    'name', ['cartpole-rank', pytest.param('cartpole', marks=pytest.mark.slow)]
)
def test_the_same_seed_is_the_same_run(name, tmp_path):
    "And another seed another"
    for d, seed in ('a', 0), ('b', 0), ('c', 1):
        start(recipe(name, seed=seed, **{**SMALL, 'steps': 600}), tmp_path / d).train()
    assert same_runs(tmp_path / 'a', tmp_path / 'b') and not same_runs(
        tmp_path / 'a', tmp_path / 'c'
    )


# ---- interrupted, killed, taken up again ----


def wait_for(path, p):
    while not path.exists():
        assert p.poll() is None, f'ended before {path.name} was there: {p.communicate()[0]}'
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['cartpole-per', 'cartpole-r2d2', 'taxi'])
def test_a_killed_run_goes_on_as_if_nothing_had_been(name, trained, tmp_path):
    "SIGKILL at some moment after the first checkpoint; resumed, all its lines and weights are those of a run that was left alone"
    changes = {
        'taxi': dict(
            episodes=60, save_every=300, report_every=200, eval_every=4000, eval_episodes=3
        ),
        'cartpole-r2d2': dict(SMALL, network=8, bs=4, length=8, burn_in=2, overlap=4),
    }
    changes, whole = changes.get(name, SMALL), trained.out
    if name != trained.name:
        whole = tmp_path / 'whole'
        start(recipe(name, **changes), whole).train()
    sets = [
        f'{k}={" ".join(map(str, v)) if isinstance(v, tuple) else v}' for k, v in changes.items()
    ]
    p = subprocess.Popen(
        command('train', name, '--out', tmp_path / 'killed', '--set', *sets),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(tmp_path / 'killed/checkpoint.pt', p)
    time.sleep(0.05)
    p.kill()
    p.communicate()
    if not (tmp_path / 'killed/summary.json').exists():
        assert main(['train', '--resume', str(tmp_path / 'killed')]) == 0
    assert same_runs(whole, tmp_path / 'killed')
    assert [
        p
        for p in (tmp_path / 'killed').iterdir()
        if p.name not in FILES and not p.name.startswith('.')
    ] == []


@pytest.mark.slow  # smaller: a killed run above, `test_stopped_twice_is_as_never_stopped` in test_recipes.py
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    "Status 130, so that a shell's loop ends; the run stands between two updates; what it prints is what continues it, to the same end"
    whole = start(recipe('cartpole-per', **{**SMALL, 'steps': 6_000}), tmp_path / 'whole')
    whole.train()
    p = subprocess.Popen(
        command('train', 'cartpole-per', '--out', tmp_path / 'stopped', *SET, '--steps', 6_000),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(tmp_path / 'stopped/metrics.jsonl', p)
    p.send_signal(signal.SIGINT)
    said = p.communicate(timeout=60)[0]
    assert (
        p.returncode == 130
        and 'stopped at step' in said
        and not (tmp_path / 'stopped/summary.json').exists()
    )
    typed(*re.search(r'fastrl-replay (train --resume .*)', said)[1].split())
    assert same_runs(tmp_path / 'whole', tmp_path / 'stopped')


@pytest.mark.parametrize('terminal, status', [(True, -signal.SIGINT), (False, 130)])
def test_ctrl_c_ends_a_shells_loop(terminal, status, monkeypatch):
    "In a terminal by the signal, since bash goes on with a loop after a command that just exits; `$?` is 130 in both cases"
    import pty

    ends = pty.openpty()

    def child():
        os.dup2(ends[1] if terminal else os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.argv = open(0), ['fastrl-replay', 'train']
        sys.exit(main())

    monkeypatch.setattr(cli, '_do', lambda args: 130)
    p = multiprocessing.get_context('fork').Process(target=child)
    p.start()
    p.join(60)
    for end in ends:
        os.close(end)
    assert p.exitcode == status


@pytest.mark.slow  # smaller: the test above
@pytest.mark.skipif(not shutil.which('bash'), reason='no bash')
def test_ctrl_c_in_a_terminal_ends_a_loop_over_seeds(tmp_path):
    "Typed into a pseudo-terminal where bash runs the loop: the first run is saved, the second doesn't begin"
    import pty

    line = shlex.join(command('train', 'cartpole', *SET, 'steps=20_000'))
    pid, fd = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execlp(
            'bash',
            'bash',
            '-c',
            f'for seed in 0 1; do {line} --seed $seed; done; echo the loop has ended by itself',
        )
    while not (tmp_path / 'runs/cartpole-seed0/checkpoint.pt').exists():
        time.sleep(0.05)
    os.write(fd, b'\x03')
    seen = b''
    try:
        while chunk := os.read(fd, 65536):
            seen += chunk
    except OSError:
        pass  # Linux's way to say that the other end is closed
    os.close(fd)
    os.waitpid(pid, 0)
    assert b'stopped at step' in seen and b'by itself' not in seen
    assert (
        not (tmp_path / 'runs/cartpole-seed1').exists()
        and resume(tmp_path / 'runs/cartpole-seed0').agent.journal.steps > 0
    )


def test_a_run_that_is_longer_in_two_goes(trained, copied):
    "--steps can be raised when a run is taken up again; eps and the rest follow"
    with pytest.raises(SettingsError, match='more --steps'):
        resume(copied)
    again = resume(copied, 1_700)
    summary = again.train()
    assert (
        summary['env_steps'] == 1700
        and json.loads((copied / 'config.json').read_text())['settings']['steps'] == 1700
    )
    assert len(again.agent.journal.returns) > len(trained.agent.journal.returns)


def test_checkpoints_are_whole_plain_and_execute_nothing(copied, tmp_path):
    "A half one and one with code in it are refused with a word; the old one stays while a new one is written"
    path = copied / 'checkpoint.pt'
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SettingsError, match="can't be read as a checkpoint"):
        resume(copied, 3_000)

    class Bad:
        def __reduce__(self):
            return os.system, ('touch ' + str(tmp_path / 'executed'),)

    torch.save(dict(agent=Bad()), path)
    with pytest.raises(SettingsError, match="can't be read as a checkpoint"):
        resume(copied, 3_000)
    assert not (tmp_path / 'executed').exists()


def test_a_checkpoint_of_other_settings_says_so(copied):
    "Someone edited config.json"
    config = json.loads((copied / 'config.json').read_text())
    config['settings']['network'] = [16, 17]
    (copied / 'config.json').write_text(json.dumps(config))
    with pytest.raises(ValueError, match='the checkpoint is of another model'):
        resume(copied, 3_000)


# ---- words ----


def test_settings_of_the_working_directory_count_before_anything_is_imported(
    capsys, tmp_path, monkeypatch
):
    "A broken file says what to do, a directory of this name is none, and a recipe of yours is known and listed"
    monkeypatch.chdir(tmp_path)
    here, said = tmp_path / 'settings.ini', lambda *words: (main([*words]), capsys.readouterr())
    here.mkdir()
    status, of = said('recipes')
    assert status == 0 and of.out.startswith('cartpole ')
    here.rmdir()
    here.write_text('steps = 7')
    for words in ('recipes',), ('train', 'cartpoel'):
        status, of = said(*words)
        assert status == 2 and 'this is not a settings file' in of.err and 'Remedy: fix' in of.err
    here.write_text('[mine]  # all of ours\nlike = cartpole\n')
    assert (
        'mine             all of ours' in said('recipes')[1].out
        and "did you mean 'mine'" in said('train', 'mein')[1].err
    )


def test_typed_alone_it_tells_what_to_type(capsys):
    "A newcomer's first line"
    assert 'fastrl-replay train cartpole' in here(capsys)


def test_every_setting_has_its_comment_and_every_recipe_builds():
    "settings.ini is complete: no recipe lacks a word, none fails to be built, and each gets its first rows from its environments"
    from fastrl_replay.app.recipes import Agent

    for r in recipes().values():
        assert r.about and all(r.comments.get(k) for k in r.settings), r.name
        agent = Agent(r.settings)
        pipe = agent.pipe
        assert repr(pipe).count('\n') >= 1
        if r.settings['workers']:
            continue  # elsewhere, each has its part of the exploration
        if r.settings.get('data', 'none') != 'none':
            continue  # recorded rows: test_recipes.py
        while (above := upstream(pipe)) is not None:
            pipe = above
        assert len(next(iter(pipe))) == r.settings['envs'] * agent.agents, r.name


@pytest.mark.slow  # lines in a pipe: `test_a_run_from_the_outside`
def test_a_bar_in_a_terminal_and_lines_in_a_file(tmp_path):
    "A pseudo-terminal gets a bar with its numbers; a pipe gets lines without carriage returns"
    import fcntl, pty, struct, termios

    main_end, far_end = pty.openpty()
    fcntl.ioctl(far_end, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 150, 0, 0))
    p = subprocess.Popen(
        command('train', 'cartpole', '--out', tmp_path / 't', *SET), stdout=far_end, stderr=far_end
    )
    os.close(far_end)
    seen = b''
    try:
        while chunk := os.read(main_end, 65536):
            seen += chunk
    except OSError:
        pass  # Linux's way to say that the other end is closed
    assert p.wait() == 0 and b'\r' in seen and 'ε' in seen.decode() and b'memory' in seen
    said = typed('train', 'cartpole', '--out', tmp_path / 'l', *SET)
    assert '\r' not in said and re.search(r'steps/s +return [\d.]+ +ε [\d.]+ +loss', said)


def test_tensorboard(tmp_path, capsys):
    "Every number is there under its name"
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    here(capsys, 'train', 'cartpole', '--out', tmp_path / 't', '--tensorboard', *SET, 'steps=600')
    board = EventAccumulator(str(tmp_path / 't')).Reload()
    assert {'loss', 'return_mean', 'eval_return', 'eps'} <= set(board.Tags()['scalars'])
    losses = [(e.step, e.value) for e in board.Scalars('loss')]
    expected = [(m['env_steps'], m['loss']) for m in read_metrics(tmp_path / 't') if 'loss' in m]
    assert [s for s, _ in losses] == [s for s, _ in expected] and np.allclose(
        [v for _, v in losses], [v for _, v in expected]
    )


def test_evaluation_counts_one_episode_of_each_environment():
    "Ending early doesn't make an episode count twice, and training isn't disturbed"
    from fastrl_replay.app.recipes import Agent

    agent = Agent(recipe('cartpole', **SMALL).settings)
    returns = evaluate(agent, 7, 3)
    one = np.concatenate([evaluate(agent, 1, 3 + i) for i in range(7)])
    np.testing.assert_array_equal(returns, one)
    assert agent.journal.steps == 0 and agent.policy.asked == 0


# ---- does it learn? The slow ones: python -m pytest -m slow -k learns ----


def results(tmp_path, name, seeds, **changes):
    return [start(recipe(name, seed=s, **changes), tmp_path / f'{name}{s}').train() for s in seeds]


@pytest.mark.slow
@pytest.mark.parametrize('name', ['cartpole', 'cartpole-per', 'cartpole-rank'])
def test_cartpole_learns(name, tmp_path):
    "At least 475 in at least four of five seeds"
    returns = [r['final_return'] for r in results(tmp_path, name, range(5))]
    assert sum(r >= 475 for r in returns) >= 4, returns


@pytest.mark.slow
def test_a_memory_for_what_is_not_seen_learns(tmp_path):
    "Without velocities: 400 and more with memory in three of three seeds, far below without"
    seeing = [r['final_return'] for r in results(tmp_path, 'cartpole-r2d2', range(3))]
    blind = [r['final_return'] for r in results(tmp_path, 'cartpole-blind', range(3))]
    assert min(seeing) >= 400 and max(blind) < 200, (seeing, blind)


@pytest.mark.slow
def test_taxi_learns_sooner_with_replay(tmp_path):
    "Over five seeds: far ahead in episodes 20 to 200, alike in the last hundred"
    early, late = {}, {}
    for name in 'taxi', 'taxi-online':
        runs = [start(recipe(name, seed=s), tmp_path / f'{name}{s}') for s in range(5)]
        for r in runs:
            r.train()
        returns = np.array([r.agent.journal.returns[:1000] for r in runs])
        early[name], late[name] = returns[:, 20:200].mean(), returns[:, -100:].mean()
    assert (
        early['taxi'] > early['taxi-online'] + 100 and abs(late['taxi'] - late['taxi-online']) < 3
    ), (early, late)


# ---- terminals and numbers ----


def test_a_terminal_of_width_0_shows_progress():
    "Some in containers say that they have no columns"
    import fcntl, pty, struct, termios

    ends = pty.openpty()
    for width in 0, 150:
        fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack('HHHH', 0, width, 0, 0))
        with open(os.dup(ends[1]), 'w') as file:
            commands.Progress(total=9, initial=4, file=file, desc='run', dynamic_ncols=True).close()
        seen = os.read(ends[0], 65536).decode()
        assert 'run' in seen and '4/9' in seen, width
    for end in ends:
        os.close(end)


@pytest.mark.parametrize('shown', ['line', 'table'])
def test_results_of_small_scale_are_told_apart(shown, tmp_path):
    "0.834 and 0.766 are not both 0.8"
    if shown == 'table':
        said = commands.table(
            {'r': [dict(final_return=x, solved_at_step=None, wall_s=1) for x in (0.834, 0.766)]}
        )
    else:
        file = io.StringIO()
        run = types.SimpleNamespace(
            settings=dict(steps=9),
            name='r',
            agent=types.SimpleNamespace(journal=types.SimpleNamespace(steps=0)),
        )
        commands.Bar(run, file, terminal=False).report(
            dict(eval_return=0.834, eval_std=0.766, env_steps=5)
        )
        said = file.getvalue()
    assert '0.834' in said and '0.766' in said


def test_a_quantity_whose_default_is_whole_takes_a_fraction():
    "And a count takes none"
    assert (
        recipe('cartpole', solved='.75').settings['solved'] == 0.75
        and type(recipe('pong').settings['solved']) is float
    )
    for count in 'steps', 'bs', 'envs', 'seed':
        with pytest.raises(SettingsError, match='expected a whole number'):
            recipe('cartpole', **{count: '1.5'})
