"""Values that are written back into rows, against a list of rows."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

from fastrl_replay.all import *
from fastrl_replay.testing import through_file
from test_ahead import STORES

STORES = STORES | dict(frames_on_a_device=lambda path: Frames(2, device='cpu'))
IMAGE = spaces.Box(0, 255, (2, 8, 8), np.uint8)
DTYPE = step_dtype(IMAGE, spaces.Discrete(3), value='f4', latent=('f4', (3,)), label='i2')


def block(t):
    "One step of two environments, whose episodes have five steps"
    rows = np.zeros(2, DTYPE)
    rows['env_id'] = 0, 1
    rows['episode_n'], rows['step_n'] = t // 5 + 1, t % 5 + 1
    rows['state'][:, 0], rows['state'][:, 1], rows['next_state'] = t, t + 1, t + 2
    rows['next_state'][:, 0] = t + 1
    rows['reward'] = t
    rows['terminated'] = t % 5 == 4
    return Steps(rows)


@pytest.mark.parametrize('store', STORES)
def test_rows_are_those_of_a_list(store, tmp_path):
    choose = random.Random(store)
    replay = PrioritizedReplay(bs=6, max_sz=16, seed=0, store=STORES[store](tmp_path / 'm'))
    model, dropped = {}, 0
    for t in range(40):
        for key, row in zip(replay.add(block(t)), block(t).rows):
            model[int(key)] = dict(value=0, latent=[0, 0, 0], label=0, reward=float(row['reward']))
        if len(replay) < 6:
            continue
        keys = choose.sample(range(max(0, 2 * t - 20), 2 * t + 2), 5) + [-1]
        values = np.array([choose.random() for _ in keys], np.float32)
        latent, label = np.outer(values, [1, 2, 3]).astype(np.float32), np.arange(6)
        stale = replay.write(
            torch.tensor(keys), value=torch.tensor(values), latent=latent, label=label
        )
        gone = sum(0 <= key < 2 * t + 2 - 16 for key in keys)
        assert stale == gone
        dropped += stale
        for i, key in enumerate(keys):
            if key >= max(0, 2 * t + 2 - 16):
                model[key].update(value=values[i], latent=latent[i].tolist(), label=i)
        batch = replay.sample().to('cpu')
        for row in batch.rows:
            wanted = model[row['index']]
            assert all(np.array_equal(row[name], x) for name, x in wanted.items())
    assert dropped
    if 'disk' not in store:
        same = PrioritizedReplay(bs=6, max_sz=16, seed=1, store=STORES[store](None))
        same.load_state_dict(through_file(replay.state_dict()))
        assert same.sample().to('cpu') == replay.sample().to('cpu')


def test_other_processes_see_what_was_written(tmp_path):
    replay = ExperienceReplay(bs=2, max_sz=16, store=Rows(tmp_path / 'm'))
    for t in range(4):
        replay.add(block(t))
    replay.write([3, 5], value=[0.5, 0.25])
    replay.memory.flush()
    code = (
        'import sys; from fastrl_replay.all import *; '
        "replay = ExperienceReplay(bs=2, max_sz=16, store=Rows(sys.argv[1], mode='r')); "
        'print(replay.memory[:].value.tolist())'
    )
    found = subprocess.run(
        [sys.executable, '-c', code, tmp_path / 'm'], check=True, text=True, stdout=subprocess.PIPE
    )
    assert json.loads(found.stdout) == [0, 0, 0, 0.5, 0, 0.25, 0, 0]


def test_recurrent_states_of_sequences_are_written_step_by_step():
    replay = SequenceReplay(bs=2, max_sz=40, length=4, burn_in=0, overlap=2, seed=0)
    for t in range(15):
        replay.add(block(t))
    batch = replay.sample()
    keys = replay.memory.walk(batch.index, range(4))
    replay.write(keys, latent=torch.arange(24.0).view(8, 3))
    written = dict(zip(keys.ravel().tolist(), torch.arange(24.0).view(8, 3).tolist()))
    for key in keys[keys >= 0].tolist():
        assert replay.memory.take([key]).latent[0].tolist() == written[key]


def test_errors_change_nothing():
    replay = ExperienceReplay(bs=2, max_sz=16, store=Frames(2), seed=0)
    for key in 0, -2:
        with pytest.raises(StaleKey, match=f'key {key} is unknown'):
            replay.write([key], value=[1.0])
    for t in range(4):
        replay.add(block(t))
    before = replay.memory[:].copy()
    wrong = [
        (dict(values=[1.0]), ArgumentError, r"columns; got \['values'\]; expected some of state"),
        (dict(step_n=[1]), ArgumentError, r"columns; got \['step_n'\]"),
        (dict(value=[1.0, 2.0]), BlockError, r'value has a different shape.*got \[2\].*\[1\]'),
        (dict(value=[np.nan]), BlockError, 'value has numbers that are not finite'),
        (dict(label=[70_000]), BlockError, 'label has a number that its dtype cannot hold'),
        (dict(label=[0.5]), BlockError, 'label has a different dtype'),
        (
            dict(value=[1.0], state=np.zeros((1, 2, 8, 8), np.uint8)),
            ArgumentError,
            'frames cannot be written; got state',
        ),
    ]
    for columns, error, match in wrong:
        with pytest.raises(error, match=match):
            replay.write([2], **columns)
    with pytest.raises(ArgumentTypeError, match='keys must be integers'):
        replay.write([0.5], value=[1.0])
    assert replay.write([], value=np.zeros(0, np.float32)) == 0
    assert replay.memory[:] == before
    keys = replay.sample().index
    replay.clear()
    assert replay.write(keys, value=[1.0, 2.0]) == 2
