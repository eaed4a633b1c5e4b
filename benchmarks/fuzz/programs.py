"""Programs: drawn at random, run both ways, shrunk while they still differ."""

import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import fzero
from benchmarks.fuzz import changes, ours, plain
from benchmarks.fuzz.pieces import KINDS, batch, build
from benchmarks.fuzz.sources import SOURCES
from benchmarks.fuzz.values import VALUES

Program = dict[str, Any]
TRACE = bool(os.environ.get("FUZZ_TRACE"))
PLAIN: Program = {
    "way": "traced", "stage": 0, "precision": "float64", "accum": 1, "clip": None, "opt": "sgd",
    "donate": True, "offload": False, "bucket_mb": 25, "buffers": True, "direct": False,
    "tie": False, "longer": [], "lr": None, "width": 3,
}  # fmt: skip
# pieces that compute something else when they run again, in plain PyTorch too
STATEFUL = ("normed", "statistics", "teacher", "counting", "words")


class Outcome(NamedTuple):
    """What came of a program: "same", "refused", "invalid", "raised" or "differs", and why."""

    kind: str
    why: str = ""


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    pick = rng.choice

    def value() -> str:
        return pick(list(VALUES))

    def piece() -> dict[str, Any]:
        kind = "reader" if rng.random() < 0.3 else pick(list(KINDS))
        made: dict[str, Any] = {"kind": kind, "hidden": pick((3, 4, 5, 6)), "wrap": None}
        if kind == "reader":
            made |= {"source": pick(list(SOURCES)), "value": value()}
            made["place"] = pick(("forward", "forward", "forward", "backward", "tensor hook"))
        if kind not in STATEFUL and rng.random() < 0.3:
            made["wrap"] = pick(("re-entrant", "not re-entrant", "function"))
        return made

    pieces = [piece() for _ in range(rng.randint(1, 4))]
    steps = rng.randint(2, 5)
    precision = pick(("float64",) * 4 + ("float32", "bf16"))
    exact = precision == "float64"
    program = {
        "seed": seed,
        "way": pick(("traced", "traced", "eager", "engine", "engine")),
        "stage": rng.randint(0, 3),
        "precision": precision,
        "accum": pick((1, 1, 2, 3)),
        "clip": pick((None, None, 0.05)),
        "opt": pick(("sgd", "momentum", "adam", "adamw", "lion", "masked")) if exact
        else pick(("sgd", "momentum")),
        "donate": rng.random() < 0.7,
        "offload": rng.random() < 0.15,
        "bucket_mb": pick((25, 25, 0.0001)),
        "buffers": rng.random() < 0.9,
        "direct": exact and rng.random() < 0.15,
        "tie": rng.random() < 0.3,
        "width": pick((3, 4, 5)),
        "steps": steps,
        "longer": [s for s in range(steps) if rng.random() < 0.15],
        "lr": {"source": pick(list(SOURCES)), "value": value()} if rng.random() < 0.3 else None,
        "pieces": pieces,
        "changes": [],
    }  # fmt: skip
    for _ in range(rng.randint(0, 5)):
        program["changes"].append(_change(rng, program))
    return program


def _change(rng: random.Random, program: Program) -> dict[str, Any]:
    pieces = program["pieces"]
    readers = [i for i, piece in enumerate(pieces) if piece["kind"] == "reader"]
    made: dict[str, Any] = {
        "at": rng.randint(0 if rng.random() < 0.2 else 1, program["steps"] - 1),
        "piece": rng.randrange(len(pieces)),
    }
    value = rng.choice(list(VALUES))
    if readers and rng.random() < 0.5:
        return made | {"do": "source", "piece": rng.choice(readers), "value": value}
    if program["lr"] and rng.random() < 0.4:
        return made | {"do": "lr", "value": value}
    group = rng.choice((changes.MODULE[1:], changes.MODULE[1:], changes.WRITES, changes.OTHER[:-1]))
    made["do"] = do = rng.choice(group)
    if do in changes.WRITES:
        return made | {"how": rng.choice(("clamp", "fill", "half", "line"))}
    if do in ("mode", "piece mode", "momentum", "buffer"):
        made["on"] = rng.random() < 0.5
    elif do == "which":
        made["on"] = rng.randint(0, 1)
    elif do == "wrap":
        stateless = pieces[made["piece"]]["kind"] not in STATEFUL
        options = (None, "re-entrant", "not re-entrant", "function")
        made["wrap"] = rng.choice(options) if stateless else None
    elif do in ("forward", "parameter hook"):
        made["by"] = rng.choice((0.5, -0.5))
    elif do == "add hook":
        made |= {"kind": rng.choice(changes.HOOKS), "value": value}
    return made


def play(trainer: Any, program: Program) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Run a program, and say what there is to compare after each step."""
    for step in range(program["steps"]):
        for change in program["changes"]:
            if change["at"] == step:
                measured = trainer.change(change, step)
                if measured is not None:
                    yield f"before step {step}", {"evaluated": measured}
        yield f"after step {step}", trainer.step(step)


def expected(program: Program, world: int) -> list[Any]:
    """What plain PyTorch gives, or the exception at the place where it raises."""
    out: list[Any] = []
    try:
        out.extend(play(plain.Plain(program, world), program))
    except Exception as error:  # a program that PyTorch doesn't take
        out.append(error)
    return out


def run(program: Program, rank: int = 0, world: int = 1) -> Outcome:
    """Run a program both ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = expected(program, world)
        if want and isinstance(want[-1], Exception) and len(want) == 1:
            return Outcome("invalid", f"{type(want[-1]).__name__}: {want[-1]}")
        try:
            trainer = ours.make(program, rank)
            found = play(trainer, program)
            for there in want:
                if isinstance(there, Exception):
                    return Outcome("invalid", f"{type(there).__name__}: {there}")
                where, values = next(found)
                if why := differs(there[1], values, program, rank):
                    return Outcome("differs", f"{where}: {why}")
            trainer.check_kept()
        except fzero.FzeroError as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        except AssertionError as error:
            return Outcome("differs", str(error))
        except Exception as error:
            if program["precision"] != "float64" and not _takes_low(program):
                return Outcome("invalid", f"in low precision: {error}")
            text = f"{type(error).__name__}: {error}"
            if "would change the parameter" in text:  # load_state_dict makes it a RuntimeError
                return Outcome("refused", text)
            if TRACE:
                traceback.print_exc()
            return Outcome("raised", text)
    return Outcome("same")


def _takes_low(program: Program) -> bool:
    """Whether plain PyTorch runs the module with low parameters and inputs, and other buffers."""
    low = torch.float32 if program["precision"] == "float32" else torch.bfloat16
    net = build(program, ours.PRECISIONS[program["precision"]][0])
    for p in net.parameters():
        p.data = p.data.to(low)
    try:
        net(*batch(program, 0, 0, 0, low)).backward()
    except Exception:  # whatever it is, it is PyTorch's
        return False
    return True


def differs(want: Any, got: Any, program: Program, rank: int) -> str:
    """What differs most, or nothing."""
    tolerance = ours.TOLERANCE[program["precision"]]
    worst = ""
    for name, there in want.items():
        if name not in got:
            continue
        here = got[name].detach().to(there.dtype)
        if name == "evaluated":
            there = there[rank]
        if here.shape != there.shape:
            return f"{name}: shape {tuple(here.shape)}, expected {tuple(there.shape)}"
        if not torch.allclose(here, there, rtol=tolerance, atol=tolerance, equal_nan=True):
            off = (here - there).abs().max().item() if here.numel() else 0.0
            worst = worst or f"{name}: off by {off:.2g}"
    return worst


def shrink(program: Program, bad: Callable[[Program], bool]) -> Program:
    """The smallest program found, by dropping choices one at a time, of which `bad` holds."""
    again = True
    while again:
        again = False
        for smaller in _smaller(program):
            if bad(smaller):
                program, again = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for key in ("changes", "pieces"):
        for i in range(len(program[key])):
            rest = program[key][:i] + program[key][i + 1 :]
            if rest or key == "changes":
                yield program | {key: rest}
    if program["steps"] > 1:
        last = program["steps"] - 1
        kept = [c for c in program["changes"] if c["at"] < last]
        yield program | {"steps": last, "changes": kept}
    for key, simple in PLAIN.items():
        if program[key] != simple and key != "way":
            yield program | {key: simple}
    for i, piece in enumerate(program["pieces"]):
        if piece["wrap"] is not None:
            pieces = [*program["pieces"]]
            pieces[i] = piece | {"wrap": None}
            yield program | {"pieces": pieces}
