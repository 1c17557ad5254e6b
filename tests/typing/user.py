"""Use each public name and chained method as a user would. Type checkers read it; it isn't run."""

from collections.abc import Iterator
from typing import Any

import gymnasium as gym, numpy as np, torch
from torch.utils.data import IterDataPipe
from fastrl_replay.all import *

env = gym.make('CartPole-v1')
states, actions = env.observation_space, env.action_space
box = gym.spaces.Box(-1, 1, (2,))
discrete = gym.spaces.Discrete(3)

# ---- rows ----

rows: np.ndarray = np.zeros(8, step_dtype(states, actions, hidden=np.dtype((np.float32, 4))))
steps = Steps(rows)
some: Steps = steps[2:5]
every: Steps = Steps.cat([steps, some.copy()])
for row in steps:
    print(row.state, row.reward.item())
print(steps.state, steps.hidden, len(steps), steps == every, steps.asdict()['action'])
moved: Steps = steps.to('cpu').pin_memory()
columns: Columns = moved.columns()
write_whole('notes.txt', b'one', b'two')

# ---- networks and policies ----

net = value_net(states, actions, (64, 64), dueling=True)
pixels = conv_net(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), actions)
parts: torch.Tensor = Branches(8, (3, 2))(torch.zeros(1, 8)) + Dueling(8, 5)(
    FlattenSpace(states)(torch.zeros(1, 8))
)
recurrent = RecurrentNet(states, discrete, size=32)
values, hidden = recurrent(torch.zeros(1, 4), recurrent.initial_hidden(1))
policy = EpsGreedy(net, eps=LinearSchedule(1, 0.05, 3_000), seed=0, random=100)
policy = EpsGreedy(net, eps=GeometricSchedule(1.0, 0.99), seed=0)
actor, critics = actor_net(box, box, (32,), spread=True), Critics(box, box, (32,))
norm, reward_norm = StateNorm(box), RewardNorm(gamma=0.99)
gaussian = SquashedGaussian(Normalized(norm, actor), box, random=100)
noisy = GaussianNoise(actor, box, scale=lambda n: 0.1 / (n + 1))
bounds = BoxBounds(box)
print(bounds.to_space(np.zeros((1, 2))), squashed(torch.zeros(1, 4), torch.zeros(1, 2)))
returns: np.ndarray = evaluate(policy, 'CartPole-v1', episodes=3, record='video.mp4')
loaded = load_policy('runs/cartpole-seed0')

# ---- environments ----


def make() -> gym.Env:
    return gym.make('CartPole-v1')


for made in ('CartPole-v1', [make] * 2, env, gym.make_vec('CartPole-v1', 2)):
    GymStepper(made, policy, seed=0)
stepper = GymStepper(['CartPole-v1'] * 2, policy, seed=0, info=dict(is_success=False))
source: Pipe = Items(['CartPole-v1']).gym_step(policy, seed=1, info=('action_mask',))
scripted = GymStepper([ScriptedEnv(*script(3, 2).values())], seed=0)
vector = ScriptedVectorEnv([script(3), script(2)])
blocks: list = scripted_steps([script(3)], 4)
team = GymStepper(Agents(object()), policy)

# ---- stages ----

journal: Journal = stepper.journal(max_steps=1e6, max_episodes=100)
counted: int = journal.steps
kept: list[float] = journal.returns
merged: NStep = journal.n_step(3, gamma=0.99, last=('action_mask',))
skipped: NSkip = journal.n_skip(2)
chunks: SequenceChunker = merged.chunk_sequences(8, overlap=4)
gathered: Gather = merged.gather(500, exact=True)
watched: UpdateNorms = stepper.update_norms(norm, reward_norm)
scaled: ScaleRewards = watched.experience_replay(bs=4).scale_rewards(reward_norm)
short: Header = merged.header(5)
forever: Cycler = short.cycle(3)
cached: InMemoryCacheHolder = short.in_memory_cache()
mapped = short.map(lambda steps: steps.reward).filter(lambda reward: bool(reward.sum()))
plain: IterDataPipe = mapped.batch(4).shuffle(buffer_size=10)
converted = MapToIterConverter([1, 2])
recorded: Episodes = Items(['episodes.npz']).episodes(keep=('hidden',), state='observations')
write_minari(read_minari('mujoco/hopper/expert-v0'), 'mine/data-v0', env)


@stage('doubled')
class Doubled(Pipe):
    "Each block twice"

    def __iter__(self) -> Iterator[Steps]:
        for block in self.blocks():
            yield from (block, block)


held: dict = check_contract(lambda: Doubled(GymStepper('CartPole-v1', seed=0)))
info: WorkerInfo = worker_info()
print(info.rank, info.world_size, Doubled(stepper).doubled())

# ---- memories ----


class Newest(Sampler):
    "Uniform draws from the last rows"

    def sample(self, n: int) -> tuple:
        keys = self.end - 1 - (self.random(n) * min(10, len(self))).astype(np.int64)
        return keys, np.full(n, 0.1)


replay: PrioritizedReplay = merged.prioritized_replay(
    bs=64,
    max_sz=1_000,
    kind='rank',
    alpha=0.7,
    beta=lambda n: min(1.0, n / 100),
    ratio=0.5,
    warmup=100,
    seed=0,
)
for kind in ('uniform', Proportional, Ranked):
    PrioritizedReplay(merged, kind=kind, beta=LinearSchedule(0.4, 1.0, 100))
batch: Steps = replay.sample(32)
batch.update_priorities(batch.reward.abs())
replay.update_priorities(batch.index, batch.reward.numpy())
keys: np.ndarray = replay.add(steps)
keys = ExperienceReplay(bs=4).add_step(
    np.zeros(4), 0, 1.0, np.zeros(4), False, truncated=False, hidden=np.zeros(4)
)
size: int = len(replay)
batches: Iterator[Any] = iter(replay)
lanes = LaneReplay(2, 100, bs=8, n=3, sampler=LanePriority(alpha=0.5), seed=0)
for sampler in (LaneUniform(each=True), LaneUniform(decay=0.99)):
    LaneReplay(2, 100, sampler=sampler)
world = ScriptedLanes([[2], [-3]])
acting = TensorStepper(world, lambda obs: torch.zeros(len(obs)), seed=0)
on_device: LaneBatches = acting.lane_replay(100, 8, n=3, updates=2)
from_lanes: LaneBatch = lanes.sample(4, n=2, gamma=0.9)
lanes.update_priorities(from_lanes.index, from_lanes.reward)
print(replay.memory[-3:], replay.stats()['rows'], replay.page('memory.html'), replay.show())
replay.load_state_dict(replay.state_dict())
own = OwnSteps().n_step(3, 0.99).experience_replay(bs=4, sampler=Newest(seed=0))
sequences: SequenceReplay = journal.sequence_replay(
    bs=4, length=8, burn_in=2, overlap=4, state='zero', beta=0.6
)
drawn = next(iter(sequences))
assert isinstance(drawn, Sequences)
drawn.update_priorities(drawn.train.reward)
goals: HindsightReplay = stepper.hindsight_replay(
    bs=4, share=0.8, strategy='final', reward=lambda achieved, goal, info: -1.0, beta=lambda n: 0.5
)
mixture = Mixture(
    dict(demos=ExperienceReplay(bs=4), mine=replay),
    shares=dict(demos=0.25, mine=lambda n: 0.75),
    bs=32,
)
mixture.add(steps, to='demos')
for store in (Rows('memory', spare=100), Frames(stack=4, compress='zstd', path='frames')):
    stored = ExperienceReplay(merged, bs=4, store=store, replacement=True)
with ExperienceReplay(merged, bs=4, sampler=Uniform(0, replacement=True)) as opened:
    opened.memory.flush()
line = Timeline(100, store=Rows())
line.add(steps)
print(line[3:].reward, line.windows([0, 1], 3), len(line))
tree, ranks = SumTree(8), RankTree(8)
tree.update(np.arange(3), np.ones(3))
places, priorities = tree.sample(4, np.random.default_rng(0))
print(tree.total, tree[0], ranks.rank(0), ranks.largest)

# ---- learners ----

record: dict = next(
    iter(replay.dqn(net, lr=1e-3, target_every=100, optimizer=torch.optim.SGD, conservative=0.5))
)
learners = [
    own.q_learn(QTable(discrete, discrete)),
    sequences.r2d2(recurrent, n=3),
    own.sac(actor, critics, box, temperature_lr=1e-4),
    own.td3(actor, critics, box),
]
classes = QLearner, DQNLearner, R2D2Learner, SACLearner, TD3Learner
offline: Offline = ExperienceReplay(bs=64).offline('rows.npz', max_steps=1_000)
td, loss = (
    dqn_errors(net, net, batch, gamma=0.99),
    discounts(batch, 0.99) * mixed_priority(rescale(unrescale(batch.reward))),
)
more = (
    r2d2_errors(recurrent, recurrent, drawn, 0.99, 3),
    sac_errors(actor, critics, critics, batch, 0.99, torch.ones(()), torch.zeros(2), bounds),
    td3_errors(critics, critics, actor, batch, 0.99, torch.zeros(2), bounds),
)
targets: torch.Tensor = double_q_target(batch.reward, batch.reward, parts, parts) + n_step_targets(
    batch.reward, batch.reward, batch.reward, n=3
)

# ---- processes and loaders ----

parallel: Parallel = stepper.parallel(4, chunk=8, ordered=False, restarts=3)
shards = replay.parallel(2, engine='ray', chunk=2)
cluster = replay.parallel(2, engine=RayEngine(num_cpus=0.5, address='auto'))
ahead: Prefetch = replay.prefetch(2, device='cuda')
rounds: Rounds = journal.rounds(Ranks(), rows=8)
weighed: RankWeights = rounds.experience_replay(bs=4).rank_weights(Ranks())
dataset, node = replay.stateful(), replay.node()
wrapped: tuple[StatefulPipe, PipeNode] = (StatefulPipe(replay), PipeNode(replay))
served: Service = connect('memory', limit=10)
served.add(steps)
print(served.sample(32), Service('memory').stats())
stop_service('memory')
averaged = Ranks(timeout=60.0)
averaged.average([torch.zeros(3)])

# ---- errors ----

try:
    replay.sample()
except (
    ActionError,
    ArgumentError,
    ArgumentTypeError,
    BlockError,
    EnvError,
    NotEnoughRows,
    StaleKey,
    StateError,
) as e:
    print(e)
except (WorkerError, NotEnoughDraws, ServiceError, RankError) as e:
    print(e)
