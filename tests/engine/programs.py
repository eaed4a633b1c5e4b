"""What users do with an engine between two updates, one function each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.engine import models
from tests.engine.models import Checkpointed, Experts, Net, Tiled
from tests.engine.parity import Program, data


@dataclass(frozen=True)
class Case:
    """A program, the module it runs on, and what it needs of the config.

    Args:
        gathered: modules that must travel together at stage 3 since only some ranks run them.
        accum: values of `accum_steps` at which the program is one update's work.
    """

    make: Callable[[], nn.Module]
    program: Program
    gathered: tuple[str, ...] = ()
    accum: tuple[int, ...] = (1,)
    fields: dict[str, Any] = field(default_factory=dict)

    def configs(self, stages: Iterable[int]) -> list[dict[str, Any]]:
        together = {"gather_together": self.gathered} if self.gathered else {}
        return [
            {
                "stage": stage,
                "accum_steps": accum,
                **(together if stage == 3 else {}),
                **self.fields,
            }
            for stage in stages
            for accum in self.accum
        ]


PROGRAMS: dict[str, Case] = {}


def case(make: Callable[[], nn.Module], *, name: str = "", **fields: Any) -> Any:
    """Enter a program in the table."""

    def enter(program: Program) -> Program:
        PROGRAMS[name or program.__name__] = Case(make, program, **fields)
        return program

    return enter


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


# --- parameters and modules ----------------------------------------------------------------------


@case(Net)
def one_backward(net: Any, rank: int) -> None:
    loss_of(net(data(rank))).backward()


@case(Net)
def parameters_outside_their_module(net: Any, rank: int) -> None:
    module = net.module
    penalty = module.outside.square().sum() + (module.inner.weight @ module.inner.bias).sum()
    (loss_of(net(data(rank))) + penalty).backward()


@case(Net)
def only_terms_that_bypass_the_engine(net: Any, rank: int) -> None:
    loss_of(net(data(rank))).backward()
    (net.module.outside.exp().sum() * (rank + 1)).backward()


@case(Net)
def called_often(net: Any, rank: int) -> None:
    loss_of(net(data(rank), times=6)).backward()


@case(Net)
def each_rank_calls_as_often_as_it_likes(net: Any, rank: int) -> None:
    loss_of(net(data(rank), times=1 + rank)).backward()


@case(Net, fields={"bucket_mb": 1e-5})
def leaves_larger_than_a_bucket(net: Any, rank: int) -> None:
    loss_of(net(data(rank))).backward()


@case(Net, fields={"frozen": ("inner.*",)})
def frozen_by_config(net: Any, rank: int) -> None:
    for p in net.module.inner.parameters():
        p.requires_grad_(False)  # in plain torch
    loss_of(net(data(rank))).backward()


@case(Net)
def not_every_row_needs_a_gradient(net: Any, rank: int) -> None:
    with torch.no_grad():
        net(data(rank, 1))
    x = net(data(rank)).detach()
    loss_of(net(torch.cat([x, x[:, :1]], 1))).backward()


@case(Experts, gathered=("experts.*",))
def some_ranks_run_some_modules(net: Any, rank: int) -> None:
    loss_of(net(data(rank), [rank % 3])).backward()


@case(Experts, gathered=("experts",))
def some_ranks_run_nothing_more(net: Any, rank: int) -> None:
    loss_of(net(data(rank), [2, 0] if rank == 0 else [])).backward()


@case(Experts, gathered=("experts",))
def experts_recomputed(net: Any, rank: int) -> None:
    loss_of(net(data(rank), [0] * (rank + 1) + [2], reentrant=True)).backward()
    loss_of(net(data(rank, 1), [0] * (2 - rank % 2), reentrant=True)).backward()


@case(Experts, gathered=("experts",), fields={"bucket_mb": 1e-5})
def one_rank_recomputes_more_than_the_last_time(net: Any, rank: int) -> None:
    loss_of(net(data(rank), [2, 1, 0], reentrant=True)).backward()
    loss_of(net(data(rank), [2] * (rank == 0) + [0, 1, 2], reentrant=True)).backward()


@case(Experts, gathered=("experts",))
def experts_recomputed_without_reentry(net: Any, rank: int) -> None:
    loss_of(net(data(rank), [0] * (rank + 1) + [2], reentrant=False)).backward()
    loss_of(net(data(rank, 1), [1], reentrant=False)).backward()


# --- ways to call backward -----------------------------------------------------------------------


@case(Net)
def a_gradient_for_backward(net: Any, rank: int) -> None:
    out = net(data(rank))
    out.backward(data(rank, 5, 3, 5))


@case(models.structured_tuple)
def outputs_in_a_tuple(net: Any, rank: int) -> None:
    loss, (h, [y]) = net(data(rank))
    (loss + h.sum() - y.exp().mean()).backward()


@case(models.structured_dict)
def outputs_in_a_dict(net: Any, rank: int) -> None:
    out = net(data(rank))
    torch.autograd.backward([out["loss"], out["rest"]["h"].sum()])


@case(models.structured_dataclass)
def outputs_in_a_dataclass(net: Any, rank: int) -> None:
    out = net(data(rank))
    torch.autograd.backward(
        [out.hidden["all"][0], out.hidden["h"]], [data(rank, 3, 3, 5), data(rank, 4, 3, 4)]
    )


@case(models.structured_tuple)
def one_output_of_several(net: Any, rank: int) -> None:
    _, (h, _) = net(data(rank))
    loss_of(h).backward()


@case(Net)
def many_roots(net: Any, rank: int) -> None:
    a, b = net(data(rank)), net(data(rank, 1))
    torch.autograd.backward([loss_of(a), b, a], [None, data(rank, 2, 3, 5), data(rank, 3, 3, 5)])


@case(Net)
def autograd_grad_leaves_gradients_alone(net: Any, rank: int) -> None:
    x = data(rank).requires_grad_()
    out = net(x)
    (dx,) = torch.autograd.grad(loss_of(out), x, retain_graph=True)
    torch.autograd.grad(loss_of(out), [net.module.inner.weight], retain_graph=True)
    loss_of(net(dx)).backward()
    torch.autograd.grad(out.sum(), x)


@case(Net)
def retained_twice(net: Any, rank: int) -> None:
    loss = loss_of(net(data(rank)))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


@case(Net, accum=(1, 2))
def forward_forward_backward_backward(net: Any, rank: int) -> None:
    a, b = loss_of(net(data(rank))), loss_of(net(data(rank, 1)))
    a.backward()
    b.backward()


@case(Net, accum=(1, 2))
def backward_in_the_other_order(net: Any, rank: int) -> None:
    a, b = loss_of(net(data(rank))), loss_of(net(data(rank, 1)))
    b.backward()
    a.backward()


@case(Net, accum=(1, 2))
def two_forwards_one_backward(net: Any, rank: int) -> None:
    (loss_of(net(data(rank))) * 2 + loss_of(net(data(rank, 1)))).backward()


@case(Net)
def engine_backward(net: Any, rank: int) -> None:
    loss = loss_of(net(data(rank)))
    net.backward(loss, retain_graph=True)
    net.backward(loss.reshape(1))


@case(Net)
def engine_scale(net: Any, rank: int) -> None:
    out = net(data(rank))
    net.scale(loss_of(out)).backward(retain_graph=True)
    net.scale(out).backward(data(rank, 2, 3, 5))


@case(Net)
def output_changed_in_place(net: Any, rank: int) -> None:
    out = net(data(rank))
    out.mul_(2).add_(1)
    out[0] = 0.0
    loss_of(out).backward()


@case(Net)
def output_is_a_view(net: Any, rank: int) -> None:
    out = net(data(rank)).t()[1:3]
    out += 1
    loss_of(out).backward()


@case(Net)
def the_input_needs_a_gradient(net: Any, rank: int) -> None:
    w = data(rank, 9, 6, 6).requires_grad_()
    loss_of(net(data(rank) @ w)).backward()
    assert w.grad is not None
    loss_of(net(data(rank) @ w.grad)).backward()


@case(Net)
def gradients_of_gradients(net: Any, rank: int) -> None:
    x = data(rank).requires_grad_()
    (dx,) = torch.autograd.grad(loss_of(net(x)), x, create_graph=True)
    dx.square().sum().backward()


@case(Net)
def backward_that_makes_a_graph(net: Any, rank: int) -> None:
    loss = loss_of(net(data(rank)))
    loss.backward(create_graph=True)
    loss.backward()


# --- accumulation --------------------------------------------------------------------------------


@case(Net, accum=(1, 4))
def four_micro_batches(net: Any, rank: int) -> None:
    for i in range(4):
        loss_of(net(data(rank, i))).backward()


@case(Net, accum=(4,))
def every_route_divides_once(net: Any, rank: int) -> None:
    net.backward(loss_of(net(data(rank))))
    net.backward(loss_of(net(data(rank, 1))), scale_wrt_gas=False)
    out = net(data(rank, 2))
    (loss_of(out) + net.module.outside.sum()).backward(retain_graph=True)
    out.backward(data(rank, 8, 3, 5))
    net.scale(net(data(rank, 3))).backward(data(rank, 9, 3, 5))
    net.module.outside.exp().sum().backward()


@case(Net, accum=(1, 3))
def no_sync_first(net: Any, rank: int) -> None:
    with net.no_sync():
        loss_of(net(data(rank))).backward()
        loss_of(net(data(rank, 1))).backward()
    loss_of(net(data(rank, 2))).backward()


@case(Net, accum=(1, 4))
def no_sync_in_between(net: Any, rank: int) -> None:
    loss_of(net(data(rank))).backward()
    with net.no_sync():
        loss = loss_of(net(data(rank, 1)))
        with net.no_sync():
            loss.backward()
    loss_of(net(data(rank, 2))).backward()
    with net.no_sync():
        late = loss_of(net(data(rank, 3)))
    late.backward()


@case(Net, accum=(1, 2))
def no_sync_last(net: Any, rank: int) -> None:
    loss_of(net(data(rank))).backward()
    with net.no_sync():
        loss_of(net(data(rank, 1))).backward()


@case(Net, accum=(1, 2))
def no_sync_only(net: Any, rank: int) -> None:
    with net.no_sync():
        loss_of(net(data(rank))).backward()
        loss_of(net(data(rank, 1))).backward()


@case(Experts, gathered=("experts",), accum=(1, 2))
def no_sync_where_ranks_differ(net: Any, rank: int) -> None:
    with net.no_sync():
        loss_of(net(data(rank), [0] if rank == 0 else [1])).backward()
    loss_of(net(data(rank, 1), [0] if rank == 1 else [1])).backward()


@case(Experts, gathered=("experts",))
def no_sync_only_where_ranks_differ(net: Any, rank: int) -> None:
    with net.no_sync():
        loss_of(net(data(rank), [0] if rank == 0 else [1])).backward()


# --- recomputation -------------------------------------------------------------------------------

_WAYS = {
    "reentrant": (["re", "re"], None),
    "not_reentrant": (["non", "non"], None),
    "mixed": (["plain", "re", "non", "plain"], None),
    "nested_reentrant": (["re+re", "plain"], None),
    "nested_not_reentrant": (["non+non", "re"], None),
    "nested_both": (["plain", "re+non", "non+re"], None),
    "deep": (["plain", "re+re+re", "non+non+non"], None),
    "frozen_reentrant": (["plain", "re", "re"], ["", "frozen", ""]),
    "frozen_not_reentrant": (["non", "non"], ["frozen", "half"]),
    "lora_reentrant": (["plain", "re", "re"], ["lora", "lora", "lora"]),
    "lora_not_reentrant": (["non", "non"], ["lora", "lora"]),
    "input_without_gradient": (["re", "non"], ["half", "half"]),
}


def _checkpoint_case(name: str, ways: list[str], kinds: list[str] | None) -> None:
    def program(net: Any, rank: int) -> None:
        x = data(rank).requires_grad_(name != "input_without_gradient")
        loss_of(net(x)).backward()
        a, b = net(data(rank, 1).requires_grad_()), net(data(rank, 2))
        (loss_of(a) + loss_of(b)).backward()

    case(lambda: Checkpointed(ways, kinds), name=f"checkpoint_{name}")(program)


for _name, (_ways, _kinds) in _WAYS.items():
    _checkpoint_case(_name, _ways, _kinds)


@case(lambda: Checkpointed(["non", "non+non"]), name="checkpoint_to_its_end")
def _without_early_stop(net: Any, rank: int) -> None:
    with set_checkpoint_early_stop(False):
        loss_of(net(data(rank))).backward()


@case(Net)
def the_engine_itself_recomputed(net: Any, rank: int) -> None:
    out = checkpoint(net, data(rank), use_reentrant=False)
    loss_of(out).backward()  # pyright: ignore
    x = data(rank, 1).requires_grad_()
    loss_of(checkpoint(net, x, use_reentrant=True)).backward()  # pyright: ignore


@case(lambda: Checkpointed(["re", "re"]))
def checkpoints_and_no_sync(net: Any, rank: int) -> None:
    with net.no_sync():
        loss_of(net(data(rank).requires_grad_())).backward()
    loss_of(net(data(rank, 1).requires_grad_())).backward()


@case(lambda: Checkpointed(["re", "plain"]))
def checkpoint_retained(net: Any, rank: int) -> None:
    loss = loss_of(net(data(rank).requires_grad_()))
    loss.backward(retain_graph=True)
    loss.backward()


@case(Tiled)
def tiles_of_both(net: Any, rank: int) -> None:
    net(data(rank)).backward()


@case(Tiled, accum=(1, 2))
def two_tiled_forwards(net: Any, rank: int) -> None:
    a, b = net(data(rank)), net(data(rank, 1))
    b.backward()
    a.backward()


@case(lambda: Tiled(mlp=False), accum=(2,))
def tiles_divided_once(net: Any, rank: int) -> None:
    net.backward(net(data(rank)))
    with net.no_sync():
        net(data(rank, 1)).backward()


@case(lambda: Tiled(loss=False))
def tiles_in_backward(net: Any, rank: int) -> None:
    net(data(rank)).backward()
    net(data(rank, 1)).backward()
