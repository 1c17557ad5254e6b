"""SequenceReplay: against a naive reference of lists and dicts; batches, recurrent states, priorities, checkpoints, what is refused."""

import copy, json, os, pickle, re, subprocess, sys

import numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.steps.row_dtypes import extend_dtype
from fastrl_replay.replay.sequence_table import IDLE, find_place
from fastrl_replay.testing import same
from scripted import Queue, elsewhere, everything, in_blocks, numbered, with_columns
from strategies import bits, cases, numpy_leaves

HIDDEN = dict(
    vector=('f4', (3,)),
    scalar='f8',
    matrix=('f4', (2, 3)),
    empty=('f4', (0,)),
    bytes=('u1', (3,)),
    nested=spaces.Dict(
        c=spaces.Box(-9, 9, (3,), np.float64),
        h=spaces.Tuple(
            [spaces.Box(-9, 9, (2, 2)), spaces.Dict(z=spaces.Discrete(9), b=spaces.MultiBinary(3))]
        ),
    ),
)


def row_dtype(hidden=None, n=False):
    return step_dtype(
        spaces.Box(-9, 9, (2,)),
        spaces.Discrete(3),
        **{**({'hidden': HIDDEN[hidden]} if hidden else {}), **({'n': 'i4'} if n else {})},
    )


@pytest.mark.parametrize('what', ['burn_in', 'hidden', 'no hidden'])
def test_a_mixture_of_other_sequences_is_refused(what):
    "By what differs: errors of steps were refused for ever, or columns were not found, without the name of one"

    def filled(hidden=None, burn_in=1):
        replay, rows = (
            SequenceReplay(bs=4, max_sz=50, length=4, burn_in=burn_in, overlap=2),
            np.zeros(30, row_dtype(hidden)),
        )
        rows['step_n'] = np.arange(30) + 1
        replay.add(Steps(rows))
        return replay

    a, b = dict(
        burn_in=lambda: (filled(), filled(burn_in=2)),
        hidden=lambda: (filled(), filled('vector')),
        **{'no hidden': lambda: (filled('vector'), filled())},
    )[what]()
    with pytest.raises(
        BlockError,
        match="batches of 'b'.*2 of them burn-in"
        if what == 'burn_in'
        else "column 'hidden' of 'b'",
    ):
        Mixture(dict(a=a, b=b)).sample()


def present(replay):
    "First row → (steps, priority) of what can be drawn"
    t, p = replay.table, replay.sampler.tree
    base = replay.memory.base
    return (
        {}
        if t is None
        else {
            int(t.first[i] - base): (int(t.steps[i]), float(p[i]))
            for i in np.flatnonzero(t.first >= 0)
        }
    )


def bytes_beside(replay):
    "Of view and sampler: all arrays, also those that kernels are given to write into"
    view, sampler = replay.view, replay.sampler
    return (
        view.nbytes
        + sampler.tree.nbytes
        + sum(
            a.nbytes
            for part in (view, sampler)
            for a in vars(part).values()
            if isinstance(a, np.ndarray)
        )
    )


def made(*blocks, **kw):
    replay = SequenceReplay(
        **{**dict(bs=1, max_sz=40, length=4, burn_in=1, overlap=2, seed=0), **kw}
    )
    for b in blocks:
        replay.add(b)
    return replay


def episode(steps, env=0, number=1, end=True, **columns):
    "All steps of one episode, numbered from 1"
    rows = np.zeros(
        steps,
        extend_dtype(numbered(1).dtype, **{k: (v.dtype, v.shape[1:]) for k, v in columns.items()})
        if columns
        else numbered(1).dtype,
    )
    rows['step_n'] = rows['reward'] = np.arange(1, steps + 1)
    rows['episode_n'], rows['env_id'] = number, env
    rows['terminated'][-1:] = end
    for k, v in columns.items():
        rows[k] = v
    return Steps(rows)


def restored(replay, **kw):
    twin = made(**kw)
    twin.load_state_dict(everything(replay))
    return twin


def close(a, b, **kw):
    np.testing.assert_allclose(
        np.asarray(a, float), np.asarray(b, float), **{**dict(rtol=1e-9, atol=1e-300), **kw}
    )


def keys_of(replay):
    return sorted(present(replay))


# ---- the judge: lists and dicts, no arithmetic with remainders ----


class Model:
    "What the specification says: all rows ever, running episodes, the sequences that can be drawn"

    def __init__(self, max_sz, length, burn_in, overlap, eta, alpha, eps, prioritized):
        self.max_sz, self.length, self.burn_in, self.overlap = max_sz, length, burn_in, overlap
        self.eta, self.alpha, self.eps = eta, alpha if prioritized else 0, eps
        self.rows, self.running, self.seqs, self.p, self.stale, self.drawn = (
            [],
            {},
            {},
            {},
            0,
            {},
        )  # env: [its keys, where the next sequence starts, where the last one ended]

    def oldest(self):
        return max(0, len(self.rows) - self.max_sz)

    def drop(self):
        self.seqs, self.p = (
            {k: v for k, v in d.items() if k >= self.oldest()} for d in (self.seqs, self.p)
        )

    def add(self, rows):
        found = []
        for r in rows:
            env = int(r['env_id'])
            if env in self.running:
                last = self.rows[self.running[env][0][-1]]
                if r['step_n'] == 1 or r['episode_n'] != last['episode_n']:
                    found += self.end(env)
            keys, start, _ = lane = self.running.setdefault(env, [[], 0, 0])
            keys.append(len(self.rows))
            self.rows.append(r)
            if len(keys) == start + self.length:
                found.append(keys[start:])
                lane[1:] = start + self.length - self.overlap, len(keys)
            if (r['terminated'] or r['truncated']) and ('n' not in rows.dtype.names or r['n'] <= 1):
                found += self.end(env)
        self.drop()
        new = max(self.p.values(), default=0) or 1.0
        for keys in found:
            if keys[0] >= self.oldest():
                self.seqs[keys[0]], self.p[keys[0]] = keys, new

    def end(self, env):
        keys, _, shown = self.running.pop(env)
        return [] if shown == len(keys) else [keys[-self.length :]]

    def update(self, keys, td):
        for k, d in zip(keys, td):
            if k < self.oldest():
                self.stale += 1
                continue
            d = [abs(float(x)) for x in d[: max(0, len(self.seqs[k]) - self.burn_in)]]
            self.p[k] = (
                (self.eta * max(d) + (1 - self.eta) * sum(d) / len(d) if d else 0.0) + self.eps
            ) ** self.alpha
            self.drawn.setdefault(k, 0)


def fill(a, keys):
    "Numbers that tell whose they are, in every plain field"
    for j, f in enumerate(numpy_leaves(a)):
        f[...] = ((keys * (j + 3)) % (2 if f.dtype == bool else 100)).reshape(
            -1, *[1] * (f.ndim - 1)
        )


class Story:
    "A replay and its model, which must agree after whatever happens"

    ENVS = 0, 0, 0, 1, 2, 17, 60

    def __init__(
        self,
        max_sz=9,
        length=4,
        burn_in=1,
        overlap=2,
        eta=0.9,
        alpha=0.9,
        eps=1e-6,
        beta=0.6,
        prioritized=True,
        state='stored',
        bs=1,
        hidden=None,
        n=False,
        seed=0,
    ):
        self.dtype, self.hidden, self.state, self.beta, self.prioritized = (
            row_dtype(hidden, n),
            hidden,
            state,
            beta,
            prioritized,
        )
        self.kw = dict(
            bs=min(bs, max_sz),
            max_sz=max_sz,
            length=length,
            burn_in=burn_in,
            overlap=overlap,
            eta=eta,
            alpha=alpha,
            eps=eps,
            beta=beta,
            prioritized=prioritized,
            state=state,
        )
        self.model, self.queue, self.rng, self.at, self.held = (
            Model(max_sz, length, burn_in, overlap, eta, alpha, eps, prioritized),
            Queue(),
            np.random.default_rng(seed),
            {},
            [],
        )
        self.replay = SequenceReplay(self.queue, seed=0, **self.kw)

    def block(self, n):
        "Rows of several environments in a bunch: '.' a step, 't', 'u' and 'b' the flags, '!' a new episode without a word, '1' one of the same number, 'e' another number, '+' a gap"
        rows, keys = np.zeros(n, self.dtype), len(self.model.rows) + np.arange(n)
        fill(rows, keys)
        rows['terminated'] = rows['truncated'] = False
        envs, busy = (
            self.rng.choice(self.ENVS, 1 + self.rng.integers(0, 3)),
            self.rng.choice([0.05, 0.3, 0.9]),
        )
        for r in rows:
            env, what = (
                int(self.rng.choice(envs)),
                self.rng.choice(list('tub!1e+')) if self.rng.random() < busy else '.',
            )
            number, step = self.at.get(env, (1, 0))
            if what == '!' and step:
                number, step = number + 1, 0
            if what == '1':
                step = 0
            if what == 'e':
                number += 2
            step += 3 if what == '+' and step else 1
            r['env_id'], r['episode_n'], r['step_n'], r['terminated'], r['truncated'] = (
                env,
                number,
                step,
                what in 'tb',
                what in 'ub',
            )
            if 'n' in rows.dtype.names:
                r['n'] = self.rng.integers(1, 4)
            self.at[env] = (
                (number + 1, 0)
                if what in 'tub' and not ('n' in rows.dtype.names and r['n'] > 1)
                else (number, step)
            )
        return Steps(rows)

    def add(self, n, _):
        steps = self.block(n * n // 4)
        first = len(self.model.rows)
        assert self.replay.add(steps).tolist() == list(range(first, first + len(steps)))
        self.model.add(steps.rows)

    def sample(self, n, _):
        n = n or None
        if len(self.model.seqs) < (n or self.replay.bs):
            with pytest.raises(NotEnoughRows):
                self.replay.sample(n)
        else:
            self.drew(self.replay.sample(n), n or self.replay.bs)

    def drew(self, batch, n):
        m, length = self.model, self.kw['length']
        assert (
            type(batch) is Sequences
            and batch.shape == (n, length)
            and batch.index.shape == batch.weight.shape == (n,)
        )
        assert not self.hidden or 'hidden' not in batch.dtype.names
        names = [x for x in self.dtype.names if x != 'hidden']
        for i, k in enumerate(batch.index.tolist()):
            keys = m.seqs[k]  # KeyError: a sequence that is not there
            want = np.array([m.rows[j] for j in keys], self.dtype)
            assert batch.mask[i].tolist() == [t < len(keys) for t in range(length)]
            for x in names:
                assert [bits(a) for a in numpy_leaves(batch.rows[x][i, : len(keys)])] == [
                    bits(a) for a in numpy_leaves(want[x])
                ], x
            assert not any(
                np.any(a) for x in names for a in numpy_leaves(batch.rows[x][i, len(keys) :])
            )
            m.drawn[k] = m.drawn.get(k, 0) + 1
            if self.hidden:
                got, first = batch._each.rows['hidden'][i : i + 1], want['hidden'][:1]
                assert [bits(a) for a in numpy_leaves(got)] == [
                    bits(a if self.state == 'stored' else np.zeros_like(a))
                    for a in numpy_leaves(first)
                ]
        p = np.array([m.p[k] for k in batch.index.tolist()])
        if max(m.p.values()) > 0:
            assert p.min() > 0
        close(
            batch.weight,
            (p / p.min()) ** -self.beta if self.prioritized and p.min() > 0 else np.ones(n),
            rtol=1e-6,
        )
        self.held.append(batch)

    def tds(self, n):
        return self.rng.choice(
            [0, 0, 1e-3, 0.5, -2, 2, -3, 7, 100, 1 / 3], (n, self.kw['length'] - self.kw['burn_in'])
        )

    def late(self, i, how):
        "An answer to some batch of long ago, as a whole, in parts, from a copy, from a device; what lies behind an episode's end or is stale may be anything"
        if not self.held:
            return
        batch = self.held.pop(i % len(self.held))
        keys, td = batch.index.tolist(), self.tds(len(batch))
        self.model.update(keys, td)
        td[~batch.train.mask.numpy()] = np.nan
        td[np.array(keys) < self.model.oldest()] = np.inf
        if batch._replay is not self.replay:
            return self.replay.update_priorities(batch.index, torch.as_tensor(td))
        for part in (slice(None),) if how % 2 else (slice(0, 1), slice(1, None)):
            b = (batch, batch.copy(), elsewhere(batch), batch.train, batch[:, ::-1], batch.burn_in)[
                how % 6
            ][part]
            b.update_priorities(torch.as_tensor(td[part]).requires_grad_() if how % 3 else td[part])

    def by_hand(self, n, _):
        keys = self.rng.choice(list(self.model.seqs), n) if self.model.seqs else np.empty(0, int)
        if not self.model.rows:
            return  # nothing added, nothing to answer: has a test of its own
        td = self.tds(len(keys))
        self.model.update(keys.tolist(), td)
        self.replay.update_priorities(keys, td)

    def refused(self, n, which):
        state, at, end = self.replay.state_dict(), dict(self.at), len(self.model.rows)
        block = self.block(n + 1)
        self.at = at
        if which % 4 == 0:
            block.rows['state'][n, 1] = np.nan
        elif which % 4 == 1:
            block.rows['env_id'][n] = -1
        elif which % 4 == 2:
            block = block[None]
        elif self.hidden in ('vector', 'scalar', 'matrix'):
            block.rows['hidden'][n] = np.nan
        else:
            block = Steps(np.zeros(n + 1, extend_dtype(block.dtype, mask='?')))
        with pytest.raises(BlockError):
            self.replay.add(block)
        here, width = list(self.model.seqs)[:n], self.kw['length'] - self.kw['burn_in']
        if end:
            for wrong in (
                end,
                -1,
                2**62,
                *[k for k in range(self.model.oldest(), end) if k not in self.model.seqs][:3],
            ):
                with pytest.raises(StaleKey):
                    self.replay.update_priorities(
                        [*here, wrong], np.full((len(here) + 1, width), 50.0)
                    )
            full = [k for k in here if len(self.model.seqs[k]) > self.kw['burn_in']]
            for bad in (np.nan, np.inf, -np.inf) if full else ():
                with pytest.raises(ValueError, match='TD error'):
                    self.replay.update_priorities(
                        [*here, full[0]], [*np.full((len(here), width), 50.0), [bad] * width]
                    )
            for shape in (
                (len(here), width + 1),
                (len(here) + 1, width),
                (len(here) * width + 1,),
                (len(here), width, 1),
            ):
                with pytest.raises(ValueError):
                    self.replay.update_priorities(here, np.ones(shape))
        for wrong in 0, -1, 1.5, 'x':
            with pytest.raises(ValueError):
                self.replay.sample(wrong)
        after = self.replay.state_dict()
        assert same(after, state)

    def restart(self, n, seed):
        twin, old = SequenceReplay(self.queue, seed=seed + 1, **self.kw), self.replay
        twin.load_state_dict(everything(old))
        if self.model.rows:
            assert same(everything(twin), everything(old))
        if len(old) >= old.bs:
            a, b = old.sample(), twin.sample()
            assert a == b and old.stats() == twin.stats()
            self.drew(b, old.bs)
        self.replay = twin

    def through(self, n, frozen):
        "A block comes from the source, into a frozen memory or not"
        self.replay.freeze_memory = bool(frozen % 2) and len(self.replay) >= self.replay.bs
        at, block = dict(self.at), self.block(n)
        self.queue.blocks.append(block)
        batches = list(self.replay)
        if not self.replay.freeze_memory:
            self.model.add(block.rows)
        else:
            self.at = at
        assert len(batches) == (len(self.model.seqs) >= self.replay.bs)
        for b in batches:
            self.drew(b, self.replay.bs)
        self.replay.freeze_memory = False

    def check(self):
        m, s, here = self.model, self.replay.stats(), present(self.replay)
        assert {k: n for k, (n, _) in here.items()} == {
            k: len(v) for k, v in m.seqs.items()
        } and len(self.replay) == len(here)
        close([here[k][1] for k in m.p], list(m.p.values()))
        steps, p = np.array([len(x) for x in m.seqs.values()]), np.array([*m.p.values()])
        assert (s['sequences'], s['stale'], s['inserted'], s['evicted']) == (
            len(steps),
            m.stale,
            len(m.rows),
            m.oldest(),
        )
        if len(steps):
            close(
                [s['steps_mean'], s['padded'] + 1, s['never_drawn']],
                [
                    steps.mean(),
                    2 - steps.sum() / (len(steps) * m.length),
                    np.mean([not m.drawn.get(k) for k in m.seqs]),
                ],
            )
        if p.sum() > 0:
            close(s['ess'], p.sum() ** 2 / (p**2).sum())
        json.dumps(s)


sizes = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.integers(0, n - 1),
        st.integers(0, n - 1),
        st.sampled_from([n, n, n + 1, 2 * n + 1, 20, 50]).map(lambda m: max(m, n)),
    )
)
events = st.tuples(
    st.sampled_from(
        [
            'add',
            'add',
            'add',
            'add',
            'sample',
            'sample',
            'late',
            'late',
            'by_hand',
            'through',
            'refused',
            'restart',
        ]
    ),
    st.integers(0, 9),
    st.integers(0, 11),
)


def told(events, sizes, **kw):
    length, burn_in, overlap, max_sz = sizes
    story = Story(max_sz, length, burn_in, overlap, **kw)
    for what, a, b in events:
        getattr(story, what)(a, b)
        story.check()
    return story


@cases(500)
@given(
    st.lists(events, min_size=3, max_size=30),
    sizes,
    st.sampled_from([None, None, *HIDDEN]),
    st.booleans(),
    st.sampled_from([0, 0.5, 0.9, 1]),
    st.sampled_from([0, 0.5, 0.9, 2]),
    st.sampled_from([1e-6, 0.1]),
    st.sampled_from([0, 0.6, 1]),
    st.sampled_from([True, True, False]),
    st.sampled_from(['stored', 'stored', 'zero']),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_any_story_agrees_with_the_reference(
    events, sizes, hidden, n, eta, alpha, eps, beta, prioritized, state, bs, seed
):
    "Adding, drawing, late answers, refusals, restarts, freezing: the set of sequences, every row and state of what is drawn, priorities, weights, counts"
    told(
        events,
        sizes,
        hidden=hidden,
        n=n,
        eta=eta,
        alpha=alpha,
        eps=eps,
        beta=beta,
        prioritized=prioritized,
        state=state,
        bs=bs,
        seed=seed,
    )


@cases(150)
@given(st.lists(events, min_size=10, max_size=30), sizes, st.booleans(), st.integers(0, 99))
def test_any_story_without_eps(events, sizes, prioritized, seed):
    "Priorities of 0: what has one is not drawn while others are there; where all have one, each is as likely"
    told(events, sizes, eps=0, alpha=1, prioritized=prioritized, seed=seed)


@pytest.mark.parametrize('seed', range(4))
def test_a_long_story_agrees_with_the_reference(seed):
    "Trees of several levels, tables that grow, blocks around the corner and beyond the memory, eight environments"
    story = Story(
        300, 6, 2, 4, hidden=[None, 'vector', 'nested', None][seed], n=seed == 3, bs=8, seed=seed
    )
    story.ENVS = 0, 1, 2, 3, 17, 33, 90, 400
    for i in range(150):
        getattr(
            story,
            story.rng.choice(
                [
                    'add',
                    'add',
                    'sample',
                    'sample',
                    'late',
                    'late',
                    'by_hand',
                    'restart',
                    'through',
                    'refused',
                ]
            ),
        )(int(story.rng.choice([0, 1, 3, 9, 20, 40])), int(story.rng.integers(0, 12)))
        if i % 5 == 0:
            story.check()
    story.check()
    assert story.model.stale and len(story.model.rows) > 600


@pytest.mark.slow
@cases(3000)
@given(
    st.lists(events, min_size=5, max_size=40),
    sizes,
    st.sampled_from([None, *HIDDEN]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 10**6),
)
def test_many_more_stories(events, sizes, hidden, n, bs, seed):
    told(events, sizes, hidden=hidden, n=n, bs=bs, seed=seed)


@pytest.mark.slow
def test_stories_again_with_bounds_checked(tmp_path):
    "Kernels that look at every place before they use it; the bytes of an environment's row are never read beyond the block"
    env = {**os.environ, 'NUMBA_BOUNDSCHECK': '1', 'NUMBA_CACHE_DIR': str(tmp_path)}
    r = subprocess.run(
        [
            sys.executable,
            '-m',
            'pytest',
            '-q',
            '-x',
            '-p',
            'no:cacheprovider',
            '-k',
            'any_story_agrees or long_story or table',
            __file__,
        ],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert not r.returncode, r.stdout


# ---- memory ----


def both_memories(length, overlap, lasts):
    "Bytes of a sequence replay and of a uniform one after the same 50,000 rows, in episodes of `lasts` steps"
    rows = numbered(50_000)
    rows.rows['episode_n'], rows.rows['step_n'] = (
        np.arange(50_000) // lasts + 1,
        np.arange(50_000) % lasts + 1,
    )
    rows.rows['terminated'] = rows.rows['step_n'] == lasts
    ours, uniform = (
        SequenceReplay(max_sz=50_000, length=length, overlap=overlap, burn_in=0),
        ExperienceReplay(max_sz=50_000),
    )
    for r in ours, uniform:
        [r.add(rows[i : i + 5000]) for i in range(0, 50_000, 5000)]
    return ours.memory.nbytes + bytes_beside(ours), uniform.memory.nbytes


@pytest.mark.parametrize(
    'length,overlap,lasts', [(80, 40, 10**9), (80, 40, 200), (80, 40, 20), (40, 20, 100)]
)
def test_memory_beside_the_uniform_replay(length, overlap, lasts):
    "For one and the same stream at most 1.05 × the uniform replay's"
    ours, uniform = both_memories(length, overlap, lasts)
    assert ours <= 1.05 * uniform


@pytest.mark.parametrize('lasts', [9, 1])
def test_memory_of_very_short_episodes(lasts):
    "Each episode is a sequence, and has a priority of its own: 32 bytes at most, and up to a quarter of them in reserve"
    ours, uniform = both_memories(80, 40, lasts)
    assert ours <= uniform + 1.25 * 32 * 50_000 / lasts + 10_000


def test_memory_where_numbers_of_environments_are_large():
    "What a number that is not used costs: as in the timeline, 8 bytes, and not 8·length; a block whose environments find no room would have entered the memory already"
    ours, uniform = SequenceReplay(max_sz=1000), ExperienceReplay(max_sz=1000)
    for r in ours, uniform:
        r.add(episode(90, env=100_000))
    assert bytes_beside(ours) < 4 * uniform.memory.nbytes


def test_states_are_kept_where_a_sequence_starts_only():
    "512 floats a step: a thirtieth of what a memory of whole rows takes; none where they start from zeros"
    rows = episode(4000, end=False, hidden=np.zeros((4000, 512), 'f4'))
    ours, uniform = SequenceReplay(max_sz=8000), ExperienceReplay(max_sz=8000)
    for r in ours, uniform:
        r.add(rows)
        r.add(rows)
    assert (
        'hidden' not in ours.memory.dtype.names
        and sum(a.nbytes for a in ours.table) + ours.sampler.tree.nbytes
        < uniform.memory.nbytes / 30
    )
    zero = SequenceReplay(max_sz=8000, state='zero')
    zero.add(rows)
    assert zero.table.hidden.nbytes == zero.view._tracks.hiddens.nbytes == 0


def test_the_table_grows_and_reuses_places():
    "Many short episodes: every place is free or taken, a sequence keeps its place, and all that belongs to it, until its first row goes"
    replay, rng, places, n = (
        made(max_sz=400, length=90, burn_in=0, overlap=0, alpha=1, eps=0, eta=1),
        np.random.default_rng(0),
        {},
        0,
    )
    for i in range(150):
        lasts = rng.integers(1, 4 if i < 100 else 100, int(rng.integers(1, 40)))
        for last in lasts:
            replay.add(
                episode(
                    int(last),
                    env=int(rng.integers(9)),
                    number=n,
                    hidden=np.full((last, 3), n, 'f4'),
                )
            )
            n += 1
        table, idle = replay.table, int(replay.view._counters[IDLE])
        taken = np.flatnonzero(table.first >= 0)
        assert sorted([*table.free[:idle], *taken]) == list(range(len(table.first))) and len(
            replay
        ) == len(taken) == len(replay.sampler)
        at = {int(k): int(p) for p, k in zip(taken, table.first[taken])}
        assert all(places[k] == p for k, p in at.items() if k in places) and not set(places) - set(
            at
        ) & set(replay.memory.keys.tolist())
        assert all(
            find_place(k, table.first, table.where) == p for k, p in at.items()
        ) and np.count_nonzero(table.where) == len(at)
        assert (
            max(
                (
                    find_place(k, table.first, table.where)
                    for k in np.setdiff1d(replay.memory.keys, list(at))
                ),
                default=-1,
            )
            == -1
        )
        first = replay.memory.take(list(at)).rows
        assert table.hidden[taken].view('f4').tolist() == [
            [float(e)] * 3 for e in first['episode_n']
        ]
        replay.update_priorities(list(at)[:1], np.full((1, 90), 2.5 * (i % 3) + 1))
        places = at
    assert n > 2000 and len(table.first) > 100 and bytes_beside(replay) >= 30 * len(table.first)
    replay = SequenceReplay(bs=1, max_sz=1000, length=80, burn_in=0, overlap=40, seed=0)
    for i in range(5):
        replay.add(Steps.cat([episode(1, env=e % 7, number=i) for e in range(900)]))
    assert (
        len(replay) == 1000
        and replay.stats()['padded'] == pytest.approx(79 / 80)
        and len(replay.table.first) < 2500
    )


# ---- batches ----


@pytest.fixture
def batch():
    rows = Steps.cat(
        [
            episode(11, hidden=np.arange(22, dtype='f4').reshape(11, 2)),
            episode(3, env=1, number=7, hidden=np.full((3, 2), 50, 'f4')),
        ]
    )
    return made(rows, burn_in=2, length=5, overlap=3, beta=1).sample(4)


def consistent(b, whole=None):
    "Do the columns of sequences belong to their rows?"
    n = len(b)
    assert (
        type(b) is Sequences
        and b.shape[:1] == b.index.shape == b.weight.shape == b.hidden.shape[:1] == (n,)
        and b.hidden.shape == (n, 2)
    )
    if whole is not None:
        lookup = {
            k: (h, s)
            for k, h, s in zip(whole.index.tolist(), whole.hidden.tolist(), whole.reward.tolist())
        }
        for k, h, s in zip(b.index.tolist(), b.hidden.tolist(), b.reward.tolist()):
            assert lookup[k][0] == h and set(s) <= set(lookup[k][1])


def test_the_shape_of_a_batch(batch):
    "Columns of steps [B, length], of sequences [B]; attributes and items; the burn-in marked"
    assert (
        batch.shape == (4, 5)
        and len(batch) == 4
        and batch.state.shape == (4, 5, 2)
        and batch.mask.dtype == torch.bool
        and batch.done.shape == (4, 5)
    )
    assert (
        batch.index.dtype == torch.int64
        and batch.weight.dtype == torch.float32
        and batch.hidden.dtype == torch.float32
    )
    assert (batch.burn_in.shape, batch.train.shape) == ((4, 2), (4, 3)) and torch.equal(
        torch.cat([batch.burn_in.reward, batch.train.reward], 1), batch.reward
    )
    for name in 'index', 'weight', 'hidden':
        assert (
            torch.equal(batch[name], getattr(batch, name))
            and torch.equal(batch.train[name], batch[name])
            and torch.equal(batch.burn_in[name], batch[name])
        )
    assert batch.hidden.tolist() == [
        [2 * s - 2.0, 2 * s - 1.0] if e == 1 else [50.0, 50.0]
        for s, e in zip(batch.step_n[:, 0].tolist(), batch.episode_n[:, 0].tolist())
    ]
    assert {'index', 'weight', 'hidden', 'mask', 'reward', 'train', 'burn_in'} <= set(dir(batch))
    assert set(batch.asdict()) == {
        *batch.dtype.names,
        'index',
        'weight',
        'hidden',
    } and batch.asdict()['weight'].shape == (4,)
    assert (
        'Sequences [4, 5]' in repr(batch)
        and 'weight' in repr(batch)
        and 'hidden' in repr(batch)
        and batch._repr_html_()
    )
    for wrong in 'indx', 'rewrd', 'wieght':
        with pytest.raises(AttributeError, match='no column'):
            getattr(batch, wrong)
        with pytest.raises(KeyError, match='no column'):
            batch[wrong]


def test_parts_are_views(batch):
    "What is written into the parts is written into the batch, and back; elsewhere too"
    for b in batch, elsewhere(batch):
        b.burn_in.reward[:] = -1
        b.train.reward[1] = -2
        assert (
            (b.reward[:, :2] == -1).all()
            and (b.reward[1, 2:] == -2).all()
            and (b.reward[0, 2:] > 0).sum() > 0
        )
        b.state[0, 3] = 9
        assert (b.train.state[0, 1] == 9).all()
        b.train.weight[0] = 0.125
        b.hidden[1] = -7
        assert b.weight[0] == b.burn_in.weight[0] == 0.125 and (b.train.hidden[1] == -7).all()
    assert (
        np.shares_memory(batch.train.rows, batch.rows)
        and np.shares_memory(batch.burn_in.rows, batch.rows)
        and np.shares_memory(batch.train._each.rows, batch._each.rows)
    )


def test_rows_of_a_batch_keep_what_is_theirs(batch):
    "Slices, masks, lists, tensors; steps backwards; the split stays as long as steps are not cut"
    some = torch.tensor([True, False, True, True])
    for i in (
        slice(1, 3),
        slice(None, None, -1),
        slice(0, 0),
        some,
        some.numpy(),
        [3, 0, 0],
        torch.tensor([2, 1]),
        (slice(0, 2),),
        np.array([-1]),
    ):
        part = batch[i]
        consistent(part, batch)
        rows = i[0] if isinstance(i, tuple) else i.numpy() if isinstance(i, torch.Tensor) else i
        assert (
            part.index.tolist() == batch.index.numpy()[rows].tolist()
            and part.train.shape == (len(part), 3)
            and part.burn_in.shape == (len(part), 2)
        )
        assert torch.equal(part.train.reward, part.reward[:, 2:])
        consistent(elsewhere(batch)[i], batch) if not (
            isinstance(i, slice) and i.step == -1
        ) else None
    for i in (
        (slice(None), slice(1, 4)),
        (slice(None), slice(None, None, -1)),
        (slice(1, 3), [0, 2]),
        (some, slice(2, None)),
        (slice(None), np.array([True, False, True, True, False])),
    ):
        consistent(batch[i], batch)
        assert (
            batch[i].reward.tolist() == batch.reward.numpy()[i].tolist()
            and batch[i].burn_in.shape[1] == 0
        )
    assert torch.equal(batch[::-1].hidden, batch.hidden.flip(0)) and torch.equal(
        batch[:, ::-1].hidden, batch.hidden
    )


def test_what_is_no_batch_of_sequences_is_plain_steps(batch):
    "One sequence, one step of each, some steps: rows, without what belongs to whole sequences"
    for part, shape in (
        (batch[1], (5,)),
        (batch[1, 2], ()),
        (batch[:, 2], (4,)),
        (batch[..., 2], (4,)),
        (batch[batch.mask], (int(batch.mask.sum()),)),
        (batch[None], (1, 4, 5)),
        ([*batch][0], (5,)),
        (batch[0, 1:3], (2,)),
    ):
        assert (
            type(part) is Steps
            and part.shape == shape
            and not hasattr(part, 'weight')
            and part.reward.shape == shape
        )
        repr(part), part.copy(), pickle.loads(pickle.dumps(part))


@pytest.mark.parametrize(
    'pick',
    [
        lambda b: b[np.ix_([0, 2], [1, 3])],
        lambda b: b[0, None],
        lambda b: b[...],
        lambda b: b[..., 1:],
        lambda b: b[()],
        lambda b: b[b.mask, None],
        lambda b: b[0, :, None],
    ],
    ids=['ix_', '0,None', '...', '...,1:', '()', 'mask,None', '0,:,None'],
)
def test_unusual_places_lose_nothing_in_silence(batch, pick):
    "What comes is either plain rows, or sequences each of which has its index and weight"
    part = pick(batch)
    if type(part) is Sequences:
        assert part.shape[:1] == part.index.shape == part.weight.shape == part._each.shape
    else:
        assert type(part) is Steps


def test_copies_devices_and_pickles(batch):
    "All columns travel, those of sequences too; a copy is one's own; a pickle knows no replay"
    twins = (
        batch.copy(),
        copy.copy(batch),
        copy.deepcopy(batch),
        pickle.loads(pickle.dumps(batch)),
        elsewhere(batch).to('cpu'),
        elsewhere(batch),
        batch.to('cpu'),
        batch.train.copy(),
        pickle.loads(pickle.dumps(elsewhere(batch))),
    )
    for i, b in enumerate(twins):
        if i != 7:
            assert (
                b == batch
                and batch == b
                and b.shape == (4, 5)
                and torch.equal(b.train.reward, batch.train.reward)
                and torch.equal(b.burn_in.reward, batch.burn_in.reward)
            )
        consistent(b, batch)
    assert batch.to('cpu') is batch and pickle.loads(pickle.dumps(batch.train)) == batch.train
    own = batch.copy()
    own.reward[:], own.weight[:], own.hidden[:] = -5, -5, -5
    assert (batch.reward >= 0).all() and (batch.weight > 0).all() and (batch.hidden >= 0).all()
    with pytest.raises(TypeError, match='not drawn from a replay'):
        pickle.loads(pickle.dumps(batch)).update_priorities(np.zeros((4, 3)))
    meta = batch.to('meta')
    assert (
        meta.shape,
        meta.index.shape,
        meta.weight.device.type,
        meta.train.shape,
        meta.burn_in.hidden.shape,
    ) == ((4, 5), (4,), 'meta', (4, 3), (4, 2)) and 'on meta' in repr(meta)
    assert meta[1:].train.weight.shape == (3,) and set(meta.asdict()) == set(batch.asdict())


def test_equal_by_value(batch):
    "Rows and what belongs to sequences; nothing else is equal to a batch"
    twin = batch.copy()
    assert batch == twin and not batch != twin
    for name in 'weight', 'index', 'hidden', 'reward':
        other = batch.copy()
        other[name][0] += 1
        assert batch != other and not batch == other
    assert batch != batch[:3] and batch != batch.train
    with pytest.raises(TypeError):
        hash(batch)


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_a_batch_is_not_equal_to_anything_else(batch):
    "Whatever is no Steps"
    for other in 3, None, 'x', batch.rows.shape, object():
        assert not batch == other and batch != other and other != batch


def test_joining_batches(batch):
    "Steps.cat joins rows; the columns of sequences come along, all of them, or the result is plain: never those of the first batch alone"
    b = batch[:2].copy()
    for blocks in (
        [batch, b],
        [b, batch],
        [batch],
        [batch.train, b.train],
        [elsewhere(batch), elsewhere(b)],
    ):
        joined, n = Steps.cat(blocks), sum(map(len, blocks))
        assert len(joined) == n and torch.equal(
            joined.reward, torch.cat([x.reward for x in blocks])
        )
        if type(joined) is Sequences:
            consistent(joined)
            for name in 'index', 'weight', 'hidden':
                assert torch.equal(joined[name], torch.cat([x[name] for x in blocks])), name
            joined.weight[:] = -1
            assert (batch.weight > 0).all(), 'shares memory with its parts'
        else:
            assert type(joined) is Steps and not hasattr(joined, 'weight')


def test_answers_from_parts_of_a_batch():
    "Each part knows its sequences: rows of a batch, its trained steps, copies; a part without its sequences says so"
    want = None
    for parts in (
        (lambda b: [(b, slice(None))]),
        (lambda b: [(b[i : i + 1], slice(i, i + 1)) for i in range(4)]),
        (lambda b: [(b.train[::-1], slice(None, None, -1))]),
        (lambda b: [(b[b.index >= 0].copy().burn_in, slice(None))]),
        (lambda b: [(elsewhere(b)[[3, 1]], [3, 1]), (elsewhere(b).train[[0, 2]], [0, 2])]),
    ):
        replay = made(numbered(20), alpha=1, eps=0)
        b, td = replay.sample(4), np.arange(1.0, 13).reshape(4, 3)
        for part, i in parts(b):
            part.update_priorities(td[i])
        want = want or present(replay)
        assert present(replay) == want and len(set(want.values())) > 3
    for part in b[0], b[:, 1], b[b.mask]:
        with pytest.raises((TypeError, KeyError), match='Steps'):
            part.update_priorities(np.zeros(len(part)))


# ---- recurrent states ----


@pytest.mark.parametrize('hidden', HIDDEN)
@pytest.mark.parametrize('state', ['stored', 'zero'])
def test_the_state_of_the_first_step(hidden, state):
    "Vectors, matrices, nested spaces: that of the first step, or zeros of the same shape; also of one moved back, a short one, and after growth and a restart"
    rows = np.zeros(60, row_dtype(hidden))
    fill(rows, np.arange(60))
    rows['env_id'], rows['episode_n'], rows['step_n'], rows['terminated'], rows['truncated'] = (
        np.arange(60) % 2,
        1,
        np.arange(60) // 2 + 1,
        False,
        False,
    )
    rows['terminated'][58:], rows['env_id'][rows['env_id'] == 1] = True, 30
    replay = made(
        *[Steps(rows[i : i + 7]) for i in range(0, 60, 7)],
        max_sz=50,
        state=state,
        length=5,
        overlap=2,
    )
    for r in replay, restored(replay, max_sz=50, state=state, length=5, overlap=2):
        b = r.sample(12)
        for k, got in zip(b.index.tolist(), b._each.rows['hidden']):
            want = (
                rows['hidden'][k : k + 1]
                if state == 'stored'
                else np.zeros(
                    1,
                    rows['hidden'].dtype
                    if rows['hidden'].dtype.names
                    else (rows['hidden'].dtype, rows['hidden'].shape[1:]),
                )
            )
            assert [
                bits(a)
                for a in numpy_leaves(
                    np.array([got], got.dtype) if got.dtype.names else np.asarray(got)[None]
                )
            ] == [bits(a) for a in numpy_leaves(want)]
    leaf = b.hidden['h'][0] if hidden == 'nested' else b.hidden
    assert leaf.shape[0] == 12 and (hidden != 'nested' or leaf.shape == (12, 2, 2))


# ---- priorities ----


@pytest.mark.parametrize('eta', [0, 0.3, 0.9, 1])
def test_priorities_are_those_of_the_losses(eta):
    "mixed_priority of the trained steps with their mask, whatever kind of numbers the errors are"
    rng = np.random.default_rng(0)
    replay = made(
        *[episode(int(n), env=e) for e, n in enumerate(rng.integers(1, 12, 30))],
        max_sz=300,
        length=6,
        burn_in=2,
        overlap=2,
        eta=eta,
        alpha=1,
        eps=0,
    )
    b = replay.sample(40)
    for kind in torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64:
        td = torch.as_tensor(rng.normal(0, 5, (40, 4))).to(kind)
        td = td[
            [b.index.tolist().index(k) for k in b.index.tolist()]
        ]  # one opinion on each sequence
        b.update_priorities(td)
        now = present(replay)
        close(
            [now[k][1] for k in b.index.tolist()],
            mixed_priority(td.double(), eta, b.train.mask),
            rtol=1e-12,
        )


@pytest.mark.parametrize('kw', [dict(eps=0), dict(alpha=60.0)], ids=['eps=0', 'underflow'])
def test_all_priorities_zero(kw):
    "No ε and no errors, or a power that takes them below the smallest number: each sequence is as likely, of those that are there"
    replay = made(numbered(12), burn_in=0, **kw)
    replay.update_priorities(keys_of(replay), np.zeros((5, 4)))
    seen = [k for _ in range(60) for k in replay.sample(3).index.tolist()]
    assert set(seen) == set(keys_of(replay)) and replay.sample().weight.tolist() == [1.0]


def test_huge_errors_are_refused_whole():
    "Whose priority is no number that fits"
    replay = made(numbered(12), alpha=2)
    state = replay.state_dict()
    for td in 1e200, 1e308:
        with pytest.raises(ValueError), np.errstate(all='ignore'):
            replay.update_priorities([0, 2], [[1] * 3, [td] * 3])
        assert same(replay.state_dict(), state)


def test_no_answers_to_an_empty_memory():
    "Nothing is fine, anything else was never given out"
    replay = made()
    with pytest.raises(StaleKey, match='never given out'):
        replay.update_priorities([0], [[1] * 3])
    with pytest.raises(NotEnoughRows, match='got 0 sequences in 0 rows'):
        replay.sample()
    assert replay.stats()['sequences'] == 0 and len(replay) == 0 and json.dumps(replay.stats())
    replay.update_priorities([], np.zeros((0, 3)))


# ---- stats, saving, pickling, the contract ----


def recurrent(blocks):
    "The same blocks with a column of 64 floats"
    return [with_columns(b, hidden=np.repeat(b.rows['reward'][:, None], 64, 1)) for b in blocks]


def test_what_a_checkpoint_of_another_replay_says():
    "Nothing has changed then"
    replay = made(numbered(20))
    saved = everything(made(numbered(9)))
    for kw in (
        dict(max_sz=5),
        dict(length=5),
        dict(overlap=1),
        dict(alpha=0.5),
        dict(state='zero'),
        dict(prioritized=False),
    ):
        other = made(numbered(20), **kw)
        before = other.state_dict()
        with pytest.raises(
            ValueError,
            match='SequenceReplay: a checkpoint of other settings|SequenceReplay: a saved memory with more rows|Proportional: a checkpoint of another sampler',
        ):
            other.load_state_dict(saved)
        assert same(other.state_dict(), before)
    with pytest.raises(ValueError, match='belongs to another stage'):
        replay.load_state_dict(ExperienceReplay(max_sz=40).state_dict())
    replay.load_state_dict(saved)
    assert len(replay.memory) == 9 and present(replay) == present(made(numbered(9)))
    fresh = restored(made(), seed=5)
    fresh.add(numbered(9))
    assert fresh.sample() == made(numbered(9), seed=0).sample()
    replay.load_state_dict(everything(made()))
    assert (
        len(replay) == 0
        and replay.table is None
        and len(replay.add(recurrent([numbered(5)])[0])) == 5
    )


def test_it_shows_itself():
    "All arguments that differ from the defaults, and how many rows are there"
    text = repr(
        Items([]).sequence_replay(
            bs=2, max_sz=50, length=7, burn_in=3, overlap=1, prioritized=False, state='zero'
        )
    )
    for part in (
        'bs=2',
        'max_sz=50',
        'length=7',
        'burn_in=3',
        'overlap=1',
        "kind='uniform'",
        "state='zero'",
    ):
        assert part in text, part


def test_it_counts_its_rows_when_it_shows_itself():
    "Rows are rows, and not sequences"
    text = repr(made(numbered(20)))
    assert '20 of 40 rows' in text or ('rows' not in text.split('#')[1])


# ---- chains ----


def test_seeds():
    "The same draws for the same seed, others for another, others each time for none"

    def draws(seed):
        r = made(numbered(40), seed=seed)
        return [r.sample(5).index.tolist() for _ in range(8)]

    assert draws(0) == draws(0) and draws(0) != draws(1) and draws(None) != draws(None)
    strata = made(numbered(40), burn_in=0, seed=3)
    assert all(
        sorted(strata.sample(19).index.tolist()) == list(range(0, 38, 2)) for _ in range(5)
    )  # equal priorities: one from each equal part


# ---- what is refused ----


@pytest.mark.parametrize(
    'kw,words',
    [
        (
            dict(length=0),
            'length; got 0; expected a whole number, 1 to 40. Remedy: at most max_sz=40',
        ),
        (
            dict(length=41),
            'length; got 41; expected a whole number, 1 to 40. Remedy: at most max_sz=40',
        ),
        (dict(length=2.0), 'length; got 2.0; expected a whole number'),
        (dict(length=True), 'length; got True'),
        (dict(length='5'), "length; got '5'"),
        (dict(length=None), 'length; got None'),
        (dict(burn_in=4), 'burn_in; got 4; expected a whole number, 0 to 3'),
        (dict(burn_in=-1), 'burn_in; got -1'),
        (dict(burn_in=1.5), 'burn_in; got 1.5'),
        (dict(burn_in=False), 'burn_in; got False'),
        (dict(overlap=4), 'overlap; got 4; expected a whole number, 0 to 3'),
        (dict(overlap=-1), 'overlap; got -1'),
        (dict(overlap='1'), "overlap; got '1'"),
        (dict(eta=1.1), 'eta; got 1.1; expected a number, 0 to 1'),
        (dict(eta=-0.1), 'eta; got -0.1'),
        (dict(eta=np.nan), 'eta; got nan'),
        (dict(eta=None), 'eta; got None'),
        (dict(alpha=-1), 'alpha; got -1'),
        (dict(alpha='1'), "alpha; got '1'"),
        (dict(alpha=np.inf), 'alpha; got inf'),
        (dict(eps=-1e-9), 'eps; got -1e-09'),
        (dict(beta=-1), 'beta; got -1'),
        (dict(beta='x'), "beta; got 'x'"),
        (dict(beta=np.nan), 'beta; got nan'),
        (dict(state='store'), "state; got 'store'; expected one of 'stored', 'zero'"),
        (dict(state=None), 'state; got None'),
        (dict(bs=0), 'bs; got 0'),
        (dict(bs=41), 'bs and max_sz'),
        (dict(ratio=-1), 'ratio; got -1'),
        (dict(warmup=-1), 'warmup; got -1'),
    ],
)
def test_arguments_are_checked(kw, words):
    with pytest.raises(ValueError, match=f'^SequenceReplay: .*{re.escape(words)}'):
        made(**kw)


@pytest.mark.parametrize('max_sz', [None, '9', 0, -1, 2**31, 40.5, np.nan])
def test_sizes_are_checked(max_sz):
    with pytest.raises(ValueError, match='max_sz'):
        made(max_sz=max_sz)


def test_numpys_numbers_are_numbers():
    "They must not find their way into checkpoints"
    kw = dict(
        bs=np.int64(2),
        max_sz=np.int32(40),
        length=np.int64(4),
        burn_in=np.int8(1),
        overlap=np.int32(2),
        eta=np.float32(0.5),
        alpha=np.float64(0.5),
        beta=np.float32(0.5),
        eps=np.float32(0.1),
        warmup=np.int64(3),
    )
    replay = made(numbered(20), **kw)
    replay.sample(np.int64(3)).update_priorities(np.ones((3, 3)))
    assert restored(replay, **kw).sample() == replay.sample()


def test_a_nan_in_a_state_is_refused():
    "Also where the block would have overwritten or completed sequences, and where it was the first"
    rows = recurrent([numbered(30)])[0]
    rows.rows['hidden'][29, 1] = np.nan
    for replay in made(), made(recurrent([numbered(38, 0)])[0]):
        state = replay.state_dict()
        with pytest.raises(BlockError, match="NaN in column 'hidden'"):
            replay.add(rows)
        assert same(replay.state_dict(), state)
        replay.add(recurrent([numbered(9, 38)])[0])
        assert len(replay) and replay.sample(2).shape == (2, 4)
    other = made()
    with pytest.raises(BlockError):
        other.add(rows)
    other.add(numbered(9))  # not even its columns stay
    assert len(other) == 3 and not hasattr(other.sample(), 'hidden')


# ---- options, and samplers of one's own ----


def test_kinds():
    "By rank, uniform in two ways; places of first rows; weights over the whole memory; the largest ever"

    def learned(**kw):
        replay = made(numbered(8), overlap=0, burn_in=0, alpha=1, eps=0, eta=1, **kw)
        replay.update_priorities([0, 4], [[4] * 4, [1] * 4])
        return replay

    close(learned(kind='rank').sampler.probabilities(), [2 / 3, 1 / 3])
    a, b = learned(kind='uniform', beta=1), learned(prioritized=False, beta=1)
    assert (
        all(a.sample(2) == b.sample(2) for _ in range(9))
        and a.kind == b.kind == 'uniform'
        and not a.prioritized
    )
    replay = learned(weight_norm='memory', beta=1, stratified=False, return_idxs=True)
    for _ in range(30):
        batch, places = replay.sample(1)
        assert (
            batch.weight.tolist() == [{0: 0.25, 4: 1.0}[int(batch.index)]]
            and places.tolist() == batch.index.tolist()
        )
    replay.add(numbered(40, 8))
    batch, places = replay.sample()
    assert replay.memory[places].reward.tolist() == batch.reward[:, 0].tolist()
    for initial, want in dict(largest=2, max_ever=9).items():
        replay = made(numbered(8), overlap=0, burn_in=0, alpha=1, eps=0, eta=1, initial=initial)
        replay.update_priorities([0, 4], [[9] * 4, [1] * 4])
        replay.update_priorities([0], [[2] * 4])
        replay.add(numbered(4, 8))
        assert present(replay)[8] == (4, want)


class Evenly(Sampler):
    "Draws places in turn"

    def clear(self):
        super().clear()
        self.taken, self.turn = set(), 0

    def __len__(self):
        return len(self.taken)

    def use_places(self, capacity):
        self.end = capacity

    def insert(self, places):
        self.taken |= set(places.tolist())

    def remove(self, places):
        self.taken -= set(places.tolist())

    def sample(self, n):
        self.turn += n
        return np.array(
            [sorted(self.taken)[(self.turn + i) % len(self)] for i in range(n)]
        ), np.full(n, 1 / len(self))


def test_a_sampler_of_ones_own():
    "Places come and go as it is told; one that draws keys in order only is refused when the replay is built"
    replay = made(*in_blocks(*[7] * 20), sampler=Evenly())
    assert (
        len(replay.sampler) == len(replay) == 19
        and len(set(replay.sample(19).index.tolist())) == 19
    )
    assert 'sampler=<Evenly>' in repr(replay) and 'sampler' not in repr(made())
    with pytest.raises(
        TypeError, match='SequenceReplay: sampler; got Uniform without use_places, insert, remove'
    ):
        made(sampler=Uniform())
    with pytest.raises(
        TypeError, match='SequenceReplay: sampler; got .*Uniform.*; expected a Sampler'
    ):
        made(sampler=Uniform)


def test_a_column_n_that_means_something_else_is_kept():
    "As in every memory; was: refused after the rows had been added, and so for ever"
    rows = np.zeros(6, extend_dtype(step_dtype(spaces.Box(-1, 1, ()), spaces.Discrete(2)), n='f4'))
    rows['step_n'], rows['episode_n'], rows['n'], rows['terminated'][-1:] = (
        range(1, 7),
        1,
        2.5,
        True,
    )
    replay = SequenceReplay(bs=1, max_sz=20, length=3, burn_in=0, overlap=0, seed=0)
    replay.add(Steps(rows))
    assert len(replay) == 2 and replay.sample().n.tolist() == [[2.5] * 3]


@pytest.mark.parametrize('hidden', [None, 'vector', 'nested'])
def test_equal_states_are_equal_bytes(hidden):
    "Of one that went on all along, and of one that was saved and restored after each block; was: rows of earlier episodes lay where nothing counts"

    def bytes_of(x):
        return (
            {k: bytes_of(v) for k, v in x.items()}
            if isinstance(x, dict)
            else x.numpy().tobytes()
            if isinstance(x, torch.Tensor)
            else x
        )

    def block(env, number, first, n, end, junk):
        rows = np.zeros(n, row_dtype(hidden))
        rows.view(np.uint8)[:] = junk  # between columns, too
        for c in rows.dtype.names:
            rows[c] = np.zeros((), rows.dtype[c])
        rows['env_id'], rows['episode_n'], rows['step_n'], rows['terminated'][-1:] = (
            env,
            number,
            np.arange(first, first + n),
            end,
        )
        if hidden == 'vector':
            rows['hidden'] = number
        return Steps(rows)

    a, b = made(max_sz=12), made(max_sz=12)
    for t, (env, number, first, n, end) in enumerate(
        [
            (0, 1, 1, 6, True),
            (1, 1, 1, 4, False),
            (0, 2, 1, 2, True),
            (1, 1, 5, 3, True),
            (0, 3, 1, 1, False),
            (1, 2, 1, 2, False),
            (0, 3, 2, 5, False),
            (1, 2, 3, 1, True),
            (1, 3, 1, 1, False),
        ]
    ):
        for r, junk in (a, 0), (b, t):
            r.add(block(env, number, first, n, end, junk))
        assert bytes_of(a.state_dict()) == bytes_of(b.state_dict()), t
        b = restored(b, max_sz=12)


def test_a_saved_table_holds_no_more_than_it_counts():
    "Free places, and steps that a running episode has not had, are zeros"
    replay = made(max_sz=12)
    for number in range(1, 8):
        replay.add(episode(5, number=number, hidden=np.full((5, 3), number, 'f4')))
    replay.add(episode(2, number=8, end=False, hidden=np.full((2, 3), 8, 'f4')))
    view = everything(replay)['own']['view']
    table, tracks = view['table'], view['tracks']
    free = table['first'] < 0
    assert (
        free.any()
        and not table['steps'][free].any()
        and not table['hidden'][free].any()
        and table['hidden'][~free].any()
    )
    assert (
        tracks['count'].tolist() == [2]
        and tracks['recent'][0].tolist() == [35, 36, 0, 0]
        and tracks['hiddens'][0, :2].any()
        and not tracks['hiddens'][0, 2:].any()
    )
