"""What is installed: extras that declare what they import, commands that install what they need, a wheel that works."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    """The distribution of a requirement, spelt as package indexes compare names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def imported(folder: Path) -> set[str]:
    """Top-level packages that modules below `folder` import by absolute names."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"halfway"}


def undeclared(packages: set[str], extra: str) -> set[str]:
    declared = {name_of(r) for r in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra])}
    owners = importlib.metadata.packages_distributions()
    return {package for package in packages if not {name_of(d) for d in owners[package]} & declared}


def test_the_lab_declares_every_package_that_it_imports() -> None:
    pytest.importorskip("matplotlib")
    packages = imported(ROOT / "src" / "halfway" / "lab")
    assert {"torchvision", "yaml"} <= packages
    assert undeclared(packages, "lab") == set()


@pytest.mark.parametrize("extra", ["lightning", "transformers", "accelerate"])
def test_an_integration_declares_its_trainer(extra: str) -> None:
    assert name_of(PROJECT["optional-dependencies"][extra][0]) == extra


def commands(target: str, tmp_path: Path) -> str:
    """What `make target` would run in a fresh clone."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    call = [make, "--dry-run", target, f"VENV={tmp_path / 'venv'}"]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_the_lab_and_no_developers_tools(tmp_path: Path) -> None:
    printed = commands("demo", tmp_path)
    assert re.findall(r'"\.\[(\w+)\]"', printed) == ["lab"]
    assert "halfway demo" in printed


def test_the_tests_install_the_developers_tools_into_the_same_environment(tmp_path: Path) -> None:
    printed = commands("test", tmp_path)
    assert re.findall(r'"\.\[(\w+)\]"', printed)[-1] == "dev"
    assert printed.count("-m venv") == 1
    assert "pytest" in printed


def test_every_development_tool_has_a_tested_version() -> None:
    pinned = {name_of(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")}
    extras = PROJECT["optional-dependencies"].values()
    wanted = {name_of(r) for extra in extras for r in extra} - {"halfway"}
    assert wanted - pinned == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources with the tools that are installed."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    call = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(folder)]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (folder / "dist").glob("*.whl")
    return found


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    source = ROOT / "src"
    files = {str(p.relative_to(source)) for p in (source / "halfway").rglob("*") if p.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert wanted - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_the_description_of_the_wheel_can_be_shown(wheel: Path) -> None:
    pytest.importorskip("twine")
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(wheel)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_works_beside_the_torch_that_is_here(wheel: Path, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*install, str(wheel)], check=True)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import halfway; print(halfway.__file__)"
    out = subprocess.run(
        [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(out.stdout.strip()).is_relative_to(tmp_path)


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With torch alone, then with the lab. Downloads both."""
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*install, str(wheel)], check=True)
    subprocess.run([str(python), "-c", "import halfway"], cwd=tmp_path, check=True)
    subprocess.run([*install, f"{wheel}[lab]"], check=True)
    layers = [str(python.with_name("halfway")), "layers", "resnet18"]
    out = subprocess.run(layers, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "layer1" in out.stdout


def test_workflows_call_what_the_makefile_has() -> None:
    yaml = pytest.importorskip("yaml")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called: set[str] = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            words = " ".join(step.get("run", "") for step in job["steps"])
            called |= set(re.findall(r"\bmake ([a-z-]+)", words))
    assert {"lint", "test", "docs", "dist"} <= called <= targets


def test_every_place_has_the_same_version() -> None:
    import halfway

    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert PROJECT["version"] == halfway.__version__ == cited.group(1)
