# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.pipe import Pipe
from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.errors import Explained
from numpy import ndarray

class Shard:
    'A part of a served memory, where Ray has placed it'
    data: Any
    rank: Any
    parts: Any
    again: Any
    replay: Any
    born: Any
    answers: Any
    ledger: Any
    def __init__(self, data: bytes, rank: int, parts: int, again: bool = False) -> None: ...
    def answer(self, what: str, *args) -> tuple:
        'What was asked for'
        ...
    def open(self) -> Any:
        'Begin, or go on with what lies there'
        ...
    def stands(self) -> dict:
        'Rows that came and are there, their priorities, batches; which memory it is, and which process'
        ...
    def look(self) -> Any:
        'Nothing is wanted but how it stands'
        ...
    def number(self, n) -> Any:
        'Numbers for `n` environments that no other one has'
        ...
    def columns(self) -> bytes:
        'What its rows are like'
        ...
    def begin(self, columns) -> Any:
        'Rows will be as in another shard'
        ...
    def stats(self) -> dict:
        'What the replay says'
        ...
    def close(self) -> Any:
        'Bring to disk what lies in files'
        ...
    def add(self, client, n, life, data) -> Any:
        'Add a block that was not added so far'
        ...
    def sample(self, n, batches, counts) -> Any:
        'Draw a part of a batch; as many before this one have been drawn from all'
        ...
    def update(self, keys, td) -> Any:
        'Errors of rows; keys of an older memory are stale'
        ...

PATIENCE: float

class Balance:
    'Who waits for whom: draws for rows, rows for draws'
    ratio: Any
    ahead: Any
    def __init__(self, ratio: Any = None, ahead: int = 1000) -> None: ...
    def due(self, rows: int, batches: int) -> int:
        'Batches that these rows pay for, after so many; without a ratio, one'
        ...
    def admits(self, n: int, rows: int, batches: int) -> bool:
        'May `n` more rows come?'
        ...

class NotEnoughDraws(Explained, RuntimeError):
    'Rows that were not taken, because those before them have not been drawn from'

class ServiceError(Explained, RuntimeError):
    'A service that is gone, or gives no answer'

class Ledger:
    'What a shard remembers beside its rows'
    all: Any
    head: Any
    notes: Any
    def __init__(self, folder, inserted: int, numbers: int = 0, life: int = 0) -> None: ...
    def __getattr__(self, name) -> Any: ...
    def raise_by(self, name: str, n: int) -> Any:
        'Count'
        ...
    def found(self, client, n) -> Any:
        'Was this `add` noted?'
        ...
    def note(self, client, n, first, rows) -> Any:
        'The rows of this `add` will have the keys from `first` on; `client` is written last, by which the note counts'
        ...
    def forget(self, at) -> Any:
        'These rows were refused'
        ...

class Gate:
    'Who waits, and which shard is asked'
    coming: Any
    going: Any
    random: Any
    name: Any
    replay: Any
    shards: Any
    balance: Any
    losses: Any
    restarts: Any
    states: Any
    past: Any
    waiting: Any
    given: Any
    changed: Any
    first: Any
    lock: Any
    def __init__(self, name: str, data: bytes, shards, ahead: int = 1000) -> None: ...
    def answer(self, what: str, seen: int, limit: float, *args) -> tuple:
        'What was asked for; no longer than `limit` seconds'
        ...
    def total(self, key) -> Any:
        'Of all shards'
        ...
    def ask(self, rank, limit, what, *args) -> Any:
        'An answer of a shard; Ray asks again where it is restarted'
        ...
    def wake(self) -> Any:
        'Let all that wait look again'
        ...
    def until(self, limit, what, ready, error) -> Any:
        'Wait until `ready()`; after `limit` seconds `error()` is raised'
        ...
    def counts(self) -> tuple:
        "Of all that the service ever had; rows of the warm-up don't pay"
        ...
    def enough(self, n) -> bool:
        'Is there enough for a batch of `n`?'
        ...
    def may_draw(self, n) -> bool:
        'Is a batch of `n` due?'
        ...
    def may_add(self, n) -> bool:
        'May `n` rows come now?'
        ...
    def too_few_rows(self, n, limit) -> Any:
        'The error of a draw'
        ...
    def too_few_draws(self, n, limit) -> Any:
        'The error of an `add`'
        ...
    def number(self, limit, home, n) -> Any:
        'Numbers for environments of a collector, in its shard (None: it is a new one)'
        ...
    def add(self, limit, client, n, home, life, rows, data) -> Any:
        'Add a block to a shard when it may come'
        ...
    def alike(self, limit, home) -> Any:
        'Let a shard without columns have those of the others'
        ...
    def split(self, n) -> list:
        'How much of a batch each shard draws'
        ...
    def sample(self, limit, n) -> Any:
        'Draw a batch when one is due'
        ...
    def draw(self, limit, n) -> Any:
        'Parts of a batch; where a shard has lost its rows meanwhile, the others draw more'
        ...
    def update(self, limit, parts) -> Any:
        'Tell each shard of its rows, if all keys were given out'
        ...
    def look(self, limit) -> tuple:
        'What a client must know'
        ...
    def stats(self, limit) -> dict:
        'Counts over all programs, and of each shard what its replay says'
        ...

class Service(Pipe):
    'A memory in a cluster, which other programs use, too'
    name: Any
    limit: Any
    address: Any
    lock: Any
    shards: Any
    bs: Any
    draws_batches: bool
    has_source: bool
    takes_any_item: bool
    _buffers: tuple
    def __init__(self, name: str, limit: float = 60.0, address: str | None = None) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def due_batches(self) -> Any:
        'Batches may be drawn for ever'
        ...
    def _fresh(self) -> Any: ...
    def _open(self) -> Any: ...
    def add(self, steps: Steps) -> ndarray:
        "Add rows, when draws have used enough of those before; a block that doesn't fit is refused whole"
        ...
    def add_step(self, obs, action, reward, next_obs, terminated, truncated: Any = False, **how) -> ndarray:
        'Add a step of a loop of yours, or one of each environment of a vector'
        ...
    def sample(self, n: int | None = None) -> Steps:
        'Draw a batch, when rows have come that pay for it'
        ...
    def update_priorities(self, keys, td) -> Any:
        'Tell the shards how wrong the learner was; what is gone by now is left out, and counted'
        ...
    def stats(self) -> dict:
        'Rows, batches, who waits, restarts and losses, over all programs'
        ...
    def order_draws(self) -> Any:
        'The lock that keeps draws in order'
        ...
    def _close(self) -> Any: ...
    def stop(self) -> Any:
        'End the service, for all programs'
        ...

class RestartedShard(Shard):
    'A shard that asks Ray whether it was restarted'
    def __init__(self, *args) -> None: ...

def connect(name: str, limit: float = 60.0, address: str | None = None) -> Service:
    'A memory that is served in this cluster'
    ...

def stop(name: str, address: str | None = None) -> Any:
    'End a service; what lies in files stays there'
    ...
