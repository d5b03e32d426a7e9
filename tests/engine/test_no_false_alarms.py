"""What ordinary models do with the length of the batch, with masks, positions and losses of their own is no reason to
compute anything twice: every expensive operation is replayed, in every step.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfway
from tests.helpers.apart import Net, normal_batches, train


def replayed(model, batches, ratio=0.5, *, computed=0, **kwargs):
    """Trains as it should, replays every step, and computes only so many expensive operations per step."""
    outcome = train(model, batches, ratio, reuse="replay", **kwargs).assert_right().assert_all_replayed()
    assert outcome.stats.operations_computed == computed * len(batches)
    assert outcome.stats.operations_replayed > 0
    return outcome


# --- on vectors ------------------------------------------------------------------------------------------------------


def with_zeros(h):
    """Constants made from the batch, of its length and of none."""
    zero, one = h.new_zeros(()), torch.ones_like(h[0])
    return h * one + zero + torch.zeros(len(h), 1) + h.new_full((len(h), 1), 0.5) + torch.empty_like(h).fill_(0.25)


def views_of_one_sample(h):
    """Only the shape of the first sample is looked at."""
    return h.view(-1, *h[0].shape) * h[0].numel() ** -0.5 + h[:1].shape[0]


def picked(h):
    """One entry per sample, by its row."""
    return h + h[torch.arange(len(h)), torch.arange(len(h)) * 0 + 3].unsqueeze(1)


def gathered(h):
    return h + h.gather(1, h.argmax(1, keepdim=True)) + h.topk(2, dim=1).values.sum(1, keepdim=True)


def scattered(h):
    """A mask of the largest entries of each sample."""
    return h * torch.zeros_like(h).scatter_(1, h.topk(4, dim=1).indices, 1.0)


VECTORS = {
    "nothing": lambda h: h,
    "constants": with_zeros,
    "views of one sample": views_of_one_sample,
    "one entry per sample, by arange": picked,
    "gather, argmax, topk": gathered,
    "scatter": scattered,
    "repeated and cut": lambda h: h.repeat(1, 2)[:, :16] + h.repeat_interleave(2, 1)[:, ::2],
    "sample norms": lambda h: F.normalize(h) * h.norm(dim=1, keepdim=True).clamp(max=3),
    "sorted features": lambda h: h.sort(1).values + h.cumsum(1) + h.flip(1) + h.roll(1, 1),
    "softmax less the largest of a sample": lambda h: (h - h.amax(1, keepdim=True)).softmax(1) * h,
    "the length as a number": lambda h: h * (len(h) / h.shape[0]) + h.reshape(-1).numel() / h.numel(),
    "split and joined": lambda h: torch.cat([c * 2 for c in h.chunk(4, 1)] + [h.unbind(1)[0][:, None]], 1)[:, :16],
    "transposed and back": lambda h: (h.T * torch.arange(16.0)[:, None]).T,
    "unsqueezed and back": lambda h: (h[None] + h[:, None].transpose(0, 1)).squeeze(0),
    "expanded": lambda h: h + torch.linspace(0, 1, 16).expand(len(h), 16),
    "a grid of positions": lambda h: (
        h + torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")[0].flatten()
    ),
    "where, by sample": lambda h: torch.where(h.mean(1, keepdim=True) > 0, h, -h),
    "in place": lambda h: (h * 1.0).mul_(2).add_(1).relu_(),
    "half the features, in place": lambda h: torch.cat([h[:, :8].clone().mul_(3), h[:, 8:]], 1),
    "nan_to_num and isfinite": lambda h: torch.where(h.isfinite(), h, torch.zeros_like(h)).nan_to_num(),
}


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize(("size", "ratio"), [(8, 0.5), (7, 0.3)])
def test_what_belongs_to_one_sample_is_replayed(name, size, ratio):
    replayed(Net(VECTORS[name]), normal_batches(3, size, 16), ratio)


MATRIX = np.eye(16, dtype=np.float32) * 2
KERNEL, KEPT = [[[1.0, 2.0, 1.0]]], torch.eye(16) * 3
CONSTANTS = {
    "a list": lambda h: F.conv1d(h[:, None], torch.tensor(KERNEL), padding=1)[:, 0],
    "an array": lambda h: h @ torch.as_tensor(MATRIX),
    "an array, shared": lambda h: h @ torch.from_numpy(MATRIX),
    "an array, by dlpack": lambda h: h @ torch.from_dlpack(MATRIX.copy()),
    "bytes": lambda h: h @ torch.frombuffer(bytearray(MATRIX.tobytes()), dtype=torch.float32).view(16, 16),
    "nothing": lambda h: h @ torch.eye(16),
    "a window": lambda h: h @ torch.hann_window(16).diag(),
    "a number": lambda h: torch.addmm(torch.tensor(0.5), h, torch.full((16, 16), 0.1)),
    "a parameter of the moment": lambda h: h @ nn.Parameter(torch.eye(16)),
    "a tensor from outside": lambda h: h @ KEPT,
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_that_forward_makes_are_no_parameters(name):
    """Made anew in each pass, they are the same all the time."""
    outcome = replayed(Net(CONSTANTS[name]), normal_batches(4, 8, 16))
    assert outcome.stats.operations_replayed == 3 * 4


# --- on images and tokens --------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A class token, positions, one block of attention with relative bias, the cut."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 10, 8))
        self.bias = nn.Parameter(torch.randn(19))
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.cut, self.head = nn.Identity(), nn.Linear(8, 3)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1) + self.positions
        n, t, c = tokens.shape
        q, k, v = self.qkv(self.norm(tokens)).view(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        relative = self.bias[torch.arange(t)[:, None] - torch.arange(t) + t - 1]
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=relative.expand(n, 2, t, t))
        else:
            mixed = (torch.einsum("nhtc,nhsc->nhts", q, k) + relative).softmax(-1) @ v
        tokens = tokens + self.out(mixed.transpose(1, 2).reshape(n, t, c))
        return self.head(self.cut(tokens)[:, 0])


@pytest.mark.parametrize("fused", [False, True])
def test_class_tokens_and_position_embeddings_are_replayed(fused):
    replayed(Tokens(fused), normal_batches(3, 8, 3, 6, 6))


class Windows(nn.Module):
    """Shifted windows: roll over space, partition, a layer per window, and back."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 8, 1), nn.Linear(8, 8)
        self.mask = nn.Parameter(torch.randn(4, 4, 1))
        self.cut, self.head = nn.Identity(), nn.Linear(8, 3)

    def forward(self, x):
        h = self.stem(x).permute(0, 2, 3, 1).roll((-1, -1), (1, 2))
        n, height, width, c = h.shape
        windows = h.view(n, height // 2, 2, width // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        windows = windows.view(n, -1, 4, c) + self.mask
        windows = self.inner(windows.view(-1, 4, c)).view(n, height // 2, width // 2, 2, 2, c)
        h = windows.permute(0, 1, 3, 2, 4, 5).reshape(n, height, width, c).roll((1, 1), (1, 2))
        return self.head(self.cut(h).mean((1, 2)))


def test_windows_over_space_are_replayed():
    replayed(Windows(), normal_batches(3, 8, 3, 4, 4))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)

    def forward(self, x):
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class GlobalResponse(nn.Module):
    """Norms over space and channels of each sample."""

    def forward(self, x):
        norms = x.norm(dim=(2, 3), keepdim=True)
        return x * (norms / (norms.mean(1, keepdim=True) + 1e-6)) + x


IMAGES = {
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "InstanceNorm": lambda: nn.InstanceNorm2d(8, affine=True),
    "LayerNorm over a sample": lambda: nn.LayerNorm([8, 6, 6]),
    "frozen BatchNorm": lambda: nn.BatchNorm2d(8).eval(),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(3),
    "squeeze and excite": SqueezeExcite,
    "global response norm": GlobalResponse,
    "max pooling": lambda: nn.MaxPool2d(2),
    "average pooling and upsampling": lambda: nn.Sequential(
        nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")
    ),
    "pixel shuffle": lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2)),
    "unfold and fold": lambda: nn.Sequential(nn.Unfold(2, stride=2), nn.Fold((6, 6), 2, stride=2)),
    "padding by reflection": lambda: nn.ReflectionPad2d(1),
    "depthwise convolution": lambda: nn.Conv2d(8, 8, 3, groups=8),
    "transposed convolution": lambda: nn.ConvTranspose2d(8, 8, 2, 2),
    "channel shuffle": lambda: nn.ChannelShuffle(2),
}


@pytest.mark.parametrize("name", IMAGES)
def test_layers_of_images_are_replayed(name):
    shallow = [nn.Conv2d(3, 8, 3, padding=1), IMAGES[name](), nn.Conv2d(8, 8, 1)]
    model = nn.Sequential(*shallow, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    replayed(model, normal_batches(3, 8, 3, 6, 6), at="2")


class DropPath(nn.Module):
    def forward(self, x):
        return x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.8).div_(0.8)


@pytest.mark.parametrize("layer", [DropPath, nn.Dropout, nn.Dropout2d, nn.RReLU, nn.AlphaDropout])
def test_layers_that_draw_are_replayed(layer):
    """Behind a draw an operation is trusted when 16 rows have been compared."""
    shallow = [nn.Conv2d(3, 8, 3, padding=1), layer(), nn.Conv2d(8, 8, 1)]
    model = nn.Sequential(*shallow, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    replayed(model, normal_batches(3, 32, 3, 6, 6), at="2", draws=True)


class Padded(nn.Module):
    """Words of different length: what the mask says of the whole batch is only read on the host."""

    def __init__(self, look):
        super().__init__()
        self.embedding, self.a, self.b = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 8), nn.Linear(8, 8)
        self.cut, self.head, self.look = nn.Identity(), nn.Linear(8, 3), look

    def forward(self, x):
        mask = x != 0
        h = self.a(self.embedding(x))
        if not self.look(mask):
            h = h.masked_fill(~mask[..., None], 0.0)
        h = self.b(h * mask[..., None]) * mask[..., None]
        return self.head(self.cut(h).sum(1) / mask.sum(1, keepdim=True))


@pytest.mark.parametrize(
    "look",
    [
        lambda mask: mask.all(),
        lambda mask: bool(mask[:, -1].any()),
        lambda mask: int(mask.sum(1).min()) > 100,
        lambda mask: torch.equal(mask, torch.ones_like(mask)),
        lambda mask: mask.all().tolist(),
    ],
)
def test_padding_masks_that_are_read_on_the_host_are_replayed(look):
    """All samples are padded, so all and some of them give the same answer."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(1, 20, (8, 6), generator=generator) for _ in range(3)]
    for x in batches:
        x[:, 4:] = 0
    replayed(Padded(look), batches)


# --- losses and statistics of the batch that do not flow back ---------------------------------------------------------


class WithLoss(Net):
    """A Net that also returns a loss of the features before the cut."""

    def __init__(self, loss):
        super().__init__(lambda h: h)
        self.loss = loss

    def forward(self, x):
        h = self.a(x)
        loss = self.loss(h)
        return self.head(self.cut(self.b(h.relu()))), loss.reshape(1)


def covariance(h):
    centred = h - h.mean(0)
    return (centred.T @ centred / len(h)).fill_diagonal_(0).square().mean()


def balance(h):
    """What mixtures of experts add: how evenly samples are spread."""
    gates = h[:, :4].softmax(1)
    load = (gates.argmax(1, keepdim=True) == torch.arange(4)).to(h.dtype).mean(0)
    return 4 * (gates.mean(0) * load).sum()


LOSSES = {
    # With the number of expensive operations that only the loss has, and that reduce the batch.
    "covariance": (covariance, 1),
    "balance": (balance, 0),
    "variance": (lambda h: (1 - h.var(0).sqrt()).relu().mean(), 0),
    "extreme": (lambda h: h.abs().amax(), 0),
    "z loss": (lambda h: h.logsumexp(1).square().mean(), 0),
    "entropy over the batch": (lambda h: -(h.softmax(1).mean(0) * h.softmax(1).mean(0).log()).sum(), 0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_the_batch_that_do_not_flow_back_are_harmless(name):
    loss, products = LOSSES[name]
    replayed(WithLoss(loss), normal_batches(3, 8, 16), computed=products)


class Averaged(nn.Module):
    """Keeps a running average of the features, which it does not use; or only uses what it was before this batch."""

    def __init__(self, used):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.used = used

    def forward(self, h):
        out = h - self.mean if self.used else h * 1.0
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
        return out


@pytest.mark.parametrize("used", [False, True])
def test_running_averages_that_are_written_after_use_are_harmless(used):
    replayed(Net(Averaged(used)), normal_batches(5, 8, 16))


def test_training_batch_norm_is_no_mixing():
    """Its statistics are those of all samples, by definition."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten())
    blocker = halfway.ForwardBlocker(model, "3", 0.5, selector=halfway.Density(num_centroids=4), reuse="replay")
    for x in normal_batches(3, 8, 3, 6, 6):
        model(blocker(x)).square().mean().backward()
    assert blocker.stats.operations_replayed == 6
    assert blocker.stats.operations_computed == 0
