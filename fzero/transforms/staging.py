"""A function of shards, staged out for one signature: its Program, compiled, and how it is run."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.attention import SDPBackend, sdpa_kernel

from fzero import zero
from fzero.config import Config
from fzero.distributed.dtensor import from_spec, local_tensor, settled
from fzero.distributed.mesh import Mesh
from fzero.distributed.ragged import rows_of
from fzero.eager.lazy import written_already
from fzero.errors import FzeroError, ShardError
from fzero.functional.memory import Apart
from fzero.functional.owners import Owners, noted, owners_of
from fzero.layout import LeafLayout, uneven_bytes
from fzero.program import Program
from fzero.program.categories import BATCH, PARAMETERS, RESULTS
from fzero.program.choice import Choice
from fzero.program.dynamic import InputDim, kept_dynamic
from fzero.program.fitting import NothingFits
from fzero.program.graph import UPDATE, phases
from fzero.program.passes.donate import own_outputs
from fzero.program.passes.functionalise import written_inputs
from fzero.program.passes.groups import Growth
from fzero.program.pipeline import in_place, optimise
from fzero.program.program import Pass
from fzero.program.trace import FrontEnd, trace_program, with_symbols
from fzero.program.transfers import machine_of
from fzero.transforms.agreement import signature_of
from fzero.transforms.frames import Frame, take_apart
from fzero.transforms.notes import ONE_AT_A_TIME, Notes
from fzero.transforms.parts import on_mesh
from fzero.transforms.recorded import Recorded, check_inputs
from fzero.tree import PyTree

# How a gradient is taken that nothing differentiates again; each front end of a recording has its
# own. Outside of a recording it is what runs any Python.
_GRADIENT: ContextVar[zero.Grad] = ContextVar("fzero_gradient", default=zero.autograd)


def gradient() -> zero.Grad:
    """The gradient operator of the recording that is under way."""
    return _GRADIENT.get()


@contextlib.contextmanager
def taking(grad: zero.Grad, mesh: Mesh) -> Iterator[None]:
    """What is recorded inside takes its gradients so, and runs on these ranks."""
    token = _GRADIENT.set(grad)
    try:
        with on_mesh(mesh):
            yield
    finally:
        _GRADIENT.reset(token)


def staged_out(
    name: str,
    front_ends: Sequence[FrontEnd],
    notes: Notes,
    inputs: Sequence[Tensor],
    names: Sequence[str],
    cfg: Config,
    *,
    roles: Callable[[], dict[str, Any]],
    fixed: Mapping[str, torch.dtype],
    changed: Callable[[str], FzeroError],
    donated: Mapping[str, torch.dtype] = MappingProxyType({}),
    choice: Choice | None = None,
    budget: int = 0,
    slack: float = 0.1,
    uneven: int = 0,
    at_home: Mapping[int, int] = MappingProxyType({}),
    last: Pass = lambda program: program,
    dynamic: Sequence[InputDim] = (),
) -> Recorded:
    """What differentiates or gathers, recorded and made fit to run: a function of shards, or the
    gradients of a step.

    Args:
        name: the Program's.
        front_ends: as `trace_program` takes them.
        notes: take down what the user's functions read from outside.
        inputs: example tensors.
        names: one per input.
        cfg: says which passes there are.
        roles: fields of the Program that say what its inputs and outputs are; asked when it is
            recorded.
        fixed: names of the inputs that nobody may write to, and the dtypes in which the function
            gets them.
        changed: what to say where it does.
        donated: the same of inputs that it may write to.
        choice: settled by all ranks; None: the best buckets up to `cfg.bucket_mb`, and the first
            plan that fits.
        budget: where it does, bytes that its peak may reach in any case.
        slack: share of the lowest peak that larger buckets may cost.
        uneven: bytes of state that the rank with the largest shards holds more than this one.
        at_home: of each flat whose full leaves lie in memory as it does, how many they are; for
            what writes to them.
        last: a pass after all others.
        dynamic: dims of inputs whose sizes may be others at other calls, if that can be had.

    Raises:
        ConfigError: nothing stays under `cfg.memory_limit`.
        TraceError: the function can't be staged out.
    """

    symbolic = None
    if dynamic:
        with ONE_AT_A_TIME:
            symbolic = with_symbols(front_ends[0], inputs, dynamic, cfg.remat_rules)

    def record() -> Program:
        return trace_program(
            name,
            front_ends,
            inputs,
            names,
            opaque=cfg.opaque,
            remat=cfg.remat_rules,
            symbolic=symbolic,
            apart=not donated,
        )

    def passes(program: Program) -> Program:
        program = replace(program, **roles())
        for label in written_inputs(program, fixed):
            raise changed(label)
        bucket_bytes = choice.gradients if choice else int(cfg.bucket_mb * 2**20)
        if written := written_inputs(program, donated):
            if {*phases(program.graph).values()} != {UPDATE}:
                raise changed(written[0])
            program = in_place(
                program,
                bucket_bytes=bucket_bytes,
                prefetch=cfg.prefetch,
                budget=budget,
                slack=slack,
                exact=choice is not None,
                passes=cfg.named_passes,
                at_home=at_home,
            )
            return kept_dynamic(last(program))
        machine = machine_of(inputs) if cfg.offloads_activations else None
        if cfg.offloads_activations and machine is None:
            line = "offload: no activations, for the host's memory is the device's own"
            program = program.logged(program.graph, line)
        program = optimise(
            program,
            reshard_after_forward=cfg.reshard_after_forward,
            bucket_bytes=bucket_bytes,
            exact=choice is not None,
            growth=choice.growth if choice else Growth(),
            early=choice.early if choice else None,
            prefetch=cfg.prefetch,
            slack=slack,
            limit=cfg.limit,
            thrift=choice.thrift if choice else None,
            passes=cfg.named_passes,
            machine=machine,
            uneven=uneven,
            placing=cfg.executor != "inductor",
        )
        return kept_dynamic(last(program))

    return Recorded(notes, record, passes, cfg.executor, cuda_graph=cfg.cuda_graph)


@dataclass(frozen=True)
class Leaf:
    """What a leaf is beside its local tensor."""

    spec: DTensorSpec | None
    owners: Owners

    @classmethod
    def of(cls, x: Tensor) -> "Leaf":
        """Of a leaf as users hold it."""
        return cls(x._spec if isinstance(x, DTensor) else None, owners_of(x))

    def wrapped(self, local: Tensor) -> Tensor:
        """The local tensor as users hold it."""
        return noted(local if self.spec is None else from_spec(local, self.spec), self.owners)


class TracedFunction:
    """One Program of a function, ready to run.

    Args:
        name: of the function.
        body: `(*args, **kwargs) -> tree`, on trees of DTensors and plain tensors.
        reads: the user's functions in it, by what messages call them.
        cfg: its config.
        leaves, frame: the arguments, taken apart.
        donated: one flag a leaf: its memory may be reused.
        mesh: its ranks.
        choice: what ranks have settled, or None.
        dynamic: dims of leaves, (leaf, dim), whose sizes may be others at other calls, if that can
            be had.
        budget, slack, at_home: as for `staged_out`.
        known: fields of the Program that the caller knows better than the arguments tell.
        saved: what another process has recorded of it, whose leaves are all plain tensors, and the
            form of its result.

    Raises:
        TraceError: the function can't be staged out.
        FzeroError: it changes an argument in place that is not donated.
        Gone: what was saved was recorded for others.
    """

    def __init__(
        self,
        name: str,
        body: Callable[..., PyTree],
        reads: Mapping[str, Any],
        cfg: Config,
        leaves: Sequence[Tensor],
        frame: Frame,
        donated: Sequence[bool],
        mesh: Mesh,
        *,
        choice: Choice | None = None,
        dynamic: Iterable[InputDim] = (),
        budget: int = 0,
        slack: float = 0.1,
        at_home: Mapping[int, int] = MappingProxyType({}),
        known: Mapping[str, Any] = MappingProxyType({}),
        saved: tuple[Recorded, Frame] | None = None,
    ) -> None:
        self.cfg, self.mesh, self.frame = cfg, mesh, frame
        self.donated = tuple(donated) if any(donated) else ()
        self._apart = Apart()
        self.inputs = [Leaf.of(x) for x in leaves]
        self.outputs: list[Leaf] = []
        self.result: Frame | None = None  # found while recording
        names = list(known.get("inputs", frame.names))

        def through(grad: zero.Grad) -> Callable[..., tuple[Tensor, ...]]:
            def flat_fn(*flat: Tensor) -> tuple[Tensor, ...]:
                pairs = zip(self.inputs, flat, strict=True)
                args, kwargs = frame.unflatten([leaf.wrapped(x) for leaf, x in pairs])
                with taking(grad, mesh):
                    result = body(*args, **kwargs)
                found, self.result = take_apart(result, "what the function returned")
                found = [as_result(x) for x in found]
                self.outputs = [Leaf.of(x) for x in found]
                return tuple(detached(local_tensor(x)) for x in found)

            return flat_fn

        locals_ = [local_tensor(x).detach() for x in leaves]
        # a tree of shards, or the first argument, which is one at every stage
        shown = zip(self.inputs, frame.paths, strict=True)
        first = [leaf.spec is not None or path.startswith("[0][0]") for leaf, path in shown]

        def roles() -> dict[str, Any]:
            assert self.result is not None
            return {
                "input_categories": tuple(PARAMETERS if one else BATCH for one in first),
                "outputs": self.result.names,
                "output_categories": (RESULTS,) * len(self.result.names),
                **known,
            }

        uneven = 0 if cfg.limit is None else _uneven(leaves, mesh)
        rows = list(zip(names, locals_, donated, strict=True))
        fixed = {label: x.dtype for label, x, given in rows if not given}
        free = {label: x.dtype for label, x, given in rows if given}
        if saved is not None:
            self.recorded, self.result = saved
            check_inputs(self.recorded.program, locals_)
            self.outputs = [Leaf(None, None)] * self.result.num_leaves
        else:
            self.recorded = staged_out(
                name,
                [
                    ("torch.func", through(zero.vjp)),
                    ("torch.autograd", through(zero.autograd)),
                    # fused attention has one derivative; written out it has all
                    ("torch.func, attention written out", attention_written_out(through(zero.vjp))),
                ],
                Notes(reads),
                locals_,
                names,
                cfg,
                roles=roles,
                fixed=fixed,
                changed=lambda label: changed_in_place(name, label, donated=label in free),
                donated=free,
                choice=choice,
                budget=budget,
                slack=slack,
                uneven=uneven,
                at_home=at_home,
                last=lambda program: own_outputs(program, donated),
                dynamic=sorted(dynamic),
            )
        self.notes = self.recorded.notes
        made = self.program.dynamic
        if made is not None:  # the spec of a shard has the shape of the whole
            pairs = zip(self.outputs, made.results, strict=True)
            made.open = not any(follows and leaf.spec is not None for leaf, follows in pairs)
        # results may need memory of their own
        if cfg.limit is not None and self.program.peak_bytes() + uneven > cfg.limit:
            raise NothingFits(self.program, cfg.limit, uneven)
        self.choice = Choice.of(self.program)
        self.collectives = signature_of(self.program, mesh, cfg.named_passes)

    @property
    def program(self) -> Program:
        """What it runs."""
        return self.recorded.program

    def hold(self) -> bool:
        """Whether all that was read from outside while recording is as it was."""
        return self.recorded.hold()

    @property
    def is_dynamic(self) -> bool:
        """Whether it may serve leaves of other sizes: see [Note: dynamic dims]."""
        return self.recorded.is_dynamic

    def serves(self, sizes: Mapping[InputDim, int]) -> bool:
        """Whether it takes leaves that have these sizes by (leaf, dim) as well."""
        return self.recorded.serves(sizes)

    def __call__(self, flat: Sequence[Tensor], key: Callable[[], int]) -> PyTree:
        """Run it on arguments of this signature.

        Args:
            flat: their local tensors; what is donated has memory of its own: see `check_donated`.
            key: gives what random numbers are a function of; asked only if there are any.
        """
        found = self.recorded(flat, key)
        assert self.result is not None
        pairs = zip(self.outputs, found, strict=True)
        return self.result.unflatten([leaf.wrapped(x) for leaf, x in pairs])

    def check_donated(self, flat: Sequence[Tensor]) -> None:
        """See that what is written over can be, and is no other argument, nor a part of one.

        Raises:
            ShardError: it is.
        """
        if not self.donated:
            return
        fault = self._apart.fault(flat, self.frame.names.__getitem__, lambda: self.donated)
        if fault is not None:
            raise ShardError(
                f"{fault}, and what is donated is written over with results, while all else is "
                "still read. Give each tree normal memory of its own, outside of "
                "torch.inference_mode() (fzero.tree_map(torch.clone, tree)), or donate none. "
                "Nothing has changed."
            )


def _uneven(leaves: Iterable[Tensor], mesh: Mesh) -> int:
    """How many bytes of DTensors the rank with the largest shards holds more than this one."""
    parts = []
    for x in leaves:
        if isinstance(x, DTensor) and (rows := rows_of(x)) is not None:
            dim, home = rows
            leaf = LeafLayout("", tuple(x.shape), x.dtype, dim, mesh.shard_size, home=home)
            parts.append((leaf, x.dtype.itemsize))
    return uneven_bytes(parts, mesh.shard_rank)


def attention_written_out(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, with attention made of operators that have all derivatives."""

    def run(*args: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return fn(*args)

    return run


def detached(x: Tensor) -> Tensor:
    """A tensor without a graph; itself, where it has none."""
    return x.detach() if x.requires_grad else x


def as_result(x: Tensor) -> Tensor:
    """A result that needs no more communication: sums that DTensor left open are summed."""
    if not isinstance(x, DTensor):
        return x
    if isinstance(closed := settled(x), DTensor) and closed is not x:
        # of a whole result nobody wants the mesh
        whole = all(isinstance(p, Replicate) for p in closed.placements)
        return closed.to_local() if whole else closed
    local = local_tensor(x)
    return x if local.is_contiguous() else from_spec(local.contiguous(), x._spec)


def changed_in_place(
    name: str, label: str, *, donated: bool = False, written: bool = False
) -> FzeroError:
    """What to say of a function that writes to what it was given.

    Args:
        name: of the function.
        label: of the argument.
        donated: whether it may, as long as it takes no derivative and gathers nothing.
        written: whether it has done so, where nothing was staged out.
    """
    if donated:
        return FzeroError(
            f"{name} changes its argument {label} in place, and takes a derivative or gathers: "
            "gathers and what is computed from them are moved, and so would read the other value. "
            "Make the update a function of its own, fzero.jit(update, donate_argnums=...) of what "
            "fzero.value_and_grad returned, or compute a new tensor (fzero.apply_updates)."
        )
    more = written_already(label) if written else ""
    return FzeroError(
        f"{name} changes its argument {label} in place. A staged-out function is pure: compute a "
        "new tensor and return it (fzero.apply_updates(params, updates) instead of add_). To reuse "
        f"the memory of what came in, say fzero.jit(fn, donate_argnums=...).{more}"
    )
