"""ExperienceReplay: fill, evict, draw, count, answer, save; and the contract of every stage."""

import copy, io, pickle
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
from fastrl_replay.learning.learners import DQNLearner, QLearner, QTable, SACLearner, TD3Learner
from fastrl_replay.stages.nstep import NSkip, NStep
from fastrl_replay.stages.normalisation import RewardNorm, StateNorm, UpdateNorms
from fastrl_replay.pipe import Items, Pipe
from fastrl_replay.generic import Cycler, Header, InMemoryCacheHolder
from fastrl_replay.learning.networks import RecurrentNet, value_net
from fastrl_replay.learning.policies import LinearSchedule
from fastrl_replay.parallel.prefetch import Prefetch
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
from scripted import draws, everything, in_blocks, modules, numbered, seed_002, take, zeros


def filled(n, bs=4, max_sz=None, **kw):
    "A replay with rows 0 to n-1 added"
    replay = ExperienceReplay(bs=bs, max_sz=max_sz or n, **{'seed': 0, **kw})
    replay.add(numbered(n))
    return replay


def steps(n=10):
    return scripted_steps([script(3, -2, 1), script(1, 4, -1, env=1)], n)


def rewards(steps):
    return [int(r) for r in steps.reward.reshape(-1)]


def through_torch(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


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
    "Filling, wrapping, renewing: 0, 10, 20, 30, 40 steps in a memory of 20, and always the stepper's last 20 rows"
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


def test_zip_with_the_pipe_first_takes_one_block_more():
    "Seed 002 zips both ways round; the pipe first costs one step, as it would with any iterator"
    _, replay = seed_002(['CartPole-v1'], 10, max_sz=20)
    _ = [step for step, _ in zip(*(replay, range(10)))]
    assert replay.memory.inserted == 21


def test_batches_of_seed_002_are_distinct_and_cover_everything():
    "300 of 1000 without a repetition; 150 draws of one from 30 reach all but the few that chance leaves out, 600 reach all"
    steps, replay = seed_002(['CartPole-v1'], 400, bs=300, max_sz=1000)
    assert all(len(set(b.index.tolist())) == 300 for b in steps)
    _, replay = seed_002(['CartPole-v1'], 200, bs=1, max_sz=30, return_idxs=True)
    hits = [int(replay.sample()[1][0]) for _ in range(600)]
    assert len(set(hits[:150])) >= 28 and set(hits) == set(range(30))


def test_what_seeds_001_and_004_ask_for():
    "Fixed size, first in first out, and separate tensors per column with the spaces' types, on one piece of memory"
    replay = filled(10, bs=3, max_sz=7)
    assert len(replay) == 7 and rewards(replay.memory[:]) == [3, 4, 5, 6, 7, 8, 9]
    b = replay.sample()
    assert [
        (t.dtype, tuple(t.shape)) for t in (b.state, b.action, b.reward, b.next_state, b.done)
    ] == [
        (torch.float32, (3, 2)),
        (torch.int64, (3,)),
        (torch.float32, (3,)),
        (torch.float32, (3, 2)),
        (torch.bool, (3,)),
    ]
    b.reward[0] = -5
    assert (
        b.rows['reward'][0] == -5 and min(rewards(replay.memory[:])) == 3
    )  # a view of the batch, a copy of the memory


# ---- how many batches, and when ----


class Watched:
    "A source of numbered rows that notes, before each block but the first, how many batches are out"

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
    "After every block: ⌊rows·ratio⌋, or one a block; any sizes, warm-ups, memories, however often iteration is broken off"
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
    # where iteration is broken off, torch's hook closes the source's generator between a block and its note
    assert replay.batches == want[-1]
    if not passes:
        assert seen == want


@pytest.mark.parametrize(
    'ratio,rows,batches',
    [
        (0.29, 100, 29),
        (0.57, 100, 57),
        (1.1, 10, 11),
        (1 / 3, 999, 333),
        (2 / 3, 3, 2),
        (1e-6, 2_000_000, 2),
        (2.5e-7, 8_000_000, 2),
    ],
)
def test_ratios_are_exact_over_a_long_time(ratio, rows, batches):
    "Where floating point would be one short, and where batches are rare"
    replay = ExperienceReplay([], ratio=ratio, bs=1, max_sz=100)
    replay.add(numbered(10))
    replay._counted = rows  # as if so many had come in
    # was: `limit_denominator(1_000_000)` makes 0 of a ratio below 5e-7
    for _ in replay:
        pass  # yields the batches that are due
    assert replay.batches == batches


@pytest.mark.parametrize(
    'ratio',
    [np.float64(0.5), np.float32(0.5), Fraction(1, 2), torch.tensor(0.5)],
    ids=lambda r: type(r).__name__,
)
def test_a_ratio_may_be_any_real_number(ratio):
    "numpy's and Python's kinds of numbers"
    # was: np.float32 and tensors pass the constructor and fail in the middle: "argument should be a string or a Rational"
    assert watched([2, 2, 3], ratio=ratio, bs=1, max_sz=9)[0] == [1, 2, 3]


@pytest.mark.parametrize(
    'kw,says',
    [
        (dict(bs=0), 'bs'),
        (dict(bs=-1), 'bs'),
        (dict(bs=101), '1 <= bs <= max_sz'),
        (dict(max_sz=0), 'max_sz'),
        (dict(ratio=-0.1), 'ratio'),
        (dict(ratio=float('nan')), 'ratio'),
        (dict(ratio=float('inf')), 'ratio'),  # was: accepted, OverflowError while iterating
        (dict(bs=1.5), 'bs'),
        (dict(warmup=-3), 'warmup'),
    ],
    ids=str,
)  # was: a bare TypeError of numpy's; accepted
def test_wrong_numbers_are_refused_at_once(kw, says):
    "The constructor says which argument is wrong"
    with pytest.raises((ValueError, TypeError), match=f'ExperienceReplay.*{says}'):
        ExperienceReplay(**{**dict(max_sz=100), **kw})


@pytest.mark.parametrize(
    'warmup,first', [(None, 3), (0, 3), (1, 3), (3, 3), (4, 4), (9, 9), (10, 10), (11, 11)]
)
def test_the_first_batch_comes_with_the_last_row_of_the_warm_up(warmup, first):
    "Not one row earlier or later; warm-ups longer than the memory work"
    replay = ExperienceReplay(in_blocks(*[1] * 12), bs=3, max_sz=5, warmup=warmup, seed=0)
    next(iter(replay))
    assert replay.memory.inserted == first


def test_warm_up_rows_pay_for_nothing():
    "ratio counts the rows after the warm-up only, also in the block in which it ends"
    assert watched([4, 4, 4, 4], ratio=Fraction(1, 2), warmup=6, bs=1, max_sz=9)[0] == [0, 1, 3, 5]
    assert watched([10, 10], ratio=1, warmup=10, bs=1, max_sz=9)[0] == [0, 10]


def test_freezing_and_thawing():
    "While it is frozen blocks pass and batches come; memory, keys and counters stand still; thawed, it goes on"
    replay = ExperienceReplay(Items(in_blocks(*[2] * 30)), bs=2, max_sz=10, seed=0, ratio=1)
    it = iter(replay)
    for _ in range(6):
        next(it)
    replay.freeze_memory = True
    before, n = replay.memory[:].copy(), replay.memory.inserted
    for _ in range(20):
        assert set(next(it).index.tolist()) <= set(range(n))
    assert replay.memory[:] == before and replay.memory.inserted == n == 6 and replay.batches == 26
    replay.freeze_memory = False
    for _ in range(4):
        next(it)
    assert replay.memory.inserted == 10 and rewards(replay.memory[-4:]) == [26, 27, 28, 29]


def test_a_frozen_memory_that_is_too_small_says_why():
    "Too few rows, or a warm-up that can never end"
    with pytest.raises(
        NotEnoughRows, match='ExperienceReplay: the memory is frozen.*got 0; expected 2 rows'
    ):
        take(ExperienceReplay(in_blocks(1, 1), bs=2, freeze_memory=True), 1)
    replay = ExperienceReplay(in_blocks(1, 1), bs=2, warmup=9, freeze_memory=True)
    replay.add(numbered(5))
    # was: says "got 5; expected 2 rows" where it is the warm-up of 9 that is not over
    with pytest.raises(NotEnoughRows, match='warmup|9 rows'):
        take(replay, 1)


FILLED = dict(
    by_hand=lambda r: [r.add(b) for b in steps()],
    loaded=lambda r: r.load_state_dict(through_file(passed(type(r)).state_dict())),
)
KINDS = {
    ExperienceReplay: dict(bs=2),
    PrioritizedReplay: dict(bs=2),
    SequenceReplay: dict(bs=2, length=2, burn_in=0, overlap=0),
}


def passed(kind):
    "A replay whose source has passed"
    r = kind(steps(), max_sz=50, seed=0, **KINDS[kind])
    for _ in r:
        pass
    return r


@pytest.mark.parametrize('kw', [{}, dict(freeze_memory=True), dict(ratio=0.5, warmup=3)], ids=str)
@pytest.mark.parametrize('how', FILLED)
@pytest.mark.parametrize('kind', KINDS, ids=lambda k: k.__name__)
def test_a_filled_replay_without_a_source_draws_for_ever(kind, how, kw):
    "Offline learning; an empty source ends at once, and one that has too few rows says so"
    r = kind(max_sz=50, seed=0, **KINDS[kind], **kw)
    with pytest.raises(NotEnoughRows):
        next(iter(r))
    FILLED[how](r)
    assert len(take(r, 30)) == len(take(r.header(30), 40)) == 30 and len(r.memory) == 20
    empty = kind([], max_sz=50, seed=0, **KINDS[kind], **kw)
    FILLED['by_hand'](empty)
    assert list(empty) == [] and len(empty.sample()) == 2


@pytest.mark.parametrize('kind', KINDS, ids=lambda k: k.__name__)
def test_a_replay_whose_source_has_passed_waits_for_the_next_pass(kind):
    "A list begins again with each pass; what was loaded goes on at the end of its source"
    r = passed(kind)
    n = r.batches
    for _ in r:
        pass
    assert r.memory.inserted == 40 and r.batches > n
    fresh = kind(steps(), max_sz=50, seed=0, **KINDS[kind])
    fresh.load_state_dict(r.state_dict())
    for _ in fresh:
        pass
    assert fresh.memory.inserted == 60


# ---- drawing ----


def uniform(counts, bs, replacement):
    "Is a table of counts what a uniform draw gives? Without replacement counts vary less, by (N-bs)/(N-1)"
    n, mean = len(counts), counts.mean()
    stat = ((counts - mean) ** 2).sum() / mean / (1 if replacement else (n - bs) / (n - 1))
    return 1e-3 < chi2.sf(stat, n - 1) < 1 - 1e-3


@pytest.mark.parametrize('bs', [1, 4, 20, 29, 39])
@pytest.mark.parametrize('inserted', [40, 55, 1000], ids=['just full', 'wrapped', 'many rounds'])
@pytest.mark.parametrize('replacement', [False, True])
def test_every_row_is_as_likely_as_any_other_at_capacity(bs, inserted, replacement):
    "Chi-square over rows, over the rows in the first place, and over pairs of neighbours in a batch"
    replay = filled(inserted, bs=bs, max_sz=40, replacement=replacement)
    keys = np.array(draws(replay, 4000)) - (inserted - 40)
    assert keys.min() >= 0 and keys.max() < 40
    assert uniform(np.bincount(keys.ravel(), minlength=40), bs, replacement)
    assert uniform(np.bincount(keys[:, 0], minlength=40), 1, False)
    assert uniform(np.bincount(keys[:, -1], minlength=40), 1, False)
    if bs > 1:  # the distance of the first two is uniform too (without replacement never 0)
        distance = np.bincount((keys[:, 0] - keys[:, 1]) % 40, minlength=40)
        assert uniform(distance if replacement else distance[1:], 1, False) and (
            replacement or distance[0] == 0
        )


@pytest.mark.parametrize('rows', [5, 17, 33])
@pytest.mark.parametrize('bs', [1, 5])
def test_and_below_capacity(rows, bs):
    "Of the rows that are there, none of those that are not"
    if rows == bs:
        bs = 2
    keys = np.array(draws(filled(rows, bs=bs, max_sz=40), 4000))
    assert keys.max() < rows and uniform(np.bincount(keys.ravel(), minlength=rows), bs, False)


def test_batches_are_distinct_unless_asked_otherwise():
    "A batch of the whole memory is a permutation of it; with replacement rows repeat, and it may be larger than the memory"
    replay = filled(20, bs=20)
    orders = {tuple(x) for x in draws(replay, 30)}
    assert all(sorted(o) == list(range(20)) for o in orders) and len(orders) == 30
    for bs in range(1, 21):
        assert all(len(set(d)) == bs for d in draws(replay, 20, bs))
    assert len(set(draws(filled(3, bs=50, replacement=True), 1)[0])) == 3


def test_seeds_decide_the_draws():
    "Equal seeds, equal batches; other seeds, and none, others; numpy's integers count"

    def made(seed, n=20):
        return draws(filled(1000, seed=seed), n)

    assert made(3) == made(3) == made(np.int64(3))
    assert len({str(made(s)) for s in (0, 1, 2, 3, None, None)}) == 6
    two = [np.array(made(s)).ravel() for s in (0, 1)]
    assert (two[0] == two[1]).mean() < 0.05
    global_state = np.random.get_state()[1].copy(), torch.random.get_rng_state()
    made(None)
    assert np.array_equal(np.random.get_state()[1], global_state[0]) and torch.equal(
        torch.random.get_rng_state(), global_state[1]
    )


def test_batches_carry_the_rows_that_their_index_names():
    "index, weight and every column, with the places that return_idxs gives, before and after wrapping"
    for n in 8, 10, 27:
        replay = filled(n, bs=4, max_sz=10, return_idxs=True)
        for _ in range(20):
            batch, idxs = replay.sample()
            assert rewards(batch) == batch.index.tolist() and batch.index.dtype == torch.int64
            assert batch.weight.tolist() == [1] * 4 and batch.weight.dtype == torch.float32
            assert replay.memory[idxs] == replay.memory.take(batch.index) and rewards(
                replay.memory[idxs]
            ) == rewards(batch)
            assert batch.rows.dtype.names[:-2] == replay.memory[:].rows.dtype.names
    assert [len(x) for x in take(ExperienceReplay(in_blocks(3, 3), bs=2, return_idxs=True), 2)] == [
        2,
        2,
    ]
    assert [len(replay.sample(n)[0]) for n in (1, 7, 10)] == [1, 7, 10]


def test_too_few_rows_are_counted():
    "What is there, what was asked for, what is missing"
    replay = filled(3, bs=4, max_sz=10)
    with pytest.raises(NotEnoughRows, match='got 3 rows; expected 4 rows: 1 is missing'):
        replay.sample()
    with pytest.raises(NotEnoughRows, match='got 3 rows; expected 9 rows: 6 are missing'):
        replay.sample(9)
    with pytest.raises(NotEnoughRows, match='got 0 rows'):
        ExperienceReplay().sample()
    for n in 0, -1:
        with pytest.raises(ValueError, match='ExperienceReplay: batch size'):
            replay.sample(n)
    assert len(replay.sample(3)) == 3 and replay.batches == 1
    # was: with replacement one row is enough, but 4 "are missing", and replacement=True is the remedy
    with pytest.raises(NotEnoughRows) as e:
        ExperienceReplay(bs=4, replacement=True).sample()
    assert '4 are missing' not in str(e.value) and 'or replacement=True' not in str(e.value)


# ---- memory in time order ----


@cases(60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12), st.data())
def test_memory_reads_like_the_list_of_the_last_rows(sizes, max_sz, data):
    "Indices, slices, masks, arrays of places, iteration, columns; blocks larger than the memory too"
    replay, naive = ExperienceReplay(bs=1, max_sz=max_sz), []
    for b in in_blocks(*sizes):
        first = len(naive)
        naive += rewards(b)
        assert replay.add(b).tolist() == list(range(first, len(naive)))
    kept, m = naive[-max_sz:], replay.memory
    n = len(kept)
    assert (
        len(replay) == len(m) == n and rewards(m[:]) == kept and [int(s.reward) for s in m] == kept
    )
    assert m.reward.tolist() == m['reward'].tolist() == kept and m.keys.tolist() == naive[-max_sz:]
    i = data.draw(st.integers(-n, n - 1))
    cut = data.draw(st.slices(n))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    places = data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=5))
    assert m[i].shape == () and rewards(m[i]) == [kept[i]]
    assert rewards(m[cut]) == kept[cut]
    assert (
        rewards(m[mask])
        == rewards(m[torch.from_numpy(mask)])
        == [k for k, keep in zip(kept, mask) if keep]
    )
    assert rewards(m[places]) == rewards(m[torch.tensor(places)]) == [kept[p] for p in places]
    for wrong in n, -n - 1:
        with pytest.raises(IndexError):
            m[wrong]


# ---- what is not taken ----


def other(**columns):
    b = numbered(4, 100)
    for n, v in columns.items():
        b.rows[n] = v
    return b


def many(dtype):
    return Steps(np.zeros(4, dtype))


dtype = numbered(1).rows.dtype
BAD = {
    'NaN state in the last row': lambda: other(state=[[0, 0]] * 3 + [[0, np.nan]]),
    'NaN reward in the first row': lambda: other(reward=[np.nan, 0, 0, 0]),
    'negative env_id in the last row': lambda: other(env_id=[0, 0, 0, -1]),
    'absurd env_id': lambda: other(env_id=[0, 0, 0, 2**30]),
    'new env_id, then NaN': lambda: other(env_id=[0, 900, 901, 902], reward=[0, 0, 0, np.nan]),
    'two dimensions': lambda: Steps(numbered(4).rows.reshape(2, 2)),
    'other shape': lambda: many(step_dtype(spaces.Box(-1, 1, (3,)), spaces.Discrete(3))),
    'other type': lambda: many(step_dtype(spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3))),
    'a column more': lambda: many(
        step_dtype(spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3), logp='f4')
    ),
    'a column less': lambda: many(
        np.dtype([(n, dtype[n]) for n in dtype.names if n != 'reward'], align=True)
    ),
    'no counters': lambda: many(np.dtype([('state', 'f4')], align=True)),
    'packed': lambda: many(np.dtype([(n, dtype[n]) for n in dtype.names])),
    'no Steps': lambda: numbered(4).rows,
    'a dict': lambda: dict(state=1),
    'None': lambda: None,
}


@pytest.mark.parametrize('name', BAD)
@pytest.mark.parametrize('n', [0, 3, 9], ids=['empty', 'partly full', 'wrapped'])
def test_a_bad_block_changes_nothing(name, n):
    "Refused whole: memory, sampler, counters and the next batches are those of a twin that never saw it"
    if n == 0 and name in ('other shape', 'other type', 'a column more', 'a column less'):
        pytest.skip('an empty memory takes any columns')
    replay, twin = (ExperienceReplay(bs=2, max_sz=6, seed=0) for _ in range(2))
    if n:
        for r in replay, twin:
            r.add(numbered(n))
            r.sample()
    with pytest.raises((BlockError, TypeError)):
        replay.add(BAD[name]())
    assert (
        same(everything(replay), everything(twin))
        or n
        and same(
            {**everything(replay)['own'], 'memory': 0}, {**everything(twin)['own'], 'memory': 0}
        )
    )
    assert (
        len(replay) == len(twin)
        and replay.stats() == twin.stats()
        and (not n or replay.memory[:] == twin.memory[:])
    )
    # was: in an empty memory, a block of two dimensions leaves its columns behind, and other columns are refused
    again = numbered(5, n) if n else Steps.cat(scripted_steps([script(9), script(9, env=1)], 3))
    for r in replay, twin:
        r.add(again)
    assert draws(replay, 20) == draws(twin, 20) and replay.memory[:] == twin.memory[:]


def test_a_bad_block_in_the_stream_stops_it_with_the_columns_name():
    "NaN names row, column and environment; the good blocks before it are there"
    replay = ExperienceReplay(
        [numbered(4), other(next_state=[[0, 0], [0, 0], [np.nan, 0], [0, 0]])], bs=1
    )
    with pytest.raises(BlockError, match="row 2 of the block has a NaN in column 'next_state'"):
        take(replay, 5)
    assert len(replay) == 4


SOURCES = {
    'empty list': (lambda: [], 0),
    'list': (lambda: in_blocks(2, 3, 1), 6),
    'one block': (lambda: numbered(5), 5),
    'one row': (lambda: numbered(1)[0], 1),
    'generator': (lambda: (b for b in in_blocks(2, 3)), 5),
    'pipe': (lambda: Items(in_blocks(2, 3)), 5),
    'map and filter': (lambda: Items(in_blocks(2, 3, 4, 1)).map(_double).filter(_big), 14),
    'single rows': (lambda: list(numbered(7)), 7),
    'empty blocks': (lambda: [numbered(0), numbered(2), numbered(0)], 2),
}


def _double(b):
    return Steps.cat([b, b])


def _big(b):
    return len(b) > 5


@pytest.mark.parametrize('name', SOURCES)
def test_sources(name):
    "Whatever gives Steps, through torch's own stages too"
    make, n = SOURCES[name]
    replay = ExperienceReplay(make(), bs=1, max_sz=50, seed=0)
    batches = list(replay)
    assert (
        len(replay) == replay.memory.inserted == n
        and all(isinstance(b, Steps) for b in batches)
        and (len(batches) > 0) == (n > 0)
    )


def test_without_a_source_batches_come_for_ever():
    "From what is there; a memory that can't fill one says so"
    replay = ExperienceReplay(bs=2, max_sz=50, seed=0)
    with pytest.raises(NotEnoughRows, match='got 0 rows; expected 2 rows: 2 are missing'):
        next(iter(replay))
    replay.add(numbered(5))
    assert {k for b in take(replay, 40) for k in b.index.tolist()} == set(
        range(5)
    ) and replay.batches == 40


@pytest.mark.parametrize(
    'source',
    [[5], ['x'], [None], [dict(a=1)], [np.zeros(3)], [torch.zeros(3)], 'abc', [[numbered(2)]]],
    ids=str,
)
def test_items_that_are_no_steps_are_named(source):
    "A TypeError with the stage, what came and what was expected"
    with pytest.raises(
        TypeError, match='ExperienceReplay: an item of its source; got .*expected Steps'
    ):
        list(ExperienceReplay(source))


for_nothing = [5, 1.5, object()]


@pytest.mark.parametrize('source', for_nothing, ids=[type(s).__name__ for s in for_nothing])
def test_sources_that_give_nothing_are_refused_at_once(source):
    with pytest.raises(TypeError, match='source'):
        ExperienceReplay(source)


def test_a_second_pass_keeps_the_memory():
    "Restarting fills on: a list comes once more, a stepper goes on, rows that were added with `add` stay"
    replay = ExperienceReplay(in_blocks(2, 3), bs=1, max_sz=50, seed=0)
    replay.add(numbered(4, 100))
    list(replay)
    list(replay)
    assert rewards(replay.memory[:]) == [100, 101, 102, 103, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    scripts = [script(3, -2), script(4, env=1)]
    replay = ExperienceReplay(
        GymStepper([ScriptedEnv(**s) for s in scripts], zeros), bs=1, max_sz=99, seed=0
    )
    for n in 1, 4, 5:
        take(replay, n)
    assert replay.memory[:] == Steps.cat(scripted_steps(scripts, 10))


# ---- the arrow back ----


def test_stale_keys_are_left_out_and_counted_and_unknown_ones_are_errors():
    "Overwritten rows are no mistake of the learner's; keys that never were are"
    replay = filled(4, bs=4)
    batch = replay.sample()
    replay.add(numbered(3, 4))
    batch.update_priorities(torch.ones(4))
    assert replay.stale == replay.stats()['stale'] == 3
    for keys in [7], [3, 99], [-1], [2**40]:
        with pytest.raises(StaleKey, match=f'key {keys[-1]} was never given out'):
            replay.update_priorities(keys, np.ones(len(keys)))
    assert replay.stale == 3
    with pytest.raises(StaleKey):
        ExperienceReplay().update_priorities([0], [1])
    with pytest.raises(TypeError, match='integers'):
        replay.update_priorities([3.5], [1])


def test_the_sampler_hears_keys_and_answers_of_rows_that_are_there():
    "In their order, the stale ones left out together with their answers"
    replay, heard = filled(6), []
    replay.sampler.update = lambda keys, td: heard.append((keys.tolist(), td.tolist()))
    replay.add(numbered(2, 6))
    replay.update_priorities([7, 0, 3, 1, 3], torch.tensor([0.5, 9, 2, 9, 4]))
    assert heard == [([7, 3, 3], [0.5, 2, 4])] and replay.stale == 2


TDS = {
    'list': [1.0, 2, 3, 4],
    'numpy': np.ones(4),
    'float32': np.ones(4, np.float32),
    'tensor': torch.ones(4),
    'gradient': torch.ones(4, requires_grad=True) * 2,
    'column': torch.ones(4, 1),
    'half': torch.ones(4).half(),
    'bfloat16': torch.ones(4).bfloat16(),
}  # was: numpy has no bfloat16, and the TypeError of torch comes through


@pytest.mark.parametrize('kind', TDS)
def test_td_errors_may_be_of_any_kind(kind):
    "And keys too; the batch, parts of it and copies of it know their replay"
    replay = filled(8)
    batch = replay.sample()
    batch.update_priorities(TDS[kind])
    replay.update_priorities(batch.index, TDS[kind])
    replay.update_priorities(batch.index.tolist(), TDS[kind])
    replay.update_priorities(batch.index.numpy().astype(np.int32), TDS[kind])
    for part in (
        batch[1:3],
        batch[torch.tensor([True, False, True, False])],
        batch.copy()[:2],
        batch.to('cpu')[[0, 3]],
        Steps.cat([batch[:1], batch[2:3]]),
    ):
        part.update_priorities(TDS[kind][:2])
    batch[2].update_priorities(TDS[kind][:1])


def test_wrong_answers_are_refused():
    "Too many, too few, a batch from a file, a block that never was in a replay"
    replay = filled(8)
    batch = replay.sample()
    for td in [1.0], np.ones(5), torch.ones(4, 2), []:
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
    st.booleans(),
)
def test_stats_are_what_a_recount_gives(events, max_sz, restart):
    "Rows in, batches out, ages and times drawn, against lists; also where it is saved and restored half-way"
    replay, drawn, ages, inserted, batches = (
        ExperienceReplay(bs=4, max_sz=max_sz, seed=1),
        {},
        [],
        0,
        0,
    )
    for n, (rows, bs) in enumerate(events):
        if rows:
            replay.add(numbered(rows, inserted))
        inserted += rows
        if 0 < bs <= len(replay):
            for k in replay.sample(bs).index.tolist():
                drawn[k] = drawn.get(k, 0) + 1
                ages.append(inserted - k)
            batches += 1
        if restart and n == len(events) // 2:
            state, replay = everything(replay), ExperienceReplay(bs=4, max_sz=max_sz, seed=1)
            replay.load_state_dict(state)
    here = [
        drawn[k] for k in range(max(0, inserted - max_sz), inserted) if drawn.get(k)
    ]  # of the rows that are there, those that were drawn
    assert replay.stats() == dict(
        inserted=inserted,
        evicted=max(0, inserted - max_sz),
        sampled=len(ages),
        batches=batches,
        stale=0,
        fill=min(inserted, max_sz) / max_sz,
        age_mean=pytest.approx(np.mean(ages) if ages else 0),
        age_max=max(ages, default=0),
        drawn_mean=pytest.approx(np.mean(here) if here else 0),
        drawn_max=max(here, default=0),
    )
    assert all(type(v) in (int, float) for v in replay.stats().values())


# ---- saving, pickling, showing ----


@pytest.mark.parametrize(
    'kw',
    [
        dict(bs=3),
        dict(bs=3, ratio=0.7, warmup=5),
        dict(bs=7, max_sz=7, ratio=2.5),
        dict(bs=9, replacement=True, return_idxs=True),
        dict(bs=1, ratio=0.01),
    ],
    ids=str,
)
@pytest.mark.parametrize('k', [0, 1, 4, 9])
def test_a_restored_pipeline_gives_the_same_batches(kw, k):
    "Environments, memory, sampler and unpaid debts go through a file; also while a block is being paid for"

    def make(seed=3):
        return GymStepper(['CartPole-v1'] * 2, seed=3).experience_replay(
            **{**dict(max_sz=12, seed=seed), **kw}
        )

    a = make()
    it = iter(a)
    for _ in range(k):
        next(it)
    b = make(seed=99)  # the draws' seed must come from the state
    b.load_state_dict(everything(a))
    for x, y in zip(take(it, 12), take(b, 12)):
        assert same(x, y)
    assert a.stats() == b.stats()


def test_a_state_is_a_copy_and_may_be_loaded_over_another():
    "What happens later changes no state; loading replaces rows, columns and counters"
    a = filled(7, max_sz=10)
    state = a.state_dict()
    kept = everything(a)
    want = draws(a, 5)
    a.add(numbered(9, 7))
    a.sample()
    assert same(state, kept)
    b = ExperienceReplay(bs=4, max_sz=10)
    b.add(Steps.cat(scripted_steps([script(9), script(5, env=1)], 8)))
    b.sample()
    b.load_state_dict(state)
    assert (
        draws(b, 5) == (np.array(want) + 20).tolist()
        and rewards(b.memory[:]) == list(range(7))
        and b.add(numbered(2, 7)).tolist() == [27, 28]
    )
    assert same(state, kept)
    c = ExperienceReplay(bs=4, max_sz=10)
    c.load_state_dict(through_file(ExperienceReplay(bs=4, max_sz=10).state_dict()))
    assert len(c) == 0 and c.add(numbered(1)).tolist() == [0]


def test_numbers_of_numpy_go_through_the_file():
    "A batch size, a warm-up and a ratio that numpy computed leave a state that loads without code"
    a = ExperienceReplay(
        in_blocks(4, 4),
        bs=np.int64(2),
        warmup=np.int64(1),
        ratio=np.float64(0.5),
        max_sz=10,
        seed=0,
    )
    take(a, 2)
    a.sample(np.int64(3))
    assert all(type(c) is int for c in everything(a)['own']['counters'])


def test_links_survive_the_file():
    "Windows on a restored memory go on over rows that come later"
    a, b = filled(5, max_sz=10), ExperienceReplay(bs=4, max_sz=10)
    b.load_state_dict(everything(a))
    for r in a, b:
        r.add(numbered(3, 5))
    assert (
        a.memory.windows([3, 6], 4) == b.memory.windows([3, 6], 4)
        and b.memory.windows([3], 4).mask.all()
    )


@pytest.mark.parametrize('other', [dict(max_sz=11), None], ids=['too many rows', 'other stage'])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(other):
    "More rows than there is room for, states of other stages: an error, and what was there is still there"
    a = filled(7, max_sz=10)
    twin = filled(7, max_sz=10)
    state = (
        GymStepper('CartPole-v1').state_dict()
        if other is None
        else filled(11, **other).state_dict()
    )
    with pytest.raises(ValueError):
        a.load_state_dict(state)
    # was: `restore` empties the memory before the timeline refuses the state
    assert len(a) == 7 and draws(a, 5) == draws(twin, 5)


@pytest.mark.parametrize('n', [0, 7, 10, 27])
@pytest.mark.parametrize('max_sz', [10, 11, 13, 40])
def test_a_state_loads_into_a_larger_memory(n, max_sz):
    "Keys, rows and windows stay, and what comes later is linked to them; the smaller one would have lost the oldest by then"
    old, new = filled(n, max_sz=10), filled(3, max_sz=max_sz)
    new.load_state_dict(through_file(old.state_dict()))
    assert new.memory.keys.tolist() == old.memory.keys.tolist() and (
        not n or new.memory[:] == old.memory[:]
    )
    first = new.add(numbered(9, n))[0] - n  # where nothing was saved, keys go on
    keys = np.arange(max(n + 9 - max_sz, old.memory.oldest, 0), n + 9)
    assert first == (0 if n else max_sz)
    assert (new.memory.keys - first).tolist() == keys.tolist() and rewards(
        new.memory[:]
    ) == keys.tolist()
    windows = new.memory.windows(new.memory.keys, 4)
    assert windows.reward[windows.mask].tolist() == [
        k + t for k in keys for t in range(4) if k + t < n + 9
    ]
    assert new.memory.walk(keys + first, [-1]).ravel().tolist() == [-1, *(keys[:-1] + first)]
    if n:
        with pytest.raises(
            ValueError,
            match='more rows than this one has room for; got .*; expected at most max_sz=2. Remedy: max_sz=10',
        ):
            filled(1, bs=1, max_sz=2).load_state_dict(old.state_dict())


def test_a_longer_chain_is_refused_and_changes_nothing():
    "The chain above is compared before anything is restored"
    a, b = (
        filled(7, max_sz=10),
        GymStepper('CartPole-v1', seed=0).experience_replay(bs=4, max_sz=10, seed=0),
    )
    b.add(numbered(5))
    state = {**a.state_dict(), 'above': None}
    with pytest.raises(ValueError, match='chain'):
        b.load_state_dict(state)
    assert len(b) == 5
    c = Items(in_blocks(1)).header(3).experience_replay(bs=4, max_sz=10)
    c.add(numbered(6))
    # was: stages are restored one by one from below, so the memory is replaced before the stage above refuses
    with pytest.raises(ValueError, match='another stage'):
        c.load_state_dict(b.state_dict())
    assert len(c) == 6


@pytest.mark.parametrize(
    'by',
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), through_torch],
    ids=['copy', 'deepcopy', 'pickle', 'torch.save'],
)
@pytest.mark.parametrize(
    'make',
    [
        lambda **kw: ExperienceReplay(bs=4, **kw),
        lambda **kw: PrioritizedReplay(bs=4, alpha=1.0, **kw),
        lambda **kw: PrioritizedReplay(bs=4, kind='rank', **kw),
        lambda **kw: SequenceReplay(bs=4, length=4, **kw),
    ],
    ids=['uniform', 'errors', 'ranks', 'sequences'],
)
def test_copies_keep_the_rows(make, by):
    "Also after a wrap, with priorities; was: an empty memory, in silence. The copy and the original go on apart"
    replay = make(max_sz=30, seed=0)
    empty = by(replay)
    assert len(empty) == len(empty.memory) == 0 and empty.add(numbered(3)).tolist() == [0, 1, 2]
    replay.add(numbered(47))
    batch = replay.sample()
    batch.update_priorities(
        np.arange(1.0, 5) if len(batch.shape) == 1 else np.ones((4, 2)) * np.arange(1.0, 5)[:, None]
    )
    twin = by(replay)
    assert (
        twin.memory is not replay.memory
        and twin.memory[:] == replay.memory[:]
        and twin.stats() == replay.stats()
        and same(twin.state_dict(), replay.state_dict())
    )
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
        repr(replay)
        == "GymStepper(['CartPole-v1']*8, seed=0)\n  .experience_replay(bs=256, max_sz=1000, ratio=0.5)  # 8 of 1000 rows"
        == str(replay)
    )
    assert len(repr(replay.header(3)).splitlines()) == 3


def test_a_million_rows():
    "At full size: exact, in order, drawn from everywhere, and within a percent of its rows and 12 bytes each"
    n = 1_000_000
    replay = ExperienceReplay(bs=256, max_sz=n, seed=0)
    for i in range(0, n + 300_000, 100_000):
        replay.add(numbered(100_000, i))
    keys = np.concatenate([replay.sample().index.numpy() for _ in range(400)])
    assert len(replay) == n and rewards(replay.memory[[0, -1]]) == [300_000, 1_299_999]
    assert keys.min() >= 300_000 and uniform(
        np.bincount((keys - 300_000) * 20 // n, minlength=20), 1, True
    )
    assert replay.memory.nbytes <= 1.01 * n * (replay.memory.dtype.itemsize + 12)


# ---- in a DataLoader, in a loop ----


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize(
    'kind, kw',
    [('experience_replay', {}), ('prioritized_replay', dict(beta=lambda n: 0.5))],
    ids=['uniform', 'prioritized'],
)
def test_the_whole_pipeline_in_a_dataloader(kind, kw, workers):
    "batch_size=None: the batches are the pipe's own; a lambda as schedule goes where workers are forked; only this process can answer"

    def make():
        return getattr(GymStepper(['CartPole-v1'] * 2, seed=0), kind)(
            bs=4, max_sz=50, ratio=0.7, seed=0, **kw
        ).header(9)

    got = list(
        DataLoader(
            make(),
            batch_size=None,
            num_workers=workers,
            multiprocessing_context='fork' if workers and kw else None,
        )
    )
    assert got == list(make()) and len(got) == 9
    if workers == 0:
        got[0].update_priorities(torch.ones(4))
    else:
        with pytest.raises(TypeError, match='in this process'):
            got[0].update_priorities(torch.ones(4))


def test_it_reads_like_the_promise():
    "for batch in pipe: learn, answer; rows come from everywhere, gradients flow into the learner only"
    net = torch.nn.Linear(4, 2)
    pipe = GymStepper(
        gym.make_vec('CartPole-v1', 4), policy=lambda s: net(s).argmax(1), seed=0
    ).experience_replay(bs=16, max_sz=1000, warmup=32, seed=0)
    for i, batch in enumerate(pipe):
        q = net(batch.state).gather(1, batch.action[:, None])[:, 0]
        td = batch.reward + 0.9 * net(batch.next_state).max(1).values * (~batch.terminated) - q
        (batch.weight * td**2).mean().backward()
        batch.update_priorities(td)
        if i == 20:
            break
    assert pipe.batches == 21 and pipe.stale == 0 and net.weight.grad.abs().sum() > 0


def test_batches_are_copies():
    "Writing into a batch, or into a block after it was added, changes no row in memory"
    replay, block = ExperienceReplay(bs=4, max_sz=9, seed=0), numbered(6)
    replay.add(block)
    block.reward.zero_()
    batches = [replay.sample() for _ in range(3)]
    for b in batches:
        b.rows.view(np.uint8)[:] = 255
    assert rewards(replay.memory[:]) == list(range(6)) and not any(
        np.shares_memory(a.rows, b.rows) for a in batches for b in batches if a is not b
    )
    replay.memory[:].reward.zero_()
    assert rewards(replay.memory[:]) == list(range(6))


def test_columns_that_batches_need_are_not_taken_twice():
    "A policy's column named like a batch's own is refused with its name"
    pipe = GymStepper(
        'CartPole-v1', policy=lambda s: (zeros(s), dict(index=s[:, 0]))
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
DRAWN = {
    'uniform': lambda p: p.experience_replay(bs=4, max_sz=50, seed=0),
    'by priority': lambda p: p.prioritized_replay(bs=4, max_sz=50, seed=0),
    'prefetched': lambda p: p.experience_replay(bs=4, max_sz=50, seed=0).prefetch(),
    'mapped': lambda p: p.experience_replay(bs=4, max_sz=50, seed=0).map(Steps.copy),
    'merged': lambda p: p.experience_replay(bs=4, max_sz=50, seed=0).gather(8),
    'from elsewhere': lambda p: Items(
        [pickle.loads(pickle.dumps(b)) for b in p.experience_replay(bs=4, max_sz=50, seed=0)]
    ),
}


@pytest.mark.parametrize('drawn', DRAWN)
@pytest.mark.parametrize('name', NOT_AFTER)
def test_what_takes_steps_refuses_batches(name, drawn):
    "Rows of many episodes in any order: each would look like an episode that broke off. The stage says what to do"
    with pytest.raises(BlockError) as e:
        list(
            NOT_AFTER[name](DRAWN[drawn](Items(steps())))
        )  # was: all but the replay of sequences took them, and made truncations of them
    assert str(e.value).startswith(
        f"{name}: column 'index'; got one that is there already"
    ) and 'put it before the replay' in str(e.value)


@pytest.mark.parametrize('name', NOT_AFTER)
def test_and_a_batch_among_steps(name):
    "After blocks of steps it is refused with the same remedy, and a chain that is restored from then goes on with the steps after it"
    batch, blocks, seen = next(iter(ExperienceReplay(steps(), bs=4, seed=0))), steps(20), []
    chain, fresh = (NOT_AFTER[name](Items([*blocks[:9], batch, *blocks[9:]])) for _ in range(2))
    with pytest.raises(BlockError, match=f"{name}: column 'index'.* before the replay"):
        for x in chain:
            seen.append(x)
    fresh.load_state_dict(through_file(chain.state_dict()))
    assert same(seen + list(fresh), list(NOT_AFTER[name](Items(blocks))))


@pytest.mark.parametrize('name', NOT_AFTER)
def test_what_takes_steps_refuses_batches_of_sequences(name):
    "[B, T]: its rows have no `index`, it is the shape that tells"
    batches = Items(steps()).sequence_replay(
        bs=2, max_sz=50, length=2, burn_in=0, overlap=0, seed=0
    )
    with pytest.raises(
        BlockError,
        match=rf'{name}: a block of rows; got shape \[2, 2\]; expected shape \[n\]. Remedy: .*put it (directly after|before)',
    ):
        list(NOT_AFTER[name](batches))  # was: Journal counted them


def test_rows_go_from_one_memory_to_another_without_their_keys():
    "What the error says to do; keys of one memory mean nothing in another"
    one, other = filled(20, bs=4), ExperienceReplay(bs=4, max_sz=20, seed=0)
    batch = one.sample()
    with pytest.raises(
        BlockError, match=r"ExperienceReplay: column 'index'.*memory.take\(batch.index\)"
    ):
        other.add(batch)
    assert len(other) == 0 and other.memory.dtype is None
    assert (
        other.add(one.memory.take(batch.index)).tolist() == [0, 1, 2, 3]
        and rewards(other.memory[:]) == batch.index.tolist()
    )
    other.add(numbered(3))
    with pytest.raises(BlockError, match='before the replay'):
        other.add(batch)
    assert len(other) == 7


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


class Scaled:
    "A function that remembers the largest reward so far"

    largest = 1.0

    def __call__(self, steps):
        self.largest = max(self.largest, float(steps.reward.max()))
        steps = steps.copy()
        steps.reward.div_(self.largest)
        return steps

    def state_dict(self):
        return dict(largest=self.largest)

    def load_state_dict(self, state):
        self.largest = state['largest']


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


CONTRACT = {  # how to build each stage on a source, or from nothing; every @stage class of the package must be here
    'Map': [lambda source: source.map(numbered_states), lambda source: source.map(Scaled())],
    'Filter': [lambda source: source.filter(odd_steps)],
    'Header': [lambda source: Header(source, 20)],
    'Cycler': [lambda source: Header(Cycler(source), 50)],
    'InMemoryCacheHolder': [],  # holds its source by design and reads it anew: its promises are tested with the stepper's
    'GymStepper': [
        lambda: GymStepper(['CartPole-v1'] * 3, seed=0),
        lambda: GymStepper('Pendulum-v1', seed=0),
        lambda: Items(['CartPole-v1'] * 2).map(gym.make).in_memory_cache().cycle().gym_step(seed=0),
    ],
    'NStep': [lambda source, n=n: NStep(source, n, 0.9) for n in (1, 2, 3, 50)],
    'NSkip': [lambda source, n=n: NSkip(source, n) for n in (1, 2, 3, 50)],
    'SequenceChunker': [
        lambda source, kw=kw: SequenceChunker(source, **kw)
        for kw in (
            dict(length=3, overlap=2),
            dict(length=1),
            dict(length=2, tail='pad'),
            dict(length=2, overlap=1, tail='drop'),
            dict(length=4, overlap=1),
        )
    ],  # enough sequences for the check
    'ExperienceReplay': [
        lambda source, kw=kw: ExperienceReplay(source, **{**dict(max_sz=20, seed=0), **kw})
        for kw in (
            dict(),
            dict(bs=2),
            dict(bs=2, ratio=0.7, warmup=5),
            dict(bs=5, max_sz=6, replacement=True, return_idxs=True, ratio=1.5),
        )
    ],
    'SequenceReplay': [
        lambda source, kw=kw: SequenceReplay(
            source, **{**dict(bs=2, max_sz=30, length=4, burn_in=1, overlap=2, seed=0), **kw}
        )
        for kw in (
            dict(),
            dict(prioritized=False, state='zero'),
            dict(ratio=0.9, warmup=8, burn_in=0, overlap=0),
        )
    ],
    'HindsightReplay': [
        lambda source, kw=kw: HindsightReplay(
            source.map(with_goals), **{**dict(max_sz=20, seed=0, reward=nearness), **kw}
        )
        for kw in (
            dict(),
            dict(strategy='episode', share=0.5, bs=2),
            dict(
                strategy='final', share=1.0, bs=5, max_sz=6, return_idxs=True, ratio=1.5, warmup=7
            ),
        )
    ],
    'PrioritizedReplay': [
        lambda source, kw=kw: PrioritizedReplay(source, **{**dict(max_sz=20, seed=0), **kw})
        for kw in (
            dict(),
            dict(kind='rank', bs=2),
            dict(bs=2, ratio=0.7, warmup=5, initial='max_ever', stratified=False),
            dict(
                bs=5, max_sz=6, return_idxs=True, ratio=1.5, weight_norm='memory', initial='reward'
            ),
        )
    ],
    'Parallel': [
        lambda: (
            GymStepper(['CartPole-v1'] * 2, seed=0)
            .n_step(2, 0.9)
            .parallel(2, chunk=2, method='fork')
        ),
        lambda: GymStepper('CartPole-v1', seed=0).parallel(0),
        lambda: (
            GymStepper('CartPole-v1', seed=0)
            .prioritized_replay(bs=2, max_sz=50, seed=0)
            .parallel(2, chunk=2, method='fork')
        ),
    ],
    'Journal': [Journal],
    'Episodes': [lambda source: source.map(as_arrays).episodes()],
    'Gather': [lambda source, n=n: Gather(source, n) for n in (1, 2)],
    'UpdateNorms': [
        lambda source: UpdateNorms(source, StateNorm(spaces.Box(-9, 9, (2,))), RewardNorm(0.9)),
        lambda source: source.update_norms(rewards=RewardNorm(0.9)),
    ],
    'ScaleRewards': [
        lambda source: (
            (r := RewardNorm(0.9))
            and source.update_norms(rewards=r)
            .prioritized_replay(bs=2, max_sz=20, seed=0)
            .scale_rewards(r)
        )
    ],
    'QLearner': [
        lambda source: QLearner(source.map(numbered_states), QTable(spaces.Discrete(200), ACTIONS)),
        lambda source: ExperienceReplay(
            source.map(numbered_states), bs=2, max_sz=20, seed=0
        ).q_learn(QTable(spaces.Discrete(200), ACTIONS)),
    ],
    'DQNLearner': [
        lambda source: DQNLearner(source, net(value_net, (8,))),
        lambda source: PrioritizedReplay(NStep(source, 2, 0.9), bs=2, max_sz=20, seed=0).dqn(
            net(value_net, (8,), True), target_every=3, tau=0.5
        ),
    ],
    'R2D2Learner': [
        lambda source: SequenceReplay(
            source, bs=2, max_sz=30, length=4, burn_in=1, overlap=2, seed=0
        ).r2d2(net(RecurrentNet, 4), n=2, target_every=3)
    ],
    'SACLearner': [
        lambda source: SACLearner(source.map(torques), *steered(True), seed=0),
        lambda source: PrioritizedReplay(source.map(torques), bs=2, max_sz=20, seed=0).sac(
            *steered(True), lr=LinearSchedule(1e-2, 1e-3, 20), seed=0
        ),
    ],
    'TD3Learner': [
        lambda source: TD3Learner(source.map(torques), *steered(False), seed=0),
        lambda source: ExperienceReplay(
            NStep(source.map(torques), 2, 0.9), bs=2, max_sz=20, seed=0
        ).td3(*steered(False), actor_every=3, seed=0),
    ],
    'Prefetch': [
        lambda source, kw=kw, n=n: Prefetch(
            ExperienceReplay(source, **{**dict(max_sz=20, seed=0), **kw}), n
        )
        for n, kw in (
            (1, dict()),
            (2, dict(bs=2, ratio=0.7, warmup=5)),
            (3, dict(bs=5, max_sz=6, replacement=True, return_idxs=True, ratio=1.5)),
        )
    ]
    + [
        lambda source, kw=kw: Prefetch(
            PrioritizedReplay(source, **{**dict(max_sz=20, seed=0), **kw}), 2, 'cpu'
        )
        for kw in (
            dict(bs=2),
            dict(kind='rank', bs=2, ratio=0.7, warmup=5),
            dict(bs=2, return_idxs=True, ratio=1.5),
        )
    ]
    + [
        lambda source, kw=kw: Prefetch(
            SequenceReplay(
                source, **dict(bs=2, max_sz=30, length=4, burn_in=1, overlap=2, seed=0), **kw
            ),
            2,
        )
        for kw in (dict(), dict(ratio=0.7, warmup=8), dict(ratio=1.5, state='zero'))
    ]
    + [
        lambda source: Prefetch(
            PrioritizedReplay(NStep(source, 2, 0.9), bs=2, max_sz=20, seed=0)
        ).dqn(net(value_net, (8,)), target_every=3)
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


@pytest.mark.parametrize(
    'name,i',
    [
        pytest.param(n, i, marks=[pytest.mark.slow] * (i > 1))
        for n, fs in CONTRACT.items()
        for i in range(len(fs))
    ],
)
def test_every_stage_keeps_the_contract(name, i):
    "One check for all"
    assert check_contract(CONTRACT[name][i])['items'] > 0


def test_exact_blocks_copy_each_row_once():
    "A large block was copied for each small one that left it"
    import tracemalloc

    block = numbered(20_000)
    blocks = iter(Gather([block, numbered(7, 20_000)], n=10, exact=True))
    found = [rewards(next(blocks))]
    tracemalloc.start()
    try:
        found += [rewards(next(blocks))]
        assert tracemalloc.get_traced_memory()[1] < block.rows.nbytes / 20
    finally:
        tracemalloc.stop()
    found += map(rewards, blocks)
    assert [k for f in found for k in f] == list(range(20_000)) and {len(f) for f in found} == {10}
