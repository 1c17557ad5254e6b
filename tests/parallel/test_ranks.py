"""Several learners, equal to one with whole batches.

Weights of one memory, one log, checkpoints of all, ranks that go."""

import json, os, re, signal, socket, subprocess, sys, time
from pathlib import Path

import numpy as np, pytest, torch
from fastrl_replay.app.runs import reopen
from fastrl_replay.parallel.ranks import Ranks

pytestmark = pytest.mark.slow  # each process imports torch
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


TRAIN = '-m', 'fastrl_replay', 'train'


def torchrun(*args, restarts=0):
    "A recipe by torchrun, in two ranks"
    launcher = '-W ignore -m torch.distributed.run --standalone --nproc-per-node 2'.split()
    command = [sys.executable, *launcher, '--max-restarts', restarts, *TRAIN, *args]
    return subprocess.Popen(
        [*map(str, command)], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# ---- equal to one ----


@pytest.mark.parametrize('kind', ['dqn', 'sac', 'td3'])
def test_two_halves_are_one_whole(kind):
    "Networks, losses and norms are equal, with weights and with a limit of the norm that counts"
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
    assert rc == 1 and 'missing: rank 1;' in err, err


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
    "Ranks have n-step rows at different times, but equal rows and updates, and one journal"
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
                and f'rank {r} of {n} waits for others; missing: rank 1; got' in err
            ), err
            assert 'restart from the last checkpoint' in err
    finally:
        for p in ps:
            p.kill()
            p.wait()


@pytest.mark.parametrize(
    'what, said',
    [
        ('networks', r'sync: model.*; got \[\d+, 4\] torch.float32 in rank'),
        ('memory', r'sync: .*Replay\..*; got'),
        *((k, f'sync: .*{k}') for k in ('ratio', 'lr', 'tau', 'target_every', 'gamma', 'n')),
    ],
)
def test_ranks_that_differ_are_told_at_once(what, said):
    "Both of them"
    for _, err, rc in ended(begin(2, str(WORK), 'differs', what), 60):
        assert rc == 1
        assert re.search(said, err), err


# ---- recipes ----


def nets(out, parts):
    "The networks of each rank in a checkpoint"
    from fastrl_replay.app.saved_policies import load_checkpoint

    lead = load_checkpoint(out / 'checkpoint.ckpt')
    others = sorted(out.glob(f'rank-*-{lead["run"]["saves"] % 2}.ckpt'))
    return [lead['agent'], *map(load_checkpoint, others)][:parts]


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
RUN = 'cartpole-per', '--steps', 3_000, *QUICK


def metrics(out):
    if not (out / 'metrics.jsonl').exists():
        return []
    return [json.loads(l) for l in (out / 'metrics.jsonl').read_text().splitlines()]


def timeless(out):
    clocks = 'wall_s', 'steps_per_s', 'waited_s'
    return [{k: v for k, v in l.items() if k not in clocks} for l in metrics(out)]


def until(condition, seconds=90):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    assert condition()


def same_runs(a, b):
    "Have both runs the same lines and networks?"
    assert timeless(a) == timeless(b)
    for x, y in zip(nets(a, 2), nets(b, 2)):
        assert same_tensors(x['pipe']['own'], y['pipe']['own'])


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A run of two ranks without a stop, and what it said"
    out = tmp_path_factory.mktemp('ranks') / 'whole'
    p = torchrun(*RUN, '--out', out)
    said, err = p.communicate(timeout=500)
    assert p.returncode == 0, err
    return out, said


def test_a_recipe_has_one_log_and_equal_networks(whole):
    "Steps and episodes of both are in it; updates are as many as with one process"
    out, said = whole
    a, b = nets(out, 2)
    own = [rank['pipe']['own'] for rank in (a, b)]
    draws = [learner.pop('generator') for learner in own]  # each rank has its own
    assert not same_tensors(*draws)
    assert same_tensors(*own)
    assert not same_tensors(a['pipe']['above'], b['pipe']['above'])
    summary = json.loads((out / 'summary.json').read_text())
    assert 3_000 <= summary['env_steps'] < 3_000 + 2 * 256
    assert 0 <= (summary['env_steps'] - 1_000) / 2 - summary['updates'] < 8  # rows of 3 steps wait
    assert said.count('2 learners') == said.count('mean return of 20') == 1
    assert len([*out.glob('rank-*')]) == 2


def test_one_process_looks_at_it(whole):
    "Plays, and builds the chain of one rank"
    agent, step = reopen(whole[0])
    assert step > 500 and agent.ranks.size == 1
    ((out, err, rc),) = ended(
        begin(1, '-m', 'fastrl_replay', 'eval', str(whole[0]), '--episodes', '2')
    )
    assert rc == 0, err
    assert 'mean return of 2 episodes' in out


def test_a_run_in_two_goes_is_the_same(whole, tmp_path):
    "SIGTERM to one of the ranks stops both; as many go on, bit for bit"
    out = tmp_path / 'two'
    ps = begin(2, *TRAIN, *map(str, RUN), '--out', str(out))
    until(lambda: metrics(out))
    ps[1].send_signal(signal.SIGTERM)
    for _, err, rc in ended(ps):
        assert rc in (130, 143), err
    resume = (*TRAIN, '--resume', str(out))
    for _, err, rc in ended(begin(1, *resume)):
        assert rc == 2
        assert 'a different number of learners; got 1; expected 2. Remedy: use torchrun' in err
    for _, err, rc in ended(begin(2, *resume)):
        assert rc == 0, err
    same_runs(out, whole[0])


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
    """The other rank names it, and nothing is left over.

    The run goes on from the last checkpoint, begun again by hand or by the launcher."""
    out = tmp_path / 'killed'
    p = torchrun(*RUN, '--out', out, restarts=restarts)
    until(lambda: any(m['env_steps'] >= 1_500 for m in metrics(out)))
    os.kill(rank_processes(out)[1], signal.SIGKILL)
    _, err = p.communicate(timeout=200)
    assert 'rank 0 of 2 waits for others; missing: rank 1' in err
    assert f'torchrun --nproc-per-node 2 -m fastrl_replay train --resume {out}' in err
    assert not rank_processes(out)
    assert (p.returncode == 0) == bool(restarts)
    if not restarts:
        again = torchrun('--resume', out)
        again.communicate(timeout=200)
        assert again.returncode == 0
    same_runs(out, whole[0])


@pytest.mark.skipif(not Path('/proc/self').exists(), reason='processes are found in /proc')
def test_ranks_end_with_their_launcher(tmp_path):
    "Killed, it ends nobody; they save, and don't go on alone"
    out = tmp_path / 'orphans'
    p = torchrun('cartpole-per', '--steps', 300_000, *QUICK, '--out', out)
    until(lambda: metrics(out))
    ranks = rank_processes(out)
    assert len(ranks) == 2
    p.kill()
    p.wait()
    try:
        until(lambda: not rank_processes(out), 20)
    finally:
        for pid in rank_processes(out).values():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    'changes, said',
    [
        (
            ['cartpole', '--set', 'shards=2'],
            "setting 'shards' with 2 learners .* Remedy: --set shards=0",
        ),
        (['cartpole', '--set', 'bs=33'], 'a multiple of the 2 learners. Remedy: --set bs=34'),
    ],
)
def test_what_ranks_cannot_have_is_refused_at_once(tmp_path, changes, said):
    for _, err, rc in ended(begin(2, *TRAIN, *changes, '--out', str(tmp_path / 'no'))):
        assert rc == 2
        assert re.search(said, err), err
    assert not (tmp_path / 'no').exists()


def test_one_that_fails_at_once_is_named_by_the_other(tmp_path):
    "A directory that has a run: the other one doesn't wait for ever"
    (tmp_path / 'there').mkdir()
    (tmp_path / 'there/checkpoint.ckpt').write_text('')
    (_, lead, rc), (_, other, rc2) = ended(
        begin(2, '-m', 'fastrl_replay', 'train', 'cartpole', '--out', str(tmp_path / 'there'))
    )
    assert (
        rc == rc2 == 2
        and 'there is not empty' in lead
        and 'rank 1 of 2 waits for others; missing: rank 0' in other
    ), other


@pytest.mark.parametrize('place', ['memory', 'disk'])
def test_rows_stay_with_their_rank(tmp_path, place):
    """As many ranks continue batch for batch.

    With more or fewer, an error says how many there were; on disk the rows need no checkpoint."""

    def ranks(n, do):
        return sorted(work(n, 'resumed', tmp_path, place, do), key=lambda said: said['rank'])

    begun = ranks(2, 'begin')
    assert begun[0]['seen'] != begun[1]['seen']
    assert ranks(2, 'resume') == begun
    other = "is invalid, in ['ranks']; got 2; expected {}"
    for said in ranks(3, 'resume')[:2]:
        assert other.format(3) in said['error']
    (alone,) = ranks(1, 'resume')
    if place == 'memory':
        assert other.format(1) in alone['error']
        return
    assert 'contains files, but no memory; got shard-0, shard-1' in alone['error']
    found = ranks(3, 'find')
    assert [said['environments'] for said in found] == [[0, 1], [2, 3], []]
    assert all(said['rows'] > 100 for said in found[:2])


# ---- alone ----


def test_without_torchrun_there_is_one(monkeypatch):
    "Nothing is begun"
    for k in 'RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT':
        monkeypatch.delenv(k, raising=False)
    ranks = Ranks()
    assert (ranks.rank, ranks.size) == (0, 1)
    assert not torch.distributed.is_initialized()
    assert ranks.gather('x') == ['x']
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(ValueError, match='variable RANK expected, but not set'):
        Ranks()
