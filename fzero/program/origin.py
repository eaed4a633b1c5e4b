"""Where a value comes from: the module and the user's line that a node was recorded in.

A node of forward is told by the Python stack at the moment it is recorded: the innermost
`nn.Module` that is called there, by its name inside the outermost one, and the innermost line that
is neither torch's nor ours. Backward runs in no module. There autograd says which of its nodes
runs, and that has the sequence number it got in forward, so a node of backward comes from what it
differentiates.

What is found is kept in `meta["custom"]`, which survives a second recording of the graph and
copies of a node.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import optree
import torch
import typing_extensions
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode


class Origin(NamedTuple):
    """Where a value was made.

    Args:
        module: name of the module whose call made it, or, in backward, whose gradient it is of:
            as in the names of parameters. "" for the outermost module, and outside of all.
        file: of the user's code.
        line: in that file.
        function: that the line is in.
    """

    module: str = ""
    file: str = ""
    line: int = 0
    function: str = ""

    @property
    def where(self) -> str:
        """`file:line`, or "" if it is of no user's line."""
        return f"{self.file}:{self.line}" if self.file else ""


NOWHERE = Origin()


def origin_of(node: fx.Node) -> Origin:
    """Where a node was recorded."""
    return node.meta.get("custom", {}).get(_MARK, NOWHERE)


def set_origin(node: fx.Node, origin: Origin) -> None:
    """Say where a node comes from that a pass made."""
    # a new dict: copies of a node share theirs
    node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: origin}


_MARK = "fzero.origin"


def origins_noted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose nodes get an origin while `make_fx` records it."""

    def noted(*args: Any) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        with _noting(mode.tracer, sys._getframe()):
            return fn(*args)

    return noted


@contextlib.contextmanager
def _noting(tracer: Any, outside: FrameType) -> Iterator[None]:
    create = tracer.create_node
    find = _Finder(outside)

    def create_node(*args: Any, **kwargs: Any) -> fx.Node:
        node = create(*args, **kwargs)
        if node.op == "call_function":
            set_origin(node, find(sys._getframe(1)))
        return node

    tracer.create_node = create_node
    try:
        yield
    finally:
        del tracer.create_node


class _Finder:
    """Finds origins during one recording, which `outside` is the frame of."""

    def __init__(self, outside: FrameType) -> None:
        self.outside = outside
        self.names: dict[int, tuple[nn.Module, dict[int, str]]] = {}
        self.forward: dict[int, Origin] = {}  # by the sequence number that autograd gave

    def __call__(self, frame: FrameType | None) -> Origin:
        running = _running_node()
        if running is not None:
            return self.forward.get(running._sequence_nr(), NOWHERE)
        origin = self._here(frame)
        # an operator takes its number before it is recorded; those that need none keep the last
        self.forward.setdefault(_sequence_number(), origin)
        return origin

    def _here(self, frame: FrameType | None) -> Origin:
        user: FrameType | None = None
        inner: nn.Module | None = None
        outer: nn.Module | None = None
        while frame is not None and frame is not self.outside:
            code = frame.f_code
            if code is MODULE_CALL:
                outer = frame.f_locals["self"]
                inner = outer if inner is None else inner  # whose len() may be 0, or an error
            elif user is None and not is_ours(code):
                user = frame
            frame = frame.f_back
        module = self._name(outer, inner) if outer is not None else ""
        if user is None:
            return Origin(module)
        return Origin(module, user.f_code.co_filename, user.f_lineno, user.f_code.co_name)

    def _name(self, outer: nn.Module, inner: nn.Module | None) -> str:
        if id(outer) not in self.names:
            names = {id(module): name for name, module in outer.named_modules()}
            self.names[id(outer)] = outer, names  # the module too: its id is its own so long
        return self.names[id(outer)][1].get(id(inner), type(inner).__name__)


# ------------------------------------------------------------------------- what torch knows of it
MODULE_CALL: CodeType = nn.Module._call_impl.__code__


def _running_node() -> Any:
    """The node that autograd's engine runs in this thread, or None."""
    return torch._C._current_autograd_node()


def _sequence_number() -> int:
    """The number of the last node that autograd made."""
    return torch.autograd._get_sequence_nr() - 1


def is_ours(code: CodeType) -> bool:
    """Whether code is torch's, this package's, or made of a string; not the user's."""
    return code.co_filename.startswith(OURS)


def raised_at(error: BaseException) -> str:
    """Where in the user's own code an exception came from, for a message; "" if nowhere there."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if not f.filename.startswith(OURS)]
    if not mine:
        return ""
    frame = mine[-1]
    return f" at {frame.filename}:{frame.lineno}, in {frame.name}: `{frame.line}`"


# By folder, not by name: a user's project may be called after any of them.
OURS = (
    *(
        f"{Path(str(module.__file__)).parent}{os.sep}"
        for module in (torch, optree, sys.modules[__name__.partition(".")[0]])
    ),
    contextlib.__file__,
    typing_extensions.__file__,  # around what torch calls deprecated
    "<",
)
