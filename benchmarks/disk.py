"""Keep pictures on disk: write them, and draw with none or all of them in main memory."""
import ctypes
import os
import re
import tempfile
from pathlib import Path
from time import perf_counter

import rows
from harness import OURS, race

DONT_NEED = 4   # MADV_DONTNEED


# ---- in the worker ----

def forget(folder):
    "Drop the files of a folder from main memory"
    libc = ctypes.CDLL(None)
    maps = Path('/proc/self/maps').read_text()
    for start, end in re.findall(rf'^(\w+)-(\w+) .* {re.escape(folder)}/', maps, re.M):
        start, end = int(start, 16), int(end, 16)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), DONT_NEED)
    for path in Path(folder).rglob('*'):
        if path.is_file():
            with open(path, 'rb') as file:
                os.fsync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def prepare(library, folder, size):
    "Fill files, and draw 20 batches from the disk"
    start = perf_counter()
    draw, _ = rows.prepare(library, 'disk', size, 32, pictures=True, folder=folder)
    figures = dict(fill=[(perf_counter() - start)/size*1e6], cold=[])
    for _ in range(20):
        forget(folder)
        start = perf_counter()
        draw()
        figures['cold'].append((perf_counter() - start)*1e6)
    return draw, figures


# ---- in the runner ----

def run(options):
    size, rounds = (1_000, 2) if options.quick else (40_000, 9)
    warm, cold = 'draw 32 rows of pictures, warm', 'draw 32 rows of pictures, cold'
    with tempfile.TemporaryDirectory() as folder:
        entries = {library: (library, 'disk', dict(folder=f'{folder}/{library}', size=size))
                   for library in (OURS, 'torchrl')}
        results = race({warm: entries}, options.libraries, rounds, .05)
    for title, key in (cold, 'cold'), ('make and write a row', 'fill'):
        results['contests'][title] = {name: x[key] for name, x in results['figures'][warm].items()}
    return dict(results, size=size)
