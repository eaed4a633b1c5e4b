"""Optimizers out of optimizers: one after the other, on some leaves only, one for each group."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.errors import ConfigError
from fzero.optim import check
from fzero.optim.adapt import as_optimizer
from fzero.optim.base import Optimizer, Params, PyTree
from fzero.optim.foreach import add_, leaves_like, ordered_like
from fzero.optim.inplace import Overwrite, in_place
from fzero.optim.whole import decided


class MaskedState(NamedTuple):
    """The state of the masked optimizer, with `None` where the mask is False."""

    inner: PyTree


class MultiState(NamedTuple):
    """The states of several optimizers by label, each with `None` at the others' leaves."""

    inner: dict[str, PyTree]


def chain(*transforms: Any) -> Optimizer:
    """Each transform's updates are the next one's gradients.

    Args:
        *transforms: Optimizers or parts of them; TorchOpt's too.

    Returns:
        An optimizer whose state is a tuple with one state per transform. It is foreign as soon
        as one transform is.

    Raises:
        ConfigError: No transforms, or something that is none.

    Examples:
        >>> from fzero.optim import clip_by_global_norm, sgd
        >>> opt = chain(clip_by_global_norm(1.0), sgd(0.1))
        >>> params = [torch.zeros(2)]
        >>> state = opt.apply_([torch.tensor([3.0, 4.0])], opt.init(params), params)
        >>> params
        [tensor([-0.0600, -0.0800])]
    """
    if not transforms:
        raise ConfigError("chain: no transforms, but it must have at least one.")
    parts = tuple(as_optimizer(transform) for transform in transforms)
    *first, last = parts

    def init(params: Params) -> tuple[PyTree, ...]:
        return tuple(part.init(params) for part in parts)

    def update(
        grads: PyTree, state: tuple[PyTree, ...], params: Params | None = None, **options: Any
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        new = []
        for part, own in zip(parts, state, strict=True):
            grads, own = part.update(grads, own, params, **options)
            new.append(own)
        return grads, tuple(new)

    @torch.no_grad()
    def apply_(
        grads: PyTree, state: tuple[PyTree, ...], params: Params, **options: Any
    ) -> tuple[PyTree, ...]:
        stored = []
        keep = tree.leaves(params)
        for part, own in zip(first, state[:-1], strict=True):
            grads, new = part.update(grads, own, params, **options)
            # written at the end: if a later part raises, this state is as it was
            stored.append(Overwrite(own, new, keep))
        assert last.apply_ is not None  # as_optimizer has filled it in
        final = last.apply_(grads, state[-1], params, **options)
        return (*(own.write() for own in stored), final)

    def rates(state: tuple[PyTree, ...]) -> list[Any]:
        return [x for part, own in zip(parts, state, strict=True) for x in part.rates(own)]

    return Optimizer(init, update, apply_, any(part.foreign for part in parts), rates)


def masked(inner: Any, mask: PyTree | Callable[[PyTree], PyTree]) -> Optimizer:
    """Apply an optimizer to the leaves where the mask is True; pass on the others' gradients.

    What passes through is not scaled: two masked optimizers with opposite masks make a chain that
    treats two groups of leaves differently. To leave leaves untouched use `Config(frozen=...)`.

    Args:
        inner: An optimizer or a part of one.
        mask: Tree of bools with the structure of the params, or one of its prefixes; or a
            function from the params' tree to such a tree. It is shown whole leaves at every
            stage, on the meta device: shapes and dtypes, no values.

    Returns:
        An optimizer whose state is a `MaskedState`.

    Raises:
        ConfigError: The mask doesn't fit the params, holds something else than bools, or is a
            function that reads values.

    Examples:
        >>> from fzero.optim import add_decayed_weights
        >>> decay = masked(add_decayed_weights(0.1), {"w": True, "b": False})
        >>> params, grads = ({"w": torch.ones(1), "b": torch.ones(1)} for _ in range(2))
        >>> decay.update(grads, decay.init(params), params)[0]
        {'w': tensor([1.1000]), 'b': tensor([1.])}
    """
    part = as_optimizer(inner)

    def init(params: Params) -> MaskedState:
        return MaskedState(part.init(_select(params, _flags(mask, params))))

    def update(
        grads: PyTree, state: MaskedState, params: Params | None = None, **options: Any
    ) -> tuple[PyTree, MaskedState]:
        flags = _flags(mask, grads)
        leaves, spec = tree.flatten(grads)
        chosen = _select(grads, flags)
        shown = None if params is None else _select(ordered_like(grads, params), flags)
        updates, inner_state = part.update(chosen, state.inner, shown, **options)
        changed = iter(leaves_like(tree.flatten(chosen)[1], updates, "updates"))
        merged = [next(changed) if flag else leaf for flag, leaf in zip(flags, leaves, strict=True)]
        return tree.unflatten(spec, merged), MaskedState(inner_state)

    @torch.no_grad()
    def apply_(grads: PyTree, state: MaskedState, params: Params, **options: Any) -> MaskedState:
        flags, params = _flags(mask, grads), ordered_like(grads, params)
        assert part.apply_ is not None  # as_optimizer has filled it in
        inner_state = part.apply_(
            _select(grads, flags), state.inner, _select(params, flags), **options
        )
        # A gradient that passes through is its leaf's update, as `update` gives it.
        others = [not flag for flag in flags]
        add_(tree.leaves(_select(params, others)), tree.leaves(_select(grads, others)))
        return MaskedState(inner_state)

    return Optimizer(init, update, apply_, part.foreign, lambda state: part.rates(state.inner))


def multi_transform(
    transforms: Mapping[str, Any], labels: PyTree | Callable[[PyTree], PyTree]
) -> Optimizer:
    """Another optimizer for each group of leaves.

    Args:
        transforms: An optimizer, or a part of one, by label.
        labels: Tree of labels with the structure of the params, or one of its prefixes; or a
            function from the params' tree to such a tree. It is shown whole leaves at every
            stage, on the meta device: shapes and dtypes, no values.

    Returns:
        An optimizer whose state is a `MultiState`. It is foreign as soon as one transform is.

    Raises:
        ConfigError: No transforms; labels that are no texts, that don't fit the params, that no
            transform has, or that a function reads from values.

    Examples:
        >>> from fzero.optim import adamw, sgd
        >>> def by_dims(params):
        ...     return {name: "matrix" if x.ndim > 1 else "vector" for name, x in params.items()}
        >>> opt = multi_transform({"matrix": sgd(0.5), "vector": adamw(0.1)}, by_dims)
        >>> params = {"w": torch.ones(1, 2), "b": torch.ones(2)}
        >>> opt.update(params, opt.init(params), params)[0]["w"]
        tensor([[-0.5000, -0.5000]])

    References:
        optax.multi_transform.
    """
    if not isinstance(transforms, Mapping):
        raise ConfigError(
            f"multi_transform: transforms is a {type(transforms).__name__}, and must be a dict, an "
            "optimizer by label: multi_transform({'decay': adamw(3e-4), ...}, labels)."
        )
    if not transforms:
        raise ConfigError("multi_transform: no transforms, but there must be at least one.")
    for label in transforms:
        if not isinstance(label, str):
            raise ConfigError(
                f"multi_transform: the label {label!r} is a {type(label).__name__}, and labels are "
                "texts, by which states are saved: 'decay', say."
            )
    parts = {label: as_optimizer(transform) for label, transform in transforms.items()}

    def groups(values: PyTree) -> dict[str, list[bool]]:
        """For each label, which leaves have it."""
        paths, found = _by_leaf(labels, values, "multi_transform: labels")
        for path, label in zip(paths, found, strict=True):
            if not isinstance(label, str) or label not in parts:
                raise ConfigError(
                    f"multi_transform: labels{path}={label!r}, and the transforms are for "
                    f"{', '.join(map(repr, parts))}. Every leaf has the label of a transform."
                )
        return {label: [one == label for one in found] for label in parts}

    def init(params: Params) -> MultiState:
        flags = groups(params)
        return MultiState({k: part.init(_select(params, flags[k])) for k, part in parts.items()})

    def update(
        grads: PyTree, state: MultiState, params: Params | None = None, **options: Any
    ) -> tuple[PyTree, MultiState]:
        check.state("multi_transform", state, MultiState)
        leaves, spec = tree.flatten(grads)
        merged, new = list(leaves), {}
        params = None if params is None else ordered_like(grads, params)
        for label, flags in groups(grads).items():
            chosen = _select(grads, flags)
            shown = None if params is None else _select(params, flags)
            updates, new[label] = parts[label].update(chosen, state.inner[label], shown, **options)
            changed = iter(leaves_like(tree.flatten(chosen)[1], updates, "updates"))
            merged = [
                next(changed) if flag else leaf for flag, leaf in zip(flags, merged, strict=True)
            ]
        return tree.unflatten(spec, merged), MultiState(new)

    @torch.no_grad()
    def apply_(grads: PyTree, state: MultiState, params: Params, **options: Any) -> MultiState:
        check.state("multi_transform", state, MultiState)
        new, params = {}, ordered_like(grads, params)
        for label, flags in groups(grads).items():
            apply = parts[label].apply_
            assert apply is not None  # as_optimizer has filled it in
            chosen, shown = _select(grads, flags), _select(params, flags)
            new[label] = apply(chosen, state.inner[label], shown, **options)
        return MultiState(new)

    def rates(state: MultiState) -> list[Any]:
        there = state.inner  # maybe with some of the labels alone
        return [x for label in parts if label in there for x in parts[label].rates(there[label])]

    foreign = any(part.foreign for part in parts.values())
    # others' may raise half-way: then nothing has been written
    return Optimizer(init, update, in_place(update) if foreign else apply_, foreign, rates)


def _flags(mask: PyTree | Callable[[PyTree], PyTree], values: PyTree) -> list[bool]:
    """One bool per leaf of `values`."""
    paths, flags = _by_leaf(mask, values, "masked: mask")
    for path, flag in zip(paths, flags, strict=True):
        if not isinstance(flag, bool):
            raise ConfigError(f"masked: mask{path}={flag!r}, but a mask must hold bools.")
    return flags


def _by_leaf(
    given: PyTree | Callable[[PyTree], PyTree], values: PyTree, what: str
) -> tuple[list[str], list[Any]]:
    """The path of each leaf of `values`, and what a tree or a function of the user's says of it."""
    found = decided(given, values, what) if callable(given) else given
    try:
        full = tree.map(lambda one, below: tree.map(lambda _: one, below), found, values)
        told = dict(zip(tree.paths(full), tree.leaves(full), strict=True))
        # a dict says it of an OrderedDict, whose leaves come in another order
        paths = tree.paths(values)
        return paths, [told[path] for path in paths]
    except (ValueError, KeyError) as error:
        name = what.split()[-1]
        theirs, ours = (", ".join(tree.paths(x)) or "none" for x in (found, values))
        raise ConfigError(
            f"{what} has the leaves {theirs} and the params {ours}, "
            f"but the {name} must have the structure of the params or a prefix of it."
        ) from error


def _select(values: PyTree, flags: list[bool]) -> PyTree:
    """The tree with `None` where the flag is False."""
    leaves, spec = tree.flatten(values)
    selected = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
    return tree.unflatten(spec, selected)
