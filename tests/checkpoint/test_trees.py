"""Any pytree of tensors and plain values comes back bit for bit; what differs is told at once."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import optree
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

import fzero
from fzero import tree
from fzero.checkpoint import load, load_partial, save
from fzero.checkpoint.flatten import flatten, keys
from fzero.checkpoint.format.boxes import box_at
from fzero.checkpoint.format.pieces import pieces
from fzero.errors import CheckpointError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    left: Any
    right: Any


optree.register_pytree_node(
    Record,
    lambda r: ((r.left, r.right), None, ("left", "right")),
    lambda _, children: Record(*children),
    path_entry_type=optree.GetAttrEntry,
    namespace=getattr(optree.registry, "__GLOBAL_NAMESPACE"),
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint16,
]

# those whose negation torch can write into memory
LAZY = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def tensors(draw: Any) -> Tensor:
    """Of any dtype, shape and strides, with any bits in it, whose memory may hold other values."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    draws = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), generator=draws)
    x = bits.to(torch.uint8).view(dtype).view(shape)
    x = x.t() if len(shape) == 2 and draw(st.booleans()) else x
    return lazily(x) if draw(st.booleans()) else x


def lazily(x: Tensor) -> Tensor:
    """In this memory other values, where torch can tell them by a bit of the tensor."""
    if x.is_complex():
        return x.conj()
    return torch._neg_view(x) if x.dtype in LAZY else x


scalars = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.booleans(), st.text(max_size=3)
)
names = st.sampled_from(["w", "a.b", "a", "b", "0", "x y", "\u00e9"])
trees = st.recursive(
    st.one_of(tensors(), scalars, st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(names, inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner, inner),
    ),
    max_leaves=6,
)


def blank(of: Any, *, lazy: bool = False) -> Any:
    """The same tree with other values; lazy ones if asked for."""

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return type(x)(0)
        return lazily(torch.zeros_like(x)) if lazy else torch.zeros_like(x)

    return tree.map(one, of)


def bits(x: Any) -> Any:
    """Equal only for what is the same, bit for bit."""
    if not isinstance(x, Tensor):
        return type(x), x
    flat = x.contiguous().resolve_conj().resolve_neg().flatten()
    return x.dtype, tuple(x.shape), flat.view(torch.uint8).tolist()


@settings(max_examples=40)
@given(params=trees, opt_state=trees, lazy=st.booleans())
def test_what_is_saved_is_what_is_loaded(params: Any, opt_state: Any, lazy: bool) -> None:
    with tempfile.TemporaryDirectory() as run:
        save(run, params, opt_state)
        found = load(run, blank(params, lazy=lazy), blank(opt_state, lazy=lazy))
    for ours, theirs in zip(found, (params, opt_state), strict=True):
        assert tree.flatten(ours)[1] == tree.flatten(theirs)[1]
        assert list(map(bits, tree.leaves(ours))) == list(map(bits, tree.leaves(theirs)))


@settings(max_examples=40)
@given(of=trees)
@example(of={"a.b": 1, "a": {"b": 2}})
@example(of=[{"w": 1}, {"w.0": [2], "w": [{"0": 3}]}])
def test_every_leaf_has_a_key_of_its_own(of: Any) -> None:
    found = keys("params", of)
    assert len(set(found)) == len(found) == len(tree.leaves(of))


@settings(max_examples=50)
@given(shape=shapes, itemsize=st.sampled_from([1, 2, 8]), limit=st.integers(1, 64))
def test_pieces_cover_a_tensor_in_order(shape: Any, itemsize: int, limit: int) -> None:
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    found = list(pieces(shape, itemsize, limit))
    parts = [piece.of(x).flatten() for piece in found]
    assert torch.equal(torch.cat([x.new_zeros(0), *parts]), x.flatten())
    at = 0
    for piece, part in zip(found, parts, strict=True):
        assert (piece.start, piece.nbytes) == (at, part.numel() * itemsize)
        assert piece.nbytes <= max(limit, itemsize)
        at += piece.nbytes


@settings(max_examples=50)
@given(shape=shapes, data=st.data(), mesh=st.lists(st.integers(1, 4), min_size=1, max_size=2))
def test_boxes_are_what_dtensors_hold(shape: Any, data: Any, mesh: list[int]) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    places = [Replicate()] + [Shard(dim) for dim in range(len(shape))]
    placements = [data.draw(st.sampled_from(places)) for _ in mesh]
    where = [data.draw(st.integers(0, n - 1)) for n in mesh]
    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, where, placements)
    box = box_at("w", shape, placements, mesh, where)
    assert box.sizes == tuple(sizes)
    if box.numel:
        assert box.offsets == tuple(offsets)


def test_all_differences_are_told_at_once(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, {"lr": 0.1})
    like = {"b": torch.zeros(4), "d": torch.zeros(1), "c": torch.zeros(1)}
    with pytest.raises(fzero.CheckpointError) as told:
        load(tmp_path, like, {"lr": torch.zeros(()), "mu": 1.0})
    for text in (
        "not in the checkpoint: params.d, opt_state.mu",
        "only in the checkpoint: params.a",
        "params.b ((3,) in the checkpoint, (4,) asked for)",
        "opt_state.lr (the value 0.1 in the checkpoint, a tensor asked for)",
        "strict=False",
    ):
        assert text in str(told.value)
    assert like["c"].item() == 0  # nothing was touched
    with pytest.warns(UserWarning, match=r"not in the checkpoint: params\.d"):
        params, _ = load(tmp_path, like, strict=False)
    assert {name: x.tolist() for name, x in params.items()} == {
        "b": [0.0] * 4,
        "c": [1.0],
        "d": [0.0],
    }


@pytest.mark.parametrize("strict", [True, False])
def test_a_dtype_changes_only_when_asked(strict: bool, tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.full((2,), 1.001)})
    like = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(fzero.CheckpointError, match="float32 in the checkpoint, bfloat16 asked"):
        load(tmp_path, like, strict=strict)
    params, _ = load(tmp_path, like, strict=strict, cast=True)
    assert params["w"].tolist() == [1.0, 1.0]


def test_params_alone_and_state_alone(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2)}, {"mu": torch.full((2,), 2.0)})
    assert load(tmp_path, {"w": torch.zeros(2)})[1] is None
    params, state = load(tmp_path, None, {"mu": torch.zeros(2)})
    assert (params, state["mu"].tolist()) == (None, [2.0, 2.0])


def test_values_are_loaded_into_the_same_memory(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2)})
    like = {"w": torch.zeros(2)}
    assert load(tmp_path, like)[0]["w"] is like["w"]


@pytest.mark.parametrize(
    "leaf", [object(), torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), b"x", 1j]
)
def test_leaves_that_cannot_be_stored_are_named(leaf: Any) -> None:
    with pytest.raises(fzero.CheckpointError, match=r"params\.x\.0"):
        flatten({"x": [leaf]}, None)


def test_an_expanded_tensor_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2), "w": torch.ones(3, 2)})
    like = {"a": torch.zeros(2), "w": torch.zeros(2).expand(3, 2)}
    with pytest.raises(CheckpointError, match=r"params\.w is an expanded tensor.*Nothing was read"):
        load(tmp_path, like)
    assert like["a"].tolist() == [0, 0]
    # what is not read may be anything
    constant = {"a": torch.zeros(2), "mask": torch.ones(1).expand(4)}
    with pytest.warns(UserWarning, match=r"params\.mask"):
        assert load(tmp_path, constant, strict=False)[0]["a"].tolist() == [1, 1]
    assert load_partial(tmp_path, constant).params["a"].tolist() == [1, 1]


@pytest.mark.parametrize("call", [save, load])
def test_a_path_that_no_file_system_has_is_refused(call: Any) -> None:
    with pytest.raises(CheckpointError, match="NUL"):
        call("run\0", {"w": torch.ones(2)})
