"""What all tests share."""

import gc, os, re, signal, subprocess, sys
from pathlib import Path

sys.dont_write_bytecode = (
    False  # tests start hundreds of processes: each would compile all that it imports
)
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)

import pytest, torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from notebooks import Forks

settings.register_profile('deep')  # all cases of property tests: see `cases` of strategies
providers._get_local_constants = lambda: (
    providers._local_constants
)  # or else cases would depend on the modules that a worker has loaded
torch.set_num_threads(1)  # the networks here are small, and pytest-xdist uses the other cores

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a job that runs in the background, and in all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    "Where no kernels are on disk so far, two processes compile them for all that will run the tests"
    here = Path(__file__).parent
    several = getattr(config.option, 'numprocesses', None) and not hasattr(config, 'workerinput')
    if not several or any((here.parent / 'fastrl_replay').rglob('*.nbi')):
        return
    warm = [
        subprocess.Popen([sys.executable, '-W', 'ignore', here / 'warm.py', str(part)])
        for part in range(2)
    ]
    for p in warm:
        p.wait()


FEW = 4  # so many variants of a test are fast, all of them
WHOLE = (
    'test_house.py',
    'test_docs.py',
    'test_combinations.py',
)  # notebooks, pages and pairs of what goes together: each is another one
THOROUGH = (
    'learns',
    'interrupts',
    'damaged_files',
    'whole_product',
)  # what is slow and has this in its name


def listed(name):
    "Is an item in this file? One in a line: a test with all its variants, or one of them; * stands for anything"
    by_test = {}
    for line in (Path(__file__).parent / name).read_text().splitlines():
        pattern = '.*'.join(map(re.escape, line.split('*'))) + ('' if '[' in line else r'(\[.*)?')
        by_test.setdefault(line.partition('[')[0], []).append(re.compile(pattern, re.S))

    def there(item):
        found = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
        return any(p.fullmatch(found) for p in by_test.get(found.partition('[')[0], ()))

    return there


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Fast is what is neither slow nor thorough. Slow: what looks at the site, for to build it takes as long as to run ten notebooks;
    what took a second and stands in long_tests.txt; and, of a test with more than four variants, all but every fourth.
    Thorough, which is slow, too, and not in CI: more cases of what CI has some of, by name or in thorough_tests.txt."""
    long, thorough, variants = listed('long_tests.txt'), listed('thorough_tests.txt'), {}
    for item in items:
        if (
            not any(map(item.get_closest_marker, ('slow', 'browser')))
            and item.path.name not in WHOLE
        ):
            variants.setdefault(item.nodeid.partition('[')[0], []).append(item)
    late = {
        id(item)
        for found in variants.values()
        if len(found) > FEW
        for i, item in enumerate(found)
        if i % FEW
    }
    for item in items:
        if item.get_closest_marker('browser'):
            continue
        site = 'site' in getattr(item, 'fixturenames', ())
        if site:
            item.add_marker(pytest.mark.site)
        if id(item) in late or site or long(item):
            item.add_marker(pytest.mark.slow)
        slow = item.get_closest_marker('slow') and not long(item)  # those are in CI
        if thorough(item) or slow and any(word in item.nodeid for word in THOROUGH):
            for mark in (pytest.mark.slow, pytest.mark.thorough):
                item.add_marker(mark)


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

    out = tmp_path_factory.mktemp('whole') / 'r'
    tiny(out).train()
    return out


@pytest.fixture(scope='module')
def machine():
    "Ray, on this one"
    from combinations import start_ray

    ray = start_ray()
    yield
    ray.shutdown()


# ---- Chromium, for tests that are marked `browser` ----

CHROMIUM = (
    '--headless=new --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --disable-background-networking '
    '--disable-component-update --disable-sync --disable-dev-shm-usage'
).split()


@pytest.fixture(scope='session')
def browser():
    "Chromium, without internet but with this machine. Where it or its driver is missing, the tests fail and say what to install."
    import shutil
    from selenium import webdriver

    found = {tool: shutil.which(tool) for tool in ('chromium', 'chromedriver')}
    if not all(found.values()):
        pytest.fail(
            f'missing: {[t for t, p in found.items() if not p]}. Remedy: apt-get install chromium chromium-driver',
            pytrace=False,
        )
    options = webdriver.ChromeOptions()
    options.binary_location = found['chromium']
    for flag in [*CHROMIUM, '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1']:
        options.add_argument(flag)
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(found['chromedriver'])
    )
    driver.set_script_timeout(60)
    yield driver
    driver.quit()
