"""The look of a report: one HTML file that needs nothing else, with figures and pictures inside.

`page.html` is the template; `page.css` and `page.js` are inserted into it. A content security policy forbids everything
that a page does not use: any other script, and anything from elsewhere. Figures are SVG, drawn twice, for a light and
for a dark page. Methods have the same colours in figures and tables.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

_FOLDER = Path(__file__).parent
# A page may use its own script, its own style sheets and `style` attributes, and pictures as data URIs.
_POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def render(style: str, template: str = "page.html", **parts: Any) -> str:
    """The whole page, from a template. style: CSS in addition to `page.css`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    script = (_FOLDER / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_typeset,
        trim_blocks=True,
    )
    environment.filters["minus"] = minus
    return environment.get_template(template).render(
        policy=Markup(_POLICY.format(script=digest)),
        style=Markup((_FOLDER / "page.css").read_text() + style),
        script=Markup(script),
        **parts,
    )


def _typeset(value: Any) -> Any:
    """Keep a number and its percent sign on one line. Markup is left alone."""
    return value.replace(" %", "\u00a0%") if type(value) is str else value


# ---------------------------------------------------------------------- colours


@dataclass(frozen=True)
class Theme:
    """Colours that are legible on one background.

    known: colours of methods that always have the same one.
    others: colours of all further methods, by their order on the page.
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


# ---------------------------------------------------------------------- figures

Draw = Callable[[Any, Theme], None]


def style(theme: Theme) -> Any:
    """Settings of matplotlib that all figures share."""
    return {
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


def _svg(draw: Draw, theme: Theme, height: float) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    out = io.BytesIO()
    with rc_context(style(theme)):
        figure = Figure(figsize=(5.6, height), layout="constrained")
        draw(figure.add_subplot(), theme)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()


@dataclass(frozen=True)
class PageFigure:
    """A figure for the page.

    title, caption: above and below it.
    alt: what it shows, for readers who cannot see it.
    light, dark: data URIs.
    """

    title: str
    caption: str
    alt: str
    light: str
    dark: str


def figure(title: str, draw: Draw, alt: str, caption: str, height: float = 3.5) -> PageFigure:
    """The figure that `draw(axes, theme)` makes."""
    return PageFigure(title, caption, alt, _svg(draw, LIGHT, height), _svg(draw, DARK, height))


def rate_edges(offers: int, at_most: int = 25) -> list[float]:
    """Histogram edges in percent for rates k / `offers`, with equally many possible rates in each bin; otherwise some
    bins would tower over others."""
    width = -(-(offers + 1) // at_most)
    return [100 * (k - 0.5) / offers for k in range(0, offers + 1 + width, width)]


# ------------------------------------------------------------------ other parts


def minus(text: str) -> str:
    """The text with minus signs as wide as a plus; hyphens stay."""
    return re.sub(r"(?<!\w)-(?=[\d ])", "−", text)


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
