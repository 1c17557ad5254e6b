"""Add rows, draw them uniformly, by priority and as sequences, step environments."""
from harness import OURS, comparison, race, resident

CONTESTS = {    # title: job, rows that are added or drawn
    'insert 1 row': ('insert', 1),
    'insert 256 rows': ('insert', 256),
    'draw 256 rows': ('uniform', 256),
    'draw 256 rows by priority, and update': ('prioritized', 256),
    'draw 256 rows by rank, and update': ('prioritized_by_rank', 256),
    'draw 64 sequences of 80': ('sequences', 64),
    'draw 64 sequences of 80 by priority, and update': ('prioritized_sequences', 64),
    'draw 32 rows of pictures': ('uniform', 32),
    '8 rows in, 256 rows of 3 steps out': ('n_step', 256),
    'an item through one stage': ('stage', 1),
    'a step of 8 CartPoles': ('env_step', 8),
}
CHECKED = ('uniform', 'prioritized', 'prioritized_by_rank', 'sequences', 'prioritized_sequences',
           'disk')


# ---- in the worker ----

def prepare(library, job, size, n, pictures=False, **settings):
    "Fill a buffer, do the job once, check the result; return also how many bytes the process grew"
    import libraries
    import torch
    torch.set_num_threads(1)
    if library == OURS:
        import ours
        function, names = ours.ours, ours.JOBS
    else:
        function, names = libraries.JOBS[library]
        job = 'insert' if job == 'add_step' else job
    if job not in names.split():
        return None, {}
    rows = libraries.Rows(size, pictures)
    before = resident()
    step, tensors = function(job, rows, n, **settings)
    grown = dict(grown=resident() - before)
    batch = step()
    if tensors is None:
        return step, grown
    if job in CHECKED:
        wrong = rows.wrong(tensors(batch), n)
        if wrong:
            raise ValueError(f'{wrong} wrong rows')
    return lambda: tensors(step()), grown


# ---- in the runner ----

def settings_of(title, contests, size):
    "Return the settings of `prepare`"
    job, n = contests[title]
    pictures = 'pictures' in title
    return dict(job=job, n=n, pictures=pictures, size=size//50 if pictures else size)


def race_rows(contests, options, cold=False):
    rounds, seconds, size = (2, .005, 20_000) if options.quick else (9, .05, 1_000_000)
    entries = {title: {library: (library, 'rows', settings_of(title, contests, size))
                       for library in options.libraries}
               for title in contests}
    return dict(race(entries, options.libraries, rounds, seconds, cold), size=size)


def run(options):
    results = race_rows(CONTESTS, options, cold=True)
    grown = results['figures']['draw 256 rows']
    results['bytes_a_row'] = {name: x['grown']/results['size'] for name, x in grown.items()}
    return results


def report(results):
    sizes = ', '.join(f'{name} {size:.0f}' for name, size in results['bytes_a_row'].items())
    return f'{comparison(results["contests"])}\n\nbytes a row: {sizes}'
