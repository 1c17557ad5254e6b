"""Seed faults into copies of the package, one at a time, and run the tests that must catch them.

    python tests/soak/seeded_faults.py [--only WORD] [--list]

`GUARANTEES` names the tests that hold each guarantee of the design, `FAULTS` has at least two
faults for each. Every fault must be caught: the script ends with status 1 and the names of those
that were not. It takes about ten minutes.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

GUARANTEES = {
    1: (
        'True transitions: no row, n-step return, sequence or relabeled goal crosses an episode, '
        'and truncation bootstraps',
        'envs/test_envs.py replay/test_own_steps.py envs/test_loops.py stages/test_nstep.py '
        'stages/test_sequence.py replay/test_sequences.py replay/test_hindsight.py',
    ),
    2: (
        'Stale keys are detected, and keys are never given out twice',
        'replay/test_keys.py replay/test_prioritized.py',
    ),
    3: (
        'A rejected block changes nothing',
        'test_blocks.py replay/test_replay.py memory/test_sumtree.py replay/test_own_steps.py',
    ),
    4: ('An interrupt or exception leaves the memory valid', 'test_interrupts.py'),
    5: (
        'Exact checkpoints between items',
        'test_pipe.py replay/test_replay.py learning/test_learners.py envs/test_envs.py '
        'memory/test_samplers.py',
    ),
    6: (
        'kill -9 loses nothing that was committed to a directory; readers see no torn row',
        'memory/test_disk.py',
    ),
    7: (
        'Untrusted files cannot execute code, crash or hang the process, or reach other files',
        'app/test_untrusted.py app/test_best.py data/test_data.py',
    ),
    8: (
        'No hang: a worker that dies is noticed, named, and restarted or raised',
        'parallel/test_parallel.py',
    ),
    9: (
        'The same seed gives the same stream, batches and training',
        'replay/test_replay.py envs/test_envs.py learning/test_policies.py',
    ),
    10: (
        'The mathematics: priorities, probabilities, weights, losses',
        'memory/test_sumtree.py memory/test_ranktree.py memory/test_samplers.py '
        'replay/test_prioritized.py learning/test_losses.py',
    ),
}


class Fault(NamedTuple):
    guarantee: int
    module: str  # in fastrl_replay
    text: str  # occurs once
    instead: str
    tests: str  # files and options of pytest


FAULTS = [
    Fault(
        1,
        'envs/slots.py',
        'if counts[i, 2] % 2:',
        'if counts[i, 2] == ABSENT:',
        'envs/test_envs.py',
    ),
    Fault(1, 'stages/nstep.py', '0.0 if terminated else power', 'power', 'stages/test_nstep.py'),
    Fault(
        1,
        'stages/nstep.py',
        'last[plan[TRUNCATED]] | (notes[note, 4] == BROKE_OFF)',
        'last[plan[TRUNCATED]]',
        'stages/test_nstep.py',
    ),
    Fault(
        1,
        'steps/episodes.py',
        'last[env, 2] and last[env, 0] == episode and last[env, 1] + 1 == step',
        'last[env, 2]',
        'stages/test_sequence.py memory/test_timeline.py',
    ),
    Fault(
        1,
        'stages/waiting.py',
        'return p - length if tail == _SHIFT else',
        'return p - length - 1 if tail == _SHIFT else',
        'stages/test_sequence.py',
    ),
    Fault(
        1,
        'replay/hindsight.py',
        'key = episode_start(goals[j], oldest, table)',
        'key = oldest',
        'replay/test_hindsight.py',
    ),
    Fault(
        2,
        'replay/views.py',
        'stale += keys[i] < oldest',
        'stale += 0',
        'replay/test_prioritized.py replay/test_keys.py',
    ),
    Fault(
        2,
        'replay/views.py',
        'if keys[i] < 0 or keys[i] >= end:',
        'if keys[i] < 0:',
        'replay/test_prioritized.py replay/test_keys.py',
    ),
    Fault(
        3,
        'memory/sumtree.py',
        'wrong = ~((p >= low) & (p <= high))',
        'wrong = ~(p <= high)',
        'memory/test_sumtree.py',
    ),
    Fault(
        3,
        'steps/episodes.py',
        "wrong = rows['env_id'].view(np.uint32) >= MAX_ENVS",
        "wrong = rows['env_id'] >= MAX_ENVS",
        'test_blocks.py replay/test_replay.py',
    ),
    Fault(
        3,
        'steps/nans.py',
        'if top > _LIMIT[kind]:',
        'if False:',
        'replay/test_replay.py replay/test_own_steps.py',
    ),
    Fault(
        4,
        'replay/replay.py',
        'self._catch_up()  # in case the last call was interrupted',
        'pass',
        'test_interrupts.py',
    ),
    Fault(
        4,
        'stages/waiting.py',
        'vars(self).update(envs=envs, held=held)',
        'self.envs = envs; sum(range(300)); self.held = held',
        'test_interrupts.py',
    ),
    Fault(
        5,
        'memory/samplers.py',
        "self._random_count = state['count']",
        'self._random_count = 0',
        'memory/test_samplers.py replay/test_replay.py',
    ),
    Fault(
        5,
        'learning/base.py',
        "self.updates = state['updates']",
        'pass',
        'learning/test_learners.py',
    ),
    Fault(5, 'pipe.py', 'self._resume = self.place', 'pass', 'test_pipe.py'),
    Fault(
        5,
        'memory/priorities.py',
        "self.largest_ever = saved['largest_ever']",
        'pass',
        'replay/test_prioritized.py memory/test_samplers.py',
    ),
    Fault(
        6,
        'steps/files.py',
        'os.replace(new, path)',
        'path.write_bytes(new.read_bytes())',
        'steps/test_files.py memory/test_disk.py',
    ),
    Fault(
        6,
        'memory/directory.py',
        "c[RESERVED], c[COMMITTED] = max(c[RESERVED], c[LIMIT]), min(c[COMMITTED], c[FLUSHED])",
        'pass',
        'memory/test_disk.py -m "slow or not slow" -k power',
    ),
    Fault(7, 'steps/states.py', '<= size - file.tell()', '< 2**60', 'app/test_untrusted.py'),
    Fault(
        7,
        'stages/recorded.py',
        'return NpzFile(path)',
        'return NpzFile(path, allow_pickle=True)',
        'data/test_data.py -m "slow or not slow" -k pickle',
    ),
    Fault(
        8,
        'parallel/stage.py',
        "and self.restarted < self.restarts",
        '',
        'parallel/test_parallel.py -m "slow or not slow" -k restart',
    ),
    Fault(
        8,
        'parallel/processes.py',
        ' or self.link.over or not self.link.process.is_alive()',
        '',
        'parallel/test_parallel.py -k death',
    ),
    Fault(
        9,
        'envs/slots.py',
        'self.env.reset(seed=self.seed)',
        'self.env.reset()',
        'envs/test_envs.py',
    ),
    Fault(
        9,
        'learning/policies.py',
        'np.random.default_rng(seed)',
        'np.random.default_rng()',
        'learning/test_policies.py',
    ),
    Fault(
        9,
        'memory/samplers.py',
        'self._random_seed = random_seed(seed)',
        'self._random_seed = random_seed(None)',
        'replay/test_replay.py memory/test_samplers.py',
    ),
    Fault(
        10,
        'memory/sumtree.py',
        'left = (nodes[_u(a)] + nodes[_u(a + 1)]) + (nodes[_u(a + 2)] + nodes[_u(a + 3)])',
        'left = (nodes[_u(a)] + nodes[_u(a + 1)]) + nodes[_u(a + 2)]',
        'memory/test_sumtree.py',
    ),
    Fault(
        10,
        'memory/samplers.py',
        'return np.power(p, -beta, out=p)',
        'return np.power(p, beta, out=p)',
        'replay/test_prioritized.py memory/test_samplers.py',
    ),
    Fault(
        10,
        'memory/draws.py',
        '(x + i) * (total / n) if stratified else x * total',
        'x * total',
        'memory/test_samplers.py replay/test_prioritized.py',
    ),
    Fault(
        10,
        'replay/sequence_view.py',
        'eta * top + (1 - eta) * total / n if n > 0 else 0.0',
        'eta * top + (1 - eta) * total if n > 0 else 0.0',
        'replay/test_sequences.py',
    ),
    Fault(
        10,
        'learning/losses.py',
        'target = reward + discount * torch.cat([after, value[..., -1:]], -1)',
        'target = reward + torch.cat([after, value[..., -1:]], -1)',
        'learning/test_losses.py',
    ),
    Fault(
        10,
        'replay/replay.py',
        'return self.counted * r.numerator // r.denominator > self._n_yielded',
        'return self.counted * r.numerator // r.denominator >= self._n_yielded',
        'replay/test_replay.py',
    ),
]


def copy_tree(folder):
    "Copy what the tests need, with compiled kernels."
    for name in ('fastrl_replay', 'tests', 'nbs', 'docs', 'benchmarks'):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name)
    for name in ('pyproject.toml', 'settings.ini', 'README.md', 'CHANGELOG.md', 'CONTRIBUTING.md'):
        shutil.copy2(ROOT / name, folder)


def caught(fault, folder, seconds=300):
    "Return whether the tests fail on a copy of the package with this fault."
    path = folder / 'fastrl_replay' / fault.module
    source = path.read_text()
    if source.count(fault.text) != 1:
        raise SystemExit(
            f'{fault.module}: {source.count(fault.text)} times {fault.text!r}: '
            'adapt FAULTS to the module'
        )
    if '@njit' in source:  # kernels of other modules may have compiled it into theirs
        for cache in (folder / 'fastrl_replay').rglob('*.nb[ic]'):
            cache.unlink()
    path.write_text(source.replace(fault.text, fault.instead))
    # paths are relative to tests/
    command = f'{sys.executable} -m pytest -q -x -p no:cacheprovider {fault.tests}'
    process = subprocess.Popen(
        shlex.split(command),
        cwd=folder / 'tests',
        env={**os.environ, 'PYTHONPATH': str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return 'hung'
    finally:
        path.write_text(source)
    if process.returncode < 0:
        return 'crashed'
    if process.returncode not in (0, 1):
        print(out[-2000:])
        raise SystemExit(f'pytest ended with {process.returncode}: {command}')
    return 'caught' if process.returncode == 1 else ''


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--only', default='', help='faults whose module contains this')
    parser.add_argument(
        '--list', action='store_true', help='print the guarantees, their tests and faults'
    )
    parser.add_argument('--begin', type=int, default=0, help='skip so many faults')
    args = parser.parse_args()
    if args.list:
        for number, (text, tests) in GUARANTEES.items():
            print(f'{number}. {text}\n   tests: {tests}')
            for fault in FAULTS:
                if fault.guarantee == number:
                    print(f'   fault: {fault.module}: {fault.text}')
        return
    missed = []
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        copy_tree(folder)
        for fault in FAULTS[args.begin :]:
            if args.only not in fault.module:
                continue
            start = time.monotonic()
            how = caught(fault, folder)
            print(
                f'{how or "NOT CAUGHT":10} {time.monotonic() - start:4.0f} s  '
                f'{fault.guarantee}  {fault.module}: {fault.text[:60]}',
                flush=True,
            )
            if not how:
                missed.append(f'{fault.module}: {fault.text}')
    if missed:
        raise SystemExit('not caught:\n' + '\n'.join(missed))


if __name__ == '__main__':
    main()
