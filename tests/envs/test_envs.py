"""GymStepper: true transitions from all environments; seeds, policies, errors, closing, saving."""

import pickle, warnings

import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from hypothesis import given, strategies as st

from fastrl_replay.all import *
from fastrl_replay.envs import catch  # noqa: F401 (the last two register games)
from fastrl_replay.envs.slots import as_mode
from fastrl_replay.testing import through_file
from strategies import cases
from scripted import (
    MODES,
    Nested,
    Remember,
    Witness,
    by_env,
    cartpole,
    chained,
    close,
    makers,
    same_streams,
    take,
    vector,
    well_counted,
    witnessed,
    zeros,
)


@pytest.fixture
def closing():
    "Register environments to be closed at the end"
    opened = []
    yield lambda x: opened.append(x) or x
    for x in opened:
        close(x)


# ---- the same true transitions from every source ----


def both(s, ends):
    "A script some of whose episodes end in a termination and a truncation at once"
    for i, done in enumerate(np.logical_or(s['terminations'], s['truncations'])):
        if done and next(ends):
            s['terminations'][i] = s['truncations'][i] = True
    return s


episode = st.integers(1, 5).flatmap(lambda n: st.sampled_from([n, -n]))
worlds = st.lists(st.lists(episode, min_size=1, max_size=4), min_size=1, max_size=4)

SOURCES = {
    'list': lambda s: [ScriptedEnv(**x) for x in s],
    'callables': makers,
    'copy=False': lambda s: vector(makers(s), 'NextStep', copy=False),
    'vector then single': lambda s: (
        [vector(makers(s[:-1]), 'SameStep'), ScriptedEnv(**s[-1])] if s[1:] else makers(s)
    ),
    'single then vector': lambda s: (
        [ScriptedEnv(**s[0]), [vector(makers(s[1:]), 'NextStep')]] if s[1:] else makers(s)
    ),
    'three kinds': lambda s: [vector(makers([x]), m) for x, m in zip(s, MODES * 2)],
    **{m: lambda s, m=m: vector(makers(s), m) for m in MODES},
}


@cases(10)
@given(worlds, st.lists(st.booleans(), min_size=16, max_size=16))
def test_random_scripts_give_the_oracles_rows_from_every_source(lengths, ends):
    "Any episode lengths, endings and kind of source give the rows of the script, in order"
    ends = iter(ends)
    scripts = [both(script(*l, env=e), ends) for e, l in enumerate(lengths)]
    truth = scripted_steps(scripts, 20)
    for name, make in SOURCES.items():
        assert same_streams(take(GymStepper(make(scripts), zeros), 41), truth, 20), name


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('how', [dict(shared_memory=False), dict(copy=False)], ids=str)
def test_processes_give_the_oracles_rows(mode, how, closing):
    "By pipes, and with shared memory that the environments write to later"
    scripts = [script(3, -2), script(1, 4, env=1), script(-6, env=2)]
    env = closing(vector(makers(scripts), mode, AsyncVectorEnv, **how))
    truth = scripted_steps(scripts, 20)
    assert same_streams(take(GymStepper(env, zeros), 41), truth, 20)


def nested_policy(k):
    "Actions that change from row to row, numbered by the first environment's step"

    def policy(state):
        t = state['deep'][0]
        return dict(
            go=(t + k) % 3 - 1,
            to=(torch.stack([t / 100, t % 4 / 4 - 0.5], 1), torch.stack([t % 2, (t + k) % 5], 1)),
        )

    return policy


@pytest.mark.parametrize('source', ['list', *MODES])
def test_nested_spaces_in_and_out(source):
    "Dict of Tuple of Dict, with scalars: true final observations, and the actions that arrived"
    fns = [lambda: Nested(1, 3, 2), lambda: Nested(2)]
    env = [f() for f in fns] if source == 'list' else vector(fns, source)
    for rows in by_env(take(GymStepper(env, nested_policy(2)), 60), 30):
        s, t, a = rows['state'], rows['next_state'], rows['action']
        for x, n in (s, rows['step_n'] - 1), (t, rows['step_n']):
            assert (x['at'][:, 0] == rows['episode_n']).all()
            assert (x['at'][:, 1] == n).all()
            assert (x['deep']['[0]'] == n).all()
        assert np.allclose(t['deep']['[1]']['z'], a['to']['[0]'][:, 1] + 10)
        assert (t['deep']['[1]']['bits'].argmax(-1) - 1 == a['go']).all()
        assert (rows['reward'] == a['to']['[1]'][:, 1]).all()
        assert well_counted(rows) is None
        assert (rows['terminated'] | rows['truncated']).sum() > 9


def bad_cartpole_rows(rows):
    "How many rows a fresh simulator disagrees with"
    sim, bad = gym.make('CartPole-v1').unwrapped, 0
    sim.reset(seed=0)
    for r in rows:
        sim.state, sim.steps_beyond_terminated = tuple(map(float, r['state'])), None
        landed, _, terminated, _, _ = sim.step(int(r['action']))
        bad += not (
            np.allclose(landed, r['next_state'], atol=1e-5)
            and terminated == r['terminated']
            and r['reward'] == 1
            and not r['truncated']
        )
    return bad


@pytest.mark.parametrize(
    'name', ['single', 'NextStep', 'Disabled']
)  # in SameStep gymnasium itself loses the final observation
def test_an_environment_may_overwrite_its_observation_and_its_action(name):
    "A reused observation array and `action *= 0` change neither rows nor the policy's tensor"

    def make():
        space = spaces.Box(-9, 9, (2,), np.float32)
        return Witness(3, 1, 2, in_place=True, rude=True, action_space=space)

    source = make() if name == 'single' else vector([make], name, copy=False)
    mine = torch.full((1, 2), 5.0)
    (rows,) = by_env(take(GymStepper(source, lambda s: mine), 30))
    assert mine.tolist() == [[5, 5]]
    assert witnessed(rows) == 0


@pytest.mark.parametrize('name', ['list', 'NextStep', 'copy=False'])
def test_blocks_share_no_memory(name):
    "Overwriting a block changes no later one"
    scripts = [script(3, -2), script(4, env=1)]
    got = []
    for b in take(GymStepper(SOURCES[name](scripts), zeros), 30):
        got.append(b.copy())
        b.rows.view(np.uint8)[:] = 255
    assert same_streams(got, scripted_steps(scripts, 12), 12)


class Liar(ScriptedEnv):
    "Its observations have another shape than its space says, from call number `after` on"

    after = 0

    def lie(self, s):
        return s[:1] if len(self.actions) >= self.after else s

    def reset(self, **kw):
        return self.lie(super().reset(**kw)[0]), {}

    def step(self, action):
        s, *rest = super().step(action)
        return (self.lie(s), *rest)


@pytest.mark.parametrize('after', [0, 1, 2])
def test_observations_of_another_shape_are_refused(after):
    "A shape that numpy would broadcast into the row is an error, at reset and at every step"
    env = Liar(**script(5))
    env.after = after
    # was: only the observation of a reset is checked; a step's [1] is broadcast into a row of [2]
    with pytest.raises(EnvError, match=r"got float32 \[1, 1\]; expected numbers \[1, 2\]"):
        take(GymStepper(env, zeros), 4)


# ---- how vector environments reset ----

SHORT = (
    script(1, -1),
    script(3, -2, 1, env=1),
    script(-6, 1, 1, env=2),
)  # episodes of one step, cut off on the last one


class Said(VectorWrapper):
    "A vector environment whose `info` is changed on the way"

    def __init__(self, env, change):
        super().__init__(env)
        self.change = change

    def step(self, actions):
        *out, info = self.env.step(actions)
        return *out, self.change(info, self)


def no_mask(info, env):
    return {k: v for k, v in info.items() if k != '_final_obs'}


def as_batch(info, env):
    "An array with zeros for those whose episodes go on"
    if 'final_obs' not in info:
        return info
    return dict(
        info, final_obs=np.stack([np.zeros(2) if o is None else o for o in info['final_obs']])
    )


FORMS = dict(
    no_mask=lambda env: Said(env, no_mask),
    as_batch=lambda env: Said(env, as_batch),
    gymnasium=RecordEpisodeStatistics,
)


@pytest.mark.parametrize('form', FORMS)
def test_same_step_finds_the_last_observation_in_every_form(form):
    "A batch, no mask: next_state of an ended row is the episode's end"
    env = FORMS[form](vector(makers(SHORT), 'SameStep'))
    assert same_streams(take(GymStepper(env, zeros), 41), scripted_steps(SHORT, 20), 20)
    more = script(2, env=3)
    mixed = [FORMS[form](vector(makers(SHORT), 'SameStep')), ScriptedEnv(**more)]
    truth = scripted_steps([*SHORT, more], 20)
    assert same_streams(take(GymStepper(mixed, zeros), 41), truth, 20)


def true_steps(rows):
    "Return whether rows of a Witness go from step to step of an episode, whatever its number"
    s, t, n = rows['state'], rows['next_state'], rows['step_n']
    return (s[:, 0] == t[:, 0]).all() and (s[:, 1] == n - 1).all() and (t[:, 1] == n).all()


def drop(info, env):
    return {k: v for k, v in info.items() if 'final' not in k}


def cut(info, env):
    if 'final_obs' in info:
        info['final_obs'][:] = [None if o is None else o[:1] for o in info['final_obs']]
    return info


@pytest.mark.parametrize(
    'lose, says',
    [
        (drop, 'step 2; .*environment 2 ended without its last observation.*Remedy'),
        (cut, r'got float32 \[1, 1\]; expected numbers \[1, 3\]'),
    ],
)
def test_an_end_without_its_last_observation_is_refused(lose, says):
    "The error names the environment, the episode and the step; the next pass gives no false row"
    env = vector([lambda: Witness(9), lambda: Witness(2)], 'SameStep')
    pipe = GymStepper([Witness(9), Said(env, lose)], zeros)
    blocks = []
    with pytest.raises(EnvError, match=says):
        for block in pipe:
            blocks.append(block)
    with pytest.raises(EnvError):
        for block in pipe:
            blocks.append(block)
    streams = by_env(blocks)
    assert all(map(true_steps, streams))
    assert streams[0]['step_n'].tolist() == [1, 1]
    assert streams[1]['episode_n'].tolist() == [1, 2]


def silent(env):
    env = VectorWrapper(env)
    env.metadata = {k: v for k, v in env.metadata.items() if k != 'autoreset_mode'}
    return env


def _silent_vector(mode):
    return silent(vector(makers(SHORT), mode))


@pytest.mark.parametrize(
    'mode, name',
    [('NextStep', 'next_step'), ('SameStep', AutoresetMode.SAME_STEP), ('Disabled', 'Disabled')],
)
def test_a_mode_can_be_given(mode, name):
    "By gymnasium's name, its object, or as a word; without a warning"
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for env in vector(makers(SHORT), mode), _silent_vector(mode):
            pipe = GymStepper(env, zeros, autoreset_mode=name)
            assert same_streams(take(pipe, 41), scripted_steps(SHORT, 20), 20)


def test_a_vector_that_does_not_say_how_it_resets_is_refused():
    with pytest.raises(ArgumentError, match="autoreset_mode of environment 0.*'next_step'"):
        take(GymStepper(_silent_vector('NextStep'), zeros), 1)


def test_vectors_of_an_older_gymnasium_are_refused(monkeypatch):
    "At once if the vector is given, or when it is made; single environments are stepped"
    vec = vector(makers(SHORT), 'NextStep')
    monkeypatch.delattr(gym.vector, 'AutoresetMode')
    says = 'vector environments.*expected 1.1 or later.*add_step'
    with pytest.raises(EnvError, match=says):
        GymStepper(vec)
    with pytest.raises(EnvError, match=says):
        take(GymStepper([lambda: vec]), 1)
    assert len(take(GymStepper(makers(SHORT), zeros), 9)) == 9


def test_a_step_after_an_end_that_ends_again_was_no_reset():
    class Ends(SyncVectorEnv):
        def step(self, actions):
            obs, reward, _, truncated, info = super().step(actions)
            return obs, reward, np.ones(3, bool), truncated, info

    with pytest.raises(EnvError, match='the step after an episode was not a reset.*Remedy'):
        take(GymStepper(vector(makers(SHORT), 'NextStep', Ends), zeros), 9)


def test_a_last_observation_in_another_mode_is_a_contradiction():
    env = silent(vector(makers([script(3), script(5)]), 'SameStep'))
    says = "environment 0 ended with its last observation.*autoreset_mode='same_step'"
    with pytest.raises(EnvError, match=says):
        take(GymStepper(env, zeros, autoreset_mode='next_step'), 20)


def test_the_given_mode_and_the_metadata_must_agree():
    "An ArgumentError before anything is stepped"
    env = vector(makers(SHORT), 'SameStep')
    source = [ScriptedEnv(**SHORT[0]), env]
    says = 'autoreset_mode of environment 1 .*; got next_step and.*same_step'
    with pytest.raises(ArgumentError, match=says):
        take(GymStepper(source, zeros, autoreset_mode='next_step'), 1)
    assert [e.seeds for e in env.envs] == [[], [], []]
    with pytest.raises(ArgumentError, match="autoreset_mode; got 'samestep'; .* did you mean"):
        take(GymStepper(env, autoreset_mode='samestep'), 1)


# ---- rewards of single environments ----


class Answers(ScriptedEnv):
    "Step number `at` (or the reset, 0) has another observation, reward or flag than the script"

    def other(self, i, x):
        return self.form(x) if (i, len(self.actions)) == (self.place, self.at) else x

    def reset(self, **kw):
        return self.other(0, super().reset(**kw)[0]), {}

    def step(self, action):
        *four, info = super().step(action)
        return *(self.other(i, x) for i, x in enumerate(four)), info


def answers(place, form, at=2):
    env = Answers(**script(5))
    env.place, env.form, env.at = place, form, at
    return env


@pytest.mark.parametrize(
    'place, form',
    [
        (1, lambda r: np.array([r])),
        (1, lambda r: torch.tensor([[r]])),
        (2, lambda flag: np.array([flag])),
        (3, int),
        (3, torch.tensor),
    ],
    ids=['reward array', 'reward tensor', 'flag array', 'flag int', 'flag tensor'],
)
def test_an_array_of_one_is_a_number(place, form):
    assert take(GymStepper(answers(place, form), zeros), 12) == scripted_steps([script(5)], 12)


NO_NUMBERS = dict(  # which of the four answers, what it is instead, what the error says
    none=(1, lambda r: None, r'reward .*; got object \[1\]; expected numbers'),
    text=(1, str, r'reward .*; got <U\d+ \[1\]; expected numbers'),
    two=(1, lambda r: np.array([r, r]), r'reward .*; got float64 \[2\]; expected numbers \[1\]'),
    no=(2, lambda t: 'no', r'terminated .*; got <U2 \[1\]; expected numbers'),
    nones=(0, lambda s: [0, None], r'observation.*; got object \[1, 2\]; expected numbers'),
)


@pytest.mark.parametrize('name', NO_NUMBERS)
def test_answers_that_are_no_numbers_are_refused(name):
    "None is not NaN, '1' is not 1, and no text is True"
    place, form, says = NO_NUMBERS[name]
    where = 'environment 1 failed in episode 1, step 2'
    with pytest.raises(EnvError, match=f'{where}; got .*{says}.*'):
        take(GymStepper([ScriptedEnv(**script(5)), answers(place, form)], zeros), 5)


# ---- seeds ----


@pytest.mark.parametrize('seed', [7, np.int64(0), None])
def test_environment_i_gets_seed_plus_i_once(seed):
    "At its first reset; later resets and later passes get none"
    first, *others = [script(2, -1, env=e) for e in range(4)]
    envs = vector(makers(others), 'Disabled')
    alone = ScriptedEnv(**first)
    pipe = GymStepper([alone, envs], zeros, seed=seed)
    for _ in range(2):
        take(pipe, 6)
    for i, env in enumerate([alone, *envs.envs]):
        assert env.seeds[0] == (None if seed is None else seed + i)
        assert {*env.seeds[1:]} == {None}


def test_action_spaces_are_seeded_like_their_environments():
    "Without a policy, environment i acts as a space seeded with seed + i; its own stays untouched"
    scripts = [script(2, -1, env=e) for e in range(3)]
    envs = [ScriptedEnv(**s) for s in scripts]
    for e in envs:
        e.action_space.seed(99)
    for source in envs, vector(makers(scripts), 'NextStep'):
        for i, rows in enumerate(by_env(take(GymStepper(source, seed=7), 40), 20)):
            space = spaces.Discrete(3, seed=7 + i)
            assert rows['action'].tolist() == [space.sample() for _ in range(20)]
    twin = spaces.Discrete(3, seed=99)
    assert [e.action_space.sample() for e in envs] == [twin.sample()] * 3


# ---- policies ----


def recurrent(f):
    class P:
        def initial_hidden(self, n):
            return torch.zeros(n)

        def __call__(self, state, h):
            return f(state, h)

    return P()


ANSWERS = {
    'tuple': lambda s: (1, 0, 2),
    'list of tensors': lambda s: [torch.tensor(1), torch.tensor(0), np.int64(2)],
    'uint8 array': lambda s: np.array([1, 0, 2], np.uint8),
    'strided array': lambda s: np.array([1, 9, 0, 9, 2, 9])[::2],
    'int32 tensor': lambda s: torch.tensor([1, 0, 2], dtype=torch.int32),
    'dict with columns': lambda s: dict(action=np.array([1, 0, 2]), v=s[:, 0]),
    'recurrent dict': recurrent(lambda s, h: dict(action=[1, 0, 2], hidden=h)),
    'recurrent with columns': recurrent(lambda s, h: dict(action=[1, 0, 2], hidden=h, v=s[:, 0])),
}


@pytest.mark.parametrize('name', ANSWERS)
def test_policies_may_answer_in_many_ways(name):
    "Tensors, arrays, lists, dicts: the row has the action that the environment heard"
    first, *others = [script(9, env=e) for e in range(3)]
    envs = vector(makers(others), 'NextStep')
    alone = ScriptedEnv(**first)
    block = take(GymStepper([alone, envs], ANSWERS[name]), 2)[1]
    assert block.action.tolist() == [1, 0, 2]
    assert block.action.dtype == torch.int64
    assert [[int(a) for a in e.actions] for e in (alone, *envs.envs)] == [[1] * 2, [0] * 2, [2] * 2]
    if 'columns' in name:
        assert block.v.tolist() == block.state[:, 0].tolist()


@pytest.mark.parametrize('answer', [2, [2], torch.tensor(2)], ids=repr)
@pytest.mark.parametrize('mode', [None, 'NextStep'])
def test_a_single_environment_takes_a_bare_action(answer, mode):
    "With one environment the leading 1 may be left out"
    (fn,) = makers([script(9)])
    source = vector([fn], mode) if mode else fn()
    assert take(GymStepper(source, lambda s: answer), 3)[2].action.tolist() == [2]


SPACES = [  # space, answer for two environments, what the rows say
    (spaces.Discrete(3, start=-1), torch.tensor([-1, 1]), [-1, 1]),
    (
        spaces.Box(-1, 1, (2,), np.float32),
        torch.tensor([[0.5, -1], [1, 0.25]], dtype=torch.float64, requires_grad=True),
        [[0.5, -1], [1, 0.25]],
    ),
    (spaces.MultiDiscrete([2, 3], start=[4, -3]), [[5, -1], [4, -3]], [[5, -1], [4, -3]]),
    (spaces.MultiBinary(2), torch.tensor([[True, False], [False, True]]), [[1, 0], [0, 1]]),
    (spaces.MultiDiscrete([2, 3], dtype=np.uint8), [[1, 2], [0, 1]], [[1, 2], [0, 1]]),
]


@pytest.mark.parametrize('space, answer, want', SPACES)
def test_actions_of_every_space(space, answer, want):
    "Whatever lies in the space is taken, by single environments and by vectors"
    fns = [lambda: ScriptedEnv(**script(9), action_space=space)] * 2
    for source in [f() for f in fns], vector(fns, 'SameStep'):
        assert take(GymStepper(source, lambda s: answer), 2)[1].action.tolist() == want


two, box = spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32)


WRONG = [  # space, answer, what the error says
    (two, [0], r'action; got int64 \[1\]: \[0\]; expected MultiDiscrete'),
    (two, torch.zeros(2, 1, dtype=torch.int64), r'got int64 \[2, 1\]'),
    (two, [0.0, 1.0], r'action; got float64 \[2\]'),
    (two, [0, 2], r'action; got int64 \[2\]: \[0 2\]'),
    (two, None, 'action'),
    (spaces.Discrete(2, start=3), [3, 2], r'\[3 2\]'),
    (box, [[0, np.nan], [0, 0]], 'nan'),
    (spaces.Dict(a=two), dict(b=[0, 1]), r"the parts \['a'\]"),
    (spaces.Tuple([two, box]), ([0, 1], [[0, 0], [2, 0]]), r'action\[1\]; got'),
    (spaces.MultiDiscrete([2, 3], dtype=np.uint8), [[1, 1], [257, 2]], '257'),
]


@pytest.mark.parametrize('space, answer, says', WRONG)
def test_wrong_actions_are_named_before_any_environment_is_stepped(space, answer, says):
    "Shape, kind of number, place: an ActionError says which, and no environment has moved"
    fns = [lambda: ScriptedEnv(**script(9), action_space=space)] * 2
    for source in [f() for f in fns], vector(fns, 'NextStep'):
        with pytest.raises(ActionError, match=says):
            take(GymStepper(source, lambda s: answer), 1)
        assert [e.actions for e in getattr(source, 'envs', source)] == [[], []]


ULP = 2.0**-23


NEARLY = [  # space, answer, what the row says; None: refused
    (spaces.Box(-1, 1, (1,)), [[1 + 2 * ULP]], 1),
    (spaces.Box(-1, 1, (1,)), [[1.0001]], None),
    (spaces.Box(0, 8, (1,)), [[-1e-6]], 0),
    (spaces.Box(0, np.inf, (1,)), [[-1e-12]], 0),
    (spaces.Box(-np.inf, np.inf, (1,)), [[np.nan]], None),
    (spaces.Box(-0.1, 0.1, (1,), np.float64), torch.tensor([[0.1]]), 0.1),
    (spaces.Box(0, 8, (1,), np.int64), [[9]], None),
]


@pytest.mark.parametrize('space, answer, want', NEARLY)
def test_a_rounding_error_beyond_a_bound_is_the_bound(space, answer, want):
    "By a millionth of the width of the space; never whole numbers"
    env = ScriptedEnv(**script(9), action_space=space)
    pipe = GymStepper(env, lambda s: answer)
    if want is None:
        with pytest.raises(ActionError, match='clip it in the policy'):
            take(pipe, 1)
    else:
        assert take(pipe, 1)[0].action.item() == want
        assert space.contains(np.asarray(env.actions[0]))


def test_after_a_wrong_action_the_stream_goes_on_unharmed():
    "A refused answer is as if the policy had not been asked"
    bad = iter([False, False, True, True] + [False] * 99)

    class P(Remember):
        def __call__(self, s, h):
            a, h = super().__call__(s, h)
            return (a + 9 * next(bad), h)

    scripts, blocks = [script(3, -2), script(4, env=1)], []
    pipe = GymStepper(vector(makers(scripts), 'NextStep'), P())
    for _ in range(3):
        try:
            for b in pipe:
                blocks.append(b)
                if len(blocks) == 30:
                    break
        except ActionError:
            pass
    for rows, truth in zip(by_env(blocks, 15), by_env(scripted_steps(scripts, 15))):
        assert well_counted(rows) is None and np.array_equal(
            rows['next_state'], truth['next_state']
        )
        # was: the hidden state of the refused answer is kept, so the policy counted two calls more
        assert (rows['hidden']['[0]'] == rows['step_n'] - 1).all()


class Net(torch.nn.Module):
    "A network that notes whether gradients were on"

    def __init__(self):
        super().__init__()
        self.l, self.grads = torch.nn.Linear(2, 3), []

    def forward(self, state):
        self.grads.append(torch.is_grad_enabled())
        return self.l(state).argmax(1)


def test_a_network_acts_without_gradients():
    "no_grad while the policy acts, and as before afterwards, also after an error and in the loop"
    net = Net()
    pipe = GymStepper(makers([script(3)]) * 2, net)
    for _, b in zip(range(3), pipe):
        assert torch.is_grad_enabled() and not b.action.requires_grad
    assert net.grads == [False] * 3
    with pytest.raises(ZeroDivisionError):
        take(GymStepper(makers([script(3)]), lambda s: 1 / 0), 1)
    assert torch.is_grad_enabled()


def test_extra_columns_keep_type_and_nesting():
    def policy(s):
        few = np.arange(len(s), dtype=np.int16)
        nest = dict(a=(s[:, 1] > 3, few))
        return dict(action=zeros(s), v=s[:, 0].double(), nest=nest)

    for source in 'SameStep', 'single then vector':
        made = SOURCES[source]([script(4, -2, env=e) for e in range(3)])
        block = take(GymStepper(made, policy), 4)[3]
        assert block.v.dtype == torch.float64
        assert block.v.tolist() == block.state[:, 0].tolist()
        flags, few = block.nest['a']
        assert flags.tolist() == (block.state[:, 1] > 3).tolist()
        assert few.dtype == torch.int16
        assert few.tolist() == [0, 1, 2]


def varying(*columns):
    "A policy whose extra columns change from call to call"
    calls = iter(columns)

    def policy(s):
        c = next(calls)
        return dict(action=zeros(s), **{k: f(s) for k, f in (c or {}).items()})

    return policy


one, wide = dict(v=lambda s: s[:, 0]), dict(v=lambda s: s)


CHANGES = {'wider': (one, wide), 'gone': (one, None), 'new': (None, one)}


@pytest.mark.parametrize('name', CHANGES)
@pytest.mark.parametrize('source', ['list', 'SameStep'])
def test_columns_must_stay_as_they_were(name, source):
    with pytest.raises(ActionError, match="extra columns"):
        take(GymStepper(SOURCES[source]([script(9)] * 2), varying(*CHANGES[name])), 2)


@pytest.mark.parametrize(
    'columns, says',
    [
        (dict(v=lambda s: torch.ones(3)), r'got float32 \[3\]; expected numbers \[2\]'),
        (dict(reward=lambda s: s[:, 0]), "reward"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns, says):
    with pytest.raises(ValueError, match=says):
        take(GymStepper(makers([script(9)]) * 2, varying(columns)), 1)


# ---- policies with a memory ----

RECURRENT = ['list', *MODES, 'three kinds', 'copy=False']


@pytest.mark.parametrize('source', RECURRENT)
def test_hidden_is_the_state_before_the_step_and_begins_with_the_episode(source):
    "Counting calls and summing states: hidden restarts for each environment, also if all end"
    scripts = [
        script(3, -2, env=0),
        script(1, 4, -1, env=1),
        script(-1, 1, env=2),
        script(3, env=3),
    ]
    for rows in by_env(take(GymStepper(SOURCES[source](scripts), Remember()), 61), 30):
        calls, saw, want = rows['hidden']['[0]'], rows['hidden']['[1]']['saw'][:, 0], 0.0
        assert calls.tolist() == (rows['step_n'] - 1).tolist()
        for r, got in zip(rows, saw):
            want = 0.0 if r['step_n'] == 1 else want
            assert got == want
            want += r['state'][0]


class InPlace(Remember):
    "Changes the hidden state it is given instead of making another"

    def initial_hidden(self, n):
        return torch.ones(n)

    def __call__(self, s, h):
        h.mul_(2)
        return zeros(s), h


class Arrays(Remember):
    "Remembers in numpy"

    def initial_hidden(self, n):
        return np.ones((n, 1), np.float32)

    def __call__(self, s, h):
        return zeros(s), np.asarray(h) * 2


@pytest.mark.parametrize('policy', [InPlace(), Arrays()])
def test_hidden_states_that_are_changed_in_place_or_are_arrays(policy):
    "2^(step-1) on every row"
    source = SOURCES['NextStep']([script(3, -2), script(4, env=1)])
    for rows in by_env(take(GymStepper(source, policy), 21), 10):
        assert np.allclose(rows['hidden'].ravel(), 2.0 ** (rows['step_n'] - 1))


# ---- errors inside environments ----


class Fragile(ScriptedEnv):
    "Fails at its `at`-th step or reset, once"

    at, call, error = 3, 'step', OSError('a wheel came off')

    def __init__(self, **kw):
        super().__init__(**kw)
        self.n = dict(step=0, reset=0)

    def _count(self, call):
        self.n[call] += 1
        if call == self.call and self.n[call] == self.at:
            raise self.error

    def step(self, action):
        self._count('step')
        return super().step(action)

    def reset(self, **kw):
        self._count('reset')
        return super().reset(**kw)


def fragile(*lengths, env=0, **kw):
    e = Fragile(**script(*lengths, env=env))
    vars(e).update(kw)
    return e


FAILURES = {  # source, what the message says
    'step': (
        lambda: [ScriptedEnv(**script(9)), fragile(2, 5, at=5)],
        'environment 1 failed in episode 2, step 3; got OSError: a wheel came off',
    ),
    'StopIteration': (
        lambda: fragile(5, error=StopIteration('x')),
        'environment 0 failed in episode 1, step 3; got StopIteration',
    ),
    'reset': (
        lambda: [ScriptedEnv(**script(9)), fragile(3, 5, call='reset', at=2)],
        'environment 1 could not be reset.*episode 2',
    ),
    'vector in a list': (
        lambda: [
            ScriptedEnv(**script(9)),
            vector([makers([script(2)])[0], lambda: fragile(3, 4, at=5)], 'SameStep'),
        ],
        r'environment 1 failed in episode \d, step \d or environment 2 failed in episode 2, step 2',
    ),
}


@pytest.mark.parametrize('name', FAILURES)
def test_failures_name_environment_episode_and_step(name):
    make, says = FAILURES[name]
    with pytest.raises(EnvError, match=says) as e:
        take(GymStepper(make(), zeros), 12)
    assert e.value.__cause__ is not None


class Late(Witness):
    "Is stopped at its 4th step, before it has stepped or after"

    calls, error, first = 0, OSError('in a step'), False

    def step(self, action):
        self.calls += 1
        if self.calls == 4 and self.first:
            raise self.error
        out = super().step(action)
        if self.calls == 4:
            raise self.error
        return out


def late(**how):
    env = Late(9)
    vars(env).update(how)
    return env


def unbroken(rows):
    "Within an episode, is no step missing?"
    inside = ~(rows['terminated'] | rows['truncated'])[:-1] & (
        rows['episode_n'][1:] == rows['episode_n'][:-1]
    )
    first = np.append(True, rows['episode_n'][1:] != rows['episode_n'][:-1])
    return (np.diff(rows['step_n'])[inside] == 1).all() and (rows['step_n'][first] == 1).all()


def after_failures(pipe, n):
    "The blocks of a pipe that is started again after each failure"
    blocks = []
    while len(blocks) < n:
        try:
            for b in pipe:
                blocks.append(b)
                if len(blocks) == n:
                    break
        except (EnvError, KeyboardInterrupt):
            pass
    return blocks


@pytest.mark.parametrize('error', [OSError('in a step'), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize('first', [True, False], ids=['before', 'after'])
@pytest.mark.parametrize('source', ['list', *MODES, 'vector between'])
def test_after_a_failure_or_an_interrupt_rows_are_true(source, first, error):
    "The environments may have been stepped, so all begin new episodes, with new hidden states"
    fns = [lambda: Witness(3, 1), lambda: late(error=error, first=first), lambda: Witness(2, 5)]
    if source == 'list':
        made = [f() for f in fns]
    elif source in MODES:
        made = vector(fns, source)
    else:
        made = [Witness(4), vector(fns[:2], 'NextStep'), Witness(1, 2)]
    streams = by_env(after_failures(GymStepper(made, Remember()), 14))
    for rows in streams:
        assert true_steps(rows)
        assert unbroken(rows)
        assert len(rows) > 5
        assert (rows['hidden']['[0]'] == rows['step_n'] - 1).all()


def test_processes_that_were_interrupted_are_refused(closing):
    "Their answers are those to the call before"

    class Cut(AsyncVectorEnv):
        calls = 0

        def step_wait(self, *args):
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().step_wait(*args)

    env = Cut([lambda: Witness(3, 1), lambda: Witness(2, 4)], autoreset_mode='NextStep')
    pipe = GymStepper(env, Remember())
    with pytest.raises(KeyboardInterrupt):
        take(pipe, 9)
    for _ in range(2):
        with pytest.raises(EnvError, match='could not be reset.*AlreadyPendingCallError'):
            take(pipe, 1)
    env.close(terminate=True)


def test_a_stepper_can_be_saved_after_a_failure():
    "It begins new episodes, where it is restored, too"
    make = lambda late: GymStepper([ScriptedEnv(**script(4, -3)), late], zeros, seed=0)
    a, b, blocks = make(fragile(9, env=1)), make(ScriptedEnv(**script(9, env=1))), []
    with pytest.raises(EnvError):
        for block, _ in zip(a, range(20)):
            blocks.append(block)
    b.load_state_dict(through_file(a.state_dict()))
    assert all(map(unbroken, by_env(blocks + take(b, 9))))


@pytest.mark.parametrize(
    'source, kind, says',
    [
        ([], ValueError, 'an empty list'),
        ([[]], ValueError, 'empty'),
        (['CartPole-v1', 5], TypeError, 'an environment id'),
        (lambda: None, TypeError, 'an environment id'),
        ('NoSuchThing-v0', Exception, 'NoSuchThing'),
        (['CartPole-v1', 'Acrobot-v1'], ValueError, 'observation_space of environment 1'),
        (Items(['CartPole-v1']), TypeError, 'make environments first'),
    ],
)
def test_wrong_sources_are_named(source, kind, says):
    with pytest.raises(kind, match=says):
        take(GymStepper(source), 1)


def test_an_environment_is_not_stepped_in_two_places():
    "The same object twice, also within a nested list; two equal vectors are fine"
    env = ScriptedEnv(**script(3))
    with pytest.raises(ValueError, match='source contains the same environment object twice'):
        take(GymStepper([env, [env]]), 1)
    assert (
        len(
            take(GymStepper([vector(makers([script(3)]), 'NextStep') for _ in range(2)], zeros), 1)[
                0
            ]
        )
        == 2
    )


# ---- closing ----


class Closing(ScriptedEnv):
    "Counts how often it was closed; step and close can be made to fail"

    made, bad_close, bad_step = [], False, False

    def __init__(self, **kw):
        super().__init__(**kw)
        self.closed = 0
        Closing.made.append(self)

    def step(self, action):
        if self.closed or self.bad_step:
            raise RuntimeError('stepped when closed')
        return super().step(action)

    def close(self):
        self.closed += 1
        if self.bad_close:
            raise OSError('cannot close')


@pytest.fixture
def closers():
    Closing.made = []
    return lambda **kw: lambda: vars(e := Closing(**script(3, -2))).update(kw) or e


def test_close_closes_what_was_opened_and_only_that(closers):
    "Once each, also when called twice, before use, and after an error in an environment"
    given, fn, bad = closers()(), closers(), closers(bad_step=True)
    pipe = GymStepper([fn, given, fn], zeros)
    pipe.close()
    take(pipe, 3)
    pipe.close()
    pipe.close()
    assert [e.closed for e in Closing.made] == [0, 1, 1]
    pipe = GymStepper([fn, bad], zeros)
    with pytest.raises(EnvError):
        take(pipe, 1)
    pipe.close()
    assert [e.closed for e in Closing.made] == [0, 1, 1, 1, 1]


def test_environments_are_closed_where_opening_all_fails(closers):
    "The first of a list was opened before the second could not be"
    pipe = GymStepper([closers(), 'NoSuchThing-v0'])
    for _ in range(2):
        with pytest.raises(gym.error.Error):
            take(pipe, 1)
    pipe.close()
    # was: what `open_envs` had opened when it failed is forgotten, so it is never closed
    assert len(Closing.made) >= 1 and all(e.closed == 1 for e in Closing.made)


def test_one_that_cannot_be_closed_does_not_keep_the_others_open(closers):
    "All are closed once, and the error is told"
    pipe = GymStepper([closers(bad_close=True), closers()], zeros)
    take(pipe, 1)
    with pytest.raises(OSError, match='cannot close'):
        pipe.close()
    pipe.close()
    # was: the loop in `close` stops at the first error, and the second call begins at the same one
    assert [e.closed for e in Closing.made] == [1, 1]


def test_use_after_close_begins_anew(closers):
    "The next pass opens new environments with the old seeds"
    pipe = GymStepper([closers()] * 2, seed=4)
    a = take(pipe, 7)
    pipe.close()
    assert take(pipe, 7) == a and len(Closing.made) == 4
    assert [e.seeds[0] for e in Closing.made] == [4, 5, 4, 5]


# ---- passes, pipes, pickles, workers ----


def test_a_second_pass_goes_on():
    "Broken-off passes add up to one stream"
    scripts = [script(3, -2), script(1, 4, env=1)]
    for name in 'list', 'SameStep':
        pipe = GymStepper(SOURCES[name](scripts), zeros)
        assert sum((take(pipe, n) for n in (1, 5, 2, 12)), []) == scripted_steps(scripts, 20)


def test_a_pipe_of_environments_steps_each_item_once():
    "Singles and vectors flow; each is recognized when it recurs, and numbered by appearance"
    s = [script(3, -2, env=e) for e in range(4)]
    envs = [ScriptedEnv(**s[0]), vector(makers(s[1:3]), 'SameStep'), ScriptedEnv(**s[3])]
    blocks = take(Items(envs).cycle().gym_step(policy=zeros), 30)
    assert [b.env_id.tolist() for b in blocks[:4]] == [[0], [1, 2], [3], [0]]
    assert same_streams(blocks, scripted_steps(s, 10), 10)
    assert len(take(Items(envs).gym_step(policy=zeros), 30)) == 3


def test_a_pickle_of_a_restored_pipe_keeps_its_place():
    "Pickled after load_state_dict (as for a spawned worker), it continues and does not restart"
    a, b = (GymStepper('CartPole-v1', seed=0) for _ in range(2))
    take(a, 5)
    b.load_state_dict(a.state_dict())
    # was: `__setstate__` calls `_fresh`, which throws away the state that was loaded
    assert take(pickle.loads(pickle.dumps(b)), 3) == take(a, 3)


# ---- saving and restoring ----

SAVED = {
    'FrozenLake': lambda: ['FrozenLake-v1'] * 2,
    **{mode: (lambda mode=mode: vector([cartpole] * 2, mode)) for mode in MODES},
    'mix': lambda: ['CartPole-v1', vector([cartpole] * 2, 'SameStep')],
    'scripted': lambda: vector(makers([script(3, -2), script(1, env=1)]), 'NextStep'),
}


class Lean(Remember):
    "Acts at random, but the same in every copy; for any space and nested states"

    def __init__(self, space):
        self.space = space

    def __call__(self, state, hidden):
        _, hidden = super().__call__(state, hidden)
        self.space.seed(int(hidden[0].sum()))
        return np.stack([self.space.sample() for _ in range(len(hidden[0]))]), hidden


@pytest.mark.parametrize('name', SAVED)
def test_a_saved_stepper_continues_exactly(name):
    "In mid-episode, with a recurrent policy; a state saved again before use is the same"

    def make():
        return GymStepper(SAVED[name](), Lean(spaces.Discrete(2)), seed=5)

    a = make()
    for k in 5, 12:
        take(a, k)
        b, c = make(), make()
        b.load_state_dict(through_file(a.state_dict()))
        c.load_state_dict(through_file(b.state_dict()))
        want = take(a, 40)
        assert take(b, 40) == want
        assert take(c, 40) == want


def test_a_state_is_a_copy():
    "Going on changes no state that was taken before, not even where a policy works in place"
    scripts = [script(3, -2), script(4, env=1)]
    make = lambda: GymStepper([ScriptedEnv(**s) for s in scripts], InPlaceAction(), seed=0)
    a, b = make(), make()
    take(a, 2)
    state = a.state_dict()
    want = take(a, 6)
    b.load_state_dict(state)
    # was: `encode` passes tensors on, so a hidden state changed in place changes the checkpoint
    assert [x.action.tolist() for x in take(b, 6)] == [x.action.tolist() for x in want]


class InPlaceAction(InPlace):
    "Acts by its hidden state, which it changes in place"

    def __call__(self, s, h):
        h.add_(1)
        return h.long() % 3, h


class Handle(gym.Wrapper):
    "Holds something that no checkpoint can hold"

    def __init__(self, env):
        super().__init__(env)
        self.handle = object()


OPAQUE = {
    'list': lambda: [lambda: Handle(cartpole())] * 2,
    **{m: lambda m=m: vector([lambda: Handle(cartpole())] * 2, m) for m in MODES},
    'Async': lambda: vector([cartpole] * 2, 'NextStep', AsyncVectorEnv),
    'mix': lambda: [lambda: Handle(cartpole()), vector([cartpole] * 2, 'NextStep')],
}


@pytest.mark.parametrize('name', OPAQUE)
@pytest.mark.parametrize('k', [9, 25])
def test_what_cannot_be_saved_begins_its_next_episode(name, k, closing):
    "Counters and hidden states restart, rows are true, a second restore is equal, one warning"

    def make():
        return GymStepper(closing(OPAQUE[name]()), Lean(spaces.Discrete(2)), seed=5)

    a, b, c = make(), make(), make()
    before = by_env(take(a, k))
    state = through_file(a.state_dict())
    says = '1 of 2' if name == 'mix' else '2 of 2' if name == 'list' else '1 of 1'
    for pipe in b, c:
        with pytest.warns(UserWarning) as seen:
            pipe.load_state_dict(state)
        assert len(seen) == 1
        assert f'{says} environments could not be saved' in str(seen[0].message)
    after = take(b, 40)
    assert take(c, 40) == after
    for i, (old, new) in enumerate(zip(before, by_env(after))):
        assert bad_cartpole_rows(new) == 0
        assert (new['hidden']['[0]'] == new['step_n'] - 1).all()
        if name == 'mix' and i > 0:  # these were saved
            assert well_counted(np.concatenate([old, new])) is None
            continue
        assert not any(np.allclose(new['state'][0], s) for s in old['state'])
        assert new['episode_n'][0] == old['episode_n'][-1] + 1
        new['episode_n'] -= old['episode_n'][-1]
        assert well_counted(new) is None


class Counting(gym.Env):
    "Counts; the subclasses keep their count where a checkpoint could overlook it"

    observation_space, action_space = spaces.Box(-99, 99, (1,), np.float32), spaces.Discrete(2)

    def start(self):
        self.x = np.zeros(1, np.float32)

    def count(self):
        self.x = self.x + 1
        return self.x.copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return self.count(), 1.0, False, False, {}


class Alias(Counting):
    def start(self):
        self.x = np.zeros(1, np.float32)
        self.view = self.x[:]

    def count(self):
        self.x += 1
        return self.view.copy()


class Carried(Counting):
    def start(self):
        box = [0.0]

        def count():
            box[0] += 1
            return np.full(1, box[0], np.float32)

        self.noise = count

    def count(self):
        return self.noise()


@pytest.mark.parametrize('kind', [Counting, Alias, Carried])
@pytest.mark.filterwarnings('ignore:.*begin new episodes', 'ignore:.*begins a new episode')
def test_an_environment_continues_exactly_or_begins_anew(kind):
    "There is no third way: a restored environment is the saved one, or a new episode has begun"
    a, b = GymStepper(kind(), seed=0), GymStepper(kind(), seed=0)
    take(a, 3)
    b.load_state_dict(through_file(a.state_dict()))
    take(a, 2)  # the saved one continues, which does not concern the restored one
    names = 'episode_n', 'step_n', 'state', 'next_state'
    got = [tuple(row[name].item() for name in names) for row in take(b, 3)]
    exactly = [(1, 4, 3, 4), (1, 5, 4, 5), (1, 6, 5, 6)]
    anew = [(2, 1, 0, 1), (2, 2, 1, 2), (2, 3, 2, 3)]
    assert got in (exactly, anew)


@pytest.mark.parametrize(
    'loaded, says',
    [
        (['CartPole-v1'] * 2, 'the saved environments are different; got'),
        (['Acrobot-v1'] * 3, 'environment'),
        (lambda: gym.make_vec('CartPole-v1', 3), 'environment'),
    ],
    ids=['fewer', 'others', 'vector'],
)
def test_a_state_of_other_environments_is_refused(loaded, says):
    a, b = GymStepper(['CartPole-v1'] * 3, seed=0), GymStepper(loaded, seed=0)
    take(a, 4)
    with pytest.raises((ValueError, RuntimeError), match=f'GymStepper.*{says}'):
        b.load_state_dict(a.state_dict())
        take(b, 1)


def test_a_state_of_another_mode_is_refused():
    "At an end, environments of two modes stand at different places"
    for mode, other in zip(MODES, MODES[1:] + MODES[:1]):
        a, b = (GymStepper(vector(makers(SHORT), m), zeros) for m in (mode, other))
        take(a, 3)
        b.load_state_dict(a.state_dict())
        with pytest.raises(
            StateError,
            match=f'the saved environments are different; got.*{as_mode(mode)}.*{as_mode(other)}',
        ):
            take(b, 1)


def test_a_pipe_of_environments_can_be_saved_twice():
    "Restored, advanced by one item, saved again: environments still to come keep their place"

    def make():
        return Items(range(3)).map(_scripted).in_memory_cache().gym_step(policy=zeros)

    a, b, c = make(), make(), make()
    list(a)
    take(a, 1)  # the second pass stands after its first environment
    b.load_state_dict(a.state_dict())
    take(b, 1)
    c.load_state_dict(b.state_dict())
    # was: `snapshot` saves only the groups that were needed since `load_state_dict`
    assert [(s.env_id.item(), s.step_n.item()) for s in c] == [(2, 2)]


def _scripted(i):
    return ScriptedEnv(**script(9, env=i))


@pytest.mark.parametrize('name', ['list', *MODES])
def test_time_limit_is_a_truncation_with_its_true_next_state(name):
    "Pendulum's TimeLimit truncates after 200 steps, and next_state obeys the physics"
    fn = lambda: gym.make('Pendulum-v1')
    blocks = take(GymStepper([fn] * 2 if name == 'list' else vector([fn] * 2, name), seed=3), 410)
    sim = fn().unwrapped
    sim.reset(seed=0)
    for rows in by_env(blocks, 400):
        assert not rows['terminated'].any() and np.flatnonzero(rows['truncated']).tolist() == [
            199,
            399,
        ]
        assert well_counted(rows) is None and chained(rows)
        for r in rows[195:205]:
            c, s, speed = r['state']
            sim.state = np.array([np.arctan2(s, c), speed])
            assert np.allclose(sim.step(r['action'])[0], r['next_state'], atol=1e-3)
        assert not np.allclose(rows['next_state'][199], rows['state'][200])
