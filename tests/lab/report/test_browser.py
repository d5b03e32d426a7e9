"""The page of a report in a real browser: nothing forbidden, nothing broken, nothing sticks out."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_FLAGS = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync "
    "disable-component-update"
)

# A frame has a window of its own: a browser's smallest window is wider than a telephone.
_FRAME = """<!doctype html><meta charset="utf-8"><title>waiting</title>
<iframe style="border:0; width:{width}px; height:9000px" srcdoc="{page}"></iframe>
<script>
document.querySelector("iframe").onload = event => {{
  const inside = event.target.contentDocument, images = [...inside.images];
  document.title = JSON.stringify({{
    images: images.length,
    broken: images.filter(image => !image.naturalWidth).length,
    swapped: images.filter(image => image.currentSrc !== image.src).length,
    width: inside.documentElement.scrollWidth,
    window: event.target.contentWindow.innerWidth,
    paper: event.target.contentWindow.getComputedStyle(inside.body).backgroundColor,
  }});
}};
</script>"""


def browse(path: Path, width: int, scheme: int, folder: Path) -> dict[str, Any]:
    """Open the page in a frame so wide; scheme: 0 is dark, 1 is light."""
    assert BROWSER is not None
    framed = folder / "framed.html"
    framed.write_text(_FRAME.format(width=width, page=html.escape(path.read_text())))
    done = subprocess.run(
        [
            BROWSER,
            *(f"--{flag}" for flag in _FLAGS.split()),
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={scheme}",
            "--window-size=1400,900",
            "--virtual-time-budget=20000",
            f"--screenshot={folder / 'seen.png'}",
            "--dump-dom",
            framed.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    return json.loads(html.unescape(title[1]))


def console(path: Path, folder: Path) -> tuple[str, list[str]]:
    """The page's title after it has loaded, and what the browser's console says about it."""
    flags = [f"--{flag}" for flag in _FLAGS.split()]
    command = [str(BROWSER), *flags, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=20000", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    return title[1], [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium found")
def test_a_browser_finds_nothing_forbidden_on_the_page_and_runs_no_other_script(written: Path, tmp_path: Path) -> None:
    title, said = console(written, tmp_path)
    assert said == []
    smuggled = '<script>document.title = "ran"</script><img src="http://127.0.0.1:9/seen.png"></main>'
    (tmp_path / "smuggled.html").write_text(written.read_text().replace("</main>", smuggled))
    again, said = console(tmp_path / "smuggled.html", tmp_path)
    assert again == title
    assert sum("violates the following Content Security Policy" in line for line in said) == 2


@pytest.mark.skipif(BROWSER is None, reason="no Chromium found")
def test_the_table_sorts_and_filters(written: Path, tmp_path: Path) -> None:
    """The page's own script, called by one more that the policy would forbid: it is taken out for this."""
    act = """<script>
    document.querySelectorAll("table.rows th button")[1].click();
    const now = [...document.querySelectorAll("table.rows tbody tr")];
    const scores = now.map(row => parseFloat(row.cells[1].textContent));
    filter.value = "PFB 0.7"; filter.oninput();
    points[0].onfocus();
    const shown = rows.filter(row => !row.hidden).map(row => row.dataset.label);
    const dim = points.filter(point => point.classList.contains("dim")).length;
    document.title = JSON.stringify({scores, shown, dim, tip: tip.textContent});
    </script></body>"""
    open_page = re.sub(r"<meta http-equiv[^>]*>", "", written.read_text()).replace("</body>", act)
    (tmp_path / "acted.html").write_text(open_page)
    title, said = console(tmp_path / "acted.html", tmp_path)
    assert said == []
    seen = json.loads(html.unescape(title))
    assert seen["scores"] == sorted(seen["scores"], reverse=True)
    assert seen["shown"] == ["pfb, p = 0.7"]
    assert seen["dim"] == 4
    assert "(n = 2) at 1.000 of the FLOPs" in seen["tip"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium found")
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize(("scheme", "paper"), [(0, "rgb(28, 28, 26)"), (1, "rgb(251, 250, 247)")])
def test_a_browser_shows_every_image_and_nothing_sticks_out(
    written: Path, tmp_path: Path, width: int, scheme: int, paper: str
) -> None:
    seen = browse(written, width, scheme, tmp_path)
    assert seen["images"] == len(re.findall("<img ", written.read_text()))
    assert seen["broken"] == 0
    assert seen["window"] == width
    assert seen["width"] <= width
    assert seen["paper"] == paper, "the page is dark where the browser is"
    assert seen["swapped"] == (0 if scheme else written.read_text().count("<figure>")), "and so are its figures"
