"""Continuous actions: what the stepper takes, policies for boxes, SAC and TD3, against second implementations and odd spaces."""
import pickle
from itertools import islice

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from fastrl_replay.all import *
from fastrl_replay.testing import ScriptedEnv, script, through_file

Box,Discrete,nan,inf = spaces.Box,spaces.Discrete,float('nan'),float('inf')
torch.set_num_threads(1)
def take(pipe, n): return list(islice(pipe, n))

# ---- what the stepper takes ----

def steered(space, answer, **kw): return take(GymStepper(ScriptedEnv(**script(9), action_space=space), lambda s: answer, **kw), 1)[0].rows['action'][0]

ULP = 2.**-23
@pytest.mark.parametrize('answer,rounding,all', [(0., 0, 0), (1 + 2*ULP, 1, 1), (-1 - 2*ULP, -1, -1), (1.5, None, 1), (-9., None, -1), (inf, None, 1), (-inf, None, -1), (nan, None, None)])
def test_actions_that_are_clipped(answer, rounding, all):
    "clip=None: rounding errors; True: all that is a number; False: none"
    space = Box(-1, 1, (2,))
    for clip,want in (None,rounding),(True,all),(False,0 if answer == 0 else None):
        given = np.float32([[0,answer]])
        if want is not None: assert steered(space, given, clip=clip).tolist() == [0,want]
        else:
            with pytest.raises(ActionError, match='outside its space'): steered(space, given, clip=clip)
        assert np.array_equal(given, np.float32([[0,answer]]), equal_nan=True)   # the policy's own array is as it was

def test_only_boxes_are_clipped():
    "Whole numbers in a box are; actions that are names of something are not, and the remedy says so"
    assert steered(Box(0, 8, (1,), np.int64), [[11]], clip=True) == 8 and steered(Box(0, 8, (1,), np.uint8), [[-1]], clip=True) == 0
    for space,wrong in (Discrete(2),[2]),(spaces.MultiDiscrete([2,3]),[[0,3]]),(spaces.MultiBinary(2),[[0,2]]):
        with pytest.raises(ActionError, match='Remedy: clip it in the policy$'): steered(space, wrong, clip=True)
    nested = spaces.Dict(a=spaces.Tuple([Box(-1, 1, (2,)), Discrete(2)]))
    got = steered(nested, dict(a=(np.float32([[5,-5]]), [1])), clip=True)['a']
    assert got['[0]'].tolist() == [1,-1] and got['[1]'] == 1
    with pytest.raises(ActionError, match=r"action\['a'\]\[1\]"): steered(nested, dict(a=(np.float32([[5,-5]]), [2])), clip=True)

@pytest.mark.parametrize('clip', ['yes', 1, 0, 2.])
def test_clip_is_one_of_three(clip):
    with pytest.raises(ValueError, match=r'^GymStepper: clip; got .*; expected True, False or None'): GymStepper('Pendulum-v1', clip=clip)

@pytest.mark.parametrize('clip', [None, True, False])
def test_a_stepper_that_clips_is_printed_pickled_and_saved(clip):
    "As any other argument"
    pipe = GymStepper('Pendulum-v1', seed=0, clip=clip, float32=True)
    other = pickle.loads(pickle.dumps(pipe))
    take(pipe, 5); other.load_state_dict(through_file(pipe.state_dict()))
    assert ('clip=' in repr(pipe)) == (clip is not None) and 'float32=True' in repr(pipe) and take(pipe, 5) == take(other, 5)

# ---- observations of float64 ----

class Double(gym.Env):
    "Observations of float64 in a dict, as some simulators give them, with numbers that float32 doesn't have"
    observation_space = spaces.Dict(arm=Box(-inf, inf, (2,), np.float64), gear=Discrete(3), pair=spaces.Tuple([Box(0, 1e300, (), np.float64), Box(0, 255, (2,), np.uint8)]))
    action_space = Box(-1, 1, (1,))
    def reset(self, *, seed=None, options=None): super().reset(seed=seed); self.t = 0; return self._look(),{}
    def step(self, action): self.t += 1; return self._look(),float(action[0]),self.t == 3,self.t == 5,{}
    def _look(self): return dict(arm=np.array([np.pi*self.t, 1 + 2.**-40]), gear=self.t % 3, pair=(np.float64(1e-3), np.array([self.t, 7], np.uint8)))

@pytest.mark.parametrize('mode', [None, *AutoresetMode])
def test_float64_as_float32(mode):
    "Every leaf, also of final observations, in every reset mode: the same rows, rounded"
    def source(): return Double() if mode is None else SyncVectorEnv([Double]*2, autoreset_mode=mode)
    wide,small = (Steps.cat(take(GymStepper(source(), seed=0, float32=f), 9)) for f in (False,True))
    def leaves(rows, dtype, path=()):
        if dtype.names: return [l for n in dtype.names for l in leaves(rows[n], dtype[n], (*path,n))]
        return [(path, dtype.base, rows)]
    seen = set()
    for (path,kind,a),(other,now,b) in zip(leaves(wide.rows, wide.rows.dtype), leaves(small.rows, small.rows.dtype), strict=True):
        assert path == other and now == (np.float32 if kind == np.float64 else kind) and np.array_equal(a.astype(now), b)
        seen.add(kind.name)
    assert 'float64' in seen and 'float64' not in {k.name for _,k,_ in leaves(small.rows, small.rows.dtype)}
    assert Double.observation_space['arm'].dtype == np.float64

def test_a_checkpoint_with_other_rows_is_refused():
    "float64 and float32 don't mix in one stream"
    a,b = GymStepper(Double(), seed=0),GymStepper(Double(), seed=0, float32=True)
    take(a, 2)
    with pytest.raises(StateError, match='the saved environments are others'):
        b.load_state_dict(through_file(a.state_dict())); take(b, 1)

def test_networks_that_meet_float64_say_what_to_do():
    "Policies and learners, by their names; a network in float64 takes it"
    space,rows = Box(-inf, inf, (2,), np.float64),np.zeros(4, step_dtype(Box(-inf, inf, (2,), np.float64), Discrete(2)))
    remedy = r'what the model is given; got states of float64; expected torch.float32, as its weights are. Remedy: GymStepper\(…, float32=True\)'
    with pytest.raises(ValueError, match='^EpsGreedy: ' + remedy): EpsGreedy(nn.Linear(2, 2), 0.)(torch.zeros(3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match='^dqn_errors: ' + remedy): DQNLearner([], nn.Linear(2, 2)).learn(Steps(rows))
    DQNLearner([], nn.Linear(2, 2).double()).learn(Steps(rows))
    DQNLearner([], nn.Sequential(FlattenSpace(space), nn.Linear(2, 2))).learn(Steps(rows))
    with pytest.raises(RuntimeError, match='cannot be multiplied'): DQNLearner([], nn.Linear(3, 2)).learn(Steps(rows.astype(step_dtype(Box(-inf, inf, (2,)), Discrete(2)))))
