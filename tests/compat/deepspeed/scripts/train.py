"""A training script as DeepSpeed's users write them; it knows no other library.

torchrun --nproc-per-node 2 train.py --deepspeed --deepspeed_config ds.json --out OUT

Each rank writes what it saw to OUT/rank-N.json.
"""

import argparse
import json
import os

import deepspeed
import torch
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, WIDTH, LENGTH = 32, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x) if self.training else block(x)
        logits = self.head(x.cumsum(1) / LENGTH)
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


class Words(Dataset):
    def __init__(self, seed, count):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(VOCABULARY, (count, 1), generator=generator)
        stride = torch.randint(1, 4, (count, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


def groups(model):
    """Weight decay for matrices only."""
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight") and "norm" not in n]
    ids = {id(p) for p in decayed}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def evaluate(engine, data):
    engine.eval()
    with torch.no_grad():
        losses = [engine(data[i : i + 4].to(engine.device)).item() for i in range(0, 8, 4)]
    engine.train()
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    parser.add_argument("--out", required=True)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    with open(args.deepspeed_config) as file:
        config = json.load(file)
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    stage3 = config["zero_optimization"]["stage"] == 3

    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage3):
        model = Model()
    with deepspeed.zero.GatheredParameters(model.head.bias, modifier_rank=0):
        if rank == 0:
            nn.init.constant_(model.head.bias, 0.01)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=groups(model), training_data=Words(1, 64)
    )
    validation = Words(2, 8).tokens

    seen = {"loss": [], "lr": [], "norm": [], "boundary": [], "evaluation": []}

    def epoch():
        for batch in loader:
            loss = engine(batch.to(engine.device))
            engine.backward(loss)
            seen["boundary"].append(engine.is_gradient_accumulation_boundary())
            engine.step()
            seen["loss"].append(loss.item())
            seen["lr"].append(engine.get_lr())
            norm = engine.get_global_grad_norm()
            seen["norm"].append(None if norm is None else float(norm))
        seen["evaluation"].append(evaluate(engine, validation))

    epoch()
    folder = os.path.join(args.out, "checkpoints")
    engine.save_checkpoint(folder, tag="first", client_state={"epoch": 1, "note": "half-way"})
    epoch()
    path, client_state = engine.load_checkpoint(folder)
    seen["client"] = [client_state["epoch"], client_state["note"], os.path.basename(str(path))]
    seen["steps"] = [engine.global_steps, engine.skipped_steps, engine.micro_steps]
    epoch()
    with deepspeed.zero.GatheredParameters(model.head.weight):
        seen["weight"] = model.head.weight.detach().float().sum().item()
    exported = engine.save_16bit_model(args.out)
    seen["exported"] = bool(exported)
    seen["batch"] = [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()]
    with open(os.path.join(args.out, f"rank-{rank}.json"), "w") as file:
        json.dump(seen, file)


if __name__ == "__main__":
    main()
