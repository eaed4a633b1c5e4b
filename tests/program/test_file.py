"""Programs in files of data: the same again, or refused."""

import contextlib
import gc
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.errors import FzeroError
from fzero.numerics.bits import same_bits
from fzero.program.collector import collector_paused
from fzero.program.file import read, write
from tests.program.programs import Recorded

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3).t(),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(True),
    "low": torch.ones(3, dtype=torch.bfloat16),
    "complex": torch.tensor([[1 + 2j, 3j]]).conj(),
    "complex128": torch.ones(2, 0, dtype=torch.complex128),  # safetensors has no name for it
    "float8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fnuz),
    "wide": torch.tensor([7]).to(torch.uint64),
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    data = {"text": 'quotes " and ü', "numbers": [1, 1.5, float("inf"), None, True]}
    write(tmp_path / "new" / "x", data, TENSORS)
    found, tensors = read(tmp_path / "new" / "x")
    assert found == data
    assert [*tensors] == [*TENSORS]
    assert all(same_bits(tensors[k], x) and tensors[k].dtype == x.dtype for k, x in TENSORS.items())
    assert [x.name for x in (tmp_path / "new").iterdir()] == ["x"]


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """As if there were room for a thousand bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_be_written_is_told_and_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "x", {}, {})
    too_large = pytest.raises(FzeroError, match=r"written to .*x: .*File too large.*save again")
    with full_disk(), too_large:
        write(tmp_path / "x", {}, {"w": torch.ones(10_000)})
    with pytest.raises(FzeroError, match=r"File exists.*can be a folder"):
        write(tmp_path / "x" / "y", {}, {})
    assert [x.name for x in tmp_path.iterdir()] == ["x"]
    assert read(tmp_path / "x") == ({}, {})


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(FzeroError, match=rf"{name} is no file. Save Programs to a file"):
            write(tmp_path / name, {}, {})
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "folder").is_dir()


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("x")
    for number in range(2):  # nothing is there, and a file is
        write(tmp_path / "latest", number, {})
        assert (tmp_path / "latest").is_symlink()
        assert read(tmp_path / "x") == (number, {})


@pytest.mark.parametrize("cut", [0, 4, 12, 100, -1])
def test_a_file_that_is_cut_short_is_an_error(cut: int, tmp_path: Path) -> None:
    write(tmp_path / "x", {}, TENSORS)
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:cut])
    with pytest.raises((ValueError, KeyError)):
        read(tmp_path / "x")


@settings(max_examples=100)
@given(st.data())
def test_a_file_with_one_other_bit_is_an_error(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        write(path, {"rate": 0.01}, TENSORS)
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
            read(path)


def test_a_program_that_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing of the kind")
    with pytest.raises(FzeroError, match="holds no Program that this process can read"):
        fzero.Program.load(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        fzero.Program.load(tmp_path / "y")
    write(tmp_path / "z", {"entries": []}, {})  # as a step function's
    with pytest.raises(FzeroError, match=r"step_fn\.load_programs"):
        fzero.Program.load(tmp_path / "z")


def test_a_program_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    program = Recorded([4, 8, 2], dropout=0.5).program
    program.save(tmp_path / "x")
    loaded = fzero.Program.load(tmp_path / "x")
    assert loaded.listing(verbose=True) == program.listing(verbose=True)
    assert loaded.peak() == program.peak()
    loaded.save(tmp_path / "y")
    assert read(tmp_path / "y")[0] == read(tmp_path / "x")[0]


def test_no_cycles_are_looked_for_meanwhile() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()  # a user's choice stays
    finally:
        gc.enable()


def _draw(program: fzero.Program, path: Path) -> None:
    program.plot(path)


def _draw_frontier(program: fzero.Program, path: Path) -> None:
    program.frontier(1).plot(path)


def _trace(program: fzero.Program, path: Path) -> None:
    program.save_trace(path)


@pytest.mark.parametrize(
    ("save", "ending"), [(_trace, "json"), (_draw, "svg"), (_draw_frontier, "svg")]
)
def test_what_shows_a_program_is_written_whole_or_not_at_all(
    save: Callable[[fzero.Program, Path], None], ending: str, tmp_path: Path
) -> None:
    if ending == "svg":
        pytest.importorskip("matplotlib")
    step_fn = fzero.make_train_step(lambda p, x: (x @ p["w"]).mean(), fzero.optim.sgd(0.1))
    program = step_fn.lower(*step_fn.init({"w": torch.ones(4, 4)}), torch.ones(2, 4))
    path = tmp_path / "new" / f"a.{ending}"
    save(program, path)
    before = path.read_bytes()
    with full_disk(), pytest.raises(FzeroError, match=r"can't be written to .*a\."):
        save(program, path)
    with full_disk(), pytest.raises(FzeroError, match=r"can't be written to .*b\."):
        save(program, path.with_name(f"b.{ending}"))
    assert [x.name for x in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before
    (tmp_path / f"folder.{ending}").mkdir()
    with pytest.raises(FzeroError, match="is no file"):
        save(program, tmp_path / f"folder.{ending}")


def test_a_trace_goes_into_a_device(tmp_path: Path) -> None:
    step_fn = fzero.make_train_step(lambda p, x: (x @ p["w"]).mean(), fzero.optim.sgd(0.1))
    program = step_fn.lower(*step_fn.init({"w": torch.ones(4, 4)}), torch.ones(2, 4))
    program.save_trace("/dev/null")
    assert Path("/dev/null").is_char_device()
