# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.learning.policies import Exploring
from fastrl_replay.steps.core import Steps
from gymnasium.spaces.box import Box
from gymnasium.spaces.space import Space
from numpy import ndarray
from torch import Tensor, dtype

class _BoxPolicy(Exploring):
    "What policies for boxes share: `_unit` makes numbers from -1 to 1 of an actor's answer"
    actor: Any
    bounds: Any
    device: Any
    random: Any
    rng: Any
    spread: bool
    def __call__(self, state) -> ndarray: ...

LOG_STD: tuple

class BoxBounds:
    'Conversion between actions of a `Box` and numbers from -1 to 1'
    divisor: Any
    space: Any
    size: Any
    low: Any
    high: Any
    middle: Any
    half: Any
    def __init__(self, space: Box, who: str = 'BoxBounds') -> None: ...
    def to_space(self, unit: ndarray) -> ndarray:
        'Actions that lie in the space'
        ...
    def to_unit(self, action: Tensor, dtype: dtype = ...) -> Tensor:
        'The inverse: numbers from -1 to 1; 0 where both bounds are the same'
        ...

def squashed(answer: Tensor, noise: Tensor) -> tuple:
    'Samples of a normal distribution, squashed by tanh, and how likely they are'
    ...

def actor_net(observation_space: Space, action_space: Box, hidden: Any = ..., spread: bool = False) -> nn.Sequential:
    'A network for the numbers of an action, before they are squashed'
    ...

class Critics(nn.Module):
    'Networks side by side: states and actions from -1 to 1 → [n, ...] values'
    layers: Any
    n: Any
    features: Any
    def __init__(self, observation_space: Space, action_space: Box, hidden: Any = ..., n: int = 2) -> None: ...
    def forward(self, state, action) -> Any: ...

def actor_values(who: str, actor, state, size: int, spread: bool = False) -> Tensor:
    'What an actor gives, before it is squashed'
    ...

def critic_values(who: str, critics, state, action: Tensor) -> Tensor:
    'What critics give'
    ...

def check_rows(who: str, batch: Steps, bounds: BoxBounds) -> Any:
    'An error where a batch has no rows, or actions of another space'
    ...

class SquashedGaussian(_BoxPolicy):
    'Draws actions from normal distributions that are squashed into the bounds of a `Box`'
    greedy: Any
    spread: bool
    def __init__(self, actor, space: Box, greedy: bool = False, random: int = 0, seed: int | None = None, device: Any = None) -> None: ...

class GaussianNoise(_BoxPolicy):
    "The actor's actions with normal noise, cut off at the bounds of a `Box`"
    scale: Any
    def __init__(self, actor, space: Box, scale: Any = 0.1, random: int = 0, seed: int | None = None, device: Any = None) -> None: ...
    def report(self) -> dict:
        'What a run writes down: the scale of the noise now'
        ...
