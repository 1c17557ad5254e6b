"""`Pipe` and the generic stages.

Registering stages, saving and continuing at every item, pickling, opening and closing."""

import gc
import inspect
import pickle
import pydoc
import re
import sys
import weakref
from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils.data import DataLoader

from fastrl_replay.all import *
from fastrl_replay.generic import Filter, Map, TypeTransformLoop, dp
from fastrl_replay.pipe import IterDataPipe, as_pipe
from fastrl_replay.testing import same, through_file
from scripted import modules, needs_datapipes

modules()  # so that all stages are registered
BLOCK = Steps(np.zeros(2, step_dtype(spaces.Discrete(2), spaces.Discrete(2))))


def up(x):
    return x.upper()


def known(x):
    return x != 'B'


class Joined:
    "A function that has a state"

    def __init__(self):
        self.seen = ''

    def __call__(self, x):
        self.seen = self.seen[-3:] + x
        return self.seen

    def state_dict(self):
        return dict(seen=self.seen)

    def load_state_dict(self, state):
        self.seen = state['seen']


# ---- registering ----


def test_chained_methods_look_like_their_stage():
    "Signature, name and docstring"
    found = {n: f for n, f in vars(Pipe).items() if hasattr(f, 'stage')}
    assert len(found) > 20
    for name, method in found.items():
        own, source, *params = inspect.signature(method.stage.__init__).parameters.values()
        assert [*inspect.signature(method).parameters.values()][1:] == params
        assert inspect.signature(method).return_annotation is method.stage
        assert method.__name__ == name and method.__doc__ == method.stage.__doc__


@pytest.mark.parametrize('cls', [ExperienceReplay, SequenceReplay, GymStepper, DQNLearner])
def test_help_of_a_stage_is_short_and_explains_its_parameters(cls):
    text = pydoc.plain(pydoc.render_doc(cls))
    most = 110 if sys.version_info < (3, 13) else 200  # later, each argument has a line
    assert text.count('\n') < most and 'state_dict(self)' in text
    assert not re.search('#[|]|n_step\\(self|__class_getitem__|check_state', text)
    for name in [*inspect.signature(cls).parameters]:
        assert re.search(f'^ [|] +{name}: .', text, re.M), name


def test_help_of_a_stage_without_source():
    "For example, of one that was entered in a terminal"
    names = dict(Pipe=Pipe)
    exec('class Mine(Pipe):\n    def __init__(self, source, by=3): self.by = by', names)
    assert 'by=3' in pydoc.plain(pydoc.render_doc(names['Mine']))


@pytest.fixture
def registry(monkeypatch):
    "Forget after the test what it registers"
    monkeypatch.setattr(IterDataPipe, 'functions', dict(IterDataPipe.functions))
    before = set(vars(Pipe))
    yield
    for name in set(vars(Pipe)) - before:
        delattr(Pipe, name)


def test_a_stage_may_be_defined_again(registry):
    "A newer class of the same name replaces the older (a cell run twice); another name doesn't"

    def define(by):
        @stage('louder')
        class Louder(Pipe):
            def __init__(self, source, n=1):
                super().__init__(source)
                self.n = n

            def __iter__(self):
                for x in self.source:
                    yield x * by * self.n

        return Louder

    define(1)
    two = define(2)
    assert type(Items('ab').louder()) is two
    assert list(Items('ab').map(up).louder(n=2)) == ['AAAA', 'BBBB']
    with pytest.raises(ValueError, match="'louder' is taken; got Mine; expected Louder"):
        stage('louder')(type('Mine', (Pipe,), dict(__init__=two.__init__)))
    assert type(Items('ab').louder()) is two


# a namesake of ours, a stage of torch's, and what pipes are made of
@needs_datapipes
@pytest.mark.parametrize('name', ['map', 'header', 'batch', 'state_dict', 'open'])
def test_names_that_are_taken_are_refused(registry, name):
    with pytest.raises(ValueError, match=f"'{name}' is taken"):
        stage(name)(type('Map', (Pipe,), dict(__init__=lambda self, source: None)))
    assert list(Items('ab').map(up)) == list(dp.iter.IterableWrapper('ab').map(up)) == ['A', 'B']


# ---- saving and continuing ----

CHAINS = {
    'map': lambda: Items('abcde').map(up).filter(known).header(3),
    'batch': lambda: Items('abcdefg').batch(2).header(4),
    "torch's map": lambda: dp.iter.Mapper(Items('abcde').map(up), up).header(3).map(up),
    'headers': lambda: Items('abcdefgh').header(5).map(up).header(3),
    'long header': lambda: Items('abc').header(9),
    'cycle': lambda: Items('abc').map(up).cycle(3),
    'cycle header': lambda: Items('abc').cycle().header(8),
    'header cycle': lambda: Items('abcdef').header(3).cycle(3),
    'cycle cycle': lambda: Items('ab').cycle(2).cycle(2),
    'cache': lambda: Items('abc').in_memory_cache().map(up).cycle(2).header(5),
    'map style': lambda: as_pipe(dp.map.SequenceWrapper(list('abcd'))).header(3),
    'empty': lambda: Items([]).cycle().header(3),
}
TORCHS = 'batch', "torch's map", 'map style'  # they contain stages of torch
NAMES = [pytest.param(n, marks=needs_datapipes if n in TORCHS else ()) for n in CHAINS]


@pytest.mark.parametrize('chain', NAMES)
def test_a_saved_chain_continues_at_every_item(chain):
    "A restored chain gives the rest of the pass, then whole passes; the saved one is unaffected"
    make = CHAINS[chain]
    whole = list(make())
    for k in range(len(whole) + 1):
        a, b = make(), make()
        it = iter(a)
        assert list(islice(it, k)) == whole[:k]
        state = a.state_dict()
        b.load_state_dict(through_file(state))
        assert b.state_dict() == state == a.state_dict()
        assert list(b) == list(it) == whole[k:], f'after {k} of {len(whole)} items'
        assert list(b) == list(a) == whole


@pytest.mark.parametrize('chain', NAMES)
def test_a_chain_saved_between_passes_goes_on_with_whole_ones(chain):
    make = CHAINS[chain]
    whole, a, b = list(make()), make(), make()
    list(a)
    b.load_state_dict(through_file(a.state_dict()))
    assert list(b) in (whole, [])
    assert list(b) == list(a) == whole


@pytest.mark.parametrize(
    'other',
    [Items('abcdef').header(3).header(5), Items('abcdef').cycle(2), Items('abcdef').header(5)],
    ids=['differs above', 'differs', 'is shorter'],
)
def test_a_state_that_does_not_fit_changes_nothing(other):
    saved = Items('abcdef').cycle(2).header(5)
    list(islice(saved, 4))
    before = list(other)
    with pytest.raises(StateError, match='a different stage'):
        other.load_state_dict(saved.state_dict())
    assert list(other) == before


@pytest.mark.parametrize('one, other', [(up, Joined()), (Joined(), up)])
def test_a_function_with_a_state_is_not_one_without(one, other):
    saved = Items('abc').map(one).state_dict()
    with pytest.raises(StateError, match='Map: the saved function is of a different kind'):
        Items('abc').map(other).load_state_dict(saved)


@needs_datapipes
def test_a_chain_with_several_sources_is_iterated_but_not_saved():
    pipe = Items('abc').map(up).zip(Items('def')).header(2)
    assert list(pipe) == list(pipe) == [('A', 'd'), ('B', 'e')]
    with pytest.raises(NotImplementedError, match='several sources'):
        pipe.state_dict()


@pytest.mark.parametrize('chain', NAMES)
def test_chains_pickle_fresh_and_in_mid_pass(chain):
    "A copy of a chain in mid-pass begins anew, and the original does not notice"
    whole, a = list(CHAINS[chain]()), CHAINS[chain]()
    it = iter(a)
    first = list(islice(it, 1))
    assert list(pickle.loads(pickle.dumps(a))) == whole
    assert first + list(it) == whole


def test_chains_work_in_a_data_loader():
    loader = DataLoader(Items('abcdef').map(up).header(2).cycle(2), batch_size=None, num_workers=1)
    assert list(loader) == list(loader) == list('ABAB')


def test_a_chain_that_is_dropped_is_gone():
    src = Items('abc')
    ref = weakref.ref(src)
    for _ in src.map(up).header(2):
        pass
    del src, _
    gc.collect()
    assert ref() is None


# ---- sources and items ----


@pytest.mark.parametrize(
    'source, items',
    [
        (None, []),
        ('ab', ['a', 'b']),
        ({'k': 1}, ['k']),
        (Items('xy'), ['x', 'y']),
        (TypeTransformLoop([1, 2], [str, float]), [1.0, 2.0]),
        (np.arange(2), [0, 1]),
        (BLOCK, [BLOCK]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_sources(source, items):
    assert same(list(as_pipe(source)), items)
    assert same(list(Header(source).cycle(2)), items * 2)


@pytest.mark.parametrize('source', [5, lambda: [1], Items], ids=['int', 'function', 'class'])
def test_what_has_no_items_is_no_source(source):
    with pytest.raises(TypeError, match='source must be a pipe or an iterable of Steps'):
        Pipe(source)


class Only(Pipe):
    def __iter__(self):
        yield from self.blocks()


@pytest.mark.parametrize('item', ['a', torch.zeros(2)], ids=['str', 'Tensor'])
def test_items_that_are_no_blocks_are_refused_by_the_stages_name(item):
    it = iter(Only(Items([BLOCK, item])))
    assert next(it) is BLOCK
    with pytest.raises(TypeError, match=f'Only: .* must be Steps; got {type(item).__name__}'):
        next(it)


class FailsOn(Pipe):
    "Raise an error at one item, in each pass"

    takes_any_item = True

    def __init__(self, source, item, error):
        super().__init__(source)
        self.item = item
        self.error = error

    def __iter__(self):
        for x in self.source:
            if x == self.item:
                raise self.error
            yield x


@pytest.mark.parametrize('error', [NotEnoughRows('Mine', 'what'), KeyError(5), OSError(2, 'no')])
def test_errors_come_through_as_they_were_raised(error):
    "Then a second pass fails in the same way, and a chain without the error goes on"
    text = str(error)
    fails = FailsOn(Items('abcd'), 'c', error)
    chain = fails.map(up).header(9).cycle(2).in_memory_cache()
    for _ in range(2):
        with pytest.raises(type(error)) as e:
            list(chain)
        assert e.value is error and str(error) == text
    fails.item = None
    assert list(chain) == list('ABCDABCD')


def test_a_stage_may_build_on_the_pass_of_its_base():
    class Louder(Header):
        def __iter__(self):
            for x in super().__iter__():
                yield x.upper()

    pipe = Louder(Items('abcd'), 3)
    assert list(pipe.cycle(2)) == ['A', 'B', 'C'] * 2
    one, two = iter(pipe), iter(pipe)
    next(one)
    next(two)
    with pytest.raises(RuntimeError, match='^Louder: a second iterator over the same stage'):
        next(one)
    assert list(two) == ['B', 'C']


# ---- generic stages ----


@needs_datapipes
def test_torchs_map_is_for_torchs_pipes():
    assert type(dp.iter.IterableWrapper('ab').map(up)) is dp.iter.Mapper
    assert type(Items('ab').map(up)) is Map and type(Items('ab').filter(known)) is Filter
    assert list(dp.iter.Mapper(Items([('a', 'b')]), up, input_col=1)) == [('a', 'B')]


@pytest.mark.parametrize('n, limit', [(5, 3), (5, 5), (5, 9), (5, 0), (0, 3)])
def test_header_is_islice(n, limit):
    "It asks for no item more, which may be expensive"
    asked = []
    p = Items(range(n)).map(lambda x: asked.append(x) or x).header(limit)
    assert list(p) == list(p) == list(range(n))[:limit]
    assert asked == list(range(n))[:limit] * 2
    with pytest.raises(ValueError, match='Header: limit; got -1'):
        Items(range(n)).header(-1)


@pytest.mark.parametrize('n, count', [(3, 2), (3, 0), (0, 2), (0, None)])
def test_cycle_is_repetition(n, count):
    p = Items(range(n)).cycle(count)
    assert list(p) == list(p) == list(range(n)) * (count or 0)


# ---- texts ----


def test_a_chain_is_shown_as_it_was_written():
    chain = Items('abcdef').header(3).cycle().map(up).filter(known).map(Joined()).in_memory_cache()
    assert repr(chain).splitlines() == [
        'Items(6)',
        '  .header(limit=3)',
        '  .cycle()',
        '  .map(fn=up)',
        '  .filter(filter_fn=known)',
        '  .map(fn=Joined)',
        '  .in_memory_cache()',
    ]
