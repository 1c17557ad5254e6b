"""Run the property tests on random cases for a while.

    python tests/soak/properties.py [--minutes 60] [TESTS …]

Each round takes twenty times as many examples as CI, from a new seed. It stops at the first
failure, which Hypothesis prints together with the example that reproduces it.
"""

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--minutes', type=float, default=60, help='when no further round begins')
    parser.add_argument('tests', nargs='*', default=['tests'], help='files or folders')
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    while True:
        seed = random.randrange(2**31)
        command = [sys.executable, '-m', 'pytest', '-q', '-x', '-n', '2', '-m', 'hypothesis']
        command += ['--hypothesis-profile', 'soak', '--hypothesis-seed', str(seed), *args.tests]
        print(*command, flush=True)
        failed = subprocess.run(command, cwd=ROOT).returncode
        if failed:
            raise SystemExit(failed)
        if time.monotonic() >= end:
            break


if __name__ == '__main__':
    main()
