"""Parameters that are there in full for a while."""

import pytest
import torch
from torch import nn

import fzero.compat.deepspeed as deepspeed
from tests.ranks import run_ranks


def _gathers(stages: list[int]) -> list[str]:
    wrong, rank = [], deepspeed.comm.get_rank()
    for stage in stages:
        with deepspeed.zero.Init():
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        weight = model[0].weight
        with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=1):
            for p in model.parameters():
                nn.init.constant_(p, float(rank))
        if any((p != 1.0).any() for p in model.parameters()):
            wrong.append(f"{stage}: ranks differ before initialize")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        engine = deepspeed.initialize(model=model, config=config)[0]
        # by the name that a variable had before, too
        with deepspeed.zero.GatheredParameters([weight, model[1].bias], modifier_rank=0):
            if rank == 0:
                weight.data.fill_(5.0)
                model[1].bias.data.fill_(7.0)
        with deepspeed.zero.GatheredParameters(model[0].weight):
            if (model[0].weight != 5.0).any():
                wrong.append(f"{stage}: the weight was not written")
        out = engine(torch.zeros(1, 4))
        if (out != 4 * 1.0 + 7.0).any():
            wrong.append(f"{stage}: the forward has {out}")
        with deepspeed.zero.GatheredParameters(model.parameters(), enabled=False):
            pass
        engine.destroy()
    return wrong


def test_what_one_rank_writes_is_what_all_have() -> None:
    assert run_ranks(2, _gathers, [0, 1, 2, 3], timeout=120) == [[], []]


@pytest.mark.parametrize("name", ["register_external_parameter", "unregister_external_parameter"])
def test_external_parameters_need_no_word(name: str) -> None:
    module = nn.Linear(2, 2)
    assert getattr(deepspeed.zero, name)(module, module.weight) is None


def test_the_paths_that_saving_scripts_import_are_there() -> None:
    from fzero.compat.deepspeed.runtime.engine import DeepSpeedEngine
    from fzero.compat.deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus

    assert (DeepSpeedEngine, Init) == (deepspeed.DeepSpeedEngine, deepspeed.zero.Init)
    assert {x.name for x in ZeroParamStatus} == {"AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"}


def test_a_model_that_generates_is_gathered_once() -> None:
    from fzero.compat.deepspeed.runtime.zero import unwrap_model_for_generation

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    expected = model(x).detach()
    engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
    for _ in range(2):
        with torch.no_grad(), unwrap_model_for_generation(engine) as inside:
            assert torch.equal(inside(x), expected)
            assert inside.module.weight.numel() == 16
        engine.backward(engine(x).sum())
        engine.step()
        expected = engine(x).detach()


def test_scripts_may_ask_for_the_version() -> None:
    assert deepspeed.__version__.startswith("0.19.")
