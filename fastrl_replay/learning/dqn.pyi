# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.learning.base import Learner
from fastrl_replay.learning.registry import Builder
from fastrl_replay.steps.core import Steps
from torch import Tensor

def action_values(who: str, values: Tensor, action: Tensor) -> Tensor:
    'The values of the actions that were taken; an error where the model gives anything else than one for each action'
    ...

def has_parts(batch: Steps) -> bool:
    'Is each action several whole numbers, as in `MultiDiscrete` and `MultiBinary` spaces?'
    ...

def dqn_errors(model, target, batch: Steps, gamma: float, double: bool = True) -> tuple:
    'Values and targets of the actions of a batch'
    ...

class DQNLearner(Learner):
    'Deep Q-learning: takes batches, improves `model`, yields records'
    learned: dict
    follows: dict
    def __init__(self, source, model: nn.Module, gamma: float = 0.99, lr: float = 0.001, double: bool = True, target_every: int = 500, tau: float = 1.0, max_norm: float = 10.0, optimizer: Any = None, conservative: float = 0.0) -> None: ...
    def learn(self, batch: Steps) -> dict:
        'One update: loss, norm of the gradient, mean error, mean value'
        ...

def value_excess(values: Tensor, action: Tensor) -> Tensor:
    'How far the soft maximum of the values is above those of the actions that were taken'
    ...

class DQNBuilder(Builder):
    '`learner = dqn`: a `value_net` or a `conv_net`, n-step rows, a replay of rows'
    memories: dict
    settings: dict
    ranges: dict
    def model(self, s, observations, actions) -> Any: ...
    def chain(self, steps, model, s) -> Any: ...
