"""What asks a tensor for its memory, of tensors that have none.

[Note: memoryless] A lazy leaf or parameter is a wrapper: torch's operators come by its
`__torch_dispatch__`, and what takes the memory itself doesn't. That ends in an error of torch's
that names no parameter, or in a crash of the process (`share_memory_`, `from_dlpack`, `apply_`).
So each such method is here: what reads gives the values, as a copy that can't be written; what
writes, or hands the memory on to somebody who could, is refused.
"""

from typing import Any, NoReturn

from torch import Tensor

from fzero.errors import FzeroError
from fzero.layout import LeafLayout


class Memoryless(Tensor):
    """A tensor whose values are gathered on use; see [Note: memoryless].

    Attributes:
        leaf: how it is split.
    """

    leaf: LeafLayout

    # --- what reads ---

    def tolist(self) -> Any:
        """Its values."""
        return self.detach().clone().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Its values, as an array that can't be written: what is written there would be lost."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        # `np.array(x)` copies what it is given, and may be written then
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=bool(copy))

    def is_shared(self) -> bool:
        """No process shares what isn't there."""
        return False

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), spec)

    # --- what takes the memory ---

    def untyped_storage(self) -> Any:
        """Refused; so is all below."""
        self._none("its storage was asked for")

    def _typed_storage(self) -> Any:
        self._none("its storage was asked for")

    storage: Any = _typed_storage

    def share_memory_(self) -> Any:
        """Refused."""
        self._none("it was to be moved to shared memory")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self._none("its memory was to be handed on (DLPack)")

    @property
    def __cuda_array_interface__(self) -> Any:
        if self.is_cuda:
            self._none("its memory was to be handed on")
        raise AttributeError("of tensors on a CUDA device only")  # as torch has it

    def apply_(self, callable: Any) -> Any:
        """Refused."""
        self._none("apply_ was to write to it")

    def map_(self, other: Any, callable: Any) -> Any:
        """Refused."""
        self._none("map_ was to write to it")

    def map2_(self, x: Any, y: Any, callable: Any) -> Any:
        """Refused."""
        self._none("map2_ was to write to it")

    def _none(self, what: str) -> NoReturn:
        raise FzeroError(
            f"the parameter {self.leaf.name!r} is sharded and has no memory of its own here: "
            f"{what}. Use a copy of its values, p.detach().clone(), of the whole module "
            f"engine.state_dict(); change it inside `with engine.gathered([{self.leaf.name!r}], "
            "modifier_rank=0):`, or through engine.load_state_dict."
        )


METHODS = {name: method for name, method in vars(Memoryless).items() if callable(method)}
