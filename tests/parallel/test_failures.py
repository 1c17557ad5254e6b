"""Each engine × memory × store × failure: a shard fails, the stream goes on, what is lost is counted; it fails again, and the run ends."""

import json

import pytest

import failures
from failures import AXES, CELLS, FILE, PAIRS
from fastrl_replay.all import *
from workers import no_process_is_left  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        'ignore::DeprecationWarning', 'ignore::UserWarning', 'ignore::FutureWarning'
    ),
]  # fast: `test_shards`


def named(cells):
    return [pytest.param(cell, id='-'.join(cell)) for cell in cells]


@pytest.mark.parametrize('cell', named(c for c in CELLS if c.engine == 'process'))
def test_on_processes(cell, tmp_path):
    failures.seen(cell, tmp_path)


@pytest.mark.parametrize('cell', named(PAIRS))
def test_pairs_on_ray(machine, cell, tmp_path):
    failures.seen(cell, tmp_path)


@pytest.mark.parametrize('cell', named(c for c in CELLS if c.engine == 'ray' and c not in PAIRS))
def test_whole_product_on_ray(machine, cell, tmp_path):
    failures.seen(cell, tmp_path)


def test_the_page_shows_all_cells():
    shown = json.loads(FILE.read_text())
    assert shown['axes'] == AXES and [*shown['cells']] == [' '.join(cell) for cell in CELLS], (
        'python tests/failures.py'
    )
