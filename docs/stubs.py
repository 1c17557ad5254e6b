"""Write fastrl_replay/pipe.pyi and the package's settings.ini: `python docs/stubs.py [--check]`.

The stub gives type checkers and editors the chained methods of `Pipe`."""

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fastrl_replay.all as everything
from fastrl_replay import generic, pipe

# private methods that stages of users may have
METHODS = '__init__ __iter__ __enter__ __exit__ _fresh _rewind _leave _open _close _in_worker'
RETURNS = dict(
    __init__='None', __iter__='Iterator[Any]', __enter__='Self', stage='Callable[[T], T]'
)
PIPE = '    source: Any\n    def __iter__(self) -> Iterator[Any]: ...'  # abstract in torch
HEADER = '''# Written by docs/stubs.py: edit nbs/pipe.ipynb, then run it.
# mypy: disable-error-code="override"
# pyright: reportIncompatibleMethodOverride=false
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, TypeVar
from torch.utils.data import IterDataPipe, MapDataPipe, datapipes
from typing_extensions import Self
T = TypeVar('T')
from .steps.states import Saves
'''


def parameter(p):
    "Return a parameter as text, with its type if that is a plain one."
    plain = p.annotation in (bool, int, float, str, dict, list, tuple)
    kind = p.annotation.__name__ if plain else 'Any'
    if p.default is None and plain:
        kind += ' | None'
    stars = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
    return f'{stars}{p.name}: {kind}' + ('' if p.default is p.empty else ' = ...')


def function(name, f):
    "Return the declaration of a function."
    signature = inspect.signature(f)
    parts = []
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and '*' not in ''.join(parts):
            parts.append('*')
        parts.append('self' if p.name == 'self' else parameter(p))
    kind = signature.return_annotation
    kind = 'Any' if kind is signature.empty else getattr(kind, '__name__', kind)
    return f'def {name}({", ".join(parts)}) -> {RETURNS.get(name, kind)}:'


def class_lines(cls):
    "Yield the lines that declare a class; chained methods have the docstring of their stage."
    bases = ', '.join(b.__name__ for b in cls.__bases__)
    yield f'class {cls.__name__}({"IterDataPipe, Saves" if cls is pipe.Pipe else bases}):'
    yield PIPE if cls is pipe.Pipe else '    ...'
    for name, value in vars(cls).items():
        stage = getattr(value, 'stage', None)
        shown = name[0] != '_' or name in METHODS.split()
        if isinstance(value, property):
            yield f'    @property\n    {function(name, value.fget)} ...'
        elif inspect.isfunction(value) and shown and (stage is None or is_public(stage)):
            yield f'    {function(name, value)} {repr(inspect.getdoc(value)) if stage else "..."}'


def is_public(stage):
    return stage in (*vars(everything).values(), generic.Map, generic.Filter)


def stub():
    "Return the text of the stub."
    stages = [f.stage for f in vars(pipe.Pipe).values() if is_public(getattr(f, 'stage', None))]
    lines = [HEADER, *(f'from {cls.__module__} import {cls.__name__}' for cls in stages)]
    for name in pipe.__all__:
        value = getattr(pipe, name)
        if name == 'WorkerInfo':
            fields = (f'    {field}: int = ...' for field in value._fields)
            lines += [f'class {name}(NamedTuple):', *fields]
        elif inspect.isclass(value):
            lines += class_lines(value)
        elif callable(value):
            lines.append(f'{function(name, value)} ...')
    return '\n'.join(lines) + '\n'


def main():
    wanted = {'pipe.pyi': stub(), 'settings.ini': (ROOT / 'settings.ini').read_text('utf-8')}
    for name, text in wanted.items():
        path = ROOT / 'fastrl_replay' / name
        if path.exists() and path.read_text('utf-8') == text:
            continue
        if '--check' in sys.argv[1:]:
            sys.exit(f'{name} is not up to date. Remedy: python docs/stubs.py')
        path.write_text(text, encoding='utf-8', newline='\n')


if __name__ == '__main__':
    main()
