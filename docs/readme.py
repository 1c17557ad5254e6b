"""Write README.md from nbs/index.ipynb, without Quarto: `python docs/readme.py [--check]`.

Prose stays as it is (links made relative to the top level), code goes into python fences, its text
output into plain fences, its pictures into docs/images. `#| hide` leaves a cell out, `#| hide_code`
only its code; `#| alt: …` says what a picture shows."""

import base64, json, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTE = '<!-- Written by docs/readme.py from nbs/index.ipynb: edit that notebook. -->'


def fence(text, lang=''):
    return f'```{lang}\n{text.rstrip()}\n```'


def split_directives(source):
    "The `#| name: value` lines at the top of a cell as a dict, and the cell without them."
    lines = source.splitlines()
    n = next((i for i, l in enumerate(lines) if not re.match(r'#\s*\||\s*$', l)), len(lines))
    found = [re.match(r'#\s*\|\s*([^\s:]+):?\s*(.*)', l) for l in lines[:n] if '|' in l]
    return {m[1]: m[2] for m in found if m}, '\n'.join(lines[n:])


def relink(text):
    "Links in the notebook start from nbs/, links in the README from the top level."
    text = re.sub(r'\]\((?=[\w/-]+\.(ipynb|md|png|svg)\b)', '](nbs/', text)
    return text.replace('](../', '](')


def show_output(out, path, alt):
    "One saved output as markdown, or None: warnings and progress bars stay in the notebook."
    if out['output_type'] == 'stream':
        return fence(''.join(out['text'])) if out['name'] == 'stdout' else None
    data = out.get('data', {})
    if 'image/png' in data:
        return f'![{alt}]({path})'
    if 'text/markdown' in data:
        return ''.join(data['text/markdown'])
    if 'text/plain' in data:
        return fence(''.join(data['text/plain']))


def show_cell(cell, pictures):
    "Return one cell's pieces of markdown; add its picture to `pictures`: path → bytes."
    names, source = split_directives(''.join(cell['source']))
    if 'hide' in names or not source.strip():
        return []
    if cell['cell_type'] == 'markdown':
        return [relink(source)]
    if cell['cell_type'] != 'code':
        return []
    path = f'docs/images/{cell["id"]}.png'
    pictures.update(
        {
            path: base64.b64decode(o['data']['image/png'])
            for o in cell['outputs']
            if 'image/png' in o.get('data', {})
        }
    )
    shown = [show_output(o, path, names.get('alt', '')) for o in cell['outputs']]
    return [*([] if 'hide_code' in names else [fence(source, 'python')]), *filter(None, shown)]


def readme():
    "Path → bytes of all that is written."
    cells = json.loads((ROOT / 'nbs/index.ipynb').read_text(encoding='utf-8'))['cells']
    pictures = {}
    parts = [NOTE] + [part.strip('\n') for c in cells for part in show_cell(c, pictures)]
    return {'README.md': ('\n\n'.join(parts) + '\n').encode(), **pictures}


def main():
    found = {
        p.relative_to(ROOT).as_posix(): p.read_bytes()
        for p in [ROOT / 'README.md', *ROOT.glob('docs/images/*')]
        if p.exists()
    }
    wanted = readme()
    if found == wanted:
        return
    if '--check' in sys.argv[1:]:
        wrong = [p for p in sorted({*found, *wanted}) if found.get(p) != wanted.get(p)]
        sys.exit(
            f'{", ".join(wrong)}: not what nbs/index.ipynb gives. '
            'Remedy: edit nbs/index.ipynb, not README.md, then run\n    python docs/readme.py'
        )
    (ROOT / 'docs/images').mkdir(exist_ok=True)
    for p in set(found) - set(wanted):
        (ROOT / p).unlink()
    for p, content in wanted.items():
        (ROOT / p).write_bytes(content)


if __name__ == '__main__':
    main()
