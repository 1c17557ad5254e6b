"""Looking into a memory: facts against a naive count on all kinds and places, nothing changed by it, remarks on faults and none without, the figure."""
import builtins, copy

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces

from fastrl_replay.all import (ExperienceReplay, Frames, GymStepper, HindsightReplay, Mixture, NStep, PrioritizedReplay, Rows,
                               Sampler, SequenceReplay, Timeline, step_dtype)
from fastrl_replay.app.offline import open_memory
from fastrl_replay.envs.bitflip import BitFlip
from fastrl_replay.envs.catch import Catch
from fastrl_replay.look.memory_figure import memory_figure, png_of
from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.row_dtypes import leaves
from fastrl_replay.testing import same
from test_memory_cli import naive, pixels, story

# ---- all kinds and places ----

class Mine(Sampler):
    "One that says nothing of itself"
    def sample(self, n): return self.first + (self.random(n)*len(self)).astype(int), 1/len(self)

GOALS = spaces.Dict(observation=spaces.Box(-1, 1, (1,)), achieved_goal=spaces.Box(-1, 1, (1,)), desired_goal=spaces.Box(-1, 1, (1,)))

def rows_for(kind, n, first=0):
    "Rows as a replay of this kind wants them"
    if kind == 'frames': return Steps(pixels(n + first).rows[first:].copy())
    if kind == 'hindsight':
        rows = np.zeros(n, step_dtype(GOALS, spaces.Discrete(2)))
        rows['env_id'], rows['episode_n'], rows['step_n'] = np.arange(n) % 2, first + 1 + np.arange(n)//20, np.arange(n) % 20//2 + 1
        rows['terminated'] = rows['step_n'] == 10
        return Steps(rows)
    return story(n, seed=n, first=first)

KINDS = dict(
    timeline=lambda s: Timeline(60, s), uniform=lambda s: ExperienceReplay(bs=4, max_sz=60, seed=0, store=s),
    proportional=lambda s: PrioritizedReplay(bs=4, max_sz=60, seed=0, store=s), rank=lambda s: PrioritizedReplay(bs=4, max_sz=60, kind='rank', seed=0, store=s),
    mine=lambda s: ExperienceReplay(bs=4, max_sz=60, sampler=Mine(0), store=s), frames=lambda s: ExperienceReplay(bs=4, max_sz=60, seed=0, store=s),
    sequences=lambda s: SequenceReplay(bs=4, max_sz=60, length=4, burn_in=1, overlap=2, seed=0, store=s),
    hindsight=lambda s: HindsightReplay(bs=4, max_sz=60, seed=0, store=s, reward=lambda a, d, i: np.zeros(len(a))))
PLACES = 'main memory', 'directory', 'cpu'

def store_in(place, kind, tmp_path, **more):
    how = dict(path=tmp_path/'m', **dict(dict(spare=13), **more)) if place == 'directory' else dict(device='cpu') if place == 'cpu' else {}
    return Frames(2, **how) if kind == 'frames' else Rows(**how)

def filled(kind, place, tmp_path):
    memory = KINDS[kind](store_in(place, kind, tmp_path))
    for first, n in (0, 51), (51, 51): memory.add(rows_for(kind, n, first))
    if kind == 'timeline': return memory
    for i in range(3):
        batch = memory.sample()
        if kind in ('proportional', 'rank'): memory.update_priorities(batch.index, torch.arange(4.) + i)
    return memory

def timeline_of(memory): return memory if isinstance(memory, Timeline) else memory.memory

@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('kind', KINDS)
def test_facts_are_those_of_the_memory(kind, place, tmp_path):
    memory = filled(kind, place, tmp_path)
    seen, line = memory.inside(), timeline_of(memory)
    rows, row, e = line[:].to('cpu').rows, seen['row'], seen['episode']
    assert (seen['place'], seen['rows'], seen['max_sz'], seen['inserted'], seen['oldest']) == (place, 60, 60, 102, 42)
    assert seen['path'] == (str(tmp_path/'m') if place == 'directory' else None) and sum(seen['nbytes'].values()) == memory.nbytes
    assert row['key'].tolist() == line.keys.tolist() and row['drawn'].tolist() == line.times_drawn.tolist()
    for n in 'env_id', 'step_n', 'reward': assert row[n].tolist() == rows[n].tolist(), n
    over = rows['terminated'] | rows['truncated']
    assert row['ended'].tolist() == over.tolist() and seen['columns'][0]['name'].startswith('state')
    want = naive(rows)
    assert len(e['end']) == sum(want['episodes'][k] for k in ('ended', 'running', 'broken_off')) and row['broken'].sum() == want['episodes']['broken_off']
    for i, (first, last) in enumerate(zip(e['first'], e['last'])):      # by the links, one row at a time
        keys = [last]
        while (before := line.walk([keys[-1]], [-1]).item()) >= 0: keys.append(before)
        assert keys[-1] == first and sorted(keys) == row['key'][row['episode'] == i].tolist()
        assert e['whole'][i] == (rows['step_n'][first - 42] == 1) or kind == 'frames'
    if hasattr(memory, 'close'): memory.close()

@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('kind', [k for k in KINDS if k != 'timeline'])
def test_what_can_be_drawn_is_told(kind, place, tmp_path):
    "With the sampler's own probabilities; what it doesn't say is left out"
    replay = filled(kind, place, tmp_path)
    draw, sampler = replay.inside()['draw'], replay.sampler
    assert len(draw['key']) == len(replay) and (np.diff(draw['key']) > 0).all() and (draw['length'] >= 1).all()
    if kind == 'mine': assert draw['probability'] is None
    else: assert draw['probability'].sum() == pytest.approx(1) and sorted(draw['probability']) == pytest.approx(sorted(sampler.probabilities()))
    assert (draw['priority'] is None) == (kind not in ('proportional', 'rank', 'sequences'))
    if kind in ('proportional', 'rank'): assert draw['priority'].tolist() == sampler.kept().tolist()
    if kind == 'sequences':
        table = replay.table
        lengths = dict(zip(table.first[table.first >= 0].tolist(), table.steps[table.first >= 0].tolist()))
        assert dict(zip(draw['key'].tolist(), draw['length'].tolist())) == lengths
    replay.close()

@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('kind', [k for k in KINDS if k != 'timeline'])
def test_looking_changes_nothing(kind, place, tmp_path):
    "The state is the same, and so are the batches that come; what was seen stays as it was"
    (a, b), batches = (filled(kind, place, tmp_path/x) for x in 'ab'), []
    before = copy.deepcopy(a.state_dict()) if place != 'directory' else None
    seen = a.inside()
    kept = copy.deepcopy(seen)
    a.inside(), a.show()
    if before is not None: assert same(a.state_dict(), before)
    for r in a, b:
        torch.manual_seed(0)
        got = []
        for i in range(3):
            r.add(rows_for(kind, 6, 102 + 6*i))
            batch = r.sample()
            got.append({n: x.copy() for n, x in leaves(batch.to('cpu').rows)})
            if kind in ('proportional', 'rank'): r.update_priorities(batch.index, torch.arange(4.))
            if r is a: a.inside()
        batches.append(got)
    assert all(np.array_equal(x[n], y[n]) for x, y in zip(*batches) for n in x)
    for part in 'row', 'episode':
        for n, x in seen[part].items(): assert x is None or np.array_equal(x, kept[part][n])
    a.close(), b.close()

@pytest.mark.parametrize('kind', ['timeline', 'uniform', 'proportional', 'rank', 'frames', 'sequences'])
def test_a_reader_sees_what_the_writer_left(kind, tmp_path):
    "By `open_memory`, and by a replay with mode='r'; the directory stays as it is"
    writer = filled(kind, 'directory', tmp_path)
    there = writer.inside()
    writer.flush()
    files = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob('*') if p.is_file()}
    seen = open_memory(tmp_path/'m').inside()
    for part in 'row', 'episode':
        for n, x in there[part].items(): assert np.array_equal(seen[part][n], x), n
    if kind in ('proportional', 'rank', 'sequences'):
        assert seen['unit'] == there['unit'] and seen['draw']['probability'].sum() == pytest.approx(1)
        for n in 'key','priority': assert seen['draw'][n].tolist() == there['draw'][n].tolist()
    reader = KINDS[kind](store_in('directory', kind, tmp_path, mode='r', spare=0))
    if kind != 'timeline':
        assert reader.inside()['draw']['key'].tolist() == there['draw']['key'].tolist()
    assert reader.show() is not None
    assert files == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob('*') if p.is_file()}
    if kind in ('proportional', 'uniform'):   # its own draws count for it, and for nobody else
        reader.sample(30)
        assert reader.inside()['row']['drawn'].sum() == 30 and open_memory(tmp_path/'m').inside()['row']['drawn'].sum() == there['row']['drawn'].sum()
    writer.close()

@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('kind', KINDS)
def test_an_empty_memory_is_told_and_shown(kind, place, tmp_path):
    memory = KINDS[kind](store_in(place, kind, tmp_path))
    seen = memory.inside()
    assert seen['rows'] == len(seen['row']['key']) == len(seen['episode']['end']) == 0 and seen['draw'] is None and seen['remarks'] == []
    assert png_of(memory.show()).startswith(b'\x89PNG')
    memory.close()

def test_a_memory_that_was_not_opened_so_far_is_opened_by_looking(tmp_path):
    filled('proportional', 'directory', tmp_path).close()
    again = KINDS['proportional'](Rows(tmp_path/'m', spare=13))
    assert 'not opened so far' in repr(again) and again.inside()['rows'] == 60
    again.close()

def test_columns_of_large_rows_on_disk_are_not_read_for_all_rows(tmp_path, monkeypatch):
    "Episodes are told by their last rows alone; what would take long to read is unknown, not zero"
    from fastrl_replay.memory import timeline_inside
    memory = filled('timeline', 'directory', tmp_path)
    all_of_it = memory.inside()
    monkeypatch.setattr(timeline_inside, '_AT_ONCE', 100)
    few = memory.inside()
    assert few['row']['reward'] is None and few['row']['env_id'].tolist() == all_of_it['row']['env_id'].tolist()
    for n, x in all_of_it['episode'].items(): assert np.array_equal(few['episode'][n], x)
    memory.close()

def test_a_mixture_tells_of_each_replay():
    parts = {k: filled(k, 'main memory', None) for k in ('uniform', 'proportional')}
    seen = Mixture(parts, dict(uniform=.25, proportional=.75), bs=8).inside()
    assert seen['shares'] == dict(uniform=.25, proportional=.75) and [p['title'] for p in seen['parts'].values()] == ['ExperienceReplay', 'PrioritizedReplay']
    fig = Mixture(parts, dict(uniform=.25, proportional=.75), bs=8).show()
    assert fig._suptitle.get_text() == 'Mixture: 2 replays, batches of 8'
    said = {a.get_title(): [t.get_text().strip() for t in a.texts] for a in fig.axes}
    assert said['shares of a batch'] == ['25%', '75%'] and said['rows'] == ['60 (100%)']*2 and said['mean age of drawn rows'] == [f'{p.stats()["age_mean"]:,.0f}' for p in parts.values()]
    assert said['never drawn'] == [f'{(p.memory.times_drawn == 0).mean():.0%}' for p in parts.values()] and [said['effective sample size'][0], len(said['effective sample size'])] == ['100%', 2]

def test_rows_of_several_steps_end_where_episodes_do():
    blocks = [story(200, envs=1, seed=3)[i:i+10] for i in range(0, 200, 10)]
    replay = ExperienceReplay(NStep(blocks, 3, .9), bs=4, max_sz=500)
    for _ in replay: pass
    rows, seen = replay.memory[:].rows, replay.inside()
    assert (rows['n'] > 1).any()
    assert seen['row']['ended'].tolist() == ((rows['terminated'] | rows['truncated']) & (rows['n'] == 1)).tolist()

# ---- remarks ----

def played(envs, n=3000, max_sz=None, bs=32, cls=ExperienceReplay, **kw):
    "A memory of so many rows, from which something was drawn"
    replay = cls(bs=bs, max_sz=max_sz or n, seed=0, **kw)
    for block in GymStepper(envs, seed=0):
        replay.add(block)
        if replay.memory.inserted >= n: break
    for _ in range(12):
        batch = replay.sample()
        if cls is PrioritizedReplay: replay.update_priorities(batch.index, torch.rand(bs))
    return replay

class Sprites(gym.Env):
    "Pictures like those of an old console: a still background, and a few things that move"
    observation_space, action_space = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(4)
    def __init__(self, game=0): self.game = game
    def _look(self):
        frame = self.ground.copy()
        for y, x in self.at: frame[y:y+8, x:x+6] = 236
        return frame
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ground = np.kron(np.random.default_rng(self.game).integers(0, 200, (7, 7)), np.ones((12, 12))).astype(np.uint8)
        self.at, self.t = self.np_random.integers(0, 76, (3, 2)), 0
        self.frames = [self._look()]*4
        return np.stack(self.frames), {}
    def step(self, action):
        self.at = np.clip(self.at + self.np_random.integers(-3, 4, (3, 2)), 0, 76)
        self.at[0, 1] = np.clip(self.at[0, 1] + 6*(action - 1), 0, 76)
        self.t += 1
        self.frames = self.frames[1:] + [self._look()]
        return np.stack(self.frames), float(self.np_random.random() < .02), bool(self.np_random.random() < .01), self.t > 300, {}

HEALTHY = dict(cartpole=['CartPole-v1']*4, one=['CartPole-v1'], pendulum=['Pendulum-v1']*3, catch=[Catch]*3, bitflip=[lambda: BitFlip(4)]*3, taxi=['Taxi-v4']*2,
               lake=['FrozenLake-v1']*3, acrobot=['Acrobot-v1']*2, blackjack=['Blackjack-v1']*2, sprites=[Sprites]*4)

@pytest.mark.parametrize('n', [100, 700, 3000])
@pytest.mark.parametrize('name', HEALTHY)
def test_nothing_is_said_of_healthy_memories(name, n):
    more = dict(store=Frames(4)) if name == 'sprites' else {}
    assert played(HEALTHY[name], n, **more).inside()['remarks'] == []
    if n == 700: assert played(HEALTHY[name], n, 500, cls=PrioritizedReplay, **more).inside()['remarks'] == []

def again(replay, change, **kw):
    "The same rows, changed, in another memory"
    rows = replay.memory[:].rows.copy()
    change(rows)
    new = ExperienceReplay(bs=32, max_sz=len(rows), seed=0, **kw)
    new.add(Steps(rows))
    return new

def shifted(by):
    def change(rows):
        for e in np.unique(rows['env_id']):
            i = np.flatnonzero(rows['env_id'] == e)
            rows['action'][i] = np.roll(rows['action'][i].copy(), by, 0)
    return change

def set_to(name, value):
    def change(rows): rows[name] = value
    return change

class Endless(gym.Wrapper):
    "Its episodes go on for ever: it begins anew and doesn't say so"
    def step(self, action):
        obs, reward, over, late, info = self.env.step(action)
        if over or late: obs, _ = self.env.reset()
        return obs, reward, False, False, info

def with_foreign_rows(share, store=True):
    ours, other = played([Sprites]*2, 1200), played([lambda: Sprites(9)]*2, 200)
    def change(rows):
        at = np.random.default_rng(0).choice(len(rows), int(share*len(rows)), False)
        for n in 'state', 'next_state': rows[n][at] = other.memory[:].rows[n][:len(at)]
    return again(ours, change, store=Frames(4))

def silent():
    replay = played(['CartPole-v1']*4, 2000)
    rows = replay.memory[:].rows
    new = ExperienceReplay(bs=32, max_sz=2000)
    new.add(Steps(rows[(rows['env_id'] != 2) | (np.arange(len(rows)) < 600)].copy()))
    return new

def never_answered(kind='proportional'):
    replay = PrioritizedReplay(bs=32, max_sz=1000, kind=kind, seed=0)
    for block in GymStepper(['CartPole-v1']*2, seed=0):
        replay.add(block)
        if replay.memory.inserted >= 1000: break
    for _ in range(40): replay.sample()
    return replay

def copied(rows): rows['next_state'] = rows['state']
def copied_at_ends(rows):
    over = rows['terminated'] | rows['truncated']
    rows['next_state'][over] = rows['state'][over]

FAULTS = {
    'all 3,000 rewards are 0': lambda: again(played(['CartPole-v1']*2), set_to('reward', 0)),
    'all 3,000 rewards are -1': lambda: played(['MountainCar-v0']*2),
    'environment 2 gave no row since key': silent,
    'environment 3 has ended no episode that is in memory': lambda: played(['CartPole-v1']*3 + [lambda: Endless(gym.make('CartPole-v1'))]),
    'priorities are alike (1)': never_answered, 'priorities are alike (1) ': lambda: never_answered('rank'),
    'action is the same in 3,000 sampled rows': lambda: again(played(['CartPole-v1']*2), set_to('action', 1)),
    'state is the same in': lambda: again(played(['CartPole-v1']*2), set_to('state', .5)),
    'next_state equals state in 100%': lambda: again(played(['CartPole-v1']*2), copied), 'next_state equals state in 100% ': lambda: again(played([Catch]*2), copied),
    'next_state equals state in 100%  ': lambda: again(played([lambda: BitFlip(4)]*2), copied),
    'rows that end an episode': lambda: again(played(['CartPole-v1']*2), copied_at_ends),
    'next_state is not the state of the next row': lambda: again(played(['CartPole-v1']*2), lambda rows: rows['next_state'].__imul__(3)),
    'states of environment 3 are unlike those of 3 others': lambda: played([Sprites]*3 + [lambda: Sprites(9)], 1500, store=Frames(4)),
    'states of environment 1 are unlike': lambda: again(played(['CartPole-v1']*3), lambda rows: [rows[n].__setitem__(rows['env_id'] == 1, 9 + rows[n][rows['env_id'] == 1]) for n in ('state', 'next_state')]),
    'next_state is not the state of the next row ': lambda: with_foreign_rows(.05),
    'rows are unlike all others': lambda: with_foreign_rows(.01),
    **{f'actions may {which}{" "*i}': lambda env=env, by=by: again(played(env), shifted(by))
       for i, env in enumerate([['CartPole-v1']*3, ['Pendulum-v1']*3, [Catch]*3, [lambda: BitFlip(4)]*3, ['Taxi-v4']*2]) for which, by in (('stand one row later', 1), ('take effect one row later', -1))}}

@pytest.mark.parametrize('text', FAULTS)
def test_a_fault_is_remarked(text):
    memory = FAULTS[text]()
    said = memory.inside()['remarks']
    assert any(text.strip() in line for line in said), said
    assert text.strip()[:20] in ' '.join(memory.show()._supxlabel.get_text().split()) or len(said) > 2

def remarks_of(memory, text):
    "Those that say it"
    return [r for r in memory.inside()['remarks'] if text in r]

def test_each_remark_has_rows_that_show_it():
    "Keys that are in memory, in which one sees what it says"
    endless = played(['CartPole-v1']*3 + [lambda: Endless(gym.make('CartPole-v1'))])
    remark, = remarks_of(endless, 'Its states jump like resets at steps')
    rows = endless.memory.take(remark.keys).rows
    assert len(remark.keys) == 3 and (rows['env_id'] == 3).all() and (abs(rows['next_state']) <= .05).all() and (abs(rows['state']).max(1) > .1).all()
    assert f'at steps {", ".join(map(str, rows["step_n"]))} and' in remark

@pytest.mark.parametrize('by', [1, -1])
def test_actions_that_are_shifted_are_shown_by_a_pair_of_rows(by):
    late = again(played(['CartPole-v1']*3), shifted(by))
    remark, = remarks_of(late, f'explained by the action of the {"next row" if by > 0 else "row before"} (')
    assert late.memory.walk(remark.keys[:1], [by]).item() == remark.keys[1] and len({*late.memory.take(remark.keys).rows['action']}) == 2

def test_states_that_are_copied_and_silence_have_their_rows():
    same_rows, = remarks_of(again(played(['CartPole-v1']*2), copied), 'next_state equals state')
    assert len(same_rows.keys) == 2
    silent_one, = remarks_of(silent(), 'gave no row since key')
    assert f'since key {silent_one.keys[0]:,},' in silent_one

def test_it_is_said_how_states_of_an_environment_differ():
    "By the number that lies farthest apart, or by the mean of a picture, and with a row of each"
    def inverted(rows):
        for n in 'state', 'next_state': rows[n][rows['env_id'] == 2] = 255 - rows[n][rows['env_id'] == 2]
    def moved(rows):
        for n in 'state', 'next_state': rows[n][rows['env_id'] == 1] += [50, 9, 9, 9]
    remark, = remarks_of(again(played(['CartPole-v1']*3), moved), 'unlike')
    assert 'mean of state[' in remark and ' against ' in remark and 'range' in remark, remark
    pictures = again(played([Catch]*4), inverted)
    remark, = remarks_of(pictures, 'unlike those of 3 others: mean of state 2')
    assert 'range' not in remark and [e == 2 for e in pictures.memory.take(remark.keys).rows['env_id']] == [True, False]

class Balanced(gym.Wrapper):
    "A pole that hardly ever falls, whatever the action"
    def reset(self, **kw):
        self.seen, info = self.env.reset(**kw)
        return self.seen, info
    def step(self, action):
        x, v, angle, w = self.seen
        self.seen, *more = self.env.step(int(3*angle + w + .05*x + .1*v > 0))
        return self.seen, *more

def test_an_episode_that_is_only_long_has_no_jumps():
    remark, = remarks_of(played(['CartPole-v1']*3 + [lambda: Balanced(gym.make('CartPole-v1', max_episode_steps=100_000))]), 'has ended no episode')
    assert 'jump' not in remark and remark.endswith('at most') and '750 steps so far' in remark

def test_lost_ends_are_found_among_pictures():
    remark, = remarks_of(played([Catch]*3 + [lambda: Endless(Catch())]), 'has ended no episode')
    assert 'is the end lost?' in remark

def test_draws_are_not_called_rows():
    "1,280 draws of 1,000 rows"
    remark, = never_answered().inside()['remarks']
    assert 'after 1,280 draws of rows in memory' in remark and len(remark.keys) == 1

def test_what_was_looked_at_is_said(monkeypatch):
    "Only what could be: not silence of a single environment, nor priorities that never had to change"
    both = played(['CartPole-v1']*2, 1500, cls=PrioritizedReplay).inside()
    assert both['remarks'] == [] and both['checked'] == 'priorities, rewards, ends, silence, columns, states, actions in 1,500 rows'
    assert played(['CartPole-v1'], 1500).inside()['checked'] == 'rewards, columns, states, actions in 1,500 rows'
    monkeypatch.setattr('fastrl_replay.memory.timeline_inside._SAMPLE', 1000)
    some = played(['CartPole-v1']*2, 1500).memory.inside()['checked']
    assert some.startswith('rewards, ends, silence in 1,500 rows; columns, states, actions in ') and some.endswith(' of 1,500 rows')
    assert ExperienceReplay(bs=2, max_sz=10).inside()['checked'] == ''

def test_environments_that_were_added_one_after_the_other_are_not_silent():
    rows = played(['CartPole-v1']*3, 1500).memory[:].rows
    replay = ExperienceReplay(bs=4, max_sz=1500)
    replay.add(Steps(rows[np.argsort(rows['env_id'], kind='stable')]))
    assert replay.inside()['remarks'] == []

def test_a_batch_that_waits_for_its_answer_is_no_reason_for_a_remark():
    replay = never_answered()
    replay.clear()
    replay.add(story(100))
    replay.sample()
    assert not any('priorities' in line for line in replay.inside()['remarks'])

def test_a_sample_is_bounded(monkeypatch):
    "20,000 rows, or 64 MB of them, and the same ones each time"
    taken = []
    real = Timeline.take
    monkeypatch.setattr(Timeline, 'take', lambda self, keys: taken.append(np.asarray(keys)) or real(self, keys))
    small, large = played(['Pendulum-v1']*8, 60_000), played([Sprites]*2, 3000, store=Frames(4))
    for r, most in (small, 20_000), (large, 2**26//large.memory.dtype.itemsize + 8):
        taken.clear()
        r.inside(), r.inside()
        assert len(taken) == 2 and np.array_equal(*taken) and most/3 < len(taken[0]) <= most

# ---- the figure ----

def titles(fig): return [a.get_title() for a in fig.axes if a.get_title()]

def test_what_is_not_known_has_no_panel():
    line, replay = filled('timeline', 'main memory', None), filled('uniform', 'main memory', None)
    assert [t.split()[0] for t in titles(line.show())][1:] == ['returns', 'lengths', 'bytes']
    assert any('never drawn' in t for t in titles(replay.show())) and not any('priorities' in t or 'effective' in t for t in titles(replay.show()))
    full = titles(filled('proportional', 'main memory', None).show())
    assert len(full) == 8 and any('priorities of 60 rows' in t for t in full) and any('effective sample size' in t for t in full)
    sequences = filled('sequences', 'main memory', None)
    n = sequences.stats()
    assert any('sequences never drawn' in t for t in titles(sequences.show())) and f'age {n["age_mean"]:,.0f} in the mean, {n["age_max"]:,} at most' in titles(sequences.show())
    assert len(titles(filled('mine', 'main memory', None).show())) == len(titles(replay.show()))   # a sampler that says nothing of itself
    assert 'priorities' not in ' '.join(titles(KINDS['proportional'](Rows()).show()))   # nothing was added so far

def panel(fig, title):
    found, = [a for a in fig.axes if a.get_title().startswith(title)]
    return found

def test_returns_that_are_lengths_are_drawn_once():
    "As in CartPole; with episodes that still run counted apart, and what is reserved called so"
    replay = played(['CartPole-v1']*2, 700)
    e, fig = replay.inside()['episode'], replay.show()
    running = int((e['end'] == 'running').sum())
    assert titles(fig)[:2] == [f'{len(e["end"]) - running} episodes, and {running} running', 'returns = lengths'] and 0 < running < 3
    assert titles(fig)[2].startswith('bytes reserved: ')
    assert {'returns', 'lengths of episodes'} <= {*titles(played(['Pendulum-v1']*2, 900).show())}

def test_rows_never_drawn_are_not_rounded_away():
    replay = ExperienceReplay(bs=997, max_sz=1000, seed=0)
    replay.add(story(1000))
    seen = replay.inside()
    for undrawn, said in (0, '0%'), (3, '0.3%'), (1, '0.1%'), (60, '6%'), (999, '99.9%'):
        drawn = np.ones(1000, np.int32)
        drawn[:undrawn] = 0
        fig = memory_figure({**seen, 'row': {**seen['row'], 'drawn': drawn}})
        assert f'{said} of rows never drawn' in titles(fig)

@pytest.mark.parametrize('envs', [1, 2, 6, 7])
def test_environments_have_colours_where_they_are_few(envs):
    "The same ones at the environments' numbers, though one of them has ended nothing; the line has one value for each key"
    replay = ExperienceReplay(bs=2, max_sz=900)
    replay.add(story(900, envs, seed=1))
    seen = replay.inside()
    seen['episode']['end'][seen['episode']['env_id'] == 0] = 'running'
    if envs == 1: seen = replay.inside()
    fig = memory_figure(seen)
    ax, ticks = panel(fig, 'returns'), panel(fig, f'{(seen["episode"]["end"] != "running").sum()} episodes').get_yticklabels()
    colors = [*dict.fromkeys(line.get_color() for line in ax.get_lines() if line.get_marker() == 'o' and len(line.get_xdata()))]
    if 2 <= envs <= 6: assert colors == [t.get_color() for t in ticks][1:] and [t.get_text() for t in ax.get_legend().get_texts()][:2] == ['env 1', *(['2'] if envs > 2 else ['truncated'])]
    else: assert len(colors) == 2   # terminated and truncated
    line, = [x for x in ax.get_lines() if x.get_marker() in ('', 'None') and len(x.get_xdata()) > 9]
    assert (np.diff(line.get_xdata()) > 0).all() and np.isfinite(line.get_ydata()).all()

def test_episodes_that_are_all_alike_have_a_sensible_axis():
    ax = panel(played(['Pendulum-v1'], 900).show(), 'lengths')
    dots, = [x for x in ax.get_lines() if len(x.get_xdata())]   # and no line through them
    assert ax.get_ylim() == (0, 260) and (dots.get_ydata() == 200).all() and dots.get_markersize() >= 3

def test_a_healthy_memory_says_in_grey_what_was_looked_at():
    "Warnings are in a colour that can be read on white and on black"
    from matplotlib.colors import to_rgb
    def contrast(color, ground):
        parts = [c/12.92 if c <= .03928 else ((c + .055)/1.055)**2.4 for c in to_rgb(color)]
        a, b = sorted([np.dot(parts, [.2126, .7152, .0722]) + .05, ground + .05])
        return b/a
    well, bad = played(['CartPole-v1']*2, 1500).show()._supxlabel, never_answered().show()._supxlabel
    assert well.get_text().startswith('nothing unusual: looked at rewards, ends, silence, columns, states, actions in 1,500 rows')
    assert bad.get_text().startswith('! all 1,000 priorities') and well.get_color() != bad.get_color()
    assert min(contrast(bad.get_color(), 0), contrast(bad.get_color(), 1)) > 4.5

def test_a_figure_leaves_nothing_in_pyplot():
    import matplotlib.pyplot as plt
    before = plt.get_fignums()
    fig = filled('proportional', 'main memory', None).show()
    assert plt.get_fignums() == before and fig._repr_png_().startswith(b'\x89PNG')

@pytest.mark.parametrize('make', [lambda: filled('timeline', 'main memory', None), lambda: filled('uniform', 'main memory', None),
                                  lambda: Mixture({k: filled(k, 'main memory', None) for k in ('uniform', 'rank')}, bs=4)])
def test_without_matplotlib_it_is_said_what_to_install(make, monkeypatch):
    memory, real = make(), builtins.__import__
    def absent(name, *args, **kw):
        if name.split('.')[0] == 'matplotlib': raise ImportError(name)
        return real(name, *args, **kw)
    monkeypatch.setattr(builtins, '__import__', absent)
    with pytest.raises(ImportError, match=r"matplotlib is not installed.*pip install 'fastrl_replay\[plot\]'"): memory.show()
    assert memory.inside()   # which needs none

@pytest.mark.parametrize('n, envs', [(1, 1), (40, 40), (5000, 3), (5000, 700)])
def test_a_figure_of_any_memory(n, envs):
    "One row; many environments; many episodes"
    replay = PrioritizedReplay(bs=1, max_sz=n, seed=0)
    replay.add(story(n, envs, seed=n))
    replay.update_priorities(replay.memory.keys, np.geomspace(1e-3, 1e3, n))
    replay.sample()
    fig = replay.show()
    assert len(titles(fig)) >= 5 and len(fig._repr_png_()) < 400_000

def test_shards_are_shown(recwarn):
    pipe = GymStepper(['CartPole-v1']*2, seed=0).experience_replay(bs=4, max_sz=200, warmup=20).parallel(2)
    assert 'nothing was started' in pipe.show()._supxlabel.get_text() or titles(pipe.show())
    for _, batch in zip(range(6), pipe): pass
    fig = pipe.show()
    pipe.close()
    assert [t for t in titles(fig) if not t.startswith('returns')] == ['shares of a batch', 'rows', 'bytes reserved', 'never drawn', 'effective sample size', 'mean age of drawn rows', 'items handed on', 'items since their weights', 'items waiting', 'restarts']
