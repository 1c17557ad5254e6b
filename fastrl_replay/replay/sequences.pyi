# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.memory.rows import Store
from fastrl_replay.memory.samplers import Sampler
from fastrl_replay.replay.prioritized import ReplayByKind

class SequenceReplay(ReplayByKind):
    'Keeps the last `max_sz` rows and yields batches of `bs` sequences of them that overlap and never cross an episode'
    length: Any
    burn_in: Any
    overlap: Any
    state: Any
    eta: Any
    prioritized: Any
    def __init__(self, source: Any = None, bs: int = 1, max_sz: int = 1000000, *, length: int = 80, burn_in: int | None = None, overlap: int | None = None, kind: str | type = 'proportional', prioritized: bool = True, eta: float = 0.9, alpha: float = 0.9, beta: Any = 0.6, initial: str = 'largest', state: str = 'stored', sampler: Sampler | None = None, store: Store | None = None, eps: float = 1e-06, stratified: bool = True, weight_norm: str = 'batch', seed: int | None = None, ratio: float | None = None, warmup: int | None = None, return_idxs: bool = False, freeze_memory: bool = False) -> None: ...
    @property
    def table(self) -> Any:
        'What belongs to each sequence; None before the first row'
        ...
    def stats(self) -> dict:
        'Counts of rows, sequences and batches; mean length, share of padding, effective sample size'
        ...
