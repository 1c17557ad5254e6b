# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.memory.rows import Store
from fastrl_replay.memory.samplers import Sampler
from fastrl_replay.replay.replay import Replay

class ReplayByKind(Replay):
    'A replay whose sampler is named by `kind`, or made of a class'
    kind: Any
    alpha: Any
    eps: Any
    initial: Any
    stratified: Any
    seed: Any
    def __init__(self, source, bs, max_sz, *, kind, alpha, beta, view, eps: float = 1e-06, initial: str = 'largest', stratified: bool = True, weight_norm: str = 'batch', seed: int | None = None, sampler: Sampler | None = None, store: Store | None = None, ratio: float | None = None, warmup: int | None = None, return_idxs: bool = False, freeze_memory: bool = False) -> None: ...

class PrioritizedReplay(ReplayByKind):
    'Keeps the last `max_sz` rows and yields batches of `bs` of them; larger TD errors are drawn more often'
    def __init__(self, source: Any = None, bs: int = 1, max_sz: int = 1000000, *, kind: str | type = 'proportional', alpha: float = 0.6, beta: Any = 0.4, eps: float = 1e-06, initial: str = 'largest', stratified: bool = True, weight_norm: str = 'batch', seed: int | None = None, sampler: Sampler | None = None, store: Store | None = None, ratio: float | None = None, warmup: int | None = None, return_idxs: bool = False, freeze_memory: bool = False) -> None: ...
    def stats(self) -> dict:
        'Counts, ages, times drawn; effective sample size, share of rows never drawn, histogram of priorities'
        ...
