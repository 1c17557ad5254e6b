"""What all tests share."""

import gc, os, signal, subprocess, sys
from pathlib import Path

sys.dont_write_bytecode = False  # tests start hundreds of processes, which import the same modules
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)

import pytest, torch

if 'WITHOUT_DATAPIPES' in os.environ:  # for this library, as if torch had none
    IterDataPipe = vars(torch.utils.data).pop('IterDataPipe')
    import fastrl_replay.pipe  # noqa: F401

    torch.utils.data.IterDataPipe = IterDataPipe

from hypothesis import settings
from notebooks import Forks

settings.register_profile('soak')  # see `cases` in strategies.py
torch.set_num_threads(1)  # the networks here are small, and pytest-xdist uses the other cores

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job that runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    "Compile the kernels in two processes if none is on disk yet"
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


def pytest_collection_finish(session):
    "Freeze what exists, so that `gc.collect` in tests is ten times faster and forks copy less"
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
    "The directory of a finished run; tests that change it work on a copy"
    from test_recipes import tiny

    out = tmp_path_factory.mktemp('whole') / 'r'
    tiny(out).train()
    return out


# ---- Chromium, for tests that are marked `browser` ----

CHROMIUM = (
    '--headless=new --no-sandbox --disable-gpu --no-first-run --hide-scrollbars '
    '--disable-background-networking --disable-component-update --disable-sync '
    '--disable-dev-shm-usage'
).split()


@pytest.fixture(scope='session')
def browser():
    """Chromium, without internet but with this machine.

    If it or its driver is missing, the tests fail and say what to install."""
    import shutil
    from selenium import webdriver

    found = {tool: shutil.which(tool) for tool in ('chromium', 'chromedriver')}
    if not all(found.values()):
        pytest.fail(
            f'missing: {[t for t, p in found.items() if not p]}. '
            'Remedy: apt-get install chromium chromium-driver',
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
