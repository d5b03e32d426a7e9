"""The look that all pages share: one HTML file that needs nothing else, with figures and pictures inside.

A content security policy forbids all that a page does not use: scripts, and whatever comes from elsewhere.
Figures are SVG, drawn twice: for a light and for a dark page. Method colours are the same in figures and tables.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# What a page is made of: style sheets and `style` attributes within it, and pictures as data URIs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

STYLE = """
:root { --paper:#fbfaf7; --ink:#2b2b28; --soft:#6f6e69; --line:#e4e2dc; --card:#fff; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --paper:#1c1c1a; --ink:#e8e6df; --soft:#a3a19a; --line:#3b3b38; --card:#242422; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--paper); color:var(--ink); line-height:1.6;
       font-family: ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width:1080px; margin:0 auto; padding:56px 24px 72px; }
.over { color:var(--soft); margin:0 0 8px; }
h1 { font-family: Georgia, "Iowan Old Style", "Times New Roman", serif; font-weight:600;
     font-size:clamp(1.8rem, 4vw, 2.7rem); line-height:1.18; margin:0 0 20px; max-width:24em; text-wrap:balance; }
h2 { font-size:1.25rem; margin:52px 0 6px; }
h3 { font-size:1rem; margin:0 0 4px; }
p { margin:0 0 10px; max-width:48em; }
.lede { font-size:1.14rem; }
.soft, figcaption, footer { color:var(--soft); font-size:.92rem; }
.scroll { overflow-x:auto; margin:28px 0 8px; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; white-space:nowrap; }
th { text-align:left; font-weight:500; color:var(--soft); font-size:.86rem; padding:6px 18px 8px 0;
     border-bottom:1px solid var(--line); vertical-align:bottom; white-space:normal; }
td { padding:9px 18px 9px 0; border-bottom:1px solid var(--line); }
td:first-child { font-weight:600; }
.key { display:inline-block; width:.72em; height:.72em; border-radius:50%; margin-right:.55em; }
.pair { display:grid; grid-template-columns:repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap:22px;
        margin-top:18px; }
figure, .card { margin:0; background:var(--card); border:1px solid var(--line); border-radius:10px; padding:18px; }
figure img { display:block; width:100%; height:auto; margin:8px 0; }
.gallery { display:grid; grid-template-columns:repeat(8, minmax(0, 1fr)); gap:8px 7px; margin:14px 0 0; padding:0;
           list-style:none; }
.gallery img { display:block; width:100%; height:auto; border-radius:5px; border:1px solid var(--line); }
@media (prefers-color-scheme: dark) { .ink img { filter: invert(.86); border-color:#ccc; } }
.gallery span { display:block; font-size:.68rem; line-height:1.7; color:var(--soft); text-align:center;
                white-space:nowrap; letter-spacing:-.01em; font-variant-numeric:tabular-nums; }
.gallery b { color:var(--ink); font-weight:600; }
code { font-family: ui-monospace, "SF Mono", Consolas, monospace; font-size:.9em; }
footer { margin-top:52px; border-top:1px solid var(--line); padding-top:18px; }
@media (max-width:520px) { .gallery { grid-template-columns:repeat(5, minmax(0, 1fr)); } main { padding-top:32px; } }
"""


# ---------------------------------------------------------------------- colours


@dataclass(frozen=True)
class Theme:
    """Colours that are legible on one background.

    known: methods that always have the same colour. others: for all further methods, by their order on the page.
    """

    text: str
    faint: str
    on_bars: str
    known: dict[str, str]
    others: tuple[str, ...]

    def colours(self, methods: Sequence[str]) -> dict[str, str]:
        """A colour for each method, distinct until the palette is used up."""
        rest = [m for m in dict.fromkeys(methods) if m not in self.known]
        palette = {m: self.others[i % len(self.others)] for i, m in enumerate(rest)}
        return {m: self.known.get(m) or palette[m] for m in methods}


LIGHT = Theme(
    "#3d3d3a",
    "#e4e2dc",
    "#ffffff",
    {"full": "#8a8a84", "random": "#d9822b", "pfb": "#2b6cb0"},
    ("#2f855a", "#b83280", "#6b46c1", "#8b6b11", "#0e7c86", "#c53030", "#5a6b1c", "#7b5142"),
)
DARK = Theme(
    "#d6d4cc",
    "#3b3b38",
    "#1c1c1a",
    {"full": "#9a9a94", "random": "#eda14d", "pfb": "#6cb0f5"},
    ("#68c791", "#f08cc4", "#b79cf5", "#d9bb55", "#5fcbd4", "#fc8181", "#b9cc6a", "#cfa08d"),
)


def method_style(methods: Sequence[str]) -> str:
    """CSS that gives each method its colour, as `var(--METHOD)`."""
    light, dark = ("; ".join(f"--{m}:{c}" for m, c in t.colours(methods).items()) for t in (LIGHT, DARK))
    return f":root {{ {light}; }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}; }} }}\n"


def key(method: str) -> str:
    """A dot in the method's colour."""
    return f'<span class="key" style="background:var(--{html.escape(method)})"></span>'


# ---------------------------------------------------------------------- figures

Draw = Callable[[Any, Theme], None]


def render(draw: Draw, height: float = 3.5) -> tuple[str, str]:
    """The figure that `draw(axes, theme)` makes, as two data URIs: light and dark."""
    return _svg(draw, LIGHT, height), _svg(draw, DARK, height)


def _svg(draw: Draw, theme: Theme, height: float) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 10.5,
        "text.color": theme.text,
        "axes.labelcolor": theme.text,
        "axes.edgecolor": theme.faint,
        "xtick.color": theme.text,
        "ytick.color": theme.text,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "svg.hashsalt": "halfway",
    }
    out = io.BytesIO()
    with rc_context(style):
        figure = Figure(figsize=(5.6, height), layout="constrained")
        draw(figure.add_subplot(), theme)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()


def figure(title: str, draw: Draw, alt: str, caption: str, height: float = 3.5) -> str:
    """A card with a figure, as HTML."""
    light, dark = render(draw, height)
    return (
        f"<figure><h3>{html.escape(title)}</h3><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{html.escape(alt)}"></picture>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def rate_edges(offers: int, at_most: int = 25) -> list[float]:
    """Histogram edges in percent for rates k / `offers`: equally many possible rates in each bin, otherwise some bins
    would tower over others."""
    width = -(-(offers + 1) // at_most)
    return [100 * (k - 0.5) / offers for k in range(0, offers + 1 + width, width)]


# ------------------------------------------------------------------ other parts


def pair(*cards: str) -> str:
    """Cards side by side, or one below the other where the window is narrow."""
    return f'<div class="pair">{"".join(cards)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], methods: Sequence[str]) -> str:
    """A table of plain text; each row begins with a dot in its method's colour. It scrolls where it is too wide."""
    head = "".join(f"<th>{html.escape(minus(c))}</th>" for c in header)
    body = ""
    for method, (name, *cells) in zip(methods, rows, strict=True):
        numbers = "".join(f"<td>{html.escape(minus(cell))}</td>" for cell in cells)
        body += f"<tr><td>{key(method)}{html.escape(name)}</td>{numbers}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def minus(text: str) -> str:
    """With minus signs that are as wide as a plus; hyphens stay."""
    return re.sub(r"(?<!\w)-(?=[\d ])", "−", text)


def gallery(title: str, note: str, items: Sequence[str], kind: str = "") -> str:
    """A card of small pictures, each an `<li>` of its own. kind: further CSS classes of the grid."""
    classes = f"gallery {kind}".strip()
    return (
        f'<div class="card"><h3>{html.escape(title)}</h3><span class="soft">{html.escape(note)}</span>'
        f'<ul class="{classes}">{"".join(items)}</ul></div>'
    )


def percent(rate: Tensor | float, digits: int = 0) -> str:
    """A share as text."""
    return f"{100 * float(rate):.{digits}f} %"


def png(pixels: Any) -> str:
    """A picture as a data URI. pixels: (H, W) or (H, W, 3), uint8, a tensor or an array."""
    return _encoded(pixels, "png", optimize=True)


def jpeg(pixels: Any) -> str:
    """The same, smaller, for photographs of more than a few pixels."""
    return _encoded(pixels, "jpeg", quality=82)


def _encoded(pixels: Any, kind: str, **options: Any) -> str:
    import numpy as np
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(out, format=kind.upper(), **options)
    return f"data:image/{kind};base64," + base64.b64encode(out.getvalue()).decode()


def document(title: str, body: str, style: str = "") -> str:
    """The whole page. style: CSS beside the shared one."""
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
    return text.replace(" %", "\u00a0%")
