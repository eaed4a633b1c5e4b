"""A report is plain data: it prints, it is JSON, it is drawn."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.distributed.buckets import ALL_REDUCE, GATHER
from fzero.program.graph import tensors_of
from fzero.program.machines import HARDWARE
from fzero.simulation.report import tokens_in


def report(**options: Any) -> fzero.Report:
    def model_fn(params: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, _ = batch
        return (params["embed"][x] @ params["w"]).square().mean()

    params = {"embed": torch.empty(11, 6, device="meta"), "w": torch.empty(6, 5, device="meta")}
    tokens = torch.empty(4, 3, dtype=torch.int64, device="meta")
    cfg = fzero.Config(**options)
    return fzero.simulate(
        model_fn, fzero.optim.adamw(0.1), cfg, params, (tokens, tokens), (3, 8), "h100"
    )


def test_a_report_reads_as_a_table_of_all_that_it_says() -> None:
    found = report(stage=3, accum_steps=2)
    text = str(found)
    for word in (
        "stage 3 on 24 x H100 80GB, mesh 3 x 8, 2 micro-batches", "fits", "all_gather",
        "reduce_scatter", "shard", "replicate", "padding", "tokens/s", "MFU", "assuming",
        *found.categories,
    ):  # fmt: skip
        assert word in text
    assert found.tokens == 12
    assert found.tokens_per_second == pytest.approx(24 * 12 / found.seconds)


@pytest.mark.parametrize("stage", [2, 3])
def test_padding_is_what_buffers_have_more_than_leaves(stage: int) -> None:
    found = report(stage=stage)  # 11 and 6 rows over 8 ranks
    assert found.program is not None
    expected = 0
    for part in found.program.parts():
        for node in part.graph.nodes:
            if (bucket := node.meta.get("bucket")) and bucket.kind != ALL_REDUCE:
                (buffer,) = tensors_of(node.args[0])
                # of a gather's buffer a rank sends its own part, packed apart or in its place
                apart = bucket.kind == GATHER and not bucket.is_around
                ranks = bucket.world if apart else 1
                expected += buffer.nbytes * ranks - bucket.nbytes
    assert found.padding == expected > 0


def test_json_has_every_field_and_figure() -> None:
    found = report(stage=2)
    said = json.loads(found.to_json())
    assert said["peak_bytes"] == sum(said["categories"].values()) == found.peak_bytes
    assert said["sent"] == sum(row["inside"] + row["between"] for row in said["traffic"])
    assert said["mesh"] == [3, 8]
    assert said["fits"] is True
    assert said["mfu"] == found.mfu
    assert "program" not in said
    plain = found.without_program()
    assert pickle.loads(pickle.dumps(plain)) == plain == found


def test_a_report_is_drawn_while_it_has_its_program(tmp_path: Path) -> None:
    found = report()
    found.plot(tmp_path / "step.svg")
    assert "H100" in (tmp_path / "step.svg").read_text()
    with pytest.raises(fzero.FzeroError, match="without its Program"):
        found.without_program().plot(tmp_path / "step.svg")


def test_mfu_counts_nothing_twice() -> None:
    found = report()
    assert found.recomputed == 0
    assert found.mfu == pytest.approx(found.flops / found.seconds / HARDWARE["h100"].peak)


def test_tokens_are_the_integers_of_a_batch() -> None:
    ids, x = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(3, 7)
    assert tokens_in((x, {"ids": ids})) == 10
    assert tokens_in((x, 3)) == 3
    assert tokens_in(()) == 0
