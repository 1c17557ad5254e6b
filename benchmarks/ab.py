"""Compare two checkouts of this repository, in turn, on the contests of rows, stages and add_step.

    python benchmarks/ab.py OLD_CHECKOUT NEW_CHECKOUT [CONTEST ...] [--rounds 25]

A CONTEST is a part of a title. Times are CPU times of one thread, which other programs disturb less
than wall-clock times. A contest is marked if the medians and the fastest rounds agree that it
changed by more than 3 %. Compare a checkout with itself to see the noise of the machine.
"""
import argparse
from pathlib import Path
from statistics import median

import add_step
import rows
from harness import OURS, Worker, git_commit, markdown_table, time_in_turns

CONTESTS = rows.CONTESTS | add_step.CONTESTS
PROCESSES = 3   # so often both processes start again
SIZE = 300_000  # rows in the buffer


def compare(old, new, titles, rounds):
    "Return {title: {'old': [microseconds], 'new': [microseconds]}}"
    found = {title: dict(old=[], new=[]) for title in titles}
    for _ in range(PROCESSES):
        workers = dict(old=Worker(OURS, checkout=old), new=Worker(OURS, checkout=new))
        for title in titles:
            for worker in workers.values():
                worker.call('prepare', 'rows', **rows.settings_of(title, CONTESTS, SIZE))
            for name, times in time_in_turns(
                    workers, max(1, rounds//PROCESSES), .05, cpu=True).items():
                found[title][name] += times
        for worker in workers.values():
            worker.close()
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('old', type=Path)
    parser.add_argument('new', type=Path)
    parser.add_argument('contests', nargs='*', metavar='CONTEST')
    parser.add_argument('--rounds', type=int, default=25)
    args = parser.parse_args()
    titles = [t for t in CONTESTS if not args.contests or any(part in t for part in args.contests)]
    if not titles:
        parser.error('expected parts of these titles:\n' + '\n'.join(CONTESTS))
    old, new = args.old.resolve(), args.new.resolve()
    print(f'old: {git_commit(old)}, new: {git_commit(new)}, {args.rounds} rounds, {SIZE:,} rows\n',
          flush=True)
    lines = []
    for title, times in compare(old, new, titles, args.rounds).items():
        ratios = [f(times['new'])/f(times['old']) for f in (median, min)]
        mark = 'SLOWER' if min(ratios) > 1.03 else 'faster' if max(ratios) < .97 else ''
        lines.append([title, median(times['old']), median(times['new']),
                      *(f'{ratio:.3f}' for ratio in ratios), mark])
    print(markdown_table(
        ['contest', 'old, microseconds', 'new', 'new/old', 'fastest rounds', ''], lines))


if __name__ == '__main__':
    main()
