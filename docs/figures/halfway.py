"""Draw halfway.svg, the picture of the README: python docs/figures/halfway.py

Colours are of middle brightness, and text outside of boxes has a contrast of more than 4 on white and on near-black, so
that one file serves light and dark pages whatever decides between them.
"""

from __future__ import annotations

from pathlib import Path

OUT = Path(__file__).with_suffix(".svg")

WIDTH, HEIGHT = 860, 345
ROWS = 8
PRUNED = {1, 4, 5}
TOP, STEP = 74, 25  # of the rows
BATCH, SHALLOW, CUT, DEEP, LOSS = 64, (150, 330), 400, (470, 700), 770

TEXT, FORWARD, BACKWARD, GONE = "#767b84", "#2f7fc2", "#c2662f", "#8a8f98"
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


def text(x: float, y: float, words: str, size: int = 14, colour: str = TEXT, weight: str = "400") -> str:
    return (
        f"<text x='{x}' y='{y}' text-anchor='middle' font-size='{size}' font-weight='{weight}' fill='{colour}' {FONT}>"
        f"{words}</text>"
    )


def line(x0: float, x1: float, y: float, colour: str, extra: str = "") -> str:
    return f"<line x1='{x0}' y1='{y}' x2='{x1}' y2='{y}' stroke='{colour}' stroke-width='2' {extra}/>"


def box(span: tuple[int, int], label: str) -> str:
    """A part of the model, with its name; drawn above the lines that go through it."""
    left, right = span
    top, height = TOP - 22, STEP * (ROWS - 1) + 44
    return (
        f"<rect x='{left}' y='{top}' width='{right - left}' height='{height}' rx='10' fill='{FORWARD}' "
        f"fill-opacity='0.16' stroke='{FORWARD}' stroke-width='1.5'/>"
        + text((left + right) / 2, top - 12, label, 15, weight="600")
    )


def sample(row: int) -> list[str]:
    """One sample: forward above, backward below; a pruned one ends at the cut."""
    y = TOP + STEP * row
    pruned = row in PRUNED
    colour = GONE if pruned else FORWARD
    square = f"<rect x='{BATCH - 8}' y='{y - 8}' width='16' height='16' rx='3' fill='{colour}'/>"
    if pruned:
        stop = f"<path d='M{CUT - 6} {y - 6} l12 12 m0 -12 l-12 12' stroke='{GONE}' stroke-width='2.5' fill='none'/>"
        return [square, line(BATCH + 14, CUT - 14, y, GONE), stop]
    return [
        square,
        line(BATCH + 14, LOSS - 26, y - 4, FORWARD, "marker-end='url(#forward)'"),
        line(LOSS - 16, SHALLOW[0] + 8, y + 4, BACKWARD, "stroke-dasharray='5 4' marker-end='url(#backward)'"),
    ]


def marker(name: str, colour: str) -> str:
    return (
        f"<marker id='{name}' viewBox='0 0 8 8' refX='6' refY='4' markerWidth='5' markerHeight='5' orient='auto'>"
        f"<path d='M0 0 L8 4 L0 8 z' fill='{colour}'/></marker>"
    )


def draw() -> str:
    bottom = TOP + STEP * (ROWS - 1) + 22
    retained = ROWS - len(PRUNED)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' role='img' "
        f"aria-labelledby='title'><title id='title'>A batch of {ROWS} runs through the shallow layers. At the cut "
        f"{len(PRUNED)} samples are pruned; deep layers, loss and backward pass see the other {retained}.</title>",
        f"<defs>{marker('forward', FORWARD)}{marker('backward', BACKWARD)}</defs>",
        text(BATCH, TOP - 34, f"batch of {ROWS}", 15, weight="600"),
        box(SHALLOW, "shallow layers"),
        box(DEEP, "deep layers"),
        text(CUT, TOP - 34, "cut", 15, weight="600"),
        f"<line x1='{CUT}' y1='{TOP - 22}' x2='{CUT}' y2='{bottom}' stroke='{GONE}' stroke-dasharray='2 4'/>",
        *(part for row in range(ROWS) for part in sample(row)),
        f"<rect x='{LOSS - 14}' y='{TOP - 22}' width='68' height='{bottom - TOP + 22}' rx='10' fill='{BACKWARD}' "
        f"fill-opacity='0.16' stroke='{BACKWARD}' stroke-width='1.5'/>",
        text(LOSS + 20, TOP - 34, "loss", 15, weight="600"),
        text((SHALLOW[0] + SHALLOW[1]) / 2, bottom + 24, f"forward once, for all {ROWS}"),
        text(CUT, bottom + 24, f"{len(PRUNED)} pruned"),
        text((DEEP[0] + DEEP[1]) / 2, bottom + 24, f"only the {retained} retained samples"),
        *_legend(HEIGHT - 14),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(y: int) -> list[str]:
    return [
        line(250, 290, y - 4, FORWARD, "marker-end='url(#forward)'"),
        text(340, y, "forward"),
        line(480, 440, y - 4, BACKWARD, "stroke-dasharray='5 4' marker-end='url(#backward)'"),
        text(580, y, f"backward, for the {ROWS - len(PRUNED)} alone"),
    ]


if __name__ == "__main__":
    OUT.write_text(draw())
