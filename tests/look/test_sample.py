"""The sample of a memory: its facts against the memory's own, its size, and that taking it changes nothing."""

import json

import numpy as np
import pytest
from gymnasium import spaces
from memories import KINDS, PIXELS, memory, rows_of, sampled

from fastrl_replay.all import (
    ExperienceReplay,
    Frames,
    Mixture,
    PrioritizedReplay,
    Rows,
    SequenceReplay,
    Steps,
    Timeline,
)
from fastrl_replay.app.offline import open_memory
from fastrl_replay.look.sample import contents, json_text, memory_sample, samples_of


def timeline_of(m):
    return m if isinstance(m, Timeline) else m.memory


@pytest.mark.parametrize('kind', [k for k in KINDS if k != 'mixture'])
@pytest.mark.parametrize('place', ['memory', 'directory'])
def test_episodes_are_those_that_links_tell(kind, place, tmp_path):
    m = memory(kind, tmp_path / 'm' if place == 'directory' else None)
    line = timeline_of(m)
    seen = contents(m)
    row, e = seen['row'], seen['episode']
    assert row['key'].tolist() == line.keys.tolist()
    assert row['drawn'].tolist() == line.times_drawn.tolist()
    assert row['env_id'].tolist() == line[:].to('cpu').rows['env_id'].tolist()
    assert sum(seen['nbytes'].values()) == m.nbytes
    for i, (first, last) in enumerate(zip(e['first'], e['last'])):
        keys = [last]
        while (before := line.walk([keys[-1]], [-1]).item()) >= 0:
            keys.append(before)
        assert keys[-1] == first
        assert sorted(keys) == row['key'][row['episode'] == i].tolist()
    if hasattr(m, 'close'):
        m.close()


@pytest.mark.parametrize(
    'kind', ['proportional', 'rank', 'uniform', 'sequences', 'hindsight', 'device']
)
def test_probabilities_are_those_of_the_sampler(kind):
    replay = memory(kind)
    draw = contents(replay)['draw']
    assert len(draw['key']) == len(replay) and (np.diff(draw['key']) > 0).all()
    assert sorted(draw['probability']) == pytest.approx(sorted(replay.sampler.probabilities()))
    assert (draw['priority'] is None) == (kind in ('uniform', 'hindsight'))


@pytest.mark.parametrize('kind', KINDS)
def test_steps_are_the_rows_of_the_memory(kind):
    """Each number of each step, with six digits; '=' where next_state is the state of the next step."""
    m = memory(kind)
    replays = m.replays.values() if kind == 'mixture' else [m]
    for s, m in zip(samples_of(m), replays):
        assert s['rows'] == 60 and s['episodes'] and len(json_text(s)) < 2_000_000
        for e in s['episodes']:
            rows = timeline_of(m).take(e['key']).to('cpu').rows
            assert e['columns']['step_n'] == rows['step_n'].tolist()
            assert e['columns']['reward'] == rows['reward'].tolist()
            if kind in ('hindsight', 'frames'):
                continue
            assert e['columns']['state'] == rows['state'].tolist()
            for i, x in enumerate(e['columns']['next_state']):
                if x == '=':
                    assert rows['next_state'][i].tolist() == rows['state'][i + 1].tolist()
                else:
                    assert x == rows['next_state'][i].tolist()


@pytest.mark.parametrize('kind', KINDS)
def test_looking_changes_nothing(kind):
    a, b = memory(kind), memory(kind)
    before = str(a.state_dict())
    a.page()
    a.show()
    assert str(a.state_dict()) == before
    if kind != 'timeline':
        for _ in range(3):
            assert a.sample().index.tolist() == b.sample().index.tolist()


@pytest.mark.parametrize('kind', ['timeline', 'uniform', 'proportional', 'rank', 'sequences'])
def test_a_reader_sees_what_the_writer_left(kind, tmp_path):
    writer = memory(kind, tmp_path / 'm')
    there = contents(writer)
    writer.flush()
    files = {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
    seen = contents(open_memory(tmp_path / 'm'))
    for part in 'row', 'episode':
        for n, x in there[part].items():
            assert np.array_equal(seen[part][n], x), n
    if kind in ('proportional', 'rank', 'sequences'):
        for n in 'key', 'priority':
            assert seen['draw'][n].tolist() == there['draw'][n].tolist()
        assert seen['draw']['probability'].sum() == pytest.approx(1)
    assert files == {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
    writer.close()


def test_rows_that_are_overwritten_meanwhile_are_left_out(tmp_path):
    writer = sampled(
        ExperienceReplay(bs=2, max_sz=100, store=Rows(tmp_path / 'm', spare=20)), rows_of(100)
    )
    reader = Timeline(100, Rows(tmp_path / 'm', mode='r', spare=20))
    take = reader.still_there

    def then_more(keys):
        if writer.memory.inserted < 200:
            writer.add(rows_of(60, first=writer.memory.inserted))
        return take(keys)

    reader.still_there = then_more
    for e in memory_sample(reader)['episodes']:
        assert min(e['key']) >= writer.memory.oldest
    writer.close()


@pytest.mark.parametrize(
    'make',
    [
        lambda: Timeline(5),
        lambda: PrioritizedReplay(bs=2, max_sz=5),
        lambda: SequenceReplay(bs=2, max_sz=50, length=4),
        lambda: ExperienceReplay(bs=2, max_sz=5, store=Frames(4)),
        lambda: Mixture(
            {n: ExperienceReplay(bs=2, max_sz=5) for n in 'ab'}, dict(a=0.5, b=0.5), bs=2
        ),
    ],
)
def test_an_empty_memory_says_so(make):
    m = make()
    assert all(s['lead'] == 'The memory is empty.' and not s['episodes'] for s in samples_of(m))
    assert m.show() is not None


# ---- weights, goals, sequences, pictures ----


@pytest.mark.parametrize('norm', ['batch', 'memory'])
def test_a_weight_is_the_one_that_the_learner_gets(norm):
    """With weight_norm='memory'; relative to the largest of the batch with 'batch'."""
    replay = PrioritizedReplay(bs=16, max_sz=200, seed=0, weight_norm=norm)
    sampled(replay, rows_of(90), 40)
    (s,) = samples_of(replay)
    shown = {k: w for e in s['episodes'] for k, w in zip(e['key'], e['weight'])}
    batch = replay.sample()
    expected = np.array([shown[k] for k in batch.index.tolist()])
    if norm == 'batch':
        expected = expected / expected.max()
    assert batch.weight.numpy() == pytest.approx(expected, rel=1e-4)


def test_goals_in_hindsight_come_later_in_their_episode():
    (s,) = samples_of(memory('hindsight'))
    for e in s['episodes']:
        assert all(goal >= key for goal, key in zip(e['more']['goal_key'], e['key']))
        assert len(e['more']['goal_reward']) == len(e['key'])


def test_sequences_have_their_first_steps_and_priorities():
    replay = memory('sequences')
    (s,) = samples_of(replay)
    assert s['unit'] == 'sequences' and s['settings']['burn_in'] == 2
    assert all(
        {'first', 'length', 'priority', 'probability', 'weight'} == {*e['spans']}
        for e in s['episodes']
    )
    assert sum(len(e['spans']['first']) for e in s['episodes']) == len(replay)


def test_frames_are_in_the_sample_once():
    (s,) = samples_of(memory('frames'))
    assert len(s['frames']) == len({*s['frames']})
    for e in s['episodes']:
        for i, ids in e['pictures']['state'].items():
            after = e['pictures']['next_state'][i]
            assert len(ids) == 2 and ids[1] == after[0]


# ---- size ----


def test_long_episodes_of_pictures_stay_within_the_bound():
    replay = ExperienceReplay(bs=2, max_sz=3000, store=Frames(2))
    replay.add(rows_of(3000, envs=1, length=1500, space=PIXELS))
    s = memory_sample(replay, 300_000)
    assert len(json_text(s)) < 400_000
    assert all(e['pictures']['state'] and len(e['key']) < e['rows'] for e in s['episodes'])


def test_wide_rows_stay_within_the_bound():
    replay = ExperienceReplay(bs=2, max_sz=20_000)
    steps = rows_of(
        20_000,
        envs=8,
        length=1000,
        space=spaces.Box(-9, 9, (400,)),
        action=spaces.Box(-1, 1, (20,)),
    )
    steps.rows['state'] = np.random.default_rng(0).normal(size=(20_000, 400))
    replay.add(steps)
    assert 100_000 < len(json_text(samples_of(replay))) < 2_100_000


@pytest.mark.slow
def test_a_million_rows_are_a_sample_that_says_so():
    replay = ExperienceReplay(bs=2, max_sz=1_000_000)
    replay.add(rows_of(1_000_000, envs=16, length=50))
    (s,) = samples_of(replay)
    assert (len(s['episodes']), s['of'], len(s['ring']['first'])) == (16, 20_000, 2000)
    assert len(json_text(s)) < 1_500_000


def test_an_endless_episode_is_shown_in_runs():
    timeline = Timeline(50_000)
    timeline.add(rows_of(50_000, envs=1, length=10**6))
    (e,) = memory_sample(timeline, 100_000)['episodes']
    assert e['rows'] == 50_000 and (e['key'][0], e['key'][-1]) == (0, 49_999)
    assert np.diff(e['at']).tolist().count(1) > len(e['at']) / 2


def test_the_sample_is_the_same_for_the_same_seed():
    replay = ExperienceReplay(bs=8, max_sz=9000, seed=0)
    for n, length in (4050, 15), (4950, 25):
        replay.add(rows_of(n, envs=9, length=length))
    for _ in range(9):
        replay.sample()
    a, b, c = (memory_sample(replay, seed=seed) for seed in (0, 0, 1))
    assert a == b and a != c
    why = {w for e in a['episodes'] for w in e['why']}
    assert why >= {
        'newest',
        'longest',
        'best',
        'worst',
        'sampled most',
        'never sampled',
        'at random',
    }


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


def changed(change, n=1200, envs=3, **kw):
    """Return a memory of rows that `change` has altered."""
    steps = rows_of(n, envs=envs)
    steps.rows['state'] += np.random.default_rng(0).random((n, 3)).astype('f4')
    steps.rows['next_state'][:-envs] = steps.rows['state'][envs:]
    steps = change(steps.rows)
    replay = ExperienceReplay(bs=4, max_sz=n, seed=0, **kw)
    replay.add(Steps(steps))
    return replay


def set_to(name, value):
    def change(rows):
        rows[name] = value
        return rows

    return change


def silent(rows):
    return rows[(rows['env_id'] != 1) | (np.arange(len(rows)) < 300)].copy()


def endless(rows, envs=(0, 1, 2)):
    of = np.isin(rows['env_id'], envs)
    rows['terminated'][of] = False
    rows['episode_n'][of] = 1
    rows['step_n'][of] = (np.arange(len(rows)) // 3 + 1)[of]
    return rows


def copied_at_ends(rows):
    rows['next_state'][rows['terminated']] = rows['state'][rows['terminated']]
    return rows


def copied(rows):
    rows['next_state'] = rows['state']
    return rows


def moved(rows):
    rows['next_state'] *= 3
    return rows


FAULTS = {
    'have the return 0': set_to('total_reward', 0),
    'environment 1 sent no row after key': silent,
    'environment 2 has ended no episode': lambda rows: endless(rows, [2]),
    'action is the same in all': set_to('action', 1),
    'state is the same in all': set_to('state', 0.5),
    'next_state equals state in 100%': copied,
    'rows that end an episode': copied_at_ends,
    "next_state is not the next row's state in": moved,
}


@pytest.mark.parametrize('text', FAULTS)
def test_a_fault_is_remarked_with_rows_that_show_it(text):
    replay = changed(FAULTS[text])
    (s,) = samples_of(replay)
    (remark,) = (r for r in s['remarks'] if text in r['text'])
    assert remark['keys'] and replay.memory.valid(remark['keys']).all()
    assert {*remark['keys']} <= {k for e in s['episodes'] for k in e['key']}
    assert text[:20] in ' '.join(replay.show()._supxlabel.get_text().split())


def test_no_episode_that_ends_is_remarked():
    timeline = Timeline(4000)
    timeline.add(Steps(endless(rows_of(3600, envs=3).rows)))
    assert any('no episode in the memory has ended' in t for t in texts(timeline))


def test_priorities_that_never_changed_are_remarked():
    replay = PrioritizedReplay(bs=32, max_sz=500, seed=0)
    replay.add(rows_of(400))
    replay.sample()
    assert not any('priorities' in t for t in texts(replay))  # one batch may wait for its errors
    for _ in range(20):
        replay.sample()
    assert any('was update_priorities called?' in t for t in texts(replay))


@pytest.mark.parametrize(
    'env', ['CartPole-v1', 'Pendulum-v1', 'Taxi-v4', 'Blackjack-v1', 'FrozenLake-v1']
)
@pytest.mark.parametrize('n', [100, 3000])
def test_nothing_is_said_of_healthy_memories(env, n):
    from fastrl_replay.all import GymStepper

    replay = PrioritizedReplay(bs=32, max_sz=2 * n // 3, seed=0)
    for block in GymStepper([env] * 3, seed=0).header(n // 3):
        replay.add(block)
        if len(replay) > 64:
            batch = replay.sample()
            batch.update_priorities(np.random.default_rng(0).random(32))
    assert texts(replay) == []
