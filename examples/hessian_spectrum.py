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
from functools import partial
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


class Quadrature(NamedTuple):
    """What one random vector sees of a spectrum.

    Args:
        values: estimates of eigenvalues, smallest first: (steps,).
        weights: of each in the density; they add up to 1.
        errors: an eigenvalue is at most this far from each.
    """

    values: Tensor
    weights: Tensor
    errors: Tensor


@partial(fzero.jit, cfg=cfg)
def without(vector: Any, one: Any) -> Any:
    """What is left of a vector that is orthogonal to a unit vector."""
    share = fzero.tree_vdot(one, vector)
    return fzero.tree_map(lambda v, u: v - share * u, vector, one)


@partial(fzero.jit, cfg=cfg)
def unit(vector: Any) -> tuple[Any, Tensor]:
    """A vector of length 1, and the length that it had."""
    length = fzero.tree_norm(vector)
    return fzero.tree_map(lambda v: v / length, vector), length


def lanczos(params: Any, seed: int) -> Quadrature:
    """Run Lanczos from a random vector; Parlett, The Symmetric Eigenvalue Problem, 1980, ch. 13."""
    vector, _ = unit(fzero.tree_random_like(params, seed))
    basis, diagonal, beside = [vector], [], []
    for _ in range(args.lanczos):
        _, product = hvp(params, basis[-1], x, y)
        diagonal.append(fzero.tree_vdot(basis[-1], product))
        # in exact arithmetic the last two would do; once more, as the first pass leaves roundings
        for one in (*basis, *basis):
            product = without(product, one)
        vector, length = unit(product)
        basis.append(vector)
        beside.append(length)
    off = torch.stack(beside[:-1])
    tridiagonal = torch.stack(diagonal).diag() + off.diag(1) + off.diag(-1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    return Quadrature(values, vectors[0].square(), (beside[-1] * vectors[-1]).abs())


def spectrum(params: Any) -> list[Quadrature]:
    """One quadrature for each probe."""
    seeds = range(args.seed, args.seed + args.probes)
    return [lanczos(params, seed) for seed in tqdm(seeds, desc="probes", disable=rank > 0)]


def density(found: list[Quadrature], at: Tensor, width: float) -> Tensor:
    """The density of eigenvalues, each a Gaussian of this width, at these values: (points,)."""
    values = torch.cat([one.values for one in found])
    weights = torch.cat([one.weights for one in found]) / len(found)
    bells = torch.exp(-(((at[:, None] - values) / width) ** 2) / 2)
    return bells @ weights / (width * math.sqrt(2 * math.pi))


# ---- training, and a look before and after ----
step_fn = fzero.make_train_step(lambda p, batch: loss_fn(p, *batch), fzero.optim.adam(1e-2), cfg)
params, opt_state = step_fn.init(params)
spectra = {"before training": spectrum(params)}
for _ in range(args.steps):
    params, opt_state = step_fn(params, opt_state, (x, y))
spectra["after training"] = spectrum(params)

# ---- what came out ----
loss = fzero.sharded(loss_fn, cfg, reduce="mean")(params, x, y).item()
if rank == 0:
    args.out.mkdir(parents=True, exist_ok=True)
    size = sum(p.numel() for p in params.values())
    peak = hvp.lower(params, params, x, y).peak_bytes() / 2**20
    dense = 8 * size**2 / 2**20
    print(f"{size} parameters, loss {loss:.4f} after training")
    print(f"a product with the Hessian: peak {peak:.1f} MiB a rank; the Hessian: {dense:.1f} MiB")
    fig, panels = plt.subplots(2, 1, figsize=(8, 7), sharex=True)
    low = min(one.values.min() for found in spectra.values() for one in found).item()
    high = max(one.values.max() for found in spectra.values() for one in found).item()
    margin = 0.05 * (high - low)
    at = torch.linspace(low - margin, high + margin, 2000, dtype=torch.float64)
    report = {}
    for axes, (when, found) in zip(panels, spectra.items(), strict=True):
        values, _, errors = found[0]
        top = [(v.item(), e.item()) for v, e in zip(values, errors, strict=True)]
        report[when] = {"top": top[::-1][: args.top], "bottom": top[: args.top]}
        print(f"{when}, the largest:", *(f"{v:.4g}" for v, _ in report[when]["top"]))
        print(f"{when}, the smallest:", *(f"{v:.4g}" for v, _ in report[when]["bottom"][:3]))
        axes.semilogy(at, density(found, at.to(values.device), 0.01 * (high - low)).cpu())
        axes.plot(*zip(*[(v, 2e-5) for v, _ in report[when]["top"]], strict=True), "|", color="r")
        axes.set(title=when, ylabel="density", ylim=(1e-5, 1e3))
    panels[-1].set(xlabel="eigenvalue of the Hessian")
    fig.savefig(args.out / "spectrum.png")
    (args.out / "spectrum.json").write_text(json.dumps(report))
