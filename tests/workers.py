"What tests of worker processes share."
import gc, time

import pytest
import torch.utils.data._utils
from torch import multiprocessing as mp

from fastrl_replay.all import ScriptedEnv, script

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = .5   # so long a DataLoader waits for a worker that has failed; else 5 seconds

FORK = dict(method='fork')

def zeros(state): return [0]*len(state)
def scripted(*lengths, env=0): return ScriptedEnv(**script(*lengths, env=env))
def short(): return scripted(3, -2)

@pytest.fixture(autouse=True)
def no_process_is_left():
    "After each test, every process that it started is gone"
    yield
    if not mp.active_children(): return   # to look for cycles takes long
    gc.collect()
    deadline = time.monotonic() + 5
    while mp.active_children() and time.monotonic() < deadline: time.sleep(.02)
    assert not mp.active_children()
