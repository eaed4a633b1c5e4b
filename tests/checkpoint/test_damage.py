"""Files that were changed after the save: told by file and leaf, and nothing in them believed."""

import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import fzero
from fzero.checkpoint import latest, load, save
from fzero.checkpoint.__main__ import main
from fzero.checkpoint.format.boxes import Box, are_disjoint
from fzero.checkpoint.format.manifest import _digest, loads, read
from fzero.checkpoint.format.verify import problems
from tests.checkpoint.foreign.test_foreign import Touch


def _tree(step: int = 0) -> dict[str, Any]:
    return {"a": torch.arange(600_000.0) + step, "b": {"c": torch.full((3, 2), float(step))}}


def _saved(run: Path, steps: int = 1) -> Path:
    for step in range(steps):
        save(run, _tree(step), {"lr": 0.1}, step=step)
    return run / f"step-{steps - 1:08d}"


def _file(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved(tmp_path_factory.mktemp("run"))


@settings(max_examples=50)
@given(data=st.data())
def test_any_flipped_bit_is_found(data: Any, saved: Path) -> None:
    file = data.draw(st.sampled_from([_file(saved), saved / "manifest.json"]))
    good = file.read_bytes()
    at, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    bad = bytearray(good)
    bad[at] ^= 1 << bit
    file.write_bytes(bad)
    try:
        (problem,) = problems(saved)
        assert file.name in problem
        header = read(saved).files[_file(saved).name].header_bytes if file == _file(saved) else 0
        if at >= header:
            with pytest.raises(fzero.CheckpointError, match=file.name):
                load(saved, _tree())
    finally:
        file.write_bytes(good)
    assert problems(saved) == []


def test_a_flipped_bit_names_file_and_leaf(tmp_path: Path) -> None:
    file = _file(_saved(tmp_path))
    extent = next(iter(read(file.parent).leaves["params.b.c"].boxes.values()))
    data = bytearray(file.read_bytes())
    data[extent.start] ^= 1
    file.write_bytes(data)
    with pytest.raises(fzero.CheckpointError, match=rf"{file.name}.*params\.b\.c.*checksum"):
        load(tmp_path, _tree())
    like = {"a": torch.zeros(600_000)}
    with pytest.warns(UserWarning, match="only in the checkpoint"):
        params, _ = load(tmp_path, like, strict=False)  # the others are as they were
    assert torch.equal(params["a"], torch.arange(600_000.0))


@pytest.mark.parametrize("size", [0, 100, 2_000_000])
def test_a_file_that_was_cut_off_is_passed_over(size: int, tmp_path: Path) -> None:
    newest = _saved(tmp_path, steps=3)
    os.truncate(_file(newest), size)
    with pytest.warns(UserWarning, match=f"passed over.*{size} bytes"):
        assert latest(tmp_path) == tmp_path / "step-00000001"
    with pytest.warns(UserWarning, match="passed over"):
        params, _ = load(tmp_path, _tree())
    assert params["b"]["c"].unique().item() == 1.0
    with pytest.raises(fzero.CheckpointError, match="bytes, and the manifest says"):
        load(newest, _tree())
    # A damaged one counts for nothing when old ones go.
    save(tmp_path, _tree(3), {"lr": 0.1}, step=3, keep=2)
    assert sorted(folder.name[-1] for folder in tmp_path.iterdir()) == ["1", "2", "3"]


@pytest.mark.parametrize("what", ["file", "manifest"])
def test_what_is_missing_is_told(what: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    gone = _file(folder) if what == "file" else folder / "manifest.json"
    gone.unlink()
    assert problems(folder)
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(fzero.CheckpointError, match="holds none that is whole"),
    ):
        load(tmp_path, _tree())


# ---- what a stranger could write
def _forged(folder: Path, change: Any) -> None:
    """The manifest with `change` applied, and a checksum that fits again."""
    held = json.loads((folder / "manifest.json").read_text())
    change(held["manifest"])
    held["checksum"] = _digest(held["manifest"])
    (folder / "manifest.json").write_text(json.dumps(held))


def _rename(to: str) -> Any:
    def change(body: Any) -> None:
        ((old, about),) = body["files"].items()
        body["files"] = {to: about}
        for leaf in body["leaves"].values():
            for box in leaf["boxes"]:
                assert box["file"] == old
                box["file"] = to

    return change


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "..", ".safetensors", "x.pt", 7],
)
def test_a_path_cannot_leave_the_folder(name: Any, tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    _file(folder).rename(tmp_path / "x.safetensors")
    _forged(folder, _rename(name) if isinstance(name, str) else lambda b: _first(b).update(file=7))
    with pytest.raises(fzero.CheckpointError, match="in its own folder"):
        load(folder, _tree())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    file = _file(_saved(tmp_path))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(fzero.CheckpointError, match="cannot be opened"):
        load(file.parent, _tree())


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    file = _file(_saved(tmp_path))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(fzero.CheckpointError, match="bytes, and the manifest says"):
        load(file.parent, _tree())


def _first(body: Any) -> Any:
    return body["leaves"]["params.a"]["boxes"][0]


def _overlap(leaf: Any) -> None:
    """Two boxes with as many elements as the leaf, none of which is the last row."""
    (box,) = leaf["boxes"]
    rows, *rest = leaf["shape"]
    one = dict(box, offsets=[0] * len(leaf["shape"]), sizes=[rows - 1, *rest])
    other = dict(box, offsets=[0] * len(leaf["shape"]), sizes=[1, *rest])
    other["checks"] = box["checks"][:8]
    leaf["boxes"] = [one, other]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=5))
def test_boxes_are_disjoint_exactly_where_no_element_is_in_two(rows: list[Any]) -> None:
    for dims in (1, 2):
        boxes = [Box((start,) * dims, (size,) * dims) for start, size in rows]
        cells = [
            {(i, j) for i in range(a, a + n) for j in (range(a, a + n) if dims == 2 else [0])}
            for a, n in rows
        ]
        expected = len(set().union(*cells)) == sum(map(len, cells))
        assert are_disjoint(boxes) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: _first(b).update(sizes=[2**50]), "no part of shape"),
        (lambda b: b["leaves"]["params.a"].update(shape=[2**50]), "do not add up"),
        (lambda b: _overlap(b["leaves"]["params.a"]), "do not add up"),
        (lambda b: _first(b).update(start=10**9), "beyond its end"),
        (lambda b: _first(b).update(start=-1), "not a count"),
        (lambda b: _first(b).update(checks="00000000"), "1 checksums for 3 blocks"),
        (lambda b: _first(b).update(checks="zz"), "cannot be read|can be read"),
        (lambda b: b["leaves"]["params.a"].update(dtype="Tensor"), "KeyError"),
        (lambda b: b["leaves"]["params.a"].update(dtype="__class__"), "KeyError"),
        (lambda b: b["leaves"]["params.a"]["boxes"].clear(), "do not add up"),
        (lambda b: b["scalars"].update({"opt_state.lr": [1]}), "not a bool, int"),
        (lambda b: b.update(version=2), "version 2"),
        (lambda b: b.update(format="zip"), "format 'zip'"),
        (lambda b: b.pop("leaves"), "KeyError"),
        (lambda b: b.update(leaves=[1]), "TypeError"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    change: Any, said: str, tmp_path: Path
) -> None:
    folder = _saved(tmp_path)
    _forged(folder, change)
    with pytest.raises(fzero.CheckpointError, match=said):
        load(folder, _tree())


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"manifest": 1}', "[" * 100_000])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(fzero.CheckpointError, match="manifest that can be read"):
        loads(text, "manifest.json")


@pytest.mark.parametrize("place", ["manifest.json", "rank-00000.safetensors"])
def test_a_pickle_in_place_of_a_file_is_not_run(place: str, tmp_path: Path) -> None:
    folder, sentinel = _saved(tmp_path), tmp_path / "ran"
    (folder / place).write_bytes(pickle.dumps(Touch(sentinel)))
    with pytest.raises(fzero.CheckpointError):
        load(folder, _tree())
    for name in ("model.safetensors", "evil.safetensors.index.json"):
        (tmp_path / name).write_bytes(pickle.dumps(Touch(sentinel)))
        with pytest.raises(fzero.CheckpointError, match=name):
            load(tmp_path / name, _tree())
    assert not sentinel.exists()


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", 3]
)
def test_an_index_cannot_leave_its_folder(name: Any, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(fzero.CheckpointError, match="own folder"):
        load(tmp_path, {"w": torch.zeros(1)})


def test_a_manifest_cannot_ask_for_memory(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(fzero.CheckpointError, match="at most"):
        load(tmp_path, _tree())


# ---- the command line
def test_inspect_verify_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = _saved(tmp_path, steps=2)
    assert main(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("step 1, written by 1 ranks: 3 leaves, 2.4 MB in 1 files\n")
    assert "params.b.c    float32 (3, 2)" in said
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(": whole\n") == 2
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    like = {"a": torch.zeros(600_000).bfloat16(), "b": {"c": torch.zeros(3, 2).bfloat16()}}
    params, _ = load(tmp_path / "out", like)
    assert torch.equal(params["a"], _tree(1)["a"].bfloat16())
    data = bytearray(_file(newest).read_bytes())
    data[-1] ^= 1
    _file(newest).write_bytes(data)
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"{tmp_path / 'step-00000000'}: whole\n" in said
    assert f"{newest}: DAMAGED\n" in said
    assert main(["verify", str(tmp_path / "nowhere")]) == 1
    assert "doesn't exist" in capsys.readouterr().err


def test_what_is_there_in_place_of_a_checkpoint_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"w": torch.zeros(2)}
    (tmp_path / "deepspeed" / "global_step10").mkdir(parents=True)
    (tmp_path / "deepspeed" / "latest").write_text("global_step10")
    (tmp_path / "universal" / "zero").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name, said in {
        "gone/run": rf"doesn't exist; the folder above that does is {tmp_path}\. ",
        "deepspeed": r"ds_to_universal\.py.*import_deepspeed_universal\(",
        "deepspeed/global_step10": r"ds_to_universal\.py.*import_deepspeed_universal\(",
        "universal": r"Load it with fzero\.checkpoint\.import_deepspeed_universal\(",
        "universal/zero": r"Load it with fzero\.checkpoint\.import_deepspeed_universal\(",
        "empty": "is no checkpoint and holds none that is whole",
    }.items():
        with pytest.raises(fzero.CheckpointError, match=said):
            load(tmp_path / name, tree)
        for command in ("inspect", "verify"):
            assert main([command, str(tmp_path / name)]) == 1
            assert re.search(said, capsys.readouterr().err)


def test_the_command_line_names_its_own_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run", {"w": torch.zeros(2)}, step=1)
    arguments = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
    assert main(arguments) == 0
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert "or pass --overwrite." in told
    assert "overwrite=True" not in told


def test_a_module_and_an_engine_are_sent_to_their_trees(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.zeros(2)}, step=1)
    module = torch.nn.Linear(2, 1)
    for wrong in (module, fzero.Engine(module, fzero.optim.sgd(0.1))):
        with pytest.raises(fzero.CheckpointError, match=r"engine\.state = load.*functionalize"):
            load(tmp_path, wrong)


def test_the_module_runs() -> None:
    import subprocess

    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "fzero.checkpoint", "--help"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "inspect" in done.stdout
