"""Installations: lower bounds, one that can't be written, types that checkers accept."""

import ast
import importlib.util
import re
import sys

import pytest

import fastrl_replay.all
from test_house import ROOT, SURFACE, run


def test_the_version_is_the_same_everywhere():
    "In the package, in the changelog's first heading and in the citation"
    version = fastrl_replay.__version__
    assert re.fullmatch(r'\d+\.\d+\.\d+', version)
    changelog = (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8')
    assert re.search(r'^## (\S+)', changelog, re.M)[1] == version
    assert f'\nversion: {version}\n' in (ROOT / 'CITATION.cff').read_text(encoding='utf-8')


def test_kernels_are_compiled_if_nothing_can_be_written(tmp_path, monkeypatch):
    "numba keeps machine code beside the module or in the user's cache; without both it works, too"
    kernels = tmp_path / 'kernels.py'
    kernels.write_text(
        'from fastrl_replay.steps.compiled import njit\n@njit\ndef add(a, b): return a + 2*b\n'
    )
    (tmp_path / '__pycache__').write_text('a file where a folder should be')
    for name in 'HOME', 'XDG_CACHE_HOME':
        monkeypatch.setenv(name, str(kernels))
    monkeypatch.setenv('IPYTHONDIR', str(tmp_path))
    spec = importlib.util.spec_from_file_location('kernels', kernels)
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    assert mod.add(3, 4) == 11
    assert (tmp_path / '__pycache__').is_file()


USER = ROOT / 'tests/typing/user.py'
MYPY = "import sys; from mypy import api; print(*api.run(sys.argv[1:])[:2])"  # its exit status is 0
WRONG = """from fastrl_replay.all import *
SumTree(8).upadte([0], [1.])
Steps.cat([]).copy(1)
GymStepper('CartPole-v1').n_step('three', .99)
"""


def test_the_program_that_checkers_read_uses_all_that_is_public():
    "Each name of the public surface, and each chained method"
    used = set()
    for node in ast.walk(ast.parse(USER.read_text(encoding='utf-8'))):
        used |= {getattr(node, 'id', None), getattr(node, 'attr', None)}
    surface = {name for names in SURFACE.values() for name in names.split()}
    chained = set()
    for name in surface:
        cls = getattr(fastrl_replay.all, name)
        chained |= {cls.stage_name} if hasattr(cls, 'stage_name') else set()
    assert {'n_step', 'prioritized_replay', 'dqn'} <= chained
    assert not (surface | chained) - used


@pytest.mark.slow
def test_public_surface_has_types_that_a_checker_accepts(tmp_path):
    "mypy follows the stub through a user's program, and finds the errors that are there, no others"

    def said(path):
        return run(sys.executable, '-c', MYPY, '--config-file', ROOT / 'pyproject.toml', path)

    found = said(USER)
    assert 'Success' in found, found
    (tmp_path / 'wrong.py').write_text(WRONG)
    found = said(tmp_path / 'wrong.py')
    assert re.findall(r':(\d+): error: ', found) == ['2', '3', '4'], found
