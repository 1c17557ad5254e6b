# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TypeVar
from torch.utils.data import IterDataPipe as IterDataPipe, MapDataPipe as MapDataPipe
_Class = TypeVar('_Class', bound=type)
from fastrl_replay.app.offline import Offline
from fastrl_replay.data.interop import PipeNode, StatefulPipe
from fastrl_replay.envs.stepper import GymStepper
from fastrl_replay.generic import Cycler, Filter, Header, InMemoryCacheHolder, Map
from fastrl_replay.learning.dqn import DQNLearner
from fastrl_replay.learning.r2d2 import R2D2Learner
from fastrl_replay.learning.sac import SACLearner
from fastrl_replay.learning.tabular import QLearner, QTable
from fastrl_replay.learning.td3 import TD3Learner
from fastrl_replay.memory.rows import Store
from fastrl_replay.memory.samplers import Sampler
from fastrl_replay.parallel.prefetch import Prefetch
from fastrl_replay.parallel.stage import Parallel
from fastrl_replay.replay.experience import ExperienceReplay
from fastrl_replay.replay.hindsight import HindsightReplay
from fastrl_replay.replay.prioritized import PrioritizedReplay
from fastrl_replay.replay.sequences import SequenceReplay
from fastrl_replay.stages.chunker import SequenceChunker
from fastrl_replay.stages.journal import Gather, Journal
from fastrl_replay.stages.normalisation import RewardNorm, ScaleRewards, StateNorm, UpdateNorms
from fastrl_replay.stages.nstep import NSkip, NStep
from fastrl_replay.stages.recorded import Episodes
from fastrl_replay.steps.states import Saves
from gymnasium.spaces.box import Box

class Pipe(IterDataPipe, Saves):
    'The base of every stage: takes items from `source`, yields items'
    source: Any
    _buffers: tuple
    takes_any_item: bool
    reads_anew: bool
    steps_envs: bool
    source_elsewhere: bool
    draws_batches: bool
    def __init__(self, source: Any = None) -> None: ...
    def check_state(self, state: dict) -> Any:
        "What `restore` takes, made of what `snapshot` gave (None: just that); an error where it can't be"
        ...
    def check_remote(self, state: dict) -> Any:
        'The same where a copy of this stage in a worker will take it; what lies there is not looked at here'
        ...
    def _fresh(self) -> Any:
        'Make new buffers'
        ...
    def _rewind(self) -> Any:
        'Let the next pass begin at the start; for a stage that has a position in the pass'
        ...
    def _leave(self) -> Any:
        'The pass was left: the next one begins at the start, or where a restored one goes on'
        ...
    def _open(self) -> Any:
        'Open now what the first item would open; what is open already stays'
        ...
    def _close(self) -> Any:
        'Close what this stage has opened; what is closed already stays closed'
        ...
    def _in_worker(self, info) -> Any:
        'Be one of several copies'
        ...
    def state_dict(self) -> dict:
        'The state of this stage and of all stages above it'
        ...
    def load_state_dict(self, state: dict) -> Any:
        "Continue, from the next pass on, where the saved chain stood; a state that doesn't fit changes nothing"
        ...
    def checked_states(self, state, remote: bool = False) -> list:
        "The stages of this chain, each with what its `restore` takes; an error where a state doesn't fit"
        ...
    def blocks(self) -> Any:
        'The items of `source`, each of which must be a `Steps`'
        ...
    @property
    def data_ended(self) -> bool:
        'Has this pass come to its end, and does the first stage say that nothing more will come?'
        ...
    def open(self) -> Any:
        'Open now what the first item would open, the first stage first'
        ...
    def close(self) -> Any:
        'Close what the stages of this chain have opened, the last stage first; a new pass opens again'
        ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error) -> None: ...
    def rewind(self) -> Any:
        'Let the next pass begin at the start, here and above'
        ...
    def in_worker(self, info: WorkerInfo) -> Any:
        'Tell every stage of this chain, once in a process, that it is one of several copies'
        ...
    @property
    def has_envs(self) -> bool:
        'Does this stage, or one above it, step environments?'
        ...
    @property
    def drawn_from(self) -> Pipe:
        'What draws the batches that come out of this chain'
        ...
    @property
    def journals(self) -> list:
        'Stages of this chain that count what a chain that runs them elsewhere wants to know'
        ...
    def resize(self, num_workers: int) -> Any:
        'Add or remove workers of the `.parallel` in this chain, also while it runs'
        ...
    def __iter__(self) -> Iterator[Any]: ...
    def map(self, fn, input_col: Any = None, output_col: Any = None) -> Map:
        'A function of each item'
        ...
    def filter(self, filter_fn, input_col: Any = None) -> Filter:
        'The items for which a function says True'
        ...
    def header(self, limit: int = 10) -> Header:
        'The first `limit` items of each pass'
        ...
    def cycle(self, count: int | None = None) -> Cycler:
        'The source again and again'
        ...
    def in_memory_cache(self) -> InMemoryCacheHolder:
        'Keep every item of the source; later passes give the same objects again'
        ...
    def gym_step(self, policy: Any = None, seed: int | None = None, autoreset_mode: Any = None, clip: bool | None = None, float32: bool = False, info: Any = ...) -> GymStepper:
        'Steps environments and yields blocks of true transitions; a second pass goes on where the last one stopped'
        ...
    def n_step(self, n: int, gamma: float, last: Any = ...) -> NStep:
        'Merges each step with the next of its episode: summed `reward`, last `next_state`, with columns `discount` and `n`'
        ...
    def n_skip(self, n: int) -> NSkip:
        'Keeps the first step of each episode, every `n`-th step after it, and the last one'
        ...
    def chunk_sequences(self, length: int, overlap: int = 0, tail: str = 'shift') -> SequenceChunker:
        'Cuts the steps of each environment and episode into sequences of `length`; column `mask`: is this row a step?'
        ...
    def journal(self, max_steps: float = ..., max_episodes: float = ...) -> Journal:
        'Passes blocks on, up to a number of steps or episodes; counts steps, and keeps the returns of finished episodes'
        ...
    def gather(self, n: int, exact: bool = False) -> Gather:
        'Blocks of `n` rows or more, joined from smaller ones; the last one has the remainder'
        ...
    def update_norms(self, states: StateNorm | None = None, rewards: RewardNorm | None = None) -> UpdateNorms:
        'Passes blocks on, and counts each row once in the statistics of states and rewards'
        ...
    def scale_rewards(self, rewards: RewardNorm) -> ScaleRewards:
        'Batches with rewards on the scale of a `RewardNorm`'
        ...
    def experience_replay(self, bs: int = 1, max_sz: int = 1000000, *, replacement: bool = False, seed: int | None = None, sampler: Sampler | None = None, store: Store | None = None, by: Any = 'row', ratio: float | None = None, warmup: int | None = None, return_idxs: bool = False, freeze_memory: bool = False) -> ExperienceReplay:
        'Keeps the last `max_sz` rows and yields batches of `bs` of them, drawn uniformly, or by `sampler`'
        ...
    def hindsight_replay(self, bs: int = 1, max_sz: int = 1000000, *, share: float = 0.8, strategy: str = 'future', reward: Any = None, replacement: bool = False, beta: Any = None, seed: int | None = None, sampler: Sampler | None = None, store: Store | None = None, ratio: float | None = None, warmup: int | None = None, return_idxs: bool = False, freeze_memory: bool = False) -> HindsightReplay:
        'Keeps the last `max_sz` rows and yields batches of `bs` of them, of which a share have goals achieved later'
        ...
    def prioritized_replay(self, bs: int = 1, max_sz: int = 1000000, *, kind: str | type = 'proportional', alpha: float = 0.6, beta: Any = 0.4, eps: float = 1e-06, initial: str = 'largest', stratified: bool = True, weight_norm: str = 'batch', seed: int | None = None, sampler: Sampler | None = None, store: Store | None = None, ratio: float | None = None, warmup: int | None = None, return_idxs: bool = False, freeze_memory: bool = False) -> PrioritizedReplay:
        'Keeps the last `max_sz` rows and yields batches of `bs` of them; larger TD errors are drawn more often'
        ...
    def q_learn(self, table: QTable, gamma: float = 0.99, lr: float = 0.5) -> QLearner:
        'Tabular Q-learning: takes batches, improves `table`, yields records'
        ...
    def dqn(self, model: nn.Module, gamma: float = 0.99, lr: float = 0.001, double: bool = True, target_every: int = 500, tau: float = 1.0, max_norm: float = 10.0, optimizer: Any = None, conservative: float = 0.0) -> DQNLearner:
        'Deep Q-learning: takes batches, improves `model`, yields records'
        ...
    def sequence_replay(self, bs: int = 1, max_sz: int = 1000000, *, length: int = 80, burn_in: int | None = None, overlap: int | None = None, kind: str | type = 'proportional', prioritized: bool = True, eta: float = 0.9, alpha: float = 0.9, beta: Any = 0.6, initial: str = 'largest', state: str = 'stored', sampler: Sampler | None = None, store: Store | None = None, eps: float = 1e-06, stratified: bool = True, weight_norm: str = 'batch', seed: int | None = None, ratio: float | None = None, warmup: int | None = None, return_idxs: bool = False, freeze_memory: bool = False) -> SequenceReplay:
        'Keeps the last `max_sz` rows and yields batches of `bs` sequences of them that overlap and never cross an episode'
        ...
    def r2d2(self, model: nn.Module, gamma: float = 0.997, n: int = 5, lr: float = 0.0001, rescaled: bool = True, target_every: int = 2500, tau: float = 1.0, max_norm: float = 40.0, optimizer: Any = None) -> R2D2Learner:
        'Recurrent replay: takes batches of sequences, improves `model`, yields records'
        ...
    def sac(self, actor: nn.Module, critics: nn.Module, space: Box, gamma: float = 0.99, lr: float = 0.0003, tau: float = 0.005, temperature: float = 1.0, temperature_lr: float | None = None, entropy: float | None = None, max_norm: float = ..., optimizer: Any = None, seed: int | None = None) -> SACLearner:
        'Soft actor-critic: takes batches, improves `actor` and `critics`, yields records'
        ...
    def td3(self, actor: nn.Module, critics: nn.Module, space: Box, gamma: float = 0.99, lr: float = 0.0003, tau: float = 0.005, smoothing: float = 0.2, most: float = 0.5, actor_every: int = 2, max_norm: float = ..., optimizer: Any = None, seed: int | None = None) -> TD3Learner:
        'Twin delayed DDPG: takes batches, improves `actor` and `critics`, yields records'
        ...
    def episodes(self, keep: Any = ..., env_id: int = 0, **names) -> Episodes:
        'Rows from arrays of whole episodes, by their `names`: dicts, `.npz`, Parquet, tables of Arrow or Hugging Face'
        ...
    def offline(self, data, max_steps: float = ..., spaces: Any = None, n_step: int = 1, gamma: float = 1.0, last: Any = ...) -> Offline:
        'Fills a replay with recorded rows, from which it then draws; each batch counts as a step'
        ...
    def prefetch(self, ahead: int = 1, device: Any = None) -> Prefetch:
        'Draws the next batches of a replay in a thread, while the learner computes with this one'
        ...
    def parallel(self, num_workers: int = 2, ahead: int | None = None, chunk: int = 4, method: str | None = None, restarts: int = 0, engine: Any = 'process', ordered: bool = True, shares: str = 'equal', weights_every: int = 0, weights_dtype: str | None = None) -> Parallel:
        'Copies of the chain above, in workers; a second pass goes on where the last one stopped'
        ...
    def stateful(self) -> StatefulPipe:
        'The chain as a dataset that `StatefulDataLoader(..., batch_size=None)` saves and restores exactly'
        ...
    def node(self) -> PipeNode:
        'The chain as a node of `torchdata.nodes`, saved and restored exactly'
        ...
    def batch(self, batch_size, drop_last: Any = False, wrapper_class: Any = ...) -> Pipe:
        'Creates mini-batches of data.'
        ...
    def unbatch(self, unbatch_level: Any = 1) -> Pipe:
        'Undoes batching of data.'
        ...
    def shuffle(self, *, buffer_size: Any = 10000, unbatch_level: Any = 0) -> Pipe:
        'Shuffle the input DataPipe with a buffer.'
        ...
    def collate(self, conversion: Any = ..., collate_fn: Any = None) -> Pipe:
        'Collates samples from DataPipe to Tensor(s) by a custom collate function.'
        ...
    def concat(self, *datapipes) -> Pipe:
        'Concatenates multiple Iterable DataPipes.'
        ...
    def zip(self, *datapipes) -> Pipe:
        'Aggregates elements into a tuple from each of the input DataPipes.'
        ...
    def sharding_filter(self, sharding_group_filter: Any = None) -> Pipe:
        'Wrapper that allows DataPipe to be sharded.'
        ...

class Positioned(Pipe):
    'A stage whose state is its position in the pass'
    saved: dict
    takes_any_item: bool
    place: int
    def restore(self, state) -> Any: ...
    def _rewind(self) -> Any: ...
    def _leave(self) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...

class SavedItems(Positioned):
    'The state of `Items`: a position, and that of the items where they have one'
    def snapshot(self) -> Any: ...
    def check_state(self, state) -> Any: ...
    def restore(self, state) -> Any: ...
    def _rewind(self) -> Any: ...
    def _leave(self) -> Any: ...

class Items(SavedItems):
    'The items of any iterable, in order'
    at_end: Any
    items: Any
    def __init__(self, items, at_end: str = 'keep') -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    @property
    def data_ended(self) -> Any: ...

class WorkerInfo(NamedTuple):
    'Which of several copies of a chain this process runs'
    rank: int = 0
    world_size: int = 1
    restart: int = 0

def worker_info() -> WorkerInfo:
    'Which of the processes that run the same chain this is'
    ...

def as_worker(info: WorkerInfo) -> AbstractContextManager[WorkerInfo]:
    'Be this worker, for a while'
    ...

def as_pipe(source) -> IterDataPipe:
    'Anything that gives items as a pipe'
    ...

def upstream(pipe) -> IterDataPipe:
    "The stage that `pipe` pulls from; an error where there are several, since such a chain can't be saved"
    ...

class Holding(Pipe):
    'The base of stages that hold rows until later ones complete them: at the end of the data they hand them out'
    def _rewind(self) -> Any: ...
    def _leave(self) -> Any: ...

def state_of(x) -> dict:
    'What an object saves of itself'
    ...

def check_own_state(who: str, what: str, x, saved) -> Any:
    'Raise where one of the two saves itself, and the other does not'
    ...

def try_state(who: str, what: str, x, saved) -> Any:
    'A `StateError` where an object refuses a state: a copy of it tries'
    ...

def as_method(name: str, cls) -> Any:
    'Make a stage class callable as a method of our pipes'
    ...

def stage(name: str) -> Callable[[_Class], _Class]:
    'Make a stage class callable as a method of every pipe'
    ...

class MapToIterConverter(Items):
    'The items of a map-style pipe, in order'
    def __init__(self, datapipe) -> None: ...
