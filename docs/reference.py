"""Pages besides notebooks: one for each public class, one for each group of source lessons.

make.py writes them into the copy of nbs/ that it builds the site from."""

import fnmatch
import inspect
import json
import re
from graphlib import TopologicalSorter
from pathlib import Path

BASES = 'Replay', 'Learner'  # not in `all`, but users call their methods
HOOKS = set(  # for writers of stages and memories
    'snapshot restore check_state check_remote checked_states blocks data_ended in_worker has_envs '
    'drawn_from journals rewind due_batches too_few needed '
    'sample_weighted drawable ask_shards order_draws facts totals'.split()
)


class Lessons:
    "The notebooks of a folder, by page."

    def __init__(self, folder):
        self.cells = {}
        self.page_of = {}  # module → the page that exports it
        for path in sorted(Path(folder).rglob('*.ipynb')):
            page = path.relative_to(folder).with_suffix('').as_posix()
            cells = json.loads(path.read_text(encoding='utf-8'))['cells']
            self.cells[page] = [''.join(c['source']) for c in cells]
            module = re.search(r'^#\| *default_exp +(\S+)', '\n'.join(self.cells[page]), re.M)
            if module:
                self.page_of[module[1]] = page

    def head(self, page):
        "Return the title and the lead of a page."
        lines = self.cells[page][0].splitlines()
        return lines[0].removeprefix('# '), lines[2].removeprefix('> ')

    def in_order(self):
        "Return the pages, each after the pages of the modules that it imports."
        needs = {page: set() for page in self.cells}
        for page in self.page_of.values():
            exported = [c for c in self.cells[page] if re.search(r'^#\| *export', c, re.M)]
            imported = re.findall(r'^ *from fastrl_replay\.([\w.]+) ', '\n'.join(exported), re.M)
            needs[page] = {self.page_of[m] for m in imported if m in self.page_of}
        return [*TopologicalSorter(needs).static_order()]


def members(cls, public):
    "Return the names of public methods and properties of a class and of its public bases."
    found = {}
    for base in cls.__mro__:
        if base not in public and base.__name__ not in BASES:
            continue
        for name, value in vars(base).items():
            function = getattr(value, 'fget', getattr(value, '__func__', value))
            if name[0] != '_' and inspect.isfunction(function) and not hasattr(function, 'stage'):
                found[name] = base
    return [name for name, base in found.items() if base is cls or name not in HOOKS]


def class_page(cls, lessons, public):
    "Return the page of a public class, as markdown."
    package, _, module = cls.__module__.partition('.')
    lesson = lessons.page_of[module]
    head = lessons.head(lesson)[0]
    chained = f', or in a chain `.{cls.stage_name}(…)`' if hasattr(cls, 'stage_name') else ''
    return f'''# {cls.__name__}

`from {package}.all import {cls.__name__}`{chained}. Explained in [{head}](../{lesson}.ipynb).

```{{eval-rst}}
.. autoclass:: {cls.__module__}.{cls.__name__}
   :members: {", ".join(members(cls, public)) or "__init__"}
   :no-index:
```
'''


def listing(title, lead, lines, pages):
    return '\n'.join(
        [f'# {title}', '', f'> {lead}', '', *lines, '', '```{toctree}', ':hidden:', '', *pages]
        + ['```', '']
    )


def write_pages(folder, classes, internals, elsewhere):
    "Write pages of classes and of groups of lessons into a folder; `elsewhere`: in other parts"
    lessons = Lessons(folder)
    for name in 'reference', 'internals':
        (folder / name).mkdir()
    rows = ['| class | what it is |', '|---|---|']
    for cls in classes:
        text = class_page(cls, lessons, classes)
        (folder / f'reference/{cls.__name__}.md').write_text(text, encoding='utf-8')
        doc = inspect.getdoc(cls).partition('\n')[0]
        rows.append(f'| [{cls.__name__}]({cls.__name__}.md) | {doc} |')
    lead = 'Every public class: signature, arguments and methods.'
    text = listing('Classes', lead, rows, [cls.__name__ for cls in classes])
    (folder / 'reference/classes.md').write_text(text, encoding='utf-8')
    order = lessons.in_order()
    for title, patterns in internals.items():
        pages = [page for pattern in patterns.split() for page in fnmatch.filter(order, pattern)]
        lines = []
        for page in pages:
            name, lead = lessons.head(page)
            lead = re.sub(r'\]\((?=[\w.])(?!http)', f'](../{Path(page).parent.as_posix()}/', lead)
            lines.append(f'- [{name}](../{page}.ipynb): {lead}')
        lead = 'Source lessons: each notebook exports one module; order of reading.'
        text = listing(title, lead, lines, [f'/{p}' for p in pages if p not in elsewhere])
        name = re.sub(r'\W+', '_', title.lower())
        (folder / f'internals/{name}.md').write_text(text, encoding='utf-8')
