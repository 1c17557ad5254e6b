"""What ranks of tests/parallel/test_ranks.py run: `python rank_work.py NAME …` for each rank."""

import json, os, signal, sys
from itertools import islice
from pathlib import Path

import gymnasium as gym, numpy as np, torch
from gymnasium import spaces
from fastrl_replay.all import *
from fastrl_replay.pipe import as_worker
from fastrl_replay.steps.errors import EnvError

BOX, TWO, UNIT = spaces.Box(-1, 1, (3,)), spaces.Discrete(2), spaces.Box(-1, 1, (2,))


def say(**said):
    print(json.dumps(said), flush=True)


def rows(n, actions, seed):
    "Random rows, with weights"
    rng, rows = np.random.default_rng(seed), np.zeros(n, step_dtype(BOX, actions, weight='f4'))
    for k in 'state', 'next_state':
        rows[k] = rng.normal(size=(n, 3))
    rows['reward'], rows['weight'], rows['terminated'] = (
        rng.normal(size=n) * 3,
        rng.uniform(0.1, 1, n),
        rng.random(n) < 0.2,
    )
    rows['action'] = rng.integers(2, size=n) if actions is TWO else rng.uniform(-1, 1, (n, 2))
    return Steps(rows)


def learner(kind, seed):
    torch.manual_seed(seed)
    if kind == 'dqn':
        return DQNLearner([], value_net(BOX, TWO, (16,)), target_every=3, max_norm=0.5)
    actor, critics = actor_net(BOX, UNIT, (16,), spread=kind == 'sac'), Critics(BOX, UNIT, (16,))
    return (SACLearner if kind == 'sac' else TD3Learner)(
        [], actor, critics, UNIT, max_norm=0.5, seed=0
    )


class Fed:
    "Random numbers of whole batches, of which a rank takes every second row"

    def __init__(self):
        self.rng, self.real = torch.Generator().manual_seed(7), torch.randn

    def set(self, n, size):
        self.numbers, self.part = self.real(2, n, size, generator=self.rng), slice(None)

    def __call__(self, shape, **kw):
        found = self.numbers[:, self.part]
        return found if len(shape) == 3 else found[0]


def distance(a, b):
    "The largest difference of any weight"
    return max(
        (p - q).abs().max().item()
        for name in a.learned
        for p, q in zip(getattr(a, name).parameters(), getattr(b, name).parameters())
    )


def equal(kind, ranks):
    "Half batches in two ranks, and whole ones in one process: 20 updates each"
    mine, whole, fed = learner(kind, 3), learner(kind, 3), Fed()
    mine.ranks, torch.randn, records = ranks, fed, 0.0
    for i in range(20):
        batch = rows(32, TWO if kind == 'dqn' else UNIT, i)
        fed.set(32, 2)
        b = whole.learn(batch)
        fed.part = slice(ranks.rank, None, ranks.size)
        a = mine.learn(batch[fed.part])
        records = max([records, *(abs(a[k] - b[k]) for k in b)])
    say(off=distance(mine, whole), records=records, moved=distance(mine, learner(kind, 3)))


def sequences(ranks):
    "Sequences of other lengths in each half: a loss that is divided by the steps that count"

    def make():
        torch.manual_seed(5)
        space = gym.make('CartPole-v1').observation_space
        return R2D2Learner([], RecurrentNet(space, TWO, 8), gamma=0.9, n=2)

    replay = SequenceReplay(
        None, bs=8, max_sz=400, length=30, burn_in=2, overlap=0, seed=1, state='zero'
    )
    with as_worker(None):  # the same rows in both
        for block in GymStepper('CartPole-v1', seed=0).header(390):
            replay.add(block)
    mine, whole = make(), make()
    mine.ranks, off = ranks, 0.0
    for _ in range(10):
        batch = replay.sample()
        b, a = whole.learn(batch), mine.learn(batch[ranks.rank :: ranks.size])
        off = max([off, *(abs(a[k] - b[k]) for k in b)])
    say(off=max(off, distance(mine, whole)), lengths=batch.train.mask.sum(1).tolist())


def differs(ranks, what):
    "A chain that is another one in rank 1"
    usual = dict(n=2, gamma=0.99, ratio=0.25, lr=1e-3, tau=1.0, target_every=100, networks=16)
    other = dict(n=3, gamma=0.9, ratio=0.5, lr=1e-2, tau=0.5, target_every=50, networks=8)
    mine = {k: other[k] if ranks.rank and k == what else usual[k] for k in usual}
    net = value_net(gym.make('CartPole-v1').observation_space, TWO, (mine['networks'],))
    steps = GymStepper('CartPole-v1', EpsGreedy(net, 0.3, seed=0), seed=0)
    steps = steps.n_step(mine['n'], gamma=mine['gamma']).rounds(ranks, max_steps=500)
    uniform = ranks.rank and what == 'memory'
    make = steps.experience_replay if uniform else steps.prioritized_replay
    replay = make(bs=8, warmup=16, ratio=mine['ratio'], seed=ranks.rank)
    how = {k: mine[k] for k in ('lr', 'tau', 'target_every')}
    for record in ranks.sync(replay.rank_weights(ranks).dqn(net, **how)):
        pass


def weights(ranks, norm):
    "Two memories of unequal mass; each says what it drew, with the weights"
    replay = PrioritizedReplay(
        None, bs=4, max_sz=64, alpha=0.7, beta=0.6, eps=0.0, weight_norm=norm, seed=0
    )
    pipe = ranks.sync(replay.rank_weights(ranks))
    n = (5, 12)[ranks.rank]
    td = np.arange(1, n + 1) * (1.0, 10.0)[ranks.rank]
    block = Steps.cat([*GymStepper('CartPole-v1', seed=0).header(n)])
    replay.update_priorities(replay.add(block), td)
    said = []
    for _ in range(30):
        batch = replay.sample()
        pipe.weigh(batch)
        said.append(ranks.gather([batch.index.tolist(), batch.weight.tolist()]))
    if ranks.leads:
        say(said=said, td=[list(range(1, 6)), [10 * x for x in range(1, 13)]])


def lost(ranks, how):
    "Rank 1 ends in the middle, in one of several ways; the others are to say so"
    for i in range(10**6):
        if i == 50 and ranks.rank == 1:
            if how == 'kill':
                os.kill(os.getpid(), signal.SIGKILL)
            if how == 'stop':
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == 'error':
                raise EnvError('GymStepper', 'the robot has fallen over')
            if how == 'leave':
                return
        ranks.average([torch.ones(3)])


def rounds(ranks, seed, steps):
    "A chain with episodes and rows of n steps: ranks that are due for batches at other steps"
    torch.manual_seed(ranks.rank)
    env = gym.make('CartPole-v1')
    net = value_net(env.observation_space, env.action_space, (8,))
    steps_ = GymStepper(['CartPole-v1'] * 2, EpsGreedy(net, 0.5, seed=seed), seed=seed).journal()
    journal = steps_.n_step(3, 0.99).rounds(ranks, rows=2, max_steps=steps)
    replay = journal.prioritized_replay(bs=8, max_sz=300, warmup=40, ratio=0.5, seed=seed)
    n = sum(1 for _ in ranks.sync(replay.rank_weights(ranks).dqn(net)))
    said = ranks.gather(
        dict(
            n=n,
            inserted=replay.memory.inserted,
            steps=journal.steps,
            returns=journal.returns,
            envs=sorted(set(replay.memory[:].env_id.tolist())),
            net=[p.detach().sum().item().hex() for p in net.parameters()],
            state=replay.memory[:].state.sum().item(),
        )
    )
    if ranks.leads:
        say(said=said)


def resumed(ranks, folder, place, do):
    """Save a chain after 30 batches, by rank, or continue it.

    Or begin one over the rows of a directory, without a checkpoint."""
    out = Path(folder)
    store = Rows(out / 'memory', spare=500) if place == 'disk' else None
    steps = GymStepper(['CartPole-v1'] * 2, seed=0).rounds(ranks, rows=2)
    replay = steps.prioritized_replay(bs=8, max_sz=300, warmup=20, ratio=0.5, seed=0, store=store)
    pipe = ranks.sync(replay.rank_weights(ranks))

    def draw(n):
        seen = []
        for batch in islice(pipe, n):
            batch.update_priorities(batch.reward + batch.step_n / 7)
            seen.append([batch.index.tolist(), batch.weight.sum().item().hex()])
        return seen

    try:
        if do == 'resume':
            pipe.load_state_dict(torch.load(out / f'rank-{ranks.rank % 2}.pt'))
        if do == 'find':
            return say(
                rank=ranks.rank,
                rows=len(replay),
                environments=sorted(set(replay.memory[:].env_id.tolist())) if len(replay) else [],
            )
        if do == 'begin':
            draw(30)
            torch.save(pipe.state_dict(), out / f'rank-{ranks.rank}.pt')
        say(rank=ranks.rank, seen=draw(20))
    except (ArgumentError, StateError) as e:
        say(rank=ranks.rank, error=str(e))
    finally:
        pipe.close()


if __name__ == '__main__':
    torch.set_num_threads(1)
    name, *args = sys.argv[1:]
    timeout = 3.0 if 'stop' in args else 60.0
    if args[-1:] == ['guest']:
        torch.distributed.init_process_group('gloo')
        args.pop()
    with Ranks(timeout=timeout) as ranks:
        if name == 'equal':
            equal(args[0], ranks)
        else:
            globals()[name](ranks, *(int(a) if a.isdigit() else a for a in args))
