"""What the tests of the engine share."""

import pytest
import torch


@pytest.fixture
def x():
    """A batch for `tests.helpers.replays.plain_net`, and for other models that take vectors of five."""
    return torch.randn(8, 5)
