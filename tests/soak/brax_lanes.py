"""Train TD3 in a Brax environment through `TensorStepper` and `LaneReplay`.

    python tests/soak/brax_lanes.py [--batches N] [--out FILE]

This needs `pip install brax`, which installs JAX; on two CPU cores it takes two minutes. It prints
how many steps the pole stays up before, during and after training.
"""

import argparse
import json
import time
from itertools import islice

import brax.envs
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import spaces

from fastrl_replay.all import *

ENVS, TIME_LIMIT = 64, 1_000


class Brax:
    "A Brax environment as a batch of tensors, which resets in the step that ends an episode"

    def __init__(self, name, envs):
        self.num_envs = envs
        self.env = brax.envs.get_environment(name, backend='spring')
        self._reset = jax.jit(jax.vmap(self.env.reset))
        self._step = jax.jit(self._advance)

    def _advance(self, state, t, first, action):
        new = jax.vmap(self.env.step)(state, action)
        terminated = new.done > 0
        over = terminated | (t + 1 >= TIME_LIMIT)

        def choose(a, b):
            if a.shape[:1] != over.shape:
                return b
            return jnp.where(over.reshape(over.shape + (1,) * (a.ndim - 1)), a, b)

        after = jax.tree_util.tree_map(choose, first, new)
        t = jnp.where(over, 0, t + 1)
        return after, t, new.obs, new.reward, terminated, over & ~terminated

    def reset(self, *, seed=0):
        keys = jax.random.split(jax.random.PRNGKey(seed), self.num_envs)
        self.first = self.state = self._reset(keys)
        self.t = jnp.zeros(self.num_envs, jnp.int32)
        return torch.from_dlpack(self.state.obs), {}

    def step(self, action):
        action = jnp.from_dlpack(action.contiguous())
        self.state, self.t, *answer = self._step(self.state, self.t, self.first, action)
        last, reward, terminated, truncated = map(torch.from_dlpack, answer)
        obs = torch.from_dlpack(self.state.obs)
        return obs, reward, terminated, truncated, dict(final_obs=last)


def mean_length(actor):
    "Return how many steps the pole stays up, without noise"
    env = Brax('inverted_pendulum', ENVS)
    obs, _ = env.reset(seed=7)
    alive = torch.ones(ENVS, dtype=torch.bool)
    total = torch.zeros(ENVS)
    for _ in range(TIME_LIMIT):
        with torch.no_grad():
            action = actor(obs).tanh()
        obs, _, terminated, _, _ = env.step(action)
        total += alive
        alive &= ~terminated
        if not alive.any():
            break
    return round(total.mean().item(), 1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--batches', type=int, default=6_000)
    parser.add_argument('--out', help='write the results to this file')
    args = parser.parse_args()
    torch.manual_seed(0)
    env = Brax('inverted_pendulum', ENVS)
    observations = spaces.Box(-np.inf, np.inf, (env.env.observation_size,))
    actions = spaces.Box(-1, 1, (env.env.action_size,))
    actor = actor_net(observations, actions, hidden=(64, 64))
    critics = Critics(observations, actions, hidden=(64, 64))
    noise = torch.Generator().manual_seed(0)

    def policy(obs):
        return (actor(obs).tanh() + 0.3 * torch.randn(ENVS, 1, generator=noise)).clamp(-1, 1)

    chain = TensorStepper(env, policy, seed=0).lane_replay(
        steps=2_000, bs=256, n=3, updates=2, warmup=100 * ENVS, seed=0
    )
    learner = iter(chain.td3(actor, critics, actions, lr=1e-3, seed=0))
    lengths = [mean_length(actor)]
    print(f'before training: {lengths[0]} steps')
    start = time.perf_counter()
    for part in range(4):
        for _ in islice(learner, args.batches // 4):
            pass
        lengths.append(mean_length(actor))
        print(f'after {(part + 1) * (args.batches // 4)} batches: {lengths[-1]} steps')
    results = dict(
        brax=brax.__version__,
        jax=jax.__version__,
        torch=torch.__version__,
        envs=ENVS,
        batches=args.batches,
        steps=chain.replay.stats()['steps'],
        seconds=round(time.perf_counter() - start),
        lengths=lengths,
    )
    if args.out:
        with open(args.out, 'w', encoding='utf-8') as file:
            file.write(json.dumps(results, indent=1) + '\n')
    assert max(lengths[1:]) > 3 * lengths[0], lengths


if __name__ == '__main__':
    main()
