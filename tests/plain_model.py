"""A small world of which every row can be worked out, and a plain model of a memory of it.

The model is a dict of key → row, without library code."""

from functools import lru_cache, partial

import gymnasium as gym, numpy as np, torch
from gymnasium import spaces
from fastrl_replay.all import Steps, step_dtype

N_ENVS, MAX_SZ, N_STEP, GAMMA = 2, 28, 3, 0.5
ALPHA, BETA, ETA, EPS = 0.5, 0.5, 0.9, 1e-6
LENGTH, BURN_IN, OVERLAP = 4, 1, 2

# ---- the world: everything is a function of environment, episode and time ----

SPACE = spaces.Dict(
    observation=spaces.Box(0, 255, (2, 8, 8), np.uint8),
    achieved_goal=spaces.Box(-np.inf, np.inf, (2,), np.float32),
    desired_goal=spaces.Box(-np.inf, np.inf, (2,), np.float32),
)
ACTIONS = spaces.Discrete(3)
HIDDEN = np.dtype(('f4', (1,)))


def picture(env, episode, t):
    return (np.arange(64) * (env + 1) + 7 * episode + 3 * max(t, 0)).reshape(8, 8) % 256


def length_of(env, episode):
    return (5, 3, 7)[(env + episode) % 3]


def action_at(env, episode, t):
    return int(picture(env, episode, t)[0, 1]) % 3


def compute_reward(achieved, desired, info):
    return -np.abs(achieved - desired).sum(-1) / 8


def observation(env, episode, t):
    "After `t` steps: the last two pictures, where it is, where it should be"
    return dict(
        achieved_goal=np.array([t + 10 * episode, 100 * env + t * t], np.float32),
        desired_goal=np.array([3 * episode + 0.5, 7 + env], np.float32),
        observation=np.stack([picture(env, episode, t - 1), picture(env, episode, t)]).astype(
            np.uint8
        ),
    )


@lru_cache(None)
def single(env_id, episode, step):
    "The row of one step, as a dict"
    env, last = env_id % N_ENVS, length_of(env_id % N_ENVS, episode)
    before, after = (observation(env, episode, t) for t in (step - 1, step))
    rewards = [
        float(
            compute_reward(observation(env, episode, t)['achieved_goal'], after['desired_goal'], {})
        )
        for t in range(1, step + 1)
    ]
    return dict(
        state=before,
        action=action_at(env, episode, step - 1),
        reward=rewards[-1],
        next_state=after,
        terminated=step == last and episode % 2 == 0,
        truncated=step == last and episode % 2 == 1,
        env_id=env_id,
        episode_n=episode,
        step_n=step,
        total_reward=sum(rewards),
        hidden=[float(sum(1 + action_at(env, episode, t) for t in range(step - 1)))],
    )


@lru_cache(None)
def merged(env_id, episode, step, n=N_STEP):
    "The row that `n` steps make together"
    n = min(n, length_of(env_id % N_ENVS, episode) - step + 1)
    rows = [single(env_id, episode, step + i) for i in range(n)]
    last = {k: rows[-1][k] for k in ('next_state', 'terminated', 'truncated')}
    return dict(
        rows[0],
        **last,
        reward=sum(GAMMA**i * r['reward'] for i, r in enumerate(rows)),
        discount=GAMMA**n * (not last['terminated']),
        n=n,
    )


class World(gym.Env):
    "The same as an environment"

    observation_space, action_space = SPACE, ACTIONS

    def __init__(self, env):
        self.env, self.episode, self.t = env, 0, 0

    def _now(self):
        return observation(self.env, self.episode, self.t)

    def compute_reward(self, achieved, desired, info):
        return compute_reward(achieved, desired, info)

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return self._now(), {}

    def step(self, action):
        self.t += 1
        row = single(self.env, self.episode, self.t)
        assert int(action) == row['action']
        return self._now(), row['reward'], row['terminated'], row['truncated'], {}


class Agent:
    "Acts by what it sees, and counts what it did: a recurrent policy"

    def initial_hidden(self, n):
        return torch.zeros(n, 1)

    def __call__(self, state, hidden):
        action = state['observation'][:, 1, 0, 1].long() % 3
        return action, hidden + 1 + action[:, None]


def worlds():
    return [partial(World, e) for e in range(N_ENVS)]


# ---- rows for who adds them ----

ROWS = {
    single: step_dtype(SPACE, ACTIONS, hidden=HIDDEN),
    merged: step_dtype(SPACE, ACTIONS, hidden=HIDDEN, discount='f4', n='i4'),
}


def _write(field, x):
    for k in field.dtype.names or ():
        _write(field[k], [v[k] for v in x])
    if not field.dtype.names:
        field[...] = np.array(x).reshape(field.shape)


def block(names, row=single):
    "The rows of these (environment, episode, step) as a block"
    rows = np.zeros(len(names), ROWS[row])
    _write(rows, [row(*name) for name in names])
    return Steps(rows)


def names(n, first=0):
    "The names of `n` rows of each environment, in turn, after the first ones"
    each = []
    for e in range(N_ENVS):
        story = (
            (e, episode, step)
            for episode in range(1, n + first + 1)
            for step in range(1, length_of(e, episode) + 1)
        )
        each.append([name for name, _ in zip(story, range(first + n))][first:])
    return [name for turn in zip(*each) for name in turn]


# ---- the model ----


def values(rows, column):
    "One part of plain rows, such as state.observation"
    for part in column.split('.'):
        rows = [row[part] for row in rows]
    return np.array(rows)


def columns(dtype, at=''):
    "The names of all parts of rows"
    return [
        c
        for n in dtype.names
        for c in (columns(dtype[n], f'{at}{n}.') if dtype[n].names else [at + n])
    ]


def difference(found, wanted, without=()):
    "Which part of which row is another than it should be; None: all are as wanted"
    for c in columns(found.dtype):
        if c in without:
            continue
        x, y = found, values(wanted, c)
        for part in c.split('.'):
            x = x[part]
        good = np.abs(x.reshape(len(x), -1) - y.astype(float).reshape(len(x), -1)) <= 1e-6 * np.abs(
            y.reshape(len(x), -1)
        )
        if not good.all():
            i = int((~good.all(1)).argmax())
            return f'row {name_of(wanted[i])}, {c}: {x[i]} instead of {y[i]}'


def name_of(row):
    return int(row['env_id']), int(row['episode_n']), int(row['step_n'])


def error_of(key):
    return 1 + key * 7 % 11  # what the learner finds for each row


class Model:
    "What a memory must hold, and what batches of it may look like"

    def __init__(self, kind, row=single, late=0, max_sz=MAX_SZ, cut=False):
        self.kind, self.row, self.late, self.max_sz = (
            kind,
            row,
            late,
            max_sz,
        )  # late: so many batches may be drawn before an error arrives
        # True: an episode may break off anywhere, and a sequence under way may begin with zeros,
        # as on disk after a crash
        self.cut = cut
        self.rows, self.told, self.batches, self.newest = {}, {}, 0, -1
        self.compared = self.relabeled = 0
        self.sees_rows = (
            False  # False: rows come in elsewhere, and are known by their names when they are drawn
        )

    def add(self, names):
        self.sees_rows = True
        for name in names:
            self.rows[len(self.rows)] = self.row(*name)
        self.newest = len(self.rows) - 1

    def wanted(self, key, found):
        "The row of this key"
        if not self.sees_rows:
            self.newest = max(self.newest, key)
            self.rows.setdefault(key, self.row(*name_of(found)))
        assert self.newest - self.max_sz * (1 + bool(self.late)) < key <= self.newest, (
            f'key {key}, newest {self.newest}'
        )
        return self.rows[key]

    def check(self, batch):
        "Raise where a batch is not what it should be"
        batch = batch.to('cpu')
        self.check_rows(
            batch.rows,
            batch['index'].tolist(),
            batch['weight'].tolist(),
            batch if self.kind == 'sequences' else None,
        )

    def taken_apart(self, rows):
        "The single rows behind rows that were merged when drawn; raise if these are wrong"
        flat = rows.reshape(-1)
        real = flat['step_n'] > 0
        found = [name_of(row) for row in flat[real]]
        counts = flat['n'][real].tolist()
        wanted = [merged(*name, n=n) for name, n in zip(found, counts)]
        wrong = difference(flat[real], wanted, {'index', 'weight', 'mask', 'replay', 'hidden'})
        assert not wrong, wrong
        newest = {row['env_id']: name_of(row) for row in self.rows.values()}
        for (env_id, episode, step), n in zip(found, counts):
            rest = length_of(env_id % N_ENVS, episode) - step + 1
            is_newest = newest[env_id] == (env_id, episode, step + n - 1)
            assert n == min(N_STEP, rest) or is_newest, f'{n} of {rest} steps were merged'
        names = [c for c in rows.dtype.names if c not in ('discount', 'n')]
        single_rows = block(found).rows
        out = np.zeros(len(flat), np.dtype([(c, rows.dtype[c]) for c in names], align=True))
        for c in names:
            out[c] = flat[c]
            if c in ('reward', 'next_state', 'terminated', 'truncated'):
                out[c][real] = single_rows[c]
        return out.reshape(rows.shape)

    def check_rows(self, rows, keys, weights, sequences=None):
        if 'n' in rows.dtype.names and self.row is single:
            rows = self.taken_apart(rows)
        first = rows[:, 0] if sequences is not None else rows
        wanted = [self.wanted(key, row) for key, row in zip(keys, first)]
        if sequences is not None:
            hidden = zip(sequences['hidden'].tolist(), wanted)
            assert all(h == row['hidden'] or self.cut and h == [0] for h, row in hidden), (
                'hidden states of sequences'
            )
            rows, wanted = self.steps(rows, wanted)
        if self.kind == 'hindsight':
            wanted = [
                self.with_goal(row, goal)
                for row, goal in zip(wanted, rows['state']['desired_goal'])
            ]
        stamped = {'index', 'weight', 'mask', 'replay'}
        assert {*rows.dtype.names} - stamped == wanted[0].keys() - (
            {'hidden'} if sequences is not None else {}
        )
        wrong = difference(rows, wanted, stamped)
        assert not wrong, wrong
        self.check_weights(keys, weights)
        self.batches += 1

    def with_goal(self, row, goal):
        "The row with this goal, which was achieved in its episode by this step or later"
        if (goal == row['state']['desired_goal']).all():
            return row
        env_id, episode, step = name_of(row)
        env, later = env_id % N_ENVS, range(step, length_of(env_id % N_ENVS, episode) + 1)
        assert any((goal == observation(env, episode, t)['achieved_goal']).all() for t in later), (
            f'row {name_of(row)} has the goal {goal}'
        )
        self.relabeled += 1
        state, after = (dict(row[k], desired_goal=goal) for k in ('state', 'next_state'))
        return dict(
            row,
            state=state,
            next_state=after,
            reward=compute_reward(after['achieved_goal'], goal, {}),
        )

    def steps(self, rows, first):
        "The steps of sequences, and what they must be; after an episode's end there is nothing"
        found, wanted = [], []
        for row, begins in zip(rows, first):
            env_id, episode, step = name_of(begins)
            whole, n = length_of(env_id % N_ENVS, episode), int(row['mask'].sum())

            def fits(steps):
                starts = {*range(0, steps - LENGTH + 1, LENGTH - OVERLAP), max(steps - LENGTH, 0)}
                return step - 1 in starts and row['mask'].tolist() == [
                    i < min(steps, LENGTH) for i in range(LENGTH)
                ]

            assert any(map(fits, range(1, whole + 1) if self.cut else [whole])), (
                f'sequence {name_of(begins)}, {row["mask"]}'
            )
            assert (row[n:] == np.zeros(LENGTH - n, row.dtype)).all()
            found.append(row[:n])
            wanted += [self.row(env_id, episode, step + i) for i in range(n)]
        return np.concatenate(found), wanted

    def check_weights(self, keys, weights):
        """Check the weights of rows whose errors have arrived.

        Larger errors have smaller weights; proportional weights follow the formula."""
        known = [
            (self.told[k][0], w)
            for k, w in zip(keys, weights)
            if k in self.told and self.told[k][1] + self.late <= self.batches
        ]
        self.compared += len({e for e, _ in known}) > 1
        if self.kind == 'rank':
            good = all(v >= w or np.isclose(v, w) for d, v in known for e, w in known if d < e)
        elif self.kind in ('proportional', 'sequences'):
            good = (
                np.ptp([np.log(w) + ALPHA * BETA * np.log(e + EPS) for e, w in known] or [0]) < 1e-4
            )
        else:
            good = max(weights) - min(weights) < 1e-6
        assert good, f'errors and weights: {known or weights}'

    def tell(self, batch):
        "Errors go back to what they are of"
        keys = batch['index'].tolist()
        self.note(keys)
        td = torch.tensor([float(error_of(k)) for k in keys])
        batch.update_priorities(
            td[:, None].expand(-1, LENGTH - BURN_IN) if self.kind == 'sequences' else td
        )

    def note(self, keys):
        self.told.update((k, (error_of(k), self.batches)) for k in keys if k not in self.told)

    def enough(self):
        "Was there something to compare?"
        assert self.batches
        if self.kind in ('proportional', 'rank', 'sequences'):
            assert self.compared
        if self.kind == 'hindsight':
            assert self.relabeled


class MixedModel:
    """The same for a mixture of a prioritized and a uniform replay, or several in shards.

    Their keys are told apart."""

    shards = 1

    def __init__(self, row=single, late=0, max_sz=MAX_SZ):
        self.parts = Model('proportional', row, late, max_sz), Model('uniform', row, late, max_sz)

    def add(self, names):
        self.parts[0].add(names)

    def divided(self, batch):
        "Keys as the parts have them, and which part each is of"
        key, shard = np.divmod(batch['index'].cpu().numpy(), self.shards)
        return key // 2 * self.shards + shard, key % 2

    def check(self, batch):
        batch = batch.to('cpu')
        keys, which = self.divided(batch)
        assert (batch['replay'].numpy() == which).all() and {*which.tolist()} == {0, 1}
        for i, part in enumerate(self.parts):
            part.check_rows(
                batch.rows[which == i],
                keys[which == i].tolist(),
                batch['weight'].numpy()[which == i].tolist(),
            )

    def tell(self, batch):
        keys, which = self.divided(batch)
        for i, part in enumerate(self.parts):
            part.note(keys[which == i].tolist())
        batch.update_priorities(torch.tensor([float(error_of(k)) for k in keys.tolist()]))

    def enough(self):
        for part in self.parts:
            part.enough()
