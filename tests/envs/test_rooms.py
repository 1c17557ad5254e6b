"""The rooms of `envs`: slots and numbers of environments."""

import numpy as np
import pytest

from fastrl_replay.envs.group import EnvGroup
from fastrl_replay.testing import ScriptedEnv, ScriptedVectorEnv, script


@pytest.mark.parametrize('seed', [None, 7, np.int64(7)])
def test_numbers_and_seeds_count_on_from_slot_to_slot(seed):
    "Also where vectors stand between single environments, and where the group is not the first"
    envs = [
        ScriptedEnv(**script(3)),
        ScriptedVectorEnv([script(2)] * 3),
        ScriptedEnv(**script(3)),
        ScriptedVectorEnv([script(2)] * 2),
    ]
    group = EnvGroup(envs, None, seed, first_id=4)
    firsts = [4, 5, 8, 9]
    assert [l.env_id for l in group.slots] == firsts and group.n == 7
    assert [l.seed for l in group.slots] == [None if seed is None else 7 + i for i in firsts]
    assert group.slots.starts == [0, 1, 4, 5]


@pytest.mark.parametrize('i, slot, own', [(0, 0, 0), (1, 1, 0), (3, 1, 2), (4, 2, 0)])
def test_an_environment_is_found_in_its_slot(i, slot, own):
    "Errors about masks name its episode and step"
    group = EnvGroup(
        [ScriptedEnv(**script(9)), ScriptedVectorEnv([script(9)] * 3), ScriptedEnv(**script(9))],
        None,
        7,
    )
    for _ in range(2):
        group.step()
        group.block = None
    group.slots.pairs[1][0].counts[:, 1] = [10, 11, 12]
    found, (episode, step) = group.slots.at(i)
    assert (
        found is group.slots.pairs[slot][0]
        and episode == 1
        and step == (2 if slot != 1 else 10 + own)
    )
