# Written by docs/stubs.py: edit nbs/pipe.ipynb, then run it.
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from typing_extensions import Self
_Class = TypeVar('_Class', bound=type)
from fastrl_replay.generic import Map
from fastrl_replay.generic import Filter
from fastrl_replay.generic import Header
from fastrl_replay.generic import Cycler
from fastrl_replay.generic import InMemoryCacheHolder
from fastrl_replay.envs.stepper import GymStepper
from fastrl_replay.stages.nstep import NStep
from fastrl_replay.stages.nstep import NSkip
from fastrl_replay.stages.chunker import SequenceChunker
from fastrl_replay.stages.journal import Journal
from fastrl_replay.stages.journal import Gather
from fastrl_replay.stages.normalisation import UpdateNorms
from fastrl_replay.stages.normalisation import ScaleRewards
from fastrl_replay.replay.experience import ExperienceReplay
from fastrl_replay.replay.hindsight import HindsightReplay
from fastrl_replay.replay.prioritized import PrioritizedReplay
from fastrl_replay.learning.tabular import QLearner
from fastrl_replay.learning.dqn import DQNLearner
from fastrl_replay.replay.sequences import SequenceReplay
from fastrl_replay.learning.r2d2 import R2D2Learner
from fastrl_replay.learning.sac import SACLearner
from fastrl_replay.learning.td3 import TD3Learner
from fastrl_replay.stages.recorded import Episodes
from fastrl_replay.app.offline import Offline
from fastrl_replay.parallel.prefetch import Prefetch
from fastrl_replay.parallel.stage import Parallel
from fastrl_replay.data.interop import StatefulPipe
from fastrl_replay.data.interop import PipeNode
import inspect, os, sys
from contextlib import contextmanager
from copy import deepcopy
from functools import partial, wraps
from itertools import count
from typing import NamedTuple
from torch.utils.data import IterDataPipe, MapDataPipe, datapipes, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map
from .steps.core import Steps
from fastrl_replay.steps.errors import ArgumentError, ArgumentTypeError, Explained, StateError, choice, did_you_mean, in_words, problem
from .steps.states import Saves, anything, checked, flag, integer
class Pipe(IterDataPipe, Saves):
    draws_batches: Any
    reads_anew: Any
    source: Any
    source_elsewhere: Any
    steps_envs: Any
    takes_any_item: Any
    def __init__(self, source: Any=None) -> None: ...
    def __init_subclass__(cls, **kw) -> None: ...
    def check_state(self, state: Any) -> Any: ...
    def check_remote(self, state: Any) -> Any: ...
    def _fresh(self) -> Any: ...
    def _rewind(self) -> Any: ...
    def _leave(self) -> Any: ...
    def _open(self) -> Any: ...
    def _close(self) -> Any: ...
    def _in_worker(self, info: Any) -> Any: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: Any) -> Any: ...
    def checked_states(self, state: Any, remote: Any=False) -> list: ...
    def __getstate__(self) -> Any: ...
    def __setstate__(self, state: Any) -> Any: ...
    def blocks(self) -> Any: ...
    @property
    def data_ended(self) -> bool: ...
    def open(self) -> Any: ...
    def close(self) -> Any: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error) -> Any: ...
    def __repr__(self) -> Any: ...
    def rewind(self) -> Any: ...
    def in_worker(self, info: Any) -> Any: ...
    @property
    def has_envs(self) -> bool: ...
    @property
    def drawn_from(self) -> 'Pipe': ...
    @property
    def journals(self) -> list: ...
    def __iter__(self) -> Iterator[Any]: ...
    def map(self, fn: Any, input_col: Any = ..., output_col: Any = ...) -> Map:
        'A function of each item'
    def filter(self, filter_fn: Any, input_col: Any = ...) -> Filter:
        'The items for which a function says True'
    def header(self, limit: int = ...) -> Header:
        'The first `limit` items of each pass'
    def cycle(self, count: int | None = ...) -> Cycler:
        'The source again and again'
    def in_memory_cache(self) -> InMemoryCacheHolder:
        'Keep every item of the source; later passes give the same objects again'
    def gym_step(self, policy: Any = ..., seed: int | None = ..., autoreset_mode: Any = ..., clip: bool | None = ..., float32: bool = ..., info: Any = ...) -> GymStepper:
        'Steps environments and yields blocks of true transitions; a second pass goes on where the last one stopped'
    def n_step(self, n: int, gamma: float, last: Any = ...) -> NStep:
        'Merges each step with the next of its episode: summed `reward`, last `next_state`, with columns `discount` and `n`'
    def n_skip(self, n: int) -> NSkip:
        'Keeps the first step of each episode, every `n`-th step after it, and the last one'
    def chunk_sequences(self, length: int, overlap: int = ..., tail: str = ...) -> SequenceChunker:
        'Cuts the steps of each environment and episode into sequences of `length`; column `mask`: is this row a step?'
    def journal(self, max_steps: float = ..., max_episodes: float = ...) -> Journal:
        'Passes blocks on, up to a number of steps or episodes; counts steps, and keeps the returns of finished episodes'
    def gather(self, n: int, exact: bool = ...) -> Gather:
        'Blocks of `n` rows or more, joined from smaller ones; the last one has the remainder'
    def update_norms(self, states: Any = ..., rewards: Any = ...) -> UpdateNorms:
        'Passes blocks on, and counts each row once in the statistics of states and rewards'
    def scale_rewards(self, rewards: Any) -> ScaleRewards:
        'Batches with rewards on the scale of a `RewardNorm`'
    def experience_replay(self, bs: int = ..., max_sz: int = ..., *, replacement: bool = ..., seed: int | None = ..., sampler: Any = ..., store: Any = ..., ratio: float | None = ..., warmup: int | None = ..., return_idxs: bool = ..., freeze_memory: bool = ...) -> ExperienceReplay:
        'Keeps the last `max_sz` rows and yields batches of `bs` of them, drawn uniformly, or by `sampler`'
    def hindsight_replay(self, bs: int = ..., max_sz: int = ..., *, share: float = ..., strategy: str = ..., reward: Any = ..., replacement: bool = ..., beta: Any = ..., seed: int | None = ..., sampler: Any = ..., store: Any = ..., ratio: float | None = ..., warmup: int | None = ..., return_idxs: bool = ..., freeze_memory: bool = ...) -> HindsightReplay:
        'Keeps the last `max_sz` rows and yields batches of `bs` of them, of which a share have goals achieved later'
    def prioritized_replay(self, bs: int = ..., max_sz: int = ..., *, kind: Any = ..., alpha: float = ..., beta: Any = ..., eps: float = ..., initial: str = ..., stratified: bool = ..., weight_norm: str = ..., seed: int | None = ..., sampler: Any = ..., store: Any = ..., ratio: float | None = ..., warmup: int | None = ..., return_idxs: bool = ..., freeze_memory: bool = ...) -> PrioritizedReplay:
        'Keeps the last `max_sz` rows and yields batches of `bs` of them; larger TD errors are drawn more often'
    def q_learn(self, table: Any, gamma: float = ..., lr: float = ...) -> QLearner:
        'Tabular Q-learning: takes batches, improves `table`, yields records'
    def dqn(self, model: Any, gamma: float = ..., lr: float = ..., double: bool = ..., target_every: int = ..., tau: float = ..., max_norm: float = ..., optimizer: Any = ..., conservative: float = ...) -> DQNLearner:
        'Deep Q-learning: takes batches, improves `model`, yields records'
    def sequence_replay(self, bs: int = ..., max_sz: int = ..., *, length: int = ..., burn_in: int | None = ..., overlap: int | None = ..., kind: Any = ..., prioritized: bool = ..., eta: float = ..., alpha: float = ..., beta: Any = ..., initial: str = ..., state: str = ..., sampler: Any = ..., store: Any = ..., eps: float = ..., stratified: bool = ..., weight_norm: str = ..., seed: int | None = ..., ratio: float | None = ..., warmup: int | None = ..., return_idxs: bool = ..., freeze_memory: bool = ...) -> SequenceReplay:
        'Keeps the last `max_sz` rows and yields batches of `bs` sequences of them that overlap and never cross an episode'
    def r2d2(self, model: Any, gamma: float = ..., n: int = ..., lr: float = ..., rescaled: bool = ..., target_every: int = ..., tau: float = ..., max_norm: float = ..., optimizer: Any = ...) -> R2D2Learner:
        'Recurrent replay: takes batches of sequences, improves `model`, yields records'
    def sac(self, actor: Any, critics: Any, space: Any, gamma: float = ..., lr: float = ..., tau: float = ..., temperature: float = ..., temperature_lr: float | None = ..., entropy: float | None = ..., max_norm: float = ..., optimizer: Any = ..., seed: int | None = ...) -> SACLearner:
        'Soft actor-critic: takes batches, improves `actor` and `critics`, yields records'
    def td3(self, actor: Any, critics: Any, space: Any, gamma: float = ..., lr: float = ..., tau: float = ..., smoothing: float = ..., most: float = ..., actor_every: int = ..., max_norm: float = ..., optimizer: Any = ..., seed: int | None = ...) -> TD3Learner:
        'Twin delayed DDPG: takes batches, improves `actor` and `critics`, yields records'
    def episodes(self, keep: Any = ..., env_id: int = ..., **names: Any) -> Episodes:
        'Rows from arrays of whole episodes, by their `names`: dicts, `.npz`, Parquet, tables of Arrow or Hugging Face'
    def offline(self, data: Any, max_steps: float = ..., spaces: Any = ..., n_step: int = ..., gamma: float = ..., last: Any = ...) -> Offline:
        'Fills a replay with recorded rows, from which it then draws; each batch counts as a step'
    def prefetch(self, ahead: int = ..., device: Any = ...) -> Prefetch:
        'Draws the next batches of a replay in a thread, while the learner computes with this one'
    def parallel(self, num_workers: int = ..., ahead: int | None = ..., chunk: int = ..., method: str | None = ..., restarts: int = ..., engine: Any = ..., ordered: bool = ..., weights_every: int = ...) -> Parallel:
        'Copies of the chain above, in workers; a second pass goes on where the last one stopped'
    def stateful(self) -> StatefulPipe:
        'The chain as a dataset that `StatefulDataLoader(..., batch_size=None)` saves and restores exactly'
    def node(self) -> PipeNode:
        'The chain as a node of `torchdata.nodes`, saved and restored exactly'

class WorkerInfo(NamedTuple):
    rank: int = 0
    world_size: int = 1
    restart: int = 0
def worker_info() -> WorkerInfo: ...
@contextmanager
def as_worker(info: Any) -> Any: ...
def as_pipe(source: Any) -> IterDataPipe: ...
def upstream(pipe: Any) -> IterDataPipe: ...
class Holding(Pipe):
    def _rewind(self) -> Any: ...
    def _leave(self) -> Any: ...
class Positioned(Pipe):
    place: Any
    saved: Any
    takes_any_item: Any
    def restore(self, state: Any) -> Any: ...
    def _rewind(self) -> Any: ...
    def _leave(self) -> Any: ...
def state_of(x: Any) -> dict: ...
def check_own_state(who: Any, what: Any, x: Any, saved: Any) -> Any: ...
def try_state(who: Any, what: Any, x: Any, saved: Any) -> Any: ...
class SavedItems(Positioned):
    def snapshot(self) -> Any: ...
    def check_state(self, state: Any) -> Any: ...
    def restore(self, state: Any) -> Any: ...
    def _rewind(self) -> Any: ...
    def _leave(self) -> Any: ...
class Items(SavedItems):
    at_end: Any
    data_ended: Any
    items: Any
    place: Any
    def __init__(self, items: Any, at_end: Any='keep') -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __repr__(self) -> Any: ...
def as_method(name: Any, cls) -> Any: ...
def stage(name: Any) -> Callable[[_Class], _Class]: ...
class MapToIterConverter(Items):
    def __init__(self, datapipe: Any) -> None: ...
    def __repr__(self) -> Any: ...
