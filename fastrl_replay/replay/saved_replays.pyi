# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.replay.due_batches import DueBatches

COUNTERS: tuple

class SavedReplay(DueBatches):
    'The base of replays: saves memory, sampler, view and counters, and takes them back all at once'
    def snapshot(self) -> dict:
        'What a checkpoint holds'
        ...
    def check_state(self, state) -> Any:
        'Parts that hold what was saved, and counters; an error where these are damaged, or of another kind of memory'
        ...
    def check_remote(self, state) -> Any:
        'The same for a copy in a worker; rows on disk are in a directory that may be on another machine'
        ...
    def restore(self, state) -> Any:
        'Continue where `state` was saved'
        ...
