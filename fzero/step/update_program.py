"""The update of a step as a function of shards: gradients in, parameters and state overwritten."""

import contextlib
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any, NoReturn

from torch import Tensor, fx
from torch._ops import OpOverload

from fzero import tree
from fzero.config import Config
from fzero.distributed.dtensor import local_tensor
from fzero.errors import ShardError
from fzero.functional.memory import overlapping
from fzero.numerics.loss_scale import LossScaleState
from fzero.numerics.rng import mix
from fzero.program import Program
from fzero.program.categories import (
    BATCH,
    GRADIENTS,
    MASTERS,
    OPTIMIZER,
    PARAMETERS,
    RESULTS,
    SCALE,
    STATE,
)
from fzero.program.choice import Choice
from fzero.program.codegen import has_written
from fzero.program.graph import (
    Held,
    memory_of,
    output_node,
    placeholders,
    tensors_of,
    written_operands,
)
from fzero.state.follow import Follower
from fzero.state.opt_state import LocalState, in_hand
from fzero.state.plan import Plan
from fzero.step.alike import NotAlike, numbers_of, tell
from fzero.step.update import Updated, update_of
from fzero.transforms.function import jit
from fzero.transforms.parts import on_mesh
from fzero.transforms.randomness import seeded
from fzero.transforms.staging import TracedFunction


class UpdateProgram:
    """The update half of a step: `jit` of `update_of`, to which all it writes into is donated.

    It is staged out ahead of calls, which then hand in flat lists: kinds of arguments do not change
    from step to step, and ranks have agreed.

    Args:
        plan: of the step.
        reduced: whether gradients come summed over the ranks.
        over: whether it may write into gradients.
        at_home: whether parameters will be where the plan has homes for them.
    """

    def __init__(
        self, plan: Plan, *, reduced: bool, over: bool = False, at_home: bool = False
    ) -> None:
        self.plan, self.reduced = plan, reduced
        self.homes = plan.homes if at_home else None
        self._update = update_of(plan, reduced=reduced, over=over)
        given = plan.cfg  # of which this counts: no module runs in an update
        cfg = Config(
            executor="inductor" if given.executor == "inductor" else "traced",
            passes=given.passes,
            bucket_mb=given.bucket_mb,
            prefetch=given.prefetch,
            cuda_graph=given.cuda_graph,
        )
        self.fn = jit(self._update, cfg, donate_argnums=_DONATED)
        self._follow: Follower | None = None
        self._last: TracedFunction | None = None
        self._firsts: weakref.WeakKeyDictionary[TracedFunction, _First]
        self._firsts = weakref.WeakKeyDictionary()

    def in_buckets(
        self,
        size: int,
        *inputs: Any,
    ) -> Updated:
        """An update in buckets of `size` bytes, on which no rank has to agree with others.

        Args:
            size: bytes.
            inputs: as of `__call__`.
        """
        if self._last is None or not self._last.hold():
            self._last = self.staged(*inputs, choice=Choice(size))
        return self(self._last, *inputs)

    def staged(
        self,
        trained: Sequence[Tensor],
        local: LocalState,
        *rest: Any,
        **more: Any,
    ) -> TracedFunction | None:
        """What tensors like these are updated by; None of an optimizer that is not recorded.

        Args:
            trained, local, rest: as `__call__` will get them.
            more: settled buckets, or bytes that may be held in any case: see `Function.staged`.
        """
        if self.plan.opt.foreign:
            return None
        if self.homes is not None:
            trained = self.homes.stand_ins(trained)
            more["at_home"] = self.homes.members
        groups = self._groups(trained, local, *rest)
        known = self._known(groups, local)
        with on_mesh(self.plan.mesh):
            arguments = self._arguments(groups, local)
            return self.fn.staged(*arguments, known=known, **more)

    def __call__(
        self,
        staged: TracedFunction | None,
        trained: Sequence[Tensor],
        local: LocalState,
        grads: list[Tensor],
        loss: Tensor,
        state: Sequence[Tensor],
        sums: Tensor | None = None,
    ) -> Updated:
        """Overwrite `trained` and what `local` has of masters and optimizer state.

        Masters start from what was written into the parameters; see [Note: masters follow].
        """
        if staged is not None:
            _refuse_numbers(local)
        if local.masters:
            parts = self.plan.parts(trained)
            self._follow = self._follow or Follower(local.masters, parts)
            self._follow(local.masters, parts)
        groups = self._groups(trained, local, grads, loss, state, sums)
        found = None
        flat = list(chain.from_iterable(groups))
        written = sum(map(len, groups[:3]))  # parameters, masters, optimizer state
        first = self._first_written(staged, written)
        before = first.version(flat)

        def untouched(error: BaseException) -> bool:
            if isinstance(error, NotAlike):
                return True
            if staged is not None and self._is_told:
                wrote = has_written(error, staged.recorded.program)
                if wrote is not None:
                    return not wrote
            return first.tells and before is not None and first.version(flat) == before

        with contextlib.suppress(NotAlike), in_hand(local, untouched):
            if staged is None:  # whole leaves, of which all ranks draw the same
                with seeded(mix(self.plan.cfg.seed, int(local.step), _UPDATE), trained):
                    found = self._update(*self._arguments(groups, local))
            else:
                del groups
                grads.clear()
                # the same on all ranks: the noise is that of whole leaves
                found = staged(flat, lambda: mix(self.plan.cfg.seed, int(local.step), _UPDATE))
        if found is None:
            self._tell(local, sums, updated=False)
        differs = found["differs"]
        if differs is not None and differs.device.type == "cpu" and differs:
            self._tell(local, sums, updated=True)
        first.tells = staged is None or first.version(flat) != before
        if (scale := found.pop("loss_scale")) is not None:
            scale = LossScaleState(*scale)
        return Updated(**found, loss_scale=scale)

    @property
    def _is_told(self) -> bool:
        """Whether what writes over inputs is a line of a Program's own: no kernels of others, and
        no graph of a device."""
        return self.plan.cfg.executor != "inductor" and not self.plan.cfg.cuda_graph

    def _first_written(self, staged: TracedFunction | None, written: int) -> "_First":
        if staged is None:  # operator by operator, by `optim.inplace`
            return _First(range(written), tells=True)
        if not self._is_told:  # they write without a word to torch
            return _First((), tells=False)
        found = self._firsts.get(staged)
        if found is None:
            found = self._firsts[staged] = _first_written(staged.recorded.program)
        return found

    def _tell(self, local: LocalState, sums: Tensor | None, *, updated: bool) -> NoReturn:
        """Which number differs between ranks; state in which an update ended, or did not begin."""
        plan, scaling = self.plan, self.plan.cfg.scaling
        scale = local.scale[0] if scaling is not None and scaling.external else None
        inner = tree.unflatten(local.inner_spec, local.inner)
        numbers = numbers_of(plan, inner, scale, local.step, sums)
        tell(numbers, plan.mesh, plan.cfg.timeout, updated=updated)

    def _groups(
        self,
        trained: Sequence[Tensor],
        local: LocalState,
        grads: Sequence[Tensor],
        loss: Tensor,
        state: Sequence[Tensor],
        sums: Tensor | None = None,
    ) -> list[Sequence[Tensor]]:
        """The tensors of each argument of an update."""
        cfg = self.plan.cfg
        before = local.state if cfg.nonfinite_policy == "skip" else []
        step = []
        if cfg.dtypes.stochastic_rounding or self.plan.axes.world > 1:
            # here, as a graph of a device has nothing of the host's; and the host waits for none
            step = [local.step.to(loss.device, non_blocking=True)]
        compared = [] if sums is None else [sums.to(loss.device, non_blocking=True)]
        own = [trained, local.masters, local.inner]
        return [*own, grads, [loss], state, local.scale, before, step, compared]

    def _arguments(self, groups: Sequence[Sequence[Any]], local: LocalState) -> tuple[Any, ...]:
        """As `update_of` takes them."""
        (*own, state, scale, before, step, sums) = map(list, groups)
        trained, masters, inner, grads, (loss,) = own
        own = (trained, masters, tree.unflatten(local.inner_spec, inner), grads)
        scaling = LossScaleState(*scale) if scale else None
        rest = (step[0] if step else None, sums[0] if sums else None)
        return (*own, loss, state, scaling, before, *rest)

    def _known(self, groups: Sequence[Sequence[Any]], local: LocalState) -> dict[str, Any]:
        """Names and categories of what it reads, and over which ranks it sums gradients."""
        trained = [leaf.name for leaf in self.plan.trained]
        numbers = [[*map(str, range(len(group)))] for group in groups]
        rows = (
            ("", trained, PARAMETERS),
            ("master.", trained[: len(local.masters)], MASTERS),
            ("inner.", names_of_state(local), OPTIMIZER),
            ("grad.", trained, GRADIENTS),
            ("loss", [""], RESULTS),
            ("model_state.", numbers[5], STATE),
            ("loss_scale.", numbers[6], SCALE),
            ("model_state_before.", numbers[7], STATE),
            ("step", [""] * len(groups[8]), OPTIMIZER),
            ("sums", [""] * len(groups[9]), OPTIMIZER),
        )
        return {
            "inputs": tuple(f"{prefix}{name}" for prefix, names, _ in rows for name in names),
            "input_categories": tuple(kind for _, names, kind in rows for _ in names),
            "reduced_over": () if self.reduced else self.plan.axes.groups,
        }


# parameters, masters, optimizer state, gradients; model state and loss scale go on as they came
_DONATED = (0, 1, 2, 3, 5, 6)


def _refuse_numbers(local: LocalState) -> None:
    """A number in the place of a tensor: an update overwrites its state."""
    if {*map(type, local.inner)} <= {Tensor} or all(map(_is_tensor, local.inner)):
        return
    for x, name in zip(local.inner, names_of_state(local), strict=True):
        if not _is_tensor(x):
            raise ShardError(
                f"opt_state.inner, {name}: it is {x!r}, and a step's state holds tensors. Write "
                "into the tensor that was there, such as hyperparams['lr'].fill_(x)."
            )


def shared_outputs(program: Program, count: int) -> list[int]:
    """Which of the gradients, the first `count` outputs, others see when they are written over.

    Those on the memory of an input, of a gradient before them or of any other output; and those
    that overlap themselves.
    """
    inputs = {key for node in placeholders(program.graph) for key in memory_of(node)}
    outputs: list[fx.Node] = list(output_node(program.graph).args[0])  # pyright: ignore
    values = [x for node in outputs for x in tensors_of(node)]
    pairs = overlapping(values, [i < count for i in range(len(values))])
    shared = {j if j < count else i for i, j in pairs}
    for i, (node, x) in enumerate(zip(outputs[:count], values, strict=False)):
        if not x.is_contiguous() or not inputs.isdisjoint(memory_of(node)):
            shared.add(i)
    return sorted(shared)


def outputs_on(program: Program, count: int) -> list[int]:
    """The outputs behind the `count` gradients that are on the memory of a parameter or the batch.

    An update writes over the first, and a loader that fills one buffer again over the second: aux
    and model state must stay what they were in the forward pass.
    """
    nodes = placeholders(program.graph)
    theirs = zip(nodes, program.input_categories, strict=False)  # a key of random numbers is last
    lent = [node for node, category in theirs if category in (PARAMETERS, BATCH)]
    inputs = {key for node in lent for key in memory_of(node)}
    outputs: Any = output_node(program.graph).args[0]
    on = [not inputs.isdisjoint(memory_of(n)) for n in outputs]
    return [index for index, shared in enumerate(on) if shared and index >= count]


def held_rows(plan: Plan, local: LocalState) -> list[Held]:
    """What `local.nbytes()` counts, row by row."""
    masters = zip(local.masters, plan.names[0], strict=False)
    inner = zip(local.inner, names_of_state(local), strict=True)
    rows = [(x, MASTERS, name) for x, name in masters] + [(x, OPTIMIZER, n) for x, n in inner]
    return [Held(local_tensor(x).nbytes, kind, name) for x, kind, name in rows if _is_tensor(x)]


class _First:
    """What an update writes first, of what lives on.

    Args:
        indices: of the inputs, among which it is; none: nobody can tell.
        tells: whether their versions change with it. Where a kernel may write without a word that
            is known once a whole update was seen to change them.
    """

    def __init__(self, indices: Sequence[int], *, tells: bool) -> None:
        self.indices, self.tells = indices, tells

    def version(self, flat: Sequence[Any]) -> int | None:
        """A sum that each write in place changes; None: of tensors that count none."""
        inputs = (flat[i] for i in self.indices)
        tensors = [local_tensor(x) for x in inputs if _is_tensor(x)]
        if any(x.is_inference() for x in tensors):
            return None
        return sum(x._version for x in tensors)


def _first_written(program: Program) -> _First:
    """What the Program writes first, of parameters, masters and optimizer state."""
    nodes = zip(placeholders(program.graph), program.input_categories, strict=False)
    given = {
        memory: i
        for i, (node, category) in enumerate(nodes)
        if category in (PARAMETERS, MASTERS, OPTIMIZER)
        for memory in memory_of(node)
    }
    for node in program.graph.nodes:
        for at in (at for x in written_operands(node) for at in memory_of(x)):
            if at in given:
                return _First([given[at]], tells=_is_counted(node))
    return _First((), tells=False)


def _is_counted(node: fx.Node) -> bool:
    """Whether what a node writes changes versions: not so optimizers' fused kernels."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    return not target._schema.name.startswith("aten::_fused")


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def names_of_state(local: LocalState) -> list[str]:
    return tree.names(tree.unflatten(local.inner_spec, local.inner))


_UPDATE = 0x0DD  # tells the update's numbers from those of micro-batch and rank
