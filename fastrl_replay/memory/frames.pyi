# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.memory.links import Links
from fastrl_replay.memory.rows import Store
from fastrl_replay.steps.core import Steps
from numpy import dtype, ndarray

class Leaf(NamedTuple):
    'A part of rows that holds frames'
    name: str
    kind: dtype
    size: int
    stack: int
    places: tuple

def frame_leaves(dtype: dtype, stack: int, columns: Any = None, least: int = 64) -> list:
    'The parts of rows that hold frames'
    ...

def spans_between(size: int, leaves: list) -> ndarray:
    'The bytes of a row that belong to no frame'
    ...

class Frames(Store):
    'Each frame once, equal ones shared; the rest of each row as it is'
    parts: Any
    stack: Any
    compress: Any
    least: int
    smallest_segment: int
    raw_frames: int
    smallest_file: int
    def __init__(self, stack: int = 1, compress: str | None = None, path: Any = None, device: Any = None, *, columns: Any = None, mode: str = 'a', spare: int = 0) -> None: ...
    def settings(self) -> Any: ...
    nbytes: Any
    def reserve(self, place) -> Any:
        'Make room for rows without their frames, references, and logs of frames'
        ...
    def add(self, line: Links, rows: ndarray) -> bool:
        "Take rows in, or do nothing: some can't be taken as they are"
        ...
    def put(self, slots, rows) -> Any:
        'Rows go into slots'
        ...
    def needs(self, dtype, max_sz) -> Any:
        'Bytes that it must have when it is full, if each row brings one frame; what packed frames take is not known'
        ...
    def gather(self, slots, out, present: Any = -1) -> Any:
        'Rows come back, as bytes'
        ...
    def batch(self, line: Links, keys, weights, plan) -> Any:
        'The rows with these keys as a batch; counted as drawn'
        ...
    def packed_batch(self, line: Links, keys, weights, plan) -> Any:
        'The rows with these keys as they lie there; counted as drawn'
        ...
    def stats(self) -> dict:
        'New frames for each row that came, and how many are there'
        ...
    def state_dict(self, slots) -> dict:
        'What a checkpoint holds: the rows in these slots, and their frames'
        ...
    def load_state_dict(self, slots, state: dict) -> Any:
        'Rows that were saved go into these slots, which are all that there are'
        ...
    def reopen(self) -> Any:
        'Go on where the files end'
        ...
    def follow(self) -> Any:
        'See which frames have come and gone'
        ...
    def derive(self, slots) -> Any:
        'The lowest references, from those of rows in these slots, oldest first'
        ...
    def close(self) -> Any: ...
    @property
    def columns(self) -> ndarray:
        'The columns without frames, of all slots, as they are'
        ...
    def episodes(self, slots) -> Any: ...
    def some_columns(self, slots, names) -> Any: ...
    @property
    def read_bytes(self) -> Any: ...

def suggested(dtype: dtype, device: Any = None) -> Frames:
    'A store that would need much less memory for rows like these, if their frames come again'
    ...

class PackedBatch(Steps):
    'Keys and weights of a batch, whose rows and packed frames are beside them'
    def __init__(self, rows, beside) -> None: ...
    def unpacked(self) -> Steps:
        'The batch'
        ...

def unpacked(item) -> Any:
    'Batches as a learner wants them'
    ...
