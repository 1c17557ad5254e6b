# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.learning.base import Learner
from fastrl_replay.learning.registry import Builder
from fastrl_replay.steps.core import Steps
from gymnasium.spaces.discrete import Discrete
from numpy import ndarray
from torch import Tensor

class QTable:
    'A value for each action in each state, all 0 at first'
    first: Any
    def __init__(self, observation_space: Discrete, action_space: Discrete) -> None: ...
    def __call__(self, state) -> Tensor: ...
    @property
    def values(self) -> Any: ...
    @values.setter
    def values(self, value) -> None: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state) -> Any: ...

class Moves(NamedTuple):
    'Columns of rows: what was done, and what came of it'
    state: ndarray
    action: ndarray
    reward: ndarray
    next_state: ndarray
    discount: ndarray

def q_update(q, moves, step, td, allowed) -> Any:
    "Learn from rows in turn and fill in their errors; -1, or the first row that can't be learned from"
    ...

class QLearner(Learner):
    'Tabular Q-learning: takes batches, improves `table`, yields records'
    updates: Any
    def __init__(self, source, table: QTable, gamma: float = 0.99, lr: float = 0.5) -> None: ...
    def snapshot(self) -> Any: ...
    def check_state(self, state) -> Any: ...
    def restore(self, state) -> Any: ...
    def learn(self, batch: Steps) -> dict:
        'Learn from each row in turn'
        ...

class TableBuilder(Builder):
    '`learner = table`: a `QTable`, learned from single steps, with or without a replay'
    memories: dict
    ranks: bool
    def model(self, s, observations, actions) -> Any: ...
    def chain(self, steps, model, s) -> Any: ...
