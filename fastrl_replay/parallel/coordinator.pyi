# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.steps.errors import Explained

PATIENCE: float

class RateLimiter:
    'Decides which calls wait: draws for rows, rows for draws'
    ratio: Any
    ahead: Any
    def __init__(self, ratio: Any = None, ahead: int = 1000) -> None: ...
    def batches_due(self, rows: int, batches: int) -> int:
        'Batches that these rows allow beyond those already drawn; without a ratio, always one'
        ...
    def may_add(self, n: int, rows: int, batches: int) -> bool:
        'May `n` more rows be added?'
        ...

class NotEnoughDraws(Explained, RuntimeError):
    'Rows that were not taken, because those before them have not been drawn from'

class ServiceError(Explained, RuntimeError):
    'The service has been stopped, or does not respond'

class ShardLog:
    'What a shard records beside its rows: counts, and of each of the last 1024 clients its last call of `add`'
    counts: Any
    adds: Any
    def __init__(self, folder, inserted: int, envs: int = 0, first_key: int = 0) -> None: ...
    def find(self, client, call) -> int:
        'The rows of a call of `add`, or of a later one of this client, which no longer waits for this one'
        ...
    def record(self, client, call, first, rows) -> int:
        'A call of `add`, before its rows are added; `client` is written last, which makes the entry valid'
        ...
    def erase(self, places) -> Any: ...

class Shard:
    'One part of a served memory, in an actor'
    data: Any
    rank: Any
    n_shards: Any
    restarted: Any
    replay: Any
    process: Any
    n_calls: Any
    log: Any
    counts: Any
    def __init__(self, data: bytes, rank: int, n_shards: int, restarted: bool = False) -> None: ...
    def call(self, method: str, *args) -> tuple:
        'Call a method; the memory is opened at the first call'
        ...
    def open(self) -> Any:
        'Open the memory, and the log beside it'
        ...
    def status(self) -> dict:
        'Counts, sums of priorities, and which memory and process this is'
        ...
    def ping(self) -> Any:
        'Only the status is wanted'
        ...
    def number_envs(self, n) -> tuple:
        'Numbers for `n` environments that no other one has'
        ...
    def columns(self) -> bytes:
        'A pickled block without rows, which says what columns there are'
        ...
    def set_columns(self, data) -> Any:
        'Take the columns of another shard'
        ...
    def add(self, client, call, first_key, data) -> int:
        'Add a block, unless this call has added it before'
        ...
    def sample(self, n, batches, counted) -> tuple:
        'Draw a part of a batch; `batches` were drawn from all shards so far, and this one is `counted` here or elsewhere'
        ...
    def update(self, keys, td) -> Any:
        'Update priorities; keys of an older memory are counted as stale'
        ...
    def stats(self) -> dict:
        'The statistics of the replay'
        ...
    def look(self, *words) -> Any:
        'A part of what pages and figures show'
        ...
    def close(self) -> Any:
        'Write to disk what lies in files'
        ...

class Coordinator:
    'Decides which calls wait, and which shards answer them'
    first_loss: Any
    rows_on_way: Any
    batches_on_way: Any
    rng: Any
    name: Any
    replay: Any
    shards: Any
    limiter: Any
    losses: Any
    restarts: Any
    statuses: Any
    lost: Any
    waiting: Any
    n_envs: Any
    changed: Any
    first_add: Any
    starting: Any
    def __init__(self, name: str, data: bytes, shards, ahead: int = 1000) -> None: ...
    def call(self, method: str, seen: int, limit: float, *args) -> tuple:
        'Call a method, which takes at most `limit` seconds'
        ...
    def total(self, key) -> Any: ...
    def ask(self, rank, limit, method, *args) -> Any:
        "The result of a shard's method; Ray repeats the call if the shard is restarted"
        ...
    def counts(self) -> tuple:
        'Of all shards since the service began; rows of the warm-up allow no batch'
        ...
    def has_batch(self, n) -> bool:
        'Are there enough rows for a batch of `n`?'
        ...
    def may_draw(self, n) -> bool:
        'May a batch of `n` be drawn now?'
        ...
    def may_add(self, n) -> bool:
        'May `n` rows be added now?'
        ...
    def number_envs(self, limit, rank, n) -> tuple:
        'Numbers for environments of a collector, in its shard (None: it is a new collector)'
        ...
    def add(self, limit, rank, n, *block) -> Any:
        'Add a block of `n` rows to a shard as soon as it may be added'
        ...
    def split(self, n) -> list:
        'How much of a batch each shard draws'
        ...
    def sample(self, limit, n) -> tuple:
        'Draw a batch as soon as one is due'
        ...
    def update(self, limit, parts) -> Any:
        'Send each shard its TD errors, if all keys exist'
        ...
    def settings(self, limit) -> tuple:
        'What a client must know'
        ...
    def look(self, limit, rank, *words) -> Any:
        'Look into a shard'
        ...
    def stats(self, limit) -> dict:
        "Counts over all programs, and the statistics of each shard's replay"
        ...
