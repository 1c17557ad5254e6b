"""Saved states, tampered with: refused in words, or taken and gone on with. `fuzz_states.py` has chains and damage."""

import numpy as np, pytest, torch

from fastrl_replay.steps.errors import StateError
from fastrl_replay.steps.states import Saves, array, generator, integer
from fastrl_replay.testing import through_file
from fuzz_states import TARGETS, bits, cases, failed, in_words, take

FAST = [name for name, t in TARGETS.items() if not t.slow]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name, t in TARGETS.items() if t.slow]


def wrong(name, seeds):
    "Cases that were neither refused nor gone on with, in words"
    found = [*filter(failed, cases(name, seeds))]
    return f'{len(found)} of {len(seeds)}\n' + '\n'.join(map(in_words, found)) if found else ''


@pytest.mark.parametrize('name', FAST + SLOW)
def test_an_untampered_state_goes_on_as_the_chain_that_was_saved(name):
    "In a chain that stands elsewhere, and from there in another one: bit for bit; what was loaded stays as it was"
    t = TARGETS[name]
    a, b, c = t.make(), t.make(), t.make()
    items, others = t.items(a), t.items(b)
    take(items, t.saved), take(others, t.held)
    state = through_file(t.plain(t.save(a)))
    before = bits(state)
    t.load(b, t.coded(state))
    for x, y in (items, t.items(b)), (items, None):
        if y is None:
            t.load(c, through_file(t.save(b)))
            y = t.items(c)
        found, want = take(y, 11), take(x, 11)
        assert len(found) == len(want) and (found == want or not t.exact)
    assert bits(state) == before
    for chain in (a, b, c) if t.slow else ():
        chain.close()


@pytest.mark.parametrize('name', FAST)
def test_a_damaged_state(name):
    "Some, the same ones each time"
    assert not (said := wrong(name, range(4))), said


@pytest.mark.slow  # smaller: `test_a_damaged_state`
@pytest.mark.parametrize('name', [*TARGETS])
def test_many_damaged_states(name):
    "Fifty for each kind of chain"
    assert not (said := wrong(name, range(100, 105 if TARGETS[name].slow else 150))), said


class Die(Saves):
    "What each kind of attribute is saved as"

    saved = dict(thrown=integer(), counts=array(np.int64, 6, low=0), rng=generator)

    def __init__(self, seed):
        self.thrown, self.counts, self.rng = (
            seed,
            np.arange(seed, seed + 6),
            np.random.default_rng(seed),
        )


DAMAGES = [
    dict(thrown=True),
    dict(counts=torch.arange(7)),
    dict(counts=-torch.arange(6)),
    dict(rng=3),
    dict(more=1),
    dict(rng=np.random.Generator(np.random.SFC64(0)).bit_generator.state),
]


def test_what_a_class_saves_is_taken_whole_or_not_at_all():
    "An array stays where it is, and what is saved is no view of it; the last entry may be the one that is refused"
    a, b = Die(1), Die(2)
    state, counts, before = through_file(a.state_dict()), b.counts, bits(b.state_dict())
    for damage in DAMAGES:
        with pytest.raises(StateError, match='^Die: '):
            b.load_state_dict({**state, **damage})
        assert bits(b.state_dict()) == before
    b.load_state_dict(state)
    assert (
        bits(b.state_dict()) == bits(state)
        and b.counts is counts
        and a.rng.random() == b.rng.random()
    )
    b.counts += 1
    assert state['counts'].tolist() == [*range(1, 7)]
