"""The reference: plain PyTorch in float64, with one copy of the module for each rank.

Every rank and micro-batch has its own forward and backward; gradients are averaged, and buffers as
the docs say: the mean over ranks of floating ones, the first rank's integers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz import changes
from benchmarks.fuzz.pieces import batch, build
from benchmarks.fuzz.sources import SOURCES
from benchmarks.fuzz.values import VALUES, number

Snapshot = dict[str, Tensor]
EPS = 1e-3  # Adam's: gradients that are zero but for rounding stay small


class Unstable(Exception):
    """A rounding error would change the result: the program says nothing."""


class Lion:
    """Lion over a list of tensors."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        self.param_groups = [{"params": params, "lr": lr}]
        self.mean = [torch.zeros_like(p) for p in params]

    def step(self) -> None:
        group = self.param_groups[0]
        for p, mean in zip(group["params"], self.mean, strict=True):
            mixed = mean * 0.9 + p.grad * 0.1
            if ((mixed != 0) & (mixed.abs() < 1e-7)).any():
                raise Unstable
            p.data.sub_(group["lr"] * mixed.sign())
            mean.mul_(0.99).add_(p.grad, alpha=0.01)


def optimizer(program: dict[str, Any], params: dict[str, nn.Parameter]) -> Any:
    """torch.optim's."""
    name, lr = program["opt"], 0.1
    each: list[Any] = list(params.values())
    if name == "lion":
        return Lion(each, lr)
    if name == "adam":
        return torch.optim.Adam(each, lr, eps=EPS)
    if name == "adamw":
        return torch.optim.AdamW(each, lr, eps=EPS, weight_decay=0.1)
    if name == "masked":
        some = [p for p in each if p.ndim >= 2]
        rest = [p for p in each if p.ndim < 2]
        groups = [{"params": some, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.SGD([g for g in groups if g["params"]], lr)
    return torch.optim.SGD(each, lr, momentum=0.9 if name == "momentum" else 0.0)


class Plain:
    """Trains `world` copies in one process."""

    def __init__(self, program: dict[str, Any], world: int) -> None:
        self.program, self.world = program, world
        self.nets = [build(program, torch.float64) for _ in range(world)]
        self.trained = {k: p for k, p in self.nets[0].named_parameters() if p.requires_grad}
        self.optimizer = optimizer(program, self.trained)
        self.lr = lambda: 0.1
        if spec := program["lr"]:
            read, self.write_lr = SOURCES[spec["source"]](nn.Module(), VALUES[spec["value"]]())
            self.lr = lambda: number(read())

    def change(self, change: dict[str, Any], step: int) -> Tensor | None:
        """Carry a change out; what it measured, if it measures."""
        do = change["do"]
        if do in changes.MODULE:
            for net in self.nets:
                changes.to_module(net, change)
        elif do in changes.WRITES:
            for net in self.nets:
                params = dict(net.named_parameters())
                for name in changes.selected(list(params), change):
                    params[name].data.copy_(changes.written(params[name].data, change))
        elif do == "lr" and self.program["lr"]:
            self.write_lr(VALUES[change["value"]]())
        elif do == "evaluate":
            with torch.no_grad():
                return torch.stack(self._evaluated(step, 7))
        elif do == "drop a backward" and self.program["way"] == "engine":
            for loss in self._evaluated(step, 6):
                loss.backward()  # forward may write, and hooks may count
        return None

    def _evaluated(self, step: int, micro: int) -> list[Tensor]:
        """The loss of each rank's batch in evaluation mode."""
        found = []
        for rank, net in enumerate(self.nets):
            modes = {m: m.training for m in net.modules()}
            net.eval()
            found.append(net(*batch(self.program, step, micro, rank, torch.float64)))
            for module, mode in modes.items():
                module.training = mode
        return found

    def step(self, step: int) -> Snapshot:
        """One update; the loss, parameters and buffers after it."""
        program, losses = self.program, []
        sums = {k: torch.zeros_like(p) for k, p in self.trained.items()}
        for rank, net in enumerate(self.nets):
            params = dict(net.named_parameters())
            for p in params.values():
                p.grad = None
            for micro in range(program["accum"]):
                loss = net(*batch(program, step, micro, rank, torch.float64))
                loss.backward()
                losses.append(loss.detach())
            for k in sums:
                if (grad := params[k].grad) is not None:
                    sums[k] += grad
        for k, p in self.trained.items():
            p.grad = sums[k] / (self.world * program["accum"])
        if program["clip"]:
            nn.utils.clip_grad_norm_(list(self.trained.values()), program["clip"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr()
        self.optimizer.step()
        self._share()
        out = {k: p.detach().clone() for k, p in self.nets[0].named_parameters()}
        out |= {k: b.detach().clone() for k, b in self.nets[0].named_buffers()}
        return out | {"loss": torch.stack(losses).mean()}

    def _share(self) -> None:
        first = dict(self.nets[0].named_parameters())
        for net in self.nets[1:]:
            for k, p in net.named_parameters():
                p.data.copy_(first[k].data)
        buffers = [dict(net.named_buffers()) for net in self.nets]
        for k, b in buffers[0].items():
            value = b
            if b.is_floating_point() and self.world > 1:
                value = torch.stack([each[k] for each in buffers]).mean(0)
            for each in buffers:
                each[k].copy_(value.clone())
