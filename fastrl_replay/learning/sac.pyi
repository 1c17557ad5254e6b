# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.learning.base import Learner
from fastrl_replay.learning.continuous import BoxBounds
from fastrl_replay.learning.registry import Builder
from fastrl_replay.steps.core import Steps
from gymnasium.spaces.box import Box
from torch import Tensor

def sac_errors(actor, critics, target, batch: Steps, gamma: float, temperature, noise: Tensor, bounds: BoxBounds) -> tuple:
    'Values and targets of the actions of a batch'
    ...

def critic_loss(q: Tensor, goal: Tensor, batch: Steps) -> Tensor:
    'Half of the mean square of the errors, weighted as the replay says, summed over the critics'
    ...

def sac_actor_loss(actor, critics, batch: Steps, temperature, noise: Tensor, size: int) -> tuple:
    "How bad the actor's actions are, in the critics' eyes"
    ...

class Temperature(nn.Module):
    'A positive number that is learned as its logarithm'
    log: Any
    def __init__(self, start: float = 1.0) -> None: ...
    def forward(self) -> Any: ...

def temperature_loss(temperature: Temperature, logp: Tensor, entropy: float) -> Tensor:
    'Falls with the temperature where actions are less certain than is wanted, and grows where they are more'
    ...

class SACLearner(Learner):
    'Soft actor-critic: takes batches, improves `actor` and `critics`, yields records'
    bounds: Any
    learned: dict
    follows: dict
    def __init__(self, source, actor: nn.Module, critics: nn.Module, space: Box, gamma: float = 0.99, lr: float = 0.0003, tau: float = 0.005, temperature: float = 1.0, temperature_lr: float | None = None, entropy: float | None = None, max_norm: float = ..., optimizer: Any = None, seed: int | None = None) -> None: ...
    def learn(self, batch: Steps) -> dict:
        'One update: losses and norms of the gradients, mean error, mean value, temperature, entropy of the actions'
        ...

class ActorCritic(nn.Module):
    'An actor and critics, and the space of their actions'
    actor: Any
    critics: Any
    space: Any
    def __init__(self, actor: nn.Module, critics: nn.Module, space: Box) -> None: ...

class SACBuilder(Builder):
    '`learner = sac`: an `actor_net` and `Critics`, n-step rows, a replay of rows'
    memories: dict
    ranges: dict
    settings: dict
    spread: bool
    def model(self, s, observations, actions) -> Any: ...
    def policy(self, model, s, episodes) -> Any: ...
    def greedy(self, model, s) -> Any: ...
    def chain(self, steps, model, s) -> Any: ...
