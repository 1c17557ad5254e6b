"""Train DQN on CartPole, and SAC and TD3 on the pendulum, next to Stable-Baselines3 with the same settings."""
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from harness import ONE_THREAD, ROOT, Worker, WorkerError, markdown_table

CARTPOLE = dict(env='CartPole-v1', learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1_000,
                gamma=.99, target_update_interval=10, train_freq=256, gradient_steps=128, exploration_fraction=.16,
                exploration_final_eps=.04, policy_kwargs=dict(net_arch=[256, 256]))   # of its zoo
PENDULUM = dict(env='Pendulum-v1', learning_rate=1e-3, train_freq=1, gradient_steps=1)
