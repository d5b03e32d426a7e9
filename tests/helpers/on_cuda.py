"""What a CUDA device would run, without having one: models on fake CUDA tensors, which have shapes and no values.

Only forward passes: a backward pass, a generator and `autocast("cuda")` ask for a driver. So half precision is that of
weights and inputs, and fused attention, which asks the driver what it can do, is called by the names of its kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfway.engine import axis, ops
from halfway.engine.flops import flops_of
from halfway.engine.plan import Op, Plan
from halfway.engine.rehearsal import Rehearsal
from halfway.engine.replay import Replayer
from halfway.engine.sandbox import tensors_in
from halfway.engine.sharding import memory
from halfway.engine.tape import Recorder
from halfway.lab.models.by_name import build

aten = torch.ops.aten

# A prime that divides no width of a network: an axis of a multiple of it is the samples' axis.
SAMPLES = 101
# What an operation may cost per sample without being known to `ops`.
FLOPS, BYTES = 10_000, 64 << 10

OLD = tuple(int(v) for v in torch.__version__.split(".")[:2]) < (2, 14)
needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built() or OLD,
    reason="this build knows nothing of CUDA, or (before 2.14) asks a driver about it",
)


class Setting(NamedTuple):
    """How weights and inputs are stored."""

    name: str
    dtype: torch.dtype = torch.float32
    channels_last: bool = False


SETTINGS = (
    Setting("float32"),
    Setting("channels_last", channels_last=True),
    Setting("float16", torch.float16, channels_last=True),
    Setting("bfloat16", torch.bfloat16),
)


class Operation(NamedTuple):
    """One that ran, and the most that it cost per sample in any call."""

    func: Any
    flops: float
    bytes: float

    @property
    def name(self) -> str:
        return str(self.func).removesuffix(".default")

    @property
    def known(self) -> bool:
        """Whether `ops` knows it, or it costs so little that it need not."""
        return ops.known(self.func) or (self.flops <= FLOPS and self.bytes <= BYTES)


class Operations(TorchDispatchMode):
    """Notes every operation that has the samples' axis."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, Operation] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        touched = {id(t): t for t in tensors_in((args, kwargs, out))}.values()
        # Fake tensors ask each other for their device (prim.device); nothing of the kind is dispatched on real ones.
        if func.namespace != "prim" and any(n and n % SAMPLES == 0 for t in touched for n in t.shape):
            moved = sum(t.numel() * t.element_size() for t in touched) / SAMPLES
            flops = flops_of(func, args, kwargs, out) / SAMPLES
            before = self.seen.get(func, Operation(func, 0, 0))
            self.seen[func] = Operation(func, max(flops, before.flops), max(moved, before.bytes))
        return out


class Device(FakeTensorMode):
    """While it is on, `cuda` is a device of fake tensors."""

    def empty(self, *shape: int, setting: Setting = SETTINGS[0]) -> Tensor:
        """A tensor; an image in the setting's memory format."""
        t = torch.empty(shape, dtype=setting.dtype, device="cuda")
        return t.to(memory_format=torch.channels_last) if setting.channels_last and t.ndim == 4 else t

    def move(self, model: nn.Module, setting: Setting) -> nn.Module:
        """The model itself, with other parameters and buffers: of the same shapes, on the device."""

        def like(t: Tensor) -> Tensor:
            kept = setting if t.is_floating_point() else setting._replace(dtype=t.dtype)
            return self.empty(*t.shape, setting=kept)

        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(like(p), requires_grad=p.requires_grad)
            for name, b in module._buffers.items():
                if b is not None:
                    module._buffers[name] = like(b)
        return model


def operations(function: Callable[[], Any]) -> list[Operation]:
    """What `function` runs with the samples' axis. To be called under a `Device`."""
    with Operations() as seen:
        function()
    return list(seen.seen.values())


class Model(NamedTuple):
    """A model to run, on images of that size. sample: whether it runs in the default suite."""

    name: str
    size: int = 224
    sample: bool = False

    def build(self) -> nn.Module:
        return build(self.name, self.size).train()


MODELS = (
    Model("resnet18", 64, sample=True),
    Model("mobilenet_v3_small", 64, sample=True),
    Model("vit_tiny_patch16_224", 64, sample=True),
    Model("swin_t", 64, sample=True),
    Model("convnext_tiny", 64, sample=True),
    *map(Model, ("resnet50", "mobilenet_v3_large", "efficientnet_b0", "efficientnet_v2_s", "swin_v2_t", "vit_b_16")),
    *map(Model, ("densenet121", "regnet_y_400mf", "maxvit_t", "googlenet", "squeezenet1_0", "shufflenet_v2_x1_0")),
    *map(Model, ("vgg11_bn", "mnasnet0_5", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")),
    Model("inception_v3", 299),
    *map(Model, ("deit_small_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "mixer_s32_224")),
    *map(Model, ("vit_base_patch16_siglip_224", "vit_small_patch16_dinov3", "cait_xxs24_224", "xcit_tiny_12_p16_224")),
    *map(Model, ("resnetv2_50", "tf_efficientnetv2_s", "convnextv2_tiny", "mobilevit_s", "dm_nfnet_f0", "resnest50d")),
    *map(Model, ("seresnet50", "res2net50_26w_4s", "repvgg_a0", "ghostnet_100", "mobilenetv4_conv_small", "levit_128")),
    *map(Model, ("poolformer_s12", "coatnet_nano_rw_224", "edgenext_small", "pvt_v2_b0", "fastvit_t8", "davit_tiny")),
    *map(Model, ("focalnet_tiny_srf", "twins_pcpvt_small", "gcvit_xxtiny", "mvitv2_tiny", "hiera_tiny_224")),
    Model("swinv2_tiny_window8_256", 256),
    Model("botnet26t_256", 256),
)


def attention(kernel: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Fused attention by one of its kernels, as F.scaled_dot_product_attention would call it where it can choose."""
    if kernel == "math":
        return lambda q, k, v: aten._scaled_dot_product_attention_math(q, k, v)[0]
    if kernel == "flash":
        return lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0]
    called = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    return lambda q, k, v: called(q, k, v, None, True)[0]


KERNELS = ("flash", "efficient", "cudnn", "math")


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Rehearse without looking at values, which fake tensors do not have: rows lie where shapes say they may lie first,
    and constants are the same for all samples."""

    def prove(op: Op, *_: Any, **__: Any) -> str:
        op.samples = tuple(places[0] if places else None for places in op.options)
        op.proven = True
        return ""

    with (
        mock.patch.object(Op, "prove", prove),
        mock.patch.object(axis.SampleAxis, "_differs", return_value=False),
        mock.patch.object(axis, "_is_arange", return_value=False),
        mock.patch.dict(ops.KNOWN, {id(torch.ops.prim.device.default): ops.Traits("cheap")}),
    ):
        yield


def replayed(model: nn.Module, x: Tensor, rows: Tensor) -> Replayer:
    """Record the model's call on all samples, rehearse it on some and replay it for them; all of it without values. A
    `Diverged` says where the device would run other operations than were recorded."""
    owned = {memory(t) for t in (*model.parameters(), *model.buffers())}
    recorder = Recorder([x], owned, len(x))
    with without_values():
        with recorder:
            model(x)
        assert not recorder.tape.refusal, recorder.tape.refusal
        plan = Plan(program=[axis.Logged(*logged) for logged in recorder.tape.program])
        part = x.index_select(0, rows)
        _pass(Rehearsal([part], recorder.tape, plan, rows, lambda: ""), model, part)
        return _pass(Replayer([part], recorder.tape, plan, rows), model, part)


def _pass(each: Replayer, model: nn.Module, part: Tensor) -> Replayer:
    with each.entered():
        model(part)
        each.finish()
    return each
