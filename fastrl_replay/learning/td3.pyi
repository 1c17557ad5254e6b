# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.learning.base import Learner
from fastrl_replay.learning.continuous import BoxBounds
from fastrl_replay.learning.sac import SACBuilder
from fastrl_replay.steps.core import Steps
from gymnasium.spaces.box import Box
from torch import Tensor

def td3_errors(critics, target, target_actor, batch: Steps, gamma: float, noise: Tensor, bounds: BoxBounds) -> tuple:
    'Values and targets of the actions of a batch'
    ...

def td3_actor_loss(actor, critics, batch: Steps, size: int) -> Tensor:
    "How bad the actor's actions are, in the first critic's eyes"
    ...

class TD3Learner(Learner):
    'Twin delayed DDPG: takes batches, improves `actor` and `critics`, yields records'
    bounds: Any
    learned: dict
    follows: dict
    def __init__(self, source, actor: nn.Module, critics: nn.Module, space: Box, gamma: float = 0.99, lr: float = 0.0003, tau: float = 0.005, smoothing: float = 0.2, most: float = 0.5, actor_every: int = 2, max_norm: float = ..., optimizer: Any = None, seed: int | None = None) -> None: ...
    def learn(self, batch: Steps) -> dict:
        'One update: losses and norms of the gradients, mean error, mean value'
        ...

class TD3Builder(SACBuilder):
    '`learner = td3`: an `actor_net` and `Critics`, n-step rows, a replay of rows'
    ranges: dict
    settings: dict
    spread: bool
    def policy(self, model, s, episodes) -> Any: ...
    def greedy(self, model, s) -> Any: ...
    def chain(self, steps, model, s) -> Any: ...
