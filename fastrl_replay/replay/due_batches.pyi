# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.pipe import Pipe

class Fixed:
    'A setting that the parts of a replay were made with: it can be read, but not changed'
    name: Any

class DueBatches(Pipe):
    'Takes in blocks and yields batches when they are due; a subclass has `memory`, `view`, `unit`, `add` and `sample`'
    warmup: Any
    bs: Any
    ratio: Any
    return_idxs: Any
    freeze_memory: Any
    sampled: Any
    batches: Any
    stale: Any
    draws_batches: bool
    ranks: Any
    max_sz: Any
    def __init__(self, source, bs, max_sz, *, needs, ratio: float | None = None, warmup: int | None = None, return_idxs: bool = False, freeze_memory: bool = False) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    @property
    def has_source(self) -> bool:
        'Do blocks come from a pipe?'
        ...
    def needed(self, n: int) -> int:
        'How many must be there for a batch of `n`'
        ...
    def start_counting(self) -> Any:
        'As before the first row'
        ...
    def due_batches(self) -> Any:
        "Take in the source's blocks; yields, with nothing, whenever a batch is to be drawn"
        ...

as_fraction: Any
