"""A training loop on FSDP2: `fully_shard`, `loss.backward()`, a torch optimizer."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

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
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=STEPS)

    losses, norms, rates = [], [], []
    for step in range(STEPS):
        total = torch.zeros(())
        for micro in range(ACCUM):
            tokens, labels = batch(step, micro, rank)
            model.set_requires_gradient_sync(micro == ACCUM - 1)
            loss = nn.functional.cross_entropy(model(tokens), labels) / ACCUM
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        rates.append(schedule.get_last_lr()[0])
        opt.step()
        opt.zero_grad()
        schedule.step()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        norms.append(norm.full_tensor().item())

    model.eval()
    with torch.no_grad():
        right = (model(batch(99, 0, 0)[0]).argmax(1) == batch(99, 0, 0)[1]).sum().item()
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(weights, f"{out}/weights.pt")
        with open(f"{out}/seen.json", "w") as file:
            json.dump({"loss": losses, "norm": norms, "lr": rates, "right": right}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
