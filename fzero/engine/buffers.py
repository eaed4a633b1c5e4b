"""The module's buffers, as the model state of an engine.

They are looked up by name each time: a forward may write into a buffer, put another tensor into its
index, or register a new one.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fzero.errors import ShardError
from fzero.functional.memory import overlaps_itself, why_unwritable
from fzero.numerics.bits import same_bits
from fzero.state import model_state
from fzero.tree import PyTree


class Buffers:
    """Every buffer of a module, persistent or not, each under its first name.

    Args:
        module: whose they are.
        world: how many ranks there are.
        first: whether this is the first of them.
        total: the sum of a tensor over ranks.
        device_type: where `total` takes its tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        world: int,
        first: bool,
        total: Callable[[Tensor], Tensor],
        device_type: str,
    ) -> None:
        self.module, self.world, self.first = module, world, first
        self.total, self.device_type = total, device_type
        # what `agree` has seen last, of those that no rank has changed so far
        self._still = {k: x.clone() for k, x in self.read().items()} if world > 1 else {}
        self._moved: list[str] = []

    def read(self) -> dict[str, Tensor]:
        """The buffers themselves, by name.

        One whose elements share memory (`torch.ones(1).expand(3)`) is a copy: nothing could be read
        into it.
        """
        found = {name: x.detach() for name, x in self.module.named_buffers()}
        return {name: x.clone() if overlaps_itself(x) else x for name, x in found.items()}

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Make these the values of the buffers; see `check`."""
        with torch.no_grad():
            for name, value in values.items():
                self._put(name, value)
        # what is assigned is the same on all ranks: no change that `agree` should find
        for name in self._still:
            if name in values:
                self._still[name] = values[name].detach().clone()

    def check(self, values: PyTree) -> None:
        """Return if these are values of all buffers.

        Raises:
            ShardError: names what differs.
        """
        own = self.read()
        values = values if isinstance(values, Mapping) else {}
        wrong = [f"{name!r} is missing" for name in own if name not in values]
        wrong += [f"the module has no buffer {name!r}" for name in values if name not in own]
        wrong += [
            f"{name!r} is {x.dtype} {tuple(x.shape)}, and must be {own[name].dtype} "
            f"{tuple(own[name].shape)}"
            for name, x in values.items()
            if name in own and (x.shape, x.dtype) != (own[name].shape, own[name].dtype)
        ]
        if wrong:
            raise ShardError(
                f"engine.state: opt_state.model_state does not fit this engine's buffers: "
                f"{'; '.join(wrong[:5])}. Assign the state of the same module, or one whose "
                "model_state is None: then the buffers stay as they are."
            )

    def agree(self) -> None:
        """After an update: what any rank has changed becomes the same on all; all must call it.

        See [Note: one model state] in `fzero.state.model_state`. What no rank has ever changed
        doesn't travel: a mask, a table of angles. A buffer that some rank replaced by one of
        another shape, before it was ever written in place, is a cache of that rank and left alone.
        """
        if self.world == 1 or not (self._still or self._moved):
            return
        own = self.read()
        if self._still:
            self._ask(own)
        if not self._moved:
            return
        leaves = [own[name] for name in self._moved]
        flat = torch.cat(
            [model_state.columns(x, world=self.world, first=self.first).view(-1) for x in leaves]
        )
        total = self.total(flat.to(self.device_type))
        with torch.no_grad():
            for name, x, part in zip(
                self._moved, leaves, model_state.split(total, leaves), strict=True
            ):
                self._put(name, model_state.joined(part.to(x.device), x, world=self.world))

    def _ask(self, own: Mapping[str, Tensor]) -> None:
        """Which of those that were still any rank has changed since."""
        flags = []
        for name, old in self._still.items():
            new = own.get(name)
            if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                # moved, and a misfit: on one rank that is enough to keep it from travelling on all
                flags += [True, True]
            else:
                flags += [not same_bits(new, old), False]
        said = torch.tensor(flags, dtype=torch.float32, device="cpu").to(self.device_type)
        answers = [flag > 0 for flag in self.total(said).tolist()]
        for name, moved, misfit in zip(list(self._still), answers[::2], answers[1::2], strict=True):
            if moved:
                del self._still[name]
            if moved and not misfit:
                self._moved.append(name)

    def _put(self, name: str, value: Tensor) -> None:
        path, _, key = name.rpartition(".")
        table = self.module.get_submodule(path)._buffers
        old = table[key]
        assert old is not None
        if why_unwritable(old):  # made by expand, or by an evaluation under inference_mode
            table[key] = value.detach().to(old.device, copy=True)
        else:
            old.detach().copy_(value)
