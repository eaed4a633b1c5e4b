"""Links, nodes and tiles."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.distributed.buckets import ALL_REDUCE, EXCHANGE, GATHER, KINDS, Bucket
from fzero.errors import ConfigError
from fzero.layout import LeafLayout
from fzero.program.hardware import Hardware
from fzero.program.machines import HARDWARE


def bucket(kind: str, world: int, numel: int = 1 << 20, group: str = "g") -> Bucket:
    leaf = LeafLayout("w", (numel,), torch.float32, 0, world)
    parts = ((numel,) * world,) * 2 if kind == EXCHANGE else ()
    return Bucket(kind, (leaf,), torch.float32, world, group, parts=parts)


@given(
    st.sampled_from(list(KINDS)), st.integers(2, 600), st.integers(1, 64), st.integers(0, 1 << 30)
)
def test_bytes_by_link_add_up_to_what_is_sent(
    kind: str, world: int, stride: int, numel: int
) -> None:
    gpu = HARDWARE["h100"].placed({"g": stride})
    sent = bucket(kind, world, numel)
    inside, between = gpu.sent(sent)
    assert inside + between == sent.wire_bytes
    assert min(inside, between) >= 0
    nodes, near = gpu.nodes_of(sent)
    assert (nodes - 1) * near < world <= nodes * near
    if nodes == 1:
        assert between == 0
    if near == 1:
        assert inside == 0


@given(st.sampled_from(list(KINDS)), st.integers(2, 600), st.integers(1, 16), st.floats(1.1, 100))
def test_a_faster_link_is_never_slower(kind: str, world: int, stride: int, factor: float) -> None:
    def time(**rates: float) -> float:
        gpu = Hardware(
            "gpu", 1e12, 1e12, devices_per_node=8, strides=(("g", stride),),
            **({"link_bandwidth": 1e11, "node_bandwidth": 1e10} | rates),
        )  # fmt: skip
        return gpu.send_time(bucket(kind, world))

    assert time(link_bandwidth=1e11 * factor) <= time()
    assert time(node_bandwidth=1e10 * factor) <= time()


def test_a_ring_over_nodes_leaves_each_through_all_its_links() -> None:
    gpu = Hardware(
        "gpu", 1e12, 1e12, link_latency=0.0, link_bandwidth=4e11, devices_per_node=8,
        node_latency=0.0, node_bandwidth=5e10,
    )  # fmt: skip
    numel = 1 << 28
    alone = gpu.send_time(bucket(GATHER, 8, numel))
    assert alone == pytest.approx(4 * numel * 7 / 8 / 4e11)
    assert gpu.send_time(bucket(GATHER, 16, numel)) == pytest.approx(4 * numel * 15 / 16 / 4e11)
    # one rank in each node: nobody to share the way out with
    far = gpu.placed({"g": 8}).send_time(bucket(ALL_REDUCE, 16, numel))
    assert far == pytest.approx(2 * 4 * numel * 15 / 16 / 5e10)


def test_products_waste_what_their_tiles_and_last_wave_have_to_spare() -> None:
    gpu = HARDWARE["h100"]
    assert gpu.waste((128 * 132, 256)) == 1
    assert gpu.waste((128 * 133, 256)) == pytest.approx(264 / 133)
    assert gpu.waste((1, 256)) == 128
    assert gpu.waste((8, 128, 256)) == 1
    assert Hardware("any", 1e12, 1e12).waste((3, 5)) == 1


def test_what_hardware_does_not_take_is_refused() -> None:
    for name in ("flops", "memory_bandwidth", "link_bandwidth", "devices_per_node"):
        with pytest.raises(ConfigError, match=name):
            Hardware("none", **({"flops": 1.0, "memory_bandwidth": 1.0} | {name: 0}))
    with pytest.raises(ConfigError, match="link_latency"):
        Hardware("none", 1.0, 1.0, link_latency=-1.0)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("flops", "a", "flops='a' must be a number above 0"),
        ("flops", None, "flops=None must be a number above 0"),
        ("memory", "80GB", "memory='80GB' must be a number above 0"),
        ("low_flops", True, "low_flops=True must be a number above 0"),
        ("overhead", None, "overhead=None is seconds"),
        ("node_latency", [1], r"node_latency=\[1\] is seconds"),
        ("tile", 128, "tile=128 must be two whole numbers"),
        ("tile", (0, 128), r"tile=\(0, 128\) must be two whole numbers"),
        ("name", 3, "name=3 must be a text"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(field: str, value: Any, rule: str) -> None:
    fields: dict[str, Any] = {"name": "mine", "flops": 1e12, "memory_bandwidth": 1e11}
    with pytest.raises(ConfigError, match=rule):
        Hardware(**(fields | {field: value}))


@pytest.mark.parametrize("asks", ["cost", "frontier", "plot", "save_trace", "overlap"])
def test_hardware_has_names_wherever_it_is_asked_for(asks: str, tmp_path: Path) -> None:
    if asks == "plot":
        pytest.importorskip("matplotlib")
    step_fn = fzero.make_train_step(lambda p, x: (x @ p["w"]).mean(), fzero.optim.sgd(0.1))
    program = step_fn.lower(*step_fn.init({"w": torch.ones(4, 4)}), torch.ones(2, 4))

    def ask(hardware: Any) -> Any:
        if asks == "overlap":
            return fzero.passes.overlap(hardware=hardware)
        where = {"plot": tmp_path / "a.svg", "save_trace": tmp_path / "a.json", "frontier": 2}
        given = (where[asks],) if asks in where else ()
        return getattr(program, asks)(*given, hardware=hardware)

    def told(found: Any) -> str:
        files = [path.read_text() for path in tmp_path.iterdir()]
        return files[0] if files else str(found)

    if asks in ("cost", "frontier", "overlap"):
        assert told(ask("h100")) == told(ask(HARDWARE["h100"]))
    else:
        ask("h100")
        assert HARDWARE["h100"].name in told(None)
    for wrong in ("h1000", 3):
        with pytest.raises(ConfigError, match=rf"hardware={wrong!r} is not known"):
            ask(wrong)
