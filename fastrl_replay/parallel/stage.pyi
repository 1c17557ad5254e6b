# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.parallel.saved_workers import SavedWorkers

class _Turns(SavedWorkers):
    'Hands on what workers made, a chunk of one after a chunk of another'
    lag_max: Any
    given: Any
    lag_sum: Any
    def __iter__(self) -> Iterator[Any]: ...

ENGINES: dict

MAX_WORKERS: int

def as_engine(engine, method: str | None = None, address: str | None = None) -> Any:
    'An engine, where a name may stand for it'
    ...

class Parallel(_Turns):
    'Copies of the chain above, in workers; a second pass goes on where the last one stopped'
    weights_dtype: Any
    engine: Any
    method: Any
    ordered: Any
    shares: Any
    restarted: Any
    num_workers: Any
    restarts: Any
    chunk: Any
    ahead: Any
    weights_every: Any
    given: Any
    lag_sum: Any
    lag_max: Any
    stale: Any
    weights_written: Any
    began: Any
    waited: Any
    takes_any_item: bool
    news: Any
    _buffers: tuple
    def __init__(self, source, num_workers: int = 2, ahead: int | None = None, chunk: int = 4, method: str | None = None, restarts: int = 0, engine: Any = 'process', ordered: bool = True, shares: str = 'equal', weights_every: int = 0, weights_dtype: str | None = None) -> None: ...
    def _fresh(self) -> Any: ...
    def _open(self) -> Any:
        'See that there are workers'
        ...
    def _close(self) -> Any:
        'End the workers; the next pass begins with new ones'
        ...
    def stats(self) -> dict:
        'Items passed on; how many items old their weights were, and the bound; waits, restarts and losses; rows'
        ...
    def show(self) -> Any:
        'What is in each shard, and what `stats` says of each worker, in one figure of matplotlib, which a notebook shows'
        ...
    def resize(self, num_workers: int) -> Any:
        'Add or remove workers, also while it runs: the highest ranks leave, and the items that they gave are passed on'
        ...
    def due_batches(self) -> Any:
        'Receive batches; yields, with nothing, for each'
        ...
    def sample(self) -> Any:
        'The next of the batches that were received'
        ...
    def order_draws(self) -> Any:
        'The lock that keeps draws in order'
        ...
