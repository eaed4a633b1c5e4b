"""Digests of losses and parameters of 20 steps: did a change of structure change a number?

    python -m benchmarks.digests save before.json          # world 1
    torchrun --nproc-per-node 2 -m benchmarks.digests compare before.json

Stages 0 to 3, the traced and the eager executor and the Engine, with accumulation, clipping,
dropout and bf16. `save` adds this world's digests to the file; `compare` names every row that
differs and ends with exit code 1. Digests are of one machine and one torch: rounding is theirs.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import fzero

STEPS = 20
CONFIGS = {
    "plain": {},
    "accum2 clip": {"accum_steps": 2, "clip_norm": 0.5},
    "bf16": {"precision": "bf16"},
}


class Model(nn.Module):
    """Odd shapes, a tied weight, dropout, a norm: what layouts and masks can go wrong with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
            for _ in range(2)
        )
        self.head = nn.Linear(6, 13)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + nn.functional.dropout(block(x), 0.1, self.training)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Another batch for every step and rank."""
    made = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        text = torch.randint(0, 13, (4, 8), generator=generator)
        made.append((text[:, :-1].contiguous(), text[:, 1:].contiguous()))
    return made


def with_step(cfg: fzero.Config, rank: int) -> list[torch.Tensor]:
    """Losses and final parameters of the step function."""
    apply, params = fzero.functionalize(Model())
    opt = fzero.optim.adamw(1e-2, weight_decay=0.1)
    step_fn = fzero.make_train_step(lambda p, batch: apply(p, *batch), opt, cfg)
    state = step_fn.init({name: x.clone() for name, x in params.items()})
    values = []
    for batch in batches(rank):
        state = step_fn(*state, batch)
        values.append(state[1].metrics["loss"].clone())
    return [*values, *fzero.unshard(state[0]).values()]


def with_engine(cfg: fzero.Config, rank: int) -> list[torch.Tensor]:
    """Losses and final parameters of the Engine."""
    engine = fzero.Engine(Model(), fzero.optim.adamw(1e-2, weight_decay=0.1), cfg)
    torch.manual_seed(rank)
    values = []
    for tokens, targets in batches(rank):
        k = cfg.accum_steps
        for part in zip(tokens.chunk(k), targets.chunk(k), strict=True):
            loss = engine(*part)
            loss.backward()
            values.append(loss.detach().clone())
        engine.step()
    return [*values, *engine.full_params().values()]


def digests(rank: int, world: int) -> dict[str, str]:
    """A digest for each way of training."""
    found = {}
    for stage in range(4):
        for name, fields in CONFIGS.items():
            for way in ("traced", "eager", "Engine"):
                torch.manual_seed(0)
                if way == "Engine":
                    values = with_engine(fzero.Config(stage=stage, **fields), rank)
                else:
                    cfg = fzero.Config(stage=stage, executor=way, **fields)
                    values = with_step(cfg, rank)
                data = b"".join(x.double().numpy().tobytes() for x in values)
                key = f"world {world}, rank {rank}, stage {stage}, {name}, {way}"
                found[key] = hashlib.blake2b(data, digest_size=8).hexdigest()
    return found


def main() -> None:
    """Save or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["save", "compare"])
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    mine = digests(rank, world)
    if rank:  # all ranks end with the same parameters; one says so
        return
    known = json.loads(args.file.read_text()) if args.file.exists() else {}
    if args.what == "save":
        args.file.write_text(json.dumps(known | mine, indent=1, sort_keys=True) + "\n")
        print(f"{len(mine)} digests saved")
        return
    wrong = [key for key in mine if known.get(key) != mine[key]]
    print(*wrong, f"{len(mine) - len(wrong)} of {len(mine)} equal", sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
