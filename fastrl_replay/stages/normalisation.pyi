# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.pipe import Pipe
from fastrl_replay.steps.core import Steps
from gymnasium.spaces.space import Space
from numpy import ndarray
from torch import Tensor

PRIOR: float

def merge_moments(mean, var, count, x) -> Any:
    'Merge rows `x` [n, k] into means and variances [k] of `count` [1] rows, in place'
    ...

class Moments(nn.Module):
    'Mean and variance of all rows so far'
    def __init__(self, *shape: int) -> None: ...
    def update(self, x: ndarray) -> Any:
        'Count these rows, too'
        ...
    def std(self, eps: float) -> Tensor: ...

class StateNorm(nn.Module):
    'A layer that brings states to mean 0 and variance 1; a stage, `update_norms`, says what they are'
    names: Any
    eps: Any
    moments: Any
    space: Any
    clip: Any
    def __init__(self, space: Space, parts: Any = None, clip: float = 10.0, eps: float = 1e-08) -> None: ...
    def forward(self, state) -> Any: ...
    def update(self, states) -> Any:
        'Count these states, too; numbers that are not finite are an error, and then none is counted'
        ...

class Normalised(nn.Module):
    'A network that is given normalised states'
    norm: Any
    net: Any
    initial_hidden: Any
    def __init__(self, norm: StateNorm, net: nn.Module) -> None: ...
    def forward(self, state, *more) -> Any: ...

def running_returns(rewards, envs, steps, ended, gamma, returns) -> Any:
    "The running return of each row's environment, which `returns` has for each of them between blocks"
    ...

class RewardNorm:
    'Rewards divided by the standard deviation of running returns'
    gamma: Any
    clip: Any
    eps: Any
    moments: Any
    returns: Any
    def __init__(self, gamma: float = 0.99, clip: float = 10.0, eps: float = 1e-08) -> None: ...
    def check(self, rows) -> Any:
        'An error where a reward is not finite'
        ...
    def __call__(self, reward: Tensor) -> Tensor: ...
    def update(self, rows: ndarray) -> Any:
        'Count the returns after these steps, too'
        ...

class UpdateNorms(Pipe):
    'Passes blocks on, and counts each row once in the statistics of states and rewards'
    states: Any
    rewards: Any
    _buffers: tuple
    def __init__(self, source, states: StateNorm | None = None, rewards: RewardNorm | None = None) -> None: ...
    def _fresh(self) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def _in_worker(self, info) -> Any: ...
    def update(self, steps: Steps) -> Any:
        'Count these rows, or none of them where there is an error'
        ...
    def snapshot(self) -> dict:
        'The statistics, and returns that are running'
        ...
    def check_state(self, state) -> Any: ...
    def restore(self, state) -> Any:
        'Go on from statistics that were saved'
        ...

class ScaleRewards(Pipe):
    'Batches with rewards on the scale of a `RewardNorm`'
    rewards: Any
    def __init__(self, source, rewards: RewardNorm) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def scaled(self, batch: Steps) -> Steps:
        'The same rows with scaled rewards'
        ...
