"""The demo's page: one HTML file that needs nothing else, with figures and images inside."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..report.page import document, figure, gallery, method_style, percent, png, table
from . import plots
from .demo import BATCH_SIZE, CUT, MAX_SHIFT, METHODS, Digits, Record
from .summary import COLUMNS, Summary, headline, reading, table_rows

GALLERY = 40


def page(summary: Summary, records: Sequence[Record], digits: Digits, environment: dict[str, Any]) -> str:
    """The whole page as HTML."""
    first, *others = (f"{html.escape(s)}</p>" for s in reading(summary))
    sentences = "\n".join([f'<p class="lede">{first}', *(f"<p>{s}" for s in others)])
    title = html.escape(headline(summary))
    over = f"halfway demo · Partial Forward Blocking on {summary.train_images:,} handwritten digits"
    body = f"""<p class="over">{over}</p>
<h1>{title}</h1>
{sentences}
{_table(summary)}
{_curves(summary, records)}
{_galleries(summary, digits)}
{_retention(summary, digits)}
{_setup(summary)}
{_footer(environment)}"""
    return document(f"halfway demo: {headline(summary)}", body, method_style(METHODS))


def _table(summary: Summary) -> str:
    n = summary.settings.seeds
    return f"""{table(COLUMNS, table_rows(summary), METHODS)}
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
        figure(
            "By epoch",
            plots.accuracy_by_epoch(records, summary),
            f"Line plot of test accuracy after each epoch. {finals}.",
            "Every method takes the same number of steps, so this says how much a step teaches.",
        )
    }
{
        figure(
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
it was in that it survived, over all seeds. Pure chance (random pruning) retained images in {percent(random.min())} to
{percent(random.max())}; PFB in {percent(rates.min())} to {percent(rates.max())}.</p>
<div class="pair">
{_gallery("Pruned most often", "common, says the density at the cut", pruned, rates, digits)}
{_gallery("Retained most often", "rare, says the density at the cut", retained, rates, digits)}
</div>"""


def _gallery(title: str, note: str, rows: Tensor, rates: Tensor, digits: Digits) -> str:
    items = []
    for row in rows.tolist():
        label, rate = int(digits.train_labels[row]), percent(rates[row])
        image = f'<img src="{_ink(digits.pixels[row])}" width="32" height="32" alt="digit {label}, retained in {rate}">'
        items.append(f"<li>{image}<span><b>{label}</b>&ensp;{rate}</span></li>")
    return gallery(title, note, items, "ink")


def _retention(summary: Summary, digits: Digits) -> str:
    rates = plots.class_rates(summary.retention["pfb"], digits.train_labels)
    by_class = ", ".join(f"digit {c}: {percent(r)}" for c, r in rates.items())
    spread = {m: percent(summary.retention[m].std(), 1) for m in ("random", "pfb")}
    return f"""<h2>Who pays for the pruning</h2>
<div class="pair">
{
        figure(
            "Retention per class",
            plots.retention_by_class(summary, digits),
            f"Bar chart of the share of each class that PFB retained. {by_class}.",
            "PFB does not look at labels, so classes that look alike at the cut can be thinned more than others.",
        )
    }
{
        figure(
            "Retention per image",
            plots.retention_histogram(summary),
            "Histogram of retention rates of training images under random pruning and under PFB; "
            f"standard deviation {spread['random']} and {spread['pfb']}.",
            f"Standard deviation between images: random {spread['random']}, PFB {spread['pfb']}. "
            "The wider the curve, the more the same images are pruned again and again.",
        )
    }
</div>"""


def _setup(summary: Summary) -> str:
    s, schedule, share = summary.settings, summary.settings.schedule, percent(summary.settings.prune_ratio)
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


def _ink(pixels: Tensor) -> str:
    """A grey image (H, W) uint8 as a data URI, dark on light like ink."""
    return png(255 - pixels.to(torch.uint8))
