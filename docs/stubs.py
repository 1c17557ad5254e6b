"""Write fastrl_replay/pipe.pyi, which gives type checkers and editors the chained methods of `Pipe`, and the package's
copy of settings.ini: `python docs/stubs.py [--check]`. The stub is pipe.py without function bodies, and a method for each stage."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fastrl_replay.all as everything
from fastrl_replay import generic
from fastrl_replay.pipe import Pipe

HOOKS = (
    '_fresh',
    '_rewind',
    '_leave',
    '_open',
    '_close',
    '_in_worker',
)  # for stages that users write
HEADER = '''# Written by docs/stubs.py: edit nbs/pipe.ipynb, then run it.
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from typing_extensions import Self
_Class = TypeVar('_Class', bound=type)
'''


class WithoutBodies(ast.NodeTransformer):
    """Replace function bodies by `...`, and drop private functions, docstrings and what is not declared by its type."""

    def visit_FunctionDef(self, node):
        node.body = [ast.Expr(ast.Constant(...))]
        if node.returns is None:
            known = {
                'stage': 'Callable[[_Class], _Class]',
                '__iter__': 'Iterator[Any]',
                '__enter__': 'Self',
            }
            node.returns = ast.Name(
                'None' if node.name.startswith('__init') else known.get(node.name, 'Any')
            )
        for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            if arg.arg not in ('self', 'cls'):
                arg.annotation = ast.Name('Any')
        return node

    def visit_ClassDef(self, node):
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        attributes = {
            n.attr
            for n in ast.walk(node)
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        }
        attributes |= {t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets}
        if node.name == 'Pipe':
            attributes.add('source')
            node.bases = [ast.Name('IterDataPipe'), ast.Name('Saves')]
            methods.append(ast.parse('def __iter__(self): ...').body[0])
        attributes -= {n.name for n in methods}
        node.body = fields + [
            ast.AnnAssign(ast.Name(a), ast.Name('Any'), simple=1)
            for a in sorted(attributes)
            if a[0] != '_'
        ]
        node.body += [
            self.visit(n)
            for n in methods
            if n.name[:2] == '__' or n.name[0] != '_' or n.name in HOOKS
        ]
        node.body = node.body or [ast.Expr(ast.Constant(...))]
        return node


def parameter(p):
    "Return a parameter as text, with its type if that is a plain one."
    kind = (
        p.annotation.__name__
        if p.annotation in (bool, int, float, str, dict, list, tuple)
        else 'Any'
    )
    if p.default is None and kind != 'Any':
        kind += ' | None'
    stars = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
    return f'{stars}{p.name}: {kind}' + ('' if p.default is p.empty else ' = ...')


def method(name, cls, parameters):
    "Return the lines of a chained method."
    parts = ['self']
    keyword = False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not keyword:
            parts.append('*')
        keyword = keyword or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        parts.append(parameter(p))
    return f'    def {name}({", ".join(parts)}) -> {cls.__name__}:\n        {cls.__doc__!r}\n'


def stub():
    "Return the text of the stub."
    tree = ast.parse((ROOT / 'fastrl_replay/pipe.py').read_text(encoding='utf-8'))
    imported = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    defined = [
        n for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name[0] != '_'
    ]
    tree.body = [*imported, *map(WithoutBodies().visit, defined)]
    text = re.sub(r':\n +\.\.\.', ': ...', ast.unparse(tree)).replace('\n\n', '\n')
    chained = imports = ''
    for name, f in vars(Pipe).items():
        cls = getattr(f, 'stage', None)
        if cls and (
            getattr(everything, cls.__name__, None) is cls or cls.__module__ == generic.__name__
        ):
            chained += method(name, cls, [*f.__signature__.parameters.values()][1:])
            imports += f'from {cls.__module__} import {cls.__name__}\n'
    at = text.index('class Pipe(')
    end = text.index('\nclass ', at)
    return HEADER + imports + text[:end] + '\n' + chained + text[end:] + '\n'


def main():
    wanted = {
        ROOT / 'fastrl_replay/pipe.pyi': stub(),
        ROOT / 'fastrl_replay/settings.ini': (ROOT / 'settings.ini').read_text(encoding='utf-8'),
    }
    wrong = [
        p for p, text in wanted.items() if not p.exists() or p.read_text(encoding='utf-8') != text
    ]
    if wrong and '--check' in sys.argv[1:]:
        sys.exit(
            f'{", ".join(str(p.relative_to(ROOT)) for p in wrong)}: not up to date. Remedy: run\n    python docs/stubs.py'
        )
    for p in wrong:
        p.write_text(wanted[p], encoding='utf-8', newline='\n')


if __name__ == '__main__':
    main()
