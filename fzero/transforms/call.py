"""One call of a user's function on trees of shards, as a function of local tensors."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fzero import tree
from fzero.config import Config
from fzero.distributed.collectives import all_reduce
from fzero.distributed.dtensor import local_tensor
from fzero.distributed.mesh import Axes
from fzero.errors import ShardError
from fzero.functional.differentiate import is_differentiated
from fzero.functional.draws import users_line
from fzero.functional.functionalize import refuse_past
from fzero.functional.held import held_over
from fzero.functional.underived import Derived
from fzero.layout import Layout
from fzero.numerics.casts import cast, in_force
from fzero.state.sharding import refuse_complex
from fzero.transforms.function import Function
from fzero.transforms.loss import with_room
from fzero.transforms.parts import Opened, Part, from_part, has_parts, joined, opened
from fzero.tree import PyTree
from fzero.zero import gathered


class Call:
    """A function and what it was called with.

    Args:
        fn: the user's, on full leaves; or a transform of the library, on shards.
        cfg: says how leaves travel.
        argnums: which arguments are trees that the caller works on.
        args, kwargs: as they came.
        room: whether values are to be in dtypes that hold their gradients as these are reduced.
        differentiated: whether a derivative is taken, which trained leaves must be real for.
        finish: what is made of the function's result; None: the config's output dtype counts.
        watched: whether something around the call looks at what has no derivative.

    Raises:
        ShardError: an argument is missing or is no tree of shards, or a trained leaf is complex.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        cfg: Config,
        argnums: Sequence[int],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        room: bool = False,
        differentiated: bool = True,
        finish: Callable[[Any], PyTree] | None = None,
        watched: bool = False,
    ) -> None:
        self.fn, self.cfg, self.argnums = fn, cfg, tuple(argnums)
        self.finish = finish or (lambda result: cast(result, cfg.dtypes.output))
        self.watched = watched
        self.takes_shards = isinstance(fn, Function) and fn.takes_parts
        self.args, self.kwargs = tuple(args), dict(kwargs)
        for i in self.argnums:
            if not -len(args) <= i < len(args):
                raise ShardError(
                    f"argument {i} is a tree of shards, and the function was called with "
                    f"{len(args)} positional arguments. Pass it by position."
                )
        self.trees = [opened(args[i], cfg, f"argument {i}") for i in self.argnums]
        for i, found in zip(self.argnums, self.trees, strict=True):
            if differentiated:
                refuse_complex(found.layout, found.paths, f"argument {i}")
        if room:
            self.trees = [_roomy(found) for found in self.trees]
        self.layout: Layout = joined([found.layout for found in self.trees])
        self.values = tuple(x for found in self.trees for x in found.values)
        # whether an outer function differentiates this call; asked before this one's transforms
        self.inside = is_differentiated() or any(x.requires_grad for x in self.values)

    @property
    def axes(self) -> Axes:
        """The mesh."""
        return self.trees[0].mesh.axes

    def run(self, values: Sequence[Tensor]) -> PyTree:
        """What the function returns for these local tensors in place of its trees' own."""
        return self.run_on(
            values if self.takes_shards else gathered(values, self.layout, self.axes)
        )

    def run_on(self, leaves: Sequence[Any]) -> PyTree:
        """What the function returns for these leaves: full ones, or shards if it takes those."""
        columns = self.columns(leaves)
        if self.takes_shards:
            args = [_as_parts(x, self.cfg) for x in self.args]
            for i, found, column in zip(self.argnums, self.trees, columns, strict=True):
                args[i] = found.parts(column)
            kwargs = {k: _as_parts(x, self.cfg) for k, x in self.kwargs.items()}
            return self.fn.body(*args, **kwargs)  # pyright: ignore[reportFunctionMemberAccess]
        # one by one: who reads another tree of shards has it gathered where it is read
        args = [x if i in self.argnums else _full(x, self.cfg) for i, x in enumerate(self.args)]
        for i, found, column in zip(self.argnums, self.trees, columns, strict=True):
            args[i] = tree.unflatten(found.spec, column)
        kwargs = {k: _full(x, self.cfg) for k, x in self.kwargs.items()}
        dtypes = in_force(self.cfg.dtypes, self.trees[0].mesh.device_type)
        derived = nullcontext() if self.watched else Derived(users_line)
        with dtypes, held_over(), derived:
            return self.finish(self.fn(*args, **kwargs))

    def outward(self, result: PyTree) -> PyTree:
        """A result as the caller gets it: outside of all transforms shards are DTensors."""
        if self.trees[0].as_parts or not has_parts(result):
            return result
        return tree.map(from_part, result)

    def columns(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """The joined leaves, tree by tree."""
        found, start = [], 0
        for one in self.trees:
            stop = start + len(one.layout)
            found.append(tuple(values[start:stop]))
            start = stop
        return found

    def closed(self, values: Sequence[Tensor | None]) -> list[PyTree]:
        """Joined leaves as trees that live as the arguments do."""
        pairs = zip(self.trees, self.columns(values), strict=True)
        return [one.closed(column) for one, column in pairs]


def like(values: PyTree, params: Opened, cfg: Config, what: str) -> tuple[Tensor, ...]:
    """The local tensors of a tree that has to live as `params` does: tangents, vectors.

    A frozen leaf for which it has None, as gradients have, does not move.

    Raises:
        ShardError: it has another structure, or a leaf another shape, dtype or placement.
    """
    found = opened(_with_still_leaves(values, params), cfg, what)
    if found.spec != params.spec:
        raise ShardError(
            f"{what} has the leaves {list(found.paths)[:5]} and the parameters "
            f"{list(params.paths)[:5]}; it must have their structure."
        )
    rows = zip(found.values, params.values, found.layout, params.layout, params.paths, strict=True)
    for x, p, leaf, like, path in rows:
        places = [(one.dim, one.home and one.home[1:]) for one in (leaf, like)]
        if leaf.shape != like.shape or places[0] != places[1] or x.dtype != p.dtype:
            raise ShardError(
                f"{what}{path} is {x.dtype} {leaf.shape} split along dim {leaf.dim}, and the "
                f"parameter is {p.dtype} {like.shape} split along dim {like.dim}; it must live as "
                "that does. fzero.shard(tree, cfg) puts a full tree there, and "
                "fzero.tree_random_like makes one."
            )
    return found.values


def _with_still_leaves(values: PyTree, params: Opened) -> PyTree:
    """A tree with zeros where it has None and the parameter is frozen."""
    if all(leaf.trainable for leaf in params.layout):
        return values
    pairs = zip(params.values, params.layout, strict=True)
    still = params.closed([None if leaf.trainable else torch.zeros_like(x) for x, leaf in pairs])
    try:
        return tree.either(values, still)
    except ValueError:  # of another structure, which is told by its leaves
        return values


class Results(NamedTuple):
    """What a function returned: its floating tensors, which have derivatives, and the rest.

    Args:
        spec: the structure.
        leaves: as they came; floating ones are replaced.
        floating: their indices.
    """

    spec: tree.Spec
    leaves: list[Any]
    floating: list[int]

    @classmethod
    def of(cls, result: PyTree) -> "Results":
        """Of a tree of tensors.

        Raises:
            ShardError: a leaf is something else, or complex.
        """
        leaves, spec = tree.flatten(result)
        for x, path in zip(leaves, tree.paths(result), strict=True):
            if not isinstance(x, (Tensor, Part)):
                raise ShardError(
                    f"the function returned{path} a {type(x).__name__}; what is differentiated "
                    "returns tensors in dicts, lists and tuples."
                )
        values = [_value(x) for x in leaves]
        for x, path in zip(values, tree.paths(result), strict=True):
            refuse_past(x)
            if x.is_complex():
                raise ShardError(
                    f"the function returned{path} {x.dtype}, and what is differentiated must be "
                    "real. Return torch.view_as_real of it."
                )
        return cls(spec, leaves, [i for i, x in enumerate(values) if x.is_floating_point()])

    @property
    def values(self) -> tuple[Tensor, ...]:
        """The floating tensors."""
        return tuple(_value(self.leaves[i]) for i in self.floating)

    def with_values(self, values: Sequence[Tensor], axes: Axes, fill: Any = None) -> PyTree:
        """The tree with other floating tensors; 0-d ones that are a rank's own become means.

        Args:
            values: one per floating leaf.
            axes: the mesh.
            fill: what stands for the others; None: themselves.
        """
        leaves: list[Any] = [x if fill is None else fill(_value(x)) for x in self.leaves]
        for i, x in zip(self.floating, values, strict=True):
            old = self.leaves[i]
            if isinstance(old, Part):
                leaves[i] = Part(x, old.leaf, old.spec, old.mesh)
            else:
                leaves[i] = mean(x, axes) if x.dim() == 0 else x
        return tree.unflatten(self.spec, leaves)

    def cotangents(self, given: PyTree, axes: Axes) -> tuple[Tensor, ...]:
        """What the floating tensors are pulled back from: local tensors, from a tree of them.

        Raises:
            ShardError: `given` is no tree like the results.
        """
        leaves, spec = tree.flatten(given)
        if spec != self.spec:
            raise ShardError(
                f"the cotangent has the structure {spec}, and the value has {self.spec}; they must "
                "have the same."
            )
        found = []
        for i in self.floating:
            old, new = self.leaves[i], leaves[i]
            value = _value(old)
            x = local_tensor(new) if isinstance(new, DTensor) else _value(new)
            x = torch.as_tensor(x, dtype=value.dtype, device=value.device)
            if x.shape != value.shape:
                raise ShardError(
                    f"a cotangent has shape {tuple(x.shape)} on this rank, and its value "
                    f"{tuple(value.shape)}; they must have the same."
                )
            # a mean over the ranks: each has its share
            own = not isinstance(old, Part) and value.dim() == 0
            found.append(x / axes.world if own else x)
        return tuple(found)


def mean(x: Tensor, axes: Axes) -> Tensor:
    """The mean over the ranks of each rank's own value."""
    if axes.world == 1:
        return x
    return all_reduce(all_reduce(x, axes.shard, "loss"), axes.replicate, "loss") / axes.world


def _roomy(found: Opened) -> Opened:
    trained, frozen = found.layout.divide(found.values)
    trained, layout = with_room(trained, found.layout)
    return replace(found, layout=layout, values=layout.merge(trained, frozen))


def _value(x: Any) -> Tensor:
    return x.value if isinstance(x, Part) else x


def _full(values: PyTree, cfg: Config) -> PyTree:
    """An argument with its shards gathered; all else as it is."""
    if not _has_shards(values):
        return values

    def one(x: Any) -> Any:
        if not isinstance(x, (DTensor, Part)):
            return x
        found = opened(x, cfg, "an argument")
        (full,) = gathered(found.values, found.layout, found.mesh.axes)
        return full

    return tree.map(one, values)


def _as_parts(values: PyTree, cfg: Config) -> PyTree:
    if not _has_shards(values):
        return values

    def one(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        found = opened(x, cfg, "an argument")
        return found.parts(found.values)

    return tree.map(one, values)


def _has_shards(values: PyTree) -> bool:
    return any(isinstance(x, (DTensor, Part)) for x in tree.leaves(values))
