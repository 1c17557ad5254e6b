# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn

class Misfit(Exception):
    'An entry of a state that is not what it must be'
    got: Any
    expected: Any
    at: Any
    def __init__(self, got, expected) -> None: ...

def described(x) -> Any:
    'What came, in a few words'
    ...

def plain(x, depth: int = 0) -> Any:
    "The same data, in which tensors are no more than their numbers; a `Misfit` where that can't be"
    ...

def match(form, x) -> Any:
    '`x`, if it has this form; or else a `Misfit`'
    ...

def checked(who: str, form, state, more: bool = False) -> Any:
    "A state that can be used; a `StateError` where it can't"
    ...

def anything(x) -> Any:
    'A form of whatever is there: it is checked elsewhere'
    ...

def flag(x) -> Any:
    'True or False'
    ...

def text(x) -> Any:
    'A string'
    ...

def integer(least: int = 0, most: int = 1152921504606846976) -> Any:
    'A whole number'
    ...

def real(low: float = ..., high: float = ...) -> Any:
    'A finite number'
    ...

def exactly(*values) -> Any:
    'One of these, and nothing else'
    ...

def maybe(form) -> Any:
    'None, or that'
    ...

def listed(form, n: int | None = None) -> Any:
    'A list or a tuple of entries that are alike'
    ...

def dict_of(form) -> Any:
    'A dict with any names'
    ...

def row(*forms) -> Any:
    'A list or a tuple of just these entries'
    ...

def some(forms: dict) -> Any:
    'A dict of any of these, each with its form'
    ...

def like(own, least: float = 0.0) -> Any:
    'A tensor of the same shape, a number that is not negative, a list of entries like these, or the same'
    ...

def array(kind, *shape, low: Any = None, high: Any = None) -> Any:
    'A tensor of numbers within a range'
    ...

def row_dtype(x) -> Any:
    'The dtype of rows, as `dtype_spec` describes it'
    ...

def block(x) -> Any:
    'A block of rows, as `pack` gives it'
    ...

def generator(x) -> Any:
    'The state of a numpy generator, as a new one'
    ...

class Saves:
    'The base of classes that save attributes: `saved` has the form of each'
    saved: dict
    def snapshot(self) -> dict:
        'What these attributes have'
        ...
    def check_state(self, state) -> dict:
        'What was saved, or a `StateError`'
        ...
    def restore(self, state: dict) -> Any:
        'Go on where another one stood'
        ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> Any: ...
