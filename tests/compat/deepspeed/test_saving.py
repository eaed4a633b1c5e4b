"""Checkpoints under DeepSpeed's tags."""

import argparse
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fzero
import fzero.compat.deepspeed as deepspeed
from fzero.compat.deepspeed import saving
from fzero.compat.deepspeed.utils import zero_to_fp32
from fzero.errors import CheckpointError, ConfigError, FzeroError
from tests.ranks import run_ranks


def test_a_clone_for_torch_save_is_a_copy_without_the_memory_around_it() -> None:
    table = torch.randn(100, 2)
    given = {"rows": [table[0], (table[1], "name", 3)], "none": None, "param": nn.Parameter(table)}
    found = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(given)
    table.zero_()
    first, (second, *plain) = found["rows"]
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 8
    assert first.count_nonzero() == second.count_nonzero() == 2
    assert (plain, found["none"]) == (["name", 3], None)
    assert found["param"].count_nonzero() == 200
    assert not found["param"].requires_grad


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def engine_of(seed: int = 0, stage: int = 3, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        **more,
    }
    return deepspeed.initialize(model=model_of(seed), config=config)[0]


def steps(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        torch.manual_seed(step)
        x = torch.randn(4, 3)
        loss = (engine(x).float() - x.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _saves(folder: Path, stage: int) -> tuple[list[float], list[float]]:
    engine = engine_of(0, stage)
    steps(engine, 0, 3)
    rank = deepspeed.comm.get_rank()
    assert engine.save_checkpoint(folder, client_state={"rank": rank, "rng": torch.arange(3)})
    if rank == 0:  # one rank is enough, and the others go on
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "alone")
    losses, rates = steps(engine, 3, 3), engine.get_lr()
    engine.destroy()
    return losses, rates


def _resumes(folder: Path, stage: int) -> tuple[list[float], list[float], Any]:
    engine = engine_of(1, stage)
    steps(engine, 9, 1)  # whatever it was before
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    assert engine.global_steps == 3
    out = steps(engine, 3, 3), engine.get_lr(), client["rank"]
    engine.destroy()
    return out


@pytest.mark.parametrize(("saved", "resumed"), [(3, 3), (3, 1), (0, 2)])
def test_a_run_goes_on_where_it_was(tmp_path: Path, saved: int, resumed: int) -> None:
    before = run_ranks(2, _saves, tmp_path, saved, timeout=120)
    after = run_ranks(2, _resumes, tmp_path, resumed, timeout=120)
    for rank in range(2):
        assert after[rank][0] == pytest.approx(before[rank][0], rel=1e-5)
        assert after[rank][1] == before[rank][1]
        assert after[rank][2] == rank


def _into_its_own(folder: Path, stage: int) -> None:
    engine = engine_of(0, stage)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    before = engine.module_state_dict()
    steps(engine, 2, 1)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, folder)
    assert model is engine.module
    for name, value in engine.module_state_dict().items():
        assert torch.equal(value, before[name]), name
    steps(engine, 2, 1)  # and it trains on
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engines_own_module_takes_the_weights_of_a_checkpoint(
    tmp_path: Path, stage: int
) -> None:
    run_ranks(2, _into_its_own, tmp_path, stage, timeout=120)


def _tags_differ(folder: Path) -> str:
    engine = engine_of(0, 1)
    try:
        engine.save_checkpoint(folder, tag=f"tag{deepspeed.comm.get_rank()}")
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_that_name_other_tags_are_told(tmp_path: Path) -> None:
    found = run_ranks(2, _tags_differ, tmp_path)
    assert all("'tag1'" in message and "'tag0'" in message for message in found)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="save_dir"):
        engine_of(stage=0).save_checkpoint("")


def test_weights_are_read_without_ranks(tmp_path: Path) -> None:
    run_ranks(2, _saves, tmp_path, 3, timeout=120)
    weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    plain = model_of(5)
    assert weights.keys() == plain.state_dict().keys()
    assert int(weights["1.num_batches_tracked"]) == 3
    zero_to_fp32.load_state_dict_from_zero_checkpoint(plain, tmp_path, "global_step3")
    engine = engine_of(1, 0)  # of one rank
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert engine.global_steps == 0
    for name, x in engine.module.state_dict().items():
        assert torch.equal(x.float(), weights[name].float()), name
        assert torch.equal(plain.state_dict()[name].float(), weights[name].float())
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    again = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(x, weights[name]) for name, x in again.items())


class Tied(nn.Module):
    """What a `state_dict` is more than named parameters and buffers, or less."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("again", self.shift)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.embed(x) + self.frozen) * self.scale + self.shift
        return self.head(x.to(self.head.weight.dtype))


def _gives_back_its_keys(folder: Path, stage: int, bf16: bool) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": bf16},
    }
    engine = deepspeed.initialize(model=Tied(), config=config)[0]
    engine.backward(engine(torch.tensor([1, deepspeed.comm.get_rank()])).float().square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    before = engine.module_state_dict()
    # every rank writes the same file
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "out")
    deepspeed.comm.barrier()
    engine.save_16bit_model(folder, "low.bin")
    for file in (folder / "out" / "pytorch_model.bin", folder / "low.bin"):
        read = torch.load(file, weights_only=True)
        assert read["head.weight"] is read["embed.weight"], file
        Tied().load_state_dict(read)
    for how in ({"load_module_only": True}, {"load_optimizer_states": False}, {}):
        engine.backward(engine(torch.tensor([3])).float().square().mean())
        engine.step()
        engine.load_checkpoint(folder, **how)
        for name, x in engine.module_state_dict().items():
            assert torch.equal(x, before[name]), (how, name)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_checkpoint_has_the_keys_of_the_modules_state_dict(
    tmp_path: Path, stage: int, bf16: bool
) -> None:
    run_ranks(2, _gives_back_its_keys, tmp_path, stage, bf16, timeout=120)


class Split(nn.Module):
    """One projection that is stored as two; what has the parameter's own name is taken, too."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(3, 4)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state["one"], state["two"] = state.pop(f"{prefix}both.weight").chunk(2)

    @staticmethod
    def _join(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        if "one" in state:
            state[f"{prefix}both.weight"] = torch.cat([state.pop("one"), state.pop("two")])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(x)


def _splits(folder: Path, stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = deepspeed.initialize(model=Split(), config=config)[0]
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    want = engine.inner.full_params()
    read = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert read.keys() == {"both.weight", "both.bias"}
    other, plain = deepspeed.initialize(model=Split(), config=config)[0], Split()
    plain.load_state_dict(read)
    other.load_checkpoint(folder, load_module_only=True)
    for name, x in other.inner.full_params().items():
        assert torch.equal(x, want[name])
        assert torch.equal(x, plain.get_parameter(name))


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_are_stored_otherwise_are_in_a_checkpoint(
    tmp_path: Path, stage: int
) -> None:
    run_ranks(2, _splits, tmp_path, stage, timeout=120)


class Adapted(nn.Module):
    """A frozen layer with an adapter, and a weight that is in no group."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(3, 5).requires_grad_(False)
        self.norm, self.adapter = nn.BatchNorm1d(5), nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.base(x.to(self.base.weight.dtype)).to(self.norm.weight.dtype)
        return self.adapter(self.norm(x).to(self.adapter.weight.dtype)) * self.scale


def _leaves_frozen_ones_out(folder: Path, stage: int, bf16: bool) -> None:
    def engine_of(seed: int) -> Any:
        model = Adapted(seed)
        # a client may give frozen parameters, too
        groups = [p for name, p in model.named_parameters() if name != "scale"]
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "bf16": {"enabled": bf16},
        }
        return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]

    frozen = {"base.weight", "base.bias"}
    first = engine_of(0)
    steps(first, 0, 2)
    first.save_checkpoint(folder, exclude_frozen_parameters=True)
    saved = first.module_state_dict()
    assert saved.keys() - first.module_state_dict(exclude_frozen_parameters=True).keys() == frozen
    losses = steps(first, 2, 2)
    first.save_checkpoint(folder, "whole", save_latest=False)
    first.destroy()
    kept = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert saved.keys() - kept.keys() == frozen
    whole = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "whole")
    some = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "whole", True)
    assert whole.keys() - some.keys() == frozen
    assert some.keys() == kept.keys()

    second = engine_of(1)
    before = second.module_state_dict()
    for how in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
        with pytest.raises(CheckpointError, match=r"base\.weight(?s:.)*load_module_strict=False"):
            second.load_checkpoint(folder, **how)
        second.load_checkpoint(folder, load_module_strict=False, **how)
        for name, x in second.module_state_dict().items():
            assert torch.equal(x, (before if name in frozen else saved)[name]), (how, name)
    third = engine_of(0)  # whose base is the same
    third.load_checkpoint(folder, load_module_strict=False)
    assert steps(third, 2, 2) == losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.quick("True-3", "False-1")
def test_a_checkpoint_may_leave_frozen_parameters_out(
    tmp_path: Path, stage: int, bf16: bool
) -> None:
    run_ranks(2, _leaves_frozen_ones_out, tmp_path, stage, bf16, timeout=120)


def test_counters_are_those_that_deepspeed_keeps(tmp_path: Path) -> None:
    def counters(engine: Any) -> tuple[int, ...]:
        now = engine.global_steps, engine.global_samples, engine.skipped_steps
        return (*now, engine.micro_steps)

    accumulates = {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    first = engine_of(**accumulates)
    steps(first, 0, 6)
    first.skipped_steps = 1
    first.save_checkpoint(tmp_path)
    assert counters(first) == (3, 24, 1, 6)
    for how, there in (
        ({}, (3, 24, 1)),
        ({"load_optimizer_states": False}, (3, 24, 1)),
        ({"load_module_only": True}, (0, 0, 0)),
    ):
        engine = engine_of(**accumulates)
        engine.load_checkpoint(tmp_path, **how)
        assert counters(engine) == (*there, 0), how


def test_the_latest_tag_is_the_last_that_asked_to_be(tmp_path: Path) -> None:
    engine = engine_of(stage=0)
    with pytest.warns(UserWarning, match="latest"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    engine.save_checkpoint(tmp_path, tag="a")
    steps(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="b", save_latest=False)
    assert saving.latest_tag(tmp_path) == "a"
    engine.save_checkpoint(tmp_path, tag="a")  # again, at another step
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "a" / "step-00000001")
    assert sorted(path.name for path in (tmp_path / "a").iterdir() if path.suffix == ".pt") == [
        "rank-00000-step-00000001.pt"
    ]


def test_what_would_run_code_when_read_is_not_written(tmp_path: Path) -> None:
    engine = engine_of(stage=0)
    for kept, place in (
        ({"fn": model_of}, r"client_state\['fn'\] is a builtins.function"),
        (
            {"runs": [{"best": np.float64(2)}]},
            r"\['runs'\]\[0\]\['best'\] is a numpy.float64.*item",
        ),
    ):
        with pytest.raises(CheckpointError, match=place):
            engine.save_checkpoint(tmp_path, tag="a", client_state=kept)
    assert not (tmp_path / "a").exists()
    engine.save_checkpoint(tmp_path, client_state={"args": argparse.Namespace(lr=0.1)})
    assert engine.load_checkpoint(tmp_path)[1]["args"].lr == 0.1


def test_another_optimizer_is_told_in_deepspeeds_words(tmp_path: Path) -> None:
    engine_of(stage=0).save_checkpoint(tmp_path, tag="a")
    other = engine_of(stage=0, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    with pytest.raises(CheckpointError, match=r"does not fit.*load_optimizer_states=False"):
        other.load_checkpoint(tmp_path, tag="a")
    assert other.load_checkpoint(tmp_path, tag="a", load_optimizer_states=False)[0]


def test_a_folder_that_is_none_of_ours_is_told(tmp_path: Path) -> None:
    engine = engine_of(stage=0)
    engine.save_checkpoint(tmp_path, tag="a")
    with pytest.raises(CheckpointError, match="Tags there: a"):
        engine.load_checkpoint(tmp_path, tag="b")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="ds_to_universal"):
        engine.load_checkpoint(tmp_path, tag="real")
    (tmp_path / "latest").write_text("\n")
    with pytest.raises(CheckpointError, match=r"latest is empty.*Tags there: a, real"):
        engine.load_checkpoint(tmp_path)
    with pytest.raises(FzeroError, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)


def test_an_optimizer_of_fzeros_goes_on_with_its_state(tmp_path: Path) -> None:
    def engine() -> Any:
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
        opt = fzero.optim.adamw(0.1)
        return deepspeed.initialize(model=model_of(0), optimizer=opt, config=config)[0]

    first = engine()
    steps(first, 0, 3)
    first.save_checkpoint(tmp_path)
    losses = steps(first, 3, 3)
    second = engine()
    second.load_checkpoint(tmp_path)
    assert steps(second, 3, 3) == losses


def test_a_load_between_micro_batches_starts_a_whole_step(tmp_path: Path) -> None:
    engine = engine_of(train_batch_size=8, gradient_accumulation_steps=2)
    steps(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    steps(engine, 2, 1)  # one micro-batch, whose gradients go
    engine.load_checkpoint(tmp_path)
    assert not engine.is_gradient_accumulation_boundary()
    steps(engine, 2, 1)
    assert engine.is_gradient_accumulation_boundary()
    assert engine.global_steps == 1


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_somebody_else_has_in_a_tags_folder_stays(tmp_path: Path) -> None:
    engine = engine_of()
    steps(engine, 0, 2)
    run, notes = tmp_path / "run", tmp_path / "notes" / "step-00000002" / "mine.txt"
    for step in (1, 2, 3):
        fzero.checkpoint.save(run, {"w": torch.ones(3)}, step=step)
    for name in ("rank-0-step-1.pt", "rank-my-notes-step-x.pt", "step-00000002/mine.txt"):
        (run / name).write_text("mine")
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    before = _files(tmp_path)
    for tag in ("run", "notes"):
        with pytest.raises(CheckpointError, match=r"step-00000002 is there .* no save_checkpoint"):
            engine.save_checkpoint(tmp_path, tag=tag)
    assert _files(tmp_path) == before
    steps(engine, 2, 2)
    engine.save_checkpoint(tmp_path, tag="run")  # beside them
    assert _files(tmp_path) > before
    assert engine.load_checkpoint(tmp_path, tag="run")[0] == str(run / "step-00000004")


def test_a_checkpoint_that_a_run_went_on_from_can_be_gone_back_to(tmp_path: Path) -> None:
    for _ in range(2):
        engine = engine_of()
        engine.load_checkpoint(tmp_path, tag="last") if tmp_path.joinpath("last").exists() else ...
        steps(engine, 0, 2)
        engine.save_checkpoint(tmp_path, tag="last", client_state={"at": engine.global_steps})
    newest = tmp_path / "last" / "step-00000004" / "rank-00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:10])
    assert engine_of().load_checkpoint(tmp_path, tag="last")[1] == {"at": 2}
    steps(engine, 0, 2)
    engine.save_checkpoint(tmp_path, tag="last")
    kept = {name for name in _files(tmp_path / "last") if name.startswith("rank-")}
    there = {path.name for path in (tmp_path / "last").glob("step-*")}
    assert kept == {f"rank-00000-{name}.pt" for name in there}


@pytest.mark.parametrize("tag", ["", ".", "../up", "a/../../up", "/tmp/up", "latest", "latest/a"])
def test_a_tag_names_a_folder(tag: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tag=.* names no folder in save_dir"):
        engine_of().save_checkpoint(tmp_path / "x", tag=tag)
    assert not list(tmp_path.iterdir())


def _one_rank_fails(folder: Path, what: str) -> str:
    engine = engine_of()
    steps(engine, 0, 1)
    client: dict[str, Any] = {}
    rank = deepspeed.comm.get_rank()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if what == "client" and rank:
        client["open"] = object()
    if what == "disk" and rank:
        client["large"] = torch.ones(10_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))

    def save() -> None:
        if what == "16 bit":
            engine.save_16bit_model(folder / "file", "model.bin")
        else:
            engine.save_checkpoint(folder, client_state=client)

    try:
        with pytest.raises(CheckpointError) as told:
            save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*folder.rglob("rank-*")]
    steps(engine, 1, 1)  # nobody waits for the other
    return str(told.value)


@pytest.mark.parametrize("what", ["client", "disk", "16 bit"])
def test_what_fails_on_one_rank_is_told_on_all(what: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    for told in run_ranks(2, _one_rank_fails, tmp_path, what):
        assert "rank 0: " in told if what == "16 bit" else "rank 1: " in told or "object" in told
    assert not [name for name in _files(tmp_path) if "part" in name or name == "latest"]
