"""`load_partial`: what of a checkpoint has a place here, under other names and in other sizes.

    checkpoint's names ──rename──▶ names of here ──only──▶ asked for ──overlap──▶ read, or a part

[Note: named, never silent] What a user writes down must come true: a pattern that matches nothing,
two leaves for one place, a leaf of another shape that no `overlap` names are errors. What nobody
wrote down, leaves that are only here or only there, is told in the report.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata

from fzero.checkpoint.compare import compare, refuse, shorten
from fzero.checkpoint.fill import Opened, open_on_every_rank
from fzero.checkpoint.format.disk import as_path
from fzero.checkpoint.format.reader import Reader
from fzero.checkpoint.load import choose, open_source
from fzero.checkpoint.sources import BUFFERS, Rename, names_of, split_key
from fzero.errors import CheckpointError, arguments_by_name
from fzero.tree import PyTree


@dataclass(frozen=True)
class LoadReport:
    """What `load_partial` did, by key: `params.<name>`, `opt_state.<field>.<name>`.

    Args:
        loaded: read from the checkpoint, in full or in part.
        renamed: of those, the ones that had another name in the checkpoint, and which.
        cut: of those, the ones of which a part was read: `(shape in the checkpoint, shape here)`.
        missing: asked for, and not in the checkpoint: they are as they were.
        unexpected: in the checkpoint, and nothing here has that name.
        left: in both, and not asked for by `only`.
    """

    loaded: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    cut: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = {
            "loaded": self.loaded,
            "renamed": [f"{key} from {was}" for key, was in self.renamed.items()],
            "cut": [f"{key} {there} to {here}" for key, (there, here) in self.cut.items()],
            "missing": self.missing,
            "unexpected": self.unexpected,
            "left": self.left,
        }
        return "\n".join(f"{what} {len(x)}: {shorten(x)}" for what, x in rows.items() if x)


class PartialLoad(NamedTuple):
    """What `load_partial` gives."""

    params: PyTree
    opt_state: PyTree
    report: LoadReport


@arguments_by_name
def load_partial(
    path: str | os.PathLike[str],
    params_like: PyTree,
    opt_state_like: PyTree = None,
    *,
    only: str | Iterable[str] = "*",
    rename: Mapping[str, str] | None = None,
    overlap: str | Iterable[str] = (),
    state: bool = False,
    cast: bool = False,
    timeout: float | None = None,
) -> PartialLoad:
    """Fill what has a place in a checkpoint, and tell what was done; all ranks call it.

    For a new head on a trained body, parameters that have other names, a vocabulary that has
    grown. Any world size, stage and mesh reads what any other wrote; no rank reads more of a leaf
    than its shard. What is not read keeps its values. A run that goes on as it was wants `load`.

    Args:
        path: as for `load`: a checkpoint of fzero, safetensors, or one of
            `torch.distributed.checkpoint`.
        params_like: params as `TrainStep.init` or `Engine.state` gives them.
        opt_state_like: the state likewise. With it masters are filled with all digits, and buffers
            are read, too; without it 16-bit parameters take rounded values (`cast=True`).
        only: globs over the names of parameters and buffers here; others stay as they are.
        rename: from names in the checkpoint to names here, the first that matches; `*` stands for
            any text, and the n-th on the right is what the n-th on the left was. A name that is
            given so is final; a prefix that all others share is found without it.
        overlap: globs over names here: leaves that may have another size in the checkpoint (and
            as many dims). The elements that both have are read, from the start of each dim.
        state: read the optimizer's state as well: what it keeps of these parameters, in the same
            way, and its counters.
        cast: convert leaves whose dtype differs; without it that is an error.
        timeout: seconds that ranks wait for each other; None: as long as the process group does.

    Returns:
        `(params, opt_state, report)`; the report is the same on all ranks. The run does not count
        as resumed: what it saves next starts a line of its own.

    Raises:
        CheckpointError: on every rank, and before anything is read: a pattern matches nothing, two
            leaves would be one, shapes or dtypes differ and nobody allowed it, ranks ask for
            different things, there is nothing to load.

    Examples:
        >>> import tempfile, torch, fzero
        >>> run = tempfile.mkdtemp()
        >>> old = {"body.w": torch.ones(2), "words": torch.ones(2, 3), "head": torch.ones(1)}
        >>> _ = fzero.checkpoint.save(run, old)
        >>> new = {"net.w": torch.zeros(2), "words": torch.zeros(3, 3), "out": torch.zeros(4)}
        >>> params, _, report = load_partial(
        ...     run, new, rename={"body.*": "net.*"}, overlap="words"
        ... )
        >>> print(report)
        loaded 2: params.net.w, params.words
        renamed 1: params.net.w from params.body.w
        cut 1: params.words (2, 3) to (3, 3)
        missing 1: params.out
        unexpected 1: params.head
        >>> params["words"][:, 0]
        tensor([1., 1., 0.])
    """
    if state and opt_state_like is None:
        raise CheckpointError(
            "load_partial(state=True) reads into the state, and opt_state_like is None. Pass it."
        )
    where = as_path(path)
    asked = _Asked(_globs("only", only), dict(rename or {}), _globs("overlap", overlap), state)
    namer = _namer(asked.rename)
    opened = open_on_every_rank(
        where,
        lambda: choose(where),
        lambda found, flat, on_bytes: open_source(found, flat, on_bytes, namer),
        params_like,
        opt_state_like,
        timeout,
    )
    said = {name: repr(value) for name, value in asked._asdict().items()}
    opened.ranks.same("what they load of it", said | {"cast": repr(cast)})
    report = _judged(opened, asked, cast=cast)
    flat = opened.flat
    skip = {*flat.tensors, *flat.scalars, *opened.source.scalars} - {*report.loaded}
    params, opt_state = opened.read(skip, {*report.cut})
    return PartialLoad(params, opt_state, report)


class _Asked(NamedTuple):
    """What a user wrote down."""

    only: tuple[str, ...]
    rename: dict[str, str]
    overlap: tuple[str, ...]
    state: bool


def _judged(opened: Opened, asked: _Asked, *, cast: bool) -> LoadReport:
    """What can be loaded, before anything is; see [Note: named, never silent]."""
    flat, source = opened.flat, opened.source
    if asked.state and asked.rename and not isinstance(source.reader, Reader):
        raise CheckpointError(
            f"{source.where} was not written by fzero: load_partial(rename=..., state=True) can't "
            "tell which of its moments are whose. Load the parameters alone, with state=False."
        )
    stored: dict[str, Any] = {**source.metadata.state_dict_metadata, **source.scalars}
    here: dict[str, Any] = {**flat.tensors, **flat.scalars}
    if not asked.state:
        stored, here = _without_optimizer(stored), _without_optimizer(here)
    if not any(key.startswith("opt_state") for key in here):
        stored = {key: x for key, x in stored.items() if not key.startswith("opt_state")}
    # the optimizer's keys end in names of parameters
    names = set(names_of(here))
    name_of = {key: split_key(key, names)[1] for key in here}
    _matched("only", asked.only, name_of.values())
    _matched("overlap", asked.overlap, name_of.values())
    for pattern in asked.rename:
        if not any(_pattern(pattern).fullmatch(name) for name in source.names):
            raise CheckpointError(_unmatched("rename", pattern, {*source.names}))
    wanted = [k for k in here if name_of[k] is None or _any(asked.only, name_of[k])]
    there = [key for key in wanted if key in stored]
    cut = {}
    for key in there:
        sizes = _sizes(stored[key], here[key])
        if sizes and sizes[0] != sizes[1] and _any(asked.overlap, name_of[key]):
            cut[key] = sizes
    report = compare(flat, source.metadata, source.scalars)
    bad = {k: v for k, v in report.misshapen.items() if k in there and k not in cut}
    if bad:
        listing = shorten([f"{key} ({what})" for key, what in bad.items()])
        raise CheckpointError(
            f"{source.where} has leaves of another shape: {listing}. Name them in overlap=[...] to "
            "read the elements that both have (with as many dims), or leave them out of only=[...]."
        )
    dtypes = {k: _dtypes(stored[k], here[k]) for k in there}
    recast = {k: v for k, v in dtypes.items() if v is not None and v[0] != v[1]}
    refuse(type(report)(recast=recast), source.where, strict=False, cast=cast)
    if not there:
        raise CheckpointError(
            f"{source.where} has nothing that is asked for. There: {shorten(stored)}. Here: "
            f"{shorten(wanted)}. Pass rename={{'theirs.*': 'ours.*'}} if names differ."
        )
    return LoadReport(
        tuple(there),
        {key: was for key, was in source.renamed.items() if key in there},
        cut,
        tuple(key for key in wanted if key not in stored),
        tuple(key for key in stored if key not in here),
        tuple(key for key in here if key in stored and key not in wanted),
    )


def _without_optimizer(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: x for k, x in leaves.items() if not k.startswith("opt_state") or k.startswith(BUFFERS)
    }


def _sizes(there: Any, here: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Both shapes, where a part of one can be a part of the other."""
    if not isinstance(there, TensorStorageMetadata) or not isinstance(here, Tensor):
        return None
    return None if len(there.size) != here.dim() else (tuple(there.size), tuple(here.shape))


def _dtypes(there: Any, here: Any) -> tuple[Any, Any] | None:
    if not isinstance(there, TensorStorageMetadata) or not isinstance(here, Tensor):
        return None
    return there.properties.dtype, here.dtype


def _globs(argument: str, given: str | Iterable[str]) -> tuple[str, ...]:
    globs = (given,) if isinstance(given, str) else tuple(given)
    for glob in globs:
        if not isinstance(glob, str):
            raise CheckpointError(
                f"load_partial({argument}=...) takes globs over names, and was given {glob!r}."
            )
    return globs


def _any(globs: Iterable[str], name: str | None) -> bool:
    return name is not None and any(fnmatchcase(name, glob) for glob in globs)


def _matched(argument: str, globs: Iterable[str], names: Iterable[str | None]) -> None:
    known = {name for name in names if name is not None}
    for glob in globs:
        if glob != "*" and not any(fnmatchcase(name, glob) for name in known):
            raise CheckpointError(_unmatched(argument, glob, known))


def _unmatched(argument: str, pattern: str, names: Iterable[str]) -> str:
    whose = "in the checkpoint" if argument == "rename" else "here"
    known = sorted(names)
    near = difflib.get_close_matches(pattern, known, 3, 0.4) or known[:3]
    return (
        f"load_partial({argument}=...): {pattern!r} matches no name {whose}. There are "
        f"{len(known)}, such as {', '.join(near)}. Write names as the report shows them, without "
        "'params.'."
    )


def _namer(rename: Mapping[str, str]) -> Rename:
    """The function that the patterns stand for."""
    for pattern, to in rename.items():
        if not isinstance(pattern, str) or not isinstance(to, str):
            raise CheckpointError(
                f"load_partial(rename=...) maps names to names, and was given {pattern!r}: {to!r}."
            )
        if to.count("*") > pattern.count("*"):
            raise CheckpointError(
                f"load_partial(rename=...): {to!r} has more '*' than {pattern!r}; each stands for "
                "what one there has matched."
            )
    rules = [(_pattern(pattern), to) for pattern, to in rename.items()]

    def namer(name: str) -> str | None:
        for pattern, to in rules:
            if found := pattern.fullmatch(name):
                pieces = to.split("*")
                texts = [*found.groups()[: len(pieces) - 1], ""]
                return "".join(a + b for a, b in zip(pieces, texts, strict=True))
        return None

    return namer


def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, glob.split("*"))), re.DOTALL)
