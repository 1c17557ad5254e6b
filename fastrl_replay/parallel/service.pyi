# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.look.memory_page import Inspectable
from fastrl_replay.parallel.coordinator import Shard
from fastrl_replay.pipe import Pipe
from fastrl_replay.steps.core import Steps
from numpy import ndarray

class Service(Inspectable, Pipe):
    'A memory in a cluster, which other programs use, too'
    name: Any
    limit: Any
    address: Any
    lock: Any
    shards: Any
    bs: Any
    draws_batches: bool
    has_source: bool
    takes_any_item: bool
    _buffers: tuple
    def __init__(self, name: str, limit: float = 60.0, address: str | None = None) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def due_batches(self) -> Any:
        'Batches may be drawn without end'
        ...
    def _fresh(self) -> Any: ...
    def _open(self) -> Any: ...
    def add(self, steps: Steps) -> ndarray:
        "Add rows, when draws have used enough of those before; a block that doesn't fit is refused whole"
        ...
    def add_step(self, obs, action, reward, next_obs, terminated, truncated: Any = False, **how) -> ndarray:
        'Add a step of an environment, or one of each environment of a vector'
        ...
    def sample(self, n: int | None = None) -> Steps:
        'Draw a batch, when the rows so far allow one'
        ...
    def update_priorities(self, keys, td) -> Any:
        'Update priorities in the shards; keys whose rows were overwritten are left out, and counted'
        ...
    def stats(self) -> dict:
        'Rows, batches, waiting calls, restarts and losses, over all programs'
        ...
    def order_draws(self) -> Any:
        'The lock that keeps draws in order'
        ...
    def _close(self) -> Any: ...
    def stop(self) -> Any:
        'End the service, for all programs'
        ...
    def pages(self) -> dict:
        'What is in each shard, and what reads its rows, where it is'
        ...
    def inside(self) -> dict:
        'What is in each shard; looking changes nothing'
        ...

class RestartedShard(Shard):
    'A shard that asks Ray whether it was restarted'
    def __init__(self, *args) -> None: ...

def connect(name: str, limit: float = 60.0, address: str | None = None) -> Service:
    'A memory that is served in this cluster'
    ...

def stop(name: str, address: str | None = None) -> Any:
    'End a service; rows in files remain'
    ...
