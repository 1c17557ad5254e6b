# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.envs.episodes import BlockGate
from fastrl_replay.pipe import Holding
from numpy import ndarray

TAILS: tuple

LENGTH: int

STRIDE: int

TAIL: int

LOOKED: int

OWN: int

GOES_ON: int

ENDED: int

BROKE_OFF: int

def unseen(p, length, stride) -> Any:
    "How many of an episode's first `p` steps are in no window that is complete by then"
    ...

def tail_start(p, length, stride, tail) -> Any:
    'Where the last window of an episode of `p` steps starts, counted from 0; -1: there is nothing left to show'
    ...

def look(rows, held) -> Any:
    'How many windows does a block complete? 0: none, and the rows were kept; -1: the block needs a closer look'
    ...

def keep(rows, held) -> Any:
    'Copy the last rows of a block that was looked at to their slots'
    ...

def row_place(block, ring, size, length, slot, t, i) -> Any:
    'The address of step `t` of a window, which is row `i` of the block, or was there before (-1)'
    ...

class Waiting:
    'The last rows of each environment, and the windows of them that a block completes'
    held: Any
    gate: Any
    envs: Any
    rule: Any
    def __init__(self, gate: BlockGate, length: int, stride: int, tail: str) -> None: ...
    @property
    def counts(self) -> Any: ...
    @property
    def nbytes(self) -> Any: ...
    def known(self, steps) -> ndarray:
        'A block that can be looked at as it is'
        ...
    def make_room(self, steps) -> ndarray:
        'A block that fits, with room for its environments and for what is found in it; another one is refused whole'
        ...

def note_rest(waiting: Waiting) -> int:
    'Note the windows of all running episodes, by `env_id`'
    ...

def forget_all(waiting: Waiting) -> Any:
    'No episode runs now'
    ...

def kept_places(waiting: Waiting, slots, counts, most: int) -> ndarray:
    'Where in the ring the last rows of some environments are, slot by slot, in time order'
    ...

class Waits(Holding):
    'The base of stages that hold a `Waiting`'
    def restored(self, state) -> Any:
        "Another stage that holds what was saved; an error where it can't"
        ...
    def check_state(self, state) -> Any: ...
    def restore(self, state) -> Any: ...
