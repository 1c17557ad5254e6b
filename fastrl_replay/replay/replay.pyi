# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.look.memory_page import Inspectable
from fastrl_replay.memory.samplers import Sampler
from fastrl_replay.replay.saved_replays import SavedReplay
from fastrl_replay.replay.views import View
from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.errors import NotEnoughRows
from fastrl_replay.steps.locks import DrawOrderLock
from numpy import ndarray

class Replay(Inspectable, SavedReplay):
    'A memory of rows, a sampler and a view as a stage: takes blocks, yields batches'
    beta: Any
    sampler: Any
    view: Any
    batches: Any
    sampled: Any
    stale: Any
    lock: Any
    _buffers: tuple
    store: Any
    weight_norm: Any
    def __init__(self, source, bs, max_sz, *, sampler: Sampler | None = None, default: Any = None, view: View = ..., store: Any = None, beta: Any = None, weight_norm: Any = 'batch', initial: Any = None, needs: int | None = None, ratio: float | None = None, warmup: int | None = None, return_idxs: bool = False, freeze_memory: bool = False) -> None: ...
    def __len__(self) -> int: ...
    @property
    def unit(self) -> str:
        'What is drawn'
        ...
    @property
    def nbytes(self) -> int:
        'Bytes reserved'
        ...
    def _fresh(self) -> Any:
        'New parts, with nothing in them'
        ...
    def clear(self) -> Any:
        'As before the first row; what lies on disk stays there'
        ...
    def add(self, steps: Steps) -> ndarray:
        "Add rows to memory; a block that doesn't fit is refused whole, and nothing has changed"
        ...
    def add_step(self, obs, action, reward, next_obs, terminated, truncated: Any = False, *, env_id: Any = 0, final_obs: Any = None, **columns) -> ndarray:
        'Add a step from your own loop, or one of each environment of a vector'
        ...
    def feedback(self, keys, td) -> tuple:
        'For what errors still count, as the view says'
        ...
    def sample_weighted(self, n: int, weigh) -> Any:
        'Draw a batch whose weights something else decides; the lock is held'
        ...
    def sample(self, bs: int | None = None) -> Any:
        'Draw a batch'
        ...
    def too_few(self, n: int) -> NotEnoughRows:
        'The error where fewer than `n` can be drawn'
        ...
    def update_priorities(self, keys, td) -> Any:
        'Give TD errors to the sampler; those of overwritten rows are dropped and counted'
        ...
    def check_errors(self, who, keys, td) -> Any:
        "Raise where errors of this form can't be taken, whatever rows there are"
        ...
    def stats(self) -> dict:
        'Counts of rows and batches, ages of drawn rows, times drawn, fill'
        ...
    def inside(self) -> dict:
        'What is in it, and what can be drawn, as plain arrays; looking changes nothing'
        ...
    def for_page(self) -> tuple:
        'What is in it, what reads its rows, and what tells more of them'
        ...
    def pages(self) -> dict:
        'What is in the memories that batches are drawn from'
        ...
    def flush(self) -> Any:
        'Flush a memory on disk to the device; in main memory there is nothing to do'
        ...
    def _close(self) -> Any:
        'Let other processes write to a memory on disk; when it is used again, it is opened again'
        ...
    def order_draws(self, lock: DrawOrderLock | None = None) -> DrawOrderLock:
        'From now on a lock that keeps draws in the order in which they were begun'
        ...
    def _in_worker(self, info) -> Any:
        'Be one shard of several: with other draws, in another directory'
        ...
    def send_packed(self) -> Any:
        'From now on batches are as they travel: a store may leave frames packed'
        ...
    def scale(self, weight, norm) -> dict:
        'Sum of priorities, β and largest weight, by which weights are brought to one scale with those of other shards'
        ...
    def facts(self, batch) -> dict:
        'What is to be said of a batch beside those of other shards'
        ...
    def totals(self) -> dict:
        'What can be drawn, with all rows so far'
        ...
    def serve(self, name: str, shards: int = 1, ahead: int = 1000, engine: Any | None = None) -> Any:
        'Keep this memory in a Ray cluster, under a name, until the service is stopped'
        ...

def scheduled(who: str, what: str, x, batches: int | None = None) -> float:
    'A setting that may follow a schedule; an error where it is no number'
    ...
