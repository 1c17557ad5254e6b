"""Saved states of all kinds of stages.

Untouched, a chain continues with the same items; damaged, they are taken, or refused and
nothing has changed."""

import random
import resource
import signal
import sys
from copy import deepcopy
from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium import spaces

from fastrl_replay.all import *
from fastrl_replay.memory.frames import Frames
from fastrl_replay.steps.errors import FastrlError
from fastrl_replay.testing import same, through_file
from kills import forked
from scripted import Remember, makers
from test_replay import CONTRACT, SEQUENCES

SCRIPTS = script(3, -2, 1), script(1, 4, -1, env=1), script(-6, env=2)
BLOCKS = scripted_steps(SCRIPTS, 80)

# ---- chains ----


class Small(Frames):
    least, smallest_segment = 1, 2


def blocks():
    return Items(BLOCKS)


def uniform(**kw):
    return ExperienceReplay(blocks(), bs=4, max_sz=20, seed=0, **kw)


def ranked(**kw):
    return PrioritizedReplay(blocks(), bs=4, kind='rank', max_sz=30, seed=0, **kw)


def remember():
    return GymStepper(makers(SCRIPTS), Remember(), seed=0)


def carts(n, kind, *args):
    torch.manual_seed(7)
    model = kind(spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2), *args)
    policy = EpsGreedy(model, LinearSchedule(0.9, 0.1, 40), seed=1)
    return GymStepper(['CartPole-v1'] * n, policy, seed=0)


STAGES = (
    'Header NStep SequenceChunker ExperienceReplay PrioritizedReplay SequenceReplay '
    'HindsightReplay Journal Gather UpdateNorms QLearner DQNLearner R2D2Learner SACLearner '
    'TD3Learner Prefetch'
).split()
CHAINS = dict(
    {name: lambda name=name: CONTRACT[name][0](blocks()) for name in STAGES},
    initial=lambda: CONTRACT['PrioritizedReplay'][1](blocks()),
    replacement=lambda: CONTRACT['ExperienceReplay'][1](blocks()),
    parallel=CONTRACT['Parallel'][1],
    stepper=remember,
    policy=lambda: carts(1, value_net, (4,)),
    recurrent=lambda: carts(2, RecurrentNet, 4),
    max_ever=lambda: ranked(initial='max_ever'),
    frames=lambda: uniform(store=Small()),
    packed=lambda: ranked(store=Small(2, 'lz4')),
    sequences_rank=lambda: SequenceReplay(blocks(), kind='rank', **SEQUENCES),
    hidden=lambda: SequenceReplay(remember(), **SEQUENCES),
    stateful=lambda: blocks().n_step(3, 0.9).stateful(),
)


def take(items, n):
    "The next few items without keys, of which a used memory has others; batches are learned from"
    found = []
    for item in islice(items, n):
        if isinstance(item, Steps):
            columns = item.asdict()
            if 'index' in columns:
                shape = item.train.shape if isinstance(item, Sequences) else item.shape
                td = np.arange(np.prod(shape)).reshape(shape) + 0.1
                item.update_priorities(td)
            item = {k: v for k, v in columns.items() if k != 'index'}
        found.append(deepcopy(item))
    return found


def started(name, n):
    "A chain and its pass after `n` items"
    torch.manual_seed(0)
    chain = CHAINS[name]()
    items = iter(chain)
    take(items, n)
    return chain, items


@pytest.mark.parametrize('name', CHAINS)
def test_a_chain_continues_from_a_saved_state(name):
    "In a chain that stands elsewhere, and from there in another one"
    a, items = started(name, 12)
    state = through_file(a.state_dict())
    kept = deepcopy(state)
    want = take(items, 8)
    for held in 7, 0:
        b, _ = started(name, held)
        b.load_state_dict(state)
        state = through_file(b.state_dict())
        assert same(take(iter(b), 8), want)
        assert same(state, kept) or held == 0


# ---- damage ----

NUMBERS = -1, 0, 1, 2**31, -(2**40), 2**63 - 1, 2**70, 0.5, float('nan'), float('inf')
OTHERS = None, 'x', True, [], {}, (1, 2), b'ab', torch.zeros(3), torch.tensor(2)


def nodes(value, put, path=''):
    "Each value in a state, with a function that puts another one in its place"
    yield value, put, path
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list):
        parts = list(enumerate(value))[:4]
    else:
        return
    for k, v in parts:
        yield from nodes(v, lambda x, k=k: value.__setitem__(k, x), f'{path}.{k}')


def damaged_tensor(rng, x):
    x = x.clone()
    ways = [
        lambda: x[:-1] if x.dim() else x[None],
        lambda: torch.cat([x, x]) if x.dim() else x[None],
        lambda: x[None],
        lambda: x.to(rng.choice([torch.float64, torch.int32, torch.uint8])),
        lambda: torch.zeros_like(x),
        lambda: -x - 1 if x.dtype != torch.bool else ~x,
        lambda: x.view(-1).view(torch.uint8).fill_(rng.choice([1, 127, 255])).view(x.dtype),
        lambda: x.flip(0) if x.dim() else x + 1,
    ]
    return rng.choice(ways)()


def damaged(rng, x):
    if rng.random() < 0.2:
        return rng.choice(OTHERS)
    if isinstance(x, torch.Tensor) and x.numel():
        return damaged_tensor(rng, x)
    if isinstance(x, dict) and x:
        gone = rng.choice([*x])
        rest = {k: v for k, v in x.items() if k != gone}
        return rng.choice([rest, dict(rest, other=x[gone]), dict(x, other=1)])
    if isinstance(x, list) and x:
        return rng.choice([x[:-1], x[::-1], x + x, x + [None]])
    if isinstance(x, str):
        return rng.choice(['', x + 'x', x[:-1], '__class__', '<f4', '|O'])
    return rng.choice([*NUMBERS, x + 1 if isinstance(x, (int, float)) else x])


def damage(state, seed):
    "Change one value in a state; return where and into what"
    rng, root = random.Random(seed), [state]
    value, put, path = rng.choice([*nodes(state, lambda x: root.__setitem__(0, x))])
    new = damaged(rng, value)
    put(new)
    return root[0], f'{path}: {value!r:.60} became {new!r:.60}'


def attempt(name, state, before, after):
    "Load a damaged state into a chain that is running"
    chain, items = started(name, 7)
    try:
        chain.load_state_dict(state)
    except FastrlError:
        assert same(through_file(chain.state_dict()), before), 'it was refused and has changed'
        assert same(take(items, 4), after), 'it was refused and continues otherwise'
        return
    try:
        take(iter(chain), 4)
        saved = through_file(chain.state_dict())
        fresh, _ = started(name, 0)
        fresh.load_state_dict(saved)
        take(iter(fresh), 2)
    except (FastrlError, RuntimeError):
        pass  # it was possible, but an environment or a network fails with these numbers


def attempts(name, seeds):
    "Try them with little time and memory; return what is wrong"
    signal.alarm(120)
    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, resource.RLIM_INFINITY))
    chain, items = started(name, 7)
    before = through_file(chain.state_dict())
    after = take(items, 4)
    good = through_file(started(name, 12)[0].state_dict())
    for seed in seeds:
        state, how = damage(deepcopy(good), seed)
        try:
            attempt(name, state, before, after)
        except BaseException as e:
            raise AssertionError(f'{name}, seed {seed}: {how}') from e


@pytest.mark.skipif(sys.platform != 'linux', reason='processes are forked, with limits')
@pytest.mark.parametrize('n', [4, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', CHAINS)
def test_a_damaged_state_is_refused_and_changes_nothing_or_is_taken(name, n):
    wrong, said = forked(attempts, name, range(n))
    assert not wrong, said
