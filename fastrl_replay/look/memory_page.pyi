# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
from fastrl_replay.look.html import Safe

WORDS: dict

def ring_picture(inside: dict, sample: dict, part: int = 0, most: int = 2000) -> Safe:
    'Episodes along the ring, a line for each environment'
    ...

def lead_of(inside: dict) -> str:
    'What it is, in a line'
    ...

def sample_text(sample: dict) -> str:
    'What the page holds of it'
    ...

def remark_list(inside: dict, sample: dict, part: int = 0) -> Safe:
    'What is unusual, with links to rows that show it'
    ...

def drawn_tables(inside: dict, sample: dict, part: int = 0) -> Safe:
    'The rows drawn most, and the oldest of those that never were'
    ...

def words_list() -> Safe:
    "What the words mean, for who can't point at them"
    ...

def memory_page(parts: dict, title: str | None = None) -> str:
    'A page of a memory, or of several'
    ...

class Inspectable:
    'What has `inside()`, and `pages()` as `memory_page` takes them, and is shown as a figure or as a page'
    def show(self) -> Any:
        'What is in it, in one figure of matplotlib, which a notebook shows'
        ...
    def page(self, path: Any = None) -> Any:
        'Some of what is in it, step by step, as a page in one file; looking changes nothing'
        ...
