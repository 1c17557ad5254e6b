"""What all tests share."""
import gc, os, signal, subprocess, sys
from pathlib import Path

sys.dont_write_bytecode = False   # tests start hundreds of processes: each would compile all that it imports
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)

import pytest, torch
from hypothesis import settings
from notebooks import Forks

settings.register_profile('deep')   # all cases of property tests: see `cases` of strategies
torch.set_num_threads(1)   # the networks here are small, and pytest-xdist uses the other cores

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:   # as in a job that runs in the background, and in all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)

def pytest_configure(config):
    "Where no kernels are on disk so far, two processes compile them for all that will run the tests"
    here = Path(__file__).parent
    several = getattr(config.option, 'numprocesses', None) and not hasattr(config, 'workerinput')
    if not several or any((here.parent/'fastrl_replay').rglob('*.nbi')): return
    warm = [subprocess.Popen([sys.executable, '-W', 'ignore', here/'warm.py', str(part)]) for part in range(2)]
    for p in warm: p.wait()

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """To build the site takes as long as to run ten notebooks: what looks at it is slow, and so is what took two seconds
    and stands in long_tests.txt. Of a test with more than four variants every fourth is run with the fast ones, and the
    others with the slow ones; notebooks, pages and pairs of what goes together, all."""
    long,variants = set((Path(__file__).parent/'long_tests.txt').read_text().splitlines()),{}
    for item in items:
        if any(map(item.get_closest_marker, ('slow', 'browser'))): continue
        if 'site' in getattr(item, 'fixturenames', ()) or f"{item.path.name}::{item.nodeid.partition('::')[2]}" in long: item.add_marker(pytest.mark.slow)
        elif item.path.name not in ('test_house.py', 'test_docs.py', 'test_combinations.py'):
            variants.setdefault(item.nodeid.partition('[')[0], []).append(item)
    for found in variants.values():
        for i,item in enumerate(found):
            if len(found) > 4 and i % 4: item.add_marker(pytest.mark.slow)

def pytest_collection_finish(session):
    "What is there for good is not looked at again: `gc.collect`, which many tests call, takes a tenth of the time, and forks copy less."
    gc.collect()
    gc.freeze()

@pytest.fixture(scope='session')
def forks(tmp_path_factory):
    "Runs notebooks; one for each worker of pytest-xdist."
    forks = Forks(tmp_path_factory.mktemp('notebooks'))
    yield forks
    forks.close()

@pytest.fixture(scope='session')
def whole(tmp_path_factory):
    "A run that was left alone; who changes anything does it in a copy"
    from test_recipes import tiny
    out = tmp_path_factory.mktemp('whole')/'r'
    tiny(out).train()
    return out
