"""Chains and blocks with torch's and torchdata's own classes."""

import pickle
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils import _pytree as pytree
from torch.utils.data._utils.pin_memory import pin_memory
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from fastrl_replay.all import *
from fastrl_replay.testing import same, through_file
from scripted import Remember, numbered, take

pytestmark = pytest.mark.filterwarnings('ignore:.*set_vital')
SCRIPTS = [
    script(3, -2, 1),
    script(1, 4, -1, env=1),
    script(-1, env=2),
]  # episodes of one step, truncation on the last


class Table:
    "Values of actions that can be pickled, and differ from state to state"

    def __call__(self, state):
        return torch.stack([state[:, 0], state[:, 1], -state[:, 0]], 1)


class Two(Table):
    def __call__(self, state):
        return super().__call__(state)[:, :2]


def scripted(*which):
    return [ScriptedEnv(**SCRIPTS[i]) for i in which]


def carts(n=2, policy=None, seed=7):
    return GymStepper(['CartPole-v1'] * n, policy=policy, seed=seed)


def loaded(dataset, **kw):
    return StatefulDataLoader(dataset, batch_size=None, **kw)


# ---- DataLoader ----


def ints():
    return Items([Steps(numbered(1, i).rows) for i in range(12)])


SOURCES = dict(
    wrapper=lambda: nodes.IterableWrapper(ints()),
    loader=lambda: nodes.Loader(nodes.IterableWrapper(list(ints()))),
    prefetcher=lambda: nodes.Prefetcher(nodes.IterableWrapper(list(ints())), 3),
    mapper=lambda: nodes.ParallelMapper(
        nodes.IterableWrapper(list(ints())), Steps.copy, num_workers=2, method='thread'
    ),
    node=lambda: nodes.Loader(nodes.Prefetcher(ints().node(), 2)),
    stateful=lambda: loaded(ints().stateful()),
    workers=lambda: loaded(ints().stateful(), num_workers=1),
)


@pytest.mark.slow
@pytest.mark.parametrize('kind', SOURCES)
def test_nodes_and_loaders_are_sources_that_save_themselves(kind):
    def n_step():
        return NStep(SOURCES[kind](), 3, 0.9)

    def replay():
        return ExperienceReplay(SOURCES[kind](), bs=2, max_sz=8, seed=0)

    for make in (n_step, replay) if kind != 'workers' else (n_step,):
        whole = list(make())
        assert len(whole) > 8
        for k in (0, 5) if kind != 'workers' else (5,):
            a, b = make(), make()
            it = iter(a)
            assert same(take(it, k), whole[:k])
            b.load_state_dict(through_file(a.state_dict()))
            assert same(list(b), list(it))
            if kind != 'workers':
                assert same(list(b), list(a))  # and so is the next pass


# ---- StatefulDataLoader ----


def chains(policy=True):
    "A chain of everything, and its list"
    return (
        GymStepper(
            scripted(0, 1, 2), EpsGreedy(Table(), eps=0.5, seed=1) if policy else None, seed=5
        )
        .n_step(2, gamma=0.5)
        .experience_replay(bs=3, max_sz=20, seed=2)
    )


def uneven(x):
    return x < 3 + 4 * (worker_info() or WorkerInfo()).rank


@pytest.mark.parametrize('workers, k', [(0, 2), (0, 7), (2, 4), (2, 8)])
def test_passes_of_different_lengths(workers, k):
    "A finished worker gives nothing more in a pass, even if restored; the next pass starts over"

    def make():
        return loaded(Items(range(7)).filter(uneven).stateful(), num_workers=workers)

    a, b = make(), make()
    whole = list(a)
    assert sorted(whole) == sorted([*range(3)] + ([*range(7)] if workers else []))
    it = iter(a)
    first = take(it, k)
    state = through_file(a.state_dict())
    assert first + list(it) == whole
    b.load_state_dict(state)
    if k < len(whole):
        assert list(b) == whole[k:]
        assert list(b) == whole


@pytest.mark.parametrize(
    'kw',
    [
        dict(),
        dict(persistent_workers=True),
        pytest.param(dict(multiprocessing_context='spawn'), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_with_workers_all_is_restored(kw):
    def make():
        return loaded(
            carts(2, EpsGreedy(Two(), eps=0.5, seed=1)).n_step(2, gamma=0.5).stateful(),
            num_workers=2,
            **kw,
        )

    for k in (0, 7) if 'multiprocessing_context' not in kw else (7,):
        a, b = make(), make()
        it = iter(a)
        take(it, k)
        state, rest = through_file(a.state_dict()), take(it, 15)
        del it, a
        b.load_state_dict(state)
        assert same(take(iter(b), 15), rest), k


def test_epochs():
    "What is left in the middle begins anew; environments go on"
    a = loaded(Items(range(5)).stateful())
    it = iter(a)
    assert take(it, 2) == [0, 1]
    it = iter(a)
    b = loaded(Items(range(5)).stateful())
    b.load_state_dict(a.state_dict())  # before the first item of the second pass
    assert list(it) == list(b) == [0, 1, 2, 3, 4]
    a = loaded(GymStepper(scripted(0)).stateful())
    assert [b.step_n.item() for _ in range(2) for b in take(iter(a), 2)] == [1, 2, 3, 1]


def test_what_cannot_be_saved_is_refused():
    for wrap in StatefulPipe, PipeNode:
        with pytest.raises(TypeError, match='its state cannot be saved'):
            wrap(Items(range(9)).batch(2).map(len))
    assert repr(Items([1]).stateful()) == 'Items(1)\n  .stateful()'
    assert list(loaded(Items([]).stateful())) == list(nodes.Loader(Items([]).node())) == []


# ---- nodes ----


def sizes(b):
    return len(b), b.reward.sum().item()


NODES = dict(
    plain=lambda n: n,
    prefetch=lambda n: nodes.Prefetcher(n, 3),
    seldom=lambda n: nodes.Prefetcher(n, 3, snapshot_frequency=4),
    mapped=lambda n: nodes.Prefetcher(
        nodes.ParallelMapper(n, sizes, num_workers=2, method='thread'), 2
    ),
    batched=lambda n: nodes.Batcher(n, 2),
)


@pytest.mark.parametrize('kind', NODES)
def test_nodes_restore(kind):
    def make():
        return nodes.Loader(NODES[kind](chains().node()))

    for k in 0, 1, 7:
        a, b = make(), make()
        it = iter(a)
        take(it, k)
        state = a.state_dict()
        saved = through_file(state)
        rest = take(it, 6)
        assert same(state, saved), 'a saved state changes while the node continues'
        b.load_state_dict(saved)
        assert same(take(iter(b), 6), rest), k


def test_resets_of_a_node():
    node = Items(range(5)).node()
    node.reset()
    assert take(node, 2) == [0, 1]
    middle = node.state_dict()
    node.reset()  # the pass was left
    begin = node.state_dict()
    assert list(node) == [0, 1, 2, 3, 4]
    end = node.state_dict()
    for state, left in (begin, [0, 1, 2, 3, 4]), (middle, [2, 3, 4]), (end, []):
        other = Items(range(5)).node()
        other.reset(through_file(state))
        assert list(other) == left
        other.reset()
        assert list(other) == [0, 1, 2, 3, 4]
    envs = GymStepper(scripted(0)).node()
    assert [next(envs).step_n.item() for _ in range(2)] == [1, 2]
    envs.reset()
    assert next(envs).step_n.item() == 3  # environments continue
    with pytest.raises(ValueError, match='belongs to a different stage'):
        GymStepper(scripted(0)).node().reset(middle)


def test_pin_memory_finds_blocks(monkeypatch):
    "Logic only: without CUDA, pinning is replaced by a copy"
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda self, device=None: self.clone())
        monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    block, seqs = numbered(3), sequences()
    for item in block, seqs, [block], dict(a=(block, 1)):
        pinned = pin_memory(item)
        assert same(pinned, item) and type(pinned) is type(item)
    assert pin_memory(block).rows is not block.rows


# ---- trees ----


def nested_dtype(**extra):
    obs = spaces.Dict(
        at=spaces.Box(-9, 9, (2,), np.float32),
        deep=spaces.Tuple(
            [
                spaces.Discrete(9),
                spaces.Dict(z=spaces.Box(0, 9, (), np.float64), bits=spaces.MultiBinary(3)),
            ]
        ),
    )
    return step_dtype(obs, spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]), **extra)


def filled(dtype, *shape):
    "Rows in which every number is different from its neighbors"
    block = Steps(np.zeros(shape, dtype))
    with torch.no_grad():
        for i, x in enumerate(pytree.tree_leaves(block)):
            x.copy_(
                (torch.arange(x.numel()).reshape(x.shape) + i)
                % (2 if x.dtype in (torch.bool, torch.int8) else 100)
            )
    return block


def sequences(policy=Remember()):
    it = iter(
        GymStepper(scripted(0, 1), policy).sequence_replay(
            bs=3, max_sz=64, length=4, burn_in=2, overlap=2, seed=0
        )
    )
    return take(it, 12)[-1]


BLOCKS = dict(
    flat=lambda: numbered(5),
    none=lambda: numbered(0),
    single=lambda: numbered(3)[1],
    slice=lambda: numbered(9)[::2],
    nested=lambda: filled(nested_dtype(hidden=('f8', (3,)), mask='?'), 4),
    nested_grid=lambda: filled(nested_dtype(), 2, 3),
    nan=lambda: Steps.from_columns(dict(reward=torch.tensor([1.0, np.nan]), x=torch.zeros(2, 3))),
    sequences=sequences,
    part=lambda: sequences().train,
)


@pytest.mark.parametrize('kind', BLOCKS)
def test_a_tree_has_the_columns_of_its_block(kind):
    block = BLOCKS[kind]()
    leaves, spec = pytree.tree_flatten(block)
    for again in pytree.tree_unflatten(leaves, spec), pytree.tree_map(torch.clone, block):
        assert type(again) is Columns
        assert same(again, block.asdict())
    if not isinstance(block, Sequences):
        assert Steps.from_columns(again, block.shape) == block


def test_columns_may_hold_anything():
    w = torch.ones((), requires_grad=True)
    for block in numbered(3), sequences():
        shapes = pytree.tree_map(lambda x: x.shape, block)
        assert list(shapes) == list(block.asdict())
        assert shapes.reward == block.reward.shape
    block = numbered(3)
    pytree.tree_map(lambda x: x * w if x.is_floating_point() else x, block).reward.sum().backward()
    assert w.grad == 3  # the gradient is not lost
    columns = block.columns()
    assert columns.state.data_ptr() == block.state.data_ptr()
    assert same(pickle.loads(pickle.dumps(columns))['reward'], block.reward)
    with pytest.raises(AttributeError, match="no column 'sate'; there are state"):
        columns.sate
    pytree.tree_map_(lambda x: x.zero_(), block)
    assert block == Steps(np.zeros(3, block.dtype))


def test_from_columns():
    x = np.arange(6, dtype='f4').reshape(2, 3)
    made = Steps.from_columns(dict(a=x, b=dict(c=[torch.ones(2), x]), d=np.float32([1, 2])))
    assert made.shape == (2,)
    assert made.b['c'][1].shape == (2, 3)
    x[:] = 0
    assert made.a.sum() == 15  # a copy
    assert Steps.from_columns(dict(a=x)).shape == (2, 3)
    for columns, says in (
        ({}, 'no columns'),
        (dict(a=torch.zeros(2), b=torch.zeros(2, device='meta')), 'several devices'),
        (dict(done=torch.zeros(2)), "a column cannot have the name 'done'"),
        (dict(a=None), 'got NoneType'),
    ):
        with pytest.raises(ValueError, match=says):
            Steps.from_columns(columns)


# ---- TensorDict ----


def test_tensordicts_of_sequences_and_of_strangers():
    tensordict = pytest.importorskip('tensordict')
    td = sequences().to_tensordict()
    assert td.batch_size == (3,)
    assert td['weight'].shape == (3,) and td['reward'].shape == (3, 4)
    lazy = tensordict.LazyStackedTensorDict(*[numbered(3, 3 * i).to_tensordict() for i in range(2)])
    assert Steps.from_tensordict(lazy).shape == (2, 3)
    td = numbered(3).to_tensordict()
    td['done'] = torch.zeros(3)
    with pytest.raises(ValueError, match="cannot have the name 'done'"):
        Steps.from_tensordict(td)
    with pytest.raises(TypeError, match='must be a TensorDict'):
        Steps.from_tensordict({})


def test_without_tensordict(monkeypatch):
    monkeypatch.setitem(sys.modules, 'tensordict', None)
    for f in numbered(3).to_tensordict, lambda: Steps.from_tensordict({}):
        with pytest.raises(ImportError, match=r"pip install 'fastrl_replay\[tensordict\]'"):
            f()


# ---- torch.compile ----


def batches(n=4):
    replay = ExperienceReplay(None, bs=6, max_sz=40, seed=0)
    replay.add(numbered(40))
    return [replay.sample() for _ in range(n)]


def fresh_net():
    torch.manual_seed(0)
    return value_net(spaces.Box(-99, 99, (2,)), spaces.Discrete(3), (8,))


def fresh_memory():
    torch.manual_seed(0)
    return RecurrentNet(spaces.Box(-99, 99, (2,)), spaces.Discrete(3), size=8)


def same_records(a, b):
    return all(
        np.allclose(list(x.values()), list(y.values()), rtol=1e-4, atol=1e-6)
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['eager', 'inductor'])
def test_compiled_models_learn_the_same(backend):
    torch._dynamo.reset()
    compiled = torch.compile(fresh_net(), backend=backend)
    a, b = (DQNLearner(Items(batches()), m, target_every=2) for m in (fresh_net(), compiled))
    assert same_records(list(a), list(b))
    for saved, other in (a, b), (b, a):
        other.load_state_dict(through_file(saved.state_dict()))
        assert same(other.state_dict(), saved.state_dict())
    seqs = [sequences_of(RecurrentNet) for _ in range(2)]
    compiled = torch.compile(fresh_memory(), backend=backend)
    a, b = (R2D2Learner(Items(seqs), m, n=1) for m in (fresh_memory(), compiled))
    assert same_records(list(a), list(b))


def sequences_of(kind):
    net = fresh_memory()
    it = iter(
        GymStepper(scripted(0, 1), EpsGreedy(net, eps=1.0, seed=0), seed=0).sequence_replay(
            bs=3, max_sz=64, length=4, burn_in=1, overlap=2, seed=0
        )
    )
    return take(it, 12)[-1]


def test_compiled_parts_and_strangers():
    "Prefixes in the middle of names, and a model that is another one"
    net = fresh_net()
    net[1] = torch.compile(net[1], backend='eager')
    a, b = DQNLearner(None, net), DQNLearner(None, fresh_net())
    b.load_state_dict(through_file(a.state_dict()))
    a.load_state_dict(through_file(b.state_dict()))
    other = DQNLearner(None, value_net(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), (9,)))
    with pytest.raises(ValueError, match='the checkpoint has a different model'):
        a.load_state_dict(other.state_dict())
