# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from numpy import ndarray
from numpy.random._generator import Generator

LARGEST: float

def levels(capacity: int, width: int = 8) -> ndarray:
    'Places of the levels of a tree in one array; all but the root fill whole lines'
    ...

def find_mass(nodes, starts, mass, idx) -> Any:
    'Whose pieces the darts stick in; afterwards `mass` holds their priorities'
    ...

class SumTree:
    'Priorities of `capacity` things; drawing and changing a batch of them costs the logarithm of `capacity` to base 8'
    capacity: Any
    starts: Any
    nodes: Any
    def __init__(self, capacity: int, smallest: bool = False) -> None: ...
    @property
    def total(self) -> Any: ...
    @property
    def largest(self) -> Any: ...
    @property
    def nbytes(self) -> Any: ...
    def __len__(self) -> int: ...
    @property
    def smallest(self) -> Any:
        'The smallest positive priority; infinity where there is none'
        ...
    def update(self, idx, priority) -> Any:
        'Set priorities; either all of them or, with an error, none'
        ...
    def __getitem__(self, idx) -> Any:
        'The priority of one index, or of an array or slice of them'
        ...
    def try_update(self, idx: ndarray, priority: ndarray) -> int:
        '`update` with arrays, without an error'
        ...
    def discard(self, idx: ndarray) -> Any:
        'Take these out: their priority is 0'
        ...
    def roll(self, gone: int, oldest: int, first: int, end: int, p: float = -1.0) -> Any:
        'Let keys of a ring leave and come; each has the index that is left when it is divided by the capacity'
        ...
    def write_keys(self, keys: ndarray, to: ndarray) -> Any:
        'Write the priorities of keys there'
        ...
    def by_age(self, idx) -> ndarray:
        'The same in an order from which an equal tree can be built: any'
        ...
    def find(self, mass) -> Any:
        'The index in whose piece a point lies: the first whose running sum is beyond it'
        ...
    def sample(self, n: int, rng: Generator | None = None, stratified: bool = True) -> tuple:
        'Draw indices in proportion to their priorities'
        ...
