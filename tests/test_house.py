"""What holds the house together: notebooks and modules in step, layers, public surface, README, wheel."""

import ast, functools, importlib, inspect, json, os, re, shutil, subprocess, sys, zipfile
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest
from fastcore.docments import docments

try:
    import tomllib
except ImportError:
    import tomli as tomllib  # Python 3.10; pytest needs it there

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # nbdev's commands live beside the interpreter
NOTEBOOKS = sorted(
    p
    for p in ROOT.glob('nbs/**/*.ipynb')
    if not any(part[0] in '._' for part in p.relative_to(ROOT).parts)
)
TORCH = 'torch~=2.13.0'  # as in the README's commands

# The public surface, as documented: module -> names that `from fastrl_replay.all import *` gives.
# A new public name is added here, in the index's map and in the changelog.
SURFACE = {
    'steps.core': 'Steps',
    'steps.row_dtypes': 'step_dtype',
    'steps.errors': 'ActionError ArgumentError ArgumentTypeError BlockError EnvError NotEnoughRows StaleKey StateError',
    'pipe': 'Pipe stage Items MapToIterConverter WorkerInfo worker_info',
    'generic': 'Cycler Header InMemoryCacheHolder',
    'steps.batches': 'Sequences',
    'steps.files': 'write_whole',
    'testing': 'check_contract ScriptedEnv ScriptedVectorEnv script scripted_steps',
    'envs.agents': 'Agents',
    'envs.stepper': 'GymStepper',
    'envs.own_steps': 'OwnSteps',
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
    'data.datasets': 'read_minari write_minari',
    'learning.losses': 'double_q_target mixed_priority n_step_targets rescale unrescale',
    'learning.networks': 'Branches Dueling FlattenSpace RecurrentNet conv_net value_net',
    'learning.policies': 'EpsGreedy GeometricSchedule LinearSchedule',
    'learning.continuous': 'BoxBounds Critics GaussianNoise SquashedGaussian actor_net squashed',
    'stages.journal': 'Gather Journal',
    'stages.normalisation': 'Normalised RewardNorm ScaleRewards StateNorm UpdateNorms',
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
    'parallel.coordinator': 'NotEnoughDraws ServiceError',
    'parallel.service': 'Service connect stop',
    'parallel.prefetch': 'Prefetch',
    'parallel.ranks': 'RankError Ranks',
}

# A stranger's first script, run with the installed wheel and nothing else.
PIPELINE = """
import fastrl_replay
from fastrl_replay.all import *
pipe = GymStepper(['CartPole-v1']*2, seed=0).experience_replay(bs=8, max_sz=100)
batch = next(iter(pipe))
assert tuple(batch.state.shape) == (8, 4), batch
print(fastrl_replay.__file__)
"""

# ---- helpers ----


def run(*cmd, cwd=ROOT, timeout=600):
    "Run a command to its end; fail with its whole output, not with a traceback of this file."
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}  # IN_TEST turns nbdev-export off
    cmd = [str(c) for c in cmd]
    try:
        r = subprocess.run(
            cmd,
            cwd=cwd,
            env=env,
            timeout=timeout,
            text=True,
            errors='replace',
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as e:
        out = (e.stdout or b'').decode(errors='replace')
        pytest.fail(f'{" ".join(cmd)}\ntook more than {timeout} s, and said:\n{out}', pytrace=False)
    if r.returncode:
        pytest.fail(
            f'{" ".join(cmd)}\nended with {r.returncode}, and said:\n{r.stdout}', pytrace=False
        )
    return r.stdout


def tree():
    "Paths, from the top level, of the files that a commit of everything here would hold."
    out = run('git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard')
    return sorted(Path(p) for p in set(out.split('\0')) if p and (ROOT / p).is_file())


def copy_tree(dest):
    "A clean copy of those files, as a clone would be."
    for p in tree():
        (dest / p).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / p, dest / p)
    return dest


def cells(nb, kind='code'):
    "The non-empty cells of one kind in a notebook file."
    found = json.loads(nb.read_text(encoding='utf-8'))['cells']
    return [c for c in found if c['cell_type'] == kind and ''.join(c['source']).strip()]


def write_notebook(path, *sources):
    "A notebook of these code cells."
    code = [
        dict(cell_type='code', id=f'c{i}', metadata={}, execution_count=None, outputs=[], source=s)
        for i, s in enumerate(sources)
    ]
    path.write_text(json.dumps(dict(cells=code, metadata={}, nbformat=4, nbformat_minor=5)))
    return path


def is_exported(cell):
    return re.search(r'^#\s*\|\s*export', ''.join(cell['source']), re.M) is not None


def dotted(path):
    "'memory.timeline' for fastrl_replay/memory/timeline.py."
    return '.'.join(path.relative_to(ROOT / 'fastrl_replay').with_suffix('').parts)


def modules():
    "Dotted name -> (file, name of its notebook), for every module that a notebook exports."
    res = {}
    for f in sorted((ROOT / 'fastrl_replay').rglob('*.py')):
        m = re.search(
            r'^# AUTOGENERATED! DO NOT EDIT! File to edit: .*?([^/]+)\.ipynb\.',
            f.read_text(encoding='utf-8'),
            re.M,
        )
        if m:
            res[dotted(f)] = f, m[1]
    return res


def imports(path):
    "What a file imports when it runs: dotted names, absolute ones, each `from a import b` as both a and a.b."
    package, tree = 'fastrl_replay.' + dotted(path), ast.parse(path.read_text(encoding='utf-8'))
    tree.body = [
        n
        for n in tree.body
        if not (isinstance(n, ast.If) and ast.unparse(n.test) == 'TYPE_CHECKING')
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        if isinstance(node, ast.ImportFrom):
            base = resolve_name('.' * node.level + (node.module or ''), package.rpartition('.')[0])
            yield from [base, *(f'{base}.{a.name}' for a in node.names)]


# ---- notebooks and modules ----


def test_notebooks_and_modules_are_in_step(tmp_path):
    "Exporting and cleaning again, from the notebooks alone, gives the same files."
    copy = copy_tree(tmp_path / 'copy')
    for f in (copy / 'fastrl_replay').rglob('*.py'):
        if f != copy / 'fastrl_replay/__init__.py':
            f.unlink()  # that one is written, not exported: the version
    run(BIN / 'nbdev-export', cwd=copy)
    run(BIN / 'nbdev-clean', cwd=copy)
    ours = lambda p: p.parts[0] in ('fastrl_replay', 'nbs')
    here, again = (
        set(filter(ours, tree())),
        {p.relative_to(copy) for p in copy.rglob('*') if p.is_file()},
    )
    again = {p for p in again if ours(p) and '__pycache__' not in p.parts}
    wrong = [f'{p}: no notebook exports it' for p in here - again]
    wrong += [f'{p}: exported, but not in the working tree' for p in again - here]
    wrong += [
        f'{p}: ' + ('not clean' if p.suffix == '.ipynb' else 'not what its notebook exports')
        for p in here & again
        if (ROOT / p).read_bytes() != (copy / p).read_bytes()
    ]
    if wrong:
        pytest.fail(
            '\n'.join(
                [
                    *sorted(wrong),
                    'Remedy: edit the notebook, not the module; then '
                    'nbdev-export && nbdev-clean; delete what no notebook exports.',
                ]
            ),
            pytrace=False,
        )


# These take more than a second and a half; CI runs them, too.
LONG = '''all app/commands app/named_envs app/recipes app/runs app/saved_policies app/tracking app/watching 
    app/offline replay/replay replay/sequence_table command_line data/datasets data/interop envs/atari envs/stepper envs/vector_slots first_training how_fast howto index learning/base look/sample look/show look/page
    learning/continuous learning/dqn learning/policies learning/r2d2 learning/sac learning/tabular learning/td3 memory/frame_log
    memory/frame_segments memory/frames memory/links memory/ranktree memory/draws memory/mapped memory/priorities memory/samplers memory/sumtree memory/timeline own_environment parallel/engines
    parallel/prefetch parallel/ranks parallel/stage replay/experience replay/hindsight replay/mixture replay/prioritized replay/sequence_view replay/sequences sb3
    stages/chunker stages/normalisation stages/nstep stages/recorded steps/compiled steps/core steps/locks steps/settings tutorials/a_memory_on_disk
    tutorials/a_million_frames tutorials/coming_from tutorials/from_machine_to_cluster tutorials/from_one_to_eight tutorials/from_seed_to_here tutorials/goals_in_hindsight
    tutorials/callbacks tutorials/life_of_one_step tutorials/several_agents tutorials/your_data tutorials/your_own_loop tutorials/your_own_stage train'''.split()


@pytest.mark.parametrize(
    'nb',
    [
        pytest.param(
            p,
            marks=[pytest.mark.slow]
            * (p.relative_to(ROOT / 'nbs').with_suffix('').as_posix() in LONG),
        )
        for p in NOTEBOOKS
    ],
    ids=lambda p: p.relative_to(ROOT / 'nbs').as_posix(),
)
def test_notebook_executes(forks, nb):
    "Without the cells that say `#| slow`."
    if wrong := forks.run(nb):
        pytest.fail(wrong, pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    'nb',
    [
        nb
        for nb in NOTEBOOKS
        if any(re.search(r'^#\|\s*slow\b', ''.join(c['source']), re.M) for c in cells(nb))
    ],
    ids=lambda p: p.relative_to(ROOT / 'nbs').as_posix(),
)
def test_notebook_executes_with_its_slow_cells(forks, nb):
    if wrong := forks.run(nb, flags='slow'):
        pytest.fail(wrong, pytrace=False)


@pytest.mark.parametrize(
    'cells, said',
    [
        (['x = 0', '1/x'], ['ended with 1', 'Cell #2', 'ZeroDivisionError']),
        (['import os; os.abort()'], ['ended by SIGABRT', '<ipython-input-1-']),
        (['x = 0', 'while True: pass'], ['ended with 1', 'Timeout', '<ipython-input-2-']),
        (['import os; os._exit(3)'], ['ended with 3']),
    ],
    ids=['error', 'crash', 'endless', 'exit'],
)
def test_a_notebook_that_fails_is_reported(forks, tmp_path, cells, said):
    wrong = forks.run(
        write_notebook(tmp_path / 'wrong.ipynb', *cells), limit=2 if 'Timeout' in said else 600
    )
    for words in ('wrong.ipynb', *said):
        assert words in wrong, wrong


def test_notebooks_are_run_as_nbdev_test_runs_them(forks, tmp_path):
    "In their folder, apart from each other, without fastrl_replay until they import it; processes may be started."
    one = "import os, sys; assert os.environ['IN_TEST'] and os.getcwd() == {!r} and 'fastrl_replay' not in sys.modules; import fastrl_replay.all"
    two = "import multiprocessing as mp; p = mp.get_context('spawn').Process(target=print); p.start(); p.join(); assert p.exitcode == 0"
    shutil.copy(ROOT / 'pyproject.toml', tmp_path)
    nb = write_notebook(
        tmp_path / 'right.ipynb',
        one.format(str(tmp_path)),
        two,
        '#| eval: false\n1/0',
        '#| slow\nprint("slow", 1/0)',
    )
    assert (
        forks.run(nb) is None
        and forks.run(nb) is None
        and 'ZeroDivisionError' in forks.run(nb, flags='slow')
    )


@pytest.mark.parametrize('nb', NOTEBOOKS, ids=lambda p: p.relative_to(ROOT / 'nbs').as_posix())
def test_notebook_is_a_lesson(nb):
    "It shows its results, none of them an error, and proves what it exports."
    code = cells(nb)
    outputs = [(i, o) for i, c in enumerate(code) for o in c['outputs']]
    errors = [
        f"code cell {i}: {o['ename']}: {o['evalue']}"
        for i, o in outputs
        if o['output_type'] == 'error'
    ]
    assert not errors, f'{nb.name} was saved with errors: {errors}'
    seen = [
        c for c in code if not re.match(r'#\|\s*hide\s', ''.join(c['source']))
    ]  # the glossary has the hidden install cell alone
    assert outputs or not seen, (
        f'{nb.name} has no saved outputs; remedy: nbdev-test --save {nb.relative_to(ROOT)}'
    )
    lessons = '\n'.join(''.join(c['source']) for c in code if not is_exported(c))
    idle = re.findall(r'^ *expect_fail\(.*', lessons, re.M)
    assert not idle, (
        f'{nb.name}: expect_fail is a context manager, and does nothing by itself: {idle}'
    )
    proved = re.search(r'^\s*(assert|test_\w+|check_\w+|(with )?expect_fail)\b', lessons, re.M)
    assert proved or not any(map(is_exported, code)), (
        f'{nb.name} exports code that none of its cells tests'
    )


# ---- layers ----


@functools.cache
def graph():
    "Module -> the modules that it imports, those in functions included"
    mods = modules()
    return {
        name: {m for i in imports(path) if (m := i.removeprefix('fastrl_replay.')) in mods} - {name}
        for name, (path, _) in mods.items()
    }


def test_imports_make_no_circle():
    try:
        assert len([*TopologicalSorter(graph()).static_order()]) == len(modules())
    except CycleError as e:
        pytest.fail(
            'imports go around in a circle: ' + ' → '.join(reversed(e.args[1])), pytrace=False
        )


FLOORS = 'steps pipe generic testing envs stages memory replay learning data sb3 parallel look app all cli __main__'.split()


def test_folders_stand_on_each_other():
    "A module imports from its own folder and from those below"
    floor = lambda name: FLOORS.index(name.split('.')[0])
    wrong = [
        f'{name} imports {used}'
        for name, needs in graph().items()
        for used in needs
        if floor(used) > floor(name)
    ]
    assert not wrong, '\n'.join(sorted(wrong))


def test_notebooks_mirror_the_package():
    places = {
        nb.relative_to(ROOT / 'nbs').with_suffix('').as_posix(): m[1]
        for nb in NOTEBOOKS
        if (m := re.search(r'#\| *default_exp +([\w.]+)', nb.read_text(encoding='utf-8')))
    }
    named = {
        place: place.replace('/', '.').replace('main', '__main__') for place in places
    }  # nbdev wants a file name once
    assert named == places, {p: (named[p], m) for p, m in places.items() if named[p] != m}


def test_datapipes_come_in_by_one_door():
    "torch may drop its datapipes one day: only `pipe` imports them from torch."
    door = re.compile(r'torch\.utils\.data\.(datapipes\b|\w*DataPipe$|functional_datapipe)')
    wrong = [
        f'{name} imports {i}'
        for name, (path, _) in modules().items()
        if name != 'pipe'
        for i in imports(path)
        if door.match(i)
    ]
    assert not wrong, 'import these from fastrl_replay.pipe instead:\n' + '\n'.join(wrong)


# ---- public surface ----


def undocumented(obj):
    "What a public class or function lacks: a docstring, or a word about a parameter."
    fn = getattr(obj, 'py_func', obj)  # numba keeps the function there
    if not (inspect.isclass(fn) or inspect.isfunction(fn)):
        return []
    if not (fn.__doc__ or '').strip():
        return ['a docstring']
    if inspect.isclass(fn):  # an inherited __init__ is documented where it is defined
        if '__init__' not in vars(fn):
            return []
        doc, params = f'{fn.__doc__} {fn.__init__.__doc__}', docments(fn.__init__)
    else:
        doc, params = fn.__doc__, docments(fn)
    return [
        f'a word about `{p}`'
        for p, comment in params.items()
        if p not in ('self', 'return', 'args', 'kwargs')
        and not comment
        and not re.search(rf'\b{p}\b', doc)
    ]


def test_star_import_gives_the_documented_surface():
    given = {}
    exec('from fastrl_replay.all import *', given)
    given, documented = (
        set(given) - {'__builtins__'},
        {n for names in SURFACE.values() for n in names.split()},
    )
    assert not given - documented, f'not in SURFACE: {sorted(given - documented)}'
    assert not documented - given, (
        f'in SURFACE, but not in fastrl_replay.all: {sorted(documented - given)}'
    )


@pytest.mark.parametrize('module', SURFACE)
def test_surface_lives_in_its_module_and_is_documented(module):
    mod, wrong = importlib.import_module(f'fastrl_replay.{module}'), []
    for name in SURFACE[module].split():
        if not hasattr(mod, name):
            wrong.append(f'{name} is not there')
            continue
        obj = getattr(mod, name)
        home = getattr(obj, '__module__', None) or mod.__name__  # constants know no module
        if home.startswith('fastrl_replay') and home != mod.__name__:
            wrong.append(f'{name} is defined in {home}')
        wrong += [f'{name} lacks {what}' for what in undocumented(obj)]
    assert not wrong, f'fastrl_replay.{module}:\n' + '\n'.join(wrong)


# ---- README, style, wheel ----


def test_readme_is_what_the_index_gives():
    run(sys.executable, ROOT / 'docs/readme.py', '--check')


def test_stub_is_what_the_stages_give():
    run(sys.executable, ROOT / 'docs/stubs.py', '--check')


def test_outputs_name_no_place_of_a_machine():
    "Warnings of other libraries tell where these lie, on the machine that ran the notebook"
    for path in (ROOT / 'nbs').rglob('*.ipynb'):
        for cell in json.loads(path.read_text())['cells']:
            said = json.dumps(cell.get('outputs', []))
            assert 'site-packages' not in said and str(ROOT) not in said, (path.name, cell['id'])


def test_tests_lie_in_folders_like_the_package():
    "What is about several folders, or about all, lies on top; pytest finds what tests share in each of them"
    here = {
        p.parent.relative_to(ROOT / 'tests').as_posix() for p in (ROOT / 'tests').rglob('test_*.py')
    } - {'.'}
    known = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['tool']['pytest'][
        'ini_options'
    ]['pythonpath']
    assert here <= {p.parent.name for p in (ROOT / 'fastrl_replay').glob('*/__init__.py')} and {
        'tests',
        *(f'tests/{d}' for d in here),
    } == set(known)


@pytest.mark.parametrize('name', ['long_tests.txt', 'thorough_tests.txt'])
def test_long_tests_are_tests(name):
    "A line that names no test would mark nothing"
    here = Path(__file__).parent
    files = {p.name: p for p in here.rglob('test_*.py')}
    lines = (here / name).read_text().splitlines()
    assert lines == sorted({*lines})
    for line in lines:
        file, test = re.match(r'(\w+\.py)::(\w+)', line).groups()
        assert f'\ndef {test}(' in files[file].read_text(), line


def test_each_test_is_run_by_a_named_command():
    "CI runs what is fast, slow or in a browser, and CONTRIBUTING.md says how the thorough ones are run"
    ci, said = (
        (ROOT / name).read_text(encoding='utf-8') for name in ('.ci/run', 'CONTRIBUTING.md')
    )
    assert (
        'run_in_fresh_clone tests 2' in ci
        and '-m "slow and not thorough and not site"' in ci
        and '-m "site or browser"' in ci
    )
    assert '`python -m pytest -m "thorough or hypothesis" --hypothesis-profile deep -n 2`' in said


def test_ruff_is_content():
    run(sys.executable, '-m', 'ruff', 'check', 'fastrl_replay', 'tests', 'docs')


def test_all_that_the_package_needs_is_packed():
    "Each file is a module of a package that setuptools finds, or is named as data. The wheel itself is slow to make."
    config = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['tool'][
        'setuptools'
    ]
    assert (
        config['packages']['find'] == {'include': ['fastrl_replay*']}
        and (ROOT / 'fastrl_replay/settings.ini').is_file()
    )
    files = [p.relative_to('fastrl_replay') for p in tree() if p.parts[0] == 'fastrl_replay']
    data = [
        p
        for p in files
        if p.suffix != '.py'
        and not any(p.match(pattern) for pattern in config['package-data']['fastrl_replay'])
    ]
    homeless = [
        p
        for p in files
        if p.suffix == '.py'
        and not all((ROOT / 'fastrl_replay' / up / '__init__.py').is_file() for up in p.parents)
    ]
    assert not data and not homeless, f'the wheel would lack {data} and {homeless}'


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(tmp_path):
    "Built from a clean copy, installed with nothing but what it asks for, used from elsewhere."
    copy, venv = copy_tree(tmp_path / 'copy'), tmp_path / 'venv'
    run(sys.executable, '-m', 'build', '--wheel', '--outdir', tmp_path, copy)
    (wheel,) = tmp_path.glob('*.whl')
    packed = set(zipfile.ZipFile(wheel).namelist())
    lost = {p.as_posix() for p in tree() if p.parts[0] == 'fastrl_replay'} - packed
    stray = {n for n in packed if not re.match(r'fastrl_replay(/|-[^/]+\.dist-info/)', n)}
    assert not lost and not stray, (
        f'the wheel lacks {sorted(lost)} and should not hold {sorted(stray)}'
    )

    python = venv / ('Scripts' if os.name == 'nt' else 'bin') / 'python'
    run(sys.executable, '-m', 'venv', venv)
    run(python, '-m', 'pip', 'install', '--quiet', TORCH, wheel)
    (tmp_path / 'script.py').write_text(PIPELINE)
    (tmp_path / 'elsewhere').mkdir()
    assert 'cartpole-r2d2' in run(
        python.parent / 'fastrl-replay', 'recipes', cwd=tmp_path / 'elsewhere'
    )  # settings.ini came along
    used = run(python, '-I', tmp_path / 'script.py', cwd=tmp_path / 'elsewhere').splitlines()[-1]
    assert Path(used).is_relative_to(venv), f'the script used {used}, not the installed wheel'
