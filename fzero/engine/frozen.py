"""What is trained just now: the parameters that require a gradient, of those that could be.

[Note: frozen between steps] An engine has room for all that required a gradient when it was made:
masters and the optimizer's state. Which of it a step trains is read off `requires_grad` in forward:
a leaf that requires none travels in no bucket, has no gradient and no update, and its state stays.
While a step has gradients already, or a forward whose backward may come, the set only grows: what
has brought one is updated, as by torch.optim, whatever is set before `step()`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.distributed.agree import agree
from fzero.distributed.mesh import is_simulated
from fzero.distributed.stations import FREEZE_ALIKE, TRAINED
from fzero.errors import FzeroError
from fzero.layout import LeafLayout
from fzero.optim.counts import own_counts
from fzero.optim.whole import whole_leaves
from fzero.state.opt_state import LocalState, OptState
from fzero.state.plan import Plan
from fzero.step.update_program import UpdateProgram
from fzero.tree import PyTree


class Wishes:
    """What the module's parameters say of themselves.

    Args:
        params: of the module, by index.
        leaves: of all parameters, as the engine was made.

    Attributes:
        asked: for each of those that can be trained, whether it is.
    """

    def __init__(self, params: Mapping[int, Tensor], leaves: Sequence[LeafLayout]) -> None:
        self.leaves = tuple(leaves)
        self.indices = [index for index, leaf in enumerate(leaves) if leaf.trainable]
        self._params = [params[index] for index in self.indices]
        self.asked = [True] * len(self.indices)

    def changed(self, *, grows: bool) -> bool:
        """Whether other parameters require a gradient than did; they are asked from now on.

        Args:
            grows: whether those that did are to go on.
        """
        # a list of flags and one comparison: this runs in every forward
        now = [param.requires_grad for param in self._params]
        if now == self.asked:
            return False
        if grows:
            now = [old or new for old, new in zip(self.asked, now, strict=True)]
        # with nothing to train this is another's forward: a GAN's critic, judging
        if now == self.asked or not any(now):
            return False
        self.asked = now
        return True

    def any(self) -> bool:
        """Whether something is trained; if not, a forward is another's, as a GAN's critic's."""
        return any(param.requires_grad for param in self._params)

    def now(self) -> tuple[LeafLayout, ...]:
        """The leaves, trainable as they are now."""
        off = {i for i, asked in zip(self.indices, self.asked, strict=True) if not asked}
        pairs = enumerate(self.leaves)
        return tuple(replace(leaf, trainable=False) if i in off else leaf for i, leaf in pairs)

    def agree(self, plan: Plan) -> None:
        """Return if all ranks train the same; all of them must come.

        Raises:
            RankMismatchError: names the first parameter that only some train.
        """
        if plan.mesh.world_size == 1 or is_simulated(plan.mesh):
            return
        flags = zip(self.indices, self.asked, strict=True)
        items = [(self.leaves[i].name, f"requires_grad={asked}") for i, asked in flags]
        agree(TRAINED, items, plan.mesh, plan.cfg.timeout, FREEZE_ALIKE)


@dataclass
class Subset:
    """The update of some of the trained leaves.

    Args:
        plan: with the others frozen.
        masters: which of the masters are theirs.
        inner: which leaves of the optimizer's state are; None: all.
        inner_spec: structure of the optimizer's state of these alone.
        half: their update, once there was one.
    """

    plan: Plan
    masters: list[int]
    inner: list[int] | None = None
    inner_spec: tree.Spec | None = None
    half: UpdateProgram | None = None

    def local(self, state: LocalState) -> LocalState:
        """What of the local state is theirs."""
        if self.inner is None:
            return state
        assert self.inner_spec is not None
        masters = [state.masters[i] for i in self.masters] if state.masters else []
        inner = [state.inner[i] for i in self.inner]
        return state._replace(masters=masters, inner=inner, inner_spec=self.inner_spec)

    def put(self, inner: PyTree, new: Sequence[Any]) -> PyTree:
        """The whole optimizer's state with theirs replaced."""
        leaves, spec = tree.flatten(inner)
        for i, x in zip(range(len(leaves)) if self.inner is None else self.inner, new, strict=True):
            leaves[i] = x
        return tree.unflatten(spec, leaves)


def subset(
    plan: Plan, leaves: tuple[LeafLayout, ...], opt_state: OptState, locals_: Sequence[Tensor]
) -> Subset:
    """The update of the leaves that are trainable.

    Args:
        plan: of all that can be trained.
        leaves: of all parameters.
        opt_state: of the engine.
        locals_: this rank's tensors of the parameters.

    Raises:
        FzeroError: the optimizer keeps its state otherwise than parameter by parameter.
    """
    able = [index for index, leaf in enumerate(plan.sharding.layout) if leaf.trainable]
    chosen = [i for i, index in enumerate(able) if leaves[index].trainable]
    if len(chosen) == len(able):
        return Subset(plan, chosen)
    layout = replace(plan.sharding.layout, leaves=leaves)
    smaller = replace(plan, sharding=replace(plan.sharding, layout=layout))
    spec = smaller.inner_spec
    if spec is None:  # of an optimizer that knows nothing of shards, and wants tensors with values
        targets = smaller.targets(layout.divide(locals_)[0])
        with torch.no_grad(), whole_leaves(smaller.whole):
            spec = tree.flatten(plan.opt.init(smaller.foreign_tree(targets)))[1]
    # with counts, as the state has them by now: see [Note: counts of leaves]
    spec = tree.flatten(own_counts(tree.unflatten(spec, range(spec.num_leaves))))[1]
    # a frozen leaf is None in a tree of parameters, and so in each such tree of the state
    paths = tree.paths(tree.unflatten(spec, range(spec.num_leaves)))
    there = {path: i for i, path in enumerate(tree.paths(opt_state.inner))}
    if unknown := [path for path in paths if path not in there]:
        raise FzeroError(
            f"parameters were frozen, and the optimizer's state of the others has {unknown[0]!r}, "
            "which its state of all has not: it is not kept parameter by parameter. Freeze before "
            "the engine is made, or unfreeze them again."
        )
    return Subset(smaller, chosen, [there[path] for path in paths], spec)
