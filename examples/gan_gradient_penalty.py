"""A Wasserstein GAN with gradient penalty on scikit-learn's digits: the whole step is one Program.

python examples/gan_gradient_penalty.py                                  # one process
torchrun --nproc_per_node 2 examples/gan_gradient_penalty.py             # two ranks, sharded

Two networks, two optimizers, a loss that holds a gradient, and a moving average, written as one
function of trees of shards (Gulrajani et al., Improved Training of Wasserstein GANs,
arXiv:1704.00028, algorithm 1).
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import fzero

cli = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
cli.add_argument("--steps", type=int, default=1500, help="of the generator")
cli.add_argument("--critic-steps", type=int, default=5, help="of the critic in each of these")
cli.add_argument("--batch", type=int, default=128, help="digits, over all ranks")
cli.add_argument("--width", type=int, default=256, help="of the hidden layers")
cli.add_argument("--penalty", type=float, default=10.0, help="lambda in the paper")
cli.add_argument("--lr", type=float, default=5e-4)
cli.add_argument("--executor", choices=["traced", "eager"], default="traced")
cli.add_argument("--double", action="store_true", help="float64 in place of float32")
cli.add_argument("--seed", type=int, default=0)
cli.add_argument("--out", type=Path, default=Path("runs/gan_gradient_penalty"))
args = cli.parse_args()
rank, local_rank, world = (
    int(os.environ.get(name, default))
    for name, default in [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)]
)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
dtype = torch.float64 if args.double else torch.float32
latent, mine = 16, slice(rank * args.batch // world, (rank + 1) * args.batch // world)

# ---- data: 1,797 digits of 8x8 pixels in 0..16; every tenth is kept to compare with ----
digits: Any = load_digits()
pixels = torch.tensor(digits.data, dtype=dtype, device=device) / 8 - 1  # in -1..1
labels = torch.tensor(digits.target, device=device)
kept = torch.arange(len(pixels), device=device) % 10 == 0
train, valid = pixels[~kept], pixels[kept]


def batch_of(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Digits, noise, and where between both the penalty looks: (critic steps, rows, ...) each.

    Drawn for all ranks, and cut: the numbers do not depend on how many there are.
    """
    draws = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    lead = (args.critic_steps, args.batch)
    real = train[torch.randint(len(train), lead, generator=draws).to(device)]
    noise = torch.randn(*lead, latent, generator=draws, dtype=torch.float64)
    mix = torch.rand(*lead, 1, generator=draws, dtype=torch.float64)
    return real[:, mine], noise[:, mine].to(device, dtype), mix[:, mine].to(device, dtype)


# ---- networks: the last bias of a critic has no gradient, as only differences count ----
def mlp(inputs: int, outputs: int, *, bias: bool = True) -> nn.Sequential:
    up, across = nn.Linear(inputs, args.width), nn.Linear(args.width, args.width)
    down = nn.Linear(args.width, outputs, bias=bias)
    return nn.Sequential(up, nn.LeakyReLU(0.2), across, nn.LeakyReLU(0.2), down)


torch.manual_seed(args.seed)  # the same networks on every rank
generator = nn.Sequential(mlp(latent, 64), nn.Tanh()).to(device, dtype)
generate, generator_params = fzero.functionalize(generator)
score, critic_params = fzero.functionalize(mlp(64, 1, bias=False).to(device, dtype))


# ---- losses, written for full leaves and this rank's rows ----
def critic_loss(critic: Any, generator: Any, real: Tensor, noise: Tensor, mix: Tensor) -> Any:
    fake = generate(generator, noise)
    between = mix * real + (1 - mix) * fake
    slopes = torch.func.grad(lambda x: score(critic, x).sum())(between)  # of each row
    penalty = (slopes.norm(dim=1) - 1).square().mean()
    distance = score(critic, real).mean() - score(critic, fake).mean()
    return args.penalty * penalty - distance, {"distance": distance, "penalty": penalty}


def generator_loss(generator: Any, critic: Any, noise: Tensor) -> Tensor:
    return -score(critic, generate(generator, noise)).mean()


# ---- the step: of shards ----
cfg = fzero.Config(stage=3, seed=args.seed, executor=args.executor)
opt = fzero.optim.adam(args.lr, b1=0.0, b2=0.9)
critic_grad = fzero.value_and_grad(critic_loss, cfg, has_aux=True)
generator_grad = fzero.value_and_grad(generator_loss, cfg)
mean = fzero.sharded(lambda critic, aux: aux, cfg, reduce="mean")  # over the ranks


def step(nets: Any, states: Any, batch: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    (generator, critic, average), (generator_state, critic_state) = nets, states
    loss, aux = torch.zeros(()), {}
    for real, noise, mix in zip(*batch, strict=True):
        (loss, aux), grads = critic_grad(critic, generator, real, noise, mix)
        updates, critic_state = opt.update(grads, critic_state, critic)
        critic = fzero.apply_updates(critic, updates)
    # the noise of the last round once more
    fooled, grads = generator_grad(generator, critic, batch[1][-1])
    updates, generator_state = opt.update(grads, generator_state, generator)
    generator = fzero.apply_updates(generator, updates)
    average = fzero.tree_map(lambda a, b: 0.99 * a + 0.01 * b, average, generator)
    metrics = {"critic_loss": loss, "generator_loss": fooled, **mean(critic, aux)}
    nets = generator, critic, average
    return nets, (generator_state, critic_state), metrics


step_fn = fzero.jit(step, cfg, donate_argnums=(0, 1))  # old networks and states give their memory
nets = [fzero.shard(p, cfg) for p in (generator_params, critic_params, generator_params)]
nets, states = tuple(nets), (opt.init(nets[0]), opt.init(nets[1]))
if args.executor == "traced" and rank == 0:
    program = step_fn.lower(nets, states, batch_of(0))
    peak = program.peak_bytes() / 2**20
    print(f"one Program: {len(program.collectives())} collectives, peak {peak:.1f} MiB a rank")
rows = []
for i in (bar := tqdm(range(args.steps), mininterval=1, disable=rank > 0)):
    nets, states, metrics = step_fn(nets, states, batch_of(i))
    rows.append({"step": i + 1, **{k: v.item() for k, v in metrics.items()}})
    bar.set_postfix(distance=f"{rows[-1]['distance']:.3f}", refresh=False)

# ---- what came out: every rank takes part ----
looks = torch.Generator().manual_seed(args.seed)
noise = torch.randn(256, latent, generator=looks, dtype=torch.float64).to(device, dtype)
samples = fzero.sharded(generate, cfg)(nets[2], noise)
if rank == 0:
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    nearest = torch.cdist(samples, train).min(dim=1)
    others = torch.cdist(valid, train).min(dim=1).values.mean()
    blur = torch.cdist(torch.rand_like(samples) * 2 - 1, train).min(dim=1).values.mean()
    print(
        f"to the nearest training digit: samples {nearest.values.mean():.2f}, "
        f"digits never seen {others:.2f}, uniform noise {blur:.2f}"
    )
    counts = torch.bincount(labels[~kept][nearest.indices], minlength=10).tolist()
    print(f"of 256 samples nearest to 0, 1, ... 9: {counts}")
    fig, panels = plt.subplot_mosaic("AB;CC", figsize=(8, 7), layout="constrained")
    for axes, title, images in [("A", "digits", valid), ("B", "samples", samples)]:
        tiles = nn.functional.pad(images[:64].view(8, 8, 8, 8), (1, 1, 1, 1), value=-1)
        tiles = tiles.transpose(1, 2).reshape(80, 80).cpu()
        panels[axes].imshow(tiles, cmap="gray_r", vmin=-1, vmax=1)
        panels[axes].set(title=title, xticks=[], yticks=[])
    panels["C"].plot(
        [row["distance"] for row in rows], label="critic's distance, digits to samples"
    )
    panels["C"].plot([row["penalty"] for row in rows], label="gradient penalty")
    panels["C"].set(xlabel="step of the generator", title="training")
    panels["C"].legend()
    fig.savefig(args.out / "samples.png")
