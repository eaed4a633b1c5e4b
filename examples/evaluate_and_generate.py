"""Train a byte-level GPT at stage 3, then validate it and sample from it: no rank ever holds it.

python examples/evaluate_and_generate.py                                # one process
torchrun --nproc_per_node 2 examples/evaluate_and_generate.py           # two ranks, sharded

The text is Python's own standard library. Samples are drawn one byte at a time with a cache of keys
and values: a pytree of fixed shapes, so that a single Program serves every byte of every prompt.
"""

import argparse
import math
import os
import sysconfig
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from tqdm import tqdm

import fzero

cli = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
cli.add_argument("--stage", type=int, default=3, help="ZeRO stage, 0 to 3")
cli.add_argument("--precision", help="as in fzero.Config; float32 if not given")
cli.add_argument("--steps", type=int, default=300)
cli.add_argument("--size", default="small", choices=["tiny", "small", "medium"])
cli.add_argument("--batch", type=int, default=6, help="windows per rank and step")
cli.add_argument("--length", type=int, default=120, help="bytes of a sample, its prompt included")
cli.add_argument("--temperature", type=float, default=0.6)
cli.add_argument("--seed", type=int, default=0)
cli.add_argument("--out", type=Path, default=Path("runs/evaluate_and_generate"))
args = cli.parse_args()
prompts = [b"def ", b"class ", b"import os\n\n", b"    if not isinstance("]
if args.length <= (least := max(map(len, prompts))):
    cli.error(
        f"--length {args.length} must be more than {least} bytes, those of the longest prompt"
    )
rank, local_rank, world = (
    int(os.environ.get(name, default))
    for name, default in [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)]
)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
context, (width, depth) = 128, {"tiny": (32, 2), "small": (128, 4), "medium": (256, 8)}[args.size]

# ---- data: every tenth file is kept for validation ----
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def windows_of(paths: list[Path]) -> Tensor:
    """Every run of `context + 1` bytes in these files, as a view: (windows, context + 1), uint8."""
    text = bytearray(b"".join(path.read_bytes() for path in paths))
    return torch.frombuffer(text, dtype=torch.uint8).unfold(0, context + 1, 1)


train, valid = windows_of([f for i, f in enumerate(files) if i % 10]), windows_of(files[::10])
valid = valid[torch.linspace(0, len(valid) - 1, 256 // world * world).long()].long().to(device)
my_draws = torch.Generator().manual_seed(args.seed * world + rank)


# ---- model: pre-norm, rotary positions, normalised queries and keys ----
linear, norm = partial(nn.Linear, bias=False), partial(nn.RMSNorm, elementwise_affine=False)


def rotate(x: Tensor, position: Tensor) -> Tensor:
    pair = torch.arange(x.shape[-1] // 2, device=x.device)
    angle = position[:, None] * 100.0 ** (-pair / len(pair))
    (a, b), cos, sin = x.chunk(2, dim=-1), angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Sequential(norm(width), linear(width, 3 * width))
        self.head_norm, self.proj = norm(32), linear(width, width)
        up, down = linear(width, 4 * width), linear(4 * width, width)
        self.mlp = nn.Sequential(norm(width), up, nn.GELU(), down)

    def forward(
        self, x: Tensor, position: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 32)).transpose(1, 3).unbind(2)
        q, k = (rotate(self.head_norm(y), position) for y in (q, k))
        seen = None
        if past is not None:  # one byte: its keys and values join those before it
            k, v = (old.index_copy(2, position, new) for old, new in zip(past, (k, v), strict=True))
            seen = torch.arange(k.shape[2], device=x.device) <= position[:, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=past is None)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x), (k, v)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(256, width), nn.ModuleList()
        self.blocks.extend(Block() for _ in range(depth))
        self.head = nn.Sequential(norm(width), linear(width, 256))

    def forward(
        self, text: Tensor, position: Tensor, cache: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, new = self.embed(text), []
        for i, block in enumerate(self.blocks):
            x, kept = block(x, position, cache[i] if cache else None)
            new.append(kept)
        return self.head(x), new


torch.manual_seed(args.seed)  # the same model on every rank
apply, full = fzero.functionalize(GPT().to(device))


def losses_of(params: dict[str, Tensor], text: Tensor) -> Tensor:
    """Nats at each position, the mean over rows: (context,)."""
    logits, _ = apply(params, text[:, :-1], torch.arange(context, device=text.device))
    return F.cross_entropy(logits.float().mT, text[:, 1:], reduction="none").mean(0)


def write(params: dict[str, Tensor], state: dict) -> dict:
    """One more byte of every row: the prompt's own, while there is one, and a drawn one after."""
    text, lengths, position = state["text"], state["lengths"], state["position"]
    logits, cache = apply(params, text.index_select(1, position), position, state["cache"])
    drawn = torch.multinomial((logits[:, -1] / args.temperature).softmax(-1), 1)
    known = position + 1 < lengths[:, None]
    following = torch.where(known, text.index_select(1, position + 1), drawn)
    text = text.index_copy(1, position + 1, following)
    # in the dtypes that it came in: what comes out goes in again
    cache = fzero.tree_map(lambda new, old: new.to(old.dtype), cache, state["cache"])
    return {"text": text, "lengths": lengths, "position": position + 1, "cache": cache}


# ---- training ----
cfg = fzero.Config(args.stage, precision=args.precision, clip_norm=1.0)
opt = fzero.optim.adamw(fzero.optim.warmup_cosine(4e-3, args.steps // 20, args.steps), b2=0.95)
step_fn = fzero.make_train_step(lambda params, text: losses_of(params, text).mean(), opt, cfg)
validate, sample = fzero.sharded(losses_of, cfg, reduce="mean"), fzero.sharded(write, cfg)
params, opt_state = step_fn.init(full)


def bits_per_byte() -> Tensor:
    """At each position of a window, over all ranks' windows: (context,)."""
    found = [len(text) * validate(params, text) for text in mine]
    return torch.stack(found).sum(0).cpu() / len(valid) * world / math.log(2)


mine = valid[rank::world].split(4)
before = bits_per_byte()
for _ in (bar := tqdm(range(args.steps), mininterval=1, disable=rank > 0)):
    drawn = torch.randint(len(train), (args.batch,), generator=my_draws)
    params, opt_state = step_fn(params, opt_state, train[drawn].long().to(device))
    bar.set_postfix(loss=f"{opt_state.metrics['loss'].item():.3f}", refresh=False)
after = bits_per_byte()

# ---- sampling: prompts of several lengths, padded; each rank draws its own bytes ----
cache_shape = (len(prompts), width // 32, args.length, 32)
state = {
    "text": torch.tensor([[*x.ljust(args.length, b"\0")] for x in prompts], device=device),
    "lengths": torch.tensor([len(x) for x in prompts], device=device),
    "position": torch.zeros(1, dtype=torch.long, device=device),
    "cache": [tuple(torch.zeros(2, *cache_shape, device=device)) for _ in range(depth)],
}
program = sample.lower(params, state)
for i in range(args.length - 1):
    assert sample.lower(params, state) is program, "this byte was recorded anew"
    state = sample(params, state, rng=i)  # another number, other draws


# ---- what came out ----
shards = sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in params.values())
beside = shards if args.stage == 3 else 0  # what `unshard` makes lies beside the shards
whole = sum(x.nbytes for x in full.values())
mib, rows = 2.0**20, []
for name, function, given in (("validation", validate, mine[0]), ("sampling", sample, state)):
    peak = function.lower(params, given).peak_bytes() / mib
    unsharded = (beside + function.lower(full, given).peak_bytes()) / mib
    rows.append((name, peak, unsharded))
if rank == 0:
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"validation: {after.mean():.3f} bits per byte; untrained: {before.mean():.3f}")
    print(f"one Program for {args.length - 1} bytes of {len(prompts)} prompts; rank 0's:")
    for row in state["text"].tolist():
        print("|" + bytes(row).decode(errors="replace").replace("\n", "\n|"))
    print(
        f"a rank holds {shards / mib:.2f} MiB of {whole / mib:.2f} MiB of parameters; at its peak"
    )
    for name, peak, unsharded in rows:
        print(f"  {name}: {peak:.2f} MiB; of the model that unshard gives: {unsharded:.2f} MiB")
    _, (upper, lower) = plt.subplots(2, 1, figsize=(6, 8), layout="constrained")
    upper.plot(before, label="untrained")
    upper.plot(after, label=f"after {args.steps} steps")
    upper.set(xlabel="bytes seen before", ylabel="bits per byte, validation", ylim=(0, None))
    upper.legend()
    names, peaks, unshardeds = zip(*rows, strict=True)
    where = torch.arange(len(rows))
    lower.bar(where - 0.2, peaks, 0.4, label="fzero.sharded")
    lower.bar(where + 0.2, unshardeds, 0.4, label="after fzero.unshard")
    lower.axhline(shards / mib, color="gray", linestyle="--", label="a rank's share")
    lower.set(xticks=where.tolist(), xticklabels=names, ylabel="MiB on a rank, at the peak")
    lower.set_ylim(0, 1.3 * max(unshardeds))  # room for the legend
    lower.legend()
    plt.savefig(args.out / "evaluation.png")
