"""Figures on the pages: each comes from what was measured, by name, and no other one is typed."""

import ast
import re
import sys

import pytest
from test_house import BIN, NOTEBOOKS, ROOT, cells, page_of, run

sys.path.insert(0, str(ROOT / 'docs'))
import figures

WORDS = (
    'half|third|quarter|fifth|tenth|two|three|four|five|six|seven|eight|nine|ten'
    '|eleven|twelve|fifteen|sixteen|twenty|thirty|forty|fifty|a hundred'
)
TYPED = re.compile(
    rf'''
    # a number, and what is measured in it:
    (?<![\w,.×])(?:[\d,.]*\d|\b(?:{WORDS}))(?:[\s-]+|(?=[µ%]))
    (?:(?:µs|ms|ns|[kmgt]i?b|%|bytes[ ]an?[ ]\w+|(?:milli|micro|nano)?seconds?|minutes?|hours?)
    (?!\w)|fold\b|×\s(?!\d)
    |times[ ](?:as[ ](?:fast|long|slow|much|many|large|small)
    |longer|faster|slower|smaller|larger|more|fewer|less)\b|(?:steps|rows)[ ]a[ ]second\b)
    |\b(?:twice|half)[ ]as[ ](?:fast|long|slow)\b
    |\b(?:half|a[ ](?:third|quarter|fifth|tenth|fiftieth))[ ]of[ ](?:the|its)[ ]time\b
    |\bhalf[ ]an?[ ](?:second|minute|hour)\b
    |\b(?:solved|solves[ ]it|learned)[ ](?:at|after)[ ](?:step[ ])?\d[\d,]+''',
    re.X,
)  # in lower-case texts, which is quicker than re.I

CONSTANTS = [  # what a page may type, by the kind of number it is
    # settings: how long, how much, how often, as the code says
    r'every two seconds',
    r'has five seconds|at most five seconds',
    r'is killed after five seconds',
    r'at most 128 MB',
    r'16 KB of what many',
    r'reads? 64 MB|64 MB (?:were|are) read',
    r'waits? (five|two) milliseconds',
    r'holds the GIL for 5 ms',
    r'longer than five seconds',
    # sizes that follow from shapes and dtypes, and the system's defaults
    r'a million fill 56 GB|are 56 GB|takes? 56 GB|rows of 56 KB|takes 29 MB'
    r'|is 14 MB|copies 14 MB|that is 80 MB',
    r'8 MB ahead|; 128 KB is usual|reads ahead, 128 KB',
    r'24 bytes a row|twelve bytes a row|four bytes a number',
    r'52\.5 %',
    # targets, assumptions and examples worked out on paper
    r'1,000 steps a second|needs 20 ms|500 steps a second|in 10 ms|differ: 5 ms'
    r'|20 ms for an update',
    r'a learner of 20 ms|12\.5 MB of gradients|take 10 ms to go'
    r'|an update takes 30 ms|an hour for six minutes',
    r'waits? 5 ms|: 5 ms a step|20 ms an update|7 MB of gradients|1,000 hours|reach 85 %',
    r'drawn three times as often',
    r'frames is four times as large',
    r'at position 2 % 3',
    r'unbiased to within 1 %',  # asserted there
    r'16 GB of RAM|Atari with 16 GB|12 GB of 16|80 % of the machine',
]


def typed(text):
    """Return a text's figures that have no name and are no constant, with the words around them.

    Code does not count."""
    text = re.sub(r'```.*?```', '', figures.MARK.sub('§', text), flags=re.S)
    text = re.sub(r'`[^`\n]*`|\$[^$\n]*\$|\]\([^)]*\)|^ {4}.*$', '§', text, flags=re.M)
    text = ' '.join(text.split()).lower()
    found = [*TYPED.finditer(text)]
    known = [m.span() for c in CONSTANTS if found for m in re.finditer(c.lower(), text)]
    return [
        text[max(0, m.start() - 40) : m.end() + 25]
        for m in found
        if not any(a < m.end() and m.start() < b for a, b in known)
    ]


def written():
    "Yield where a text for readers is, and the text"
    for nb in NOTEBOOKS:
        for c in cells(nb, 'markdown'):
            yield f'{page_of(nb)} {c["id"]}', ''.join(c['source'])
    for path in [*ROOT.glob('nbs/*.md'), ROOT / 'CONTRIBUTING.md']:
        yield path.name, path.read_text(encoding='utf-8')
    for path in sorted((ROOT / 'fastrl_replay').rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield f'{path.name} {getattr(node, "name", "")}', ast.get_docstring(node) or ''


def test_no_figure_is_typed():
    for text in 'a draw takes 12.5 µs', 'half of the time', 'is twice as fast', 'takes .4 GB':
        assert typed(text) and not typed(f'`{text}`')
    found = [f'{place}: …{words}…' for place, text in written() for words in typed(text)]
    remedy = 'Remedy: a name in FIGURES of docs/figures.py; or a constant, in CONSTANTS here'
    assert not found, '\n'.join([*found, remedy])


def tables(nb):
    "Return the tables that cells give; a displayed one has what the notebook itself measured"
    return {
        c['id']: ''.join(o['data']['text/markdown'])
        for c in cells(nb)
        for o in c['outputs']
        if o['output_type'] == 'execute_result' and 'text/markdown' in o['data']
    }


MEASURED = [nb for nb in NOTEBOOKS if 'benchmarks/results' in nb.read_text() and tables(nb)]


@pytest.mark.slow
@pytest.mark.parametrize('nb', MEASURED, ids=page_of)
def test_saved_tables_are_those_of_the_files(nb, tmp_path):
    "What a page computed from the files, when its outputs were saved, is what it computes now"
    copy = tmp_path / nb.name
    copy.write_bytes(nb.read_bytes())
    (tmp_path / 'benchmarks').symlink_to(ROOT / 'benchmarks')
    run(BIN / 'nbdev-test', '--save', copy)
    assert tables(copy) == tables(nb), f'Remedy: nbdev-test --save nbs/{page_of(nb)}.ipynb'
