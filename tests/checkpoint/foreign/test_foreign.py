"""Checkpoints of FSDP2 and of DeepSpeed, into other shardings; nothing in them is run."""

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import fzero
from fzero.checkpoint import Reader, deepspeed_param_groups, import_deepspeed_universal, load, save
from tests.ranks import run_ranks


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def _fsdp2(path: Path) -> dict[str, Tensor]:
    """Trains two steps, saves as its users do, and tells all values in full."""
    model = _module()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.ones(4, 5)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, opt)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=path)
    full = {f"params {name}": x.full_tensor() for name, x in weights.items()}
    for name, state in moments["state"].items():
        full |= {f"{k} {name}": state[k].full_tensor() for k in ("exp_avg", "exp_avg_sq")}
    return full


def _load_fsdp2(path: Path, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    params, opt_state = _fresh(stage)
    params, opt_state = fzero.unshard(load(path, params, opt_state))
    full = {f"params {name}": x for name, x in params.items()}
    full |= {f"exp_avg {name}": x for name, x in opt_state.inner.mu.items()}
    full |= {f"exp_avg_sq {name}": x for name, x in opt_state.inner.nu.items()}
    return full, [float(opt_state.step), float(opt_state.inner.step)]


def _fresh(stage: int) -> tuple[Any, Any]:
    apply, params = fzero.functionalize(_module())
    opt, cfg = fzero.optim.adamw(1e-2), fzero.Config(stage)
    step_fn = fzero.make_train_step(lambda p, x: apply(p, x).square().mean(), opt, cfg)
    return step_fn.init({name: torch.zeros_like(x) for name, x in params.items()})


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    path = tmp_path_factory.mktemp("fsdp2") / "step"
    return path, run_ranks(2, _fsdp2, path)[0]


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (3, 3), (2, 1)])
def test_a_checkpoint_of_fsdp2_loads(
    world: int, stage: int, fsdp2: tuple[Path, dict[str, Tensor]]
) -> None:
    path, expected = fsdp2
    for found, steps in run_ranks(world, _load_fsdp2, path, stage):
        assert steps == [2.0, 2.0]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], x) for key, x in expected.items())


class Touch:
    """Unpickled, it would make a file."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return Path.touch, (self.sentinel,)


def test_metadata_that_asks_for_code_is_refused(
    fsdp2: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    sentinel = tmp_path / "ran"
    metadata = pickle.loads((fsdp2[0] / ".metadata").read_bytes())
    for evil in (Touch(sentinel), metadata):
        if evil is metadata:
            metadata.planner_data = Touch(sentinel)
        (tmp_path / ".metadata").write_bytes(pickle.dumps(evil))
        with pytest.raises(fzero.CheckpointError, match=r"asks for .*don't trust|Don't trust"):
            load(tmp_path, *_fresh(0))
    assert not sentinel.exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert sentinel.exists()  # the file does what it says where nobody looks


@pytest.mark.parametrize("name", ["../__0_0.distcp", "/etc/passwd", "..", "a/b"])
def test_metadata_that_leads_out_of_its_folder_is_refused(
    name: str, fsdp2: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    metadata = pickle.loads((fsdp2[0] / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(fzero.CheckpointError, match="own folder"):
        load(tmp_path, *_fresh(0))


def test_tensors_that_are_pickles_with_code_are_refused(
    fsdp2: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    sentinel = tmp_path / "ran"
    metadata = pickle.loads((fsdp2[0] / ".metadata").read_bytes())
    torch.save(Touch(sentinel), tmp_path / "evil.distcp")
    for info in metadata.storage_data.values():
        info.relative_path, info.offset = "evil.distcp", 0
        info.length = (tmp_path / "evil.distcp").stat().st_size
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(fzero.CheckpointError, match="cannot be read"):
        load(tmp_path, *_fresh(0))
    assert not sentinel.exists()


def test_dcp_reads_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = save(tmp_path, {"w": torch.arange(6.0).view(3, 2)}, step=1)
    mine = {"params.w": torch.zeros(3, 2)}
    monkeypatch.chdir(where)
    reader = Reader(".")
    monkeypatch.chdir("/")
    dcp.load(mine, storage_reader=reader, no_dist=True)
    assert torch.equal(mine["params.w"], torch.arange(6.0).view(3, 2))


# ---- DeepSpeed
class LossScaler:
    """As DeepSpeed pickles one beside its optimizer's state."""

    def __init__(self) -> None:
        self.cur_scale = 65536.0


LossScaler.__module__ = "deepspeed.runtime.fp16.loss_scaler"


def _universal(path: Path, *, steps: dict[str, int] | None = None) -> dict[str, Tensor]:
    """A universal checkpoint of `_module`, its first layer's rows padded, and its values."""
    torch.manual_seed(3)
    values = {}
    for name, x in _module().state_dict().items():
        folder = path / "zero" / name
        folder.mkdir(parents=True)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            value = torch.rand_like(x)
            values[f"{state} {name}"] = value
            held: dict[str, Any] = {"param": value, "cat_dim": 0}
            if name == "0.weight":  # two rows more than the model has here
                held |= {"param": torch.cat([value, value[:2]]), "vocab_tensor": True}
            if name == "1.weight":
                held["param"] = value.flatten()
            torch.save(held, folder / f"{state}.pt")
        torch.save((steps or {}).get(name, 12), folder / "step.pt")
    groups = [
        {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "step": 12, "params": [0]},
        {"lr": 2e-3, "weight_decay": 0.0, "betas": (0.9, 0.95), "step": 12, "params": [1]},
    ]
    state = {"param_groups": groups, "zero_stage": 2, "ds_version": "0.16.0"}
    torch.save(state, path / "zero" / "optimizer_state.pt")
    return values


def _import(path: Path, stage: int, precision: str | None) -> tuple[dict[str, Tensor], list[float]]:
    apply, params = fzero.functionalize(_module())
    cfg = fzero.Config(stage, precision=precision)
    opt = fzero.optim.adamw(1e-2)
    step_fn = fzero.make_train_step(lambda p, x: apply(p, x).square().mean(), opt, cfg)
    state = step_fn.init({name: torch.zeros_like(x) for name, x in params.items()})
    params, opt_state = fzero.unshard(import_deepspeed_universal(path, *state))
    high = opt_state.master or params
    found = {f"fp32 {name}": x for name, x in high.items()}
    found |= {f"exp_avg {name}": x for name, x in opt_state.inner.mu.items()}
    found |= {f"exp_avg_sq {name}": x for name, x in opt_state.inner.nu.items()}
    return found, [float(opt_state.step), float(opt_state.inner.step)]


@pytest.mark.parametrize(
    ("world", "stage", "precision"), [(1, 0, None), (2, 3, None), (3, 2, "bf16"), (2, 2, "fp16")]
)
def test_deepspeed_universal(world: int, stage: int, precision: str, tmp_path: Path) -> None:
    expected = _universal(tmp_path)
    for found, steps in run_ranks(world, _import, tmp_path, stage, precision):
        assert steps == [12.0, 12.0]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], x) for key, x in expected.items())


def test_deepspeed_vocabulary_is_filled_up_with_zeros(tmp_path: Path) -> None:
    (tmp_path / "zero" / "w").mkdir(parents=True)
    held = {"param": torch.ones(3, 2), "vocab_tensor": True}
    torch.save(held, tmp_path / "zero" / "w" / "fp32.pt")
    params, _ = import_deepspeed_universal(tmp_path, {"w": torch.full((5, 2), 7.0)})
    assert params["w"][:, 0].tolist() == [1, 1, 1, 0, 0]
    torch.save({"param": torch.ones(3, 2)}, tmp_path / "zero" / "w" / "fp32.pt")
    with pytest.raises(fzero.CheckpointError, match=r"of another shape: params\.w"):
        import_deepspeed_universal(tmp_path, {"w": torch.zeros(5, 2)})


def test_deepspeed_groups_are_kept_apart(tmp_path: Path) -> None:
    _universal(tmp_path)
    first, second = deepspeed_param_groups(tmp_path)
    assert (first["lr"], first["weight_decay"]) == (1e-3, 0.1)
    assert (second["lr"], second["weight_decay"]) == (2e-3, 0.0)


def test_deepspeed_steps_that_differ_are_counts_of_leaves(tmp_path: Path) -> None:
    _universal(tmp_path, steps={"1.bias": 11})
    _, opt_state = import_deepspeed_universal(tmp_path, *_fresh(0))
    counts = {name: int(x) for name, x in opt_state.inner.counts.items()}
    assert counts == {"0.weight": 12, "0.bias": 12, "1.weight": 12, "1.bias": 11}
    assert int(opt_state.inner.step) == 12


def test_deepspeed_steps_must_agree_for_one_count(tmp_path: Path) -> None:
    _universal(tmp_path, steps={"1.bias": 11})
    apply, params = fzero.functionalize(_module())
    opt = fzero.optim.lion(1e-2)
    step_fn = fzero.make_train_step(lambda p, x: apply(p, x).square().mean(), opt)
    with pytest.raises(fzero.CheckpointError, match=r"11 times \(1\.bias\) and 12 times"):
        import_deepspeed_universal(tmp_path, *step_fn.init(params))


def _fsdp2_frozen(path: Path) -> None:
    model = _module()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model[1].requires_grad_(step == 2)  # pyright: ignore
        model(torch.ones(4, 5)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, opt)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=path)


def test_a_checkpoint_of_fsdp2_that_froze_has_counts_of_leaves(tmp_path: Path) -> None:
    run_ranks(2, _fsdp2_frozen, tmp_path / "step")
    _, opt_state = load(tmp_path / "step", *_fresh(0))
    counts = {name: int(x) for name, x in opt_state.inner.counts.items()}
    assert counts == {"0.weight": 3, "0.bias": 3, "1.weight": 1, "1.bias": 1}


def test_deepspeed_objects_become_empty_records(tmp_path: Path, monkeypatch: Any) -> None:
    _universal(tmp_path)
    file = tmp_path / "zero" / "optimizer_state.pt"
    module = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    module.LossScaler = LossScaler  # type: ignore[attr-defined]
    held = torch.load(file, weights_only=True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
        patch.setitem(sys.modules, module.__name__, module)
        torch.save(held | {"loss_scaler": LossScaler()}, file)
    import_deepspeed_universal(tmp_path, *_fresh(0))
    assert "deepspeed" not in sys.modules


@pytest.mark.parametrize("which", ["optimizer_state.pt", "0.bias/fp32.pt", "0.bias/exp_avg.pt"])
def test_deepspeed_files_that_ask_for_code_are_refused(which: str, tmp_path: Path) -> None:
    _universal(tmp_path)
    sentinel = tmp_path / "ran"
    torch.save({"param": Touch(sentinel)}, tmp_path / "zero" / which)
    with pytest.raises(fzero.CheckpointError, match=r"Don't trust"):
        import_deepspeed_universal(tmp_path, *_fresh(0))
    assert not sentinel.exists()


def _zero3(
    path: Path, state: dict[Any, Any], *, group: float = 0, moments: bool = True
) -> tuple[Any, Any]:
    """A universal checkpoint as ZeRO-3 makes it, without a step.pt, and what it is to fill."""
    for name, x in _module().named_parameters():
        folder = path / "zero" / name
        folder.mkdir(parents=True)
        kinds = ["fp32", *["exp_avg", "exp_avg_sq"] * moments]
        for kind in kinds:
            torch.save(x.detach().clone(), folder / f"{kind}.pt")
    groups = [{"lr": 1e-3, "step": group, "params": [0]}]
    held = {"state": state, "param_groups": groups}
    found = {"zero_stage": 3, "optimizer_state_dict": held, "param_groups": groups}
    torch.save(found, path / "zero" / "optimizer_state.pt")
    return _fresh(3)


@pytest.mark.parametrize("step", [10, 10.0, torch.tensor(10.0), torch.tensor([10])])
def test_deepspeed_zero3_has_its_count_in_the_state(step: Any, tmp_path: Path) -> None:
    like = _zero3(tmp_path, {0: {"step": step}, 1: {"step": step}, 2: {}})
    _, opt_state = import_deepspeed_universal(tmp_path, *like)
    assert [int(opt_state.step), int(opt_state.inner.step)] == [10, 10]


@pytest.mark.parametrize(
    ("state", "group", "said"),
    [
        ({}, 0, "no count of its updates"),
        ({0: {"exp_avg": torch.zeros(1)}}, 0, "no count of its updates"),
        ({0: {"step": 10}, 1: {"step": 11}}, 0, "10 times .*11 times"),
        ({0: {"step": 10}}, 12, "10 times .*12 times"),
        ({0: {"step": 0}}, 12, "0 times .*12 times"),
        ({0: {"step": "ten"}}, 0, "expected a number"),
    ],
)
def test_deepspeed_moments_without_one_count_are_refused(
    state: Any, group: float, said: str, tmp_path: Path
) -> None:
    with pytest.raises(fzero.CheckpointError, match=said):
        import_deepspeed_universal(tmp_path, *_zero3(tmp_path, state, group=group))


def test_deepspeed_parameters_need_no_count(tmp_path: Path) -> None:
    params, _ = _zero3(tmp_path, {})
    loaded, _ = import_deepspeed_universal(tmp_path, params)
    for name, x in _module().named_parameters():
        assert torch.equal(fzero.unshard(loaded)[name], x)
