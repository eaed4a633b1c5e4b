"""A DeepSpeed script, with one import changed."""

import argparse
import contextlib
import copy
import importlib.util
import inspect
import json
import math
import os
import pydoc
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

import fzero
import fzero.compat.deepspeed as deepspeed
from fzero.compat.deepspeed.lr_schedules import BY_NAME, scheduler_of
from fzero.compat.deepspeed.settings import Section
from fzero.errors import BackwardError, CheckpointError, ConfigError, FzeroError
from tests.ranks import run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = (SCRIPTS / "train.py").read_text()
OURS = SCRIPT.replace("\nimport deepspeed\n", "\nimport fzero.compat.deepspeed as deepspeed\n")
MAX_LR, CLIP = 0.01, 0.15
BF16 = {
    "bf16": {"enabled": True},
    # what is so here in any case: DeepSpeed adds up in bfloat16 unless told otherwise
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
}


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 500_000, "stage3_param_persistence_threshold": 0}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        zero["memory_efficient_linear"] = False  # it rounds once more than torch's own
    adamw = {"lr": MAX_LR, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True}
    warmup = {"warmup_min_lr": 0.001, "warmup_max_lr": MAX_LR, "warmup_num_steps": 3}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 1000,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": adamw},
        "scheduler": {"type": "WarmupDecayLR", "params": {**warmup, "total_num_steps": 14}},
        "zero_optimization": zero,
        **more,
    }


def _script(folder: Path, stages: list[int]) -> None:
    """On a rank: run the script, as `python train.py` would."""
    for stage in stages:
        at = folder / str(stage)
        given = ["--deepspeed", "--deepspeed_config", str(at / "ds.json"), "--out", str(at)]
        with mock.patch.object(sys, "argv", ["train.py", *given]):
            runpy.run_path(str(folder / "train.py"), run_name="__main__")


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "ds.json").write_text(json.dumps(config))
    return folder


def reference(script: dict[str, Any]) -> dict[str, Any]:
    """The same training in plain PyTorch, on one process and the batches of both ranks."""
    torch.manual_seed(0)
    model, data = script["Model"](), script["Words"](1, 64)
    nn.init.constant_(model.head.bias, 0.01)
    opt = torch.optim.AdamW(script["groups"](model), lr=MAX_LR, betas=(0.9, 0.95))
    ranks = [list(DistributedSampler(data, 2, rank)) for rank in range(2)]
    steps, seen = 0, {"loss": [], "evaluation": [], "norm": []}
    saved: Any = None

    def rate(step: int) -> float:
        """DeepSpeed's WarmupDecayLR at an iteration; before the first one, the least."""
        if step < 0:
            return 0.001
        if step < 3:
            return 0.001 + 0.009 * math.log(step + 1) / math.log(3)
        return 0.001 + 0.009 * (14 - step) / 11

    for epoch in range(3):
        if epoch == 2:  # the script goes back to its checkpoint
            model.load_state_dict(saved[0])
            opt.load_state_dict(saved[1])
            steps = saved[2]
        for i in range(0, 32, 4):
            for rank in ranks:
                loss = model(data.tokens[rank[i : i + 4]])
                (loss / 4).backward()
                if rank is ranks[0]:
                    seen["loss"].append(loss.item())
            if i % 8:
                for group in opt.param_groups:
                    group["lr"] = rate(steps - 1)
                seen["norm"].append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
                opt.step()
                opt.zero_grad()
                steps += 1
        model.eval()
        with torch.no_grad():
            tokens = script["Words"](2, 8).tokens
            halves = [model(tokens[i : i + 4]).item() for i in (0, 4)]
        model.train()
        seen["evaluation"].append(sum(halves) / 2)
        if epoch == 0:
            copied = {name: x.clone() for name, x in model.state_dict().items()}
            saved = copied, copy.deepcopy(opt.state_dict()), steps
    seen["weight"] = model.head.weight.sum().item()
    return seen


def test_a_deepspeed_script_trains_as_plain_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OURS)
    for stage in range(4):
        written(tmp_path / str(stage), configuration(stage))
    run_ranks(2, _script, tmp_path, [0, 1, 2, 3], timeout=200)
    expected = reference(runpy.run_path(str(tmp_path / "train.py")))
    for stage in range(4):
        seen = json.loads((tmp_path / str(stage) / "rank-0.json").read_text())
        for key in ("loss", "evaluation", "weight"):
            assert seen[key] == pytest.approx(expected[key], rel=1e-5), (stage, key)
        assert seen["norm"][1::2] == pytest.approx(expected["norm"], rel=1e-5), stage
        assert seen["boundary"] == [False, True] * 12
        assert seen["client"] == [1, "half-way", "step-00000004"]
        assert seen["steps"] == [4, 0, 16]
        assert seen["batch"] == [16, 4]
        exported = torch.load(tmp_path / str(stage) / "pytorch_model.bin", weights_only=True)
        assert exported["head.weight"].sum().item() == pytest.approx(seen["weight"], rel=1e-5)


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install fzero[dev-peers]",
)


def _real_and_ours(folder: Path, script: str, config: dict[str, Any]) -> list[list[Any]]:
    """What each of two ranks writes: with DeepSpeed itself, and here."""
    real = (SCRIPTS / script).read_text()
    here = real.replace("\nimport deepspeed\n", "\nimport fzero.compat.deepspeed as deepspeed\n")
    (folder / script).write_text(here)
    seen = []
    for name, command in (
        ("real", [str(SCRIPTS / "real.py"), str(SCRIPTS / script)]),
        ("ours", [str(folder / script)]),
    ):
        at = written(folder / name, config)
        launch = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        given = ["--deepspeed", "--deepspeed_config", str(at / "ds.json"), "--out", str(at)]
        subprocess.run(
            [sys.executable, *launch, "--nproc-per-node", "2", *command, *given],
            check=True,
            capture_output=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        seen.append([json.loads((at / f"rank-{rank}.json").read_text()) for rank in (0, 1)])
    return seen


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (2, BF16),
        (3, BF16),
    ],
    ids=["stage1", "stage2", "stage3", "stage2-bf16", "stage3-bf16"],
)
def test_losses_are_those_of_deepspeed_itself(
    tmp_path: Path, stage: int, more: dict[str, Any]
) -> None:
    seen = _real_and_ours(tmp_path, "train.py", configuration(stage, **more))
    for real, ours in zip(*seen, strict=True):
        for key in ("loss", "evaluation"):
            assert ours[key] == pytest.approx(real[key], rel=1e-5), key
        for key in ("lr", "boundary", "steps", "batch", "exported"):
            assert ours[key] == (pytest.approx(real[key]) if key == "batch" else _close(real[key]))
        norms = [x for x in real["norm"] if x is not None]
        assert [x for x in ours["norm"] if x is not None] == pytest.approx(norms, rel=1e-5)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_losses_of_a_tied_gpt2_in_bf16_are_those_of_deepspeed_itself(
    tmp_path: Path, clip: float
) -> None:
    pytest.importorskip("transformers")
    # the kernel that is used here in any case: torch's other one rounds otherwise
    adamw = {"lr": 1e-3, "torch_adam": True, "fused": True}
    optimizer = {"type": "AdamW", "params": adamw}
    config = configuration(3, **BF16, optimizer=optimizer, gradient_clipping=clip)
    del config["scheduler"]
    config["gradient_accumulation_steps"] = 1
    real, ours = _real_and_ours(tmp_path, "gpt2.py", config)
    assert ours == real


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    "path",
    [
        *(f"runtime.lr_schedules.{name}" for name in BY_NAME),
        *("ops.adam.FusedAdam", "ops.adam.DeepSpeedCPUAdam", "ops.lamb.FusedLamb"),
        *("ops.lion.FusedLion", "ops.lion.DeepSpeedCPULion"),
        *("initialize", "add_config_arguments", "zero.GatheredParameters"),
        *("utils.set_z3_leaf_modules", "utils.set_z3_leaf_modules_by_name"),
        *("utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",),
        *("checkpoint.utils.clone_tensors_for_torch_save",),
        *("runtime.engine.DeepSpeedEngine.load_checkpoint", "utils.safe_get_full_optimizer_state"),
    ],
)
def test_arguments_and_their_defaults_are_deepspeeds(path: str) -> None:
    """A default that differs is another number, and nobody has written it."""

    def arguments(root: str) -> dict[str, Any]:
        found = pydoc.locate(f"{root}.{path}")
        assert callable(found), path
        return {p.name: p.default for p in inspect.signature(found).parameters.values()}

    assert arguments("fzero.compat.deepspeed") == arguments("deepspeed")


def _close(values: Any) -> Any:
    if isinstance(values, list) and values and isinstance(values[0], list):
        return [pytest.approx(row, rel=1e-9) for row in values]
    return values


# -------------------------------------------------------------------------------- one process
def engine_of(**more: Any) -> tuple[deepspeed.DeepSpeedEngine, Any]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=nn.Linear(3, 1), config=config, dist_init_required=False
    )
    return engine, optimizer


def backward(engine: deepspeed.DeepSpeedEngine, factor: float = 1.0) -> None:
    x = torch.ones(2, 3, dtype=next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().square().mean() * factor)


def test_the_boundary_is_the_scripts_where_it_sets_one() -> None:
    engine, _ = engine_of(gradient_accumulation_steps=4)
    before = engine.inner.full_param("bias")
    engine.set_gradient_accumulation_boundary(False)
    for _ in range(5):
        backward(engine)
        engine.step()
    assert torch.equal(engine.inner.full_param("bias"), before)
    assert engine.global_steps == 0
    engine.set_gradient_accumulation_boundary(True)
    backward(engine)
    engine.step()
    assert not torch.equal(engine.inner.full_param("bias"), before)
    assert (engine.global_steps, engine.micro_steps) == (1, 6)


def test_each_step_updates_where_accumulation_is_the_scripts() -> None:
    """After any number of backwards, each divided by the configuration's steps."""
    engine, _ = engine_of(
        gradient_accumulation_steps=4, managed_gradient_accumulation=False, gradient_clipping=0.0
    )
    plain = copy.deepcopy(engine.module)
    opt = torch.optim.SGD(plain.parameters(), 0.1)
    rows = 0
    for update, backwards in enumerate((2, 5, 1)):
        for _ in range(backwards):
            backward(engine)
            (plain(torch.ones(2, 3)).square().mean() / 4).backward()
            assert not engine.is_gradient_accumulation_boundary()
        engine.step()
        opt.step()
        opt.zero_grad()
        rows += 2 * backwards
        assert (engine.global_steps, engine.global_samples) == (update + 1, rows)
        assert engine.was_step_applied()
        for name, x in engine.inner.state_dict().items():
            assert torch.allclose(x, plain.state_dict()[name])
    with pytest.raises(ConfigError, match="managed_gradient_accumulation"):
        engine.set_gradient_accumulation_boundary(True)


def test_a_step_that_overflows_is_counted_and_leaves_the_schedule() -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.5}}
    engine, optimizer = engine_of(
        fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}, scheduler=warmup
    )
    backward(engine, math.inf)
    engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.was_step_applied()) == (1, 1, False)
    assert optimizer.overflow
    assert engine.lr_scheduler.last_batch_iteration == -1
    assert engine.loss_scale() == optimizer.cur_scale == 8.0
    backward(engine)
    engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.was_step_applied()) == (2, 1, True)
    assert engine.lr_scheduler.last_batch_iteration == 0


# What DeepSpeed 0.19.8 does with an infinite gradient, which was run at 2 ranks on the CPU, but for
# float16, which it has on a GPU alone.
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}


@pytest.mark.parametrize(
    ("section", "skipping"),
    [
        ({}, (1, 2, 3)),
        ({"bf16": {"enabled": True}}, (0, 1, 2, 3)),
        (UNCHECKED, (0, 3)),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, (1, 2, 3)),
        ({"fp16": {"enabled": True, "initial_scale_power": 4}}, (0, 1, 2, 3)),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_are_not_finite_are_skipped_where_deepspeed_skips_them(
    stage: int, section: dict[str, Any], skipping: tuple[int, ...]
) -> None:
    engine, optimizer = engine_of(zero_optimization={"stage": stage}, **section)
    backward(engine)
    engine.step()
    before = engine.inner.full_param("weight").clone()
    backward(engine, math.inf)
    engine.step()
    skips = stage in skipping
    assert (engine.global_steps, engine.skipped_steps, optimizer.overflow) == (2, skips, skips)
    after = engine.inner.full_param("weight")
    assert torch.equal(after, before) if skips else after.isnan().any()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_at_the_smallest_scale_raises_where_deepspeeds_does(stage: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1}
    engine, _ = engine_of(fp16=fp16, zero_optimization={"stage": stage})
    backward(engine, math.inf)
    engine.step()
    backward(engine, math.inf)
    with contextlib.nullcontext() if stage == 0 else pytest.raises(FzeroError, match="smallest"):
        engine.step()
    assert engine.loss_scale() == 1.0
    if stage == 0:
        assert (engine.global_steps, engine.skipped_steps) == (2, 2)


def test_the_loss_scale_is_shown_as_deepspeed_shows_it() -> None:
    for fp16, scale, dynamic in (({"loss_scale": 138.0}, 138.0, False), ({}, 2.0**16, True)):
        _, optimizer = engine_of(fp16={"enabled": True, **fp16})
        assert optimizer.loss_scale == optimizer.loss_scaler.loss_scale == scale
        assert optimizer.dynamic_loss_scale == optimizer.loss_scaler.dynamic == dynamic


class Scaler:
    """The rules of DeepSpeed's scalers: without ZeRO there is no hysteresis."""

    def __init__(self, stage: int, scale: float, window: int, hysteresis: int) -> None:
        self.scale, self.window, self.refill = scale, window, hysteresis
        self.left = 1 if stage == 0 else hysteresis
        self.stage, self.iteration, self.last = stage, 0, -1

    def step(self, overflow: bool) -> float:
        if overflow:
            self.scale, self.left = (
                (max(self.scale / 2, 1.0), 1) if self.left == 1 else (self.scale, self.left - 1)
            )
            self.last = self.iteration
        else:
            stable = self.iteration - self.last - 1
            if stable > 0 and stable % self.window == 0:
                self.scale *= 2
                self.left = 1 if self.stage == 0 else self.refill
        self.iteration += 1
        return self.scale


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_scale_moves_as_deepspeeds_does(stage: int, seed: int) -> None:
    fp16 = {
        "enabled": True, "initial_scale_power": 9, "loss_scale_window": 2, "hysteresis": 3
    }  # fmt: skip
    engine, optimizer = engine_of(fp16=fp16, zero_optimization={"stage": stage})
    held = optimizer.loss_scaler  # scripts hold it, and read it later
    model, skipped = Scaler(stage, held.cur_scale, held.scale_window, 3), 0
    chance = random.Random(seed)
    for step in range(24):
        overflow = chance.random() < 0.3
        backward(engine, math.inf if overflow else 1e-3)
        engine.step()
        skipped += overflow
        assert held.cur_scale == model.step(overflow), step
        assert (held.cur_iter, held.cur_hysteresis) == (step + 1, model.left)
        assert engine.skipped_steps == skipped
    assert optimizer.loss_scale_config.min_loss_scale == held.min_scale == 1.0


def _optimizer(kind: str, of: nn.Module) -> torch.optim.Optimizer:
    if kind in ("AdamW", "Adam"):
        return getattr(torch.optim, kind)(of.parameters(), 0.5, weight_decay=0.1)
    options = {"momentum": 0.7, "nesterov": kind == "nesterov", "weight_decay": 0.1}
    return torch.optim.SGD(of.parameters(), 0.5, **options)


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "nesterov"])
@pytest.mark.parametrize("schedule", ["OneCycle", "OneCycleLR", "CyclicLR"])
def test_momentum_cycles_as_with_torchs_optimizer(kind: str, schedule: str, tmp_path: Path) -> None:
    params: dict[str, Any] = {
        # of this one DeepSpeed cycles the momentum of optimizers with betas alone
        "OneCycle": {"cycle_min_lr": 0.02, "cycle_max_lr": 0.1, "cycle_first_step_size": 4},
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 12},
        "CyclicLR": {"base_lr": 0.02, "max_lr": 0.1, "step_size_up": 2},
    }[schedule]
    plain = nn.Linear(3, 1)
    module = copy.deepcopy(plain)
    opt = _optimizer(kind, plain)
    theirs = scheduler_of(Section(schedule, params), opt)
    engine = deepspeed.initialize(
        model=module,
        optimizer=_optimizer(kind, module),
        config={
            "train_batch_size": 2,
            "gradient_clipping": 0.0,
            "scheduler": {"type": schedule, "params": params},
        },
        dist_init_required=False,
    )[0]
    seen = set()
    for step in range(8):
        if step == 4:  # what it has reached is in a checkpoint
            engine.save_checkpoint(str(tmp_path))
            backward(engine)
            engine.step()
            engine.load_checkpoint(str(tmp_path))
        (group,) = opt.param_groups
        assert engine.get_mom() == [group.get("betas", group.get("momentum"))]
        seen.add(str(engine.get_mom()))
        backward(engine)
        engine.step()
        opt.zero_grad()
        plain(torch.ones(2, 3)).square().mean().backward()
        opt.step()
        theirs.step()
        for name, value in plain.named_parameters():
            torch.testing.assert_close(engine.inner.full_param(name), value.detach())
    assert (len(seen) > 2) == (schedule != "OneCycle" or "Adam" in kind)


def test_lions_first_beta_cycles_and_lambs_is_refused() -> None:
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0.0,
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 0.02, "cycle_max_lr": 0.1, "cycle_first_step_size": 4},
        },
    }
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    params = {name: x.detach().clone() for name, x in module.named_parameters()}
    lion = {"optimizer": {"type": "Lion", "params": {"lr": 0.5}}}
    engine = deepspeed.initialize(model=module, config=config | lion, dist_init_required=False)[0]
    state = fzero.optim.lion(0.1).init(params)
    for _ in range(6):
        ((b1, b2),), (lr,) = engine.get_mom(), engine.get_lr()
        gradients = torch.func.grad(
            lambda p: (
                torch.func.functional_call(nn.Linear(3, 1), p, (torch.ones(2, 3),)).square().mean()
            )
        )(params)
        updates, state = fzero.optim.lion(lr, b1, b2).update(gradients, state, params)
        params = {name: x + updates[name] for name, x in params.items()}
        backward(engine)
        engine.step()
        for name, value in params.items():
            torch.testing.assert_close(engine.inner.full_param(name), value)
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 0.5}}}
    engine = deepspeed.initialize(
        model=nn.Linear(3, 1), config=config | lamb, dist_init_required=False
    )[0]
    backward(engine)
    engine.step()
    backward(engine)
    with pytest.raises(ConfigError, match="betas"):
        engine.step()


def test_torchs_schedulers_and_writes_to_groups_set_the_rate() -> None:
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias]}], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step))
    engine, face, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=opt,
        lr_scheduler=schedule,
        config={"train_batch_size": 2, "gradient_clipping": 0.0},
        dist_init_required=False,
    )
    assert scheduler is schedule
    for step in range(3):
        if step == 2:
            face.param_groups[1]["lr"] = 0.125
        rates = engine.get_lr()
        assert rates == [1.0 / (1 + step), 0.125 if step == 2 else 0.5 / (1 + step)]
        backward(engine)
        grads = [engine.inner.full_grad(name) for name in ("weight", "bias")]
        before = [engine.inner.full_param(name) for name in ("weight", "bias")]
        engine.step()
        for name, rate, grad, old in zip(("weight", "bias"), rates, grads, before, strict=True):
            assert grad is not None
            torch.testing.assert_close(engine.inner.full_param(name), old - rate * grad)


def test_what_is_in_no_group_stays() -> None:
    model = nn.Linear(3, 1)
    bias = model.bias.detach().clone()
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "train_batch_size": 2}
    engine = deepspeed.initialize(
        model=model, model_parameters=[model.weight], config=config, dist_init_required=False
    )[0]
    backward(engine)
    engine.step()
    assert torch.equal(engine.inner.full_param("bias"), bias)


class Rotary(nn.Module):
    """Angles that 16 bits can't tell apart, as rotary embeddings have them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("angles", 1000.0 + torch.arange(4.0) / 8, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear((x * self.angles.sin()).to(self.linear.weight.dtype)))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_stay_as_precise_as_they_are(kind: str, stage: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Rotary(), torch.randn(2, 4)
    low = torch.bfloat16 if kind == "bf16" else torch.float16
    plain = copy.deepcopy(model)
    plain.linear.to(low)
    config = {
        "train_batch_size": 2,
        kind: {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
    assert torch.equal(engine(x).float(), plain(x).float())
    assert torch.equal(engine.module.angles, plain.angles)
    engine.save_16bit_model(str(tmp_path))
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    theirs = plain.state_dict()
    assert {k: v.dtype for k, v in saved.items()} == {k: v.dtype for k, v in theirs.items()}
    assert all(torch.equal(saved[key], theirs[key]) for key in theirs)


def test_inputs_are_cast_where_the_configuration_says_so() -> None:
    seen = []

    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, mask.dtype))
            return super().forward((x * mask).to(self.weight.dtype))

    x = torch.full((2, 3), 1.001)
    for auto_cast, dtype in ((False, torch.float32), (True, torch.float16)):
        config = {"train_batch_size": 2, "fp16": {"enabled": True, "auto_cast": auto_cast}}
        model = Reads(3, 1)
        engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
        engine(x, mask=x)
        assert seen.pop() == (dtype, dtype)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("around", ["forward", "all"])
def test_autocast_around_the_call_gives_way_to_the_configurations(stage: int, around: str) -> None:
    losses = []
    for outer in (contextlib.nullcontext, lambda: torch.autocast("cpu", torch.float16)):
        engine, _ = engine_of(
            zero_optimization={"stage": stage},
            torch_autocast={"enabled": True, "dtype": "bfloat16"},
        )
        for step in range(3):
            torch.manual_seed(step)
            with outer():
                out = engine(torch.randn(2, 3))
                if around == "all":
                    loss = out.float().square().mean()
                    engine.backward(loss)
                    engine.step()
            assert out.dtype == torch.bfloat16
            if around == "forward":
                loss = out.float().square().mean()
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


def test_autocast_around_the_call_is_off_on_a_gpu_where_the_configuration_has_none() -> None:
    engine, _ = engine_of()
    engine.device = torch.device("cuda")  # there is none, and it is asked nothing but this
    with (
        mock.patch.object(torch, "is_autocast_enabled", lambda kind: kind == "cuda"),
        mock.patch.object(torch, "autocast") as autocast,
        pytest.warns(UserWarning, match="torch_autocast"),
    ):
        engine._autocast()
    autocast.assert_called_once_with("cuda", enabled=False)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = nn.Linear(3, 1)
    mine, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for optimizer in (None, mine, fzero.optim.sgd(0.1)):  # None: the configuration's
        scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
        with pytest.raises(ConfigError, match="another optimizer than"):
            deepspeed.initialize(
                model=model,
                config=config,
                optimizer=optimizer,
                lr_scheduler=scheduler,
                dist_init_required=False,
            )


def test_a_model_has_one_engine_until_that_gives_it_back() -> None:
    engine, _ = engine_of(zero_optimization={"stage": 3})
    model = engine.module
    given = {"model": model, "config": {"train_batch_size": 2}, "dist_init_required": False}
    with pytest.raises(ConfigError, match=r"engine\.destroy"):
        deepspeed.initialize(**given)
    engine.destroy()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    again = deepspeed.initialize(**given, optimizer=opt)[0]
    backward(again)
    again.step()
    assert again.global_steps == 1


def _goes_on_from_the_optimizers_state(stage: int, kind: str) -> None:
    low = {kind: {"enabled": True, "initial_scale_power": 4}} if kind == "fp16" else {}
    adam = {"type": "AdamW", "params": {"lr": 0.1}}
    zero = {"stage": stage}
    engine, optimizer = engine_of(optimizer=adam, zero_optimization=zero, **low)
    optimizer.param_groups[0]["lr"] = 0.2
    for _ in range(3):
        backward(engine)
        engine.step()
    saved = optimizer.state_dict(), engine.inner.state_dict()
    again, fresh = engine_of(optimizer=adam, zero_optimization=zero, **low)
    again.inner.load_state_dict(saved[1])
    fresh.load_state_dict(copy.deepcopy(saved[0]))
    for _ in range(2):
        for each in (engine, again):
            backward(each)
            each.step()
        for name, x in engine.inner.state_dict().items():
            assert torch.equal(x, again.inner.state_dict()[name])
        assert again.get_lr() == [0.2]
        assert again.loss_scale() == engine.loss_scale()
    for wrong in ({}, {**saved[0]["state"], "more": torch.ones(1)}):
        with pytest.raises(CheckpointError, match="save_checkpoint"):
            fresh.load_state_dict({**saved[0], "state": wrong})
    engine.destroy()
    again.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_an_optimizers_state_dict_has_its_state(stage: int, kind: str) -> None:
    run_ranks(2, _goes_on_from_the_optimizers_state, stage, kind)


def test_an_optimizer_of_fzero_is_taken_as_it_is() -> None:
    engine, optimizer, _, _ = deepspeed.initialize(
        model=nn.Linear(3, 1),
        optimizer=fzero.optim.muon(0.1),
        config={"train_batch_size": 2},
        dist_init_required=False,
    )
    backward(engine)
    engine.step()
    assert engine.get_lr() == [0.1] == [group["lr"] for group in optimizer.param_groups]


def test_without_an_optimizer_there_are_gradients_and_no_step() -> None:
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=nn.Linear(3, 1), config={"train_batch_size": 2}, dist_init_required=False
    )
    assert (optimizer, loader, scheduler) == (None, None, None)
    backward(engine)
    with pytest.raises(BackwardError, match=r"initialize got none.*initialize\(optimizer=...\)"):
        engine.step()


def test_the_engine_is_a_module_and_shows_its_own() -> None:
    engine, _ = engine_of()
    assert isinstance(engine, nn.Module)
    assert [name for name, _ in engine.named_parameters()] == ["module.weight", "module.bias"]
    assert engine.in_features == 3  # of the model
    assert engine.eval().module.training is False
    assert engine.train().module.training is True


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": None}, "model=NoneType"),
        ({"mpu": object()}, "mpu"),
        ({"config": None}, "needs a configuration"),
        ({"args": argparse.Namespace(deepspeed_config="a.json")}, "two configurations"),
        ({"config": "/nowhere/ds.json"}, "/nowhere/ds.json"),
        ({"optimizer": 3}, "optimizer=int"),
        ({"config": {"zero_optimization": {"offload_param": {"device": "cpu"}}}}, "offload_param"),
        ({"config": {"pipeline": {"stages": 2}}}, "pipeline"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    full = {"model": nn.Linear(3, 1), "config": {"train_batch_size": 2}, **given}
    with pytest.raises(ConfigError, match=message):
        deepspeed.initialize(**full, dist_init_required=False)


def test_methods_without_a_counterpart_say_so() -> None:
    engine, _ = engine_of()
    with pytest.raises(FzeroError, match="train_batch"):
        engine.train_batch()
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = engine.no_such_name
