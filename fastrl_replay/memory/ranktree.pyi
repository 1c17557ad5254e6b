# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from numpy import ndarray

SHELF: int

TOGETHER: int

class RankTree:
    'Priorities of up to `capacity` things, in order: rank 1 is the largest; of equal ones the older comes first'
    capacity: Any
    def __init__(self, capacity: int) -> None: ...
    @property
    def nbytes(self) -> Any: ...
    def __len__(self) -> int: ...
    def update(self, idx, priority) -> Any:
        'Set priorities, of new things or of those that are here; either all of them or, with an error, none'
        ...
    def remove(self, idx) -> Any:
        'Take things out; they can come again, as young ones'
        ...
    def rank(self, idx) -> Any:
        'One more than the number of larger priorities and of older equal ones'
        ...
    def __getitem__(self, idx) -> Any:
        'The priority of one index, or of an array of them'
        ...
    def select(self, rank) -> Any:
        'Who has this rank'
        ...
    @property
    def largest(self) -> float:
        'The largest priority; 0 where there is none'
        ...
    def try_update(self, idx: ndarray, priority: ndarray) -> int:
        '`update` with arrays, without an error'
        ...
    def select_into(self, ranks: ndarray, idx: ndarray) -> Any:
        '`select` into an array'
        ...
    def discard(self, idx: ndarray) -> Any:
        'Take out those that are here'
        ...
    def roll(self, gone: int, oldest: int, first: int, end: int, p: float = -1.0) -> Any:
        'Let keys of a ring leave and come; each has the index that is left when it is divided by the capacity'
        ...
    def write_keys(self, keys: ndarray, to: ndarray) -> Any:
        'Write the priorities of keys there'
        ...
    def by_age(self, idx: ndarray) -> ndarray:
        'These indices, the oldest first'
        ...
