"""Add rows, and draw them uniformly, by priority and as sequences."""
import gc
import os
import sys
from pathlib import Path

from harness import OURS, Worker, WorkerError, comparison, markdown_table, time_in_turns

CONTESTS = {    # title: job, rows that are added or drawn, are they pictures
    'insert 1 row': ('insert', 1, False),
    'insert 256 rows': ('insert', 256, False),
    'draw 256 rows': ('uniform', 256, False),
    'draw 256 rows by priority, and update': ('prioritized', 256, False),
    'draw 256 rows by rank, and update': ('prioritized_by_rank', 256, False),
    'draw 64 sequences of 80': ('sequences', 64, False),
    'draw 64 sequences of 80 by priority, and update': ('prioritized_sequences', 64, False),
    'draw 32 rows of pictures': ('uniform', 32, True),
    '8 rows in, 256 rows of 3 steps out': ('n_step', 256, False),
    'an item through one stage': ('stage', 1, False),
    'a step of 8 CartPoles': ('env_step', 8, False),
    'a step of 1 CartPole': ('env_step', 1, False),
}


CHECKED = ('uniform', 'prioritized', 'prioritized_by_rank', 'sequences', 'prioritized_sequences')


# ---- in the worker ----

def jobs_of(library, size, n, pictures=False):
    "Return the object whose methods are the jobs of a library"
    import libraries
    rows = libraries.Rows(size, pictures)
    if library not in (OURS, 'bare'):
        return libraries.CLASSES[library](rows, n)
    import ours
    return ours.Ours(rows, n) if library == OURS else ours.Bare(rows, n)


def has_job(library, job):
    return hasattr(jobs_of(library, 1, 1), job)


def prepare(library, job, size, n, pictures=False):
    "Fill a buffer, do the job once, and check the result; return the function that is timed"
    import torch
    torch.set_num_threads(1)
    jobs = jobs_of(library, size, n, pictures)
    step = getattr(jobs, job)()
    result = step()
    if job not in CHECKED and job != 'n_step':
        return step
    batch = jobs.tensors(result)
    if job in CHECKED:
        wrong = jobs.rows.wrong(batch, n)
        if wrong:
            raise ValueError(f'{wrong} wrong rows')
    return lambda: jobs.tensors(step())


def bytes_a_row(library, size):
    "Return how many bytes a row takes: `nbytes`, or how much the process grows"
    if library == OURS:
        return jobs_of(library, size, 1).full().memory.nbytes/size
    sizes = []
    for n in size//10, size:
        buffer = jobs_of(library, n, 32).full()
        gc.collect()
        sizes.append(int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE'))
        del buffer
    return (sizes[1] - sizes[0])/(size - size//10)


# ---- in the runner ----

def start_workers(libraries, **environment):
    "Return {library: worker}"
    pythons = {library: python for library, (python, _) in libraries.items()}
    return {name: Worker(name, pythons.get(name, sys.executable), **environment) for name in [OURS, *pythons]}


def race(contests, options, rounds, seconds, size, cold=True):
    "Return the times of {title: (job, n, pictures)} with warm and with cold caches, and what failed"
    results = dict(size=size, contests={}, cold={}, faults={})
    workers = start_workers(options.libraries) | dict(bare=Worker('bare'))
    for title, (job, n, pictures) in contests.items():
        faults, ready = {}, {}
        for name, worker in workers.items():
            try:
                if worker.call('has_job', 'rows', library=name, job=job):
                    rows = size//50 if pictures else size
                    worker.call('prepare', 'rows', job=job, n=n, pictures=pictures, size=rows)
                    ready[name] = worker
            except WorkerError as error:
                faults[name] = str(error)
        results['contests'][title] = time_in_turns(ready, rounds, seconds, faults)
        if cold:
            results['cold'][title] = time_in_turns(ready, min(rounds, 3), .001, faults, cold=True)
        results['faults'].update({f'{title}, {name}': why for name, why in faults.items()})
    for worker in workers.values():
        worker.close()
    return results


def run(options):
    rounds, seconds, size = (2, .005, 20_000) if options.quick else (9, .05, 1_000_000)
    results = race(CONTESTS, options, rounds, seconds, size)
    results['bytes_a_row'] = {}
    # blocks of more than 64 KB go back to the system when they are freed
    environment = dict(MALLOC_MMAP_THRESHOLD_='65536', MALLOC_TRIM_THRESHOLD_='65536')
    for name, worker in start_workers(options.libraries, **environment).items():
        try:
            results['bytes_a_row'][name] = worker.call('bytes_a_row', 'rows', library=name, size=size)
        except WorkerError as error:
            results['faults'][f'bytes a row, {name}'] = str(error)
        worker.close()
    return results


def report(results):
    sizes = markdown_table(['library', 'bytes a row'], list(results['bytes_a_row'].items()))
    return '\n\n'.join([comparison(results['contests']), 'With cold caches:', comparison(results['cold']), sizes])
