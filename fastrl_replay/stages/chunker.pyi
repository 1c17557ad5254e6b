# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.stages.waiting import Waits
from fastrl_replay.steps.core import Steps

class _Cutting(Waits):
    'Blocks in, sequences out, without a source'
    _buffers: tuple
    def _fresh(self) -> Any: ...
    def chunk(self, steps: Steps) -> list:
        "The sequences that these rows complete, in order; a block that doesn't fit is refused whole"
        ...
    def flush(self) -> list:
        'The last sequences of episodes that nothing more will come of'
        ...

class SequenceChunker(_Cutting):
    'Cuts the steps of each environment and episode into sequences of `length`; column `mask`: is this row a step?'
    overlap: Any
    length: Any
    tail: Any
    def __init__(self, source, length: int, overlap: int = 0, tail: str = 'shift') -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def snapshot(self) -> Any: ...
    def restored(self, state) -> Any: ...
