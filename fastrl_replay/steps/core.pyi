# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from numpy import dtype, ndarray
from torch import Tensor, device

class Steps:
    "A block of environment steps, one row a step; each column is a tensor that shares the rows' memory"
    def __init__(self, rows: ndarray) -> None: ...
    @property
    def rows(self) -> ndarray:
        'The structured array itself'
        ...
    def __len__(self) -> int: ...
    def __getattr__(self, name) -> Any: ...
    @property
    def dtype(self) -> dtype:
        'The dtype of a row'
        ...
    @property
    def shape(self) -> tuple:
        'The shape of the block of rows'
        ...
    @property
    def device(self) -> device:
        'Where the block lies'
        ...
    @property
    def state(self) -> Any: ...
    @property
    def action(self) -> Any: ...
    @property
    def reward(self) -> Any: ...
    @property
    def next_state(self) -> Any: ...
    @property
    def terminated(self) -> Any: ...
    @property
    def truncated(self) -> Any: ...
    @property
    def env_id(self) -> Any: ...
    @property
    def episode_n(self) -> Any: ...
    @property
    def step_n(self) -> Any: ...
    @property
    def total_reward(self) -> Any: ...
    def __getitem__(self, i) -> Any:
        'A column by name; rows by number, slice, mask or array of numbers'
        ...
    @property
    def done(self) -> Tensor:
        'Where the episode ended: terminated or truncated'
        ...
    def to(self, device, non_blocking: bool = False) -> Steps:
        'The block on `device`, moved as one copy whatever the number of columns'
        ...
    def pin_memory(self, device: Any = None) -> Steps:
        'A copy of the block in page-locked memory, from which `to` can copy without waiting'
        ...
    def is_pinned(self) -> bool:
        'Does the block lie in page-locked memory?'
        ...
    def __iter__(self) -> Iterator[Any]:
        'One-row `Steps`, in order'
        ...
    def copy(self) -> Steps:
        'The same rows in new memory, for a stage that wants to change them'
        ...
    def asdict(self) -> dict:
        'All columns by name, on the same memory'
        ...
    @classmethod
    def cat(cls, blocks) -> Steps:
        'Join blocks along their first axis'
        ...
    def update_priorities(self, td) -> Any:
        'Return a TD error for each row to the replay that this batch was drawn from'
        ...
    @classmethod
    def from_columns(cls, columns: dict, shape: Any = None) -> Steps:
        'A block of rows from its columns'
        ...
    def columns(self) -> Any:
        'All columns by name, without the rows: for functions that torch compiles or transforms'
        ...
    def to_tensordict(self) -> Any:
        'The columns as a `TensorDict`, on the same memory'
        ...
    @classmethod
    def from_tensordict(cls, td) -> Steps:
        'A block of rows from a `TensorDict`'
        ...

def column_of_rows(a: ndarray) -> Any:
    'A field as a tensor, or as a dict or tuple of tensors, on the same memory'
    ...

def column_of_bytes(block: Tensor, dtype: dtype, offset: int) -> Any:
    'The same for rows that are a tensor of bytes, on any device'
    ...

def plain_columns(dtype: dtype) -> frozenset:
    'The columns that are one tensor each, and neither a dict nor a tuple of them'
    ...

def steps_of_rows(rows: ndarray, plain: frozenset) -> Steps:
    'A block as `Steps(rows)` makes one, without looking at what is known'
    ...

def steps_of_bytes(block: Tensor, dtype: dtype) -> Steps:
    'A block of rows that are bytes, on any device'
    ...

def main_rows(x) -> ndarray:
    'The rows of a block in main memory'
    ...

def joined(blocks, dtype: dtype | None = None) -> Steps:
    'Blocks one after the other'
    ...

def same_fields(a, b) -> bool:
    'Are two fields of rows equal by value, NaN equal to NaN?'
    ...

def replay_of(steps: Steps) -> Any:
    'The replay that gets the TD errors of this block'
    ...

def set_replay(steps: Steps, replay) -> Any:
    'Send TD errors of this block to a replay'
    ...

def pack(steps: Steps) -> dict:
    'A block, or one of a subclass, for a checkpoint'
    ...

def unpack(state: dict) -> Steps:
    'The block that was packed; a `StateError` where it is none'
    ...

def refuse_flags(who: str, rows: ndarray) -> Any:
    'A `StateError` where a column of flags holds other bytes than 0 and 1'
    ...
