"""Write two tables into nbs/install.md: `python docs/versions.py [--check]`.

What was run comes from benchmarks/results/stacks.json, which `.ci/stacks` writes; the extras come
from pyproject.toml."""

import json, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / 'nbs/install.md'
BEGIN, END = '<!-- docs/versions.py: {} -->\n', '<!-- docs/versions.py: end -->\n'


def versions():
    "The table of what was run"
    found = json.loads((ROOT / 'benchmarks/results/stacks.json').read_text(encoding='utf-8'))
    lines = [
        '| stack | what it requires | Python | torch, numpy, numba, gymnasium | tests | commit |',
        '|---|---|---|---|---|---|',
    ]
    for name, r in found.items():
        t = r['tests']
        pins = ', '.join(f'`{pin}`' for pin in r['pins'].split() if pin != '[dev]')
        lines.append(
            f"| {name} | {pins} | {r['python']} | {r['torch'].partition('+')[0]}, {r['numpy']}, "
            f"{r['numba']}, {r['gymnasium']} | {r['what']}: {t['passed']:,} passed, "
            f"{t['failed']} failed, {t['skipped']} skipped | {r['date']}, `{r['commit']}` |"
        )
    return lines


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
