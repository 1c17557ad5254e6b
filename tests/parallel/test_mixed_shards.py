"""Mixtures in shards: of one replay each worker has a part, of the others all rows; keys, weights and errors are right, and a saved one goes on."""

import os, signal
from itertools import islice

import numpy as np, pytest, torch

import test_shards
from fastrl_replay.look.sample import contents
from fastrl_replay.all import *
from fastrl_replay.testing import script, scripted_steps, through_file
from test_ray import ENGINES, ON_RAY, cluster, engine, ray  # noqa: F401
from workers import FORK, no_process_is_left, short, zeros  # noqa: F401

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
    n=2, engine=FORK, shares=dict(online=0.5, demos=0.5), demos=None, store=None, chunk=1, **kw
):
    online = GymStepper(short, zeros, seed=0).prioritized_replay(
        bs=4, max_sz=40, seed=0, warmup=8, store=store, alpha=1.0, beta=1.0, eps=0.0
    )
    return Mixture(
        dict(online=online, demos=demonstrations() if demos is None else demos), shares, bs=8
    ).parallel(n, chunk=chunk, **engine, **kw)


def local(pipe, batch):
    return (
        batch.index // pipe.num_workers // 2
    )  # keys in the replay of a shard that was never restarted


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
            assert (
                batch.replay.tolist() == [0] * 4 + [1] * 4
                and len({*(batch.index % 2).tolist()}) == 1
            )
            row = DEMOS[local(pipe, batch)[batch.replay == 1]]
            assert (
                row.reward.tolist() == batch.reward[batch.replay == 1].tolist()
                and row.step_n.tolist() == batch.step_n[batch.replay == 1].tolist()
            )
            batch.update_priorities(error(batch))
            told |= {
                (int(k % 2), int(w), int(i)): float(e)
                for k, w, i, e in zip(batch.index, batch.replay, local(pipe, batch), error(batch))
            }
        list(islice(pipe, 4))  # the last errors go with the next requests
        found = {
            (i, w, int(k)): p
            for i, draws in enumerate(pipe.ask_shards(draws_of))
            for w, draw in enumerate(draws)
            for k, p in zip(draw['key'], draw['priority'])
        }
        here = [k for k in told if k in found]
        assert len(here) > 60 and all(abs(found[k] - told[k]) < 1e-9 for k in here)
        stats = pipe.stats()
        assert (
            stats['items'] == 44
            and stats['lost'] == stats['restarts'] == 0
            and [w['rows'] + 1 for w in stats['workers']]
            == [len(draws[0]['key']) for draws in pipe.ask_shards(draws_of)]
        )  # with the one that waits


def raw_weights(batch):
    "Weights on the scale on which those of uniform demonstrations are 1"
    return batch.weight.double() / batch.weight[batch.replay == 1][0]


@pytest.mark.parametrize(
    'kw', [dict(), pytest.param(dict(ordered=False), marks=pytest.mark.slow)], ids=str
)
def test_weights_are_those_of_one_mixture(kw):
    "Of uniform demonstrations 1, of the others 1/(N q), with N rows in all shards and q the chance of a draw: 1 on average, whatever the shards' masses"
    online = GymStepper(short, zeros, seed=0).prioritized_replay(
        bs=4, max_sz=40, seed=0, alpha=1.0, beta=1.0, eps=0.0
    )
    demos = ExperienceReplay(bs=4, max_sz=60, seed=7)
    demos.add(DEMOS)
    seen = []
    with Mixture(dict(online=online, demos=demos), bs=8).parallel(2, chunk=1, **FORK, **kw) as pipe:
        for i, batch in enumerate(islice(pipe, 3000)):
            factor = 1 + 4 * (
                batch.index[0] % 2
            )  # the second shard's errors are five times those of the first
            batch.update_priorities(error(batch) * factor)
            assert (batch.weight <= 1).all() and len(
                {*batch.weight[batch.replay == 1].tolist()}
            ) == 1
            if i < 300:
                continue
            w = raw_weights(batch)[batch.replay == 0]
            mine, others = pipe._workers[batch.index[0] % 2], pipe._workers[1 - batch.index[0] % 2]
            online = mine.facts['parts'][0], others.facts['parts'][0]
            share = pipe._share(mine)
            p = (
                1 / w * (online[0]['mass'] / share) / sum(x['drawable'] for x in online)
            )  # which priority must it have had?
            assert (p > 0).all() and p.max() <= online[0]['mass']
            seen.append(float(w.mean()))
        shards = [w.given for w in pipe._workers]
    assert abs(np.mean(seen) - 1) < 5 * np.std(seen) / len(seen) ** 0.5 + 0.01
    assert shards[0] == shards[1] or kw


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
            WorkerError, match="demos holds a memory, which several workers can't write.*mode='r'"
        ),
    ):
        next(iter(pipe))


@pytest.mark.filterwarnings('ignore:Parallel')
@pytest.mark.parametrize('engine', ENGINES, indirect=True)
def test_a_shard_that_is_killed_begins_anew_with_the_demonstrations(engine):
    "Its part of the rows is lost, and its keys are new ones; errors for the old ones are stale"
    with mixed(engine=engine, restarts=2) as pipe:
        first = [*islice(pipe, 20)]
        rows = pipe.stats()['workers'][1]['rows']
        pid = (
            ray.get(pipe._workers[1].actor.__ray_call__.remote(lambda self: os.getpid()))
            if engine is ON_RAY
            else pipe._workers[1].process.pid
        )
        os.kill(pid, signal.SIGKILL)
        while pipe.stats()['restarts'] == 0:
            first += islice(pipe, 1)
        then = [*islice(pipe, 12)]
        stats = pipe.stats()
        assert rows <= stats['lost'] <= 40 and stats['restarts'] == 1
        old, new = (
            {k for b in some for k in b.index[b.index % 2 == 1].tolist()}
            for some in (first, then[-6:])
        )
        assert old and new and not old & new and min(new) > max(old)
        pipe.update_priorities(sorted(old), np.ones(len(old)))
        assert pipe.stats()['stale'] == stats['stale'] + len(old)
        for batch in then[-6:]:
            batch.update_priorities(error(batch))
        list(islice(pipe, 6))
        assert pipe.stats()['stale'] == stats['stale'] + len(old)


def test_keys_are_known_for_each_replay():
    "One that the demonstrations never gave out is refused, also where the other replay has given out later ones"
    with mixed() as pipe:
        newest = {}
        for batch in islice(pipe, 90):
            for w, k in zip(batch.replay.tolist(), local(pipe, batch).tolist()):
                newest[w] = max(newest.get(w, 0), k)
        assert newest[1] <= 29 < 35 < newest[0]

        def key(replay, k, shard):
            return (2 * k + replay) * 2 + shard

        for shard in 0, 1:
            with pytest.raises(StaleKey, match=f'key {key(1, 35, shard)} was never given out'):
                pipe.update_priorities([key(0, 35, shard), key(1, 35, shard)], [1.0, 1.0])
            pipe.update_priorities([key(0, 35, shard)], [1.0])
        assert [len(w.told) for w in pipe._workers] == [1, 1]
        with pytest.raises(
            ArgumentError,
            match='Parallel: update_priorities: TD errors; got 16; expected 8, one for each key',
        ):
            batch.update_priorities(torch.ones(8, 2))
        assert len([*islice(pipe, 6)]) == 6


def test_one_worker_gives_what_a_mixture_here_gives():
    "Without errors, batch for batch; then prefetched"
    here = Mixture(
        dict(
            online=GymStepper(short, zeros, seed=0).prioritized_replay(
                bs=4, max_sz=40, seed=0, warmup=8, alpha=1.0, beta=1.0, eps=0.0
            ),
            demos=demonstrations(),
        ),
        dict(online=0.5, demos=0.5),
        bs=8,
    )
    want = [*islice(here, 12)]
    with mixed(1) as pipe:
        assert [*islice(pipe, 12)] == want
    with mixed(1).prefetch(2) as pipe:
        assert [*islice(pipe, 12)] == want
    with mixed(2).prefetch(2) as pipe, mixed(2) as plain:
        assert [*islice(pipe, 12)] == [*islice(plain, 12)]
    assert len(want) == 12 == len([*islice(mixed(0), 12)])


def test_sequences_mix_in_shards():
    def make():
        online = GymStepper(short, zeros, seed=0).sequence_replay(
            bs=2, max_sz=60, length=4, burn_in=1, overlap=2, seed=0
        )
        demos = SequenceReplay(bs=2, max_sz=60, length=4, burn_in=1, overlap=2, seed=1)
        demos.add(DEMOS)
        return Mixture(dict(online=online, demos=demos), bs=4).parallel(2, chunk=1, **FORK)

    with make() as pipe:
        for batch in islice(pipe, 16):
            assert batch.replay.tolist() == [0, 0, 1, 1] and list(batch.train.shape) == [4, 3]
            batch.update_priorities(torch.ones(4, 3))
        assert pipe.stats()['stale'] == 0


def test_a_look_has_all_replays_of_all_shards(tmp_path):
    with mixed() as pipe:
        [*islice(pipe, 12)]
        pipe.page(tmp_path / 'page.html')
        of_page = test_shards.rows_in((tmp_path / 'page.html').read_text(encoding='utf-8'))
        assert [*of_page] == [
            f'shard {i}, {name}' for i in (0, 1) for name in ('online', 'demos')
        ] and all(of_page.values())
        assert len(pipe.show().axes) > 4
