# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.envs.nans import NaNSearch
from fastrl_replay.memory.links import Links
from fastrl_replay.memory.places import Place
from fastrl_replay.steps.core import Steps
from numpy import dtype, ndarray

class Store:
    'The base of stores: adds blocks, draws batches and saves by `put` and `gather`'
    path: Any
    folder: Any
    mode: str
    spare: int
    device: Any
    nbytes: int
    def reserve(self, place: Place) -> Any:
        'Make room'
        ...
    def refuse(self, rows) -> Any:
        "Raise where some of these can't be kept: afterwards it is too late, older rows have gone"
        ...
    def put(self, slots, rows) -> Any: ...
    def gather(self, slots, out, present: Any = -1) -> Any: ...
    def empty(self, n, size) -> ndarray: ...
    def reopen(self) -> Any:
        'Go on with what lies in the place'
        ...
    def follow(self) -> Any:
        'See what the process has done that writes'
        ...
    def derive(self, slots) -> Any:
        'Make anew what is known of rows in these slots, oldest first, and is not by slot'
        ...
    def close(self) -> Any:
        'Nothing more will be written'
        ...
    def needs(self, dtype, max_sz) -> int: ...
    def stats(self) -> dict: ...
    def open(self, dtype: dtype, max_sz: int, place: Place) -> Store:
        'A store of this kind with room for rows'
        ...
    def lies(self, path, device: Any = None, mode: Any = 'a', spare: Any = 0) -> Any:
        'Keep where it lies, if that can be'
        ...
    def new_place(self, who: str) -> Place:
        'Where its arrays lie'
        ...
    def check_place(self, who: str) -> Any:
        "Raise where it can't be opened, without opening it"
        ...
    def settings(self) -> dict:
        'What must be the same where a memory on disk is opened again'
        ...
    def add(self, line: Links, rows: ndarray) -> bool:
        "Take rows in, or do nothing: some can't be taken as they are"
        ...
    def batch(self, line: Links, keys, weights, plan: BatchPlan) -> Steps:
        'The rows with these keys as a batch; counted as drawn'
        ...
    def packed_batch(self, line, keys, weights, plan) -> Steps:
        'The same for who sends it elsewhere: a store may leave parts of it packed, which `unpacked` unpacks there'
        ...
    def bytes_of(self, slots) -> ndarray:
        'The rows in these slots, in main memory'
        ...
    def episodes(self, slots) -> ndarray:
        'What the rows in these slots say of their episodes'
        ...
    @property
    def columns(self) -> ndarray:
        'Columns of the rows in all slots; those of a store that has them somewhere are no copies'
        ...
    def some_columns(self, slots, names) -> dict:
        'These columns, as far as there are such, of the rows in these slots'
        ...
    @property
    def read_bytes(self) -> int:
        'How many bytes of a row are read for a column'
        ...
    def state_dict(self, slots) -> dict:
        'What a checkpoint holds: the rows in these slots'
        ...
    def load_state_dict(self, slots, state: dict) -> Any:
        'Rows that were saved go into these slots'
        ...

STORES: dict

class BatchPlan:
    "The rows of a batch: a memory's rows with `index` and `weight`"
    dtype: Any
    numbers: Any
    itemsize: Any
    plain: Any
    def __init__(self, dtype: dtype) -> None: ...
    def steps(self, out, n) -> Any:
        'Bytes as a batch'
        ...

def as_steps(out, dtype: dtype, shape) -> Steps:
    'Bytes as rows'
    ...

def check_weights(keys, weights) -> Any:
    'An error where these are not as many'
    ...

def episodes_at(columns, slots) -> Any:
    'The same from columns by slot'
    ...

def check_saved_rows(who: str, rows: ndarray, search: NaNSearch) -> Any:
    'Raise where there can be no such rows'
    ...

class Rows(Store):
    'Whole rows, in main memory, in files or on a device'
    nbytes: Any
    def __init__(self, path: Any = None, device: Any = None, *, mode: str = 'a', spare: int = 0) -> None: ...
    def reserve(self, place) -> Any: ...
    def put(self, slots, rows) -> Any:
        'Rows go into slots'
        ...
    def gather(self, slots, out, present: Any = -1) -> Any:
        'Rows come back, as bytes'
        ...
    @property
    def columns(self) -> ndarray:
        'Of all slots, as they are; copies where they come from a device'
        ...
    def episodes(self, slots) -> Any:
        'What the rows in these slots say of their episodes'
        ...
    def some_columns(self, slots, names) -> Any: ...
    def add(self, line: Links, rows: ndarray) -> bool:
        "Take rows in, or do nothing: some can't be taken as they are"
        ...
    def batch(self, line: Links, keys, weights, plan: BatchPlan) -> Steps:
        'The rows with these keys as a batch; counted as drawn'
        ...
