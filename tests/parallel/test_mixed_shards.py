"""Mixtures in shards: each worker has a part of one replay and all rows of the others.

Keys, weights and errors are right, and a saved mixture continues."""

import os, signal
from itertools import islice

import numpy as np, pytest

import test_shards
from fastrl_replay.look.sample import contents
from fastrl_replay.all import *
from fastrl_replay.testing import script, scripted_steps, through_file
from test_ray import ENGINES, ON_RAY, cluster, engine, ray  # noqa: F401
from workers import FORK, no_process_is_left, short, zeros  # noqa: F401

pytestmark = pytest.mark.slow

DEMOS = Steps.cat([*scripted_steps([script(9, env=3)], 30)])


def demonstrations(mode=None, folder=None, **kw):
    store = None if folder is None else Rows(folder, **({} if mode is None else dict(mode=mode)))
    replay = PrioritizedReplay(
        bs=4, max_sz=60, seed=7, store=store, **{**dict(alpha=1.0, beta=1.0, eps=0.0), **kw}
    )
    if mode is None:
        replay.add(DEMOS)
    return replay


def mixed(
    n=2, engine=FORK, shares=dict(online=0.5, demos=0.5), demos=None, store=None, told=False, **kw
):
    online = GymStepper(short, zeros, seed=0).prioritized_replay(
        bs=4, max_sz=40, seed=0, warmup=8, store=store, alpha=1.0, beta=1.0, eps=0.0
    )
    if demos is None:
        demos = demonstrations()
    chain = Mixture(dict(online=online, demos=demos), shares, bs=8)
    if told:
        chain = test_shards.Told(chain)
    return chain.parallel(n, **{**dict(chunk=1), **engine, **kw})


def error(batch):
    return 1 + (batch.index % 13).double()


def draws_of(mixture):
    return [contents(r)['draw'] for r in mixture.replays.values()]


@pytest.mark.parametrize('engine', ENGINES, indirect=True)
def test_errors_reach_the_replay_and_the_row(engine):
    "The priorities of both replays in both shards are the errors of the rows that were drawn there"
    with mixed(engine=engine) as pipe:
        told = {}
        for batch in islice(pipe, 40):
            shards, which = batch.index % 2, batch.replay
            rows = batch.index // 4  # keys in the replay of a shard that was never restarted
            assert which.tolist() == [0] * 4 + [1] * 4
            assert len({*shards.tolist()}) == 1
            assert DEMOS[rows[4:]].step_n.tolist() == batch.step_n[4:].tolist()
            batch.update_priorities(error(batch))
            names = zip(shards.tolist(), which.tolist(), rows.tolist())
            told |= dict(zip(names, error(batch).tolist()))
        list(islice(pipe, 4))  # the last errors go with the next requests
        found = {}
        for i, draws in enumerate(pipe.ask_shards(draws_of)):
            for w, draw in enumerate(draws):
                for k, p in zip(draw['key'], draw['priority']):
                    found[i, w, int(k)] = p
    here = [name for name in told if name in found]
    assert len(here) > 60
    assert all(abs(found[name] - told[name]) < 1e-9 for name in here)


def test_weights_are_those_of_one_mixture():
    "Of uniform demonstrations 1, of the others 1/(N q): 1 on average, whatever the shards' masses"
    online = GymStepper(short, zeros, seed=0).prioritized_replay(
        bs=4, max_sz=40, seed=0, alpha=1.0, beta=1.0, eps=0.0
    )
    demos = ExperienceReplay(bs=4, max_sz=60, seed=7)
    demos.add(DEMOS)
    seen = []
    chain = Mixture(dict(online=online, demos=demos), bs=8)
    with chain.parallel(2, chunk=1, **FORK) as pipe:
        for i, batch in enumerate(islice(pipe, 800)):
            factor = 1 + 4 * (batch.index[0] % 2)  # the second shard's errors are five times larger
            batch.update_priorities(error(batch) * factor)
            weight = batch.weight.double()
            assert (weight <= 1).all()
            assert len({*weight[4:].tolist()}) == 1
            if i >= 100:
                seen.append(float((weight[:4] / weight[4]).mean()))
    assert abs(np.mean(seen) - 1) < 5 * np.std(seen) / len(seen) ** 0.5 + 0.01


def some(pipe, n):
    "So many batches, each of which is answered"
    seen = []
    for batch in islice(pipe, n):
        batch.update_priorities(error(batch))
        seen.append(batch)
    return seen


@pytest.mark.parametrize('engine', ENGINES, indirect=True)
@pytest.mark.parametrize(
    'shares', [None, lambda batches: dict(online=2, demos=batches % 3)], ids=['alike', 'scheduled']
)
def test_a_saved_one_goes_on(engine, shares):
    "Batch for batch, also where the demonstrations are not there before the checkpoint is"
    with mixed(engine=engine, shares=shares, chunk=2) as pipe:
        some(pipe, 17)
        state = through_file(pipe.state_dict())
        want = some(pipe, 14)
    empty = PrioritizedReplay(bs=4, max_sz=60, seed=7, alpha=1.0, beta=1.0, eps=0.0)
    for demos in None, empty:
        with mixed(engine=engine, shares=shares, chunk=2, demos=demos) as again:
            again.load_state_dict(state)
            assert some(again, 14) == want
    with (
        mixed(engine=engine, chunk=2, demos=ExperienceReplay(bs=4, max_sz=60)) as other,
        pytest.raises(StateError),
    ):
        other.load_state_dict(state)


def test_on_disk_the_others_are_read_by_all(tmp_path):
    "And a saved one goes on; one that all would write is refused by the first batch"
    with demonstrations(folder=tmp_path / 'demos'):
        pass

    def make(mode='r'):
        return mixed(
            demos=demonstrations(mode, tmp_path / 'demos'),
            store=Rows(tmp_path / 'online', spare=500),
        )

    with make() as pipe:
        some(pipe, 21)
        state = through_file(pipe.state_dict())
        want = some(pipe, 16)
    assert sorted(p.name for p in (tmp_path / 'online').iterdir()) == [
        'shard-0',
        'shard-1',
    ] and not [*(tmp_path / 'demos').glob('shard*')]
    with make() as again:
        again.load_state_dict(state)
        assert some(again, 16) == want
    with (
        make('a') as pipe,
        pytest.raises(
            WorkerError, match="several workers cannot write the memory in .*demos.*mode='r'"
        ),
    ):
        next(iter(pipe))


@pytest.mark.filterwarnings('ignore:Parallel')
@pytest.mark.parametrize('engine', ENGINES, indirect=True)
def test_a_shard_that_is_killed_begins_anew_with_the_demonstrations(engine):
    "Its part of the rows is lost, and its keys are new ones; errors for the old ones are stale"

    def keys(batches):
        return {k for b in batches for k in b.index.tolist() if k % 2 == 1}

    with mixed(engine=engine, restarts=2, told=True) as pipe:
        first = []
        for batch, pid in islice(pipe, 20):
            first.append(batch)
        assert batch.index[0] % 2 == 1
        rows = pipe.stats()['workers'][1]['rows']
        os.kill(pid, signal.SIGKILL)
        while pipe.stats()['restarts'] == 0:
            first += [batch for batch, _ in islice(pipe, 1)]
        then = [batch for batch, _ in islice(pipe, 12)][-6:]
        stats = pipe.stats()
        assert rows <= stats['lost'] <= 40
        assert stats['restarts'] == 1
        old, new = keys(first), keys(then)
        assert min(new) > max(old)
        pipe.update_priorities(sorted(old), np.ones(len(old)))
        for batch in then:
            batch.update_priorities(error(batch))
        list(islice(pipe, 6))
        assert pipe.stats()['stale'] == stats['stale'] + len(old)


def test_one_worker_gives_what_a_mixture_here_gives():
    "Without errors, batch for batch; then prefetched"
    with mixed(1) as pipe:
        want = [*islice(pipe, 12)]
    assert [*islice(mixed(0), 12)] == want
    with mixed(1).prefetch(2) as pipe:
        assert [*islice(pipe, 12)] == want
