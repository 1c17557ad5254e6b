"""The sample of a memory: its facts are the memory's, its size, and taking it changes nothing."""

import json

import numpy as np
import pytest
from gymnasium import spaces
from memories import PIXELS, memory, rows_of, sampled

from fastrl_replay.all import *
from fastrl_replay.app.offline import open_memory
from fastrl_replay.look.sample import contents, json_text, memory_sample, samples_of


def timeline_of(m):
    return m if isinstance(m, Timeline) else m.memory


@pytest.mark.parametrize('kind, on_disk', [('frames', False), ('sequences', True)])
def test_episodes_are_those_that_links_tell(kind, on_disk, tmp_path):
    m = memory(kind, tmp_path / 'm' if on_disk else None)
    timeline = timeline_of(m)
    seen = contents(m)
    row = seen['row']
    assert row['key'].tolist() == timeline.keys.tolist()
    assert row['drawn'].tolist() == timeline.times_drawn.tolist()
    assert row['env_id'].tolist() == timeline[:].rows['env_id'].tolist()
    assert sum(seen['nbytes'].values()) == m.nbytes
    for i, (first, last) in enumerate(zip(seen['episode']['first'], seen['episode']['last'])):
        keys = [last]
        while (before := timeline.walk([keys[-1]], [-1]).item()) >= 0:
            keys.append(before)
        assert keys[-1] == first
        assert sorted(keys) == row['key'][row['episode'] == i].tolist()


@pytest.mark.parametrize('kind', ['proportional', 'rank', 'uniform', 'sequences'])
def test_probabilities_are_those_of_the_sampler(kind):
    replay = memory(kind)
    draw = contents(replay)['draw']
    assert len(draw['key']) == len(replay)
    assert sorted(draw['probability']) == pytest.approx(sorted(replay.sampler.probabilities()))
    assert (draw['priority'] is None) == (kind == 'uniform')


@pytest.mark.parametrize('kind', ['timeline', 'sequences', 'device', 'mixture'])
def test_steps_are_the_rows_of_the_memory(kind):
    "'=' stands for a next_state that is the state of the next step"
    m = memory(kind)
    replays = m.replays.values() if kind == 'mixture' else [m]
    for s, m in zip(samples_of(m), replays):
        assert s['rows'] == 60 and s['episodes']
        for e in s['episodes']:
            rows = timeline_of(m).take(e['key']).to('cpu').rows
            for name in 'step_n', 'reward', 'state':
                assert e['columns'][name] == rows[name].tolist()
            for i, x in enumerate(e['columns']['next_state']):
                after = rows['state'][i + 1].tolist() if x == '=' else x
                assert rows['next_state'][i].tolist() == after


@pytest.mark.parametrize('kind', ['proportional', 'rank', 'sequences', 'frames', 'mixture'])
def test_looking_changes_nothing(kind):
    a, b = memory(kind), memory(kind)
    before = str(a.state_dict())
    a.stats()
    repr(a)
    a.page()
    a.show()
    assert str(a.state_dict()) == before
    for _ in range(3):
        assert a.sample().index.tolist() == b.sample().index.tolist()


@pytest.mark.parametrize('kind', ['rank', 'sequences'])
def test_a_reader_sees_what_the_writer_left(kind, tmp_path):
    writer = memory(kind, tmp_path / 'm')
    there = contents(writer)
    writer.flush()
    files = {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
    seen = contents(open_memory(tmp_path / 'm'))
    for part, names in dict(
        row=seen['row'], episode=seen['episode'], draw=['key', 'priority']
    ).items():
        for name in names:
            assert np.array_equal(seen[part][name], there[part][name]), name
    assert files == {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}


@pytest.mark.parametrize(
    'make', [lambda: Timeline(5), lambda: SequenceReplay(bs=2, max_sz=50, length=4)]
)
def test_an_empty_memory_says_so(make):
    m = make()
    (s,) = samples_of(m)
    assert s['lead'] == 'The replay buffer is empty.' and not s['episodes']
    assert m.show() is not None


@pytest.mark.parametrize('norm', ['batch', 'memory'])
def test_a_weight_is_the_one_that_the_learner_gets(norm):
    "With weight_norm='memory'; relative to the largest of the batch with 'batch'."
    replay = PrioritizedReplay(bs=16, max_sz=200, seed=0, weight_norm=norm)
    sampled(replay, rows_of(90), 40)
    (s,) = samples_of(replay)
    shown = {k: w for e in s['episodes'] for k, w in zip(e['key'], e['weight'])}
    batch = replay.sample()
    expected = np.array([shown[k] for k in batch.index.tolist()])
    if norm == 'batch':
        expected = expected / expected.max()
    assert batch.weight.numpy() == pytest.approx(expected, rel=1e-4)


def test_goals_sequences_and_frames_are_in_the_sample():
    (goals,) = samples_of(memory('hindsight'))
    for e in goals['episodes']:
        assert all(goal >= key for goal, key in zip(e['more']['goal_key'], e['key']))
    replay = memory('sequences')
    (sequences,) = samples_of(replay)
    assert sum(len(e['spans']['first']) for e in sequences['episodes']) == len(replay)
    (frames,) = samples_of(memory('frames'))
    assert len(frames['frames']) == len({*frames['frames']})
    for e in frames['episodes']:
        for i, ids in e['pictures']['state'].items():
            assert ids[1] == e['pictures']['next_state'][i][0]


# ---- size ----


def test_long_episodes_of_pictures_stay_within_the_bound():
    replay = ExperienceReplay(bs=2, max_sz=3000, store=Frames(2))
    replay.add(rows_of(3000, envs=1, length=1500, space=PIXELS))
    s = memory_sample(replay, 300_000)
    assert len(json_text(s)) < 400_000
    assert all(e['pictures']['state'] and len(e['key']) < e['rows'] for e in s['episodes'])


def test_wide_rows_stay_within_the_bound():
    wide = spaces.Box(-9, 9, (400,))
    replay = ExperienceReplay(bs=2, max_sz=3_000)
    steps = rows_of(3_000, envs=8, length=1000, space=wide)
    steps.rows['state'] = np.random.default_rng(0).normal(size=(3_000, 400))
    replay.add(steps)
    assert 100_000 < len(json_text(samples_of(replay))) < 2_100_000


def test_the_sample_is_the_same_for_the_same_seed():
    replay = ExperienceReplay(bs=8, max_sz=9000, seed=0)
    for n, length in (4050, 15), (4950, 25):
        replay.add(rows_of(n, envs=9, length=length))
    replay.sample()
    a, b, c = (memory_sample(replay, seed=seed) for seed in (0, 0, 1))
    assert a == b and a != c


def test_numbers_have_six_digits_and_text_cannot_close_a_script():
    rows = rows_of(40, **{'</script>': 'f8'})
    rows.rows['</script>'] = [2, np.inf, -np.inf, 1 / 3] * 10
    timeline = Timeline(50)
    timeline.add(rows)
    text = json_text(samples_of(timeline))
    assert '<' not in text and '0.333333,' in text
    values = [v for e in json.loads(text)[0]['episodes'] for v in e['columns']['</script>']]
    assert {*values} == {2, 'Infinity', '-Infinity', 0.333333}


# ---- remarks ----


def texts(m):
    return [r['text'] for s in samples_of(m) for r in s['remarks']]


def silent(rows):
    return rows[(rows['env_id'] != 1) | (np.arange(len(rows)) < 300)].copy()


def same_action(rows):
    rows['action'] = 1
    return rows


def copied(rows):
    rows['next_state'] = rows['state']
    return rows


def moved(rows):
    rows['next_state'] *= 3
    return rows


FAULTS = {
    'environment 1 sent no row after key': silent,
    'action is the same in all': same_action,
    'next_state equals state in 100%': copied,
    "next_state is not the next row's state in": moved,
}


@pytest.mark.parametrize('text', FAULTS)
def test_a_fault_is_remarked_with_rows_that_show_it(text):
    rows = rows_of(1200, envs=3).rows
    rows['state'] += np.random.default_rng(0).random((1200, 3)).astype('f4')
    rows['next_state'][:-3] = rows['state'][3:]
    replay = ExperienceReplay(bs=4, max_sz=1200, seed=0)
    replay.add(Steps(FAULTS[text](rows)))
    (s,) = samples_of(replay)
    (remark,) = (r for r in s['remarks'] if text in r['text'])
    assert remark['keys'] and {*remark['keys']} <= {k for e in s['episodes'] for k in e['key']}


def test_priorities_that_never_changed_are_remarked():
    replay = PrioritizedReplay(bs=32, max_sz=500, seed=0)
    replay.add(rows_of(400))
    replay.sample()
    assert not any('priorities' in t for t in texts(replay))  # one batch may wait for its errors
    for _ in range(20):
        replay.sample()
    assert any('was update_priorities called?' in t for t in texts(replay))


def test_equal_priorities_may_differ_by_rounding():
    "Bins of a histogram of them would have no width"
    replay = PrioritizedReplay(bs=2, seed=0)
    replay.add(rows_of(2))
    replay.update_priorities([0, 1], np.array([0.3, 0.1 * 3]))
    assert memory_sample(replay)['lead']


@pytest.mark.parametrize('env', ['CartPole-v1', 'Taxi-v4'])
def test_nothing_is_said_of_healthy_memories(env):
    replay = PrioritizedReplay(bs=32, max_sz=600, seed=0)
    for block in GymStepper([env] * 3, seed=0).header(300):
        replay.add(block)
        if len(replay) > 64:
            batch = replay.sample()
            batch.update_priorities(np.random.default_rng(0).random(32))
    assert texts(replay) == []
