# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.memory.timeline import Timeline
from fastrl_replay.stages.journal import Journal

def open_memory(path) -> Timeline:
    'The memory in a directory, whatever wrote it'
    ...

def recorded_rows(data) -> Any:
    'The rows that a setting names'
    ...

def check_recorded(dtype, observations, actions) -> Any:
    'Raise where rows are not of such an environment'
    ...

class Offline(Journal):
    'Fills a replay with recorded rows, from which it then draws; each batch counts as a step'
    data: Any
    spaces: Any
    gamma: Any
    last: Any
    steps: Any
    takes_any_item: bool
    def __init__(self, source, data, max_steps: float = ..., spaces: Any = None, n_step: int = 1, gamma: float = 1.0, last: Any = ...) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def fill(self) -> int:
        'Let the memory have the recorded rows'
        ...
