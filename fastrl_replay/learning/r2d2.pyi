# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.learning.base import Learner
from fastrl_replay.learning.registry import Builder
from fastrl_replay.steps.batches import Sequences

def r2d2_errors(model, target, batch: Sequences, gamma: float, n: int, rescaled: bool = True) -> tuple:
    'Values and targets of the steps after the burn-in'
    ...

class R2D2Learner(Learner):
    'Recurrent replay: takes batches of sequences, improves `model`, yields records'
    learned: dict
    follows: dict
    def __init__(self, source, model: nn.Module, gamma: float = 0.997, n: int = 5, lr: float = 0.0001, rescaled: bool = True, target_every: int = 2500, tau: float = 1.0, max_norm: float = 40.0, optimizer: Any = None) -> None: ...
    def learn(self, batch: Sequences) -> dict:
        'One update: loss, norm of the gradient, mean error, mean value'
        ...

class R2D2Builder(Builder):
    '`learner = r2d2`: a `RecurrentNet`, a replay of sequences'
    memories: dict
    settings: dict
    def model(self, s, observations, actions) -> Any: ...
    def chain(self, steps, model, s) -> Any: ...
