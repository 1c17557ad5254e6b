"""`Pipe`: what editors are told, registering, saving and continuing at every item, pickling, and the structure that keeps items cheap."""
import ast, gc, importlib, inspect, pickle, pkgutil
from itertools import islice
from pathlib import Path

import numpy as np, pytest, torch
from gymnasium import spaces
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.graph import traverse_dps

import fastrl_replay
from fastrl_replay.core import Steps, step_dtype
from fastrl_replay.pipe import Cycler, Header, InMemoryCacheHolder, Items, MapToIterConverter, Pipe, TypeTransformLoop, above, as_pipe, dp, stage
from fastrl_replay.testing import same, through_file

PACKAGE = Path(fastrl_replay.__file__).parent
NAMES = [m.name for m in pkgutil.walk_packages([str(PACKAGE)], 'fastrl_replay.') if not m.name.endswith('__main__')]
for name in NAMES: importlib.import_module(name)
STAGES = {n: f.stage for n,f in IterDataPipe.functions.items() if getattr(f, 'stage', None) and f.stage.__module__.startswith('fastrl_replay.')}
ENDS = 'stateful','node'   # what a chain becomes there is no pipe

def up(x): return x.upper()
def known(x): return x != 'B'

# ---- what editors are told ----

def tree(module): return ast.parse(Path(inspect.getsourcefile(importlib.import_module(module))).read_text(encoding='utf-8'))
def typing_blocks(body): return [b for b in body if isinstance(b, ast.If) and ast.unparse(b.test) == 'TYPE_CHECKING']

def described(fn):
    "name, kind, type and default of each parameter but the first two of a method (`self`, and a stage's `source`) or the first (`self`)"
    a = fn.args
    plain = a.posonlyargs + a.args
    defaults = [None]*(len(plain)-len(a.defaults)) + a.defaults
    text = lambda n: n and ast.unparse(n)
    res = [(x.arg, 'plain', text(x.annotation), text(d)) for x,d in zip(plain, defaults)]
    res += [(x.arg, 'keyword', text(x.annotation), text(d)) for x,d in zip(a.kwonlyargs, a.kw_defaults)]
    return res + [(x.arg, kind, text(x.annotation), None) for x,kind in ((a.vararg,'*'),(a.kwarg,'**')) if x]

PIPE = next(n for n in tree('fastrl_replay.pipe').body if isinstance(n, ast.ClassDef) and n.name == 'Pipe')
DECLARED = {f.name: f for b in typing_blocks(PIPE.body) for f in b.body}

def init_of(cls):
    "The __init__ of a stage class, or the one it inherits, as written"
    for c in cls.__mro__:
        node = next((n for n in ast.walk(tree(c.__module__)) if isinstance(n, ast.ClassDef) and n.name == c.__name__), None)
        fn = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == '__init__'), None)
        if fn: return fn

def decorated():
    "(method, class, module) of every @stage in the package's source"
    for m in NAMES:
        for node in ast.walk(tree(m)):
            for d in getattr(node, 'decorator_list', []):
                if isinstance(node, ast.ClassDef) and isinstance(d, ast.Call) and ast.unparse(d.func) == 'stage': yield d.args[0].value, node.name, m

def test_every_stage_is_declared_and_nothing_else():
    "The @stage classes in the source are those that are registered, and those that Pipe declares for editors"
    found = {name: (cls, m) for name,cls,m in decorated()}
    assert len(found) >= 5 and found == {n: (c.__name__, c.__module__) for n,c in STAGES.items()} and set(DECLARED) == set(found)

@pytest.mark.parametrize('name', sorted(STAGES))
def test_declared_methods_have_the_parameters_of_their_stage(name):
    "Names, kinds, types and defaults, in order; what they return is the stage"
    fn,cls = DECLARED[name],STAGES[name]
    own,src,*params = described(init_of(cls))
    assert described(fn)[0][0] == 'self' and described(fn)[1:] == params and own[0] == 'self' and src[0] == 'source'
    assert ast.literal_eval(fn.returns) == cls.__name__ and ast.unparse(fn.body[0]) == '...'

@pytest.mark.parametrize('name', sorted(STAGES))
def test_what_declarations_return_is_imported_from_where_it_is(name):
    imports = {a.name: n.module for b in typing_blocks(tree('fastrl_replay.pipe').body) for n in b.body for a in n.names}
    assert STAGES[name].__module__ == imports.get(STAGES[name].__name__, 'fastrl_replay.pipe')

@pytest.mark.parametrize('name', sorted(STAGES))
def test_chained_methods_look_like_their_stage(name):
    "Signature, name and docstring of the method, on our pipes and torch's; the class knows its name"
    method,cls = getattr(Pipe, name),STAGES[name]
    own,src,*params = inspect.signature(cls.__init__).parameters.values()
    assert list(inspect.signature(method).parameters.values())[1:] == params and inspect.signature(method).return_annotation is cls
    assert method.__name__ == name == cls.stage_name and method.__doc__ == cls.__doc__ and issubclass(cls, Pipe) == (name not in ENDS)
    assert callable(getattr(Items('ab').map(up), name))

@pytest.mark.parametrize('cls', sorted({*(c for n,c in STAGES.items() if n not in ENDS), Items, MapToIterConverter}, key=lambda c: c.__name__), ids=lambda c: c.__name__)
def test_items_are_cheap_by_structure(cls):
    "__iter__ is a generator in the class body, under torch's hook, which finds `_is_child_datapipe` at once"
    assert inspect.isgeneratorfunction(inspect.unwrap(cls.__iter__)) and hasattr(cls.__iter__, '__wrapped__') and cls._is_child_datapipe is False
    assert '__next__' not in dir(cls) and cls.__iter__.__wrapped__.__module__.startswith('fastrl_replay')

# ---- registering ----

@pytest.fixture
def registry(monkeypatch):
    "Forget after the test what it registers; restore what it overwrites"
    monkeypatch.setattr(IterDataPipe, 'functions', dict(IterDataPipe.functions))
    before = dict(vars(Pipe))
    yield
    for n in set(vars(Pipe)) - set(before): delattr(Pipe, n)
    for n,v in before.items():
        if vars(Pipe)[n] is not v: setattr(Pipe, n, v)

def test_a_stage_may_be_defined_again(registry):
    "A notebook cell runs twice: the newer class replaces the older; a stranger doesn't"
    def define(by):
        @stage('louder')
        class Louder(Pipe):
            def __init__(self, source, n=1): super().__init__(source); self.n = n
            def __iter__(self):
                for x in self.source: yield x*by*self.n
        return Louder
    one,two = define(1),define(2)
    assert type(Items('ab').louder()) is two is not one and list(Items('ab').louder(2)) == ['aaaa','bbbb'] and list(Items('ab').map(up).louder(n=1)) == ['AA','BB']
    assert stage('louder')(two) is two
    with pytest.raises(ValueError, match="'louder' is taken; got Stranger; expected Louder"): stage('louder')(type('Stranger', (Pipe,), dict(__init__=one.__init__)))
    assert type(Items('ab').louder()) is two

@pytest.mark.parametrize('name', ['map', 'filter', 'batch', 'shuffle', 'header', 'cycle'])
def test_names_that_are_taken_are_refused(registry, name):
    with pytest.raises(ValueError, match=f"'{name}' is taken"): stage(name)(type('Mine', (Pipe,), dict(__init__=lambda self, source: None)))

@pytest.mark.parametrize('name', ['blocks', 'state_dict', 'load_state_dict', 'snapshot', 'restore', 'takes_any_item'])   # was: they are overwritten on Pipe in silence
def test_a_stage_cannot_replace_what_pipes_are_made_of(registry, name):
    "stage('state_dict') would take `state_dict` away from every pipe"
    with pytest.raises(ValueError, match=name): stage(name)(type('Mine', (Pipe,), dict(__init__=lambda self, source: None)))

# ---- saving and continuing ----

CHAINS = {
    'items':            lambda: Items('abcde'),
    'map':              lambda: Items('abcde').map(up).header(4),
    'filter':           lambda: Items('abcde').map(up).filter(known).header(3),
    'batch':            lambda: Items('abcdefg').batch(2).header(4),
    'header':           lambda: Items('abcdefgh').header(3),
    'headers':          lambda: Items('abcdefgh').header(5).map(up).header(3),
    'long header':      lambda: Items('abc').header(9),
    'no header':        lambda: Items('abc').header(0),
    'cycle':            lambda: Items('abc').cycle(3),
    'cycle map':        lambda: Items('abc').map(up).cycle(3),
    'cycle header':     lambda: Items('abc').cycle().header(8),
    'header cycle':     lambda: Items('abcdef').header(3).cycle(3),
    'cycle cycle':      lambda: Items('ab').cycle(2).cycle(2),
    'cache':            lambda: Items('abc').map(up).in_memory_cache(),
    'cache cycle':      lambda: Items('abc').in_memory_cache().cycle(3),
    'cache map cycle':  lambda: Items('abc').in_memory_cache().map(up).cycle(2).header(5),
    'map style':        lambda: as_pipe(dp.map.SequenceWrapper(list('abcd'))).header(3),
    'empty':            lambda: Items([]).cycle().header(3),
}

@pytest.mark.parametrize('chain', CHAINS)   # was: chains with cycle, saved at the end of a pass of its source: the restored one finds it empty, and stops for ever
def test_a_saved_chain_continues_at_every_item(chain):
    "Saved after k items, for every k: a fresh chain gives the rest of the pass, and the pass after that is a whole one"
    make = CHAINS[chain]
    whole = list(make())
    for k in range(len(whole)+1):
        a,b = make(),make()
        it = iter(a)
        assert same(list(islice(it, k)), whole[:k])
        b.load_state_dict(through_file(a.state_dict()))
        assert same(list(b), whole[k:]), f'after {k} of {len(whole)} items'
        assert same(list(b), whole), f'the pass after one that was continued after {k} items'   # was: a header that had given all leaves its source in the middle

@pytest.mark.parametrize('chain', CHAINS)   # was: header: the pass after the restored (empty) one begins in the middle of the source
def test_a_chain_saved_between_passes_goes_on_with_whole_ones(chain):
    "When a pass is over, what comes next is a whole pass (or the nothing that is left of this one, and then whole passes)"
    make = CHAINS[chain]
    whole,a,b = list(make()),make(),make()
    list(a)
    b.load_state_dict(through_file(a.state_dict()))
    first = list(b)
    assert same(first, whole) or first == []
    assert same(list(b), whole) and same(list(a), whole)

@pytest.mark.parametrize('chain', CHAINS)
def test_saving_changes_nothing_and_can_be_done_twice(chain):
    "state_dict in mid-pass is only a look; a restored chain that has not moved saves what it was given"
    make = CHAINS[chain]
    whole,a = list(make()),make()
    seen = []
    for x in a: seen.append(x); a.state_dict()
    assert same(seen, whole)
    a,b = make(),make()
    it = iter(a)
    next(it, None)
    state = a.state_dict()
    b.load_state_dict(state)
    assert b.state_dict() == state == a.state_dict() and same(list(it), list(b))

@pytest.mark.parametrize('make', [lambda: Items('abc').zip(Items('def')).header(3), lambda: Items('abc').concat(Items('def')).header(5)], ids=['zip','concat'])
def test_torchs_stages_with_several_sources_are_not_forgotten(make):
    "They hold their sources as `datapipes`: the chain continues, or says that it can't"
    a,b = make(),make()
    it = iter(a)
    next(it)
    try: b.load_state_dict(a.state_dict())
    except (ValueError, TypeError, NotImplementedError): return
    assert list(b) == list(it)   # was: their sources are left out of the state in silence, and the restored chain repeats items

def test_a_state_belongs_to_its_chain():
    state = Items('abc').header(2).state_dict()
    for other,what in (Items('abc').cycle(2), 'another stage'), (Items('abc').header(2).header(2), 'another stage'), (Items('abc').cycle().header(2), 'another stage'):
        with pytest.raises(ValueError, match=what): other.load_state_dict(state)
    with pytest.raises(ValueError, match='not as long'): Items('abc').in_memory_cache().load_state_dict({**Items('abc').header(1).state_dict(), 'stage': 'InMemoryCacheHolder'})

def test_a_state_that_does_not_fit_changes_nothing():
    "Refused whole, like a bad block: the stages below the one that differs are as before"
    a,b = Items('abcdef').cycle(2).header(5),Items('abcdef').header(3).header(5)
    it = iter(a)
    list(islice(it, 4))
    with pytest.raises(ValueError): b.load_state_dict(a.state_dict())
    assert list(b) == list('abc')   # was: the last stage is restored before the ones above it are looked at: it gives a part of the pass

def test_state_names_every_stage():
    s = Items('abc').map(up).cycle(2).header(4).state_dict()
    names = []
    while s: names.append(s['stage']); s = s['above']
    assert names == ['Header', 'Cycler', 'Items']

# ---- chains ----

def test_above_walks_past_torchs_own_stages():
    src = Items('abc')
    chain = src.map(up).filter(known).header(2)
    assert chain._above() is src and above(src) is None and type(above(chain)).__name__ == 'FilterIterDataPipe'

@pytest.mark.parametrize('source,items', [(None, []), ([], []), ('ab', ['a','b']), ((1,2), [1,2]), (range(2), [0,1]), ({'k': 1}, ['k']), (Items('xy'), ['x','y']),
                                          (dp.map.SequenceWrapper([1,2]), [1,2]), (TypeTransformLoop([1,2], [str, float]), [1.,2.]), (np.arange(2), [0,1])], ids=str)
def test_sources(source, items):
    assert list(as_pipe(source)) == items and list(Header(source)) == items and list(Header(source).cycle(2)) == items*2
    assert isinstance(Pipe(source).source, IterDataPipe)

def test_a_block_is_a_source_of_one_block():
    steps = Steps(np.zeros(2, step_dtype(spaces.Discrete(2), spaces.Discrete(2))))
    assert [len(x) for x in Header(steps)] == [2] and list(Header([steps, steps]))[1] is steps

@pytest.mark.parametrize('source', [5, 1.5, lambda: [1], object(), Items], ids=['int','float','function','object','class'])   # was: a class has `__iter__`, and is taken
def test_what_has_no_items_is_no_source(source):
    with pytest.raises(TypeError, match='expected a pipe or an iterable of Steps'): Pipe(source)

class Only(Pipe):
    def __iter__(self): yield from self.blocks()

@pytest.mark.parametrize('item', ['a', None, 3, np.zeros(2), torch.zeros(2), {}, np.zeros(2, step_dtype(spaces.Discrete(2), spaces.Discrete(2)))], ids=lambda x: type(x).__name__)
def test_items_that_are_no_blocks_are_refused_by_the_stages_name(item):
    good = Steps(np.zeros(1, step_dtype(spaces.Discrete(2), spaces.Discrete(2))))
    it = iter(Only(Items([good, item])))
    assert next(it) is good
    with pytest.raises(TypeError, match=f'Only: an item of its source; got {type(item).__name__}; expected Steps'): next(it)

def test_generators_give_their_items_once():
    p = Items(x for x in 'abc').header(2)
    assert list(p) == ['a','b'] and len(list(Items(iter('abc')).cycle())) == 3

def test_one_live_iterator():
    "torch's rule: a second one invalidates the first, which says so"
    p = Items('abc').header(3)
    one,two = iter(p),iter(p)
    assert next(one) == 'a' and next(two) == 'a'
    with pytest.raises(RuntimeError, match='invalidated'): next(one)
    assert list(two) == ['b','c']

# ---- generic stages ----

@pytest.mark.parametrize('n,limit', [(5,3), (5,5), (5,9), (5,0), (0,3)])
def test_header_is_islice(n, limit):
    p = Items(range(n)).header(limit)
    assert list(p) == list(p) == list(range(n))[:limit]
    with pytest.raises(ValueError, match='Header: limit; got -1'): Items(range(n)).header(-1)

@pytest.mark.filterwarnings('ignore:Local function')
def test_header_asks_for_no_item_more():
    "The item behind the limit may be expensive"
    asked = []
    def note(x): asked.append(x); return x
    assert list(Items(range(9)).map(note).header(3)) == [0,1,2] == asked

@pytest.mark.parametrize('n,count', [(3,2), (3,1), (3,0), (0,2), (0,None), (1,4)])
def test_cycle_is_repetition(n, count):
    p = Items(range(n)).cycle(count)
    assert list(p) == list(p) == list(range(n))*(count or 0)

@pytest.mark.filterwarnings('ignore:Local function')
def test_cache_reads_once_and_gives_the_same_objects():
    made = []
    def make(x): made.append(x); return [x]
    p = Items('abc').map(make).in_memory_cache()
    assert [x is y for x,y in zip(list(p), list(p))] == [True]*3 and made == ['a','b','c']
    assert [id(x) for x in islice(p, 2)] == [id(x) for x in islice(p, 2)]

def test_old_names_are_there():
    "What seed 002's pipelines import"
    assert (dp.iter.Header, dp.iter.Cycler, dp.iter.InMemoryCacheHolder, dp.iter.MapToIterConverter) == (Header, Cycler, InMemoryCacheHolder, MapToIterConverter)
    assert list(dp.iter.MapToIterConverter(dp.map.Mapper([1,2], str))) == ['1','2'] and dp.iter.IterableWrapper and dp.map.SequenceWrapper
    assert len(TypeTransformLoop([1,2,3], [])) == 3 and TypeTransformLoop([1,2], [str, float])[1] == 2.

# ---- pickling and workers ----

@pytest.mark.parametrize('chain', [c for c in CHAINS])
def test_chains_pickle_fresh_and_in_mid_pass(chain):
    "A copy of a fresh chain gives the same; one of a chain in mid-pass can be iterated; the original does not notice"
    make = CHAINS[chain]
    whole,a = list(make()),make()
    assert same(list(pickle.loads(pickle.dumps(a))), whole)
    it = iter(a)
    first = list(islice(it, 1))
    assert same(list(pickle.loads(pickle.dumps(a))), whole)
    assert same(first + list(it), whole)

def test_buffers_stay_out_of_pickles():
    p = Items([bytes(100_000)]).map(up_bytes).in_memory_cache()
    size = len(pickle.dumps(p))
    assert len(list(p)[0]) == 100_000 and len(pickle.dumps(p)) < size + 1000 and list(pickle.loads(pickle.dumps(p))) == list(p)

def up_bytes(x): return x.upper()

def test_torch_sees_the_whole_chain():
    "traverse_dps finds every stage, through ours and its own, and pickles no buffer on the way"
    src = Items('abc')
    chain = src.map(up).in_memory_cache().header(2)
    found = []
    def walk(g):
        for p,sub in g.values(): found.append(type(p).__name__); walk(sub)
    walk(traverse_dps(chain))
    assert found == ['Header','InMemoryCacheHolder','MapperIterDataPipe','Items']

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
    for _ in src.map(up).header(2): pass
    del src, _
    gc.collect()
    assert ref() is None

# ---- a face ----

class Scaled(Pipe):
    stage_name = 'scaled'
    def __init__(self, source, by=1, name='x', fn=None): super().__init__(source); self.by,self.name,self.fn = by,name,fn

def test_a_chain_is_shown_as_it_was_written():
    assert repr(Items('abcdef').header(3).cycle().header(10)) == 'Items(6)\n  .header(limit=3)\n  .cycle()\n  .header()'
    assert repr(Items(x for x in 'a').in_memory_cache()) == 'Items(generator)\n  .in_memory_cache()'
    assert repr(Scaled([1], 2, 'y', up)) == "Items(1)\n  .scaled(by=2, name='y', fn=up)" and str(Scaled([1])) == repr(Scaled([1]))
    assert len(repr(Scaled([1], 'x'*500))) < 100

@pytest.mark.parametrize('by', [np.array([1.,2.]), torch.tensor([1.,2.]), [np.ones(2)]], ids=['array','tensor','list'])
def test_arguments_of_any_kind_can_be_shown(by):
    "A stage with an array for an argument, as CONTRIBUTING invites users to write"
    assert '.scaled(by=' in repr(Scaled([1], by))   # was: "The truth value of an array … is ambiguous"
