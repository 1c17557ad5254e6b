# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.pipe import Pipe
from fastrl_replay.stages.waiting import Waits
from fastrl_replay.steps.core import Steps

class _Merging(Waits):
    'Blocks in, merged rows out, without a source'
    _buffers: tuple
    def _fresh(self) -> Any: ...
    def merge(self, steps: Steps) -> Steps:
        "Take a block; a block that doesn't fit is refused whole, and nothing has changed"
        ...
    @property
    def waiting(self) -> Any: ...

class NStep(_Merging):
    'Merges each step with the next of its episode: summed `reward`, last `next_state`, with columns `discount` and `n`'
    last: Any
    n: Any
    gamma: Any
    def __init__(self, source, n: int, gamma: float, last: Any = ...) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def flush(self) -> Steps:
        'Yield the steps that still wait for later ones'
        ...
    def snapshot(self) -> Any: ...
    def restored(self, state) -> Any: ...

class NSkip(Pipe):
    'Keeps the first step of each episode, every `n`-th step after it, and the last one'
    n: Any
    _buffers: tuple
    def __init__(self, source, n: int) -> None: ...
    def _fresh(self) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def skip(self, steps: Steps) -> Steps:
        'What is kept of a block'
        ...
