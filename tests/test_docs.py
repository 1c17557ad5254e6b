"""Texts for readers: words, outputs, examples that run, and scripts that make README and site."""

import io
import json
import re
import sys

import pytest
from test_house import NOTEBOOKS, ROOT, SURFACE, cells, page_of

sys.path.insert(0, str(ROOT / 'docs'))
import literate
import make
import readme
from conf import sidebar

# ---- words ----


def texts():
    "Yield a text's place and the text: cells without outputs, and what is beside the notebooks."
    for nb in NOTEBOOKS:
        for c in json.loads(nb.read_text(encoding='utf-8'))['cells']:
            yield f'{nb.name} {c["id"]}', ''.join(c['source'])
    files = 'README.md CONTRIBUTING.md CHANGELOG.md CITATION.cff settings.ini'
    for path in [*(ROOT / name for name in files.split()), *ROOT.glob('nbs/*.md')]:
        yield path.name, path.read_text(encoding='utf-8')


LEFT_OVER = {  # in outputs: what they look like, and what it is
    r'/tmp/|site-packages|\btmp[a-z0-9_]{8}\b': 'a path of the machine',
    r'compiles its kernels': 'a line of the compiler',
    r'with 0 Axes': 'an empty figure',
    (
        r'(?m)^(?:<function |<bound method |functools\.partial\(|\'?<iframe)'
        r'|\A(?:True|False)\Z'
    ): 'what the last line of a cell returns',
    r'(?m)^\|(?:-+:?\|)+$': 'a table that is not drawn: display(Markdown(…))',
    r'\d\.\d{9}': 'a number with all its digits: round it where it is shown',
}


def test_outputs_have_no_leftovers():
    found = []
    for nb in NOTEBOOKS:
        for c in cells(nb):
            if 'hide' in readme.split_directives(''.join(c['source']))[0]:
                continue
            for o in c['outputs']:
                data = o.get('data', {})
                plain = data.get('text/plain', '') if {*data} == {'text/plain'} else ''
                text = ''.join(o.get('text') or plain)
                for looks, meaning in LEFT_OVER.items():
                    # a terminal shows tables as they were typed
                    typed = meaning.startswith('a table') and nb.stem == 'command_line'
                    m = re.search(looks, text)
                    if m and not typed:
                        found.append(f'{nb.stem} {c["id"]}: {meaning}: {m[0]}')
    assert not found, '\n'.join(found)


# ---- pages ----

INSTALL = """#| hide
# Taken alone, on Colab say, this notebook gets what it needs.
import importlib.util

if not importlib.util.find_spec('fastrl_replay'):
    %pip install -q 'fastrl_replay[plot]'"""


@pytest.mark.parametrize('nb', NOTEBOOKS, ids=page_of)
def test_notebook_begins_with_title_lead_and_install_cell(nb):
    first, second = json.loads(nb.read_text(encoding='utf-8'))['cells'][:2]
    assert first['cell_type'] == 'markdown'
    assert re.match(r'# [^\n]+\n\n> [^\n]+(\n\n|$)', ''.join(first['source']))
    assert second['cell_type'] == 'code' and ''.join(second['source']) == INSTALL


def test_every_public_name_is_in_one_api_cell():
    found = []
    for nb in NOTEBOOKS:
        for c in cells(nb):
            names, source = readme.split_directives(''.join(c['source']))
            if 'api' in names:
                found += re.findall(r'\w+', source)
    others = 'FastrlError NoRoom SettingsError'.split()
    assert sorted(found) == sorted([*others, *' '.join(SURFACE.values()).split()])


def test_readme_is_short_and_fits_a_phone():
    "The first example and CI's two commands have lines that 400 pixels do not cut"
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    assert len(text.splitlines()) <= 120
    example = re.search(r'```python\n(.*?)```', text, re.S)[1]
    commands = re.findall(r'```sh\n(.*?)```', text, re.S)
    assert len(commands) == 2 and 'train cartpole' in commands[0] and 'pytest' in commands[1]
    assert max(map(len, (example + ''.join(commands)).splitlines())) <= 46


def run_alone(source, name):
    try:
        exec(compile(source, name, 'exec'), {'__name__': '__main__'})
    except Exception as e:
        pytest.fail(f'{name}: {type(e).__name__}: {e}\n{source}')


@pytest.mark.slow
def test_blocks_of_the_how_to_run_alone():
    for c in cells(ROOT / 'nbs/howto.ipynb'):
        source = ''.join(c['source'])
        if not re.search(r'#\| *hide', source):
            run_alone(source, c['id'])


OPENINGS = {}  # the first block of Python on a page of the sidebar
for nb in NOTEBOOKS:
    opening = ''.join(cells(nb, 'markdown')[0]['source'])
    block = re.search(r'```python\n(.*?)```', opening, re.S)
    if block and page_of(nb) in sidebar:
        OPENINGS[page_of(nb)] = block[1]


@pytest.mark.slow
@pytest.mark.parametrize('page', OPENINGS)
def test_opening_example_runs_alone(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_alone(OPENINGS[page], page)


def hidden(cell):
    return {'hide', 'hide_code'} & {*readme.split_directives(''.join(cell['source']))[0]}


def hides(nb):
    return len([cell for cell in cells(nb) if hidden(cell)]) > 1


READ = [nb for nb in NOTEBOOKS if page_of(nb) in {*sidebar} - {'combinations'} and hides(nb)]


@pytest.mark.slow
@pytest.mark.parametrize('nb', READ, ids=page_of)
def test_what_a_reader_sees_runs_alone(forks, nb, tmp_path):
    "The cells that a page hides are not needed. (All hide the one that installs the library.)"
    parts = json.loads(nb.read_text(encoding='utf-8'))
    seen = [cell for cell in parts['cells'] if not hidden(cell)]
    (tmp_path / nb.name).write_text(json.dumps(parts | dict(cells=seen)))
    wrong = forks.run(tmp_path / nb.name)
    if wrong:
        pytest.fail(wrong, pytrace=False)


# ---- the scripts of docs/ ----


def shown(source):
    cell = dict(cell_type='code', id='a', metadata={}, source=source, outputs=[])
    return literate.cells_of(cell, 'p.m')


def test_cells_become_what_a_reader_wants():
    assert shown('#| hide\nx = 1') == shown('#| default_exp core') == []
    assert shown('#| export\nimport os') == []
    assert [c['source'] for c in shown('#| eval: false\nx = 1')] == ['x = 1']
    api, code = shown('#| export\nclass C:\n    def m(self): pass\n    def _p(self): pass')
    assert '.. autoclass:: p.m.C\n   :members: m\n' in api['source']
    assert code['metadata']['tags'] == ['hide-input']
    (picture,) = shown('#| frames\n#| alt: a pole\nshow()')
    assert picture['metadata']['mystnb'] == dict(image=dict(alt='a pole', classes='frames'))


def test_docstrings_have_backticks_and_no_other_marks():
    assert literate.rst('a `b_|` and --seed, x_*y') == r'a ``b_|`` and ``--seed``, x\_\*y'


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / 'mine').write_text('precious')
    with pytest.raises(SystemExit, match='not empty and not a site'):
        make.build(tmp_path)
    assert (tmp_path / 'mine').read_text() == 'precious'


def test_a_script_with_another_hash_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(make.urllib.request, 'urlopen', lambda url, timeout: io.BytesIO(b'else'))
    with pytest.raises(SystemExit, match='hash was noted'):
        make.mathjax()
    assert not list(tmp_path.rglob('*.js'))
