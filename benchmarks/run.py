"""Compare this library with its peers, each in its own process, in turn.

    python benchmarks/run.py [CONTEST ...] [--peers PYTHON ...] [--out DIR] [--quick]

PYTHON is the interpreter of another virtual environment, for example one in which
`pip install '.[peers]'` was run. Each contest writes CONTEST.json into DIR.
"""
import argparse
import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

from harness import OURS, comparison, find_libraries, git_commit, machine

CONTESTS = ('rows', 'add_step', 'frames', 'disk', 'workers', 'learners', 'first_batch',
            'six_buffers')


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('contests', nargs='*', metavar='CONTEST', help=', '.join(CONTESTS))
    parser.add_argument('--peers', nargs='+', default=[], metavar='PYTHON')
    parser.add_argument('--out', type=Path, metavar='DIR')
    parser.add_argument('--quick', action='store_true',
                        help='small, and without peers unless --peers names them')
    args = parser.parse_args()
    unknown = set(args.contests) - set(CONTESTS)
    if unknown:
        parser.error(f'{", ".join(unknown)}: expected some of {", ".join(CONTESTS)}')
    libraries, missing = find_libraries(args.peers)
    if args.quick and not args.peers:
        libraries, missing = {OURS: libraries[OURS]}, {}
    for name in args.contests or CONTESTS:
        contest = importlib.import_module(name)
        options = SimpleNamespace(quick=args.quick, libraries=libraries)
        load = os.getloadavg()[0]
        results = dict(machine=machine(),
                       versions={k: version for k, (_, version) in libraries.items() if k != OURS},
                       missing=missing, **contest.run(options))
        results['made'] = dict(commit=git_commit(), load=[load, os.getloadavg()[0]],
                               quick=args.quick)
        report = contest.report(results) if hasattr(contest, 'report') else comparison(
            results['contests'])
        print(f'## {name}\n\n{report}\n')
        for kind in 'missing', 'faults':
            for who, why in results.get(kind, {}).items():
                print(f'{kind}: {who}: {why}')
        facts = {**results['machine'], **results['versions'], **results['made']}
        print(', '.join(f'{k} {v}' for k, v in facts.items()) + '\n', flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out/f'{name}.json').write_text(json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    main()
