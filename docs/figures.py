"""Write the figures of the pages from what was measured: `python docs/figures.py [--check]`.

In a text, a figure is between two comments, which no renderer shows:
`<!--=bytes.ours-->76<!--=-->`. The first one names an entry of FIGURES below, a function of the
files in benchmarks/results/ or of a notebook's saved outputs. This script writes its result between
the comments; `--check` reports where the text differs."""

import functools, json, re, sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r'<!--=([\w.]+)-->([^<]*)<!--=-->')


@functools.cache
def measured(name):
    return json.loads((ROOT / f'benchmarks/results/{name}.json').read_text(encoding='utf-8'))


def number(x):
    return f'{x:,.0f}' if abs(x) >= 10 else f'{x:.2g}'


def span(values, form=number):
    "“3 to 5”, or “3” where both ends read the same"
    low, high = form(min(values)), form(max(values))
    return low if low == high else f'{low} to {high}'


def per_row(memory):
    return [
        found[memory]['nbytes'] / measured('frames')['rows']
        for found in measured('frames')['figures'].values()
    ]


def runs(file, *recipes):
    return [r for name in recipes for r in measured(file)['runs'][name]]


def mean_solved(arm):
    return sum(r['solved_at_step'] for r in runs('arms', arm)) / len(runs('arms', arm))


def goals(memory, bits, field='success'):
    return measured('hindsight')['bitflip'][field][memory][str(bits)]


def reach(field):
    return [r[field] for r in measured('hindsight')['fetchreach']]


def machine(*names):
    "Where and with what files were measured: processor and torch"
    found = [measured(name)['machine'] for name in names]
    found = [
        dict(fact.split(' ', 1) for fact in m.split(', ')) if isinstance(m, str) else m
        for m in found
    ]
    return '; '.join(
        dict.fromkeys(f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}" for m in found)
    )


def output(notebook, cell):
    "The last saved output, as text, of the cell whose code contains `cell`"
    for c in json.loads((ROOT / f'nbs/{notebook}.ipynb').read_text(encoding='utf-8'))['cells']:
        if c['cell_type'] == 'code' and cell in ''.join(c['source']):
            return ''.join(c['outputs'][-1]['data']['text/plain'])


OURS = 'fastrl_replay'
FIGURES = {
    # rows.json: bytes and nanoseconds
    'bytes.ours': lambda: f"{measured('rows')['bytes_a_row'][OURS]:.0f}",
    'stage.ns': lambda: (
        f"{median(measured('rows')['contests']['an item through one stage'][OURS]) * 1000:.0f}"
    ),
    # frames.json: bytes a row and microseconds, the least and the most of the games
    'frames.gb': lambda: span(
        per_row('Frames(4)'), lambda x: f'{x / 1000:.1f}'
    ),  # of a million rows
    'frames.zstd_most': lambda: f"{max(per_row(zstd)):.0f}",
    'frames.zstd_gb': lambda: span(per_row(zstd), lambda x: f'{x / 1000:.2f}'),
    # recipes.json, arms.json, cartpole-apex.json, hindsight.json: trainings
    'cartpole.seconds': lambda: span(
        [r['wall_s'] for r in runs('recipes', 'cartpole') + runs('arms', 'cartpole')]
    ),
    'pendulum.solved': lambda: span([r['solved_at_step'] for r in runs('recipes', 'pendulum-sac')]),
    'arms.plain': lambda: f"{round(mean_solved('cartpole'), -3):,.0f}",
    'arms.steps': lambda: f"{round(mean_solved('cartpole-3-steps'), -3):,.0f}",
    'arms.steps_decay': lambda: f"{round(mean_solved('cartpole-3-steps-decay'), -3):,.0f}",
    'arms.all': lambda: f"{round(mean_solved('cartpole-per'), -3):,.0f}",
    'apex.solved': lambda: f"{measured('cartpole-apex')['solved_at_step']:,}",
    'apex.seconds': lambda: number(measured('cartpole-apex')['wall_s']),
    'goals.25': lambda: f"{100 * min(goals('hindsight', 25)):.0f}",
    'goals.seeds': lambda: f"{len(goals('hindsight', 25))}",
    'reach.solved': lambda: span(reach('solved_at_step')),
    'machine.arms': lambda: machine('arms'),
    'machine.recipes': lambda: machine('recipes'),
    # of pages themselves: what their last run gave
    'cliffwalk.times': lambda: (
        f"{float(re.findall(r'[0-9.]+', output('replay/prioritized', 'advantage.round'))[-1]):g}"
    ),
}
zstd = "Frames(4, compress='zstd')"


def fill(text):
    "The text with each figure as it is now"

    def figure(m):
        if m[1] not in FIGURES:
            raise KeyError(f'no figure is called {m[1]!r}')
        return f'<!--={m[1]}-->{FIGURES[m[1]]()}<!--=-->'

    return MARK.sub(figure, text)


def pages():
    return sorted(
        [
            *ROOT.glob('nbs/**/*.ipynb'),
            *ROOT.glob('nbs/*.md'),
            ROOT / 'CONTRIBUTING.md',
            ROOT / 'CHANGELOG.md',
        ]
    )


def main():
    wrong = []
    for page in pages():
        text = page.read_text(encoding='utf-8')
        if (new := fill(text)) == text:
            continue
        was, now = MARK.findall(text), MARK.findall(new)
        wrong += [
            f'{page.relative_to(ROOT)}: {name} is {b}, not {a}'
            for (name, a), (_, b) in zip(was, now)
            if a != b
        ]
        if '--check' not in sys.argv[1:]:
            page.write_text(new, encoding='utf-8')
    if wrong:
        print('\n'.join(wrong))
    if wrong and '--check' in sys.argv[1:]:
        sys.exit('Remedy: python docs/figures.py, then python docs/readme.py')


if __name__ == '__main__':
    main()
