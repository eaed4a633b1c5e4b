"""Finds and refuses random numbers that come from elsewhere than torch's own generators.

What is recorded draws nothing when it runs: a number from Python's `random` or from numpy would be
a constant of the Program. A `torch.Generator` of the user's goes on from call to call, which a
pure step may not.
"""

import contextlib
import linecache
import random
import secrets
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.errors import TraceError
from fzero.functional.library import is_library
from fzero.functional.outside import is_generator
from fzero.functional.transforms import levels_of
from fzero.functional.uncompiled import not_compiled_alone, uncompiled
from fzero.functional.underived import OPERATORS, refuse_underived
from fzero.numerics.thread_generator import thread_generator

T = TypeVar("T")


class Source(NamedTuple):
    """A host generator, and its state when it was met."""

    generator: Any
    name: str
    before: Any

    @property
    def drawn(self) -> bool:
        """Whether somebody has drawn from it since."""
        return bool(state_of(self.generator) != self.before)


def source(generator: Any, name: str) -> Source:
    """A host generator with its present state."""
    return Source(generator, name, state_of(generator))


def global_sources() -> list[Source]:
    """Python's and numpy's hidden generators."""
    hidden = random.random.__self__  # pyright: ignore[reportFunctionMemberAccess]
    found = [source(hidden, "Python's `random`")]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append(source(numpy.random.mtrand._rand, "`numpy.random`"))
    return found


def without_draws(run: Callable[[], T], sources: list[Source]) -> T:
    """Run a recording, and refuse it if it draws from one of `sources`.

    `run` may add to `sources` the generators that it meets.

    Another thread may draw as well, so a draw counts when a second run shows the line.

    Raises:
        TraceError: it drew; the generators are then as they were.
    """
    with _fresh_entropy_refused():
        result = run()
        drawn = [one for one in sources if one.drawn]
        if not drawn:
            return result
        found = _line_of(run, [one.generator for one in drawn])
    if found is None and threading.active_count() > 1:
        return result  # another thread's
    for one in drawn:
        _set_state(one.generator, one.before)
    raise TraceError(_refusal(f"drew a number from {drawn[0].name}{found or ''}"))


def _refusal(what: str) -> str:
    return (
        f"the function {what} while it was staged out; the Program would repeat that one number in "
        "every step. Draw with torch and its own generators (torch.rand, dropout, ...), pass the "
        "number in the batch, or use Config(executor='eager')."
    )


def state_of(generator: Any) -> Any:
    """A value that is another after every draw."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    state = getattr(generator, "bit_generator", generator)
    state = generator.get_state() if hasattr(generator, "get_state") else state.state
    return _Comparable(state)


class _Comparable:
    """A numpy generator's state, which has arrays inside."""

    def __init__(self, state: Any) -> None:
        self.state, self.text = state, _text(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Comparable) and self.text == other.text

    __hash__ = None  # pyright: ignore


def _text(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _text(value) for key, value in state.items()}
    if isinstance(state, (tuple, list)):
        return [_text(value) for value in state]
    return state.tobytes() if hasattr(state, "tobytes") else state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif hasattr(generator, "set_state"):
        generator.set_state(state.state)
    else:
        getattr(generator, "bit_generator", generator).state = state.state


# ---------------------------------------------------------------------------------------- lines
def _line_of(run: Callable[[], Any], generators: list[Any]) -> str | None:
    """Run once more, and say at which line of the user's code one of them goes on."""
    states = [state_of(one) for one in generators]
    line: tuple[Any, int] | None = None  # the user's, that has run since the last look
    found: list[tuple[Any, int]] = []

    def look(frame: Any) -> None:
        nonlocal states, line
        now = [state_of(one) for one in generators]
        if now != states and line is not None:
            found.append(line)
        while frame is not None and not _is_users(frame):
            frame = frame.f_back
        states, line = now, frame and (frame.f_code, frame.f_lineno)

    def at_line(frame: Any, event: str, arg: Any) -> Any:
        if found:
            return None
        look(frame.f_back if event == "return" else frame)
        return at_line

    def at_call(frame: Any, event: str, arg: Any) -> Any:
        if found or not _is_users(frame):
            return None
        look(frame.f_back)
        return at_line

    interval, tracer = sys.getswitchinterval(), sys.gettrace()
    sys.setswitchinterval(1000.0)  # what changes between two lines was changed by this thread
    sys.settrace(at_call)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.settrace(tracer)
        sys.setswitchinterval(interval)
    return _place(*found[0]) if found else None


def _place(code: types.CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f" at {code.co_filename}:{line}, in {code.co_name}: `{text}`"


def _is_users(frame: Any) -> bool:
    name = frame.f_code.co_filename
    # methods that NamedTuple and dataclass write
    made = name == "<string>" and frame.f_globals.get("__name__") != "__main__"
    return not made and not is_library(name)


def users_line() -> str:
    """Where in the user's code the caller's caller is."""
    frame = sys._getframe(2)
    while frame is not None:
        if _is_users(frame):
            return _place(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def _fresh_entropy_refused() -> Iterator[None]:
    """Refuse generators that are made without a seed meanwhile: each run would make another."""
    owner = threading.get_ident()

    def refuse(frame: Any) -> None:
        nearest = frame
        while nearest is not None and nearest.f_code.co_filename in _ENTROPY:
            nearest = nearest.f_back
        mine = threading.get_ident() == owner
        if mine and nearest is not None and _is_users(nearest):
            raise TraceError(
                _refusal(
                    f"made a generator without a seed{_place(nearest.f_code, nearest.f_lineno)}"
                )
            )

    seed, urandom = random.Random.seed, getattr(random, "_urandom", None)

    def seeded(self: Any, a: Any = None, version: int = 2) -> None:
        if a is None:
            refuse(sys._getframe(1))
        seed(self, a, version)

    def entropy(size: int) -> bytes:
        refuse(sys._getframe(1))
        assert urandom is not None
        return urandom(size)

    random.Random.seed = seeded
    if urandom is not None:
        random._urandom = entropy  # pyright: ignore
    try:
        yield
    finally:
        random.Random.seed = seed
        if urandom is not None:
            random._urandom = urandom  # pyright: ignore


_ENTROPY = (random.__file__, secrets.__file__)


# ---------------------------------------------------------------------------------------- torch
class Watch(TorchFunctionMode):
    """Refuses a generator that is handed to a torch function, and operators without a derivative
    where one is asked for; notes what is read on the host.

    Args:
        reads: gets each tensor whose values Python reads; None: nobody asks.
        numbers: gets each tensor that torch itself reads as a number.
    """

    def __init__(self, reads: list[Any] | None = None, numbers: list[Any] | None = None) -> None:
        super().__init__()
        self.reads, self.numbers = reads, numbers
        self._made_of: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    @not_compiled_alone
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs:
            generator = kwargs.get("generator")
            if generator is not None:
                refuse_generator(generator)
        if self.numbers is not None and type(func) is _GETTER and func == _SET_DATA:
            raise TraceError(
                f"a tensor is given other memory{users_line()} while the function is staged out, "
                "and what is recorded would go on with the old values. Compute a new tensor "
                "(w = w * 2 instead of w.data = w.data * 2); change parameters between steps, and "
                "buffers by buffer.copy_(new), as model state."
            )
        to_numpy = getattr(func, "__name__", "") in ("numpy", "__array__")
        if self.reads is not None and to_numpy and not _is_fake(args[0]):  # others raise by torch
            raise TraceError(
                f"a tensor is turned into a numpy array{users_line()} while the function is "
                "staged out, where tensors have no values. Do this before the step and pass "
                "the result in the batch, or use Config(executor='eager')."
            )
        result = self._called(func, args, kwargs or {})
        if type(func) in OPERATORS and not torch.compiler.is_compiling():
            uncompiled(refuse_underived, func, (args, kwargs), result, users_line)
        if self.reads is not None and getattr(func, "__name__", "") in _HOST_READS:
            self.reads += [x for x in args if isinstance(x, torch.Tensor)]
        return result

    @not_compiled_alone
    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function, and note what torch itself reads as numbers: `x[:t]`, `full(size, t)`.

        A number made of tensors from outside, `x[t + 1]`, is known by what it was made of.
        """
        asks = type(func) is _GETTER and getattr(func.__self__, "__name__", "") not in _TENSORS
        given = [] if asks or self.numbers is None else _numbers_in(args)
        if kwargs and self.numbers is not None:
            given += _numbers_in(tuple(kwargs.values()))
        if not given:
            return func(*args, **kwargs)
        sources = [y for x in given for y in self._sources(x)]
        with _Hears() as hears:
            result = func(*args, **kwargs)
        assert self.numbers is not None
        if hears.inner or getattr(func, "__name__", "") in _FROM_DATA:
            self.numbers += sources
        self.numbers += hears.outer
        if isinstance(result, torch.Tensor) and sources and _numbers_in((result,)):
            self._made_of[id(result)] = result, sources  # held: no other has its id
        return result

    def _sources(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._made_of[id(x)][1] if id(x) in self._made_of else [] if _is_fake(x) else [x]


class _Hears(TorchDispatchMode):
    """Notes tensors that become numbers in the parsers of torch's functions.

    Args:
        outer: those from outside.
        inner: whether there was any other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outer: list[torch.Tensor] = []
        self.inner = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.inner |= _is_fake(args[0])
            self.outer += [] if _is_fake(args[0]) else [args[0]]
        return func(*args, **(kwargs or {}))


def _numbers_in(values: Any) -> list[torch.Tensor]:
    """Tensors among arguments that may be read as numbers: of one element that has a value."""
    found = []
    for x in values:  # every call of torch's comes here
        if isinstance(x, torch.Tensor):
            count = x.numel()
            # a symbol's is asked nothing: the recording would go by the answer
            if type(count) is int and count == 1 and _has_value(x):
                found.append(x)
        elif type(x) is slice:
            found += _numbers_in((x.start, x.stop, x.step))
        elif isinstance(x, (list, tuple)):
            found += _numbers_in(x)
    return found


def _innermost(x: torch.Tensor) -> torch.Tensor:
    (*_, last) = levels_of(x)
    return last


def _is_fake(x: torch.Tensor) -> bool:
    return isinstance(_innermost(x), FakeTensor)


def _has_value(x: torch.Tensor) -> bool:
    """Whether a value is known while recording: it is from outside, or made of such."""
    last = _innermost(x)
    return not isinstance(last, FakeTensor) or last.constant is not None


_SET_DATA = torch.Tensor.data.__set__  # pyright: ignore
_GETTER = type(torch.Tensor.shape.__get__)  # pyright: ignore
_TENSORS = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
"""Attributes of a tensor that are tensors."""
_FROM_DATA = frozenset(("tensor", "as_tensor", "asarray", "new_tensor"))
"""What reads each number of its data with no call that anybody hears."""

_HOST_READS = frozenset(
    (
        *("item", "tolist", "equal", "allclose", "is_nonzero", "__contains__", "__repr__"),
        *("__float__", "__int__", "__bool__", "__index__", "__complex__", "__format__"),
    )
)


def refuse_generator(generator: Any) -> None:
    """Raise a TraceError if the user made this generator."""
    if is_generator(generator) and generator not in (
        thread_generator(),
        torch._C.default_generator,
    ):
        raise TraceError(
            f"a torch.Generator was passed to a random function{users_line()}. Its state goes on "
            "from call to call, and a step is a pure function: the same inputs give the same "
            "outputs. Leave it out (random numbers are then a function of Config.seed, step, "
            "micro-batch and rank), or draw before the step and pass the numbers in the batch."
        )
