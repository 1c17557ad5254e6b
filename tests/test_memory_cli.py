"""`fastrl-replay memory`, and runs whose memory lies on disk: what it prints; what a SIGKILL costs."""

import json, os, random, shutil, subprocess, time
from contextlib import closing
from pathlib import Path

import numpy as np, pytest
from gymnasium import spaces

from fastrl_replay.look.sample import contents
from fastrl_replay.all import *
from fastrl_replay.cli import main
from fastrl_replay.steps.errors import Explained
from fastrl_replay.app.recipe_settings import recipe
from fastrl_replay.app.recipes import spare_rows
from fastrl_replay.steps.settings import SettingsError
from fastrl_replay.app.saved_policies import load_checkpoint
from fastrl_replay.app.run_files import read_metrics, run_of
from fastrl_replay.app.runs import resume, start
from fastrl_replay.app.offline import open_memory
from fastrl_replay.testing import same
from test_cli import command, here, no_clock


def story(n, envs=3, seed=0, first=0):
    "Rows of environments in any order: episodes of any length, some broken off, nested states"
    rng = np.random.default_rng(seed)
    rows = np.zeros(
        n,
        step_dtype(
            spaces.Dict(a=spaces.Box(-9, 9, (2,)), b=spaces.Discrete(5)), spaces.Discrete(3)
        ),
    )
    at = {e: [1 + first, 0, 0.0] for e in range(envs)}  # episode, step, return
    for r in rows:
        e = int(rng.integers(envs))
        s = at[e]
        s[1], reward = s[1] + 1, float(rng.integers(-3, 9))
        s[2] += reward
        r['env_id'], r['episode_n'], r['step_n'], r['reward'], r['total_reward'] = (
            e,
            s[0],
            s[1],
            reward,
            s[2],
        )
        r['state']['a'], r['state']['b'] = rng.normal(size=2), rng.integers(5)
        r['terminated'], r['truncated'] = rng.random() < 0.15, rng.random() < 0.05
        if r['terminated'] or r['truncated'] or rng.random() < 0.05:
            at[e] = [s[0] + 1, 0, 0.0]
    return Steps(rows)


def naive(rows):
    "The facts about episodes, a row at a time: of rows that are there, oldest first"
    lists, facts = {}, dict(ended=0, whole=0, running=0, broken_off=0)
    for r in rows:
        lists.setdefault((int(r['env_id']), int(r['episode_n'])), []).append(r)
    newest = {e: max(n for f, n in lists if f == e) for e in {e for e, _ in lists}}
    lengths, returns = [], []
    for (e, n), of in lists.items():
        if of[-1]['terminated'] or of[-1]['truncated']:
            facts['ended'] += 1
            facts['whole'] += of[0]['step_n'] == 1
            lengths.append(of[-1]['step_n']), returns.append(of[-1]['total_reward'])
        else:
            facts['running' if n == newest[e] else 'broken_off'] += 1
    return dict(environments=len(newest), episodes=facts, lengths=lengths, returns=returns)


# ---- what is told ----


def test_sequences_are_told_when_the_ring_has_come_round_many_times(tmp_path):
    "None of rows that were overwritten; the same after a kill, and in a memory that an older version has left"

    def make():
        return SequenceReplay(
            bs=2, max_sz=53, length=5, burn_in=1, overlap=2, store=Rows(tmp_path / 'm'), seed=0
        )

    def told(replay):
        draw, view = contents(open_memory(tmp_path / 'm'))['draw'], replay.view
        return dict(zip(draw['key'].tolist(), draw['priority'].tolist())) == dict(
            zip(view.key_of(view.places[1]).tolist(), replay.sampler.kept().tolist())
        )

    replay = make()
    for first in range(0, 400, 20):
        replay.add(story(20, envs=2, first=first))
        batch = replay.sample()
        replay.update_priorities(batch.index, np.full((2, 4), first))
        assert told(replay)
    replay.memory.place.lasting('priorities', np.float64)[:] += (
        1  # as all slots were, sooner or later
    )
    replay.memory.place.leave()
    replay = make()
    assert len(replay) and told(replay)
    replay.close()


def files(d):
    return {
        p.relative_to(d): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in d.rglob('*')
        if p.is_file()
    }


def test_the_command_changes_nothing(tmp_path, capsys, monkeypatch):
    "It prints, and writes a page; the directory is as it was, to the last byte and time"
    monkeypatch.chdir(tmp_path)
    replay = PrioritizedReplay(bs=4, max_sz=90, store=Rows('m'))
    replay.add(story(120))
    replay.close()
    before = files(tmp_path / 'm')
    said = here(capsys, 'memory', 'm', '--html', 'm.html')
    assert '90 rows' in said and 'keys 30 to 119' in said and 'm.html' in said
    assert files(tmp_path / 'm') == before and sorted(p.name for p in Path('.').iterdir()) == [
        'm',
        'm.html',
    ]


# ---- errors ----


def broken(d, how):
    meta = json.loads((d / 'meta.json').read_text())
    data = d / meta['data']
    if how == 'no meta':
        (d / 'meta.json').unlink()
        (d / 'notes.txt').write_text('x')
    if how == 'not JSON':
        (d / 'meta.json').write_text('{')
    if how == 'another version':
        (d / 'meta.json').write_text(json.dumps({**meta, 'version': 99}))
    if how == 'another store':
        (d / 'meta.json').write_text(json.dumps({**meta, 'store': {'kind': 'os.system'}}))
    if how == 'odd settings':
        (d / 'meta.json').write_text(
            json.dumps({**meta, 'store': {'kind': 'Rows', 'path': '/etc'}})
        )
    if how == 'no store':
        (d / 'meta.json').write_text(json.dumps({**meta, 'store': 5}))
    if how == 'short rows':
        os.truncate(data / 'rows', 100)
    if how == 'short draws':
        os.truncate(data / 'drawn', 100)
    if how == 'short priorities':
        os.truncate(data / 'priorities', 8)
    if how == 'counters':
        (data / 'counters').write_bytes(b'\xff' * 512)
    if how == 'gone':
        shutil.rmtree(data)


HOW = [
    'no meta',
    'not JSON',
    'another version',
    'another store',
    'odd settings',
    'no store',
    'short rows',
    'short draws',
    'short priorities',
    'counters',
    'gone',
]


@pytest.mark.parametrize('how', HOW)
def test_what_is_no_memory_or_damaged_is_named(how, tmp_path, capsys):
    "Status 2, one line with the place, and nothing is written"
    replay = PrioritizedReplay(bs=4, max_sz=90, store=Rows(tmp_path / 'm'))
    replay.add(story(20))
    replay.close()
    broken(tmp_path / 'm', how)
    before = files(tmp_path / 'm')
    for option in [], ['--html', str(tmp_path / 'm.html')]:
        capsys.readouterr()
        assert main(['memory', str(tmp_path / 'm'), *option]) == 2, how
        out, err = capsys.readouterr()
        assert str(tmp_path) in err and err.count('\n') == 1 and 'Traceback' not in err and not out
    assert files(tmp_path / 'm') == before and not (tmp_path / 'm.html').exists()


def test_what_is_typed_wrong_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('empty').mkdir()
    Path('file').write_text('x')
    for line, said in {
        'memory': 'DIR',
        'memory none': 'no such directory',
        'memory empty': 'no row was ever added',
        'memory file': 'file',
        'memry x': "did you mean 'memory'",
        'memory empty --htlm': "did you mean '--html'",
    }.items():
        assert main(line.split()) == 2 and said in capsys.readouterr().err, line
    assert [p.name for p in Path('empty').iterdir()] == []
    with pytest.raises(SystemExit) as e:
        main(['memory', '--help'])
    assert e.value.code == 0 and '--export' in capsys.readouterr().out


# ---- frames ----


def pixels(n, stack=2, env=0):
    rows = np.zeros(
        n,
        step_dtype(
            spaces.Dict(
                see=spaces.Box(0, 255, (stack, 16, 16), np.uint8), at=spaces.Box(-9, 9, (2,))
            ),
            spaces.Discrete(3),
        ),
    )
    frames = np.random.default_rng(0).integers(0, 256, (n + stack, 16, 16))
    for j in range(stack):
        rows['state']['see'][:, j], rows['next_state']['see'][:, j] = (
            frames[j : n + j],
            frames[1 + j : n + 1 + j],
        )
    rows['step_n'], rows['episode_n'], rows['env_id'] = (
        np.arange(n) % 10 + 1,
        np.arange(n) // 10 + 1,
        env,
    )
    rows['terminated'], rows['total_reward'] = rows['step_n'] == 10, np.arange(n)
    rows['state']['at'] = np.arange(n)[:, None]
    return Steps(rows)


# ---- runs with their memory on disk ----

SMALL = dict(
    steps=1_600,
    warmup=200,
    train_every=7,
    max_sz=500,
    network=16,
    bs=16,
    eval_every=700,
    eval_episodes=3,
    save_every=300,
    report_every=200,
)
RUNS = {
    'cartpole': SMALL,
    'cartpole-per': SMALL,
    'cartpole-rank': SMALL,
    'cartpole-r2d2': dict(SMALL, train_every=1, network=8, bs=4, length=8, burn_in=2, overlap=4),
}

RUNS['catch'] = dict(
    SMALL,
    envs=2,
    steps=800,
    warmup=100,
    max_sz=200,
    network='conv 8',
    store='Frames(stack=2, compress=lz4)',
    bs=4,
    train_every=1,
)


def options(changes):
    return ['--set', *(f'{k}={v}' for k, v in changes.items())]


def plain(x):
    "A state without what says which directory its memory is in, or refers to its files"
    if isinstance(x, dict):
        return {
            k: plain(v)
            for k, v in x.items()
            if k not in ('id', 'directory', 'rewound', 'wall', 'reported', 'path')
        }
    return [plain(v) for v in x] if isinstance(x, list) else x


def same_on_disk(a, b, ma, mb):
    "The same metrics, checkpoints, rows and priorities?"
    pa, pb = (plain(load_checkpoint(d / 'checkpoint.pt')) for d in (a, b))
    for p in pa, pb:
        sampler = p['agent']['pipe']['above']['own']['sampler']
        if isinstance(sampler.get('priorities'), str):
            del sampler['priorities']  # a name of files, that are compared below
        del p['run']  # where it lies
    ra, rb = open_memory(ma), open_memory(mb)
    assert ra.keys.tolist() == rb.keys.tolist() and ra[:] == rb[:]
    assert (ra.walk(ra.keys, [1, -1]) == rb.walk(rb.keys, [1, -1])).all()
    x, y = ((contents(m)["draw"] or {}).get("priority") for m in (ra, rb))
    assert (x is None) == (y is None) and (x is None or np.array_equal(x, y))
    return no_clock(read_metrics(a)) == no_clock(read_metrics(b)) and same(pa, pb)


@pytest.mark.parametrize(
    'name', [pytest.param(n, marks=pytest.mark.slow) if n != 'cartpole-per' else n for n in RUNS]
)
def test_a_run_on_disk_is_the_run_in_main_memory(name, tmp_path):
    "To the last digit"
    for d, more in ('ram', {}), ('disk', dict(memory_path=str(tmp_path / 'm'))):
        start(recipe(name, **RUNS[name], **more), tmp_path / d).train()
    assert no_clock(read_metrics(tmp_path / 'ram')) == no_clock(read_metrics(tmp_path / 'disk'))


@pytest.mark.slow
@pytest.mark.parametrize('name,kills', [('cartpole', 2), *((name, 8) for name in RUNS)])
def test_kill_9_costs_nothing_but_time(name, kills, tmp_path):
    "SIGKILL at a random moment after a checkpoint, several times; resumed, all is as in a run that was left alone"
    start(recipe(name, **RUNS[name], memory_path=str(tmp_path / 'mw')), tmp_path / 'whole').train()
    line, rng = (
        [
            'train',
            name,
            '--out',
            str(tmp_path / 'r'),
            '--memory',
            str(tmp_path / 'm'),
            *options(RUNS[name]),
        ],
        random.Random(f'{name} {kills}'),
    )
    for _ in range(kills):
        before = (
            (tmp_path / 'r/checkpoint.pt').stat().st_mtime_ns
            if (tmp_path / 'r/checkpoint.pt').exists()
            else 0
        )
        p = subprocess.Popen(
            command(*line), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        line = ['train', '--resume', str(tmp_path / 'r')]
        while p.poll() is None and not (
            (tmp_path / 'r/checkpoint.pt').exists()
            and (tmp_path / 'r/checkpoint.pt').stat().st_mtime_ns > before
        ):
            time.sleep(0.005)
        time.sleep(rng.random() * 0.25)
        p.kill()
        said = p.communicate()[0]
        assert p.returncode == -9 or (tmp_path / 'r/summary.json').exists(), said
        if (tmp_path / 'r/summary.json').exists():
            break
    if not (tmp_path / 'r/summary.json').exists():
        assert main(line) == 0
    assert same_on_disk(tmp_path / 'whole', tmp_path / 'r', tmp_path / 'mw', tmp_path / 'm')


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


def test_too_few_spare_rows_are_told_and_it_goes_on(tmp_path):
    "They were overwritten since the checkpoint: how many, and what helps; with the default none is missing"
    for spare in 20, 0:
        d, m = tmp_path / f'r{spare}', tmp_path / f'm{spare}'
        run = start(
            recipe(
                'cartpole', **{**SMALL, 'save_every': 400}, memory_spare=spare, memory_path=str(m)
            ),
            d,
        )
        with pytest.raises(KeyboardInterrupt):
            run.train(Stops(run, 1_100, True))
        if spare:
            with pytest.warns(
                UserWarning,
                match=r'\d+ of the rows that were in memory at this checkpoint have been overwritten since.*larger spare',
            ):
                again = resume(d)
            assert 0 < len(again.agent.memory.memory) < 500
        else:
            again = resume(d)
        assert again.train() and len(open_memory(m)) == 500


def test_spare_rows_suffice():
    "As many as come between two checkpoints, whatever the recipe"
    for name in RUNS:
        s = recipe(name, **RUNS[name]).settings
        assert spare_rows(s) >= s['save_every'] + s['train_every'] + s['envs'] * (s['n_step'] + 1)
        assert spare_rows({**s, 'memory_spare': 3}) == 3


def test_two_runs_one_after_the_other(tmp_path, capsys):
    "The second one goes on with the rows; the first can't be resumed, but plays; a third one is refused while it trains"
    on_disk = dict(SMALL, memory_path=str(tmp_path / 'm'))
    one = start(recipe('cartpole', **on_disk), tmp_path / 'one')
    assert one.train(Stops(one, 800)) is None
    n = open_memory(tmp_path / 'm').inserted
    two = start(recipe('cartpole', **on_disk, seed=1), tmp_path / 'two')
    assert two.found == 500 and two.agent.memory.memory.inserted == n
    before = files(tmp_path / 'one')
    for line in (
        [
            'train',
            'cartpole',
            '--memory',
            tmp_path / 'm',
            '--out',
            tmp_path / 'three',
            *options(SMALL),
        ],
        ['train', '--resume', tmp_path / 'one'],
    ):
        said = here(capsys, *line, status=2)
        assert 'in use' in said or 'of another run by now' in said, said
    assert not (tmp_path / 'three').exists() and files(tmp_path / 'one') == before
    assert 'after 800 steps' in here(capsys, 'eval', tmp_path / 'one', '--episodes', 2)
    assert two.train() and open_memory(tmp_path / 'm').inserted == n + 1600
    assert run_of(tmp_path / 'm')['directory'] == str(tmp_path / 'two')
    shutil.rmtree(tmp_path / 'm')
    assert 'mean return' in here(
        capsys, 'eval', tmp_path / 'two', '--episodes', 2
    )  # it needs no rows


@pytest.mark.parametrize(
    'changes, said',
    [
        (dict(env='Acrobot-v1'), 'rows of another environment; got CartPole-v1'),
        (dict(observe=(0, 1)), "rows of another kind: column 'state'"),
        (dict(n_step=3), "rows of another kind: column 'discount'"),
        (dict(max_sz=400), 'larger'),
    ],
)
def test_other_rows_are_refused_before_anything_begins(changes, said, tmp_path):
    one = start(recipe('cartpole', **SMALL, memory_path=str(tmp_path / 'm')), tmp_path / 'one')
    assert one.train(Stops(one, 400)) is None
    before = {
        k: v[0] for k, v in files(tmp_path / 'm').items() if k.name not in ('writer', 'counters')
    }
    with pytest.raises(Explained, match=said):
        start(
            recipe('cartpole', **{**SMALL, **changes}, memory_path=str(tmp_path / 'm')),
            tmp_path / 'two',
        )
    assert (
        not (tmp_path / 'two').exists()
        and {
            k: v[0]
            for k, v in files(tmp_path / 'm').items()
            if k.name not in ('writer', 'counters')
        }
        == before
    )
    again = resume(tmp_path / 'one')
    assert again.train(Stops(again, 800)) is None


def test_rows_of_another_environment_are_refused(tmp_path):
    "Of the same columns"
    two = dict(SMALL, memory_path=str(tmp_path / 'm'))
    one = start(recipe('cartpole', **{**two, 'env': 'CartPole-v0'}), tmp_path / 'one')
    assert one.train(Stops(one, 400)) is None
    with pytest.raises(
        SettingsError, match='rows of another environment; got CartPole-v0; expected CartPole-v1'
    ):
        start(recipe('cartpole', **two), tmp_path / 'two')


def test_a_strangers_config_names_no_directory_of_mine(tmp_path, capsys, monkeypatch):
    "Resumed, it is refused, whatever it names; evaluated, nothing is opened; a path in `store` is none"
    monkeypatch.chdir(tmp_path)
    run = start(recipe('cartpole', **SMALL, memory_path='theirs'), tmp_path / 'r')
    assert (
        run.train(Stops(run, 0)) is None
    )  # before its first row: its checkpoint has no memory's name
    mine = Timeline(50, Rows('mine'))
    mine.add(story(20))
    mine.close()
    config = json.loads(Path('r/config.json').read_text())
    for path in 'mine', 'new', str(tmp_path), '../x':
        config['settings']['memory_path'] = path
        Path('r/config.json').write_text(json.dumps(config))
        before = files(tmp_path)
        assert 'is not the memory of this run' in here(capsys, 'train', '--resume', 'r', status=2)
        here(capsys, 'eval', 'r', '--episodes', 1)
        assert files(tmp_path) == before and not Path('new').exists()
    config['settings'].update(memory_path='none', store='Rows(mine)')
    Path('r/config.json').write_text(json.dumps(config))
    for line in (['train', '--resume', 'r'], ['eval', 'r']):
        assert 'says where rows lie' in here(capsys, *line, status=2)
    assert files(tmp_path / 'mine') == {
        k.relative_to('mine'): v for k, v in before.items() if k.parts[0] == 'mine'
    }


def test_a_memory_that_was_moved_is_found(tmp_path, capsys, monkeypatch):
    "With --memory; a relative path is seen from the working directory, and what is missing is named with both"
    monkeypatch.chdir(tmp_path)
    assert 'its memory is in' in here(
        capsys,
        'train',
        'cartpole',
        '--memory',
        '5',
        '--out',
        'r',
        *options({**SMALL, 'steps': 600}),
    )
    assert json.loads(Path('r/config.json').read_text())['settings']['memory_path'] == './5'
    (tmp_path / '5').rename(tmp_path / 'other')
    said = here(capsys, 'train', '--resume', 'r', '--steps', 900, status=2)
    assert str(tmp_path / '5') in said and '--memory DIR, where it is by now' in said
    here(capsys, 'train', '--resume', 'r', '--steps', 900, '--memory', 'other')
    assert (
        json.loads(Path('r/config.json').read_text())['settings']['memory_path'] == 'other'
        and open_memory('other').inserted == 900
    )
    assert 'is in its checkpoint' in here(
        capsys, 'train', '--resume', _ram(), '--memory', 'other', status=2
    )


def _ram():
    run = start(recipe('cartpole', **SMALL), 'ram')
    run.train(Stops(run, 100))
    return 'ram'


def test_saving_copies_no_rows(tmp_path):
    "A checkpoint of a memory on disk is as large with many rows as with few; with its rows in main memory it grows by all of them"
    size = {}
    for where in 'ram', 'disk':
        run = start(
            recipe(
                'cartpole',
                **{**SMALL, 'max_sz': 30_000},
                **(dict(memory_path=str(tmp_path / 'm')) if where == 'disk' else {}),
            ),
            tmp_path / where,
        )
        run.began = time.perf_counter()
        block = next(iter(run.agent.memory.source)).rows[:1]
        for n in 10, 20_000:
            rows = np.repeat(block, n)
            rows['step_n'] = np.arange(n) + 1
            run.agent.memory.add(Steps(rows))
            run.save()
            size[where, n] = (tmp_path / where / 'checkpoint.pt').stat().st_size
        run.agent.close_memory()
    assert (
        size['ram', 20_000] > size['ram', 10] + 20_000 * 60
        and size['disk', 20_000] < size['disk', 10] + 1_000
    )


def test_killed_before_its_first_row(tmp_path):
    "There is a directory that says whose memory will be in it, and no memory: it goes on, and so does a new run there"
    for i in range(2):
        run = start(
            recipe('cartpole', **SMALL, memory_path=str(tmp_path / 'm')), tmp_path / f'r{i}'
        )
        with pytest.raises(KeyboardInterrupt):
            run.train(Stops(run, 0, True))
        assert sorted(p.name for p in (tmp_path / 'm').iterdir()) == ['run', 'writer']
    again = resume(tmp_path / 'r1')
    assert again.train() and open_memory(tmp_path / 'm').inserted == 1600
    whole = start(recipe('cartpole', **SMALL, memory_path=str(tmp_path / 'mw')), tmp_path / 'whole')
    assert whole.train() and same_on_disk(
        tmp_path / 'whole', tmp_path / 'r1', tmp_path / 'mw', tmp_path / 'm'
    )


SHARDED = dict(
    shards=2,
    save_every=600,
    report_every=300,
    warmup=200,
    eval_every=10**6,
    steps=3_000,
    max_sz=2_000,
)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['cartpole', 'cartpole-per'])
def test_kill_9_of_a_run_with_shards_on_disk_costs_nothing_but_time(name, tmp_path):
    "The parent is killed after a checkpoint; resumed, rows and metrics are those of a run that was left alone; it plays, and a new run goes on with the rows"
    start(recipe(name, **SHARDED, memory_path=str(tmp_path / 'mw')), tmp_path / 'whole').train()
    r, m = tmp_path / 'r', tmp_path / 'm'
    p = subprocess.Popen(
        command('train', name, '--out', str(r), '--memory', str(m), *options(SHARDED)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    while p.poll() is None and not (r / 'checkpoint.pt').exists():
        time.sleep(0.01)
    time.sleep(0.3)
    p.kill()
    p.communicate()
    assert not (r / 'summary.json').exists()

    def free():  # shards notice that their parent has gone
        try:
            return resume(r)
        except SettingsError as e:
            if 'another process' not in str(e):
                raise

    while (run := free()) is None:
        time.sleep(0.1)
    run.train()

    def told(d):
        return [
            {k: v for k, v in line.items() if k not in ('shards', 'waited_s')}
            for line in no_clock(read_metrics(d))
        ]

    assert told(r) == told(tmp_path / 'whole')
    for i in 0, 1:
        assert open_memory(m / f'shard-{i}')[:] == open_memory(tmp_path / f'mw/shard-{i}')[:]
    assert main(['eval', str(r), '--episodes', '1']) == 0
    assert start(recipe(name, **SHARDED, memory_path=str(m)), tmp_path / 'next').found == 2 * 1_000


def test_shards_on_disk_fit_or_are_refused(tmp_path):
    "Another number of shards, other columns, a shard that is in use: before any process begins; else it is said how many rows there are"
    step, m = GymStepper('CartPole-v1', seed=0), str(tmp_path / 'm')
    rows = Steps(np.concatenate([b.rows for b, _ in zip(step, range(20))]))
    for i in 0, 1:
        with closing(Timeline(1_000, Rows(tmp_path / f'm/shard-{i}'))) as t:
            t.add(rows)
    small = dict(shards=2, max_sz=2_000, warmup=200, steps=3_000)
    run = start(recipe('cartpole', **small, memory_path=m), tmp_path / 'r')
    assert run.found == 40 and json.loads((tmp_path / 'm/run').read_text())['env'] == 'CartPole-v1'
    with pytest.raises(
        SettingsError, match='of another number; got 3; expected 2. Remedy: --shards 2'
    ):
        start(recipe('cartpole', **{**small, 'shards': 3}, memory_path=m), tmp_path / 'a')
    with pytest.raises(Explained, match='is not a memory, and not empty; got .*shard-0, shard-1'):
        start(recipe('cartpole', memory_path=m), tmp_path / 'b')
    with pytest.raises(
        SettingsError, match='of another number; got 2; expected 1. Remedy: --shards 0'
    ):
        start(recipe('cartpole', **small, memory_path=f'{m}/shard-0'), tmp_path / 'c')
    with pytest.raises(SettingsError, match="shard-0 has rows of another kind: column 'discount'"):
        start(recipe('cartpole-per', **small, memory_path=m), tmp_path / 'd')
    with pytest.raises(SettingsError, match='has rows of another environment; got CartPole-v1'):
        start(recipe('cartpole', **small, env='Acrobot-v1', memory_path=m), tmp_path / 'e')
    t = Timeline(1_000, Rows(tmp_path / 'm/shard-1'))
    t.add(rows)
    with closing(t), pytest.raises(Explained, match='shard-1 is in use; got this process itself'):
        start(recipe('cartpole', **small, memory_path=m), tmp_path / 'f')


def test_looking_while_another_process_adds_rows(tmp_path, monkeypatch):
    "Rows that come between two looks of one call are not asked for"
    from fastrl_replay.look import sample

    rows, taken = story(400), sample.rows_of
    with closing(Timeline(1_000, Rows(tmp_path / 'm'))) as writer:
        writer.add(rows[:300])
        reader = Timeline(1_000, Rows(tmp_path / 'm', mode='r'))

        def then_more(timeline, *args):
            found = taken(timeline, *args)
            if timeline is reader:
                writer.add(rows[300:])
            return found

        monkeypatch.setattr(sample, 'rows_of', then_more)
        seen = contents(reader)
        assert seen['rows'] == len(seen['row']['key']) == 300 and seen['inserted'] == 300
