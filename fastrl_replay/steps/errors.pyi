# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn

class Explained(Exception):
    "The base of this library's errors: takes the parts of a message, or a whole one"
    def __init__(self, who, what: Any = None, got: Any = None, expected: Any = None, remedy: Any = None) -> None: ...

class ArgumentError(Explained, ValueError):
    "An argument, or a setting, of a value that doesn't fit"

def problem(who: str, what: str, got: Any = None, expected: Any = None, remedy: str | None = None) -> str:
    'One message that says where, what came, what was expected and what to do'
    ...

class ArgumentTypeError(Explained, TypeError):
    "An argument, or an item of a stream, of a type that doesn't fit"

class StateError(ArgumentError):
    "A saved state that doesn't fit what is to continue from it"

class BlockError(Explained, ValueError):
    'A block of rows that a stage or a memory refuses; nothing has changed'

class NotEnoughRows(Explained, ValueError):
    "A memory that can't fill the batch that was asked for"

class ActionError(Explained, ValueError):
    "An action that doesn't fit the environments' action space"

class EnvError(Explained, RuntimeError):
    'An environment that failed, with its number, episode and step'

class StaleKey(Explained, KeyError):
    'A key whose row was overwritten, or was never given out'

class NoRoom(Explained, MemoryError):
    'A memory that is larger than what the machine has'

def whole(who: str, what: str, x, least: int = 0, most: int | None = None, remedy: str | None = None) -> int:
    '`x` as a whole number; an `ArgumentError` where it is none'
    ...

def did_you_mean(name, names, least: float = 0.6, form: str = ' ({})') -> str:
    'The nearest of the names, as a question'
    ...

def number(who: str, what: str, x, low: float = 0.0, high: float | None = None, remedy: str | None = None) -> float:
    '`x` as a number; an `ArgumentError` where it is none'
    ...

def choice(who: str, what: str, x, names) -> str:
    '`x` itself; an `ArgumentError` that names the nearest where it is none of `names`'
    ...

def not_installed(who: str, what: str, extra: str, kind: type = ..., got: Any = None) -> Exception:
    'An error, to be raised, that says which extra of this library has what is missing'
    ...

def outside() -> int:
    'How far up the first caller is that is not of this library'
    ...

def in_words(e: BaseException) -> str:
    'The class of an error, and what it says'
    ...
