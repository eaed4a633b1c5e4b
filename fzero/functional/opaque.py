"""Parts of a function that a Program holds as one node each; see [Note: islands]."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from fzero.errors import ConfigError, ShardError, TraceError
from fzero.functional.apart import apart
from fzero.functional.containers import Contents, others, put_together, take_apart
from fzero.functional.held import held_by_nobody, held_over
from fzero.functional.islands import Form, Island, check_islands, record, shown
from fzero.functional.remat import is_recording, region
from fzero.functional.remat_modules import matches_nothing
from fzero.functional.slots import SlotTable, plan_slots
from fzero.functional.swap import clone, read_buffers, swapped
from fzero.numerics.fakes import without_addresses
from fzero.numerics.rng import generator_of, preserved
from fzero.tree import PyTree

F = TypeVar("F", bound=Callable[..., Any])


def opaque(fn_or_module: F, *, like: Callable[..., PyTree] | None = None) -> F:
    """One node of the Program that runs as plain PyTorch, with its own backward.

    For what can't be recorded because it reads a tensor's values: packed sequences, CTC loss,
    experts that are chosen by a boolean index, loops until convergence. All around it stays staged
    out; its parameters are gathered before it and freed after it, in forward and again in backward,
    where it is run a second time. What it holds meanwhile is not in `peak_bytes()`.

    It runs whenever its Program does: what it reads from outside is as it is then. Random numbers
    that it draws from torch's generators are a function of seed, step and rank as everywhere. It
    has one derivative. Where nothing is staged out (plain PyTorch, `executor="eager"`, an
    `Engine`), it is called as it is.

    Args:
        fn_or_module: a function of tensors in any containers, numbers and strings, pure, which
            takes every tensor that it needs the gradient of as an argument; or a module, whose
            parameters and buffers are its own.
        like: `like(*args) -> results`, tensors of the shapes and dtypes that come out. They must
            follow from the shapes of the arguments. None: found by trying: on tensors without
            values, or else on tensors of ones and of twos.

    Returns:
        A function with the same arguments; or the module itself, whose `forward` is opaque from
        then on.

    Raises:
        ConfigError: it is neither.
        ShardError: it is given a shard.
        TraceError: while it is recorded: the shapes of its results can't be found, it closes over
            a tensor of the recording, or it puts one into an argument. When it runs: its results
            have other shapes.

    Examples:
        >>> import fzero, torch
        >>> @fzero.opaque
        ... def clipped(x):
        ...     return x.clamp(max=float(x.detach().mean()))  # reads a value
        >>> step_fn = fzero.make_train_step(
        ...     lambda p, x: clipped(p["w"] * x).sum(), fzero.optim.sgd(1)
        ... )
        >>> params, opt_state = step_fn.init({"w": torch.ones(3)})
        >>> params, _ = step_fn(params, opt_state, torch.tensor([1.0, 2.0, 6.0]))
        >>> fzero.unshard(params)["w"]
        tensor([ 0., -1.,  1.])
    """
    if isinstance(fn_or_module, nn.Module):
        fn_or_module.forward = OpaqueForward(fn_or_module, fn_or_module.forward, like)
        return cast(F, fn_or_module)
    if not callable(fn_or_module):
        raise ConfigError(
            f"opaque got a {type(fn_or_module).__name__}, and takes a function or a module: "
            "opaque(block)(x), not opaque(block(x))."
        )
    fn = fn_or_module

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not is_recording():
            return fn(*args, **kwargs)
        return _recorded(_name(fn), fn, like, args, kwargs)

    return cast(F, called)


class OpaqueForward:
    """The `forward` of an opaque module.

    Args:
        module: whose it is.
        forward: its own.
        like: see `opaque`.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], like: Callable[..., Any] | None
    ) -> None:
        self.module, self.forward, self.like = module, forward, like

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_recording():
            return self.forward(*args, **kwargs)
        plan = plan_slots(self.module)
        params = {s.name: s.tensor(plan) for s in plan.params}
        buffers = {s.name: s.tensor(plan) for s in plan.buffers}
        changed: list[str] | None = None

        def body(params: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
            nonlocal changed
            copies = {name: clone(x) for name, x in buffers.items()}
            before = {name: x._version for name, x in copies.items()}
            with plan.turn, swapped(plan, params, copies, buffers):
                out = self.forward(*args, **kwargs)
                new = read_buffers(plan, copies)
            if changed is None:  # found while recording: which buffers are results
                seen = {
                    name.rpartition(".")[0]
                    for name, x in new.items()
                    if x is not copies[name] or x._version != before[name]
                }
                # all of a module's: batch norm writes its statistics unseen by their versions
                changed = [name for name in new if name.rpartition(".")[0] in seen]
            return out, [new[name] for name in changed]

        def shapes(params: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
            nonlocal changed
            assert self.like is not None
            changed = list(buffers)  # nobody has seen which
            return self.like(*args, **kwargs), list(buffers.values())

        out, new = _recorded(
            _name(self.module), body, self.like and shapes, (params, buffers, args, kwargs), {}
        )
        _write(plan, dict(zip(changed or [], new, strict=True)))
        return out


def _write(plan: SlotTable, buffers: Mapping[str, Tensor]) -> None:
    """Put new buffers into their slots."""
    for name, _, entries in plan.buffers:
        for index, table, key in entries if name in buffers else ():
            plan.modules[index].__dict__[table][key] = buffers[name]


# ------------------------------------------------------------------------------- by the module
@contextlib.contextmanager
def opaque_modules(globs: Sequence[str]) -> Iterator[None]:
    """What is recorded meanwhile has the modules of these names as opaque ones.

    Args:
        globs: over names inside of the module that was functionalised.

    Raises:
        ConfigError: at the end: a glob matches no module of those that were called.
    """
    mine = _Globs(tuple(globs))
    token = _GLOBS.set(mine)
    try:
        yield
    finally:
        _GLOBS.reset(token)
    for glob in mine.globs:
        if not any(fnmatchcase(name, glob) for name in mine.seen):
            raise matches_nothing("Config.opaque", glob, list(mine.seen))


@dataclass
class _Globs:
    """The globs of a recording, and the modules that they were held against."""

    globs: tuple[str, ...]
    seen: dict[str, None] = field(default_factory=dict)  # in order, as messages show them


_GLOBS: ContextVar[_Globs | None] = ContextVar("fzero_opaque", default=None)


def wrap_forwards(plan: SlotTable) -> None:
    """Make the chosen modules of a functionalised one opaque, until its slots are put back."""
    mine = _GLOBS.get()
    if mine is None or not mine.globs or not is_recording():
        return
    for prefix, module in zip(plan.prefixes, plan.modules, strict=True):
        mine.seen[prefix] = None
        if any(fnmatchcase(prefix, glob) for glob in mine.globs):
            module.__dict__["forward"] = OpaqueForward(module, module.forward, None)


# ----------------------------------------------------------------------------------- recording
def _recorded(
    name: str,
    fn: Callable[..., Any],
    like: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    check_islands()
    call = _Call.of(name, fn, args, kwargs)
    tensors = call.tensors
    if any(isinstance(x, DTensor) for x in tensors):
        raise ShardError(
            f"the opaque function {name} was given a DTensor, a shard of a leaf, and takes full "
            "tensors: call it inside of fzero.sharded(fn, cfg)(params, ...)."
        )
    wanted = torch.is_grad_enabled()
    island = Island(
        name,
        call.flat,
        tuple(map(Form.of, tensors)),
        _forms(call, like),
        tuple(wanted and x.requires_grad and x.is_floating_point() for x in tensors),
    )
    with region():
        results = record(island, [x.contiguous() for x in tensors])
    return put_together(call.result, results)


@dataclass(eq=False)
class _Call:
    """A call, as a function of its tensors alone.

    Args:
        name: of the function.
        fn: the function.
        template: its arguments, with places where tensors are.
        tensors: these.
        casts: device and dtype of the autocast that is in force, per device.
        result: template of the result, once it is known.
    """

    name: str
    fn: Callable[..., Any]
    template: Any
    tensors: list[Tensor]
    casts: dict[str, torch.dtype]
    result: Any = None

    @classmethod
    def of(cls, name: str, fn: Any, args: Any, kwargs: Any) -> "_Call":
        """Take a call apart."""
        tensors, template = take_apart((args, kwargs))
        devices = {x.device.type for x in tensors}
        casts = {d: torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}
        return cls(name, fn, template, tensors, casts)

    def flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of the result, of these tensors in place of its own."""
        with held_by_nobody():
            return take_apart(self._called(self.fn, *put_together(self.template, tensors)))[0]

    def tried(self, tensors: Sequence[Tensor], fn: Any, valued: bool) -> list[Tensor]:
        """The same of `fn`, while it is not known yet what comes out.

        Args:
            tensors: of the forms of its own.
            fn: its own function, or what tells the shapes.
            valued: whether they have values, which what is no tensor may depend on.
        """
        args, kwargs = put_together(self.template, tensors)
        contents = Contents((args, kwargs))
        try:
            with held_over() as held:
                result = self._called(fn, args, kwargs)
                held.warn(f"the opaque function {self.name}")
        finally:
            changed = contents.restored()
        if changed:
            raise TraceError(
                f"the opaque function {self.name} put a tensor or an item into one of its "
                "arguments, where those outside would not find it. Return it instead, or make what "
                "holds the argument opaque as well."
            )
        for x in others(result):
            if isinstance(x, _SYMBOLS) or (valued and not isinstance(x, _WITHOUT_VALUE)):
                raise TraceError(
                    f"the opaque function {self.name} returned a {type(x).__name__}, which may "
                    "depend on values; it must return tensors, in any containers."
                )
        found, self.result = take_apart(result)
        return found

    def _called(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in self.casts.items():
                stack.enter_context(torch.autocast(device, dtype))
            return fn(*args, **kwargs)


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_WITHOUT_VALUE = (type(None), type, torch.dtype, torch.device)


def _forms(call: _Call, like: Callable[..., Any] | None) -> tuple[Form, ...]:
    """What comes out of a call, found by trying.

    Raises:
        TraceError: nothing tells.
    """
    if like is not None:
        return _tried(call, _without_values, like)
    found: list[tuple[Form, ...]] = []
    refusals: list[Exception] = []
    for attempt in (_without_values, _of(1), _of(2)):
        try:
            found.append(_tried(call, attempt, None))
            if attempt is _without_values:
                break
        except _ClosedOver as error:
            raise TraceError(
                f"the opaque function {call.name} reads a tensor of the function that is staged "
                "out, which it was not given as an argument: its gradient would be lost. Pass "
                "every tensor as an argument; of a module pass the module: fzero.opaque(module)."
            ) from error
        except _HiddenDraw:
            raise
        except Exception as error:
            refusals.append(error)
    if len(set(found)) == 1:
        return found[0]
    if found:
        raise TraceError(
            f"the shapes of what the opaque function {call.name} returns depend on values: on "
            f"tensors of ones they are {shown(found[0])}, on tensors of twos {shown(found[1])}. "
            "Make them follow from the shapes of its arguments (pad_packed_sequence takes "
            "total_length=), or put what reads the result inside as well."
        )
    _, of_ones, _ = refusals
    raise TraceError(
        f"nobody can tell what the opaque function {call.name} returns: on tensors of ones it "
        f"raises {type(of_ones).__name__}: {str(of_ones)[:200]}. Say it with "
        "fzero.opaque(fn, like=lambda *args: ...), which returns tensors of the same shapes and "
        "dtypes."
    ) from of_ones


_OF_FAKES = (DataDependentOutputException, DynamicOutputShapeException)


class _ClosedOver(Exception):
    """A result is a tensor of the recording."""


def _tried(
    call: _Call,
    attempt: Callable[[list[Form]], tuple[Any, list[Tensor]]],
    like: Callable[..., Any] | None,
) -> tuple[Form, ...]:
    """Results' forms, apart from the recording."""
    forms = list(map(Form.of, call.tensors))

    def attempted() -> tuple[Form, ...]:
        context, tensors = attempt(forms)
        mode = context if isinstance(context, FakeTensorMode) else None
        generators = [generator_of(form.device) for form in {x.device: x for x in forms}.values()]
        try:
            with (
                _compiled_as_is(),
                preserved(generators),
                HiddenDraws(),
                context,
                torch.no_grad(),
            ):
                found = call.tried(tensors, like or call.fn, valued=mode is None)
        except (AssertionError, *_OF_FAKES) as error:
            # its own are of the mode; without one there are none
            if mode is None or "Mixing fake modes" in str(error):
                raise _ClosedOver from error
            raise
        for x in found:
            if isinstance(x, FakeTensor) and x.fake_mode is not mode:
                raise _ClosedOver
            if not all(type(size) is int for size in x.shape):
                raise TraceError(f"the shape {tuple(x.shape)} of a result depends on values")
        return tuple(map(Form.of, found))

    return apart(attempted)


class _HiddenDraw(TraceError):
    """See `HiddenDraws`: other tensors would change nothing."""


class HiddenDraws(TorchFunctionMode):
    """Refuses what draws masks that no seed reaches: backward runs an island again, with others.

    Examples:
        >>> rnn = torch.nn.LSTM(2, 2, num_layers=2, dropout=0.5)
        >>> with HiddenDraws():  # on a CPU it draws as all others do
        ...     _ = rnn(torch.ones(3, 2))
    """

    rnns = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.rnns and bool in map(type, args) and args[0].is_cuda:
            # after tensors and parameters: whether there are biases, layers, dropout, in training
            at = [type(x) for x in args].index(bool)
            layers, dropout, training = args[at + 1 : at + 4]
            if training and dropout and layers > 1 and torch.backends.cudnn.enabled:
                raise _HiddenDraw(
                    f"{func.__name__} with dropout={dropout} on CUDA: cuDNN draws its masks from "
                    "a state of its own, which no seed reaches, and backward runs an island again: "
                    "its gradients would be those of other masks. Use RNNs of one layer with "
                    "nn.Dropout in between, or Config(executor='eager')."
                )
        return func(*args, **(kwargs or {}))


def _compiled_as_is() -> Any:
    """What torch.compile has made runs as what it was made of, where it would refuse a recording.

    It can't see that it is run apart from that. Private in torch, without a public alternative.
    """
    return torch._dynamo.config.patch(error_on_nested_fx_trace=False)


def _without_values(forms: list[Form]) -> tuple[Any, list[Tensor]]:
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    mode = without_addresses(FakeTensorMode, allow_non_fake_inputs=True, shape_env=shapes)
    with mode:
        return mode, [form.empty() for form in forms]


def _of(value: int) -> Callable[[list[Form]], tuple[Any, list[Tensor]]]:
    return lambda forms: (contextlib.nullcontext(), [form.empty().fill_(value) for form in forms])


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))
