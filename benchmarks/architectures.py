"""Which real models stage out, and how near their gradients are to `loss.backward()`.

python -m benchmarks.architectures            # writes the table into docs/models.md
python -m benchmarks.architectures --print    # only prints it
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

from fzero.errors import FzeroError, TraceError
from tests.models.compare import Outcome, batch_of, error, errors_on_ranks, plain, scale, stepped
from tests.models.zoo import CASES, Case
from tests.ranks import close_ranks, run_ranks

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEAD = ("model", "front end", "nodes", "staged out in", "1 rank", "2 ranks", "eager: 1; 2 ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the table of docs/models.md.")
    parser.add_argument("--print", action="store_true", dest="only_print")
    only_print = parser.parse_args().only_print
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [case for case in CASES if case.installed]
    try:
        table = "\n".join([_row(HEAD), _row(["---"] * len(HEAD)), *map(_measured, cases)])
    finally:
        close_ranks()
    if only_print:
        print(table)
        return
    text = DOCUMENT.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def _measured(case: Case) -> str:
    """The case's row."""
    print(f"{case.name} ...", file=sys.stderr)
    batch = batch_of(case)
    theirs = plain(case, batch)
    cells = ["", "", "", "", ""]
    try:
        ours = stepped(case, batch, stage=3)
    except TraceError as refusal:
        cells[0] = _reason(refusal)
    else:
        start = time.perf_counter()
        stepped(case, batch, stage=3)  # the second time: without what torch does once
        seconds = time.perf_counter() - start
        pairs = [(3, "traced"), (1, "traced")]
        cells = [
            f"`{ours.front_end}`",
            str(len(ours.program.graph.nodes)),
            f"{seconds:.1f} s",
            _shown(_relative(ours, theirs)),
            ", ".join(_shown(_on_two_ranks(case, *pair)) for pair in pairs),
        ]
    return _row([case.name, *cells, _eager(case, theirs)])


def _eager(case: Case, theirs: Outcome) -> str:
    try:
        ours = stepped(case, batch_of(case), lower=False, stage=3, executor="eager")
        return f"{_shown(_relative(ours, theirs))}; {_shown(_on_two_ranks(case, 3, 'eager'))}"
    except FzeroError as refusal:
        return _reason(refusal)


def _on_two_ranks(case: Case, stage: int, executor: str) -> float:
    found = run_ranks(2, errors_on_ranks, [case.name], stage, executor, timeout=120)
    return max(errors[case.name] for errors in found)


def _relative(ours: Outcome, theirs: Outcome) -> float:
    return error(ours, theirs) / scale(theirs)


def _shown(value: float) -> str:
    return "**0**" if value == 0 else f"{value:.0e}"


def _reason(refusal: Exception) -> str:
    """What a TraceError found, without where."""
    line = str(refusal).splitlines()[0].removeprefix("the model function can't be staged out: ")
    return f"refused: {line.split(' at /')[0]}"


def _row(cells: "list[str] | tuple[str, ...]") -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
