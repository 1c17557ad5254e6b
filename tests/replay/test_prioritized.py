"""PrioritizedReplay: weights, late answers, initial priorities, checkpoints, statistics; a plain dict as the oracle."""

import re, json, pickle, warnings

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt, numpy as np, pytest, torch
from hypothesis import given, strategies as st
from scipy.stats import chi2

import fastrl_replay.all
from fastrl_replay.all import *
from fastrl_replay.steps.row_dtypes import extend_dtype
from fastrl_replay.testing import same
from scripted import Queue, draws, elsewhere, everything, in_blocks, numbered, take, with_columns
from strategies import cases

KINDS = 'proportional', 'rank'


def surprising(td, first=0, env=0):
    "Numbered rows with a column of TD errors"
    return with_columns(numbered(len(td), first, env), td=np.asarray(td, float))


def named(kw):
    return re.sub(
        r" at 0x\w+", "", str(kw)
    )  # workers must agree on names, and functions have addresses


def filled(td, bs=None, **kw):
    "A replay that holds rows with these TD errors, as they are: no ε, and α = 1 unless told"
    replay = PrioritizedReplay(
        bs=bs or min(4, len(td)), **{**dict(max_sz=len(td), alpha=1, eps=0, seed=0), **kw}
    )
    replay.update_priorities(replay.add(numbered(len(td))), td)
    return replay


def chances(replay):
    return dict(zip(replay.memory.keys.tolist(), replay.sampler.probabilities().tolist()))


def close(a, b, **kw):
    np.testing.assert_allclose(
        np.asarray(a, float), np.asarray(b, float), **{**dict(rtol=1e-9, atol=1e-300), **kw}
    )


# ---- the oracle ----


class Model:
    "What the specification says, in plain Python: key → priority"

    def __init__(self, max_sz, kind, alpha, eps, initial):
        self.max_sz, self.kind, self.alpha, self.eps, self.initial = (
            max_sz,
            kind,
            alpha,
            eps,
            initial,
        )
        self.p, self.end, self.ever, self.stale, self.drawn = {}, 0, 1.0, 0, {}

    def kept(self, td):
        return abs(td) + self.eps if self.kind == 'rank' else (abs(td) + self.eps) ** self.alpha

    def add(self, tds):
        first, self.end = self.end, self.end + len(tds)
        self.p = {k: p for k, p in self.p.items() if k >= self.end - self.max_sz}
        new = self.ever if self.initial == 'max_ever' else max(self.p.values(), default=0) or 1.0
        self.p.update(
            {
                k: self.kept(td) if self.initial == 'td' else new
                for k, td in enumerate(tds, first)
                if k >= self.end - self.max_sz
            }
        )

    def update(self, keys, tds):
        for k, td in zip(keys, tds):
            if k in self.p:
                self.p[k] = self.kept(td)
            else:
                self.stale += 1
        self.ever = max([self.ever, *(self.p[k] for k in keys if k in self.p)])

    def chances(self):
        if self.kind == 'rank':
            mass = {
                k: (r + 1) ** -self.alpha
                for r, k in enumerate(sorted(self.p, key=lambda k: (-self.p[k], k)))
            }
        else:
            mass = self.p if any(self.p.values()) else dict.fromkeys(self.p, 1)
        total = sum(mass.values())
        return {k: mass[k] / total for k in self.p}


class Story:
    "A replay and its model, which must agree after whatever happens"

    def __init__(self, kind, alpha, eps, initial, scale, stratified, beta, max_sz, bs):
        self.kw = dict(
            kind=kind,
            alpha=alpha,
            eps=eps,
            initial=initial,
            weight_norm=scale,
            stratified=stratified,
            beta=beta,
            max_sz=max_sz,
            bs=min(bs, max_sz),
        )
        self.model, self.held = Model(max_sz, kind, alpha, eps, initial), []
        self.queue, self.rng = Queue(), np.random.default_rng(0)
        self.replay = PrioritizedReplay(self.queue, seed=0, **self.kw)

    def tds(self, n):
        return self.rng.choice([0, 0, 1e-3, 0.5, -2, 2, -3, 7, 100, 1 / 3], n)

    def add(self, n, env):
        td = self.tds(
            n or int(not self.model.end)
        )  # a first block without rows has a separate test
        n = len(td)
        keys = self.replay.add(surprising(td, self.model.end, env % 3))
        self.model.add(td)
        assert keys.tolist() == list(range(self.model.end - n, self.model.end))

    def sample(self, n, _):
        n = n or None
        if len(self.model.p) < (n or self.replay.bs):
            with pytest.raises(NotEnoughRows):
                self.replay.sample(n)
        else:
            self.drew(self.replay.sample(n), n or self.replay.bs)

    def drew(self, batch, n):
        p, scale = self.model.chances(), self.kw['weight_norm']
        mine = np.array([p[k] for k in batch.index.tolist()])  # KeyError: a key that is not there
        assert len(batch) == n and mine.min() > 0 and batch.reward.tolist() == batch.index.tolist()
        least = mine.min() if scale == 'batch' else min(x for x in p.values() if x > 0)
        close(batch.weight, (mine / least) ** -self.kw['beta'], rtol=1e-6)
        for k in batch.index.tolist():
            self.model.drawn[k] = self.model.drawn.get(k, 0) + 1
        self.held.append(batch)

    def late(self, i, how):
        if not self.held:
            return
        batch = self.held.pop(i % len(self.held))
        keys, td = batch.index.tolist(), self.tds(len(batch))
        if self.kw['initial'] == 'max_ever':
            td = np.sort(
                abs(td)
            )  # or which of a twin's errors ever was the largest is a matter of taste
        self.model.update(keys, td)
        if batch._replay is not self.replay:
            self.replay.update_priorities(
                batch.index, torch.as_tensor(td)
            )  # was drawn before the restart
        else:
            (batch, batch.copy(), elsewhere(batch), batch[np.arange(len(batch))])[
                how % 4
            ].update_priorities(td if how % 2 else torch.as_tensor(td))

    def by_hand(self, n, _):
        if not self.model.end:
            return
        keys = self.rng.integers(0, self.model.end, n)
        td = np.sort(abs(self.tds(n)))
        self.model.update(keys.tolist(), td)
        self.replay.update_priorities(keys, td)

    def refused(self, n, which):
        state, end, powers = (
            self.replay.state_dict(),
            self.model.end,
            self.kw['alpha'] or self.kw['kind'] == 'rank',
        )  # α = 0 has a separate test
        block = surprising(self.tds(n + 1), end)
        if which % 3 == 0:
            block.rows['state'][n, 1] = np.nan
        elif which % 3 == 1:
            block.rows['env_id'][n] = -1
        elif self.kw['initial'] == 'td' and powers:
            block.rows['td'][n] = np.inf
        else:
            block = numbered(n, end) if self.model.end else block[None]
        with pytest.raises(BlockError):
            self.replay.add(block)
        here = list(self.model.p)[:n]
        with pytest.raises(StaleKey, match='never given out'):
            self.replay.update_priorities(
                [*here, (end, -1, 2**62)[which % 3]], np.full(len(here) + 1, 50.0)
            )
        if here and powers:
            for bad in np.nan, np.inf, -np.inf:
                with pytest.raises(ValueError, match='TD error'):
                    self.replay.update_priorities([*here, here[0]], [50.0] * len(here) + [bad])
        with pytest.raises(ValueError):
            self.replay.update_priorities(here, np.ones(len(here) + 1))
        assert same(self.replay.state_dict(), state)

    def restart(self, n, seed):
        twin, old = PrioritizedReplay(self.queue, seed=seed + 1, **self.kw), self.replay
        twin.load_state_dict(everything(old))
        if len(old) >= old.bs:
            a, b = old.sample(), twin.sample()
            assert a == b and old.stats() == twin.stats()
            self.replay = twin
            self.drew(b, old.bs)
        self.replay = twin

    def through(self, n, frozen):
        "A block comes from the source, into a frozen memory or not"
        self.replay.freeze_memory = bool(frozen % 2) and len(self.replay) >= self.replay.bs
        td = self.tds(n)
        self.queue.blocks.append(surprising(td, self.model.end))
        before = self.replay.memory.inserted
        batches = list(self.replay)
        if not self.replay.freeze_memory:
            self.model.add(td)
        else:
            assert self.replay.memory.inserted == before
        assert len(batches) == (len(self.model.p) >= self.replay.bs)
        for b in batches:
            self.drew(b, self.replay.bs)
        self.replay.freeze_memory = False

    def check(self):
        want, s = self.model.chances(), self.replay.stats()
        assert self.replay.memory.keys.tolist() == list(want) and len(self.replay) == len(want)
        close(self.replay.sampler.probabilities(), list(want.values()))
        assert s['stale'] == self.model.stale
        if want:
            close(s['ess'], 1 / sum(p * p for p in want.values()))
            assert s['never_drawn'] == pytest.approx(
                np.mean([k not in self.model.drawn for k in want])
            )
        positive = np.array([p for p in self.model.p.values() if p > 0])
        edges = np.array(s['priority_edges'])
        edges[[0, -1]] *= 1 - 1e-7, 1 + 1e-7  # a power may differ in its last bit
        assert (
            sum(s['priority_counts'])
            == len(positive)
            == ((positive >= edges[0]) & (positive <= edges[-1])).sum()
        )
        json.dumps(s)


events = st.tuples(
    st.sampled_from(
        [
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


@cases(120)
@given(
    st.lists(events, min_size=1, max_size=30),
    st.sampled_from(KINDS),
    st.sampled_from([0, 0.5, 0.6, 1, 2]),
    st.sampled_from([0, 1e-6, 0.1]),
    st.sampled_from(['largest', 'max_ever', 'td']),
    st.sampled_from(['batch', 'memory']),
    st.booleans(),
    st.sampled_from([0, 0.4, 1]),
    st.sampled_from([1, 2, 3, 5, 8, 9, 20]),
    st.integers(1, 4),
)
def test_it_agrees_with_a_dict(
    events, kind, alpha, eps, initial, scale, stratified, beta, max_sz, bs
):
    "Adding, drawing, late and early answers, refusals, restarts, freezing, in any order: probabilities, weights, counts, rows"
    story = Story(kind, alpha, eps, initial, scale, stratified, beta, max_sz, bs)
    for what, a, b in events:
        getattr(story, what)(a, b)
        story.check()


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('initial', ['largest', 'max_ever', 'td'])
def test_a_long_story_agrees_with_a_dict(kind, initial):
    "The same with trees of several levels, shelves that fill, blocks around the corner and beyond the memory"
    story, rng = (
        Story(kind, 0.6, 1e-6, initial, 'memory', True, 0.4, 300, 40),
        np.random.default_rng(1),
    )
    for i in range(120):
        what = rng.choice(['add', 'sample', 'sample', 'late', 'late', 'by_hand', 'restart'])
        getattr(story, what)(
            int(rng.choice([0, 1, 30, 70, 299, 700]) if what != 'sample' else rng.integers(0, 50)),
            int(rng.integers(0, 12)),
        )
        if what == 'add' or i % 10 == 0:
            story.check()
    story.check()


# ---- probabilities and weights ----


def test_probabilities_by_hand():
    "TD errors 4, -9, 0, 1: √ gives 2, 3, 0, 1 of 6; ranks 2, 1, 4, 3 give halves, wholes, quarters, thirds of 25/12"
    close(filled([4, -9, 0, 1], alpha=0.5).sampler.probabilities(), [2 / 6, 3 / 6, 0, 1 / 6])
    close(
        filled([4, -9, 0, 1], kind='rank').sampler.probabilities(),
        [6 / 25, 12 / 25, 3 / 25, 4 / 25],
    )
    close(
        filled([3, 0, 8, 24], alpha=0.5, eps=1).sampler.probabilities(),
        [2 / 11, 1 / 11, 3 / 11, 5 / 11],
    )  # ε before the power


def test_the_paper_is_the_default():
    "α = .6, β = .4, ε = 1e-6, proportional, in strata, scaled in the batch"
    a, b = (
        PrioritizedReplay(bs=8, max_sz=20, seed=0),
        PrioritizedReplay(
            bs=8,
            max_sz=20,
            kind='proportional',
            alpha=0.6,
            beta=0.4,
            eps=1e-6,
            initial='largest',
            stratified=True,
            weight_norm='batch',
            seed=0,
        ),
    )
    for r in a, b:
        r.update_priorities(r.add(numbered(20)), np.arange(20))
    assert all(a.sample() == b.sample() for _ in range(9)) and a.stats() == b.stats()
    close(
        a.sampler.probabilities(),
        (np.arange(20) + 1e-6) ** 0.6 / ((np.arange(20) + 1e-6) ** 0.6).sum(),
    )


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('scale', ['batch', 'memory'])
@pytest.mark.parametrize('beta', [0, 0.4, 1, 1.5])
def test_weights_are_rounded_once(kind, scale, beta):
    "(N·P)^-β over the largest in batch or memory, in double precision; float32 only at the end"
    rng = np.random.default_rng(3)
    replay = filled(
        rng.lognormal(0, 2, 500), bs=256, kind=kind, alpha=0.6, beta=beta, weight_norm=scale
    )
    right = total = 0
    for i in range(30):
        p, batch = replay.sampler.probabilities(), replay.sample()
        raw = (500 * p) ** -beta
        want = (
            raw[batch.index] / raw[batch.index if scale == 'batch' else slice(None)].max()
        ).astype('f4')
        got = batch.weight.numpy()
        assert (
            got.dtype == np.float32
            and batch.index.dtype == torch.int64
            and 0 < got.min()
            and got.max() <= 1
        )
        assert got.max() == 1 or scale == 'memory'
        np.testing.assert_array_max_ulp(got, want, 1)
        right, total = right + (got == want).sum(), total + len(got)
        batch.update_priorities(rng.lognormal(0, 2, 256))
    assert right >= 0.999 * total  # float32 on the way would be off in every third


def test_outliers_do_not_move_ranks():
    "One error of 1e200 takes a proportional memory over, and is just the first of the ranks"
    td = np.random.default_rng(0).random(100)
    calm, wild = (
        filled(np.where(td == td.max(), top, td), kind='rank', alpha=0.7) for top in (1, 1e200)
    )
    assert same(calm.sampler.probabilities(), wild.sampler.probabilities()) and draws(
        calm, 20
    ) == draws(wild, 20)
    assert calm.sample().weight.tolist() == wild.sample().weight.tolist()
    assert filled(np.where(td == td.max(), 1e200, td)).stats()['ess'] == pytest.approx(1)
    filled([1e298, 1e-300]).sample(2)
    with pytest.raises(ValueError, match='got 1e\\+299'):
        filled([1e299])


@pytest.mark.parametrize('how', [dict(stratified=True), dict(stratified=False)], ids=named)
@pytest.mark.parametrize('kind', KINDS)
def test_one_row_from_each_part_of_the_mass(kind, how):
    "Equal priorities, 60 rows, batches of 12: five neighbours for each place in the batch; independent draws hit the same part again"
    replay = filled(np.arange(60), bs=12, kind=kind, alpha=0, **how)
    parts = [sorted(int(k // 5) for k in b) for b in draws(replay, 200)]
    assert (
        all(p == list(range(12)) for p in parts)
        if how['stratified']
        else sum(p == list(range(12)) for p in parts) < 5
    )


def test_beta_may_follow_a_schedule():
    "It is asked once for each batch, for the number of those drawn so far, by `sample` or in the chain, and goes on after a restart"
    asked = []

    def beta(n):
        asked.append(n)
        return np.float32(n / 4)

    kw = dict(bs=2, max_sz=4, alpha=1, eps=0, weight_norm='memory', beta=beta)
    replay = PrioritizedReplay(in_blocks(2, 2), seed=0, **kw)
    batches = list(replay)
    assert asked == [0, 1]
    replay.update_priorities(range(4), [1, 2, 4, 8])
    twin = PrioritizedReplay(in_blocks(2, 2), **kw)
    twin.load_state_dict(everything(replay))
    for r in replay, twin:
        asked.clear()
        for n in 2, 3, 4:
            b = r.sample()
            close(b.weight, (2.0**b.index) ** (-n / 4), rtol=1e-6)
        assert asked == [2, 3, 4] and len(batches) == 2
        assert r.stats()['beta'] == pytest.approx(5 / 4)


# ---- statistics ----


def fair(counts, expected, spread=1.0, lower=True):
    "Do counts fit? Strata make them fit better than chance"
    there = expected > 0
    stat = ((counts - expected)[there] ** 2 / expected[there]).sum() / spread
    return (
        not counts[~there].any()
        and 1e-4 < chi2.sf(stat, there.sum() - 1)
        and (not lower or chi2.sf(stat, there.sum() - 1) < 1 - 1e-4)
    )


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    'bs,stratified', [pytest.param(1, True, marks=pytest.mark.slow), (16, False), (16, True)]
)
def test_rows_come_as_often_as_they_should_while_the_memory_slides(kind, bs, stratified):
    "Errors that change with each answer, rows that come and go: draws by size of the error and by age against the sum of probabilities"
    rng, errors = np.random.default_rng(5), np.array([0, 0.01, 0.1, 0.5, 1, 2, 5, 30.0])
    replay = PrioritizedReplay(
        bs=bs, max_sz=90, kind=kind, alpha=0.7, eps=0, initial='td', stratified=stratified, seed=7
    )
    group = np.empty(100_000, int)
    counts, expected, ages, by_age = np.zeros(8), np.zeros(8), np.zeros(9), np.zeros(9)
    end = 0
    for _ in range(6400 // bs + 400):
        n = int(rng.integers(0, 8))
        group[end : end + n] = rng.integers(0, 8, n)
        replay.add(surprising(errors[group[end : end + n]], end))
        end += n
        if len(replay) < 90:
            continue
        keys, p = replay.memory.keys, replay.sampler.probabilities()
        batch = replay.sample()
        drawn = batch.index.numpy()
        counts += np.bincount(group[drawn], minlength=8)
        ages += np.bincount((end - 1 - drawn) // 10, minlength=9)
        expected += bs * np.bincount(group[keys], p, minlength=8)
        by_age += bs * np.bincount((end - 1 - keys) // 10, p, minlength=9)
        group[drawn] = rng.integers(0, 8, bs)
        batch.update_priorities(errors[group[drawn]])  # a row that came twice has one new error
    chance = not (stratified and bs > 1)
    assert fair(counts, expected, lower=chance) and fair(ages, by_age, lower=chance)


# ---- initial priorities ----


@pytest.mark.parametrize('dtype', ['f2', 'f4', 'f8', 'i1', 'i8', 'u1'])
def test_the_column_may_be_of_any_number(dtype):
    "Signs fall away; a single row will do"
    rows = np.zeros(2, extend_dtype(numbered(1).rows.dtype, td=dtype))
    rows['step_n'], rows['td'] = (
        [1, 2],
        np.array([-3, 1]).astype(dtype) if dtype != 'u1' else [3, 1],
    )
    replay = PrioritizedReplay(max_sz=4, alpha=1, eps=0, initial='td', seed=0)
    replay.add(Steps(rows)[0])
    replay.add(Steps(rows[1:]))
    close(replay.sampler.probabilities(), [0.75, 0.25])


@pytest.mark.parametrize(
    'initial,says',
    [
        ('dt', "initial='dt'; got no column"),
        ('state', "initial='state'; got"),
        ('terminated', "initial='terminated'; got bool"),
    ],
)
def test_a_column_that_will_not_do_is_refused(initial, says):
    "At the first block, by name, and the memory is as new: other columns may come"
    replay = PrioritizedReplay(max_sz=4, initial=initial, seed=0)
    with pytest.raises(BlockError, match='PrioritizedReplay.*' + says):
        replay.add(surprising([1]))
    assert (len(replay), len(replay.sampler), replay.memory.dtype) == (0, 0, None)


# ---- the arrow back ----

TDS = dict(
    list=[1.0, 4, 0, 2],
    ints=[1, 4, 0, 2],
    f4=np.array([1, 4, 0, 2], 'f4'),
    f2=np.array([1, -4, 0, 2], 'f2'),
    big=np.array([1, 4, 0, 2], '>f8'),
    i8=np.array([1, -4, 0, 2]),
    u1=np.array([1, 4, 0, 2], 'u1'),
    strided=np.array([1, 9, 4, 9, 0, 9, 2, 9.0])[::2],
    backward=np.array([2, 0, 4, 1.0])[::-1],
    square=np.array([[1, 4], [0, 2.0]]),
    turned=np.array([[1, 0], [4, 2.0]]).T,
    tensor=torch.tensor([1.0, 4, 0, 2]),
    double=torch.tensor([1.0, -4, 0, 2]).double(),
    half=torch.tensor([1, -4, 0, 2.0]).half(),
    bfloat16=torch.tensor([1, 4, 0, 2.0]).bfloat16(),
    long=torch.tensor([1, -4, 0, 2]),
    byte=torch.tensor([1, 4, 0, 2]).byte(),
    column=torch.tensor([[1.0], [4], [0], [2]]),
    gradient=torch.tensor([0.5, 2, 0, 1], requires_grad=True) * 2,
    leaf=torch.tensor([1.0, 4, 0, 2], requires_grad=True),
    negated=torch.view_as_complex(torch.tensor([[9.0, 1], [9, -4], [9, 0], [9, 2]]))
    .conj()
    .imag,  # torch keeps the minus sign as a flag
    matrix=torch.tensor([[1.0, 0], [4, 2]]).T,
    stepped=torch.arange(8.0)[torch.tensor([1, 4, 0, 2])].repeat_interleave(2)[::2],
)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('name', TDS)
def test_answers_may_be_of_any_kind(name, kind):
    "torch and numpy, any number, any memory layout: the same chances, and what was given is not changed"
    td = TDS[name]

    def plain(x):
        return (
            x.detach().double() if isinstance(x, torch.Tensor) else torch.tensor(np.array(x, 'f8'))
        ).tolist()

    before = plain(td)
    want = np.array([1, 4, 0, 2]) / 7 if kind == 'proportional' else np.array([4, 12, 3, 6]) / 25
    for keys in (
        [3, 1, 2, 0],
        torch.tensor([3, 1, 2, 0]),
        np.array([3, 1, 2, 0], 'i4'),
        np.array([3, 1, 2, 0], 'u8'),
        np.array([3, 9, 1, 9, 2, 9, 0, 9])[::2],
        torch.tensor([[3, 1], [2, 0]]),
    ):
        replay = filled([1] * 4, kind=kind)
        replay.update_priorities(keys, td)
        close(replay.sampler.probabilities()[[3, 1, 2, 0]], want)
    assert plain(td) == before


@pytest.mark.parametrize(
    'key,td',
    [
        (1, 6),
        (np.int64(1), np.float32(6)),
        (torch.tensor(1), torch.tensor(6.0)),
        (np.array(1), np.array(-6)),
        (torch.tensor([1]), torch.tensor(6, dtype=torch.bfloat16)),
    ],
)
def test_one_answer_needs_no_list(key, td):
    "Numbers, and arrays and tensors without dimensions"
    replay = filled([1] * 3)
    replay.update_priorities(key, td)
    close(replay.sampler.probabilities(), [1 / 8, 6 / 8, 1 / 8])


def test_answers_that_can_not_be_written_to():
    "Read-only arrays are only read"
    keys, td = np.arange(3), np.array([1.0, 2, 5])
    keys.flags.writeable = td.flags.writeable = False
    for kind in KINDS:
        replay = filled([1] * 3, kind=kind)
        replay.update_priorities(keys, td)
        assert replay.sampler.probabilities().argmax() == 2


def test_an_error_of_nan_is_refused_even_for_a_stale_key():
    replay = filled([1, 2, 3, 4])
    replay.add(numbered(4, 4))
    with pytest.raises(ValueError):
        replay.update_priorities([0, 1, 0], [np.nan, 5, 5])
    assert replay.stats()['stale'] == 0


def test_a_refused_answer_is_refused_whole():
    "Unknown keys, errors that are none, too many, too few: memory, sampler and the next draws are as they were"
    for kind in KINDS:
        replay, twin = (
            filled([1, 2, 3, 4], kind=kind, initial='max_ever'),
            filled([1, 2, 3, 4], kind=kind, initial='max_ever'),
        )
        for r in replay, twin:
            r.add(numbered(1, 4))
        state = everything(replay)
        for keys, td, error in [
            ([1, 5], [9, 9], StaleKey),
            ([-1, 1], [9, 9], StaleKey),
            ([0, 99], [9, 9], StaleKey),
            ([1, 2], [9, np.nan], ValueError),
            ([1, 2], [9, np.inf], ValueError),
            ([1, 2, 0], [9, -np.inf, 9], ValueError),
            ([1], [1e299], ValueError),
            ([1, 2], [9], ValueError),
            ([1, 2], [9] * 3, ValueError),
            ([1, 2], 9, ValueError),
            ([1, 2], torch.ones(2, 2), ValueError),
            ([1.0], [9], TypeError),
            ([True], [9], TypeError),
            ([2**63], [9], StaleKey),
            ([2**64 - 1], [9], StaleKey),
        ]:
            with pytest.raises(error):
                replay.update_priorities(keys, td)
        assert same(everything(replay), state)
        replay.update_priorities([], [])
        replay.update_priorities(torch.tensor([], dtype=torch.int64), torch.tensor([]))
        assert draws(replay, 9) == draws(twin, 9)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('alpha', [0, 1e-3, 1])
def test_errors_that_are_no_numbers_are_refused_at_any_alpha(kind, alpha):
    "NaN and infinity to the power of 0 are 1, and still no errors; from the learner and from the column"
    replay = PrioritizedReplay(bs=2, max_sz=4, kind=kind, alpha=alpha, initial='td', seed=0)
    replay.add(surprising([1, 2, 3, 4]))
    state = everything(replay)
    for bad in np.nan, np.inf, -np.inf:
        with pytest.raises(ValueError, match='TD error at place 1'):
            replay.update_priorities([0, 1], [1, bad])
        with pytest.raises(BlockError, match='TD error at place 1'):
            replay.add(surprising([1, bad], 4))
    assert same(everything(replay), state)


def test_a_refused_block_after_one_without_rows():
    "The columns that the empty block brought are still the memory's"
    replay, block = PrioritizedReplay(max_sz=4, seed=0), numbered(1)
    replay.add(surprising([]))
    state, block = everything(replay), surprising([1])
    block.rows['state'] = np.nan
    with pytest.raises(BlockError):
        replay.add(block)
    assert same(everything(replay), state)


def test_wherever_a_batch_was_sent():
    "To a device, in parts, masked, copied, joined, one row: the answers go to its keys"
    for n, part in enumerate(
        [
            lambda b: b.to('cpu'),
            elsewhere,
            lambda b: elsewhere(b).to('cpu'),
            lambda b: b[1:3],
            lambda b: b[::-1],
            lambda b: b[torch.tensor([True, False, True, False])],
            lambda b: elsewhere(b)[[3, 0]],
            lambda b: b.copy(),
            lambda b: b[2],
            lambda b: elsewhere(b)[2],
            lambda b: Steps.cat([b[3:], b[:2]]),
            lambda b: Steps.cat([elsewhere(b), elsewhere(b)[:1]]),
            lambda b: Steps.cat([b[i] for i in (2, 0)]),
        ]
    ):
        replay = filled([1] * 9, seed=n)
        some = part(replay.sample())
        td = np.arange(len(some)) + 2.0
        some.update_priorities(torch.as_tensor(td))
        want = {**dict.fromkeys(range(9), 1.0), **dict(zip(some.index.reshape(-1).tolist(), td))}
        close(list(chances(replay).values()), np.array(list(want.values())) / sum(want.values()))
    with pytest.raises(ValueError, match='expected 4'):
        replay.sample().update_priorities([1, 2])


def test_a_batch_on_meta_remembers_where_it_came_from():
    "It has no keys to answer with, which is another error than having no replay, and nothing has changed"
    replay = filled([1] * 4)
    there = replay.sample().to('meta')
    state = everything(replay)
    assert there.index.device.type == 'meta' and there[1:].weight.shape == (3,)
    try:
        there.update_priorities(torch.ones(4))
    except TypeError as e:
        raise AssertionError(f'taken for a block without a replay: {e}')
    except NotImplementedError:
        assert same(everything(replay), state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
def test_a_batch_on_a_graphics_card_answers():
    "Pinned, sent, learned from there: keys and errors come back from the card"
    replay = filled([1] * 4)
    batch = replay.sample().pin_memory()
    there = batch.to('cuda', non_blocking=True)
    there.update_priorities(there.weight * 5)
    assert batch.is_pinned() and max(chances(replay).values()) == pytest.approx(
        5 / (4 + 4 * len(set(batch.index.tolist())))
    )


# ---- stats ----


@pytest.mark.parametrize(
    'kw,edges', [(dict(alpha=0.5), [2, 4]), (dict(kind='rank'), [4, 16])], ids=named
)
def test_stats_by_hand(kw, edges):
    "Powers of the errors in the histogram, where the sampler has them; all that a uniform replay says, too, and of an empty memory"
    s, empty = filled([16, 4, 4, 0], bs=1, **kw).stats(), PrioritizedReplay(max_sz=3).stats()
    assert (
        s['priority_counts'][0] == 2
        and s['priority_counts'][-1] == 1
        and len(s['priority_edges']) == len(s['priority_counts']) + 1
    )
    close([s['priority_edges'][0], s['priority_edges'][-1], s['beta']], [*edges, 0.4], rtol=1e-6)
    assert set(map(type, s.values())) <= {int, float, list} and json.loads(json.dumps(s)) == s
    assert (empty['ess'], empty['never_drawn'], sum(empty['priority_counts'])) == (0, 0, 0) and set(
        ExperienceReplay().stats()
    ) <= set(empty)


def test_looking_changes_nothing():
    "stats, show, repr and probabilities draw no random number and move no priority"
    for kind in KINDS:
        a, b = (filled([1, 2, 3, 4, 0, 5], kind=kind) for _ in range(2))
        for _ in range(4):
            a.stats()
            repr(a)
            a.sampler.probabilities()
            plt.close(a.show())
            assert a.sample() == b.sample()


SHOWN = dict(
    empty=lambda **kw: PrioritizedReplay(max_sz=3, **kw),
    one=lambda **kw: filled([2], bs=1, **kw),
    zeros=lambda **kw: filled([0] * 5, **kw),
    equal=lambda **kw: filled([3] * 5, **kw),
    some=lambda **kw: filled([0, 1, 2, 30, 4], **kw),
    wide=lambda **kw: filled([1e-30, 1e30], bs=1, **kw),
)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('name', SHOWN)
def test_a_figure_of_whatever_there_is(name, kind):
    "Drawings of all that is there, which can be rendered without a warning, and a figure that can be closed"
    replay, before = SHOWN[name](kind=kind), len(plt.get_fignums())
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fig = replay.show()
        fig.canvas.draw()
    assert isinstance(fig, matplotlib.figure.Figure)
    plt.close(fig)
    assert len(plt.get_fignums()) == before


# ---- saving, pickling, showing ----

CHAINS = [
    dict(),
    dict(kind='rank', alpha=0.7),
    dict(weight_norm='memory', ratio=0.7, warmup=5),
    dict(initial='max_ever', stratified=False),
    dict(initial='reward', return_idxs=True),
    dict(beta=lambda n: min(1, 0.4 + n / 20), ratio=2.5, kind='rank', initial='max_ever'),
]


def test_a_state_is_a_copy_and_may_be_loaded_over_another():
    "What happens later changes no state; what was there before leaves no trace"
    for kind in KINDS:
        a, b = (
            PrioritizedReplay(bs=3, max_sz=7, kind=kind, initial='max_ever', seed=s) for s in (0, 1)
        )
        a.update_priorities(a.add(numbered(5)), [1, 2, 3, 4, 5])
        state, kept = a.state_dict(), everything(a)
        b.update_priorities(b.add(numbered(20)), range(100, 120))
        b.sample()
        b.load_state_dict(state)
        first = b.memory.base  # keys that were given out before are not given out again
        want = draws(b, 5)
        b.update_priorities([first, first + 1], [70, 80])
        b.add(numbered(9, 5))
        assert (
            first == 21
            and same(state, kept)
            and want == [[k + first for k in d] for d in draws(a, 5)]
        )
        a.update_priorities([0, 1], [70, 80])
        a.add(numbered(9, 5))
        assert draws(b, 5) == [[k + first for k in d] for d in draws(a, 5)]
        assert a.memory[:] == b.memory[:] and np.array_equal(a.sampler.kept(), b.sampler.kept())


def test_foreign_states_are_refused_and_change_nothing():
    "Of a uniform replay, of a fuller one, of another stage; and the other way round"
    for make, other in [
        (PrioritizedReplay, ExperienceReplay),
        (ExperienceReplay, PrioritizedReplay),
    ]:
        mine, yours = make(bs=2, max_sz=4, seed=0), other(bs=2, max_sz=4, seed=0)
        for r in mine, yours:
            r.add(numbered(4))
            r.sample()
        kept, fuller = everything(mine), make(bs=2, max_sz=5)
        fuller.add(numbered(5))
        for state in everything(yours), everything(fuller):
            with pytest.raises(
                ValueError, match=make.__name__ if state['stage'] != make.__name__ else None
            ):
                mine.load_state_dict(state)
        assert same(everything(mine), kept)


@pytest.mark.parametrize(
    'old,new',
    [
        (dict(alpha=0.5), dict(alpha=1)),
        (dict(alpha=1), dict(alpha=0)),
        (dict(kind='rank'), dict(alpha=0.5)),
        (dict(alpha=0.5), dict(kind='rank')),
        (dict(kind='rank', alpha=0.5), dict(kind='rank', alpha=1)),
    ],
    ids=named,
)
def test_a_state_of_other_settings_is_refused_or_read_rightly(old, new):
    "Either an error that changes nothing, or the chances that the same errors have under the new settings"
    a, b, want = (
        filled([1, 4, 9, 16], **old),
        filled([5, 5, 5, 5], **new),
        filled([1, 4, 9, 16], **new),
    )
    kept = everything(b)
    try:
        b.load_state_dict(everything(a))
    except ValueError:
        assert same(everything(b), kept)
    else:
        close(b.sampler.probabilities(), want.sampler.probabilities())
        for r in b, want:
            r.update_priorities([0], [6])
        close(b.sampler.probabilities(), want.sampler.probabilities())


def test_a_state_whose_rows_lack_the_column_of_errors():
    "New rows can't get what no row has: refused with the state, or with the next block, but not silently the largest"
    a, b = (
        filled([1, 2, 3], max_sz=9),
        PrioritizedReplay(bs=3, max_sz=9, alpha=1, eps=0, initial='td', seed=0),
    )
    with pytest.raises(ValueError, match="'td'"):
        b.load_state_dict(everything(a))
        b.add(numbered(1, 3))


def test_numbers_of_numpy_go_through_the_file():
    "All settings may be numpy's numbers, and the state still loads without code"
    for kind in KINDS:
        a = PrioritizedReplay(
            bs=np.int64(2),
            max_sz=np.int64(4),
            kind=kind,
            alpha=np.float32(0.5),
            beta=np.float64(1),
            eps=np.float32(0),
            initial='max_ever',
            warmup=np.int64(1),
            seed=np.int64(0),
        )
        a.update_priorities(a.add(numbered(np.int64(6))), np.float32([1, 4, 9, 16, 25, 36]))
        a.sample(np.int64(3))
        b = PrioritizedReplay(
            bs=2, max_sz=4, kind=kind, alpha=0.5, beta=1, eps=0, initial='max_ever'
        )
        b.load_state_dict(everything(a))
        assert a.sample() == b.sample()


def half(n):
    return 0.5


def test_a_schedule_travels_if_it_has_a_name():
    "And a lambda says that it can't"
    assert pickle.loads(pickle.dumps(PrioritizedReplay(beta=half))).beta is half
    with pytest.raises((AttributeError, pickle.PicklingError), match='lambda'):
        pickle.dumps(PrioritizedReplay(beta=lambda n: 0.5))


def test_the_repr_shows_what_is_not_default():
    "One stage a line, schedules by name, and the fill; the method and the name are public"
    pipe = Items([numbered(3)]).prioritized_replay(bs=2, max_sz=9, kind='rank', beta=half, seed=1)
    list(pipe)
    assert (
        repr(pipe)
        == str(pipe)
        == "Items(1)\n  .prioritized_replay(bs=2, max_sz=9, kind='rank', beta=half, seed=1)  # 3 of 9 rows"
    )
    assert (
        Pipe.prioritized_replay.stage is PrioritizedReplay
        and 'PrioritizedReplay' in fastrl_replay.all.__all__
    )


# ---- in a chain ----


def test_a_frozen_memory_still_learns():
    "Blocks pass, rows and keys stand still, answers arrive; a memory too small says so; thawed it goes on"
    replay = PrioritizedReplay(Items(in_blocks(*[2] * 30)), bs=2, max_sz=10, alpha=1, eps=0, seed=0)
    it = iter(replay)
    for _ in range(3):
        next(it)
    replay.freeze_memory = True
    for _ in range(9):
        assert max(next(it).index) < 6
    replay.update_priorities(range(6), [0, 0, 0, 0, 3, 1])
    assert (
        set(np.ravel([next(it).index for _ in range(9)])) == {4, 5} and replay.memory.inserted == 6
    )
    replay.freeze_memory = False
    next(it)
    close(replay.sampler.probabilities(), np.array([0, 0, 0, 0, 3, 1, 3, 3]) / 10)
    with pytest.raises(NotEnoughRows, match='PrioritizedReplay: the memory is frozen'):
        list(PrioritizedReplay(in_blocks(1), freeze_memory=True))


@pytest.mark.parametrize('kw', CHAINS[:5], ids=named)
def test_the_same_seed_gives_the_same_batches(kw):
    "Same stream, same answers, same batches; another seed or none gives others; nothing global is drawn from or touched"

    def run(seed, noise=0):
        np.random.seed(noise)
        torch.manual_seed(noise)
        pipe, got = (
            GymStepper(['CartPole-v1'] * 2, seed=1).prioritized_replay(
                **{**dict(bs=4, max_sz=20, seed=seed), **kw}
            ),
            [],
        )
        for item in take(pipe, 25):
            got.append(item[0] if isinstance(item, tuple) else item)
            got[-1].update_priorities(got[-1].reward * got[-1].step_n)
        assert np.random.get_state()[2] == 624 and torch.initial_seed() == noise
        return got

    assert run(5) == run(5, 1) and run(5) != run(6) and run(None) != run(None)


# ---- errors ----

WRONG = [
    (
        dict(kind='ranked'),
        "kind; got 'ranked'; expected one of 'proportional', 'rank'.*mean 'rank'",
    ),
    (dict(kind='porportional'), "did you mean 'proportional'"),
    (dict(kind=None), 'kind; got None'),
    (dict(kind=''), "kind; got ''"),
    (
        dict(weight_norm='batches'),
        "weight_norm; got 'batches'; expected one of 'batch', 'memory'.*mean 'batch'",
    ),
    (dict(weight_norm='memroy'), "did you mean 'memory'"),
    (dict(beta=-0.1), 'beta; got -0.1; expected a number'),
    (dict(beta=np.nan), 'beta; got nan'),
    (dict(beta=np.inf), 'beta; got inf'),
    (dict(beta='0.4'), "beta; got '0.4'"),
    (dict(beta=None), 'beta; got None'),
    (dict(bs=0), 'bs; got 0; expected a whole number, at least 1'),
    (dict(bs=5, max_sz=4), 'bs=5, max_sz=4; expected 1 <= bs <= max_sz'),
    (dict(bs=1.5), 'bs; got 1.5'),
    (dict(max_sz=0), 'max_sz; got 0; expected a whole number'),
    (dict(ratio=-1), 'ratio; got -1'),
    (dict(warmup=-1), 'warmup; got -1'),
]


@pytest.mark.parametrize('kw,says', WRONG, ids=[named(kw) for kw, _ in WRONG])
def test_wrong_arguments_are_refused_at_once(kw, says):
    "The stage, the argument, what came, what was expected, and the name that was meant"
    with pytest.raises(ValueError, match='PrioritizedReplay: .*' + says):
        PrioritizedReplay(**kw)


@pytest.mark.parametrize(
    'kw',
    [
        dict(alpha=-1),
        dict(alpha=np.nan),
        dict(alpha=np.inf),
        dict(eps=-1e-9),
        dict(eps=np.nan),
        dict(kind='rank', alpha=-1),
        dict(kind='rank', eps=np.inf),
    ],
    ids=named,
)
def test_errors_of_the_sampler_name_the_argument(kw):
    "α and ε are finite and not negative"
    what = 'alpha' if 'alpha' in kw else 'eps'
    with pytest.raises(ValueError, match=f'{what}; got {kw[what]}; expected a number'):
        PrioritizedReplay(**kw)


@pytest.mark.parametrize('wrong', [lambda n: -1, lambda n: np.nan, lambda n: None, lambda n: 'x'])
def test_a_wrong_schedule_is_found_when_it_is_asked(wrong):
    "With what it gave; nothing was counted as drawn"
    replay = filled([1] * 4, beta=wrong)
    with pytest.raises(ValueError, match='PrioritizedReplay: beta; got'):
        replay.sample()
    assert (replay.batches, replay.sampled, replay.memory.times_drawn.sum()) == (0, 0, 0)


@pytest.mark.parametrize('kind', KINDS)
def test_messages_name_the_stage_and_the_thing(kind):
    "Wherever they are found: who complains is the stage that the user wrote"

    def says(error, words, f):
        with pytest.raises(error, match='PrioritizedReplay.*' + words):
            f()

    replay = filled([1] * 4, kind=kind)
    says(ValueError, 'got 1; expected 2', lambda: replay.update_priorities([0, 1], [1]))
    says(TypeError, 'got list; expected Steps', lambda: replay.add([1]))
    says(ValueError, 'batch size; got 0', lambda: replay.sample(0))
    says(NotEnoughRows, '4 rows; expected 7 rows: 3 are missing', lambda: replay.sample(7))
    says(
        TypeError,
        'an item of its source; got int; expected Steps',
        lambda: list(PrioritizedReplay([3], kind=kind)),
    )
    says(
        ValueError,
        'TD error at place 1.*; got nan; expected a finite number',
        lambda: replay.update_priorities([0, 1], [1, np.nan]),
    )


def test_the_place_of_a_wrong_error_is_that_in_the_answer():
    "Also where keys before it are stale"
    replay = filled([1] * 4)
    replay.add(numbered(2, 4))
    with pytest.raises(ValueError, match='TD error at place 2.*; got nan'):
        replay.update_priorities([0, 4, 5], [1, 1, np.nan])


def test_no_remedy_that_does_not_exist():
    "A prioritized batch may repeat rows and has no `replacement` to turn on"
    with pytest.raises(NotEnoughRows) as e:
        PrioritizedReplay(max_sz=3).sample()
    assert 'replacement' not in str(e.value) and 'distinct' not in str(e.value)


# ---- at full size ----


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_a_million_rows(kind):
    "Frequencies by decile of the error, and exact probabilities, after the ring has closed"
    n, rng = 1_000_000, np.random.default_rng(0)
    replay = PrioritizedReplay(bs=256, max_sz=n, kind=kind, initial='td', seed=0)
    td = rng.lognormal(0, 2, 1_300_000)
    for i in range(0, len(td), 100_000):
        replay.add(surprising(td[i : i + 100_000], i))
    here = td[-n:]
    order = np.argsort(np.argsort(-here, kind='stable'), kind='stable')
    mass = (here + 1e-6) ** 0.6 if kind == 'proportional' else (order + 1.0) ** -0.6
    close(replay.sampler.probabilities(), mass / mass.sum())
    counts = sum(
        np.bincount(order[replay.sample().index.numpy() - 300_000] * 20 // n, minlength=20)
        for _ in range(2000)
    )
    expected = np.bincount(order * 20 // n, mass / mass.sum()) * 2000 * 256
    assert fair(counts, expected, lower=False)


@pytest.mark.parametrize(
    'td',
    [np.ones(4, complex), torch.ones(4, dtype=torch.complex64), [*'abcd']],
    ids=['numpy', 'torch', 'words'],
)
@pytest.mark.parametrize('keys', [np.arange(4), torch.arange(4)], ids=['array', 'tensor'])
def test_errors_that_are_no_real_numbers_are_refused(keys, td):
    replay = PrioritizedReplay(bs=4, max_sz=20, seed=0)
    replay.add(numbered(10))
    with pytest.raises(
        ArgumentTypeError, match='update_priorities: TD errors; got .*; expected real numbers'
    ):
        replay.update_priorities(keys, td)


def test_ranks_with_a_large_alpha():
    "The smallest probability is no number any more: it was divided by"
    replay = PrioritizedReplay(
        bs=4, max_sz=50, kind='rank', alpha=500, weight_norm='memory', seed=0
    )
    replay.update_priorities(replay.add(numbered(50)), range(50))
    batch = replay.sample()
    assert batch.index.tolist() == [49] * 4 and torch.isfinite(batch.weight).all()


def test_feedback_on_a_device_asks_for_no_doubles():
    "Some devices have none; here one that computes nothing"
    from torch.utils._python_dispatch import TorchDispatchMode
    from fastrl_replay.replay.views import fetched

    asked = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kw=None):
            if f is torch.ops.aten._to_copy.default and (kw or {}).get('device') == torch.device(
                'cpu'
            ):
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
            out = f(*args, **(kw or {}))
            asked.append(out.dtype)
            return out

    keys = torch.zeros(3, dtype=torch.int64, device='meta')
    for kind in torch.float32, torch.float16, torch.bfloat16:
        td = torch.zeros(3, dtype=kind, device='meta')
        with Watch():
            keys_here, td_here = fetched('here', keys, td)
        assert keys_here.tolist() == td_here.tolist() == [0] * 3 and td_here.dtype == np.float64
    assert asked and torch.float64 not in asked
