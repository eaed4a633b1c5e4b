"""Folders of a run whose checkpoints hold one number each."""

from pathlib import Path

import torch

from fzero.checkpoint import load
from fzero.checkpoint.format.verify import problems


def tree_of(value: float) -> dict[str, torch.Tensor]:
    """What a save is given."""
    return {"w": torch.full((3,), float(value))}


def value_of(folder: Path | None) -> float:
    """What a checkpoint holds, which is whole."""
    assert folder is not None
    assert problems(folder) == []
    return float(load(folder, tree_of(-1))[0]["w"][0])


def names_in(run: Path) -> list[str]:
    """All that is there, hidden or not."""
    return sorted(entry.name for entry in run.iterdir())
