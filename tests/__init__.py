"""The folders of the tests are those of the package; `helpers` and `fuzz` hold no tests of their own."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
