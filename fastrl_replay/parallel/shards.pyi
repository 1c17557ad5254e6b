# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.look.memory_page import Inspectable
from fastrl_replay.pipe import Pipe
from numpy import ndarray

def as_feedback(who: str, keys, td) -> tuple:
    'What a learner tells, as arrays of equal length'
    ...

def by_shard(keys: ndarray, n: int) -> list:
    'Which keys are of which shard'
    ...

class Shards(Inspectable, Pipe):
    'A stage whose workers have parts of a replay: keys, errors that find their shard, weights of one memory'
    stale: Any
    def update_priorities(self, keys, td) -> Any:
        'Tell the shards how wrong the learner was; what is gone by now is left out'
        ...
    def pages(self) -> dict:
        'What is in each shard, and what reads its rows, where it is'
        ...
    def inside(self) -> dict:
        'What is in each shard, their shares in the batches, and what `stats` says; looking changes nothing'
        ...

def in_shards(looks: dict) -> dict:
    'What is in each shard, and what reads its rows, where it is'
    ...
