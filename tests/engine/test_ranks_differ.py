"""Ranks that run different modules at stage 3: right, or an error on every rank, never a hang."""

import contextlib

import pytest
import torch

import fzero
from tests.engine.models import Experts, Lost, Net, Raises
from tests.engine.parity import SGD, STAGES, build, data, here
from tests.ranks import RanksFailed, run_fresh, run_ranks


def differ(when: str) -> str:
    """How long it took, and what this rank was told."""
    torch.distributed.init_process_group("gloo")
    rank, world = here()
    engine = fzero.Engine(build(Experts), SGD(), fzero.Config(stage=3, bucket_mb=1e-4))
    same = [0, 1]
    if when != "forward":  # a step that all agree on comes first
        engine(data(rank), same).square().mean().backward()
        engine.step()
    try:
        odd = rank == world - 1
        out = engine(data(rank), [2] if odd and when != "backward" else same)
        if when == "backward" and odd:
            out = out * 0 + engine.module.experts[2](data(rank))
        out.square().mean().backward()
        engine.step()
        out = engine(data(rank), same)
    except fzero.RankMismatchError as error:
        return str(error)
    return ""


def raises_alone(stage: int, where: str) -> str:
    """One rank loses a pass in its middle and tries again, the other knows nothing of it."""
    torch.distributed.init_process_group("gloo")
    rank, _ = here()
    engine = fzero.Engine(build(Raises), SGD(), fzero.Config(stage=stage, bucket_mb=1e-5))
    for _ in range(2):
        engine(data(rank)).square().mean().backward()
        engine.step()
    engine.module.where = where if rank == 0 else ""
    try:
        if rank == 0:
            with pytest.raises(Lost):
                engine(data(rank)).square().mean().backward()
            engine.module.where = ""
        engine(data(rank)).square().mean().backward()
        engine.step()
        engine.full_params()
    except fzero.RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("stage", "where"), [(2, "backward"), (3, "backward"), (3, "forward")])
@pytest.mark.quick("3-backward")
def test_a_rank_that_starts_again_alone_is_found_out(stage: int, where: str) -> None:
    for message in run_fresh(2, raises_alone, stage, where, timeout=60):
        assert "(raised)" in message


@pytest.mark.parametrize("when", ["forward", "later"])
def test_every_rank_is_told(when: str) -> None:
    for message in run_fresh(2, differ, when, timeout=60):
        assert "gather_together" in message
        assert when == "later" or "experts.2" in message


def reads_alone() -> str:
    """One rank looks at a gradient, and the other updates."""
    torch.distributed.init_process_group("gloo")
    rank, _ = here()
    engine = fzero.Engine(build(Raises), SGD(), fzero.Config(stage=3))
    engine(data(rank)).square().mean().backward()
    try:
        if rank == 0:
            engine.full_grad("a.weight")
        engine.step()
    except fzero.RankMismatchError as error:
        return str(error)
    return ""


def test_a_gradient_that_one_rank_reads_is_a_call_that_all_must_make() -> None:
    for message in run_fresh(2, reads_alone, timeout=60):
        assert "rank 0: full_grad; rank 1: update. It must be the same on all" in message
        assert "All ranks must call the same functions and methods" in message
        assert "Give every rank a batch" not in message


def goes_on_alone() -> None:
    """One rank calls backward once more, and the other updates."""
    torch.distributed.init_process_group("gloo")
    rank, _ = here()
    engine = fzero.Engine(build(Raises), SGD(), fzero.Config(stage=2))
    for turn in range(3):
        for _ in range(2 if turn == 2 and rank == 1 else 1):
            engine(data(rank)).square().mean().backward()
        engine.step()


def test_one_backward_more_is_found_out_where_no_parameters_travel() -> None:
    differ = r"RankMismatchError: rank 0 came to 'engine 1, update', and rank 1 to .*: backward'"
    with pytest.raises(RanksFailed, match=rf"(?s){differ}.*{differ}"):
        run_fresh(2, goes_on_alone, timeout=30)


def evaluates_alone(how: str) -> str:
    """One rank runs an evaluation, or enters a block, and the other goes on to the next step."""
    torch.distributed.init_process_group("gloo")
    rank, _ = here()
    engine = fzero.Engine(build(Raises), SGD(), fzero.Config(stage=3))
    try:
        for turn in range(2):
            engine(data(rank)).square().mean().backward()
            engine.step()
            if turn == 0 or rank == 1:
                with torch.no_grad():
                    if how == "forward":
                        engine(data(rank))
                    elif how == "module":
                        engine.module(data(rank))
                    elif how == "local_forward":
                        with engine.local_forward():
                            engine(data(rank))
                    else:
                        with engine.gathered("a.weight", modifier_rank=1) as params:
                            params["a.weight"].zero_()
        engine(data(rank))
    except fzero.RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "how",
    [
        "forward",
        "module",
        pytest.param("local_forward", marks=pytest.mark.slow),
        pytest.param("gathered", marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_of_one_rank_alone_is_found_out(how: str) -> None:
    station = {"forward": "evaluation", "module": "evaluation"}.get(how, how)
    for message in run_fresh(2, evaluates_alone, how, timeout=60):
        assert f"engine 1, {station}" in message


def raises_in_a_block_alone() -> str:
    torch.distributed.init_process_group("gloo")
    rank, _ = here()
    engine = fzero.Engine(build(Raises), SGD(), fzero.Config(stage=3))
    # what reads, and what is local, is nobody else's business
    with contextlib.suppress(Lost), engine.gathered("a.weight"):
        if rank == 0:
            raise Lost
    engine.module.where = "forward" if rank == 0 else ""
    with engine.local_forward(), contextlib.suppress(Lost), torch.no_grad():
        engine(data(rank))
    engine.module.where = ""
    engine(data(rank)).square().mean().backward()
    engine.step()
    try:
        with contextlib.suppress(Lost), engine.gathered("a.weight", modifier_rank=0):
            if rank == 0:
                raise Lost
        engine(data(rank))
    except fzero.RankMismatchError as error:
        return str(error)
    return ""


def test_a_rank_that_loses_what_it_was_to_write_is_found_out() -> None:
    for message in run_fresh(2, raises_in_a_block_alone, timeout=60):
        assert "after an exception" in message or "(raised)" in message


def _drops(stage: int, where: int, one: bool) -> str:
    """What `step()` says where some ranks drop a gradient that others keep; -1: all drop it."""
    rank, _ = here()
    engine = fzero.Engine(build(Net), SGD(), fzero.Config(stage=stage))
    for i in range(3):
        engine(data(rank, i)).square().mean().backward()
        if i == 0 and (rank == where or where < 0):
            if one:
                next(engine.module.parameters()).grad = None
            else:
                engine.zero_grad()
    try:
        engine.step()
    except fzero.RankMismatchError as error:
        return str(error)
    engine.zero_grad()
    engine(data(rank, 0)).square().mean().backward()
    engine.step()
    return ""


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_some_ranks_drop_is_told(stage: int, one: bool) -> None:
    for said in run_ranks(2, _drops, stage, 0, one):
        assert "backwards since engine.zero_grad() or p.grad = None: rank 0: " in said
        assert one or "rank 0: 2; rank 1: 3" in said
    assert run_ranks(2, _drops, stage, -1, one) == ["", ""]


def _drops_in_another_order(stage: int) -> None:
    """In a set of parameters, say, whose order is each rank's; and gradients given by hand."""
    rank, _ = here()
    engine = fzero.Engine(build(Net), SGD(), fzero.Config(stage=stage))
    for i in range(2):
        engine(data(rank, i)).square().mean().backward()
        params = list(engine.module.named_parameters())[:2]
        for _, param in params[:: 1 if rank else -1]:
            param.grad = None
        engine(data(rank, i)).square().mean().backward()
        given = [(name, engine.local_grad(name)) for name, _ in params]
        for name, grad in given[:: 1 if rank else -1]:
            if grad is not None:  # of a leaf that nobody uses
                engine.set_local_grad(name, 2 * grad)
        engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_drop_and_replace_gradients_in_any_order(stage: int) -> None:
    run_ranks(2, _drops_in_another_order, stage)
