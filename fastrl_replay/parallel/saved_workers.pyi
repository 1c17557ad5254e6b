# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.parallel.shards import Shards

class SavedWorkers(Shards):
    'A stage whose workers are saved with it: their chains, and the chunks that wait'
    given: Any
    lag_sum: Any
    lag_max: Any
    stale: Any
    def snapshot(self) -> dict: ...
    def restore(self, state) -> Any: ...
    def check_state(self, state) -> Any:
        'An error where a checkpoint is of other workers'
        ...
