"""The eager executor: the same step for model functions that can't be staged out.

Forward and backward run as plain PyTorch; collectives travel in buckets, outside of autograd.

    stages 0-2   the model function gets full leaves, and gradients are reduced bucket by bucket in
                 a fixed order while backward goes on: ranks may use different leaves
    stage 3      it gets lazy leaves (see `fzero.eager.lazy`); `fzero.stage` frees them after use

Differentiated is with `torch.autograd.grad`, as `loss.backward()` does: whatever trains in PyTorch
trains here, and user code runs once. The results have no derivative; that is the traced executor's.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fzero.distributed.collectives import dense
from fzero.distributed.journal import EAGER, Journal
from fzero.distributed.transport import Transport
from fzero.eager.arrivals import Arrivals
from fzero.eager.gathered import Gathered
from fzero.eager.lazy import GivenLeaf, changed_in_place
from fzero.errors import FzeroError, users_line
from fzero.functional.differentiate import accumulated, added, differentiated, differentiating
from fzero.functional.draws import Watch
from fzero.functional.functionalize import calls_noted
from fzero.functional.leftovers import Leftover, leftovers
from fzero.functional.tasks import check_tasks
from fzero.functional.torch_checkpoint import check_checkpoints, recomputing
from fzero.inference import outside_inference, with_versions
from fzero.layout import LeafLayout
from fzero.numerics.casts import widened
from fzero.numerics.rng import mix
from fzero.program.choice import Choice
from fzero.state.opt_state import LocalState
from fzero.state.plan import Plan
from fzero.step.gradients import ModelFn, Signature, batch_changed, reduces_once, share_of
from fzero.step.update import Updated
from fzero.step.update_program import UpdateProgram
from fzero.transforms.derivatives import loss_of
from fzero.transforms.frames import stacked, take_apart
from fzero.transforms.function import no_program
from fzero.transforms.loss import summable, with_room
from fzero.transforms.randomness import seeded
from fzero.tree import PyTree


class Eager:
    """The halves of a step, as `Traced` has them, the gradients' run eagerly.

    Random numbers are a function of seed, step, micro-batch and rank. Unlike in a Program, where
    every operator is seeded by its index, they come from one stream per micro-batch: the masks are
    others than the traced executor's.
    """

    collectives = "those of the eager executor"

    def __init__(self, model_fn: ModelFn, plan: Plan) -> None:
        check_checkpoints("eager")
        check_tasks()
        self.model_fn = model_fn
        self.plan = plan
        self.limit = int(plan.cfg.bucket_mb * 2**20)
        self.choice = Choice(self.limit, update=self.limit)
        # autograd may hand out memory that others see, of what no rank has summed
        over = plan.axes.world > 1 and plan.cfg.stage < 3
        self.update_program = UpdateProgram(plan, reduced=True, over=over, at_home=True)
        # below stage 3 leaves are reduced in a fixed order, whatever the model function does
        self.journal = Journal(plan.mesh, EAGER, active=plan.cfg.stage == 3, limit=plan.cfg.timeout)
        self.transport = Transport(plan.mesh, plan.axes, self.journal, limit=self.limit)
        self.order: list[int] = []  # in which leaves were used last time
        self._looked = False

    @contextlib.contextmanager
    def _looking(self) -> Iterator[Mapping[Any, Leftover]]:
        """A micro-batch runs inside: as ever with a graph, the first one under the looks that a
        recording has, too. Filled with what it leaves that is told of.
        """
        with outside_inference(), contextlib.ExitStack() as looks:
            left: Mapping[Any, Leftover] = {}
            if not self._looked:
                looks.enter_context(calls_noted())
                left = looks.enter_context(leftovers())
            yield left
        self._looked = True

    @property
    def program(self) -> NoReturn:
        """There is none.

        Raises:
            TraceError: always.
        """
        raise no_program()

    def gradients(
        self,
        trained: Sequence[Tensor],
        frozen: Sequence[Tensor],
        local: LocalState,
        micro: Sequence[PyTree],
        step: Tensor,
    ) -> tuple[list[Tensor], Tensor, list[Tensor], PyTree]:
        """Gradients and loss summed over the micro-batches, the last model state, all aux.

        Raises:
            FzeroError: the model function changed a parameter or the batch in place.
            RankMismatchError: at stage 3, this rank gathers other leaves than the others.
        """
        plan, state = self.plan, local.state
        leaves = plan.sharding.layout.merge(trained, frozen)
        total: list[Tensor] = []
        losses, auxes = [], []
        for i, batch in enumerate(micro):
            key = mix(plan.cfg.seed, int(step), i, plan.mesh.rank)
            with seeded(key, leaves), _unchanged(leaves, batch, plan), self._looking() as left:
                grads, loss, state, aux = self._one(leaves, state, batch, local)
            if left:
                _warn_of_counters([*left.values()])
            if total:
                torch._foreach_add_(total, grads)
            else:
                total = grads
                for j in range(len(grads) if len(micro) > 1 else 0):
                    total[j] = grads[j].clone()  # autograd may hand out memory that others see
            del grads
            losses.append(loss)
            auxes.append(aux)
        if reduces_once(plan.cfg):
            total = self._reduce(total, plan.trained)
        loss = torch.stack(losses).sum() / (plan.axes.world * len(micro))
        aux = stacked(auxes)
        return total, loss, state, aux

    def update(
        self,
        trained: Sequence[Tensor],
        local: LocalState,
        grads: list[Tensor],
        loss: Tensor,
        state: Sequence[Tensor],
    ) -> Updated:
        """Overwrite `trained` and what `local` has of masters and optimizer state."""
        self.journal.leave("update after micro-batch")
        return self.update_program.in_buckets(self.limit, trained, local, grads, loss, state)

    def _one(
        self, leaves: Sequence[Tensor], state: Sequence[Tensor], batch: PyTree, local: LocalState
    ) -> tuple[list[Tensor], Tensor, list[Tensor], PyTree]:
        """One micro-batch, from the leaves as they live between steps."""
        plan, cfg = self.plan, self.plan.cfg
        inputs, spec = take_apart(batch)
        inputs = [with_versions(x) for x in inputs]
        leaves = [with_versions(x) for x in leaves]
        signature = Signature(plan, local.state_spec, spec, bool(local.scale))
        # copies of the state: the model function may write into it, as BatchNorm does
        copies = tuple(x.clone() for x in state)
        call = signature.call(self.model_fn, tuple(leaves), copies, tuple(inputs))
        loss_fn = loss_of(call, share_of(cfg, plan.axes, local.scale), [])

        def run(given: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, tuple[Tensor, ...]]]:
            # who checkpoints a closure must get its gradient: the re-entrant form gives it to the
            # arguments only, unless `.backward()` runs it
            with torch.enable_grad(), Watch(), recomputing(lambda function: function):
                return loss_fn(tuple(given))

        differentiate = self._sharded if cfg.stage == 3 else self._whole
        # a caller's no_grad is not to reach it, nor does it a recording
        with torch.enable_grad(), differentiating(), _compiled_takes_leaves():
            grads, loss, aux = differentiate(leaves, run)
        # aux may be a parameter, whose memory the update writes over, or of the batch, whose memory
        # is the caller's to fill again
        held = {x.untyped_storage()._cdata for x in (*leaves, *inputs)}
        own = [x.clone() if x.untyped_storage()._cdata in held else x for x in aux]
        grads = [g.contiguous() for g in grads]
        grads = summable(grads) if cfg.accum_steps > 1 else grads
        return signature.results((*grads, widened(loss.detach()), *own))

    def _whole(
        self, leaves: Sequence[Tensor], run: Callable[..., Any]
    ) -> tuple[list[Tensor], Tensor, tuple[Tensor, ...]]:
        """Stages 0 to 2."""
        layout = self.plan.sharding.layout
        given = [
            x.detach().requires_grad_(leaf.trainable)
            for x, leaf in zip(leaves, layout, strict=True)
        ]
        low = [
            GivenLeaf.of(x.to(leaf.compute or x.dtype), leaf.name)
            for x, leaf in zip(given, layout, strict=True)
        ]
        versions = [_version(x) for x in low]
        scaled_loss, (loss, aux) = run(low)
        for x, version, leaf in zip(low, versions, layout, strict=True):
            if _version(x) != version:  # a cast copy, or the parameter itself
                raise changed_in_place(leaf.name, written=leaf.compute in (None, leaf.dtype))
        inputs = [x for x in given if x.requires_grad]
        if reduces_once(self.plan.cfg):
            grads = differentiated(scaled_loss, inputs)
            pairs = zip(grads, inputs, strict=True)
            return [torch.zeros_like(x) if g is None else dense(g) for g, x in pairs], loss, aux
        arrivals = Arrivals(inputs, self.plan.trained, self._reduce, self.limit)
        arrivals.differentiate(scaled_loss)
        return arrivals.finish(), loss, aux

    def _sharded(
        self, leaves: Sequence[Tensor], run: Callable[..., Any]
    ) -> tuple[list[Tensor], Tensor, tuple[Tensor, ...]]:
        """Stage 3."""
        plan = self.plan
        self.journal.begin("micro-batch")
        layout = plan.sharding.layout
        trained_shards, frozen = layout.divide(leaves)
        trained_shards, layout = with_room(trained_shards, layout)
        source = Gathered(layout.merge(trained_shards, frozen), layout, self.transport, self.order)
        with _compiled_named():
            scaled_loss, (loss, aux) = run(source.leaves)
        self.order = list(source.used)
        if plan.cfg.reshard_after_forward:
            source.reshard()
        trained = [x for x in source.leaves if x.requires_grad]
        # what was gathered is the same on every rank, what was used may not be
        used = [x for x in trained if x.leaf_index in source.used]
        arrivals = Arrivals(
            used,
            [x.leaf for x in used],
            self._reduce,
            self.limit,
            done=lambda i: source.drop(used[i].leaf_index),
        )
        shards = [x.shard for x in trained]
        found = arrivals.differentiate(scaled_loss, shards)
        found = [added(g, accumulated(x)) for g, x in zip(found, shards, strict=True)]
        arrived = dict(zip((x.leaf_index for x in used), arrivals.finish(), strict=True))
        source.close()
        grads: list[Tensor] = []
        for x, returned in zip(trained, found, strict=True):
            parts = [arrived.get(x.leaf_index), returned]
            there = [part.to(x.leaf.dtype) for part in parts if part is not None]
            grads.append(sum(there[1:], there[0]) if there else torch.zeros_like(x.shard))
        return grads, loss, aux

    def _reduce(self, grads: list[Tensor], leaves: Sequence[LeafLayout]) -> list[Tensor]:
        # not written over: autograd may hand out memory that others see
        scatter = self.plan.cfg.stage > 0
        return self.transport.reduce(grads, leaves, scatter=scatter, over=False).wait()


def _compiled_takes_leaves() -> Any:
    """What torch.compile has made looks, at its first call, whether custom operators alias their
    arguments, and can't with tensors of classes that it does not know.

    Private in torch; there is no other way to tell it not to look.
    """
    return torch._functorch.config.patch(  # pyright: ignore[reportAttributeAccessIssue]
        check_custom_op_aliasing=False
    )


@contextlib.contextmanager
def _compiled_named() -> Iterator[None]:
    """Say what to do where torch.compile meets a leaf that is gathered on use."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("torch._dynamo"):
            raise
        raise FzeroError(
            "a part of the model that torch.compile has compiled reads a sharded parameter, and "
            f"torch.compile can't follow its gather ({type(error).__name__}). At stage 3 leave it "
            "uncompiled under executor='eager', or use Config(executor='inductor'), which compiles "
            "the whole step, fzero.Engine, which gathers around compiled blocks, or stage 2."
        ) from error


@contextlib.contextmanager
def _unchanged(leaves: Sequence[Tensor], batch: PyTree, plan: Plan) -> Iterator[None]:
    """Raise if a parameter or the batch was written to."""
    names = [leaf.name for leaf in plan.sharding.layout]
    inputs, frame = take_apart(batch)
    versions = [_version(x) for x in (*leaves, *inputs)]
    yield
    for name, x, version in zip(names, leaves, versions, strict=False):
        if _version(x) != version:
            raise changed_in_place(name, written=True)
    for path, x, version in zip(frame.paths, inputs, versions[len(leaves) :], strict=True):
        if _version(x) != version:
            raise batch_changed(f"batch{path}", written=True)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # inference tensors count no changes


def _warn_of_counters(left: Sequence[Leftover]) -> None:
    said = ", ".join(f"{x.place} from {x.before} to {x.after}" for x in left[:3])
    warnings.warn(
        f"forward changes {said}, which `apply` puts back: under Config(executor='eager') each "
        "call begins with the same number. If forward computes with it, make it a buffer "
        "(register_buffer, functionalize(module, buffers=True)), change it between calls, or use "
        "fzero.Engine, where a module keeps what it writes.",
        stacklevel=users_line(),
    )
