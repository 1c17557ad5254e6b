# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.memory.timeline import Timeline
from fastrl_replay.steps.core import Steps
from numpy import ndarray

class _OfPlaces:
    'What a view is asked besides that draws places'
    follows: bool
    followed: Any
    places: Any
    def follow(self, steps, first) -> Any:
        'Rows from the key `first` on came, perhaps known ones'
        ...
    def drawable(self) -> tuple: ...
    def told(self) -> Any:
        'The sampler knows of these changes'
        ...
    def key_of(self, places) -> Any: ...
    def lengths(self, places) -> ndarray:
        'How many rows are drawn with each of these places'
        ...
    def came(self, places) -> Any:
        'These were taken: what belongs to them may be written down, or read'
        ...
    def refollow(self, end) -> Any:
        'Follow rows up to this key, which lie in the memory since before it was opened, or that another process added'
        ...
    def note(self) -> Any:
        'The sampler knows of all that was followed: what is written down of places is true for so many rows'
        ...

class View(_OfPlaces):
    'The base of views: what becomes of keys that a sampler draws'
    unit: str
    adds: dict
    counted: bool
    nbytes: int
    def stored(self, steps: Steps) -> Steps: ...
    def batch(self, keys, weights) -> Steps: ...
    def feedback(self, keys, td) -> tuple: ...
    def check_errors(self, who, keys, td) -> Any:
        'Raise where `feedback` could not take errors of this form, whatever rows there are'
        ...
    def __len__(self) -> int: ...
    def clear(self) -> Any:
        'As before the first row'
        ...
    def snapshot(self) -> dict: ...
    def check_state(self, state) -> Any:
        'Raise where a saved view was another one'
        ...
    def beside(self, keys) -> dict: ...
    def restore(self, state) -> Any:
        'Go on where `snapshot` was taken'
        ...
    def fresh(self, memory: Timeline, who: str) -> View:
        'The same view of a memory that is still empty'
        ...
    def check_columns(self, dtype) -> Any:
        'Raise where rows of this kind have columns that a batch has besides'
        ...

def as_float64(who: str, x) -> ndarray:
    'Real numbers as a flat array of doubles'
    ...

def fetched(who: str, keys, td) -> tuple:
    'Keys and errors, by one copy where both are on a device'
    ...

def check_feedback(keys, td, oldest, end) -> Any:
    'The place of the first mistake, in one of two kinds (-1: none of it), and how many keys are stale'
    ...

def check_numbers(who: str, keys: ndarray, td: ndarray) -> Any:
    'Raise where an error is no number'
    ...

def checked_view(who: str, view) -> View:
    "A view that can do what is asked of it; an error where it can't"
    ...

class Transitions(View):
    'Each row is a transition'
    packed: bool
    def batch(self, keys, weights) -> Steps: ...
    def check_errors(self, who, keys, td) -> Any: ...
    def feedback(self, keys, td) -> tuple:
        'For which rows errors still count'
        ...
