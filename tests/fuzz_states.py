"""Saved states, damaged at random: each is refused in words and nothing has changed, or taken, and the chain goes on.

`python tests/fuzz_states.py --count 20000 --seed 0` tries many, `--only NAME` one target, `--case NAME:SEED` a single
case, in this process and with its traceback."""

import argparse, faulthandler, gc, io, json, os, re, resource, signal, sys, threading, time, traceback, warnings, zlib
from collections import Counter, OrderedDict, defaultdict
from copy import deepcopy
from functools import cache
from itertools import islice

import gymnasium as gym, numpy as np, torch
from gymnasium import spaces
from torch import nn

import fastrl_replay
from fastrl_replay.all import *
from fastrl_replay.steps.batches import each_of
from fastrl_replay.steps.core import pack
from fastrl_replay.steps.errors import Explained
from fastrl_replay.steps.row_dtypes import extend_dtype, padding, spec_dtype
from fastrl_replay.memory.frames import Frames
from fastrl_replay.pipe import _stages
from fastrl_replay.app.recipe_settings import recipe
from fastrl_replay.app.recipes import Agent
from fastrl_replay.replay.replay import Replay
from fastrl_replay.testing import through_file
from scripted import Remember, cartpole, makers, vector, zeros

ON, SECONDS, ROOM = (
    4,
    20,
    2 << 30,
)  # items after a load, and what a case may take of time and of further memory

# ---- chains in the middle of something ----

SCRIPTS = script(3, -2, 1), script(1, 4, -1, env=1), script(-6, env=2)
BLOCKS = scripted_steps(SCRIPTS, 80)
PLANE, THREE = spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(3)


class Scaled:
    "A function with a state that it checks itself, when all else has been looked at"

    n = 1

    def __call__(self, steps):
        steps, self.n = steps.copy(), self.n + 1
        steps.reward.mul_(self.n)
        return steps

    def state_dict(self):
        return dict(n=self.n)

    def load_state_dict(self, state):
        if (
            not isinstance(state, dict)
            or type(state.get('n')) is not int
            or not 0 < state['n'] < 1000
        ):
            raise StateError('Scaled', 'n', repr(state)[:40])
        self.n = state['n']


class Naive(Scaled):
    "The same without a look: what is wrong is an error of Python's, halfway"

    def load_state_dict(self, state):
        self.n = 0
        self.n += int(state['n']) % 100


class Noisy(DQNLearner):
    "A learner with a generator"

    seed = 3


def handled():
    "An environment that can't be saved"
    env = cartpole()
    env.unwrapped.handle = threading.Lock()
    return env


def net(kind, *args, space=PLANE, actions=THREE):
    torch.manual_seed(7)
    return kind(space, actions, *args)


def cart(kind, *args):
    env = cartpole()
    return net(kind, *args, space=env.observation_space, actions=env.action_space)


def lake():
    env = gym.make('FrozenLake-v1')
    return QTable(env.observation_space, env.action_space)


TORQUE = spaces.Box(-2, 6, (1,))


def torques(steps):
    "The same steps with numbers for actions"
    rows = np.zeros(len(steps), step_dtype(PLANE, TORQUE))
    for n in rows.dtype.names:
        rows[n] = steps.rows[n][:, None] if n == 'action' else steps.rows[n]
    return Steps(rows)


def steered(spread):
    "An actor, critics, and the space of their actions"
    return net(actor_net, (4,), spread, actions=TORQUE), net(Critics, (4,), actions=TORQUE), TORQUE


def swings(spread):
    "An actor for a pendulum, and its space"
    space = spaces.Box(-2, 2, (1,))
    return net(actor_net, (4,), spread, space=spaces.Box(-8, 8, (3,)), actions=space), space


def explores(kind, *args):
    return EpsGreedy(cart(kind, *args), LinearSchedule(0.9, 0.1, 40), seed=1)


def blocks(n=None):
    return Items(BLOCKS[:n])


def sgd(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def uniform(source=None, **kw):
    return ExperienceReplay(source or blocks(), **{**dict(bs=4, max_sz=50, seed=0), **kw})


def per(source=None, **kw):
    return PrioritizedReplay(source or blocks(), **{**dict(bs=4, max_sz=50, seed=0), **kw})


def seqs(source=None, **kw):
    return SequenceReplay(
        source or blocks(),
        **{**dict(bs=2, max_sz=60, length=4, burn_in=1, overlap=2, seed=0), **kw},
    )


def agent(name, **changes):
    return Agent(recipe(name, **{**dict(steps=100_000, max_sz=100, bs=4), **changes}).settings)


def waits():
    "As an interrupt leaves it"
    gather = blocks().gather(7)
    gather._wait(BLOCKS[:2])
    return gather


def deep(name, **changes):
    return agent(name, warmup=20, train_every=4, ratio=0.5, target_every=5, **changes)


class Tiny(Frames):
    "Frames of a few bytes, in segments of two"

    least, smallest_segment = 1, 2


class Target:
    "A chain that can be built again and again, and how it is saved, restored and gone on with"

    # saved, held: items before a state is taken, and before one is loaded; exact: all that it has can be saved
    def __init__(self, build, saved=12, held=7, exact=True, slow=False):
        self.build, self.saved, self.held, self.exact, self.slow = build, saved, held, exact, slow

    def make(self):
        torch.manual_seed(0)
        return self.build()

    def save(self, c):
        return c.state_dict()

    def load(self, c, state):
        c.load_state_dict(state)

    def items(self, c):
        return iter(c)

    def pipe(self, c):
        return c

    def plain(self, state):
        return state  # as what is damaged

    def coded(self, state):
        return state  # and back


class OfAgent(Target):
    def items(self, c):
        return iter(c.pipe)

    def pipe(self, c):
        return c.pipe


class OfNode(Target):
    def make(self):
        c = super().make()
        c.reset()
        return c

    def load(self, c, state):
        c.reset(state)

    def items(self, c):
        return iter(c.__next__, self)

    def pipe(self, c):
        return c.source


class OfStateful(Target):
    "What is damaged is what its bytes are made of"

    def pipe(self, c):
        return c.source

    def plain(self, state):
        return torch.load(io.BytesIO(state['chain']), weights_only=True)

    def coded(self, state):
        file = io.BytesIO()
        torch.save(state, file)
        return dict(chain=file.getvalue())


TARGETS = {
    'items': Target(blocks),
    'header': Target(lambda: blocks().header(30)),
    'cycle': Target(lambda: blocks(5).cycle(9)),
    'map': Target(lambda: Header(blocks().map(Scaled()), 40).n_step(3, 0.9)),
    'naive': Target(lambda: blocks().map(Naive()).header(40)),
    'filter': Target(lambda: blocks().filter(lambda b: bool(b.reward[0] > 2))),
    'stepper': Target(lambda: GymStepper('CartPole-v1', seed=0), 30, 20),
    'scripted': Target(lambda: GymStepper(makers(SCRIPTS), zeros, seed=0)),
    'vector': Target(lambda: GymStepper(vector([cartpole] * 2, 'NextStep'), seed=0), 30, 20),
    'same-step': Target(lambda: GymStepper(vector([cartpole] * 2, 'SameStep'), seed=0), 30, 20),
    'disabled': Target(
        lambda: GymStepper([vector([cartpole] * 2, 'Disabled'), cartpole()], seed=0), 30, 20
    ),
    'unsaved': Target(lambda: GymStepper([handled, cartpole], seed=0), exact=False),
    'remember': Target(lambda: GymStepper(makers(SCRIPTS), Remember(), seed=0)),
    'recurrent': Target(lambda: GymStepper(['CartPole-v1'] * 2, explores(RecurrentNet, 4), seed=0)),
    'eps-greedy': Target(lambda: GymStepper('CartPole-v1', explores(value_net, (4,)), seed=0)),
    'piped': Target(
        lambda: Items(['CartPole-v1'] * 2).map(gym.make).in_memory_cache().cycle().gym_step(seed=0)
    ),
    'n-step': Target(lambda: blocks().n_step(3, 0.9)),
    'chunks': Target(lambda: blocks().chunk_sequences(4, 1), 13),
    'chunks-pad': Target(lambda: blocks().chunk_sequences(3, 2, 'pad'), 13),
    'uniform': Target(uniform),
    'uniform-full': Target(lambda: uniform(max_sz=20), 14, 9),
    'uniform-ratio': Target(
        lambda: uniform(max_sz=20, replacement=True, return_idxs=True, ratio=0.7, warmup=5)
    ),
    'proportional': Target(lambda: per(max_sz=30), 14, 9),
    'rank': Target(lambda: per(max_sz=30, kind='rank'), 14, 9),
    'max-ever': Target(lambda: per(initial='max_ever', stratified=False)),
    'max-ever-rank': Target(lambda: per(initial='max_ever', kind='rank')),
    'by-memory': Target(lambda: per(max_sz=20, weight_norm='memory', return_idxs=True)),
    'by-memory-rank': Target(lambda: per(max_sz=20, weight_norm='memory', kind='rank')),
    'by-column': Target(lambda: per(max_sz=20, initial='reward', ratio=0.7, warmup=5)),
    'frames': Target(lambda: uniform(max_sz=20, store=Tiny()), 20, 14),
    'frames-lz4': Target(lambda: per(max_sz=30, store=Tiny(2, 'lz4')), 20, 14),
    'frames-zstd': Target(lambda: per(max_sz=30, kind='rank', store=Tiny(1, 'zstd')), 40, 30),
    'frames-sequences': Target(lambda: seqs(max_sz=40, store=Tiny(1, 'lz4')), 20, 14),
    'sequences': Target(seqs),
    'sequences-rank': Target(lambda: seqs(kind='rank')),
    'sequences-full': Target(lambda: seqs(max_sz=24), 30, 25),
    'sequences-uniform': Target(lambda: seqs(kind='uniform', state='zero')),
    'sequences-hidden': Target(
        lambda: seqs(GymStepper(makers(SCRIPTS), Remember(), seed=0), max_sz=40), 20
    ),
    'prefetch': Target(lambda: uniform().prefetch(2)),
    'prefetch-idxs': Target(lambda: per(return_idxs=True, ratio=1.5).prefetch(2, 'cpu')),
    'prefetch-sequences': Target(lambda: seqs(ratio=0.7, warmup=8).prefetch(2)),
    'journal': Target(lambda: blocks().journal(200)),
    'gather': Target(lambda: blocks().journal().gather(7), 5, 4),
    'gather-waits': Target(lambda: waits().map(Scaled()), 0, 1),
    'dqn': Target(
        lambda: blocks().dqn(
            net(value_net, (4,)), lr=LinearSchedule(1e-3, 1e-4, 50), target_every=3, tau=0.5
        )
    ),
    'dqn-per': Target(
        lambda: per(blocks().n_step(2, 0.9)).dqn(net(value_net, (4,), True), target_every=3)
    ),
    'dqn-sgd': Target(lambda: blocks().dqn(net(value_net, (4,)), optimizer=sgd)),
    'dqn-seed': Target(lambda: Noisy(blocks(), net(value_net, (4,)))),
    'sac': Target(lambda: per(blocks().map(torques).n_step(2, 0.9)).sac(*steered(True), seed=0)),
    'td3': Target(lambda: blocks().map(torques).td3(*steered(False), seed=0)),
    'squashed': Target(
        lambda: GymStepper('Pendulum-v1', SquashedGaussian(*swings(True), random=9, seed=1), seed=0)
    ),
    'noise': Target(
        lambda: GymStepper('Pendulum-v1', GaussianNoise(*swings(False), random=9, seed=1), seed=0)
    ),
    'r2d2': Target(lambda: seqs().r2d2(net(RecurrentNet, 4), n=2, target_every=3)),
    'table': Target(lambda: uniform(GymStepper('FrozenLake-v1', seed=0)).q_learn(lake())),
    'agent': OfAgent(lambda: deep('cartpole', network=(8,))),
    'agent-per': OfAgent(lambda: deep('cartpole-per', network=(8,), envs=2)),
    'agent-r2d2': OfAgent(
        lambda: agent('cartpole-r2d2', network=4, envs=2, length=8, burn_in=2, overlap=4, warmup=20)
    ),
    'agent-sac': OfAgent(lambda: agent('pendulum-sac', network=(8,), warmup=20)),
    'agent-td3': OfAgent(lambda: agent('pendulum-td3', network=(8,), warmup=20)),
    'agent-taxi': OfAgent(lambda: agent('taxi', max_sz=50)),
    'parallel': Target(lambda: GymStepper('CartPole-v1', seed=0).parallel(0)),
    'workers': Target(
        lambda: (
            GymStepper(['CartPole-v1'] * 2, seed=0)
            .n_step(2, 0.9)
            .parallel(2, chunk=2, method='fork')
        ),
        slow=True,
    ),
    'stateful': OfStateful(lambda: blocks().n_step(3, 0.9).stateful()),
    'node': OfNode(lambda: blocks().n_step(3, 0.9).node()),
    'of-node': Target(lambda: Header(blocks().n_step(3, 0.9).node(), 40)),
}

# ---- what chains give, and what can be done with them ----


def bits(x):
    "The very bits of an item or a state, in what can be compared"
    if isinstance(x, Steps):
        return 'steps', bits(pack(x))
    if isinstance(x, torch.Tensor):
        raw = (
            x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            if x.numel()
            else b''
        )
        return 'tensor', str(x.dtype), tuple(x.shape), raw
    if isinstance(x, np.ndarray):
        return 'array', x.dtype.str, x.shape, x.tobytes()
    if isinstance(x, dict):
        return 'dict', *(
            (k, bits(v))
            for k, v in (without_padding(x) if 'rows' in x and 'dtype' in x else x).items()
        )
    if isinstance(x, (list, tuple)):
        return 'list', *map(bits, x)
    return type(x).__name__, repr(x)


def without_padding(x):
    "The rows that wait in a stage without the bytes that belong to no column: they are what lay there before"
    row = spec_dtype(x['dtype'])
    whole = {'rows': row, 'waiting': extend_dtype(row, mask='?')}
    x = {k: v.clone() if k in whole else v for k, v in x.items()}
    for k in whole.keys() & x.keys():
        x[k].view(-1, whole[k].itemsize)[:, padding(whole[k])] = 0
    return x


def told(item):
    "Say how wrong the learner was about a batch, in numbers that differ from row to row"
    batch = item[0] if isinstance(item, tuple) else item
    if not isinstance(batch, Steps) or batch._replay is None:
        return
    number = sum(
        k * batch[n].numpy().reshape(len(batch), -1)[:, 0]
        for n, k in dict(step_n=7, env_id=3, episode_n=5).items()
    )
    td = number % 11 / 4 + 0.1
    batch.update_priorities(
        td[:, None] + np.arange(batch.train.shape[1]) if isinstance(batch, Sequences) else td
    )


def take(items, n):
    "The bits of the next few items, but for keys, which a used memory has others of; all of them are learned from"
    found = []
    for item in islice(items, n):
        found.append(bits(without_keys(item)))
        told(item)
    return found


def without_keys(item):
    if isinstance(item, tuple):
        return tuple(map(without_keys, item))
    if not isinstance(item, Steps):
        return item
    item = item.copy()
    each = each_of(item).rows
    if 'index' in each.dtype.names:
        each['index'] = 0
    return item


def look_around(pipe):
    "Whatever else can be asked of the replays in a chain"
    for s in _stages(pipe):
        if not isinstance(s, Replay):
            continue
        m = s.memory
        if len(m):
            (
                m[:],
                m.take(m.keys[:3]),
                m.windows(m.keys[-5:], 3),
                m.walk(m.keys[::5], [-2, -1, 1, 2]),
                m.times_drawn,
            )
        if len(s) >= (s._needs or s.bs):
            for _ in range(3):
                told(s.sample())
        s.stats()


def held(t):
    "A chain that stands somewhere, and its running pass"
    chain = t.make()
    items = t.items(chain)
    take(items, t.held)
    return chain, items


@cache
def saved_state(name):
    "What a chain of this kind saves, as a file gives it back"
    t = TARGETS[name]
    chain = t.make()
    items = t.items(chain)
    take(items, t.saved)
    state = through_file(t.plain(t.save(chain)))
    if t.slow:
        chain.close()
    return state


@cache
def warm(name):
    "What a chain that is held would save, and what it gives next; by then, all that cases need is compiled"
    t, state = TARGETS[name], saved_state(name)
    (a, items), (b, _) = held(t), held(t)
    before = bits(t.save(a))
    assert before == bits(t.save(b)), 'two chains of a kind stand in different places'
    after = take(items, ON)
    t.load(b, t.coded(deepcopy(state)))
    take(t.items(b), ON)
    look_around(t.pipe(b))
    t.save(b)
    for c in (a, b) if t.slow else ():
        c.close()
    return before, after


# ---- damage ----


class Unfit(Exception):
    "A change that can't be made of this value"


EXTREMES = (
    -1,
    0,
    1,
    2**31 - 1,
    -(2**31),
    2**62,
    -(2**62),
    2**63 - 1,
    -(2**63),
    float('nan'),
    float('inf'),
    float('-inf'),
)
INTS = *EXTREMES[:9], 2, 7, 255, 2**31, 2**32, 2**63, 2**64 - 1, 2**64, 10**30, -(10**30)
FLOATS = *EXTREMES[9:], -1.0, 0.0, -0.0, 0.5, 2.0, 1e308, -1e308, 5e-324
WORDS = (
    '',
    '|O',
    'O',
    '<M8',
    '<M8[s]',
    '|V8',
    '|V0',
    '|S0',
    '<U9',
    '>f4',
    '>i8',
    '<f4',
    '<f8',
    '<i8',
    '|u1',
    '|b1',
    '<f2',
    '<c8',
    '<g',
    'f4,f4',
    '(2,)f4',
    '__class__',
    '__dict__',
    '__init__',
    '_',
    'é\0',
    'x' * 10**6,
    'rows',
    'state',
    'Steps',
    'Sequences',
    'Items',
    'array',
    'own',
    'same',
    'object',
    'constant',
    'random',
    'PCG64',
    'MT19937',
)
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.bool,
)
OTHERS = (
    lambda: None,
    lambda: 'x',
    lambda: 0,
    lambda: 1,
    lambda: -1,
    lambda: 1.5,
    lambda: [],
    lambda: {},
    lambda: (),
    lambda: True,
    lambda: False,
    lambda: b'ab',
    lambda: 1j,
    lambda: float('nan'),
    lambda: 2**70,
    lambda: [0],
    lambda: ['x'],
    lambda: [None],
    lambda: dict(kind='array'),
    lambda: {0: 1},
    lambda: [[0, 1]] * 3,
    lambda: set(),
    lambda: torch.float32,
    lambda: torch.zeros(3),
    lambda: torch.tensor(2),
    lambda: torch.zeros(0),
    lambda: torch.zeros(2, 3, dtype=torch.int64),
    lambda: torch.Size([2]),
    lambda: torch.device('cpu'),
)


def pick(rng, options):
    return options[int(rng.integers(len(options)))]


def shown(x):
    "A value in few words, however deep"
    if isinstance(x, torch.Tensor) and x.is_nested:
        return 'a nested tensor'
    if isinstance(x, torch.Tensor):
        usual = x.layout == torch.strided and x.device.type == 'cpu'
        return f'{str(x.dtype)[6:]}{list(x.shape)}' + ('' if usual else f' {x.layout} {x.device}')
    if isinstance(x, dict):
        return '{' + ', '.join(map(repr, islice(x, 6))) + '}' if len(x) else '{}'
    if isinstance(x, (list, tuple)):
        long = len(x) > 3 or any(isinstance(v, (list, dict, torch.Tensor)) for v in x)
        return f'{type(x).__name__} of {len(x)}' if long else repr(x)[:50]
    return repr(x)[:50]


def wrapped(x, dtype):
    "A number as a dtype has it, the bits above its own cut off"
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        return x
    if x != x or x in (float('inf'), float('-inf')):
        return torch.iinfo(dtype).min
    n = 8 * dtype.itemsize
    x %= 2**n
    return x if dtype == torch.uint8 or x < 2 ** (n - 1) else x - 2**n


def of_tensor(rng, t):
    "Another tensor instead of this one"
    if t.is_meta:
        return t, 'on meta already'  # of 2**50 numbers, perhaps
    how, n, flat = int(rng.integers(20)), t.numel(), t.detach().clone().contiguous().flatten()
    if how in (0, 1):
        return t.to(pick(rng, DTYPES)), 'of another dtype'
    if how == 2:
        return t.contiguous().view(pick(rng, DTYPES)), 'the same bytes as another dtype'
    if how == 3:
        return pick(
            rng,
            [
                lambda: t[None],
                lambda: t[..., None],
                lambda: t.reshape(-1),
                lambda: t.reshape(-1, 1),
                lambda: t.transpose(0, -1),
                lambda: t.flip(0),
                lambda: t.reshape(2, -1),
                lambda: torch.stack([t, t], -1)[..., 0],
                lambda: torch.stack([t, t], -1),
            ],
        )(), 'of another shape'
    if how in (4, 5):
        return pick(
            rng,
            [
                lambda: t[:-1],
                lambda: t[1:],
                lambda: t[:0],
                lambda: torch.cat([t, t]),
                lambda: torch.cat([t, t[:1]]),
                lambda: t[::2],
                lambda: t[..., :-1],
            ],
        )(), 'longer or shorter'
    if how in (6, 7, 8):
        i, x = int(rng.integers(n)), wrapped(pick(rng, EXTREMES), t.dtype)
        flat[i] = x
        return flat.reshape(t.shape), f'[{i}] is {x}'
    if how == 9:
        x = wrapped(pick(rng, EXTREMES), t.dtype)
        return torch.full_like(t, x), f'all are {x}'
    if how in (10, 11, 12):
        raw, i, k = (
            flat.view(torch.uint8),
            int(rng.integers(n * t.element_size())),
            int(rng.integers(8)),
        )
        raw[i] ^= 1 << k
        return flat.reshape(t.shape), f'bit {k} of byte {i} flipped'
    if how == 13:
        return pick(
            rng,
            [
                lambda: torch.zeros(1, dtype=t.dtype).expand(2**40),
                lambda: torch.zeros(1, dtype=t.dtype).expand(2**40, *t.shape[1:]),
                lambda: t[:1].expand(2**34, *t.shape[1:]),
                lambda: flat[:1].expand(t.shape),
                lambda: torch.zeros(1, 1, dtype=t.dtype).expand(2**31, 2**31),
            ],
        )(), 'expanded'
    if how == 14:
        return pick(rng, [t.to_sparse, t.to_sparse_csr])(), 'sparse'
    if how == 15:
        return pick(
            rng, [lambda: t.to('meta'), lambda: torch.empty(2**50, dtype=t.dtype, device='meta')]
        )(), 'on meta'
    if how == 16:
        return pick(
            rng,
            [
                lambda: t.float().requires_grad_(),
                lambda: t.clone().requires_grad_(),
                lambda: nn.Parameter(t.clone(), t.is_floating_point()),
                lambda: torch._neg_view(t),
                lambda: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
                lambda: torch.nested.nested_tensor([flat, flat[:1]]),
            ],
        )(), 'of another kind'
    if how == 17:
        return flat[torch.from_numpy(rng.permutation(n))].reshape(t.shape), 'shuffled'
    if how == 18:
        x = wrapped(pick(rng, EXTREMES[:9]), t.dtype)
        return t + x, f'plus {x}'
    return flat[torch.from_numpy(rng.integers(0, n, n))].reshape(t.shape), 'with repetitions'


def of_spec(rng, v):
    "Another description of a dtype"
    others = (
        *(['plain', x] for x in ('|O', '<M8[s]', '|S0', '|V0', '|V8', '<U3', '>f4', 'f4,i4', 5)),
        ['plain'],
        ['array', v, [2**40]],
        ['array', v, [-1]],
        ['array', v, []],
        ['array', v, [0]],
        ['array', v, 3],
        ['array', v],
        ['row', 8, []],
        ['row', 2**40, []],
        ['row', 8, [['a', 0, ['plain', '|O']]]],
        ['row', 8, [['', 0, v]]],
        ['row', 8, [['a', 4, ['plain', '<f8']]]],
        ['row', 8, [['a', 0, ['plain', '<f4']], ['a', 4, ['plain', '<f4']]]],
        ['other', 3],
        [[], []],
        ['row', 2**31, [['a', 0, ['plain', '|u1']]]],
    )
    if v[0] == 'plain' and rng.random() < 0.6:
        return ['plain', pick(rng, WORDS)], 'other words'
    if v[0] != 'row' or rng.random() < 0.4 or not v[2]:
        return deepcopy(pick(rng, others)), 'another spec'
    new, field = deepcopy(v), int(rng.integers(len(v[2])))
    f, how = new[2][field], int(rng.integers(8))
    if how == 0:
        new[1] = pick(rng, [0, -8, v[1] - 1, v[1] + 1, v[1] + 8, 2 * v[1], 2**31, 2**40, 2**62])
    elif how == 1:
        f[1] = pick(rng, [-4, -1, 1, 2, f[1] + 1, f[1] + 4, v[1] - 1, v[1], 2**31, 2**62, 0])
    elif how == 2:
        f[0] = pick(
            rng,
            [
                '',
                'rows',
                '_x',
                '__class__',
                'mask',
                'index',
                'n',
                'hidden',
                new[2][field - 1][0],
                5,
                None,
                'é',
            ],
        )
    elif how == 3:
        f[2] = deepcopy(pick(rng, others))
    elif how == 4:
        del new[2][field]
    elif how == 5:
        new[2].append(['more', pick(rng, [0, v[1] - 4, v[1]]), ['plain', '<f4']])
    elif how == 6:
        f[2] = ['plain', pick(rng, WORDS)]
    else:
        new[2][field], new[2][field - 1] = new[2][field - 1], new[2][field]
    return new, f'field {field}, way {how}'


def of_dict(rng, v):
    "Another dict"
    new, keys, how = type(v)(v), [*v], int(rng.integers(8))
    if how == 0:
        return {}, 'emptied'
    if how == 1:
        return OrderedDict(v), 'ordered'
    if how in (2, 3):
        k = pick(
            rng,
            ['foreign', 7, '__class__', '__dict__', None, 'dtype', 'there', 'rows', 'kind', 1.5],
        )
        new[k] = pick(rng, OTHERS)()
        return new, f'with {k!r}'
    k = pick(rng, keys)
    if how in (4, 5):
        del new[k]
        return new, f'without {k!r}'
    if how == 6:
        new[pick(rng, ['x', 0, str(k) + '.', None, -1])] = new.pop(k)
        return new, f'{k!r} renamed'
    other = pick(rng, keys)
    new[k], new[other] = new[other], new[k]
    return new, f'{k!r} and {other!r} swapped'


def of_list(rng, v):
    "Another list or tuple"
    kind, new, how = type(v), list(v), int(rng.integers(10))
    if how == 0:
        return kind(), 'emptied'
    if how == 1:
        return (list if kind is tuple else tuple)(v), 'of the other kind'
    if how == 2:
        return kind(new + [pick(rng, OTHERS)()]), 'with one more'
    if how == 3:
        return kind(new * 2), 'twice'
    if how == 4:
        return kind(new * 1000), 'a thousand times'
    if how == 5:
        return kind(new[::-1]), 'reversed'
    if how == 6 and new and all(type(x) is int for x in new):
        d = pick(rng, INTS)
        return kind(x + d for x in new), f'plus {d}'
    i, j = (int(x) for x in rng.integers(0, len(new), 2))
    if how == 7:
        del new[i]
        return kind(new), f'without [{i}]'
    if how == 8:
        new.insert(i, deepcopy(new[j]))
        return kind(new), f'[{j}] again at {i}'
    new[i], new[j] = new[j], new[i]
    return kind(new), f'[{i}] and [{j}] swapped'


def of_scalar(rng, v):
    "Another value of the same kind, or of a near one"
    if type(v) is bool:
        return pick(
            rng, [not v, int(v), int(not v), 2, None, 'True', torch.tensor(v)]
        ), 'no longer so'
    if type(v) is int:
        return pick(
            rng,
            [
                *INTS,
                v + 1,
                v - 1,
                -v,
                ~v,
                2 * v,
                float(v),
                str(v),
                bool(v),
                torch.tensor(v % 2**62),
                v + 2**32,
            ],
        ), 'another number'
    if type(v) is float:
        return pick(
            rng,
            [
                *FLOATS,
                v + 1,
                -v,
                v * 1e10,
                int(v) if abs(v) < 1e300 else 0,
                str(v),
                torch.tensor(v),
            ],
        ), 'another number'
    if type(v) is str:
        return pick(rng, [*WORDS, v + 'x', v[:-1], v.upper(), v.encode(), [v]]), 'other words'
    if type(v) is bytes:
        i = int(rng.integers(len(v)))
        return pick(
            rng,
            [
                b'',
                v[:i],
                v[i:],
                v * 2,
                v[:i] + bytes([v[i] ^ 1 << int(rng.integers(8))]) + v[i + 1 :],
            ],
        ), 'other bytes'
    raise Unfit


def is_spec(v):
    return type(v) is list and len(v) > 1 and v[0] in ('plain', 'array', 'row')


def nodes(v, put, path='', depth=0):
    "Each value in a state with a function that puts another in its place, and where it is; of long lists some"
    yield v, put, path
    if depth > 40:
        return
    if isinstance(v, dict):
        for k in v:
            yield from nodes(
                v[k],
                lambda x, k=k: v.__setitem__(k, x),
                f'{path}.{k}' if isinstance(k, str) else f'{path}[{k}]',
                depth + 1,
            )
    elif isinstance(v, (list, tuple)):
        for i in sorted({*range(min(4, len(v))), max(len(v) - 1, 0)}) if len(v) else ():

            def put_at(x, i=i):
                v.__setitem__(i, x) if isinstance(v, list) else put((*v[:i], x, *v[i + 1 :]))

            yield from nodes(v[i], put_at, f'{path}[{i}]', depth + 1)


def damaged(rng, v, all):
    "Another value instead of `v`, and in words"
    if rng.random() < 0.2:
        how = int(rng.integers(6))
        if how == 0:
            n, x = pick(rng, [1, 3, 900, 100_000]), v
            for i in range(n):
                x = [x] if i % 2 else dict(a=x)
            return x, f'{n} deep'
        if how in (1, 2):
            x, _, path = pick(rng, all)
            return deepcopy(x), f'what is at {path or "the root"}'
        return pick(rng, OTHERS)(), 'of another type'
    if isinstance(v, torch.Tensor):
        return of_tensor(rng, v)
    if is_spec(v) and rng.random() < 0.7:
        return of_spec(rng, v)
    if isinstance(v, dict):
        return of_dict(rng, v)
    if isinstance(v, (list, tuple)):
        return of_list(rng, v)
    return of_scalar(rng, v)


def damage(state, seed, name):
    "A state with one to three changes, and what they are"
    rng, root, said = np.random.default_rng([zlib.crc32(name.encode()), seed]), [state], []
    wanted = pick(rng, [1, 1, 2, 3])
    while len(said) < wanted:
        all = [*nodes(root[0], lambda x: root.__setitem__(0, x))]
        if rng.random() < 0.3:
            all = [
                n for n in all if isinstance(n[0], (torch.Tensor, int, str)) or is_spec(n[0])
            ] or all
        v, put, path = pick(rng, all)
        try:
            new, how = damaged(rng, v, all)
        except (
            Unfit,
            RuntimeError,
            IndexError,
            ValueError,
            TypeError,
            OverflowError,
            NotImplementedError,
        ):
            continue  # not of this one
        put(new)
        said.append(f'{path or "the root"}: {how}: {shown(v)} → {shown(new)}')
    return root[0], said


# ---- a case ----


def where(e):
    "The last line of the library that an error passed, or its last line at all"
    frames = traceback.extract_tb(e.__traceback__)
    ours = [f for f in frames if '/fastrl_replay/' in f.filename]
    f = (ours or frames or [None])[-1]
    return f and f'{f.filename.split("/fastrl_replay/")[-1].split("/")[-1]}:{f.name}'


def outcome(kind, e=None):
    said = '' if e is None else f'{type(e).__name__}: {" ".join(str(e).split())[:200]}'
    return dict(kind=kind, where=e and where(e), said=said, error=e)


def attempt(t, before, after, state):
    "Load a state: 'refused', 'loaded', 'late', or what is wrong"
    chain, items = held(t)
    try:
        t.load(chain, state)
    except Explained as e:
        try:
            if bits(t.save(chain)) != before:
                return outcome('refused, but changed', e)
            if take(items, ON) != after:
                return outcome('refused, but went on otherwise', e)
        except BaseException as e:
            return outcome(f'refused, then {type(e).__name__}', e)
        return outcome('refused', e)
    except BaseException as e:
        return outcome(f'load: {type(e).__name__}', e)
    try:
        take(t.items(chain), ON)
        look_around(t.pipe(chain))
        take(t.items(chain), ON)
    except Explained as e:
        return outcome('late', e)
    except BaseException as e:
        return outcome(f'loaded, then {type(e).__name__}', e)
    try:
        new = t.make()
        t.load(new, t.coded(through_file(t.plain(t.save(chain)))))
        take(t.items(new), 1)
    except EnvError as e:
        return outcome('late', e)  # a number in an environment made it fail a step later
    except BaseException as e:
        return outcome(f'loaded, but what it saves: {type(e).__name__}', e)
    return outcome('loaded')


def prepared(name, seed):
    t = TARGETS[name]
    state, said = damage(deepcopy(saved_state(name)), seed, name)
    try:
        return t.coded(state), said
    except Exception:
        return None, said  # no file can hold it


def case(name, seed):
    "A case from beginning to end, in this process"
    before, after = warm(name)
    state, said = prepared(name, seed)
    return dict(attempt(TARGETS[name], before, after, state), damage=said, name=name, seed=seed)


def limit_memory():
    "From now on this process gets only some more"
    if sys.platform != 'linux':
        return
    size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))


def child(w, name, seeds):
    "Write what came of each case, a line each; some cases end this process"
    faulthandler.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.disable()  # it would touch, and so copy, all that the parent has
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1), os.dup2(quiet, 2)
    warnings.simplefilter('ignore')
    limit_memory()
    for seed in seeds:
        signal.alarm(SECONDS)
        try:
            found = case(name, seed)
        except BaseException as e:
            found = dict(
                outcome(f'the fuzzer: {type(e).__name__}', e), damage=[], name=name, seed=seed
            )
        w.write(json.dumps(dict(found, error=None)) + '\n')
        w.flush()


def forked(name, seeds):
    "What came of cases in a process of their own, up to the one that it died of"
    warm(name)
    r, w = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(r)
            child(os.fdopen(w, 'w'), name, seeds)
        finally:
            os._exit(0)
    os.close(w)
    with os.fdopen(r) as f:
        found = [json.loads(line) for line in f if line.endswith('\n')]
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0 and len(found) == len(seeds):
        return found
    died = signal.Signals(-status).name if status < 0 else status
    kind = 'time-out' if status == -signal.SIGALRM else f'dead: {died}'
    seed = seeds[len(found)]
    return [
        *found,
        dict(kind=kind, where=None, said='', damage=prepared(name, seed)[1], name=name, seed=seed),
    ]


def cases(name, seeds):
    "What came of these cases; those that failed, and what may have come of it, are tried again alone"
    seeds = [*seeds]
    while seeds:
        for found in forked(name, seeds):
            if failed(found) and len(seeds) > 1:
                (alone,) = forked(name, [found['seed']])
                found = (
                    alone if failed(alone) else dict(found, kind=f'{found["kind"]}, after others')
                )
            seeds = [s for s in seeds if s != found['seed']]
            yield found


def failed(found):
    return found['kind'] not in ('refused', 'loaded', 'late')


def in_words(found):
    "A case on some lines"
    at = f' at {found["where"]}' if found['where'] else ''
    head = f'{found["name"]}:{found["seed"]}: {found["kind"]}{at}: {found["said"]}'
    return '\n    '.join([head, *found['damage']])


# ---- the command ----


def table(all):
    "A line for each target"
    lines = [
        f'{"target":<20}{"cases":>7}{"refused":>9}{"loaded":>8}{"late":>6}{"failed":>8}   failures'
    ]
    for name in dict.fromkeys(f['name'] for f in all):
        mine = [f for f in all if f['name'] == name]
        kinds = Counter(f['kind'] for f in mine)
        bad = Counter(f['kind'] for f in mine if failed(f))
        counts = f'{len(mine):>7}{kinds["refused"]:>9}{kinds["loaded"]:>8}{kinds["late"]:>6}{bad.total():>8}'
        lines.append(f'{name:<20}{counts}   ' + ', '.join(f'{n} {k}' for k, n in bad.most_common()))
    return '\n'.join(lines)


def groups(all, some=6):
    "Those that look alike together: kind, place, how many, which"
    found = defaultdict(list)
    for f in all:
        found[f['kind'], f['where'], re.sub(r'[-\d.]+', '#', f['said'].split(';')[0])[:90]].append(
            f
        )
    for (kind, at, said), mine in sorted(found.items(), key=lambda g: -len(g[1])):
        which = ' '.join(f'{f["name"]}:{f["seed"]}' for f in mine[:some])
        yield f'{len(mine):>5}  {kind} at {at}: {said}\n       {which}\n       ' + ' | '.join(
            mine[0]['damage']
        )


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--count', type=int, default=2000, help='cases in all')
    p.add_argument('--seed', type=int, default=0, help='of the first case of each target')
    p.add_argument('--only', help='targets whose name begins so, or several, with commas')
    p.add_argument('--case', help='NAME:SEED, or a seed with --only: one case in this process')
    p.add_argument('--slow', action='store_true', help='targets with worker processes, too')
    p.add_argument('--late', action='store_true', help='list late errors as well')
    p.add_argument('--out', help='a file for all cases, a line of JSON each')
    a = p.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    print('of', os.path.dirname(fastrl_replay.__file__))
    if a.case:
        name, seed = a.case.split(':') if ':' in a.case else (a.only, a.case)
        faulthandler.enable()
        print(*prepared(name, int(seed))[1], sep='\n', flush=True)
        limit_memory()
        found = case(name, int(seed))
        if found['error'] is not None:
            traceback.print_exception(found['error'])
        return print(found['kind'], found['said'])
    names = [
        n
        for n, t in TARGETS.items()
        if (not t.slow or a.slow or a.only == n)
        and (
            not a.only or n in a.only.split(',') or (a.only not in TARGETS and n.startswith(a.only))
        )
    ]
    all, start = [], time.time()
    for name in names:
        warm(name)
    gc.collect()
    gc.freeze()
    print(f'{len(names)} targets, {time.time() - start:.1f} s to build', flush=True)
    with open(a.out or os.devnull, 'w') as out:
        each = -(-a.count // len(names))
        for i, name in ((i, name) for i in range(0, each, 20) for name in names):
            for found in cases(name, range(a.seed + i, a.seed + min(i + 20, each))):
                all.append(found)
                print(json.dumps(found), file=out, flush=True)
    print(table(all), '\n')
    for line in groups(filter(failed, all)):
        print(line)
    if a.late:
        print('\nlate:')
        for line in groups((f for f in all if f['kind'] == 'late'), 3):
            print(line)
    print(f'\n{len(all)} cases, {sum(map(failed, all))} failed, {time.time() - start:.0f} s')
    return 1 if any(map(failed, all)) else 0


if __name__ == '__main__':
    sys.exit(main())
