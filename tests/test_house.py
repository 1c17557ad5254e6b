"""Notebooks and modules in step, layers, the public surface, README and wheel."""

import ast
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import is_dataclass
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest
from fastcore.docments import docments
from soak.seeded_faults import FAULTS

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # nbdev's commands are beside the interpreter
NOTEBOOKS = sorted(p for p in ROOT.glob('nbs/**/*.ipynb') if '.ipynb_checkpoints' not in p.parts)
TORCH = 'torch~=2.13.0'  # as in the README's commands

# The public surface, as documented: module -> names that `from fastrl_replay.all import *` gives.
# A new public name is added here, in the index's map and in the changelog.
SURFACE = {
    'steps.core': 'Steps',
    'steps.row_dtypes': 'step_dtype',
    'steps.errors': (
        'ActionError ArgumentError ArgumentTypeError BlockError EnvError '
        'NotEnoughRows StaleKey StateError'
    ),
    'pipe': 'Pipe stage Items MapToIterConverter WorkerInfo worker_info',
    'generic': 'Cycler Header InMemoryCacheHolder',
    'steps.batches': 'Sequences',
    'steps.files': 'write_whole',
    'testing': 'check_contract ScriptedEnv ScriptedLanes ScriptedVectorEnv script scripted_steps',
    'envs.agents': 'Agents',
    'envs.stepper': 'GymStepper',
    'envs.tensor_stepper': 'TensorStepper',
    'replay.own_steps': 'OwnSteps',
    'stages.nstep': 'NStep NSkip',
    'stages.chunker': 'SequenceChunker',
    'memory.rows': 'Rows',
    'memory.frames': 'Frames',
    'memory.timeline': 'Timeline',
    'memory.sumtree': 'SumTree',
    'memory.ranktree': 'RankTree',
    'memory.samplers': 'Sampler Uniform',
    'memory.priorities': 'Proportional Ranked',
    'replay.experience': 'ExperienceReplay',
    'replay.prioritized': 'PrioritizedReplay',
    'replay.sequences': 'SequenceReplay',
    'replay.hindsight': 'HindsightReplay',
    'replay.mixture': 'Mixture',
    'replay.lanes': ('LaneBatch LaneBatches LanePriority LaneReplay LaneUniform'),
    'data.datasets': 'read_minari write_minari',
    'learning.losses': 'double_q_target mixed_priority n_step_targets rescale unrescale',
    'learning.networks': 'Branches Dueling FlattenSpace RecurrentNet conv_net value_net',
    'learning.policies': 'EpsGreedy GeometricSchedule LinearSchedule',
    'learning.continuous': 'BoxBounds Critics GaussianNoise SquashedGaussian actor_net squashed',
    'stages.journal': 'Gather Journal',
    'stages.norms': 'Normalized RewardNorm ScaleRewards StateNorm UpdateNorms',
    'learning.evaluation': 'evaluate',
    'stages.recorded': 'Episodes',
    'app.offline': 'Offline',
    'app.saved_policies': 'load_policy',
    'learning.base': 'discounts',
    'learning.tabular': 'QLearner QTable',
    'learning.dqn': 'DQNLearner dqn_errors',
    'learning.r2d2': 'R2D2Learner r2d2_errors',
    'learning.sac': 'SACLearner sac_errors',
    'learning.td3': 'TD3Learner td3_errors',
    'data.interop': 'Columns PipeNode StatefulPipe',
    'parallel.engines': 'WorkerError',
    'parallel.ray_engine': 'RayEngine',
    'parallel.stage': 'Parallel',
    'parallel.service': 'NotEnoughDraws Service ServiceError connect stop_service',
    'parallel.prefetch': 'Prefetch',
    'parallel.ranks': 'RankError RankWeights Ranks Rounds',
}

# ---- helpers ----


def run(*cmd, cwd=ROOT, timeout=600):
    "Run a command and return its output; fail with the output, not with a traceback of this file."
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}  # IN_TEST turns nbdev-export off
    cmd = [str(c) for c in cmd]
    ended = subprocess.run(
        cmd,
        cwd=cwd,
        env=env,
        timeout=timeout,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if ended.returncode:
        text = f'{" ".join(cmd)}\nended with {ended.returncode} and said:\n{ended.stdout}'
        pytest.fail(text, pytrace=False)
    return ended.stdout


def tree(*folders):
    "Return the paths, from the top level, of the files that a commit of all here would hold."
    options = '--cached', '--others', '--exclude-standard'
    out = run('git', 'ls-files', '-z', *options, '--', *folders)
    return {Path(p) for p in out.split('\0') if p and (ROOT / p).is_file()}


def copy_tree(folder):
    "Copy those files, as a clone would."
    for p in tree():
        (folder / p).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / p, folder / p)
    return folder


def page_of(nb):
    return nb.relative_to(ROOT / 'nbs').with_suffix('').as_posix()


def cells(nb, kind='code'):
    "Return the non-empty cells of one kind in a notebook file."
    found = json.loads(nb.read_text(encoding='utf-8'))['cells']
    return [c for c in found if c['cell_type'] == kind and ''.join(c['source']).strip()]


def modules():
    "Return dotted name → file of every module that a notebook exports."
    found = {}
    for path in sorted((ROOT / 'fastrl_replay').rglob('*.py')):
        if 'AUTOGENERATED! DO NOT EDIT! File to edit' in path.read_text(encoding='utf-8'):
            name = path.relative_to(ROOT / 'fastrl_replay').with_suffix('')
            found['.'.join(name.parts)] = path
    return found


def imports(name, path):
    "Yield what a module imports, as absolute dotted names; `from a import b` gives a and a.b."
    package = f'fastrl_replay.{name}'.rpartition('.')[0]
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        if isinstance(node, ast.ImportFrom):
            base = resolve_name('.' * node.level + (node.module or ''), package)
            yield from [base, *(f'{base}.{a.name}' for a in node.names)]


# ---- notebooks and modules ----


def test_notebooks_and_modules_are_in_step(tmp_path):
    "Exporting and cleaning again, from the notebooks alone, gives the same files."
    copy = copy_tree(tmp_path / 'copy')
    for path in (copy / 'fastrl_replay').rglob('*.py'):
        if path != copy / 'fastrl_replay/__init__.py':  # that one is written by hand
            path.unlink()
    run(BIN / 'nbdev-export', cwd=copy)
    run(BIN / 'nbdev-clean', cwd=copy)
    here = tree('fastrl_replay', 'nbs')
    again = {p.relative_to(copy) for d in ('fastrl_replay', 'nbs') for p in (copy / d).rglob('*.*')}
    again = {p for p in again if '__pycache__' not in p.parts}
    same = {p for p in here & again if (ROOT / p).read_bytes() == (copy / p).read_bytes()}
    wrong = sorted(map(str, (here | again) - same))
    remedy = (
        'Remedy: edit the notebook, not the module; then nbdev-export && nbdev-clean; '
        'delete what no notebook exports.'
    )
    assert not wrong, '\n'.join([*wrong, remedy])


QUICK = {'generic', 'memory/rows', 'pipe'}


@pytest.mark.parametrize(
    'nb',
    [
        pytest.param(nb, id=page_of(nb), marks=[] if page_of(nb) in QUICK else pytest.mark.slow)
        for nb in NOTEBOOKS
    ],
)
def test_notebook_executes(forks, nb):
    "Without the cells that begin with `#| slow`; a few of the quick ones are fast tests."
    wrong = forks.run(nb)
    if wrong:
        pytest.fail(wrong, pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize('code, said', [('1/0', 'ZeroDivision'), ('while True: pass', 'Timeout')])
def test_a_notebook_that_fails_is_reported(forks, tmp_path, code, said):
    path = tmp_path / 'wrong.ipynb'
    cell = dict(
        cell_type='code', id='a', metadata={}, execution_count=None, outputs=[], source=code
    )
    path.write_text(json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5)))
    wrong = forks.run(path, limit=5)
    assert 'wrong.ipynb ended with 1' in wrong and said in wrong


@pytest.mark.parametrize('nb', NOTEBOOKS, ids=page_of)
def test_notebook_is_a_lesson(nb):
    "It shows its results, none of them an error, and proves what it exports."
    code = cells(nb)
    shown = [c for c in code if not re.match(r'#\|\s*hide\s', ''.join(c['source']))]
    outputs = [o for c in shown for o in c['outputs']]
    assert not [o['evalue'] for o in outputs if o['output_type'] == 'error']
    assert outputs or not shown, f'remedy: nbdev-test --save {nb.relative_to(ROOT)}'
    exported = [c for c in code if re.search(r'^#\s*\|\s*export', ''.join(c['source']), re.M)]
    lessons = '\n'.join(''.join(c['source']) for c in code if c not in exported)
    assert not re.findall(r'^ *expect_fail\(.*', lessons, re.M), 'expect_fail is a context manager'
    proved = re.search(r'^\s*(assert|test_\w+|check_\w+|with expect_fail)\b', lessons, re.M)
    assert proved or not exported


# ---- layers ----


@functools.cache
def graph():
    "Return module → the modules that it imports, those in functions included."
    mods = modules()
    found = {}
    for name, path in mods.items():
        used = {i.removeprefix('fastrl_replay.') for i in imports(name, path)}
        found[name] = used & {*mods} - {name}
    return found


FLOORS = (
    'base_pipes steps pipe generic testing memory stages envs replay learning data sb3 parallel '
    'look app all cli __main__'
).split()


def test_imports_point_downward():
    "A module imports from its own folder and from those below, and imports make no circle."
    floor = lambda name: FLOORS.index(name.split('.')[0])
    edges = [(name, used) for name, needs in graph().items() for used in needs]
    assert not [edge for edge in edges if floor(edge[1]) > floor(edge[0])]
    assert len([*TopologicalSorter(graph()).static_order()]) == len(modules())


def test_notebooks_mirror_the_package():
    exported = {}
    for nb in NOTEBOOKS:
        module = re.search(r'#\| *default_exp +([\w.]+)', nb.read_text(encoding='utf-8'))
        if module:
            exported[page_of(nb).replace('main', '__main__').replace('/', '.')] = module[1]
    assert len(exported) > 100
    assert exported == {name: name for name in exported}


def test_datapipes_come_in_by_one_door():
    "torch may drop its datapipes one day: only `pipe` imports them from torch."
    door = re.compile(r'torch\.utils\.data\.(datapipes\b|\w*DataPipe$|functional_datapipe)')
    for name, path in modules().items():
        assert name == 'pipe' or not [*filter(door.match, imports(name, path))], name


# ---- public surface ----


def undocumented(obj):
    "Return what a public class or function lacks: a docstring, or a word about a parameter."
    fn = getattr(obj, 'py_func', obj)  # numba keeps the function there
    if not (inspect.isclass(fn) or inspect.isfunction(fn)):
        return []
    doc = fn.__doc__ or ''
    if not doc.strip():
        return ['a docstring']
    if inspect.isclass(fn):  # an inherited __init__ is documented where it is defined
        if '__init__' not in vars(fn):
            return []
        if not is_dataclass(fn):  # whose fields are documented
            fn = fn.__init__
            doc += fn.__doc__ or ''
    said = docments(fn)
    for base in obj.__mro__ if is_dataclass(obj) else ():
        said |= {p: c for p, c in docments(base).items() if c}
    return [
        f'a word about `{p}`'
        for p, comment in said.items()
        if p not in ('self', 'return', 'args', 'kwargs')
        and not comment
        and not re.search(rf'\b{p}\b', doc)
    ]


def test_star_import_gives_the_documented_surface():
    given = {}
    exec('from fastrl_replay.all import *', given)
    documented = {n for names in SURFACE.values() for n in names.split()}
    assert {*given} - {'__builtins__'} == documented


@pytest.mark.parametrize('module', SURFACE)
def test_surface_is_defined_in_its_module_and_documented(module):
    mod = importlib.import_module(f'fastrl_replay.{module}')
    wrong = []
    for name in SURFACE[module].split():
        obj = getattr(mod, name)
        home = getattr(obj, '__module__', None) or mod.__name__  # constants know no module
        if home.startswith('fastrl_replay') and home != mod.__name__:
            wrong.append(f'{name} is defined in {home}')
        wrong += [f'{name} lacks {what}' for what in undocumented(obj)]
    assert not wrong, '\n'.join(wrong)


# ---- README, style, wheel ----


@pytest.mark.parametrize('script', ['figures', 'readme', 'stubs', 'versions'])
def test_what_a_script_writes_is_up_to_date(script):
    run(sys.executable, ROOT / f'docs/{script}.py', '--check')


def test_ruff_is_content():
    run(sys.executable, '-m', 'ruff', 'check', 'fastrl_replay', 'tests', 'docs', 'benchmarks')
    run(sys.executable, '-m', 'ruff', 'check', '--select', 'E501', 'nbs')


def test_seeded_faults_are_in_the_modules():
    "Or a change of a module would turn a fault off without a word"
    for fault in FAULTS:
        source = (ROOT / 'fastrl_replay' / fault.module).read_text(encoding='utf-8')
        assert source.count(fault.text) == 1, fault


# A first script, run with the installed wheel and nothing else.
PIPELINE = """
import fastrl_replay
from fastrl_replay.all import *
pipe = GymStepper(['CartPole-v1']*2, seed=0).experience_replay(bs=8, max_sz=100)
batch = next(iter(pipe))
assert tuple(batch.state.shape) == (8, 4), batch
print(fastrl_replay.__file__)
"""


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(tmp_path):
    "Built from a clean copy, installed with nothing but what it asks for, used from elsewhere."
    copy = copy_tree(tmp_path / 'copy')
    run(sys.executable, '-m', 'build', '--wheel', '--outdir', tmp_path, copy)
    (wheel,) = tmp_path.glob('*.whl')
    packed = {p for p in zipfile.ZipFile(wheel).namelist() if '.dist-info/' not in p}
    assert packed == {p.as_posix() for p in tree('fastrl_replay')}

    python = tmp_path / 'venv/bin/python'
    run(sys.executable, '-m', 'venv', tmp_path / 'venv')
    run(python, '-m', 'pip', 'install', '--quiet', TORCH, wheel)
    (tmp_path / 'script.py').write_text(PIPELINE)
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    # settings.ini came along
    assert 'cartpole-r2d2' in run(python.parent / 'fastrl-replay', 'recipes', cwd=elsewhere)
    used = run(python, '-I', tmp_path / 'script.py', cwd=elsewhere).splitlines()[-1]
    assert Path(used).is_relative_to(tmp_path / 'venv')
