"""The report of a comparison, or of single runs: one HTML page, see `page`.

Everything but pictures and centroids comes from the run folders. Those two need the data set; where it is gone, the
page says so in their place. The centroids need the model, too; one that is not halfway's own is built only if asked to:
a report is what one runs on other people's results.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from ..comparison import table, verdict
from ..comparison.results import Row, summarise
from . import page, plots, words
from .gallery import centroid_gallery, galleries
from .method import how_it_was_measured
from .pictures import load_pictures
from .retention import read_counts
from .retention import section as retention_section
from .runs import Runs, how_to_go_on

_STYLE = """
h1 small { display:block; font:1rem/1.5 ui-sans-serif, system-ui, "Segoe UI", Roboto, Arial, sans-serif;
           color:var(--soft); margin-top:12px; text-wrap:pretty; }
.scroll table { font-size:.9rem; }
.scroll th, .scroll td { padding-right:14px; }
.scroll th { font-size:.82rem; }
.scroll td:first-child { white-space:normal; min-width:11.5em; }
.over { overflow-wrap:anywhere; }
.gallery.wide { grid-template-columns:repeat(6, minmax(0, 1fr)); }
.gallery.wide span { line-height:1.35; padding-top:3px; overflow:hidden; text-overflow:ellipsis; }
.small-pixels img { image-rendering:pixelated; }
.centroids { display:grid; grid-template-columns:repeat(auto-fill, minmax(210px, 1fr)); gap:16px 22px;
             margin:14px 0 0; padding:0; list-style:none; }
.centroids div { display:grid; grid-template-columns:repeat(4, minmax(0, 1fr)); gap:4px; }
.centroids img { display:block; width:100%; height:auto; border-radius:5px; border:1px solid var(--line); }
.centroids span { display:block; font-size:.78rem; color:var(--soft); overflow:hidden; text-overflow:ellipsis;
                  white-space:nowrap; }
.centroids b { color:var(--ink); font-weight:600; font-variant-numeric:tabular-nums; }
.numbers th, .numbers td { vertical-align:baseline; }
.numbers th { font-size:.92rem; border-bottom-color:var(--line); padding-right:12px; }
.numbers td:first-child { font-weight:400; }
.note { border-left:3px solid var(--line); padding:2px 0 2px 14px; margin:18px 0; }
.note p:last-child, .card p:last-child { margin-bottom:0; }
.facts { display:grid; grid-template-columns:max-content minmax(0, 1fr); gap:5px 20px; margin:14px 0 18px; }
.facts dt { color:var(--soft); }
.facts dd { margin:0; overflow-wrap:anywhere; }
.command { display:block; background:var(--card); border:1px solid var(--line); border-radius:7px; padding:9px 13px;
           margin:0 0 8px; white-space:pre-wrap; overflow-wrap:anywhere; }
@media (max-width:520px) { .gallery.wide { grid-template-columns:repeat(4, minmax(0, 1fr)); }
  .facts { grid-template-columns:minmax(0, 1fr); gap:0; } .facts dd { margin-bottom:8px; } }
"""


def write(runs: Runs, root: str | None, title: str | None, trust: bool = False) -> str:
    """The page.

    Args:
        root: where the data lie; None: where they lay in training.
        title: the line above the headline; None: the recipe's name.
        trust: import and build whatever models the runs name.
    """
    rows = summarise(runs.groups, runs.timing["steps"])
    run = runs.first
    counts = read_counts(runs)
    pictures = load_pictures(runs.example.recipe, root, len(counts[runs.main].offered) if runs.main in counts else None)
    headline = verdict.headline(rows)
    notes = table.notes(rows, run.recipe, run.sessions[-1], runs.timing)
    over = title or f"halfway report · {run.recipe.name}"
    body = [
        f'<p class="over">{html.escape(over)}</p>',
        f"<h1>{html.escape(headline)}<small>"
        f"{html.escape(words.scale(run.recipe, run.sessions[-1]['data']))}</small></h1>",
        _sentences(verdict.reading(rows)),
        _unfinished(runs),
        _table(rows),
        f'<p class="soft">{html.escape(page.minus(notes))} Each interval stands on its '
        "own: of twenty, one is expected to miss.</p>",
        _cost(runs, rows),
        _curves(runs),
        retention_section(runs, counts, pictures),
        galleries(runs, counts, pictures),
        centroid_gallery(runs, pictures, trust),
        how_it_was_measured(runs),
    ]
    style = page.method_style(runs.methods) + _STYLE
    return page.document(f"{over}: {headline}", "\n".join(part for part in body if part), style)


# --------------------------------------------------------------------- sections


def _sentences(sentences: Sequence[str]) -> str:
    texts = [html.escape(page.minus(sentence)) for sentence in sentences]
    return "\n".join(f"<p>{text}</p>" if i else f'<p class="lede">{text}</p>' for i, text in enumerate(texts))


def _table(rows: Sequence[Row]) -> str:
    every = [table.COLUMNS, *(table.cells(row) for row in rows)]
    filled = [i for i in range(len(table.COLUMNS)) if any(line[i] for line in every[1:])]
    header, *lines = [[line[i].replace("p = ", "p\u00a0=\u00a0") for i in filled] for line in every]
    return page.table(header, lines, [row.group.method for row in rows])


def _unfinished(runs: Runs) -> str:
    if not runs.unfinished:
        return ""
    names = ", ".join(
        f"<b>{html.escape(run.path.name)}</b> ({_progress(run.metrics, run.steps)})" for run in runs.unfinished
    )
    commands = dict.fromkeys(how_to_go_on(run) for run in runs.unfinished)
    shown = "".join(f'<code class="command">{html.escape(command)}</code>' for command in commands)
    return f'<div class="note"><p>Not finished, and left out of all that follows: {names}. To go on:</p>{shown}</div>'


def _progress(metrics: list[dict[str, float]], steps: int) -> str:
    return f"{metrics[-1]['step'] / steps:.0%} trained" if metrics and steps else "not a round yet"


def _cost(runs: Runs, rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return ""
    score = f"{runs.first.recipe.score_name}, %"
    points = "; ".join(
        f"{row.group.label}: {row.mean:.2f} % at {row.flops[1]:.3f} (n = {len(row.scores)})" for row in rows
    )
    cards = [
        page.figure(
            "Score by cost",
            plots.score_by_cost(rows, score, values=runs.sweep is None),
            f"Final score against FLOPs of the whole run relative to full data. {points}.",
            "Large dots: mean ± standard error over seeds; small dots: seeds. Up is better, left is cheaper.",
            height=4.1,
        )
    ]
    if runs.sweep is not None:
        cards.append(
            page.figure(
                f"Score by {runs.sweep}",
                plots.score_by_setting(rows, runs.sweep, score),
                f"Final score against {runs.sweep}. {points}.",
                "Lines: mean over seeds; bands: from the worst seed to the best. Bands across the whole width: methods "
                "that do not look at this setting.",
                height=4.1,
            )
        )
    else:
        cards.append(
            '<div class="card"><h3>How to read it</h3>'
            "<p>Pruning within the batch makes steps cheaper, pruning before the epoch makes them fewer; either leaves "
            "less to learn from. A method is worth its cost if it lies above the line of its rivals <em>at the same "
            "FLOPs</em>, not at the same p: whoever chooses by looking has to run part of the model on samples that "
            "are then pruned, while random pruning looks at nothing.</p>"
            f"<p>FLOPs are those of the whole run, forward and backward, with the {runs.first.recipe.unit}s that see "
            "all data. They do not depend on the machine. Wall time does; it is in the table if it was measured.</p>"
            "</div>"
        )
    return f"<h2>Accuracy against cost: the plot that decides</h2>{page.pair(*cards)}"


def _curves(runs: Runs) -> str:
    unit = runs.first.recipe.unit
    shown = runs.shown
    groups = "; ".join(f"{group.label} (n = {len(seeds)})" for group, seeds in shown.items())
    left_out = len(runs.methods) - len({group.method for group in shown})
    note = f" The best of {len(runs.methods)} methods, beside full data, random and PFB." if left_out else ""
    return "<h2>Over the training</h2>" + page.pair(
        page.figure(
            "Score",
            plots.curves(shown, "score", f"{runs.first.recipe.score_name.partition(',')[0]}, %"),
            f"Line plot of the score on test images over {unit}s. {groups}.",
            f"Thin lines are seeds, thick ones their mean; dots where the model was evaluated.{note}",
        ),
        page.figure(
            "Training loss",
            plots.curves(shown, "loss", "loss of the samples trained on"),
            f"Line plot of the training loss over {unit}s. {groups}.",
            "Of retained samples only, while a method prunes: a selection of hard samples has a higher loss without "
            "being worse for the model.",
        ),
    )


# ------------------------------------------------------------------------ parts
