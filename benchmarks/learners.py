"""Steps a second of one and two learners with 1 to 8 actors, and training next to SB3."""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from harness import FOLDER, ONE_THREAD, ROOT, Worker, markdown_table

SB3 = 'stable-baselines3'
PENDULUM = dict(env='Pendulum-v1', learning_rate=1e-3, batch_size=128, buffer_size=100_000,
                learning_starts=100, train_freq=1, gradient_steps=1,
                policy_kwargs=dict(net_arch=[64, 64]))
TRAININGS = {   # recipe: steps, learner and settings of Stable-Baselines3
    'cartpole': (50_000, 'DQN', dict(   # as in its zoo
        env='CartPole-v1', learning_rate=2.3e-3, batch_size=64, buffer_size=100_000,
        learning_starts=1_000, gamma=.99, target_update_interval=10, train_freq=256,
        gradient_steps=128, exploration_fraction=.16, exploration_final_eps=.04,
        policy_kwargs=dict(net_arch=[256, 256]))),
    'pendulum-sac': (10_000, 'SAC', PENDULUM),
    'pendulum-td3': (10_000, 'TD3', dict(PENDULUM, learning_starts=1_000, noise=.1)),
}


# ---- in the worker ----

def train_sb3(learner, seed, steps, noise=0., **settings):
    "Return the seconds, the mean return of 20 episodes at the end"
    import numpy as np
    import stable_baselines3
    import torch
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.noise import NormalActionNoise
    torch.set_num_threads(1)
    model = getattr(stable_baselines3, learner)('MlpPolicy', seed=seed, device='cpu', **settings)
    if noise:
        model.action_noise = NormalActionNoise(np.zeros(1), np.array([noise]))
    start = perf_counter()
    model.learn(steps)
    seconds = perf_counter() - start
    return dict(seconds=seconds, final_return=float(evaluate_policy(model, model.get_env(), 20)[0]))


# ---- in the runner ----

def python(*command):
    environment = {**os.environ, **ONE_THREAD,
                   'PYTHONPATH': os.pathsep.join([str(ROOT), str(FOLDER)])}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True).stdout


def train_ours(recipe, seed, steps):
    "Train by the command; evaluations and checkpoints are not counted"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)/'run'
        python('-m', 'fastrl_replay', 'train', recipe, '--seed', seed, '--steps', steps,
               '--out', out, '--set', 'eval_every=1000000000')
        summary = json.loads((out/'summary.json').read_text())
    extra = sum(summary['spent'].get(part, 0) for part in ('evaluations', 'checkpoints'))
    return dict(seconds=summary['wall_s'] - extra, final_return=summary['final_return'])


def run(options):
    most, updates, trainings, seeds = 8, 250, TRAININGS, 3
    if options.quick:
        trainings = {'cartpole': (1_200, *TRAININGS['cartpole'][1:])}
        most, updates, seeds = 2, 30, 1
    found = dict(steps={}, runs={})
    for learners in 1, 2:
        command = ('-m', 'torch.distributed.run', '--standalone',
                   f'--nproc-per-node={learners}', FOLDER/'ours_parallel.py')
        found['steps'][learners] = {n: json.loads(python(*command, n, updates*n).splitlines()[-1])
                                    for n in (1, 2, 4, 8) if learners <= n <= most}
    for recipe, (steps, learner, settings) in trainings.items():
        train_ours(recipe, 0, settings['learning_starts'] + 200)    # compiles kernels
        runs = found['runs'][recipe] = {'fastrl_replay': [], SB3: []}
        for seed in range(seeds):
            runs['fastrl_replay'].append(train_ours(recipe, seed, steps))
            if SB3 in options.libraries:
                worker = Worker(SB3, options.libraries[SB3][0])
                runs[SB3].append(worker.call(
                    'train_sb3', 'learners', learner=learner, seed=seed, steps=steps, **settings))
                worker.close()
    return found


def report(results):
    lines = [[n, actors, rate]
             for n, rates in results['steps'].items() for actors, rate in rates.items()]
    steps = markdown_table(['learners', 'actors that wait 5 ms', 'steps a second'], lines)
    lines = [[recipe, who, *(median(x[key] for x in runs) for key in ('seconds', 'final_return'))]
             for recipe, found in results['runs'].items() for who, runs in found.items() if runs]
    return steps + '\n\n' + markdown_table(['recipe', 'library', 'seconds', 'final return'], lines)
