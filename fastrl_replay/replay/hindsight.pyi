# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.memory.rows import Store
from fastrl_replay.memory.samplers import Sampler
from fastrl_replay.replay.replay import Replay
from fastrl_replay.replay.views import Transitions
from fastrl_replay.steps.core import Steps
from numpy import ndarray

class _AsksGoals(Replay):
    'A replay whose view asks what a goal is worth'
    def sample_weighted(self, n: int, weigh) -> Any:
        'Draw a batch whose weights something else decides; the lock is held'
        ...

PLACE: int

STEP_BACK: int

JUMP: int

AHEAD: int

STRATEGIES: tuple

def follow_links(numbers, followed, table) -> Any:
    'Note rows from the key `followed` on; which key will be the next'
    ...

def episode_end(key, table) -> Any:
    'The last row of its episode so far, which is noted in the rows on the way'
    ...

def row_at(place, key, oldest, table) -> Any:
    'The row at an earlier place of the episode, which must be there still'
    ...

def episode_start(key, oldest, table) -> Any:
    'The first row of its episode that is still there'
    ...

def place_between(first, last, bits, table) -> Any:
    'A place out of random bits'
    ...

def likely_between(first, last, bits, table) -> Any:
    'Where the row at this place would be, if all were at even distances'
    ...

def choose_goals(numbers, keys, table, seed, count, share, strategy, out) -> Any:
    'Which rows get other goals, and those of which rows, into the two rows of `out`; how many'
    ...

def goal_functions(who: str, given) -> tuple:
    'What gives the reward of an outcome under any goal, and what says whether the task is over'
    ...

def stepped_env(who: str, pipe) -> Any:
    'An environment that the chain above steps in this process'
    ...

def refuse_merged(who: str, pipe) -> Any:
    'Raise where these are rows of several steps'
    ...

def rewards_of(who, f, achieved, desired) -> ndarray:
    'The rewards of outcomes under goals'
    ...

def terminations_of(who, f, achieved, desired) -> ndarray:
    'Is the task over with outcomes under goals?'
    ...

class Hindsight(Transitions):
    'Rows of which a share have goals that were achieved later'
    share: Any
    strategy: Any
    seed: Any
    functions: Any
    counted: bool
    def __init__(self, share: float = 0.8, strategy: str = 'future', seed: int | None = None) -> None: ...
    def clear(self) -> Any: ...
    nbytes: Any
    def check_columns(self, dtype) -> Any:
        'Raise where rows have no goals that could be replaced'
        ...
    def batch(self, keys, weights) -> Steps:
        'The rows with these keys; a share of them with other goals'
        ...
    def choose(self, keys) -> ndarray:
        'Which rows get other goals, and whose'
        ...
    def give_goals(self, batch, chosen, goals) -> Any:
        'Write goals that others achieved into chosen rows of a batch; copies of outcomes and goals'
        ...
    def beside(self, keys) -> dict:
        'A goal that each of these rows may get, of which row, and what follows'
        ...
    def snapshot(self) -> dict:
        'Settings and RNG state'
        ...
    def check_state(self, state) -> Any:
        'Raise where a saved view had other settings'
        ...
    def restore(self, state) -> Any:
        'Go on where `snapshot` was taken'
        ...

class HindsightReplay(_AsksGoals):
    'Keeps the last `max_sz` rows and yields batches of `bs` of them, of which a share have goals achieved later'
    share: Any
    strategy: Any
    reward: Any
    replacement: Any
    seed: Any
    def __init__(self, source: Any = None, bs: int = 1, max_sz: int = 1000000, *, share: float = 0.8, strategy: str = 'future', reward: Any = None, replacement: bool = False, beta: Any = None, seed: int | None = None, sampler: Sampler | None = None, store: Store | None = None, ratio: float | None = None, warmup: int | None = None, return_idxs: bool = False, freeze_memory: bool = False) -> None: ...
