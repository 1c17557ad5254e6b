"""`Pipe`: what editors are told, registering, saving and continuing at every item, pickling, and the structure that keeps items cheap."""

import ast, gc, inspect, pickle
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import numpy as np, pytest, torch
from gymnasium import spaces
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.graph import traverse_dps
from torchdata import nodes

import fastrl_replay
from fastrl_replay.all import *
from fastrl_replay.steps.states import anything
from fastrl_replay.pipe import Positioned
from fastrl_replay.generic import Filter, Map, TypeTransformLoop
from fastrl_replay.pipe import as_pipe, upstream
from fastrl_replay.generic import dp
from fastrl_replay.testing import same, through_file
from scripted import modules

PACKAGE = Path(fastrl_replay.__file__).parent
modules()  # so that all stages are registered
STAGES = {
    n: f.stage
    for n, f in vars(Pipe).items()
    if getattr(f, 'stage', None) and f.stage.__module__.startswith('fastrl_replay.')
}
ENDS = 'stateful', 'node'  # what a chain becomes there is no pipe


def up(x):
    return x.upper()


def known(x):
    return x != 'B'


class Joined:
    "A function that remembers"

    def __init__(self):
        self.seen = ''

    def __call__(self, x):
        self.seen = self.seen[-3:] + x
        return self.seen

    def state_dict(self):
        return dict(seen=self.seen)

    def load_state_dict(self, state):
        self.seen = state['seen']


# ---- what editors are told ----


def test_every_stage_is_declared_with_its_parameters():
    "`test_house` compares the stub with what the script writes; this reads it"
    stub = next(
        n
        for n in ast.parse((PACKAGE / 'pipe.pyi').read_text()).body
        if getattr(n, 'name', '') == 'Pipe'
    )
    declared = {f.name: f for f in stub.body if isinstance(f, ast.FunctionDef)}
    public = {
        n: c
        for n, c in STAGES.items()
        if c in (Map, Filter) or getattr(fastrl_replay.all, c.__name__, None) is c
    }
    assert len(public) > 15 and set(declared) & set(STAGES) == set(public)
    for name, cls in public.items():
        args = declared[name].args
        found = [x.arg for x in (*args.args[1:], args.vararg, *args.kwonlyargs, args.kwarg) if x]
        assert (
            found == [*inspect.signature(cls.__init__).parameters][2:]
            and ast.unparse(declared[name].returns) == cls.__name__
        )


def test_no_name_of_pipe_is_imported_from_above():
    assert 'TYPE_CHECKING' not in (PACKAGE / 'pipe.py').read_text(encoding='utf-8')
    assert (PACKAGE / 'py.typed').exists()


@pytest.mark.parametrize('name', sorted(STAGES))
def test_chained_methods_look_like_their_stage(name):
    "Signature, name and docstring of the method, on our pipes and torch's; the class knows its name"
    method, cls = getattr(Pipe, name), STAGES[name]
    own, src, *params = inspect.signature(cls.__init__).parameters.values()
    assert (
        list(inspect.signature(method).parameters.values())[1:] == params
        and inspect.signature(method).return_annotation is cls
    )
    assert (
        method.__name__ == name == cls.stage_name
        and method.__doc__ == cls.__doc__
        and issubclass(cls, Pipe) == (name not in ENDS)
    )
    assert callable(getattr(Items('ab').map(up), name))


@pytest.mark.parametrize(
    'cls',
    sorted(
        {*(c for n, c in STAGES.items() if n not in ENDS), Items, MapToIterConverter},
        key=lambda c: c.__name__,
    ),
    ids=lambda c: c.__name__,
)
def test_items_are_cheap_by_structure(cls):
    "__iter__ is a generator in the class body, under torch's hook, which finds `_is_child_datapipe` at once"
    assert (
        inspect.isgeneratorfunction(inspect.unwrap(cls.__iter__))
        and hasattr(cls.__iter__, '__wrapped__')
        and cls._is_child_datapipe is False
    )
    assert '__next__' not in dir(cls) and cls.__iter__.__wrapped__.__module__.startswith(
        'fastrl_replay'
    )


# ---- registering ----


@pytest.fixture
def registry(monkeypatch):
    "Forget after the test what it registers; restore what it overwrites"
    monkeypatch.setattr(IterDataPipe, 'functions', dict(IterDataPipe.functions))
    before = dict(vars(Pipe))
    yield
    for n in set(vars(Pipe)) - set(before):
        delattr(Pipe, n)
    for n, v in before.items():
        if vars(Pipe)[n] is not v:
            setattr(Pipe, n, v)


def test_a_stage_may_be_defined_again(registry):
    "A notebook cell runs twice: the newer class replaces the older; a stranger doesn't"

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

    one, two = define(1), define(2)
    assert (
        type(Items('ab').louder()) is two is not one
        and list(Items('ab').louder(2)) == ['aaaa', 'bbbb']
        and list(Items('ab').map(up).louder(n=1)) == ['AA', 'BB']
    )
    assert stage('louder')(two) is two
    with pytest.raises(ValueError, match="'louder' is taken; got Stranger; expected Louder"):
        stage('louder')(type('Stranger', (Pipe,), dict(__init__=one.__init__)))
    assert type(Items('ab').louder()) is two


@pytest.mark.parametrize('name', ['map', 'filter', 'batch', 'shuffle', 'header', 'cycle'])
def test_names_that_are_taken_are_refused(registry, name):
    with pytest.raises(ValueError, match=f"'{name}' is taken"):
        stage(name)(type('Mine', (Pipe,), dict(__init__=lambda self, source: None)))


@pytest.mark.parametrize('name,cls', [('map', 'Map'), ('filter', 'Filter')])
def test_torchs_names_are_refused_to_a_namesake_of_ours(registry, name, cls):
    "It would take torch's stage away from torch's pipes"
    with pytest.raises(ValueError, match="is taken; got .*; expected one of torch's pipes"):
        stage(name)(type(cls, (Pipe,), dict(__init__=lambda self, source: None)))
    assert (
        type(Items('ab').map(up)) is Map
        and type(dp.iter.IterableWrapper('ab').map(up)) is dp.iter.Mapper
    )


@pytest.mark.parametrize(
    'name',
    [
        'blocks',
        'state_dict',
        'load_state_dict',
        'snapshot',
        'restore',
        'takes_any_item',
        'open',
        'close',
        'in_worker',
        'has_envs',
    ],
)  # was: they are overwritten on Pipe in silence
def test_a_stage_cannot_replace_what_pipes_are_made_of(registry, name):
    "stage('state_dict') would take `state_dict` away from every pipe"
    with pytest.raises(ValueError, match=name):
        stage(name)(type('Mine', (Pipe,), dict(__init__=lambda self, source: None)))


# ---- saving and continuing ----

CHAINS = {
    'items': lambda: Items('abcde'),
    'map': lambda: Items('abcde').map(up).header(4),
    'filter': lambda: Items('abcde').map(up).filter(known).header(3),
    'batch': lambda: Items('abcdefg').batch(2).header(4),
    "torch's map": lambda: dp.iter.Filter(dp.iter.Mapper(Items('abcde').map(up), up), known).header(
        3
    ),
    'map at the end': lambda: Items('abcde').header(4).map(up).filter(known),
    'header': lambda: Items('abcdefgh').header(3),
    'headers': lambda: Items('abcdefgh').header(5).map(up).header(3),
    'long header': lambda: Items('abc').header(9),
    'no header': lambda: Items('abc').header(0),
    'cycle': lambda: Items('abc').cycle(3),
    'cycle map': lambda: Items('abc').map(up).cycle(3),
    'cycle header': lambda: Items('abc').cycle().header(8),
    'header cycle': lambda: Items('abcdef').header(3).cycle(3),
    'cycle cycle': lambda: Items('ab').cycle(2).cycle(2),
    'cache': lambda: Items('abc').map(up).in_memory_cache(),
    'cache cycle': lambda: Items('abc').in_memory_cache().cycle(3),
    'cache map cycle': lambda: Items('abc').in_memory_cache().map(up).cycle(2).header(5),
    'map style': lambda: as_pipe(dp.map.SequenceWrapper(list('abcd'))).header(3),
    'empty': lambda: Items([]).cycle().header(3),
}


@pytest.mark.parametrize(
    'chain', CHAINS
)  # was: chains with cycle, saved at the end of a pass of its source: the restored one finds it empty, and stops for ever
def test_a_saved_chain_continues_at_every_item(chain):
    "Saved after k items, for every k: a fresh chain gives the rest of the pass, and the pass after that is a whole one"
    make = CHAINS[chain]
    whole = list(make())
    for k in range(len(whole) + 1):
        a, b = make(), make()
        it = iter(a)
        assert same(list(islice(it, k)), whole[:k])
        b.load_state_dict(through_file(a.state_dict()))
        assert same(list(b), whole[k:]), f'after {k} of {len(whole)} items'
        assert same(list(b), whole), (
            f'the pass after one that was continued after {k} items'
        )  # was: a header that had given all leaves its source in the middle


@pytest.mark.parametrize(
    'chain', CHAINS
)  # was: header: the pass after the restored (empty) one begins in the middle of the source
def test_a_chain_saved_between_passes_goes_on_with_whole_ones(chain):
    "When a pass is over, what comes next is a whole pass (or the nothing that is left of this one, and then whole passes)"
    make = CHAINS[chain]
    whole, a, b = list(make()), make(), make()
    list(a)
    b.load_state_dict(through_file(a.state_dict()))
    first = list(b)
    assert same(first, whole) or first == []
    assert same(list(b), whole) and same(list(a), whole)


@pytest.mark.parametrize('chain', CHAINS)
def test_saving_changes_nothing_and_can_be_done_twice(chain):
    "state_dict in mid-pass is only a look; a restored chain that has not moved saves what it was given"
    make = CHAINS[chain]
    whole, a = list(make()), make()
    seen = []
    for x in a:
        seen.append(x)
        a.state_dict()
    assert same(seen, whole)
    a, b = make(), make()
    it = iter(a)
    next(it, None)
    state = a.state_dict()
    b.load_state_dict(state)
    assert b.state_dict() == state == a.state_dict() and same(list(it), list(b))


@pytest.mark.parametrize(
    'make',
    [
        lambda: Items('abc').zip(Items('def')).header(3),
        lambda: Items('abc').concat(Items('def')).header(5),
    ],
    ids=['zip', 'concat'],
)
def test_torchs_stages_with_several_sources_are_not_forgotten(make):
    "They hold their sources as `datapipes`: the chain continues, or says that it can't"
    a, b = make(), make()
    it = iter(a)
    next(it)
    try:
        b.load_state_dict(a.state_dict())
    except (ValueError, TypeError, NotImplementedError):
        return
    assert (
        list(b) == list(it)
    )  # was: their sources are left out of the state in silence, and the restored chain repeats items


def test_a_state_belongs_to_its_chain():
    state = Items('abc').header(2).state_dict()
    for other, what in (
        (Items('abc').cycle(2), 'another stage'),
        (Items('abc').header(2).header(2), 'another stage'),
        (Items('abc').cycle().header(2), 'another stage'),
    ):
        with pytest.raises(ValueError, match=what):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match='not as long'):
        Items('abc').in_memory_cache().load_state_dict(
            {**Items('abc').header(1).state_dict(), 'stage': 'InMemoryCacheHolder'}
        )


def test_a_state_that_does_not_fit_changes_nothing():
    "Refused whole, like a bad block: the stages below the one that differs are as before"
    a, b = Items('abcdef').cycle(2).header(5), Items('abcdef').header(3).header(5)
    it = iter(a)
    list(islice(it, 4))
    with pytest.raises(ValueError):
        b.load_state_dict(a.state_dict())
    assert (
        list(b) == list('abc')
    )  # was: the last stage is restored before the ones above it are looked at: it gives a part of the pass


class Twice(Positioned):
    "Each item twice; the second one may be left for the next pass"

    saved, place = dict(place=anything), ''

    def __iter__(self):
        if self.place:
            item, self.place = self.place, ''
            yield item
        for item in self.source:
            self.place = item
            yield item
            self.place = ''
            yield item

    def _rewind(self):
        pass

    def _leave(self):
        pass


def letters():
    return as_pipe(nodes.IterableWrapper('abcd'))


@pytest.mark.parametrize(
    'above',
    [
        lambda: Items('abcd'),
        letters,
        lambda: Items('abcd').map(up),
        lambda: Items('ab').cycle(2),
        lambda: Items('abcdef').header(4),
        lambda: letters().header(3).map(up),
        lambda: dp.iter.Mapper(Items('abcd'), up),
        lambda: Items('abcd').in_memory_cache(),
    ],
    ids=['items', 'node', 'map', 'cycle', 'header', 'node, header', "torch's map", 'cache'],
)
@pytest.mark.parametrize('left', [1, 2, 3])
def test_what_a_pass_left_comes_first_in_a_restored_chain_too(above, left):
    "A pass is left; the next one gives what it left, is saved before it asks for more, and begins at the start of the source"
    a, b = (Twice(above()).map(up) for _ in 'ab')
    list(islice(a, left))
    it = iter(a)
    first = next(it)
    b.load_state_dict(through_file(a.state_dict()))
    want, got = [first, *it], [first, *b]
    assert got == want  # was: the restored chain went on where the first pass had left its source
    assert len(want) == (len(list(above())) * 2 + left % 2) and list(a) == list(b)


def test_a_state_that_waits_is_not_forgotten():
    "Restored in the middle, with an item that waits: saved again before the source has begun, it still goes on in the middle"
    a, b, c = (Twice(Items('abcd')) for _ in 'abc')
    it = iter(a)
    assert list(islice(it, 3)) == ['a', 'a', 'b']
    b.load_state_dict(a.state_dict())
    again = iter(b)
    assert next(again) == 'b'
    c.load_state_dict(b.state_dict())
    assert list(c) == list(again) == ['c', 'c', 'd', 'd']


def test_copies_number_their_passes_anew():
    "A copy made in a process that has counted far, in one that has not"
    a = Twice(Items('abcd'))
    list(islice(a, 3))
    b = pickle.loads(pickle.dumps(a))
    assert '_valid_iterator_id' not in {*vars(b), *vars(b.source)} and '_valid_iterator_id' in vars(
        a
    )
    assert list(islice(b, 1)) == ['b']


def test_a_chain_with_several_sources_has_several_passes():
    "A header begins all of them anew"
    p = Items('abc').map(up).zip(Items('def')).header(2)
    assert (
        list(p) == list(p) == [('A', 'd'), ('B', 'e')]
    )  # was: NotImplementedError at the end of each pass
    p = Twice(Items('abc').header(2).concat(Items('de'))).header(3)
    assert list(p) == ['a', 'a', 'b'] and list(p) == ['b', 'a', 'a']


def test_state_names_every_stage():
    s = Items('abc').map(up).cycle(2).header(4).state_dict()
    names = []
    while s:
        names.append(s['stage'])
        s = s['above']
    assert names == ['Header', 'Cycler', 'Map', 'Items']


# ---- chains ----


def test_above_walks_past_torchs_own_stages():
    src = Items('abc')
    chain = dp.iter.Filter(dp.iter.Mapper(src, up), known).header(2)
    assert (
        chain._upstream() is src
        and upstream(src) is None
        and type(upstream(chain)) is dp.iter.Filter
    )


@pytest.mark.parametrize(
    'source,items',
    [
        (None, []),
        ([], []),
        ('ab', ['a', 'b']),
        ((1, 2), [1, 2]),
        (range(2), [0, 1]),
        ({'k': 1}, ['k']),
        (Items('xy'), ['x', 'y']),
        (dp.map.SequenceWrapper([1, 2]), [1, 2]),
        (TypeTransformLoop([1, 2], [str, float]), [1.0, 2.0]),
        (np.arange(2), [0, 1]),
    ],
    ids=str,
)
def test_sources(source, items):
    assert (
        list(as_pipe(source)) == items
        and list(Header(source)) == items
        and list(Header(source).cycle(2)) == items * 2
    )
    assert isinstance(Pipe(source).source, IterDataPipe)


def test_a_block_is_a_source_of_one_block():
    steps = Steps(np.zeros(2, step_dtype(spaces.Discrete(2), spaces.Discrete(2))))
    assert [len(x) for x in Header(steps)] == [2] and list(Header([steps, steps]))[1] is steps


@pytest.mark.parametrize(
    'source',
    [5, 1.5, lambda: [1], object(), Items],
    ids=['int', 'float', 'function', 'object', 'class'],
)  # was: a class has `__iter__`, and is taken
def test_what_has_no_items_is_no_source(source):
    with pytest.raises(TypeError, match='expected a pipe or an iterable of Steps'):
        Pipe(source)


class Only(Pipe):
    def __iter__(self):
        yield from self.blocks()


@pytest.mark.parametrize(
    'item',
    [
        'a',
        None,
        3,
        np.zeros(2),
        torch.zeros(2),
        {},
        np.zeros(2, step_dtype(spaces.Discrete(2), spaces.Discrete(2))),
    ],
    ids=lambda x: type(x).__name__,
)
def test_items_that_are_no_blocks_are_refused_by_the_stages_name(item):
    good = Steps(np.zeros(1, step_dtype(spaces.Discrete(2), spaces.Discrete(2))))
    it = iter(Only(Items([good, item])))
    assert next(it) is good
    with pytest.raises(
        TypeError, match=f'Only: an item of its source; got {type(item).__name__}; expected Steps'
    ):
        next(it)


def test_generators_give_their_items_once():
    p = Items(x for x in 'abc').header(2)
    assert list(p) == ['a', 'b'] and len(list(Items(iter('abc')).cycle())) == 3


# ---- generic stages ----


@pytest.mark.parametrize('k', range(6))
def test_what_a_function_remembers_is_saved(k):
    "After k items, a fresh chain with another function goes on with what the saved one remembered"
    a, b = (
        Items('abcde').map(up).map(Joined()).filter(known) for _ in 'ab'
    )  # was: torch's map: no `state_dict`, and in the middle its function was left out
    it = iter(a)
    first = list(islice(it, k))
    state = a.state_dict()
    b.load_state_dict(through_file(state))
    assert first + list(b) == ['A', 'AB', 'ABC', 'ABCD', 'BCDE'] == first + list(it)
    assert state['above']['own']['own'] == dict(
        seen=''.join('ABCDE'[:k][-4:])
    )  # and stays as it was


@pytest.mark.parametrize(
    'one,other', [(up, Joined()), (Joined(), up)], ids=['remembers', 'does not']
)
def test_a_function_that_saves_itself_is_no_other(one, other):
    "Refused before anything changes"
    a, b = Items('abc').map(one), Items('abc').header(2).map(up).map(other)
    state = Items('abc').header(2).map(up).map(one).state_dict()
    with pytest.raises(
        ValueError,
        match='Map: the saved function is of another kind; got one that .*; expected one that .* Remedy: build',
    ):
        b.load_state_dict(state)
    a.load_state_dict(a.state_dict())


def test_maps_and_filters_show_the_whole_chain():
    "Where torch's own show their own name only; also torch's own between ours"
    chain = Items('abcde').header(4).map(up).filter(known).map(Joined())
    assert (
        repr(chain)
        == "Items(5)\n  .header(limit=4)\n  .map(fn=up)\n  .filter(filter_fn=known)\n  .map(fn=Joined)"
    )  # was: MapperIterDataPipe
    assert (
        repr(chain.batch(2).header(3))
        == repr(chain) + '\n  .batch(batch_size=2)\n  .header(limit=3)'
    )  # was: BatcherIterDataPipe
    assert repr(Items('ab').zip(Items('cd')).header(3)) == 'ZipperIterDataPipe\n  .header(limit=3)'


def test_torchs_map_is_for_torchs_pipes():
    "A chain that begins with a pipe of torch's has torch's, with all its arguments"
    assert (
        type(dp.iter.IterableWrapper('ab').map(up)) is dp.iter.Mapper
        and type(Items('ab').map(up)) is Map
        and type(Items('ab').filter(known)) is Filter
    )
    assert list(dp.iter.Mapper(Items([('a', 'b')]), up, input_col=1)) == [('a', 'B')]


@pytest.mark.parametrize(
    'wrong,says',
    [
        (
            lambda: Items('ab').map(up, input_col=0),
            "Map: arguments that only torch's stage has; got {'input_col': 0}. Remedy: .* dp.iter.Mapper",
        ),
        (lambda: Items('ab').map(up, 0, 1), "got {'input_col': 0, 'output_col': 1}"),
        (lambda: Items('ab').filter(known, input_col='x'), 'Filter: arguments .* dp.iter.Filter'),
        (lambda: Items('ab').map(None), 'Map: fn; got NoneType; expected a function of one item'),
        (lambda: Items('ab').filter('ab'), 'Filter: fn; got str'),
    ],
)
def test_functions_that_do_not_fit_are_refused_at_once(wrong, says):
    with pytest.raises(TypeError, match=says):
        wrong()


@pytest.mark.parametrize(
    'answer,got',
    [
        (torch.tensor([True]), 'Tensor [1]'),
        (np.ones(2, bool), 'ndarray [2]'),
        (None, 'NoneType'),
        (1, 'int'),
        ('yes', 'str'),
        (torch.tensor(1.0), 'Tensor []'),
    ],
    ids=lambda x: str(type(x).__name__),
)
def test_a_filter_wants_yes_or_no(answer, got):
    "Of a whole item: a mask of rows would keep a block of one row, and fail with the next"
    with pytest.raises(TypeError) as e:
        list(Items('ab').filter(lambda x: answer))
    assert str(e.value).startswith(
        f'Filter: what its function says of an item; got {got}; expected True or False'
    )


@pytest.mark.parametrize('kind', [bool, np.bool_, torch.tensor, np.array], ids=lambda k: k.__name__)
def test_every_kind_of_yes_is_one(kind):
    assert list(Items('abc').filter(lambda x: kind(x != 'b'))) == ['a', 'c']


@pytest.mark.parametrize('n,limit', [(5, 3), (5, 5), (5, 9), (5, 0), (0, 3)])
def test_header_is_islice(n, limit):
    p = Items(range(n)).header(limit)
    assert list(p) == list(p) == list(range(n))[:limit]
    with pytest.raises(ValueError, match='Header: limit; got -1'):
        Items(range(n)).header(-1)


@pytest.mark.filterwarnings('ignore:Local function')
def test_header_asks_for_no_item_more():
    "The item after the limit may be expensive"
    asked = []

    def note(x):
        asked.append(x)
        return x

    assert list(Items(range(9)).map(note).header(3)) == [0, 1, 2] == asked


@pytest.mark.parametrize('n,count', [(3, 2), (3, 1), (3, 0), (0, 2), (0, None), (1, 4)])
def test_cycle_is_repetition(n, count):
    p = Items(range(n)).cycle(count)
    assert list(p) == list(p) == list(range(n)) * (count or 0)


@pytest.mark.filterwarnings('ignore:Local function')
def test_cache_reads_once_and_gives_the_same_objects():
    made = []

    def make(x):
        made.append(x)
        return [x]

    p = Items('abc').map(make).in_memory_cache()
    assert [x is y for x, y in zip(list(p), list(p))] == [True] * 3 and made == ['a', 'b', 'c']
    assert [id(x) for x in islice(p, 2)] == [id(x) for x in islice(p, 2)]


def test_old_names_are_there():
    "What seed 002's pipelines import"
    assert (
        dp.iter.Header,
        dp.iter.Cycler,
        dp.iter.InMemoryCacheHolder,
        dp.iter.MapToIterConverter,
    ) == (Header, Cycler, InMemoryCacheHolder, MapToIterConverter)
    assert (
        list(dp.iter.MapToIterConverter(dp.map.Mapper([1, 2], str))) == ['1', '2']
        and dp.iter.IterableWrapper
        and dp.map.SequenceWrapper
    )
    assert (
        len(TypeTransformLoop([1, 2, 3], [])) == 3
        and TypeTransformLoop([1, 2], [str, float])[1] == 2.0
    )


# ---- errors and passes ----


class FailsOn(Pipe):
    "Raises what it was given at one item, each pass"

    takes_any_item = True

    def __init__(self, source, item, error):
        super().__init__(source)
        self.item, self.error, self.looked = item, error, 0

    @property
    def costly(self):
        self.looked += 1
        raise OSError('nobody should look here')

    def __iter__(self):
        for x in self.source:
            if x == self.item:
                raise self.error
            yield x


ERRORS = [
    ArgumentError('Mine', 'what', 1, 2, 'do'),
    BlockError('Mine', 'what'),
    StateError('a whole text'),
    NotEnoughRows('Mine', 'what'),
    EnvError('Mine', 'what'),
    StaleKey('Mine', 'key 5'),
    KeyError(5),
    ValueError(),
    OSError(2, 'no such file'),
    UnicodeDecodeError('utf-8', b'a', 0, 1, 'why'),
    ZeroDivisionError('by 0'),
]


@pytest.mark.parametrize('error', ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    'stages',
    [lambda p: p, lambda p: p.map(up).header(9).filter(known).cycle(2).in_memory_cache()],
    ids=['alone', 'five stages'],
)
def test_errors_come_through_as_they_were_raised(error, stages):
    "The very same, with its text and its arguments; then a second pass fails in the same way, and a chain without the error goes on"
    args, text = error.args, str(error)
    fails = FailsOn(Items('abcd'), 'c', error)
    chain, seen = stages(fails), []
    for _ in range(2):
        with pytest.raises(type(error)) as e:
            for x in chain:
                seen.append(x)
        assert (
            e.value is error and error.args == args and str(error) == text
        )  # was: "This exception is thrown by __iter__ of FailsOn(…)", which replaced what is no text
    assert fails.looked == 0  # was: all properties of the stage were read for that line
    fails.item = None
    assert [x.lower() for x in dict.fromkeys(chain)] == (
        list('abcd') if chain is fails else list('acd')
    )


def test_a_stage_may_build_on_the_pass_of_its_base():
    "`super().__iter__()` is part of the same pass"

    class Louder(Header):
        def __iter__(self):
            for x in super().__iter__():
                yield x.upper()

    class Loudest(Louder):
        def __iter__(self):
            yield from (x + '!' for x in super().__iter__())

    pipe = Loudest(Items('abcd'), 3).cycle(2)
    assert (
        list(pipe) == ['A!', 'B!', 'C!'] * 2
    )  # was: "This iterator has been invalidated", at the second item
    one, two = iter(pipe.source), iter(pipe.source)
    next(one)
    next(two)
    with pytest.raises(RuntimeError, match='^Loudest: this iterator was invalidated'):
        next(one)
    assert list(two) == ['B!', 'C!']


# ---- pickling and workers ----


@pytest.mark.parametrize('chain', [c for c in CHAINS])
def test_chains_pickle_fresh_and_in_mid_pass(chain):
    "A copy of a fresh chain gives the same; one of a chain in mid-pass can be iterated; the original does not notice"
    make = CHAINS[chain]
    whole, a = list(make()), make()
    assert same(list(pickle.loads(pickle.dumps(a))), whole)
    it = iter(a)
    first = list(islice(it, 1))
    assert same(list(pickle.loads(pickle.dumps(a))), whole)
    assert same(first + list(it), whole)


def test_buffers_stay_out_of_pickles():
    p = Items([bytes(100_000)]).map(up_bytes).in_memory_cache()
    size = len(pickle.dumps(p))
    assert (
        len(list(p)[0]) == 100_000
        and len(pickle.dumps(p)) < size + 1000
        and list(pickle.loads(pickle.dumps(p))) == list(p)
    )


def up_bytes(x):
    return x.upper()


def test_torch_sees_the_whole_chain():
    "traverse_dps finds every stage, through ours and its own, and pickles no buffer on the way"
    src = Items('abc')
    chain = dp.iter.Mapper(src.map(up), up).in_memory_cache().header(2)
    found = []

    def walk(g):
        for p, sub in g.values():
            found.append(type(p).__name__)
            walk(sub)

    walk(traverse_dps(chain))
    assert found == ['Header', 'InMemoryCacheHolder', 'MapperIterDataPipe', 'Map', 'Items']


@pytest.mark.parametrize('workers', [0, 1])
def test_chains_work_in_a_data_loader(workers):
    p = Items('abcdef').map(up).header(2).cycle(2)
    loader = DataLoader(p, batch_size=None, num_workers=workers)
    assert list(loader) == list(loader) == list('ABAB')


def test_a_chain_that_is_dropped_is_gone():
    "No registry and no iterator keeps a used chain alive"
    import weakref

    src = Items('abc')
    ref = weakref.ref(src)
    for _ in src.map(up).header(2):
        pass
    del src, _
    gc.collect()
    assert ref() is None


# ---- opening, closing, workers ----


class Opens(Positioned):
    "Opens something that must be closed once, and notes it"

    def __init__(self, source, name, log, fails=''):
        super().__init__(source)
        self.name, self.log, self.fails, self.opened = name, log, fails, False

    def __iter__(self):
        self._open()
        yield from self.source

    def _open(self):
        if self.opened:
            return
        if self.fails == 'open':
            raise OSError(self.name)
        self.opened = True
        self.log.append(f'+{self.name}')

    def _close(self):
        if not self.opened:
            return
        self.opened = False
        self.log.append(f'-{self.name}')
        if self.fails == 'close':
            raise OSError(self.name)

    def _in_worker(self, info):
        self.log.append((self.name, info))


def opening(log, *fails):
    pipe = 'abc'
    for name in 'xyz':
        pipe = Opens(pipe, name, log, 'close' if name in fails else '').map(up).filter(known)
    return pipe.header(9)


def test_a_chain_closes_once_from_the_last_stage_up():
    log = []
    pipe = opening(log)
    pipe.close()
    assert log == []  # nothing was opened
    pipe.open()
    pipe.open()
    assert log == ['+x', '+y', '+z']
    pipe.close()
    pipe.close()
    assert (
        log[3:] == ['-z', '-y', '-x'] and list(pipe) == ['A', 'C'] and log[6:] == ['+z', '+y', '+x']
    )


@pytest.mark.parametrize('fails,told', [('x', 'x'), ('z', 'z'), ('xz', 'z'), ('xyz', 'z')])
def test_all_are_closed_also_where_some_fail(fails, told):
    log = []
    pipe = opening(log, *fails)
    pipe.open()
    with pytest.raises(OSError, match=told):
        pipe.close()
    assert log[3:] == ['-z', '-y', '-x']
    pipe.close()
    assert len(log) == 6


@pytest.mark.parametrize('error', [None, KeyError])
def test_a_chain_is_a_context(error):
    log = []
    with pytest.raises(error) if error else nullcontext():
        with opening(log) as pipe:
            assert next(iter(pipe)) == 'A'
            if error:
                raise error
    assert sorted(log) == sorted(['+x', '+y', '+z', '-x', '-y', '-z']) and log[3:] == [
        '-z',
        '-y',
        '-x',
    ]


def test_what_could_be_opened_is_closed_when_another_could_not():
    log = []
    with pytest.raises(OSError, match='bad'):
        with Opens(Opens('ab', 'good', log), 'bad', log, 'open') as pipe:
            pipe.open()
    assert log == ['+good', '-good']


def test_branches_that_meet_are_closed_once():
    log = []
    top = Opens('ab', 'top', log)
    both = Opens(Opens(top, 'l', log).concat(Opens(top, 'r', log)), 'both', log)
    with both:
        both.open()
    assert log == ['+top', '+r', '+l', '+both', '-both', '-l', '-r', '-top'] and not both.has_envs
    log.clear()
    first, second = Opens(Items('ab'), 'top', log).fork(2)
    pipe = Header(first.zip(second))
    with pipe:
        pipe.open()
    assert log == ['+top', '-top']


def test_who_is_a_worker_is_told_so():
    log, info = [], WorkerInfo(1, 3, 2)
    opening(log).in_worker(info)
    assert log == [(name, info) for name in 'zyx']


def test_rewinding_touches_positions_only():
    "A stage may have attributes of any name"

    class Other(Pipe):
        def __init__(self, source):
            super().__init__(source)
            self.place, self._place, self._resume = 'mine', [1], 'too'

        def __iter__(self):
            yield from self.source

    pipe = Other(Items('abc')).header(2)
    assert list(pipe) == list(pipe) == ['a', 'b'] and (
        pipe.source.place,
        pipe.source._place,
        pipe.source._resume,
    ) == ('mine', [1], 'too')


# ---- a face ----


class Scaled(Pipe):
    stage_name = 'scaled'

    def __init__(self, source, by=1, name='x', fn=None):
        super().__init__(source)
        self.by, self.name, self.fn = by, name, fn


def test_a_chain_is_shown_as_it_was_written():
    assert (
        repr(Items('abcdef').header(3).cycle().header(10))
        == 'Items(6)\n  .header(limit=3)\n  .cycle()\n  .header()'
    )
    assert repr(Items(x for x in 'a').in_memory_cache()) == 'Items(generator)\n  .in_memory_cache()'
    assert repr(Scaled([1], 2, 'y', up)) == "Items(1)\n  .scaled(by=2, name='y', fn=up)" and str(
        Scaled([1])
    ) == repr(Scaled([1]))
    assert len(repr(Scaled([1], 'x' * 500))) < 100


@pytest.mark.parametrize(
    'by',
    [np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), [np.ones(2)]],
    ids=['array', 'tensor', 'list'],
)
def test_arguments_of_any_kind_can_be_shown(by):
    "A stage with an array for an argument, as CONTRIBUTING invites users to write"
    assert '.scaled(by=' in repr(
        Scaled([1], by)
    )  # was: "The truth value of an array … is ambiguous"


# ---- names that are not there ----


@pytest.mark.parametrize(
    'make, says',
    [
        (
            lambda: Items([]).experience_replay(batch_size=2),
            r"ExperienceReplay: unexpected keyword argument 'batch_size' \(did you mean 'bs'\?\)",
        ),
        (lambda: ExperienceReplay(None, 2, buffer_size=9), "did you mean 'max_sz'"),
        (lambda: PrioritizedReplay(None, 2, 9, learning_starts=9), "did you mean 'warmup'"),
        (lambda: Items([]).n_step(n_steps=3), "did you mean 'n'"),
        (lambda: Items([]).dqn(None, learning_rate=1), "did you mean 'lr'"),
        (lambda: GymStepper('CartPole-v1', sede=1), "did you mean 'seed'"),
        (
            lambda: Items([]).header(xyz=1),
            r"Header: unexpected keyword argument 'xyz'; expected one of source, limit",
        ),
    ],
)
def test_unknown_arguments_name_the_nearest_one(make, says):
    with pytest.raises(TypeError, match=says):
        make()


@pytest.mark.parametrize(
    'name, meant',
    [
        ('prioritised_replay', 'prioritized_replay'),
        ('sequence_repaly', 'sequence_replay'),
        ('n_steps', 'n_step'),
        ('state_dcit', 'state_dict'),
    ],
)
def test_missing_attributes_name_the_nearest_one(name, meant):
    with pytest.raises(
        AttributeError, match=f"^Items: no attribute '{name}' .did you mean '{meant}'"
    ):
        getattr(Items([]), name)


def test_what_is_not_there_is_asked_for_as_before():
    pipe = Items([1, 2]).map(str)
    assert (
        not hasattr(pipe, 'nothing_like_it')
        and getattr(pipe, '_none', 3) == 3
        and [*pipe.batch(2)] == [['1', '2']]
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'$") as e:
        pipe.nothing_like_it
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
