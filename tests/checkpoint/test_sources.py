"""Names in others' files, and whose each of our keys is."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fzero
from fzero.checkpoint import load, load_partial
from fzero.checkpoint.sources import moment_of, our_names, shared_prefix


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("opt_state.inner.nu.x.mu.w", ("x.mu.w", "exp_avg_sq")),
        ("opt_state.inner.mu.mu.w", ("mu.w", "exp_avg")),
        ("opt_state.inner.mu.w", ("w", "exp_avg")),
        ("opt_state.inner.nu.mu.w", ("mu.w", "exp_avg_sq")),
        ("opt_state.inner.mu.elsewhere", None),
        ("params.mu.w", None),
    ],
)
def test_a_moment_is_of_the_longest_name(key: str, found: tuple[str, str] | None) -> None:
    assert moment_of(key, {"w", "mu.w", "x.mu.w"}) == found


@pytest.mark.parametrize(
    ("names", "theirs", "prefix"),
    [
        (["a.w", "b.w"], ["a.w", "b.w", "ema.a.w", "ema.b.w"], ""),
        (["a.w", "b.w"], ["m.a.w", "m.b.w", "m.ema.a.w", "m.ema.b.w"], "m."),
        (["a.w", "b.w"], ["m.a.w", "m.b.w", "ema.a.w"], "m."),
        # the first names of ours are new here
        (["a", "b", "c", "x.w"], ["m.x.w", "m.y.w"], "m."),
        (["a.w"], ["other"], ""),
        (["a.w"], ["ba.w"], ""),
    ],
)
def test_a_prefix_is_what_most_names_have(names: list[str], theirs: list[str], prefix: str) -> None:
    assert shared_prefix(names, theirs, "file") == prefix
    assert shared_prefix(names[::-1], theirs[::-1], "file") == prefix


@pytest.mark.parametrize("heads", [("model.", "ema."), ("m.", "m_ema."), ("x.m.", "x.ema.", "t.")])
def test_prefixes_that_fit_as_well_are_named(heads: tuple[str, ...]) -> None:
    theirs = [f"{head}{name}" for head in heads for name in ("a.w", "b.w")]
    with pytest.raises(fzero.CheckpointError, match="file has 2 of the 2 names") as told:
        our_names(["a.w", "b.w"], theirs, None, "file")
    assert sum(f"under {head!r}" in str(told.value) for head in heads) == 2
    for head in heads:
        kept = our_names(["a.w", "b.w"], theirs, lambda key, h=head: _cut(key, h), "file")
        assert [key for key, to in kept.items() if to == "a.w"] == [f"{head}a.w"]


def _cut(key: str, head: str) -> str | None:
    return key.removeprefix(head) if key.startswith(head) else None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_of_two_sets_of_weights_the_user_chooses(kind: str, tmp_path: Path) -> None:
    values = {"model": 1.0, "ema": 2.0}
    held = {f"{head}.{name}": torch.full((2,), x) for head, x in values.items() for name in "ab"}
    if kind == "dcp":
        dcp.save(held, checkpoint_id=tmp_path, no_dist=True)
    else:
        save_file(held, tmp_path / "model.safetensors")
    like = {"a": torch.zeros(2), "b": torch.zeros(2)}
    for strict in (True, False):
        with pytest.raises(fzero.CheckpointError, match=r"under 'ema\.' .* under 'model\.'"):
            load(tmp_path, like, strict=strict)
    assert not any(x.any() for x in like.values())
    for head, value in values.items():
        params, _, report = load_partial(tmp_path, like, rename={f"{head}.*": "*"})
        assert {x.item() for leaf in params.values() for x in leaf} == {value}
        assert len(report.unexpected) == 2
