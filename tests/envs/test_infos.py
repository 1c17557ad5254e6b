"Entries of info as columns: the mask of a row is that of its next state, wherever rows go"

import json
from itertools import islice
import gymnasium as gym, numpy as np, pytest, torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from fastrl_replay.all import *
from fastrl_replay.cli import main
from fastrl_replay.learning.settings import recipe
from fastrl_replay.app.recipes import Agent, play_episodes
from fastrl_replay.app.run_files import read_metrics
from fastrl_replay.app.runs import resume, start


def bits(k):
    return np.array([k + 1 >> 2 & 1, k + 1 >> 1 & 1, k + 1 & 1], np.int8)


class Told(ScriptedEnv):
    "In state k the bits of k + 1 are allowed; an episode that ends in an odd state is a success"

    def reset(self, **kw):
        obs, _ = super().reset(**kw)
        return obs, dict(action_mask=bits(int(obs[0]) % 1000))

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        k = int(obs[0]) % 1000
        end = dict(is_success=np.bool_(k % 2)) if terminated or truncated else {}
        return obs, reward, terminated, truncated, dict(action_mask=bits(k), **end)


SCRIPTS = script(3, -2), script(1, 4, env=1)
KEPT = dict(action_mask=None, is_success=False)


def told():
    return [lambda s=s: Told(**s) for s in SCRIPTS]


def first_of():
    return Told(**SCRIPTS[0])


def first_allowed(state, mask):
    return mask.int().argmax(1)


def stepper(**kw):
    return GymStepper(told(), first_allowed, info=KEPT, **kw)


def check(rows):
    "Each row that is a step has the mask and the success of its next state"
    rows = np.asarray(rows).reshape(-1)
    rows = rows[rows['step_n'] > 0]  # padding
    k = rows['next_state'].reshape(len(rows), -1)[:, -2].astype(int) % 1000
    assert len(rows) and (rows['action_mask'] == np.array([bits(i) for i in k])).all()
    ended = rows['terminated'] | rows['truncated']
    assert (rows['is_success'] == (ended & (k % 2 == 1))).all()
    return len(rows)


CHAINS = dict(
    merged=lambda s, path: s.n_step(3, 0.9),
    chunks=lambda s, path: s.chunk_sequences(4, 2),
    uniform=lambda s, path: s.n_step(3, 0.9).experience_replay(bs=8, max_sz=20, seed=0),
    disk=lambda s, path: s.experience_replay(bs=8, max_sz=20, seed=0, store=Rows(path / 'm')),
    rank=lambda s, path: s.prioritized_replay(bs=8, max_sz=20, kind='rank', seed=0),
    sequences=lambda s, path: s.sequence_replay(
        bs=4, max_sz=40, length=4, burn_in=1, overlap=2, seed=0
    ),
)


@pytest.mark.parametrize('name', CHAINS)
def test_entries_stay_with_their_row(name, tmp_path):
    "Memories are full soon: rows are overwritten"
    for batch in CHAINS[name](stepper(), tmp_path).header(30):
        check(batch.rows)


class Says(gym.Env):
    "Episodes of given lengths, and what `info` says at each step"

    observation_space, action_space = spaces.Box(-9, 9, (1,)), spaces.Discrete(2)

    def __init__(self, *infos, length=1, first=None):
        self.infos, self.length, self.first, self.t = infos, length, first or {}, 0

    def reset(self, **kw):
        super().reset(**kw)
        self.s = 0
        return np.zeros(1, np.float32), dict(self.first)

    def step(self, a):
        self.s += 1
        self.t += 1
        info = self.infos[(self.t - 1) % len(self.infos)]
        return np.full(1, self.s, np.float32), 1.0, self.s == self.length, False, info


def columns(*envs, n=3, vector=None, **kw):
    makers = [lambda e=e: e for e in envs]
    source = SyncVectorEnv(makers, autoreset_mode=vector) if vector else makers
    return Steps.cat(list(islice(GymStepper(source, seed=0, **kw), n)))


@pytest.mark.parametrize('vector', [None, *AutoresetMode])
def test_episodes_of_length_one(vector):
    steps = columns(
        Says(dict(a=1.5), dict(a=2.5), dict(a=3.5)), Says(dict(a=9.0)), n=6, vector=vector, info='a'
    )
    assert steps.a[steps.env_id == 0][:3].tolist() == [1.5, 2.5, 3.5] and set(
        steps.a[steps.env_id == 1].tolist()
    ) == {9.0}


@pytest.mark.parametrize('vector', [None, *AutoresetMode])
def test_only_at_the_end(vector):
    steps = columns(
        Says({}, {}, dict(won=True), length=3),
        Says({}, length=3),
        n=9,
        vector=vector,
        info=dict(won=False),
    )
    assert (steps.won == ((steps.step_n == 3) & (steps.env_id == 0))).all() and steps.won.any()


@pytest.mark.parametrize(
    'infos, message',
    [
        ([dict(a='x')], 'got <U1'),
        ([dict(a=[1, 2]), dict(a=[1, 2, 3])], r'got int64 \[3\]; expected int64 \[2\]'),
        ([dict(a=1), dict(a=1.5)], 'got float64'),
        ([dict(a=1), {}], "info has no entry .*; got info with nothing"),
        ([dict(a=dict(b=1))], 'got object'),
    ],
)
@pytest.mark.parametrize('vector', [None, AutoresetMode.SAME_STEP])
def test_entries_that_change_are_refused(infos, message, vector):
    with pytest.raises(EnvError, match=message):
        columns(Says(*infos, length=5), n=4, vector=vector, info='a')


def test_nan_and_infinity_pass():
    assert columns(Says(dict(a=np.nan), dict(a=np.inf), dict(a=1)), info='a').a[1:].tolist() == [
        np.inf,
        1.0,
    ]


def test_an_array_that_an_environment_goes_on_writing_to():
    mask = np.array([1, 0], np.int8)

    class Reuses(Says):
        def step(self, a):
            mask[:] = mask[::-1].copy()
            return super().step(a)

    steps = columns(
        Reuses(dict(action_mask=mask), length=9, first=dict(action_mask=mask)),
        n=4,
        info='action_mask',
    )
    assert steps.action_mask.tolist() == [
        [0, 1],
        [1, 0],
        [0, 1],
        [1, 0],
    ] and steps.action.tolist() == [0, 1, 0, 1]


def test_nothing_allowed_is_named_and_ends_are_not():
    zeros, ones = dict(action_mask=[0, 0]), dict(action_mask=[1, 0])
    steps = columns(
        Says(ones, zeros, length=2, first=ones), n=2, info='action_mask'
    )  # zeros at the end
    assert steps.action_mask.tolist() == [[1, 0], [0, 0]] and steps.action.tolist() == [0, 0]
    with pytest.raises(EnvError, match='the action_mask of environment 0 allows nothing'):
        columns(Says(zeros, length=3, first=ones), info='action_mask')
    for mode in AutoresetMode:
        steps = columns(
            Says(ones, zeros, ones, zeros, ones, zeros, ones, zeros, length=2, first=ones),
            n=7,
            vector=mode,
            info='action_mask',
            policy=lambda s, mask: mask.int().argmax(1),
        )
        assert (steps.action_mask[:, 0] == (steps.step_n == 1)).all()


@pytest.mark.parametrize('info', ['action_mask', (), dict(KEPT, is_success=0.0)])
def test_a_state_of_other_entries_is_refused(info):
    saved = stepper()
    list(islice(saved, 3))
    other = GymStepper(told(), info=info)
    other.load_state_dict(saved.state_dict())
    with pytest.raises(StateError):
        next(iter(other))


def naive_targets(model, target, rows, gamma, double):
    out = []
    for r in rows:
        q, t = (net(torch.as_tensor(r['next_state'])[None])[0].tolist() for net in (model, target))
        allowed = [i for i in range(3) if r['action_mask'][i]]
        best = max(allowed, key=lambda i: (q if double else t)[i]) if allowed else None
        out.append(float(r['reward']) + (0 if r['terminated'] else gamma * t[best]))
    return out


@pytest.mark.parametrize('double', [False, True])
def test_targets_against_a_plain_loop(double):
    from fastrl_replay.learning.dqn import dqn_errors

    torch.manual_seed(0)
    model, target = (torch.nn.Linear(2, 3) for _ in range(2))
    batch = Steps.cat(list(islice(stepper(), 30)))
    batch.rows['action_mask'][batch.rows['terminated']] = 0
    _, goal = dqn_errors(model, target, batch, 0.9, double)
    assert torch.isfinite(goal).all()
    np.testing.assert_allclose(
        goal, naive_targets(model, target, batch.rows, 0.9, double), rtol=1e-5
    )


gym.register('TestTold-v0', first_of)
TINY = dict(
    env='TestTold-v0',
    info='action_mask, is_success=no',
    steps=60,
    warmup=8,
    bs=4,
    network=8,
    train_every=1,
    eval_every=30,
    eval_episodes=3,
    report_every=20,
    save_every=30,
    ratio=0.2,
    solved=25,
    n_step=2,
)


@pytest.mark.slow
def test_successes_of_a_run(tmp_path, capsys):
    run = start(recipe('cartpole', **TINY), tmp_path / 'r')
    run.train()
    journal = run.agent.journal
    wanted = [float(i % 2 == 0) for i in range(len(journal.returns))]
    assert journal.successes == wanted  # episodes of 3 steps end in 3, of 2 in 6
    lines = read_metrics(tmp_path / 'r')
    assert all(0 < l['success_mean'] < 1 for l in lines if 'success_mean' in l)
    assert [l['eval_success'] for l in lines if 'eval_return' in l] == [1] * 2
    assert json.loads((tmp_path / 'r/summary.json').read_text())['final_success'] == 1
    again = resume(tmp_path / 'r', dict(steps=90))
    assert again.agent.journal.successes == journal.successes
    returns, won = play_episodes(run.agent, 4)
    assert won.tolist() == [1] * 4
    assert main(['eval', str(tmp_path / 'r'), '--episodes', '2']) == 0
    assert '100% successes' in capsys.readouterr().out


def test_taxi_masked_acts_among_what_is_allowed():
    agent = Agent(recipe('taxi-masked', episodes=3).settings)
    rows = Steps.cat(list(islice(agent.stepper, 300)))
    follows = rows.step_n[1:] > 1
    assert rows.action_mask[:-1].gather(1, rows.action[1:, None])[:, 0][follows].all()


@pytest.mark.parametrize('several', [False, True])
def test_a_policy_is_evaluated_with_the_mask_it_was_trained_with(several):
    env = SyncVectorEnv(told()) if several else first_of
    how = dict(autoreset_mode='next_step') if several else {}
    returns = evaluate(first_allowed, env, 4, info=KEPT, float32=True, **how)
    assert (returns == evaluate(lambda s: [0] * len(s), env, 4)).all()
    asked = []

    def asks(state, mask=None):
        asked.append(mask)
        return [0] * len(state)

    evaluate(asks, env, 2, info='action_mask')
    assert all(m is not None and m.any(1).all() for m in asked)
    with pytest.raises(EnvError, match="entry 'level'"):
        evaluate(asks, env, 2, info='level')
