"""The bench: entries are checked before they are timed, peers run in separate processes, reports say which are missing."""
import io, json, re, sys
from contextlib import closing, redirect_stdout
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
import gymnasium as gym
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given, strategies as st

from fastrl_replay.bench import bench, buffers, disk, frames, options, peer_memories, peers
from fastrl_replay.bench.parts import PARTS, Part, parts_table, run_parts
from fastrl_replay.bench.bench import CONTESTS, TARGETS, entries, fastest, measure, medians, summary, table, targets
from fastrl_replay.steps.errors import ArgumentError
from fastrl_replay.bench.adapters import ADAPTERS, Rows, wrong_rows
from fastrl_replay.bench.peers import Peer, PeerError

# Libraries made up for these tests, in a copy of the peers' module.
STRANGERS = '''
from itertools import count
from .adapters import Adapter
def version(library): return '0.0'

class Stranger(Adapter, library='stranger'):
    def look(self, out): return out

class Noisy(Stranger, library='noisy'):
    def uniform(self):
        print('welcome to noisy, please star us')
        os.system('echo and hello from a child')
        return lambda: (print('drawing'), self.rows.part(0, self.n))[1]
    insert = uniform

class Liar(Stranger, library='liar'):
    def uniform(self): return lambda: self.rows.part(0, self.n)
    def look(self, cols): return {**cols, 'reward': cols['reward'][::-1]}

class Short(Stranger, library='short'):
    def uniform(self): return lambda: self.rows.part(0, self.n-1)

class Broken(Stranger, library='broken'):
    def uniform(self): raise RuntimeError('no such\\nluck')

class Mortal(Stranger, library='mortal'):
    def uniform(self):
        calls = count()
        def step():
            if next(calls): sys.stderr.write('out of life\\n'); sys.stderr.flush(); os._exit(3)
            return self.rows.part(0, self.n)
        return step

class Plain:
    blocks = True
    def __init__(self, size, envs, shape): self.rows,self.size,self.rng = [],size,np.random.default_rng(0)
    def ready(self, c, last): return [*zip(*(c[k] for k in ('state','action','reward','next_state','terminated')))],
    def add(self, rows): self.rows = [*self.rows, *rows][-self.size:]
    def draw(self): return [np.array(c) for c in zip(*(self.rows[i] for i in self.rng.integers(0, len(self.rows), 32)))]

class Lossy(Plain):
    "The next state of the last row of an episode is its state; a row at a time"
    blocks = False
    def ready(self, c, last): return super().ready({**c, 'next_state': np.where(last[:,None,None,None], c['state'], c['next_state'])}, last)

class MortalFrames(Plain):
    def draw(self): sys.stderr.write('out of life\\n'); sys.stderr.flush(); os._exit(3)

FRAME_MEMORIES['noisy'] = {'plain': Plain}
FRAME_MEMORIES['liar'] = {'lossy': Lossy}
FRAME_MEMORIES['mortal'] = {'short': MortalFrames}
'''

@pytest.fixture
def strangers(tmp_path, monkeypatch):
    "Their module, which processes are started with, and their names in ours."
    source = open(peers.__file__, encoding='utf-8').read()
    head, main, tail = source.rpartition("if __name__ == '__main__'")
    path = tmp_path/'strange_peers.py'
    path.write_text(head + STRANGERS + main + tail, encoding='utf-8')
    monkeypatch.setattr(peers, 'find_spec', lambda name: SimpleNamespace(origin=str(path)))
    for name in 'noisy liar short broken mortal'.split(): monkeypatch.setitem(ADAPTERS, name, SimpleNamespace(uniform=None, **(dict(insert=None) if name == 'noisy' else {})))
    return 'noisy liar short broken mortal'.split()

def test_bench_and_traintime_do_not_need_each_other():
    "What both need, such as `machine`, lies below both; bench starts the other one where it is asked for, by name"
    from fastrl_replay.bench import traintime
    used = {path.stem: set(re.findall(r'\b(bench|traintime)\b', ' '.join(re.findall(r'^ *(?:from|import) .*|import_module\(.*', path.read_text(), re.M))))
            for path in (files('fastrl_replay')/'bench'/f'{name}.py' for name in ('peers', 'traintime'))}
    assert used == dict(peers=set(), traintime=set()) and traintime.machine is bench.machine is peers.machine

# ---- rows ----

@given(st.integers(0, 5000), st.integers(2, 60), st.data())
def test_wrong_rows_finds_whatever_is_changed(start, n, data):
    rows, cols = Rows(10_000), Rows(10_000).part(start, start+n)
    assert wrong_rows(cols, n, rows) == 0
    name, i = data.draw(st.sampled_from(['state', 'action', 'reward', 'next_state'])), data.draw(st.integers(0, n-1))
    spoiled = {k: v.copy() for k, v in cols.items()}
    spoiled[name][i] += 1
    assert wrong_rows(spoiled, n, rows) == 1
    assert wrong_rows({k: v[:-1] for k, v in cols.items()}, n, rows) == 1

def test_pictures_are_checked_too():
    rows = Rows(600, pictures=True)
    cols = rows.part(240, 270)
    assert wrong_rows(cols, 30, rows) == 0
    cols['next_state'][3,80,80,2] += 1
    assert wrong_rows(cols, 30, rows) == 1

@pytest.mark.parametrize('size', [1, 99_999, 100_000, 100_001])
def test_chunks_are_all_rows_once(size):
    whole = [c['state'][:,0] for _, c in Rows(size).chunks()]
    assert np.array_equal(np.concatenate(whole), np.arange(size, dtype=np.float32))

# ---- peers ----

def test_what_a_library_prints_is_not_taken_for_an_answer(strangers):
    with closing(Peer('noisy')) as p:
        assert p.ask('prepare', job='uniform', size=100, n=8)['wrong'] == 0
        assert p.timeit(2) > 0

def test_errors_and_crashes_are_told(strangers):
    with closing(Peer('broken')) as p:
        with pytest.raises(PeerError, match=r'^RuntimeError: no such$'): p.ask('prepare', job='uniform', size=100, n=8)
        with pytest.raises(PeerError): p.timeit(1)          # nothing is prepared
        with pytest.raises(PeerError, match='AttributeError'): p.ask('dance')
    with closing(Peer('mortal')) as p:
        p.ask('prepare', job='uniform', size=100, n=8)
        with pytest.raises(PeerError, match='crashed: out of life'): p.timeit(1)

def test_no_process_is_left_of_a_peer(strangers):
    p = Peer('noisy')
    p.close()
    assert p.process.poll() == 0

@pytest.mark.slow   # smaller: `test_errors_and_crashes_are_told`, `test_wrong_rows_finds_whatever_is_changed`
def test_entries_that_fail_or_lie_are_left_out(strangers):
    running = {name: Peer(name) for name in strangers}
    try:
        there, wrong = entries(CONTESTS['draw 32 rows'], 1_000, running)
        assert list(there) == ['fastrl_replay', 'noisy', 'mortal', 'bare take']
        assert wrong['broken'] == 'RuntimeError: no such' and 'wrong rows' in wrong['liar'] and wrong['short'] == '1 wrong rows'
        there, wrong = entries(CONTESTS['a step of 1 CartPole'], 1_000, running)
        assert list(there) == ['fastrl_replay', 'bare env.step'] and not wrong
    finally:
        for p in running.values(): p.close()

@pytest.mark.slow
def test_a_whole_run_with_strangers(strangers, monkeypatch):
    "One that crashes while it is timed is named, and the others' figures are kept."
    monkeypatch.setattr(bench, 'CONTESTS', {t: CONTESTS[t] for t in ('draw 32 rows', 'insert 8 rows')})
    results = bench.run(options.contest_options([]), 2_000, rounds=2, seconds=.001)
    assert set(results['peers']) == {*ADAPTERS} - set(results['missing'])
    assert {'noisy', 'liar'} <= set(results['peers'])
    times = results['contests']['draw 32 rows']
    assert list(times)[0] == 'fastrl_replay' and list(times)[-1] == 'bare take' and 'liar' not in times and len(times['noisy']) == 2
    assert 'mortal' not in times and 'crashed' in results['faults']['draw 32 rows']['mortal']
    said = summary(results)
    assert '- liar failed at “draw 32 rows”' in said and json.loads(json.dumps(results)) == results
    assert 60 < results['bytes_a_row']['fastrl_replay'] < 100

@pytest.mark.slow
def test_growth_names_who_fails_too(strangers):
    "One that lies, one that crashes while it is timed; the others' curves go on."
    running = {name: Peer(name) for name in ('noisy', 'liar', 'mortal')}
    try: took, faults = bench.growth(running, rounds=1, largest=10_000, progress=False)
    finally:
        for p in running.values(): p.close()
    assert set(took['uniform']) == {'fastrl_replay', 'noisy'} and set(took['sequences']) == {'fastrl_replay'}
    wrong = faults['uniform, 10,000 rows']
    assert 'wrong rows' in wrong['liar'] and 'crashed' in wrong['mortal'] and not faults['sequences, 10,000 rows']

def test_memory_names_who_fails_too(strangers):
    wrong = {}
    assert set(bench.bytes_a_row(1_000, {'noisy': sys.executable, 'broken': sys.executable}, wrong)) == {'fastrl_replay', 'noisy'}
    assert wrong == {'broken': 'RuntimeError: no such'}

def test_measure_interleaves_entries():
    order = []
    times = measure({'a': lambda: order.append('a'), 'b': lambda: order.append('b')}, rounds=3, seconds=1e-4)
    turns = re.sub(r'(.)\1*', r'\1', ''.join(order))
    assert turns == 'abababab' and [len(t) for t in times.values()] == [3, 3]   # the warm-up, then three rounds

# ---- frames ----

class Noise(gym.Env):
    "Episodes of seven steps, the last of which ends by itself or is cut off, in turn; frames are noise"
    observation_space, action_space = Box(0, 255, (12, 10), np.uint8), Discrete(3)
    episode = 0
    def look(self): return self.np_random.integers(0, 256, (12, 10), np.uint8)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return self.look(), {}
    def step(self, action):
        self.t += 1
        return self.look(), 1., self.t == 7 and self.episode % 2 == 0, self.t == 7 and self.episode % 2 == 1, {}

def noise(): return FrameStackObservation(Noise(), 4)

@pytest.fixture(scope='module')
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp('frames')
    return folder, frames.record(str(folder), 'Noise', noise, 160, seed=3)

def test_what_is_recorded_is_what_was_played(played):
    folder, found = played
    rows, blocks = peer_memories.Recorded(folder, 'Noise'), iter(frames.random_play(noise, seed=3))
    for t in range(20):
        block, part = next(blocks), rows.part(np.arange(8)*20 + t)
        for k in part:
            if k != 'reward': assert np.array_equal(block.rows[k], part[k]), (t, k)
    assert np.array_equal(rows.rows['reward'], np.arange(160)) and found['frames'] == len(rows.frames) == 8*(20 + 3)
    assert rows.over.sum() == 8*2 and rows.ends.sum() == 8*3 and rows.ends[19::20].all()

def test_every_byte_of_a_drawn_row_is_compared(played):
    rows = peer_memories.Recorded(played[0], 'Noise')
    test = peer_memories.FrameTest(None, rows)
    for name in ('state', 'action', 'next_state', 'terminated'):
        cols = rows.part(np.arange(32))
        cols[name].reshape(32, -1)[13, -1] ^= cols[name].dtype.type(1)
        test.memory = SimpleNamespace(draw=lambda: [cols[k] for k in ('state', 'action', 'reward', 'next_state', 'terminated')])
        assert test.check(1) == dict(rows=32, wrong=1, ends=3, wrong_ends=1), name

def test_memories_of_frames_that_lie_or_crash_are_named(strangers, played, monkeypatch):
    "In processes, as the libraries' are."
    there = {'bare take': frames.MEMORIES['bare take'], 'noisy, plain': ('noisy', 'plain'),
        'liar, lossy': ('liar', 'lossy'), 'mortal, short': ('mortal', 'short'), 'broken, any': ('broken', 'any')}
    monkeypatch.setattr(frames, 'MEMORIES', there)
    found, wrong = frames.frame_contest(played[0], 'Noise', rounds=2, number=20)
    assert list(found) == ['bare take', 'noisy, plain', 'liar, lossy'] and list(wrong) == ['mortal, short', 'broken, any']
    assert 'crashed: out of life' in wrong['mortal, short'] and 'KeyError' in wrong['broken, any']
    assert found['noisy, plain']['checked']['wrong'] == 0 and found['noisy, plain']['version'] == '0.0'
    assert found['noisy, plain']['add_8_us'] > 0 and found['liar, lossy']['add_8_us'] is None
    lost = found['liar, lossy']['checked']
    assert lost['wrong'] > lost['wrong_ends'] == lost['ends'] > 0
    results = dict(machine=made_up()['machine'], rows=160, games=dict(Noise=dict(memories=found)), missing=wrong, faults={}, fill={})
    said = frames.frame_report(results)
    assert '- mortal, short was left out: crashed' in said and f'no: {lost["wrong"]} of' in said and 'not measured' in said

def test_the_bench_hands_frames_their_options(capsys):
    with pytest.raises(SystemExit): options.main(['--frames', '--rows', '8'])
    assert '--rows: expected 64 or more' in capsys.readouterr().err
    with pytest.raises(SystemExit): options.main(['--help'])
    assert '--frames --help says more' in ' '.join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit): options.main(['--frames', '--help'])
    assert '--fill ROWS' in capsys.readouterr().out

# ---- memories on disk ----

@pytest.fixture
def on_disk(tmp_path): return peer_memories.DiskTest(disk.OurDisk, str(tmp_path/'memory'), 150)

def test_each_row_that_comes_from_disk_is_compared(on_disk, monkeypatch):
    on_disk.fill(block=64)
    for way in disk.PAGES:
        found = on_disk.draw(way, 8, 0, 5)
        assert (found['wrong'], found['rows'], len(found['us'])) == (0, 24, 3), way
    on_disk.memory.replay.memory._parts[1]._mem.reshape(150, -1)[:,30_000] ^= 1   # a byte of each next state
    assert on_disk.draw('asks for pages', 8, 0, 3)['wrong'] == 24

@pytest.mark.skipif(sys.platform != 'linux', reason='the cache is told what to drop')
def test_cold_is_cold(on_disk, tmp_path):
    on_disk.fill()
    peer_memories.read_at_places(on_disk.folder)
    before = peer_memories.share_cached(on_disk.folder)
    peer_memories.forget_pages(on_disk.folder)
    if peer_memories.share_cached(on_disk.folder) > .5: pytest.skip('files here are in main memory')
    assert before > .9 and not peer_memories.mappings(tmp_path/'elsewhere')
    assert on_disk.draw('asks for pages', 8, 0, 3, cold=True)['wrong'] == 0

@pytest.mark.parametrize('groups, files, where', [
    ('3:memory:/a/b', ['memory/a/b/x', 'memory/a/x'], 'memory/a/b'),
    ('3:cpu,memory:/gone/b', ['memory/x'], 'memory'),                 # in a container
    ('0::/a/b', ['a/b/x', 'a/cgroup.subtree_control/x', 'a/b/cgroup.subtree_control/x'], ''),   # the inner ones refuse
    ('5:cpu:/', ['x'], None)])
def test_a_group_is_made_where_it_can_be(tmp_path, groups, files, where):
    (tmp_path/'proc/self').mkdir(parents=True)
    (tmp_path/'proc/self/cgroup').write_text(groups)
    for f in files: (tmp_path/'sys/fs/cgroup'/f).parent.mkdir(parents=True, exist_ok=True)
    if where is None:
        with pytest.raises(ArgumentError, match='--limit 0 --size GIB'): disk.MemoryLimit(2**20, tmp_path)
        return
    limit = disk.MemoryLimit(2**20, tmp_path)
    assert limit.folder.parent == tmp_path/'sys/fs/cgroup'/where
    assert [p.read_text() for p in limit.folder.iterdir()] == [str(2**20)]
    assert limit.around(['python'])[-2:] == [str(limit.folder/'cgroup.procs'), 'python']

def test_a_process_has_what_its_group_allows():
    try: limit = disk.MemoryLimit(700*2**20)
    except ArgumentError as e: pytest.skip(str(e))
    try:
        with closing(disk.our_process(limit)) as entry: assert entry.ask('has') == 700*2**20
    finally: limit.close()
    assert not limit.folder.exists()

def test_the_bench_hands_disk_its_options(capsys, monkeypatch):
    with pytest.raises(SystemExit): options.main(['--disk', '--limit', '0'])
    assert '--limit 0 takes --size GIB' in capsys.readouterr().err
    with pytest.raises(SystemExit): options.main(['--disk', '--help'])
    assert '--limit GIB' in capsys.readouterr().out
    def refuse(nbytes): raise ArgumentError('bench', 'groups', 'none')
    monkeypatch.setattr(disk, 'MemoryLimit', refuse)
    with pytest.raises(ArgumentError): disk._limit(options.disk_options([]))
    assert disk._limit(options.disk_options(['--size', '1'])) is None and 'measured without' in capsys.readouterr().err
    assert disk._limit(options.disk_options(['--limit', '0', '--size', '.01'])) is None

# ---- reports ----

def made_up(**times):
    return dict(machine=dict(date='today', cpu='abacus', cores=1), peers=dict(cpprb='1'), size=10, missing=dict(torchrl='not installed for x'), faults={},
        copy_speed=1e9, bytes_a_row={}, contests={'draw 256 rows': {who: [t, t, 3*t] for who, t in times.items()}})

def test_targets_are_shown_where_asked_for_only(monkeypatch, capsys):
    "A user sees what things cost; what the developers aimed at, and missed, with --targets"
    from fastrl_replay.bench import bench
    results = made_up(fastrl_replay=2., cpprb=5., bare=1.)
    monkeypatch.setattr(bench, 'run', lambda *a, **k: results)
    for more, shown in ([], False), (['--targets'], True):
        options.main(['--quick', *more])
        said = capsys.readouterr().out
        assert ('missed' in said) == ('target' in said) == shown and '| draw 256 rows |' in said

def test_targets_say_met_missed_and_not_measured():
    assert [f[1:] for f in TARGETS if f[0] == 'draw 256 rows'] == [('bare take', 1.25), (None, 3.5)]
    lines = lambda **k: [l for l in targets(made_up(**k)).splitlines() if l.startswith('| draw 256 rows |')]
    met, missed = lines(fastrl_replay=2., cpprb=7., **{'bare take': 2.4})
    assert met.endswith('| bare take | 1.25 × | 1.2 × | **missed** |') and missed.endswith('| cpprb | 3.5 × | 3.5 × | met |')
    assert [l.endswith('not measured |') for l in lines(fastrl_replay=2., bare=1.)] == [True, True]

def test_parts_are_timed_beside_the_whole(monkeypatch):
    done = []
    def prepare(size): return lambda: done.append(size), {'half': Part(lambda: done.append('half'), '1 of the row')}
    monkeypatch.setattr('fastrl_replay.bench.parts.PARTS', {'draw': prepare})
    found = run_parts(7, 1, .0001)
    assert set(found['draw']) == {'whole', 'half'} and {7, 'half'} == set(done) and found['draw']['half']['lines'] == '1 of the row'
    assert all(t > 0 for p in found['draw'].values() for t in (p['warm'], p['cold']))

def test_what_the_parts_leave_is_the_rest():
    part = lambda warm, cold: dict(warm=warm, cold=cold, lines='')
    whole, half, rest = parts_table({'draw': dict(whole=part(10., 20.), half=part(4., 25.))}).splitlines()[2:]
    assert [c.strip() for c in rest.split('|')[2:5]] == ['the rest', '6', '-5'] and '**10**' in whole and '| 4 | 25 |' in half

def test_the_fastest_peer_is_a_library():
    r = made_up(fastrl_replay=2., cpprb=12., deque=9., bare=1.)
    assert fastest(r, 'draw 256 rows') == ('deque', 9.) and medians(r, 'draw 256 rows')['cpprb'] == 12
    assert '| draw 256 rows | **2** | bare | 1 | 2.00 | deque | 9 | 4.5 |' in table(r)
    assert fastest(made_up(fastrl_replay=2., bare=1.), 'draw 256 rows') is None

def test_report_says_which_libraries_are_missing_and_how_to_get_them():
    said = summary(made_up(fastrl_replay=2., bare=1.))
    assert '- torchrl was left out: not installed for x.' in said and "pip install '.[peers]'" in said and '--peer-python' in said
    assert 'date today, cpu abacus, cores 1, cpprb 1' in said

@pytest.mark.parametrize('args, word', [(['--peer-python', 'numpy=x'], 'expected NAME=PATH'), (['--peer-python', 'cpprb'], 'expected NAME=PATH'), (['--speed'], 'unrecognized')])
def test_options_are_checked_before_anything_runs(args, word, capsys):
    with pytest.raises(SystemExit): options.main(args)
    assert word in capsys.readouterr().err

def test_an_interpreter_for_all_or_for_one():
    a = options.contest_options(['--peer-python', 'all=p', '--peer-python', 'cpprb=q'])
    assert a.pythons == {**{n: 'p' for n in ADAPTERS}, 'cpprb': 'q'}

def test_without_matplotlib_there_are_no_pictures_and_a_word(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with redirect_stdout(io.StringIO()) as said: bench.save(made_up(fastrl_replay=2., bare=1.), tmp_path/'out')
    assert sorted(p.name for p in (tmp_path/'out').iterdir()) == ['bench.json', 'bench.md'] and 'matplotlib is missing' in said.getvalue()

# ---- the figures that the pages show ----

def test_the_figures_are_of_this_bench():
    "Every contest, every peer, with date and machine, as the command writes it."
    results = json.loads((files('fastrl_replay')/'measured/bench.json').read_text())
    assert set(results['contests']) == set(CONTESTS) and set(results['peers']) == set(ADAPTERS) and not results['missing']
    assert not any(results['faults'].values()), results['faults']
    assert results['size'] == 1_000_000 and {'date', 'cpu', 'cores', 'torch', 'numpy'} <= set(results['machine'])
    assert {'growth', 'train', 'buffers', 'copy_speed', 'bytes_a_row', 'as_drawn'} <= set(results)
    assert set(results['cold']) == {t for t, c in CONTESTS.items() if c.job} and set(results['parts']) == set(PARTS)
    assert 'not measured' not in targets(results)
    assert set(results['buffers']['seconds']) == set(buffers.BUFFERS)

@pytest.mark.skipif(not (files('fastrl_replay')/'measured/frames.json').is_file(), reason='not measured yet')
def test_the_figures_of_frames_are_of_this_bench():
    results = json.loads((files('fastrl_replay')/'measured/frames.json').read_text())
    assert set(results['games']) == set(frames.GAMES) and not results['missing'] and results['rows'] == 20_000
    for game in results['games'].values():
        assert set(game['memories']) == set(frames.MEMORIES)
        for name, f in game['memories'].items():
            c = f['checked']
            assert c['wrong'] == c['wrong_ends'] == (c['ends'] if 'stable' in name else 0), name
    assert 'not measured' not in frames.aims(results)
    fill = results['fill']['Pong']
    assert fill['rows'] == 1_000_000 and fill['wrong_blocks'] == 0

@pytest.mark.skipif(not (files('fastrl_replay')/'measured/disk.json').is_file(), reason='not measured yet')
def test_the_figures_of_memories_on_disk_are_of_this_bench():
    results = json.loads((files('fastrl_replay')/'measured/disk.json').read_text())
    assert set(results['memories']) == {'fastrl_replay', *peer_memories.DISK_MEMORIES} and not results['missing']
    assert results['limit'] == results['memory'] and results['rows']*disk.ROW.itemsize > 1.99*results['limit']
    for name, found in results['memories'].items():
        ways = list(disk.PAGES) if name == 'fastrl_replay' else list(peer_memories.DISK_MEMORIES[name].ways)
        assert [(f['way'], f['bs']) for f in found['draws']] == [(way, bs) for way in ways for bs in disk.SIZES]
        assert not any(f[when]['wrong'] for f in found['draws'] for when in ('cold', 'warm'))
