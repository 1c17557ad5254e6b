"""SequenceChunker, against lists and loops; ends of episodes, any blocks, saving, refusals."""

from itertools import islice

import numpy as np, pytest
from gymnasium import spaces
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.steps.row_dtypes import extend_dtype
from fastrl_replay.testing import through_file
from scripted import numbered
from strategies import bits, cases, numpy_leaves, scribble

TAILS = 'shift', 'pad', 'drop'
DTYPE = step_dtype(
    spaces.Dict(
        a=spaces.Box(-9, 9, (3,)), b=spaces.Tuple([spaces.Discrete(9), spaces.MultiBinary(3)])
    ),
    spaces.Discrete(3),
)

# ---- the judge: lists, loops, no arithmetic with remainders ----


def naive(rows, length, overlap, tail, ended=False):
    """Return (number of the row that completes it, numbers of its rows) of each sequence, in order.

    If the data has ended, the last ones of all episodes follow."""
    out = []
    # env_id: [numbers of the episode's rows, where the next sequence starts, where the last ended]
    running = {}

    def end(env, at):
        episode, start, shown = running.pop(env)
        if shown == len(episode) or tail == 'drop':
            return
        out.append(
            (at, episode[max(0, len(episode) - length) :] if tail == 'shift' else episode[start:])
        )

    for i, r in enumerate(rows):
        env = int(r['env_id'])
        if env in running:
            before = rows[running[env][0][-1]]
            if r['episode_n'] != before['episode_n'] or r['step_n'] != before['step_n'] + 1:
                end(env, i)
        episode, start, _ = entry = running.setdefault(env, [[], 0, 0])
        episode.append(i)
        if len(episode) == start + length:
            out.append((i, episode[start:]))
            entry[1:] = start + length - overlap, len(episode)
        if (r['terminated'] or r['truncated']) and ('n' not in rows.dtype.names or r['n'] == 1):
            end(env, i)
    for env in sorted(running) if ended else []:
        end(env, len(rows))
    return out


def like(seq, rows, numbers, length):
    "Is this block the sequence of these rows, bit for bit, with zeros after them?"
    k, names = len(numbers), rows.dtype.names
    return (
        seq.shape == (length,)
        and seq.dtype == extend_dtype(rows.dtype, mask='?')
        and seq.mask.tolist() == [t < k for t in range(length)]
        and all(
            bits(a) == bits(b)
            for n in names
            for a, b in zip(numpy_leaves(seq.rows[n][:k]), numpy_leaves(rows[n][numbers]))
        )
        and not seq.rows.view(np.uint8).reshape(length, -1)[k:].any()
    )


def agrees(seqs, rows, length, overlap, tail, ended=False):
    want = naive(rows, length, overlap, tail, ended)
    assert [s.step_n[s.mask].tolist() for s in seqs] == [
        rows['step_n'][n].tolist() for _, n in want
    ]
    assert all(like(s, rows, n, length) for s, (_, n) in zip(seqs, want))


def told(events, seed=0):
    """Rows from (env, what happens) pairs: '.' is a step, 't' and 'u' are the flags, 'b' is both.

    '!' is a new episode without an end before it, '1' and '0' one with the same or an earlier
    number, 'e' another number in its middle, '+' a gap."""
    rows, at = scribble(np.zeros(len(events), DTYPE), seed), {}
    for r, (env, what) in zip(rows, events):
        episode, step = at.get(env, (1, 0))
        if what in '!10' and step:
            episode, step = episode + (what == '!') - (what == '0'), 0
        if what == 'e':
            episode += 1
        step += 3 if what == '+' and step else 1
        r['env_id'], r['episode_n'], r['step_n'] = env, episode, step
        r['terminated'], r['truncated'] = what in 'tb', what in 'ub'
        at[env] = (episode + 1, 0) if what in 'tub' else (episode, step)
    return rows


def split(rows, sizes):
    "Blocks of these sizes, again and again until all rows are in one"
    blocks, at, i = [], 0, 0
    while at < len(rows):
        blocks.append(Steps(rows[at : at + sizes[i % len(sizes)]].copy()))
        at, i = at + sizes[i % len(sizes)], i + 1
    return blocks


def steps_of(seqs):
    return [s.step_n.tolist() for s in seqs]


def cut(blocks, *args, **kw):
    return list(SequenceChunker([blocks] if isinstance(blocks, Steps) else blocks, *args, **kw))


def episodes(*lengths, env=0):
    return Steps.cat(scripted_steps([script(*lengths, env=env)], sum(map(abs, lengths))))


arguments = st.integers(1, 7).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.sampled_from(TAILS))
)
events = st.lists(
    st.tuples(st.sampled_from([0, 1, 1, 3, 40]), st.sampled_from('.......+tub!10e')), max_size=80
)
sizes = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


@cases(240)
@given(events, sizes, arguments, st.integers(0, 99))
def test_any_stream_in_any_blocks(events, sizes, arguments, seed):
    """Irregular environments, episodes of length one, both flags, unannounced ends, gaps.

    Gives what lists and loops give, bit for bit, in their order."""
    rows = told(events, seed=seed)
    chunker, at, seqs, want = SequenceChunker(None, *arguments), 0, [], naive(rows, *arguments)
    for block in split(rows, sizes):
        seqs += chunker.chunk(block)
        at += len(block)
        assert len(seqs) == sum(i < at for i, _ in want), 'a sequence came too early or too late'
    agrees(seqs, rows, *arguments)
    agrees(cut(split(rows, sizes), *arguments), rows, *arguments)
    agrees(cut(Items(split(rows, sizes), at_end='flush'), *arguments), rows, *arguments, ended=True)


@cases(60)
@given(events, st.integers(1, 4), sizes, arguments)
def test_n_step_rows_end_with_the_last_of_them(events, n, sizes, arguments):
    "The last n rows of an episode are done, with n, n-1, …, 1 in column n: the last one ends it"
    steps = told(events)
    steps['reward'] = 1
    rows = NStep(None, n, 0.9).merge(Steps(steps)).rows
    agrees(cut(split(rows, sizes), *arguments), rows, *arguments)


# ---- ends ----


def test_an_episode_under_way_begins_where_it_is_first_seen():
    rows = Steps(numbered(9).rows[4:])
    assert steps_of(cut(rows, 3, 1)) == [[5, 6, 7], [7, 8, 9]]


# ---- blocks ----


def test_sequences_own_their_memory():
    """Overlapping ones, and several from one block: writing into one changes no other.

    It changes neither what waits nor the block that came."""
    block = episodes(9, 5)
    chunker, copy = SequenceChunker(None, 4, 2), block.copy()
    seqs = chunker.chunk(block[:11])
    want = cut(copy, 4, 2)
    for i, s in enumerate(seqs):
        assert s == want[i]
        s.rows.view(np.uint8)[:] = 255
    assert block == copy
    block.rows.view(np.uint8)[:] = 255
    assert chunker.chunk(copy[11:]) == want[4:]


# ---- saving ----


@cases(100)
@given(events, sizes, arguments, st.integers(0, 6))
def test_saved_anywhere_it_goes_on(events, sizes, arguments, k):
    "In mid-episode, between sequences of one block, before the first row: through a file, twice"
    blocks = split(told([(99 - e if e < 9 else e, w) for e, w in events]), sizes)
    a, b, c = (Items(blocks).chunk_sequences(*arguments) for _ in range(3))
    it = iter(a)
    head = list(islice(it, k))
    b.load_state_dict(through_file(a.state_dict()))
    c.load_state_dict(through_file(b.state_dict()))
    rest = list(it)
    assert head + rest == cut(blocks, *arguments)
    if len(head) == k:  # or else the pass was over
        assert list(b) == list(c) == rest


def test_restored_columns_are_those_that_were_saved():
    "A block with others is refused, before and after"
    a, b = SequenceChunker(None, 4), SequenceChunker(None, 4)
    a.chunk(Steps(np.ones(2, DTYPE)))
    b.load_state_dict(through_file(a.state_dict()))
    for x in a, b:
        with pytest.raises(BlockError, match="'state' is .*, not .*"):
            x.chunk(numbered(3))
