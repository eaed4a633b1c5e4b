"""A function of leaves that are gathered on use holds no more of them than one bucket."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fzero
from fzero.eager.gathered import Gathered
from tests.ranks import run_fresh, run_ranks

SIDE = 2**9  # of float32: a leaf has one MiB


def _gathers(order: str, bucket_mb: float) -> Any:
    """On a rank: what is gathered in each of two calls, and the most MiB that are held then."""
    cfg = fzero.Config(stage=3, executor="eager", bucket_mb=bucket_mb)
    values = {name: torch.full((SIDE, SIDE), float(ord(name))) for name in "abcd"}
    params = fzero.shard(values, cfg)
    alive: list[weakref.ref[Tensor]] = []
    calls: list[list[str]] = []
    most = 0
    original = Gathered.gather

    def watched(self: Gathered, leaves: Any) -> list[Tensor]:
        nonlocal most
        most = max(most, sum(x() is not None for x in alive))
        calls[-1].append("".join(lazy.leaf.name for lazy in leaves))
        found = original(self, leaves)
        alive.extend(map(weakref.ref, found))
        return found

    def reads(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.stack([p[name].mean() * x for name in order])

    evaluate = fzero.sharded(reads, cfg)
    Gathered.gather = watched
    try:
        for _ in range(2):
            calls.append([])
            assert evaluate(params, torch.ones(())).tolist() == [ord(name) for name in order]
            assert not any(x() is not None for x in alive)
    finally:
        Gathered.gather = original
    return calls, most


@pytest.mark.parametrize(
    ("order", "bucket_mb", "second"),
    [
        ("abcda", 1, ["a", "b", "c", "d", "a"]),
        ("abcda", 2, ["ab", "cd", "ab"]),  # in the order that the first call has learned
        ("abcddcba", 2, ["ab", "cd", "b", "a"]),  # back again: nobody keeps the way there
        ("abab", 1, ["a", "b", "a", "b"]),
        ("abab", 2, ["ab"]),
        ("abcdabcd", 8, ["abcd"]),
    ],
)
def test_what_was_used_last_is_kept_and_no_more_than_a_bucket(
    order: str, bucket_mb: float, second: list[str]
) -> None:
    for (first, then), most in run_ranks(2, _gathers, order, bucket_mb):
        assert "".join(first)[: len(set(order))] == "".join(sorted(set(order)))
        assert then == second
        assert most <= bucket_mb


def _returned(executor: Any, stage: int) -> bool:
    cfg = fzero.Config(stage=stage, executor=executor)
    full = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}
    params = fzero.shard(full, cfg)

    def leaves(p: dict[str, Tensor]) -> Any:
        return p["a"], {"rows": p["a"][1], "turned": p["a"].T}, p["b"], p["a"].sum()

    for _ in range(2):
        result = fzero.sharded(leaves, cfg)(params)
        torch.testing.assert_close(result, leaves(full))
        for x in (result[0], *result[1].values(), result[2]):
            x.mul_(-1.0)  # the caller's own
    torch.testing.assert_close(fzero.unshard(params), full)
    return True


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_returned_of_a_parameter_is_a_full_tensor_of_the_callers(
    world: int, executor: Any
) -> None:
    for stage in (0, 3):
        if world == 1:
            assert _returned(executor, stage)
        else:
            assert all(run_ranks(world, _returned, executor, stage))


def _reads_on_one_rank() -> str:
    dist.init_process_group("gloo")
    cfg = fzero.Config(executor="eager", timeout=60.0)
    params = fzero.shard({"v": torch.ones(4, 4), "w": torch.ones(4, 4)}, cfg)
    alone = dist.get_rank() == 1

    def fn(params: Any, x: Tensor) -> Tensor:
        out = (x @ params["w"]).sum()
        return out + params["v"].sum() if alone else out

    dist.barrier()
    try:
        fzero.sharded(fn, cfg, reduce="mean")(params, torch.ones(2, 4))
    except fzero.RankMismatchError as error:
        return str(error)
    return ""


def test_a_rank_that_goes_on_to_the_result_is_elsewhere_and_not_late() -> None:
    for said in run_fresh(2, _reads_on_one_rank, timeout=120):
        assert "rank 0 came to 'eager step function 1, result of evaluation 1'" in said
