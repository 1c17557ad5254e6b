"""Check on a machine with a GPU what other machines cannot: `python benchmarks/gpu_check.py`.

It needs torch, numpy, numba and this library, and no network. It takes a few minutes, prints a
line for each check, and writes benchmarks/results/gpu.json. A failed check does not stop it.
"""
import json
import random
import subprocess
import sys
import time
import traceback
from itertools import islice
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from harness import git_commit, machine

from fastrl_replay.all import *
from fastrl_replay.envs.catch import Catch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / 'results/gpu.json'


def random_steps(envs, moments, device):
    "Return arguments of `add_step`, the same on each device"
    choose = torch.Generator().manual_seed(0)
    rand = torch.rand(moments, envs, generator=choose)
    steps = []
    obs = torch.rand(envs, 4, generator=choose)
    for t in range(moments):
        last = torch.rand(envs, 4, generator=choose)
        terminated, truncated = rand[t] < .1, rand[t] > .9
        fresh = torch.rand(envs, 4, generator=choose)
        after = torch.where((terminated | truncated)[:, None], fresh, last)
        values = obs, rand[t], rand[t] - .5, after, terminated, truncated, last
        steps.append([x.to(device) for x in values])
        obs = after
    return steps


def lanes_are_exact():
    "The same steps give the same rows, n-step returns and last observations as on the CPU"
    replays = []
    for device in 'cpu', 'cuda':
        replay = LaneReplay(64, 50, n=5, device=device, seed=0)
        for step in random_steps(64, 120, device):
            replay.add_step(*step)
        replays.append(replay)
    keys = torch.arange(70*64, 120*64)
    for n in 1, 3, 8:
        cpu, gpu = (r.take(keys.to(r.device), n).asdict() for r in replays)
        for name, x in cpu.items():
            assert torch.allclose(x.float(), gpu[name].cpu().float(), atol=1e-5), (n, name)


def lanes_do_not_wait():
    "Adding, drawing by priority and updating never wait for the device"
    replay = LaneReplay(64, 50, bs=256, n=3, device='cuda', sampler=LanePriority(), seed=0)
    steps = random_steps(64, 100, 'cuda')
    replay.add_step(*steps[0])
    torch.cuda.set_sync_debug_mode('error')
    try:
        for step in steps[1:]:
            replay.add_step(*step)
            batch = replay.sample()
            replay.update_priorities(batch.index, batch.reward)
    finally:
        torch.cuda.set_sync_debug_mode('default')


def lanes_are_captured():
    "A CUDA graph adds steps and draws batches, as the calls do"
    def make():
        return LaneReplay(64, 50, bs=256, n=3, device='cuda', seed=0)

    steps = random_steps(64, 60, 'cuda')
    eager, captured = make(), make()
    for replay in eager, captured:
        for step in steps[:3]:
            replay.add_step(*step)
            replay.sample()
    place = [x.clone() for x in steps[3]]
    batch = captured.sample()
    eager.sample()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(captured.generator)
    with torch.cuda.graph(graph):
        captured.add_step(*place)
        captured.sample(out=batch)
    for step in steps[3:]:
        for x, new in zip(place, step):
            x.copy_(new)
        graph.replay()
        eager.add_step(*step)
    torch.cuda.synchronize()
    assert len(captured) == len(eager)
    keys = torch.arange(20*64, 60*64, device='cuda')
    a, b = captured.take(keys).asdict(), eager.take(keys).asdict()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def stores_on_a_gpu():
    "`Rows` and `Frames` on the GPU sample the batches of those in main memory"
    games = [lambda: gym.wrappers.FrameStackObservation(Catch(), 4)]*4
    steps = list(islice(GymStepper(games, seed=0), 200))
    for make in Rows, lambda **where: Frames(4, **where):
        batches = []
        for device in None, 'cuda':
            replay = PrioritizedReplay(bs=32, max_sz=500, store=make(device=device), seed=0)
            for block in steps:
                replay.add(block)
            batches.append([replay.sample().to('cpu') for _ in range(20)])
        assert batches[0] == batches[1]


def prefetch_to_a_gpu():
    "`.prefetch(device='cuda')` yields the batches of the chain without it"
    def chain():
        steps = GymStepper(['CartPole-v1']*4, seed=0)
        return steps.experience_replay(bs=32, max_sz=500, seed=0)

    with chain().prefetch(2, device='cuda') as ahead:
        for a, b in zip(islice(chain(), 50), ahead):
            assert b.device.type == 'cuda' and a == b.to('cpu')


def training():
    "DQN learns CartPole on the GPU"
    torch.manual_seed(0)
    env = gym.make('CartPole-v1')
    net = value_net(env.observation_space, env.action_space).cuda()
    policy = EpsGreedy(net, eps=LinearSchedule(1, .05, 3_000), seed=0)
    steps = GymStepper(['CartPole-v1']*8, policy, seed=0).journal()
    replay = steps.n_step(3, gamma=.99).prioritized_replay(bs=64, ratio=.5, warmup=1_000, seed=0)
    for _ in islice(replay.dqn(net, lr=1e-3, target_every=100), 5_000):
        pass
    assert np.mean(steps.returns[-20:]) > 100, steps.returns[-20:]


def main():
    if not torch.cuda.is_available():
        sys.exit('there is no GPU that torch can use')
    random.seed(0)
    checks = (lanes_are_exact, lanes_do_not_wait, lanes_are_captured, stores_on_a_gpu,
              prefetch_to_a_gpu, training)
    found = {}
    for check in checks:
        start = time.perf_counter()
        try:
            check()
            found[check.__name__] = 'passed'
        except Exception:
            found[check.__name__] = traceback.format_exc(limit=-3)
        print(f'{check.__name__}: {found[check.__name__]} ({time.perf_counter() - start:.0f} s)',
              flush=True)
    command = sys.executable, HERE / 'lanes.py', '--device', 'cuda'
    ended = subprocess.run(command, capture_output=True, text=True)
    print(ended.stdout or ended.stderr)
    times = json.loads(ended.stdout) if ended.returncode == 0 else ended.stderr
    results = dict(gpu=torch.cuda.get_device_name(), checks=found, lanes=times,
                   machine=machine(), commit=git_commit())
    RESULTS.write_text(json.dumps(results, indent=1) + '\n', encoding='utf-8')
    sys.exit(any(text != 'passed' for text in found.values()))


if __name__ == '__main__':
    main()
