# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from gymnasium.vector.vector_env import VectorEnv

def is_parallel(x) -> bool:
    "Has it the interface of PettingZoo's `ParallelEnv`?"
    ...

def as_agents(x) -> Any:
    'A parallel environment as environments of a stepper; an error where agents act in turn'
    ...

class Agents(VectorEnv):
    'A `ParallelEnv` as environments of a stepper, one for each agent that can be present at a time'
    num_envs: Any
    single_observation_space: Any
    single_action_space: Any
    observation_space: Any
    action_space: Any
    parallel: Any
    named: Any
    def __init__(self, parallel, room: int | None = None) -> None: ...
    def close(self, **kwargs) -> Any: ...
    def render(self) -> Any: ...

class Rounds:
    'When the agents of an environment begin anew: here, of one that no other group steps'
    broken: bool
    ready: bool
    def begin(self) -> Any:
        'A slot is made, with none of its agents: what it steps begins as at first'
        ...
    def leave(self, seed: Any = None) -> Any:
        'A new episode begins, for all who step it'
        ...
