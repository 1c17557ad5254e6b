"""The scripts in benchmarks/: they run, check the rows that come back, and write their results."""

import json, os, subprocess, sys

import pytest
from test_house import ROOT


def script(name, *args):
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    run = subprocess.run(
        [sys.executable, ROOT / 'benchmarks' / name, *map(str, args)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert not run.returncode, run.stderr
    return run.stdout


@pytest.mark.slow
def test_contests_run_and_write_results(tmp_path):
    "Ours only, small; no timing decides"
    shown = script('run.py', 'add_step', 'six_buffers', '--quick', '--out', tmp_path)
    for name in 'add_step', 'six_buffers':
        found = json.loads((tmp_path / f'{name}.json').read_text())
        assert not found['faults'] and found['made']['quick'] and found['machine']['torch'], found[
            'faults'
        ]
        for title, times in found['contests'].items():
            assert title in shown and all(us > 0 for entry in times.values() for us in entry)


def test_an_unknown_contest_is_named():
    run = subprocess.run(
        [sys.executable, ROOT / 'benchmarks/run.py', 'raws'], capture_output=True, text=True
    )
    assert run.returncode == 2 and 'raws' in run.stderr and 'six_buffers' in run.stderr


@pytest.mark.slow
def test_a_checkout_is_compared_with_itself():
    shown = script('ab.py', ROOT, ROOT, 'one stage', '--rounds', 3)
    assert 'an item through one stage' in shown and 'new/old' in shown
