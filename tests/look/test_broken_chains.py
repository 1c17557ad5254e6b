"Chains with one fault each, as they come about: what is said of them under the figure and on the page, and that nothing is said of a chain without fault."
import gymnasium as gym, numpy as np, pytest, torch
from test_inside import Endless, Sprites
from fastrl_replay.all import *
from fastrl_replay.envs.catch import Catch

class Late(gym.Wrapper):
    "It does what it was told a step ago"
    def reset(self, **kw):
        self.waiting = self.action_space.sample()
        return self.env.reset(**kw)
    def step(self, action):
        action, self.waiting = self.waiting, action
        return self.env.step(action)

class Mixed(gym.Wrapper):
    "Now and then it shows a frame of another environment, of the same kind"
    def __init__(self, env, other):
        super().__init__(env)
        self.other, self.rng = other, np.random.default_rng(0)
        other.reset(seed=99)
    def step(self, action):
        obs, *more = self.env.step(action)
        shown, _, over, late, _ = self.other.step(self.other.action_space.sample())
        if over or late: shown, _ = self.other.reset()
        return shown if self.rng.random() < .05 else obs, *more

def played(envs, answered=True, n=4000, **kw):
    "A prioritized memory, drawn from while it is filled"
    replay, rng = PrioritizedReplay(bs=32, max_sz=3*n//4, seed=0, **kw), torch.Generator().manual_seed(0)
    for k, block in enumerate(GymStepper(envs, seed=0)):
        replay.add(block)
        if len(replay) >= 500 and k % 4 == 0:
            batch = replay.sample()
            if answered: batch.update_priorities(batch.reward + torch.randn(32, generator=rng))
        if replay.memory.inserted >= n: return replay

CHAINS = dict(
    healthy=lambda make, **kw: played([make]*3, **kw),
    endless=lambda make, **kw: played([make]*2 + [lambda: Endless(make())], **kw), alone=lambda make, **kw: played([lambda: Endless(make())], **kw),
    late=lambda make, **kw: played([lambda: Late(make())]*3, **kw), mixed=lambda make, **kw: played([make]*2 + [lambda: Mixed(make(), make())], **kw),
    stale=lambda make, **kw: played([make]*3, answered=False, **kw))
SAID = dict(endless='has ended no episode', alone='no episode that is in memory has ended', late='actions may take effect one row later', mixed='do they come from another environment?', stale='priorities are alike')
ENVS = dict(cartpole=(lambda: gym.make('CartPole-v1'), {}), pendulum=(lambda: gym.make('Pendulum-v1'), {}), catch=(Catch, {}), acrobot=(lambda: gym.make('Acrobot-v1'), dict(n=6000)),
            pixels=(Sprites, dict(store=Frames(4), n=2000)))
CASES = [(env, chain) for env in ENVS for chain in CHAINS if (env, chain) != ('pixels', 'late')]   # no remark finds this

@pytest.mark.slow
@pytest.mark.parametrize('env, chain', CASES)
def test_each_fault_is_named_and_nothing_else(env, chain):
    make, kw = ENVS[env]
    replay = CHAINS[chain](make, **kw)
    remarks, page = replay.inside()['remarks'], replay.page().page
    told = ' '.join(replay.show()._supxlabel.get_text().split())
    if chain == 'healthy':
        assert remarks == [] and told.startswith('nothing unusual') and 'Nothing unusual' in page
        return
    remark, = [r for r in remarks if SAID[chain] in r]
    assert remarks == [remark] and remark.keys and replay.memory.valid(list(remark.keys)).all()
    assert f'! {remark[:40]}' in told and 'What is unusual' in page and f'data-key="{remark.keys[0]}"' in page
