# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.pipe import WorkerInfo
from fastrl_replay.steps.states import Saves
from numpy import ndarray

class Exploring(Saves):
    'The base of policies with random numbers'
    rng: Any
    device: Any
    saved: dict
    asked: int
    worker: Any
    def in_worker(self, info: WorkerInfo) -> Any:
        'Act as one of several copies'
        ...

class LinearSchedule:
    'From `start` to `end` in `steps` even steps, and `end` ever after'
    start: Any
    end: Any
    steps: Any
    def __init__(self, start: float, end: float, steps: int) -> None: ...
    def __call__(self, count) -> float: ...

class GeometricSchedule:
    '`start`, times `factor` at each count, but never beyond `end`'
    start: Any
    factor: Any
    end: Any
    def __init__(self, start: float, factor: float, end: float = 0.0) -> None: ...
    def __call__(self, count) -> float: ...

def branch_sizes(values) -> ndarray:
    'The parts of the actions whose values a network gives, as one of its layers says by `action_sizes`'
    ...

class EpsGreedy(Exploring):
    'The action of the largest value, or with probability `eps` any action'
    sizes: Any
    values: Any
    eps: Any
    device: Any
    random: Any
    actions: Any
    rng: Any
    initial_hidden: Any
    saved: dict
    def __init__(self, values, eps: Any = 0.05, seed: int | None = None, device: Any = None, random: int = 0) -> None: ...
    def __call__(self, state, hidden: Any = None, mask: Any = None) -> ndarray: ...
    @property
    def eps_now(self) -> Any:
        'The probability of exploring at the next call'
        ...
    def report(self) -> dict:
        'What a run writes down: how likely it is to explore now, on average where environments differ'
        ...

def ask(who: str, model, *inputs) -> Any:
    "What a model answers; an error with a remedy where states are float64 and its weights aren't"
    ...

def n_states(who: str, state) -> int:
    'The number of environments, whatever their states are'
    ...
