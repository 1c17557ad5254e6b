# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.pipe import Pipe
from fastrl_replay.stages.journal import Collected
from fastrl_replay.steps.errors import Explained
from torch import Tensor

class Alone:
    'A learner that has no others to talk to'
    size: Any
    rank: int
    local: int
    def __init__(self, size: int = 1) -> None: ...
    @property
    def leads(self) -> Any: ...
    def gather(self, x) -> list:
        'What each rank said; `x` is plain data, as JSON has it'
        ...
    def average(self, tensors) -> Any:
        'Replace tensors by their means over all ranks, in place'
        ...
    def spread(self, tensors) -> Any:
        'Replace tensors by those of rank 0, in place'
        ...
    def all(self, x) -> bool:
        'Does each rank say yes?'
        ...
    def mean(self, x: Tensor) -> Tensor:
        'The mean of a tensor over all ranks'
        ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error) -> None: ...
    def close(self, error: Any = None) -> Any:
        'Leave the others'
        ...
    def join(self, pipe: Pipe, rows: int = 1, journal: Any = None, max_steps: float = ..., max_episodes: float = ...) -> Pipe:
        'Join a chain with those of the other ranks'
        ...

class RankError(Explained, RuntimeError):
    "Another learner has ended, or doesn't answer"

class Ranks(Alone):
    'The learners that torchrun has started, of which this process is one'
    timeout: Any
    patience: Any
    size: Any
    def __init__(self, timeout: float = 1800.0, patience: float = 5.0) -> None: ...
    def gather(self, x) -> list:
        'What each rank said; `x` is plain data, as JSON has it'
        ...
    def average(self, tensors) -> Any:
        'Replace tensors by their means over all ranks, in place: one message for all of them'
        ...
    def spread(self, tensors) -> Any:
        'Replace tensors by those of rank 0, in place'
        ...
    def __exit__(self, kind, error, trace) -> None: ...
    def close(self, error: Any = None) -> Any:
        'Leave the others'
        ...

def launched() -> bool:
    'Has torchrun, or what sets the same variables, started this process as one of several?'
    ...

class Rounds(Collected):
    'Blocks that all ranks have at a time, and one journal of them all; over for all where it is over for one'
    ranks: Any
    ask: Any
    stopping: Any
    takes_any_item: bool
    def __init__(self, source, ranks, journal: Any = None, max_steps: float = ..., max_episodes: float = ...) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def snapshot(self) -> Any: ...
    def check_state(self, state) -> Any: ...

class RankWeights(Pipe):
    'Brings weights of batches to a scale that is that of the memories of all ranks'
    ranks: Any
    takes_any_item: bool
    def __init__(self, source, ranks) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def weigh(self, batch) -> Any:
        'Scale its weights, in place'
        ...
