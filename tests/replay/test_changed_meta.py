"""A directory whose description was changed by somebody else."""

import json

import numpy as np
import pytest

from fastrl_replay.all import Rows, SequenceReplay
from fastrl_replay.steps.errors import StateError


def test_columns_of_steps_that_do_not_fit_the_rows(tmp_path):
    "Kernels would write outside of arrays"

    def opened():
        return SequenceReplay(bs=2, max_sz=200, length=4, overlap=0, seed=0, store=Rows(tmp_path))

    def add(replay, n):
        for i in range(n):
            replay.add_step(np.full(4, i), 0, 1.0, np.full(4, i + 1), False)

    replay = opened()
    add(replay, 20)
    replay.close()
    path = tmp_path / 'meta.json'
    meta = json.loads(path.read_text())
    text = json.dumps(meta['steps'])
    assert '[4]' in text
    path.write_text(json.dumps(dict(meta, steps=json.loads(text.replace('[4]', '[0]', 1)))))
    with pytest.raises(StateError, match='steps'):
        add(opened(), 1)
    path.write_text(json.dumps(meta))
    replay = opened()
    add(replay, 20)
    assert len(replay.memory) == 40
