# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn

class RayEngine:
    'Workers are actors of a Ray cluster'
    resources: Any
    num_cpus: Any
    num_gpus: Any
    patience: Any
    address: Any
    def __init__(self, num_cpus: float = 1, num_gpus: float = 0, resources: dict | None = None, address: str | None = None, patience: float = 300.0) -> None: ...
    @property
    def needs(self) -> Any: ...
    @property
    def cluster(self) -> Any:
        'Ray, connected'
        ...
    @property
    def actors(self) -> Any:
        'What makes actors; connects to the cluster when it is first asked'
        ...
    def weights(self, tensors, copies, *dtype) -> Any:
        'A place in the object store, from which workers take weights'
        ...
    def worker(self, *args) -> Any:
        'An actor with a chain'
        ...
    def wait(self, workers) -> Any:
        'Until one of them has an answer, or its end'
        ...
    def end(self, workers, owner) -> Any:
        'End actors: their chains are closed where that takes no longer than five seconds'
        ...
