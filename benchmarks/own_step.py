"""A WGAN-GP step as one Program beside the same step as two gradients and two updates.

    python -m benchmarks.own_step
    torchrun --nproc_per_node 2 -m benchmarks.own_step --rounds 20

Each round runs both, one after the other, in changing order; the ratio is the median over rounds of
the one Program's time over the separate calls', with the quartiles behind it.
"""

import argparse
import os
import statistics
from typing import Any

import torch
from torch import Tensor, nn

import fzero
from benchmarks.speed import one_round


def main() -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=128, help="of each rank")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    separate, together = steps_of(args.width, args.rows)
    one_round(separate, together, turned=False)  # recorded
    rounds = [one_round(separate, together, turned=i % 2 == 1) for i in range(args.rounds + 2)][2:]
    low, middle, high = statistics.quantiles([b / a for a, b in rounds], n=4)
    apart, one = (statistics.median(column) * 1e3 for column in zip(*rounds, strict=True))
    if os.environ.get("RANK", "0") == "0":
        print("| separate ms | one Program ms | one / separate |")
        print("|---|---|---|")
        print(f"| {apart:.2f} | {one:.2f} | {middle:.3f} [{low:.3f}, {high:.3f}] |")


def steps_of(width: int, rows: int) -> tuple[Any, Any]:
    """The step in both ways, each with networks and states of its own."""
    torch.manual_seed(0)
    body = nn.Linear(width, width), nn.LeakyReLU(0.2)
    critic = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2), *body, nn.Linear(width, 1))
    body = nn.Linear(width, width), nn.LeakyReLU(0.2)
    generator = nn.Sequential(nn.Linear(16, width), nn.LeakyReLU(0.2), *body, nn.Linear(width, 64))
    score, critic_params = fzero.functionalize(critic)
    generate, generator_params = fzero.functionalize(generator)
    real, noise, mix = torch.rand(rows, 64), torch.randn(rows, 16), torch.rand(rows, 1)
    cfg, opt = fzero.Config(stage=3), fzero.optim.adam(1e-4, b1=0.0, b2=0.9)

    def critic_loss(critic: Any, generator: Any, real: Tensor, noise: Tensor, mix: Tensor) -> Any:
        fake = generate(generator, noise)
        between = mix * real + (1 - mix) * fake
        slopes = torch.func.grad(lambda x: score(critic, x).sum())(between)
        penalty = (slopes.norm(dim=1) - 1).square().mean()
        return score(critic, fake).mean() - score(critic, real).mean() + 10 * penalty

    def generator_loss(generator: Any, critic: Any, noise: Tensor) -> Tensor:
        return -score(critic, generate(generator, noise)).mean()

    critic_grad = fzero.value_and_grad(critic_loss, cfg)
    generator_grad = fzero.value_and_grad(generator_loss, cfg)

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        updates, state = opt.update(grads, state, params)
        return fzero.apply_updates(params, updates), state

    def whole(nets: Any, states: Any, update: Any = update) -> tuple[Any, Any, Tensor]:
        (generator, critic), (g_state, c_state) = nets, states
        loss, grads = critic_grad(critic, generator, real, noise, mix)
        critic, c_state = update(critic, grads, c_state)
        fooled, grads = generator_grad(generator, critic, noise)
        generator, g_state = update(generator, grads, g_state)
        return (generator, critic), (g_state, c_state), loss + fooled

    updated = fzero.jit(update, cfg, donate_argnums=(0, 2))
    stepped = fzero.jit(lambda nets, states: whole(nets, states), cfg, donate_argnums=(0, 1))

    def start() -> list[Any]:
        nets = tuple(fzero.shard(p, cfg) for p in (generator_params, critic_params))
        return [nets, tuple(map(opt.init, nets))]

    one, other = start(), start()

    def separate() -> None:
        one[0], one[1], _ = whole(*one, update=updated)

    def together() -> None:
        other[0], other[1], _ = stepped(*other)

    return separate, together


if __name__ == "__main__":
    main()
