"""The loop of before_fsdp2.py on an Engine."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

import fzero

ACCUM, STEPS = 2, 6


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=10, classes=5):
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        x = self.embed(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * (step % 2) + 10 * micro + rank)
    tokens = torch.randint(17, (4, 6), generator=generator)
    return tokens, tokens.sum(1) % 5


def main(out):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    adamw = fzero.optim.inject_hyperparams(fzero.optim.adamw)(lr=1e-2, weight_decay=0.1)
    engine = fzero.Engine(model, adamw, fzero.Config(stage=3, accum_steps=ACCUM, clip_norm=0.5))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, T_max=STEPS)

    losses, norms, rates = [], [], []
    for step in range(STEPS):
        for micro in range(ACCUM):
            tokens, labels = batch(step, micro, rank)
            engine.backward(nn.functional.cross_entropy(engine(tokens), labels))
        engine.optimizer.step()
        schedule.step()
        losses.append(engine.metrics["loss"].item())
        norms.append(engine.metrics["grad_norm"].item())
        rates.append(engine.metrics["lr"].item())

    engine.eval()
    with torch.no_grad():
        right = (engine(batch(99, 0, 0)[0]).argmax(1) == batch(99, 0, 0)[1]).sum().item()
    weights = engine.state_dict()
    if rank == 0:
        torch.save(weights, f"{out}/weights.pt")
        with open(f"{out}/seen.json", "w") as file:
            json.dump({"loss": losses, "norm": norms, "lr": rates, "right": right}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
