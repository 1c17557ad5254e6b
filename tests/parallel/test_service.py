"""A memory as a service: programs that come, go and are killed, beside plain models of what must be there."""

import asyncio, faulthandler, os, pickle, re, signal, subprocess, sys, time
from concurrent.futures import Future
from pathlib import Path

import cloudpickle, numpy as np, pytest
from gymnasium.spaces import Box, Discrete

from fastrl_replay.look.sample import samples_of
from fastrl_replay.all import *
from fastrl_replay.parallel import service
from fastrl_replay.parallel.coordinator import Coordinator, RateLimiter, Shard, ShardLog
from fastrl_replay.testing import same
from workers import PLACES, no_process_is_left, ray_cluster  # noqa: F401

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning')

DTYPE = step_dtype(Box(-np.inf, np.inf, (2,), np.float32), Discrete(3), who='i8')


def block(first, who=1, n=4, envs=2, **columns):
    "Rows of `envs` environments in turn, the i-th of all with reward i: episodes of five steps"
    i = np.arange(first, first + n)
    rows = np.zeros(n, DTYPE)
    rows['env_id'], step = i % envs, i // envs
    rows['episode_n'], rows['step_n'], rows['terminated'] = (
        step // 5 + 1,
        step % 5 + 1,
        step % 5 == 4,
    )
    rows['reward'], rows['who'], rows['state'], rows['next_state'] = (
        i,
        who,
        step[:, None],
        step[:, None] + 1,
    )
    for k, x in columns.items():
        rows[k] = x
    return Steps(rows)


@pytest.mark.parametrize(
    'args, says',
    [
        ((3,), "connect: name; got 3; expected a text"),
        (('',), 'connect: name'),
        (('a/b',), 'connect: name'),
        (('a', np.inf), 'connect: limit; got inf; expected a number'),
        (('a', -1), 'connect: limit'),
        (('a', 10**400), 'connect: limit'),
        (('a', 'long'), 'connect: limit'),
    ],
    ids=str,
)
def test_what_no_service_can_be_called_is_refused_without_a_cluster(args, says):
    with pytest.raises(ArgumentError, match=says):
        service.connect(*args)


# ---- without Ray: shards and a coordinator in this process ----

LOOP = asyncio.new_event_loop()


class LocalActor:
    "As a handle of an actor, in this process"

    def __init__(self, make):
        self.make, self.made, self.call = make, make(False), self

    def remote(self, *args):
        future = Future()
        future.set_result(self.made.call(*args))
        return type('Ref', (), dict(future=lambda me: future))()

    def kill(self):
        self.made = self.make(True)


def coordinator_of(replay, n=2, ahead=1000):
    data = cloudpickle.dumps(replay)
    parts = [LocalActor(lambda again, i=i: Shard(data, i, n, again)) for i in range(n)]
    return Coordinator('m', data, parts, ahead), parts


class Local(Service):
    "A service whose coordinator is in this process"

    def __init__(self, coordinator, limit=0.05):
        self.coordinator, self.limit, self.name, self.news = coordinator, limit, 'm', []
        Pipe.__init__(self)
        self._fresh()
        self.shards, self.bs = self._ask('settings')

    def _ask(self, what, *args):
        value, self._losses_seen, news = LOOP.run_until_complete(
            self.coordinator.call(what, self._losses_seen, self.limit, *args)
        )
        self.news += news
        if isinstance(value, Exception):
            raise value
        return value


def plain(row):
    return {n: np.asarray(row[n]).tolist() for n in DTYPE.names}


def test_a_replay_with_places_is_served_and_stays_as_it_is():
    "was: serve set return_idxs=False on the user's replay"
    replay = ExperienceReplay(None, bs=2, max_sz=20, return_idxs=True, seed=0)
    service._check_served(replay, 'ExperienceReplay', 'm')
    coordinator, parts = coordinator_of(replay)
    client = Local(coordinator)
    client.add(block(0))
    assert isinstance(client.sample(), Steps) and replay.return_idxs


def by_key(memory, bs=64, draws=40):
    "What is drawn: key → row"
    found = {}
    for _ in range(draws):
        b = memory.sample(bs)
        for row in b.rows:
            assert found.setdefault(int(row['index']), plain(row)) == plain(row)
    return found


def test_rows_that_come_out_are_those_that_went_in():
    "Beside a plain dict of key → row, with two collectors whose environments have the same numbers"
    coordinator, parts = coordinator_of(PrioritizedReplay(None, bs=4, max_sz=500, seed=0))
    model, envs = {}, {}
    for who in (1, 2, 3):
        memory = Local(coordinator)
        for first in range(0, 40, 4):
            b = block(first, who)
            for key, row in zip(memory.add(b).tolist(), b.rows):
                model[key] = plain(row)
    found = by_key(Local(coordinator))
    assert found.keys() == model.keys() and len(model) == 120
    for key, got in found.items():
        want = model[key]
        assert envs.setdefault((want['who'], want['env_id']), got['env_id']) == got['env_id']
        assert got == dict(want, env_id=got['env_id'])
    assert len({*envs.values()}) == 6  # each collector's environments stay apart
    for rank, part in enumerate(
        parts
    ):  # links: the next row of an environment is that of the same collector
        timeline = part.made.replay.memory
        for key in range(timeline.inserted):
            ((here, there),) = timeline.windows([key], 2).rows
            mine = model[key * 2 + rank]
            if mine['terminated']:
                assert not timeline.windows([key], 2).mask[0, 1]
            elif timeline.windows([key], 2).mask[0, 1]:
                assert (
                    there['who'] == here['who']
                    and there['env_id'] == here['env_id']
                    and there['reward'] == here['reward'] + 2
                )
            else:
                assert here['reward'] >= 38  # the last ones


def test_sequences_of_two_collectors():
    "Links, as sequences have them, over shards"
    coordinator, _ = coordinator_of(
        SequenceReplay(None, bs=4, max_sz=500, length=5, burn_in=1, overlap=1, seed=0)
    )
    a, b = Local(coordinator), Local(coordinator)
    for first in range(0, 40, 4):
        a.add(block(first, 1))
        b.add(block(first, 2))
    batch = Local(coordinator).sample(16)
    assert isinstance(batch, Sequences) and batch.shape == (16, 5) and batch.train.shape == (16, 4)
    for rows, mask in zip(batch.rows, batch.mask.numpy()):
        assert len({*rows['who'][mask]}) == 1 and (np.diff(rows['reward'][mask]) == 2).all()
    assert {1, 2} <= {*batch.rows['who'][batch.mask.numpy()].tolist()}
    batch.update_priorities(np.ones((16, 4)))


def test_a_look_into_the_shards_changes_nothing(tmp_path):
    "Figures and pages have the rows of each; one that was restarted without them says that it is empty"
    coordinator, parts = coordinator_of(PrioritizedReplay(None, bs=4, max_sz=500, seed=0))
    memory, other = Local(coordinator), Local(coordinator)
    for first in range(0, 40, 4):
        memory.add(block(first, 1))
        other.add(block(first, 2))
    memory.sample()
    before = [pickle.loads(pickle.dumps(p.made.replay.state_dict())) for p in parts]
    seen = samples_of(memory)
    assert [s['name'] for s in seen] == ['shard 0', 'shard 1'] and [s['rows'] for s in seen] == [
        40,
        40,
    ]
    assert sum(sum(e['sampled']) for s in seen for e in s['episodes']) == 4
    assert 'shard 1: Return of finished episodes' in {a.get_title() for a in memory.show().axes}
    assert memory.page(tmp_path / 'a.html').read_text(encoding='utf-8').count('40 of 500 rows') == 2
    assert all(same(p.made.replay.state_dict(), state) for p, state in zip(parts, before))
    parts[1].kill()
    assert [s['rows'] for s in samples_of(memory)] == [
        40,
        0,
    ] and 'The memory is empty' in memory.page().page


@pytest.mark.parametrize('norm', ['batch', 'memory'])
def test_weights_are_those_of_one_memory(norm):
    "w = (N·P)^-β, over the largest of the batch, or of all rows; and draws as often as P says"
    beta, alpha, n = 0.7, 0.8, 24
    coordinator, _ = coordinator_of(
        PrioritizedReplay(
            None, bs=8, max_sz=100, alpha=alpha, eps=0, beta=beta, weight_norm=norm, seed=1
        )
    )
    a, b = Local(coordinator), Local(coordinator)
    keys = np.concatenate([a.add(block(0, 1, 16)), b.add(block(0, 2, 8))])
    td = np.linspace(0.5, 3, n)
    a.update_priorities(keys, td)
    P = dict(zip(keys.tolist(), td**alpha / (td**alpha).sum()))
    count = dict.fromkeys(P, 0)
    for _ in range(400):
        batch = b.sample()
        w = np.array([(n * P[k]) ** -beta for k in batch.index.tolist()])
        top = w.max() if norm == 'batch' else (n * min(P.values())) ** -beta
        np.testing.assert_allclose(batch.weight.numpy(), w / top, rtol=1e-5)
        for k in batch.index.tolist():
            count[k] += 1
    expected = np.array([P[k] * 3200 for k in P])
    chi2 = ((np.array([count[k] for k in P]) - expected) ** 2 / expected).sum()
    assert chi2 < 60  # 23 degrees of freedom: p < .0001; stratified draws vary less


def test_equal_draws_without_replacement():
    "All 24 rows of two shards in a batch of 24: each once"
    coordinator, _ = coordinator_of(ExperienceReplay(None, bs=24, max_sz=100, seed=1))
    a, b = Local(coordinator), Local(coordinator)
    keys = [*a.add(block(0, 1, 16)), *b.add(block(0, 2, 8))]
    for _ in range(5):
        batch = a.sample()
        assert sorted(batch.index.tolist()) == sorted(keys) and (batch.weight == 1).all()


def test_a_schedule_of_beta_counts_all_batches():
    coordinator, parts = coordinator_of(
        PrioritizedReplay(
            None, bs=8, max_sz=100, alpha=1, eps=0, beta=lambda batches: float(batches), seed=1
        )
    )
    a, b = Local(coordinator), Local(coordinator)
    keys = np.concatenate([a.add(block(0, 1, 4)), b.add(block(0, 2, 4))])
    a.update_priorities(keys, 1 + np.arange(8.0))
    p = dict(zip(keys.tolist(), 1 + np.arange(8.0)))
    for beta in range(4):
        batch = a.sample()
        w = np.array([p[k] ** -float(beta) for k in batch.index.tolist()])
        np.testing.assert_allclose(batch.weight.numpy(), w / w.max(), rtol=1e-5)


def test_updates_reach_their_row_and_stale_keys_are_counted():
    coordinator, parts = coordinator_of(
        PrioritizedReplay(None, bs=4, max_sz=8, alpha=1, eps=0, seed=0)
    )
    a, b = Local(coordinator), Local(coordinator)
    mine, theirs = a.add(block(0, 1, 8)), b.add(block(0, 2, 8))
    a.update_priorities([mine[3], theirs[5]], [7.0, 9.0])
    kept = [part.made.replay.sampler.kept() for part in parts]
    assert [k.argmax() for k in kept] == [3, 5] and [k.max() for k in kept] == [7, 9]
    a.add(block(8, 1, 4))  # the first four are overwritten
    a.update_priorities(np.concatenate([mine[:2], theirs[:1]]), [50.0, 50.0, 60.0])
    assert (
        a.stats()['stale'] == 2
        and parts[1].made.replay.sampler.kept()[0] == 60
        and 50 not in parts[0].made.replay.sampler.kept()
    )
    before = [part.made.replay.sampler.kept().copy() for part in parts]
    for wrong, kind in ([[mine[0] + 1000, theirs[0]], StaleKey], [[-1, theirs[0]], StaleKey]):
        with pytest.raises(kind, match='was never given out'):
            a.update_priorities(wrong, [1.0, 1.0])
    with pytest.raises(ValueError, match='finite'):
        a.update_priorities(theirs[:2], [1.0, np.nan])
    with pytest.raises(ValueError, match='2, one for each key|got 1'):
        a.update_priorities(theirs[:2], [1.0])
    a.update_priorities([], [])
    assert all((x == part.made.replay.sampler.kept()).all() for x, part in zip(before, parts))


def other(kind):
    rows = block(0).rows
    if kind == 'dtype':
        return Steps(
            rows.astype(
                np.dtype(
                    [(n, 'f8' if n == 'reward' else DTYPE[n]) for n in DTYPE.names], align=True
                )
            )
        )
    if kind == 'missing':
        return Steps(
            rows[[n for n in DTYPE.names if n != 'who']].astype(
                np.dtype([(n, DTYPE[n]) for n in DTYPE.names if n != 'who'], align=True)
            )
        )
    if kind == 'no env_id':
        return Steps(
            rows[['state', 'reward']].astype(
                np.dtype([(n, DTYPE[n]) for n in ('state', 'reward')], align=True)
            )
        )
    if kind == 'negative':
        return block(0, env_id=-1)
    return rows


@pytest.mark.parametrize('kind', ['dtype', 'missing', 'no env_id', 'negative', 'no Steps'])
def test_wrong_blocks_are_refused(kind):
    "By a shard that has rows and by one that has none; both are as they were"
    coordinator, parts = coordinator_of(PrioritizedReplay(None, bs=4, max_sz=100, seed=0))
    a, b = Local(coordinator), Local(coordinator)
    if kind in ('no env_id', 'negative'):
        with pytest.raises(BlockError):
            a.add(other(kind))  # also as the first of all
    a.add(block(0))
    for memory in (a, b):
        with pytest.raises((BlockError, TypeError)):
            memory.add(other(kind))
    assert [p.made.replay.memory.inserted for p in parts] == [4, 0]
    assert b.add(block(4, 2)).tolist() == [1, 3, 5, 7] and len(a) == 8
    assert len(a.add(block(8)[:0])) == 0 and len(a) == 8
    assert len(a.add(block(8)[0])) == 1  # one row that is no block


@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('path', [False, True])
def test_a_call_that_is_repeated_adds_nothing_twice(tmp_path, path, when):
    "The shard is killed before it has added the rows, or after; Ray asks again; other rows may come in between"
    replay = ExperienceReplay(
        None, bs=4, max_sz=100, seed=0, store=Rows(tmp_path / 'm') if path else None
    )
    make = lambda again: Shard(cloudpickle.dumps(replay), 0, 1, again)
    shard = make(False)
    shard.call('add', 5, 1, 0, pickle.dumps(block(0)))
    if when == 'after':
        shard.call('add', 5, 2, 0, pickle.dumps(block(4)))
    else:
        shard.log.record(5, 2, first=4, rows=4)  # and killed
    if path:
        shard.replay.close()
        shard = make(True)
        assert shard.call('ping')[1]['first_key'] == 0
    elif when == 'before':
        shard.log = ShardLog(None, 4)
    shard.call('add', 6, 1, 0, pickle.dumps(block(0, 2)))
    for call in range(2, 1_200):
        shard.call(
            'add', 6, call, 0, pickle.dumps(block(0)[:0])
        )  # of the log's 1,024 entries these need one
    assert shard.call('add', 5, 2, 0, pickle.dumps(block(4)))[0] == dict(before=8, after=4)[when]
    rewards = shard.replay.memory[:].rows[['reward', 'who']].tolist()
    assert len(rewards) == 12 and sorted(rewards) == sorted(
        [(float(i), 1) for i in range(8)] + [(float(i), 2) for i in range(4)]
    )


def test_a_call_that_its_client_has_given_up():
    "A client got no reply to its second call, and made a third: the second, repeated after it, adds nothing any more"
    shard = Shard(cloudpickle.dumps(ExperienceReplay(None, bs=4, max_sz=100, seed=0)), 0, 1, False)
    for call in 1, 2, 3, 2:
        shard.call('add', 5, call, 0, pickle.dumps(block(4 * call)))
    assert shard.replay.memory.inserted == 12


def test_refused_rows_are_not_noted():
    "Or the same block again would be thought to be there"
    coordinator, parts = coordinator_of(ExperienceReplay(None, bs=4, max_sz=100, seed=0), 1)
    a, b = Local(coordinator), Local(coordinator)
    a.add(block(0))
    for _ in range(2):
        with pytest.raises(BlockError):
            a.add(other('dtype'))
        b.add(block(0, 2))
    assert len(a) == 12


@pytest.mark.parametrize('n', [1, 2])
def test_lost_rows_are_told(n):
    "A shard without a path begins anew: each program is told once; keys of before are stale, and never given out again"
    coordinator, parts = coordinator_of(PrioritizedReplay(None, bs=4, max_sz=100, seed=0), n)
    a, b = Local(coordinator), Local(coordinator)
    old = a.add(block(0))
    if n == 2:
        b.add(block(0, 2))
    parts[0].kill()
    new = a.add(block(4))  # its environments get new numbers
    assert new.min() > old.max() and len(a) == 4 * n
    for memory in (a, b):
        memory.stats()
        assert (
            len(memory.news) == 1
            and 'shard 0 of' in memory.news[0]
            and '4 rows of its memory are lost' in memory.news[0]
        )
    assert Local(coordinator).news == []
    a.update_priorities(old, np.ones(4))
    stats = a.stats()
    assert (stats['stale'], stats['restarts'], stats['losses'], stats['rows_in']) == (
        4,
        1,
        1,
        4 * n + 4,
    )
    by_key(a, 4, 5)


def test_lost_rows_are_told_where_the_coordinator_is_lost_too():
    "To each program once, also to one that was told of a loss before; nothing is said where only the coordinator is restarted"

    def again(coordinator):
        return Coordinator('m', coordinator.shards[0].made.data, coordinator.shards)

    coordinator, parts = coordinator_of(PrioritizedReplay(None, bs=4, max_sz=100, seed=0))
    a, b = Local(coordinator), Local(coordinator)
    a.add(block(0)), b.add(block(0, 2))
    for i in range(3):
        a.news, b.news = [], []
        coordinator = again(coordinator)  # alone
        for memory in a, b:
            memory.coordinator = coordinator
            memory.stats()
        assert a.news == b.news == []
        parts[i % 2].kill()
        coordinator = again(coordinator)
        for memory in a, b:
            memory.coordinator = coordinator
            memory.stats(), memory.stats()
            assert len(memory.news) == 1 and re.search(
                f'shard {i % 2} of 2 was restarted, and the rows that it had are lost; how many is not known.*a store with a path',
                memory.news[0],
            )
    assert Local(coordinator).news == []


def test_a_shard_with_a_path_goes_on(tmp_path):
    coordinator, parts = coordinator_of(
        PrioritizedReplay(None, bs=4, max_sz=100, seed=0, ratio=1, store=Rows(tmp_path / 'm'))
    )
    a, b = Local(coordinator), Local(coordinator)
    old = [*a.add(block(0)), *b.add(block(0, 2))]
    for _ in range(3):
        a.sample()
    for part in parts:
        part.made.replay.close()
        part.kill()
    a.add(block(4))  # as if nothing had happened: the same episodes of the same environments
    assert not a.news and a.stats()['restarts'] == 2 and a.stats()['batches'] == 3 and len(a) == 12
    assert {*old} <= by_key(a, 12, 9).keys()
    timeline = parts[0].made.replay.memory
    assert timeline.windows([2], 2).mask[0, 1] and timeline.windows([2], 2).rows[
        'reward'
    ].tolist() == [[2, 4]]
    again, _ = coordinator_of(PrioritizedReplay(None, bs=4, max_sz=100, store=Rows(tmp_path / 'm')))
    for part in parts:
        part.made.close()
    assert len(Local(again)) == 12  # served anew


def test_a_coordinator_that_is_killed_knows_it_again():
    coordinator, parts = coordinator_of(
        PrioritizedReplay(None, bs=4, max_sz=100, ratio=1 / 4, warmup=4, seed=0)
    )
    a = Local(coordinator)
    for first in range(0, 20, 4):
        a.add(block(first))
    for _ in range(2):
        a.sample()
    again = Coordinator('m', coordinator.shards[0].made.data, parts)
    b = Local(again)
    assert b.stats()['batches'] == 2 and again.counts() == coordinator.counts() == (16, 2)
    for _ in range(2):
        b.sample()
    with pytest.raises(NotEnoughRows):
        b.sample()


def test_the_ratio_is_exact_while_many_wait():
    "Eight collectors and four learners at once, in random order: neither side is ahead by more than it may, and what is under way"
    coordinator, parts = coordinator_of(
        ExperienceReplay(None, bs=4, max_sz=1000, ratio=0.5, warmup=8, seed=0), ahead=24
    )

    async def collect(k):
        rank, first_key, number = (await coordinator.call('number_envs', 0, 9.0, None, 2))[0]
        for i in range(30):
            data = block(4 * i, k)
            data.rows['env_id'] += number * 2 + rank
            assert isinstance(
                (
                    await coordinator.call(
                        'add', 0, 9.0, rank, 4, k + 1, i, first_key, pickle.dumps(data)
                    )
                )[0],
                int,
            )
            seen.append(coordinator.counts())
            await asyncio.sleep(0)

    async def learn():
        while True:
            value, *_ = await coordinator.call('sample', 0, 0.5, None)
            if isinstance(value, NotEnoughRows):
                return
            seen.append(coordinator.counts())

    async def run():
        await asyncio.gather(*[collect(k) for k in range(8)], *[learn() for _ in range(4)])

    seen = []
    LOOP.run_until_complete(run())
    assert all(batches <= rows * 0.5 for rows, batches in seen)
    assert all(
        rows - batches / 0.5 <= 24 + 4 / 0.5 for rows, batches in seen
    )  # four draws were under way
    assert seen[-1] == (8 * 30 * 4 - 8, (8 * 30 * 4 - 8) // 2)


def test_limits_are_told_on_both_sides():
    coordinator, _ = coordinator_of(
        ExperienceReplay(None, bs=4, max_sz=100, ratio=1 / 4, warmup=6, seed=0), ahead=8
    )
    a = Local(coordinator)
    with pytest.raises(
        NotEnoughRows,
        match=r'0 rows can be drawn.*expected 4 rows, and 6 rows of warm-up.*Remedy: see that a collector',
    ):
        a.sample()
    for first in range(0, 12, 4):
        a.add(block(first))
    with pytest.raises(
        NotEnoughDraws,
        match=r'too few batches were drawn within 0.05 seconds for 4 more rows; got 6 rows, 0 batches, a ratio of 0.25.*ahead=8.*Remedy: see that a learner',
    ):
        a.add(block(12))
    assert len(a) == 12
    a.sample()
    with pytest.raises(
        NotEnoughRows, match='6 rows count for 1 batches; expected 8 rows, for batch 2'
    ):
        a.sample()
    a.add(block(12))
    a.sample()
    assert a.stats()['rows'] == 16


@pytest.mark.parametrize('ratio', [1 / 4, 3, 0.3, 2 / 7])
def test_both_sides_never_wait_for_each_other(ratio):
    rng = np.random.default_rng(0)
    for ahead in (1, 5, 100):
        limiter, rows, batches = RateLimiter(ratio, ahead), 0, 0
        for _ in range(2000):
            n = int(rng.integers(1, 40))
            assert limiter.batches_due(rows, batches) >= 1 or limiter.may_add(n, rows, batches)
            if limiter.may_add(n, rows, batches) and rng.random() < 0.5:
                rows += n
            elif limiter.batches_due(rows, batches) >= 1:
                batches += 1


def test_steps_of_a_loop():
    coordinator, _ = coordinator_of(
        ExperienceReplay(None, bs=4, max_sz=100, seed=0, ratio=1, warmup=0), ahead=2
    )
    a = Local(coordinator)
    for i in range(2):
        a.add_step(np.float32([i, 0]), 1, float(i), np.float32([i + 1, 0]), False)
    for i in range(2, 4):
        a.add_step(
            np.float32([i, 0]), 1, float(i), np.float32([i + 1, 0]), i == 3
        )  # no batch is due before four rows
    with pytest.raises(NotEnoughDraws):
        a.add_step(np.float32([9, 0]), 1, 4.0, np.float32([10, 0]), False)
    for _ in range(4):
        a.sample()
    a.add_step(
        np.float32([9, 0]), 1, 4.0, np.float32([10, 0]), truncated=False, terminated=False
    )  # the same step again, and once
    rows = (
        coordinator.shards[0].made.replay.memory[:].rows
        if coordinator.shards[0].made.replay.memory.inserted
        else coordinator.shards[1].made.replay.memory[:].rows
    )
    assert [(r['reward'], r['episode_n'], r['step_n']) for r in rows] == [
        (0, 1, 1),
        (1, 1, 2),
        (2, 1, 3),
        (3, 1, 4),
        (4, 2, 1),
    ]


def test_a_log_that_is_damaged_is_refused(tmp_path):
    ShardLog(tmp_path, 0)
    good = (tmp_path / 'service').read_bytes()
    for bad in (b'', good[:-1], bytes(8) + good[8:], good[:8] + b'\xff' * 8 + good[16:]):
        (tmp_path / 'service').write_bytes(bad)
        with pytest.raises(StateError, match='damaged'):
            ShardLog(tmp_path, 0)


def test_a_call_that_can_not_be_sent_says_what_to_do(monkeypatch):
    "As after ray.shutdown(): Ray's own exception has no type and no remedy"

    class Gone:
        def __init__(self):
            self.call = self

        def remote(self, *args):
            raise Exception(
                "Failed to submit task to actor ActorID(94) due to b\"Can't find actor 94\""
            )

    memory = object.__new__(Service)
    memory.name, memory.limit, memory.address = 'm', 1.0, None
    memory._fresh()
    memory._coordinator = Gone()
    monkeypatch.setattr(
        'fastrl_replay.parallel.service._cluster',
        lambda address: type('Ray', (), dict(exceptions=None)),
    )
    with pytest.raises(
        ServiceError,
        match=r"m: the call can't be sent; got Failed to submit task.*Remedy: connect\('m'\) again",
    ):
        memory.stats()


def test_a_shard_without_room_is_told(monkeypatch):
    "No machine starts it: that is said, not that it were busy"

    class Nowhere:
        def __init__(self):
            self.call = self

        def remote(self, *args):
            return type('Ref', (), dict(future=lambda me: Future()))()

    coordinator, _ = coordinator_of(ExperienceReplay(None, bs=4, max_sz=100))
    coordinator.shards = [Nowhere(), Nowhere()]
    monkeypatch.setattr('fastrl_replay.parallel.coordinator.PATIENCE', 0.05)
    with pytest.raises(
        ServiceError,
        match=r'shard 0 of 2 has not started within 0.05 seconds; got no machine of the cluster has room for it.*num_cpus',
    ):
        Local(coordinator)


def test_a_service_waits_for_room_as_long_as_its_engine_says(monkeypatch):
    "As workers do: a cluster that scales itself needs minutes; calls wait a minute at most"
    from fastrl_replay.parallel import service

    def connected(name, limit, address):
        return type('Service', (), dict(name=name, limit=limit, first=limit))

    for name, put in dict(
        _start=lambda *a: None, _actor_names=lambda ray: [], Service=connected
    ).items():
        monkeypatch.setattr(service, name, put)
    monkeypatch.setattr(RayEngine, 'cluster', None)
    for patience, limit in (600, 60), (300, 60), (5, 5):
        s = ExperienceReplay(None, bs=4, max_sz=100).serve(
            'pong', engine=RayEngine(patience=patience)
        )
        assert (s.first, s.limit) == (patience, limit)


# ---- on a cluster ----

NAMESPACE = 'fastrl_replay'


@pytest.fixture(scope='module')
def cluster():
    "One machine, and programs beside this one"
    with ray_cluster(4) as (found, _):
        yield found


@pytest.fixture
def served(cluster):
    "What serves a replay, and stops it after the test; nothing hangs"
    names = []
    faulthandler.dump_traceback_later(240, exit=True)

    def serve(replay, name, **kw):
        names.append(name)
        return replay.serve(name, engine=RayEngine(num_cpus=0.5), **kw)

    yield serve
    for name in names:
        try:
            stop(name)
        except ArgumentError:
            pass  # it was stopped
    assert not actors()
    faulthandler.cancel_dump_traceback_later()


def actors():
    import ray

    return sorted(
        a['name']
        for a in ray.util.list_named_actors(all_namespaces=True)
        if a['namespace'] == NAMESPACE
    )


def inside(name, f):
    "What a function says of an actor"
    import ray

    return ray.get(ray.get_actor(name, namespace=NAMESPACE).__ray_call__.remote(f), timeout=60)


def pid_of(name):
    return inside(name, lambda self: os.getpid())


def rows_of(name, shards):
    "All rows: (key, who, reward)"
    found = []
    for i in range(shards):
        part = inside(
            f'{name}/{i}',
            lambda self: (
                [(r['who'], r['reward']) for r in self.replay.memory[:].rows]
                if len(self.replay.memory)
                else []
            ),
        )
        first_key = inside(f'{name}/{i}', lambda self: int(self.log.counts['first_key']))
        found += [
            ((k + first_key) * shards + i, int(who), float(x)) for k, (who, x) in enumerate(part)
        ]
    return found


PROGRAM = '''
import json, sys
from fastrl_replay.all import *
from test_service import block
kind, address, who, total = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
memory = connect('pong', limit=60. if kind == 'collect' else 25., address=address)
print('begun', flush=True)
if kind == 'collect':
    for first in range(0, total, 4): print(json.dumps([who, first, memory.add(block(first, who)).tolist()]), flush=True)
else:
    try:
        for batch in memory:
            batch.update_priorities(1 + batch.reward.abs())
            print(json.dumps(batch.index.tolist()), flush=True)
    except NotEnoughRows: print('over', flush=True)
'''


class Program:
    "A program of its own, whose lines are read from a file"

    def __init__(self, path, kind, address, who=0, total=0):
        self.path = path / f'{kind}-{who}-{time.monotonic_ns()}'
        env = {**os.environ, 'PYTHONPATH': PLACES}
        with open(self.path, 'w') as out:
            self.process = subprocess.Popen(
                [sys.executable, '-c', PROGRAM, kind, address, str(who), str(total)],
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )

    def lines(self):
        whole, *_ = self.path.read_text().rpartition('\n')
        return [eval(x) for x in whole.split('\n') if x[:1] == '[']

    def wait_for(self, n):
        end = time.monotonic() + 90
        while len(self.lines()) < n:
            assert self.process.poll() is None and time.monotonic() < end, (
                self.process.stderr.read() if self.process.poll() is not None else self.lines()
            )
            time.sleep(0.02)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def end(self):
        assert self.process.wait(150) == 0, self.process.stderr.read()[-3000:]


@pytest.mark.slow
def test_programs_that_are_killed_and_begun_again(served, cluster, tmp_path):
    "Nothing that was acknowledged is lost, no row is there twice, the ratio is exact but for what was in flight"
    ratio, shards = 1 / 4, 2
    served(
        PrioritizedReplay(None, bs=8, max_sz=10_000, ratio=ratio, warmup=16, seed=0),
        'pong',
        shards=shards,
        ahead=64,
    )
    at, over = cluster.address, []
    a, b, learner = (
        Program(tmp_path, 'collect', at, 1, 4000),
        Program(tmp_path, 'collect', at, 2, 4000),
        Program(tmp_path, 'learn', at),
    )
    a.wait_for(30)
    a.kill()
    over.append(a)
    a = Program(tmp_path, 'collect', at, 3, 200)
    learner.wait_for(20)
    learner.kill()
    first = learner
    learner = Program(tmp_path, 'learn', at)
    learner.wait_for(10)
    b.kill()
    over.append(b)
    b = Program(tmp_path, 'collect', at, 4, 200)
    for p in (a, b, learner):
        p.end()
    over += [a, b]
    rows = rows_of('pong', shards)
    there = {key: (who, x) for key, who, x in rows}
    assert len({(who, x) for _, who, x in rows}) == len(rows) == len(there)
    told = {
        key: (who, float(first + i))
        for p in over
        for who, first, keys in p.lines()
        for i, key in enumerate(keys)
    }
    assert (
        told.items() <= there.items() and 0 <= len(rows) - len(told) <= 4 * 2
    )  # a block of each that was killed
    assert sum(who in (3, 4) for who, _ in told.values()) == 400
    stats = connect('pong').stats()
    assert stats['rows_in'] == len(rows) and stats['batches'] == int((len(rows) - 16) * ratio)
    got = [*first.lines(), *learner.lines()]
    assert 0 <= stats['batches'] - len(got) <= 1  # of the learner that was killed
    assert {k for batch in got for k in batch} <= there.keys()


@pytest.mark.slow
@pytest.mark.parametrize('path', [True, False])
def test_an_actor_is_killed(served, tmp_path, path):
    "With a path all rows are there again; without one, that is told. The coordinator may be killed, too"
    memory = served(
        PrioritizedReplay(
            None, bs=4, max_sz=1000, seed=0, store=Rows(tmp_path / 'm') if path else None
        ),
        'pong',
        shards=2,
    )
    other, keys = connect('pong'), []
    for first in range(0, 40, 4):
        keys += [*memory.add(block(first, 1)), *other.add(block(first, 2))]
    before = rows_of('pong', 2)
    assert {k for k, *_ in before} == {*keys}
    os.kill(pid_of('pong/0'), signal.SIGKILL)
    if path:
        keys += [*memory.add(block(40, 1))]
        assert (
            {*before} <= {*rows_of('pong', 2)}
            and len(memory) == 84
            and memory.stats()['restarts'] == 1
        )
    else:
        with pytest.warns(
            RuntimeWarning,
            match='pong: shard 0 of 2 was restarted, and 40 rows of its memory are lost.*Remedy: serve a store with a path',
        ):
            memory.add(block(40, 1))
        with pytest.warns(RuntimeWarning, match='40 rows of its memory are lost'):
            other.stats()
        assert len(memory) == 44
    os.kill(pid_of('pong'), signal.SIGKILL)
    rows = memory.stats()['rows']
    assert rows == (84 if path else 44)
    memory.add(block(44, 1))
    assert len(other) == rows + 4 and len(other.sample(8)) == 8


@pytest.mark.slow
def test_it_outlives_its_program_and_leaves_nothing(served, cluster, tmp_path):
    "Served by a program that has ended; stopped by name: no actor, no process, no open file"
    program = f"from fastrl_replay.all import *\nExperienceReplay(None, bs=4, max_sz=100, store=Rows({str(tmp_path / 'm')!r})).serve('pong', shards=2, engine=RayEngine(num_cpus=.5, address={cluster.address!r}))"
    ran = subprocess.run(
        [sys.executable, '-c', program],
        env={**os.environ, 'PYTHONPATH': PLACES},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    served(ExperienceReplay(None, bs=4, max_sz=100), 'other')
    memory, other = connect('pong'), connect('other')
    try:
        keys = memory.add(block(0))
        other.add(block(0))
        other.add(block(4))
        assert (len(memory), len(other)) == (4, 8) and actors() == [
            'other',
            'other/0',
            'pong',
            'pong/0',
            'pong/1',
        ]
        with pytest.raises(
            ArgumentError,
            match=r"the name 'pong' is taken.*Remedy: connect\('pong'\) to use what is there, or stop",
        ):
            ExperienceReplay(None).serve('pong')
        with pytest.raises(
            ArgumentError,
            match="no service has the name 'pang' .did you mean 'pong'.*expected one of 'other', 'pong'",
        ):
            connect('pang')
        pids = [pid_of(n) for n in ('pong', 'pong/0', 'pong/1')]
    finally:
        memory.stop()
    assert actors() == ['other', 'other/0']
    end = time.monotonic() + 20
    while any(Path(f'/proc/{p}').exists() for p in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(Path(f'/proc/{p}').exists() for p in pids)
    assert not open_below(tmp_path)
    with pytest.raises(ServiceError, match=r"the service ended.*Remedy: replay.serve\('pong'\)"):
        memory.add(block(4))
    with pytest.raises(ArgumentError, match='no service has the name'):
        stop('pong')
    again = served(
        ExperienceReplay(None, bs=4, max_sz=100, store=Rows(tmp_path / 'm')), 'pong', shards=2
    )
    assert (
        len(again) == 4
        and sorted(again.sample(4).index.tolist()) == sorted(keys.tolist())
        and len(other) == 8
    )


def open_below(folder):
    "Files below a folder that some process has open or mapped"
    found = []
    for p in Path('/proc').glob('[0-9]*'):
        try:
            found += [
                f
                for f in (
                    *(os.readlink(fd) for fd in (p / 'fd').iterdir()),
                    *(line.split(None, 5)[-1] for line in (p / 'maps').read_text().splitlines()),
                )
                if f.startswith(str(folder))
            ]
        except OSError:
            pass  # it has ended, or is another one's
    return found


@pytest.mark.slow
def test_a_chain_after_it(served):
    "Batches through `.prefetch`, whose feedback arrives; a copy by pickle connects by itself"
    memory = served(PrioritizedReplay(None, bs=4, max_sz=100, alpha=1, eps=0, seed=0), 'pong')
    keys = memory.add(block(0, n=8))
    for i, batch in enumerate(memory.prefetch()):
        batch.update_priorities([0.01] * 4)  # the others are drawn the sooner
        if i == 20:
            break
    assert set(inside('pong/0', lambda self: self.replay.sampler.kept().tolist())) == {0.01}
    assert len(pickle.loads(pickle.dumps(memory))) == 8 == len(keys)


@pytest.mark.slow
def test_what_can_not_be_opened_is_told(served, tmp_path):
    "A path that is a file: the error of the store, and nothing is left"
    (tmp_path / 'm').write_text('a file')
    with pytest.raises(ArgumentError, match='path'):
        served(ExperienceReplay(None, bs=4, store=Rows(tmp_path / 'm' / 'x')), 'pong')
    assert not actors()
