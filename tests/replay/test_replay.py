"""ExperienceReplay: fill, evict, draw, count, answer, save; and the contract of every stage."""

from fractions import Fraction

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from fastrl_replay.all import *
from fastrl_replay.parallel.ranks import Ranks, Rounds
from fastrl_replay.testing import through_file
from strategies import cases
from scripted import draws, everything, in_blocks, modules, numbered, take


def filled(n, bs=4, max_sz=None, **kw):
    "A replay with rows 0 to n-1 added"
    replay = ExperienceReplay(bs=bs, max_sz=max_sz or n, **{'seed': 0, **kw})
    replay.add(numbered(n))
    return replay


def rewards(steps):
    return [int(r) for r in steps.reward.reshape(-1)]


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


# ---- drawing ----


@pytest.mark.parametrize('kind', [ExperienceReplay, PrioritizedReplay, SequenceReplay])
def test_seeds_decide_the_draws(kind):
    "Without a seed they differ each time; global generators are neither used nor changed"

    def made(seed):
        replay = kind(bs=4, max_sz=1000, seed=seed)
        replay.add(numbered(1000))
        return draws(replay, 20)

    before = np.random.get_state()[1].copy(), torch.random.get_rng_state()
    assert made(3) == made(3) == made(np.int64(3))
    assert len({str(made(s)) for s in (0, 1, 2, 3, None, None)}) == 6
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.random.get_rng_state(), before[1])


def test_too_few_rows_are_counted():
    replay = filled(3, bs=4, max_sz=10)
    with pytest.raises(NotEnoughRows, match='a batch needs 4 rows, and the buffer has 3 rows'):
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


def test_a_bad_block_in_the_stream_stops_it_with_the_columns_name():
    "NaN names row, column and environment; the good blocks before it are there"
    bad = numbered(4, 4)
    bad.next_state[2, 0] = np.nan
    replay = ExperienceReplay([numbered(4), bad], bs=1)
    with pytest.raises(BlockError, match="row 2 of the block has a NaN in column 'next_state'"):
        take(replay, 5)
    assert len(replay) == 4


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


# ---- rows that a replay has drawn ----


def test_rows_go_from_one_memory_to_another_without_their_keys():
    "The error says how; keys of one memory mean nothing in another"
    one, other = filled(20, bs=4), ExperienceReplay(bs=4, max_sz=20, seed=0)
    batch = one.sample()
    with pytest.raises(
        BlockError, match=r"the index column of a batch.*memory.take\(batch.index\)"
    ):
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
    others = {'LaneBatches'}  # takes steps of tensors: see test_lanes.py
    assert {s.__name__ for s in stages()} == set(CONTRACT) | others
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
