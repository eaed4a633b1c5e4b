"""What is reckoned from few layers is what recording all of them says."""

from dataclasses import replace
from typing import Any

import pytest

import fzero
from fzero.program.machines import HARDWARE
from fzero.simulation.layers import simulate_layers
from fzero.simulation.models import REMAT, Shape, build
from fzero.simulation.report import Report

TINY = Shape(layers=1, width=512, heads=4, kv_heads=2, hidden=768, vocab=1000, sequence=64)
ROWS = {"layout": "rows"}  # leaves that lie end to end are recorded at every depth
EXACT = ("peak_bytes", "categories", "host_bytes", "traffic", "flops", "recomputed", "tokens")


def both(
    shape: Shape, layers: int, cfg: fzero.Config, world: Any, remat: str
) -> tuple[Report, Report]:
    """The report from few layers, and that of all."""

    def make(depth: int) -> Any:
        return build(shape, 2, layers=depth, policy=REMAT[remat], again=remat != "none")

    opt, gpu = fzero.optim.adamw(1e-3), HARDWARE["h100"]
    few = simulate_layers(make, layers, opt, cfg, world, gpu)
    model_fn, *rest = make(layers)
    return few, fzero.simulate(model_fn, opt, cfg, *rest, world, gpu)


@pytest.mark.parametrize(
    ("remat", "world", "options"),
    [
        pytest.param("none", 8, {"stage": 3}, marks=pytest.mark.slow),
        ("full", (2, 8), {"stage": 3, "precision": "bf16"}),
        pytest.param("dots", 16, {"stage": 3, "clip_norm": 1.0}, marks=pytest.mark.slow),
        pytest.param("full", 16, {"stage": 2, "accum_steps": 2} | ROWS, marks=pytest.mark.slow),
        pytest.param("none", 8, {"stage": 0}, marks=pytest.mark.slow),
        pytest.param("none", 8, {"stage": 1, "precision": "bf16"} | ROWS, marks=pytest.mark.slow),
        pytest.param("full", 8, {"offload": "cpu", "precision": "bf16"}, marks=pytest.mark.slow),
    ],
)
def test_few_layers_say_what_many_cost(remat: str, world: Any, options: dict[str, Any]) -> None:
    # buckets of less than a layer, or layers are not equal; one size, so that few are tried
    few, all_of_them = both(TINY, 6, fzero.Config(bucket_mb=0.07, **options), world, remat)
    # an offloaded update works through groups of leaves on the host, which do not grow evenly in
    # each category: then all layers are recorded
    assert any("6 equal layers" in said for said in few.assumptions) == ("offload" not in options)
    for name in EXACT:
        assert getattr(few, name) == getattr(all_of_them, name), name
    assert few.seconds == pytest.approx(all_of_them.seconds, rel=5e-3)
    assert few.exposed == pytest.approx(all_of_them.exposed, abs=5e-3 * all_of_them.seconds)


@pytest.mark.slow
def test_layers_that_share_buckets_are_all_recorded() -> None:
    small = replace(TINY, width=32, hidden=48, vocab=64, sequence=8)
    few, all_of_them = both(small, 5, fzero.Config(stage=3), 4, "none")
    if len(few.assumptions) == len(all_of_them.assumptions):  # not reckoned
        assert few == all_of_them
    for name in EXACT:
        assert getattr(few, name) == getattr(all_of_them, name), name
