"""Where episodes begin: NStep, the chunker and a plain model agree on every stream; and what interrupts a stage takes all of a block or none of it."""

import numpy as np, pytest, torch
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.steps.row_dtypes import extend_dtype
from gymnasium import spaces
from bytecodes import before_bytecodes
from strategies import bits, cases, numpy_leaves

DTYPE = step_dtype(spaces.Discrete(9), spaces.Discrete(3))

# ---- one rule ----


def episodes_of(rows):
    "The plain model: (numbers of the rows, did they end with a flag?) of each episode, in the order in which they begin"
    episodes, running = [], {}
    for i, r in enumerate(rows):
        env = int(r['env_id'])
        last = rows[running[env][0][-1]] if env in running else None
        if (
            last is None
            or running[env][1]
            or r['episode_n'] != last['episode_n']
            or r['step_n'] <= last['step_n']
        ):
            running[env] = [[], False]
            episodes.append(running[env])
        running[env][0].append(i)
        running[env][1] = bool(r['terminated'] or r['truncated'])
    return episodes


def stream(events, start):
    """Rows of (env, what) pairs: '.' a step, 't' and 'u' the flags, '!' another episode that follows without a flag, '<' steps that fall,
    '=' a step that stands still, '+' a gap; steps count from `start`. A row's reward is its number."""
    rows, at = np.zeros(len(events), DTYPE), {}
    for i, (r, (env, what)) in enumerate(zip(rows, events)):
        episode, step = at.get(env, (1, start - 1))
        if what == '!':
            episode, step = episode + 1, start - 1
        step = {'<': max(start, step - 2), '=': max(start, step), '+': step + 5}.get(what, step + 1)
        r['env_id'], r['episode_n'], r['step_n'], r['reward'] = env, episode, step, i
        r['terminated'], r['truncated'] = what == 't', what == 'u'
        at[env] = (episode + 1, start - 1) if what in 'tu' else (episode, step)
    return rows


def blocks_of(rows, sizes):
    cuts = np.cumsum([0, *(sizes * (len(rows) // sum(sizes) + 1))])
    return [Steps(r) for r in np.split(rows, cuts[cuts < len(rows)])]


events = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 7, 4000]), st.sampled_from('......tu!!<=+')), max_size=60
)
sizes = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)


@cases(300)
@given(events, st.sampled_from([0, 1]), sizes)
def test_all_stages_agree_on_where_episodes_begin(events, start, sizes):
    "Counted from 0 and from 1, several environments, blocks of any size; all rows of an episode are in one sequence, and in one chain of merged rows"
    rows = stream(events, start)
    end = np.zeros(
        len(set(rows['env_id'])), DTYPE
    )  # a last row of each environment sends out what is left
    end['env_id'], end['episode_n'], end['reward'], end['terminated'] = (
        sorted(set(rows['env_id'])),
        10**6,
        10**6,
        True,
    )
    blocks = blocks_of(rows, sizes) + [Steps(end)]
    expected = episodes_of(rows)
    assert [i for e, _ in expected for i in e] != [] or not len(rows)

    chunked = list(SequenceChunker(blocks, 64, tail='pad'))
    seqs = [s.reward[s.mask].int().tolist() for s in chunked]
    assert sorted(s for s in seqs if s[0] < 10**6) == [e for e, _ in expected]

    pairs = Steps.cat(
        [
            Steps(np.zeros(0, extend_dtype(DTYPE, discount='f4', n='i4'))),
            *NStep(blocks, 2, gamma=1.0),
        ]
    ).rows
    pairs = pairs[pairs['episode_n'] < 10**6]
    firsts = {(e[i], tuple(e[i : i + 2])) for e, _ in expected for i in range(len(e))}
    assert sorted(pairs['reward'].astype(int).tolist()) == sorted(sum(p) for _, p in firsts)
    assert len(pairs) == len(rows) and (pairs['n'] == 1).sum() == len(expected)
    assert pairs['terminated'].sum() + pairs['truncated'].sum() >= len(expected)


@cases(100)
@given(events, st.sampled_from([0, 1]), sizes, st.sampled_from(['i4', 'i8']), st.integers(1, 4))
def test_merged_rows_have_the_same_episodes(events, start, sizes, kind, n):
    "A chunker after an n_step, whose column `n` may be made longer on the way"
    rows = stream(events, start)
    rows = rows[
        np.isin(np.arange(len(rows)), [i for e, ended in episodes_of(rows) if ended for i in e])
    ]  # finished ones, nothing waits
    merged = [b.rows for b in NStep(blocks_of(rows, sizes), n, gamma=1.0)]
    wide = [
        np.zeros(len(b), [(c, kind if c == 'n' else b.dtype[c]) for c in b.dtype.names])
        for b in merged
    ]
    wide = [w.astype(np.dtype([(c, w.dtype[c]) for c in w.dtype.names], align=True)) for w in wide]
    for w, b in zip(wide, merged):
        for c in b.dtype.names:
            w[c] = b[c]
    seqs = list(SequenceChunker([Steps(w) for w in wide], 64, tail='pad'))
    got = sorted((int(s.env_id[0]), int(s.episode_n[0]), s.step_n[s.mask].tolist()) for s in seqs)
    want = sorted(
        (int(rows['env_id'][e[0]]), int(rows['episode_n'][e[0]]), rows['step_n'][e].tolist())
        for e, _ in episodes_of(rows)
    )
    assert got == want


HAND = dict(  # steps, where episodes begin (of one episode_n, one environment), and the number of the row with a flag
    falls=([1, 2, 3, 4, 2, 3, 4, 5], [0, 4], None),
    from_0=([0, 1, 2, 3], [0], 3),
    from_0_falls=([0, 1, 2, 0, 1], [0, 3], None),
    still=([3, 3, 3], [0, 1, 2], None),
    one=([1], [0], 0),
    last=([1, 2, 3], [0], 2),
    flag=([1, 2, 3, 4], [0, 2], 1),
)


@pytest.mark.parametrize('name', HAND)
@pytest.mark.parametrize('flag', ['terminated', 'truncated'])
def test_by_numbers(name, flag):
    steps, begins, flagged = HAND[name]
    rows = np.zeros(len(steps) + 1, DTYPE)
    rows['step_n'][:-1], rows['reward'], rows['episode_n'] = (
        steps,
        np.arange(len(rows)),
        [1] * len(steps) + [2],
    )
    if flagged is not None:
        rows[flag][flagged] = True
    want = [list(range(a, b)) for a, b in zip(begins, [*begins[1:], len(steps)])]
    assert [s.reward[s.mask].int().tolist() for s in SequenceChunker([Steps(rows)], 9)] == want
    (out,) = NStep([Steps(rows)], 9, gamma=1.0)
    assert out['n'].tolist() == [len(e) - i for e in want for i in range(len(e))]


TAKES = dict(
    NStep=lambda b: list(NStep(b, 2, 0.9)),
    SequenceChunker=lambda b: list(SequenceChunker(b, 2)),
    Timeline=lambda b: [Timeline(9).add(x) for x in b],
    ExperienceReplay=lambda b: list(ExperienceReplay(b, 1, 9)),
    PrioritizedReplay=lambda b: list(PrioritizedReplay(b, 1, 9)),
    SequenceReplay=lambda b: list(SequenceReplay(b, 1, 9, length=2, burn_in=0, overlap=0)),
)


@pytest.mark.parametrize('name', TAKES)
@pytest.mark.parametrize('column', ['reward', 'discount'])
def test_a_column_of_columns_is_refused(name, column):
    "A reward of shape [n, 1] would be broadcast to [n, n] in a learner; several rewards in a row may be kept"
    if (name, column) == ('NStep', 'discount'):
        return  # it makes that column itself
    rows = stream([(0, w) for w in '...t'], 1)
    wide = extend_dtype(rows.dtype, discount='f4')

    def block(shape):
        kinds = {n: wide[n] for n in wide.names if column == 'discount' or n != 'discount'} | {
            column: np.dtype(('f4', shape))
        }
        new = np.zeros(4, np.dtype(list(kinds.items()), align=True))
        for n in rows.dtype.names:
            new[n] = rows[n].reshape(4, *[1] * len(shape)) if n == column else rows[n]
        return Steps(new)

    for shape in (1,), (1, 1):
        # was: taken, and the learner's targets were a table
        with pytest.raises(
            BlockError,
            match=rf"{name}: column '{column}'; got shape \[n, 1(, 1)?\]; expected shape \[n\], a number in each row",
        ):
            TAKES[name]([block(shape)])
    TAKES[name]([block(())])
    if name != 'NStep':
        TAKES[name]([block((3,))])


def test_what_a_pipe_remembers_is_no_buffer():
    "`rewind`, by which a pass of `header` ends, once wrote a number over the stage's map of environments"
    blocks = scripted_steps([script(9), script(4, env=1)], 8)
    pipe = Items(blocks).n_step(2, gamma=0.9).header(3)
    assert [b.step_n.tolist() for b in pipe] == [b.step_n.tolist() for b in NStep(blocks, 2, 0.9)][
        :3
    ]
    assert len(list(pipe)) == 3
    pipe = Items(blocks).chunk_sequences(2).header(3)
    assert [len(list(pipe)) for _ in range(2)] == [3, 3]


# ---- interrupts ----


class Interrupt(KeyboardInterrupt):
    pass


def interrupted(call, at, *files):
    "Run, but raise before bytecode number `at` of this library, or of these files; did that happen?"
    seen = 0

    def each():
        nonlocal seen
        seen += 1
        if seen == at:
            raise Interrupt

    grad = torch.is_grad_enabled()
    end = before_bytecodes(lambda file: any(f in file for f in files or ['fastrl_replay']), each)
    try:
        call()
    except Interrupt:
        return True
    finally:
        end()
        torch.set_grad_enabled(
            grad
        )  # a `with` that is cut before the call of its exit stays entered; no signal comes there
    return False


def feed(stage, block):
    return stage.merge(block) if isinstance(stage, NStep) else stage.chunk(block)


def seen(out):
    "The very bits of all columns; what lies between columns is no column's"
    return [
        [bits(a) for a in numpy_leaves(s.rows)] for s in (out if isinstance(out, list) else [out])
    ]


MAKE = dict(
    NStep=lambda: NStep(None, 3, 0.5),
    shift=lambda: SequenceChunker(None, 4, 1),
    pad=lambda: SequenceChunker(None, 3, 0, 'pad'),
)
QUICK = ['NStep', *(pytest.param(k, marks=pytest.mark.slow) for k in ('shift', 'pad'))]
STREAM = stream(
    [
        (e, w)
        for k, w in enumerate('..!...t.<..u....!.t....=..+..t..')
        for e in (0, 3, 40, 9)[: 1 + k // 8]
    ],
    1,
)
WHICH = dict(
    first=([], STREAM[:5]),
    same=([STREAM[:5]], STREAM[5:13]),
    new=([STREAM[:16]], STREAM[16:40]),
    larger=([STREAM[:1], STREAM[1:2]], STREAM[2:7]),
    strided=([STREAM[:6]], np.repeat(STREAM[6:12], 2)[::2]),
)


def in_the_middle(kind, which):
    "What makes a stage that has seen some blocks; the next block; what a stage gives for those after it"
    earlier, block = WHICH[which]
    block, rest = Steps(block), [Steps(r) for r in (STREAM[40:50], STREAM[50:])]

    def prepared():
        stage = MAKE[kind]()
        for rows in earlier:
            feed(stage, Steps(rows))
        return stage

    def future(stage):
        return [seen(feed(stage, b)) for b in [block[:0], *rest]]

    return prepared, block, future


@pytest.mark.parametrize('which', WHICH)
@pytest.mark.parametrize('kind', QUICK)
def test_an_interrupt_leaves_the_state_before_or_after(kind, which):
    "At every bytecode of merge, chunk and what they call: the next blocks bring what they bring where the block was never sent, or where it was taken"
    prepared, block, future = in_the_middle(kind, which)
    after = prepared()
    out = seen(feed(after, block))
    after = future(after)
    without = future(prepared())
    fresh = prepared()
    assert [seen(feed(fresh, block))] + future(fresh) == [out] + after
    at, befores, afters = 1, 0, 0
    while True:
        stage = prepared()
        if not interrupted(lambda: feed(stage, block), at):
            break
        state = stage.state_dict()
        got = future(stage)
        assert got in (without, after), f'bytecode {at}'
        if got == without:  # then the block may be sent again; every seventh time it is
            befores += 1
        if got == without and at % 7 == 0:
            again = MAKE[kind]()
            again.load_state_dict(state)
            assert seen(feed(again, block)) == out and future(again) == after
        else:
            afters += 1
        at += 1
    assert befores > 20 and (afters > 2 or without == after)


@pytest.mark.parametrize('kind', QUICK)
def test_an_interrupted_load_leaves_the_state_before_or_after(kind):
    "All that a stage holds is replaced at once"

    def holding(rows):
        stage = MAKE[kind]()
        feed(stage, Steps(rows))
        return stage

    old, new, block = STREAM[:9], STREAM[20:33], Steps(STREAM[40:50])
    state = holding(new).state_dict()
    before, after = seen(feed(holding(old), block)), seen(feed(holding(new), block))
    at, got = 1, []
    while True:
        stage = holding(old)
        if not interrupted(lambda: stage.load_state_dict(state), at):
            break
        got.append(seen(feed(stage, block)))
        at += 5
    assert before != after and before in got and all(g in (before, after) for g in got)


@pytest.mark.parametrize('kind', MAKE)
def test_states_that_do_not_fit_change_nothing(kind):
    "A state is checked whole before anything of it is taken"
    stage, block = MAKE[kind](), Steps(STREAM[9:30])
    feed(stage, Steps(STREAM[:9]))
    state = stage.state_dict()

    def spoiled(**changes):
        return dict(state, own=dict(state['own'], **changes))

    bad = state['own']['rows'].clone()
    bad[0, -1:] = 0
    env = DTYPE.fields['env_id'][1]
    bad[:, env : env + 4] = 255  # env_id -1
    spoils = [spoiled(rows=bad), spoiled(rows=state['own']['rows'][:, :-4].contiguous())]
    if kind != 'NStep':
        spoils += [
            spoiled(rows=state['own']['rows'][1:]),
            spoiled(ids=state['own']['ids'] + 1),
            spoiled(counts=state['own']['counts'] + 1),
        ]
    expected = MAKE[kind]()
    feed(expected, Steps(STREAM[:9]))
    for i, s in enumerate(spoils):
        said = 'a saved state that does not fit, in .+rows' if i == 1 else 'saved rows that'
        with pytest.raises(StateError, match=f'{type(stage).__name__}: {said}'):
            stage.load_state_dict(s)
    assert seen(feed(stage, block)) == seen(feed(expected, block))
