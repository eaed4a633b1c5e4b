"""What `python -m fzero.simulate` prints, and what it says to wrong options."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fzero.simulation.cli import main

SMALL = ["--model", "gpt2", "--layers", "1", "--sequence", "16", "--remat", "none"]


@pytest.mark.slow
def test_the_command_prints_a_table() -> None:
    command = [sys.executable, "-m", "fzero.simulate", *SMALL, "--world", "4", "--hardware", "a100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "stage 3 on 4 x A100 80GB" in done.stdout
    assert "MFU" in done.stdout


@pytest.mark.slow
def test_who_has_read_enough_is_not_told_of_it() -> None:
    command = [sys.executable, "-m", "fzero.simulate", *SMALL, "--world", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout is not None
        done.stdout.close()
        _, errors = done.communicate(timeout=120)
    assert done.returncode == 0
    assert b"BrokenPipe" not in errors


def test_json_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    picture = f"{tmp_path}/step.png"
    options = ["--world", "16", "--replicate", "2", "--stage", "1", "--json", "--plot", picture]
    assert main([*SMALL, *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["mesh"] == [2, 8]
    with open(picture, "rb") as file:
        assert file.read(4) == b"\x89PNG"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama3-7b", "--world", "8"], "Did you mean 'llama3-70b'|'llama3-8b'"),
        ([*SMALL, "--world", "0"], "must be 1 or more"),
        ([*SMALL, "--world", "6", "--replicate", "4"], "does not divide --world"),
        ([*SMALL, "--world", "6", "--rows", "3", "--accum", "2"], "does not divide --rows"),
        ([*SMALL, "--world", "6", "--hardware", "h1000"], "Did you mean 'h100'"),
        (["--model", "gpt2", "--world", "6", "--sequence", "2048"], "positions for 1024"),
        (["--model", "llama3-405b", "--world", "1", "--sweep"], "fits with no stage"),
        ([*SMALL, "--world", "2", "--sweep", "--plot", "x.png"], "without --sweep"),
        ([*SMALL, "--world", "2", "--plot", "nowhere/x.png"], "there is no folder nowhere"),
        ([*SMALL, "--world", "2", "--plot", "picture"], "ends with .png or .svg"),
    ],
)
def test_wrong_options_are_refused_with_a_way_on(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert any(part in captured.err for part in message.split("|"))


def test_a_picture_takes_no_folders_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "d.png").mkdir()
    assert main([*SMALL, "--world", "2", "--plot", str(tmp_path / "d.png")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""  # before anything is simulated
    assert "that is a folder" in captured.err


@pytest.mark.slow
def test_a_sweep_prints_what_fits_first(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SMALL, "--world", "4", "--sweep", "--candidates", "3", "--workers", "1"]
    assert main(options) == 0
    captured = capsys.readouterr()
    assert captured.out.count("fits") == 3
    assert "[3/3]" in captured.err
