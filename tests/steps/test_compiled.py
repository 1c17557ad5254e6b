"""How kernels are compiled: when a line says so, and what of it Python's garbage collector sees."""

import gc, os, subprocess, sys
from pathlib import Path

import pytest
from fastrl_replay.steps.compiled import njit

ROOT = Path(__file__).resolve().parents[2]
LINE = 'fastrl_replay compiles its kernels (once; 0 s so far) ...\n'

KERNELS = """import sys
from fastrl_replay.steps import compiled
compiled.SAY_AFTER = float(sys.argv[1])
@compiled.njit
def inner(a): return a + 1
@compiled.njit
def outer(a): return 2*inner(a)
exec(sys.argv[2])
"""


@pytest.fixture
def said(tmp_path):
    """(seconds before a line, what to run) → what a process with the folder's kernels says.

    Nothing is compiled at first."""
    (tmp_path / 'kernels.py').write_text(KERNELS)
    env = dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path / 'cache'), PYTHONPATH=str(ROOT))

    def run(after, code):
        done = subprocess.run(
            [sys.executable, tmp_path / 'kernels.py', str(after), code],
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


@pytest.mark.slow
def test_a_line_says_once_that_kernels_are_compiled(said):
    "Not if it is fast, or if they are on disk"
    assert said(60, 'outer(3)') == ''
    assert said(0, 'outer(3)') == ''  # found on disk
    assert said(0, 'outer(3.); inner(True)') == LINE


def test_garbage_is_collected_again_after_a_kernel_was_compiled():
    def fails(a):
        return a.nothing_like_this

    for on in True, False:
        (gc.enable if on else gc.disable)()
        try:
            assert njit(lambda a: a + 1)(3) == 4 and gc.isenabled() == on
            with pytest.raises(Exception):
                njit(fails)(3)
            assert gc.isenabled() == on
        finally:
            gc.enable()
