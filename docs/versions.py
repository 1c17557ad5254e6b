"""Write two tables into nbs/install.md: `python docs/versions.py [--check]`.

What was run comes from benchmarks/results/pythons.json, which `.ci/pythons` writes; the extras come
from pyproject.toml."""

import json, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / 'nbs/install.md'
BEGIN, END = '<!-- docs/versions.py: {} -->\n', '<!-- docs/versions.py: end -->\n'
WHICH = dict(fast='the fast tests', some='the tests of `.ci/lowest`')


def line(name, r):
    "One row of the table of what was run"
    packages = 'passed' if r.get('wheel') == r.get('sdist') == 'passed' else '–'
    tests = 'not run'
    if 'tests' in r:
        t = r['tests']
        tests = (
            f"{WHICH[r['what']]}: {t['passed']:,} passed, "
            f"{t['failed']} failed, {t['skipped']} skipped"
        )
    what = f"{r['python']}, the lowest versions" if name == 'lowest' else r['python']
    return (
        f"| {what} | {r['torch']}, {r['numpy']}, {r['numba']}, {r['gymnasium']} "
        f"| {packages} | {tests} | {r['date']}, `{r['commit']}` |"
    )


def versions():
    "The table of what was run"
    found = json.loads((ROOT / 'benchmarks/results/pythons.json').read_text(encoding='utf-8'))
    order = sorted(
        found, key=lambda name: (name != 'lowest', [int(n) for n in re.findall(r'\d+', name)])
    )
    return [
        '| Python | torch, numpy, numba, gymnasium | wheel and sdist | tests | when, commit |',
        '|---|---|---|---|---|',
        *(line(name, found[name]) for name in order),
    ]


def extras():
    "The table of extras: what the comment behind each says, and its packages"
    section = (
        (ROOT / 'pyproject.toml')
        .read_text(encoding='utf-8')
        .partition('[project.optional-dependencies]\n')[2]
        .partition('\n[')[0]
    )
    found = re.findall(r'^(\w+) = \[(.+)\]  # (.+)$', section, re.M)
    return [
        '| extra | what it adds | packages |',
        '|---|---|---|',
        *(
            f"| `{name}` | {text} "
            f"| {', '.join(re.findall(r'[a-zA-Z][^<>=]*', needs.replace(chr(34), '')))} |"
            for name, needs, text in found
        ),
    ]


def with_table(text, name, table):
    "Return the text of the page with this table between its two comments"
    begin = BEGIN.format(name)
    before, rest = text.split(begin)
    return '\n'.join([f'{before}{begin}', *table, f'\n{END}']) + rest.split(END, 1)[1]


def main():
    found = PAGE.read_text(encoding='utf-8')
    wanted = with_table(found, 'extras', extras())
    wanted = with_table(wanted, 'versions', versions())
    if wanted == found:
        return
    if '--check' in sys.argv[1:]:
        sys.exit(
            'nbs/install.md: its tables are not what their sources give. '
            'Remedy: run\n    python docs/versions.py'
        )
    PAGE.write_text(wanted, encoding='utf-8', newline='\n')


if __name__ == '__main__':
    main()
