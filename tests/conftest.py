"""What all tests share."""
import torch

torch.set_num_threads(1)   # the networks here are small, and pytest-xdist uses the other cores
