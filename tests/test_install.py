"""What people install: lower bounds, files that survive a clone on any system, an installation that can't be written."""
import importlib.util, re, sys

import pytest
from test_house import ROOT, run, tomllib

def pinned(): return dict(l.strip().split('==') for l in (ROOT/'.ci/lowest.txt').read_text().splitlines() if '==' in l)

def test_lowest_versions_are_those_of_pyproject():
    "A constraint for each dependency, and none that pyproject would refuse or that is far above its bound"
    asked = tomllib.loads((ROOT/'pyproject.toml').read_text(encoding='utf-8'))['project']['dependencies']
    bounds = dict(re.fullmatch(r'([\w-]+)>=([\d.]+)', d).groups() for d in asked)
    assert {*bounds} == {*pinned()}
    for name, version in pinned().items(): assert f'{version}.'.startswith(f'{bounds[name]}.'), (name, version, bounds[name])
    assert bounds['torch'] == '2.6' and bounds['gymnasium'] == '1.4' and bounds['numpy'] == '2.0'

def test_no_file_of_the_repository_is_a_link():
    "A clone on Windows holds the link's text instead"
    modes = run('git', 'ls-files', '--stage').splitlines()
    links = [l.split('\t')[1] for l in modes if l.startswith('120000') and (ROOT/l.split('\t')[1]).is_symlink()]
    assert not links, links

def test_kernels_are_compiled_where_nothing_can_be_written(tmp_path, monkeypatch):
    "numba keeps machine code beside the module, or in the user's cache; where neither can be written it does without"
    (tmp_path/'kernels.py').write_text('from fastrl_replay.steps.compiled import njit\n@njit\ndef add(a, b): return a + 2*b\n')
    (tmp_path/'__pycache__').write_text('a file where a folder should be')
    monkeypatch.setenv('HOME', str(tmp_path/'kernels.py')); monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'kernels.py'))
    monkeypatch.setenv('IPYTHONDIR', str(tmp_path))
    spec = importlib.util.spec_from_file_location('kernels', tmp_path/'kernels.py')
    mod = importlib.util.module_from_spec(spec); spec.loader.exec_module(mod)
    assert mod.add(3, 4) == 11 and (tmp_path/'__pycache__').is_file()

@pytest.mark.slow
def test_public_surface_has_types_that_a_checker_accepts(tmp_path):
    "mypy follows the package's own annotations through a user's program, and finds no error that isn't there"
    (tmp_path/'user.py').write_text(USER)
    done = run(sys.executable, '-m', 'mypy', '--config-file', ROOT/'pyproject.toml', tmp_path/'user.py')
    assert 'Success' in done, done

USER = """
from collections.abc import Iterator
from fastrl_replay.steps.core import Steps
from fastrl_replay.envs.stepper import GymStepper
from fastrl_replay.stages.nstep import NStep
from fastrl_replay.pipe import Pipe
from fastrl_replay.replay.experience import ExperienceReplay
from fastrl_replay.replay.prioritized import PrioritizedReplay
from fastrl_replay.replay.sequences import SequenceReplay
from fastrl_replay.memory.rows import Rows

source: Pipe = GymStepper(['CartPole-v1']*2, seed=0).n_step(3, gamma=.99)
replay = PrioritizedReplay(source, bs=64, max_sz=1000, beta=lambda n: min(1., n/100), store=Rows(), ratio=.5, seed=0)
batch: Steps = replay.sample()
keys = replay.add(batch)
size: int = len(replay)
other = ExperienceReplay(None, 32, 100, seed=1)
sequences = SequenceReplay(None, bs=4, max_sz=100, length=8, burn_in=2)
batches: Iterator = iter(replay)
saved = replay.state_dict()
replay.load_state_dict(saved)
"""
