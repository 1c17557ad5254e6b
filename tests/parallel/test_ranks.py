"""Several learners: equal to one with whole batches, weights of one memory, one log, checkpoints of all, ranks that go."""

import json, os, re, signal, socket, subprocess, sys, time
from pathlib import Path

import numpy as np, pytest, torch
from fastrl_replay.app.recipe_settings import recipe
from fastrl_replay.app.recipes import Agent
from fastrl_replay.app.runs import reopen
from fastrl_replay.parallel.ranks import Ranks
from fastrl_replay.steps.errors import ArgumentError

WORK = Path(__file__).parent.parent / 'rank_work.py'
ENV = {
    k: v
    for k, v in os.environ.items()
    if k not in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
}
ENV['PYTHONPATH'] = os.pathsep.join([str(WORK.parent.parent), ENV.get('PYTHONPATH', '')])


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def begin(n, *command):
    "The same command in n ranks, without a launcher"
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, '-W', 'ignore', *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(
                ENV,
                RANK=str(r),
                WORLD_SIZE=str(n),
                LOCAL_RANK=str(r),
                MASTER_ADDR='127.0.0.1',
                MASTER_PORT=str(port),
            ),
        )
        for r in range(n)
    ]


def ended(ps, seconds=120):
    "Exit status, output, errors of each"
    try:
        return [(*p.communicate(timeout=seconds), p.returncode) for p in ps]
    finally:
        for p in ps:
            if p.poll() is None:
                p.kill()
                p.wait()


def work(n, *args):
    "What ranks say of themselves"
    done = ended(begin(n, str(WORK), *map(str, args)))
    for out, err, rc in done:
        assert rc == 0, err
    return [json.loads(out) for out, _, _ in done if out]


def train(n, *args, cwd, ok=True, **more):
    "A recipe by torchrun"
    torchrun = [
        sys.executable,
        '-W',
        'ignore',
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc-per-node',
        str(n),
        *more.get('launch', ()),
    ]
    done = subprocess.run(
        [*torchrun, '-m', 'fastrl_replay', 'train', *map(str, args)],
        cwd=cwd,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert (done.returncode == 0) == ok, done.stderr
    return done


# ---- equal to one ----


@pytest.mark.parametrize('kind', ['dqn', 'sac', 'td3'])
def test_two_halves_are_one_whole(kind):
    "Number for number: networks, losses, norms, with weights and with a limit of the norm that counts"
    for said in work(2, 'equal', kind):
        assert said['off'] < 1e-6 and said['records'] < 1e-5 and said['moved'] > 1e-3, said


def test_halves_of_unequal_steps_are_one_whole():
    "Sequences, whose loss is divided by the steps that count"
    found = work(2, 'sequences')
    assert all(s['off'] < 1e-5 for s in found)
    assert len(set(found[0]['lengths'])) > 1


def test_in_a_process_group_that_is_there():
    "Of the program itself, or of another library"
    assert all(said['off'] < 1e-6 for said in work(2, 'equal', 'dqn', 'guest'))
    ps = begin(2, str(WORK), 'lost', 'kill', 'guest')
    (_, err, rc), _ = ended(ps)
    assert rc == 1 and 'gone: rank 1;' in err, err


@pytest.mark.parametrize('norm', ['batch', 'memory'])
def test_weights_are_those_of_one_memory(norm):
    "(q)**-β for the probability q with which a row was drawn from its memory, over the largest"
    (found,), beta = work(2, 'weights', norm), 0.6
    p = [np.array(td) ** 0.7 for td in found['td']]
    q = [x / x.sum() / 2 for x in p]
    assert p[1].sum() > 5 * p[0].sum()
    for both in found['said']:
        raw = [q[r][keys] ** -beta for r, (keys, _) in enumerate(both)]
        most = max(x.max() for x in (raw if norm == 'batch' else [x**-beta for x in q]))
        for x, (_, weights) in zip(raw, both):
            np.testing.assert_allclose(weights, x / most, rtol=1e-5)


def test_rounds_end_together():
    "Rows of n steps come at other times in each rank: all have equally many rows and updates, and one journal"
    (found,) = work(2, 'rounds', 0, 1001)
    a, b = found['said']
    for k in 'n', 'inserted', 'steps', 'returns', 'net':
        assert a[k] == b[k], k
    assert a['n'] == (a['inserted'] - 40) // 2 and a['steps'] >= 1001 and len(a['returns']) > 10
    assert a['state'] != b['state'] and (a['envs'], b['envs']) == ([0, 1], [2, 3])


# ---- ranks that go ----


@pytest.mark.parametrize(
    'n, how', [(2, 'kill'), (3, 'kill'), (2, 'stop'), (2, 'error'), (2, 'leave')]
)
def test_a_rank_that_goes_is_named(n, how):
    "Rank 1 is killed, stopped, fails or ends: the others end soon, and name it"
    ps = begin(n, str(WORK), 'lost', how)
    try:
        for r, p in enumerate(ps):
            if r == 1:
                continue
            out, err = p.communicate(timeout=60)
            assert (
                p.returncode == 1
                and f'rank {r} of {n} waits for the others; gone: rank 1; got' in err
            ), err
            assert 'begin again from the last checkpoint' in err
    finally:
        for p in ps:
            p.kill()
            p.wait()


@pytest.mark.parametrize(
    'what, said',
    [
        ('networks', r'join: networks; got \[\d+, 4\] torch.float32 in rank'),
        ('memory', 'join: chain; got'),
        ('ratio', 'join: ratio; got'),
        *(
            (k, rf'join: .*{k}')
            for k in ('lr', 'tau', 'target_every', 'gamma', 'n', 'alpha', 'optimizer')
        ),
        ('schedule', 'join: .*lr'),
    ],
)
def test_ranks_that_differ_are_told_at_once(what, said):
    "Both of them; one was ended by gloo with a signal, or both waited for half an hour"
    began = time.monotonic()
    for out, err, rc in ended(begin(2, str(WORK), 'differs', what), 60):
        assert rc == 1 and re.search(said, err), err
    assert time.monotonic() - began < 60


# ---- recipes ----


def nets(out, parts):
    "The networks of each rank in a checkpoint"
    from fastrl_replay.app.saved_policies import load_checkpoint

    lead = load_checkpoint(out / 'checkpoint.pt')
    return [
        lead['agent'],
        *(load_checkpoint(p) for p in sorted((out / 'ranks' / lead['parts']).glob('*.pt'))),
    ][:parts]


def same_tensors(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tensors(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_tensors, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


QUICK = (
    '--set',
    'eval_every=1_000',
    'save_every=1_000',
    'report_every=500',
    'eval_episodes=2',
    'network=16',
)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A run of two ranks without a stop"
    cwd = tmp_path_factory.mktemp('ranks')
    done = train(2, 'cartpole-per', '--steps', 3_000, '--out', 'whole', *QUICK, cwd=cwd)
    return cwd / 'whole', done


def metrics(out):
    return [json.loads(l) for l in (out / 'metrics.jsonl').read_text().splitlines()]


def timeless(lines):
    return [
        {k: v for k, v in l.items() if k not in ('wall_s', 'steps_per_s', 'waited_s')}
        for l in lines
    ]


def test_a_recipe_has_one_log_and_equal_networks(whole):
    "Steps and episodes of both are in it; updates are as many as with one process"
    out, done = whole
    a, b = nets(out, 2)
    assert a['pipe']['stage'] == 'DQNLearner' and same_tensors(a['pipe']['own'], b['pipe']['own'])
    assert not same_tensors(a['pipe']['above'], b['pipe']['above'])
    summary = json.loads((out / 'summary.json').read_text())
    assert (
        3_000 <= summary['env_steps'] < 3_000 + 2 * 256
        and 0 <= (summary['env_steps'] - 1_000) / 2 - summary['updates'] < 8
    )  # rows of 3 steps wait
    journal = a['pipe']['above']
    while journal['stage'] != 'Rounds':
        journal = journal['above']
    own = b['pipe']['above']
    while own['stage'] != 'Journal':
        own = own['above']
    assert len(journal['own']['returns']) == summary['episodes'] > len(own['own']['returns']) > 5
    assert (
        done.stdout.count('into whole, 2 learners') == 1
        and done.stdout.count('mean return of 20') == 1
    )
    assert len([*(out / 'ranks').iterdir()]) == 1


def test_one_process_looks_at_it(whole):
    "Plays, and builds the chain of one rank; but goes on only with as many as it had"
    agent, step = reopen(whole[0])
    assert step > 500 and agent.ranks.size == 1
    r = subprocess.run(
        [sys.executable, '-m', 'fastrl_replay', 'eval', str(whole[0]), '--episodes', '2'],
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert r.returncode == 0 and 'mean return of 2 episodes' in r.stdout, r.stderr
    r = subprocess.run(
        [
            sys.executable,
            '-m',
            'fastrl_replay',
            'train',
            '--resume',
            str(whole[0]),
            '--steps',
            '9000',
        ],
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert (
        r.returncode == 2
        and 'begun with another number of learners; got 1; expected 2. Remedy: torchrun --nproc-per-node 2'
        in r.stderr
    ), r.stderr


def test_a_run_in_two_goes_is_the_same(whole, tmp_path):
    "SIGTERM to one of the ranks stops both, and they go on bit for bit"
    ps = begin(
        2,
        '-m',
        'fastrl_replay',
        'train',
        'cartpole-per',
        '--steps',
        '3000',
        '--out',
        str(tmp_path / 'two'),
        *QUICK,
    )
    until = time.monotonic() + 90
    while time.monotonic() < until and not (
        (tmp_path / 'two/metrics.jsonl').exists() and metrics(tmp_path / 'two')
    ):
        time.sleep(0.02)
    ps[1].send_signal(signal.SIGTERM)
    for out, err, rc in ended(ps):
        assert rc in (130, 143), err
    stopped = nets(tmp_path / 'two', 2)
    assert same_tensors(stopped[0]['pipe']['own'], stopped[1]['pipe']['own'])
    for n in 1, 3:
        for out, err, rc in ended(
            begin(n, '-m', 'fastrl_replay', 'train', '--resume', str(tmp_path / 'two'))
        ):
            assert (
                rc == 2
                and f'another number of learners; got {n}; expected 2. Remedy: torchrun --nproc-per-node 2'
                in err
            ), err
    for out, err, rc in ended(
        begin(2, '-m', 'fastrl_replay', 'train', '--resume', str(tmp_path / 'two'))
    ):
        assert rc == 0, err
    assert timeless(metrics(tmp_path / 'two')) == timeless(metrics(whole[0]))
    for a, b in zip(nets(tmp_path / 'two', 2), nets(whole[0], 2)):
        assert same_tensors(a['pipe']['own'], b['pipe']['own'])


def rank_processes(out):
    "Processes that train into a directory, by rank"
    found = {}
    for p in Path('/proc').glob('[0-9]*'):
        try:
            line, env = (
                (p / 'cmdline').read_bytes().split(b'\0'),
                (p / 'environ').read_bytes().split(b'\0'),
            )
        except OSError:
            continue
        if str(out).encode() in line and b'torch.distributed.run' not in line:
            found |= {int(e[5:]): int(p.name) for e in env if e.startswith(b'RANK=')}
    return found


@pytest.mark.skipif(not Path('/proc/self').exists(), reason='processes are found in /proc')
@pytest.mark.parametrize('restarts', [0, 1])
def test_a_rank_that_is_killed(whole, tmp_path, restarts):
    "By torchrun: the other one says which, nothing is left over, and it goes on from the last checkpoint, begun again by hand or by the launcher"
    out = tmp_path / 'killed'
    torchrun = [
        sys.executable,
        '-W',
        'ignore',
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc-per-node',
        '2',
        '--max-restarts',
        str(restarts),
    ]
    p = subprocess.Popen(
        [
            *torchrun,
            '-m',
            'fastrl_replay',
            'train',
            'cartpole-per',
            '--steps',
            '3000',
            '--out',
            str(out),
            *QUICK,
        ],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 90
    while time.monotonic() < until and not (
        (out / 'metrics.jsonl').exists() and any(m['env_steps'] >= 1_500 for m in metrics(out))
    ):
        time.sleep(0.02)
    os.kill(rank_processes(out)[1], signal.SIGKILL)
    said, err = p.communicate(timeout=200)
    assert 'rank 0 of 2 waited for the others: rank 1 has gone' in err, err
    assert f'torchrun --nproc-per-node 2 -m fastrl_replay train --resume {out}' in err
    assert not rank_processes(out) and (p.returncode == 0) == bool(restarts)
    if not restarts:
        train(2, '--resume', out, cwd=tmp_path)
    assert timeless(metrics(out)) == timeless(metrics(whole[0]))
    for a, b in zip(nets(out, 2), nets(whole[0], 2)):
        assert same_tensors(a['pipe']['own'], b['pipe']['own'])


@pytest.mark.skipif(not Path('/proc/self').exists(), reason='processes are found in /proc')
def test_ranks_end_with_their_launcher(tmp_path):
    "Killed, it ends nobody; they save, and don't go on alone"
    out = tmp_path / 'orphans'
    torchrun = [
        sys.executable,
        '-W',
        'ignore',
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc-per-node',
        '2',
    ]
    p = subprocess.Popen(
        [
            *torchrun,
            '-m',
            'fastrl_replay',
            'train',
            'cartpole-per',
            '--steps',
            '300000',
            '--out',
            str(out),
            *QUICK,
        ],
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 90
    while time.monotonic() < until and not ((out / 'metrics.jsonl').exists() and metrics(out)):
        time.sleep(0.02)
    ranks = [*rank_processes(out).values()]
    p.kill()
    p.wait()
    killed = time.monotonic()
    while any(Path(f'/proc/{r}').exists() for r in ranks) and time.monotonic() < killed + 60:
        time.sleep(0.1)
    took = time.monotonic() - killed
    for r in ranks:
        if Path(f'/proc/{r}').exists():
            os.kill(r, signal.SIGKILL)
    assert len(ranks) == 2 and took < 20, took


@pytest.mark.parametrize(
    'changes, said',
    [
        (
            ['cartpole', '--shards', '2'],
            "setting 'shards' with 2 learners (--nproc-per-node); got 2; expected 0. Remedy: --set shards=0",
        ),
        (
            ['cartpole', '--set', 'bs=33'],
            "setting 'bs' with 2 learners (--nproc-per-node); got 33; expected a multiple of 2. Remedy: --set bs=34",
        ),
        (['taxi'], "setting 'learner' with 2 learners"),
    ],
)
def test_what_ranks_cannot_have_is_refused_at_once(tmp_path, changes, said):
    for out, err, rc in ended(
        begin(2, '-m', 'fastrl_replay', 'train', *changes, '--out', str(tmp_path / 'no'))
    ):
        assert rc == 2 and said in err, err
    assert not (tmp_path / 'no').exists()


@pytest.mark.parametrize(
    'key, value',
    dict(
        engine='ray',
        data='x',
        memory_path='m',
        normalise_states=True,
        normalise_rewards=True,
        envs=3,
        workers=3,
    ).items(),
)
def test_settings_that_cannot_be_divided(key, value):
    with pytest.raises(ValueError, match=f"setting '{key}' with 2 learners"):
        Agent({**recipe('cartpole').settings, 'ranks': 2, key: value})


def test_one_that_fails_at_once_is_named_by_the_other(tmp_path):
    "A directory that has a run: the other one doesn't wait for ever"
    (tmp_path / 'there').mkdir()
    (tmp_path / 'there/checkpoint.pt').write_text('')
    (_, lead, rc), (_, other, rc2) = ended(
        begin(2, '-m', 'fastrl_replay', 'train', 'cartpole', '--out', str(tmp_path / 'there'))
    )
    assert (
        rc == rc2 == 2
        and 'there is a run already' in lead
        and 'rank 0 has ended: SettingsError: run: there is a run already' in other
    ), other


def test_actors_in_processes(tmp_path):
    "Each rank has its part of the workers, with numbers and seeds that are its own"
    train(
        2,
        'cartpole',
        '--workers',
        2,
        '--steps',
        2_000,
        '--out',
        'w',
        *QUICK,
        'envs=2',
        cwd=tmp_path,
    )
    a, b = nets(tmp_path / 'w', 2)
    assert same_tensors(a['pipe']['own'], b['pipe']['own'])


@pytest.mark.slow
@pytest.mark.parametrize('place', ['memory', 'disk'])
def test_rows_stay_with_their_rank(tmp_path, place):
    "As many ranks go on batch for batch; with more or fewer it is said how many there were, and on disk the rows are found without a checkpoint"

    def ranks(n, do):
        return sorted(work(n, 'resumed', tmp_path, place, do), key=lambda said: said['rank'])

    begun = ranks(2, 'begin')
    assert (
        ranks(2, 'resume') == begun
        and begun[0]['seen'] != begun[1]['seen']
        and all(len(said['seen']) == 20 for said in begun)
    )
    for said in ranks(3, 'resume')[:2]:
        assert (
            'a checkpoint of another number of ranks; got 3; expected 2. Remedy: torchrun --nproc-per-node 2: rows stay with their rank'
            in said['error']
        )
    (alone,) = ranks(1, 'resume')
    if place == 'memory':
        assert (
            'a checkpoint of another number of ranks; got 1; expected 2. Remedy: torchrun --nproc-per-node 2'
            in alone['error']
        )
        return
    assert re.search(
        'memory is not a memory, and not empty; got shard-0, shard-1.*or torchrun', alone['error']
    )
    found = ranks(3, 'find')
    assert [said['environments'] for said in found] == [[0, 1], [2, 3], []] and all(
        said['rows'] > 100 for said in found[:2]
    )


# ---- alone ----


def test_without_torchrun_there_is_one(monkeypatch):
    "Nothing is begun, and a chain that joins is as it was, but for its rounds"
    for k in 'RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT':
        monkeypatch.delenv(k, raising=False)
    ranks = Ranks()
    assert (ranks.rank, ranks.size) == (0, 1) and not torch.distributed.is_initialized()
    assert ranks.gather('x') == ['x'] and type(ranks.mean(torch.tensor(2))) is torch.Tensor
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(ArgumentError, match='torchrun --nproc-per-node 2'):
        Ranks()
    monkeypatch.setenv('WORLD_SIZE', 'many')
    with pytest.raises(ArgumentError, match='a whole number'):
        Ranks()
    assert (
        'ranks' not in recipe('cartpole').settings
        and type(Agent(recipe('cartpole').settings).journal).__name__ == 'Journal'
    )


@pytest.mark.slow
@pytest.mark.parametrize('name, goal', [('cartpole', 475), ('pendulum-sac', -250)])
def test_two_learners_learn(tmp_path, name, goal):
    train(2, name, '--out', 'run', cwd=tmp_path)
    summary = json.loads((tmp_path / 'run/summary.json').read_text())
    assert summary['solved_at_step'] is not None or summary['final_return'] >= goal, summary
