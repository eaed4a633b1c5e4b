"""Distil a teacher into a smaller student: two sharded trees, an average of one, one Program.

python examples/distill.py                                   # one process
torchrun --nproc_per_node 2 examples/distill.py              # two ranks, all three trees sharded

A byte-level model of Python's standard library, trained first, teaches a student half as wide: the
student's distribution is drawn to the teacher's (Hinton et al., arXiv:1503.02531), and it learns to
prefer real text to corrupted text more than the teacher does (DPO, Rafailov et al.,
arXiv:2305.18290, with the teacher as the reference). Beside it goes the average of its weights.
Both forwards, the gradient, the optimizer's update and the average are one Program.
"""

import argparse
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import fzero

cli = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
cli.add_argument("--stage", type=int, default=3, help="ZeRO stage, 0 to 3")
cli.add_argument("--precision", help="as in fzero.Config; float32 if not given")
cli.add_argument("--teacher-steps", type=int, default=400)
cli.add_argument("--steps", type=int, default=300, help="of the student")
cli.add_argument("--width", type=int, default=128, help="of the teacher; the student has half")
cli.add_argument("--batch", type=int, default=8, help="windows per rank and step")
cli.add_argument("--beta", type=float, default=0.1, help="of DPO: how near to stay to the teacher")
cli.add_argument("--decay", type=float, default=0.95, help="of the average of weights, per step")
cli.add_argument("--seed", type=int, default=0)
cli.add_argument("--out", type=Path, default=Path("runs/distill"))
args = cli.parse_args()
rank, local_rank, world = (
    int(os.environ.get(name, default))
    for name, default in [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)]
)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
context = 64
Params: TypeAlias = dict[str, Tensor]

# ---- data: every tenth file is kept for validation ----
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def windows_of(paths: list[Path]) -> Tensor:
    """Every run of `context + 1` bytes in these files, as a view: (windows, context + 1), uint8."""
    text = bytearray(b"".join(path.read_bytes() for path in paths))
    return torch.frombuffer(text, dtype=torch.uint8).unfold(0, context + 1, 1)


train, valid = windows_of([f for i, f in enumerate(files) if i % 10]), windows_of(files[::10])
valid = valid[torch.linspace(0, len(valid) - 1, 256 // world * world).long()].long().to(device)
mine = valid[rank::world].split(32)
my_draws = torch.Generator().manual_seed(args.seed * world + rank)


def draw() -> Tensor:
    return train[torch.randint(len(train), (args.batch,), generator=my_draws)].long().to(device)


# ---- model: pre-norm, rotary positions, normalised queries and keys ----
linear, norm = partial(nn.Linear, bias=False), partial(nn.RMSNorm, elementwise_affine=False)


def rotate(x: Tensor) -> Tensor:
    position, pair = (torch.arange(n, device=x.device) for n in (x.shape[-2], x.shape[-1] // 2))
    angle = position[:, None] * 100.0 ** (-pair / len(pair))
    (a, b), cos, sin = x.chunk(2, dim=-1), angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Sequential(norm(width), linear(width, 3 * width))
        self.head_norm, self.proj = norm(16), linear(width, width)
        up, down = linear(width, 4 * width), linear(4 * width, width)
        self.mlp = nn.Sequential(norm(width), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 16)).transpose(1, 3).unbind(2)
        q, k = rotate(self.head_norm(q)), rotate(self.head_norm(k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def build(width: int) -> tuple[Callable[..., Tensor], Params]:
    torch.manual_seed(args.seed)  # the same model on every rank
    blocks = [Block(width) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(256, width), *blocks, norm(width), linear(width, 256))
    return fzero.functionalize(model.to(device))


def nats(logits: Tensor, text: Tensor) -> Tensor:
    """Of each row's bytes, the mean: (rows,)."""
    return F.cross_entropy(logits.float().mT, text[:, 1:], reduction="none").mean(1)


cfg = fzero.Config(args.stage, precision=args.precision)
(teach, teacher), (study, student) = build(args.width), build(args.width // 2)


# ---- the teacher: trained, and never changed again ----
def teacher_loss(params: Params, text: Tensor) -> Tensor:
    return nats(teach(params, text[:, :-1]), text).mean()


schedule = fzero.optim.warmup_cosine(4e-3, args.teacher_steps // 20, args.teacher_steps)
train_teacher = fzero.make_train_step(teacher_loss, fzero.optim.adamw(schedule, b2=0.95), cfg)
teacher, teacher_state = train_teacher.init(teacher)
for _ in (bar := tqdm(range(args.teacher_steps), "teacher", mininterval=1, disable=rank > 0)):
    teacher, teacher_state = train_teacher(teacher, teacher_state, draw())
    bar.set_postfix(loss=f"{teacher_state.metrics['loss'].item():.3f}", refresh=False)


# ---- the student: a step of our own ----
def losses(student: Params, teacher: Params, text: Tensor, worse: Tensor) -> tuple[Tensor, Params]:
    """The loss, and its two parts: `worse` is corrupted text."""
    both = torch.cat((text, worse))
    ours, theirs = study(student, both[:, :-1]), teach(teacher, both[:, :-1])
    first = slice(len(text))  # it imitates the teacher on real text only
    p, log_q = theirs[first].softmax(-1), ours[first].log_softmax(-1)
    imitation = (p * (p.clamp(min=1e-9).log() - log_q)).sum(-1).mean()
    gain = context * (nats(theirs, both) - nats(ours, both))  # log student(x) / teacher(x)
    preference = -F.logsigmoid(args.beta * (gain[first] - gain[len(text) :])).mean()
    return imitation + preference, {"imitation": imitation, "preference": preference}


opt = fzero.optim.adamw(fzero.optim.warmup_cosine(4e-3, args.steps // 20, args.steps), b2=0.95)
loss_and_grads = fzero.value_and_grad(losses, cfg, has_aux=True)


def step(student: Params, average: Params, opt_state: Any, teacher: Params, batch: Tensor) -> Any:
    (_, parts), grads = loss_and_grads(student, teacher, *batch)
    updates, opt_state = opt.update(grads, opt_state, student)
    student = fzero.apply_updates(student, updates)
    average = fzero.tree_map(lambda a, x: a + (1 - args.decay) * (x - a), average, student)
    return student, average, opt_state, parts


def pair(text: Tensor) -> Tensor:
    """The text, and the same with one byte in eight replaced by another one of its row."""
    other = text[:, torch.randperm(text.shape[1], generator=my_draws)]
    spoilt = torch.rand(text.shape, generator=my_draws).to(device) < 0.125
    return torch.stack((text, torch.where(spoilt, other, text)))


def student_loss(params: Params, text: Tensor) -> Tensor:
    return nats(study(params, text[:, :-1]), text).mean()


def bits_per_byte(loss: Callable[..., Tensor], params: Params) -> float:
    found = [len(text) * loss(params, text) for text in mine]
    return torch.stack(found).sum().item() / len(valid) * world / math.log(2)


student = fzero.shard(student, cfg)
average = fzero.tree_map(torch.clone, student)
opt_state = opt.init(student)
run = fzero.jit(step, cfg, donate_argnums=(0, 1, 2))
validate_teacher = fzero.sharded(teacher_loss, cfg, reduce="mean")
validate = fzero.sharded(student_loss, cfg, reduce="mean")
rows, measured = [], []
for i in (bar := tqdm(range(1, args.steps + 1), "student", mininterval=1, disable=rank > 0)):
    batch = pair(draw())
    student, average, opt_state, parts = run(student, average, opt_state, teacher, batch)
    rows.append({name: x.item() for name, x in parts.items()})
    if i % (args.steps // 10 or 1) == 0:
        found = (bits_per_byte(validate, params) for params in (student, average))
        measured.append((i, *found))
    bar.set_postfix(rows[-1], refresh=False)

# ---- what came out ----
goal = bits_per_byte(validate_teacher, teacher)
program = run.lower(student, average, opt_state, teacher, pair(draw()))
if rank == 0:
    args.out.mkdir(parents=True, exist_ok=True)
    _, last, of_average = measured[-1]
    print(f"validation, bits per byte: teacher {goal:.3f}, student {last:.3f}", end=", ")
    print(f"average of its weights {of_average:.3f}")
    kinds = Counter(row.kind for row in program.collectives())
    print(f"one Program a step, {program.peak_bytes() / 2**20:.2f} MiB at its peak:", dict(kinds))
    _, (upper, lower) = plt.subplots(2, 1, figsize=(6, 8), layout="constrained")
    for name in rows[0]:
        upper.plot([row[name] for row in rows], label=name)
    upper.set(xlabel="step", ylabel="loss of the student, nats", yscale="log")
    upper.legend()
    steps, ours, averages = zip(*measured, strict=True)
    lower.plot(steps, ours, "o-", label="student")
    lower.plot(steps, averages, "o-", label="average of its weights")
    lower.axhline(goal, color="gray", linestyle="--", label="teacher")
    lower.set(xlabel="step", ylabel="bits per byte, validation")
    lower.legend()
    plt.savefig(args.out / "loss.png")
