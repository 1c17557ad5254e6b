"""Write the package's stubs (`.pyi`) and its copy of settings.ini: `python docs/stubs.py [--check]`. (A symbolic link
would be a text file in a clone on Windows.)

Editors and type checkers don't run the program: where a stub lies beside a module, they read it instead. Methods that
`@patch` adds are missing in the modules; a stub has all that a class really has. There is one for each module in which a class
of `from fastrl_replay.all import *`, or one of its bases, is defined. In pipe.pyi `Pipe` has a method for each stage, and those of
torch's chained methods that pipes are often used with."""
import ast, importlib, inspect, sys, textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ROOT/'fastrl_replay/settings.ini'
sys.path.insert(0, str(ROOT))   # the working tree, whatever is installed

import fastrl_replay.all as everything
from fastrl_replay import generic, pipe
from fastrl_replay.pipe import IterDataPipe, Pipe

HEADER = '''# Written by docs/stubs.py from what classes have: edit the notebooks, then run it.
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from typing_extensions import Self
from torch import nn
'''
PIPES = '''from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TypeVar
from torch.utils.data import IterDataPipe as IterDataPipe, MapDataPipe as MapDataPipe
_Class = TypeVar('_Class', bound=type)
'''
TORCHS = 'batch', 'unbatch', 'shuffle', 'collate', 'concat', 'zip', 'sharding_filter'
HOOKS = '_buffers', '_fresh', '_open', '_close', '_rewind', '_leave', '_in_worker'   # for stages that someone writes
SPECIAL = '__init__', '__iter__', '__len__', '__getitem__', '__getattr__', '__call__', '__enter__', '__exit__'
PLAIN = bool, int, float, str, tuple, dict
RETURNS = {'stage': 'Callable[[_Class], _Class]', 'as_worker': 'AbstractContextManager[WorkerInfo]', '__enter__': 'Self',
           '__iter__': 'Iterator[Any]', '__init__': 'None', '__len__': 'int', '__exit__': 'None'}

def given(cls):
    "Names of the attributes that methods of a class give to its objects"
    for f in vars(cls).values():
        f = f.fget if isinstance(f, property) else f
        if not inspect.isfunction(f) or not f.__code__.co_argcount: continue
        try: source = inspect.getsource(f)
        except OSError: continue   # dataclasses, say, generate some
        this = f.__code__.co_varnames[0]
        for node in ast.walk(ast.parse(textwrap.dedent(source))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == this: yield node.attr
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f'vars({this}).update': yield from (k.arg for k in node.keywords if k.arg)

class Stub:
    "The text of a module's stub, and what it must import"
    def __init__(self, module): self.module,self.imports = module,set()

    def kind(self, annotation):
        "An annotation as text; '' where there is none"
        if annotation is inspect.Parameter.empty: return ''
        if not isinstance(annotation, type): return str(annotation).replace('typing.', '').replace('collections.abc.', '')
        name, module = annotation.__qualname__, annotation.__module__.removesuffix('._local')   # pathlib's, in Python 3.13
        if module.startswith('torch.nn'): return f'nn.{name}'
        if module in ('builtins', 'torch.utils.data.datapipes.datapipe') or module == self.module.__name__: return name
        ours = module.startswith('fastrl_replay') and self.module is not pipe
        if ours and getattr(self.module, name, None) is not annotation: return 'Any'   # patched in a module above: no import points upward
        self.imports.add((module, name))
        return name

    def parameter(self, p):
        "A parameter with its type and default"
        text, default = self.kind(p.annotation), p.default
        if default is None and text and 'None' not in text: text += ' | None'
        star = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
        if not text and not star and default is not p.empty: text = 'Any'   # a checker would take the default's type
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
            if x.fset: yield from (f'@{name}.setter', f'def {name}(self, value) -> None: ...')
        elif inspect.isfunction(x):
            yield from self.function(name, inspect.signature(x), RETURNS.get(name), x.__doc__, method=True)
        elif isinstance(x, classmethod) or type(x).__name__ == '_clsmethod':   # by `@classmethod`, by `@patch(cls_method=True)`
            f = getattr(x, '__func__', None) or x.f
            yield '@classmethod'
            yield from (line.replace('(self', '(cls', 1) for line in self.function(name, inspect.signature(f), doc=f.__doc__, method=True))
        else: yield f'{name}: {type(x).__name__ if type(x) in PLAIN else "Any"}'

    def members(self, cls):
        "The lines of a class, without what torch put there and without the chained methods"
        there = {name: x for name, x in vars(cls).items() if not hasattr(x, 'stage') and name not in ('stage_name', 'functions')}
        shown = [name for name in there if name in SPECIAL or name in HOOKS or not name.startswith('_')]
        for name in dict.fromkeys(given(cls)):
            if name[0] != '_' and not hasattr(cls, name): yield f'{name}: Any'
        for name in shown:
            written = isinstance(there[name], property) and any(not isinstance(vars(b)[name], property) for b in cls.__mro__[1:] if name in vars(b))
            yield from [f'{name}: Any'] if written else self.method(name, there[name])   # a base has an attribute there
        if cls in (Pipe, pipe.Positioned): yield 'def __iter__(self) -> Iterator[Any]: ...'   # or they would count as abstract

    def chained(self):
        "The methods that stages are, ours and torch's"
        for name, f in vars(Pipe).items():
            cls = getattr(f, 'stage', None)
            if cls and (getattr(everything, cls.__name__, None) is cls or cls.__module__ == generic.__name__):
                yield from self.function(name, f.__signature__, doc=cls.__doc__, method=True)
        for name in TORCHS:
            cls = IterDataPipe.functions[name].args[0]
            own, source, *params = [p.replace(annotation=p.empty) for p in inspect.signature(cls.__init__).parameters.values()]
            if source.kind is source.VAR_POSITIONAL: params.insert(0, source)   # `zip` and `concat` take more pipes
            doc = cls.__doc__.strip().split('\n')[0].replace(f' (functional name: ``{name}``)', '')
            yield from self.function(name, inspect.Signature([own, *params]), 'Pipe', doc, method=True)

    def thing(self, name, x):
        "The lines of one public name of the module"
        x = getattr(x, 'py_func', x)                                    # numba keeps the function there
        if inspect.isfunction(x): yield from self.function(name, inspect.signature(x), RETURNS.get(name), x.__doc__)
        elif not inspect.isclass(x): yield f'{name}: {type(x).__name__ if type(x) in PLAIN or name == "dp" else "Any"}'
        elif issubclass(x, tuple):
            yield f'class {name}(NamedTuple):'
            yield f'    {x.__doc__!r}'
            for field, kind in x.__annotations__.items():
                missing = ' | None'*(x._field_defaults.get(field, 0) is None)
                yield f'    {field}: {self.kind(kind)}{missing}' + (f' = {x._field_defaults[field]!r}' if field in x._field_defaults else '')
        else:
            bases = [c for b in x.__bases__ for c in (b.__bases__ if b.__name__ == '_Names' else (b,)) if c is not object]
            yield f'class {name}' + (f'({", ".join(map(self.kind, bases))}):' if bases else ':')
            yield f'    {x.__doc__!r}'
            yield from (f'    {line}' for line in [*self.members(x), *(self.chained() if x is Pipe else ())])

    def names(self):
        "What is public in the module, and the private bases of its public classes, each after its own"
        public = {name: getattr(self.module, name) for name in self.module.__all__}
        found = {b.__name__: b for x in public.values() if inspect.isclass(x) for b in x.__mro__[:0:-1]
                 if b.__module__ == self.module.__name__ and b.__name__ != '_Names'}
        return {**found, **public}

    def text(self):
        "The whole of it"
        body = [line for name, x in self.names().items() for line in ['', *self.thing(name, x)]]
        modules = sorted({module for module, _ in self.imports})
        imports = [f'from {m} import {", ".join(sorted(name for module, name in self.imports if module == m))}' for m in modules]
        header = HEADER + (PIPES if self.module in (pipe, generic) else '')
        return '\n'.join([header.rstrip(), *imports, *body]) + '\n'

def stubs():
    "Path → text"
    classes = [x for x in vars(everything).values() if inspect.isclass(x)]
    homes = {b.__module__ for x in classes for b in x.__mro__ if b.__module__.startswith('fastrl_replay')}
    return {ROOT.joinpath(*name.split('.')).with_suffix('.pyi'): Stub(importlib.import_module(name)).text() for name in homes}

def main():
    wanted = {**stubs(), SETTINGS: (ROOT/'settings.ini').read_text(encoding='utf-8')}
    wrong = [p for p, text in wanted.items() if p.is_symlink() or not p.exists() or p.read_text(encoding='utf-8') != text]
    gone = {*(ROOT/'fastrl_replay').rglob('*.pyi')} - {*wanted}
    if (wrong or gone) and '--check' in sys.argv[1:]: sys.exit(f'{", ".join(str(p.relative_to(ROOT)) for p in sorted([*wrong, *gone]))}: not what '
        'the classes give, or not like settings.ini at the top level. Remedy: run\n    python docs/stubs.py')
    for p in gone: p.unlink()
    for p in wrong: p.unlink(missing_ok=True); p.write_text(wanted[p], encoding='utf-8', newline='\n')

if __name__ == '__main__': main()
