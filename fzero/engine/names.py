"""Names of parameters, as users ask for them."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from fzero.errors import ShardError
from fzero.layout import LeafLayout


class Names:
    """Indices of parameters by every name they have.

    Args:
        leaves: of all parameters.
        other: for each further name of a tied parameter, the one that its leaf has.

    >>> import torch
    >>> leaves = [LeafLayout(name, (2,), torch.float32) for name in ("embed", "bias")]
    >>> names = Names(leaves, {"head": "embed"})
    >>> names.index("full_grad", "bias"), names.index("full_grad", "head")
    (1, 0)
    """

    def __init__(self, leaves: Sequence[LeafLayout], other: Mapping[str, str]) -> None:
        self._indices = {leaf.name: i for i, leaf in enumerate(leaves)}
        self._other = other

    def index(self, asked: str, name: str) -> int:
        """The index of a parameter.

        Args:
            asked: the method that was called, for the message.
            name: of the parameter.

        Raises:
            ShardError: there is none of that name; it lists near ones.
        """
        name = self._other.get(name, name)
        if name in self._indices:
            return self._indices[name]
        near = get_close_matches(str(name), list(self._indices), n=3)
        hint = f" Near ones: {', '.join(map(repr, near))}." if near else ""
        raise ShardError(
            f"{asked}({name!r}): the module has no parameter of that name.{hint} Names are those "
            "of model.named_parameters() when the engine was made."
        )
