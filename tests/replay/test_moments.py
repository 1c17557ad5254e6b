"""Moments of several agents: against a naive list, saved and resumed, on disk, in other stores, refused by name."""
import collections

import numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, settings, strategies as st
from scripted import take, through_file
from fastrl_replay.all import *
from fastrl_replay.replay.replay import Replay

KINDS = dict(agent='i4', moment='i8')
DTYPE = step_dtype(spaces.Box(0, 255, (8, 8), np.uint8), spaces.Discrete(3), **KINDS)

def block(rows):
    "(environment, agent, moment); the reward names them"
    a = np.zeros(len(rows), DTYPE)
    for i, (env, agent, moment) in enumerate(rows):
        a['env_id'][i], a['agent'][i], a['moment'][i] = 10*env + agent, agent, moment
        a['reward'][i], a['episode_n'][i], a['step_n'][i] = env*1000 + agent*100 + moment % 100, 1, moment + 1
    return Steps(a)

def naive(rows, max_sz, agents):
    "{first key: rewards by agent, None where there is none} of the moments whose rows are all there"
    found, oldest, before = {}, max(0, len(rows) - max_sz), None
    for key, (env, agent, moment) in enumerate(rows):
        if (env, moment) != before: first, before = key, (env, moment); found[first] = [None]*agents
        found[first][agent] = env*1000 + agent*100 + moment % 100
    return {k: v for k, v in found.items() if k >= oldest}

def shown(batch):
    return {k: [int(x) if m else None for x, m in zip(r, ms)] for k, r, ms in zip(batch.index.tolist(), batch.reward.tolist(), batch.mask.tolist())}

def all_of(replay, agents):
    "Every moment that can be drawn, by the view alone"
    replay._look()
    n, places = replay.view.places
    found = shown(replay.view.batch(places, np.ones(len(places)))) if len(places) else {}
    return {k - replay.memory.base: x for k, x in found.items()}

plans = st.lists(st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 3), min_size=1)), min_size=1, max_size=4, unique_by=lambda x: x[0]), min_size=1, max_size=25)

def blocks_of(plan):
    "Blocks of rows, each environment with a moment in a block"
    count, out = collections.Counter(), []
    for entry in plan:
        rows = []
        for env, agents in sorted(entry):
            rows += [(env, a, count[env]) for a in sorted(agents)]
            count[env] += 1
        out.append(rows)
    return out

@settings(max_examples=60, deadline=None)
@given(plans, st.integers(4, 40))
def test_what_can_be_drawn_is_what_a_list_of_rows_says(plan, max_sz):
    replay, rows = ExperienceReplay(bs=1, max_sz=max_sz, by=Moments(4), seed=0), []
    for b in blocks_of(plan):
        replay.add(block(b)); rows += b
        want = naive(rows, max_sz, 4)
        assert all_of(replay, 4) == want and len(replay) == len(want)
        if want: assert shown(replay.sample(min(5, len(want)))).items() <= want.items()

@settings(max_examples=30, deadline=None)
@given(plans, st.integers(4, 40), st.integers(0, 24))
def test_a_state_goes_on_with_the_same_draws(plan, max_sz, at):
    blocks = blocks_of(plan)
    at = min(at, len(blocks))
    def fill(replay, blocks):
        for b in blocks: replay.add(block(b))
    def make(): return ExperienceReplay(bs=2, max_sz=max_sz, by='moment', seed=3)
    one, two = make(), make()
    fill(one, blocks[:at])
    two.load_state_dict(through_file(one.state_dict()))
    fill(one, blocks[at:]), fill(two, blocks[at:])
    assert all_of(one, 4) == all_of(two, 4)
    if len(one) >= 2: assert [one.sample() == two.sample() for _ in range(5)] == [True]*5

def test_moments_are_drawn_alike_however_many_agents_they_have():
    replay = ExperienceReplay(bs=16, max_sz=400, by='moment', seed=1)
    for t in range(40): replay.add(block([(0, a, t) for a in range(1 + 3*(t % 2))]))
    counts = collections.Counter(k for _ in range(500) for k in replay.sample().index.tolist())
    n = np.array([counts[k] for k in naive([(0, a, t) for t in range(40) for a in range(1 + 3*(t % 2))], 400, 4)])
    assert n.sum() == 8000 and ((n - 200)**2/200).sum() < 80   # 39 degrees of freedom

def test_absent_agents_are_zeros_with_a_false_mask():
    replay = ExperienceReplay(bs=1, max_sz=10, by=Moments(4), seed=1)
    replay.add(block([(1, 1, 7), (1, 3, 7)]))
    batch = replay.sample()
    assert batch.mask.tolist() == [[False, True, False, True]] and batch.shape == (1, 4)
    assert not any(np.any(batch.rows[n][0, 0]) for n in batch.dtype.names) and batch.rows['env_id'][0].tolist() == [0, 11, 0, 13]
    assert batch.weight.tolist() == [1.] and batch.index.tolist() == [0]

def test_the_axis_grows_with_the_agents_that_were_seen():
    replay = ExperienceReplay(bs=1, max_sz=10, by='moment', seed=1)
    replay.add(block([(0, 0, 0)])); assert replay.sample().shape == (1, 1)
    replay.add(block([(0, 2, 1)])); assert replay.sample().shape == (1, 3)

def test_a_moment_that_comes_row_by_row_is_one():
    replay = ExperienceReplay(bs=1, max_sz=10, by='moment', seed=1)
    for a in range(3): replay.add(block([(0, a, 0)]))
    assert len(replay) == 1 and replay.sample().mask.tolist() == [[True]*3]

@pytest.mark.parametrize('store', [Rows, lambda path=None: Frames(1, path=path)], ids=['rows', 'frames'])
def test_moments_on_disk_go_on_with_their_rows(tmp_path, store):
    rows = [(e, a, t) for t in range(30) for e in range(2) for a in range(3) if a != t % 3]
    def make(): return ExperienceReplay(bs=2, max_sz=50, by='moment', seed=1, store=store(path=tmp_path/'m'))
    replay = make()
    for i in range(0, len(rows), 4): replay.add(block(rows[i:i+4]))
    want = naive(rows, 50, 3)
    assert all_of(replay, 3) == want
    state = through_file(replay.state_dict())
    replay.close()
    again = make()   # without a checkpoint
    assert all_of(again, 3) == want
    again.close()
    resumed = make()
    resumed.load_state_dict(state)
    assert all_of(resumed, 3) == want
    resumed.add(block([(0, 0, 30), (0, 1, 30)]))
    assert all_of(resumed, 3) == naive(rows + [(0, 0, 30), (0, 1, 30)], 50, 3)
    resumed.close()

def test_a_process_that_only_reads_draws_moments_of_the_one_that_writes(tmp_path):
    writer = ExperienceReplay(bs=2, max_sz=50, by='moment', seed=1, store=Rows(path=tmp_path/'m'))
    rows = [(0, a, t) for t in range(10) for a in range(2)]
    writer.add(block(rows))
    reader = ExperienceReplay(bs=2, max_sz=50, by='moment', seed=1, store=Rows(path=tmp_path/'m', mode='r'))
    assert all_of(reader, 2) == naive(rows, 50, 2)
    more = [(0, a, t) for t in range(10, 40) for a in range(2)]
    writer.add(block(more))
    found, want = all_of(reader, 2), naive(rows + more, 50, 2)
    assert found == want
    reader.close(), writer.close()

def test_a_reader_goes_back_with_the_writer(tmp_path):
    def made(**kw): return ExperienceReplay(bs=2, max_sz=50, by='moment', seed=1, store=Rows(path=tmp_path/'m', **kw))
    writer, rows = made(spare=50), [(0, a, t) for t in range(6) for a in range(2)]
    writer.add(block(rows))
    saved = through_file(writer.state_dict())
    writer.add(block([(0, a, t) for t in range(6, 10) for a in range(2)]))
    reader = made(mode='r')
    assert len(all_of(reader, 2)) == 10
    writer.load_state_dict(saved)
    assert all_of(reader, 2) == naive(rows, 50, 2) and reader.sample().index.max() - reader.memory.base < 12
    more = [(0, 1, 6)] + [(0, a, t) for t in range(7, 12) for a in range(2)]
    writer.add(block(more))
    assert all_of(reader, 2) == naive(rows + more, 50, 2)
    reader.close(), writer.close()

def test_a_writer_that_overwrites_what_a_reader_looks_at(tmp_path, monkeypatch):
    from fastrl_replay.replay import views
    def made(**kw): return ExperienceReplay(bs=2, max_sz=20, by='moment', seed=1, store=Rows(path=tmp_path/'m', **kw))
    rows, parts, writer = [(0, a, t) for t in range(40) for a in range(2)], views.in_parts, made()
    writer.add(block(rows[:16]))
    reader = made(mode='r')
    def late(*args):
        for keys in parts(*args):
            writer.add(block(rows[16:]))
            yield keys
    monkeypatch.setattr(views, 'in_parts', late)
    assert len(reader) == 0
    monkeypatch.undo()
    assert all_of(reader, 2) == all_of(made(mode='r'), 2) == naive(rows, 20, 2)
    reader.close(), writer.close()

@pytest.mark.parametrize('spare', [0, 7])
def test_a_moment_that_begins_at_the_oldest_row_is_there_after_reopening(spare, tmp_path):
    "The row before it is gone: that it begins there is written down, and errors of it are taken"
    def made(**kw): return ExperienceReplay(bs=2, max_sz=12, by='moment', seed=1, store=Rows(tmp_path/'m', **kw))
    rng, rows, writer = np.random.default_rng(spare), [], made(spare=spare)
    for t in range(30):
        new = [(env, a, t) for env in range(rng.integers(1, 3)) for a in range(3) if a == t % 3 or rng.random() < .7]
        writer.add(block(new))
        rows += new
        if t % 3: continue
        writer.close() if t % 2 else writer.memory.place.leave()
        writer = made(spare=spare)
        assert all_of(writer, 3) == all_of(made(mode='r'), 3) == naive(rows, 12, 3)
        writer.update_priorities([*naive(rows, 12, 3)][:1], [1.])
    writer.close()

def test_priorities_of_moments():
    replay = Replay(None, 4, 60, sampler=Proportional(60, alpha=1., seed=0), view=Moments(), beta=.4)
    for t in range(10): replay.add(block([(0, a, t) for a in range(3)]))
    batch = replay.sample(4)
    batch.update_priorities(torch.zeros(4))
    replay.update_priorities([27], [1e6])
    again = replay.sample(8)
    assert (again.index == 27).all() and (again.weight == 1).all()
    with pytest.raises(StaleKey, match='is not the key of a moment'): replay.update_priorities([28], [1.])
    with pytest.raises(ValueError, match='one for each key'): batch.update_priorities(torch.zeros(4, 3))
    with pytest.raises(ValueError, match='finite'): batch.update_priorities(torch.full((4,), np.nan))

def test_rows_that_do_not_say_their_moment_are_refused_and_nothing_changes():
    replay = ExperienceReplay(bs=1, max_sz=10, by='moment')
    plain = np.zeros(2, step_dtype(spaces.Discrete(2), spaces.Discrete(2)))
    with pytest.raises(BlockError, match='no agent and no moment'): replay.add(Steps(plain))
    with pytest.raises(BlockError, match='leave out n_step'): next(iter(Items([block([(0, 0, t)]) for t in range(5)]).n_step(2, .9).experience_replay(by='moment')))
    assert len(replay) == 0
    small = ExperienceReplay(bs=1, max_sz=10, by=Moments(2))
    small.add(block([(0, 0, 0)]))
    with pytest.raises(BlockError, match="column 'agent'; got 2; expected numbers from 0 to 1"): small.add(block([(0, 2, 1)]))
    assert len(small) == 1 and small.memory.inserted == 1

def test_what_does_not_go_with_moments_is_refused():
    with pytest.raises(ValueError, match="by.*'row'"): ExperienceReplay(by='agent')
    with pytest.raises(TypeError, match='Uniform without'): ExperienceReplay(by='moment', sampler=Uniform())
    replay = ExperienceReplay(bs=1, max_sz=10, by='moment')
    with pytest.raises(ValueError, match='by is fixed'): replay.by = 'row'
    replay.add(block([(0, 0, 0)]))
    larger = ExperienceReplay(bs=1, max_sz=11, by='moment')
    with pytest.raises(StateError, match='max_sz=10'): larger.load_state_dict(replay.state_dict())
    with pytest.raises(StateError): ExperienceReplay(bs=1, max_sz=10).load_state_dict(replay.state_dict())

@pytest.mark.parametrize('change', [dict(low=-1), dict(first=torch.tensor([5, 3])), dict(agent=torch.zeros(3, dtype=torch.int32)), dict(agents=1), dict(last=[1]),
                                    dict(capacity=7), dict(first=torch.zeros(0, dtype=torch.int64)), dict(agent=torch.full((4,), 9, dtype=torch.int32))])
def test_damaged_states_of_moments_are_refused(change):
    replay = ExperienceReplay(bs=1, max_sz=10, by='moment', seed=0)
    replay.add(block([(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]))
    state = replay.snapshot()
    state['view'] = state['view'] | change
    fresh = ExperienceReplay(bs=1, max_sz=10, by='moment', seed=0)
    with pytest.raises(StateError): fresh.restore(fresh.check_state(state))
    assert len(fresh) == 0

def test_a_stepper_of_agents_feeds_moments_to_the_end(tmp_path):
    pettingzoo = pytest.importorskip('pettingzoo')
    def env(): return pettingzoo.make('parallel', 'sisl/pursuit-v5', x_size=6, y_size=6, n_evaders=2, n_pursuers=3, max_cycles=8)
    batches = take(GymStepper([env, env], seed=0).experience_replay(bs=4, max_sz=50, by='moment', seed=0), 30)
    for b in batches:
        assert b.shape == (4, 3) and b.mask.all()
        assert (b.rows['moment'] == b.rows['moment'][:, :1]).all() and (b.rows['agent'] == range(3)).all()
        assert (b.rows['env_id'] // 3 == b.rows['env_id'][:, :1] // 3).all()
