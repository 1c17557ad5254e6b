"""What fails × engine × memory × store: in each cell one of two shards fails twice, and what must hold meanwhile is looked at.

`python tests/failures.py` tries all cells, and writes what it saw into the table that "What works together" shows;
`python tests/failures.py mixture ray` tries only those that have these values, and keeps what was seen of the others."""

import itertools, json, os, re, signal, subprocess, sys, tempfile, time, warnings
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from fastrl_replay.all import *
from fastrl_replay.pipe import worker_info
from combinations import BS, MEMORIES, covering, start_ray, stepper
from plain_model import MixedModel, Model, block, name_of, names

MAX_SZ, LIMIT = 200, 150  # rows of a shard; seconds for what should take a few


def stop_for_a_second():
    subprocess.Popen(['sh', '-c', f'sleep 1; kill -CONT {os.getpid()}'])
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_an_error():
    raise RuntimeError('as it was told')


FAILURES = dict(
    killed=lambda: os.kill(os.getpid(), signal.SIGKILL),
    stopped=stop_for_a_second,
    raises=raise_an_error,
)
STORES = dict(rows=lambda path: Rows(), frames=lambda path: Frames(2), disk=Rows)
KINDS = dict(
    uniform='uniform',
    prioritized='proportional',
    sequences='sequences',
    hindsight='hindsight',
    mixture='mixture',
)
ENGINES = dict(process=dict(method='fork'), ray=dict(engine=RayEngine(num_cpus=0.5)))
AXES = dict(engine=[*ENGINES], memory=[*KINDS], store=[*STORES], failure=[*FAILURES])


class Cell(NamedTuple):
    engine: str
    memory: str
    store: str
    failure: str


CELLS = [Cell(*values) for values in itertools.product(*AXES.values())]
PAIRS = covering([cell for cell in CELLS if cell.engine == 'ray'])  # a restart takes seconds there


class Fails(Pipe):
    "After the replay of each shard: shard 1 fails as a file says, once"

    takes_any_item = True

    def __init__(self, source, folder):
        super().__init__(source)
        self.folder = folder

    def __iter__(self):
        (self.folder / f'process-{os.getpid()}').touch()
        for batch in self.source:
            order = self.folder / 'order'
            if worker_info().rank == 1 and order.exists():
                failure = order.read_text()
                order.unlink()
                FAILURES[failure]()
            yield batch


class Mixed(MixedModel):
    "A model of a mixture whose shards begin anew: each key that is given out is one of its own"

    def divided(self, batch):
        return batch['index'].numpy(), batch['replay'].numpy()


def memory(cell, folder):
    "Of a shard; a mixture has all rows of another one in each, which on disk all read"
    kind = KINDS[cell.memory]

    def make(kind, source, store):
        return MEMORIES[kind](source, bs=BS, max_sz=MAX_SZ, store=store)

    here, there = STORES[cell.store](folder / 'memory'), STORES[cell.store](folder / 'other')
    if kind != 'mixture':
        return make(kind, stepper(), here)
    other = make('uniform', None, there)
    other.add(block(names(20)))
    if cell.store == 'disk':
        other.close()
        other = make('uniform', None, Rows(folder / 'other', mode='r'))
    return Mixture(dict(online=make('proportional', stepper(), here), other=other))


class Learner:
    "Draws batches of two shards, compares each with a plain model, and answers"

    def __init__(self, cell, folder):
        kind, self.cell, self.folder = KINDS[cell.memory], cell, folder
        if kind == 'mixture':
            self.model = Mixed(late=10**9, max_sz=10**9)
        else:
            self.model = Model(
                kind, late=10**9, max_sz=10**9, cut=cell.store == 'disk'
            )  # which keeps episodes that a failure ended
        self.keys = defaultdict(set)
        self.pipe = Fails(memory(cell, folder), folder).parallel(
            2, chunk=1, ordered=False, restarts=1, **ENGINES[cell.engine]
        )
        self.batches = iter(self.pipe)
        self.draw()  # workers are started

    def draw(self):
        "A batch: each key has one row for good. A row has one key; another begins when its shard does, and so does each that a disk kept"
        batch = next(self.batches)
        self.model.check(batch)
        self.model.tell(batch)
        first = batch.rows[:, 0] if self.cell.memory == 'sequences' else batch.rows
        of = batch['replay'].tolist() if self.cell.memory == 'mixture' else [0] * len(first)
        for key, row, replay in zip(
            batch['index'].tolist(), first, of
        ):  # rows of another memory are in both shards
            keys, restarted = (
                self.keys[replay, key % 2, name_of(row)],
                self.pipe.stats()['workers'][key % 2]['restarts'],
            )
            keys.add(key)
            assert len(keys) <= 1 + restarted * (1 + (self.cell.store == 'disk')), (
                f'row {name_of(row)} has the keys {keys}'
            )

    def until_both_give(self, n):
        "Draw until each shard has given so many batches more"
        before, began = [w['items'] for w in self.pipe.stats()['workers']], time.monotonic()
        while any(w['items'] < b + n for w, b in zip(self.pipe.stats()['workers'], before)):
            assert time.monotonic() - began < LIMIT, (
                f'a shard gives nothing any more: {before}, {self.pipe.stats()}'
            )
            self.draw()

    def fail(self):
        "Let shard 1 fail; seconds until it has done so, and given batches again"
        order, began = self.folder / 'order', time.monotonic()
        (self.folder / 'new').write_text(self.cell.failure)
        (self.folder / 'new').rename(order)
        while order.exists():
            assert time.monotonic() - began < LIMIT
            self.draw()
        failed = time.monotonic()
        while self.pipe.stats()['restarts'] == 0 and self.cell.failure != 'stopped':
            assert time.monotonic() - failed < LIMIT
            self.draw()
        self.until_both_give(4)
        return time.monotonic() - failed

    def processes(self):
        "Those of shards that still run"
        found = [p.name.partition('-')[2] for p in self.folder.glob('process-*')]

        def state(pid):
            try:
                return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
            except OSError:
                return 'gone'

        return [pid for pid in found if state(pid) not in ('gone', 'Z')]


def after_one_failure(learner, before, said):
    "What `stats` must count, and what must have been reported"
    cell, after = learner.cell, learner.pipe.stats()
    assert after['rows_in'] >= before['rows_in']
    restarts, most = int(cell.failure != 'stopped'), before['workers'][1]['rows']
    assert [w['restarts'] for w in after['workers']] == [0, restarts] and len(said) == restarts, (
        after,
        said,
    )
    assert any(len(keys) > 1 for keys in learner.keys.values()) == bool(
        restarts
    )  # environments begin anew, and their rows have new keys
    if not restarts or cell.store == 'disk':
        assert after['lost'] == 0 and after['workers'][1]['rows'] >= most
    else:
        assert (
            most <= after['lost'] <= MAX_SZ
            and f"worker 1 of 2 failed, restart 1 of 1, {after['lost']} rows of its memory are lost"
            in said[0]
        )
    return dict(restarts=restarts, lost=after['lost'])


def seen(cell, folder):
    "Two failures of a shard, and what was seen of the first; an error where something doesn't hold"
    learner = Learner(cell, Path(folder))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            learner.until_both_give(12)
            before = learner.pipe.stats()
            seconds = learner.fail()
            found = after_one_failure(
                learner, before, [str(w.message) for w in caught if 'Parallel' in str(w.message)]
            )
            try:
                learner.fail()
            except WorkerError as e:
                wrong = str(e)
            else:
                wrong = ''
        asked = dict(
            killed='worker 1 of 2 failed',
            raises='worker 1 of 2 failed.*as it was told',
            stopped='$',
        )[cell.failure]
        assert re.match(f'(Parallel: )?{asked}', wrong, re.S), wrong
        if cell.memory == 'hindsight':
            learner.model.enough()
    finally:
        learner.pipe.close()
    limit = time.monotonic() + 20
    while learner.processes() and time.monotonic() < limit:
        time.sleep(0.05)
    assert not learner.processes(), 'processes are left'
    return dict(found, seconds=round(seconds, 2))


FILE = Path(__file__).resolve().parent.parent / 'benchmarks' / 'results' / 'survived.json'


def main(*values):
    "Try all cells, or those that have these values, and write what was seen"
    start_ray()
    tried = [cell for cell in CELLS if {*values} <= {*cell}]
    found = json.loads(FILE.read_text())['cells'] if values else {}
    for cell in tried:
        with tempfile.TemporaryDirectory() as folder:
            found[' '.join(cell)] = seen(cell, folder)
        print(*cell, found[' '.join(cell)], flush=True)
    cells = {name: found[name] for name in map(' '.join, CELLS) if name in found}
    FILE.write_text(json.dumps(dict(axes=AXES, cells=cells), indent=1) + '\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
