# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.pipe import Pipe
from torch import Tensor
from torch._C import Generator

def bare_names(state: dict) -> dict:
    'The tensors of a model without the prefix that torch.compile gives them'
    ...

def saved_part(part) -> Any:
    'What a checkpoint keeps of a model, an optimizer or a generator'
    ...

def load_part(part, saved) -> Any:
    'Let a model, an optimizer or a generator go on where another one was saved'
    ...

def check_same_shapes(stage: str, saved: dict, mine: dict) -> Any:
    'An error where a checkpoint has other tensors than we have, by name, by shape or by kind of number'
    ...

def check_part(who: str, prefix: str, part, saved) -> Any:
    'An error where this part of a checkpoint is of another one'
    ...

def check_optimizer(who: str, opt, saved) -> Any:
    'An error where a step from there on could not be made'
    ...

def load_generator(own: Generator, saved: Tensor) -> Any:
    'Go on where another generator was; on another kind of device, with numbers that follow from its state'
    ...

def check_generator(who, own, saved) -> Any:
    "An error where this is no state of torch's random numbers"
    ...

class SavedLearner(Pipe):
    'A stage that learns, saved with its models, target networks, optimizers and generator'
    updates: Any
    def snapshot(self) -> dict:
        'What a checkpoint holds'
        ...
    def restore(self, state) -> Any:
        'Continue where `state` was saved'
        ...
    def check_state(self, state) -> Any:
        'An error where a checkpoint is of other models or optimizers'
        ...
