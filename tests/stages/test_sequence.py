"""SequenceChunker: against lists and loops; how episodes end, blocks of any kind, saving, and what is refused."""
import pickle
from collections import deque, namedtuple
from itertools import islice

import numpy as np, pytest
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.steps.core import Steps
from fastrl_replay.steps.errors import BlockError
from fastrl_replay.steps.row_dtypes import extend_dtype, step_dtype
from fastrl_replay.envs.stepper import GymStepper
from fastrl_replay.pipe import Items
from fastrl_replay.stages.chunker import SequenceChunker
from fastrl_replay.testing import ScriptedVectorEnv, script, scripted_steps, through_file
from fastrl_replay.stages.waiting import LOOKED
from scripted import MODES, Nested, Remember, Witness, numbered, take, witnessed
from strategies import bits, cases, numpy_leaves, scribble

TAILS = 'shift', 'pad', 'drop'
DTYPE = step_dtype(spaces.Box(-9, 9, (3,)), spaces.Discrete(3))

# ---- the judge: lists, loops, no arithmetic with remainders ----

def naive(rows, length, overlap, tail):
    "(number of the row that completes it, numbers of its rows) of each sequence, in order"
    out, running = [], {}   # env_id: [numbers of the episode's rows, where the next sequence starts, where the last one ended]
    def end(env, at):
        episode, start, shown = running.pop(env)
        if shown == len(episode) or tail == 'drop': return
        out.append((at, episode[max(0, len(episode)-length):] if tail == 'shift' else episode[start:]))
    for i, r in enumerate(rows):
        env = int(r['env_id'])
        if env in running:
            before = rows[running[env][0][-1]]
            if r['episode_n'] != before['episode_n'] or r['step_n'] <= before['step_n']: end(env, i)
        episode, start, _ = entry = running.setdefault(env, [[], 0, 0])
        episode.append(i)
        if len(episode) == start + length:
            out.append((i, episode[start:]))
            entry[1:] = start + length - overlap, len(episode)
        if (r['terminated'] or r['truncated']) and ('n' not in rows.dtype.names or r['n'] == 1): end(env, i)
    return out

def like(seq, rows, numbers, length):
    "Is this block the sequence of these rows, bit for bit, with zeros after them?"
    k, names = len(numbers), rows.dtype.names
    return (seq.shape == (length,) and seq.dtype == extend_dtype(rows.dtype, mask='?') and seq.mask.tolist() == [t < k for t in range(length)]
            and all(bits(a) == bits(b) for n in names for a, b in zip(numpy_leaves(seq.rows[n][:k]), numpy_leaves(rows[n][numbers])))
            and not seq.rows.view(np.uint8).reshape(length, -1)[k:].any())

def agrees(seqs, rows, length, overlap, tail):
    want = naive(rows, length, overlap, tail)
    assert [s.step_n[s.mask].tolist() for s in seqs] == [rows['step_n'][n].tolist() for _, n in want]
    assert all(like(s, rows, n, length) for s, (_, n) in zip(seqs, want))

def told(events, n=None, seed=0):
    "Rows from (env, what happens) pairs: '.' a step, 't' and 'u' the flags, 'b' both, '!' a new episode without an end before it, '+' a gap"
    rows, at = scribble(np.zeros(len(events), DTYPE if n is None else extend_dtype(DTYPE, n=n)), seed), {}
    for r, (env, what) in zip(rows, events):
        episode, step = at.get(env, (1, 0))
        if what == '!' and step: episode, step = episode + 1, 0
        step += 3 if what == '+' and step else 1
        r['env_id'], r['episode_n'], r['step_n'], r['terminated'], r['truncated'] = env, episode, step, what in 'tb', what in 'ub'
        at[env] = (episode + 1, 0) if what in 'tub' else (episode, step)
    return rows

def split(rows, sizes):
    "Blocks of these sizes, again and again until all rows are in one"
    blocks, at, i = [], 0, 0
    while at < len(rows):
        blocks.append(Steps(rows[at:at+sizes[i % len(sizes)]].copy()))
        at, i = at + sizes[i % len(sizes)], i + 1
    return blocks

def steps_of(seqs): return [s.step_n.tolist() for s in seqs]
def cut(blocks, *args, **kw): return list(SequenceChunker([blocks] if isinstance(blocks, Steps) else blocks, *args, **kw))
def episodes(*lengths, env=0): return Steps.cat(scripted_steps([script(*lengths, env=env)], sum(map(abs, lengths))))

arguments = st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n-1), st.sampled_from(TAILS)))
events = st.lists(st.tuples(st.sampled_from([0, 1, 1, 3, 40]), st.sampled_from('.......+tub!')), max_size=80)
sizes = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)

@cases(600)
@given(events, sizes, arguments, st.integers(0, 99))
def test_any_stream_in_any_blocks(events, sizes, arguments, seed):
    "Irregular environments, episodes of length one, both flags, unannounced ends, gaps: what lists and loops give, bit for bit, in their order"
    rows = told(events, seed=seed)
    chunker, at, seqs, want = SequenceChunker(None, *arguments), 0, [], naive(rows, *arguments)
    for block in split(rows, sizes):
        seqs += chunker.chunk(block)
        at += len(block)
        assert len(seqs) == sum(i < at for i, _ in want), 'a sequence came too early or too late'
    agrees(seqs, rows, *arguments)
    agrees(cut(split(rows, sizes), *arguments), rows, *arguments)

@cases(300)
@given(events, sizes, arguments)
def test_what_holds_for_every_stream(events, sizes, arguments):
    "One environment and one episode each; all steps of finished episodes are shown, unless dropped; neighbours share what they should"
    (length, overlap, tail), rows = arguments, told(events)
    rows['reward'] = np.arange(len(rows))
    by_episode, shown = {}, set()
    for s in cut(split(rows, sizes), *arguments):
        real = s.rows[s.mask.numpy()]
        assert len(real) and s.mask.tolist() == sorted(s.mask.tolist(), reverse=True)
        assert len(set(zip(real['env_id'], real['episode_n']))) == 1 and (np.diff(real['step_n']) > 0).all()
        assert not (real['terminated'] | real['truncated'])[:-1].any()
        by_episode.setdefault((int(real['env_id'][0]), int(real['episode_n'][0])), []).append(real['reward'].astype(int).tolist())
        shown |= set(real['reward'].astype(int).tolist())
    for seqs in by_episode.values():
        for i, (a, b) in enumerate(zip(seqs, seqs[1:])):
            common = len(set(a) & set(b))
            assert len(a) == length and (common == overlap or (tail == 'shift' and i == len(seqs)-2 and overlap < common < length))
            assert a[len(a)-common:] == b[:common]
    ended = {(e, n) for e, n, t, u in rows[['env_id', 'episode_n', 'terminated', 'truncated']].tolist() if t or u}
    if tail != 'drop': assert shown >= {i for i, r in enumerate(rows) if (r['env_id'], r['episode_n']) in ended}

@cases(200)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.sampled_from('tub')), max_size=9), st.integers(1, 4), sizes, arguments, st.sampled_from(['i4', 'i8']))
def test_n_step_rows_end_with_the_last_of_them(lives, n, sizes, arguments, kind):
    "The last n rows of an episode are done, and say n, n-1, …, 1: the last one ends it"
    streams = [[(e, '.') for e, length, _ in lives for _ in range(length) if e == env] for env in range(3)]
    turns = [s for k in range(99) for s in (stream[k:k+1] for stream in streams) if s]
    rows = told([t[0] for t in turns], n=kind)
    rows['n'], rows['terminated'], rows['truncated'] = n, False, False
    for env in range(3):
        mine, at = np.flatnonzero(rows['env_id'] == env), 0
        for number, (length, flag) in enumerate([(length, flag) for e, length, flag in lives if e == env], 1):
            i = mine[at:at+length]
            rows['episode_n'][i], rows['step_n'][i], rows['n'][i] = number, np.arange(length) + 1, np.minimum(n, np.arange(length, 0, -1))
            last = i[max(0, length-n):]
            rows['terminated'][last], rows['truncated'][last] = flag in 'tb', flag in 'ub'
            at += length
    agrees(cut(split(rows, sizes), *arguments), rows, *arguments)

# ---- the founding document ----

def seed_000(n_burn_in=3, n_sequence_length=5):
    "Its loop, line by line; the memory is the deque in which it kept sequences"
    Experience, buffer = namedtuple('Experience', ['observation', 'action', 'reward']), deque(maxlen=10)
    tmp = 0
    exp = []
    for i in range(1, 11):
        exp.append([Experience(i, i, i)])
        if i <= n_sequence_length and i % n_sequence_length == 0 and i > 0:
            buffer.append(exp)
            exp = exp[-n_burn_in:]
            tmp = 0
        if i > n_sequence_length and tmp == n_sequence_length - n_burn_in:
            buffer.append(exp)
            exp = exp[-n_burn_in:]
            tmp = 0
        tmp = tmp + 1
    return [[e[0].observation for e in seq] for seq in buffer]

def test_the_example_of_seed_000():
    "What it printed; and the sizes that it names, 80 and 40"
    assert steps_of(cut(scripted_steps([script(99)], 10), 5, 3)) == seed_000() == [[1,2,3,4,5], [3,4,5,6,7], [5,6,7,8,9]]
    long = cut(Steps.cat(scripted_steps([script(500)], 400)), length=80, overlap=40)
    assert [(len(s), int(s.step_n[0])) for s in long] == [(80, 1 + 40*i) for i in range(9)] and all(s.mask.all() for s in long)

# ---- ends ----

ENDS = [ # steps of the episode, length, overlap; then the sequences of each tail after the regular ones; 0 is padding
    (1,  1, 0, [], [], []),
    (1,  4, 0, [1,0,0,0], [1,0,0,0], []),
    (1,  4, 3, [1,0,0,0], [1,0,0,0], []),
    (3,  4, 2, [1,2,3,0], [1,2,3,0], []),
    (4,  4, 2, [], [], []),
    (5,  4, 2, [2,3,4,5], [3,4,5,0], []),
    (6,  4, 2, [], [], []),
    (5,  4, 0, [2,3,4,5], [5,0,0,0], []),
    (7,  4, 0, [4,5,6,7], [5,6,7,0], []),
    (8,  4, 0, [], [], []),
    (9,  4, 3, [], [], []),
    (11, 5, 1, [7,8,9,10,11], [9,10,11,0,0], []),
]

@pytest.mark.parametrize('flag', [1, -1])
@pytest.mark.parametrize('p,length,overlap,shift,pad,drop', ENDS)
def test_tails(p, length, overlap, shift, pad, drop, flag):
    "Drawn as text, for both flags; the next episode starts anew"
    regular = [list(range(s+1, s+length+1)) for s in range(0, p-length+1, length-overlap)]
    for tail, last in zip(TAILS, (shift, pad, drop)):
        seqs = cut(episodes(flag*p, length, 1), length, overlap, tail)
        want = regular + [last]*bool(last) + [list(range(1, length+1))]
        assert steps_of(seqs)[:len(want)] == want
        assert [s.episode_n[0].item() for s in seqs[:len(want)]] == [1]*(len(want)-1) + [2]
        if last: assert seqs[len(want)-2].done.tolist() == [s == p for s in last]

def test_ends_that_no_flag_announced():
    "A smaller or equal step_n, or another episode_n in either direction, ends the episode; the tail comes with the row that told"
    for change in dict(step_n=1, episode_n=2), dict(step_n=1), dict(step_n=3), dict(step_n=2), dict(episode_n=2), dict(episode_n=0):
        rows = numbered(5).rows
        for n, v in change.items(): rows[n][3:] = v + np.arange(2)*(n == 'step_n')
        chunker = SequenceChunker(None, 4, tail='pad')
        assert not chunker.chunk(Steps(rows[:3]))
        seq, = chunker.chunk(Steps(rows[3:4]))
        assert seq.reward[seq.mask].tolist() == [0, 1, 2] and not chunker.chunk(Steps(rows[4:]))

def test_one_row_can_complete_two_sequences():
    "The tail of an episode that it ends by beginning another, and its own; in this order"
    rows = numbered(3).rows
    rows['episode_n'], rows['step_n'], rows['terminated'] = [1, 1, 2], [1, 2, 1], [0, 0, 1]
    chunker = SequenceChunker(None, 3)
    chunker.chunk(Steps(rows[:2]))
    assert steps_of(chunker.chunk(Steps(rows[2:]))) == [[1, 2, 0], [1, 0, 0]]

def test_steps_may_count_from_0():
    "What goes on is what grows"
    rows = numbered(6).rows
    rows['step_n'] -= 1
    assert steps_of(cut(Steps(rows), 3)) == [[0, 1, 2], [3, 4, 5]]

def test_an_episode_under_way_begins_where_it_is_first_seen():
    rows = Steps(numbered(9).rows[4:])
    assert steps_of(cut(rows, 3, 1)) == [[5, 6, 7], [7, 8, 9]]

def test_a_flag_on_a_middle_n_step_row_ends_nothing():
    "terminated with n = 2 is news from the future; where the row with n = 1 was lost, the next episode tells"
    rows = told([(0, '.')]*5, n='i4')
    rows['n'], rows['terminated'] = [3, 3, 2, 2, 2], [0, 0, 1, 1, 1]
    chunker = SequenceChunker(None, 4, 1)
    assert steps_of(chunker.chunk(Steps(rows))) == [[1, 2, 3, 4]]
    rows['episode_n'] = 2
    assert steps_of(chunker.chunk(Steps(rows[:1]))) == [[2, 3, 4, 5]]

# ---- blocks ----

def test_blocks_of_every_kind():
    "Read-only, with gaps, backwards in memory, single rows, empty ones, before all others too: taken, and not changed"
    rows = episodes(7, -4, 2).rows
    frozen, spread = rows.copy(), np.zeros(2*len(rows), rows.dtype)
    frozen.flags.writeable = False
    spread[::2] = rows
    mirrored = rows[::-1].copy()[::-1]
    want = cut(Steps(rows), 3, 1)
    assert len(want) == 6
    for blocks in [Steps(frozen)], [Steps(spread[::2])], [Steps(mirrored)], [Steps(rows)[i] for i in range(13)], [Steps(rows[:0]), Steps(rows[:5]), Steps(rows[5:5]), Steps(rows[5:])]:
        before = [b.copy() for b in blocks]
        assert cut(blocks, 3, 1) == want and blocks == before
    assert cut([Steps(rows[:0])], 3) == [] and cut([], 3) == [] and list(SequenceChunker(None, 3)) == []

def test_sequences_own_their_memory():
    "Overlapping ones, and several from one block: writing into one changes no other, nor what waits, nor the block that came"
    block = episodes(9, 5)
    chunker, copy = SequenceChunker(None, 4, 2), block.copy()
    seqs = chunker.chunk(block[:11])
    assert len(seqs) == 4 and not any(np.shares_memory(a.rows, b.rows) for a in [*seqs, block] for b in [*seqs, block] if a is not b)
    assert not any(np.shares_memory(s.rows, chunker._held.held[5]) for s in seqs)
    want = cut(copy, 4, 2)
    for s in seqs: s.rows.view(np.uint8)[:] = 255
    assert block == copy
    block.rows.view(np.uint8)[:] = 255
    assert chunker.chunk(copy[11:]) == want[4:]

def test_a_late_environment_and_numbers_with_gaps():
    "Room is for environments that are there, not for the numbers below theirs; late ones may have smaller numbers"
    chunker, seen = SequenceChunker(None, 3), []
    for env in 7, 2, 9_000_000, 0, 16_777_215:
        block = numbered(4, env=env)
        seen += [(int(s.env_id[0]), s.step_n.tolist()) for s in chunker.chunk(block)]
    for env in 0, 2, 7, 9_000_000: seen += [(int(s.env_id[0]), s.step_n.tolist()) for s in chunker.chunk(numbered(2, 4, env))]
    assert seen == [(e, [1, 2, 3]) for e in (7, 2, 9_000_000, 0, 16_777_215)] + [(e, [4, 5, 6]) for e in (0, 2, 7, 9_000_000)]
    assert chunker._held.held[5].nbytes <= 2*5*3*block.dtype.itemsize

def test_it_holds_length_rows_an_environment():
    "However long an episode gets, and whatever the tail"
    for tail in TAILS:
        chunker = SequenceChunker(None, 5, 2, tail)
        for i in range(100): chunker.chunk(Steps.cat([numbered(3, 3*i, env) for env in range(4)]))
        assert chunker._held.held[5].nbytes == 4*5*numbered(1).dtype.itemsize and not chunker._waiting
        assert chunker.snapshot()['rows'].shape == (20, numbered(1).dtype.itemsize)

def test_a_million_rows_in_one_block():
    "Ten thousand environments, one of which steps at a time, in long runs; by arithmetic on whole arrays"
    rows = np.zeros(1_000_000, step_dtype(spaces.Discrete(9), spaces.Discrete(9)))
    rows['env_id'], rows['episode_n'] = np.arange(len(rows))//100, 1
    rows['step_n'] = np.arange(len(rows)) % 100 + 1
    rows['truncated'] = rows['step_n'] == 100
    chunker = SequenceChunker(None, 16, 6)   # 1, 11, …, 81 start regular ones, the last of which ends with 96; the tail starts with 85
    seqs = chunker.chunk(Steps(rows))
    first = np.array([s.rows['step_n'][0] for s in seqs]).reshape(10_000, 10)
    assert (first == [*range(1, 90, 10), 85]).all() and (np.repeat(np.arange(10_000), 10) == [s.rows['env_id'][-1] for s in seqs]).all()
    assert all((np.diff(s.rows['step_n']) == 1).all() for s in seqs[::97]) and not chunker._held.counts.any()

def test_a_great_many_steps():
    "Counts beyond 32 bits, as they would be after a year"
    chunker = SequenceChunker(None, 5, 2)
    chunker.chunk(numbered(5))
    chunker._held.counts[0] += 3*2**40
    chunker._held.held[6][LOOKED] = 1   # what was looked at is forgotten
    chunker._held.held[5].reshape(5, -1)[:] = np.roll(chunker._held.held[5].reshape(5, -1), 3*2**40 % 5, 0)
    assert steps_of(chunker.chunk(numbered(3, 5))) == [[4, 5, 6, 7, 8]]

# ---- in a chain ----

@pytest.mark.parametrize('tail', TAILS)
@pytest.mark.parametrize('mode', MODES)
def test_after_a_stepper_in_every_reset_mode(mode, tail):
    "Vector environments whose episodes end at different times, by both flags"
    scripts = [script(3, -7, 1), script(-1, 12, env=1), script(5, env=2)]
    blocks = take(GymStepper(ScriptedVectorEnv(scripts, mode), seed=0), 40)
    agrees(cut(blocks, 4, 1, tail), np.concatenate([b.rows for b in blocks]), 4, 1, tail)
    assert take(GymStepper(ScriptedVectorEnv(scripts, mode), seed=0).chunk_sequences(4, 1, tail), 15) == cut(blocks, 4, 1, tail)[:15]

def test_nested_observations_and_hidden_states():
    "Dicts and tuples on both sides are bytes like others; hidden[0] is where a learner starts, in the padded ones too"
    seqs = take(GymStepper([lambda: Nested(5), lambda: Nested(11)], seed=0).chunk_sequences(4, 2), 20)
    for s in seqs:
        k = int(s.mask.sum())
        assert s.state['at'].shape == (4, 2) and s.next_state['deep'][1]['bits'].shape == (4, 3)
        assert s.state['at'][:k, 1].tolist() == s.state['deep'][0][:k].tolist() == (s.step_n[:k] - 1).tolist()
        assert s.action['to'][1].shape == (4, 2) and not s.next_state['deep'][1]['z'][k:].any()
    for s in take(GymStepper([lambda: Witness(5, 2), lambda: Witness(11)], policy=Remember(), seed=0).chunk_sequences(4, 2), 20):
        assert s.mask[0] and s.hidden[0][0] == s.step_n[0] - 1 and not witnessed(s.rows[s.mask.numpy()])

def test_passes_go_on():
    "Broken off anywhere, a stepper's next pass continues in mid-episode; sequences that were complete come first"
    def chain(): return GymStepper(ScriptedVectorEnv([script(3, 9), script(3, 4, env=1), script(3, env=2)], 'NextStep'), seed=0).chunk_sequences(3, 1)
    whole, pipe = take(chain(), 40), chain()
    assert [x for n in (1, 1, 2, 0, 5, 3, 28) for x in islice(pipe, n)] == whole
    assert any(len(pipe._waiting) for pipe in [chain()] for _ in islice(pipe, 1))

def test_a_list_read_twice_ends_what_was_pending():
    "Its first row is step 1 again: the old episode is over"
    pipe = Items(scripted_steps([script(9)], 5)).chunk_sequences(3)
    assert [steps_of(pipe) for _ in range(2)] == [[[1, 2, 3]], [[3, 4, 5], [1, 2, 3]]]

# ---- saving ----

@cases(250)
@given(events, sizes, arguments, st.integers(0, 6))
def test_saved_anywhere_it_goes_on(events, sizes, arguments, k):
    "In mid-episode, between the sequences of one block, before the first row: through a file, and twice"
    blocks = split(told([(99 - e if e < 9 else e, w) for e, w in events]), sizes)   # new environments have smaller numbers than old ones
    a, b, c = (Items(blocks).chunk_sequences(*arguments) for _ in range(3))
    it = iter(a)
    head = list(islice(it, k))
    state = a.state_dict()
    b.load_state_dict(through_file(state))
    c.load_state_dict(through_file(b.state_dict()))
    rest = list(it)
    if len(head) < k: rest = []   # the pass was over: what comes now is the next one
    else: assert list(b) == rest and list(c) == rest
    assert head + rest == cut(blocks, *arguments)

def test_environments_keep_their_rows():
    "Saved in the order in which they came, which need not be that of their numbers"
    a, b = SequenceChunker(None, 4), SequenceChunker(None, 4)
    for env in 9, 0, 5: a.chunk(numbered(1 + env % 4, 10*env, env))
    b.load_state_dict(through_file(a.state_dict()))
    for x in a, b: assert [[s.reward.tolist() for s in x.chunk(numbered(3 - env % 4, 10*env + 1 + env % 4, env))] for env in (0, 5, 9)] == [
        [[0, 1, 2, 3]], [[50, 51, 52, 53]], [[90, 91, 92, 93]]]

def test_a_saved_state_is_a_copy():
    "What happens afterwards, on either side, does not show in it"
    a, b, c = (SequenceChunker(None, 4, 1) for _ in range(3))
    a.chunk(numbered(6)), a._waiting.extend(cut(numbered(4), 4))
    state = a.snapshot()
    b.restore(b.check_state(state))
    for x in a, b: x.chunk(numbered(8, 6)), x._waiting[0].rows.view(np.uint8).fill(9), x._held.held[5].fill(7)
    c.restore(c.check_state(state))
    assert steps_of(c._waiting) == [[1, 2, 3, 4]] and steps_of(c.chunk(numbered(1, 6))) == [[4, 5, 6, 7]]

def test_a_state_of_another_chunker_changes_nothing():
    saved = SequenceChunker(None, 4, 1)
    for other in (5, 1), (4, 2), (4, 1, 'pad'):
        chunker = SequenceChunker(None, *other)
        chunker.chunk(numbered(3))
        with pytest.raises(ValueError, match=r"SequenceChunker: a saved stage with other arguments; got \[4, 1, 'shift'\]"): chunker.load_state_dict(saved.state_dict())
        assert chunker._held.counts[0] == 3

def test_restored_columns_are_those_that_were_saved():
    "A block with others is refused, before and after"
    a, b = SequenceChunker(None, 4), SequenceChunker(None, 4)
    a.chunk(Steps(np.zeros(2, DTYPE)))
    b.load_state_dict(through_file(a.state_dict()))
    for x in a, b:
        with pytest.raises(BlockError, match="'state' is .*, not .*"): x.chunk(numbered(3))

def test_pickles_are_empty():
    "Buffers stay at home; arguments travel"
    pipe = Items(scripted_steps([script(9)], 30)).chunk_sequences(4, 1, 'pad')
    take(pipe, 3)
    twin = pickle.loads(pickle.dumps(pipe))
    assert pipe._held.held is not None and not set(SequenceChunker._buffers) & set(pipe.__getstate__())
    assert (twin.length, twin.overlap, twin.tail) == (4, 1, 'pad') and twin._held.gate.layout is None

def test_numpys_numbers_are_numbers():
    "They must not find their way into checkpoints"
    chunker = SequenceChunker(None, np.int64(4), np.int32(1))
    chunker.chunk(numbered(3))
    SequenceChunker(None, 4, 1).load_state_dict(through_file(chunker.state_dict()))
    assert repr(chunker).endswith('.chunk_sequences(length=4, overlap=1)')

# ---- what is refused ----

@pytest.mark.parametrize('kw,words', [
    (dict(length=0), 'length; got 0; expected a whole number, 1 to 2147483647'), (dict(length=-3), 'length; got -3'),
    (dict(length=2.), 'length; got 2.0'), (dict(length=True), 'length; got True'), (dict(length='5'), "length; got '5'"), (dict(length=None), 'length; got None'),
    (dict(length=2**31), 'length; got 2147483648'), (dict(length=float('nan')), 'length; got nan'),
    (dict(length=5, overlap=5), 'overlap; got 5; expected a whole number, 0 to 4'),
    (dict(length=5, overlap=-1), 'overlap; got -1'), (dict(length=5, overlap=1.5), 'overlap; got 1.5'), (dict(length=5, overlap=False), 'overlap; got False'),
    (dict(length=5, tail='Shift'), "did you mean 'shift'"), (dict(length=5, tail='padd'), "did you mean 'pad'"), (dict(length=5, tail='dorp'), "did you mean 'drop'"),
    (dict(length=5, tail=None), 'tail; got None'), (dict(length=5, tail=['pad']), "tail; got \\['pad'\\]"), (dict(length=5, tail='zzz'), "expected one of 'shift', 'pad', 'drop'$")])
def test_arguments_are_checked(kw, words):
    with pytest.raises(ValueError, match=f'^SequenceChunker: .*{words}'): SequenceChunker(None, **kw)

def test_what_is_not_a_block_is_refused():
    for make in (lambda c: c.chunk('abc'), lambda c: c.chunk(np.zeros(3, DTYPE)), lambda c: c.chunk(None)):
        with pytest.raises(TypeError, match='SequenceChunker: a block of rows; got .*; expected Steps'): make(SequenceChunker(None, 3))
    with pytest.raises(TypeError, match='SequenceChunker: an item of its source'): cut([(1, 2)], 3)

def without(name): return np.dtype([(n, DTYPE[n]) for n in DTYPE.names if n != name], align=True)
def other(name, kind): return np.dtype([(n, kind if n == name else DTYPE[n]) for n in DTYPE.names], align=True)

@pytest.mark.parametrize('rows,words', [
    *[(np.zeros(3, without(n)), f"column '{n}'; got no such column; expected .*step_dtype") for n in ('env_id', 'episode_n', 'step_n', 'terminated', 'truncated')],
    (np.zeros(3, other('env_id', 'i8')), "column 'env_id'; got int64; expected int32"), (np.zeros(3, other('step_n', '>i4')), "column 'step_n'; got >i4"),
    (np.zeros(3, other('terminated', 'u1')), "column 'terminated'; got uint8; expected bool"), (np.zeros(3, other('truncated', ('?', (2,)))), "column 'truncated'"),
    (np.zeros(3, np.dtype([*[(n, DTYPE[n]) for n in DTYPE.names]])), 'a packed dtype; expected an aligned one'),
    (np.zeros(3, np.dtype([('o', object), *[(n, DTYPE[n]) for n in DTYPE.names]], align=True)), 'no Python objects'),
    (np.zeros(3, extend_dtype(DTYPE, mask='?')), "column 'mask'; got one that is there already"), (np.zeros(3, extend_dtype(DTYPE, mask='f4')), "column 'mask'"),
    *[(np.zeros(3, extend_dtype(DTYPE, n=kind)), "column 'n'; got .*; expected int32 or int64") for kind in ('f4', 'i2', '?', ('i4', (2,)))],
    (np.zeros((3, 2), DTYPE), r'got shape \[3, 2\]; expected shape \[n\]'), (np.zeros((1, 1), DTYPE), r'got shape \[1, 1\]')])
def test_blocks_are_checked(rows, words):
    "The error says which column and what it should be; a chunker that has refused its first block takes any other"
    chunker = SequenceChunker(None, 3)
    with pytest.raises(BlockError, match=f'^SequenceChunker: .*{words}'): chunker.chunk(Steps(rows))
    assert chunker._held.gate.layout is None and steps_of(chunker.chunk(numbered(3))) == [[1, 2, 3]]

@pytest.mark.parametrize('bad', [-1, -2**31, 1 << 24, 2**31 - 1])
def test_a_refused_block_leaves_everything_as_it_was(bad):
    "Also where rows before the bad one would have completed a sequence"
    new = SequenceChunker(None, 3)
    rows = numbered(6).rows
    rows['env_id'][4] = bad
    with pytest.raises(BlockError, match=f"row 4 of the block, column 'env_id'; got {bad}; expected a number from 0 to 16777215"): new.chunk(Steps(rows))
    assert new._held.gate.layout is None
    old = SequenceChunker(None, 3)
    old.chunk(numbered(2))
    with pytest.raises(BlockError, match='row 4'): old.chunk(Steps(rows))
    assert steps_of(old.chunk(numbered(1, 2))) == [[1, 2, 3]]

def test_two_chunkers_in_a_row():
    with pytest.raises(BlockError, match="column 'mask'; got one that is there already; expected none. Remedy: a chunker adds it"):
        list(Items([numbered(9)]).chunk_sequences(4).chunk_sequences(2))
