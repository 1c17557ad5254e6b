# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.steps.core import Steps

class Sequences(Steps):
    'Steps of shape [B, length], with columns that belong to whole sequences: `index`, `weight`, `hidden`'
    def __init__(self, rows, each: Steps, split: int = 0) -> None: ...
    @property
    def burn_in(self) -> Any:
        'The first steps, which only warm up the recurrent state'
        ...
    @property
    def train(self) -> Any:
        'The steps to learn from'
        ...
    def __getattr__(self, name) -> Any: ...
    def __getitem__(self, i) -> Any:
        'A column by name, or a part'
        ...
    def update_priorities(self, td) -> Any:
        'Return a TD error for each step to the replay'
        ...
    def asdict(self) -> dict:
        'All columns by name, on the same memory'
        ...
    def to(self, *args, **kw) -> Any:
        'The block on `device`, moved as one copy whatever the number of columns'
        ...
    def pin_memory(self, *args, **kw) -> Any:
        'A copy of the block in page-locked memory, from which `to` can copy without waiting'
        ...
    def copy(self, *args, **kw) -> Any:
        'The same rows in new memory, for a stage that wants to change them'
        ...

def each_of(batch: Steps) -> Steps:
    'What belongs to each draw: of sequences their columns, of rows the rows'
    ...

def burn_in_of(batch: Steps) -> int:
    'How many steps of each draw are burn-in'
    ...
