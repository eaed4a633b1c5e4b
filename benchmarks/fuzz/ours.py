"""The same program by a step function (traced or eager) or by the Engine."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from benchmarks.fuzz import changes
from benchmarks.fuzz.pieces import batch, build
from benchmarks.fuzz.plain import EPS, Snapshot
from benchmarks.fuzz.sources import SOURCES
from benchmarks.fuzz.values import VALUES, number
from fzero import optim

PRECISIONS: dict[str, tuple[torch.dtype, Any]] = {
    "float64": (torch.float64, None),
    "float32": (
        torch.float64,
        fzero.Precision(param=torch.float32, reduce=torch.float64, master=torch.float64),
    ),
    "bf16": (torch.float32, "bf16"),
}
# what rounding may change after some steps; what is written, or read anew, changes far more
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bf16": 0.1}


def config(program: dict[str, Any], frozen: list[str]) -> fzero.Config:
    """The program's Config."""
    return fzero.Config(
        stage=program["stage"],
        accum_steps=program["accum"],
        clip_norm=program["clip"],
        precision=PRECISIONS[program["precision"]][1],
        executor=program["way"] if program["way"] != "engine" else "traced",
        donate=program["donate"],
        offload="cpu" if program["offload"] else None,
        bucket_mb=program["bucket_mb"],
        frozen=frozen,
        timeout=60,
    )


def optimizer(program: dict[str, Any], lr: Any) -> optim.Optimizer:
    """fzero.optim's."""
    name = program["opt"]
    if name == "lion":
        return optim.lion(lr)
    if name == "adam":
        return optim.adam(lr, eps=EPS)
    if name == "adamw":
        return optim.adamw(lr, eps=EPS, weight_decay=0.1)
    if name == "masked":
        decay = optim.masked(
            optim.add_decayed_weights(0.1),
            lambda params: {k: p.ndim >= 2 for k, p in params.items()},
        )
        return optim.chain(decay, optim.sgd(lr))
    return optim.sgd(lr, momentum=0.9 if name == "momentum" else 0.0)


class Ours:
    """What both have in common: the module, the rate, copies that must not change."""

    def __init__(self, program: dict[str, Any], rank: int) -> None:
        self.program, self.rank = program, rank
        self.dtype = PRECISIONS[program["precision"]][0]
        self.net = build(program, self.dtype)
        self.kept: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        self.lr: Any = 0.1
        if spec := program["lr"]:
            read, self.write_lr = SOURCES[spec["source"]](nn.Module(), VALUES[spec["value"]]())
            as_tensor = program["seed"] % 2

            def lr(step: Tensor) -> Any:
                rate = number(read())
                return torch.tensor(rate, dtype=torch.float64) if as_tensor else rate

            self.lr = lr
        self.frozen = [k for k, p in self.net.named_parameters() if not p.requires_grad]
        self.path = tempfile.TemporaryDirectory()
        self.saves = 0

    def full(self) -> dict[str, Tensor]:
        """Whole parameters."""
        raise NotImplementedError

    def write(self, new: dict[str, Tensor], how: str) -> None:
        """Write parameters in one of the ways of `changes.WRITES`."""
        raise NotImplementedError

    def evaluate(self, step: int) -> Tensor:
        """The loss of a batch in evaluation mode."""
        raise NotImplementedError

    def round_trip(self) -> None:
        """Save and load everything."""
        raise NotImplementedError

    def drop_a_backward(self, step: int) -> None:
        """A backward whose gradients are thrown away."""

    def folder(self) -> str:
        """A new folder that all ranks know."""
        self.saves += 1
        names = [self.path.name]
        if dist.is_initialized():
            dist.broadcast_object_list(names)
        return f"{names[0]}/{self.saves}"

    def change(self, change: dict[str, Any], step: int) -> Tensor | None:
        """Carry a change out; what it measured, if it measures."""
        do = change["do"]
        if do in changes.MODULE:
            changes.to_module(self.net, change)
        elif do in changes.WRITES:
            full = {k: v.clone() for k, v in self.full().items()}
            names = changes.selected(list(full), change)
            how = "in place" if do == "set one" else do
            self.write({k: changes.written(full[k], change) for k in names}, how)
        elif do == "lr" and self.program["lr"]:
            self.write_lr(VALUES[change["value"]]())
        elif do == "evaluate":
            return self.evaluate(step)
        elif do == "save and load":
            self.round_trip()
        elif do == "drop a backward":
            self.drop_a_backward(step)
        elif do in ("keep a copy", "read"):
            full = self.full()
            if do == "keep a copy":
                self.kept.append((full, {k: v.clone() for k, v in full.items()}))
        return None

    def check_kept(self) -> None:
        """Copies that were kept are as they were."""
        for full, copied in self.kept:
            for k, v in full.items():
                if not torch.equal(v, copied[k]):
                    raise AssertionError(f"the copy of {k} changed")

    def placed(self, full: dict[str, Tensor], like: Any, cfg: fzero.Config) -> Any:
        """Full parameters as `like` has them: that dtype, and shards at stage 3."""
        full = {k: v.to(like[k].dtype) for k, v in full.items()}
        return fzero.shard(full, cfg) if cfg.stage == 3 else full

    def modes(self) -> dict[nn.Module, bool]:
        """Training flags."""
        return {m: m.training for m in self.net.modules()}

    def back(self, modes: dict[nn.Module, bool]) -> None:
        """Training flags as they were."""
        for module, mode in modes.items():
            module.training = mode


class Functional(Ours):
    """A step function and what it carries."""

    def __init__(self, program: dict[str, Any], rank: int) -> None:
        super().__init__(program, rank)
        self.buffers: dict[str, Tensor] | None = None
        if program["buffers"] and any(True for _ in self.net.buffers()):
            self.apply, params, self.buffers = fzero.functionalize(self.net, buffers=True)
        else:
            self.apply, params = fzero.functionalize(self.net)
        self.cfg = config(program, self.frozen)

        def with_state(params: Any, state: Any, batch: Any) -> Any:
            return self.apply(params, state, *batch)

        def without(params: Any, batch: Any) -> Any:
            return self.apply(params, *batch)

        fn = without if self.buffers is None else with_state
        self.step_fn = fzero.make_train_step(fn, optimizer(program, self.lr), self.cfg)
        params = {k: v.detach().clone() for k, v in params.items()}
        self.params, self.state = self.step_fn.init(params, self.buffers)

    def change(self, change: dict[str, Any], step: int) -> Tensor | None:
        if change["do"] != "buffer" or self.buffers is None:
            return super().change(change, step)
        for name, value in self.state.model_state.items():  # these count, not the module's own
            if name.endswith(".average"):
                value.mul_(0.5).add_(1)
        return None

    def full(self) -> dict[str, Tensor]:
        return fzero.unshard(self.params)

    def write(self, new: dict[str, Tensor], how: str) -> None:
        params = dict(self.params)
        shards = self.placed(dict(self.full()) | new, params, self.cfg)
        if how == "checkpoint":
            path = self.folder()
            fzero.checkpoint.save(path, shards)
            self.params, _ = fzero.checkpoint.load(path, self.params)
        elif how in ("assign", "load_state_dict"):
            self.params = params | {k: shards[k] for k in new}
        else:
            for k in new:
                with torch.no_grad():
                    (params[k].data if how == "data" else params[k]).copy_(shards[k])

    def evaluate(self, step: int) -> Tensor:
        modes = self.modes()
        self.net.eval()
        full, low = self.full(), self.cfg.dtypes.param or self.dtype
        # at stage 3 only frozen ones are kept in the low dtype
        full = {k: v.to(low) for k, v in full.items()}
        data = batch(self.program, step, 7, self.rank, low)
        with torch.no_grad():
            if self.buffers is None:
                loss = self.apply(full, *data)
            else:
                loss = self.apply(full, self.state.model_state, *data)[0]
        self.back(modes)
        return loss

    def round_trip(self) -> None:
        path = self.folder()
        fzero.checkpoint.save(path, self.params, self.state)
        fresh = self.step_fn.init(
            {k: torch.zeros_like(v) for k, v in self.full().items()}, self.buffers
        )
        self.params, self.state = fzero.checkpoint.load(path, *fresh)

    def step(self, step: int) -> Snapshot:
        parts = [
            batch(self.program, step, m, self.rank, self.dtype)
            for m in range(self.program["accum"])
        ]
        data = tuple(torch.cat(each) for each in zip(*parts, strict=True))
        self.params, self.state = self.step_fn(self.params, self.state, data)
        out = {k: v.clone() for k, v in self.full().items()}
        if self.buffers is not None:
            out |= {k: v.clone() for k, v in self.state.model_state.items()}
        return out | {"loss": self.state.metrics["loss"].clone()}


class Engine(Ours):
    """An Engine around the module."""

    def __init__(self, program: dict[str, Any], rank: int) -> None:
        super().__init__(program, rank)
        frozen = self.frozen if program["seed"] % 3 == 0 else []
        cfg = config(program, frozen)
        self.engine = fzero.Engine(self.net, optimizer(program, self.lr), cfg)
        self.call = self.net if program["direct"] else self.engine

    def full(self) -> dict[str, Tensor]:
        return self.engine.full_params()

    def write(self, new: dict[str, Tensor], how: str) -> None:
        params = dict(self.net.named_parameters())
        if how == "load_state_dict":
            self.net.load_state_dict(new, strict=False)
        elif how == "checkpoint":
            path, (own, state) = self.folder(), self.engine.state
            shards = self.placed(dict(self.full()) | new, own, self.engine.cfg)
            fzero.checkpoint.save(path, shards)
            self.engine.state = fzero.checkpoint.load(path, own)[0], state
        elif how == "assign":
            own, state = self.engine.state
            shards = self.placed(dict(self.full()) | new, own, self.engine.cfg)
            self.engine.state = {**own, **{k: shards[k] for k in new}}, state
        else:
            for k in new:
                with torch.no_grad():
                    (params[k].data if how == "data" else params[k]).copy_(new[k])

    def evaluate(self, step: int) -> Tensor:
        modes = self.modes()
        self.net.eval()
        with torch.no_grad():
            loss = self.call(*batch(self.program, step, 7, self.rank, self.dtype))
        self.back(modes)
        return loss

    def drop_a_backward(self, step: int) -> None:
        modes = self.modes()
        self.net.eval()
        loss = self.call(*batch(self.program, step, 6, self.rank, self.dtype))
        loss.backward()
        self.engine.zero_grad()
        self.back(modes)

    def round_trip(self) -> None:
        path = self.folder()
        fzero.checkpoint.save(path, *self.engine.state)
        self.engine.state = fzero.checkpoint.load(path, *self.engine.state)

    def step(self, step: int) -> Snapshot:
        losses = []
        for micro in range(self.program["accum"]):
            loss = self.call(*batch(self.program, step, micro, self.rank, self.dtype))
            loss.backward()
            losses.append(loss.detach().to(torch.float64))
            if self.program["seed"] % 2:
                self.engine.step()
        if not self.program["seed"] % 2:
            self.engine.step()
        out = {k: v.clone() for k, v in self.full().items()}
        out |= {k: v.detach().clone() for k, v in self.net.named_buffers()}
        mean = torch.stack(losses).mean()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return out | {"loss": mean}


def make(program: dict[str, Any], rank: int) -> Any:
    """The trainer that the program names."""
    return (Engine if program["way"] == "engine" else Functional)(program, rank)
