"""What random calls to a replay do, beside a model of it that subclasses have."""

import numpy as np, pytest

from fastrl_replay.all import *
from scripted import everything

EVENTS = 'add add sample sample late late through refused restart'.split()


class Story:
    "A replay and its model, which must agree after whatever happens"

    def sample(self, n, _):
        n = n or self.replay.bs
        if self.drawable() < n:
            with pytest.raises(NotEnoughRows):
                self.replay.sample(n)
        else:
            self.drew(self.replay.sample(n), n)

    def refuse(self, block, n, which):
        "Spoil a block of `n` + 1 rows, for which `add` raises an error"
        if which % 3 == 0:
            block.rows['state'][n, 1] = np.nan
        elif which % 3 == 1:
            block.rows['env_id'][n] = -1
        else:
            block = block[None]
        with pytest.raises(BlockError):
            self.replay.add(block)

    def restart(self, n, seed):
        twin, old = type(self.replay)(self.queue, seed=seed + 1, **self.kw), self.replay
        twin.load_state_dict(everything(old))
        self.replay = twin
        if len(old) >= old.bs:
            a, b = old.sample(), twin.sample()
            assert a == b and old.stats() == twin.stats()
            self.drew(b, old.bs)

    def through(self, n, frozen):
        "A block comes from the source, into a frozen memory or not"
        frozen = bool(frozen % 2) and len(self.replay) >= self.replay.bs
        self.replay.freeze_memory = frozen
        block = self.block(n)
        self.queue.blocks.append(block)
        batches = list(self.replay)
        if not frozen:
            self.came(block)
        assert len(batches) == (self.drawable() >= self.replay.bs)
        for b in batches:
            self.drew(b, self.replay.bs)
        self.replay.freeze_memory = False
        return frozen
