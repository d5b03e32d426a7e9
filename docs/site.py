"""What `make docs` does beyond Markdown: pages from other folders, and links as they are in the repository.

Pages link to each other, and to source files, as one reads them in a checkout. On the site some pages of other folders
are included, and links to files that are not on the site become plain text. A link to nothing is a warning, which
`--strict` turns into an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Pages outside of docs/, under the same path on the site.
OTHERS = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "benchmarks/results/README.md",
    "benchmarks/results/methods.md",
    "results/README.md",
    "results/coresets.md",
    "results/rivals.md",
    "results/map/map.md",
    "results/map/map.svg",
    "results/coresets-cifar10/agreement.png",
]
_LINK = re.compile(r"(?P<label>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<link>[^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```|``.+?``|`(?:[^`\n]|\n(?!\n))+`", re.DOTALL | re.MULTILINE)
_log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of other folders."""
    for path in OTHERS:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of the repository as links of the site."""
    source = page.file.src_uri
    here = source if source in OTHERS else f"docs/{source}"
    links = [match.span() for match in _LINK.finditer(markdown)]
    # Code is left alone, but not code within the label of a link.
    code = [m.span() for m in _CODE.finditer(markdown) if not any(a <= m.start() and m.end() <= b for a, b in links)]

    def moved(match: re.Match[str]) -> str:
        if any(start <= match.start() < end for start, end in code):
            return match.group()
        return _moved(match, source, here, files)

    return _LINK.sub(moved, markdown)


def _moved(match: re.Match[str], source: str, here: str, files: Files) -> str:
    label, link = match["label"], match["link"]
    path, mark, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", link):
        return match.group()
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    on_site = "index.md" if target == "README.md" else target.removeprefix("docs/")
    if (target in OTHERS or target == "README.md" or target.startswith("docs/")) and files.get_file_from_path(on_site):
        return f"{label}({posixpath.relpath(on_site, posixpath.dirname(source) or '.')}{mark}{anchor})"
    if not (ROOT / target).exists():
        _log.warning("%s links to %s, which does not exist", here, link)
    return label.lstrip("!")[1:-1]
