"""Run each library in its own process and time the libraries in turn.

A worker is `python harness.py LIBRARY`: it reads calls from its standard input, one JSON list a
line, and answers each with a line. It needs only numpy and its library, so it also runs in another
virtual environment, in which this package is not installed.
"""
import ctypes
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
OURS = 'fastrl_replay'
PEERS = ('deque', 'stable-baselines3', 'cpprb', 'tianshou', 'torchrl', 'flashbax', 'rlox')
ONE_THREAD = dict(OMP_NUM_THREADS='1', NUMBA_NUM_THREADS='1', RAYON_NUM_THREADS='1',
                  XLA_FLAGS='--xla_cpu_multi_thread_eigen=false', JAX_PLATFORMS='cpu',
                  CUDA_VISIBLE_DEVICES='', RAY_USAGE_STATS_ENABLED='0')


# ---- in the worker ----

job = None      # the function that `prepare` made


def prepare(module, library, **settings):
    """Make the function to time with `module.prepare`, which raises if its results are wrong.

    Return the figures that come with it; None if the library does not have this job."""
    global job
    job = None
    gc.collect()
    job, figures = importlib.import_module(module).prepare(library, **settings)
    return figures if job else None


def time_job(number, cold=False, cpu=False):
    """Return the seconds of so many calls, or the CPU seconds.

    With `cold`, at most 20 calls are made, and 64 MB are read before each."""
    clock = process_time if cpu else perf_counter
    if not cold:
        start = clock()
        for _ in range(number):
            job()
        return clock() - start
    import numpy as np
    large = np.ones(1 << 23)
    calls = min(number, 20)
    seconds = 0.
    for _ in range(calls):
        large.sum()
        start = clock()
        job()
        seconds += clock() - start
    return seconds*number/calls


def resident():
    "Return the bytes of this process that are in main memory"
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')


def serve(library):
    "Answer calls until the input ends; what libraries print goes to standard error"
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    for line in sys.stdin:
        module, function, settings = json.loads(line)
        try:
            if function == 'prepare':
                answer = prepare(module, library, **settings)
            elif function == 'time_job':
                answer = time_job(**settings)
            else:
                answer = getattr(importlib.import_module(module), function)(**settings)
            reply = dict(answer=answer)
        except Exception as e:
            reply = dict(error=' '.join(f'{type(e).__name__}: {e}'.split())[:200])
        print(json.dumps(reply), file=answers, flush=True)


# ---- in the runner ----

class WorkerError(RuntimeError):
    "An error in a worker, or a worker that died"


class Worker:
    "A library in its own process; `checkout` is the repository from which our package is imported"
    def __init__(self, library, python=sys.executable, checkout=ROOT, command=(), **environment):
        path = [str(FOLDER)]
        if library == OURS:
            path.insert(0, str(checkout))
        environment = {**os.environ, **ONE_THREAD, 'PYTHONPATH': os.pathsep.join(path),
                       **environment}
        self.errors = tempfile.TemporaryFile('w+')
        self.process = subprocess.Popen([*command, python, str(FOLDER/'harness.py'), library],
                                        env=environment, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.errors)

    def call(self, function, module='', **settings):
        "Call a function of a module of this folder in the worker"
        try:
            print(json.dumps([module, function, settings]), file=self.process.stdin, flush=True)
            reply = json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            self.errors.seek(0)
            lines = self.errors.read().strip().splitlines() or ['no message']
            raise WorkerError(f'the process died: {lines[-1][:200]}') from None
        if 'error' in reply:
            raise WorkerError(reply['error'])
        return reply['answer']

    def close(self):
        self.process.communicate()
        self.errors.close()


def time_in_turns(workers, rounds, seconds, **how):
    "Return {name: [microseconds of a call in each round]}; each round runs about `seconds`"
    numbers = {}
    for name, worker in workers.items():
        number = 1
        worker.call('time_job', number=number, **how)
        while (spent := worker.call('time_job', number=number, **how)) < seconds/5:
            number *= 4
        numbers[name] = max(1, int(number*seconds/spent))
    times = {name: [] for name in workers}
    for i in range(rounds):
        for name in sorted(workers, reverse=i % 2):
            spent = workers[name].call('time_job', number=numbers[name], **how)
            times[name].append(spent/numbers[name]*1e6)
    return times


def race(contests, libraries, rounds, seconds, cold=False):
    """Time {title: {name: (library, module, settings)}} with warm and, if `cold`, cold caches.

    Each name has a process. Skips libraries not in `libraries`, {library: (Python, version)}."""
    results = dict(contests={}, figures={}, faults={})
    workers = {}
    for title, entries in contests.items():
        ready = {}
        figures = results['figures'][title] = {}
        for name, (library, module, settings) in entries.items():
            if library not in libraries:
                continue
            if name not in workers:
                workers[name] = Worker(library, libraries[library][0])
            try:
                found = workers[name].call('prepare', module, **settings)
            except WorkerError as error:
                results['faults'][f'{title}, {name}'] = str(error)
                continue
            if found is not None:
                ready[name] = workers[name]
                figures[name] = found
        results['contests'][title] = time_in_turns(ready, rounds, seconds)
        if cold:
            results['contests'][f'{title}, cold caches'] = time_in_turns(
                ready, min(rounds, 3), .001, cold=True)
    for worker in workers.values():
        worker.close()
    return results


def find_libraries(pythons):
    "Return {library: (Python, version)} of the first Python with it, and {library: why missing}"
    script = ('import importlib.metadata as m, json, sys\nfound = {}\nfor name in sys.argv[1:]:\n'
              '    try: found[name] = m.version(name)\n    except m.PackageNotFoundError: pass\n'
              'print(json.dumps(found))')
    found = {name: (sys.executable, platform.python_version()) for name in (OURS, 'deque')}
    for python in [sys.executable, *pythons]:
        output = subprocess.run(
            [python, '-c', script, *PEERS], capture_output=True, text=True, check=True)
        for name, version in json.loads(output.stdout).items():
            found.setdefault(name, (python, version))
    missing = {name: 'not installed in ' + ', '.join(map(str, [sys.executable, *pythons]))
               for name in PEERS if name not in found}
    return found, missing


def git_commit(checkout=ROOT):
    "Return the commit of a checkout, with `-dirty` if files differ from it"
    command = ['git', '-C', str(checkout), 'describe', '--always', '--dirty']
    return subprocess.check_output(command, text=True).strip()


def machine():
    "Return what the figures were measured on"
    cpu = platform.processor()
    info = Path('/proc/cpuinfo')
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith('model name')]
        cpu = lines[0].partition(': ')[2] if lines else cpu
    versions = {name: importlib.metadata.version(name)
                for name in ('torch', 'gymnasium', 'numpy', 'numba')}
    return dict(date=datetime.now(timezone.utc).isoformat(timespec='minutes'), cpu=cpu,
                cores=os.cpu_count(), python=platform.python_version(), **versions)


def markdown_table(heads, rows):
    "Return a table as Markdown; numbers are shown with three digits"
    def text(x):
        if not isinstance(x, float):
            return str(x)
        return f'{x:,.0f}' if abs(x) >= 100 else f'{x:.3g}'
    lines = [heads, ['---']*len(heads), *rows]
    return '\n'.join(f'| {" | ".join(map(text, line))} |' for line in lines)


def comparison(contests):
    "Return a table of medians and ratios to the first entry of {title: {who: [microseconds]}}"
    rows = []
    for title, times in contests.items():
        first = None
        for who, values in times.items():
            middle = median(values)
            first = first or middle
            rows.append([title, who, middle, middle/first])
            title = ''
    return markdown_table(['contest', 'library', 'microseconds', 'ratio'], rows)


if __name__ == '__main__':
    sys.path.insert(0, str(FOLDER))
    serve(sys.argv[1])
