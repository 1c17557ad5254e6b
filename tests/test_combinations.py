"""Each pair of memory, store, place and use works as a plain model says, or is refused."""

import json

import pytest

import combinations
from combinations import CELLS, FILE, REFUSED, Cell, covering, pairs, refusals, table, works
from fastrl_replay.parallel import ray_engine
from fastrl_replay.all import *
from plain_model import Model
from test_ray import OneThread
from workers import no_process_is_left  # noqa: F401

pytestmark = pytest.mark.filterwarnings(
    'ignore::DeprecationWarning', 'ignore::UserWarning', 'ignore:.*overlap'
)

WORK = covering([cell for cell in CELLS if not refusals(cell)])
NEVER = covering(CELLS, WORK)  # pairs of which no cell works
ONE_EACH = [next(cell for cell in CELLS if rule in refusals(cell)) for rule in REFUSED]
FEW = [*dict.fromkeys([*WORK, *NEVER, *ONE_EACH])]


@pytest.mark.parametrize('cell', [pytest.param(cell, id='-'.join(cell[:4])) for cell in FEW])
def test_pairs(cell, tmp_path, monkeypatch):
    "Ray's actors are objects in this process"
    fake = OneThread()
    monkeypatch.setattr(ray_engine, '_ray', lambda: fake)
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path / 'minari'))
    assert works(cell, tmp_path) == (not refusals(cell))


def test_each_pair_is_tried():
    assert set().union(*map(pairs, FEW)) == set().union(*map(pairs, CELLS))


def test_the_page_shows_what_is_declared():
    assert json.loads(FILE.read_text()) == table(), 'python tests/combinations.py'


# ---- does the plain model notice? ----


def filled(kind):
    replay, model = Cell(kind, 'rows', 'main', 'own_loop').replay(), Model(kind)
    combinations.fill(replay, model)
    for _ in range(6):
        batch = replay.sample()
        model.check(batch)
        model.tell(batch)
    return replay.sample(), model


@pytest.mark.parametrize('column', ['next_state.achieved_goal', 'truncated', 'hidden'])
def test_a_wrong_number_is_noticed(column):
    batch, model = filled('proportional')
    x = batch.rows
    for part in column.split('.'):
        x = x[part]
    x[2] = ~x[2] if x.dtype == bool else x[2] + 1
    with pytest.raises(AssertionError, match=column):
        model.check(batch)


def test_a_wrong_weight_is_noticed():
    batch, model = filled('proportional')
    batch['weight'][batch['weight'].argmin()] = 1.5
    with pytest.raises(AssertionError, match='errors and weights'):
        model.check(batch)


def test_swapped_keys_are_noticed():
    batch, model = filled('uniform')
    batch['index'][:2] = batch['index'][:2].flip(0)
    with pytest.raises(AssertionError, match='row'):
        model.check(batch)
