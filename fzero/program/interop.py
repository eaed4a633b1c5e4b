"""Other libraries' questions about staging out, answered while it goes on.

Never imports them: who has not imported a library does not use it.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def transformers_is_tracing() -> Iterator[None]:
    """`transformers.utils.is_tracing()` answers True, wherever transformers asks.

    Its models ask before they read values (is a mask all ones? are there padding tokens?). On its
    own the function knows fake tensors, but not those inside `torch.func`. It is bound by name in
    many modules, so it is replaced in each; a transformers without it stays as it is.
    """
    library = sys.modules.get("transformers.utils")
    original = vars(library).get("is_tracing") if library is not None else None
    if original is None:
        yield
        return
    holders = [
        vars(module)
        for name, module in list(sys.modules.items())
        # through vars(): to ask such a module for an attribute can import half of the library
        if name.startswith("transformers.") and vars(module).get("is_tracing") is original
    ]
    try:
        for holder in holders:
            holder["is_tracing"] = _yes
        yield
    finally:
        for holder in holders:
            holder["is_tracing"] = original


def _yes(tensor: Any = None) -> bool:
    return True
