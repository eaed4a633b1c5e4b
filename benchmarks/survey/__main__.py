"""How many models run through the traced executor, of all that the libraries at hand have.

    python -m benchmarks.survey                       # all, a table of what is not plainly traced
    python -m benchmarks.survey --libraries torch --only LSTM Conv
    python -m benchmarks.survey --json FILE; python -m benchmarks.survey --read FILE --markdown
    python -m benchmarks.survey --save DIR; python -m benchmarks.survey --load DIR

A model is *traced*, or traced with `Config(opaque="auto")` (the submodules that it wraps are
named), or refused (the words are shown). Each takes one step at stage 3 (SGD), whose gradients are
compared with `loss.backward()`; one that draws random numbers in training is compared in eval mode.
Libraries that are not installed are left out, and named. Models whose own forward and backward fail
in plain PyTorch are no subjects, and are counted apart. With `--save` and `--load` a second process
must compute the same losses bit for bit from the saved Programs, and stage nothing.
"""

import argparse
import contextlib
import io
import json
import re
import signal
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fzero
from benchmarks.survey import elsewhere, in_torch
from benchmarks.survey.subjects import Built, Subject
from fzero.errors import FzeroError, TraceError
from fzero.transforms import recorded

TRACED, AUTO, REFUSED, NONE = "traced", "opaque", "refused", "fails in plain PyTorch"
Row = dict[str, Any]


class Late(BaseException):  # which nobody takes for a refusal
    """A model took longer than it may."""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise `Late` in what takes longer."""

    def late(*_: Any) -> None:
        raise Late(f"{seconds} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def built(subject: Subject, training: bool = True) -> Built:
    """The same in every call and process."""
    torch.manual_seed(0)
    found = subject.build()
    _wake(found.module)
    return found if training else found._replace(module=found.module.eval())


def _wake(module: torch.nn.Module) -> None:
    """Give values to weights that start at zero or next to it: gradients behind one are zero."""
    for p in module.parameters():
        largest = float(p.detach().abs().max()) if p.is_floating_point() and p.numel() else 1.0
        if largest < 1e-3 and (largest or p.dim() > 1):
            torch.nn.init.normal_(p, std=0.05)


def trains(subject: Subject) -> bool:
    """Whether training is compared: not where forward draws random numbers, others in a step."""
    module, batch, loss_of = built(subject)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loss_of(module, batch)
    # what seeds by itself, as reversible layers do, need not have drawn
    return torch.initial_seed() != 1 or torch.equal(before, torch.get_rng_state())


def plain(subject: Subject, training: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of `loss.backward()`."""
    module, batch, loss_of = built(subject, training)
    torch.manual_seed(1)
    loss = loss_of(module, batch)
    loss.backward()
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return loss.detach(), {n: g.to_dense() if g.is_sparse else g for n, g in grads.items()}


class Run:
    """A step function of a subject and its state."""

    def __init__(self, subject: Subject, opaque: Any, training: bool = True) -> None:
        module, self.batch, loss_of = built(subject, training)
        apply, params, buffers = fzero.functionalize(module, buffers=True)

        def model_fn(params: Any, state: Any, batch: Any) -> tuple[Tensor, Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal state
                out, state = apply(params, state, *args, **kwargs)
                return out

            return loss_of(call, batch), state

        frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
        cfg = fzero.Config(stage=3, frozen=frozen, opaque=opaque)
        self.step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.0, momentum=0.9), cfg)
        self.state = self.step_fn.init(params, buffers)

    def step(self) -> Tensor:
        """One step's loss."""
        self.state = self.step_fn(*self.state, self.batch)
        return self.state[1].metrics["loss"].clone()

    def gradients(self) -> dict[str, Tensor]:
        """Those of the first step, which momentum keeps."""
        traces = fzero.unshard(self.state[1].inner.trace)
        return {name: x for name, x in traces.items() if x is not None}


def words_of(error: BaseException) -> str:
    """What an error says, in one line."""
    text = str(error).strip().splitlines()
    line = text[0] if text else ""
    line = line.removeprefix("the model function can't be staged out: ").split(" at /")[0]
    return line if isinstance(error, FzeroError) else f"{type(error).__name__}: {line}"


def tried(subject: Subject) -> tuple[Row, Run | None]:
    """What became of one model."""
    row: Row = {"name": subject.name, "library": subject.library}
    try:
        training = trains(subject)
        loss, grads = plain(subject, training)
    except Exception as error:  # whatever the libraries raise
        return row | {"kind": NONE, "words": words_of(error)}, None
    if not grads:
        return row | {"kind": NONE, "words": "no gradient"}, None
    for opaque, kind in (((), TRACED), ("auto", AUTO)):
        try:
            run = Run(subject, opaque, training)
            found = run.step()
        except TraceError as error:
            row["words"] = words_of(error)
            continue
        except (Late, KeyboardInterrupt):
            raise
        except Exception as error:
            return row | {"kind": REFUSED, "words": words_of(error)}, None
        program = run.step_fn.lower(*run.state, run.batch)
        islands = [line for line in program.log if line.startswith("opaque")]
        largest = max(float(g.abs().max()) for g in grads.values() if g.numel())
        apart = max(
            float((x - grads.get(n, torch.zeros_like(x))).abs().nan_to_num().max())
            for n, x in run.gradients().items()
            if x.numel()
        )
        row |= {"kind": kind, "error": apart / (largest or 1.0), "loss": float(loss - found)}
        row["islands"] = islands[0] if islands else ""
        row["training"] = training
        return row, run
    return row | {"kind": REFUSED}, None


def saved(row: Row, run: Run, folder: Path) -> None:
    """Save its Programs and its losses."""
    try:
        run.step_fn.save_programs(folder)
        losses = torch.stack([run.step() for _ in range(2)])
        torch.save(losses, folder / "losses")
    except FzeroError as error:
        row["saved"] = f"refused: {error!s}"


def loaded(subject: Subject, folder: Path) -> Row:
    """Whether this process computes the same from what was saved, and stages nothing."""
    row: Row = {"name": subject.name, "library": subject.library}
    recorded_here: list[str] = []
    init = recorded.Recorded.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        recorded_here.append(self.program.name)

    recorded.Recorded.__init__ = noted
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            auto = "auto" if (folder / "auto").exists() else ()
            run = Run(subject, auto, training=trains(subject))
            run.step_fn.load_programs(folder)
            run.step()
            losses = torch.stack([run.step() for _ in range(2)])
        told = [str(w.message) for w in said if "are not used" in str(w.message)]
    finally:
        recorded.Recorded.__init__ = init
    wanted = torch.load(folder / "losses")
    row["recorded"] = recorded_here
    row["equal"] = losses.numpy().tobytes() == wanted.numpy().tobytes()
    row["kind"] = "loaded" if row["equal"] and not recorded_here else "not loaded"
    row["words"] = "; ".join(told)
    return row


def main() -> None:
    """Run the survey."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--libraries", nargs="+", default=[])
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--seconds", type=int, default=120, help="that a model may take")
    parser.add_argument("--json", type=Path, help="a line of JSON per model")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="such lines; run nothing")
    parser.add_argument("--markdown", action="store_true", help="the names, for docs/models.md")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [x for x in read(args.read) if x["library"] in (args.libraries or [x["library"]])]
    if args.read:
        print(markdown(rows) if args.markdown else summary(rows))
        return
    missing: set[str] = set()
    for subject in chain(in_torch.subjects(), elsewhere.subjects()):
        if args.libraries and subject.library not in args.libraries:
            continue
        if args.only and not any(part in subject.name for part in args.only):
            continue
        if not subject.installed:
            missing.add(subject.library)
            continue
        folder = Path(args.save or args.load or ".") / f"{subject.library}-{subject.name}"
        if args.load and not (folder / "losses").exists():
            continue
        try:
            with within(args.seconds), contextlib.redirect_stdout(io.StringIO()):
                if args.load:
                    row = loaded(subject, folder)
                else:
                    row, run = tried(subject)
                    if args.save and run is not None:
                        folder.mkdir(parents=True, exist_ok=True)
                        if row["kind"] == AUTO:
                            (folder / "auto").touch()
                        saved(row, run, folder)
        except Late as late:
            row = {"name": subject.name, "library": subject.library, "kind": "late"}
            row["words"] = words_of(late)
        except Exception as error:
            row = {"name": subject.name, "library": subject.library, "kind": "broke"}
            row["words"] = words_of(error)
        rows.append(row)
        print(_shown(row), file=sys.stderr, flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(markdown(rows) if args.markdown else summary(rows))
    for name in sorted(missing):
        print(f"{name} is not installed: left out")


def read(files: Iterable[Path]) -> list[Row]:
    """What earlier runs have found, of each model the last; in the survey's order."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    found = {(row["library"], row["name"]): row for row in lines}
    every = chain(in_torch.subjects(), elsewhere.subjects())
    keys = [(subject.library, subject.name) for subject in every]
    return [found[key] for key in keys if key in found]


def markdown(rows: list[Row]) -> str:
    """Each library's models by name: traced, with which opaque parts, refused with which words."""
    count = Counter(row["kind"] for row in rows if row["kind"] != NONE)
    share = count[TRACED] / count.total()
    ran = [row["error"] for row in rows if "error" in row]
    parts = [
        f"Of {count.total()} models {count[TRACED]} are traced ({share:.0%}), "
        f"{count[AUTO]} with opaque parts, {count[REFUSED]} refused. {ran.count(0.0)} have the "
        "gradients of plain PyTorch to the bit; elsewhere the largest difference over the largest "
        f"gradient is {max(ran):.0e}.",
        summary(rows),
    ]
    for library in dict.fromkeys(row["library"] for row in rows):
        said: dict[str, list[str]] = {}
        # a stable sort: the survey's order within a kind
        for row in sorted(rows, key=lambda row: (row["kind"] != TRACED, row["kind"])):
            if row["library"] == library:
                said.setdefault(_became(row), []).append(row["name"])
        for became, names in said.items():
            parts.append(f"**{library}**, {became}: {_listed(names)}.")
    wrap = partial(textwrap.fill, width=110, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(x if x.startswith("|") else wrap(x) for x in parts)


def _listed(names: list[str]) -> str:
    """Names; what follows the comma of five and more stands once, before them."""
    ends = Counter(name.partition(", ")[2] for name in names)
    groups: dict[str, list[str]] = {}
    for name in names:
        first, _, end = name.partition(", ")
        many = end and ends[end] >= 5
        groups.setdefault(end if many else "", []).append(
            first if many else name.replace(", ", " ")
        )
    return "; ".join(
        f"{end}: {', '.join(of)}" if end else ", ".join(of) for end, of in groups.items()
    )


def _became(row: Row) -> str:
    return row["kind"] if row["kind"] == TRACED else f"{row['kind']}: {_why(row)}"


def _why(row: Row) -> str:
    if not row.get("islands"):
        return row.get("words", "").split(". ")[0].split(": ")[0]
    # blocks and layers are alike
    parts = row["islands"].removeprefix("opaque: ").split(", ")
    starred = dict.fromkeys(re.sub(r"(?<=\.)\d+|^\d+", "*", part) for part in parts)
    shown = ", ".join(f"`{part}`" if part != "all" else "the whole" for part in [*starred][:3])
    return f"{shown}{', ...' * (len(starred) > 3)}"


def _shown(row: Row) -> str:
    more = [f"{row['error']:.0e}"] if "error" in row else []
    more += [str(row[k]) for k in ("islands", "words", "saved") if row.get(k)]
    return f"{row['library']:16} {row['name']:36} {row['kind']:8} {' | '.join(more)}"


def summary(rows: list[Row]) -> str:
    """A row per library: how many of its models became what."""
    found = {row["kind"] for row in rows}
    kinds = [kind for kind in (TRACED, AUTO, REFUSED) if kind in found]
    kinds += sorted(found - set(kinds))
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    count = Counter((row["library"], row["kind"]) for row in rows)
    lines = [["library", *kinds], ["---"] * (len(kinds) + 1)]
    for library in libraries:
        lines.append([library, *(str(count[library, kind]) for kind in kinds)])
    totals = [str(sum(count[library, kind] for library in libraries)) for kind in kinds]
    lines.append(["all", *totals])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
