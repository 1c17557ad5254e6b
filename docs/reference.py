"""What pages of the API show, and the page of all notebooks that the sidebar has not."""

import inspect
import json
import re
from graphlib import TopologicalSorter
from pathlib import Path

import fastrl_replay.all as everything
from fastrl_replay.pipe import HOOKS

BASES = 'Replay', 'Learner'  # not in `all`, but users call their methods


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


def members(cls):
    "Return the names of public methods and properties of a class and of its public bases."
    found = {}  # in order
    for base in cls.__mro__:
        if base.__name__ not in (*BASES, *everything.__all__):
            continue
        for name, value in vars(base).items():
            function = getattr(value, 'fget', getattr(value, '__func__', value))
            if name[0] != '_' and inspect.isfunction(function) and not hasattr(function, 'stage'):
                found[name] = True
    shown = found if cls.__name__ in ('Pipe', 'Sampler', 'Timeline') else found.keys() - HOOKS
    return [name for name in found if name in shown]


def write_sources(folder, shown):
    "Write the page of the notebooks in a folder that are not `shown` in the sidebar."
    lessons = Lessons(folder)
    parts = {}
    for page in lessons.in_order():
        if page not in shown:
            path = Path(page)
            title, lead = lessons.head(page)
            lead = re.sub(r'\]\((?=[\w.])(?!http)', f']({path.parent.as_posix()}/', lead)
            part = path.parent.name or 'fastrl_replay'
            parts[part] = [*parts.pop(part, []), f'- [{title}]({page}.ipynb): {lead}']
    text = (
        '# Source notebooks\n\n> Each notebook exports one module. Here they are in import order.\n'
    )
    for part, lines in parts.items():
        text += '\n'.join([f'\n## {part}\n', *lines, ''])
    (folder / 'sources.md').write_text(text, encoding='utf-8')
