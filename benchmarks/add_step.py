"""Add the steps of a loop one at a time, as `add_step` takes them; of peers, a row."""
from rows import race_rows

CONTESTS = {    # title: job, environments
    'add_step, 1 environment': ('add_step', 1),
    'add_step, 8 environments': ('add_step', 8),
    'add_step into a sequence buffer': ('add_step_sequences', 1),
    'add_step through n_step(3) into a prioritized buffer': ('add_step_n_step', 1),
    'add_step through n_step(3), 8 environments': ('add_step_n_step', 8),
}


def run(options):
    return race_rows(CONTESTS, options)

