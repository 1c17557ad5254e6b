"""Write the table of what was run into nbs/versions.md, from fastrl_replay/measured/pythons.json, which `.ci/pythons` writes:
`python docs/versions.py [--check]`."""
import json, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, RUN = ROOT/'nbs/versions.md', ROOT/'fastrl_replay/measured/pythons.json'
BEGIN, END = '<!-- docs/versions.py: begin -->\n', '<!-- docs/versions.py: end -->\n'
WHICH = dict(fast='the fast tests', some='the tests of `.ci/lowest`')

def line(name, r):
    "One row of the table"
    packages = 'passed' if r.get('wheel') == r.get('sdist') == 'passed' else '–'
    tests = 'not run'
    if 'tests' in r:
        t = r['tests']
        tests = f"{WHICH[r['what']]}: {t['passed']:,} passed, {t['failed']} failed, {t['skipped']} skipped"
    what = f"{r['python']}, the lowest versions" if name == 'lowest' else r['python']
    return f"| {what} | {r['torch']}, {r['numpy']}, {r['numba']}, {r['gymnasium']} | {packages} | {tests} | {r['date']}, `{r['commit']}` |"

def page():
    "The page with its table"
    found = json.loads(RUN.read_text(encoding='utf-8'))
    order = sorted(found, key=lambda name: (name != 'lowest', [int(n) for n in re.findall(r'\d+', name)]))
    head = ['| Python | torch, numpy, numba, gymnasium | wheel and sdist | tests | when, commit |', '|---|---|---|---|---|']
    table = '\n'.join([*head, *(line(name, found[name]) for name in order)]) + '\n'
    before, rest = PAGE.read_text(encoding='utf-8').split(BEGIN)
    return f'{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}'

def main():
    wanted = page()
    if wanted == PAGE.read_text(encoding='utf-8'): return
    if '--check' in sys.argv[1:]: sys.exit('nbs/versions.md: its table is not what measured/pythons.json gives. Remedy: run\n    python docs/versions.py')
    PAGE.write_text(wanted, encoding='utf-8', newline='\n')

if __name__ == '__main__': main()
