# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.learning.checkpoints import SavedLearner
from fastrl_replay.steps.core import Steps
from torch import Tensor

def discounts(batch: Steps, gamma: float) -> Tensor:
    'What the value of each next state counts for: the column `discount`, or else γ where the episode goes on'
    ...

def allowed_next(who: str, batch: Steps, discount: Tensor, actions: int) -> Tensor:
    'Which actions are allowed in the next states'
    ...

def check_discrete(who: str, batch: Steps, columns: Any = ...) -> Any:
    'An error that names the space of a column, where it is another than `Discrete`'
    ...

class Learned:
    'How a model is learned: each a value, or the name of the attribute that has it'
    lr: str
    max_norm: str
    optimizer: str
    def __init__(self, lr: object = 'lr', max_norm: object = 'max_norm', optimizer: object = 'optimizer') -> None: ...

class Follows:
    'How a target network follows a model: each a value, or the name of the attribute that has it'
    every: str
    tau: str
    def __init__(self, model: str, every: object = 'target_every', tau: object = 'tau') -> None: ...

class Learner(SavedLearner):
    'The base of learners: takes batches, improves models, yields records'
    targets: Any
    optimizers: Any
    generator: Any
    updates: Any
    _buffers: tuple
    learned: dict
    follows: dict
    precision: str
    compiled: bool
    ranks: Any
    def __init__(self, source, **given) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def learn(self, batch) -> dict:
        'One update: floats by name'
        ...
    def setting(self, x) -> Any:
        'What `x` names, or `x` itself where it is no name'
        ...
    def rate(self, lr: Any = 'lr') -> float:
        'A learning rate at the next update'
        ...
    def _fresh(self) -> Any: ...
    @property
    def opt(self) -> Any:
        'The optimizer of the first model; None: there is no model'
        ...
    @property
    def target(self) -> Any:
        'The first target network; None: there is none'
        ...
    @property
    def device(self) -> Any:
        'Where the first model is, and where batches are brought'
        ...
    def step(self, losses, **numbers) -> dict:
        'Take one step along the gradient of each loss; the record has losses, norms of the gradients, and the numbers'
        ...
    def over_ranks(self, x: Tensor) -> Tensor:
        'Its mean over several learners'
        ...
    def compute_with(self, precision: str = 'float32', compile: bool = False) -> Learner:
        'Set how networks are computed from now on'
        ...
    def arithmetic(self) -> Any:
        'The context in which errors are computed'
        ...
    def feedback(self, batch: Steps, td) -> Any:
        'Return TD errors to the replay that `batch` was drawn from'
        ...

def follow(target: nn.Module, model: nn.Module, tau: float) -> Any:
    'Bring `target` up to `model`, or part of the way'
    ...

def full(x: Tensor) -> Tensor:
    'Losses are computed with all bits'
    ...
