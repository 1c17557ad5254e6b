"""SequenceReplay, against a naive reference of lists and dicts.

Batches, recurrent states, priorities, checkpoints, what is refused."""

import copy, pickle
from functools import partial
from itertools import product

import numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.testing import same, through_file
from scripted import Queue, elsewhere, everything, numbered, with_columns
from stories import EVENTS, Story
from strategies import bits, cases, numpy_leaves, pairs

HIDDEN = dict(
    vector=('f4', (3,)),
    nested=spaces.Dict(
        c=spaces.Box(-9, 9, (3,), np.float64),
        h=spaces.Tuple([spaces.Box(-9, 9, (2, 2)), spaces.Dict(b=spaces.MultiBinary(3))]),
    ),
)


def row_dtype(hidden=None, n=False):
    extra = {}
    if hidden:
        extra['hidden'] = HIDDEN[hidden]
    if n:
        extra['n'] = 'i4'
    return step_dtype(spaces.Box(-9, 9, (2,)), spaces.Discrete(3), **extra)


def made(*blocks, **kw):
    settings = dict(bs=1, max_sz=40, length=4, burn_in=1, overlap=2, seed=0)
    replay = SequenceReplay(**{**settings, **kw})
    for b in blocks:
        replay.add(b)
    return replay


def close(a, b, rtol=1e-6):
    np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=rtol, atol=1e-300)


# ---- the reference: lists and dicts, no arithmetic with remainders ----


class Model:
    "What the specification says: all rows ever, running episodes, the sequences that can be drawn"

    def __init__(self, max_sz, length, burn_in, overlap, eta, alpha, eps, prioritized, **_):
        self.max_sz, self.length, self.burn_in, self.overlap = max_sz, length, burn_in, overlap
        self.eta, self.alpha, self.eps = eta, alpha if prioritized else 0, eps
        self.rows, self.seqs, self.p, self.stale, self.drawn = [], {}, {}, 0, set()
        # env: [its keys, where the next sequence starts, where the last one ended]
        self.running = {}
        self.newest = {}  # env: its newest key
        self.top = 0  # the largest priority that there was when a row came, since the last update

    def oldest(self):
        return max(0, len(self.rows) - self.max_sz)

    def add(self, rows):
        found = []
        for i, r in enumerate(rows):
            env = int(r['env_id'])
            key = len(self.rows)
            # an episode of which no row is left, or that is in a block larger than the memory
            lost = i < len(rows) - self.max_sz
            if lost or key - self.newest.get(env, key) >= self.max_sz:
                self.running.pop(env, None)
            self.newest[env] = key
            self.rows.append(r)
            here = [v for k, v in self.p.items() if k >= self.oldest()]
            self.top = max(self.top, *here, 0)
            if lost:
                continue
            if env in self.running:
                last = self.rows[self.running[env][0][-1]]
                if r['step_n'] != last['step_n'] + 1 or r['episode_n'] != last['episode_n']:
                    found += self.end(env)
            keys, start, _ = lane = self.running.setdefault(env, [[], 0, 0])
            keys.append(key)
            if len(keys) == start + self.length:
                found.append(keys[start:])
                lane[1:] = start + self.length - self.overlap, len(keys)
            if (r['terminated'] or r['truncated']) and ('n' not in rows.dtype.names or r['n'] <= 1):
                found += self.end(env)
        self.seqs = {k: v for k, v in self.seqs.items() if k >= self.oldest()}
        self.p = {k: v for k, v in self.p.items() if k >= self.oldest()}
        new = self.top or 1.0
        for keys in found:
            if keys[0] >= self.oldest():
                self.seqs[keys[0]], self.p[keys[0]] = keys, new
                self.top = 0

    def end(self, env):
        keys, _, shown = self.running.pop(env)
        return [] if shown == len(keys) else [keys[-self.length :]]

    def update(self, keys, td):
        self.top = 0
        for k, d in zip(keys, td):
            if k < self.oldest():
                self.stale += 1
                continue
            d = [abs(float(x)) for x in d[: max(0, len(self.seqs[k]) - self.burn_in)]]
            mixed = self.eta * max(d) + (1 - self.eta) * sum(d) / len(d) if d else 0.0
            self.p[k] = (mixed + self.eps) ** self.alpha


SETTINGS = dict(eta=0.9, alpha=0.9, eps=1e-6, beta=0.6, prioritized=True, state='stored', bs=1)


class OfSequences(Story):
    def __init__(self, sizes, hidden=None, n=False, seed=0, envs=(0, 0, 0, 1, 2, 17, 60), **kw):
        self.kw = {**SETTINGS, **sizes, **kw}
        self.kw['bs'] = min(self.kw['bs'], self.kw['max_sz'])
        self.dtype, self.hidden, self.envs = row_dtype(hidden, n), hidden, envs
        self.model, self.queue = Model(**self.kw), Queue()
        self.rng, self.at, self.held = np.random.default_rng(seed), {}, []
        self.replay = SequenceReplay(self.queue, seed=0, **self.kw)

    def block(self, n):
        """Rows of several environments in a bunch.

        '.' is a step; 't', 'u' and 'b' are the flags; '!' is a new episode without an end before
        it, '1' one of the same number, 'e' another number, '+' a gap."""
        rows, keys = np.zeros(n, self.dtype), len(self.model.rows) + np.arange(n)
        for j, a in enumerate(numpy_leaves(rows)):
            number = keys * (j + 3) % (2 if a.dtype == bool else 100)
            a[...] = number.reshape(-1, *[1] * (a.ndim - 1))
        envs = self.rng.choice(self.envs, 1 + self.rng.integers(0, 3))
        busy = self.rng.choice([0.05, 0.3, 0.9])
        for r in rows:
            env = int(self.rng.choice(envs))
            what = self.rng.choice(list('tub!1e+')) if self.rng.random() < busy else '.'
            number, step = self.at.get(env, (1, 0))
            if what in '!1' and step:
                number, step = number + (what == '!'), 0
            if what == 'e':
                number += 2
            step += 3 if what == '+' and step else 1
            r['env_id'], r['episode_n'], r['step_n'] = env, number, step
            r['terminated'], r['truncated'] = what in 'tb', what in 'ub'
            last = what in 'tub'
            if 'n' in rows.dtype.names:
                r['n'] = self.rng.integers(1, 4)
                last = last and r['n'] == 1
            self.at[env] = (number + 1, 0) if last else (number, step)
        return Steps(rows)

    def add(self, n, _):
        steps = self.block(n * n // 4)
        first = len(self.model.rows)
        assert self.replay.add(steps).tolist() == list(range(first, first + len(steps)))
        self.came(steps)

    def came(self, steps):
        self.model.add(steps.rows)

    def drawable(self):
        return len(self.model.seqs)

    def through(self, n, frozen):
        at = dict(self.at)
        if super().through(n, frozen):
            self.at = at

    def drew(self, batch, n):
        m, length = self.model, self.kw['length']
        assert batch.shape == (n, length)
        keys = batch.index.tolist()
        for i, k in enumerate(keys):
            rows = m.seqs[k]  # KeyError: a sequence that is not there
            want = np.zeros(length, self.dtype)
            want[: len(rows)] = np.array([m.rows[j] for j in rows], self.dtype)
            assert batch.mask[i].tolist() == [t < len(rows) for t in range(length)]
            for name in set(self.dtype.names) - {'hidden'}:
                assert bits(batch.rows[name][i]) == bits(want[name]), name
            if self.hidden:
                first = want['hidden'][:1]
                if self.kw['state'] == 'zero':
                    first = np.zeros_like(first)
                for a, t in pairs(first, batch[i : i + 1].hidden):
                    assert bits(t) == bits(a)
        m.drawn.update(keys)
        p = np.array([m.p[k] for k in keys])
        if max(m.p.values()) > 0:
            assert p.min() > 0
        if self.kw['prioritized'] and p.min() > 0:
            close(batch.weight, (p / p.min()) ** -self.kw['beta'])
        else:
            assert batch.weight.tolist() == [1] * n
        self.held.append((batch, self.replay))

    def tds(self, n):
        numbers = [0, 0, 1e-3, 0.5, -2, 2, -3, 7, 100, 1 / 3]
        return self.rng.choice(numbers, (n, self.kw['length'] - self.kw['burn_in']))

    def late(self, i, how):
        """TD errors of some earlier batch: whole, of its trained steps, of a copy or on a device.

        Those of stale keys, and behind the end of an episode, may be anything."""
        if not self.held:
            return
        batch, replay = self.held.pop(i % len(self.held))
        keys, td = batch.index.tolist(), self.tds(len(batch))
        self.model.update(keys, td)
        td[~batch.train.mask.numpy()] = np.nan
        td[np.array(keys) < self.model.oldest()] = np.inf
        if replay is self.replay:
            part = (batch, batch.train, batch.copy(), elsewhere(batch))[how % 4]
            part.update_priorities(torch.as_tensor(td) if how % 3 else td)
        else:
            self.replay.update_priorities(batch.index, td)

    def refused(self, n, which):
        state, at, here = everything(self.replay), dict(self.at), list(self.model.seqs)[:n]
        self.refuse(self.block(n + 1), n, which)
        self.at = at
        width, end = self.kw['length'] - self.kw['burn_in'], len(self.model.rows)
        inside = [k for k in range(self.model.oldest(), end) if k not in self.model.seqs]
        for wrong in end, -1, *inside[:1]:
            with pytest.raises(StaleKey):
                self.replay.update_priorities([*here, wrong], np.ones((len(here) + 1, width)))
        with pytest.raises(ValueError):
            self.replay.update_priorities(here, np.ones((len(here), width + 1)))
        full = [k for k in here if len(self.model.seqs[k]) > self.kw['burn_in']]
        if full:
            with pytest.raises(ValueError, match='TD error'):
                self.replay.update_priorities(full, np.full((len(full), width), np.nan))
        assert same(everything(self.replay), state)

    def check(self):
        m, s = self.model, self.replay.stats()
        assert len(self.replay) == s['sequences'] == len(m.seqs)
        assert (s['stale'], s['inserted'], s['evicted']) == (m.stale, len(m.rows), m.oldest())
        if m.seqs:
            steps = np.array([len(x) for x in m.seqs.values()])
            never = np.mean([k not in m.drawn for k in m.seqs])
            assert s['steps_mean'] == pytest.approx(steps.mean())
            assert s['padded'] == pytest.approx(1 - steps.sum() / (len(steps) * m.length), abs=1e-9)
            assert s['never_drawn'] == pytest.approx(never)
        p = np.array([*m.p.values()])
        if p.sum() > 0:
            assert s['ess'] == pytest.approx(p.sum() ** 2 / (p**2).sum())


sizes = st.integers(1, 7).flatmap(
    lambda n: st.fixed_dictionaries(
        dict(
            length=st.just(n),
            burn_in=st.integers(0, n - 1),
            overlap=st.integers(0, n - 1),
            max_sz=st.sampled_from([n, n + 1, 2 * n + 1, 20, 50]),
        )
    )
)
settings = st.fixed_dictionaries(
    dict(
        hidden=st.sampled_from([None, *HIDDEN]),
        n=st.booleans(),
        eta=st.sampled_from([0, 0.5, 0.9, 1]),
        alpha=st.sampled_from([0, 0.5, 0.9, 2]),
        eps=st.sampled_from([0, 1e-6, 0.1]),
        beta=st.sampled_from([0, 0.6, 1]),
        prioritized=st.sampled_from([True, True, False]),
        state=st.sampled_from(['stored', 'stored', 'zero']),
        bs=st.integers(1, 3),
        seed=st.integers(0, 99),
    )
)
events = st.tuples(st.sampled_from(['add', *EVENTS]), st.integers(0, 9), st.integers(0, 11))


@pytest.mark.filterwarnings('ignore:.*is less than burn_in')
@cases(100)
@given(st.lists(events, min_size=5, max_size=30), sizes, settings)
def test_any_story_agrees_with_the_reference(events, sizes, settings):
    """Adding, drawing, late TD errors, refusals, restarts, freezing.

    Compares every row and state that is drawn, priorities, weights, counts."""
    story = OfSequences(sizes, **settings)
    for what, a, b in events:
        getattr(story, what)(a, b)
        if b % 2:  # the sampler is told of new rows
            story.check()
    story.check()


@pytest.mark.parametrize('hidden', [None, 'nested'])
def test_a_long_story_agrees_with_the_reference(hidden):
    "Deep trees, tables that grow, blocks that wrap or exceed the memory, eight environments"
    story = OfSequences(
        dict(max_sz=300, length=6, burn_in=2, overlap=4),
        hidden=hidden,
        n=hidden is None,
        bs=8,
        seed=1,
        envs=(0, 1, 2, 3, 17, 33, 90, 400),
    )
    for i in range(120):
        what = story.rng.choice(['add', *EVENTS])
        getattr(story, what)(int(story.rng.choice([0, 1, 9, 20, 40])), int(story.rng.integers(12)))
        if i % 5 == 0:
            story.check()
    assert story.model.stale and len(story.model.rows) > 600


def test_memory_beside_the_uniform_replay():
    "At most 16 bytes a row more, for the tree of priorities and the lengths of sequences"
    rows = numbered(50_000)
    rows.rows['episode_n'] = np.arange(50_000) // 200 + 1
    rows.rows['step_n'] = np.arange(50_000) % 200 + 1
    ours, uniform = SequenceReplay(max_sz=50_000), ExperienceReplay(max_sz=50_000)
    for r in ours, uniform:
        r.add(rows)
    assert ours.nbytes - uniform.nbytes <= 16 * 50_000


# ---- batches ----


def episode(steps, env=0, number=1, **columns):
    "All steps of one episode, numbered from 1"
    block = with_columns(numbered(steps), **columns)
    block.rows['reward'] = block.rows['step_n']
    block.rows['episode_n'], block.rows['env_id'] = number, env
    block.rows['terminated'][-1] = True
    return block


@pytest.fixture
def batch():
    rows = Steps.cat(
        [
            episode(11, hidden=np.arange(22, dtype='f4').reshape(11, 2)),
            episode(3, env=1, number=7, hidden=np.full((3, 2), 50, 'f4')),
        ]
    )
    return made(rows, burn_in=2, length=5, overlap=3, beta=1).sample(4)


def consistent(part, whole):
    "Do the columns of sequences belong to their rows?"
    assert type(part) is Sequences
    n = len(part)
    assert part.index.shape == part.weight.shape == (n,) and part.hidden.shape == (n, 2)
    place = {int(k): i for i, k in enumerate(whole.index)}
    for i, k in enumerate(part.index.tolist()):
        assert torch.equal(part.hidden[i], whole.hidden[place[k]])
        assert set(part.reward[i].tolist()) <= set(whole.reward[place[k]].tolist())


def test_parts_are_views(batch):
    "Also on a device"
    for b in batch, elsewhere(batch):
        b.burn_in.reward[:] = -1
        b.train.reward[1] = -2
        assert (b.reward[:, :2] == -1).all() and (b.reward[1, 2:] == -2).all()
        b.state[0, 3] = 9
        assert (b.train.state[0, 1] == 9).all()
        b.train.weight[0] = 0.125
        assert b.weight[0] == b.burn_in.weight[0] == 0.125


SOME = torch.tensor([True, False, True, True])


@pytest.mark.parametrize(
    'pick', [slice(1, 3), slice(None, None, -1), SOME, [3, 0, 0], torch.tensor([2, 1])], ids=str
)
def test_rows_of_a_batch_keep_what_is_theirs(batch, pick):
    part = batch[pick]
    consistent(part, batch)
    place = pick.numpy() if isinstance(pick, torch.Tensor) else pick
    assert part.index.tolist() == batch.index.numpy()[place].tolist()
    assert torch.equal(part.train.reward, part.reward[:, 2:])
    if pick != slice(None, None, -1):  # torch has no negative strides
        consistent(elsewhere(batch)[pick], batch)


@pytest.mark.parametrize('pick', [(slice(None), slice(1, 4)), (slice(1, 3), [0, 2])], ids=str)
def test_some_steps_of_all_sequences_have_no_burn_in(batch, pick):
    consistent(batch[pick], batch)
    assert batch[pick].reward.tolist() == batch.reward.numpy()[pick].tolist()
    assert batch[pick].burn_in.shape[1] == 0


def test_what_is_no_batch_of_sequences_is_plain_steps(batch):
    "One sequence, one step of each, some steps: rows, without what belongs to whole sequences"
    for part, shape in (
        (batch[1], (5,)),
        (batch[1, 2], ()),
        (batch[:, 2], (4,)),
        (batch[batch.mask], (int(batch.mask.sum()),)),
        (batch[None], (1, 4, 5)),
    ):
        assert type(part) is Steps and part.shape == shape and not hasattr(part, 'weight')
        with pytest.raises((TypeError, KeyError), match='Steps'):
            part.update_priorities(np.zeros(len(part)))


def test_copies_devices_and_pickles(batch):
    "All columns travel; a copy shares no memory; a pickle knows no replay"
    for b in (
        batch.copy(),
        copy.deepcopy(batch),
        pickle.loads(pickle.dumps(batch)),
        elsewhere(batch).to('cpu'),
        pickle.loads(pickle.dumps(elsewhere(batch))),
    ):
        assert b == batch
        assert torch.equal(b.train.reward, batch.train.reward)
        consistent(b, batch)
    own = batch.copy()
    own.reward[:], own.weight[:], own.hidden[:] = -5, -5, -5
    assert (batch.reward >= 0).all() and (batch.weight > 0).all() and (batch.hidden >= 0).all()
    with pytest.raises(TypeError, match='not sampled from a replay'):
        pickle.loads(pickle.dumps(batch)).update_priorities(np.zeros((4, 3)))
    meta = batch.to('meta')
    assert meta.train.shape == (4, 3) and meta.weight.device.type == 'meta'


def test_equal_by_value(batch):
    "Rows and what belongs to sequences"
    for name in 'weight', 'index', 'hidden', 'reward':
        other = batch.copy()
        assert batch == other
        other[name][0] += 1
        assert batch != other
    assert batch != batch[:3] and batch != batch.train and batch != 3


def test_joining_batches(batch):
    b = batch[:2].copy()
    for blocks in [batch, b], [batch.train, b.train], [elsewhere(batch), elsewhere(b)]:
        joined = Steps.cat(blocks)
        for name in 'reward', 'index', 'weight', 'hidden':
            assert torch.equal(joined[name], torch.cat([x[name] for x in blocks])), name


def test_a_mixture_of_other_sequences_is_refused():
    "The error says what differs"

    def filled(hidden=None, burn_in=1):
        replay = made(bs=4, max_sz=50, burn_in=burn_in)
        rows = np.zeros(30, row_dtype(hidden))
        rows['step_n'] = np.arange(30) + 1
        replay.add(Steps(rows))
        return replay

    with pytest.raises(BlockError, match="batches of 'b'.*2 of them burn-in"):
        Mixture(dict(a=filled(), b=filled(burn_in=2))).sample()
    with pytest.raises(BlockError, match="column 'hidden' of 'b'"):
        Mixture(dict(a=filled(), b=filled('vector'))).sample()


# ---- seeds, checkpoints, options ----


def test_a_checkpoint_of_other_settings_changes_nothing():
    saved = everything(made(numbered(9)))
    for kw in dict(max_sz=5), dict(length=5), dict(overlap=1), dict(alpha=0.5), dict(state='zero'):
        other = made(numbered(20), **kw)
        before = everything(other)
        with pytest.raises(ValueError, match='settings|checkpoint is|more rows'):
            other.load_state_dict(saved)
        assert same(everything(other), before)
    with pytest.raises(ValueError, match='belongs to a different stage'):
        made().load_state_dict(ExperienceReplay(max_sz=40).state_dict())


def test_an_empty_checkpoint_forgets_rows_and_columns():
    replay = made(episode(9, hidden=np.zeros((9, 2), 'f4')))
    replay.load_state_dict(everything(made()))
    assert len(replay) == 0
    assert len(replay.add(numbered(5))) == 5


def test_an_own_uniform_sampler_draws_sequences():
    replay = made(numbered(8), overlap=0, burn_in=0, bs=2, sampler=Uniform(seed=0))
    assert sorted(replay.sample().index.tolist()) == [0, 4]


def learned(errors=(4, 1), **kw):
    "Two sequences, with TD errors"
    replay = made(numbered(8), overlap=0, burn_in=0, alpha=1, eps=0, eta=1, **kw)
    replay.update_priorities([0, 4], [[e] * 4 for e in errors])
    return replay


def test_weights_over_the_whole_memory():
    replay = learned(weight_norm='memory', beta=1, stratified=False)
    for _ in range(30):
        batch = replay.sample(1)
        assert batch.weight.item() == {0: 0.25, 4: 1.0}[batch.index.item()]


@pytest.mark.parametrize('initial,want', [('largest', 2), ('max_ever', 9)])
def test_priorities_of_new_sequences(initial, want):
    replay = learned((9, 1), initial=initial)
    replay.update_priorities([0], [[2] * 4])
    replay.add(numbered(4, 8))
    close(replay.sampler.probabilities(), np.array([2, 1, want]) / (3 + want))


def test_a_column_n_that_means_something_else_is_kept():
    block = episode(6, n=np.full(6, 2.5, 'f4'))
    replay = made(block, length=3, burn_in=0, overlap=0)
    assert len(replay) == 2
    assert replay.sample().n.tolist() == [[2.5] * 3]


STATES = step_dtype(spaces.Box(-9, 9, (1,)), spaces.Discrete(2), hidden=('f4', (2,)))


def with_states(path, length, overlap, max_sz, mode='a', **kw):
    store = Rows(path, mode=mode)
    options = dict(bs=1, burn_in=0, seed=0, alpha=1.0, eps=0.0)
    return SequenceReplay(
        length=length, overlap=overlap, max_sz=max_sz, store=store, **options, **kw
    )


def add_states(replay, *steps, env=0, end=False, dtype=STATES):
    "The recurrent state says whose it is"
    for step in steps:
        row = np.zeros(1, dtype)
        row['env_id'], row['episode_n'], row['step_n'], row['terminated'] = env, 1, step, end
        if 'hidden' in dtype.names:
            row['hidden'] = env + 1, step
        replay.add(Steps(row))


def states_drawn(replay) -> dict:
    "By key: is it zero? Any other one must be that of its step"
    zero = {}
    for _ in range(200):
        batch = replay.sample()
        state = batch.hidden[0].tolist()
        assert state in ([0, 0], [batch.env_id[0, 0] + 1, batch.step_n[0, 0]])
        zero[batch.index.item()] = state == [0, 0]
    return zero


def give_errors(replay):
    "The priority of a sequence is its first step"
    for _ in range(100):
        batch = replay.sample()
        batch.update_priorities(batch.step_n[:, :1].repeat(1, batch.shape[1]).float())


@pytest.mark.parametrize('stride', [1, 2])
def test_states_and_priorities_on_disk_are_of_no_other_row(tmp_path, stride):
    "Sequences may start elsewhere, in a ring that was overwritten many times"
    writer = with_states(tmp_path / 'm', 4, 1, 25)
    for first in range(1, 200, 20):
        add_states(writer, *range(first, first + 20, stride))
        give_errors(writer)
    assert not any(states_drawn(writer).values())
    for mode, overlap in product('ra', (1, 2, 0)):
        if mode == 'a':
            writer.close()
        other = with_states(tmp_path / 'm', 4, overlap, 25, mode)
        states_drawn(other)
        known = other.drawable()
        steps = other.memory.take(known['key']).rows['step_n']
        top = known['priority'].max()
        assert all(p in (1, s, top) for p, s in zip(known['priority'], steps))
        other.close()


def test_states_on_disk_when_environments_come_and_go(tmp_path):
    with with_states(tmp_path / 'm', 2, 0, 8) as replay:
        add_states(replay, 1, 2, 3, env=1)
        add_states(replay, *range(1, 9))
    with with_states(tmp_path / 'm', 2, 0, 8) as replay:
        for env in range(2, 32):
            add_states(replay, 1, env=env, end=True)
        add_states(replay, *range(4, 11), env=1)
        states_drawn(replay)
        states_drawn(with_states(tmp_path / 'm', 2, 0, 8, 'r'))
    states_drawn(with_states(tmp_path / 'm', 2, 0, 8))


@pytest.mark.parametrize('reopened', [False, True])
def test_states_on_disk_after_going_back(tmp_path, reopened):
    "The same rows have them; those that were dropped leave none to rows with the same numbers"
    replay = with_states(tmp_path / 'm', 4, 1, 80)
    add_states(replay, *range(1, 31))
    state = through_file(replay.state_dict())
    add_states(replay, *range(31, 61))
    if reopened:
        replay.close()
        replay = with_states(tmp_path / 'm', 4, 1, 80)
    replay.load_state_dict(state)
    assert not any(states_drawn(replay).values())
    add_states(replay, 31, end=True)
    add_states(replay, *range(1, 20), env=5)
    assert not any(states_drawn(replay).values())
    replay.close()
    states_drawn(with_states(tmp_path / 'm', 4, 3, 80))


add_rows = partial(add_states, dtype=step_dtype(spaces.Discrete(2), spaces.Discrete(2)))


@pytest.mark.parametrize('overlap', [1, 2, 3])
def test_priorities_on_disk_after_going_back(tmp_path, overlap):
    "Sequences that begin elsewhere when it is opened again have none of rows that were dropped"
    replay = with_states(tmp_path / 'm', 4, 0, 200)
    add_rows(replay, *range(1, 31))
    state = through_file(replay.state_dict())
    add_rows(replay, *range(31, 71))
    give_errors(replay)
    replay.load_state_dict(state)
    add_rows(replay, 31, end=True)
    add_rows(replay, *range(1, 40), env=5)
    replay.close()
    with with_states(tmp_path / 'm', 4, overlap, 200) as replay:
        assert {*replay.drawable()['priority']} == {1}


@pytest.mark.parametrize(
    'between',
    [
        ExperienceReplay,
        partial(PrioritizedReplay, kind='uniform'),
        partial(SequenceReplay, kind='uniform', length=3),
    ],
)
def test_priorities_on_disk_are_not_those_of_overwritten_rows(tmp_path, between):
    "If a replay without priorities has added rows in between"
    sequences = partial(with_states, tmp_path / 'm', 2, 0, 12)
    replay = sequences()
    add_rows(replay, *range(1, 13))
    give_errors(replay)
    replay.close()
    other = between(bs=2, max_sz=12, store=Rows(tmp_path / 'm'))
    with other:
        add_rows(other, *range(13, 19))
        other.sample()
    with sequences() as replay:
        known = replay.drawable()
        steps = replay.memory.take(known['key']).rows['step_n']
        top = known['priority'].max()
        assert all(p in (1, s, top) for p, s in zip(known['priority'], steps))
        assert {*known['priority'][steps > 12]} == {top}


def test_packed_states_are_refused_before_their_rows_are_taken():
    packed = np.dtype([('h', 'f4', (2,)), ('c', 'f2', (3,))])
    rows = np.zeros(3, step_dtype(spaces.Box(-9, 9, (1,)), spaces.Discrete(2), hidden=packed))
    rows['step_n'], rows['episode_n'] = [1, 2, 3], 1
    replay = SequenceReplay(bs=1, max_sz=20, length=2, burn_in=0, overlap=0)
    with pytest.raises(BlockError, match='packed'):
        replay.add(Steps(rows))
    assert not len(replay.memory)
    add_states(replay, 1, 2, 3)
    assert len(replay) == 1
