"""The GAN example runs on two ranks, has the losses of plain torch, and leaves its picture."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gan_gradient_penalty.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
STEPS, CRITIC_STEPS, BATCH, WIDTH = 50, 2, 8, 16


def _run(launcher: list[str], out: Path, steps: int, *flags: str) -> str:
    command = [sys.executable, *launcher, str(EXAMPLE), "--out", str(out), "--steps", str(steps)]
    command += ["--critic-steps", str(CRITIC_STEPS), "--batch", str(BATCH)]
    command += ["--width", str(WIDTH), "--double", *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # this checkout, installed or not
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _plain_torch(steps: int) -> list[dict[str, float]]:
    """Algorithm 1 of arXiv:1704.00028 with modules, `torch.optim` and the whole batch."""
    digits = torch.tensor(load_digits().data) / 8 - 1
    train = digits[torch.arange(len(digits)) % 10 != 0]
    wide, leaky = (nn.Linear, lambda: nn.LeakyReLU(0.2))
    torch.manual_seed(0)
    generator = nn.Sequential(
        *[wide(16, WIDTH), leaky(), wide(WIDTH, WIDTH), leaky(), wide(WIDTH, 64), nn.Tanh()]
    ).double()
    critic = nn.Sequential(
        *[wide(64, WIDTH), leaky(), wide(WIDTH, WIDTH), leaky(), wide(WIDTH, 1, bias=False)]
    ).double()
    adams = [torch.optim.Adam(x.parameters(), 5e-4, (0.0, 0.9)) for x in (generator, critic)]
    rows = []
    for step in range(steps):
        draws = torch.Generator().manual_seed(step)
        lead = (CRITIC_STEPS, BATCH)
        real = train[torch.randint(len(train), lead, generator=draws)]
        noise = torch.randn(*lead, 16, generator=draws, dtype=torch.float64)
        mix = torch.rand(*lead, 1, generator=draws, dtype=torch.float64)
        row = {"step": float(step + 1)}
        for x, z, t in zip(real, noise, mix, strict=True):
            fake = generator(z).detach()
            between = (t * x + (1 - t) * fake).requires_grad_()
            (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = ((slopes.norm(dim=1) - 1) ** 2).mean()
            distance = critic(x).mean() - critic(fake).mean()
            row |= _stepped(adams[1], 10 * penalty - distance, "critic_loss")
            row |= {"distance": distance.item(), "penalty": penalty.item()}
        row |= _stepped(adams[0], -critic(generator(noise[-1])).mean(), "generator_loss")
        rows.append(row)
    return rows


def _stepped(opt: torch.optim.Optimizer, loss: Tensor, name: str) -> dict[str, float]:
    opt.zero_grad()
    loss.backward()
    opt.step()
    return {name: loss.item()}


@pytest.mark.slow
def test_fifty_steps_of_two_ranks_have_the_losses_of_plain_torch(tmp_path: Path) -> None:
    printed = _run(TORCHRUN, tmp_path, STEPS)

    rows, plain = _rows(tmp_path), _plain_torch(STEPS)
    assert len(rows) == STEPS
    for ours, theirs in zip(rows, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-9)
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")
    # rank 0 alone speaks
    assert len(re.findall(r"one Program: \d+ collectives", printed)) == 1
    (counts,) = re.findall(r"nearest to 0, 1, ... 9: \[(.*)\]", printed)
    assert sum(map(int, counts.split(","))) == 256


@pytest.mark.slow
def test_alone_and_eagerly_it_has_the_same_losses(tmp_path: Path) -> None:
    _run([], tmp_path, 3, "--executor", "eager")
    for ours, theirs in zip(_rows(tmp_path), _plain_torch(3), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-10)


def test_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 170
