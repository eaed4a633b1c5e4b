"""Checkpoints that `torch.distributed.checkpoint` wrote for other code, FSDP2 for one.

Their `.metadata` is a pickle. It is read by an unpickler that knows a dozen names, each of which
stands for a plain record made here: no module is imported, and no function of anybody's is called.
Tensors are read with `torch.load(weights_only=True)`; entries that are no tensors are never read.
"""

import enum
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    Metadata,
)

# Private, and what `FileSystemReader.read_data` looks up; there is no public way to make one.
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from fzero.checkpoint.flatten import Flat
from fzero.checkpoint.sources import (
    Rename,
    Source,
    ends_of,
    is_step,
    moment_of,
    names_of,
    our_names,
    renamed_params,
)
from fzero.errors import CheckpointError

NAME = ".metadata"
MAX_BYTES = 2**30

_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_DCP}.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    )
} | {(f"{_DCP}.filesystem", "_StorageInfo"), (f"{_DCP}.filesystem", "_StoragePrefix")}
_TEXTS = {("pathlib", "Path"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}


def open_dcp(
    path: Path, flat: Flat, on_bytes: Callable[[int], None], rename: Rename | None = None
) -> Source:
    """A checkpoint of `torch.distributed.checkpoint` as a source.

    Parameters are found under the names that they have there, whatever one prefix stands before all
    of them; moments of Adam under torch.optim's names, see `_states`.

    Args:
        path: the folder with the `.metadata`.
        flat: what is to be filled.
        on_bytes: called with the bytes of each tensor that is read.
        rename: see `our_names`.

    Raises:
        CheckpointError: the metadata is damaged, asks for code, or leads out of the folder; a
            parameter's state is there several times, or two prefixes fit as well.
    """
    there = _read(path)
    foreign = {k: v for k, v in there.tensors.items() if isinstance(v, TensorStorageMetadata)}
    names = names_of(flat.tensors)
    params = {*names}
    # an optimizer's keys end in the names of parameters, too
    theirs = [key for key in foreign if not key.startswith("optim")]
    found = our_names(names, theirs, rename, str(path))
    ours = {f"params.{to}": key for key, to in found.items()}
    moments = {key: at for key in flat.tensors if (at := moment_of(key, params)) is not None}
    states = _states(foreign, {*moments.values()}, params | {*found.values()}, path)
    ours |= {key: states.at[moment] for key, moment in moments.items() if moment in states.at}
    reader = _Reader(path, there, ours, on_bytes)
    metadata = reader.read_metadata()
    heads = states.heads or ("optim",)
    steps = {key for key in foreign if key.startswith(heads) and key.endswith(".step")}
    values = _steps(path, there, steps, states, flat) if steps else {}
    for key, value in values.items():
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=value.dtype), value.shape, []
        )
    identity = repr(sorted((key, tuple(x.size)) for key, x in foreign.items()))
    renamed = renamed_params(found, rename)
    source = Source(str(path), reader, metadata, values=values, identity=identity)
    return replace(source, renamed=renamed, names=theirs)


class _States(NamedTuple):
    """Where an optimizer keeps what it knows of our parameters.

    Args:
        at: keys in the checkpoint, by a parameter's name and what torch.optim calls the state.
        heads: what stands before the names in these.
    """

    at: dict[tuple[str, str], str]
    heads: tuple[str, ...]


def _states(
    foreign: Iterable[str], moments: Set[tuple[str, str]], known: Set[str], path: Path
) -> _States:
    """Whose state each of an optimizer's keys is.

    Before its last part a key ends in the name of a parameter. If it ends in several, the one that
    leaves the head that most keys share is meant, then the longest. If several optimizers have a
    state of one parameter, it is that of the one that has most.

    Args:
        foreign: keys in the checkpoint.
        moments: that are asked for, each a parameter's name and what torch.optim calls it; counts
            of updates are looked for besides.
        known: names of parameters, here and in the checkpoint.
        path: of the checkpoint, for the message.

    Raises:
        CheckpointError: none has most.
    """
    wanted = moments | {(name, "step") for name, _ in moments}
    kinds = {kind for _, kind in wanted}
    ends: dict[str, list[tuple[str, str]]] = {}
    for key in foreign:
        stem, _, kind = key.rpartition(".")
        if kind in kinds:
            ends[key] = [(head, name) for head, name in ends_of(stem) if head and name in known]
    shared = Counter(head for pairs in ends.values() for head, _ in pairs)
    found: dict[tuple[str, str], dict[str, str]] = {}
    for key, pairs in ends.items():
        # the longest name is the first
        head, name = max(pairs, key=lambda pair: shared[pair[0]], default=("", ""))
        of = (name, key.rpartition(".")[2])
        if of in wanted:
            found.setdefault(of, {})[head] = key
    counts = Counter(head for keys in found.values() for head in keys)
    if several := [keys for keys in found.values() if len(keys) > 1]:
        top = max(counts.values())
        most = [head for head, count in counts.items() if count == top]
        if len(most) > 1:
            one, other, *_ = several[0].values()
            raise CheckpointError(
                f"{path} has two states of one parameter, {one} and {other}, and nothing tells "
                "which of its optimizers is meant. Load the parameters alone "
                "(opt_state_like=None), or save the other job with one of them."
            )
        counts = Counter(most)
    at = {of: keys[head] for of, keys in found.items() for head in keys if head in counts}
    return _States(at, tuple(counts))


class _There:
    """What a `.metadata` says: tensors by key, and where each chunk is."""

    def __init__(self, tensors: dict[str, Any], storage: dict[Any, _StorageInfo]) -> None:
        self.tensors, self.storage = tensors, storage


class _Reader(FileSystemReader):
    """Reads tensors under our keys; refuses to read anything else."""

    def __init__(
        self, path: Path, there: _There, ours: dict[str, str], on_bytes: Callable[[int], None]
    ) -> None:
        super().__init__(path)
        # indexed once: each key looked up in all of the storage would be quadratic in the leaves
        theirs = {key: [] for key in ours.values()}
        for index, info in there.storage.items():
            if index.fqn in theirs:
                theirs[index.fqn].append((index, info))
        self._metadata = Metadata(
            {key: there.tensors[at] for key, at in ours.items()},
            storage_data={
                MetadataIndex(key, index.offset, index.index): info
                for key, at in ours.items()
                for index, info in theirs[at]
            },
        )
        self._on_bytes = on_bytes
        self.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was found when it was opened; the file is not read again."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan names into the planner's tensors, one chunk at a time."""
        try:
            for item in plan.items:
                # one item a call: between two calls is when progress can be told
                super().read_data(LoadPlan([item]), planner)
                itemsize = self._metadata.state_dict_metadata[item.storage_index.fqn]
                assert isinstance(itemsize, TensorStorageMetadata)  # we ask for nothing else
                self._on_bytes(item.lengths.numel() * itemsize.properties.dtype.itemsize)
        except (OSError, pickle.UnpicklingError, RuntimeError, AssertionError, EOFError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {error}. A file of it is damaged, or holds something "
                "else than tensors."
            ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _steps(
    path: Path, there: _There, steps: set[str], states: _States, flat: Flat
) -> dict[str, torch.Tensor]:
    """The one count of updates that all parameters have, for each of our counters."""
    read: dict[str, Any] = {
        key: torch.zeros((), dtype=there.tensors[key].properties.dtype, device="cpu")
        for key in sorted(steps)
    }
    reader = _Reader(path, there, {key: key for key in read}, lambda nbytes: None)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(read, reader.read_metadata(), is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner)
    counted = {key: float(x) for key, x in read.items()}
    own = {name: counted[key] for (name, kind), key in states.at.items() if kind == "step"}
    return one_step(counted, own, str(path), flat)


def one_step(
    steps: Mapping[str, float], own: Mapping[str, float], where: str, flat: Flat
) -> dict[str, torch.Tensor]:
    """The count of `steps` for each of our counters; and for each leaf of Adam's, if they differ.

    Args:
        steps: every count that there is, by where it is.
        own: of those, each parameter's by its name.
        where: the checkpoint is.
        flat: what is to be filled.

    Raises:
        CheckpointError: they differ, and an optimizer that is to be filled keeps one for all.
    """
    step = max(steps.values())
    values = {
        k: torch.tensor(step, device="cpu").to(x.dtype)
        for k, x in flat.tensors.items()
        if is_step(k)
    }
    # parameters alone need no count
    if len(set(steps.values())) == 1 or not values:
        return values
    counts = _counts(own, flat)
    if not counts:
        low, high = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        raise CheckpointError(
            f"{where}: parameters were updated {steps[low]:g} times ({low}) and {steps[high]:g} "
            f"times ({high}). Of fzero's optimizers Adam's kind keeps a count for each; load the "
            "parameters alone (opt_state_like=None), or save the other job at a step where they "
            "agree."
        )
    return values | counts


def _counts(own: Mapping[str, float], flat: Flat) -> dict[str, torch.Tensor]:
    """Each leaf's own count, under the key that it has in Adam's state; {} if one has none."""
    names, counts = {*names_of(flat.tensors)}, {}
    for key in flat.tensors:
        if (moment := moment_of(key, names)) is None:
            continue
        name, kind = moment
        state = key.removesuffix(f".{name}")
        if name not in own or kind not in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            return {}
        if kind == "exp_avg_sq":  # what has one is Adam's
            count = torch.tensor(own[name], dtype=torch.float32, device="cpu")
            counts[f"{state.removesuffix('.nu')}.counts.{name}"] = count
    return counts


def _read(path: Path) -> _There:
    file = path / NAME
    try:
        if file.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{file} has more than {MAX_BYTES} bytes: it is damaged.")
        with file.open("rb") as opened:
            found = _Unpickler(opened, str(file)).load()
        return _There(
            {key: _tensor(x) for key, x in found.state_dict_metadata.items()},
            {_index(i): _info(x, path) for i, x in found.storage_data.items()},
        )
    except CheckpointError:
        raise
    except Exception as error:  # a pickle that is damaged can fail in any way
        raise CheckpointError(
            f"{file} cannot be read: {type(error).__name__}: {error}. It is damaged, or written by "
            "a version of torch that this release doesn't know."
        ) from error


class _Unpickler(pickle.Unpickler):
    """Knows the names of one kind of file, and makes a plain record of each."""

    def __init__(self, file: Any, where: str) -> None:
        super().__init__(file)
        self.where = where
        # Made anew each time, so that nothing in a file can change what the next one finds.
        self.records = {key: type(key[1], (_Record,), {}) for key in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the file stands for, or a refusal."""
        if (module, name) in self.records:
            return self.records[module, name]
        if (module, name) == (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"):
            return enum.IntEnum("Memory", {"CONTIGUOUS": 0, "CHANNELS_LAST": 1, "PRESERVE": 2})
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        # dtypes are pickled by name; nothing else of torch gets through here
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda text: str(text)
        if (module, name) in _TEXTS:
            return lambda *parts: "/".join(map(str, parts))
        raise CheckpointError(
            f"{self.where} asks for {module}.{name}, and metadata of a checkpoint has no use for "
            "it: loading it could run code. Don't trust this file."
        )


class _Record:
    """The fields of a pickled object, and no behaviour."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def _tensor(x: Any) -> TensorStorageMetadata | None:
    if not hasattr(x, "size"):
        return None  # of bytes, which are never read
    size = torch.Size(x.size)
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in x.chunks]
    # TensorProperties pickle themselves as a tuple, the dtype first.
    return TensorStorageMetadata(TensorProperties(dtype=x.properties.state[0]), size, chunks)


def _index(x: Any) -> MetadataIndex:
    return MetadataIndex(x.fqn, getattr(x, "offset", None), getattr(x, "index", None))


def _info(x: Any, path: Path) -> _StorageInfo:
    name = x.relative_path
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(
            f"{path / NAME} names the file {name!r}; it may name only files in its own folder. "
            "Don't trust this checkpoint."
        )
    if getattr(x, "transform_descriptors", None):
        raise CheckpointError(
            f"{path / NAME} says that {name} is compressed or encrypted "
            f"({x.transform_descriptors}); fzero reads plain files. Save it again without."
        )
    return _StorageInfo(name, int(x.offset), int(x.length))
