# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.memory.samplers import Sampler
from numpy import ndarray

class _Prioritized(Sampler):
    'Keys with priorities: what new ones get, what errors are worth'
    alpha: Any
    eps: Any
    stratified: Any
    max_ever: Any
    tree: Any
    largest_ever: Any
    place: Any
    key_of: Any
    def __init__(self, capacity, alpha, eps, seed, stratified, max_ever) -> None: ...
    def clear(self) -> Any: ...
    @property
    def kind(self) -> Any: ...
    def added(self, first: int, end: int, oldest: int = 0, p: ndarray | None = None) -> Any:
        'Keys that came and went'
        ...
    def update(self, keys: ndarray, td: ndarray) -> Any:
        'TD errors of these keys; where a key comes twice, the last one counts'
        ...
    def priorities(self, td) -> ndarray:
        "What TD errors are worth; an error where one isn't finite"
        ...
    def state_dict(self) -> dict:
        'Counters, and the priorities in the order of the keys, or where a copy of their file is'
        ...
    def check_state(self, state: dict) -> Any:
        'The same, with priorities that the tree can take'
        ...
    def load_state_dict(self, state: dict) -> Any:
        'Continue where `state` was saved'
        ...
    def use_places(self, capacity: int) -> Any:
        'Draw places from now on; those that are taken stay so'
        ...
    def kept(self) -> ndarray:
        'Priorities, of each key, oldest first, or of places that are taken: |td| + eps, or a power of it'
        ...
    def __len__(self) -> int: ...
    nbytes: Any
    def insert(self, places) -> Any:
        'These are taken now, and get the largest priority'
        ...
    def remove(self, places) -> Any:
        'These are free now'
        ...
    def sample(self, n: int) -> tuple:
        'Draw `n` keys'
        ...
    def open(self, place, key_of: Any = None) -> Any:
        'The memory lies here, and what the largest priority ever was'
        ...
    def settle(self) -> Any:
        'From now on, priorities are written down as well; those that there are, at once'
        ...
    def unwritten(self, first, end) -> Any: ...
    def reopen(self, oldest, end) -> Any:
        'Go on with the priorities of these keys'
        ...
    def recall(self, places) -> Any:
        'Give priorities to places as they were written down; a place without one keeps what it has'
        ...
    def found(self, state) -> Any:
        'A state with its priorities, where it has the name of a copy; None: newer copies have taken its place'
        ...

AS_ZERO: float

class Proportional(_Prioritized):
    'A key is as likely as its priority (|td| + eps)**alpha'
    def __init__(self, capacity: int, alpha: float = 0.6, eps: float = 1e-06, seed: int | None = None, stratified: bool = True, max_ever: bool = False, least: bool = False) -> None: ...
    @property
    def least(self) -> Any:
        'The smallest probability of a key that can be drawn'
        ...
    @property
    def mass(self) -> Any:
        'The sum of all priorities, and how many keys there are where they are all 0'
        ...
    def probabilities(self) -> ndarray:
        'The probability of each key, oldest first; of places, of those that are taken'
        ...

class Ranked(_Prioritized):
    'A key is as likely as 1/rank**alpha, where the largest |td| has rank 1'
    def __init__(self, capacity: int, alpha: float = 0.7, eps: float = 1e-06, seed: int | None = None, stratified: bool = True, max_ever: bool = False, least: bool = True) -> None: ...
    @property
    def mass(self) -> Any: ...
    @property
    def least(self) -> Any: ...
    def probabilities(self) -> ndarray:
        'The probability of each key, oldest first; of places, of those that are taken'
        ...

def sampler_of_kind(who: str, kind, **settings) -> Sampler:
    'A new sampler with those of the settings that its constructor takes'
    ...
