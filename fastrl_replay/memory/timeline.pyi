# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.look.memory_page import Inspectable
from fastrl_replay.memory.rows import Store
from fastrl_replay.steps.core import Steps
from numpy import ndarray

class Timeline(Inspectable):
    'The last `max_sz` rows in order of arrival, each stored once and named by its serial number, its key'
    reads_only: Any
    max_sz: Any
    who: Any
    store: Any
    place: Any
    rewinds: int
    says: dict
    def __init__(self, max_sz: int = 1000000, store: Store | None = None, who: str = 'Timeline', check: Any = None, instead_of: Any = None, counted: bool = False) -> None: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def parts(self) -> Any: ...
    @property
    def inserted(self) -> Any: ...
    @property
    def oldest(self) -> Any: ...
    @property
    def keys(self) -> Any: ...
    @property
    def nbytes(self) -> Any: ...
    def __len__(self) -> int: ...
    def clear(self) -> Any:
        'Forget everything, the columns too'
        ...
    @property
    def is_open(self) -> bool:
        'Is it known what is in it? One on disk is opened when it is first asked'
        ...
    @property
    def span(self) -> tuple:
        'The next key, and the oldest that is there'
        ...
    @property
    def environments(self) -> Any:
        'Dense numbers of environments'
        ...
    def were_there(self, *keys) -> Any:
        'Raise where another process has overwritten a row while it was read'
        ...
    @property
    def going_on(self) -> Any:
        'Numbers of environments under way, but for those that have been silent for long'
        ...
    def stands_at(self, env_ids: list) -> dict:
        'Where environments stand after their last rows; of those that are not known, nothing'
        ...
    def _open(self, dtype, place: Any = None) -> Any:
        'Links and a store for such rows in an empty place, and what batches and windows of them look like'
        ...
    def add(self, steps: Steps) -> ndarray:
        "Append rows, each overwriting the oldest one when the memory is full; a block that doesn't fit is refused whole"
        ...
    def take(self, keys) -> Steps:
        'Copies of the rows with these keys'
        ...
    def refuse_key(self, key) -> Any:
        'Say what is wrong with a key'
        ...
    def batch(self, keys: ndarray, weights: ndarray, packed: bool = False) -> Steps:
        'The rows with these keys as a batch; counted as drawn'
        ...
    def count(self, keys) -> Any:
        'These rows were drawn, by whatever made a batch of them'
        ...
    def grid(self, keys: ndarray) -> Steps:
        'The rows with these keys; zeros and a false `mask` where there is none'
        ...
    def windows(self, keys, length: int) -> Steps:
        'From each key, the next rows of the same episode; zeros and a false `mask` after its end or the newest row'
        ...
    def walk(self, keys, offsets) -> ndarray:
        'Keys along the episodes of these rows'
        ...
    def valid(self, keys) -> ndarray:
        'Is the row with this key still there?'
        ...
    @property
    def times_drawn(self) -> ndarray:
        'How often each row that is there was drawn for a batch'
        ...
    @property
    def ages(self) -> ndarray:
        'Sum and maximum of the ages that rows had when they were drawn for a batch'
        ...
    @property
    def store_stats(self) -> dict:
        "The store's numbers by name, and how many bytes a row takes in all"
        ...
    def __getitem__(self, i) -> Any:
        'Rows by their place in time order (0 is the oldest), or a column of all rows'
        ...
    def __iter__(self) -> Iterator[Any]:
        'One-row `Steps`, oldest first'
        ...
    def forget_ages(self) -> Any:
        'Nothing was drawn so far, by who counts from now on'
        ...
    def inside(self) -> dict:
        'What is in it, as plain arrays; looking changes nothing'
        ...
    def still_there(self, keys) -> tuple:
        'Those of these rows that are there, in main memory, also while another process writes'
        ...
    def pages(self) -> dict:
        'What is in it, and what reads its rows'
        ...
    def state_dict(self) -> dict:
        'Everything, in time order; of rows in a place that lasts, where they lie'
        ...
    def check_state(self, state: dict) -> Any:
        'Raise where this state holds more than there is room for'
        ...
    def load_state_dict(self, state: dict) -> Any:
        'Become the timeline that was saved'
        ...
    def prepare(self, state: dict) -> Any:
        'The same, but that files on disk stay as they are until `settle`'
        ...
    def settle(self) -> Any:
        'What was prepared counts from now on'
        ...
    @property
    def missing(self) -> int:
        'How many rows a state had that was prepared, and that are gone'
        ...
    def __getattr__(self, name) -> Any: ...
    def flush(self) -> Any:
        'Flush everything to the device, for power cuts; in main memory there is nothing to do'
        ...
    def close(self) -> bool:
        "Flush, and let other processes write; nothing where rows don't last"
        ...
