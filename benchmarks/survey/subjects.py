"""The models of the survey: how each is built, at toy size, and what loss is taken of it."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Loss = Callable[[Callable[..., Any], Batch], Tensor]


class Built(NamedTuple):
    """A module, a batch, and `loss(call, batch)`, where `call` is the module or stands for it."""

    module: nn.Module
    batch: Batch
    loss: Loss


class Subject(NamedTuple):
    """One model.

    Args:
        name: for the table.
        library: what must be installed.
        build: called after `torch.manual_seed`.
    """

    name: str
    library: str
    build: Callable[[], Built]

    @property
    def installed(self) -> bool:
        """Whether its library is there."""
        return importlib.util.find_spec(self.library) is not None


def squares(found: Any) -> Tensor:
    """A loss of whatever a model returns: the mean square of each floating tensor, summed."""
    return sum((x.float().square().mean() for x in floating(found)), torch.zeros(()))


def floating(found: Any) -> Iterator[Tensor]:
    """The floating tensors of what a model returns."""
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield found
        elif found.is_complex():
            yield torch.view_as_real(found)
    elif isinstance(found, dict):
        for x in found.values():
            yield from floating(x)
    elif isinstance(found, (list, tuple)):
        for x in found:
            yield from floating(x)
    elif isinstance(found, nn.utils.rnn.PackedSequence):
        yield found.data
    elif hasattr(found, "__dict__"):  # a record of another library
        yield from floating(vars(found))


def still(module: nn.Module) -> nn.Module:
    """The module, training, with all that draws random numbers at rest."""
    for part in module.modules():
        if isinstance(part, (nn.Dropout, nn.Dropout2d, nn.AlphaDropout)):
            part.p = 0.0
    return module.train()


def called(module: nn.Module, *args: Any, **kwargs: Any) -> Built:
    """`squares` of a module called with these; what is a tensor is in the batch."""
    batch = {f"arg{i}": x for i, x in enumerate(args) if isinstance(x, Tensor)}
    batch |= {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}

    def loss(call: Callable[..., Any], batch: Batch) -> Tensor:
        given = [batch.get(f"arg{i}", x) for i, x in enumerate(args)]
        return squares(call(*given, **{k: batch.get(k, x) for k, x in kwargs.items()}))

    return Built(still(module), batch, loss)
