# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.pipe import Holding

class Prefetch(Holding):
    'Draws the next batches of a replay in a thread, while the learner computes with this one'
    ahead: Any
    device: Any
    _buffers: tuple
    def __init__(self, source, ahead: int = 1, device: Any = None) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def _fresh(self) -> Any: ...
    def _close(self) -> Any: ...
    def snapshot(self) -> dict:
        'The batches that were drawn and not yielded'
        ...
    def check_state(self, state) -> Any:
        'The same with blocks and places'
        ...
    def restore(self, state) -> Any:
        'Continue where `state` was saved'
        ...
