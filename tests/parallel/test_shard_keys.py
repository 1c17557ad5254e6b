"""The learning process gives out each key of a replay in workers once, even after close or load."""

from itertools import islice

import numpy as np, pytest

import fastrl_replay.all  # noqa: F401 (registers all stages)
from fastrl_replay.envs.stepper import GymStepper
from fastrl_replay.steps.errors import StaleKey
from fastrl_replay.testing import through_file


def build():
    return (
        GymStepper('CartPole-v1', seed=0)
        .prioritized_replay(bs=4, max_sz=100, seed=0)
        .parallel(2, chunk=2, method='fork')
    )


def learned(batches, n=9):
    found = []
    for batch in islice(batches, n):
        batch.update_priorities(np.abs(batch.reward.numpy()) + batch.state[:, 0].numpy() ** 2)
        found.append(batch)
    return found


def keys_of(batches, rank):
    return [k for b in batches for k in b.index.tolist() if k % 2 == rank]


def test_shards_that_went_back_draw_the_same_batches_under_new_keys():
    chain, fresh = build(), build()
    batches = iter(chain)
    learned(batches)
    state = through_file(chain.state_dict())
    first = learned(batches)
    stale = chain.stats()['stale']
    chain.load_state_dict(state)
    again = learned(iter(chain))
    chain.update_priorities(first[-1].index, np.full(4, 1e6))
    assert all(
        (a.state == b.state).all() and (a.weight == b.weight).all() for a, b in zip(first, again)
    )
    assert all(min(keys_of(again, rank)) > max(keys_of(first, rank)) for rank in range(2))
    assert chain.stats()['stale'] - stale >= 4
    fresh.load_state_dict(state)
    assert all((a.index == b.index).all() for a, b in zip(first, learned(iter(fresh))))
    for c in chain, fresh:
        c.close()


def test_shards_that_were_closed_begin_with_other_keys():
    chain = build()
    first = learned(iter(chain), 3)
    chain.close()
    again = learned(iter(chain), 3)
    assert all(min(keys_of(again, rank)) > max(keys_of(first, rank)) for rank in range(2))
    chain.close()


def test_a_key_that_was_never_given_out_raises_at_once():
    "Nothing of that call reaches a shard, and the run continues"
    with build() as chain:
        (batch,) = learned(iter(chain), 1)
        never = batch.index.clone()
        never[-1] += 2000
        with pytest.raises(StaleKey, match=f'Parallel: key {never[-1]} is unknown'):
            chain.update_priorities(never, np.ones(4))
        assert len(learned(iter(chain))) == 9
        assert chain.stats()['stale'] == 0
