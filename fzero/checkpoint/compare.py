"""How a checkpoint and the trees to be filled differ: all of it at once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from fzero.checkpoint.flatten import Flat, Scalar
from fzero.checkpoint.format.manifest import dtype_name
from fzero.errors import CheckpointError

SHOWN = 20


@dataclass(frozen=True)
class Report:
    """Where a checkpoint and the trees to be filled differ, by key.

    Args:
        missing: asked for, and not in the checkpoint.
        extra: in the checkpoint, and not asked for.
        misshapen: in both, with other shapes or kinds: what each is.
        recast: in both, with other dtypes: `(in the checkpoint, asked for)`.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    misshapen: Mapping[str, str] = field(default_factory=dict)
    recast: Mapping[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether they differ at all."""
        return bool(self.missing or self.extra or self.misshapen or self.recast)

    def __str__(self) -> str:
        parts = [
            ("not in the checkpoint", self.missing),
            ("only in the checkpoint", self.extra),
            ("of another shape", [f"{k} ({v})" for k, v in self.misshapen.items()]),
            (
                "of another dtype",
                [
                    f"{k} ({dtype_name(a)} in the checkpoint, {dtype_name(b)} asked for)"
                    for k, (a, b) in self.recast.items()
                ],
            ),
        ]
        return "; ".join(f"{what}: {shorten(keys)}" for what, keys in parts if keys)


def compare(flat: Flat, metadata: Metadata, scalars: Mapping[str, Scalar]) -> Report:
    """How what a checkpoint holds differs from what is to be filled."""
    stored = metadata.state_dict_metadata
    wanted = {**flat.tensors, **flat.scalars}
    # A tree that nobody asked for, such as the state of a load of params, is not extra.
    asked = tuple({key.split(".")[0].split("[")[0] for key in wanted})
    missing = [key for key in wanted if key not in stored and key not in scalars]
    extra = [key for key in (*stored, *scalars) if key not in wanted and key.startswith(asked)]
    misshapen, recast = {}, {}
    for key, x in wanted.items():
        there = stored.get(key, scalars.get(key))
        if key in missing:
            continue
        if isinstance(x, Tensor) and isinstance(there, TensorStorageMetadata):
            if there.size != x.shape:
                misshapen[key] = (
                    f"{tuple(there.size)} in the checkpoint, {tuple(x.shape)} asked for"
                )
            elif there.properties.dtype != x.dtype:
                recast[key] = (there.properties.dtype, x.dtype)
        elif isinstance(x, Tensor) or key not in scalars:
            kinds = [_kind(there), _kind(x)]
            misshapen[key] = f"{kinds[0]} in the checkpoint, {kinds[1]} asked for"
    return Report(tuple(missing), tuple(extra), misshapen, recast)


def refuse(report: Report, where: str, *, strict: bool, cast: bool) -> None:
    """Raise what of the report is not allowed.

    Raises:
        CheckpointError: names every leaf that differs.
    """
    if report.recast and not cast:
        raise CheckpointError(
            f"{where} does not fit: {report}. A dtype changes only if you say so: pass cast=True "
            "to convert, or make the step function with the precision that the checkpoint has."
        )
    if strict and (report.missing or report.extra or report.misshapen):
        raise CheckpointError(
            f"{where} does not fit: {report}. Make params and opt_state with the model and "
            "optimizer that were saved, or pass strict=False to load what fits and keep the rest "
            "as it is."
        )


def shorten(keys: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    keys = list(keys)
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(keys[:SHOWN]) + more


def _kind(x: object) -> str:
    return "a tensor" if isinstance(x, Tensor | TensorStorageMetadata) else f"the value {x!r}"
