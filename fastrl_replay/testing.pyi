# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.steps.states import Saves
from gymnasium.core import Env
from gymnasium.spaces.space import Space
from gymnasium.vector.sync_vector_env import SyncVectorEnv

class ScriptedEnv(Env, Saves):
    'An environment that plays given episodes, again and again, whatever the actions'
    observation_space: Any
    action_space: Any
    states: Any
    rewards: Any
    terminations: Any
    truncations: Any
    t: Any
    s: Any
    running: Any
    seeds: Any
    actions: Any
    saved: dict
    def __init__(self, states, rewards, terminations, truncations, observation_space: Space | None = None, action_space: Space | None = None) -> None: ...
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        'Go to the first state of the next episode; one that is running is left'
        ...
    def step(self, action) -> Any:
        'The next step of the script'
        ...

def script(*lengths, env: int = 0) -> dict:
    'Episodes of given lengths with numbers that are all different'
    ...

class ScriptedVectorEnv(SyncVectorEnv):
    'Scripted environments as a gymnasium vector environment'
    def __init__(self, scripts, autoreset_mode: Any = 'NextStep') -> None: ...

def scripted_steps(scripts, n: int) -> list:
    'The true transitions of scripts, read off the lists'
    ...

def same(a, b) -> bool:
    'Are two items of pipes equal? Blocks, tensors, arrays, records, and tuples of these'
    ...

def through_file(state: dict) -> dict:
    'Write a state to a file and read it back as an untrusted one: without executing code'
    ...

def check_contract(factory, holds: int = 2) -> dict:
    'Test that a stage keeps the contract of all stages'
    ...
