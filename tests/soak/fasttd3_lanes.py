"""Run FastTD3's `train.py` in a Brax environment with its own buffer and with `LaneReplay`.

    python tests/soak/fasttd3_lanes.py FOLDER [--steps N] [--out FILE]

FOLDER is a clone of https://github.com/younggyoseo/FastTD3. This needs `pip install brax tensordict
tyro`; on two CPU cores it takes three minutes. The adapter is the one in
nbs/tutorials/simulator_training.ipynb. It prints the mean length of episodes during training.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from brax_lanes import Brax

SCRIPT = Path(__file__).resolve()
PAGE = SCRIPT.parents[2] / 'nbs/tutorials/simulator_training.ipynb'
ENVS, EVERY = 64, 300
OPTIONS = (
    '--env_name Isaac-Lift-Cube-Franka-v0 --num_steps 3 --buffer_size 2000 --batch_size 256 '
    '--critic_hidden_dim 128 --actor_hidden_dim 64 --num_atoms 51 --v_min 0 --v_max 100 '
    '--learning_starts 100 --eval_interval 0 --no-cuda --no-compile --no-amp --no-use_wandb '
    f'--num_envs {ENVS} --num_eval_envs {ENVS}'
)
terminations = []  # of each step


class Pole(Brax):
    "The environment, with the interface of FastTD3's wrappers"

    num_obs, num_actions, num_privileged_obs, asymmetric_obs = 4, 1, 0, False

    def __init__(self, name, device, envs, seed, action_bounds=None):
        super().__init__('inverted_pendulum', envs)

    def reset(self, random_start_init=True):
        return super().reset()[0].clone()

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        terminations.append(int(terminated.sum()))
        raw = dict(obs=info['final_obs'].clone())
        info = dict(time_outs=truncated, observations=dict(raw=raw))
        return obs.clone(), reward, (terminated | truncated).long(), info


def adapter():
    "Return the class on the page"
    cells = [''.join(cell['source']) for cell in json.loads(PAGE.read_text())['cells']]
    code = next(cell for cell in cells if cell.startswith('class LaneBuffer'))
    names = {}
    exec('import torch\nfrom fastrl_replay.all import *\n' + code, names)
    return names['LaneBuffer']


def train(folder, which, steps):
    "Train in this process, and print the mean lengths of episodes as JSON"
    sys.path.insert(0, str(folder / 'fast_td3'))
    simulator = ModuleType('environments.isaaclab_env')
    simulator.IsaacLabEnv = Pole
    sys.modules.update({simulator.__name__: simulator, 'wandb': ModuleType('wandb')})
    import fast_td3_utils

    if which == 'lanes':
        fast_td3_utils.SimpleReplayBuffer = adapter()
    import train as program

    sys.argv = ['train.py', *OPTIONS.split(), '--total_timesteps', str(steps)]
    program.main()
    parts = [terminations[i : i + EVERY] for i in range(0, steps - EVERY + 1, EVERY)]
    print('\n' + json.dumps([round(ENVS * EVERY / max(sum(part), 1), 1) for part in parts]))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('folder', type=Path)
    parser.add_argument('--steps', type=int, default=1_500)
    parser.add_argument('--out', help='write the results to this file')
    parser.add_argument('--which', choices=['ring', 'lanes'], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.which:
        return train(args.folder, args.which, args.steps)
    results = dict(every=EVERY, envs=ENVS, torch=torch.__version__)
    for which in 'ring', 'lanes':
        command = [sys.executable, SCRIPT, args.folder.resolve(), '--steps', str(args.steps)]
        command += ['--which', which]
        with tempfile.TemporaryDirectory() as place:  # FastTD3 saves its models there
            run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=place)
        results[which] = json.loads(run.stdout.splitlines()[-1])
        print(which, results[which])
    if args.out:
        with open(args.out, 'w', encoding='utf-8') as file:
            file.write(json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    main()
