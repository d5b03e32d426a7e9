"""Models by name: torchvision's, timm's, or from a user's factory. Never with pretrained weights."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_EXTRA = "pip install '.[lab]' in a checkout of halfway"
# Token ids of a random example are below this, so that they fit every vocabulary.
_TOKENS = 10
_USUAL_SIZE = 224


def build(name: str, size: int | None = None, **options: Any) -> nn.Module:
    """A freshly initialised model.

    Args:
        name: a torchvision name (including segmentation and video models), a timm name, or `package.module:factory`;
            the current directory is searched first, and the factory is called without arguments.
        size: of the images, for models that must know it (ViT, timm's Swin); others ignore it.
        **options: passed to torchvision's or timm's builder.
    """
    if ":" in name:
        return _from_factory(name)
    torchvision = _library("torchvision.models")
    if torchvision is not None and name in torchvision.list_models():
        builder = torchvision.get_model_builder(name)
        # By default segmentation and detection models download a pretrained backbone.
        if "weights_backbone" in inspect.signature(builder).parameters:
            options = {"weights_backbone": None, **options}
        return _sized(lambda **sized: builder(weights=None, **options, **sized), "image_size", size)
    timm = _library("timm")
    if timm is not None and timm.is_model(name):
        return _sized(lambda **sized: timm.create_model(name, pretrained=False, **options, **sized), "img_size", size)
    if torchvision is None and timm is None:
        raise ModuleNotFoundError(f"building {name!r} needs torchvision or timm: {_EXTRA}")
    raise ValueError(_unknown(name, torchvision, timm))


class Source:
    """A model by name with random inputs that fit it, as a command line describes them.

    Args:
        name: see `build`.
        size: of square RGB images; None: what the model is made for.
        shape: of one sample if it is not an image, "128" or "1,28,28".
        dtype: of the inputs, "float32" or "int64".
    """

    def __init__(self, name: str, size: int | None, shape: str | None, dtype: str) -> None:
        if size is not None and (shape is not None or size < 1):
            raise ValueError(f"--size is for square RGB images and positive, got {size}; --input is for other shapes")
        self.name = name
        self.size = (size or _native_size(name)) if shape is None else None
        self.shape = (3, self.size, self.size) if self.size else _parse_shape(str(shape))
        known = getattr(torch, dtype, None)
        if not isinstance(known, torch.dtype):
            raise ValueError(f"unknown dtype {dtype!r}; float32 and int64 are the usual ones")
        self.dtype = known

    def build(self) -> nn.Module:
        """A freshly initialised model."""
        return build(self.name, self.size)

    def example(self, batch: int, device: str | torch.device = "cpu") -> Tensor:
        """(batch, *shape) random numbers, or token ids for an integer type."""
        return random_input((batch, *self.shape), self.dtype, device)

    def refused(self, error: Exception) -> str:
        """The error message for a model that does not run on the example."""
        said = (str(error) or type(error).__name__).splitlines()[0]
        return (
            f"{self.name} does not train on one tensor of {self.dtype}, shape (batch, "
            f"{', '.join(map(str, self.shape))}): {said}. --size, --input and --dtype say what it takes"
        )


def random_input(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Tensor:
    """Random numbers for a floating point type, token ids for an integer one."""
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.randint(_TOKENS, shape, dtype=dtype, device=device)


def _native_size(name: str) -> int:
    """The image size that a torchvision or timm model is made for; the usual one if that is not known."""
    if ":" in name:
        return _USUAL_SIZE
    torchvision = _library("torchvision.models")
    if torchvision is not None and name in torchvision.list_models():
        # From its first weights; later ones may have been trained at another size. Only classifiers give one number.
        first = next(iter(torchvision.get_model_weights(name)), None)
        size = getattr(getattr(first, "transforms", None), "keywords", {}).get("crop_size")
        return size if isinstance(size, int) else _USUAL_SIZE
    timm = _library("timm")
    known = timm.get_pretrained_cfg(name) if timm is not None and timm.is_model(name) else None
    return known.input_size[-1] if known is not None else _USUAL_SIZE


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(n) for n in text.split(","))
    except ValueError:
        raise ValueError(f"--input takes numbers with commas, like 3,224,224 or 128, got {text!r}") from None
    if min(shape) < 1:
        raise ValueError(f"--input must be positive, got {text!r}")
    return shape


def _sized(make: Callable[..., nn.Module], argument: str, size: int | None) -> nn.Module:
    if size is not None:
        try:
            return make(**{argument: size})
        except TypeError as error:
            if argument not in str(error):
                raise
    return make()


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        return None


def _unknown(name: str, torchvision: Any, timm: Any) -> str:
    names = {n for library in (torchvision, timm) if library is not None for n in library.list_models()}
    close = difflib.get_close_matches(name, sorted(names), n=6, cutoff=0.5)
    missing = [n for n, library in (("torchvision", torchvision), ("timm", timm)) if library is None]
    where = f"; {missing[0]} is not installed ({_EXTRA})" if missing else ""
    hint = f"the closest are {', '.join(close)}" if close else "torchvision.models.list_models() lists some"
    return f"no model {name!r}; {hint}{where}. Your own model: package.module:factory"


def _from_factory(name: str) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    with _current_directory():
        module = importlib.import_module(module_name)
    factory = getattr(module, attribute, None)
    if factory is None:
        close = difflib.get_close_matches(attribute, dir(module), n=5)
        raise ValueError(
            f"{module_name} has no {attribute!r}" + (f"; the closest are {', '.join(close)}" * bool(close))
        )
    with _current_directory():
        model = factory if isinstance(factory, nn.Module) else factory()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} gave a {type(model).__name__}, not a torch.nn.Module")
    return model


@contextlib.contextmanager
def _current_directory() -> Iterator[None]:
    """Add the current directory to the import path, which the `halfway` command lacks, unlike `python -m`."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
