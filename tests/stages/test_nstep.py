"""`NStep` against a judge that sees the whole stream at once, and at every edge that episodes, environments and blocks have."""
import math, pickle
from itertools import islice

import numpy as np, pytest, torch
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.errors import BlockError
from fastrl_replay.steps.row_dtypes import extend_dtype, step_dtype
from fastrl_replay.envs.stepper import GymStepper
from fastrl_replay.stages.nstep import NSkip, NStep
from fastrl_replay.pipe import Items
from fastrl_replay.replay.experience import ExperienceReplay
from fastrl_replay.replay.hindsight import HindsightReplay
from fastrl_replay.replay.sequences import SequenceReplay
from fastrl_replay.stages.chunker import SequenceChunker
from fastrl_replay.testing import same, script, scripted_steps, through_file
from strategies import bits, cases, numbers

Box,Discrete = spaces.Box,spaces.Discrete
KINDS = dict(
    cartpole = step_dtype(Box(-1, 1, (4,)), Discrete(2)),
    odd      = step_dtype(Box(0, 255, (9,), np.uint8), Box(0, 1, (), np.int8)),
    nested   = step_dtype(spaces.Dict(a=Box(-1, 1, (3,), np.float16), b=spaces.Tuple([Box(-1, 1, (), np.float64), Box(0, 9, (5,), np.uint8)])),
                          spaces.Tuple([Discrete(3), spaces.MultiBinary(3)]), logp='f8', hidden=('f2',(2,))),
    empty    = step_dtype(Box(0, 1, (0,)), Discrete(2)))

def episode(*rewards, ends='terminated', env=0, number=1, start=1, dtype=KINDS['cartpole']):
    "An episode, or a part of one, as a block"
    rows = numbers(len(rewards), dtype, sum(map(int, rewards)))
    rows['reward'],rows['env_id'],rows['episode_n'],rows['step_n'] = rewards,env,number,np.arange(len(rewards)) + start
    rows['terminated'],rows['truncated'],rows['total_reward'] = False,False,np.cumsum(rewards)
    if ends: rows[ends][-1] = True
    return Steps(rows)

def table(blocks, *columns): return [b[c].tolist() for b in blocks for c in columns]
def one_by_one(steps): return [steps[i:i+1] for i in range(len(steps))]

# ---- the judge ----

def judge(rows, n, gamma):
    "What must come out, in order, of each start that is complete"
    out = []
    for i,start in enumerate(rows):
        window,by,broken = [i],None,False
        for j in range(i, len(rows)):
            r = rows[j]
            if r['env_id'] != start['env_id']: continue
            if j > i:
                last = rows[window[-1]]
                if r['step_n'] <= last['step_n'] or r['episode_n'] != last['episode_n']: by,broken = j,True; break
                window.append(j)
            if r['terminated'] or r['truncated'] or len(window) == n: by = j; break
        if by is not None: out.append((by, not broken, i, window))
    out.sort(key=lambda o: o[:3])   # what breaks off comes before what the same row completes
    merged = np.zeros(len(out), extend_dtype(rows.dtype, discount='f4', n='i4'))
    for m,(_,whole,i,window) in zip(merged, out):
        last = rows[window[-1]]
        for name in rows.dtype.names: m[name] = rows[i][name]
        m['reward'] = math.fsum(gamma**k*float(rows[j]['reward']) for k,j in enumerate(window))
        m['next_state'],m['terminated'],m['truncated'] = last['next_state'],last['terminated'],last['truncated'] or not whole
        m['discount'],m['n'] = gamma**len(window)*(not last['terminated']),len(window)
    return merged

ENVS = [0, 3, 15, 4000]

def story(program, dtype):
    """What a string of bytes tells: (rows, cuts). A byte is a step of one of four environments, which goes on, terminates, is truncated, does both,
    or is never heard of again (and an episode with the same or another number begins); it may also end a block, before an empty one or a save."""
    rows,cuts,place = numbers(len(program), dtype, len(program)),[],[[1,0] for _ in ENVS]
    for i,(b,r) in enumerate(zip(program, rows)):
        env,what = place[b & 3],b>>2 & 7
        env[1] += 1
        r['env_id'],r['episode_n'],r['step_n'] = ENVS[b & 3],*env
        r['terminated'],r['truncated'] = what in (1,3),what in (2,3)
        if what in (1,2,3,4): env[:] = env[0]+1,0
        if what == 5: env[1] = 0                                 # the same number again
        if what == 6: env[:] = env[0]+1,7                        # another episode, joined in its middle
        if b>>5 & 3: cuts.append((i+1, b>>5 & 3))
    return rows,cuts

@pytest.mark.parametrize('kind', KINDS)
@cases(120)
@given(st.binary(max_size=60), st.integers(1, 6) | st.just(100), st.sampled_from([0, .25, .5, 1]))
def test_it_does_what_the_judge_says(kind, program, n, gamma):
    "Every bit of every row, in order, whatever the blocks, and through files at any time; these γ are exact in floating point"
    rows,cuts = story(program, KINDS[kind])
    stage,out,at,before = NStep([], n, gamma),[],0,rows.copy()
    for end,how in [*cuts, (len(rows), 1)]:
        out.append(stage.merge(Steps(rows[at:end])))
        done = out[-1].rows
        assert len(done) == 0 or same(Steps(judge(rows[:end], n, gamma)[-len(done):]), out[-1])
        at = end
        if how == 2: assert len(stage.merge(Steps(rows[:0]))) == 0
        if how == 3:
            state = through_file(stage.state_dict())
            stage = NStep([], n, gamma)
            stage.load_state_dict(state)
            assert bits(through_file(stage.state_dict())['own'].get('rows', [])) == bits(state['own'].get('rows', []))
    expected = Steps(judge(rows, n, gamma))
    assert Steps.cat(out) == expected and Steps(rows) == Steps(before)
    assert stage.waiting == len(rows) - len(expected)   # none is lost

@cases(60)
@given(st.binary(min_size=1, max_size=60), st.integers(1, 9), st.floats(0, 1), st.integers(0, 2**31))
def test_any_gamma_and_any_rewards(program, n, gamma, seed):
    "The same with rewards of many sizes: to the last digits of single precision"
    rows,_ = story(program, KINDS['cartpole'])
    rng = np.random.default_rng(seed)
    rows['reward'] = rng.normal(size=len(rows))*10.**rng.integers(-9, 9, len(rows))
    got,expected = NStep([], n, gamma).merge(Steps(rows)).rows,judge(rows, n, gamma)
    scale = np.abs(rows['reward']).max()
    np.testing.assert_allclose(got['reward'], expected['reward'], rtol=2e-7, atol=1e-9*scale)
    np.testing.assert_allclose(got['discount'], expected['discount'], rtol=2e-7, atol=1e-44)
    for name in set(got.dtype.names) - {'reward','discount'}: assert np.array_equal(got[name], expected[name])

# ---- tables ----

@pytest.mark.parametrize('n,rewards,steps', [(1, [1,10,100,1000], [1,1,1,1]), (2, [6,60,600,1000], [2,2,2,1]), (3, [31,310,600,1000], [3,3,2,1]),
                                             (4, [156,310,600,1000], [4,3,2,1]), (77, [156,310,600,1000], [4,3,2,1])])
@pytest.mark.parametrize('ends', ['terminated','truncated'])
def test_the_table(n, rewards, steps, ends):
    "1, 10, 100, 1000 at γ = ½; a truncated tail keeps the discount of its length"
    block = episode(1,10,100,1000, ends=ends)
    for blocks in [block],one_by_one(block),[block[:1],block[1:]]:
        out = Steps.cat(list(NStep(blocks, n, .5)))
        ended = np.array([i + m == 4 for i,m in enumerate(steps)])
        assert table([out], 'reward','n') == [rewards, steps]
        assert out.discount.tolist() == (.5**np.array(steps)*(1 if ends == 'truncated' else ~ended)).tolist()
        assert out[ends].tolist() == ended.tolist() and not out['truncated' if ends == 'terminated' else 'terminated'].any()
        assert np.array_equal(out.rows['next_state'], block.rows['next_state'][[i+m-1 for i,m in enumerate(steps)]])
        for c in 'state','action','step_n','episode_n','total_reward': assert torch.equal(out[c], block[c])

def test_terminated_and_truncated_at_once():
    "Both flags stand; there is nothing to bootstrap from"
    block = episode(1,10, ends='truncated')
    block.rows['terminated'][-1] = True
    out, = NStep([block], 2, .5)
    assert table([out], 'reward','discount','terminated','truncated') == [[6,10], [0,0], [True]*2, [True]*2]

@pytest.mark.parametrize('n', [1, 2, 9])
def test_episodes_of_one_step(n):
    "Each is complete at once"
    rows = Steps.cat([episode(r, number=k, ends='terminated' if k%2 else 'truncated') for k,r in enumerate([4,7,2], 1)])
    out, = NStep([rows], n, .5)
    assert table([out], 'reward','n','discount') == [[4,7,2], [1]*3, [0,.5,0]]

def test_order_of_rows():
    "By the row that completes; what broke off first; oldest start first; one environment several times in a block; one that appears late"
    a,b,c = episode(1,2,4),episode(8,16,32, env=7, ends=None),episode(64,128, env=2)
    anew = episode(3,5, env=7, number=2, ends='truncated')
    rows = Steps.cat([a[:2], b[:3], a[2:], anew[:1], c, anew[1:]])
    out, = NStep([rows], 3, 1.)
    assert table([out], 'env_id','reward','n') == [[7,0,0,0,7,7,2,2,7,7], [56,7,6,4,48,32,192,128,8,5], [3,3,2,1,2,1,2,1,2,1]]
    assert out.truncated.tolist() == [False]*4 + [True]*2 + [False]*2 + [True]*2
    assert out.discount.tolist() == [1,0,0,0,1,1,0,0,1,1]

def test_sums_are_double_inside():
    "In single precision, 2²⁴ would swallow every 1 that is added to it, from either side"
    for rewards in [2.**24, *[1]*100],[*[1]*100, 2.**24]:
        out, = NStep([episode(*rewards)], 101, 1.)
        assert out.reward[0] == 2**24 + 100

def test_what_a_policy_added_is_of_the_start():
    "Extra columns pass through, as do nested states"
    block = episode(1,2,3, dtype=KINDS['nested'])
    out, = NStep([block], 2, .5)
    assert out.rows.dtype.names == (*block.rows.dtype.names, 'discount', 'n')
    for c in 'hidden','logp','state','action': assert bits(out.rows[c]) == bits(block.rows[c])
    assert bits(out.rows['next_state']) == bits(block.rows['next_state'][[1,2,2]])

# ---- blocks ----

def test_a_block_keeps_its_rows():
    "What came out is not written on by what comes later, nor does it alias what came in"
    block = episode(*range(1,9))
    stage = NStep([], 2, .5)
    first = stage.merge(block[:4])
    saved = first.copy()
    block.rows['reward'] = -1
    for _ in range(5): stage.merge(episode(*range(20)))
    assert first == saved and first.rows.flags.writeable

@pytest.mark.parametrize('how', ['read-only', 'strided', 'reversed', 'record', 'single'])
def test_blocks_of_every_make(how):
    "What numpy can do to an array"
    rows = episode(1,10,100,1000).rows
    stage,wide = NStep([], 3, .5),np.zeros(8, rows.dtype)
    if how == 'read-only': rows.flags.writeable = False
    if how == 'strided': wide[::2] = rows; rows = wide[::2]
    if how == 'reversed': rows = rows[::-1].copy()[::-1]
    if how == 'record': rows = rows.view(np.recarray)
    out = [stage.merge(Steps(rows[i,...])) for i in range(4)] if how == 'single' else [stage.merge(Steps(rows))]
    assert Steps.cat(out).reward.tolist() == [31,310,600,1000]

def test_a_single_step_is_a_block_of_one():
    "steps[i] has no axis"
    block,stage = episode(1,10,100),NStep([], 2, .5)
    assert [len(stage.merge(block[i])) for i in range(3)] == [0,1,2]
    assert table(NSkip([block[i] for i in range(3)], 2), 'step_n') == [[1],[3]]

def test_nothing_in_nothing_out():
    "No source, an empty one, empty blocks"
    assert [list(NStep(s, 3, .9)) for s in (None, [], [episode(1)[:0]]*3)] == [[]]*3
    out = list(NStep([episode(1)[:0], episode(1), episode(1)[:0]], 3, .9))
    assert len(out) == 1
    assert [list(NSkip(s, 3)) for s in (None, [], [episode(1)[:0]]*3)] == [[]]*3

# ---- what is refused ----

def packed(rows): return rows.astype(np.dtype([(n, rows.dtype[n]) for n in rows.dtype.names]))
def without(rows, name):
    kept = [n for n in rows.dtype.names if n != name]
    return rows[kept].astype(np.dtype([(n, rows.dtype[n]) for n in kept], align=True))
def retyped(rows, name, kind): return rows.astype(np.dtype([(n, kind if n == name else rows.dtype[n]) for n in rows.dtype.names], align=True))
def with_value(rows, name, value): rows = rows.copy(); rows[name][1] = value; return rows

REFUSED = {
    'NaN': (lambda r: with_value(r, 'reward', np.nan), r"row 1 of the block, column 'reward' \(env_id 0\); got nan"),
    'infinite': (lambda r: with_value(r, 'reward', -np.inf), 'got -inf; expected a finite number'),
    'negative env': (lambda r: with_value(r, 'env_id', -1), "column 'env_id'.*got -1"),
    'huge env': (lambda r: with_value(r, 'env_id', 1<<24), 'got 16777216; expected a number from 0 to 16777215'),
    'two axes': (lambda r: r.reshape(1,-1), r'shape \[1, 3\]; expected shape \[n\]'),
    'packed': (packed, 'a packed dtype'),
    'no reward': (lambda r: without(r, 'reward'), "column 'reward'; got no such column; expected float32"),
    'no next_state': (lambda r: without(r, 'next_state'), "column 'next_state'; got no such column; expected any kind"),
    'double reward': (lambda r: retyped(r, 'reward', 'f8'), "column 'reward'; got float64; expected float32"),
    'long step_n': (lambda r: retyped(r, 'step_n', 'i8'), "column 'step_n'; got int64; expected int32"),
    'bytes for flags': (lambda r: retyped(r, 'truncated', 'u1'), "column 'truncated'; got uint8; expected bool"),
    'discount': (lambda r: extend(r, discount='f4'), r"columns of an n_step already; got \['discount'\]"),
    'n': (lambda r: extend(r, n='i8'), r'put n_skip before n_step'),
}
def extend(rows, **extra):
    new = np.zeros(len(rows), extend_dtype(rows.dtype, **extra))
    for n in rows.dtype.names: new[n] = rows[n]
    return new

@pytest.mark.parametrize('what', REFUSED)
def test_a_bad_block_changes_nothing(what):
    "As the first block, so that a good one of another kind may follow; and in the middle of an episode"
    spoil,says = REFUSED[what]
    bad = Steps(spoil(episode(1,10,100, start=3, ends=None).rows))
    stage = NStep([], 3, .5)
    with pytest.raises(BlockError, match=f'NStep: .*{says}'): stage.merge(bad)
    assert len(stage.merge(episode(5, dtype=KINDS['odd']))) == 1
    stage = NStep([], 3, .5)
    stage.merge(episode(1,10, ends=None))
    before = stage.state_dict()
    with pytest.raises(BlockError, match='NStep: '): stage.merge(bad)
    assert bits(stage.state_dict()['own']['rows']) == bits(before['own']['rows'])
    assert stage.merge(episode(100,1000, start=3)).reward.tolist() == [31,310,600,1000]

def test_objects_are_refused():
    "Their bytes are addresses"
    rows = np.zeros(1, np.dtype([(n, KINDS['cartpole'][n]) for n in KINDS['cartpole'].names] + [('note', object)], align=True))
    with pytest.raises(BlockError, match='no Python objects'): NStep([], 2, .5).merge(Steps(rows))

def test_other_columns_than_before():
    "Refused; the same columns in another dtype object are not"
    stage = NStep([], 2, .5)
    stage.merge(episode(1, ends=None))
    with pytest.raises(BlockError, match='a block with other columns'): stage.merge(episode(1, dtype=KINDS['odd']))
    equal = pickle.loads(pickle.dumps(KINDS['cartpole']))
    assert stage.merge(episode(2, start=2, dtype=equal)).reward.tolist() == [2,2]   # equal, but another object

@pytest.mark.parametrize('n', [0, -1, 1.5, 2., True, None, '3', 2**31])
@pytest.mark.parametrize('make', [lambda n: NStep([], n, .9), lambda n: NSkip([], n)], ids=['NStep','NSkip'])
def test_n_must_be_a_whole_number(make, n):
    "Before anything flows"
    with pytest.raises(ValueError, match=r'n; got .*a whole number, 1 to 2147483647'): make(n)

@pytest.mark.parametrize('gamma', [-.1, 1.1, float('nan'), float('inf'), None, '.9'])
def test_gamma_must_be_a_share(gamma):
    "Before anything flows"
    with pytest.raises(ValueError, match='gamma; got .*a number, 0 to 1'): NStep([], 3, gamma)

def test_numbers_of_numpy_will_do():
    "They become Python's, which a checkpoint may hold"
    stage = NStep([], np.int64(3), np.float32(.5))
    assert (type(stage.n), type(stage.gamma)) == (int, float) and type(NSkip([], np.int32(3)).n) is int
    through_file(stage.state_dict())

def test_two_of_them_in_a_chain():
    "An n_step after an n_step, a skip after it, and both before a good one"
    block = [episode(1,2,3)]
    for make in lambda p: p.n_step(2, .5).n_step(2, .5), lambda p: p.n_step(1, 1.).n_skip(1), lambda p: p.n_skip(1).n_step(2, .5).n_skip(2):
        with pytest.raises(BlockError, match='put n_skip before n_step'): list(make(Items(block)))
    assert table(Items(block).n_skip(2).n_step(2, .5), 'reward') == [[2.5,3]]

# ---- passes, saving, pickling ----

def test_passes():
    "The next pass goes on with what waits, or, where an episode begins, sends it out first"
    part = episode(1,10,100, ends=None),episode(1000, start=4)
    source = [part[0]]
    stage = NStep(source, 3, .5)
    assert table(stage, 'reward') == [[31]]
    source[:] = [part[1]]
    assert table(stage, 'reward','n') == [[310,600,1000], [3,2,1]]
    source[:] = [part[0]]
    assert table(stage, 'reward') == [[31]]
    assert table(stage, 'reward','n','truncated','discount') == [[60,100,31], [2,1,3], [True,True,False], [.25,.5,.125]]
    assert table(stage, 'reward','n') == [[60,100,31], [2,1,3]]

@pytest.mark.parametrize('n', [1, 2, 5, 30])
def test_breaking_off_and_going_on(n):
    "A chain that is saved to a file after every block goes on as one that never was, in the middle of all episodes"
    blocks = scripted_steps([script(7,-5,1,9), script(-3,11, env=1), script(25, env=2)], 60)
    make = lambda: NStep(blocks, n, .9)
    whole,pieces,state = list(make()),[],None
    while True:
        chain = make()
        if state: chain.load_state_dict(state)
        got = list(islice(chain, 1))
        if not got: break
        pieces += got
        state = through_file(chain.state_dict())
    assert same(whole, pieces)

def test_a_state_that_does_not_fit_changes_nothing():
    stage,other = NStep([], 3, .5),NStep([], 3, .25)
    for s in stage,other: s.merge(episode(1,10, ends=None))
    for bad in other,NStep([], 2, .5):
        with pytest.raises(ValueError, match='NStep: a saved stage with another n or gamma'): stage.load_state_dict(bad.state_dict())
    with pytest.raises(ValueError, match='another stage'): stage.load_state_dict(NSkip([], 3).state_dict())
    assert stage.merge(episode(100, start=3)).reward.tolist() == [31,60,100]

def test_restoring_forgets_what_waited():
    "And the columns, where nothing waited when it was saved"
    stage = NStep([], 3, .5)
    empty = stage.state_dict()
    stage.merge(episode(1,10, ends=None))
    stage.load_state_dict(empty)
    assert stage.merge(episode(100, start=3, dtype=KINDS['odd'])).reward.tolist() == [100]

def test_a_state_is_a_copy():
    "Neither what goes on after the save nor what is done to the state afterwards matters"
    a,b = NStep([], 3, .5),NStep([], 3, .5)
    a.merge(episode(1,10, ends=None))
    state = a.state_dict()
    a.merge(episode(7,7,7, number=2))
    b.load_state_dict(state)
    state['own']['rows'].zero_()
    assert b.merge(episode(100, start=3)).reward.tolist() == [31,60,100]

def test_pickling_leaves_rows_behind():
    "A copy for a worker is empty"
    stage = NStep([episode(1)], 3, .5)
    size = len(pickle.dumps(stage))
    stage.merge(episode(*range(100), ends=None))
    twin = pickle.loads(pickle.dumps(stage))
    assert len(pickle.dumps(stage)) <= size + 100 and twin.waiting == 0 and stage.waiting == 2
    assert table(twin, 'reward') == [[1]]

def test_it_holds_n_rows_an_environment():
    "However many have passed, and whatever the numbers of the environments"
    stage = NStep([], 5, .9)
    for k in range(50): stage.merge(Steps.cat([episode(*range(20), env=e, number=k, ends=None) for e in (0, 9, 70_000)]))
    assert stage._held.held[5].nbytes == 3*5*KINDS['cartpole'].itemsize and stage.waiting == 3*4 and stage._held.envs.nbytes < 5000

# ---- in a chain ----

def test_with_a_stepper_and_a_replay():
    "What a replay draws from merged rows are merged rows; the chain continues from a file"
    make = lambda: ExperienceReplay(GymStepper(['CartPole-v1']*3, seed=0).n_step(4, gamma=.9), bs=8, max_sz=500, seed=0)
    a,b = make(),make()
    it = iter(a)
    for _ in range(60): batch = next(it)
    b.load_state_dict(through_file(a.state_dict()))
    assert same(list(islice(it, 40)), list(islice(b, 40)))
    m = batch['n']
    torch.testing.assert_close(batch.reward, (1 - .9**m)/.1, rtol=1e-6, atol=0)      # CartPole's rewards are 1
    torch.testing.assert_close(batch.discount, .9**m*~batch.terminated, rtol=1e-6, atol=0)
    all_n = a.memory['n']
    assert set(all_n.tolist()) == {1,2,3,4} and bool((batch.done | (m == 4)).all())

def test_its_repr():
    "As it would be written"
    assert repr(Items([]).n_skip(2).n_step(3, gamma=.5)).split('\n  ')[1:] == ['.n_skip(n=2)', '.n_step(n=3, gamma=0.5)']

@pytest.mark.slow
def test_a_million_rows():
    "Against a table of all environments at all times, worked out backwards"
    T,E,n,gamma = 15_625,64,3,.5
    rng = np.random.default_rng(0)
    rows = np.zeros((T,E), step_dtype(Box(-1, 1, (1,)), Discrete(2)))
    done = rng.random((T,E)) < .1
    rows['terminated'] = done & (rng.random((T,E)) < .5)
    rows['truncated'],rows['reward'],rows['env_id'] = done & ~rows['terminated'],rng.integers(0, 1000, (T,E)),np.arange(E)
    before = np.vstack([np.zeros((1,E), int), done.cumsum(0)[:-1]])
    last_end = np.maximum.accumulate(np.where(np.vstack([np.ones((1,E), bool), done[:-1]]), np.arange(T)[:,None], 0), 0)
    rows['episode_n'],rows['step_n'] = before+1,np.arange(T)[:,None]-last_end+1
    rows['next_state'][...,0] = np.arange(T)[:,None]

    out = Steps.cat(list(NStep([Steps(r) for r in rows], n, gamma))).rows
    merged,length,end = (np.zeros((T,E)) for _ in range(3))
    for t in range(T-1, -1, -1):   # one to three steps, as far as the episode goes
        for k in range(n):
            if t+k == T: break
            there = before[t+k] == before[t]
            merged[t] += there*gamma**k*rows['reward'][t+k]
            length[t] += there
        end[t] = t + length[t] - 1
    whole = (length == n) | done[np.minimum(end, T-1).astype(int), np.arange(E)]
    out = out[np.lexsort((out['step_n'], out['episode_n'], out['env_id']))]
    pick = lambda a: a.T[whole.T]
    assert len(out) == whole.sum() > 999_000
    assert np.array_equal(out['reward'], pick(merged)) and np.array_equal(out['n'], pick(length)) and np.array_equal(out['next_state'][:,0], pick(end))
    ended = pick(rows['terminated'][end.astype(int), np.arange(E)])
    assert np.array_equal(out['discount'], np.float32(gamma)**out['n']*~ended) and np.array_equal(out['terminated'], ended)

# ---- n_skip ----

@cases(100)
@given(st.binary(max_size=60), st.integers(1, 7))
def test_skipping(program, n):
    "The first, every n-th after it, the last; whatever the blocks, and bit for bit"
    rows,cuts = story(program, KINDS['nested'])
    before = rows.copy()
    blocks = [Steps(r) for r in np.split(rows, [c for c,_ in cuts])]
    expected = [i for i,r in enumerate(rows) if r['step_n'] in range(1, 99, n) or r['terminated'] or r['truncated']]
    got = list(NSkip(blocks, n))
    assert all(map(len, got)) and Steps(rows) == Steps(before)
    assert not expected and not got or Steps.cat(got) == Steps(rows[expected])

@pytest.mark.parametrize('n', [1, 2, 3, 9])
def test_skipping_steps_that_count_from_0(n):
    "The first and the last of each episode are kept, in the middle of a block and at its start"
    rows = np.concatenate([episode(*range(8), start=0).rows, episode(*range(5), start=0, number=2, ends='truncated').rows])
    expected = [s for last in (7, 4) for s in range(last + 1) if s == 0 or s % n == 1 % n or s == last]
    for blocks in [Steps(rows)], one_by_one(Steps(rows)): assert Steps.cat(list(NSkip(blocks, n))).step_n.tolist() == expected

@pytest.mark.parametrize('what', ['two axes', 'packed', 'long step_n', 'bytes for flags'])
def test_skipping_refuses(what):
    "The same as n_step, of the columns that it needs"
    spoil,says = REFUSED[what]
    with pytest.raises(BlockError, match=f'NSkip: .*{says}'): list(NSkip([Steps(spoil(episode(1,2,3).rows))], 2))

def test_skipping_gives_rows_of_its_own():
    "Also where it keeps all"
    block = episode(1,2,3)
    for n in 1,2:
        out, = NSkip([block], n)
        assert not np.shares_memory(out.rows, block.rows) and out.rows.dtype == block.rows.dtype

# ---- rows whose counters were never filled in ----

_goal = Box(-1, 1, (1,))
GOALS = step_dtype(spaces.Dict(observation=_goal, achieved_goal=_goal, desired_goal=_goal), Discrete(2))

def blank(n=20):
    "Rows as one's own loop makes them that fills in no counters; the last one ends"
    rows = np.zeros(n, GOALS)
    rows['terminated'][-1] = True
    return rows

UNCOUNTED = {'NStep': lambda: NStep(None, 3, .9).merge, 'NSkip': lambda: NSkip(None, 3).skip,
    'SequenceChunker': lambda: SequenceChunker(None, 4).chunk, 'SequenceReplay': lambda: SequenceReplay(None, 1, 99, length=4).add,
    'HindsightReplay': lambda: HindsightReplay(None, 1, 99, reward=lambda got, wanted, info: np.zeros(len(got))).add}

@pytest.mark.parametrize('name', UNCOUNTED)
@pytest.mark.parametrize('size', [1, 7, 20])
def test_rows_without_counters_are_refused(name, size):
    "In blocks of any size, with the remedy; whatever number stands still"
    for number in 0, 1:
        rows, take = blank(), UNCOUNTED[name]()
        rows['step_n'] = rows['episode_n'] = number
        with pytest.raises(BlockError, match=f"{name}: .*'step_n' and 'episode_n' do not count.*Remedy: fill both columns in"):
            for i in range(0, 20, size): take(Steps(rows[i:i+size]))

@pytest.mark.parametrize('name', UNCOUNTED)
def test_rows_that_count_in_their_way_are_taken(name):
    "Single rows, episodes of one step, several environments, gaps, counters from 0, restarts, every third row"
    rows = blank(60)
    rows['env_id'], rows['episode_n'], rows['step_n'] = np.arange(60) % 3, 1, np.arange(60)//3
    ends = blank(60)
    ends['terminated'] = True
    lost = rows[np.random.default_rng(0).random(60) < .5]
    again = np.concatenate([rows[:3], rows[:3], rows])   # a checkpoint from the first steps, twice
    for legitimate in rows, ends, lost, again, rows[::3], rows[:1], blank(2):
        for size in 1, 60:
            take = UNCOUNTED[name]()
            for i in range(0, len(legitimate), size): take(Steps(legitimate[i:i+size]))

def test_without_episodes_no_counters_are_asked_for():
    "Uniform replay, and n-step rows of one step"
    replay = ExperienceReplay(None, 4, 99, seed=0)
    replay.add(Steps(blank()))
    assert len(replay.sample()) == 4 and len(NStep(None, 1, .9).merge(Steps(blank()))) == 20

def test_a_refused_block_is_not_counted():
    "The same rows, put right, are taken"
    stage, rows = NStep(None, 2, .9), blank(2)
    rows['reward'][1] = np.nan
    for _ in range(5):
        with pytest.raises(BlockError, match='finite'): stage.merge(Steps(rows))
    rows['reward'], rows['step_n'] = 1, (0, 1)
    assert len(stage.merge(Steps(rows))) == 2
