"""The page about subset files: the matrix is Spearman's, and the pictures are those that a method likes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from scipy import stats

from halfway.coresets import Coreset
from halfway.lab.cli import main
from halfway.lab.report import coresets as page
from tests.helpers.small_training import load
from tests.helpers.subsets import tiny


def written(path: Path, method: str, scores: Tensor | None, keep: float = 0.5, seed: int = 0) -> None:
    labels_N = load(tiny()).train.labels
    assert labels_N is not None
    Coreset(
        ids=torch.arange(round(keep * 160)),
        method=method,
        settings={"keep": keep, "class_balance": True, "seed": seed},
        num_samples=160,
        fingerprint=Coreset.fingerprint_of(labels_N),
        scores=scores,
        made_from={"settings": tiny().as_dict(), "data": "synthetic pictures"},
        cost={"runs": 1.0, "set": "long"},
    ).save(path / f"{method}-{keep}-s{seed}.pt")


def test_the_matrix_is_spearmans_with_ties_and_infinities() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randint(0, 6, (200,), generator=generator).double(), torch.rand(200, generator=generator).double()]
    values.append(values[0] + 3 * values[1])
    values[0][:9] = torch.inf
    found = page.rank_correlations(values)
    for i in range(3):
        for j in range(3):
            assert found[i, j].item() == pytest.approx(stats.spearmanr(values[i], values[j]).statistic, abs=1e-9)
    assert page.rank_correlations([values[0], torch.zeros(200)])[0, 1].isnan()


def test_one_opinion_of_each_method_nearest_to_half(tmp_path: Path) -> None:
    for keep, seed in ((0.3, 0), (0.5, 1), (0.5, 0)):
        written(tmp_path, "el2n", torch.rand(160), keep, seed)
    written(tmp_path, "random_coreset", torch.rand(160))
    (tmp_path / "no-subset.pt").write_bytes(b"something else")
    found = page.opinions(tmp_path)
    assert [opinion.file.name for opinion in found] == ["random_coreset-0.5-s0.pt", "el2n-0.5-s0.pt"]


def test_the_page_shows_the_matrix_and_what_each_likes_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = torch.arange(160.0)
    written(tmp_path, "el2n", scores)
    written(tmp_path, "aum", -scores)
    written(tmp_path, "craig", None)
    assert main(["report", str(tmp_path), "--data", "synthetic"]) == 0
    assert "3 methods" in capsys.readouterr().out
    html = (tmp_path / "report.html").read_text()
    assert "aum with craig" in html or "craig with aum" in html
    assert "(rank correlation 0.87), el2n and aum least (−1.00)" in html
    assert html.count("Likes most") == 2  # craig scores none
    names = load(tiny()).train
    first = html.index("<h2>el2n</h2>")
    assert f"<b>{names.label(159)}</b><br>159" in html[first : html.index("Likes least", first)]
    assert "<script" not in html


def test_a_folder_of_two_data_sets_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "el2n", torch.rand(160))
    Coreset(torch.arange(5), "aum", {"keep": 0.5, "seed": 0}, 10, "other").save(tmp_path / "aum.pt")
    with pytest.raises(ValueError, match="different data sets"):
        page.opinions(tmp_path)
    with pytest.raises(FileNotFoundError, match="halfway coreset"):
        page.opinions(tmp_path / "empty")
