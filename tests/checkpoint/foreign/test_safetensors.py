"""Safetensors out and in, held against the library that defines them, and against transformers."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import fzero
from fzero import tree as trees
from fzero.checkpoint import export_safetensors, load, load_partial, save
from fzero.checkpoint.__main__ import main
from fzero.errors import CheckpointError
from tests.checkpoint.cases import Job, full, make
from tests.checkpoint.faults import watched
from tests.ranks import run_ranks


def _tree() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(5, 7),
        "a.bias": torch.randn(5).bfloat16(),
        "n": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "b": torch.randn(3, 4).t(),
    }


def _read(folder: Path) -> dict[str, Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        for name, x in safetensors.torch.load_file(folder / file).items():
            assert index["weight_map"][name] == file
            found[name] = x
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    assert found.keys() == index["weight_map"].keys()
    return found


def _export(run: Path, limit: int) -> dict[str, Tensor]:
    params, opt_state, _ = make(Job(2, 3), 5)
    export_safetensors(run, params, max_file_bytes=limit)
    return full(params, opt_state)


@pytest.mark.parametrize("limit", [1, 200, 10**9])
def test_what_is_exported_is_what_the_library_reads(limit: int, tmp_path: Path) -> None:
    export_safetensors(tmp_path, _tree(), max_file_bytes=limit)
    found = _read(tmp_path)
    assert {name: x.tolist() for name, x in found.items()} == {
        name: x.tolist() for name, x in _tree().items()
    }
    assert all(found[name].dtype == x.dtype for name, x in _tree().items())
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert all((tmp_path / file).stat().st_size <= limit + 500 for file in files if limit > 1)


@pytest.mark.parametrize(
    "tree",
    [
        {"a.b": 1.0, "a": {"b": 2.0}, "c": 3.0},
        {0: 1.0, "0": 2.0},
        {"": 1.0},
        1.0,
        {"params": 1.0},
        {"\u00fc\n\"'": 1.0, "x/y": 2.0, "['a']": 3.0},
    ],
    ids=repr,
)
def test_every_name_that_is_exported_is_found(tree: Any, tmp_path: Path) -> None:
    def of(fill: Any) -> Any:
        return trees.map(lambda x: torch.full((2,), fill(x)), tree)

    def values(of: Any) -> list[float]:
        return [x[0].item() for x in trees.leaves(of)]

    export_safetensors(tmp_path, of(float))
    assert len(_read(tmp_path)) == len(trees.leaves(tree))
    assert values(load(tmp_path, of(lambda x: 0.0))[0]) == trees.leaves(tree)
    loaded, _, report = load_partial(tmp_path, of(lambda x: 0.0))
    assert values(loaded) == trees.leaves(tree)
    assert report.missing == report.unexpected == ()
    save(tmp_path / "run", of(float), step=1)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert _read(tmp_path / "again").keys() == _read(tmp_path).keys()


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"__metadata__": 1}, "by the name of '__metadata__'"),
        ({"a": {"\ud800": 1}, "b": 2}, r"by the name of 'a\.\\ud800'"),
        ({"a.b": 1, "a": {"b": 2}, "params['a.b']": 3}, "several leaves would be .*a.b"),
    ],
)
def test_names_that_a_file_cannot_have_are_refused(tree: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        export_safetensors(tmp_path / "out", trees.map(lambda x: torch.ones(1), tree))
    assert not (tmp_path / "out").exists()


def test_ranks_export_whole_leaves(tmp_path: Path) -> None:
    values, _ = run_ranks(2, _export, tmp_path, 300)
    found = _read(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for name, x in found.items():
        assert torch.equal(x, values[f"['{name}']"])


def test_files_that_are_there_are_not_overwritten(tmp_path: Path) -> None:
    export_safetensors(tmp_path, _tree())
    with pytest.raises(fzero.CheckpointError, match="already"):
        export_safetensors(tmp_path, _tree())


class Cut(BaseException):
    """In place of a kill, or of a Ctrl-C."""


def test_what_an_export_cannot_take_is_refused(tmp_path: Path) -> None:
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (_tree(), {"dtype": torch.int8}, r"dtype=torch.int8 must be a floating"),
        (_tree(), {"dtype": "bf16"}, r"dtype='bf16' must be .* torch.bfloat16"),
        (_tree(), {"max_file_bytes": "1GB"}, "max_file_bytes='1GB' must be a number"),
        (None, {}, r"params has no leaves \(None\)"),
    ]
    for params, options, said in refused:
        with pytest.raises(CheckpointError, match=said):
            export_safetensors(tmp_path / "x", params, **options)
    assert not (tmp_path / "x").exists()


def _cut_at(at: int, how: str) -> Any:
    def act(number: int, name: str, args: Any) -> None:
        # whoever is killed does nothing any more
        if number == at or (how == "killed" and number > at):
            raise OSError(28, "No space left on device") if how == "full" else Cut

    return act


@pytest.mark.parametrize("how", ["full", "interrupted"])
def test_an_export_that_fails_leaves_the_folder_as_it_was(how: str, tmp_path: Path) -> None:
    new = {"a": torch.ones(16), "b": torch.ones(12)}

    def names(folder: Path) -> list[str]:
        return sorted(file.name for file in folder.iterdir())

    whole = tmp_path / "whole"
    with watched(lambda number, name, args: None) as calls:
        export_safetensors(whole, new, max_file_bytes=60)
    published = [i for i, name in enumerate(calls) if name == "rename"]
    for at in range(1, len(calls)):
        folder = tmp_path / str(at)
        folder.mkdir()
        with pytest.raises((CheckpointError, Cut)), watched(_cut_at(at, how)):
            export_safetensors(folder, new, max_file_bytes=60)
        if at <= published[-1]:
            assert names(folder) == []
            export_safetensors(folder, new, max_file_bytes=60)
        assert names(folder) == names(whole)
        assert load(folder, {name: torch.zeros_like(x) for name, x in new.items()})[0]["b"].all()


def _one_fails(folder: Path, failing: int, call: str) -> list[str]:
    def act(number: int, name: str, args: Any) -> None:
        if torch.distributed.get_rank() == failing and name == call:
            raise OSError(28, "No space left on device")

    # shards, which all ranks gather, whoever writes; several in a file, so that some are to come
    params = fzero.shard({name: torch.ones(8) for name in "abcdef"}, fzero.Config())
    with pytest.raises(CheckpointError, match=r"No space left .*export again"), watched(act):
        export_safetensors(folder, params, max_file_bytes=80)
    torch.distributed.barrier()
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize(
    ("failing", "call"), [(1, "create"), (0, "append"), (1, "sync"), (0, "link")]
)
def test_no_rank_leaves_files_of_an_export_that_fails(
    failing: int, call: str, tmp_path: Path
) -> None:
    assert run_ranks(2, _one_fails, tmp_path, failing, call) == [[], []]


@pytest.mark.parametrize("how", ["full", "interrupted"])
def test_files_without_an_index_stay_until_the_new_ones_are_found(how: str, tmp_path: Path) -> None:
    # as a kill between the files and the index leaves them
    old = tmp_path / "model-00001-of-00001.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(3)}, old)
    with watched(lambda number, name, args: None) as calls:
        export_safetensors(tmp_path / "whole", {"w": torch.ones(3)})
    before = old.read_bytes()
    with pytest.raises((CheckpointError, Cut)), watched(_cut_at(calls.index("rename"), how)):
        export_safetensors(tmp_path, {"w": torch.ones(3)}, overwrite=True)
    assert old.read_bytes() == before
    export_safetensors(tmp_path, {"w": torch.ones(3)}, overwrite=True)
    assert load(tmp_path, {"w": torch.zeros(3)})[0]["w"].tolist() == [1, 1, 1]


# Another number of files, the same number, and one file as transformers calls it.
@pytest.mark.parametrize("how", ["killed", "full", "interrupted"])
@pytest.mark.parametrize("before", [60, 100, None])
def test_an_export_that_is_replaced_is_one_or_the_other(
    before: int | None, how: str, tmp_path: Path
) -> None:
    old = {"a": torch.zeros(16), "b": torch.zeros(12)}
    new = {"a": torch.ones(16), "b": torch.ones(12)}

    def there(folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if before is None:
            safetensors.torch.save_file(old, folder / "model.safetensors")
        else:
            export_safetensors(folder, old, max_file_bytes=before)
        return folder

    def read(folder: Path) -> float:
        found, _ = load(folder, {name: torch.full_like(x, 7.0) for name, x in old.items()})
        values = {x.item() for leaf in found.values() for x in leaf.unique()}
        assert len(values) == 1
        return values.pop()

    asked: dict[str, Any] = {"max_file_bytes": 60, "overwrite": True}
    whole = there(tmp_path / "whole")
    with watched(lambda number, name, args: None) as calls:
        export_safetensors(whole, new, **asked)
    seen = []
    for at in range(len(calls)):
        folder = there(tmp_path / str(at))
        old_files = {file.name: file.read_bytes() for file in folder.iterdir()}
        with pytest.raises((CheckpointError, Cut)), watched(_cut_at(at, how)):
            export_safetensors(folder, new, **asked)
        seen.append(read(folder))
        if how != "killed" and not seen[-1]:
            now = {file.name: file.read_bytes() for file in folder.iterdir()}
            assert now == old_files
        export_safetensors(folder, new, **asked)
        assert read(folder) == 1.0
        files = sorted(file.name for file in folder.iterdir())
        assert files == sorted(file.name for file in whole.iterdir())
        assert len(files) == 4
    assert seen == sorted(seen)
    assert set(seen) == {0.0, 1.0}


@pytest.mark.parametrize("which", ["file", "index", "folder"])
def test_a_file_an_index_and_a_folder_load(which: str, tmp_path: Path) -> None:
    kept = {f"model.{name}": x.contiguous() for name, x in _tree().items()}
    if which == "file":
        safetensors.torch.save_file(kept, tmp_path / "any.safetensors")
    else:
        export_safetensors(tmp_path, kept, max_file_bytes=100)
    path = {
        "file": tmp_path / "any.safetensors",
        "index": tmp_path / "model.safetensors.index.json",
        "folder": tmp_path,
    }[which]
    # the names in the file have a prefix that ours don't
    params, state = load(path, {name: torch.zeros_like(x) for name, x in _tree().items()})
    assert state is None
    for name, x in _tree().items():
        assert torch.equal(params[name], x), name


@pytest.mark.parametrize("beside", ["safetensors", "dcp"])
def test_an_export_beside_a_runs_checkpoints_is_not_taken_for_the_run(
    beside: str, tmp_path: Path
) -> None:
    def like(value: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {"w": torch.full((3,), value)}, {"m": torch.full((3,), value)}

    save(tmp_path, *like(1.0), step=1)
    if beside == "safetensors":
        export_safetensors(tmp_path, like(1.0)[0])
    else:
        dcp.save(like(1.0)[0], checkpoint_id=tmp_path)
    save(tmp_path, *like(2.0), step=2, client_state={"epoch": 2})
    latest = fzero.checkpoint.latest(tmp_path)
    assert latest is not None
    assert latest.name == "step-00000002"
    params, state = load(tmp_path, *like(0.0))
    assert params["w"].tolist() == state["m"].tolist() == [2, 2, 2]
    params, state, _ = load_partial(tmp_path, *like(0.0))
    assert params["w"].tolist() == [2, 2, 2]
    assert fzero.checkpoint.client_state(tmp_path) == {"epoch": 2}
    # with none that is whole what is left is not a step of this run
    for step in ("step-00000001", "step-00000002"):
        (tmp_path / step / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(CheckpointError) as told:
        load(tmp_path, *like(0.0))
    ways_on = {"safetensors": "pass the file", "dcp": "Move the checkpoint of torch"}
    assert ways_on[beside] in str(told.value)
    if beside == "safetensors":
        file = tmp_path / "model.safetensors.index.json"
        assert load(file, like(0.0)[0])[0]["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("inside", [None, ".metadata"])
def test_a_folder_called_as_a_step_makes_no_run(inside: str | None, tmp_path: Path) -> None:
    export_safetensors(tmp_path, {"w": torch.ones(3)})
    (tmp_path / "step-00000005").mkdir()
    if inside:
        dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "step-00000005")
    assert load(tmp_path, {"w": torch.zeros(3)})[0]["w"].tolist() == [1, 1, 1]


def test_a_run_may_be_called_as_a_file(tmp_path: Path) -> None:
    run = tmp_path / "my.safetensors"
    save(run, {"w": torch.ones(3)})
    assert load(run, {"w": torch.zeros(3)})[0]["w"].tolist() == [1, 1, 1]


def _load_shards(path: Path) -> list[Any]:
    """Loads into shards, and the most bytes that any one region read had."""
    from fzero.checkpoint import sources

    largest = [0]
    real = sources.LazyReader.read_data

    def read_data(self: sources.LazyReader, plan: Any, planner: Any) -> Any:
        def watched(leaf: sources.Lazy) -> sources.Lazy:
            def read(region: Any) -> Tensor:
                found = leaf.read(region)
                largest[0] = max(largest[0], found.nbytes)
                return found

            return leaf._replace(read=read)

        self.leaves = {key: watched(leaf) for key, leaf in self.leaves.items()}
        return real(self, plan, planner)

    sources.LazyReader.read_data = read_data
    try:
        like = fzero.shard({"w": torch.zeros(8, 1000), "t": torch.zeros(3, 1000)})
        params, _ = load(path, like)
    finally:
        sources.LazyReader.read_data = real
    return [fzero.unshard(params), largest[0]]


def test_no_rank_reads_more_than_its_shard(tmp_path: Path) -> None:
    torch.manual_seed(1)
    full = {"w": torch.randn(8, 1000), "t": torch.randn(3, 1000)}
    safetensors.torch.save_file(full, tmp_path / "model.safetensors")
    for params, largest in run_ranks(2, _load_shards, tmp_path / "model.safetensors"):
        assert torch.equal(params["w"], full["w"])
        assert torch.equal(params["t"], full["t"])
        assert largest <= full["w"].nbytes // 2


def test_masters_take_the_values_too(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.full((3, 2), 1.0009765)}, tmp_path / "m.safetensors")
    cfg = fzero.Config(stage=2, precision="bf16")
    step_fn = fzero.make_train_step(lambda p, b: (p["w"] * b).sum(), fzero.optim.sgd(0.1), cfg)
    params, opt_state = step_fn.init({"w": torch.zeros(3, 2)})
    with pytest.warns(UserWarning, match=r"not in the checkpoint: opt_state\.step"):
        params, opt_state = load(tmp_path / "m.safetensors", params, opt_state, strict=False)
    assert params["w"].unique().tolist() == [1.0]
    assert fzero.unshard(opt_state.master)["w"].unique().tolist() == [pytest.approx(1.0009765)]


def test_transformers_loads_an_export_and_we_load_theirs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(2)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
    config = transformers.LlamaConfig(
        **shape, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False
    )
    model = transformers.LlamaForCausalLM(config)
    _, params = fzero.functionalize(model)
    config.save_pretrained(tmp_path / "ours")
    export_safetensors(tmp_path / "ours", fzero.shard(params), max_file_bytes=5000)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(theirs(ids).logits, model(ids).logits)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    like = fzero.shard({name: torch.zeros_like(x) for name, x in params.items()})
    loaded = fzero.unshard(load(tmp_path / "theirs", like)[0])
    assert all(torch.equal(loaded[name], x) for name, x in params.items())


def test_exports_to_one_folder_take_turns(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def export(value: float) -> None:
        try:
            for _ in range(5):
                tree = {name: torch.full((100,), value) for name in "abc"}
                export_safetensors(tmp_path, tree, max_file_bytes=400, overwrite=True)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=export, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    weights, _ = load(tmp_path, {name: torch.zeros(100) for name in "abc"}, None)
    assert len({float(x.mean()) for x in weights.values()}) == 1
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_file_is_not_exported_over(overwrite: bool, tmp_path: Path) -> None:
    name = "model-00001-of-00001.safetensors"
    folder, link = tmp_path / "a" / name, tmp_path / "b" / name
    folder.mkdir(parents=True)
    link.parent.mkdir()
    link.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=f"a folder {name}, where a file"):
        export_safetensors(tmp_path / "a", {"w": torch.ones(2)}, overwrite=overwrite)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [name]
    if not overwrite:
        with pytest.raises(CheckpointError, match=f"has {name} already"):
            export_safetensors(tmp_path / "b", {"w": torch.ones(2)})
        assert link.is_symlink()


def test_the_folder_of_here_is_exported_beside_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(save(tmp_path, {"w": torch.ones(2)}, None, step=1))
    assert main(["export", "."]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-00000001",
        "step-00000001-safetensors",
    }
