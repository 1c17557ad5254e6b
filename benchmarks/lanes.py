"""Compare `LaneReplay` with a plain ring of tensors and with torchrl's tensor storage.

    python benchmarks/lanes.py [--device DEVICE] [--quick] [--out FILE]

The ring stores both observations of a step, as FastTD3's buffer does. All take the same steps and
draw in turn; the times are medians in milliseconds. On a CPU, one thread is used.
"""
import argparse
import json
import time
from itertools import count
from statistics import median

import torch
from harness import git_commit, machine

from fastrl_replay.all import LanePriority, LaneReplay

ENVS, STEPS, OBS, ACT, GAMMA = 4096, 488, 48, 8, .99
BATCHES, NS = (8192, 32768), (1, 3, 8)


class Ring:
    "Columns [environments, steps, …]; n-step returns are computed when rows are drawn"

    def __init__(self, envs, steps, device):
        self.steps = steps
        self.lanes = torch.arange(envs, device=device)[:, None]

        def zeros(*shape, dtype=torch.float32):
            return torch.zeros(envs, steps, *shape, dtype=dtype, device=device)

        self.columns = dict(
            obs=zeros(OBS), action=zeros(ACT), reward=zeros(), next_obs=zeros(OBS),
            done=zeros(dtype=torch.int64), truncated=zeros(dtype=torch.int64))
        self.count = 0

    def add(self, obs, action, reward, next_obs, terminated, truncated, final_obs):
        done = (terminated | truncated).long()
        values = obs, action, reward, next_obs, done, truncated.long()
        for column, x in zip(self.columns.values(), values):
            column[:, self.count % self.steps] = x
        self.count += 1

    def pick(self, name, at):
        column = self.columns[name]
        at = at if column.dim() == 2 else at[..., None].expand(-1, -1, column.shape[2])
        return column.gather(1, at).flatten(0, 1)

    def sample(self, bs, n):
        envs = len(self.lanes)
        rows = min(self.count, self.steps)
        at = torch.randint(rows, (envs, bs//envs), device=self.lanes.device)
        ahead = (at[..., None] + torch.arange(n, device=at.device)) % self.steps
        flat = ahead.flatten(1)
        reward, done = (self.columns[k].gather(1, flat).view(ahead.shape)
                        for k in ('reward', 'done'))
        before = torch.cat([torch.zeros_like(done[..., :1]), done[..., :-1]], -1).cumsum(-1)
        alive = before == 0
        powers = GAMMA**torch.arange(n, device=at.device)
        last = ahead.gather(2, alive.sum(-1, keepdim=True) - 1)[..., 0]
        returns = (reward*alive*powers).sum(-1).flatten()
        return (self.pick('obs', at), self.pick('action', at), returns,
                self.pick('next_obs', last), self.pick('done', last),
                self.pick('truncated', last))


def torchrl_storage(envs, steps, device):
    "Return functions that add a step and draw rows, or None if torchrl is not installed"
    try:
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    except ImportError:
        return None
    storage = LazyTensorStorage(envs*steps, device=device)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCHES[0])
    names = 'obs', 'action', 'reward', 'next_obs', 'terminated', 'truncated'

    def add(*step):
        buffer.extend(TensorDict(dict(zip(names, step[:6])), [envs]))

    return add, buffer.sample


def timed(jobs, device, repeat):
    "Return the median of each job in milliseconds; the jobs take turns"
    found = {name: [] for name in jobs}
    for _ in range(repeat):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if device.type == 'cuda':
                torch.cuda.synchronize()
            found[name].append(time.perf_counter() - start)
    return {name: round(1e3*median(times), 3) for name, times in found.items()}


def compare(device, envs, steps, repeat):
    "Return times of adding and of drawing, and bytes of a row"
    torch.manual_seed(0)

    def rand(*shape):
        return torch.rand(envs, *shape, device=device)

    states = [rand(OBS) for _ in range(9)]
    action, reward, never = rand(ACT), rand(), rand() < 0
    ends = [rand() < .01 for _ in range(9)]
    ours = LaneReplay(envs, steps, device=device, seed=0)
    compared = LaneReplay(envs, steps, device=device, seed=0)  # with obs in every step
    weighted = LaneReplay(envs, steps, device=device, seed=0, sampler=LanePriority())
    half = LaneReplay(envs, steps, device=device, dtype=dict(state=torch.bfloat16))
    ring, rl = Ring(envs, steps, device), torchrl_storage(envs, steps, device)
    adders = dict(ours=ours.add_step, by_priority=weighted.add_step)
    others = dict(compared=compared.add_step, ring=ring.add)
    if rl:
        others['torchrl'] = rl[0]

    def adding(add, continues=False):
        moments = count()

        def step():
            i = next(moments)
            obs, after = states[i % 9], states[(i + 1) % 9]
            obs = None if continues and i else obs
            add(obs, action, reward, after, ends[i % 9], never, after)

        return step

    jobs = {name: adding(add, continues=True) for name, add in adders.items()}
    jobs.update((name, adding(add)) for name, add in others.items())
    for job in jobs.values():
        for _ in range(steps + 8):
            job()
    adding(half.add_step)()
    results = dict(add=timed(jobs, device, repeat))
    table = ours.store.columns['state']
    for bs in BATCHES:
        at = torch.randint(len(table), (bs,), device=device)
        td = torch.rand(bs, device=device)

        def by_priority(bs=bs, td=td):
            weighted.update_priorities(weighted.sample(bs).index, td)

        draws = dict(bare=lambda at=at: [table.index_select(0, at) for _ in range(2)],
                     by_priority_and_update=by_priority)
        for n in NS:
            draws[f'ours, n={n}'] = lambda bs=bs, n=n: ours.sample(bs, n=n)
            draws[f'ring, n={n}'] = lambda bs=bs, n=n: ring.sample(bs, n)
        if rl:
            draws['torchrl, n=1'] = lambda bs=bs: rl[1](bs)
        results[f'draw {bs}'] = timed(draws, device, repeat)
    rows = envs*steps
    results['bytes'] = dict(
        ours=round(ours.nbytes/rows), bfloat16=round(half.nbytes/rows),
        ring=round(sum(x.nbytes for x in ring.columns.values())/rows))
    return results


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cpu', type=torch.device)
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--out')
    args = parser.parse_args()
    if args.device.type == 'cpu':
        torch.set_num_threads(1)
    steps, repeat = (8, 3) if args.quick else (STEPS, 31)
    results = compare(args.device, ENVS, steps, repeat)
    results.update(machine=machine(), made=dict(commit=git_commit(), quick=args.quick))
    if args.device.type == 'cuda':
        results['gpu'] = torch.cuda.get_device_name()
    text = json.dumps(results, indent=1)
    print(text)
    if args.out:
        with open(args.out, 'w', encoding='utf-8') as file:
            file.write(text + '\n')


if __name__ == '__main__':
    main()
