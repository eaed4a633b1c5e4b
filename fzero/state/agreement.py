"""What ranks must have in common before they shard: the config, structure, shapes and values."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fzero import tree
from fzero.config import Config
from fzero.distributed.agree import agree
from fzero.distributed.mesh import Mesh, is_simulated
from fzero.numerics.bits import bits
from fzero.optim.base import Optimizer
from fzero.optim.check import numbers_of
from fzero.tree import PyTree


def agree_on_start(
    cfg: Config,
    params: PyTree,
    model_state: PyTree,
    mesh: Mesh,
    *,
    values: bool = True,
    built: bool = True,
) -> None:
    """Find what differs between ranks while a message is still possible."""
    agree(
        "Config", [(f".{name}", text) for name, text in cfg.describe().items()], mesh, cfg.timeout
    )
    agree_on_tree("params", params, mesh, cfg.timeout, values=values and built)
    agree_on_tree("model_state", model_state, mesh, cfg.timeout, values=values)


def agree_on_tree(
    what: str, values_of: PyTree, mesh: Mesh, timeout: float | None, *, values: bool = True
) -> None:
    """See that all ranks have the same leaves, and if `values`, the same bits in them.

    Raises:
        RankMismatchError: ranks differ in structure, shapes, dtypes or values.
    """
    leaves, paths = tree.leaves(values_of), tree.paths(values_of)
    pairs = list(zip(paths, leaves, strict=True))
    agree(what, [(path, f"{x.dtype} {tuple(x.shape)}") for path, x in pairs], mesh, timeout)
    if values and mesh.world_size > 1 and not is_simulated(mesh):
        agree(
            f"the values of {what}",
            [(path, checksum(x)) for path, x in pairs],
            mesh,
            timeout,
            hint="Every rank must start from the same values: seed all ranks alike before "
            "building the model (torch.manual_seed(0)), or load the same checkpoint on each.",
        )


def checksum(x: Tensor) -> str:
    """A text that differs where bits do: their sum, and one along each dim that sees the order.

    Integers that wrap around: no rounding, so the order of summation, which may depend on a rank's
    threads or device, does not matter.
    """
    if x.device.type == "meta" or isinstance(x, FakeTensor):
        return "no values"
    x = bits(x.detach().contiguous())
    sums = [x.sum(dtype=torch.int64)]
    for dim in range(x.dim()):
        rest = [d for d in range(x.dim()) if d != dim]
        line = x.sum(rest, dtype=torch.int64) if rest else x.to(torch.int64)
        sums.append((line * torch.arange(1, len(line) + 1, device=x.device)).sum())
    return f"checksum {' '.join(f'{int(total) % 2**64:x}' for total in sums)}"


def agree_on_optimizer(opt: Optimizer, inner: PyTree, mesh: Mesh, timeout: float | None) -> None:
    """See that all ranks update alike: each its own part of the leaves, or all of them.

    Args:
        opt: of which the numbers are known that it was made with, if it is of this library.
        inner: its state, which may hold rates.
        mesh: the ranks.
        timeout: of the config.
    """
    if mesh.world_size == 1 or is_simulated(mesh):
        return
    rates = enumerate(float(x) for x in opt.rates(inner))
    agree(
        "the optimizer's arguments",
        [*numbers_of(opt).items(), *((f"learning rate {i}", repr(x)) for i, x in rates)],
        mesh,
        timeout,
        hint="Every rank must make the optimizer with the same numbers.",
    )
