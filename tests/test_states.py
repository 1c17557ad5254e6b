"""Saved states, tampered with: refused in words, or taken and gone on with. `fuzz_states.py` has chains and damage."""
import pytest

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
        if y is None: t.load(c, through_file(t.save(b))); y = t.items(c)
        found, want = take(y, 11), take(x, 11)
        assert len(found) == len(want) and (found == want or not t.exact)
    assert bits(state) == before
    for chain in (a, b, c) if t.slow else (): chain.close()

@pytest.mark.parametrize('name', FAST)
def test_a_damaged_state(name):
    "Some, the same ones each time"
    assert not (said := wrong(name, range(4))), said

@pytest.mark.slow   # smaller: `test_a_damaged_state`
@pytest.mark.parametrize('name', [*TARGETS])
def test_many_damaged_states(name):
    "Fifty for each kind of chain"
    assert not (said := wrong(name, range(100, 105 if TARGETS[name].slow else 150))), said
