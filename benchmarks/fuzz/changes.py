"""What a user does between two steps: to the module, or to the parameters that are trained.

`to_module(net, change)` is the same call on the reference's copies and on the trained module.
`written(name, value, change)` is what a parameter becomes; how it is written is up to the trainer.
"""

import types
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.pieces import Experts, Net, Reader
from benchmarks.fuzz.values import VALUES, use

MODULE = (
    "source", "mode", "piece mode", "add hook", "remove hook", "forward", "which", "wrap",
    "momentum", "buffer", "parameter hook",
)  # fmt: skip
WRITES = ("in place", "data", "load_state_dict", "checkpoint", "assign", "set one")
OTHER = ("save and load", "keep a copy", "evaluate", "drop a backward", "read", "lr")
HOOKS = ("forward", "forward pre", "backward", "backward pre", "module forward", "always")


def to_module(net: Net, change: dict[str, Any]) -> None:
    """Carry out a change of the module; one that doesn't fit does nothing."""
    do = change["do"]
    piece = net.pieces[change.get("piece", 0) % len(net.pieces)]
    if do == "source" and isinstance(piece, Reader):
        piece.__dict__["write"](VALUES[change["value"]]())
    elif do == "mode":
        net.train(change["on"])
    elif do == "piece mode":
        piece.train(change["on"])
    elif do == "which" and isinstance(piece, Experts):
        piece.which = change["on"]
    elif do == "wrap":
        net.wraps[change["piece"] % len(net.pieces)] = change["wrap"]
    elif do == "momentum":
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum, module.eps = (0.5, 1e-2) if change["on"] else (None, 1e-5)
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    elif do == "buffer":
        for module in net.modules():
            if "average" in module._buffers and isinstance(old := module.average, Tensor):
                if change["on"]:
                    module.average = old * 0.5 + 1
                else:
                    old.mul_(0.5).add_(1)
    elif do == "forward":
        inner = type(piece).forward

        def forward(self: Any, *args: Any) -> Tensor:
            return inner(self, *args) * change["by"]

        piece.forward = types.MethodType(forward, piece)
    elif do == "parameter hook":
        for p in list(piece.parameters())[:1]:
            if p.requires_grad:
                p.register_hook(lambda grad: grad.clamp(-0.01, 0.01) * change["by"])
    elif do == "add hook":
        net.__dict__.setdefault("handles", []).append(_hook(net, piece, change))
    elif do == "remove hook":
        handles = net.__dict__.get("handles", [])
        if handles:
            handles.pop(change.get("piece", 0) % len(handles)).remove()


def _hook(net: Net, piece: Any, change: dict[str, Any]) -> Any:
    kind, value = change["kind"], VALUES[change["value"]]()
    if kind == "forward":
        return piece.register_forward_hook(lambda module, args, out: use(out, value))
    if kind == "forward pre":
        return piece.register_forward_pre_hook(
            lambda module, args: (use(args[0], value), *args[1:])
        )
    if kind == "backward":
        return piece.register_full_backward_hook(
            lambda module, before, after: tuple(g if g is None else g * 0.5 for g in before)
        )
    if kind == "backward pre":
        return piece.register_full_backward_pre_hook(
            lambda module, after: tuple(g * 0.5 for g in after)
        )
    if kind == "always":
        return piece.register_forward_hook(
            lambda module, args, kwargs, out: use(out, value),
            with_kwargs=True, prepend=True, always_call=True,
        )  # fmt: skip
    leaf = next((m for m in piece.modules() if isinstance(m, nn.Linear)), piece)
    return leaf.register_forward_hook(lambda module, args, out: use(out, value))


def selected(names: list[str], change: dict[str, Any]) -> list[str]:
    """The parameters that a change writes."""
    if change["do"] != "set one":
        return names
    return [names[change.get("piece", 0) % len(names)]]


def written(value: Tensor, change: dict[str, Any]) -> Tensor:
    """What a parameter becomes."""
    how = change["how"]
    if how == "clamp":
        return value.clamp(-0.2, 0.2)
    if how == "fill":
        return torch.full_like(value, 0.25)
    if how == "half":
        return value * 0.5
    line = torch.linspace(-0.5, 0.5, value.numel(), dtype=value.dtype)
    return line.reshape(value.shape)
