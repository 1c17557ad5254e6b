# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.pipe import Pipe
from numpy import dtype, ndarray

def as_array(x) -> Any:
    'A value of a step as an array'
    ...

def first_dtype(who: str, values: dict, n: int | None = None) -> dtype:
    'The dtype of rows for steps like this one'
    ...

def as_before(new: dtype, old: dtype) -> dtype:
    'The same, but that each column is as in the memory, if that takes what the step has'
    ...

def fill(who: str, field: ndarray, x, name: str) -> Any:
    'Write the values of a column; an error where they are not like those of the first call'
    ...

class OneRow:
    "Writes a step of one environment in one piece, where its values are of the row's kinds"
    forms: Any
    rows: Any
    pack_into: Any
    bytes: Any
    def __init__(self, rows: ndarray, names: list) -> None: ...
    fits: Any
    def write(self, values) -> bool:
        'Write a step'
        ...

class StepRows:
    'Makes rows of the steps of a loop, and counts episodes'
    who: Any
    memory: Any
    goes_on: Any
    others: Any
    rows: Any
    ids: Any
    def __init__(self, who: str, memory: Any = ..., goes_on: bool = True) -> None: ...
    def make(self, values: dict, env_id: Any = 0, final_obs: Any = None, mode: str | None = None) -> ndarray:
        'Rows of a step; they count when `done` is called'
        ...
    def stands(self) -> dict:
        'Where each environment stands'
        ...
    def done(self) -> Any:
        'The rows that were made last were taken: they count'
        ...
    def like(self, rows: ndarray) -> Any:
        'Expect steps like these from now on'
        ...

class OwnSteps(Pipe):
    'The first stage of a chain whose steps come from your own loop'
    _buffers: tuple
    data_ended: bool
    takes_steps: bool
    def __init__(self) -> None: ...
    def _fresh(self) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def end_in(self, memory) -> Any:
        'Episodes are counted from those of the rows that lie there'
        ...
    def add_step(self, obs, action, reward, next_obs, terminated, truncated: Any = False, **how) -> Any:
        'Let a step wait for the chain; `how`: as `add_step` of replays takes it'
        ...
    def take(self, values, *how) -> Any:
        'The same of values that are sorted'
        ...
    def snapshot(self) -> Any: ...
    def check_state(self, state) -> Any: ...
    def restore(self, state) -> Any: ...

def step_values(obs, action, reward, next_obs, terminated, truncated, env_id: Any = 0, final_obs: Any = None, **columns) -> Any:
    'What `StepRows.make` takes, of the arguments of `add_step`'
    ...
