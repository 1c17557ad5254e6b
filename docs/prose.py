"""List sentences that an editor would change: `python docs/prose.py [PAGE …]`, all by default.

A page is named as on the site: `tutorials/frames`. The list is a help, and some of it is right as
it is."""

import json
import re
import sys
from pathlib import Path

NBS = Path(__file__).resolve().parent.parent / 'nbs'
SENTENCE = {  # patterns, and what to do
    r'^(Where|Of|By|What)\b': 'begin with the subject',
    r'\b(is|are|was) refused\b': 'name what raises which error',
    r'\banother (one|than)\b|\b(is|are) (that|those) of\b': 'repeat the noun',
    r'\b(goe?s? on|anew|for ever|so many)\b': 'continue, again, indefinitely, as many',
    r'[:;] .*[:;] ': 'one colon or semicolon',
    r'(\S+ ){30}': 'at most 30 words',
}
HEADING = {r'^(What|Where|How)\b': 'name the task or the object'}
DOCSTRING = {
    r'\?$': 'state it',
    r'^(An?|The|Is|Are|Has|Does|May|Can|If|Wh\w+|How|Of|By|In|As|For|With|From|To|All|Each|One|No'
    r'|This|That|Its)\b': 'begin with a verb',
}


def sentences(text):
    "Yield the sentences of a text in markdown, and the patterns that count."
    text = re.sub(r'(?ms)```.*?```|<!--.*?-->|^\|[^\n]*$', '', text)
    for part in re.split(r'\n\s*\n|\n(?=\s*[-#>] )', text):
        patterns = HEADING if part.startswith('#') else SENTENCE
        part = re.sub(r'^[-#>*\s]+', '', ' '.join(part.split())).replace('**', '')
        for sentence in re.split(r'(?<=[.!?]) (?=[A-Z`\[])', part):
            yield sentence, patterns


def docstrings(source):
    "Yield the first lines of docstrings, and the patterns that count."
    for doc in re.findall(r'^ +"+([^"\n]+)', source, re.M):
        yield doc, DOCSTRING


def texts(page):
    "Yield each cell's number, and its sentences."
    path = NBS / f'{page}.md'
    if path.exists():
        yield 0, sentences(path.read_text(encoding='utf-8'))
        return
    cells = json.loads((NBS / f'{page}.ipynb').read_text(encoding='utf-8'))['cells']
    for number, cell in enumerate(cells):
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown':
            yield number, sentences(source)
        elif source.startswith('#| export'):
            yield number, docstrings(source)


def main():
    paths = sorted(p for p in NBS.rglob('*.*') if p.suffix in ('.ipynb', '.md'))
    for page in sys.argv[1:] or [p.relative_to(NBS).with_suffix('').as_posix() for p in paths]:
        for number, found in texts(page):
            for sentence, patterns in found:
                for pattern, advice in patterns.items():
                    if re.search(pattern, sentence):
                        print(f'{page} [{number}] {advice}: {sentence}')


if __name__ == '__main__':
    main()
