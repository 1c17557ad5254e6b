"""ExperienceReplay: fill, evict, draw, count, answer, save; and the contract of every stage."""

import copy, pickle
from fractions import Fraction

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from scipy.stats import chi2
from torch.utils.data import DataLoader

import fastrl_replay.all  # noqa: F401 (registers all stages)
from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.errors import BlockError, NotEnoughRows, StaleKey
from fastrl_replay.steps.row_dtypes import step_dtype
from fastrl_replay.envs.stepper import GymStepper
from fastrl_replay.learning.continuous import Critics, actor_net
from fastrl_replay.learning.learners import QLearner, QTable
from fastrl_replay.stages.nstep import NSkip, NStep
from fastrl_replay.stages.normalisation import RewardNorm, StateNorm, UpdateNorms
from fastrl_replay.pipe import Items, Pipe
from fastrl_replay.generic import Cycler, Header, InMemoryCacheHolder
from fastrl_replay.learning.networks import RecurrentNet, value_net
from fastrl_replay.learning.policies import LinearSchedule
from fastrl_replay.parallel.prefetch import Prefetch
from fastrl_replay.parallel.ranks import Ranks, Rounds
from fastrl_replay.app.recipes import Gather, Journal
from fastrl_replay.replay.experience import ExperienceReplay
from fastrl_replay.replay.hindsight import HindsightReplay
from fastrl_replay.replay.prioritized import PrioritizedReplay
from fastrl_replay.replay.sequences import SequenceReplay
from fastrl_replay.stages.chunker import SequenceChunker
from fastrl_replay.testing import (
    ScriptedEnv,
    check_contract,
    same,
    script,
    scripted_steps,
    through_file,
)
from strategies import cases
from scripted import (
    with_columns,
    draws,
    everything,
    in_blocks,
    modules,
    numbered,
    seed_002,
    take,
    zeros,
)


def filled(n, bs=4, max_sz=None, **kw):
    "A replay with rows 0 to n-1 added"
    replay = ExperienceReplay(bs=bs, max_sz=max_sz or n, **{'seed': 0, **kw})
    replay.add(numbered(n))
    return replay


def steps(n=10):
    return scripted_steps([script(3, -2, 1), script(1, 4, -1, env=1)], n)


def rewards(steps):
    return [int(r) for r in steps.reward.reshape(-1)]


# ---- the founding documents ----


def transition(*values):  # obs, action, reward, next obs, done
    rows = np.zeros(1, step_dtype(spaces.Discrete(10), spaces.Discrete(10)))
    for n, v in zip(('state', 'action', 'reward', 'next_state', 'terminated'), values):
        rows[n] = v
    return Steps(rows)


def test_what_seed_003_asserts_of_a_replay_buffer():
    "Its five assertions, in its order and with its numbers"

    def unique(b):
        return tuple(
            np.unique(b[n]).tolist()
            for n in ('state', 'action', 'reward', 'next_state', 'terminated')
        )

    obj1, obj2 = transition(*range(5)), transition(*range(5, 10))
    replay = ExperienceReplay(bs=1, max_sz=2, seed=0, replacement=True)
    one, two = ([0], [1], [2], [3], [True]), ([5], [6], [7], [8], [True])
    replay.add(obj1)
    assert unique(replay.sample(1)) == one
    replay.add(obj2)
    assert len(replay) == 2
    replay.add(obj2)
    assert len(replay) == 2 and unique(replay.sample(100)) == two
    replay.add(obj1)
    assert max(map(len, unique(replay.sample(100)))) == 2
    replay.add(obj1)
    assert unique(replay.sample(100)) == one
    with pytest.raises(NotEnoughRows):
        ExperienceReplay(bs=1, max_sz=2).sample()


def test_the_lessons_of_seed_002():
    "Filling, wrapping, renewing: 0, 10, …, 40 steps in a memory of 20 leave the last 20 rows"
    assert len(seed_002(['CartPole-v1'], 0, bs=1)[1]) == 0
    _, replay = seed_002(['CartPole-v1'], 10, max_sz=20)
    for total in 10, 20, 30, 40:
        if total > 10:
            _ = [step for step, _ in zip(*(range(10), replay))]  # as it stands there
        assert (len(replay), replay.memory.inserted) == (min(total, 20), total)
        baseline, _ = seed_002(['CartPole-v1'], total, replay=False)
        assert Steps.cat(baseline[-20:]) == replay.memory[:]
        for b, m in zip(baseline[-20:], replay.memory):
            assert torch.equal(b.state[0], m.state) and torch.equal(b.next_state[0], m.next_state)


def test_what_seeds_001_and_004_ask_for():
    "Fixed size, first in first out, and a tensor for each column with the type of its space"
    replay = filled(10, bs=3, max_sz=7)
    assert rewards(replay.memory[:]) == [3, 4, 5, 6, 7, 8, 9]
    b = replay.sample()
    for column, dtype, shape in (
        (b.state, torch.float32, (3, 2)),
        (b.action, torch.int64, (3,)),
        (b.reward, torch.float32, (3,)),
        (b.done, torch.bool, (3,)),
    ):
        assert column.dtype == dtype and column.shape == shape


# ---- how many batches, and when ----


class Watched:
    "A source of numbered rows; before each block but the first it notes how many batches are out"

    def __init__(self, sizes):
        self.blocks, self.seen, self.replay = in_blocks(*sizes), [], None

    def __iter__(self):
        while self.blocks:
            yield self.blocks.pop(0)
            self.seen.append(self.replay.batches)


def watched(sizes, passes=(), **kw):
    "Batches that are out after each block; iteration is broken off after `passes` batches each"
    source = Watched(sizes)
    replay = source.replay = ExperienceReplay(source, seed=0, **kw)
    for n in passes:
        take(replay, n)
    for _ in replay:
        pass
    return source.seen, replay


def expected(sizes, bs, max_sz, ratio=None, warmup=None, replacement=False):
    "The same, worked out in fractions: whole numbers and fractions, nothing else"
    seen, out, rows, paying = [], 0, 0, 0
    for n in sizes:
        rows += n
        paying += min(n, max(0, rows - (warmup or 0)))
        ready = min(rows, max_sz) >= (1 if replacement else bs) and rows >= (warmup or 0)
        if ready:
            out = out + 1 if ratio is None else paying * ratio.numerator // ratio.denominator
        seen.append(out)
    return seen


sizes = st.lists(st.integers(1, 7), min_size=1, max_size=25)
ratios = st.one_of(
    st.none(),
    st.fractions(0, 3, max_denominator=1000),
    st.sampled_from([0.29, 0.1, 0.3, 0.7, 1 / 3, 2.2, 1e-3, 0, 1, 3]),
)


@cases(150)
@given(
    sizes,
    ratios,
    st.integers(1, 6),
    st.integers(0, 12),
    st.one_of(st.none(), st.integers(0, 20)),
    st.booleans(),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_the_number_of_batches_is_exact(sizes, ratio, bs, more, warmup, replacement, passes):
    """⌊rows·ratio⌋ batches after every block, or one a block.

    With any sizes, warm-ups and memories, however often iteration is broken off."""
    kw = dict(bs=bs, max_sz=bs + more, warmup=warmup, replacement=replacement)
    exact = (
        None
        if ratio is None
        else Fraction(str(ratio))
        if isinstance(ratio, float) and ratio != 1 / 3
        else Fraction(ratio).limit_denominator(1000)
    )
    seen, replay = watched(sizes, passes, ratio=ratio, **kw)
    want = expected(sizes, ratio=exact, **kw)
    # if iteration is broken off, torch's hook closes the source between a block and its note
    assert replay.batches == want[-1]
    if not passes:
        assert seen == want


@pytest.mark.parametrize(
    'kw,says',
    [
        (dict(bs=0), 'bs'),
        (dict(bs=1.5), 'bs'),
        (dict(bs=101), '1 <= bs <= max_sz'),
        (dict(max_sz=0), 'max_sz'),
        (dict(ratio=-0.1), 'ratio'),
        (dict(ratio=float('inf')), 'ratio'),
        (dict(warmup=-3), 'warmup'),
    ],
    ids=str,
)
def test_wrong_numbers_are_refused_at_once(kw, says):
    with pytest.raises((ValueError, TypeError), match=f'ExperienceReplay.*{says}'):
        ExperienceReplay(**{**dict(max_sz=100), **kw})


def test_warm_up_rows_pay_for_nothing():
    "ratio counts the rows after the warm-up only, also in the block in which it ends"
    assert watched([4, 4, 4, 4], ratio=Fraction(1, 2), warmup=6, bs=1, max_sz=9)[0] == [0, 1, 3, 5]
    assert watched([10, 10], ratio=1, warmup=10, bs=1, max_sz=9)[0] == [0, 10]


def test_freezing_and_thawing():
    "While the memory is frozen, blocks pass and batches come; memory and keys do not change"
    replay = ExperienceReplay(Items(in_blocks(*[2] * 30)), bs=2, max_sz=10, seed=0, ratio=1)
    it = iter(replay)
    for _ in range(6):
        next(it)
    replay.freeze_memory = True
    before = replay.memory[:].copy()
    for _ in range(20):
        assert max(next(it).index) < 6
    assert replay.memory[:] == before and replay.memory.inserted == 6
    replay.freeze_memory = False
    for _ in range(4):
        next(it)
    assert rewards(replay.memory[-4:]) == [26, 27, 28, 29]


def test_a_frozen_memory_that_is_too_small_says_why():
    with pytest.raises(NotEnoughRows, match='the memory is frozen.*got 0; expected 2 rows'):
        take(ExperienceReplay(in_blocks(1, 1), bs=2, freeze_memory=True), 1)
    replay = ExperienceReplay(in_blocks(1, 1), bs=2, warmup=9, freeze_memory=True)
    replay.add(numbered(5))
    with pytest.raises(NotEnoughRows, match='warmup|9 rows'):
        take(replay, 1)


KINDS = {
    ExperienceReplay: dict(bs=2),
    PrioritizedReplay: dict(bs=2),
    SequenceReplay: dict(bs=2, length=2, burn_in=0, overlap=0),
}


@pytest.mark.parametrize('kind', KINDS, ids=lambda k: k.__name__)
def test_a_filled_replay_without_a_source_draws_indefinitely(kind):
    "As for offline learning; an empty source ends at once"
    replay, empty = kind(max_sz=50, seed=0, **KINDS[kind]), kind([], max_sz=50, **KINDS[kind])
    with pytest.raises(NotEnoughRows):
        next(iter(replay))
    for block in steps():
        replay.add(block)
        empty.add(block)
    assert len(take(replay, 30)) == 30
    assert list(empty) == []


# ---- drawing ----


def uniform(counts, bs, replacement):
    """Return whether a table of counts is what a uniform draw gives.

    Without replacement counts vary less, by (N-bs)/(N-1)."""
    n, mean = len(counts), counts.mean()
    stat = ((counts - mean) ** 2).sum() / mean / (1 if replacement else (n - bs) / (n - 1))
    return 1e-3 < chi2.sf(stat, n - 1) < 1 - 1e-3


@pytest.mark.parametrize('bs', [1, 20])
@pytest.mark.parametrize('inserted', [40, 55])
@pytest.mark.parametrize('replacement', [False, True])
def test_every_row_is_as_likely_as_any_other_at_capacity(bs, inserted, replacement):
    "Chi-square over rows, and over the rows in the first place of a batch"
    replay = filled(inserted, bs=bs, max_sz=40, replacement=replacement)
    keys = np.array(draws(replay, 4000)) - (inserted - 40)
    assert uniform(np.bincount(keys.ravel(), minlength=40), bs, replacement)
    assert uniform(np.bincount(keys[:, 0], minlength=40), 1, False)


def test_batches_are_distinct_unless_asked_otherwise():
    "A batch of the whole memory is a permutation of it; with replacement it may be larger"
    replay = filled(20, bs=20)
    orders = {tuple(x) for x in draws(replay, 30)}
    assert all(sorted(o) == list(range(20)) for o in orders) and len(orders) == 30
    assert all(len(set(d)) == 7 for d in draws(replay, 20, 7))
    assert set(draws(filled(3, bs=50, replacement=True), 1)[0]) == {0, 1, 2}


def test_seeds_decide_the_draws():
    "Without a seed they differ each time; global generators are neither used nor changed"

    def made(seed):
        return draws(filled(1000, seed=seed), 20)

    before = np.random.get_state()[1].copy(), torch.random.get_rng_state()
    assert made(3) == made(3) == made(np.int64(3))
    assert len({str(made(s)) for s in (0, 1, 2, 3, None, None)}) == 6
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.random.get_rng_state(), before[1])


@pytest.mark.parametrize('n', [8, 27])
def test_batches_carry_the_rows_that_their_index_names(n):
    "index, weight and every column, with the keys of return_idxs, before and after wrapping"
    replay = filled(n, bs=4, max_sz=10, return_idxs=True)
    for _ in range(20):
        batch, idxs = replay.sample()
        assert rewards(batch) == batch.index.tolist()
        assert batch.weight.tolist() == [1] * 4
        assert (idxs == batch.index.numpy()).all()
    assert [len(replay.sample(n)[0]) for n in (1, 7)] == [1, 7]


def test_too_few_rows_are_counted():
    replay = filled(3, bs=4, max_sz=10)
    with pytest.raises(NotEnoughRows, match='got 3 rows; expected 4 rows: 1 is missing'):
        replay.sample()
    with pytest.raises(ValueError, match='ExperienceReplay: batch size'):
        replay.sample(0)
    assert len(replay.sample(3)) == 3 and replay.batches == 1
    with pytest.raises(NotEnoughRows) as e:
        ExperienceReplay(bs=4, replacement=True).sample()
    assert '4 are missing' not in str(e.value)  # one row is enough


# ---- memory in time order ----


@cases(60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12), st.data())
def test_memory_reads_like_the_list_of_the_last_rows(sizes, max_sz, data):
    "Indices, slices, masks, arrays of places, iteration, columns; also blocks beyond the memory"
    replay, naive = ExperienceReplay(bs=1, max_sz=max_sz), []
    for b in in_blocks(*sizes):
        first = len(naive)
        naive += rewards(b)
        assert replay.add(b).tolist() == list(range(first, len(naive)))
    kept, m = naive[-max_sz:], replay.memory
    n = len(kept)
    assert len(replay) == len(m) == n
    assert m.reward.tolist() == m.keys.tolist() == [int(s.reward) for s in m] == kept
    i = data.draw(st.integers(-n, n - 1))
    cut = data.draw(st.slices(n))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    places = data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=5))
    assert rewards(m[i]) == [kept[i]]
    assert rewards(m[cut]) == kept[cut]
    assert rewards(m[mask]) == [k for k, keep in zip(kept, mask) if keep]
    assert rewards(m[places]) == rewards(m[torch.tensor(places)]) == [kept[p] for p in places]
    with pytest.raises(IndexError):
        m[n]


# ---- what is not taken ----


def other(**columns):
    b = numbered(4, 100)
    for n, v in columns.items():
        b.rows[n] = v
    return b


dtype = numbered(1).rows.dtype
BAD = {
    'NaN state in the last row': lambda: other(state=[[0, 0]] * 3 + [[0, np.nan]]),
    'negative env_id in the last row': lambda: other(env_id=[0, 0, 0, -1]),
    'new env_id, then NaN': lambda: other(env_id=[0, 900, 901, 902], reward=[0, 0, 0, np.nan]),
    'two dimensions': lambda: Steps(numbered(4).rows.reshape(2, 2)),
    'a column more': lambda: with_columns(numbered(4), logp=np.zeros(4)),
    'no Steps': lambda: numbered(4).rows,
}


@pytest.mark.parametrize('name', BAD)
@pytest.mark.parametrize('n', [3, 9], ids=['partly full', 'wrapped'])
def test_a_bad_block_changes_nothing(name, n):
    "Memory, sampler, counters and the next batches are those of a twin that never saw it"
    replay, twin = (ExperienceReplay(bs=2, max_sz=6, seed=0) for _ in range(2))
    for r in replay, twin:
        r.add(numbered(n))
        r.sample()
    with pytest.raises((BlockError, TypeError)) as e:
        replay.add(BAD[name]())
    assert 'report this' not in str(e.value)  # a later check says that the first one missed it
    assert same(everything(replay), everything(twin))
    for r in replay, twin:
        r.add(numbered(5, n))
    assert draws(replay, 20) == draws(twin, 20)
    assert replay.memory[:] == twin.memory[:]


def test_a_bad_block_in_the_stream_stops_it_with_the_columns_name():
    "NaN names row, column and environment; the good blocks before it are there"
    replay = ExperienceReplay(
        [numbered(4), other(next_state=[[0, 0], [0, 0], [np.nan, 0], [0, 0]])], bs=1
    )
    with pytest.raises(BlockError, match="row 2 of the block has a NaN in column 'next_state'"):
        take(replay, 5)
    assert len(replay) == 4


def test_a_second_pass_keeps_the_memory():
    "A list begins again, a stepper goes on, rows that were added with `add` stay"
    replay = ExperienceReplay(in_blocks(2, 3), bs=1, max_sz=50, seed=0)
    replay.add(numbered(2, 100))
    list(replay)
    list(replay)
    assert rewards(replay.memory[:]) == [100, 101, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    scripts = [script(3, -2), script(4, env=1)]
    envs = [ScriptedEnv(**s) for s in scripts]
    replay = ExperienceReplay(GymStepper(envs, zeros), bs=1, max_sz=99, seed=0)
    for n in 1, 4, 5:
        take(replay, n)
    assert replay.memory[:] == Steps.cat(scripted_steps(scripts, 10))


# ---- the arrow back ----


def test_stale_keys_are_left_out_and_counted_and_unknown_ones_are_errors():
    "Overwritten rows are no mistake of the learner's; keys that were never given out are"
    replay = filled(4, bs=4)
    batch = replay.sample()
    replay.add(numbered(3, 4))
    batch.update_priorities(torch.ones(4))
    assert replay.stale == replay.stats()['stale'] == 3
    for keys in [7], [3, 99], [-1], [2**40]:
        with pytest.raises(StaleKey, match=f'key {keys[-1]} was never given out'):
            replay.update_priorities(keys, np.ones(len(keys)))
    assert replay.stale == 3
    with pytest.raises(TypeError, match='integers'):
        replay.update_priorities([3.5], [1])


def test_wrong_answers_are_refused():
    "Too many, too few, a batch from a file, a block that never was in a replay"
    batch = filled(8).sample()
    for td in [1.0], np.ones(5):
        with pytest.raises(ValueError, match='ExperienceReplay: update_priorities.*expected 4'):
            batch.update_priorities(td)
    for lost in pickle.loads(pickle.dumps(batch)), numbered(4):
        with pytest.raises(TypeError, match='not drawn from a replay'):
            lost.update_priorities(torch.ones(4))


def test_answers_reach_the_replay_that_was_asked():
    "Two replays, two batches: each answer goes home"
    a, b = filled(4), filled(4)
    x, y = a.sample(), b.sample()
    a.add(numbered(4, 4))
    x.update_priorities(np.ones(4))
    y.update_priorities(np.ones(4))
    assert (a.stale, b.stale) == (4, 0)


# ---- stats ----


@cases(40)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=25),
    st.integers(4, 15),
)
def test_stats_are_what_a_recount_gives(events, max_sz):
    "Rows in, batches out, ages and times drawn, against lists; saved and restored half-way"
    replay = ExperienceReplay(bs=4, max_sz=max_sz, seed=1)
    drawn, ages, inserted, batches = {}, [], 0, 0
    for n, (rows, bs) in enumerate(events):
        replay.add(numbered(rows, inserted))
        inserted += rows
        if 0 < bs <= len(replay):
            for k in replay.sample(bs).index.tolist():
                drawn[k] = drawn.get(k, 0) + 1
                ages.append(inserted - k)
            batches += 1
        if n == len(events) // 2:
            state, replay = everything(replay), ExperienceReplay(bs=4, max_sz=max_sz, seed=1)
            replay.load_state_dict(state)
    here = [times for k, times in drawn.items() if k >= inserted - max_sz]
    assert replay.stats() == dict(
        inserted=inserted,
        evicted=max(0, inserted - max_sz),
        sampled=len(ages),
        batches=batches,
        stale=0,
        fill=min(inserted, max_sz) / max_sz,
        age_mean=pytest.approx(np.mean(ages or [0])),
        age_max=max(ages, default=0),
        drawn_mean=pytest.approx(np.mean(here or [0])),
        drawn_max=max(here, default=0),
    )


# ---- saving, pickling, showing ----


@pytest.mark.parametrize(
    'kw',
    [
        dict(bs=3, ratio=0.7, warmup=5),
        dict(bs=7, max_sz=7, ratio=2.5),
        dict(bs=9, replacement=True, return_idxs=True),
    ],
    ids=str,
)
@pytest.mark.parametrize('k', [0, 1, 9])
def test_a_restored_pipeline_gives_the_same_batches(kw, k):
    "Environments, memory, sampler and due batches go through a file, also in mid-block"

    def make(seed):
        steps = GymStepper(['CartPole-v1'] * 2, seed=3)
        return steps.experience_replay(**{**dict(max_sz=12, seed=seed), **kw})

    a, b = make(3), make(99)
    it = iter(a)
    for _ in range(k):
        next(it)
    b.load_state_dict(everything(a))
    for x, y in zip(take(it, 12), take(b, 12)):
        assert same(x, y)
    assert a.stats() == b.stats()


def test_a_state_is_a_copy_and_may_be_loaded_over_another():
    "Loading replaces rows, columns and counters; keys that were given out are not given out again"
    a = filled(7, max_sz=10)
    state = a.state_dict()
    kept = everything(a)
    want = draws(a, 5)
    a.add(numbered(9, 7))
    a.sample()
    assert same(state, kept)
    b = ExperienceReplay(bs=4, max_sz=10)
    b.add(Steps.cat(steps(8)))
    b.sample()
    b.load_state_dict(state)
    assert draws(b, 5) == (np.array(want) + 20).tolist()
    assert rewards(b.memory[:]) == list(range(7))
    assert b.add(numbered(2, 7)).tolist() == [27, 28]
    assert same(state, kept)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    "More rows than there is room for, and states of other stages"
    a, twin = filled(7, max_sz=10), filled(7, max_sz=10)
    for other in GymStepper('CartPole-v1'), filled(11):
        with pytest.raises(ValueError):
            a.load_state_dict(other.state_dict())
    assert draws(a, 5) == draws(twin, 5)


@pytest.mark.parametrize('n', [7, 27])
@pytest.mark.parametrize('max_sz', [10, 13])
def test_a_state_loads_into_a_larger_memory(n, max_sz):
    "Keys, rows and windows stay, and rows that come later are linked to them"
    old, new = filled(n, max_sz=10), ExperienceReplay(bs=4, max_sz=max_sz)
    new.load_state_dict(through_file(old.state_dict()))
    assert new.memory[:] == old.memory[:]
    assert new.add(numbered(9, n))[0] == n
    keys = np.arange(max(n + 9 - max_sz, old.memory.oldest, 0), n + 9)
    assert new.memory.keys.tolist() == rewards(new.memory[:]) == keys.tolist()
    windows = new.memory.windows(new.memory.keys, 4)
    assert windows.reward[windows.mask].tolist() == [
        k + t for k in keys for t in range(4) if k + t < n + 9
    ]


@pytest.mark.parametrize('by', [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize('kind', KINDS, ids=lambda k: k.__name__)
def test_copies_keep_the_rows(kind, by):
    "Also after a wrap, with priorities; the copy and the original go on apart"
    replay = kind(max_sz=30, seed=0, **KINDS[kind])
    replay.add(numbered(47))
    batch = replay.sample()
    batch.update_priorities(batch.reward)
    twin = by(replay)
    assert same(twin.state_dict(), replay.state_dict())
    for r in replay, twin:
        r.add(numbered(5, 47))
        r.sample()
    assert same(twin.state_dict(), replay.state_dict())
    twin.add(numbered(3, 52))
    assert twin.memory.inserted == 55 and replay.memory.inserted == 52


def test_the_repr_shows_the_chain_and_the_fill():
    "One stage a line, and how much is in memory"
    replay = GymStepper(['CartPole-v1'] * 8, seed=0).experience_replay(
        bs=256, max_sz=1000, ratio=0.5
    )
    replay.add(next(iter(GymStepper(['CartPole-v1'] * 8))))
    assert (
        repr(replay) == "GymStepper(['CartPole-v1']*8, seed=0)\n"
        "  .experience_replay(bs=256, max_sz=1000, ratio=0.5)  # 8 of 1000 rows" == str(replay)
    )
    assert len(repr(replay.header(3)).splitlines()) == 3


# ---- in a DataLoader, in a loop ----


@pytest.mark.parametrize('workers', [0, 1])
def test_the_whole_pipeline_in_a_dataloader(workers):
    "The batches are the pipe's own; batches from another process cannot return TD errors"

    def make():
        steps = GymStepper(['CartPole-v1'] * 2, seed=0)
        return steps.prioritized_replay(bs=4, max_sz=50, ratio=0.7, seed=0).header(9)

    got = list(DataLoader(make(), batch_size=None, num_workers=workers))
    assert got == list(make()) and len(got) == 9
    if workers:
        with pytest.raises(TypeError, match='in this process'):
            got[0].update_priorities(torch.ones(4))
    else:
        got[0].update_priorities(torch.ones(4))


def test_it_reads_like_the_promise():
    "for batch in pipe: learn, update_priorities"
    net = torch.nn.Linear(4, 2)
    pipe = GymStepper(
        gym.make_vec('CartPole-v1', 4), policy=lambda s: net(s).argmax(1), seed=0
    ).experience_replay(bs=16, max_sz=1000, warmup=32, seed=0)
    for batch in pipe:
        q = net(batch.state).gather(1, batch.action[:, None])[:, 0]
        td = batch.reward + 0.9 * net(batch.next_state).max(1).values * (~batch.terminated) - q
        (batch.weight * td**2).mean().backward()
        batch.update_priorities(td)
        if pipe.batches == 21:
            break
    assert net.weight.grad.abs().sum() > 0


def test_batches_are_copies():
    "Writing into a batch, or into a block after it was added, changes no row in memory"
    replay, block = ExperienceReplay(bs=4, max_sz=9, seed=0), numbered(6)
    replay.add(block)
    block.reward.zero_()
    a, b = replay.sample(), replay.sample()
    assert not np.shares_memory(a.rows, b.rows)
    a.rows.view(np.uint8)[:] = 255
    replay.memory[:].reward.zero_()
    assert rewards(replay.memory[:]) == list(range(6))


def test_columns_that_batches_need_are_not_taken_twice():
    "A policy's column named like a batch's own is refused with its name"
    pipe = GymStepper(
        'CartPole-v1', policy=lambda s: dict(action=zeros(s), index=s[:, 0])
    ).experience_replay()
    # was: numpy's "name already used as a name or title", when the first batch is drawn
    with pytest.raises(ValueError, match="'index'"):
        take(pipe, 1)


# ---- rows that a replay has drawn ----

NOT_AFTER = {  # what takes steps as they come, and nothing else
    'NStep': lambda p: p.n_step(2, 0.9),
    'NSkip': lambda p: p.n_skip(2),
    'SequenceChunker': lambda p: p.chunk_sequences(2),
    'Journal': lambda p: p.journal(),
    'ExperienceReplay': lambda p: p.experience_replay(bs=2, max_sz=9, seed=0),
    'PrioritizedReplay': lambda p: p.prioritized_replay(bs=2, max_sz=9, seed=0),
    'SequenceReplay': lambda p: p.sequence_replay(
        bs=1, max_sz=9, length=2, burn_in=0, overlap=0, seed=0
    ),
}


@pytest.mark.parametrize('name', NOT_AFTER)
def test_what_takes_steps_refuses_batches(name):
    "Rows of many episodes in any order would look like episodes that broke off"
    batches = Items(steps()).experience_replay(bs=4, max_sz=50, seed=0)
    says = f"^{name}: column 'index'; got one that is there already.*put it before the replay"
    with pytest.raises(BlockError, match=says):
        list(NOT_AFTER[name](batches))
    sequences = Items(steps()).sequence_replay(
        bs=2, max_sz=50, length=2, burn_in=0, overlap=0, seed=0
    )
    with pytest.raises(BlockError, match=rf'^{name}: .*got shape \[2, 2\]; expected shape \[n\]'):
        list(NOT_AFTER[name](sequences))


def test_rows_go_from_one_memory_to_another_without_their_keys():
    "The error says how; keys of one memory mean nothing in another"
    one, other = filled(20, bs=4), ExperienceReplay(bs=4, max_sz=20, seed=0)
    batch = one.sample()
    with pytest.raises(BlockError, match=r"column 'index'.*memory.take\(batch.index\)"):
        other.add(batch)
    assert other.add(one.memory.take(batch.index)).tolist() == [0, 1, 2, 3]
    assert rewards(other.memory[:]) == batch.index.tolist()


# ---- the contract of every stage ----

BOX, ACTIONS = spaces.Box(-9, 9, (2,)), spaces.Discrete(3)


def numbered_states(steps):
    "The same steps with numbers for states, as tables want them"
    if not isinstance(steps, Steps):
        return steps
    rows = np.zeros(len(steps), step_dtype(spaces.Discrete(200), ACTIONS))
    for n in rows.dtype.names:
        rows[n] = steps.rows[n][:, 1] if n in ('state', 'next_state') else steps.rows[n]
    return Steps(rows)


TORQUE = spaces.Box(-2, 6, (1,))


def torques(steps):
    "The same steps with numbers within bounds for actions"
    if not isinstance(steps, Steps):
        return steps
    rows = np.zeros(len(steps), step_dtype(BOX, TORQUE))
    for n in rows.dtype.names:
        rows[n] = steps.rows[n][:, None] if n == 'action' else steps.rows[n]
    return Steps(rows)


def odd_steps(steps):
    return bool(steps.step_n[0] % 2)


def scaled(source):
    rewards = RewardNorm(0.9)
    replay = source.update_norms(rewards=rewards).experience_replay(bs=2, max_sz=20, seed=0)
    return replay.scale_rewards(rewards)


def net(kind, *args):
    "A network that is the same each time"
    torch.manual_seed(0)
    return kind(BOX, ACTIONS, *args)


def steered(spread):
    "An actor and critics that are the same each time, and their actions' space"
    torch.manual_seed(0)
    return actor_net(BOX, TORQUE, (4,), spread), Critics(BOX, TORQUE, (4,)), TORQUE


GOAL = spaces.Box(-np.inf, np.inf, (1,), np.float32)
WITH_GOALS = step_dtype(spaces.Dict(achieved_goal=GOAL, desired_goal=GOAL), ACTIONS)


def nearness(achieved, desired, info):
    return -abs(achieved - desired)[:, 0]


def with_goals(steps):
    "The first number of a state is what was achieved, and the second one wanted"
    if not isinstance(steps, Steps):
        return steps
    rows = np.zeros(len(steps), WITH_GOALS)
    for n in rows.dtype.names:
        if n not in ('state', 'next_state'):
            rows[n] = steps.rows[n]
            continue
        rows[n]['achieved_goal'], rows[n]['desired_goal'] = steps.rows[n][:, :1], 7
    rows['reward'] = nearness(
        rows['next_state']['achieved_goal'], rows['next_state']['desired_goal'], {}
    )
    return Steps(rows)


def as_arrays(steps):
    "A block as recorded arrays"
    return {
        n: steps.rows[n]
        for n in ('state', 'action', 'reward', 'next_state', 'terminated', 'truncated')
    }


SEQUENCES = dict(bs=2, max_sz=30, length=4, burn_in=1, overlap=2, seed=0)


# how to build each stage on a source, or from nothing; every @stage class of the package is here
ALONE = Ranks(alone=1)
CONTRACT = {
    'Map': [lambda source: source.map(numbered_states)],
    'Filter': [lambda source: source.filter(odd_steps)],
    'Header': [lambda source: Header(source, 20)],
    'Cycler': [lambda source: Header(Cycler(source), 50)],
    'InMemoryCacheHolder': [],  # holds its source by design and reads it anew
    'GymStepper': [
        lambda: GymStepper(['CartPole-v1'] * 3, seed=0),
        lambda: Items(['CartPole-v1'] * 2).map(gym.make).in_memory_cache().cycle().gym_step(seed=0),
    ],
    'NStep': [lambda source: NStep(source, 1, 0.9), lambda source: NStep(source, 3, 0.9)],
    'NSkip': [lambda source: NSkip(source, 3)],
    'SequenceChunker': [
        lambda source: SequenceChunker(source, length=3, overlap=2),
        lambda source: SequenceChunker(source, length=2, tail='pad'),
        lambda source: SequenceChunker(source, length=2, overlap=1, tail='drop'),
    ],
    'ExperienceReplay': [
        lambda source: ExperienceReplay(source, bs=2, max_sz=20, ratio=0.7, warmup=5, seed=0),
        lambda source: ExperienceReplay(
            source, bs=5, max_sz=6, replacement=True, return_idxs=True, ratio=1.5, seed=0
        ),
    ],
    'SequenceReplay': [
        lambda source: SequenceReplay(source, **SEQUENCES),
        lambda source: SequenceReplay(source, prioritized=False, state='zero', **SEQUENCES),
    ],
    'HindsightReplay': [
        lambda source: HindsightReplay(source.map(with_goals), max_sz=20, seed=0, reward=nearness),
        lambda source: HindsightReplay(
            source.map(with_goals), bs=5, max_sz=6, seed=0, reward=nearness, ratio=1.5, warmup=7
        ),
    ],
    'PrioritizedReplay': [
        lambda source: PrioritizedReplay(source, max_sz=20, kind='rank', bs=2, seed=0),
        lambda source: PrioritizedReplay(
            source, bs=5, max_sz=6, ratio=1.5, weight_norm='memory', initial='reward', seed=0
        ),
    ],
    'Parallel': [
        lambda: (
            GymStepper(['CartPole-v1'] * 2, seed=0)
            .n_step(2, 0.9)
            .parallel(2, chunk=2, method='fork')
        ),
        lambda: GymStepper('CartPole-v1', seed=0).parallel(0),
    ],
    'Journal': [Journal],
    'Episodes': [lambda source: source.map(as_arrays).episodes()],
    'Gather': [lambda source: Gather(source, 2)],
    'UpdateNorms': [
        lambda source: UpdateNorms(source, StateNorm(spaces.Box(-9, 9, (2,))), RewardNorm(0.9))
    ],
    'ScaleRewards': [scaled],
    'QLearner': [
        lambda source: QLearner(source.map(numbered_states), QTable(spaces.Discrete(200), ACTIONS))
    ],
    'DQNLearner': [
        lambda source: PrioritizedReplay(NStep(source, 2, 0.9), bs=2, max_sz=20, seed=0).dqn(
            net(value_net, (8,), True), target_every=3, tau=0.5
        )
    ],
    'R2D2Learner': [
        lambda source: SequenceReplay(source, **SEQUENCES).r2d2(
            net(RecurrentNet, 4), n=2, target_every=3
        )
    ],
    'SACLearner': [
        lambda source: PrioritizedReplay(source.map(torques), bs=2, max_sz=20, seed=0).sac(
            *steered(True), lr=LinearSchedule(1e-2, 1e-3, 20), seed=0
        )
    ],
    'TD3Learner': [
        lambda source: ExperienceReplay(
            NStep(source.map(torques), 2, 0.9), bs=2, max_sz=20, seed=0
        ).td3(*steered(False), actor_every=3, seed=0)
    ],
    'Prefetch': [
        lambda source: Prefetch(
            PrioritizedReplay(source, bs=2, max_sz=20, ratio=0.7, warmup=5, seed=0), 3
        ),
        lambda source: Prefetch(SequenceReplay(source, ratio=1.5, **SEQUENCES), 2, 'cpu'),
        lambda source: Prefetch(
            PrioritizedReplay(NStep(source, 2, 0.9), bs=2, max_sz=20, seed=0)
        ).dqn(net(value_net, (8,)), target_every=3),
    ],
    'Rounds': [lambda source: Rounds(source, ALONE, rows=2)],
    'RankWeights': [
        lambda source: ALONE.sync(
            PrioritizedReplay(Rounds(source, ALONE, rows=2), bs=2, seed=0).rank_weights(ALONE)
        )
    ],
}


def stages():
    "All stage classes of the package, whichever module they are in"
    modules()
    return {
        f.stage
        for f in vars(Pipe).values()
        if getattr(f, 'stage', None)
        and f.stage.__module__.startswith('fastrl_replay.')
        and f.stage.__name__ not in ('StatefulPipe', 'PipeNode', 'Offline')
    }  # what a chain becomes there is no pipe; and a replay for `.offline` has no source


def test_every_stage_is_in_the_table():
    "A new stage needs a factory in CONTRACT"
    assert {s.__name__ for s in stages()} == set(CONTRACT)
    assert (
        all(issubclass(s, Pipe) and callable(getattr(Pipe, s.stage_name)) for s in stages())
        and InMemoryCacheHolder in stages()
    )


SLOW = 'Parallel', 'DQNLearner', 'R2D2Learner', 'SACLearner', 'TD3Learner', 'Prefetch'


@pytest.mark.parametrize(
    'name,i',
    [
        pytest.param(name, i, marks=[pytest.mark.slow] * (name in SLOW))
        for name, makers in CONTRACT.items()
        for i in range(len(makers))
    ],
)
def test_every_stage_keeps_the_contract(name, i):
    "One check for all"
    assert check_contract(CONTRACT[name][i])['items'] > 0


def test_exact_blocks_copy_each_row_once():
    "A large block is not copied for each small one that leaves it"
    import tracemalloc

    blocks = iter(Gather([numbered(20_000), numbered(10, 20_000)], n=10, exact=True))
    first = next(blocks)
    tracemalloc.start()
    try:
        second = next(blocks)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert rewards(first) + rewards(second) == list(range(20))
