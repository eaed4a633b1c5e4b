"""Staging out: run a function on fake tensors and keep what it did as a Program.

Two front ends record the same composition. `torch.func` comes first, as `torch.func.vjp`: the
gradient that `torch.func.grad` defines, with a backward outside of grad mode. Where it refuses
(autograd Functions without `setup_context`, ...), `torch.autograd.grad` on detached leaves records
what it can. What neither can record is a `TraceError` that names the operation, the
user's line and the ways on.
"""

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.graph import CodeGen
from torch.nn import Parameter

from fzero.errors import FzeroError, TraceError, TransformOverError, first_line
from fzero.functional.copies import deep_copies
from fzero.functional.library import is_library_class
from fzero.functional.opaque import opaque_modules
from fzero.functional.remat_modules import Rules, remat_modules
from fzero.functional.torch_checkpoint import checkpoints_as_regions
from fzero.functional.transforms import is_recorded
from fzero.layout.modules import modules_around
from fzero.numerics.fakes import asks_for_memory, recorded_on, without_addresses
from fzero.program.devices import devices_kept
from fzero.program.dynamic import Dynamic, InputDim, marked
from fzero.program.graph import is_op, output_node, placeholders
from fzero.program.interop import failures_unlogged, transformers_is_tracing, unchecked
from fzero.program.origin import MODULE_CALL, is_ours, origin_of, origins_noted, raised_at
from fzero.program.program import Program
from fzero.program.promises import note
from fzero.program.symbols import ByParts, fake_inputs, new_env, quiet
from fzero.program.unstaged import plain, raises_unstaged

FrontEnd = tuple[str, Callable[..., Any]]


def trace_program(
    name: str,
    front_ends: Sequence[FrontEnd],
    inputs: Sequence[Tensor],
    names: Sequence[str],
    *,
    opaque: Sequence[str] = (),
    remat: Rules = (),
    symbolic: "Symbolic | None" = None,
    apart: bool = False,
) -> Program:
    """Record `fn(*inputs)`, a flat tuple of tensors, with the first front end that can.

    Args:
        name: the Program's name.
        front_ends: (name, function) in the order to try them.
        inputs: example tensors; only their shapes, strides, dtypes and devices are used.
        names: one per input.
        opaque: globs over names of modules that become one node each; ("auto",): the smallest ones
            that can't be recorded.
        remat: globs over names of modules, each with a policy of `fzero.remat`.
        symbolic: the same, recorded with symbols: see [Note: dynamic dims].
        apart: each input is recorded in memory of its own, whatever lies beside it.

    Raises:
        ConfigError: a glob of `remat` or `opaque` matches no module.
        TraceError: no front end can record the function, or recording it would be wrong.
    """
    try:
        with remat_modules(remat), failures_unlogged():
            fakes = partial(_fakes, inputs, apart=apart)
            record = partial(_by_front_ends, name, front_ends, inputs, names, fakes, symbolic)
            return _with_islands(record, opaque)
    except TraceError as error:
        _begin_with_users_code(error.__cause__)
        raise


def _with_islands(record: Callable[[], Program], opaque: Sequence[str]) -> Program:
    if tuple(opaque) != ("auto",):
        with opaque_modules(opaque):
            return record()
    chosen: list[str] = []
    while True:
        try:
            with opaque_modules(chosen):
                program = record()
        except TraceError as error:
            # what can't be an island was tried apart, so its cause knows of no module around it
            module = _module_of(error.__cause__ or error)
            module = _module_of(error) if module is None else module
            while module and module in chosen:  # what can't be an island is a part of one
                module = module.rpartition(".")[0]
            if module is None or module in chosen:
                raise
            chosen.append(module)
            continue
        if not chosen:
            return program
        outermost = [
            x for x in chosen if not any(y != x and y in modules_around(x) for y in chosen)
        ]
        return program.logged(program.graph, f"opaque: {', '.join(x or 'all' for x in outermost)}")


def _by_front_ends(
    name: str,
    front_ends: Sequence[FrontEnd],
    inputs: Sequence[Tensor],
    names: Sequence[str],
    fakes: Callable[[], Sequence[Tensor]],
    symbolic: "Symbolic | None",
) -> Program:
    refusals: list[tuple[str, Exception]] = []
    for label, fn in front_ends:
        try:
            graph_module = _recorded(fn, fakes)
            _refuse_host_collectives(graph_module.graph)
            _refuse_recorded(graph_module, inputs)
        except Exception as error:
            # what torch.func can't give back in backward, plain autograd may
            if isinstance(error, FzeroError) and not isinstance(error, TransformOverError):
                raise
            if _is_users(error):
                raise  # for whoever of the user's catches it
            refusals.append((label, error))
            continue
        log = [f"{front}: refused: {first_line(error)}" for front, error in refusals]
        log.append(f"staged out through {label}: {len(graph_module.graph.nodes)} nodes")
        made = None
        if symbolic is not None:
            made, line = _compared(label, graph_module.graph, symbolic)
            log.append(line)
        return replace(_program(name, graph_module, names, tuple(log)), dynamic=made)
    raise _trace_error(refusals, inputs, names, front_ends[-1][1])


def _is_users(error: BaseException | None) -> bool:
    """Whether an exception is of a class of the user's, and tells of none of torch's."""
    while error is not None:
        if is_library_class(type(error)):
            return False
        error = error.__cause__ or error.__context__
    return True


def _refuse_host_collectives(graph: fx.Graph) -> None:
    """Those of `torch.distributed` itself write into tensors from outside of what is recorded."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") == "c10d":
            raise TraceError(
                f"the model function calls a collective of torch.distributed, {node.target} "
                f"at {origin_of(node).where or 'an unknown line'}, which can't be staged out. "
                "Those of torch.distributed._functional_collectives can, and have gradients: "
                "all_gather_tensor_autograd(x, 0, group), which newer versions call "
                "all_gather_single_autograd, and all_reduce(x, 'sum', group). Or use "
                "Config(executor='eager') or an Engine, where every collective runs as it is."
            )


def _refuse_recorded(graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    """A tensor that was made in an earlier recording, and kept outside, has no values."""
    if all(x.is_meta or is_recorded(x) for x in inputs):
        return  # a simulation: nobody runs it
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and is_recorded(x := getattr(graph_module, str(node.target))):
            where = next((o.where for user in node.users if (o := origin_of(user)).where), None)
            raise TraceError(
                f"the model function reads, at {where or 'an unknown line'}, a tensor of shape "
                f"{tuple(x.shape)} that it made and kept outside (a cache of masks or rotary "
                "tables, in a class, a global or an object) while an earlier call was staged out: "
                "such a tensor has no values. Fill the cache before the first step (one call under "
                "torch.no_grad() does), keep it in an attribute of the module, which each call "
                "finds as it was, or make the tensor anew each time."
            )


def _recorded(fn: Callable[..., Any], fakes: Callable[[], Sequence[Tensor]]) -> fx.GraphModule:
    try:
        return _run(fn, fakes)
    except Exception as error:
        # Only what torch has put on the meta device by itself (see `devices`) needs a second try.
        if "meta" not in str(error):
            raise
        return _run(devices_kept(fn), fakes)


class Symbolic(NamedTuple):
    """A recording with symbols in place of sizes.

    Args:
        label: of the front end that recorded it.
        dims: whose sizes.
        twin: the recording, or why there is none.
        env: what was asked of the symbols.
    """

    label: str
    dims: Sequence[InputDim]
    twin: fx.GraphModule | Exception
    env: Any


def with_symbols(
    front_end: FrontEnd, inputs: Sequence[Tensor], dims: Sequence[InputDim], remat: Rules
) -> Symbolic:
    """Record a function with symbols in place of the sizes of these dims of inputs.

    Outside of what watches a recording, and before it: what the function reads of symbols is
    torch's, and what it notes while it is recorded is to be of the real sizes.

    Args:
        front_end, inputs, remat: as `trace_program` takes them.
        dims: whose sizes.
    """
    label, fn = front_end
    env = new_env()
    try:
        with remat_modules(remat), quiet(), ByParts():
            twin = _run(fn, lambda: fake_inputs(inputs, frozenset(dims), env))
    except Exception as error:  # then it is recorded for each size
        return Symbolic(label, dims, error, env)
    return Symbolic(label, dims, twin, env)


def _compared(label: str, graph: fx.Graph, symbolic: Symbolic) -> tuple[Dynamic | None, str]:
    """How a recording follows sizes, and what its log says of that."""
    other = symbolic.twin
    if isinstance(other, Exception):
        return None, f"dynamic: refused: {type(other).__name__}: {first_line(other)}"
    if label != symbolic.label:
        return None, f"dynamic: refused: {label} alone records it"
    try:
        made = marked(graph, other, symbolic.env, symbolic.dims)
    except Exception as error:  # of another torch, say: what symbols know is private
        return None, f"dynamic: refused: {first_line(error)}"
    return made, f"dynamic: {len(made.table)} numbers follow {len(symbolic.dims)} sizes"


def _run(fn: Callable[..., Any], fakes: Callable[[], Sequence[Tensor]]) -> fx.GraphModule:
    with (
        # a caller's no_grad is not to reach the gradients that are recorded; nor is its inference
        # mode, which torch 2.11, unlike later ones, lets into make_fx
        torch.inference_mode(False),
        transformers_is_tracing(),
        unchecked,
        checkpoints_as_regions(),
        deep_copies,
        torch.enable_grad(),
    ):
        return recorded_on(fakes(), origins_noted(fn))


def _fakes(inputs: Sequence[Tensor], *, apart: bool) -> list[Tensor]:
    # Non-fake inputs are what the function closes over.
    mode = without_addresses(FakeTensorMode, allow_non_fake_inputs=True)
    seen: set[int] = set()
    fakes: list[Tensor] = []
    for x in inputs:
        # A tensor that is passed twice (labels that are the tokens) may be two at another call. As
        # one fake tensor, all reads of it would be recorded as reads of the input that comes last.
        fakes.append(_fake(x, mode, anew=id(x) in seen, apart=apart))
        seen.add(id(x))
    return fakes


def _fake(x: Tensor, mode: FakeTensorMode, *, anew: bool, apart: bool) -> Tensor:
    # A fake tensor of another Program is to be the same in this mode. A number is made anew, too:
    # from 2.15 on torch reads its value, which would count as read by the function.
    number = type(x) is Tensor and x.dim() == 0 and not x.requires_grad
    # And a part of a larger memory, where others may lie, now or at another call: torch takes no
    # derivative along a direction of one (2.13: an internal assertion).
    part = apart and type(x) in (Tensor, Parameter) and x.layout is torch.strided and _is_part(x)
    if anew or number or part or isinstance(x, FakeTensor):
        with mode:
            made = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)
        return made.requires_grad_(x.requires_grad)
    return mode.from_tensor(x, static_shapes=True)


def _is_part(x: Tensor) -> bool:
    """Whether its memory is larger than it is."""
    spans = zip(x.shape, x.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in spans) if x.numel() else -1
    return x.untyped_storage().nbytes() > (last + 1) * x.itemsize


def _program(
    name: str, graph_module: fx.GraphModule, names: Sequence[str], log: tuple[str, ...]
) -> Program:
    graph = graph_module.graph
    graph.set_codegen(CodeGen())  # make_fx leaves a pytree calling convention
    (results,) = output_node(graph).args
    if not isinstance(results, (tuple, list)):
        output_node(graph).args = ((results,),)
    constants = {
        str(node.target): getattr(graph_module, str(node.target))
        for node in graph.nodes
        if node.op == "get_attr"
    }
    assert len(placeholders(graph)) == len(names)
    note(graph)
    outputs = tuple(f"out{i}" for i, _ in enumerate(output_node(graph).args[0]))  # pyright: ignore
    literals = [constants[str(x.target)] for x in graph.nodes if x.op == "get_attr" and _is_new(x)]
    return Program(name, graph, tuple(names), outputs, constants, log, literals=tuple(literals))


def _is_new(constant: fx.Node) -> bool:
    """Whether the function made a constant itself, as `torch.tensor([1, 2])` does."""
    return bool(constant.users) and all(
        is_op(user, "aten::lift_fresh", "aten::lift_fresh_copy") for user in constant.users
    )


# ------------------------------------------------------------------------------------ messages
def _trace_error(
    refusals: Sequence[tuple[str, Exception]],
    inputs: Sequence[Tensor],
    names: Sequence[str],
    fn: Callable[..., Any],
) -> TraceError:
    _, last = refusals[-1]
    # A value that is read tells the user most, whichever front end met it.
    cause = next((e for _, e in refusals if isinstance(e, _DATA_DEPENDENT)), last)
    where = raised_at(cause)
    if is_anomaly_mode() and isinstance(cause, _DATA_DEPENDENT) and not where:
        error = TraceError(_ANOMALY)
        error.__cause__ = cause
        return error
    if "dynamo-optimized function" in str(cause):
        error = TraceError(_COMPILED.format(where))
        error.__cause__ = cause
        return error
    if any("backward() called inside a functorch" in str(e) for _, e in refusals):
        error = TraceError(_BACKWARD)
        error.__cause__ = cause
        return error
    apart = _apart(inputs, names) if re.search(_TWO_DEVICES, str(cause)) else ""
    if apart and ("meta" not in str(cause) or any(x.is_meta for x in inputs)):
        error = TraceError(f"the model function meets tensors of two devices{where}. {apart}")
        error.__cause__ = cause
        return error
    agree = len({plain(e) for _, e in refusals}) == 1
    if where and agree and all(x.numel() for x in inputs) and raises_unstaged(fn, inputs, cause):
        error = TraceError(_ITS_OWN.format(type(cause).__name__, plain(cause)[:500], where))
        error.__cause__ = cause
        return error
    module = _module_of(cause)
    told = {first_line(cause): ""}
    for label, error in refusals:
        told.setdefault(first_line(error), f"  through {label}: {first_line(error)}\n")
    bug = "" if isinstance(cause, _DATA_DEPENDENT) else _PERHAPS_A_BUG
    empty = [(n, x) for n, x in zip(names, inputs, strict=False) if x.numel() == 0]
    if empty and isinstance(cause, ArithmeticError):
        ((leaf, x), *_) = empty
        bug = _EMPTY.format(leaf, tuple(x.shape))
    if "mixed torch.Tensor and DTensor" in str(cause):
        bug = _SHARDS_READ
    if asks_for_memory(cause):
        bug = _KERNEL
    error = TraceError(
        f"the model function can't be staged out: {_operation(cause)}{where}.\n"
        f"{''.join(told.values())}{bug}A Program holds the same operations for every batch, so "
        "nothing in it may depend on a tensor's values. Ways on: use tensor operations "
        "(torch.where instead of `if`, a mask instead of indexing by a condition); "
        f"{_wrap(module)}; move this part out of the model function and pass its result in the "
        "batch; or Config(executor='eager'), which runs any Python."
    )
    error.__cause__ = cause
    return error


def is_anomaly_mode() -> bool:
    """Whether autograd looks at the values of each gradient."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


_ANOMALY = (
    "torch.autograd's anomaly mode is on (set_detect_anomaly, detect_anomaly), which looks at the "
    "values of each gradient. While a function is staged out there are none, and its Program runs "
    "without autograd, so nobody would look. Switch the mode off: Config(on_nonfinite='raise') "
    "stops at the first step whose gradient is not finite, and under Config(executor='eager') "
    "anomaly mode names the operation."
)
_BACKWARD = (
    "the model function calls backward(), and what it returns is differentiated for it. Return the "
    "loss, and leave out loss.backward(), optimizer.step() and zero_grad(). A gradient that the "
    "loss is made of, as of a penalty, comes from torch.func.grad, or from torch.autograd.grad "
    "with create_graph=True."
)
_COMPILED = (
    "the model function calls what torch.compile has made{}: it can't be staged out, as its "
    "operators are hidden in there. Call the function or module that was compiled itself (of a "
    "module its `_orig_mod`): a Program has no Python left to save. Config(executor='inductor') "
    "compiles all of it; Config(executor='eager') takes it as it is, and so does an island around "
    "the call, fzero.opaque of the function or module that makes it, or Config(opaque='auto')."
)
_ITS_OWN = (
    "the model function raises {}: {}{}. It does so by itself, also where it is not staged out: in "
    "plain PyTorch, on tensors of these shapes and dtypes. Mend that line, or what it is given."
)
_TWO_DEVICES = "same device|two (different )?devices"  # torch 2.11 says the second
_PERHAPS_A_BUG = "If the function raises the same when you call it yourself, mend that first. "
_EMPTY = (
    "{} has shape {}, and what torch records divides by the number of elements (the gradient of "
    "mse_loss, say), where its kernels give NaN. Pass over such a batch, on every rank, "
    "or use Config(executor='eager'). "
)
_SHARDS_READ = (
    "A leaf of a tree of shards was read as if it were whole. A function of whole leaves goes "
    "through fzero.sharded(fn, cfg)(params, ...), fzero.value_and_grad(fn, cfg) or another of "
    "them, inside of fzero.jit too. "
)
_KERNEL = (
    "While a function is staged out tensors have no memory. Of a kernel make an operator, "
    "torch.library.triton_op with wrap_triton, or custom_op; or an island, as below. Whether two "
    "tensors are one `is` tells. "
)
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)

_READS = {
    "aten._local_scalar_dense.default": "a tensor's value is read "
    "(.item(), float(), bool() or an `if` on it)",
    "aten.nonzero.default": "the shape of a result depends on values (nonzero, or a boolean index)",
    "aten.equal.default": "a tensor's values are compared (torch.equal)",
    "aten._pack_padded_sequence.default": "the shape of a packed sequence depends on its lengths",
    "aten._ctc_loss.Tensor": "what CTC loss keeps for backward depends on values",
    "aten._ctc_loss.default": "what CTC loss keeps for backward depends on values",
}


def _apart(inputs: Sequence[Tensor], names: Sequence[str]) -> str:
    """How tensors of two devices come together."""
    found: dict[torch.device, list[str]] = {}
    for name, x in zip(names, inputs, strict=False):
        if x.dim():  # numbers go everywhere
            found.setdefault(x.device, []).append(name)
    if len(found) < 2:
        return (
            f"All that it is given is on {', '.join(map(str, found))}, so one is made or "
            "kept elsewhere: pass device=x.device where it is made, or make it a buffer."
        )
    (home, those), *_, (away, others) = found.items()
    one, other = (f"{x[0]}{f' (and {len(x) - 1} more)' if x[1:] else ''}" for x in (those, others))
    return f"{other}: on {away}, {one}: on {home}. Move it there first: x.to('{home}')."


def _operation(error: Exception) -> str:
    if isinstance(error, _DATA_DEPENDENT):
        name = str(error.func)
        return f"{_READS.get(name, 'the result of an operation depends on values')} ({name})"
    if "UntypedStorage" in str(error) and _came_through(error, torch.nn.modules.rnn):
        return "the memory of a tensor is looked at, as cuDNN's RNNs do with their weights'"
    if asks_for_memory(error):
        return "the address of a tensor is asked for (data_ptr, as launchers of kernels do)"
    return f"{type(error).__name__}: {first_line(error)}"


def _came_through(error: BaseException, module: ModuleType) -> bool:
    return any(x.filename == module.__file__ for x in traceback.extract_tb(error.__traceback__))


def _begin_with_users_code(error: BaseException | None) -> None:
    """Let a traceback begin with the user's function: what records it is nothing to mend."""
    tb = error.__traceback__ if error is not None else None
    while tb is not None and is_ours(tb.tb_frame.f_code):
        tb = tb.tb_next
    if error is not None and tb is not None:
        error.__traceback__ = tb


def _module_of(error: BaseException) -> str | None:
    """The innermost module whose call an exception came through, by its name in the outermost.

    What `forward` itself makes of a module (`torch.compile(self.block)(x)`) has no name there.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = [frame.f_locals["self"] for frame in frames if frame.f_code is MODULE_CALL]
    names = {id(x): name for name, x in calls[0].named_modules()} if calls else {}
    return next((names[id(x)] for x in reversed(calls) if id(x) in names), None)


def _wrap(module: str | None) -> str:
    """How to make an island of what can't be recorded."""
    if module is None:
        return "make the part that reads it an island, fzero.opaque(fn)"
    if not module:
        return "make the part that reads it an island, fzero.opaque(fn), or Config(opaque='auto')"
    return f"make that module one node, Config(opaque=[{module!r}]), or Config(opaque='auto')"
