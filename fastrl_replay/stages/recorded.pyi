# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.pipe import Positioned
from fastrl_replay.steps.core import Steps
from pathlib import Path

NAMES: dict

def table_columns(x) -> Any:
    'The columns of recorded data, whatever it came in'
    ...

def read_table(path: Path) -> Any:
    'What a file holds'
    ...

def as_array(x) -> Any:
    'Recorded numbers as arrays'
    ...

class Episodes(Positioned):
    'Rows from arrays of whole episodes, by their `names`: dicts, `.npz`, Parquet, tables of Arrow or Hugging Face'
    env_id: Any
    keep: Any
    names: Any
    def __init__(self, source, keep: Any = ..., env_id: int = 0, **names) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def rows_of(self, item) -> Steps:
        'The rows of the next `item`, arrays by name'
        ...
