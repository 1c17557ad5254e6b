"""Each memory × store × place × use works as a plain model says, or is refused when it is made: pairs here, all with `-m slow`."""

import json

import numpy as np, pytest

import combinations
from combinations import (
    AXES,
    CELLS,
    FILE,
    Cell,
    covering,
    declared,
    faults,
    outcome,
    pairs,
    refusals,
    table,
)
from fastrl_replay.parallel import ray_engine
from fastrl_replay.all import *
from plain_model import MAX_SZ, Model, error_of
from test_ray import OneThread
from workers import no_process_is_left  # noqa: F401

pytestmark = pytest.mark.filterwarnings(
    'ignore::DeprecationWarning', 'ignore::UserWarning', 'ignore:.*overlap'
)


def params(cells, *marks):
    def failing(cell):
        return [pytest.mark.xfail(strict=True, reason=faults(cell)[0].why)] if faults(cell) else []

    return [
        pytest.param(cell, id='-'.join(cell[:4]), marks=[*marks, *failing(cell)]) for cell in cells
    ]


BY_KIND = {
    kind: [cell for cell in CELLS if declared(cell) == kind]
    for kind in ('works', 'refused', 'faulty')
}
ONE_EACH = [
    next(cell for cell in CELLS if rule in refusals(cell) + faults(cell))
    for rule in combinations.REFUSED + combinations.FAULTS
]
FEW = covering(BY_KIND['works'])
FEW = [
    *dict.fromkeys([*FEW, *covering(CELLS, FEW), *ONE_EACH])
]  # pairs of which no cell works, each refusal, each fault


def run(cell, folder, monkeypatch):
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(folder / 'minari'))
    want = 'works' if faults(cell) else declared(cell)
    assert outcome(cell, folder) == want


@pytest.mark.parametrize('cell', params(FEW))
def test_pairs(cell, tmp_path, monkeypatch):
    "Ray's actors are objects in this process, here"
    fake = OneThread()
    monkeypatch.setattr(ray_engine, '_ray', lambda: fake)
    run(cell, tmp_path, monkeypatch)


@pytest.mark.parametrize('cell', params(CELLS, pytest.mark.slow))
def test_whole_product(cell, tmp_path, monkeypatch, request):
    if cell.use == 'ray_shards':
        request.getfixturevalue('machine')
    run(cell, tmp_path, monkeypatch)


def test_each_pair_is_tried():
    assert set().union(*map(pairs, FEW)) == set().union(*map(pairs, CELLS)) and len(
        CELLS
    ) == np.prod([len(v) for v in AXES.values()])


def test_the_page_shows_what_is_declared():
    assert json.loads(FILE.read_text()) == table(), 'python tests/combinations.py'


# ---- does the contract notice? ----


def replay(kind='proportional'):
    replay, model = Cell(kind, 'rows', 'main', 'own_loop').replay(), Model(kind)
    combinations.fill(replay, model)
    for _ in range(6):
        batch = replay.sample()
        model.check(batch)
        model.tell(batch)
    return replay, model


@pytest.mark.parametrize(
    'column',
    [
        'state.observation',
        'next_state.achieved_goal',
        'reward',
        'truncated',
        'episode_n',
        'total_reward',
        'hidden',
    ],
)
def test_a_wrong_number_is_noticed(column):
    memory, model = replay()
    batch = memory.sample()
    x = batch.rows
    for part in column.split('.'):
        x = x[part]
    x[2] = x[2] + 1 if x.dtype != bool else ~x[2]
    with pytest.raises(AssertionError, match=column):
        model.check(batch)


@pytest.mark.parametrize('kind', ['proportional', 'rank', 'sequences', 'uniform'])
def test_wrong_weights_are_noticed(kind):
    memory, model = replay(kind)
    batch = memory.sample()
    weight, errors = batch['weight'], [error_of(k) for k in batch['index'].tolist()]
    weight[[e == max(errors) for e in errors]] = 1.5  # of the largest error
    with pytest.raises(AssertionError, match='errors and weights'):
        model.check(batch)


def test_keys_that_are_gone_or_swapped_are_noticed():
    memory, model = replay('uniform')
    batch = memory.sample()
    batch['index'][0] = model.newest - MAX_SZ
    with pytest.raises(AssertionError, match='key'):
        model.check(batch)
    batch = memory.sample()
    batch['index'][:2] = batch['index'][:2].flip(0)
    with pytest.raises(AssertionError, match='row'):
        model.check(batch)


def test_a_goal_that_was_never_reached_is_noticed():
    memory, model = replay('hindsight')
    batch = memory.sample()
    batch.rows['state']['desired_goal'][0] += 1000
    with pytest.raises(AssertionError, match='has the goal'):
        model.check(batch)


def test_a_sequence_of_another_episode_is_noticed():
    memory, model = replay('sequences')
    batch = memory.sample()
    batch.rows[:, 1] = batch.rows[:, 2]
    with pytest.raises(AssertionError):
        model.check(batch)
