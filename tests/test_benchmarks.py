"""The scripts in benchmarks/ run, check the rows and write their results. No timing decides."""

import json
import sys

import pytest
from test_house import ROOT, run


def script(name, *args):
    return run(sys.executable, ROOT / 'benchmarks' / name, *args, cwd=ROOT / 'benchmarks')


@pytest.mark.slow
def test_contests_run_and_write_results(tmp_path):
    shown = script('run.py', 'add_step', 'six_buffers', '--quick', '--out', tmp_path)
    for name in 'add_step', 'six_buffers':
        found = json.loads((tmp_path / f'{name}.json').read_text())
        assert not found['faults'], found['faults']
        assert found['made']['quick'] and found['machine']['torch']
        for title, times in found['contests'].items():
            assert title in shown
            assert all(us > 0 for entry in times.values() for us in entry)


@pytest.mark.slow
def test_a_checkout_is_compared_with_itself():
    shown = script('ab.py', ROOT, ROOT, 'one stage', '--rounds', 3)
    assert 'an item through one stage' in shown and 'new/old' in shown
