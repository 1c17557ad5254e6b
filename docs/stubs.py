"""Write fastrl_replay/pipe.pyi, which tells editors the chained methods, and the package's copy of settings.ini:
`python docs/stubs.py [--check]`. (A symbolic link would be a text file in a clone on Windows.)

Each stage is a method of every pipe, registered when its module is imported. Editors and type checkers don't run
the program: they read this file instead of pipe.py. It holds all that is public in `pipe`, a method for each stage
that `from fastrl_replay.all import *` or this module brings, and those of torch's chained methods that pipes are often
used with."""
import inspect, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB, SETTINGS = ROOT/'fastrl_replay/pipe.pyi', ROOT/'fastrl_replay/settings.ini'
sys.path.insert(0, str(ROOT))   # the working tree, whatever is installed

import fastrl_replay.all as everything
from fastrl_replay import pipe
from fastrl_replay.pipe import IterDataPipe, Pipe

HEADER = '''# Written by docs/stubs.py from what is registered: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from typing_extensions import Self
from torch import nn
from torch.utils.data import IterDataPipe as IterDataPipe, MapDataPipe as MapDataPipe
'''
TORCHS = 'batch', 'unbatch', 'shuffle', 'collate', 'concat', 'zip', 'sharding_filter'
HOOKS = '_buffers', '_fresh', '_open', '_close', '_rewind', '_leave', '_in_worker'   # for stages that someone writes
SPECIAL = '__init__', '__iter__', '__len__', '__getitem__', '__enter__', '__exit__'
RETURNS = {'stage': 'Callable[[_Class], _Class]', 'as_worker': 'AbstractContextManager[WorkerInfo]', '__enter__': 'Self',
           '__iter__': 'Iterator[Any]', '__init__': 'None', '__len__': 'int', '__exit__': 'None'}

class Stub:
    "The text of the stub, and what it must import"
    def __init__(self): self.imports = set()

    def kind(self, annotation):
        "An annotation as text; '' where there is none"
        if annotation is inspect.Parameter.empty: return ''
        if not isinstance(annotation, type): return str(annotation).replace('typing.', '')
        name, module = annotation.__qualname__, annotation.__module__
        if module.startswith('torch.nn'): return f'nn.{name}'
        known = 'builtins', 'fastrl_replay.pipe', 'torch.utils.data.datapipes.datapipe'
        if module not in known: self.imports.add((module, name))
        return name

    def parameter(self, p):
        "A parameter with its type and default"
        text, default = self.kind(p.annotation), p.default
        if default is None and text and 'None' not in text: text += ' | None'
        star = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
        head = f'{star}{p.name}' + (f': {text}' if text else '')
        if default is p.empty: return head
        plain = default is None or type(default) in (bool, int, str) or type(default) is float and abs(default) < float('inf')
        return head + (' = ' if text else '=') + (repr(default) if plain else '...')

    def function(self, name, signature, returns=None, doc=None, method=False):
        "The lines of a function or method"
        params, parts = list(signature.parameters.values())[method:], ['self']*method
        for k, p in enumerate(params):
            after_star = any(q.kind in (q.VAR_POSITIONAL, q.KEYWORD_ONLY) for q in params[:k])
            if p.kind is p.KEYWORD_ONLY and not after_star: parts.append('*')
            parts.append(self.parameter(p))
        returns = returns or self.kind(signature.return_annotation) or 'Any'
        yield f'def {name}({", ".join(parts)}) -> {returns}:' + ('' if doc else ' ...')
        if doc: yield from (f'    {doc!r}', '    ...')

    def method(self, name, x):
        "The lines of what a class has under a name"
        if isinstance(x, property):
            yield '@property'
            yield from self.function(name, inspect.signature(x.fget), doc=x.fget.__doc__, method=True)
        elif inspect.isfunction(x):
            yield from self.function(name, inspect.signature(x), RETURNS.get(name), x.__doc__, method=True)
        else: yield f'{name}: {type(x).__name__}'

    def members(self, cls):
        "The lines of a class, without what torch put there and without the chained methods"
        for name, x in vars(cls).items():
            shown = name in SPECIAL or name in HOOKS or not name.startswith('_')
            if shown and not hasattr(x, 'stage') and name not in ('stage_name', 'functions'): yield from self.method(name, x)
        if cls in (Pipe, pipe.Positioned): yield 'def __iter__(self) -> Iterator[Any]: ...'   # or they would count as abstract

    def chained(self):
        "The methods that stages are, ours and torch's"
        for name, f in vars(Pipe).items():
            cls = getattr(f, 'stage', None)
            if cls and (getattr(everything, cls.__name__, None) is cls or cls.__module__ == pipe.__name__):
                yield from self.function(name, f.__signature__, doc=cls.__doc__, method=True)
        for name in TORCHS:
            cls = IterDataPipe.functions[name].args[0]
            own, source, *params = [p.replace(annotation=p.empty) for p in inspect.signature(cls.__init__).parameters.values()]
            if source.kind is source.VAR_POSITIONAL: params.insert(0, source)   # `zip` and `concat` take more pipes
            doc = cls.__doc__.strip().split('\n')[0].replace(f' (functional name: ``{name}``)', '')
            yield from self.function(name, inspect.Signature([own, *params]), 'Pipe', doc, method=True)

    def thing(self, name, x):
        "The lines of one public name of `pipe`"
        if inspect.isfunction(x): yield from self.function(name, inspect.signature(x), RETURNS.get(name), x.__doc__)
        elif not inspect.isclass(x): yield f'{name}: {type(x).__name__}'
        elif issubclass(x, tuple):
            yield f'class {name}(NamedTuple):'
            yield f'    {x.__doc__!r}'
            for field, kind in x.__annotations__.items(): yield f'    {field}: {self.kind(kind)} = {x._field_defaults[field]!r}'
        else:
            bases = [c for b in x.__bases__ for c in (b.__bases__ if b.__name__[0] == '_' else (b,))]
            yield f'class {name}({", ".join(map(self.kind, bases))}):'
            yield f'    {x.__doc__!r}'
            yield from (f'    {line}' for line in [*self.members(x), *(self.chained() if x is Pipe else ())])

def stub():
    "The whole text"
    s = Stub()
    body = [line for name in pipe.__all__ for line in ['', *s.thing(name, getattr(pipe, name))]]
    modules = sorted({module for module, _ in s.imports})
    imports = [f'from {m} import {", ".join(sorted(name for module, name in s.imports if module == m))}' for m in modules]
    return '\n'.join([HEADER.rstrip(), *imports, '', "_Class = TypeVar('_Class', bound=type)", *body]) + '\n'

def main():
    wanted = {STUB: stub(), SETTINGS: (ROOT/'settings.ini').read_text(encoding='utf-8')}
    wrong = [p for p, text in wanted.items() if p.is_symlink() or not p.exists() or p.read_text(encoding='utf-8') != text]
    if wrong and '--check' in sys.argv[1:]: sys.exit(f'{", ".join(str(p.relative_to(ROOT)) for p in wrong)}: not what '
        'the stages give, or not like settings.ini at the top level. Remedy: run\n    python docs/stubs.py')
    for p in wrong: p.unlink(missing_ok=True); p.write_text(wanted[p], encoding='utf-8', newline='\n')

if __name__ == '__main__': main()
