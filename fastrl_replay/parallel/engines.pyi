# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from _pickle import Unpickler
from fastrl_replay.pipe import Pipe, WorkerInfo
from fastrl_replay.steps.errors import Explained
from torch import Tensor

AWAY: str

class Filled(Unpickler):
    'Puts tensors into an outline'
    tensors: Any
    def __init__(self, data, tensors) -> None: ...
    def persistent_load(self, i) -> Any: ...

def outline(x) -> tuple:
    'A pickle without tensors, and the tensors'
    ...

class Weights:
    "Copies of tensors as bytes: `write` fills one, `refresh` brings what has changed to a worker's own tensors"
    kinds: Any
    starts: Any
    bytes: Any
    copies: Any
    last: Any
    views: Any
    def __init__(self, tensors, copies: int, dtype: str | None = None) -> None: ...
    def room(self, copies, size) -> Tensor: ...
    def __getitem__(self, i) -> Any: ...
    def versions(self, i) -> Any: ...
    def write(self, i, tensors) -> Any:
        'Let copy `i` have these numbers; what the worker must be told'
        ...
    def private(self, i) -> Any:
        'Copies in other memory'
        ...
    def refresh(self, own, seen, i) -> Any:
        "Overwrite what has changed since it was `seen`; the rest may be the worker's own, such as a noise"
        ...

def pickled(x) -> bytes:
    'A pickle in which batches remember that a replay gave them'
    ...

def batches_in(item) -> Any:
    'The batches that a replay gave, also where they are parts of other things'
    ...

class ChainCopy(Pipe):
    'The chain as a worker runs it; batches of a replay at its end travel packed'
    takes_any_item: bool
    def __iter__(self) -> Iterator[Any]: ...
    def _in_worker(self, info) -> Any: ...

def format_error(e) -> str:
    'An error and where it was raised, as text'
    ...

def generators() -> dict:
    'Where the generators stand that are shared by the whole process'
    ...

def save_chain(chain) -> bytes:
    'The state of a chain and of the generators of this process'
    ...

def checked_generators(who: str, state: dict) -> dict:
    "An error where the generators of this process can't go on there"
    ...

def set_generators(state: dict) -> Any:
    'Let the generators of this process go on there'
    ...

def load_chain(chain, data: bytes) -> Any:
    'Go on where `save_chain` was called'
    ...

def seed_generators(seed: int, info: WorkerInfo) -> Any:
    'Seed the generators that are shared by the whole process'
    ...

class Served:
    'Answers requests with a chain: `next`, `save`, `load`, `look`'
    build: Any
    chunk: Any
    chain: Any
    items: Any
    number: Any
    replay: Any
    journals: Any
    learn: Any
    def __init__(self, build, chunk: int) -> None: ...
    def answer(self, what, *args) -> bytes:
        'The pickle of: what was asked, items or data, what went wrong, what is to be said of batches, and news'
        ...
    def close(self) -> Any:
        'Close the chain'
        ...

def look_into(holder, part: int, name: str = '', *keys) -> Any:
    'What pages and figures of another process show'
    ...

class WorkerError(Explained, RuntimeError):
    'A worker that failed or crashed'

class Worker:
    'What `Parallel` notes of a worker, of whatever engine'
    over: Any
    left: Any
    told: Any
    given: Any
    lag: Any
    past: Any
    kept: Any
    info: Any
    asked: Any
    chunks: Any
    begun: Any
    copy: Any
    facts: Any
    newest: Any
    due: Any
    share: Any
    patience: float
    def __init__(self, info: WorkerInfo) -> None: ...
    def stopped(self) -> bool: ...
    def doing(self) -> str: ...
    def wait(self) -> Any:
        'Until there is an answer, or the end; nothing is lost where this is interrupted'
        ...

class Silence:
    'How long workers have been waited for; each is named when its patience is over, and again after twice that time'
    waits: Any
    last: Any
    def __init__(self) -> None: ...
    def goes_on(self, workers) -> Any:
        'These have given no answer so far; of all others nothing is wanted'
        ...
