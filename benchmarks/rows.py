"""Add rows, and draw them uniformly, by priority and as sequences."""
import harness
from harness import OURS

CONTESTS = {    # title: job, rows that are added or drawn, are they pictures
    'insert 1 row': ('insert', 1, False),
    'insert 256 rows': ('insert', 256, False),
    'draw 256 rows': ('uniform', 256, False),
    'draw 256 rows by priority, and update': ('prioritized', 256, False),
    'the same by rank': ('prioritized_by_rank', 256, False),
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
