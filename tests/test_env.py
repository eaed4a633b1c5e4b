"""A report names what runs, and keeps to itself what is nobody's business."""

import subprocess
import sys

import pytest
import torch

from fzero import env
from fzero.errors import TraceError


def test_the_command_prints_versions_and_probes() -> None:
    text = subprocess.run(
        [sys.executable, "-m", "fzero.env"], capture_output=True, text=True, check=True
    ).stdout
    assert torch.__version__ in text
    assert text.count("as expected") == 4


def test_only_variables_of_torch_and_its_like_are_shown() -> None:
    text = env.report({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hidden", "RANK": "3"})
    assert "NCCL_DEBUG" in text
    assert "RANK                         3" in text
    assert "hidden" not in text


def test_a_torch_that_does_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise TraceError("this torch does otherwise")

    monkeypatch.setattr(env, "_PROBES", {"islands": refuse})
    assert "REFUSED: this torch does otherwise" in env.report({})
