"""`fastrl-replay memory`, and runs with a memory on disk: output, SIGKILL, whose rows they are."""

import json, os, random, shutil, subprocess, time
from contextlib import closing
from pathlib import Path

import pytest

from fastrl_replay.all import *
from fastrl_replay.app.offline import open_memory
from fastrl_replay.learning.settings import recipe
from fastrl_replay.app.run_files import read_metrics
from fastrl_replay.app.runs import resume, start
from fastrl_replay.app.saved_policies import load_checkpoint
from fastrl_replay.cli import main
from fastrl_replay.steps.errors import FastrlError
from fastrl_replay.testing import same
from memories import rows_of
from test_cli import command, here, no_clock


def files(d):
    return {
        p.relative_to(d): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in d.rglob('*')
        if p.is_file()
    }


# ---- errors ----

DAMAGE = {
    'not JSON': lambda d, meta: (d / 'meta.json').write_text('{'),
    'another store': lambda d, meta: (d / 'meta.json').write_text(
        json.dumps({**meta, 'store': {'kind': 'os.system'}})
    ),
    'short rows': lambda d, meta: os.truncate(d / meta['data'] / 'rows', 100),
    'counters': lambda d, meta: (d / meta['data'] / 'counters').write_bytes(b'\xff' * 80),
    'gone': lambda d, meta: shutil.rmtree(d / meta['data']),
}


@pytest.mark.parametrize('how', DAMAGE)
def test_what_is_damaged_is_named(how, tmp_path, capsys):
    "Status 2, one line with the place, and nothing is written"
    replay = PrioritizedReplay(bs=4, max_sz=90, store=Rows(tmp_path / 'm'))
    replay.add(rows_of(20))
    replay.close()
    DAMAGE[how](tmp_path / 'm', json.loads((tmp_path / 'm/meta.json').read_text()))
    before = files(tmp_path / 'm')
    assert main(['memory', str(tmp_path / 'm'), '--html', str(tmp_path / 'm.html')]) == 2
    out, err = capsys.readouterr()
    assert str(tmp_path) in err and err.count('\n') == 1 and not out
    assert files(tmp_path / 'm') == before and not (tmp_path / 'm.html').exists()


def test_what_is_typed_wrong_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('empty').mkdir()
    Path('file').write_text('x')
    for line, said in {
        'memory none': 'has no replay buffer with rows',
        'memory empty': 'has no replay buffer with rows',
        'memory file': 'file',
    }.items():
        assert main(line.split()) == 2 and said in capsys.readouterr().err, line
    assert [*Path('empty').iterdir()] == []


# ---- runs with their memory on disk ----

SMALL = dict(
    steps=800,
    warmup=100,
    train_every=7,
    max_sz=250,
    network=16,
    bs=16,
    eval_every=350,
    eval_episodes=3,
    save_every=150,
    report_every=100,
)
RUNS = {
    'cartpole': SMALL,
    'cartpole-per': SMALL,
    'cartpole-r2d2': dict(SMALL, train_every=1, network=8, bs=4, length=8, burn_in=2, overlap=4),
}


def options(changes):
    return ['--set', *(f'{k}={v}' for k, v in changes.items())]


def same_on_disk(a, b, ma, mb):
    "The same metrics, rows, weights and returns?"
    ra, rb = open_memory(ma), open_memory(mb)
    assert ra.keys.tolist() == rb.keys.tolist() and ra[:] == rb[:]
    pa, pb = (load_checkpoint(d / 'checkpoint.ckpt')['agent'] for d in (a, b))
    assert same(pa['pipe']['own'], pb['pipe']['own']) and same(pa['generators'], pb['generators'])
    return no_clock(read_metrics(a)) == no_clock(read_metrics(b))


@pytest.mark.slow
@pytest.mark.parametrize('name', RUNS)
def test_kill_9_costs_nothing_but_time(name, tmp_path):
    "SIGKILL at a random moment after a checkpoint, three times; resumed, it equals a whole run"
    start(recipe(name, **RUNS[name], memory_path=str(tmp_path / 'mw')), tmp_path / 'whole').train()
    r = tmp_path / 'r'
    line = ['train', name, '--out', r, '--memory', tmp_path / 'm', *options(RUNS[name])]
    rng = random.Random(name)
    written = 0
    for _ in range(3):
        p = subprocess.Popen(command(*line), stdout=subprocess.DEVNULL)
        line = ['train', '--resume', r, '--trust']
        checkpoint = r / 'checkpoint.ckpt'
        while p.poll() is None:
            if checkpoint.exists() and checkpoint.stat().st_mtime_ns > written:
                break
            time.sleep(0.005)
        time.sleep(rng.random() * 0.25)
        p.kill()
        p.wait()
        written = checkpoint.stat().st_mtime_ns
        if (r / 'summary.json').exists():
            break
    if not (r / 'summary.json').exists():
        assert main(['train', '--resume', str(r), '--trust']) == 0
    assert same_on_disk(tmp_path / 'whole', r, tmp_path / 'mw', tmp_path / 'm')


class Stops:
    "Stops a run, or breaks it off, at a step"

    def __init__(self, run, step, broken=False):
        self.run, self.step, self.broken = run, step, broken

    def report(self, line):
        pass

    def tick(self, rows):
        if self.run.agent.journal.steps < self.step:
            return
        if self.broken:
            raise KeyboardInterrupt
        self.run.stop = True


@pytest.mark.slow
def test_too_few_spare_rows_are_told_and_it_goes_on(tmp_path):
    "Rows overwritten since the checkpoint: how many, and what helps; by default none is missing"
    for spare in 10, 0:
        d, m = tmp_path / f'r{spare}', tmp_path / f'm{spare}'
        changes = {**SMALL, 'save_every': 200, 'memory_spare': spare, 'memory_path': str(m)}
        run = start(recipe('cartpole', **changes), d)
        with pytest.raises(KeyboardInterrupt):
            run.train(Stops(run, 550, True))
        if spare:
            with pytest.warns(UserWarning, match=r'\d+ rows .* overwritten .*larger spare'):
                again = resume(d, trust=True)
            assert 0 < len(again.agent.memory.memory) < 250
        else:
            again = resume(d, trust=True)
        assert again.train() and len(open_memory(m)) == 250


def test_two_runs_one_after_the_other(tmp_path, capsys):
    """The second one goes on with the rows; the first one plays.

    A third one is refused while the second has the memory."""
    on_disk = dict(SMALL, memory_path=str(tmp_path / 'm'))
    one = start(recipe('cartpole', **on_disk), tmp_path / 'one')
    assert one.train(Stops(one, 400)) is None
    n = open_memory(tmp_path / 'm').inserted
    two = start(recipe('cartpole', **on_disk, seed=1), tmp_path / 'two')
    assert two.agent.memory.memory.inserted == n
    before = files(tmp_path / 'one')
    third = ['train', 'cartpole', '--memory', tmp_path / 'm', '--out', tmp_path / 'three']
    assert 'in use' in here(capsys, *third, *options(SMALL), status=2)
    assert not (tmp_path / 'three').exists() and files(tmp_path / 'one') == before
    assert 'after 400 steps' in here(capsys, 'eval', tmp_path / 'one', '--episodes', 2)
    assert two.train() and open_memory(tmp_path / 'm').inserted == n + 800


def test_other_rows_are_refused(tmp_path):
    "A smaller memory before anything begins, other columns by the first block; the rows stay"
    one = start(recipe('cartpole', **SMALL, memory_path=str(tmp_path / 'm')), tmp_path / 'one')
    assert one.train(Stops(one, 200)) is None
    for name, changes, said in (
        ('two', dict(max_sz=200), 'a different max_sz or spare'),
        ('three', dict(wrappers='Observe([0, 1])'), "columns differ .*'state'"),
    ):
        other = recipe('cartpole', **{**SMALL, **changes}, memory_path=str(tmp_path / 'm'))
        with pytest.raises(FastrlError, match=said):
            start(other, tmp_path / name).train()
    assert not (tmp_path / 'two').exists()
    again = resume(tmp_path / 'one', trust=True)
    assert again.train(Stops(again, 400)) is None


def test_a_strangers_config_names_no_directory_of_mine(tmp_path, capsys, monkeypatch):
    "Resuming refuses any path that it names; evaluating opens nothing; `store` takes no path"
    monkeypatch.chdir(tmp_path)
    run = start(recipe('cartpole', **SMALL, memory_path='theirs'), tmp_path / 'r')
    assert run.train(Stops(run, 0)) is None  # before its first row
    mine = Timeline(50, Rows('mine'))
    mine.add(rows_of(20))
    mine.close()
    config = json.loads(Path('r/config.json').read_text())
    for path in 'mine', 'new', str(tmp_path):
        config['settings']['memory_path'] = path
        Path('r/config.json').write_text(json.dumps(config))
        before = files(tmp_path)
        said = here(capsys, 'train', '--resume', 'r', status=2)
        assert f'memory_path={path}' in said
        here(capsys, 'eval', 'r', '--episodes', 1)
        assert files(tmp_path) == before and not Path('new').exists()
    config['settings'].update(memory_path='none', store='Rows(mine)')
    Path('r/config.json').write_text(json.dumps(config))
    for line in (['train', '--resume', 'r'], ['eval', 'r']):
        assert "multiple values for argument 'path'" in here(capsys, *line, status=2)


def test_a_memory_that_was_moved_is_found(tmp_path, capsys, monkeypatch):
    "With --memory; what is missing is named"
    monkeypatch.chdir(tmp_path)
    line = 'train', 'cartpole', '--memory', 'm', '--out', 'r'
    here(capsys, *line, *options({**SMALL, 'steps': 300}))
    Path('m').rename('other')
    said = here(capsys, 'train', '--resume', 'r', '--steps', 450, status=2)
    assert 'memory_path=m' in said
    here(capsys, 'train', '--resume', 'r', '--steps', 450, '--memory', 'other')
    assert json.loads(Path('r/config.json').read_text())['settings']['memory_path'] == 'other'
    assert open_memory('other').inserted == 450


def test_a_checkpoint_of_a_memory_on_disk_has_no_rows(tmp_path):
    "It is as large with many rows as with few, but for the returns of episodes"
    sizes = []
    for steps in 150, 750:
        more = dict(max_sz=30_000, memory_path=str(tmp_path / f'm{steps}'))
        run = start(recipe('cartpole', **{**SMALL, **more}), tmp_path / f'r{steps}')
        assert run.train(Stops(run, steps)) is None
        sizes.append((run.out / 'checkpoint.ckpt').stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 5_000


def test_killed_before_its_first_row(tmp_path):
    "The directory has no memory; the run goes on, and so does a new run there"
    for i in range(2):
        on_disk = recipe('cartpole', **SMALL, memory_path=str(tmp_path / 'm'))
        run = start(on_disk, tmp_path / f'r{i}')
        with pytest.raises(KeyboardInterrupt):
            run.train(Stops(run, 0, True))
        assert sorted(p.name for p in (tmp_path / 'm').iterdir()) == ['writer']
    assert (
        resume(tmp_path / 'r1', trust=True).train() and open_memory(tmp_path / 'm').inserted == 800
    )


def test_shards_on_disk_fit_or_are_refused(tmp_path):
    "An error names another number of shards"
    m = str(tmp_path / 'm')
    rows = Steps.cat(list(GymStepper('CartPole-v1', seed=0).header(20)))
    for i in 0, 1:
        with closing(Timeline(1_000, Rows(tmp_path / f'm/shard-{i}'))) as t:
            t.add(rows)
    small = dict(shards=2, max_sz=2_000, warmup=200, steps=3_000)
    start(recipe('cartpole', **small, memory_path=m), tmp_path / 'r')
    for changes, said in (
        ({**small, 'shards': 3}, 'a different number; got 3; expected 2'),
        ({**small, 'shards': 0}, 'contains files, but no memory'),
    ):
        with pytest.raises(FastrlError, match=said):
            start(recipe('cartpole', **changes, memory_path=m), tmp_path / 'other')
