# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from gymnasium.spaces.box import Box
from gymnasium.spaces.discrete import Discrete
from gymnasium.spaces.space import Space

PARTED: tuple

class FlattenSpace(nn.Module):
    'States of a space as floats, [..., `size`]'
    space: Any
    size: Any
    def __init__(self, space: Space) -> None: ...
    def forward(self, state) -> Any: ...

def is_image(space: Space) -> bool:
    'Is it an image, or a stack of images?'
    ...

def has_images(space: Space) -> bool:
    'Is there an image in it?'
    ...

class ConvLayers(nn.Module):
    'Images of a space as features, [..., `size`]'
    last: Any
    shape: Any
    highest: Any
    layers: Any
    size: Any
    def __init__(self, space: Box) -> None: ...
    def forward(self, state) -> Any: ...

def feature_layers(space: Space) -> nn.Module:
    'Layers that make features of states: `ConvLayers` for images, `FlattenSpace` for everything else'
    ...

class Dueling(nn.Module):
    'A linear head: value of the state plus advantage of each action'
    value: Any
    advantage: Any
    def __init__(self, size: int, actions: int) -> None: ...
    def forward(self, x) -> Any: ...

def part_sizes(space: Space) -> tuple:
    "The sizes of an action's parts; an error where they don't begin at 0, or lie in a table"
    ...

class Branches(nn.Module):
    'A linear head: values for each part of an action; with `dueling` a value of the state, and advantages'
    action_sizes: Any
    advantage: Any
    value: Any
    def __init__(self, size: int, sizes: tuple, dueling: bool = False) -> None: ...
    def forward(self, x) -> Any: ...

def value_net(observation_space: Space, action_space: Space, hidden: Any = ..., dueling: bool = False) -> nn.Sequential:
    'A plain network of linear layers and ReLUs'
    ...

def n_actions(space: Space, who: str = 'values of actions') -> int:
    "How many actions there are; an error where they aren't 0, 1, 2, …"
    ...

def conv_net(observation_space: Space, action_space: Space, hidden: Any = ..., dueling: bool = False) -> nn.Sequential:
    'A network of convolutions, linear layers and ReLUs'
    ...

class RecurrentNet(nn.Module):
    'States and a hidden state → values of actions and the next hidden state'
    lstm: Any
    head: Any
    size: Any
    encoder: Any
    def __init__(self, observation_space: Space, action_space: Discrete, size: int = 64, dueling: bool = False) -> None: ...
    def initial_hidden(self, n) -> Any: ...
    def forward(self, state, hidden) -> Any: ...
