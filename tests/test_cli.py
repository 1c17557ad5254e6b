"""The command fastrl-replay, by hand or script: what it prints, leaves, survives and repeats."""

import json, multiprocessing, os, re, signal, subprocess, sys, time

import numpy as np, pytest

from fastrl_replay import cli
from fastrl_replay.app.recipes import Agent, play_episodes
from fastrl_replay.app.run_files import read_metrics
from fastrl_replay.app.runs import start
from fastrl_replay.app.saved_policies import load_checkpoint
from fastrl_replay.cli import main
from fastrl_replay.pipe import upstream
from fastrl_replay.steps.core import Steps, unpack
from fastrl_replay.steps.row_dtypes import spec_dtype
from fastrl_replay.learning.settings import SettingsError, recipe, recipes
from fastrl_replay.testing import same

SMALL = dict(
    steps=800,
    warmup=200,
    train_every=1,
    network=(16, 16),
    eval_every=350,
    eval_episodes=3,
    save_every=150,
    report_every=100,
)
SET = [
    '--set',
    *(f'{k}={" ".join(map(str, v)) if isinstance(v, tuple) else v}' for k, v in SMALL.items()),
]
FILES = [
    'best.ckpt',
    'checkpoint.ckpt',
    'config.json',
    'metrics.jsonl',
    'report.html',
    'returns.png',
    'summary.json',
]


def command(*args):
    return [sys.executable, '-m', 'fastrl_replay', *map(str, args)]


def here(capsys, *args, status=0):
    "The same in this process"
    capsys.readouterr()
    assert main([str(a) for a in args]) == status, capsys.readouterr().err
    return ''.join(capsys.readouterr())


def no_clock(lines):
    return [{k: v for k, v in d.items() if k not in ('wall_s', 'steps_per_s')} for d in lines]


def everything(out):
    "All that a checkpoint holds; rows as columns, since the bytes between columns mean nothing"
    stage = top = load_checkpoint(out / 'checkpoint.ckpt')['agent']['pipe']
    while stage:
        for m in stage['own'], stage['own'].get('memory', {}):
            if 'rows' in m and m.get('dtype'):
                m['rows'] = Steps(m['rows'].numpy().reshape(-1).view(spec_dtype(m['dtype'])))
        held = stage['own'].get('held', {})
        if held.get('rows'):  # rows that wait, in any order of environments
            rows = unpack(held['rows']).rows
            rows = rows[np.arange(rows.shape[1]) < held['counts'].numpy()[:, None]]
            stage['own']['held'] = Steps(rows[np.lexsort((rows['step_n'], rows['env_id']))])
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


# ---- what a run leaves ----


@pytest.mark.slow  # in this process: test_directories_of_runs
def test_a_run_from_the_outside(tmp_path, monkeypatch, capsys):
    "The files, the summary, what is said at the end, and that eval plays the same episodes"
    (tmp_path / 'outside.py').write_text(
        "import gymnasium as gym\n"
        "gym.register('Outside-v0', 'gymnasium.envs.classic_control.cartpole:CartPoleEnv')"
    )
    # as the script in bin/ starts: without the working directory among Python's paths
    script = 'import sys; sys.path.pop(0); from fastrl_replay.cli import main; sys.exit(main())'
    more = 'env=outside:Outside-v0', 'wrappers=TimeLimit(max_episode_steps=200)'
    line = ['train', 'cartpole', '--seed', '3', '--out', 'here', *SET, *more]
    r = subprocess.run(
        [sys.executable, '-c', script, *line],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    out, said = tmp_path / 'here', r.stdout
    title = 'cartpole on outside:Outside-v0 with TimeLimit(max_episode_steps=200), seed 3'
    assert r.returncode == 0 and said.startswith(f'{title}, into here\n'), said
    assert sorted(p.name for p in out.iterdir()) == FILES
    s = json.loads((out / 'summary.json').read_text())
    lines = read_metrics(out)
    assert (s['recipe'], s['seed'], s['env_steps'], s['updates']) == ('cartpole', 3, 800, 300)
    assert f'{s["final_return"]:.5g}' in said and 'fastrl-replay eval here --trust' in said
    assert re.search(r'steps +return_mean [\d.]+ +eps [\d.]+ +loss', said) and '\r' not in said
    assert s['final_return'] == lines[-1]['eval_return'] and lines[-1]['eval_episodes'] == 20
    assert (out / 'returns.png').read_bytes().startswith(b'\x89PNG')
    config = json.loads((out / 'config.json').read_text())
    assert config['settings']['network'] == '16 16' and config['settings']['env'] == s['env']
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    found = f'{s["final_return"]:.5g} ± {s["final_std"]:.5g}'
    assert found in here(capsys, 'eval', 'here', '--trust')
    assert found not in here(capsys, 'eval', 'here', '--trust', '--episodes', 3, '--seed', 5)
    del sys.modules['outside']


def test_metrics_say_what_happened(trained):
    "Reports and evaluations at their steps; every number finite"
    lines = read_metrics(trained.out)
    reports = [m for m in lines if 'eps' in m]
    assert [m['env_steps'] // 100 for m in reports] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [m['env_steps'] // 350 for m in lines if 'eval_return' in m] == [1, 2, 2]
    assert [m['env_steps'] for m in lines] == sorted(m['env_steps'] for m in lines)
    names = 'loss td q norm fill age_mean age_max return_mean steps_per_s wall_s updates episodes'
    assert {*names.split()} <= set(reports[3])  # the first two are of the warm-up
    assert all(np.isfinite(v) for m in lines for v in m.values() if v is not None)
    j = trained.agent.journal
    weights = np.diff([0, *(m['episodes'] for m in reports)])
    means = [m['return_mean'] or 0 for m in reports]
    np.testing.assert_allclose(weights @ means, sum(j.returns[: reports[-1]['episodes']]))
    assert sum(j.returns) <= j.steps == 800  # each step of CartPole gives 1


def test_the_same_seed_is_the_same_run(trained, tmp_path):
    "And another seed another"
    for d, seed in ('a', 0), ('b', 1):
        start(recipe('cartpole-per', seed=seed, **SMALL), tmp_path / d).train()
    assert same_runs(trained.out, tmp_path / 'a') and not same_runs(trained.out, tmp_path / 'b')


# ---- killed, and continued ----


@pytest.mark.slow
@pytest.mark.parametrize('name', ['cartpole-per', 'cartpole-r2d2'])
def test_a_killed_run_goes_on_as_if_nothing_had_been(name, tmp_path):
    "SIGKILL after the first checkpoint; resumed, lines and weights are those of a whole run"
    changes = SMALL
    if name == 'cartpole-r2d2':
        changes = dict(SMALL, network=8, bs=4, length=8, burn_in=2, overlap=4)
    start(recipe(name, **changes), tmp_path / 'whole').train()
    sets = [
        f'{k}={",".join(map(str, v)) if isinstance(v, tuple) else v}' for k, v in changes.items()
    ]
    p = subprocess.Popen(command('train', name, '--out', tmp_path / 'killed', '--set', *sets))
    while not (tmp_path / 'killed/checkpoint.ckpt').exists():
        assert p.poll() is None
        time.sleep(0.02)
    time.sleep(0.05)
    p.kill()
    p.wait()
    if not (tmp_path / 'killed/summary.json').exists():
        assert main(['train', '--resume', str(tmp_path / 'killed')]) == 0
    assert same_runs(tmp_path / 'whole', tmp_path / 'killed')


@pytest.mark.parametrize('terminal, status', [(True, -signal.SIGINT), (False, 130)])
def test_ctrl_c_ends_a_shells_loop(terminal, status, monkeypatch):
    """In a terminal it ends by the signal, since bash continues a loop after a plain exit.

    `$?` is 130 in both cases."""
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


# ---- words ----


def test_a_recipe_of_a_file_is_known(capsys, tmp_path):
    (tmp_path / 's.ini').write_text('[mine]\nabout = all of ours\nlike = cartpole\n')
    more = '--settings', tmp_path / 's.ini'
    assert 'mine             all of ours' in here(capsys, 'recipes', *more)
    assert "did you mean 'mine'" in here(capsys, 'train', 'mein', *more, status=2)


def test_a_mistyped_command_imports_nothing_heavy(tmp_path):
    program = """
import sys
from fastrl_replay.cli import main
main(['trian', 'cartpole'])
assert not {'torch', 'numba'} & {*sys.modules}"""
    run = [sys.executable, '-c', program]
    r = subprocess.run(run, text=True, capture_output=True, timeout=300, cwd=tmp_path)
    assert r.returncode == 0 and "did you mean 'train'" in r.stderr, r.stderr


def test_every_setting_has_its_comment_and_every_recipe_builds():
    "Each recipe has its words, can be built, and gets first rows from its environments"
    for r in recipes().values():
        assert r.about and all(' # ' in r.lines[k] for k in r.settings), r.name
        agent = Agent(r.settings)
        pipe = agent.pipe
        if r.settings['workers'] or r.settings['data'] != 'none':
            continue
        while (above := upstream(pipe)) is not None:
            pipe = above
        assert len(next(iter(pipe))) == r.settings['envs'] * agent.agents, r.name


def test_tensorboard(tmp_path, capsys):
    "Every number is there under its name"
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    here(capsys, 'train', 'cartpole', '--out', tmp_path / 't', '--tensorboard', *SET, 'steps=600')
    board = EventAccumulator(str(tmp_path / 't')).Reload()
    assert {'loss', 'return_mean', 'eval_return', 'eps'} <= set(board.Tags()['scalars'])
    losses = [(e.step, pytest.approx(e.value)) for e in board.Scalars('loss')]
    assert losses == [
        (m['env_steps'], m['loss']) for m in read_metrics(tmp_path / 't') if 'loss' in m
    ]


def test_evaluation_counts_one_episode_of_each_environment():
    "Ending early doesn't make an episode count twice, and training isn't disturbed"
    agent = Agent(recipe('cartpole', **SMALL).settings)
    returns = play_episodes(agent, 7, 3)[0]
    one = np.concatenate([play_episodes(agent, 1, 3 + i)[0] for i in range(7)])
    np.testing.assert_array_equal(returns, one)
    assert agent.journal.steps == 0 and agent.policy.asked == 0


@pytest.mark.slow  # python -m pytest -m slow -k learns
@pytest.mark.parametrize('name, least', [('cartpole-per', 475), ('taxi', 6)])
def test_a_recipe_learns(name, least, tmp_path):
    assert start(recipe(name), tmp_path / 'r').train()['final_return'] >= least


# ---- numbers ----


def test_a_quantity_whose_default_is_whole_takes_a_fraction():
    "And a count takes none"
    assert (
        recipe('cartpole', tau='1').settings['tau'] == 1.0
        and type(recipe('pong').settings['tau']) is float
    )
    for count in 'steps', 'bs', 'envs', 'seed':
        with pytest.raises(SettingsError, match='expected an integer'):
            recipe('cartpole', **{count: '1.5'})
