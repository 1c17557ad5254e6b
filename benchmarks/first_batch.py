"""CPU seconds until a new process has a batch, after an installation (cold) and later (warm)."""
import json
import os
import subprocess
import sys
import tempfile

from harness import ROOT, markdown_table

REPLAYS = {
    'uniform': 'ExperienceReplay(steps, bs=32, seed=0)',
    'prioritized': 'PrioritizedReplay(steps, bs=32, seed=0)',
    'sequences': 'SequenceReplay(steps, bs=32, length=8, burn_in=0, overlap=4, seed=0)',
}
PROGRAM = '''
import json, time
from fastrl_replay.all import *
import gymnasium as gym, torch
imports = time.process_time()
steps = GymStepper(gym.make_vec('CartPole-v1', 8), seed=0)
batch = next(iter({replay}))
if {update}: batch.update_priorities(torch.zeros(batch.shape))
print(json.dumps(dict(imports=imports, whole=time.process_time())))
'''


def run(options):
    found = {}
    for kind, replay in REPLAYS.items():
        program = PROGRAM.format(replay=replay, update=kind != 'uniform')
        found[kind] = {}
        with tempfile.TemporaryDirectory() as folder:   # numba keeps compiled kernels here
            environment = dict(os.environ, NUMBA_CACHE_DIR=folder, PYTHONPATH=str(ROOT))
            for when in 'cold', 'warm':
                output = subprocess.run([sys.executable, '-c', program], env=environment,
                                        capture_output=True, text=True, check=True)
                found[kind][when] = json.loads(output.stdout)
        if options.quick:
            break
    return found


def report(results):
    rows = [[kind, *(results[kind][when][part]
                     for when in ('cold', 'warm') for part in ('imports', 'whole'))]
            for kind in REPLAYS if kind in results]
    heads = ['CPU seconds', 'cold: imports', 'cold: first batch',
             'warm: imports', 'warm: first batch']
    return markdown_table(heads, rows)
