"""What the README's first command runs."""
import subprocess, sys

import pytest

from fastrl_replay.__main__ import train

def test_same_seed_same_run():
    "Environments, draws, network: all of it follows from the seed"
    a, b, c = (train(800, seed=s, progress=False) for s in (0, 0, 1))
    assert a == b != c

@pytest.mark.slow
def test_the_command_learns():
    "Seed 0 ends far above the 20 steps of a random policy"
    out = subprocess.run([sys.executable, '-m', 'fastrl_replay'], capture_output=True, text=True, check=True).stdout
    assert float(out.split(': ')[1].split(' of ')[0]) > 195, out
