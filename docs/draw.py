"""The diagrams of the documentation, as SVG: `python docs/draw.py` writes docs/pictures/*.svg.

360 units wide, so that a phone shows text in its real size; a background and colours of their own
for light and dark, as the reader's system says. `python docs/draw.py --check` compares instead.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "pictures"
WIDTH, LEFT = 360, 14
STYLE = """
.bg{fill:#fff}.t{fill:#1f2328}.s{fill:#57606a}.l{stroke:#8b949e}.o{fill:none;stroke:#8b949e}
.a{fill:#3f7fd0}.b{fill:#d97b29}.c{fill:#3d9a58}.d{fill:#9a6fd0}.e{fill:#c9585a}.f{fill:#9aa3ad}
text{font:13px system-ui,-apple-system,Segoe UI,Roboto,sans-serif}.s{font-size:12px}
.h{font-weight:600}
@media(prefers-color-scheme:dark){.bg{fill:#22252b}.t{fill:#e8ebef}.s{fill:#b3bac3}
.a{fill:#6ea3e8}.b{fill:#e89a55}.c{fill:#63bb7d}.d{fill:#b795e6}.e{fill:#e07f80}.f{fill:#7d8690}}
""".replace("\n", "")


# ---- what a picture is made of ----
def text(x: float, y: float, words: str, look: str = "t", anchor: str = "start") -> str:
    """Words whose baseline begins, has its middle or ends at x, y."""
    return f'<text class="{look}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, look: str) -> str:
    """A rectangle; its colour is a class of STYLE."""
    size = f'width="{width:.4g}" height="{height:g}"'
    return f'<rect class="{look}" x="{x:.4g}" y="{y:g}" {size} rx="2"/>'


def arrow(x: float, y: float, end: float) -> str:
    """Straight down, from y to end."""
    head = f"M{x - 4:g},{end - 6:g} L{x:g},{end:g} L{x + 4:g},{end - 6:g}"
    return f'<path class="o l" stroke-width="1.5" d="M{x:g},{y:g} L{x:g},{end:g} {head}"/>'


def legend(y: float, entries: Sequence[tuple[str, str]], step: float = 110) -> str:
    """Coloured squares with words, three in a row."""
    marks = []
    for i, (look, words) in enumerate(entries):
        x, line = LEFT + i % 3 * step, y + i // 3 * 19
        marks += [box(x, line - 10, 11, 11, look), text(x + 16, line, words, "s")]
    return "".join(marks)


def picture(height: float, title: str, parts: Sequence[str]) -> str:
    """A whole file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="520" '
        f'role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>"
        f'<rect class="bg" width="{WIDTH}" height="{height:g}" rx="6"/>{"".join(parts)}</svg>\n'
    )


# ---- the pictures ----
def step() -> str:
    """One step at stage 3 on three ranks, from shards to shards."""
    tall, ranks = 78, 3
    rows = [
        ("between steps: a rank has its part", "a", [1], "gather, before the first use"),
        ("forward: all parameters, for a moment", "a", [0, 1, 2], "and again for backward"),
        (
            "backward: gradients of its own rows",
            "b",
            [0, 1, 2],
            "reduce-scatter: sums, a part each",
        ),
        ("its part of the mean gradient", "b", [1], "clip by the norm of all, update"),
        ("new parameters, in parts again", "c", [1], ""),
    ]
    parts = [text(LEFT, 24, "A step at stage 3, three ranks", "t h")]
    for r in range(ranks):
        parts.append(text(LEFT + 55 + r * 110, 46, f"rank {r}", "s", "middle"))
    for i, (words, look, held, then) in enumerate(rows):
        y = 56 + i * tall
        for r in range(ranks):
            for part in range(ranks):
                x = LEFT + 6 + r * 110 + part * 33
                mine = len(held) == ranks or part == r
                parts.append(box(x, y, 30, 18, look if mine else "o"))
        parts.append(text(WIDTH / 2, y + 34, words, "t", "middle"))
        if then:
            parts += [
                arrow(40, y + 40, y + tall - 6),
                text(52, y + 58, then, "s"),
            ]
    return picture(56 + len(rows) * tall - 30, "The step of ZeRO stage 3", parts)


def stages() -> str:
    """Bytes a parameter between steps, by stage: Adam in float32 on 8 ranks."""
    world, scale = 8, 17.5
    parts = [
        text(LEFT, 24, "What a rank keeps, bytes a parameter", "t h"),
        text(LEFT, 42, "Adam in float32, 8 ranks", "s"),
    ]
    for stage in range(4):
        y = 62 + stage * 50
        sizes = [4 / (world if stage >= least else 1) for least in (3, 2, 1)]
        sizes[2] *= 2
        parts.append(text(LEFT, y + 4, f"stage {stage}", "t"))
        parts.append(text(WIDTH - LEFT, y + 4, f"{sum(sizes):g} bytes", "t", "end"))
        x = float(LEFT)
        for look, size in zip("abc", sizes, strict=True):
            parts.append(box(x, y + 11, size * scale, 18, look))
            x += size * scale + 1.5
    parts.append(legend(278, [("a", "parameters"), ("b", "gradients"), ("c", "moments")]))
    return picture(292, "Bytes that a rank keeps, by stage", parts)


# `fzero.simulate` of the model of docs/tutorials/memory.md with 8 blocks and 512 rows, 8 ranks:
# MiB at the fullest moment, by stage: parameters, optimizer, gradients and buckets, activations,
# temporaries and batch
MEASURED = {
    0: (16.05, 32.11, 1.00, 37.53, 5.00),
    1: (16.05, 4.01, 1.00, 37.53, 5.00),
    2: (16.05, 4.01, 1.00, 37.53, 5.00),
    3: (2.01, 4.01, 2.25, 37.53, 5.00),
}
# `program.frontier(points=8)` of its step at stage 3: MiB at the peak, percent of the FLOPs again
FRONTIER = [(50.81, 0.0), (44.57, 0.0), (36.06, 0.0), (31.54, 0.0)]
FRONTIER += [(27.54, 4.0), (22.56, 9.4), (19.78, 12.7)]


def memory() -> str:
    """What a rank holds at its fullest moment, by stage and category."""
    scale = 3.4
    parts = [
        text(LEFT, 24, "A rank at its fullest moment, MiB", "t h"),
        text(LEFT, 42, "8 blocks of width 256, 512 rows, 8 ranks", "s"),
    ]
    for stage, sizes in MEASURED.items():
        y = 62 + stage * 50
        parts.append(text(LEFT, y + 4, f"stage {stage}", "t"))
        parts.append(text(WIDTH - LEFT, y + 4, f"{sum(sizes):.0f} MiB", "t", "end"))
        x = float(LEFT)
        for look, size in zip("acbdf", sizes, strict=True):
            parts.append(box(x, y + 11, size * scale, 18, look))
            x += size * scale + 1
    entries = [("a", "parameters"), ("c", "optimizer"), ("b", "gradients")]
    parts.append(legend(278, [*entries, ("d", "activations"), ("f", "other")]))
    return picture(312, "Memory at the peak, by stage and category", parts)


def frontier() -> str:
    """Memory against what is computed a second time."""

    def across(mib: float) -> float:
        return 40 + mib * 5.6

    def up(percent: float) -> float:
        return 210 - percent * 11

    parts = [text(LEFT, 24, "Less memory for some FLOPs twice", "t h")]
    for percent in (0, 5, 10, 15):
        y = up(percent)
        parts.append(f'<path class="o" stroke-width=".5" d="M40,{y} H346"/>')
        parts.append(text(34, y + 4, f"{percent}%", "s", "end"))
    for mib in (10, 20, 30, 40, 50):
        parts.append(text(across(mib), 228, str(mib), "s", "middle"))
    line = " ".join(f"{across(m):.4g},{up(p):.4g}" for m, p in FRONTIER)
    parts.append(f'<polyline class="o" stroke-width="2" points="{line}"/>')
    for mib, percent in FRONTIER:
        parts.append(f'<circle class="a" cx="{across(mib):.4g}" cy="{up(percent):.4g}" r="5"/>')
    parts.append(text(across(50.81) + 4, up(0) - 12, "no limit", "s", "end"))
    parts.append(text(across(19.78) + 12, up(12.7) + 4, "the least", "s"))
    parts.append(text(WIDTH / 2, 246, "MiB at the peak of a rank", "s", "middle"))
    return picture(260, "Peak memory against FLOPs computed twice", parts)


Span = tuple[float, float]
LAYERS = 6
ORDERS = {  # layers that share a gather, and how many gathers come before the first is used
    "as recorded: all gathers first": (1, LAYERS),
    "sink: each gather at its first use": (1, 1),
    "bucket: two layers share a gather": (2, 1),
    "schedule: launched one ahead": (2, 2),
}


def timeline(shared: int, ahead: int) -> tuple[list[Span], list[Span], int]:
    """When layers are gathered and computed, and how many are whole at a time at most.

    A launch costs 1, a layer's bytes 1.5, its forward 3. A gather starts when the network is free
    and the bucket `ahead` before it has been computed.
    """
    gathers: list[Span] = []
    computes: list[Span] = []
    buckets = LAYERS // shared
    for i in range(buckets):
        used = computes[(i - ahead + 1) * shared - 1][1] if i >= ahead else 0.0
        start = max(gathers[-1][1] if gathers else 0.0, used)
        gathers.append((start, start + 1 + 1.5 * shared))
        if ahead == buckets and i < buckets - 1:
            continue  # nothing is computed before the last is there
        for done in range(len(computes), (i + 1) * shared):
            there = gathers[-1][1] if ahead == buckets else gathers[done // shared][1]
            start = max(computes[-1][1] if computes else 0.0, there)
            computes.append((start, start + 3))
    lives = [(gathers[k // shared][0], end) for k, (_, end) in enumerate(computes)]
    whole = max(sum(a <= start < b for a, b in lives) for start, _ in lives)
    return gathers, computes, whole


def passes() -> str:
    """What the passes do to the forward of six layers, on a time line."""
    scale = 9.9
    parts = [text(LEFT, 24, "Six layers forward, by pass", "t h")]
    parts.append(legend(44, [("a", "gather"), ("c", "compute")], 90))
    for i, (words, order) in enumerate(ORDERS.items()):
        y = 64 + i * 80
        gathers, computes, whole = timeline(*order)
        parts.append(text(LEFT, y + 8, words))
        for look, lane, spans in (("a", 15, gathers), ("c", 33, computes)):
            for start, stop in spans:
                width = (stop - start) * scale - 1.5
                parts.append(box(LEFT + start * scale, y + lane, width, 15, look))
        took = f"time {computes[-1][1]:g}, whole layers at once: {whole}"
        parts.append(text(LEFT, y + 63, took, "s"))
    return picture(62 + len(ORDERS) * 80, "Passes on a time line", parts)


PICTURES = {fn.__name__: fn for fn in (step, stages, memory, frontier, passes)}


def main() -> None:
    """Write the pictures, or compare them with what is there."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        path = FOLDER / f"{name}.svg"
        if "--check" not in sys.argv:
            path.write_text(draw())
        elif path.read_text() != draw():
            raise SystemExit(f"{path} is not what docs/draw.py draws: run it")


if __name__ == "__main__":
    main()
