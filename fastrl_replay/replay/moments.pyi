# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.replay.views import Transitions, View
from fastrl_replay.steps.batches import Sequences
from fastrl_replay.steps.core import Steps

class Span(NamedTuple):
    'Which moments are there, and what is known of the last row'
    low: int = 0
    high: int = 0
    told_low: int = 0
    told_high: int = 0
    followed: int = 0
    last: tuple | None = None
    agents: int = 0

class Moments(Transitions):
    'Rows of all agents at one moment, as [n, agents]; a false `mask` where one was not there'
    agents: Any
    span: Any
    capacity: Any
    unit: str
    follows: bool
    adds: dict
    def __init__(self, agents: int | None = None) -> None: ...
    def clear(self) -> Any: ...
    def __len__(self) -> int: ...
    followed: Any
    nbytes: Any
    def key_of(self, places) -> Any: ...
    places: Any
    def check_columns(self, dtype) -> Any:
        "Raise where rows don't say whose they are, or span several steps"
        ...
    def stored(self, steps: Steps) -> Steps:
        'The rows as they are; an error where an agent has no place on the axis'
        ...
    def follow(self, steps: Steps, first: int) -> Any:
        'Rows with keys from `first` on have been added'
        ...
    def drawable(self) -> tuple:
        'Which moments came and went'
        ...
    def told(self) -> Any:
        'The sampler knows of all moments that came and went'
        ...
    def lengths(self, places) -> Any: ...
    def batch(self, places, weights) -> Sequences:
        'The rows of the moments at these places'
        ...
    def feedback(self, keys, td) -> tuple:
        'For which moments errors still count'
        ...
    def snapshot(self) -> dict:
        'Where the moments begin, and whose the rows are'
        ...
    def check_state(self, state) -> Any:
        "The same as arrays; an error where it is another view's, or was damaged"
        ...
    def restore(self, state) -> Any:
        'Go on where `snapshot` was taken; the memory has been restored'
        ...

def view_by(who: str, by) -> View:
    'The view that a word names'
    ...
