"""The command line of `python -m fzero.simulate`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fzero.errors import ConfigError, FzeroError
from fzero.program.machines import HARDWARE, resolve_hardware
from fzero.simulation.models import MODELS, REMAT, resolve_model
from fzero.simulation.report import Report
from fzero.simulation.sweep import Candidate, Job, as_table, candidates, sweep

_EXAMPLES = """
examples:
  python -m fzero.simulate --model llama3-70b --world 512 --hardware h100
  python -m fzero.simulate --model llama3-8b --world 64 --rows 2 --remat dots --replicate 8
  python -m fzero.simulate --model llama3-8b --world 64 --rows 4 --sweep
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate as the command line says; the exit code: 0, or 2 if it can't be done."""
    args = _parser().parse_args(argv)
    try:
        code = _sweep(args) if args.sweep else _one(args)
        sys.stdout.flush()
        return code
    except FzeroError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except BrokenPipeError:  # `| head` has read enough; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fzero.simulate",
        description="Memory, traffic and time of a training step in a world that isn't there. "
        "Nothing is run, and nothing of the model's size is allocated.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help=f"one of {', '.join(MODELS)}")
    add("--world", type=int, required=True, metavar="N", help="ranks")
    add("--hardware", default="h100", metavar="NAME", help=f"one of {', '.join(HARDWARE)} [h100]")
    add("--stage", type=int, default=3, choices=range(4), help="of ZeRO [3]")
    add("--replicate", type=int, default=1, metavar="N", help="copies of the shards: HSDP [1]")
    add("--rows", type=int, default=1, metavar="N", help="sequences of a rank in a step [1]")
    add("--sequence", type=int, metavar="N", help="tokens in a sequence [the model's]")
    add("--layers", type=int, metavar="N", help="layers [the model's]")
    add("--accum", type=int, default=1, metavar="N", help="micro-batches of a step [1]")
    add(
        "--remat",
        default="full",
        choices=REMAT,
        help="what backward computes again of each layer: none, all but products and attention "
        "(dots), everything (full) [full]",
    )
    add("--precision", default="bf16", choices=["bf16", "fp16", "fp32"], help="[bf16]")
    add("--offload", action="store_true", help="masters and optimizer state in host memory")
    add("--activations", action="store_true", help="all values of forward that can wait there too")
    add("--exact", action="store_true", help="record every layer instead of reckoning from few")
    add("--sweep", action="store_true", help="search stage, HSDP, accumulation, remat and offload")
    add("--candidates", type=int, default=30, metavar="N", help="of a sweep, at most [30]")
    add("--workers", type=int, metavar="N", help="processes of a sweep [one for each core]")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--plot", metavar="FILE", help="draw the step (.png, .svg); records every layer")
    return parser


def _job(args: argparse.Namespace) -> Job:
    shape = resolve_model(args.model)
    for name in ("world", "rows", "accum", "replicate", "sequence", "layers", "candidates"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: must be 1 or more.")
    if args.world % args.replicate:
        raise ConfigError(
            f"--replicate {args.replicate} does not divide --world {args.world}; every copy has "
            "equally many ranks."
        )
    if args.rows % args.accum:
        raise ConfigError(
            f"--accum {args.accum} does not divide --rows {args.rows}; a rank's sequences are cut "
            f"into equal micro-batches. Pass --rows {args.accum}, or a multiple of it."
        )
    if args.sequence and shape.gpt2 and args.sequence > shape.sequence:
        raise ConfigError(
            f"--sequence {args.sequence}: {args.model} has positions for {shape.sequence} tokens."
        )
    if args.plot:
        _check_picture(Path(args.plot))
    return Job(
        replace(shape, layers=args.layers or shape.layers),
        args.rows,
        args.sequence or shape.sequence,
        args.world,
        resolve_hardware(args.hardware),
        None if args.precision == "fp32" else args.precision,
        args.exact or bool(args.plot),
    )


def _check_picture(path: Path) -> None:
    """Before anything is simulated: a picture is drawn at the end."""
    if path.suffix not in _PICTURES:
        raise ConfigError(f"--plot {path}: name a file that ends with {' or '.join(_PICTURES)}.")
    if path.is_dir():
        raise ConfigError(f"--plot {path}: that is a folder; name a file that isn't there.")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}; make it first.")


_PICTURES = (".png", ".svg")


def _one(args: argparse.Namespace) -> int:
    candidate = Candidate(
        args.stage, args.replicate, args.accum, args.remat, args.offload, args.activations
    )
    report = _job(args).run(candidate)
    print(report.to_json(indent=1) if args.json else report)  # noqa: T201
    if args.plot:
        report.plot(args.plot)
    return 0


def _sweep(args: argparse.Namespace) -> int:
    job = _job(args)
    if args.plot:
        raise ConfigError("--plot draws one step: pass it without --sweep, and the best's options.")
    those = candidates(job, args.candidates)
    if not those:
        raise ConfigError(
            f"{args.model} on {args.world} ranks of {job.hardware.name} fits with no stage, nor "
            "with offload: parameters and optimizer state alone are more. Pass a larger --world."
        )

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)  # noqa: T201

    rows = sweep(job, those, workers=args.workers, tell=tell)
    if args.json:
        found = [
            {"candidate": vars(one), "report": json.loads(result.to_json())}
            for one, result in rows
            if isinstance(result, Report)
        ]
        print(json.dumps(found, indent=1))  # noqa: T201
    else:
        print(as_table(rows))  # noqa: T201
    return 0
