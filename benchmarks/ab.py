"""Compare two checkouts of this repository, in turn, on the contests of rows, stages and add_step.

    python benchmarks/ab.py OLD_CHECKOUT NEW_CHECKOUT [CONTEST ...] [--rounds 25]

A CONTEST is a part of a title; `--list` shows the titles. Times are CPU times of one thread, which
other programs disturb less than they disturb the clock on the wall. A contest is marked if the medians and the
fastest rounds agree that it changed by more than 3 %. Compare a checkout with itself to see the noise
of the machine.
"""
import argparse
from pathlib import Path
from statistics import median

import add_step
import rows
from harness import OURS, Worker, WorkerError, git_commit, markdown_table, time_in_turns

CONTESTS = rows.CONTESTS | add_step.CONTESTS


def compare(old, new, titles, rounds, processes, size, seconds):
    "Return {title: {'old': [microseconds], 'new': [microseconds]}}, and {title: error}"
    found = {title: dict(old=[], new=[]) for title in titles}
    errors = {}
    for _ in range(processes):
        workers = dict(old=Worker(OURS, checkout=old), new=Worker(OURS, checkout=new))
        for title in titles:
            try:
                for worker in workers.values():
                    worker.call('prepare', 'rows', **rows.settings_of(title, CONTESTS, size))
                times = time_in_turns(workers, max(1, rounds//processes), seconds, cpu=True)
            except WorkerError as error:
                errors[title] = str(error)
                continue
            for name in times:
                found[title][name] += times[name]
        for worker in workers.values():
            worker.close()
    return found, errors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('old')
    parser.add_argument('new')
    parser.add_argument('contests', nargs='*', metavar='CONTEST')
    parser.add_argument('--rounds', type=int, default=25)
    parser.add_argument('--processes', type=int, default=3, help='how often both processes start again (3)')
    parser.add_argument('--size', type=int, default=300_000, help='rows in the buffer (300,000)')
    parser.add_argument('--seconds', type=float, default=.05, help='of each round (.05)')
    parser.add_argument('--list', action='store_true', help='show the titles of the contests')
    args = parser.parse_args()
    args.old, args.new = Path(args.old).resolve(), Path(args.new).resolve()
    titles = [t for t in CONTESTS if not args.contests or any(part in t for part in args.contests)]
    if args.list or not titles:
        parser.exit(message='\n'.join(CONTESTS) + '\n')
    found, errors = compare(args.old, args.new, titles, args.rounds, args.processes, args.size, args.seconds)
    lines = []
    for title, times in found.items():
        if title in errors:
            lines.append([title, '', '', '', '', errors[title]])
            continue
        old, new = median(times['old']), median(times['new'])
        ratios = new/old, min(times['new'])/min(times['old'])
        mark = 'SLOWER' if min(ratios) > 1.03 else 'faster' if max(ratios) < .97 else ''
        lines.append([title, old, new, *(f'{ratio:.3f}' for ratio in ratios), mark])
    print(f'old: {git_commit(args.old)}, new: {git_commit(args.new)}, {args.rounds} rounds, {args.size:,} rows\n')
    print(markdown_table(['contest', 'old, microseconds', 'new', 'new/old', 'fastest rounds', ''], lines))


if __name__ == '__main__':
    main()
