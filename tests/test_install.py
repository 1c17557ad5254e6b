"""What people install: lower bounds, files that survive a clone on any system, an installation that can't be written."""

import ast, importlib.util, re, sys

import pytest, fastrl_replay
from test_house import ROOT, SURFACE, run, tomllib


def pinned():
    return dict(
        l.strip().split('==')
        for l in (ROOT / '.ci/lowest.txt').read_text().splitlines()
        if '==' in l
    )


def test_lowest_versions_are_those_of_pyproject():
    "A constraint for each dependency, and none that pyproject would refuse or that is far above its bound"
    asked = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project'][
        'dependencies'
    ]
    bounds = dict(re.fullmatch(r'([\w-]+)>=([\d.]+)', d).groups() for d in asked)
    assert {*bounds} == {*pinned()}
    for name, version in pinned().items():
        assert f'{version}.'.startswith(f'{bounds[name]}.'), (name, version, bounds[name])
    assert bounds['torch'] == '2.6' and bounds['gymnasium'] == '1.4' and bounds['numpy'] == '2.0'


def test_the_version_is_the_same_everywhere():
    "In the package, in the changelog's first heading and in the citation"
    version = fastrl_replay.__version__
    assert (
        re.search(r'^## (\S+)', (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8'), re.M)[1]
        == version
    )
    assert f'\nversion: {version}\n' in (ROOT / 'CITATION.cff').read_text(
        encoding='utf-8'
    ) and re.fullmatch(r'\d+\.\d+\.\d+', version)


def test_the_tables_of_versions_and_extras_are_those_of_their_sources():
    run(sys.executable, ROOT / 'docs/versions.py', '--check')


def test_no_file_of_the_repository_is_a_link():
    "A clone on Windows holds the link's text instead"
    modes = run('git', 'ls-files', '--stage').splitlines()
    links = [
        l.split('\t')[1]
        for l in modes
        if l.startswith('120000') and (ROOT / l.split('\t')[1]).is_symlink()
    ]
    assert not links, links


def test_kernels_are_compiled_where_nothing_can_be_written(tmp_path, monkeypatch):
    "numba keeps machine code beside the module, or in the user's cache; where neither can be written it does without"
    (tmp_path / 'kernels.py').write_text(
        'from fastrl_replay.steps.compiled import njit\n@njit\ndef add(a, b): return a + 2*b\n'
    )
    (tmp_path / '__pycache__').write_text('a file where a folder should be')
    monkeypatch.setenv('HOME', str(tmp_path / 'kernels.py'))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'kernels.py'))
    monkeypatch.setenv('IPYTHONDIR', str(tmp_path))
    spec = importlib.util.spec_from_file_location('kernels', tmp_path / 'kernels.py')
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    assert mod.add(3, 4) == 11 and (tmp_path / '__pycache__').is_file()


USER = ROOT / 'tests/typing/user.py'


def test_the_user_that_checkers_read_uses_all_that_is_public():
    "Each name of the public surface, and each chained method"
    used = {
        getattr(n, 'id', None) or getattr(n, 'attr', None)
        for n in ast.walk(ast.parse(USER.read_text(encoding='utf-8')))
    }
    stub = ast.parse((ROOT / 'fastrl_replay/pipe.pyi').read_text(encoding='utf-8'))
    (pipe,) = (n for n in stub.body if isinstance(n, ast.ClassDef) and n.name == 'Pipe')
    methods = [f.name for f in pipe.body if isinstance(f, ast.FunctionDef)]
    chained = methods[methods.index('map') :]
    assert {'map', 'n_step', 'prioritized_replay', 'dqn'} <= {*chained}
    public = {name for names in SURFACE.values() for name in names.split()}
    assert not (missing := {*public, *chained} - used), missing


@pytest.mark.slow
def test_public_surface_has_types_that_a_checker_accepts(tmp_path):
    "mypy follows the package's stubs through a user's program, finds no error that isn't there, and those that are"

    def said(path):
        return run(sys.executable, '-c', MYPY, '--config-file', ROOT / 'pyproject.toml', path)

    assert 'Success' in (found := said(USER)), found
    (tmp_path / 'wrong.py').write_text(WRONG)
    found = said(tmp_path / 'wrong.py')
    assert [int(l.split(':')[1]) for l in found.splitlines() if ': error: ' in l] == [2, 3, 4], (
        found
    )


MYPY = "import sys; from mypy import api; print(*api.run(sys.argv[1:])[:2])"  # whatever it finds, the exit status is 0
WRONG = """from fastrl_replay.all import *
SumTree(8).upadte([0], [1.])
Steps.cat([]).copy(1)
GymStepper('CartPole-v1').n_step('three', .99)
"""
