"""The spectrum of a Hessian that no rank holds, by Lanczos on trees of shards.

python examples/hessian_spectrum.py                                  # one process
torchrun --nproc_per_node 2 examples/hessian_spectrum.py             # two ranks, sharded

A small network learns scikit-learn's digits; then the eigenvalues of its loss's Hessian are looked
at, before training and after. The Hessian is met as a function of a vector alone, `fzero.hvp`:
neither it nor the parameters nor a Lanczos vector is ever whole on any rank. Stochastic Lanczos
quadrature: Ghorbani, Krishnan and Xiao, An Investigation into Neural Net Optimization via Hessian
Eigenvalue Density, arXiv:1901.10159, algorithms 1 and 2.
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import fzero

cli = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
cli.add_argument("--steps", type=int, default=200, help="of training")
cli.add_argument("--lanczos", type=int, default=60, help="Lanczos steps of each probe")
cli.add_argument("--probes", type=int, default=4, help="random vectors for the density")
cli.add_argument("--top", type=int, default=10, help="eigenvalues to print")
cli.add_argument("--width", type=int, default=32, help="of the hidden layer")
cli.add_argument("--rows", type=int, default=1536, help="digits to learn, over all ranks")
cli.add_argument("--seed", type=int, default=0)
cli.add_argument("--out", type=Path, default=Path("runs/hessian_spectrum"))
args = cli.parse_args()
rank, local_rank, world = (
    int(os.environ.get(name, default))
    for name, default in [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)]
)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

# ---- data and model, in float64: small eigenvalues are differences of large numbers ----
digits: Any = load_digits()
mine = slice(rank * args.rows // world, (rank + 1) * args.rows // world)
x = torch.tensor(digits.data, device=device)[: args.rows][mine] / 16
y = torch.tensor(digits.target, device=device)[: args.rows][mine]
torch.manual_seed(args.seed)  # the same model on every rank
model = nn.Sequential(nn.Linear(64, args.width), nn.Tanh(), nn.Linear(args.width, 10))
apply, params = fzero.functionalize(model.to(device, torch.float64))


def loss_fn(params: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(apply(params, x), y)


# ---- Lanczos: an orthonormal basis in which the Hessian is tridiagonal ----
cfg = fzero.Config(stage=3, seed=args.seed)
hvp = fzero.hvp(loss_fn, cfg)


def lanczos_step(params: Any, basis: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor, Tensor]:
    """The next vector of the basis, how the Hessian acts on the last one, and what was left.

    Args:
        basis: rows (steps, ...) of each parameter; the last one not zero is at work. Those to come
            are zeros, so that all steps have one shape and are one Program.
    """
    _, product = hvp(params, basis[-1], x, y)
    along = fzero.tree_vdot(basis[-1], product)
    for _ in range(2):  # once against all loses digits where little is left; twice is enough
        for one in basis:
            share = fzero.tree_vdot(one, product)
            product = fzero.tree_map(lambda p, v, s=share: p - s * v, product, one)
    left = fzero.tree_norm(product)
    return fzero.tree_map(lambda p: p / left, product), along, left
