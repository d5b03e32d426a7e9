"""Settings for the whole suite."""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--programs", type=int, default=500, help="random programs in the fuzz test (default 500)")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Small tensors: threads cost more than they bring, above all with several test processes."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
