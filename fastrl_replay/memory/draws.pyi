# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from numpy import ndarray, uint64

def random_bits(seed, i) -> Any:
    'The `i`-th random number of 64 bits'
    ...

def random_seed(seed: int | None = None) -> uint64:
    'A seed of 64 well mixed bits; neighbouring seeds give unrelated ones'
    ...

def draw_keys(seed, count, first, n, keys) -> Any:
    'Fill `keys` with keys from first to first+n-1, with replacement; the new count'
    ...

def draw_distinct(seed, count, first, n, keys, table) -> Any:
    'The same without replacement; `table` has a power of two of places, at least twice as many as keys'
    ...

def draw_most(seed, count, first, n, keys) -> Any:
    'Without replacement, for many keys: the front of a shuffled list'
    ...

def throw_darts(seed, count, total, stratified, darts) -> Any:
    'Random places from 0 to `total`, one in each of equal parts or anywhere'
    ...

class Draws:
    'Random numbers from a seed and a count'
    seed: Any
    def __init__(self, seed: int | None = None) -> None: ...
    def clear(self) -> Any: ...
    def draw_on(self, other) -> Any: ...
    def fresh(self) -> Any:
        'A new one of this kind, with nothing in it'
        ...
    def reseed(self, seed) -> Any:
        'Draw other random numbers from now on'
        ...
    def random(self, n: int) -> ndarray:
        'The next `n` random numbers from 0 to 1'
        ...
