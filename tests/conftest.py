"""What all tests share."""
import gc, signal

import pytest, torch
from notebooks import Forks

torch.set_num_threads(1)   # the networks here are small, and pytest-xdist uses the other cores

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:   # as in a job that runs in the background, and in all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
