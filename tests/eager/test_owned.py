"""Gradients are found, dropped and hooked where PyTorch's users look for them, or refused."""

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import fzero
from fzero import BackwardError, ShardError
from tests.engine.parity import LR, SGD, build, data, here
from tests.ranks import fake_ranks, run_ranks

# stage 3 on one rank has lazy parameters with a compute dtype only
KINDS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "accum_steps": 2},
    "stage 3, lazy": {"stage": 3, "precision": "bf16"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


# --- the law: programs of hooks, ways to call and ways to drop, against plain torch ---

HOOKS: list[Callable[[Tensor], Tensor | None]] = [
    lambda grad: grad * 0,
    lambda grad: grad.clamp(-0.05, 0.05),
    lambda grad: grad + 1,
    lambda grad: None,
]
OPERATIONS = ["call", "direct", "backward", "step", "hook", "unhook", "zero", "part", "look"]
Program = Sequence[tuple[str, int]]


class Both:
    """An engine, and for each rank a plain module that does the same."""

    def __init__(self, before: Sequence[int], **fields: Any) -> None:
        self.rank, self.world = here()
        self.cfg = fzero.Config(**fields)
        module = build(make)
        self.plain = [build(make) for _ in range(self.world)]
        self.nets = [module, *self.plain]
        self.old = list(module.parameters())  # as somebody else may hold them
        self.handles: list[list[Any]] = []
        for i in before:
            self.hook(i, former=False)
        self.engine = fzero.Engine(module, SGD(), self.cfg)
        self.micro = self.calls = 0
        self.moved = False

    def run(self, program: Program) -> None:
        for operation, number in program:
            getattr(self, operation)(number)
            self.compare()

    def _losses(self, call: Any) -> list[Tensor]:
        self.calls += 1
        ours = call(data(self.rank, self.calls)).square().mean()
        plain = [net(data(r, self.calls)).square().mean() for r, net in enumerate(self.plain)]
        self.micro += 1
        self.moved = True
        return [ours, *plain]

    def call(self, _: int) -> None:
        for loss in self._losses(self.engine):
            loss.backward()

    def direct(self, _: int) -> None:
        for loss in self._losses(self.engine.module):
            loss.backward()

    def backward(self, _: int) -> None:
        ours, *plain = self._losses(self.engine)
        self.engine.backward(ours)
        for loss in plain:
            loss.backward()

    def hook(self, number: int, former: bool = True) -> None:
        place = number % 4
        ours = self.old if former and number % 2 else list(self.nets[0].parameters())
        params = [ours[place], *[list(net.parameters())[place] for net in self.plain]]
        self.handles.append([p.register_hook(HOOKS[number % 3]) for p in params])

    def unhook(self, number: int) -> None:
        if self.handles:
            for handle in self.handles.pop(number % len(self.handles)):
                handle.remove()

    def zero(self, number: int) -> None:
        for net in self.nets:
            net.zero_grad(set_to_none=number % 2 == 0)
        for net in self.plain:  # an engine has none then
            net.zero_grad()
        self.micro, self.moved = 0, False

    def part(self, number: int) -> None:
        for net in self.nets:
            if number % 2:
                net.get_submodule("0").zero_grad()
            else:
                for p in net.get_submodule("2").parameters():
                    p.grad = None
        if all(p.grad is None for p in self.plain[0].parameters()):
            self.micro, self.moved = 0, False

    def look(self, _: int) -> None:
        params = list(self.nets[0].parameters())
        for ours, plain in zip(params, self.plain[0].parameters(), strict=True):
            assert (ours.grad is None) == (plain.grad is None)
        if any(p.grad is not None for p in params):
            with pytest.raises(BackwardError, match="full_grad"):
                clip_grad_norm_(params, 1.0)

    def step(self, _: int) -> None:
        if not self.moved:
            with pytest.raises(BackwardError, match="no backward"):
                self.engine.step()
            return
        self.engine.step()
        self.moved = False
        if self.cfg.accum_steps > 1 and self.micro < self.cfg.accum_steps:
            return
        with torch.no_grad():
            for net in self.plain[1:] + self.plain[:1]:
                for name, p in net.named_parameters():
                    if (grad := self._wanted()[name]) is not None and net is self.plain[0]:
                        p -= LR * grad
        for net in self.plain:
            net.load_state_dict(self.plain[0].state_dict())
            net.zero_grad()
        self.micro = 0

    def _wanted(self) -> dict[str, Tensor | None]:
        share = self.world * self.cfg.accum_steps
        total: dict[str, Tensor | None] = {}
        for name, _ in self.plain[0].named_parameters():
            grads = [net.get_parameter(name).grad for net in self.plain]
            there = [grad for grad in grads if grad is not None]
            total[name] = torch.stack(there).sum(0) / share if there else None
        return total

    def compare(self) -> None:
        for name, want in self._wanted().items():
            got = self.engine.full_grad(name)
            assert (got is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        for name, value in self.engine.full_params().items():
            want = self.plain[0].get_parameter(name).detach()
            torch.testing.assert_close(value, want, rtol=0, atol=1e-12)


def run(before: Sequence[int], program: Program, fields: dict[str, Any]) -> None:
    Both(before, **fields).run(program)


number = st.integers(0, 11)
programs = st.lists(st.tuples(st.sampled_from(OPERATIONS), number), min_size=6, max_size=16)
hooks = st.lists(number, max_size=2)
configs = st.fixed_dictionaries({"stage": st.integers(0, 3), "accum_steps": st.integers(1, 2)})
relaxed = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@relaxed
@given(hooks, programs, configs)
def test_any_program_with_hooks_is_plain_torch_s(
    before: list[int], program: Program, fields: dict[str, Any]
) -> None:
    run(before, program, fields)


@settings(relaxed, max_examples=20)
@given(hooks, programs, configs)
def test_any_program_with_hooks_on_two_ranks(
    before: list[int], program: Program, fields: dict[str, Any]
) -> None:
    run_ranks(2, run, before, program, fields)


# --- what is refused, by name ---


def trained(kind: str) -> tuple[nn.Module, fzero.Engine, Any]:
    """A module, its engine with a gradient, and an optimizer that was made before."""
    torch.manual_seed(0)
    module = make()
    earlier = torch.optim.SGD(module.parameters(), 0.1)
    engine = fzero.Engine(module, fzero.optim.sgd(0.1), fzero.Config(**KINDS[kind]))
    engine(torch.ones(3, 6)).square().mean().backward()
    return module, engine, earlier


GRADIENT_USES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "clip_grad_norm_": lambda m, _: clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_value_": lambda m, _: clip_grad_value_(m.parameters(), 1.0),
    "SGD made before": lambda m, earlier: earlier.step(),
    "SGD with momentum": lambda m, _: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9).step(),
    "AdamW": lambda m, _: torch.optim.AdamW(m.parameters()).step(),
    "AdamW, foreach": lambda m, _: torch.optim.AdamW(m.parameters(), foreach=True).step(),
    "assignment": lambda m, _: setattr(m[0].weight, "grad", torch.ones(5, 6)),  # pyright: ignore
    "reading": lambda m, _: m[0].weight.grad.norm(),  # pyright: ignore
    "in place": lambda m, _: m[0].weight.grad.mul_(2),  # pyright: ignore
    "accumulate hook": lambda m, _: m[0].weight.register_post_accumulate_grad_hook(print),  # pyright: ignore
    "deepcopy of it": lambda m, _: copy.deepcopy(m[0].weight.grad),  # pyright: ignore
}


@every_kind
@pytest.mark.parametrize("use", GRADIENT_USES)
def test_what_would_use_a_gradient_is_told_where_it_is(kind: str, use: str) -> None:
    module, engine, earlier = trained(kind)
    params, grad = engine.full_params(), engine.full_grad("0.weight")
    with pytest.raises(fzero.FzeroError, match=r"'0\.weight'.*engine"):
        GRADIENT_USES[use](module, earlier)
    after = engine.full_grad("0.weight")
    assert grad is not None
    assert after is not None
    assert torch.equal(grad, after)
    assert all(torch.equal(x, params[name]) for name, x in engine.full_params().items())


@every_kind
def test_an_engine_is_not_copied(kind: str) -> None:
    _, engine, _ = trained(kind)
    for way in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(fzero.FzeroError, match=r"engine was to be copied.*fzero\.checkpoint"):
            way(engine)


@pytest.mark.parametrize("kind", ["stage 0", "stage 2"])
def test_a_copy_of_the_module_is_plain_and_tells_the_engine_nothing(kind: str) -> None:
    module, engine, _ = trained(kind)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        before = engine.is_gradient_accumulation_boundary(), engine.full_grad("0.weight")
        other(torch.ones(3, 6)).sum().backward()
        assert {type(p) for p in other.parameters()} == {nn.Parameter}
        assert all(
            isinstance(p.grad, Tensor) and p.grad.isfinite().all() for p in other.parameters()
        )
        assert engine.is_gradient_accumulation_boundary() == before[0]
        assert torch.equal(engine.full_grad("0.weight"), before[1])  # pyright: ignore


@every_kind
def test_what_is_frozen_between_steps_stays(kind: str) -> None:
    module, engine, _ = trained(kind)
    for flags in ((False, True), (True, False)):
        engine.zero_grad()
        for layer, flag in zip((module[0], module[2]), flags, strict=True):  # pyright: ignore
            layer.requires_grad_(flag)
        before = engine.full_params()
        for _ in range(engine.cfg.accum_steps):
            engine(torch.ones(3, 6)).sum().backward()
            engine.step()
        after = engine.full_params()
        for at, flag in zip((0, 2), flags, strict=True):
            assert torch.equal(after[f"{at}.weight"], before[f"{at}.weight"]) != flag


def test_an_accumulate_hook_from_before_is_refused_by_name() -> None:
    for stage in range(4):
        module = make()
        handle = module[2].bias.register_post_accumulate_grad_hook(print)  # pyright: ignore
        with pytest.raises(ShardError, match=r"'2\.bias'.*register_post_accumulate_grad_hook"):
            fzero.Engine(module, SGD(), fzero.Config(stage=stage))
        handle.remove()
        fzero.Engine(module, SGD(), fzero.Config(stage=stage))


class Doubled(Tensor):
    pass


class OwnKind(nn.Parameter):
    pass


@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_of_another_class_is_refused_by_name(stage: int) -> None:
    values = torch.ones(2, 2)
    for strange in (nn.Parameter(values.as_subclass(Doubled)), OwnKind(values)):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[1].weight = strange
        for use in (
            fzero.functionalize,
            lambda m: fzero.Engine(m, SGD(), fzero.Config(stage=stage)),
        ):
            with pytest.raises(ShardError, match=rf"'1\.weight' is a .*{type(strange).__name__}"):
                use(module)


def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    module = parallelize_module(make(), init_device_mesh("cpu", (2,)), {"2": ColwiseParallel()})
    for stage in range(4):
        with pytest.raises(ShardError, match=r"'2\.weight' is a DTensor"):
            fzero.Engine(module, SGD(), fzero.Config(stage=stage))
    with pytest.raises(ShardError, match=r"'2\.weight' is a DTensor"):
        fzero.functionalize(module)


def test_a_tensor_parallel_parameter_is_refused_by_name() -> None:
    run_ranks(2, tensor_parallel)


# --- what counts ---


@every_kind
def test_notes_on_parameters_stay(kind: str) -> None:
    module = make()
    module[0].weight.no_decay = True  # pyright: ignore
    old = module[0].weight
    fzero.Engine(module, SGD(), fzero.Config(**KINDS[kind]))
    assert module[0].weight.no_decay  # pyright: ignore
    assert torch.equal(old.sum(), module[0].weight.sum())  # pyright: ignore


def test_a_backward_that_reaches_no_forward_is_no_micro_batch() -> None:
    module = make()
    engine = fzero.Engine(module, SGD(), fzero.Config(accum_steps=2))
    module[0](torch.ones(3, 6)).sum().backward()  # pyright: ignore
    with pytest.raises(BackwardError, match=r"no micro-batch.*the whole module"):
        engine.step()
    for _ in range(2):
        module(torch.ones(3, 6)).sum().backward()
        engine.step()
    assert int(engine.state[1].step) == 1


@every_kind
def test_a_loss_that_has_nothing_of_the_engine_s_is_refused(kind: str) -> None:
    _, engine, _ = trained(kind)
    engine.zero_grad()
    leaf = torch.tensor(1000.0, requires_grad=True)
    for wrong in (leaf, leaf * 2, make()(torch.ones(3, 6)).mean()):
        with pytest.raises(BackwardError, match=r"leaf|came to no parameter"):
            engine.backward(wrong)
        with pytest.raises(BackwardError, match="no backward"):
            engine.step()
    for _ in range(engine.cfg.accum_steps):
        loss = engine(torch.ones(3, 6)).square().mean()
        engine.backward(loss)
    engine.step()
    torch.testing.assert_close(engine.state[1].metrics["loss"], loss.detach().float())


class Reads(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        # not symmetric, and exact in bfloat16
        self.weight, self.how = nn.Parameter(torch.arange(16.0).view(4, 4)), how

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.how(self.weight)


@pytest.mark.parametrize(
    "how",
    [
        lambda w: w.t().t(),
        lambda w: torch.cat(w.split(2)),
        lambda w: torch.stack([w[i] for i in range(4)]),
        lambda w: w.view(16).view(4, 4),
        lambda w: torch.stack(w.unbind()),
        lambda w: w.T.mT,
        lambda w: w.expand(2, 4, 4)[1],
        lambda w: w.diagonal().diag_embed(),
        # these may copy, and arrive whole under inference_mode
        lambda w: w.t().contiguous(),
        lambda w: w.t().reshape(16).reshape(4, 4),
        lambda w: w.mT.flatten().view(4, 4),
        lambda w: w + w.data.t().contiguous(),
        lambda w: w[:, ::2].contiguous().repeat(1, 2),
        lambda w: w.view(1, 2, 2, 4).to(memory_format=torch.channels_last).flatten(0, 2),
        lambda w: torch.broadcast_to(w, (2, 4, 4)).reshape(8, 4)[2:6],
        lambda w: w.float().exp().bfloat16(),
    ],
)
def test_views_of_lazy_parameters_are_read_under_inference_mode(how: Any) -> None:
    cfg = fzero.Config(stage=3, precision="bf16")
    module = Reads(how)
    engine, x = fzero.Engine(module, SGD(), cfg), torch.ones(2, 4)
    with torch.no_grad():
        want = engine(x)
    for call in (engine, lambda x: module(x.bfloat16())):
        with torch.inference_mode():
            assert torch.equal(call(x), want)
        call(x).sum().backward()  # what inference has gathered may be read again
        engine.zero_grad()
    with torch.inference_mode(), pytest.raises(fzero.FzeroError, match="change the parameter"):
        module.weight.view(16).mul_(2)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 1 + 2**-10))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,i->b", x, self.weight)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_autocast_sees_what_operators_on_lazy_parameters_are_made_of(mode: Any) -> None:
    """Below it they arrive whole, and would compute in float32."""
    module, x = Product(), torch.ones(2, 4)
    with mode(), torch.autocast("cpu", torch.bfloat16):
        want = module(x)
    with fake_ranks(2):
        engine = fzero.Engine(module, SGD(), fzero.Config(stage=3))
        with mode(), torch.autocast("cpu", torch.bfloat16):
            found = engine(x)
        with mode():
            plainly = engine(x)
    assert found.dtype == want.dtype == torch.bfloat16
    assert plainly.dtype == torch.float32


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_is_made_of_an_owned_one_as_of_a_plain_one(stage: int) -> None:
    engine = fzero.Engine(nn.Linear(2, 2), SGD(), fzero.Config(stage))
    weight = engine.module.get_parameter("weight")
    assert type(weight.detach()) is Tensor
    new = nn.Parameter(weight, requires_grad=False)
    assert isinstance(new, nn.Parameter)
    assert not new.requires_grad
    assert new.data_ptr() == weight.data_ptr()
    new.requires_grad_(True).sum().backward()
    assert torch.equal(new.grad, torch.ones(2, 2))  # its own: no engine has it  # pyright: ignore
    assert weight.grad is None
    nn.utils.parametrizations.weight_norm(engine.module)
    with pytest.raises(fzero.FzeroError, match=r"'parametrizations\.weight\.original0' has come"):
        engine(torch.ones(1, 2))


def test_a_compiled_function_takes_the_values_of_an_owned_parameter() -> None:
    engine = fzero.Engine(nn.Linear(2, 2), SGD(), fzero.Config(0))
    weight = engine.module.get_parameter("weight")
    double = torch.compile(lambda: weight.detach() * 2, backend="eager", fullgraph=True)
    assert torch.equal(double(), weight * 2)
