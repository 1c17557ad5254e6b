"""n-step returns and next rows, computed when rows are drawn, against lists of rows."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium import spaces

from fastrl_replay.all import *
from fastrl_replay.replay.replay import Replay
from fastrl_replay.replay.views import Transitions
from fastrl_replay.testing import script, scripted_steps, through_file

STORES = dict(
    ram=lambda path: Rows(),
    disk=lambda path: Rows(path),
    device=lambda path: Rows(device='cpu'),
    frames=lambda path: Frames(2),
    frames_on_disk=lambda path: Frames(2, path=path),
)


def as_frames(block):
    "Return the same rows with stacks of two images as observations"
    dtype = step_dtype(spaces.Box(0, 255, (2, 8, 8), np.uint8), spaces.Discrete(3))
    rows = np.zeros(len(block), dtype)
    for name in dtype.names:
        if 'state' not in name:
            rows[name] = block.rows[name]
    for i in range(2):
        first = (block.rows['state'][:, 0] + i) % 251
        rows['state'][:, i] = first[:, None, None]
        rows['next_state'][:, i] = ((first + 1) % 251)[:, None, None]
    return Steps(rows)


def stream(seed, moments=60):
    "Random episodes of one to three environments; some break off without an end"
    choose = random.Random(seed)
    lengths = [1, 1, 2, 3, 5, 9, -1, -2, -4, -7]
    scripts = [script(*choose.choices(lengths, k=6), env=e) for e in range(choose.randint(1, 3))]
    blocks = scripted_steps(scripts, moments)
    if seed % 2:
        return blocks
    gone = [0] * len(scripts)  # episodes that began earlier than in the scripts
    ended = [True] * len(scripts)
    for block in blocks:
        rows = block.rows
        for e in range(len(rows)):
            if choose.random() < 0.1 and not ended[e]:
                gone[e] += 1
            rows['episode_n'][e] += gone[e]
            ended[e] = bool(rows['terminated'][e] or rows['truncated'][e])
    return renumbered(blocks)


def renumbered(blocks):
    "Count the steps of each episode from 1 again"
    counts = {}
    for block in blocks:
        for row in block.rows:
            counts[row['env_id'], row['episode_n']] = (
                counts.get((row['env_id'], row['episode_n']), 0) + 1
            )
            row['step_n'] = counts[row['env_id'], row['episode_n']]
    return blocks


def expected(rows, key, n, gamma):
    "Return what an n-step return consists of, from all rows by key"
    own = [k for k in range(key, len(rows)) if rows[k]['env_id'] == rows[key]['env_id']]
    merged = []
    for k in own:
        if rows[k]['episode_n'] != rows[key]['episode_n'] or len(merged) == n:
            break
        merged.append(k)
        if rows[k]['terminated'] or rows[k]['truncated']:
            break
    last = rows[merged[-1]]
    broke_off = len(merged) < n and len(own) > len(merged)
    ended = last['terminated'] or last['truncated']
    return dict(
        reward=sum(gamma**i * float(rows[k]['reward']) for i, k in enumerate(merged)),
        discount=0 if last['terminated'] else gamma ** len(merged),
        n=len(merged),
        terminated=bool(last['terminated']),
        truncated=bool(last['truncated']) or broke_off and not ended,
        next_state=last['next_state'],
        state=rows[key]['state'],
    )


@pytest.mark.parametrize('store', STORES)
@pytest.mark.parametrize('seed', range(12))
def test_returns_are_those_of_a_plain_model(seed, store, tmp_path):
    choose = random.Random(seed)
    n, gamma = choose.randint(1, 8), choose.choice([0.5, 0.9, 1.0])
    kind = choose.choice([ExperienceReplay, PrioritizedReplay])
    max_sz = choose.randint(8, 60)
    replay = kind(
        bs=8, max_sz=max_sz, n=n, gamma=gamma, seed=seed, store=STORES[store](tmp_path / 'm')
    )
    rows = []
    for block in stream(seed):
        block = as_frames(block) if 'frames' in store else block
        keys = replay.add(block)
        rows += list(block.rows)
        assert keys.tolist() == list(range(len(rows)))[-len(block) :]
        if len(rows) < 8:
            continue
        batch = replay.sample().to('cpu')
        assert batch.index.min() >= len(rows) - max_sz
        for row in batch.rows:
            for name, x in expected(rows, row['index'], n, gamma).items():
                assert np.allclose(row[name], x, atol=1e-5), name


@pytest.mark.parametrize('seed', range(6))
def test_returns_are_those_of_the_stage(seed):
    "Bit for bit, but for the ends of running episodes, which the stage has not returned yet"
    blocks = stream(seed, 200)
    replay = ExperienceReplay(bs=100, max_sz=1_000, n=5, gamma=0.9, seed=0)
    for block in blocks:
        replay.add(block)
    names = 'env_id', 'episode_n', 'step_n'
    merged = {}
    for block in Items(blocks).n_step(5, 0.9):
        merged |= {tuple(row[k] for k in names): row for row in block.rows}
    found = 0
    for row in replay.sample().rows:
        other = merged.get(tuple(row[k] for k in names))
        if other is not None:
            found += 1
            assert all(np.array_equal(row[k], other[k]) for k in other.dtype.names)
    assert found > 80


def filled(**kwargs):
    replay = ExperienceReplay(bs=50, max_sz=1_000, seed=0, **kwargs)
    for block in stream(1):
        replay.add(block)
    return replay


def test_steps_and_discounts_may_change():
    replay = filled(n=lambda batches: 10 - batches, gamma=lambda batches: 0.9 + batches / 100)
    assert replay.sample().n.max() > replay.sample(n=2).n.max() == 2
    running = replay.sample(n=1, gamma=0.25)
    assert set(running.discount.tolist()) == {0, 0.25}
    assert replay.sample(n=1).discount.max() == pytest.approx(0.93)


def test_each_row_may_have_its_own_number_of_steps():
    a, b = filled(n=(2, 4)), filled(n=(2, 4))
    batches = [a.sample() for _ in range(20)]
    b.load_state_dict(through_file(a.state_dict()))
    assert a.sample() == b.sample()
    whole = torch.cat([batch.n[(batch.discount > 0) & ~batch.truncated] for batch in batches])
    assert torch.bincount(whole, minlength=5)[2:].min() > 50


@pytest.mark.parametrize('store', ['ram', 'disk', 'device', 'frames'])
def test_next_rows_of_each_row(store, tmp_path):
    replay = PrioritizedReplay(bs=40, max_sz=100, seed=0, store=STORES[store](tmp_path / 'm'))
    rows = []
    for block in stream(3):
        block = as_frames(block) if 'frames' in store else block
        replay.add(block)
        rows += list(block.rows)
    batch = replay.sample(horizon=4)
    assert batch.shape == (40, 4)
    for i, key in enumerate(batch.index.tolist()):
        own = [r for r in rows[key:] if r['env_id'] == rows[key]['env_id']][:4]
        own = [r for r in own if r['episode_n'] == rows[key]['episode_n']]
        assert batch.mask[i].tolist() == [True] * len(own) + [False] * (4 - len(own))
        assert batch.reward[i, : len(own)].tolist() == [r['reward'] for r in own]
        assert batch.next_state[i, : len(own)].tolist() == [r['next_state'].tolist() for r in own]
    batch.update_priorities(torch.arange(1.0, 41))
    assert replay.stats()['sampled'] == 40 and replay.stats()['stale'] == 0


def test_a_loop_needs_no_chain_for_n_step_returns():
    own, chained = PrioritizedReplay(bs=30, n=3, gamma=0.9, seed=0), OwnSteps().n_step(3, 0.9)
    chained = chained.prioritized_replay(bs=30, seed=0)
    for t in range(60):
        step = [float(t)], 0, float(t), [t + 1.0], t % 7 == 6, t % 11 == 10
        own.add_step(*step)
        chained.add_step(*step)
    mine = {int(row['state'][0]): row for row in own.sample().rows}
    for row in chained.sample().rows:
        other = mine.get(int(row['state'][0]))
        if other is not None:
            assert all(row[k] == other[k] for k in ('reward', 'discount', 'n', 'terminated'))


def test_errors_name_what_is_wrong():
    for n in 0, 2.5, (3, 2), (1, 2, 3):
        with pytest.raises(ArgumentError, match='ExperienceReplay: n; got'):
            ExperienceReplay(n=n)
    with pytest.raises(ArgumentError, match='gamma; got 1.5; expected a number, 0 to 1'):
        ExperienceReplay(n=2, gamma=1.5)
    with pytest.raises(ArgumentError, match='HindsightReplay: n and horizon need rows whose'):
        HindsightReplay(bs=2, max_sz=100, n=3, reward=lambda *goals: 0)
    sequences = SequenceReplay(bs=1, max_sz=100, length=2, burn_in=0, overlap=0)
    for block in stream(1):
        sequences.add(block)
    with pytest.raises(ArgumentError, match='SequenceReplay: horizon is for rows'):
        sequences.sample(horizon=3)
    replay = filled()
    with pytest.raises(ArgumentError, match='horizon; got 0'):
        replay.sample(horizon=0)
    with pytest.raises(BlockError, match='merged by n_step already'):
        for block in Items(stream(1)).n_step(2, 0.9):
            ExperienceReplay(n=2).add(block)
    for how in dict(gamma=0.5), dict(n=2, horizon=3):
        with pytest.raises(ArgumentError, match='gamma needs n, and horizon cannot'):
            replay.sample(**how)
    counts = [Steps(block.rows.copy()) for block in stream(1)]
    for block in counts:
        block.step_n.zero_()
        block.episode_n.zero_()
    with pytest.raises(BlockError, match="no 'step_n'"):
        ExperienceReplay(n=2).add(counts[0])
    uncounted = ExperienceReplay(bs=4)
    for block in counts:
        uncounted.add(block)
    for how in dict(n=2), dict(horizon=2):
        with pytest.raises(BlockError, match="rows have no 'step_n'"):
            uncounted.sample(**how)
    dtype = step_dtype(spaces.Discrete(3), spaces.Discrete(3))
    whole = [(k, 'i4' if k == 'reward' else dtype[k]) for k in dtype.names]
    whole = np.zeros(3, np.dtype(whole, align=True))
    whole['episode_n'], whole['step_n'] = 1, [1, 2, 3]
    with pytest.raises(BlockError, match="column 'reward'; got int32; expected float32"):
        ExperienceReplay(n=2).add(Steps(whole))
    merged = Items(stream(1)).n_step(2, 0.9).experience_replay(bs=4)
    next(iter(merged))
    with pytest.raises(BlockError, match='merged by n_step already'):
        merged.sample(n=2)


def test_an_iterated_replay_merges_rows():
    chain = Items(stream(5)).experience_replay(bs=4, n=3, gamma=0.9, seed=0)
    batches = list(islice(chain, 30))
    assert {'discount', 'n'} <= {*batches[0].dtype.names}
    assert max(batch.n.max() for batch in batches) == 3


@pytest.mark.parametrize('store', STORES)
def test_steps_of_sequences(store, tmp_path):
    "Also beyond the end of a sequence"
    options = dict(length=5, burn_in=1, overlap=2, n=3, gamma=0.9, seed=0)
    replay = SequenceReplay(bs=4, max_sz=90, store=STORES[store](tmp_path / 'm'), **options)
    rows = []
    for block in stream(3, 100):
        block = as_frames(block) if 'frames' in store else block
        replay.add(block)
        rows += list(block.rows)
        if len(replay) < 4:
            continue
        batch = replay.sample().to('cpu')
        for i, key in enumerate(batch.index.tolist()):
            own = [k for k in range(key, len(rows)) if rows[k]['env_id'] == rows[key]['env_id']]
            for k, row in zip(own, batch.rows[i]):
                if not row['mask']:
                    assert not row['reward'] and not row['next_state'].any()
                    continue
                for name, x in expected(rows, k, 3, 0.9).items():
                    assert np.allclose(row[name], x, atol=1e-5), name
        batch.update_priorities(torch.ones(4, 4))


class Scaled(Transitions):
    "A view that changes rows, which n-step returns would not know"

    def batch(self, keys, weights):
        batch = super().batch(keys, weights)
        batch.reward.mul_(2)
        return batch


def test_views_that_change_rows_must_say_that_they_look_ahead():
    with pytest.raises(ArgumentError, match='need rows whose rewards stay as they are'):
        Replay(None, 2, 50, view=Scaled(), n=2)


def test_a_reader_draws_the_rows_of_the_writer(tmp_path):
    writer = ExperienceReplay(bs=20, max_sz=50, n=3, gamma=0.9, seed=0, store=Rows(tmp_path / 'm'))
    for block in stream(2):
        writer.add(block)
    options = dict(bs=20, max_sz=50, n=3, gamma=0.9, seed=0)
    reader = ExperienceReplay(store=Rows(tmp_path / 'm', mode='r'), **options)
    mine, other = writer.sample(), reader.sample()
    for name in mine.dtype.names:
        assert torch.equal(mine[name], other[name])


def test_n_may_be_longer_than_all_episodes():
    replay = filled()
    assert replay.sample(n=2**31 - 1).n.max() <= 9


@pytest.mark.parametrize('seed', range(3))
def test_a_key_that_was_overwritten_while_it_is_read_is_drawn_again(seed, tmp_path, monkeypatch):
    "Every other read of a reader loses its first row to the writer"
    writer = ExperienceReplay(max_sz=40, store=Rows(tmp_path / 'm'))
    blocks = iter(scripted_steps([script(500)], 400))
    for _ in range(40):
        writer.add(next(blocks))
    reader = ExperienceReplay(bs=8, max_sz=40, seed=seed, store=Rows(tmp_path / 'm', mode='r'))
    reader.sample()
    store = reader.memory.parts[1]
    read = type(store).some_columns

    def late(self, slots, names):
        for _ in range(5 if self is store else 0):
            writer.add(next(blocks))
        return read(self, slots, names)

    monkeypatch.setattr(type(store), 'some_columns', late)
    for _ in range(10):
        batch = reader.sample(n=3, gamma=1.0)
        for row in batch.rows:
            t = int(row['state'][0])
            assert row['reward'] == sum((t + k) ** 2 for k in range(row['n']))


@pytest.mark.parametrize('store', STORES)
@pytest.mark.parametrize('seed', range(6))
def test_rows_continue_with_the_next_episodes(seed, store, tmp_path):
    "Also after a checkpoint, and through turns of the ring"
    options = dict(bs=6, max_sz=40, seed=seed)
    path = tmp_path / 'm'
    replay, rows = ExperienceReplay(store=STORES[store](path), **options), []
    for t, block in enumerate(stream(seed, 80)):
        block = as_frames(block) if 'frames' in store else block
        replay.add(block)
        rows += list(block.rows)
        if len(rows) < 6:
            continue
        if t % 25 == 24 and 'disk' not in store:
            loaded = ExperienceReplay(store=STORES[store](path), **options)
            loaded.load_state_dict(through_file(replay.state_dict()))
            replay = loaded
        batch = replay.sample(horizon=9, cross_episodes=True).to('cpu')
        for i, key in enumerate(batch.index.tolist()):
            own = [r for r in rows[key:] if r['env_id'] == rows[key]['env_id']][:9]
            n = len(own)
            assert batch.mask[i].tolist() == [True] * n + [False] * (9 - n)
            assert batch.reward[i, :n].tolist() == [r['reward'] for r in own]
            first = [r['step_n'] == 1 for r in own]
            assert batch.is_first[i].tolist() == first + [False] * (9 - n)


def test_a_reader_continues_with_the_next_episodes(tmp_path):
    writer = ExperienceReplay(bs=30, max_sz=50, seed=0, store=Rows(tmp_path / 'm'))
    for block in stream(2):
        writer.add(block)
    reader = ExperienceReplay(bs=30, max_sz=50, seed=0, store=Rows(tmp_path / 'm', mode='r'))
    how = dict(horizon=7, cross_episodes=True)
    assert writer.sample(**how) == reader.sample(**how)
    with pytest.raises(ArgumentError, match='cross_episodes needs horizon'):
        reader.sample(cross_episodes=True)
