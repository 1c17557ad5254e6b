"""A Sphinx extension for where lines break: text in columns scrolls instead of wrapping; short code, numbers with their units
and formulas with the punctuation after them stay whole."""

import re
from docutils import nodes

LONGEST = 24  # characters of code that a line of a phone has room for, in a table, too
UNIT = r'(?:/ )?(?:s|ms|µs|ns|min|h|B|kB|KB|MB|GB|TB|KiB|MiB|GiB|px|GHz|×|%)(?!\w)'
DRAWN = re.compile(
    r'[─│┌┐└┘├┤╭╮╰╯━┃█▁-▇]|^\s*\|.*\||^\s*[|+\\/^v]?\s*[-=]{3,}|[-=]{3,}>|^ +\.\w+\('
)


def in_columns(text):
    "Do lines belong together, as columns, a drawing or a chain of stages, so that they can't be read where one wraps?"
    lines = [l.rstrip() for l in text.splitlines() if l.strip()]
    if sum(bool(DRAWN.search(l)) for l in lines) > 1:
        return True

    def places(line):  # where words begin and end that have a gap before them
        for m in re.finditer(r'(?:(?<=\S) {2,}|^ {8,})(\S+)', line):
            yield from (('begins', m.start(1)), ('ends', m.end(1)))

    found = [p for l in lines for p in {*places(l)}]
    return len(found) > len({*found})


def keep_columns(doctree):
    for block in doctree.findall(nodes.literal_block):
        if block.get('language') not in ('python', 'sh', 'mermaid') and in_columns(block.astext()):
            block['classes'].append('columns')


def keep_code(doctree):
    for code in doctree.findall(nodes.literal):
        if max(map(len, code.astext().split()), default=0) <= LONGEST:
            code['classes'].append('whole')


def keep_units(doctree):
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) > 40:
            cell['classes'].append('long')  # wide enough for words
        for text in [
            t for t in cell.findall(nodes.Text) if not isinstance(t.parent, nodes.literal)
        ]:
            text.parent.replace(text, nodes.Text(with_units(text)))


def with_units(text):
    return re.sub(
        rf'(?<=\d) {UNIT}|[≤≥] (?=\d)', lambda m: m[0].replace(' ', '\N{NO-BREAK SPACE}'), text
    )


def keep_punctuation(doctree):
    for formula in list(doctree.findall(nodes.math)):
        line, i = formula.parent, formula.parent.index(formula)
        follows = (
            re.match(r'[^\s\w]+', line[i + 1])
            if len(line) > i + 1 and isinstance(line[i + 1], nodes.Text)
            else None
        )
        if not follows:
            continue
        line[i + 1 : i + 2] = [nodes.Text(line[i + 1][follows.end() :])]
        line[i : i + 1] = [
            nodes.inline('', '', formula.deepcopy(), nodes.Text(follows[0]), classes=['together'])
        ]


def typeset(app, doctree, docname):
    "Sphinx's `doctree-resolved`"
    for keep in keep_columns, keep_code, keep_units, keep_punctuation:
        keep(doctree)


def setup(app):
    app.connect('doctree-resolved', typeset)
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
