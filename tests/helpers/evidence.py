"""A small classification problem as evidence for coresets."""

import torch
import torch.nn.functional as F

from halfway.coresets import Checkpoint, Dynamics, Evidence, ShortRun
from tests.helpers.draws import generator


def evidence(num_samples=60, num_classes=3, width=4, seed=0, dtype=torch.float64, epochs=5):
    """Features around a centre per class, a linear classifier that is sometimes wrong, and all else drawn."""
    source = generator(seed)
    labels = torch.arange(num_samples) % num_classes
    labels = labels[torch.randperm(num_samples, generator=source)]

    def randn(*shape):
        return torch.randn(*shape, generator=source, dtype=dtype)

    features = randn(num_samples, width) + randn(num_classes, width)[labels]
    logits = features @ randn(width, num_classes) + F.one_hot(labels, num_classes)
    dynamics = Dynamics(num_samples)
    for _ in range(epochs):
        dynamics.observe(torch.arange(num_samples), logits + 2 * randn(num_samples, num_classes), labels)

    def per_sample():
        return randn(num_samples).abs()

    return Evidence(
        labels,
        num_classes,
        features,
        logits,
        dynamics,
        [ShortRun(per_sample(), per_sample(), per_sample()) for _ in range(3)],
        [Checkpoint(lr, randn(num_samples), per_sample()) for lr in (0.2, 0.1)],
        torch.full((num_samples,), 7),
        torch.randint(8, (num_samples,), generator=source),
    )


def recorded(margins_by_visit):
    """Dynamics of two classes with the margins of (visits, N)."""
    record = Dynamics(len(margins_by_visit[0]))
    for row in margins_by_visit:
        logits = torch.tensor([[margin, 0.0] for margin in row])
        record.observe(torch.arange(len(row)), logits, torch.zeros(len(row), dtype=torch.int64))
    return Evidence(torch.zeros(len(margins_by_visit[0]), dtype=torch.int64), 2, dynamics=record)
