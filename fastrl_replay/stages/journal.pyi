# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.pipe import Pipe

class Journal(Pipe):
    'Passes blocks on, up to a number of steps or episodes; counts steps, and keeps the returns of finished episodes'
    successes: Any
    fresh: Any
    max_steps: Any
    max_episodes: Any
    steps: Any
    ends: Any
    returns: Any
    watch: Any
    between: Any
    _buffers: tuple
    def __init__(self, source, max_steps: float = ..., max_episodes: float = ...) -> None: ...
    def _fresh(self) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    @property
    def over(self) -> Any: ...
    def news(self) -> dict:
        'What was written since it was last asked'
        ...
    def snapshot(self) -> Any: ...
    def check_state(self, state) -> Any: ...
    def restore(self, state) -> Any: ...

class Collected(Journal):
    'One journal of those that `.parallel` above it runs; lets everything pass'
    steps: Any
    ends: Any
    returns: Any
    successes: Any
    takes_any_item: bool
    def __iter__(self) -> Iterator[Any]: ...

class Gather(Pipe):
    'Blocks of `n` rows or more, joined from smaller ones; the last one has the remainder'
    n: Any
    exact: Any
    _buffers: tuple
    saved: dict
    def __init__(self, source, n: int, exact: bool = False) -> None: ...
    def _fresh(self) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    @property
    def rows(self) -> Any: ...
    @rows.setter
    def rows(self, value) -> None: ...
