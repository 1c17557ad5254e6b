# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from torch import Tensor
from torch.utils.data.dataset import IterableDataset
from torchdata.nodes.base_node import BaseNode

class _Passes:
    'The passes over a chain: each can be left, saved, and gone on with'
    source: Any
    stage: Any
    begun: Any
    over: Any
    loaded: Any
    def __init__(self, source) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state) -> Any: ...

class StatefulPipe(_Passes, IterableDataset):
    'The chain as a dataset that `StatefulDataLoader(..., batch_size=None)` saves and restores exactly'
    def __init__(self, source) -> None: ...
    def state_dict(self) -> dict:
        'Where the pass stands'
        ...
    def load_state_dict(self, state: dict) -> Any:
        'Go on there with the next pass'
        ...

class PipeNode(BaseNode):
    'The chain as a node of `torchdata.nodes`, saved and restored exactly'
    source: Any
    def __init__(self, source) -> None: ...
    def reset(self, initial_state: dict | None = None) -> Any:
        'Begin the next pass, or go on with the one that was saved'
        ...
    def next(self) -> Any:
        'The next item'
        ...
    def get_state(self) -> dict:
        'Where the pass stands'
        ...

class Columns(dict):
    'The columns of a block by name, as attributes and as items; any values will do'
    def __getattr__(self, name) -> Any: ...
    @property
    def done(self) -> Tensor:
        'Where the episode ended: terminated or truncated'
        ...
