"""Folds of the training images, for models that are scored on what they were not trained on.

Each fold has its share of every class, and copies of a picture are in one fold: a model that has seen a copy has seen
the picture. Shapes: N pictures.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..progress import Bar
from .sources import Source

# Not the run's seed: runs with different seeds must have the same folds.
_SEED = 20_240_608


def check(fold: tuple[int, int]) -> None:
    """Raise unless (k, K) is a fold."""
    k, count = fold
    if count < 2 or not 0 <= k < count:
        raise ValueError(
            f"data.fold=[k, K] leaves out fold k of K, with at least 2 folds and k from 0 to K - 1; got {list(fold)}"
        )


def folds_of(source: Source, count: int, workers: int = 0) -> Tensor:
    """(N,) int64: the fold of each picture, a function of the pictures alone.

    Args:
        count: of folds.
        workers: threads that read the pictures.
    """
    labels = source.labels
    return assign([0] * len(source) if labels is None else labels.tolist(), copies(source, workers), count)


def copies(source: Source, workers: int = 0) -> list[int]:
    """A number for each picture; equal ones have the same pixels, or were made from the same original."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    def content(row: int) -> bytes:
        picture, _ = source.read(row)
        return hashlib.blake2b(repr(picture.size).encode() + picture.tobytes(), digest_size=16).digest()

    count = len(source)
    # Threads, because decoding happens outside of the interpreter.
    with ThreadPoolExecutor(max(1, workers)) as pool, Bar(count, "looking for copies", "image", delay=1.0) as bar:
        first: dict[bytes | int, int] = {}
        like = []
        for row, key in enumerate(pool.map(content, range(count))):
            like.append(first.setdefault(key, row))
            bar.update()
    originals = range(count) if source.originals is None else source.originals.tolist()
    # Pictures are linked to the first of the same content and to the first of the same original, through any chain.
    linked = [*like, *(first.setdefault(original, row) for row, original in enumerate(originals))]
    links = coo_array(([1] * (2 * count), ([*range(count)] * 2, linked)), shape=(count, count))
    groups: list[int] = connected_components(links, directed=False)[1].tolist()
    return groups


def assign(labels: Sequence[int], groups: Sequence[int], count: int) -> Tensor:
    """(N,) int64: a fold for each sample, the same for all of a group; classes are spread evenly.

    Large groups go first, each to the fold that has the fewest samples of its class so far, or else the fewest of all.
    Without groups the folds' numbers of samples differ by at most one, in each class and in all.

    Args:
        labels: the class of each sample. A group has that of its first sample.
        groups: equal numbers stay together.
    """
    members: dict[int, list[int]] = defaultdict(list)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED)).tolist()
    for row in order:
        members[groups[row]].append(row)
    if len(members) < count:
        raise ValueError(f"{len(members)} different training images cannot be split into {count} folds; take fewer")
    by_class: dict[int, list[list[int]]] = defaultdict(list)
    for rows in members.values():
        by_class[labels[min(rows)]].append(rows)
    found = [0] * len(labels)
    totals = [0] * count
    for label in sorted(by_class):
        here = [0] * count
        for rows in sorted(by_class[label], key=len, reverse=True):
            _, _, fold = min(zip(here, totals, range(count), strict=True))
            here[fold] += len(rows)
            totals[fold] += len(rows)
            for row in rows:
                found[row] = fold
    return torch.tensor(found)
