# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.memory.rows import Store
from fastrl_replay.memory.samplers import Sampler
from fastrl_replay.replay.replay import Replay

class ExperienceReplay(Replay):
    'Keeps the last `max_sz` rows and yields batches of `bs` of them, drawn uniformly, or by `sampler`'
    seed: Any
    replacement: Any
    by: Any
    def __init__(self, source: Any = None, bs: int = 1, max_sz: int = 1000000, *, replacement: bool = False, seed: int | None = None, sampler: Sampler | None = None, store: Store | None = None, by: Any = 'row', ratio: float | None = None, warmup: int | None = None, return_idxs: bool = False, freeze_memory: bool = False) -> None: ...
