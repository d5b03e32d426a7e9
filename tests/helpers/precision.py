"""Numbers in both precisions, and how close they have to be."""

import numpy as np
import torch

DTYPES = [torch.float32, torch.float64]
RULES = ["silverman", "scott", "identity"]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(actual, expected, **tolerance):
    """Equal shape and values: float64 to 1e-9, float32 to 1e-5 unless told otherwise."""
    expected = torch.as_tensor(np.asarray(expected), dtype=actual.dtype)
    small = 1e-9 if actual.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(actual, expected, **({"rtol": small, "atol": small} | tolerance))
