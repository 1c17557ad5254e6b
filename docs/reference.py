"""Pages that no notebook is: one for each public class, one for each group of source lessons. make.py writes them into
the copy of nbs/ that the site is built from."""

import ast, fnmatch, inspect, json, re, textwrap
from functools import cached_property
from pathlib import Path

ERRORS = re.compile(r'(?:Error|NotEnough\w+|StaleKey)$')
LONGEST = 16  # lines of an example
BASES = 'Replay', 'Learner'  # that are not in `all`, but whose methods users call
MIXINS = ('Inspectable',)  # what they have belongs to the class that takes them in
HOOKS = {
    *(
        'snapshot restore check_state check_remote checked_states blocks data_ended in_worker has_envs drawn_from journals rewind due_batches too_few needed '
        'sample_weighted drawable ask_shards order_draws facts totals'
    ).split()
}  # for writers of stages and memories


class Lessons:
    "The notebooks of a folder, by page."

    def __init__(self, folder):
        self.folder = Path(folder)
        self.cells = {
            p.relative_to(folder).with_suffix('').as_posix(): json.loads(
                p.read_text(encoding='utf-8')
            )['cells']
            for p in sorted(self.folder.rglob('*.ipynb'))
        }

    def head(self, page):
        "Title and lead of a page"
        lines = ''.join(self.cells[page][0]['source']).splitlines()
        return lines[0].removeprefix('# '), lines[2].removeprefix('> ')

    @cached_property
    def page_of(self):
        "Module → the page that exports it"
        found = (
            (page, re.search(r'^#\| *default_exp +(\S+)', ''.join(c['source'])))
            for page, cells in self.cells.items()
            for c in cells
        )
        return {m[1]: page for page, m in found if m}

    def example(self, cls, pages):
        "The first short cell on these pages that uses a class and shows something, no refusals if there is another one: its code and its text."
        used = rf'\b{cls.__name__}\(' + (
            rf'|\.{cls.stage_name}\(' if hasattr(cls, 'stage_name') else ''
        )
        found = []
        for page in pages:
            for c in self.cells[page]:
                source = ''.join(c['source'])
                if (
                    c['cell_type'] != 'code'
                    or source.startswith('#|')
                    or not re.search(used, source)
                    or source.count('\n') >= LONGEST
                ):
                    continue
                found.append(
                    (
                        ('expect_fail' in source) + ('plt.' in source),
                        not c['outputs'],
                        page,
                        source,
                        shown(c['outputs']),
                    )
                )
        return min(found, key=lambda f: f[:2], default=None)


def shown(outputs):
    texts = [
        ''.join(o.get('text') or o.get('data', {}).get('text/plain', ''))
        for o in outputs
        if 'image/png' not in o.get('data', {})
    ]
    return '\n'.join(t.rstrip() for t in texts if t.strip())


def package_of(obj):
    return (getattr(obj, '__module__', None) or '').partition('.')[0]


def members(cls):
    "Public methods and properties of a class and of its bases in the package: name → (the base that has it, function)."
    found = {}
    for base in cls.__mro__:
        if package_of(base) != package_of(cls):
            continue
        if base.__name__ not in MIXINS:
            owner = base
        for name, value in vars(base).items():
            fn = getattr(value, 'fget', None) or getattr(value, '__func__', value)
            if (
                not name.startswith('_')
                and inspect.isfunction(inspect.unwrap(fn) if callable(fn) else None)
                and not hasattr(fn, 'stage')
            ):
                found.setdefault(name, (owner, inspect.unwrap(fn)))
    return found


def raised(fn, cls, deep=3, seen=()):
    "Names of the errors that a function raises, itself or by functions and methods of the package that it calls."
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError):
        return set()
    found = set()
    for node in ast.walk(tree):
        name = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found |= {ast.unparse(node.exc.func)}
        elif isinstance(name, ast.Name):
            called = fn.__globals__.get(name.id)
        elif isinstance(name, ast.Attribute) and ast.unparse(name.value) == 'self':
            called = inspect.getattr_static(cls, name.attr, None)
        else:
            continue
        if isinstance(node, ast.Raise):
            continue
        called = inspect.unwrap(called) if inspect.isfunction(called) else None
        if deep and called and package_of(called) == package_of(cls) and called not in seen:
            found |= raised(called, cls, deep - 1, (*seen, called))
    return {n for n in found if ERRORS.search(n)}


def first_line(obj):
    return (inspect.getdoc(obj) or '').partition('\n')[0].replace('|', '\\|')


def signature(cls):
    "The arguments of a class, which autodoc doesn't see behind torch's metaclass; '' where it has no __init__ in Python."
    init = inspect.unwrap(cls.__init__)
    if not inspect.isfunction(init):
        return ''

    def plain(p):
        return p.replace(
            annotation=p.empty,
            default=p.default
            if p.default is p.empty or isinstance(p.default, (int, float, str, tuple, type(None)))
            else ...,
        )

    return str(
        inspect.Signature([plain(p) for p in list(inspect.signature(init).parameters.values())[1:]])
    ).replace('Ellipsis', '...')


def class_page(cls, lessons, public):
    "The page of a class of the public ones, as markdown."
    module = cls.__module__.partition('.')[2]
    lesson = lessons.page_of[module]
    known = {
        n: (base, fn)
        for n, (base, fn) in members(cls).items()
        if n not in HOOKS and (base in public or base.__name__ in BASES)
    }
    own = {n: fn for n, (base, fn) in members(cls).items() if base is cls}
    lines = [
        f'# {cls.__name__}',
        '',
        f'`from {package_of(cls)}.all import {cls.__name__}`'
        + (f', or in a chain `.{cls.stage_name}(…)`' if hasattr(cls, 'stage_name') else '')
        + f'. Explained in [{lessons.head(lesson)[0]}](../{lesson}.ipynb).',
        '',
        '```{eval-rst}',
        f'.. autoclass:: {cls.__module__}.{cls.__name__}',
        *([f'   :members: {", ".join(own)}'] if own else []),
        '   :no-index:',
        '```',
        '',
    ]
    inherited = {
        n: (base, fn) for n, (base, fn) in known.items() if base is not cls and first_line(fn)
    }
    if inherited:
        lines += [
            '## Inherited',
            '',
            '| name | what it does, or is |',
            '|---|---|',
            *[
                f'| `{base.__name__}.{n}` | {first_line(fn)} |'
                for n, (base, fn) in inherited.items()
            ],
            '',
        ]
    errors = {}
    for name, (_, fn) in {'made': (cls, inspect.unwrap(cls.__init__)), **known}.items():
        for error in raised(fn, cls) if inspect.isfunction(fn) else ():
            errors.setdefault(error, []).append(name)
    if errors:
        lines += [
            '## Errors',
            '',
            '| raised | by |',
            '|---|---|',
            *[
                f'| `{e}` | {", ".join("making it" if n == "made" else f"`{n}`" for n in who)} |'
                for e, who in sorted(errors.items())
            ],
            '',
        ]
    others = [p for p in lessons.cells if p != lesson]
    if example := lessons.example(cls, [lesson]) or lessons.example(cls, others):
        *_, page, source, text = example
        lines += [
            '## Example',
            '',
            f'From [{lessons.head(page)[0]}](../{page}.ipynb), which has what it needs:',
            '',
            f'```python\n{source}\n```',
            *(['', f'```\n{text}\n```'] if text else []),
            '',
        ]
    return '\n'.join(lines)


def moved(text, page):
    "A text of a page with its links as they are from a folder beside the page's."
    return re.sub(r'\]\((?=[\w.])(?!http)', f'](../{Path(page).parent.as_posix()}/', text)


def listing(title, lead, pages, lines):
    return '\n'.join(
        [
            f'# {title}',
            '',
            f'> {lead}',
            '',
            *lines,
            '',
            '```{toctree}',
            ':hidden:',
            '',
            *pages,
            '```',
            '',
        ]
    )


def write_pages(folder, classes, internals, order, elsewhere=()):
    "Write the pages of classes and of groups of lessons into a folder of notebooks; `order` sorts pages for reading, `elsewhere` are in other parts of the sidebar."
    lessons, folder = Lessons(folder), Path(folder)
    for name in 'reference', 'internals':
        (folder / name).mkdir()
    for cls in classes:
        (folder / f'reference/{cls.__name__}.md').write_text(
            class_page(cls, lessons, classes), encoding='utf-8'
        )
    rows = [f'| [{c.__name__}]({c.__name__}.md) | {first_line(c)} |' for c in classes]
    (folder / 'reference/classes.md').write_text(
        listing(
            'Classes',
            'Every public class: signature, arguments, errors, an example.',
            [c.__name__ for c in classes],
            ['| class | what it is |', '|---|---|', *rows],
        ),
        encoding='utf-8',
    )
    pages = order(folder, sorted(lessons.cells))
    for title, patterns in internals.items():
        here = [p for w in patterns.split() for p in fnmatch.filter(pages, w)]
        lines = [
            f'- [{lessons.head(p)[0]}](../{p}.ipynb): {moved(lessons.head(p)[1], p)}' for p in here
        ]
        name = re.sub(r'\W+', '_', title.lower())
        (folder / f'internals/{name}.md').write_text(
            listing(
                title,
                'Source lessons: each notebook exports one module; order of reading.',
                [f'/{p}' for p in here if p not in elsewhere],
                lines,
            ),
            encoding='utf-8',
        )
