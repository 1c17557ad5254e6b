"""What goes with what: memories, stores, places and uses.

Each combination works as a plain model says, or is refused when it is made.
`python tests/combinations.py` writes the table that the site shows; `test_combinations.py` tries
each pair of values."""

import copy, io, itertools, json, os, pickle, re
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np, torch
from torch.utils.data import DataLoader

from fastrl_replay.all import *
from plain_model import (
    ACTIONS,
    ALPHA,
    BETA,
    BURN_IN,
    EPS,
    ETA,
    GAMMA,
    LENGTH,
    MAX_SZ,
    N_ENVS,
    N_STEP,
    OVERLAP,
    SPACE,
    Agent,
    MixedModel,
    Model,
    block,
    compute_reward,
    difference,
    merged,
    names,
    single,
    values,
    worlds,
)

BS, DEVICE = 6, 'cuda' if torch.cuda.is_available() else 'cpu'

# ---- memory, store, place ----


class Oldest(Sampler):
    "A sampler of one's own: the older half of the keys"

    def _half(self):
        return max(len(self) // 2, 1)

    def sample(self, n):
        return self.first + (self.random(n) * self._half()).astype(np.int64), np.full(
            n, 1 / self._half()
        )

    def probabilities(self):
        return (np.arange(len(self)) < self._half()) / self._half()


SETTINGS = dict(alpha=ALPHA, beta=BETA, eps=EPS)
MEMORIES = dict(
    uniform=lambda source, **kw: ExperienceReplay(source, seed=1, **kw),
    proportional=lambda source, **kw: PrioritizedReplay(source, seed=1, **SETTINGS, **kw),
    rank=lambda source, **kw: PrioritizedReplay(source, kind='rank', seed=1, **SETTINGS, **kw),
    own_sampler=lambda source, **kw: PrioritizedReplay(source, sampler=Oldest(1), **kw),
    sequences=lambda source, **kw: SequenceReplay(
        source, length=LENGTH, burn_in=BURN_IN, overlap=OVERLAP, eta=ETA, seed=1, **SETTINGS, **kw
    ),
    hindsight=lambda source, **kw: HindsightReplay(source, reward=compute_reward, seed=1, **kw),
)
STORES = dict(
    rows=Rows,
    frames=lambda **kw: Frames(2, **kw),
    lz4=lambda **kw: Frames(2, 'lz4', **kw),
    zstd=lambda **kw: Frames(2, 'zstd', **kw),
)
PLACES = 'main', 'directory', 'device'


class Cell(NamedTuple):
    memory: str
    store: str
    place: str
    use: str
    folder: Path = Path()  # for what lies in directories

    def make_store(self, name='memory', **kw):
        place = dict(main={}, directory=dict(path=self.folder / name), device=dict(device=DEVICE))[
            self.place
        ]
        return STORES[self.store](**place, **kw)

    def make(self, memory, source, name, ahead={}, **kw):
        store = self.make_store(name, **kw)
        return MEMORIES[memory](source, bs=BS, max_sz=MAX_SZ, store=store, **ahead)

    def replay(self, source=None, name='memory', other={}, **kw):
        "A memory of this kind; a mixture's second has no source, and its store `other` settings"
        if self.memory != 'mixture':
            return self.make(self.memory, source, name, **kw)
        return Mixture(
            dict(
                online=self.make('proportional', source, name, **kw),
                other=self.make('uniform', None, f'{name}-other', **{**kw, **other}),
            )
        )

    def model(self, **kw):
        return MixedModel(**kw) if self.memory == 'mixture' else Model(self.memory, **kw)


def fill(replay, model, first=0, n=20):
    "Rows into a memory and its model; a mixture has them twice"
    rows = names(n, first)
    for i in range(0, len(rows), 10):
        if isinstance(replay, Mixture):
            replay.add(block(rows[i : i + 10]), 'online')
        else:
            replay.add(block(rows[i : i + 10]))
    model.add(rows)
    fill_other(replay, model, rows)


def fill_other(replay, model, rows=names(20)):
    if not isinstance(replay, Mixture):
        return
    if replay.replays['other'].store.mode != 'r':
        replay.add(block(rows, model.parts[1].row), 'other')
    model.parts[1].add(
        [name for name in rows for _ in range(model.shards)]
    )  # each shard has all of them


# ---- uses: how each is made, and what it must give ----


class Tap(Pipe):
    "Lets a model see what comes into a memory"

    def __init__(self, source, model):
        super().__init__(source)
        self.model = model

    def __iter__(self):
        for steps in self.source:
            self.model.add(zip(*(steps[k].tolist() for k in ('env_id', 'episode_n', 'step_n'))))
            yield steps


def stepper():
    return GymStepper(worlds(), Agent(), seed=0)


def drawn(pipe, model, n=32, tell=True):
    "So many batches, compared with the model, and answered"
    batches = []
    for batch in islice(pipe, n):
        model.check(batch)
        if tell:
            model.tell(batch)
        batches.append(batch)
    return batches


class OwnLoop:
    def __init__(self, cell):
        self.replay, self.model = cell.replay(), cell.model()

    def check(self):
        for i in range(0, 48, 8):
            fill(self.replay, self.model, 2 * i, 16)
            for _ in range(5):
                batch = self.replay.sample()
                self.model.check(batch)
                self.model.tell(batch)
        self.model.enough()

    def close(self):
        self.replay.close()


class Chain:
    "Rows come from a stepper; subclasses put something before the memory, or after it"

    late, rows, ahead = 0, staticmethod(single), {}

    def __init__(self, cell, model=None):
        self.model = model or cell.model(row=self.rows, late=self.late)
        self.replay = cell.replay(self.before(), ahead=self.ahead)
        self.pipe = self.after(self.replay)

    def before(self):
        return Tap(stepper(), self.model)

    def after(self, replay):
        return replay

    def check(self):
        fill_other(self.replay, self.model)
        drawn(self.pipe, self.model)
        self.model.enough()

    def close(self):
        self.pipe.close()


class AfterNStep(Chain):
    rows = staticmethod(merged)

    def before(self):
        return Tap(stepper().n_step(N_STEP, GAMMA), self.model)


class MergedWhenDrawn(Chain):
    ahead = dict(n=N_STEP, gamma=GAMMA)


class Prefetched(Chain):
    late = 4

    def after(self, replay):
        return replay.prefetch(2)


class Workers(Chain):
    def before(self):
        return Tap(stepper().parallel(2, chunk=2, method='fork'), self.model)


class Apart(Chain):
    "Copies of a memory in processes; what a mixture on disk has besides, all of them read"

    def __init__(self, cell):
        self.model, reads = (
            cell.model(late=self.late),
            (cell.memory, cell.place) == ('mixture', 'directory'),
        )
        if reads:
            with cell.make('uniform', None, 'memory-other') as writer:
                writer.add(block(names(20), self.model.parts[1].row))
        self.replay = cell.replay(stepper(), other=dict(mode='r') if reads else {})
        self.pipe = self.after(self.replay)


class Shards(Apart):
    late = 8
    engine = dict(method='fork')

    def __init__(self, cell):
        super().__init__(cell)
        self.model.shards = 2

    def after(self, replay):
        return replay.parallel(2, chunk=1, **self.engine)


class RayShards(Shards):
    engine = dict(engine=RayEngine(num_cpus=0.5))


class Loader(Apart):
    "In two processes of a DataLoader, which number rows alike"

    def check(self):
        fill_other(self.replay, self.model)
        models = {}
        for batch in islice(
            DataLoader(self.pipe, batch_size=None, num_workers=2, multiprocessing_context='fork'),
            24,
        ):
            worker = int(batch['env_id'].reshape(-1)[0]) // N_ENVS
            models.setdefault(worker, copy.deepcopy(self.model)).check(batch)
        assert {*models} == {0, 1}


class Checkpoint(Chain):
    "Saved in the middle, and gone on with in another chain, as one that was never saved"

    def __init__(self, cell):
        super().__init__(cell)
        self.cell, self.twin = cell, Chain(cell._replace(folder=cell.folder / 'twin'))

    def check(self):
        for c in self, self.twin:
            fill_other(c.replay, c.model)
        whole = drawn(self.twin.pipe, self.twin.model)
        first = drawn(self.pipe, self.model, 16)
        file = io.BytesIO()
        torch.save(self.pipe.state_dict(), file)
        self.pipe.close()
        second = Chain(self.cell, self.model)
        second.pipe.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        rest = drawn(second.pipe, self.model, 16)
        second.close()
        assert all(a == b for a, b in zip(whole, first + rest)) and len(whole) == len(first + rest)

    def close(self):
        super().close()
        self.twin.close()


class Copies:
    "Pickled, and copied: each draws what the first one draws"

    def __init__(self, cell):
        self.replay, self.model = cell.replay(), cell.model()
        fill(self.replay, self.model)
        for _ in range(6):
            self.draw(self.replay)
        self.copies = [pickle.loads(pickle.dumps(self.replay)), copy.deepcopy(self.replay)]

    def draw(self, replay, model=None):
        batch, model = replay.sample(), model or self.model
        model.check(batch)
        model.tell(batch)
        return batch

    def check(self):
        models = [copy.deepcopy(self.model) for _ in range(3)]
        seen = [
            [self.draw(r, m) for _ in range(4)] for r, m in zip((self.replay, *self.copies), models)
        ]
        assert seen[0] == seen[1] == seen[2]

    def close(self):
        self.replay.close()


class Reader:
    "A second memory, that reads while the first one writes"

    def __init__(self, cell):
        cell.make_store(mode='r')  # or it is refused
        self.replay, self.model = cell.replay(), cell.model()
        fill(self.replay, self.model)
        for _ in range(6):
            self.draw(self.replay)
        self.reader = cell.replay(mode='r')

    def check(self):
        for _ in range(6):
            self.model.check(self.reader.sample())
        self.model.enough()
        fill(self.replay, self.model, 20, 8)  # it grows meanwhile
        for _ in range(6):
            self.model.check(self.reader.sample())
        for _ in range(3):
            assert Copies.draw(self, self.replay)

    draw = Copies.draw

    def close(self):
        self.reader.close()
        self.replay.close()


class FromRecords:
    "Recorded rows of another memory, and no environment"

    def __init__(self, cell):
        self.model, self.folder = cell.model(), cell.folder / 'records'
        self.pipe = cell.replay().offline(self.folder)

    def check(self):
        self.model.add(names(MAX_SZ // N_ENVS))
        records = Timeline(MAX_SZ, Rows(self.folder))
        records.add(block(names(MAX_SZ // N_ENVS)))
        records.close()
        drawn(self.pipe, self.model, 20)
        self.model.enough()

    def close(self):
        self.pipe.close()


class Adapter:
    "For agents of Stable-Baselines3, which know no keys: rows are identified by their content"

    asks = dict(
        uniform={},
        proportional=dict(kind='proportional'),
        rank=dict(kind='rank'),
        own_sampler=dict(sampler=Oldest(1)),
        sequences=dict(length=LENGTH),
        hindsight=dict(share=0.8),
        mixture=dict(shares={}),
    )

    def __init__(self, cell):
        from fastrl_replay.sb3 import ReplayBuffer

        self.replay = ReplayBuffer(
            MAX_SZ, SPACE, ACTIONS, 'cpu', N_ENVS, store=cell.make_store(), **self.asks[cell.memory]
        )

    def check(self):
        rows = [single(*name) for name in names(30)]
        for i in range(0, len(rows), N_ENVS):
            some = rows[i : i + N_ENVS]
            state, after = (
                {k: np.stack([r[column][k] for r in some]) for k in SPACE}
                for column in ('state', 'next_state')
            )
            ends = np.array([r['terminated'] or r['truncated'] for r in some])
            action = np.array([[r['action']] for r in some])
            reward = np.array([r['reward'] for r in some])
            infos = [{'TimeLimit.truncated': r['truncated']} for r in some]
            self.replay.add(state, after, action, reward, ends, infos)
            if i >= MAX_SZ:
                self.check_batch(rows[i + N_ENVS - MAX_SZ : i + N_ENVS])

    def check_batch(self, rows):
        batch, here = self.replay.sample(BS), {place(row['state']): row for row in rows}
        goals = batch.observations['achieved_goal'].numpy()
        drawn = [here[tuple(goal.tolist())] for goal in goals]
        columns = dict(action=batch.actions, reward=batch.rewards, terminated=batch.dones)
        for k in SPACE:
            columns[f'state.{k}'] = batch.observations[k]
            columns[f'next_state.{k}'] = batch.next_observations[k]
        for name, x in columns.items():
            want = values(drawn, name)
            assert (x.numpy().reshape(want.shape) == want).all(), name

    def close(self):
        self.replay.memory.close()


def place(state):
    return tuple(np.ravel(state['achieved_goal']).tolist())  # no two rows have the same


class Export:
    "A data set of Minari"

    def __init__(self, cell):
        self.replay, self.model = cell.replay(), cell.model()
        fill(self.replay, self.model)
        os.environ['MINARI_DATASETS_PATH'] = str(cell.folder / 'minari')
        self.data = write_minari(
            self.replay, 'world/cell-v0', observation_space=SPACE, action_space=ACTIONS
        )

    def check(self):
        here = {
            place(row['state']): row
            for key, row in self.model.rows.items()
            if key > self.model.newest - MAX_SZ
        }
        for part in read_minari(self.data):
            wanted = [here.pop(place(row['state'])) for row in part.rows]
            wrong = difference(
                part.rows,
                wanted,
                ('truncated', 'env_id', 'episode_n', 'step_n', 'total_reward', 'seed'),
            )
            assert not wrong, wrong
        assert not here

    def close(self):
        self.replay.close()


USES = dict(
    own_loop=OwnLoop,
    chain=Chain,
    n_step=AfterNStep,
    n_when_drawn=MergedWhenDrawn,
    prefetch=Prefetched,
    workers=Workers,
    shards=Shards,
    ray_shards=RayShards,
    data_loader=Loader,
    sb3=Adapter,
    offline=FromRecords,
    checkpoint=Checkpoint,
    copies=Copies,
    reader=Reader,
    export=Export,
)
AXES = dict(memory=[*MEMORIES, 'mixture'], store=[*STORES], place=[*PLACES], use=[*USES])
CELLS = [Cell(*values) for values in itertools.product(*AXES.values())]

# ---- what does not go together ----


class Rule(NamedTuple):
    "Cells that have one of the values named, on each axis that is named"

    why: str
    says: str  # a regular expression: what is raised
    memory: str = ''
    store: str = ''
    place: str = ''
    use: str = ''

    def holds(self, cell):
        return all(
            getattr(cell, axis) in (getattr(self, axis).split() or [getattr(cell, axis)])
            for axis in AXES
        )


REFUSED = [  # when it is made
    Rule(
        'frames on a device are not packed: codecs run in main memory',
        'cannot be compressed',
        store='lz4 zstd',
        place='device',
    ),
    Rule(
        'recorded rows go into one replay; fill those of a mixture by add',
        'a replay without a source',
        memory='mixture',
        use='offline',
    ),
    Rule(
        'a mixture has no rows; write the memory of each replay',
        "one of its replays",
        memory='mixture',
        use='export',
    ),
    Rule(
        'agents of Stable-Baselines3 draw uniformly from one buffer, take no weights '
        'and return no errors',
        'unexpected keyword',
        memory='proportional rank own_sampler mixture',
        use='sb3',
    ),
    Rule(
        'off-policy agents of Stable-Baselines3 learn from single transitions '
        'and have no recurrent networks',
        'unexpected keyword',
        memory='sequences',
        use='sb3',
    ),
    Rule(
        "relabeling needs the environment's compute_reward, "
        "and Stable-Baselines3 passes its environment to HerReplayBuffer alone",
        'unexpected keyword',
        memory='hindsight',
        use='sb3',
    ),
    Rule(
        'under another goal a reward is computed anew, from one outcome; '
        'a row of several steps has the sum of its rewards and the last outcome, '
        'but not the outcomes in between',
        'cannot follow',
        memory='hindsight',
        use='n_step',
    ),
    Rule(
        'rewards depend on the goal that a row gets when it is drawn',
        'need rows whose rewards stay',
        memory='hindsight',
        use='n_when_drawn',
    ),
    Rule(
        'only what lies in a directory can be read by another process',
        'need a path',
        place='main device',
        use='reader',
    ),
    Rule(
        "a directory has one writer; memories with mode='r' are copied",
        'is in use',
        place='directory',
        use='copies',
    ),
]


def refusals(cell):
    return [rule for rule in REFUSED if rule.holds(cell)]


def pairs(cell):
    return set(itertools.combinations(cell[:4], 2))


def covering(cells, seen=()):
    "Return few cells that contain each pair of values of all cells, except pairs of `seen` cells"
    pairs_of, found = {cell: pairs(cell) for cell in cells}, []
    left = set().union(*pairs_of.values()).difference(*map(pairs, seen))
    while left:
        found.append(max(cells, key=lambda cell: len(pairs_of[cell] & left)))
        left -= pairs_of[found[-1]]
    return found


# ---- what comes of a cell ----


def works(cell, folder):
    "Make it and use it, or see that it is refused when it is made; did it work?"
    try:
        made = USES[cell.use](cell._replace(folder=Path(folder)))
    except Exception as error:
        if any(re.search(rule.says, str(error)) for rule in refusals(cell)):
            return False
        raise
    try:
        made.check()
    finally:
        made.close()
    return True


# ---- the table ----

FILE = Path(__file__).resolve().parent.parent / 'benchmarks' / 'results' / 'combinations.json'
LETTERS = {rule: chr(ord('a') + i) for i, rule in enumerate(REFUSED)}


def mark(cell):
    "A dot where it works, else the letter of the reason"
    rules = refusals(cell)
    return LETTERS[rules[0]] if rules else '.'


def table():
    "What is declared, as plain data: in each cell, the stores one after the other"

    def marks(use, memory, place):
        return ''.join(mark(Cell(memory, store, place, use)) for store in AXES['store'])

    cells = {
        use: {
            memory: {place: marks(use, memory, place) for place in AXES['place']}
            for memory in AXES['memory']
        }
        for use in AXES['use']
    }
    marks_of_all = [mark(cell) for cell in CELLS]
    n_works = marks_of_all.count('.')
    reasons = {
        letter: dict(
            kind='refused',
            why=rule.why,
            where={axis: getattr(rule, axis).split() for axis in AXES if getattr(rule, axis)},
            cells=marks_of_all.count(letter),
        )
        for rule, letter in LETTERS.items()
    }
    counts = dict(works=n_works, refused=len(CELLS) - n_works, faulty=0)
    return dict(axes=AXES, counts=counts, reasons=reasons, cells=cells)


if __name__ == '__main__':
    FILE.write_text(json.dumps(table(), indent=1) + '\n')
