"""PrioritizedReplay, with a plain dict as the oracle.

Weights, late answers, initial priorities, checkpoints, statistics."""

import pickle, warnings
from functools import partial

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt, numpy as np, pytest, torch
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.testing import same
from scripted import Queue, elsewhere, everything, numbered, with_columns
from strategies import cases
from stories import EVENTS, Story
from test_samplers import Plain

KINDS = 'proportional', 'rank'


def surprising(td, first=0, env=0):
    "Numbered rows with a column of TD errors"
    return with_columns(numbered(len(td), first, env), td=np.asarray(td, float))


def filled(td, **kw):
    "A replay that holds rows with these TD errors, without ε, and with α = 1 unless told"
    settings = dict(bs=min(4, len(td)), max_sz=len(td), alpha=1, eps=0, seed=0)
    replay = PrioritizedReplay(**{**settings, **kw})
    replay.update_priorities(replay.add(numbered(len(td))), td)
    return replay


def close(a, b, rtol=1e-9):
    np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=rtol, atol=1e-300)


# ---- the oracle ----


class Prioritized(Story):
    def __init__(self, kind, alpha, eps, initial, weight_norm, stratified, beta, max_sz, bs):
        settings = dict(max_sz=max_sz, kind=kind, alpha=alpha, eps=eps, initial=initial)
        sampler = Proportional if kind == 'proportional' else Ranked
        self.model = Plain(sampler, max_sz, alpha, eps, initial == 'max_ever')
        self.end, self.stale, self.drawn, self.held = 0, 0, set(), []
        self.kw = dict(
            settings, weight_norm=weight_norm, stratified=stratified, beta=beta, bs=min(bs, max_sz)
        )
        self.queue, self.rng = Queue(), np.random.default_rng(0)
        self.replay = PrioritizedReplay(self.queue, seed=0, **self.kw)
        assert self.replay.sampler.stratified == stratified

    def chances(self):
        return dict(sorted(zip(*(x.tolist() for x in self.model.line()))))

    def drawable(self):
        return len(self.model.p)

    def block(self, n):
        return surprising(self.tds(n), self.end)

    def came(self, block):
        "Rows have come in; of a large block only the last ones are there"
        td = block.rows['td']
        keys = range(self.end, self.end + len(td))
        self.end += len(td)
        self.model.added(keys, td if self.kw['initial'] == 'td' else None)

    def tds(self, n):
        return self.rng.choice([0, 0, 1e-3, 0.5, -2, 2, -3, 7, 100, 1 / 3], n)

    def add(self, n, env):
        block, first = self.block(n or int(not self.end)), self.end  # the first block has rows
        block.rows['env_id'] = env % 3
        keys = self.replay.add(block)
        self.came(block)
        assert keys.tolist() == list(range(first, first + len(block)))

    def drew(self, batch, n):
        p, keys = self.chances(), batch.index.tolist()
        mine = np.array([p[k] for k in keys])  # KeyError: a key that is not there
        assert len(batch) == n and mine.min() > 0 and batch.reward.tolist() == keys
        smallest = min(x for x in p.values() if x > 0)
        if self.kw['weight_norm'] == 'batch':
            smallest = mine.min()
        close(batch.weight, (mine / smallest) ** -self.kw['beta'], rtol=1e-6)
        self.drawn.update(keys)
        self.held.append((batch, self.replay))

    def late(self, i, how):
        "TD errors of some earlier batch, from a copy or a device, too"
        if not self.held:
            return
        batch, replay = self.held.pop(i % len(self.held))
        td = np.sort(abs(self.tds(len(batch))))  # of a row that came twice, the last is the largest
        here = [(k, x) for k, x in zip(batch.index.tolist(), td) if k in self.model.p]
        self.stale += len(batch) - len(here)
        self.model.update([k for k, _ in here], [x for _, x in here])
        if replay is self.replay:
            part = (batch, batch.copy(), elsewhere(batch))[how % 3]
            part.update_priorities(td if how % 2 else torch.as_tensor(td))
        else:
            self.replay.update_priorities(batch.index, td)

    def refused(self, n, which):
        state, end, here = everything(self.replay), self.end, list(self.model.p)[:n]
        self.refuse(self.block(n + 1), n, which)
        with pytest.raises(StaleKey, match='is unknown'):
            self.replay.update_priorities(
                [*here, (end, -1, 2**62)[which % 3]], [50.0] * (len(here) + 1)
            )
        with pytest.raises(ValueError):
            self.replay.update_priorities(here, np.ones(len(here) + 1))
        if here:
            with pytest.raises(ValueError, match='TD error'):
                self.replay.update_priorities(here, [50.0] * (len(here) - 1) + [np.nan])
        assert same(everything(self.replay), state)

    def check(self):
        want, s = self.chances(), self.replay.stats()
        assert self.replay.memory.keys.tolist() == list(want)
        close(self.replay.sampler.probabilities(), list(want.values()))
        assert s['stale'] == self.stale
        if want:
            never = np.mean([k not in self.drawn for k in want])
            close(s['ess'], 1 / sum(p * p for p in want.values()))
            assert s['never_drawn'] == pytest.approx(never)


events = st.tuples(st.sampled_from(EVENTS), st.integers(0, 9), st.integers(0, 11))


@cases(120)
@given(
    st.lists(events, min_size=5, max_size=30),
    st.fixed_dictionaries(
        dict(
            kind=st.sampled_from(KINDS),
            alpha=st.sampled_from([0, 0.5, 1, 2]),
            eps=st.sampled_from([0, 1e-6, 0.1]),
            initial=st.sampled_from(['largest', 'max_ever', 'td']),
            weight_norm=st.sampled_from(['batch', 'memory']),
            stratified=st.booleans(),
            beta=st.sampled_from([0, 0.4, 1]),
            max_sz=st.sampled_from([1, 2, 3, 5, 8, 9, 20]),
            bs=st.integers(1, 4),
        )
    ),
)
def test_it_agrees_with_a_dict(events, settings):
    """Adding, drawing, late TD errors, refusals, restarts, freezing, in any order.

    Compares probabilities, weights, counts and rows."""
    story = Prioritized(**settings)
    for what, a, b in events:
        getattr(story, what)(a, b)
        if b % 2:  # the sampler is told of new rows
            story.check()
    story.check()


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('initial', ['largest', 'max_ever', 'td'])
def test_a_long_story_agrees_with_a_dict(kind, initial):
    "Trees of several levels, blocks around the corner and beyond the memory"
    story = Prioritized(kind, 0.6, 1e-6, initial, 'memory', True, 0.4, 300, 40)
    rng = np.random.default_rng(1)
    for i in range(60):
        what = rng.choice(EVENTS)
        n = int(rng.integers(50) if what == 'sample' else rng.choice([0, 1, 30, 70, 299, 700]))
        getattr(story, what)(n, int(rng.integers(12)))
        if i % 5 == 0:
            story.check()
    story.check()


# ---- probabilities and weights ----


def test_the_defaults_are_those_of_the_paper():
    "α = .6, β = .4, ε = 1e-6, proportional, in strata, scaled in the batch"
    settings = dict(kind='proportional', alpha=0.6, beta=0.4, eps=1e-6, initial='largest')
    a = PrioritizedReplay(bs=8, max_sz=20, seed=0)
    b = PrioritizedReplay(bs=8, max_sz=20, stratified=True, weight_norm='batch', seed=0, **settings)
    for r in a, b:
        r.update_priorities(r.add(numbered(20)), np.arange(20))
    assert all(a.sample() == b.sample() for _ in range(9))


# ---- initial priorities ----


@pytest.mark.parametrize('kind', KINDS)
def test_looking_changes_no_priority(kind):
    "The row with the largest one leaves between two blocks"
    chances = []
    for look in False, True:
        replay = filled([1, 9, 2], kind=kind)
        replay.add(numbered(1, 3))
        if look:
            replay.stats()
            replay.load_state_dict(everything(replay))
        replay.add(numbered(1, 4))
        replay.stats()
        chances.append(replay.sampler.kept().tolist())
    assert chances == [[2, 9, 9]] * 2


@pytest.mark.parametrize('dtype', ['f2', 'f8', 'i8'])
def test_initial_priorities_from_a_column(dtype):
    "Of any number; signs fall away"
    rows = with_columns(numbered(2), td=np.array([-3, 1], dtype))
    replay = PrioritizedReplay(max_sz=4, alpha=1, eps=0, initial='td', seed=0)
    replay.add(rows[0])
    replay.add(rows[1:])
    close(replay.drawable()['probability'], [0.75, 0.25])


@pytest.mark.parametrize(
    'initial,says',
    [
        ('dt', "initial='dt' .*; got no such column"),
        ('terminated', "initial='terminated' .*; got bool"),
    ],
)
def test_a_column_that_will_not_do_is_refused(initial, says):
    "At the first block, and other columns may come"
    replay = PrioritizedReplay(max_sz=4, initial=initial, seed=0)
    with pytest.raises(BlockError, match='PrioritizedReplay.*' + says):
        replay.add(surprising([1]))
    assert len(replay) == 0 and replay.memory.dtype is None


# ---- the arrow back ----

TDS = dict(
    list=[1.0, 4, 0, 2],
    f2=np.array([1, -4, 0, 2], 'f2'),
    big_endian=np.array([1, 4, 0, 2], '>f8'),
    u1=np.array([1, 4, 0, 2], 'u1'),
    strided=np.array([1, 9, 4, 9, 0, 9, 2, 9.0])[::2],
    bfloat16=torch.tensor([1, 4, 0, 2.0]).bfloat16(),
    long=torch.tensor([1, -4, 0, 2]),
    column=torch.tensor([[1.0], [4], [0], [2]]),
    gradient=torch.tensor([0.5, 2, 0, 1], requires_grad=True) * 2,
)


@pytest.mark.parametrize('name', TDS)
def test_td_errors_may_be_of_any_kind(name):
    "torch and numpy, any number, any memory layout; keys, too"
    keys = [3, 1, 2, 0]
    for same_keys in keys, torch.tensor(keys), np.array([keys, keys], 'i4').T[:, 0]:
        replay = filled([1] * 4)
        replay.update_priorities(same_keys, TDS[name])
        close(replay.sampler.probabilities()[keys], np.array([1, 4, 0, 2]) / 7)


@pytest.mark.parametrize('key,td', [(1, 6), (torch.tensor(1), torch.tensor(-6.0))])
def test_one_td_error_needs_no_list(key, td):
    replay = filled([1] * 3)
    replay.update_priorities(key, td)
    close(replay.sampler.probabilities(), [1 / 8, 6 / 8, 1 / 8])


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('alpha', [0, 1])
def test_refused_td_errors_change_nothing(kind, alpha):
    """Unknown keys, TD errors that are none, too many, too few; also beside a stale key.

    NaN and infinity to the power of 0 are 1, but no TD errors; from learner and column."""
    replay = PrioritizedReplay(bs=2, max_sz=4, kind=kind, alpha=alpha, initial='td', seed=0)
    replay.add(surprising([1, 2, 3, 4, 5]))
    state = everything(replay)
    for keys, td, error in [
        ([2**64 - 1], [9], StaleKey),
        ([1, 2, 0], [9, -np.inf, 9], ValueError),
        ([1, 2], 9, ValueError),
        ([1.0], [9], TypeError),
        ([1], torch.ones(1, dtype=torch.complex64), TypeError),
        ([1], ['a'], TypeError),
    ]:
        with pytest.raises(error):
            replay.update_priorities(keys, td)
    for bad in np.nan, np.inf:
        with pytest.raises(ValueError, match='TD error at position 1'):
            replay.update_priorities([2, 1], [1, bad])
        with pytest.raises(BlockError, match=f"column 'td' must be finite; got {bad}"):
            replay.add(surprising([1, bad], 5))
    replay.update_priorities([], [])
    assert same(everything(replay), state)


@pytest.mark.parametrize(
    'part',
    [
        lambda b: elsewhere(b).to('cpu'),
        lambda b: b[::-1],
        lambda b: b[torch.tensor([True, False, True, False])],
        lambda b: elsewhere(b)[[3, 0]],
        lambda b: b.copy(),
        lambda b: elsewhere(b)[2],
        lambda b: Steps.cat([b[3:], b[:2]]),
    ],
)
def test_wherever_a_batch_was_sent(part):
    "To a device, in parts, masked, copied, joined: TD errors go to its keys"
    replay = filled([1] * 9)
    some = part(replay.sample())
    td = np.arange(len(some)) + 2.0
    some.update_priorities(torch.as_tensor(td))
    want = np.ones(9)
    want[some.index.reshape(-1).numpy()] = td
    close(replay.sampler.probabilities(), want / want.sum())


# ---- stats ----


@pytest.mark.parametrize('td', [[], [0, 0], [3, 3], [1e-30, 1e30]], ids=str)
def test_a_figure_of_whatever_there_is(td):
    "It is rendered without a warning"
    replay = filled(td) if td else PrioritizedReplay(max_sz=3)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fig = replay.show()
        fig.canvas.draw()
    plt.close(fig)


# ---- saving, pickling, showing ----


@pytest.mark.parametrize(
    'mine,yours', [(PrioritizedReplay, ExperienceReplay), (ExperienceReplay, PrioritizedReplay)]
)
def test_foreign_states_are_refused_and_change_nothing(mine, yours):
    replay, other, fuller = mine(max_sz=4, seed=0), yours(max_sz=4), mine(max_sz=5)
    for r in replay, other, fuller:
        r.add(numbered(5))
    before = everything(replay)
    for state in everything(other), everything(fuller):
        with pytest.raises(ValueError):
            replay.load_state_dict(state)
    assert same(everything(replay), before)


def half(n):
    return 0.5


def test_a_schedule_travels_if_it_has_a_name():
    "And a lambda says that it can't"
    assert pickle.loads(pickle.dumps(PrioritizedReplay(beta=half))).beta is half
    with pytest.raises((AttributeError, pickle.PicklingError), match='lambda'):
        pickle.dumps(PrioritizedReplay(beta=lambda n: 0.5))


# ---- errors ----


@pytest.mark.parametrize('wrong', [lambda n: -1, lambda n: None])
def test_a_wrong_schedule_is_found_when_it_is_called(wrong):
    "Nothing counts as drawn"
    replay = filled([1] * 4, beta=wrong)
    with pytest.raises(ValueError, match='PrioritizedReplay: beta; got'):
        replay.sample()
    assert (replay.batches, replay.sampled) == (0, 0)


# ---- at full size ----


def test_ranks_with_a_large_alpha():
    "The smallest probability is no number any more: it was divided by"
    replay = PrioritizedReplay(
        bs=4, max_sz=50, kind='rank', alpha=500, weight_norm='memory', seed=0
    )
    replay.update_priorities(replay.add(numbered(50)), range(50))
    batch = replay.sample()
    assert batch.index.tolist() == [49] * 4 and torch.isfinite(batch.weight).all()
    mixture = Mixture(dict(a=replay, b=ExperienceReplay(bs=4, max_sz=9)), dict(a=1, b=0))
    assert torch.isfinite(mixture.sample().weight).all()


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


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('between', [ExperienceReplay, partial(PrioritizedReplay, kind='uniform')])
def test_priorities_on_disk_are_not_those_of_overwritten_rows(tmp_path, kind, between):
    "If a replay without priorities has added rows in between"
    store = Rows(tmp_path / 'm')
    settings = dict(bs=2, max_sz=10, store=store)
    with PrioritizedReplay(kind=kind, alpha=1, eps=0, **settings) as replay:
        keys = replay.add(numbered(10))
        replay.update_priorities(keys, np.arange(10) + 1.0)
    with between(**settings) as other:
        other.add(numbered(6, 10))
        other.sample()
    with PrioritizedReplay(kind=kind, alpha=1, eps=0, **settings) as replay:
        assert replay.drawable()['priority'].tolist() == [7, 8, 9, *[10] * 7]
