"""A memory never gives out a key twice, whatever is cleared, loaded, closed or rewound.

Late feedback reaches no other row."""

import shutil
from itertools import islice
from multiprocessing import get_context

import numpy as np, pytest, torch
from gymnasium import spaces

from fastrl_replay.all import *
from fastrl_replay.testing import through_file

BOX = spaces.Box(-np.inf, np.inf, (16,), np.float32)  # large enough for `Frames`
GOALS = spaces.Dict(
    observation=spaces.Box(-1, 1, (2,)),
    achieved_goal=spaces.Box(-1, 1, (2,)),
    desired_goal=spaces.Box(-1, 1, (2,)),
)


def rows(n, first=0, space=BOX, length=5):
    "Rows whose reward is their number, in episodes of some steps"
    block = np.zeros(n, step_dtype(space, spaces.Discrete(2)))
    number = np.arange(first, first + n)
    block['reward'] = number
    block['episode_n'], block['step_n'] = number // length + 1, number % length + 1
    block['truncated'] = number % length == length - 1
    if space is BOX:
        block['state'][:, 0], block['next_state'][:, 0] = number, number + 1
    else:
        block['next_state']['achieved_goal'][:, 0], block['reward'] = (
            number,
            -number,
        )  # far from the goal, which is 0
    return Steps(block)


def goal_rows(n, first=0):
    return rows(n, first, GOALS)


def distance(achieved, desired, info):
    return -np.abs(achieved - desired).sum(-1)


KINDS = dict(
    uniform=lambda store=None: ExperienceReplay(bs=4, max_sz=12, seed=0, store=store),
    proportional=lambda store=None: PrioritizedReplay(bs=4, max_sz=12, seed=0, store=store),
    rank=lambda store=None: PrioritizedReplay(bs=4, max_sz=12, kind='rank', seed=0, store=store),
    sequences=lambda store=None: SequenceReplay(
        bs=4, max_sz=12, length=3, burn_in=0, overlap=1, seed=0, store=store
    ),
    hindsight=lambda store=None: HindsightReplay(
        bs=4, max_sz=12, seed=0, reward=distance, store=store
    ),
)
STORES = dict(
    rows=lambda path: None,
    frames=lambda path: Frames(),
    disk=lambda path: Rows(path / 'm', spare=9),
    frames_on_disk=lambda path: Frames(path=path / 'm', spare=9),
)
every_kind = pytest.mark.parametrize('kind', KINDS)
every_store = pytest.mark.parametrize('store', STORES)


each = pytest.mark.parametrize(
    'kind,store',
    [*((kind, 'rows') for kind in KINDS), *(('proportional', store) for store in STORES)],
)


def made(kind, store, path):
    return KINDS[kind](STORES[store](path)), goal_rows if kind == 'hindsight' else rows


def errors(batch):
    return np.abs(batch.reward.numpy()) % 7 + 1.0


def without_index(batch):
    "What a learner sees"
    return {n: x for n, x in batch.asdict().items() if n != 'index'}


def alike(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    return torch.equal(a, b)


def learned(replay, block, first, n=4):
    "Batches of some updates, each of which tells the replay its errors; rows come in between"
    found = []
    for i in range(n):
        batch = replay.sample()
        found.append(batch)
        batch.update_priorities(errors(batch))
        replay.add(block(2, first + 2 * i))
    return found


@each
def test_a_memory_that_went_back_draws_the_same_batches_under_new_keys(kind, store, tmp_path):
    replay, block = made(kind, store, tmp_path)
    replay.add(block(15))
    replay.sample().update_priorities(errors(replay.sample()))
    state = through_file(replay.state_dict())
    first = learned(replay, block, 15)
    end, late = replay.memory.inserted, replay.sample()
    replay.load_state_dict(state)
    assert replay.memory.oldest >= end and not replay.memory.valid(late.index).any()
    stale = replay.stale
    late.update_priorities(np.full(errors(late).shape, 1e6))
    assert replay.stale == stale + len(late)
    again = learned(replay, block, 15)
    assert all(alike(without_index(a), without_index(b)) for a, b in zip(first, again))
    moved = {int(k) for a, b in zip(first, again) for k in b.index - a.index}
    ring = 12 + (9 if 'disk' in store else 0)
    assert len(moved) == 1 and moved.pop() % ring == 0


@each
def test_a_memory_that_has_given_out_no_keys_restores_those_that_were_saved(kind, store, tmp_path):
    replay, block = made(kind, store, tmp_path)
    replay.add(block(15))
    replay.sample()
    state = through_file(replay.state_dict())
    first = learned(replay, block, 15)
    replay.close()
    new, _ = made(kind, store, tmp_path)
    for _ in range(2):
        new.load_state_dict(state)
    base = new.memory.base
    # this process has given out newer keys of the directory: others follow, with the same slots
    assert (base > 0) == ('disk' in store)
    assert new.memory.inserted == base + 15 and new.memory.oldest == base + 3
    again = learned(new, block, 15)
    assert [(b.index - base).tolist() for b in again] == [b.index.tolist() for b in first]


def test_a_new_object_gives_out_no_key_of_a_directory_twice(tmp_path):
    "The directory went back, and was closed, or the new object goes back"
    given, late = [], []

    def add(replay, n):
        for _ in range(n):
            step = len(given)
            given.extend(replay.add_step([step], 0, 1.0, [step + 1], False))

    def opened():
        store = Rows(tmp_path / 'rows', spare=50)
        return PrioritizedReplay(bs=4, max_sz=50, seed=0, store=store)

    replay = opened()
    add(replay, 10)
    state = through_file(replay.state_dict())
    add(replay, 20)
    late.append(replay.sample().index)
    replay.load_state_dict(state)
    add(replay, 5)
    replay.close()
    replay = opened()
    add(replay, 25)
    replay.close()
    replay = opened()
    replay.load_state_dict(state)
    add(replay, 30)
    assert len(set(given)) == len(given)
    replay.update_priorities(late[0][late[0] >= 10], np.full((late[0] >= 10).sum(), 99.0))
    assert replay.stale == (late[0] >= 10).sum() > 0
    replay.close()


def test_a_directory_that_went_back_to_nothing_gives_out_no_key_twice(tmp_path):
    "A state without rows is loaded, and the directory is closed without a row"

    def opened():
        return PrioritizedReplay(bs=4, max_sz=50, seed=0, store=Rows(tmp_path / 'rows'))

    replay = opened()
    empty = replay.state_dict()
    given = replay.add(rows(10)).tolist()
    late = replay.sample().index
    replay.load_state_dict(empty)
    replay.close()
    replay = opened()
    given += replay.add(rows(10)).tolist()
    assert len(set(given)) == 20
    replay.update_priorities(late, np.full(4, 99.0))
    assert replay.stale == 4
    replay.close()


def test_an_older_copy_of_a_directory_gives_out_no_key_twice(tmp_path):
    "The copy is put in the directory's place while it is closed"
    path = tmp_path / 'rows'

    def opened():
        return PrioritizedReplay(bs=4, max_sz=50, seed=0, store=Rows(path))

    replay = opened()
    given = replay.add(rows(10)).tolist()
    replay.close()
    shutil.copytree(path, tmp_path / 'copy')
    replay = opened()
    given += replay.add(rows(5, 10)).tolist()
    late = replay.sample().index
    replay.close()
    shutil.rmtree(path)
    (tmp_path / 'copy').rename(path)
    replay = opened()
    given += replay.add(rows(5, 20)).tolist()
    assert len(set(given)) == 20
    replay.update_priorities(late, np.full(4, 99.0))
    assert replay.stale == 4
    replay.close()


@every_store
def test_keys_stay_where_no_row_came_since(store, tmp_path):
    replay, block = made('proportional', store, tmp_path)
    replay.add(block(15))
    batch, state = replay.sample(), through_file(replay.state_dict())
    replay.load_state_dict(state)
    assert replay.memory.keys.tolist() == list(range(3, 15))
    batch.update_priorities(np.full(4, 1e3))
    assert replay.stale == 0


def test_other_rows_under_keys_that_were_given_out_get_others():
    "A longer state of other rows, whose keys are newer, too"
    replay, other = (KINDS['proportional']() for _ in range(2))
    replay.add(rows(8))
    other.add(rows(12, 100))
    late = replay.sample()
    replay.load_state_dict(other.state_dict())
    late.update_priorities(np.full(4, 1e6))
    assert replay.stale == 4 and not replay.memory.valid(late.index).any()
    assert replay.stats()['inserted'] == 12 and replay.stats()['evicted'] == 0


@every_kind
def test_clear_goes_on_with_keys_in_the_slots_of_the_start(kind):
    replay, block = made(kind, 'rows', None)
    replay.add(block(15))
    late = replay.sample()
    first = KINDS[kind]()
    replay.clear()
    assert len(replay) == 0 and replay.stats()['inserted'] == replay.stats()['evicted'] == 0
    late.update_priorities(np.ones(errors(late).shape))  # of an empty memory
    keys = replay.add(block(14))
    assert keys[0] == 24 and (first.add(block(14)) + 24 == keys).all()
    late.update_priorities(np.full(errors(late).shape, 1e6))
    assert replay.stale == 2 * len(late)
    for a, b in zip(learned(replay, block, 14), learned(first, block, 14)):
        assert alike(without_index(a), without_index(b)) and (a.index - b.index == 24).all()
    with pytest.raises(StaleKey):
        replay.memory.take(late.index)
    with pytest.raises(StaleKey):
        replay.memory.take([replay.memory.inserted])


def test_the_same_slots_where_an_own_sampler_has_more_room():
    from fastrl_replay.memory.priorities import Proportional

    replay = ExperienceReplay(bs=4, max_sz=12, sampler=Proportional(18, seed=0))
    replay.add(rows(15))
    replay.update_priorities(np.arange(3, 15), np.arange(12.0))
    state = through_file(replay.state_dict())
    first = replay.sample()
    replay.add(rows(1, 15))
    replay.load_state_dict(state)
    assert alike(without_index(first), without_index(replay.sample()))


def test_a_mixture_that_went_back():
    def build():
        return Mixture(dict(a=KINDS['proportional'](), b=KINDS['rank']()), bs=6)

    mixture = build()
    mixture.add(rows(15), 'a')
    mixture.add(rows(9, 100), 'b')
    state = through_file(mixture.state_dict())

    def learned():
        for i in range(3):
            batch = mixture.sample()
            batch.update_priorities(errors(batch))
            mixture.add(rows(2, 15 + 2 * i), 'a')
            yield batch

    first, late = [*learned()], mixture.sample()
    mixture.load_state_dict(state)
    mixture.update_priorities(late.index[late.replay == 0], np.full(3, 1e6))
    assert mixture.replays['a'].stale == 3
    assert mixture.replays['b'].memory.keys.tolist() == list(range(9))  # no row came there since
    assert all(alike(without_index(a), without_index(b)) for a, b in zip(first, learned()))


def test_batches_that_were_drawn_ahead_tell_their_rows():
    def run(batches):  # as a learner does
        for batch in islice(batches, 9):
            batch.update_priorities(errors(batch))
            yield batch

    source = [rows(3, 3 * i) for i in range(200)]
    chain = Prefetch(PrioritizedReplay(source, bs=4, max_sz=12, seed=0), 2)
    batches = iter(chain)
    assert len([*run(batches)]) == 9
    state = through_file(chain.state_dict())
    first = [*run(batches)]
    chain.load_state_dict(state)
    again = [*run(iter(chain))]
    assert all(alike(without_index(a), without_index(b)) for a, b in zip(first, again))
    assert len({int(k) for a, b in zip(first, again) for k in b.index - a.index} - {0}) == 1
    assert again[0].index.min() > first[-1].index.max()


def directory(path):
    return KINDS['proportional'](Rows(path=path, spare=9))


def go_back(path, state):
    "In another process: load an older state, and add six rows"
    other = directory(path)
    other.load_state_dict(state)
    assert other.add(rows(6, 50)).tolist() == list(range(10, 16))  # it has given out no keys
    other.close()


@pytest.mark.slow
def test_a_directory_that_was_closed_and_rewound_elsewhere(tmp_path):
    "The keys go on if nobody went back in the meantime, else they begin in a new generation"
    path = tmp_path / 'm'
    replay = directory(path)
    replay.add(rows(10))
    state = through_file(replay.state_dict())
    replay.add(rows(4, 10))
    late = replay.sample()
    replay.close()
    late.update_priorities(np.ones(4))
    assert replay.stale == 0 and replay.memory.inserted == 14  # it is open again
    replay.close()
    other = get_context('spawn').Process(target=go_back, args=(path, state))
    other.start()
    other.join()
    assert other.exitcode == 0
    late.update_priorities(np.full(4, 1e6))
    assert replay.stale == 4 and replay.memory.oldest > late.index.max()
    assert replay.memory[:].reward.tolist() == [*range(4, 10), *range(50, 56)]
    last = replay.add(rows(1, 60))
    replay.close()
    assert replay.memory[-1:].reward == 60 and last % 21 == 16


def test_clear_lets_go_of_an_open_directory(tmp_path):
    replay = KINDS['proportional'](Rows(tmp_path / 'm'))
    replay.add(rows(10))
    late = replay.sample()
    replay.clear()
    assert replay.batches == 0 and len(replay) == 10  # what lies on disk stays there
    late.update_priorities(np.ones(4))
    assert replay.stale == 0 and replay.add(rows(1, 10)).tolist() == [10]


@pytest.mark.parametrize(
    'kind,store',
    [
        ('uniform', 'disk'),
        ('proportional', 'frames'),
        ('rank', 'frames_on_disk'),
        ('sequences', 'rows'),
    ],
)
@pytest.mark.filterwarnings('ignore:.*have been overwritten since')
def test_no_key_ever_stands_for_two_rows(kind, store, tmp_path):
    "Random calls, against a dict of all keys that were ever given out"
    rng, given = np.random.default_rng(0), {}
    replay, _ = made(kind, store, tmp_path)
    states, number = [], 0
    for _ in range(100):
        do = rng.integers(7)
        if do < 3:
            n = int(rng.integers(1, 5))
            keys = replay.add(rows(n, number))
            number += n
            assert not {*keys.tolist()} & given.keys()
        elif do == 3:
            states.append(through_file(replay.state_dict()))
        elif do == 4 and states:
            try:
                replay.load_state_dict(states[int(rng.integers(len(states)))])
            except ValueError:
                assert 'disk' in store  # its rows were replaced
        elif do == 5 and 'disk' not in store:
            replay.clear()
        elif do == 6:
            replay.close()
        if len(replay.memory):
            for key, reward in zip(replay.memory.keys.tolist(), replay.memory.reward.tolist()):
                assert given.setdefault(key, reward) == reward
        if len(replay) >= 4:
            batch = replay.sample()
            late = rng.choice([*given], 4)
            if kind != 'sequences':
                replay.update_priorities(late, np.ones(4))
            assert np.isin(batch.index, [*given]).all()


# ---- what is refused for one replay changes no other ----


def test_errors_that_one_replay_of_a_mixture_refuses_change_none():
    def build():
        mixture = Mixture(dict(a=KINDS['proportional'](), b=KINDS['rank']()), bs=6)
        mixture.add(rows(10), 'a')
        mixture.add(rows(10, 100), 'b')
        return mixture

    mixture, same = build(), build()
    batch = mixture.sample()
    same.sample()
    td = np.ones(6)
    td[batch.replay == 1] = np.inf
    with pytest.raises(ArgumentError):
        batch.update_priorities(td)
    assert alike(mixture.sample().asdict(), same.sample().asdict())


# ---- weights of a mixture ----


@pytest.mark.parametrize('norm', ['memory', 'batch'])
def test_a_mixture_keeps_the_weights_of_a_whole_memory(norm):
    "With weight_norm='memory' the largest possible weight is 1, whether it is drawn or not"
    replays = {}
    for name in 'ab':
        replay = PrioritizedReplay(
            bs=4, max_sz=50, alpha=1.0, beta=1.0, eps=0.0, weight_norm=norm, seed=0
        )
        replay.update_priorities(replay.add(rows(50)), [*[9.0] * 49, 1.0])
        replays[name] = replay
    batch = Mixture(replays, bs=4).sample()
    assert 49 not in batch.reward
    assert torch.allclose(batch.weight, torch.full((4,), 1 / 9 if norm == 'memory' else 1.0))
