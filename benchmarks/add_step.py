"""Add the steps of a loop one at a time, as `add_step` takes them; of peers, a row."""
from harness import comparison
from rows import race

CONTESTS = {    # title: job, environments, are they pictures
    'add_step, 1 environment': ('add_step', 1, False),
    'add_step, 8 environments': ('add_step', 8, False),
    'add_step into a prioritized buffer': ('add_step_prioritized', 1, False),
    'add_step into a sequence buffer': ('add_step_sequences', 1, False),
    'add_step through n_step(3) into a prioritized buffer': ('add_step_n_step', 1, False),
    'add_step through n_step(3), 8 environments': ('add_step_n_step', 8, False),
}


def run(options):
    rounds, seconds, size = (2, .005, 20_000) if options.quick else (9, .05, 1_000_000)
    return race(CONTESTS, options, rounds, seconds, size, cold=False)


def report(results):
    return comparison(results['contests'])
