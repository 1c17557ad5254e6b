"""`fastrl-replay memory`, and runs whose memory lies on disk: what is told, exported and drawn; what a SIGKILL costs."""
import json, os, random, shutil, signal, subprocess, sys, time
from pathlib import Path

import numpy as np, pytest, torch
from gymnasium import spaces

from fastrl_replay.cli import main
from fastrl_replay.core import Explained, StaleKey, Steps, leaves, step_dtype
from fastrl_replay.memory.rows import Rows
from fastrl_replay.memory.timeline import Timeline
from fastrl_replay.recipes import Agent, SettingsError, recipe, spare_rows
from fastrl_replay.replay.experience import ExperienceReplay
from fastrl_replay.replay.prioritized import PrioritizedReplay
from fastrl_replay.replay.sequences import SequenceReplay
from fastrl_replay.runs import load_checkpoint, read_config, read_metrics, reopen, resume, start
from fastrl_replay.survey import export_rows, open_memory, survey, survey_picture, survey_text
from fastrl_replay.testing import same
from test_cli import command, here, no_clock, wait_for

def story(n, envs=3, seed=0, first=0):
    "Rows of environments in any order: episodes of any length, some broken off, nested states"
    rng = np.random.default_rng(seed)
    rows = np.zeros(n, step_dtype(spaces.Dict(a=spaces.Box(-9, 9, (2,)), b=spaces.Discrete(5)), spaces.Discrete(3)))
    at = {e: [1 + first, 0, 0.] for e in range(envs)}   # episode, step, return
    for r in rows:
        e = int(rng.integers(envs))
        s = at[e]
        s[1], reward = s[1] + 1, float(rng.integers(-3, 9))
        s[2] += reward
        r['env_id'], r['episode_n'], r['step_n'], r['reward'], r['total_reward'] = e, s[0], s[1], reward, s[2]
        r['state']['a'], r['state']['b'] = rng.normal(size=2), rng.integers(5)
        r['terminated'], r['truncated'] = rng.random() < .15, rng.random() < .05
        if r['terminated'] or r['truncated'] or rng.random() < .05: at[e] = [s[0] + 1, 0, 0.]
    return Steps(rows)

def naive(rows):
    "The facts about episodes, a row at a time: of rows that are there, oldest first"
    lists, facts = {}, dict(ended=0, whole=0, running=0, broken_off=0)
    for r in rows: lists.setdefault((int(r['env_id']), int(r['episode_n'])), []).append(r)
    newest = {e: max(n for f, n in lists if f == e) for e in {e for e, _ in lists}}
    lengths, returns = [], []
    for (e, n), of in lists.items():
        if of[-1]['terminated'] or of[-1]['truncated']:
            facts['ended'] += 1
            facts['whole'] += of[0]['step_n'] == 1
            lengths.append(of[-1]['step_n']), returns.append(of[-1]['total_reward'])
        else: facts['running' if n == newest[e] else 'broken_off'] += 1
    return dict(environments=len(newest), episodes=facts, lengths=lengths, returns=returns)

def check_facts(facts, rows):
    want = naive(rows)
    assert (facts['rows'], facts['environments'], facts['episodes']) == (len(rows), want['environments'], want['episodes'])
    for k in 'lengths', 'returns':
        x = want[k]
        assert facts[k] == (None if not x else dict(mean=pytest.approx(np.mean(x)), min=min(x), max=max(x)))

# ---- what is told ----

@pytest.mark.parametrize('n, max_sz, spare', [(1, 50, 0), (49, 50, 0), (50, 50, 7), (300, 50, 0), (300, 120, 33), (300, 1000, 5)])
def test_facts_are_those_of_a_naive_count(n, max_sz, spare, tmp_path):
    "While it is written, and afterwards"
    memory = Timeline(max_sz, Rows(tmp_path/'m', spare=spare))
    steps = story(n, seed=n)
    for i in range(0, n, 37): memory.add(steps[i:i+37])
    for writes in True, False:
        facts = survey(open_memory(tmp_path/'m'))
        check_facts(facts, steps.rows[-max_sz:])
        assert facts['writer']['now'] == writes and facts['writer']['process'] == os.getpid()
        assert (facts['max_sz'], facts['spare'], facts['end_key']) == (max_sz, spare, n) and facts['priorities'] is None
        assert {c['name']: (c['dtype'], c['shape']) for c in facts['columns']}['state.a'] == ('float32', [2])
        assert json.loads(json.dumps(facts)) == facts and f'{n:,} have come' in survey_text(facts)
        memory.close()

def test_n_step_rows_end_where_episodes_do(tmp_path):
    "The last rows of an episode say that it is over, all of them; the one of a single step is its end"
    replay = PrioritizedReplay(([story(200, seed=3)] if False else _blocks(story(200, envs=1, seed=3))), bs=4, max_sz=500, store=Rows(tmp_path/'m'))
    replay.source = replay.source.n_step(3, gamma=.9) if hasattr(replay.source, 'n_step') else replay.source
    for _ in replay: pass
    rows = replay.memory[:].rows
    assert (rows['n'] > 1).any()
    over = rows[(rows['terminated'] | rows['truncated']) & (rows['n'] == 1)]
    facts = survey(open_memory(tmp_path/'m'))
    assert facts['episodes']['ended'] == len(over) and facts['returns']['mean'] == pytest.approx(over['total_reward'].mean())

def _blocks(steps):
    from fastrl_replay.pipe import Items
    return Items([steps[i:i+10] for i in range(0, len(steps), 10)])

@pytest.mark.parametrize('kind', ['proportional', 'rank'])
def test_priorities_are_told(kind, tmp_path):
    replay, rng = PrioritizedReplay(bs=8, max_sz=60, kind=kind, store=Rows(tmp_path/'m', spare=9), seed=0), np.random.default_rng(0)
    replay.add(story(100))
    replay.update_priorities(replay.memory.keys, rng.lognormal(size=60))
    for _ in range(5): replay.sample()
    replay.memory.add(story(13, first=50))   # the sampler hasn't heard of them
    told = survey(open_memory(tmp_path/'m'))
    p = told['priorities']
    tree = replay.sampler.tree[np.arange(53, 100) % replay.sampler.capacity]
    assert (p['unit'], p['known'], p['rows_without']) == ('rows', 47, 13) and kind[:4] in p['kind'].lower()
    assert (p['min'], p['median'], p['max']) == (tree.min(), np.median(tree), tree.max())
    assert ('effective_sample_size' in p) == (kind == 'proportional')
    if kind == 'proportional': assert p['effective_sample_size'] == pytest.approx(tree.sum()**2/(tree**2).sum())
    drawn = replay.memory.times_drawn
    assert told['drawn']['max'] == drawn.max() and told['drawn']['mean'] == pytest.approx(drawn.mean()) and told['drawn']['never'] == pytest.approx((drawn == 0).mean())
    replay.sample()
    assert survey(open_memory(tmp_path/'m'))['priorities']['rows_without'] == 0
    replay.close()
    assert survey(open_memory(tmp_path/'m'))['drawn']['oldest_age'] == 60

def test_sequences_are_told(tmp_path):
    replay = SequenceReplay(bs=2, max_sz=200, length=4, burn_in=1, overlap=2, store=Rows(tmp_path/'m'), seed=0)
    replay.add(story(150, envs=2))
    batch = replay.sample()
    replay.update_priorities(batch.index, np.full((2, 4), 3.))
    p, t = survey(open_memory(tmp_path/'m'))['priorities'], replay.table
    assert (p['unit'], p['known']) == ('sequences', int((t.first >= 0).sum())) and p['max'] == pytest.approx((3 + 1e-6)**.9)
    check_facts(survey(open_memory(tmp_path/'m')), replay.memory[:].rows)

def test_while_it_is_written(tmp_path):
    "Another process adds rows all the time, over the edge of the ring: what is told belongs together, and nothing is changed by telling"
    script = '''if 1:
        import sys; sys.path.insert(0, sys.argv[2])
        from test_memory_cli import *
        memory, i = Timeline(3_000, Rows(sys.argv[1], spare=200)), 0
        while True: memory.add(story(100, seed=i % 7, first=9*i)); i += 1'''
    p = subprocess.Popen([sys.executable, '-c', script, str(tmp_path/'m'), str(Path(__file__).parent)], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(tmp_path/'m/meta.json', p)
        last, end = 0, time.time() + 120
        while last < 4_000:
            assert time.time() < end and p.poll() is None, p.communicate()
            facts = survey(open_memory(tmp_path/'m'))
            assert facts['end_key'] >= last and facts['writer']['process'] == p.pid and facts['writer']['now']
            assert facts['rows'] <= 3_000 and facts['environments'] <= 3
            last = facts['end_key']
            if facts['lengths']: assert 1 <= facts['lengths']['min'] <= facts['lengths']['max'] <= 100 and -300 <= facts['returns']['min']
        try: export_rows(open_memory(tmp_path/'m'), tmp_path/'m.npz')
        except StaleKey: assert not (tmp_path/'m.npz').exists()
        else: assert (np.diff(np.load(tmp_path/'m.npz')['key']) == 1).all()
    finally: p.kill(); p.communicate()
    facts = survey(open_memory(tmp_path/'m'))
    assert facts['writer']['now'] is False and facts['writer']['process'] == p.pid and facts['rows'] >= 2_800

def files(d): return {p.relative_to(d): (p.read_bytes(), p.stat().st_mtime_ns) for p in d.rglob('*') if p.is_file()}

def test_the_command_changes_nothing(tmp_path, capsys, monkeypatch):
    "It prints, as text and as JSON, draws and exports; the directory is as it was, to the last byte and time"
    monkeypatch.chdir(tmp_path)
    replay = PrioritizedReplay(bs=4, max_sz=90, store=Rows('m'))
    replay.add(story(120))
    replay.close()
    before = files(tmp_path/'m')
    said = here(capsys, 'memory', 'm', '--plot', '--export', 'm.npz')
    assert '90 of 90' in said and 'm.png' in said and 'm.npz' in said and 'none now; the last one was process' in said
    assert Path('m.png').read_bytes().startswith(b'\x89PNG')
    capsys.readouterr()
    assert main(['memory', 'm', '--json', '--plot', 'other.png']) == 0 and Path('other.png').exists()
    told = json.loads(capsys.readouterr().out)
    check_facts(told, story(120).rows[-90:])
    assert files(tmp_path/'m') == before and sorted(p.name for p in Path('.').iterdir()) == ['m', 'm.npz', 'm.png', 'other.png']

def test_a_picture_of_anything(tmp_path):
    "No episode has ended, priorities are all alike, or many"
    replay = PrioritizedReplay(bs=4, max_sz=90, store=Rows(tmp_path/'m'))
    replay.add(story(1, seed=1))
    for _ in range(2):
        assert survey_picture(open_memory(tmp_path/'m')).startswith(b'\x89PNG')
        replay.add(story(89, seed=5))
    replay.update_priorities(replay.memory.keys, np.geomspace(1e-5, 1e5, 90))
    assert survey_picture(open_memory(tmp_path/'m'), 'm').startswith(b'\x89PNG')

@pytest.mark.parametrize('most', [1, 4096, 2**24])
def test_an_archive_holds_all_rows(most, tmp_path):
    "As numpy reads it, without pickles; parts of any size"
    memory = Timeline(70, Rows(tmp_path/'m', spare=11))
    memory.add(story(130))
    export_rows(open_memory(tmp_path/'m'), tmp_path/'m.npz', most)
    with np.load(tmp_path/'m.npz', allow_pickle=False) as a:
        columns = dict(leaves(memory[:].rows))
        assert set(a) == {'key', *columns} and a['key'].tolist() == memory.keys.tolist()
        for n, c in columns.items(): assert a[n].dtype == c.dtype and np.array_equal(a[n], c)

# ---- errors ----

def broken(d, how):
    meta = json.loads((d/'meta.json').read_text())
    data = d/meta['data']
    if how == 'no meta': (d/'meta.json').unlink(); (d/'notes.txt').write_text('x')
    if how == 'not JSON': (d/'meta.json').write_text('{')
    if how == 'another version': (d/'meta.json').write_text(json.dumps({**meta, 'version': 99}))
    if how == 'another store': (d/'meta.json').write_text(json.dumps({**meta, 'store': {'kind': 'os.system'}}))
    if how == 'odd settings': (d/'meta.json').write_text(json.dumps({**meta, 'store': {'kind': 'Rows', 'path': '/etc'}}))
    if how == 'no store': (d/'meta.json').write_text(json.dumps({**meta, 'store': 5}))
    if how == 'short rows': os.truncate(data/'rows', 100)
    if how == 'short draws': os.truncate(data/'drawn', 100)
    if how == 'short priorities': os.truncate(data/'priorities', 8)
    if how == 'counters': (data/'counters').write_bytes(b'\xff'*512)
    if how == 'gone': shutil.rmtree(data)

HOW = ['no meta', 'not JSON', 'another version', 'another store', 'odd settings', 'no store', 'short rows', 'short draws', 'short priorities', 'counters', 'gone']

@pytest.mark.parametrize('how', HOW)
def test_what_is_no_memory_or_damaged_is_named(how, tmp_path, capsys):
    "Status 2, one line with the place, and nothing is written"
    replay = PrioritizedReplay(bs=4, max_sz=90, store=Rows(tmp_path/'m'))
    replay.add(story(20))
    replay.close()
    broken(tmp_path/'m', how)
    before = files(tmp_path/'m')
    for option in [], ['--json'], ['--export', str(tmp_path/'m.npz')]:
        capsys.readouterr()
        assert main(['memory', str(tmp_path/'m'), *option]) == 2, how
        out, err = capsys.readouterr()
        assert str(tmp_path) in err and err.count('\n') == 1 and 'Traceback' not in err and not out
    assert files(tmp_path/'m') == before and not (tmp_path/'m.npz').exists()

def test_what_is_typed_wrong_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('empty').mkdir(); Path('file').write_text('x')
    for line, said in {'memory': 'DIR', 'memory none': 'no such directory', 'memory empty': 'no row was ever added', 'memory file': 'file',
                       'memry x': "did you mean 'memory'", 'memory empty --plto': "did you mean '--plot'"}.items():
        assert main(line.split()) == 2 and said in capsys.readouterr().err, line
    assert [p.name for p in Path('empty').iterdir()] == []
    with pytest.raises(SystemExit) as e: main(['memory', '--help'])
    assert e.value.code == 0 and '--export' in capsys.readouterr().out
