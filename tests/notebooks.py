"""Run notebooks as `nbdev-test` does, each in a fork of one process that has their imports.

Imports are most of what a fresh interpreter costs. The process that forks, run as `python
tests/notebooks.py`, runs no notebook, no parallel code and no thread itself, and does not import
fastrl_replay: a notebook sees what it imports."""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path


class Forks:
    "Notebooks are run by a process that waits for their names."

    def __init__(self, folder):  # where the output goes
        self.log = Path(folder) / 'output'
        with open(self.log, 'wb') as out:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )

    def run(self, nb, limit=600):  # seconds
        "Return None if the notebook runs to its end, else what is wrong and what was printed."
        print(json.dumps([str(nb), str(self.log), limit]), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        if code:
            return f'{nb} ended with {code} and said:\n{self.log.read_text(errors="replace")}'

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def run_notebook(nb, log, limit):
    "In the fork: everything printed goes to `log`, and the exit status says whether it passed."
    os.setsid()  # a group of processes, to be ended together
    nothing = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for opened, fd in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(opened, fd)
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit, exit=True)
    from nbdev.test import nbdev_test

    take_kernels_from(nb)
    try:
        nbdev_test(nb)
    except SystemExit as e:
        return e.code
    return 0


def leave(code):
    """End as a script does, but don't take the modules apart.

    That takes half a second, for pages that the fork shares so far."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def take_kernels_from(nb):
    """Keep kernels that the notebook exports from being compiled again: its module has the same.

    Another test proves that, and the module's kernels are on disk."""
    exported = re.search(r'#\| default_exp ([\w.]+)', Path(nb).read_text(encoding='utf-8'))
    if not exported:
        return
    from fastrl_replay.steps import compiled

    module = importlib.import_module(f'fastrl_replay.{exported[1]}')
    compile_ = compiled.njit

    def code(f):
        return [getattr(f.__code__, k) for k in ('co_code', 'co_consts', 'co_names', 'co_varnames')]

    def njit(f=None, nogil=False, inline=False):
        if f is None:
            return lambda f: njit(f, nogil, inline)
        there = getattr(module, f.__name__, None)
        own = getattr(there, 'py_func', None)
        return there if own and code(own) == code(f) else compile_(f, nogil, inline)

    compiled.njit = njit


def serve():
    "Run the notebooks named on stdin, one after the other, and answer with their exit statuses."
    answers = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)  # what an import prints is no answer
    os.environ.pop('IN_TEST', None)
    import gymnasium, matplotlib.pyplot, nbdev.showdoc, nbdev.test, numba, torch, torchdata.nodes  # noqa: F401

    torch.set_num_threads(1)  # threads don't survive a fork, and pytest-xdist uses the other cores
    gc.freeze()  # otherwise each fork copies all of this when it cleans up
    for line in iter(sys.stdin.readline, ''):
        pid = os.fork()
        if not pid:
            answers.close()
            try:
                leave(run_notebook(*json.loads(line)))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            os.killpg(pid, signal.SIGKILL)  # what the notebook left running
        except ProcessLookupError:
            pass
        print(code, file=answers)


if __name__ == '__main__':
    serve()
