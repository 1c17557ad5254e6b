"""Steps a second of one learner and of two that share each update, with 1 to 8 actors."""
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from harness import FOLDER, ONE_THREAD, OURS, ROOT, Worker, markdown_table

MODULE = 'ours_parallel'


def launch(learners, actors, seconds):
    "Start so many learners by torchrun, and return what the first one prints"
    environment = {**os.environ, **ONE_THREAD, 'PYTHONPATH': os.pathsep.join([str(ROOT), str(FOLDER)])}
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(learners),
               str(FOLDER/f'{MODULE}.py'), str(actors), str(seconds)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def run(options):
    seconds, most = (.5, 2) if options.quick else (4., 8)
    found = dict(steps={}, parts={})
    for learners in 1, 2:
        runs = {n: launch(learners, n, seconds) for n in (1, 2, 4, 8) if learners <= n <= most}
        found['steps'][learners] = {n: x['steps'] for n, x in runs.items()}
        for name in 'average', 'gather':
            found['parts'][name] = median(x[name] for x in runs.values())
    worker = Worker(OURS)
    ask = worker.call('message_of', MODULE, kind='process')
    rate = worker.call('actors', MODULE, n=1, seconds=seconds, kind='process')
    costs = worker.call('parts', MODULE, bs=64)
    worker.close()
    found['parts'].update(message=ask, step=1e6/rate - ask/8, add_row=costs['add_row'], draw=costs['draw'])
    return dict(found, load=os.getloadavg()[0], load_after=os.getloadavg()[0])


def report(results):
    lines = [[n, actors, rate] for n, rates in results['steps'].items() for actors, rate in rates.items()]
    return markdown_table(['learners', 'actors that wait 5 ms', 'steps a second'], lines)
