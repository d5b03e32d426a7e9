"""The demo's page: one HTML file that needs nothing else, with figures and images inside."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import demo_plots as plots
from .demo import BATCH_SIZE, CUT, MAX_SHIFT, METHODS, Digits, Record
from .demo_summary import COLUMNS, Summary, headline, reading, table_rows

GALLERY = 40

_STYLE = """
:root { --paper:#fbfaf7; --ink:#2b2b28; --soft:#6f6e69; --line:#e4e2dc; --card:#fff;
        --full:#8a8a84; --random:#d9822b; --pfb:#2b6cb0; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --paper:#1c1c1a; --ink:#e8e6df; --soft:#a3a19a; --line:#3b3b38; --card:#242422;
          --full:#9a9a94; --random:#eda14d; --pfb:#6cb0f5; } }
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
@media (prefers-color-scheme: dark) { .gallery img { filter: invert(.86); border-color:#ccc; } }
.gallery span { display:block; font-size:.68rem; line-height:1.7; color:var(--soft); text-align:center;
                white-space:nowrap; letter-spacing:-.01em; font-variant-numeric:tabular-nums; }
.gallery b { color:var(--ink); font-weight:600; }
code { font-family: ui-monospace, "SF Mono", Consolas, monospace; font-size:.9em; }
footer { margin-top:52px; border-top:1px solid var(--line); padding-top:18px; }
@media (max-width:520px) { .gallery { grid-template-columns:repeat(5, minmax(0, 1fr)); } main { padding-top:32px; } }
"""


def page(summary: Summary, records: Sequence[Record], digits: Digits, environment: dict[str, Any]) -> str:
    """The whole page as HTML."""
    first, *others = (f"{html.escape(s)}</p>" for s in reading(summary))
    sentences = "\n".join([f'<p class="lede">{first}', *(f"<p>{s}" for s in others)])
    title = html.escape(headline(summary))
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>halfway demo: {title}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<p class="over">halfway demo · Partial Forward Blocking on {summary.train_images:,} handwritten digits</p>
<h1>{title}</h1>
{sentences}
{_table(summary)}
{_curves(summary, records)}
{_galleries(summary, digits)}
{_retention(summary, digits)}
{_setup(summary)}
{_footer(environment)}
</main>
</body>
</html>
"""
    return text.replace(" %", "\u00a0%")


def _table(summary: Summary) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in COLUMNS)
    body = ""
    for method, (name, *cells) in zip(METHODS, table_rows(summary), strict=True):
        key = f'<span class="key" style="background:var(--{method})"></span>'
        numbers = "".join(f"<td>{html.escape(cell).replace('-', '−')}</td>" for cell in cells)
        body += f"<tr><td>{key}{html.escape(name)}</td>{numbers}</tr>"
    n = summary.settings.seeds
    return f"""<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p class="soft">Accuracy on {summary.test_images:,} held-out images after the last epoch, mean ± standard error over
seeds (n&nbsp;=&nbsp;{n}); the error covers seeds, not the choice of test images. Differences are paired by seed. FLOPs
and time are relative to full data; <em>step</em> looks at the epochs that prune, <em>run</em> at all. Wall time: median
[quartiles] of each pruned epoch against the full one trained beside it.</p>"""


def _curves(summary: Summary, records: Sequence[Record]) -> str:
    finals = "; ".join(
        f"{row[0]} ends at {row[1]} %, for {m.flops[1]:.2f} of the FLOPs"
        for row, m in zip(table_rows(summary), summary.methods.values(), strict=True)
    )
    return f"""<h2>Accuracy, and what it cost</h2>
<p class="soft">Thin lines are seeds, thick ones their mean. The vertical axis is stretched towards 100 %, so that equal
heights are equal factors in the error.</p>
<div class="pair">
{
        _figure(
            "By epoch",
            plots.accuracy_by_epoch(records, summary),
            f"Line plot of test accuracy after each epoch. {finals}.",
            "Every method takes the same number of steps, so this says how much a step teaches.",
        )
    }
{
        _figure(
            "By cost",
            plots.accuracy_by_cost(records, summary),
            f"Line plot of test accuracy against FLOPs spent. {finals}.",
            "The plot that decides. Compare the dots: only there has a training finished its learning-rate schedule.",
        )
    }
</div>"""


def _galleries(summary: Summary, digits: Digits) -> str:
    rates = summary.retention["pfb"]
    order = rates.argsort(stable=True)
    pruned, retained = order[:GALLERY], order.flip(0)[:GALLERY]
    random = summary.retention["random"]
    return f"""<h2>What PFB pruned, and what it retained</h2>
<p class="soft">Of {summary.train_images:,} training images. Below each: its label, and the share of the pruned batches
it was in that it survived, over all seeds. Pure chance (random pruning) retained images in {_percent(random.min())} to
{_percent(random.max())}; PFB in {_percent(rates.min())} to {_percent(rates.max())}.</p>
<div class="pair">
{_gallery("Pruned most often", "common, says the density at the cut", pruned, rates, digits)}
{_gallery("Retained most often", "rare, says the density at the cut", retained, rates, digits)}
</div>"""


def _gallery(title: str, note: str, rows: Tensor, rates: Tensor, digits: Digits) -> str:
    items = ""
    for row in rows.tolist():
        label, rate = int(digits.train_labels[row]), _percent(rates[row])
        image = png(digits.pixels[row])
        items += f'<li><img src="{image}" width="32" height="32" alt="digit {label}, retained in {rate}">'
        items += f"<span><b>{label}</b>&ensp;{rate}</span></li>"
    return f'<div class="card"><h3>{title}</h3><span class="soft">{note}</span><ul class="gallery">{items}</ul></div>'


def _retention(summary: Summary, digits: Digits) -> str:
    rates = plots.class_rates(summary.retention["pfb"], digits.train_labels)
    by_class = ", ".join(f"digit {c}: {_percent(r)}" for c, r in rates.items())
    spread = {m: _percent(summary.retention[m].std(), 1) for m in ("random", "pfb")}
    return f"""<h2>Who pays for the pruning</h2>
<div class="pair">
{
        _figure(
            "Retention per class",
            plots.retention_by_class(summary, digits),
            f"Bar chart of the share of each class that PFB retained. {by_class}.",
            "PFB does not look at labels, so classes that look alike at the cut can be thinned more than others.",
        )
    }
{
        _figure(
            "Retention per image",
            plots.retention_histogram(summary),
            "Histogram of retention rates of training images under random pruning and under PFB; "
            f"standard deviation {spread['random']} and {spread['pfb']}.",
            f"Standard deviation between images: random {spread['random']}, PFB {spread['pfb']}. "
            "The wider the curve, the more the same images are pruned again and again.",
        )
    }
</div>"""


def _figure(title: str, draw: plots.Draw, alt: str, caption: str) -> str:
    light, dark = plots.render(draw)
    return (
        f"<figure><h3>{title}</h3><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{html.escape(alt)}"></picture>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _setup(summary: Summary) -> str:
    s, schedule, share = summary.settings, summary.settings.schedule, _percent(summary.settings.prune_ratio)
    return f"""<h2>How it was measured</h2>
<p>A ResNet of seven basic blocks learns scikit-learn's digits (8 × 8 px, enlarged to 32 px, shifted by up to
{MAX_SHIFT} px, a little noise) for {s.epochs} epochs in batches of {BATCH_SIZE}. <b>Full data</b> is the plain loop.
<b>Random</b> drops {share} of every batch before the model sees it. <b>PFB</b> runs the model up to <code>{CUT}</code>
on all of the batch and drops the {share} whose features are the most common. Both prune in epochs {schedule.start + 1}
to {schedule.stop}; the first and last see all data.</p>
<p>At each seed all three start from the same weights and see the same batches with the same augmentation. They advance
together, epoch by epoch, in rotating order.</p>"""


def _footer(environment: dict[str, Any]) -> str:
    facts = " · ".join(
        f"{html.escape(str(name))} {html.escape(str(value))}" for name, value in environment["versions"].items()
    )
    return f"""<footer><p><code>{html.escape(environment["command"])}</code></p>
<p>{facts} · {environment["cores"]} cores, {environment["threads"]} threads · {html.escape(environment["date"])} ·
trained in {environment["seconds"]:.0f} s · all numbers are in <code>results.json</code> beside this page</p>
</footer>"""


def _percent(rate: Tensor | float, digits: int = 0) -> str:
    return f"{100 * float(rate):.{digits}f} %"


def png(pixels: Tensor) -> str:
    """A grey image (H, W) uint8 as a data URI, dark on light like ink."""
    from PIL import Image

    out = io.BytesIO()
    ink = (255 - pixels.to(torch.uint8)).numpy()
    Image.fromarray(ink).save(out, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
