"""Train a byte-level GPT on the Python standard library's own source files.

python examples/train_lm.py                                  # one process
torchrun --nproc_per_node 2 examples/train_lm.py --stage 3   # two ranks, sharded
torchrun --nproc_per_node 2 --max-restarts 3 examples/train_lm.py --checkpoint ckpt --resume
"""

import argparse
import json
import math
import os
import resource
import sysconfig
import time
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import fzero
from fzero.checkpoint import sample_order

cli = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
cli.add_argument("--stage", type=int, default=3, help="ZeRO stage, 0 to 3")
cli.add_argument("--precision", help="as in fzero.Config; float32 if not given")
cli.add_argument("--accum", type=int, default=1, help="micro-batches per step")
cli.add_argument("--steps", type=int, default=400)
cli.add_argument("--size", default="small", choices=["tiny", "small", "medium"])
cli.add_argument("--batch", type=int, help="windows a step, over all ranks; about 12 if not given")
cli.add_argument("--optimizer", default="adamw", choices=["adamw", "muon", "adafactor", "lamb"])
cli.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
cli.add_argument("--seed", type=int, default=0)
cli.add_argument("--out", type=Path, default=Path("runs/train_lm"))
cli.add_argument("--checkpoint", type=Path, help="folder for checkpoints; none if not given")
cli.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
cli.add_argument("--resume", action="store_true", help="go on from the latest checkpoint, if any")
cli.add_argument("--save-on-signal", action="store_true", help="at SIGTERM save once more and end")
args = cli.parse_args()
if (args.resume or args.save_on_signal) and not vars(args)["checkpoint"]:
    cli.error("--resume and --save-on-signal need --checkpoint DIR")
if args.save_every < 1 or (args.checkpoint and args.checkpoint.is_file()):
    cli.error("--save-every must be 1 or more steps, and --checkpoint a folder, not a file")
rank, local_rank, world = (
    int(os.environ.get(name, default))
    for name, default in [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)]
)
parts = world * max(args.accum, 1)  # of a batch, all of one size
if args.batch is None:
    args.batch = -(-12 // parts) * parts
    if rank == 0 and args.batch > 12:
        print(f"--batch {args.batch}: the first multiple of {parts} from 12 on")
if args.batch % parts:
    cli.error(f"--batch {args.batch} must be a multiple of {parts}: {world} ranks, --accum")
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
context, (width, depth) = 128, {"tiny": (32, 2), "small": (128, 4), "medium": (256, 8)}[args.size]

# ---- data: every tenth file is kept for validation ----
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
stdlib = Path(sysconfig.get_path("stdlib"))
files = [f for f in sorted(stdlib.rglob("*.py")) if not SKIPPED & {*f.relative_to(stdlib).parts}]


def windows_of(paths: list[Path]) -> Tensor:
    """Every run of `context + 1` bytes in these files, as a view: (windows, context + 1), uint8."""
    text = bytearray(b"".join(path.read_bytes() for path in paths))
    return torch.frombuffer(text, dtype=torch.uint8).unfold(0, context + 1, 1)


train, valid = windows_of([f for i, f in enumerate(files) if i % 10]), windows_of(files[::10])
valid = valid[torch.linspace(0, len(valid) - 1, 512 // world * world).long()].long().to(device)
order = partial(sample_order, samples=len(train), batch=args.batch, seed=args.seed)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Bytes and the bytes that follow them: two of (batch / world, context), this rank's part."""
    drawn = train[order(step, rank=rank, world=world)].long().to(device)
    return drawn[:, :-1], drawn[:, 1:]


# ---- model: pre-norm, rotary positions, normalised queries and keys ----
linear, norm = partial(nn.Linear, bias=False), partial(nn.RMSNorm, elementwise_affine=False)


def rotate(x: Tensor) -> Tensor:
    position, pair = (torch.arange(n, device=x.device) for n in (x.shape[-2], x.shape[-1] // 2))
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

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 32)).transpose(1, 3).unbind(2)
        q, k = rotate(self.head_norm(q)), rotate(self.head_norm(k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


torch.manual_seed(args.seed)  # the same model on every rank
embed, blocks = nn.Embedding(256, width), [Block() for _ in range(depth)]
model = nn.Sequential(embed, *blocks, norm(width), linear(width, 256)).to(device)

# ---- training ----
apply, params = fzero.functionalize(model)


def model_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(apply(params, x).flatten(0, 1), y.flatten())


def bits_per_byte(params: dict[str, Tensor]) -> float:
    mine = valid[rank::world]  # no rank ever holds the model
    losses = [len(w) * validate(params, (w[:, :-1], w[:, 1:])) for w in mine.split(64)]
    return torch.stack(losses).sum().item() / len(mine) / math.log(2)


schedule = fzero.optim.warmup_cosine(args.lr, args.steps // 20, args.steps)
edges = ("0.weight", f"{depth + 2}.weight")  # embedding and head of an nn.Sequential have no name
labels = {name: "rest" if name in edges else "muon" for name in params}
opt = {
    "adamw": lambda: fzero.optim.adamw(schedule, b2=0.95, weight_decay=0.1),
    "muon": lambda: fzero.optim.muon(schedule, labels=labels),
    "adafactor": lambda: fzero.optim.adafactor(schedule, weight_decay=0.1),
    "lamb": lambda: fzero.optim.lamb(schedule, weight_decay=0.1),
}[args.optimizer]()
cfg = fzero.Config(args.stage, precision=args.precision, accum_steps=args.accum, clip_norm=1.0)
step_fn = fzero.make_train_step(model_fn, opt, cfg)
validate = fzero.sharded(model_fn, cfg, reduce="mean")
params, opt_state = step_fn.init(params)
args.out.mkdir(parents=True, exist_ok=True)
rows, metrics = [], args.out / "metrics.jsonl"
if args.resume and fzero.checkpoint.latest(args.checkpoint):
    params, opt_state = fzero.checkpoint.load(args.checkpoint, params, opt_state)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
done = int(opt_state.step)
rows = [row for row in rows if row["step"] <= done]
validation = {row["step"]: x for row in rows if (x := row.get("valid_bits_per_byte"))}
stop = fzero.checkpoint.StopOnSignal() if args.save_on_signal else lambda: False
for step in (bar := tqdm(range(done + 1, args.steps + 1), mininterval=1, disable=rank > 0)):
    start = time.perf_counter()
    params, opt_state = step_fn(params, opt_state, batch_of(step - 1))
    row = {"step": step, "loss": opt_state.metrics["loss"].item()}
    row["tokens_per_s"] = args.batch * context / (time.perf_counter() - start)
    row["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(row)
    if step % 100 == 0 or step == args.steps:
        validation[step] = row["valid_bits_per_byte"] = bits_per_byte(params)
    saving = args.checkpoint and (step % args.save_every == 0 or step == args.steps)
    stopping = stop()
    if rank == 0 and (saving or stopping or step in validation):
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if saving or stopping:
        fzero.checkpoint.save(args.checkpoint, params, opt_state, keep=3, asynchronous=True)
    if stopping:
        fzero.checkpoint.wait()
        raise SystemExit
    bar.set_postfix({k: f"{v:.3g}" for k, v in row.items() if k != "step"}, refresh=False)
fzero.checkpoint.wait()

# ---- what came out ----
full = fzero.unshard(params)  # every rank takes part
if rank == 0:
    pairs = torch.bincount(train[:, 0].long() * 256 + train[:, 1], minlength=256 * 256) + 0.1
    bigram = (pairs / pairs.view(256, 256).sum(1).repeat_interleave(256)).to(device).log2()
    bigram_bits = -bigram[valid[:, :-1] * 256 + valid[:, 1:]].mean().item()
    print(f"validation: {validation[args.steps]:.3f} bits per byte; byte bigram: {bigram_bits:.3f}")
    text = torch.tensor(list(b"def "), device=device)[None]
    while text.shape[1] < 400:
        logits = apply(full, text[:, -context:])[0, -1]
        text = torch.cat((text, torch.multinomial((logits / 0.7).softmax(-1), 1)[None]), dim=1)
    print("sample:\n" + bytes(text[0].tolist()).decode(errors="replace"))
    plt.plot([row["loss"] / math.log(2) for row in rows], label="training")
    plt.plot(list(validation), list(validation.values()), "o-", label="validation")
    plt.axhline(bigram_bits, color="gray", linestyle="--", label="byte bigram, validation")
    plt.gca().set(xlabel="step", ylabel="bits per byte")
    plt.legend()
    plt.savefig(args.out / "loss.png")
