"""Chains and blocks with torch's and torchdata's own classes."""

import copy, pickle, subprocess, sys, textwrap

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from fastrl_replay.all import *
from fastrl_replay.pipe import as_pipe
from fastrl_replay.testing import same, through_file
from scripted import Remember, by_env, numbered, same_streams, take

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


@pytest.mark.parametrize('how', ['fork', pytest.param('spawn', marks=pytest.mark.slow)])
def test_workers_do_together_what_one_process_does_alone(how):
    alone = take(carts(4), 25)
    loader = DataLoader(carts(2), batch_size=None, num_workers=2, multiprocessing_context=how)
    blocks = take(loader, 50)
    assert {tuple(b.env_id.tolist()) for b in blocks} == {(0, 1), (2, 3)}
    assert same_streams(blocks, alone, 25)


def test_policies_in_workers_have_dice_of_their_own_and_again_the_same():
    def blocks():
        return take(
            DataLoader(carts(2, EpsGreedy(Two(), eps=0.5, seed=3)), batch_size=None, num_workers=2),
            60,
        )

    a, b = blocks(), blocks()
    assert same(a, b)
    actions = [rows['action'] for rows in by_env(a, 30)]
    assert not np.array_equal(actions[0], actions[2]) and not np.array_equal(actions[1], actions[3])


def test_unseeded_copies_of_given_environments_differ():
    pipe = GymStepper(gym.make('CartPole-v1'))
    take(pipe, 3)  # it has RNG state now, which a fork would copy
    one, two = take(DataLoader(pipe, batch_size=None, num_workers=2), 2)
    assert not torch.equal(one.state, two.state) and one.step_n.item() == two.step_n.item() == 1


@pytest.mark.parametrize('keep', [True, False])
def test_passes_over_a_loader(keep):
    loader = DataLoader(
        GymStepper(scripted(0)).header(3), batch_size=None, num_workers=2, persistent_workers=keep
    )
    first, second = list(loader), list(loader)
    assert [b.step_n.item() for b in first[::2]] == [1, 2, 3] and len(first) == 6
    assert [b.step_n.item() for b in second[::2]] == ([1, 2, 1] if keep else [1, 2, 3])
    assert [b.episode_n.item() for b in second[::2]] == ([2, 2, 3] if keep else [1, 1, 1])


def test_a_loader_is_a_source():
    loader = DataLoader(GymStepper(scripted(0, 1)), batch_size=None, num_workers=2)
    replay = ExperienceReplay(loader, bs=4, max_sz=100, seed=0)
    assert 'DataLoader' in repr(replay)
    batch = next(b for b in replay if len(replay) >= 20)
    assert set(replay.memory.take(np.arange(20)).env_id.tolist()) == {0, 1, 2, 3}
    batch.update_priorities(torch.ones(4))
    assert (
        sum(
            1
            for _ in DataLoader(
                as_pipe(DataLoader(Items(range(3)), batch_size=None)), batch_size=None
            )
        )
        == 3
    )


def test_a_replay_in_a_worker_says_that_it_is_far_away():
    loader = DataLoader(
        GymStepper(scripted(0, 1)).experience_replay(bs=2, max_sz=10, seed=0),
        batch_size=None,
        num_workers=1,
    )
    with pytest.raises(TypeError, match='not drawn from a replay in this process'):
        next(iter(loader)).update_priorities(torch.ones(2))


def ints():
    return Items([Steps(numbered(1, i).rows) for i in range(12)])


def number(b):
    return b.reward.tolist()


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


@pytest.mark.parametrize('kind', SOURCES)
def test_nodes_and_loaders_are_sources_that_save_themselves(kind):
    make = [
        lambda: NStep(SOURCES[kind](), 3, 0.9),
        lambda: ExperienceReplay(SOURCES[kind](), bs=2, max_sz=8, seed=0),
    ]
    for chain in make if kind != 'workers' else make[:1]:
        whole = list(chain())
        assert len(whole) > 8
        ends = (
            [] if kind in ('loader', 'node') else [len(whole), len(whole) + 1]
        )  # a Loader that was saved after its last item begins anew
        for k in [0, 1, 5, *ends] if kind != 'workers' else [5]:
            a, b = chain(), chain()
            it = iter(a)
            assert same(take(it, k), whole[:k])
            b.load_state_dict(through_file(a.state_dict()))
            if k <= len(whole):
                assert same(list(b), list(it)), k
            if kind != 'workers':
                assert same(list(b), list(a)), k  # and so does the next pass


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


@pytest.mark.parametrize('k', [0, 1, 2, 9])
def test_without_workers_all_is_restored(k):
    a, b = loaded(chains().stateful()), loaded(chains().stateful())
    it = iter(a)
    take(it, k)
    state = a.state_dict()
    kept = copy.deepcopy(state)
    rest = take(it, 12)
    assert same(state, kept), 'a state that was taken changes while the loader goes on'
    b.load_state_dict(through_file(state))
    assert same(take(iter(b), 12), rest)


def uneven(x):
    return x < 3 + 4 * (worker_info() or WorkerInfo()).rank


@pytest.mark.parametrize(
    'workers, k', [(0, 2), (0, 3), (0, 7), (2, 0), (2, 4), (2, 6), (2, 8), (2, 10)]
)
def test_passes_of_different_lengths(workers, k):
    "A worker that is through gives nothing more in this pass, also where it is restored; the next pass begins anew"

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
    if 0 < k <= len(whole):
        assert list(b) == (
            whole[k:] if k < len(whole) or not a._iterator._finished else whole
        ) or k == len(whole)
    assert list(b) == whole


@pytest.mark.parametrize(
    'kw',
    [
        dict(),
        dict(snapshot_every_n_steps=4),
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


@pytest.mark.slow
def test_states_need_no_file_descriptors():
    "32 environments in each of two workers, many snapshots, and few descriptors"
    code = '''
        import resource, sys
        from itertools import islice
        from fastrl_replay.all import *
        from torchdata.stateful_dataloader import StatefulDataLoader
        def make(): return StatefulDataLoader(GymStepper(['CartPole-v1']*32, seed=0).n_step(2, gamma=.9).stateful(), batch_size=None, num_workers=2)
        a, b = make(), make()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        it = iter(a)
        states = []
        for _ in range(30): next(it); states.append(a.state_dict())
        b.load_state_dict(states[10])
        next(iter(b))
        print('well')'''
    r = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', textwrap.dedent(code)],
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert r.stdout == 'well\n', r.stderr


def test_what_cannot_be_saved_is_refused():
    for chain in (
        Items(range(9)).shuffle(),
        Items(range(9)).batch(2).map(len),
        Items(range(9)).sharding_filter(),
    ):
        for wrap in StatefulPipe, PipeNode:
            with pytest.raises(TypeError, match='what it holds or has counted is not saved'):
                wrap(chain)
    from torch.utils.data import datapipes

    with pytest.raises(TypeError, match='not saved'):
        StatefulPipe(datapipes.iter.IterableWrapper([1]))
    envs = Items(['CartPole-v1']).map(gym.make).in_memory_cache().cycle()
    assert (
        len(take(iter(loaded(envs.gym_step(seed=0).map(len).stateful())), 3)) == 3
    )  # torch's pipe at the end
    assert (
        repr(Items([1]).stateful()) == 'Items(1)\n  .stateful()'
        and repr(Items([1]).node()) == 'Items(1)\n  .node()'
    )
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
        assert same(state, saved), 'a state that was taken changes while the node goes on'
        b.load_state_dict(saved)
        assert same(take(iter(b), 6), rest), k


def test_resets_of_a_node():
    node = Items(range(5)).node()
    node.reset()
    assert take(node, 2) == [0, 1]
    middle = node.state_dict()
    node.reset()  # the pass was left
    begin = node.state_dict()
    assert take(node, 3) == [0, 1, 2]
    node.reset(middle)
    assert list(node) == [2, 3, 4] and list(node) == []
    end = node.state_dict()
    for state, left in (begin, [0, 1, 2, 3, 4]), (middle, [2, 3, 4]), (end, []):
        other = Items(range(5)).node()
        other.reset(through_file(state))
        assert same(other.state_dict(), state)
        assert list(other) == left
        other.reset()
        assert list(other) == [0, 1, 2, 3, 4]
    envs = GymStepper(scripted(0)).node()
    assert [next(envs).step_n.item() for _ in range(2)] == [1, 2]
    envs.reset()
    assert next(envs).step_n.item() == 3  # environments go on
    with pytest.raises(ValueError, match='belongs to another stage'):
        GymStepper(scripted(0)).node().reset(middle)


def test_several_passes_through_nodes():
    loader = nodes.Loader(nodes.Prefetcher(Items(range(4)).node(), 2))
    assert [list(loader) for _ in range(3)] == [[0, 1, 2, 3]] * 3
    take(iter(loader), 2)
    assert list(loader) == [0, 1, 2, 3]


def test_no_item_is_none():
    for wrap in lambda n: n, lambda n: nodes.Prefetcher(n, 2):
        with pytest.raises(TypeError, match='PipeNode: an item; got None'):
            list(nodes.Loader(wrap(Items([1, None, 2]).node())))


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

    def make():
        return nodes.Loader(nodes.PinMemory(nodes.Prefetcher(chains().node(), 2)))

    a, b = make(), make()
    it = iter(a)
    first = take(it, 4)
    assert all(type(x) is Steps for x in first) and (
        not torch.cuda.is_available() or first[0].is_pinned()
    )
    b.load_state_dict(a.state_dict())
    assert same(take(iter(b), 3), take(it, 3))


def test_blocks_are_not_collated():
    for x in numbered(3), numbered(3)[0], sequences():
        for item in x, [x], (x, 1), dict(a=dict(b=[x])):
            with pytest.raises(TypeError, match='it would collate what is a batch already'):
                default_collate([item, item])


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
    "Rows in which every number is different from its neighbours"
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
    grid=lambda: Steps(numbered(6).rows.reshape(2, 3)),
    nested=lambda: filled(nested_dtype(hidden=('f8', (3,)), mask='?'), 4),
    nested_single=lambda: filled(nested_dtype(), 4)[0],
    nested_none=lambda: filled(nested_dtype(), 0, 3),
    nested_grid=lambda: filled(nested_dtype(), 2, 3),
    merged=lambda: take(GymStepper(scripted(0, 1)).n_step(2, 0.9), 5)[-1],
    odd=lambda: filled(
        np.dtype(
            dict(names=['reward', 'x'], formats=['f4', 'f8'], offsets=[4, 16], itemsize=32),
            align=True,
        ),
        3,
    ),
    nan=lambda: Steps.from_columns(dict(reward=torch.tensor([1.0, np.nan]), x=torch.zeros(2, 3))),
    sequences=sequences,
    plain_sequences=lambda: sequences(None),
    part=lambda: sequences().train,
)


@pytest.mark.parametrize('kind', BLOCKS)
def test_out_of_a_tree_comes_what_went_in(kind):
    block = BLOCKS[kind]()
    leaves, spec = pytree.tree_flatten(block)
    assert all(type(x) is torch.Tensor for x in leaves)
    for again in (
        pytree.tree_unflatten(leaves, spec),
        pytree.tree_map(torch.clone, block),
        pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec))),
    ):
        assert type(again) is type(block) and again == block and again.dtype == block.dtype
        assert not np.shares_memory(again.rows, block.rows)
        assert getattr(again, '_split', 0) == getattr(block, '_split', 0) and (
            not isinstance(block, Sequences) or again.train == block.train
        )
    assert pytree.tree_map(torch.clone, block.columns()) == block
    for path, x in pytree.tree_leaves_with_path(block):
        assert torch.equal(pytree.key_get(block, path), x) or x.isnan().any()


def test_dtypes_and_shapes_may_change():
    block = BLOCKS['nested']()
    double = pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, block)
    assert type(double) is Steps and double.shape == (4,) and double.dtype.isalignedstruct
    assert double.dtype['state']['at'].base == np.float64 and double.dtype['env_id'] == np.int32
    assert torch.equal(double.state['deep'][1]['bits'], block.state['deep'][1]['bits'])
    assert pytree.tree_map(lambda x: x[1:3], block) == block[1:3]
    assert pytree.tree_map(lambda x: x[1], block) == block[1]
    assert pytree.tree_map(lambda x: x[None], block).shape == (1, 4)
    assert pytree.tree_map(lambda *x: torch.stack(x), block, block, block)[1] == block
    assert (
        pytree.tree_map(lambda a, b: torch.where(a == b, a, b), block, double).dtype == double.dtype
    )
    assert pytree.tree_map(lambda x: x.float().mean(), numbered(3)).reward.shape == ()
    wide = pytree.tree_map(
        lambda x: x.reshape(5, -1), numbered(5)
    )  # each column has one more dimension now, or not
    assert wide.shape == (5,) and wide.reward.shape == (5, 1)
    pytree.tree_map_(lambda x: x.zero_(), block)
    assert block == Steps(np.zeros(4, block.dtype))
    seqs = sequences()
    half = pytree.tree_map(lambda x: x[:2].half() if x.dtype == torch.float32 else x[:2], seqs)
    assert (
        type(half) is Sequences
        and half.shape == (2, 4)
        and half.train.shape == (2, 2)
        and half.weight.dtype == half.reward.dtype == torch.float16
    )


def test_what_cannot_be_rows_is_columns():
    block, seqs = numbered(3), sequences()
    w = torch.ones((), requires_grad=True)
    for f in (
        lambda x: x.shape,
        lambda x: None,
        lambda x: x.numel(),
        lambda x: x.numpy().tolist(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x * w,
        lambda x: x.to('meta') if x.dtype == torch.bool else x,
        lambda x: x.to_sparse(),
        lambda x: x.nonzero() if x.dtype == torch.bool else x,
        lambda x: 'a',
    ):
        for b in block, seqs:
            mapped = pytree.tree_map(f, b)
            assert type(mapped) is Columns and list(mapped) == list(b.asdict())
            assert (
                same(mapped['reward'], f(b.reward))
                if not isinstance(f(b.reward), torch.Tensor)
                else mapped.reward.shape == f(b.reward).shape
            )
    pytree.tree_map(lambda x: x * w if x.is_floating_point() else x, block).reward.sum().backward()
    assert w.grad == 3  # the gradient is not lost
    shapes = pytree.tree_map(lambda x: (x.shape,), block)
    assert (
        shapes.state == (torch.Size([3, 2]),)
        and pytree.tree_map(lambda x: x + 1, pytree.tree_map(lambda x: 1, block)).action == 2
    )
    assert pytree.tree_map(
        lambda x: torch.zeros(x[0]), shapes, is_leaf=lambda x: type(x) is tuple
    ).shape == (3,)  # rows once more
    assert type(pickle.loads(pickle.dumps(shapes))) is Columns and copy.deepcopy(
        block.columns()
    ).reward.tolist() == [0, 1, 2]
    with pytest.raises(AttributeError, match="no column 'sate'; there are state"):
        shapes.sate
    assert (
        torch.equal(block.columns().done, block.done)
        and block.columns().state.data_ptr() == block.state.data_ptr()
    )
    assert (
        type(pytree.tree_map(torch.clone, Columns(a=torch.zeros(2)))) is Columns
    )  # it never was a block


def test_transforms():
    block, net = numbered(4), value_net(spaces.Box(-9, 9, (2,)), spaces.Discrete(3), hidden=())
    with torch.no_grad():
        expected = net(block.state)
    assert torch.allclose(torch.vmap(lambda s: net(s.state))(block), expected)
    assert torch.allclose(
        torch.vmap(torch.vmap(lambda s: net(s.state)))(Steps(block.rows.reshape(2, 2))),
        expected.reshape(2, 2, 3),
    )
    out = torch.vmap(lambda s: pytree.tree_map(torch.neg if False else torch.clone, s))(
        BLOCKS['nested']()
    )
    assert out == BLOCKS['nested']()  # what comes out is a block again

    def loss(weights, s):
        return (
            (torch.func.functional_call(net, weights, (s.state,)).amax(-1) - s.reward)
            .square()
            .mean()
        )

    weights = {k: v.detach() for k, v in net.named_parameters()}
    for transform in torch.func.grad, torch.func.jacrev, torch.func.jacfwd:
        assert set(transform(loss)(weights, block)) == set(weights)
    rows = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, block)
    for i in range(4):
        assert torch.allclose(
            rows['1.weight'][i], torch.func.grad(loss)(weights, block[i])['1.weight']
        )
    seqs = sequences()
    assert torch.equal(
        torch.vmap(lambda s: s.reward.sum() + s.weight)(seqs), seqs.reward.sum(1) + seqs.weight
    )


def test_tracing():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    block = numbered(4)
    with FakeTensorMode() as mode:
        fake = pytree.tree_map(mode.from_tensor, block)
    assert type(fake) is Columns and fake.state.shape == (4, 2)

    def f(b):
        return pytree.tree_map(lambda x: x + x if x.is_floating_point() else x, b).reward * 3

    for kind in 'real', 'fake':
        graph = make_fx(f, tracing_mode=kind)(block.columns())
        if torch.__version__.startswith('2.6.'):  # its graphs take no classes of others, and say so
            with pytest.raises(RuntimeError, match='flatten_fn_spec'):
                graph(numbered(4, 10).columns())
            continue
        assert torch.equal(graph(numbered(4, 10).columns()), numbered(4, 10).reward * 6), (
            kind
        )  # nothing became a constant


def test_other_devices():
    there = BLOCKS['nested']().to('meta')
    assert there.device.type == 'meta'
    again = pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, there)
    assert (
        type(again) is Steps
        and again.device.type == 'meta'
        and again.shape == (4,)
        and again.state['deep'][1]['bits'].shape == (4, 3)
        and again.reward.dtype == torch.float64
    )
    assert pytree.tree_map(torch.clone, there).dtype == there.dtype and pytree.tree_map(
        lambda x: torch.zeros_like(x, device='cpu'), there
    ) == Steps(np.zeros(4, there.dtype))
    seqs = pytree.tree_map(torch.clone, sequences().to('meta'))
    assert (
        type(seqs) is Sequences
        and seqs.device.type == 'meta'
        and seqs.weight.shape == (3,)
        and seqs.train.shape == (3, 2)
    )


def test_trees_know_no_replay():
    replay = ExperienceReplay(None, bs=2, max_sz=9, seed=0)
    replay.add(numbered(9))
    batch = replay.sample()
    mapped = pytree.tree_map(torch.clone, batch)
    with pytest.raises(TypeError, match='replay.update_priorities'):
        mapped.update_priorities(torch.ones(2))
    replay.update_priorities(mapped.index, torch.ones(2))
    assert mapped == batch and pytree.tree_structure(mapped) == pytree.tree_structure(batch)


def test_cxx_trees():
    optree = pytest.importorskip('optree')
    from torch.utils import _cxx_pytree

    block = BLOCKS['nested']()
    assert optree and _cxx_pytree.tree_map(torch.clone, block) == block


def test_from_columns():
    x = np.arange(6, dtype='f4').reshape(2, 3)
    made = Steps.from_columns(dict(a=x, b=dict(c=[torch.ones(2), x]), d=np.float32([1, 2])))
    assert made.shape == (2,) and made.b['c'][1].shape == (2, 3) and made.dtype.isalignedstruct
    x[:] = 0
    assert made.a.sum() == 15  # a copy
    assert Steps.from_columns(dict(a=x)).shape == (2, 3) and Steps.from_columns(
        dict(a=x), 2 * [2][:0] + [2]
    ).a.shape == (2, 3)
    assert Steps.from_columns({'a': {'[0]': x, '[1]': x}}).a[1].shape == (2, 3)

    def refused(match, columns, shape=None, error=BlockError):
        with pytest.raises(error, match=match):
            Steps.from_columns(columns, shape)

    refused('no columns', {})
    refused(r"column 'b.c\[0\]'; got int", dict(b=dict(c=[1])))
    refused(r'got shape \[2, 3\]; expected \[3, ...\]', dict(a=x), (3,))
    refused('several devices', dict(a=torch.zeros(2), b=torch.zeros(2, device='meta')))
    refused("'done' is a name that Steps needs itself", dict(done=torch.zeros(2)), error=ValueError)
    refused('got NoneType', dict(a=None))
    refused('got dict', dict(a={}))
    refused('got ndarray', dict(a=np.array([object()])))
    refused('a tensor with a gradient', dict(a=torch.nn.Parameter(torch.zeros(2))))


# ---- TensorDict ----


def test_tensordict_and_back():
    tensordict = pytest.importorskip('tensordict')
    for kind, make in BLOCKS.items():
        block = make()
        td = block.to_tensordict()
        assert isinstance(td, tensordict.TensorDict) and td.device.type == 'cpu'
        if isinstance(block, Sequences):
            assert (
                td.batch_size == block.shape[:1]
                and td['weight'].shape == (3,)
                and td['reward'].shape == block.shape
            )
            assert Steps.from_tensordict(td).shape == (3,)
            continue
        assert td.batch_size == block.shape
        back = Steps.from_tensordict(td)
        assert (
            same(back.asdict(), block.asdict())
            and back.dtype.names == block.dtype.names
            and back.shape == block.shape
        )
        assert Steps.from_tensordict(td.clone()) == back
    block = BLOCKS['nested']()
    td = block.to_tensordict()
    assert td['state', 'deep', '[1]', 'z'].data_ptr() == block.state['deep'][1]['z'].data_ptr()
    td['state', 'at'][1, 1] = 7
    assert block.state['at'][1, 1] == 7  # shared on the way out,
    back = Steps.from_tensordict(td)
    td['reward'].zero_()
    assert back.reward.sum() > 0  # copied on the way in
    lazy = tensordict.LazyStackedTensorDict(*[numbered(3, 3 * i).to_tensordict() for i in range(2)])
    assert Steps.from_tensordict(lazy).shape == (2, 3)
    assert BLOCKS['grid']().to('meta').to_tensordict().device.type == 'meta'
    td['done'] = torch.zeros(4)
    with pytest.raises(ValueError, match="'done' is a name"):
        Steps.from_tensordict(td)
    assert Steps.from_tensordict(td.exclude('done')).shape == (4,)
    with pytest.raises(TypeError, match='expected a TensorDict'):
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


@pytest.mark.parametrize(
    'backend',
    ['eager', *(pytest.param(b, marks=pytest.mark.slow) for b in ('aot_eager', 'inductor'))],
)
def test_compiled_models_learn_the_same(backend):
    torch._dynamo.reset()
    plain, compiled = (
        DQNLearner(Items(batches()), m, target_every=2)
        for m in (fresh_net(), torch.compile(fresh_net(), backend=backend))
    )
    assert same_records(list(plain), list(compiled))
    assert not any('_orig_mod' in k for k in compiled.state_dict()['own']['model'])
    for saved, other in (plain, compiled), (compiled, plain):
        other.load_state_dict(through_file(saved.state_dict()))
        assert same(other.snapshot()['target'], saved.snapshot()['target'])
    seqs = [sequences_of(RecurrentNet) for _ in range(2)]
    plain, compiled = (
        R2D2Learner(Items(seqs), m, n=1)
        for m in (fresh_memory(), torch.compile(fresh_memory(), backend=backend))
    )
    assert same_records(list(plain), list(compiled))
    plain.load_state_dict(through_file(compiled.state_dict()))


def sequences_of(kind):
    net = fresh_memory()
    it = iter(
        GymStepper(scripted(0, 1), EpsGreedy(net, eps=1.0, seed=0), seed=0).sequence_replay(
            bs=3, max_sz=64, length=4, burn_in=1, overlap=2, seed=0
        )
    )
    return take(it, 12)[-1]


def test_compiled_parts_and_strangers():
    "Prefixes in the middle of names, old checkpoints with prefixes, and a model that is another one"
    net = fresh_net()
    net[1] = torch.compile(net[1], backend='eager')
    a, b = DQNLearner(None, net), DQNLearner(None, fresh_net())
    b.load_state_dict(through_file(a.state_dict()))
    old = b.state_dict()
    old['own']['model'] = {f'_orig_mod.{k}': v for k, v in old['own']['model'].items()}
    a.load_state_dict(old)
    with pytest.raises(ValueError, match='the checkpoint is of another model'):
        a.load_state_dict(
            DQNLearner(
                None, value_net(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), (9,))
            ).state_dict()
        )


@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
def test_compiled_losses(backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    net = fresh_net()

    def loss(b):
        return (net(b.state).gather(1, b.action[:, None])[:, 0] - b.reward).square().mean()

    counter = CompileCounterWithBackend(backend)
    compiled, nested = torch.compile(loss, backend=counter, fullgraph=True), BLOCKS['nested']()
    for b in batches(5):
        compiled(b.columns()).backward()
        assert torch.allclose(compiled(b.columns()), loss(b))
    assert counter.frame_count == 1  # one graph, compiled once for all batches
    deep = torch.compile(
        lambda b: b.state['deep'][1]['z'].sum() + b['action'][1].sum() + b.done.sum(),
        backend=backend,
        fullgraph=True,
    )
    assert torch.allclose(
        deep(nested.columns()),
        nested.state['deep'][1]['z'].sum() + nested.action[1].sum() + nested.done.sum(),
    )

    @torch.compile(backend=backend)
    def loose(b):
        return (
            net(b.state).gather(1, b['action'][:, None])[:, 0] - b.reward
        ).square().mean() + b.done.sum()

    for b in batches(2):
        assert torch.allclose(
            loose(b), loss(b) + b.done.sum()
        )  # in pieces or not at all, but right
    mapped = torch.compile(
        lambda b: pytree.tree_map(lambda x: x + x, b), backend=backend, fullgraph=True
    )(nested.columns())
    assert torch.equal(
        mapped.state['deep'][1]['z'], 2 * nested.state['deep'][1]['z']
    ) and torch.equal(mapped['reward'], 2 * nested.reward)
    seqs = sequences()
    total = torch.compile(
        lambda s: (s.reward.sum(1) * s.weight).sum(), backend=backend, fullgraph=True
    )
    assert torch.allclose(total(seqs.columns()), (seqs.reward.sum(1) * seqs.weight).sum())
