"""A directory whose description was changed by somebody else."""

import json

import numpy as np
import pytest

from fastrl_replay.all import Rows, SequenceReplay


def test_states_of_sequences_that_are_none(tmp_path):
    "Kernels would write outside of arrays"

    def opened():
        return SequenceReplay(bs=2, max_sz=200, length=4, overlap=0, seed=0, store=Rows(tmp_path))

    def add(replay, n):
        for i in range(n):
            hidden = np.ones(4, np.float32)
            replay.add_step(np.full(4, i), 0, 1.0, np.full(4, i + 1), False, hidden=hidden)

    replay = opened()
    add(replay, 20)
    replay.close()
    path = tmp_path / 'meta.json'
    meta = json.loads(path.read_text())
    text = json.dumps(meta['sequences'])
    assert '[4]' in text
    changed = json.loads(text.replace('[4]', '[-4]', 1))
    path.write_text(json.dumps(dict(meta, sequences=changed)))
    with pytest.raises(ValueError, match='sequences'):
        add(opened(), 1)
