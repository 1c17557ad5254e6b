"""Write README.md from nbs/index.ipynb, without Quarto: `python docs/readme.py [--check]`.

Prose stays as it is (links made relative to the top level), code goes into python fences,
its text output into plain fences. A cell that begins with `#| hide` is left out."""
import json, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTE = '<!-- Written by docs/readme.py from nbs/index.ipynb: edit that notebook. -->'

def fence(text, lang=''): return f'```{lang}\n{text.rstrip()}\n```'

def split_directives(source):
    "The names of the `#| ...` lines at the top of a cell, and the cell without them."
    lines = source.splitlines()
    n = next((i for i, l in enumerate(lines) if not re.match(r'#\s*\||\s*$', l)), len(lines))
    names = {re.split(r'[\s:]', l.split('|', 1)[1].strip())[0] for l in lines[:n] if '|' in l}
    return names, '\n'.join(lines[n:])

def relink(text):
    "Links in the notebook start from nbs/, links in the README from the top level."
    text = re.sub(r'\]\((?=[\w/-]+\.(ipynb|png|svg)\b)', '](nbs/', text)
    return text.replace('](../', '](')

def show_output(out):
    "One saved output as markdown, or None: warnings, progress bars and plots stay in the notebook."
    if out['output_type'] == 'stream':
        return fence(''.join(out['text'])) if out['name'] == 'stdout' else None
    data = out.get('data', {})
    if 'text/markdown' in data: return ''.join(data['text/markdown'])
    if 'text/plain' in data and 'image/png' not in data: return fence(''.join(data['text/plain']))

def show_cell(cell):
    "The pieces of markdown that one cell becomes."
    names, source = split_directives(''.join(cell['source']))
    if 'hide' in names or not source.strip(): return []
    if cell['cell_type'] == 'markdown': return [relink(source)]
    if cell['cell_type'] == 'code':
        return [fence(source, 'python'), *filter(None, map(show_output, cell['outputs']))]
    return []

def readme():
    cells = json.loads((ROOT/'nbs/index.ipynb').read_text(encoding='utf-8'))['cells']
    return '\n\n'.join([NOTE] + [part.strip('\n') for c in cells for part in show_cell(c)]) + '\n'

def main():
    path, text = ROOT/'README.md', readme()
    if '--check' not in sys.argv[1:]: path.write_text(text, encoding='utf-8')
    elif not path.exists() or path.read_text(encoding='utf-8') != text:
        sys.exit('README.md is not what nbs/index.ipynb gives. Remedy: edit nbs/index.ipynb, not '
                 'README.md, then run\n    python docs/readme.py')

if __name__ == '__main__': main()
