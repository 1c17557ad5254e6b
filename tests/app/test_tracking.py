"Runs that are tracked: TensorBoard, and Weights & Biases in its offline mode"

import json, os, re, signal, subprocess, sys, time
from pathlib import Path
import pytest
from fastrl_replay.app.run_files import read_config, read_metrics
from fastrl_replay.app.tracking import numbers
from fastrl_replay.cli import main

SET = [
    '--set',
    'steps=600',
    'warmup=100',
    'report_every=100',
    'eval_every=300',
    'save_every=200',
    'eval_episodes=2',
    'network=8',
]


def records(path):
    "What an offline file holds: a log of LevelDB, in blocks of 32 KiB, of serialised messages"
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = Path(path).read_bytes(), 7, b''
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = (
            int.from_bytes(data[at + 4 : at + 6], 'little'),
            data[at + 6],
        )  # whole, first, middle, last
        if kind == 0:
            break
        parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b''


def value(item):
    return '/'.join(item.nested_key) or item.key, json.loads(item.value_json)


def logged(out):
    "Of each file of a run: how it began, its settings, its lines, the exit code"
    import wandb

    wandb.teardown()  # what writes the files is another process, which ends now, and then they are whole
    for path in sorted(
        Path(out).glob('wandb/offline-run-*/*.wandb'), key=lambda p: p.stat().st_mtime_ns
    ):
        found = [*records(path)]
        begin = next(r.run for r in found if r.WhichOneof('record_type') == 'run')
        lines = [
            dict(map(value, r.history.item))
            for r in found
            if r.WhichOneof('record_type') == 'history'
        ]
        lines = [{k: v for k, v in line.items() if k[0] != '_'} for line in lines]
        yield (
            begin,
            dict(map(value, begin.config.update)),
            lines,
            [r.exit.exit_code for r in found if r.WhichOneof('record_type') == 'exit'],
        )


@pytest.fixture
def offline(monkeypatch, tmp_path):
    pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    for name in 'WANDB_PROJECT', 'WANDB_DIR', 'WANDB_RUN_ID':
        monkeypatch.delenv(name, raising=False)


def plain(x):
    return json.loads(json.dumps(x))


def test_weights_and_biases_gets_the_lines_of_metrics_and_the_settings(offline, tmp_path, capfd):
    "All of them, under the run's id; nothing is printed but where they are"
    out = tmp_path / 'r'
    assert main(['train', 'cartpole', '--out', str(out), '--track', *SET]) == 0
    ((begin, settings, lines, code),) = logged(out)
    assert (
        lines == [plain(numbers(m)) for m in read_metrics(out)] and len(lines) > 5 and code == [0]
    )
    config = read_config(out)
    assert (
        begin.run_id == config['id']
        and begin.project == 'fastrl_replay'
        and begin.display_name == 'r'
    )
    assert begin.run_group == 'cartpole on CartPole-v1' and settings['recipe'] == 'cartpole'
    assert {k: settings[k] for k in config['settings']} == plain(config['settings'])
    said = capfd.readouterr()
    assert (
        'wandb' not in said.err
        and len(re.findall('wandb', re.sub(r'tracked:.*', '', said.out))) == 0
    )
    assert re.search(r'tracked: +wandb sync .*offline-run', said.out)


@pytest.mark.slow
def test_a_tracked_run_that_is_stopped_goes_on_under_its_id(offline, tmp_path):
    "Ctrl-C ends it there, too, and what --resume adds is of the same run"
    out = tmp_path / 'r'
    command = [sys.executable, '-m', 'fastrl_replay', 'train']
    p = subprocess.Popen(
        [*command, 'cartpole', '--out', out, '--track', *SET, 'steps=1_000_000'],
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not len(read_metrics(out)) > 3:
        assert p.poll() is None, p.stdout.read()
        time.sleep(0.1)
    os.killpg(p.pid, signal.SIGINT)  # as a terminal does: all its processes get it
    said = p.communicate(timeout=100)[0]
    assert p.returncode == 130 and 'stopped at step' in said and 'Traceback' not in said
    before = read_metrics(out)
    steps = before[-1]['env_steps'] + 500
    done = subprocess.run(
        [*command, '--resume', out, '--steps', str(steps), '--track'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (first, _, lines, code), (second, settings, more, end) = logged(out)
    assert (
        first.run_id == second.run_id == read_config(out)['id']
        and code == end == [0]
        and settings['steps'] == steps
    )
    assert lines + more == [plain(numbers(m)) for m in read_metrics(out)]


def test_a_tracked_run_that_fails_is_marked(offline, tmp_path, monkeypatch):
    "It ends with the error, and isn't left open"
    from fastrl_replay.app.runs import Run

    def fail(self, *args):
        raise RuntimeError('a wire came loose')

    monkeypatch.setattr(Run, 'evaluate', fail)
    with pytest.raises(RuntimeError, match='wire'):
        main(['train', 'cartpole', '--out', str(tmp_path / 'r'), '--track', *SET])
    ((_, _, lines, code),) = logged(tmp_path / 'r')
    assert lines and code == [1]


@pytest.mark.slow
def test_tracking_does_not_change_a_training(offline, tmp_path):
    "No random number is drawn for it: all but times is the same"
    for name, more in ('a', []), ('b', ['--track', '--tensorboard']):
        main(['train', 'cartpole', '--out', str(tmp_path / name), *more, *SET])
    a, b = [
        [
            {k: v for k, v in m.items() if k not in ('wall_s', 'steps_per_s')}
            for m in read_metrics(tmp_path / n)
        ]
        for n in 'ab'
    ]
    assert a == b


def test_a_missing_wandb_is_named_before_anything_begins(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    assert main(['train', 'cartpole', '--out', str(tmp_path / 'r'), '--track', *SET]) != 0
    assert (
        'pip install wandb, or leave the option out' in capsys.readouterr().err
        and not (tmp_path / 'r').exists()
    )


@pytest.mark.slow
def test_who_is_not_logged_in_is_told_before_anything_begins(tmp_path):
    "Without a terminal no question can be asked"
    pytest.importorskip('wandb')
    env = {k: v for k, v in os.environ.items() if not k.startswith('WANDB_')}
    done = subprocess.run(
        [sys.executable, '-m', 'fastrl_replay', 'train', 'cartpole', '--out', 'r', '--track', *SET],
        cwd=tmp_path,
        env={**env, 'HOME': str(tmp_path), 'NETRC': str(tmp_path / 'none')},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode
        and 'wandb login, or WANDB_MODE=offline' in done.stderr
        and 'Traceback' not in done.stderr
    )
    assert not (tmp_path / 'r').exists()


def test_shards_are_tracked_one_by_one():
    "A list is no number; with it, --tensorboard ended a training with shards"
    line = dict(env_steps=5, loss=0.5, return_mean=None, shards=[dict(rows=1), dict(rows=2)])
    assert numbers(line) == {'env_steps': 5, 'loss': 0.5, 'shards/0/rows': 1, 'shards/1/rows': 2}
    assert all(isinstance(v, (int, float)) for v in numbers(line).values())
