"""A pass leaves no trace, whatever the model does in it: after every step the model is what plain training made it.

The models here keep state in every way we could think of; `drive` compares all of it with a model that only ever saw
the retained samples. What happens before the cut happens once per step, also in the first one.
"""

import pytest
import torch
from torch import nn

import halfway
from tests.helpers.state import drive

REUSE = pytest.mark.parametrize("reuse", ["auto", "recompute"])


class Net(nn.Module):
    """A layer, the cut, another layer. `prepare` runs before the cut or behind it, and may do anything to the model."""

    behind = False

    def __init__(self):
        super().__init__()
        self.a, self.cut, self.f = nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 3)

    def prepare(self, h):
        return h

    def forward(self, x):
        h = self.a(x)
        h = self.cut(h if self.behind else self.prepare(h))
        return self.f(self.prepare(h) if self.behind else h)


def variant(prepare, **attributes):
    """A maker of Nets with these attributes (made anew for each) and `prepare`; before or behind the cut."""

    kinds = [type("Net", (Net,), {"prepare": prepare, "behind": behind}) for behind in (False, True)]

    def make(behind=False):
        net = kinds[behind]()
        for name, value in attributes.items():
            setattr(net, name, value())
        return net

    return make


# --- hooks and layers that the first forward puts in -----------------------------------------------------------------


def capture(self, h):
    """As transformers does to collect hidden states: a flag says that the hooks are there."""
    if not self.installed:
        for module in (self.a, self.f):
            module.register_forward_hook(lambda m, args, out: self.captured.append(out.detach().mean(0)))
        self.installed = True
    self.captured.clear()
    return h


def capture_inputs(self, h):
    if not self.installed:
        self.installed = True
        self.f.register_forward_pre_hook(lambda m, a, k: self.captured.append(a[0].shape[1]), with_kwargs=True)
        self.a.register_forward_hook(lambda m, a, k, out: self.captured.append(1), with_kwargs=True, always_call=True)
    return h


def triple(parameter):
    parameter.grad.mul_(3)


def double_gradients(self, h):
    if not self.installed:
        self.f.weight.register_hook(lambda grad: grad * 2)
        self.a.bias.register_post_accumulate_grad_hook(triple)
        self.installed = True
    return h


def watch_backward(self, h):
    if not self.installed:
        self.f.register_full_backward_hook(lambda m, inputs, outputs: self.captured.append(len(outputs)))
        self.installed = True
    return h


def build_layer(self, h):
    if not self.installed:
        self.late = nn.Linear(8, 8)
        nn.init.constant_(self.late.weight, 0.1)
        nn.init.constant_(self.late.bias, 0.1)
        self.installed = True
    return h + self.late(h)


def build_parameter(self, h):
    if not self.installed:
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.register_buffer("offset", torch.ones(8))
        self.installed = True
    return h * self.scale + self.offset


def build_in_a_list(self, h):
    while len(self.layers) < 2:
        self.layers.append(nn.LayerNorm(8))
        self.by_name["late"] = nn.LayerNorm(8)
    return self.by_name["late"](self.layers[1](self.layers[0](h)))


def replace_layer(self, h):
    """A layer that is wrapped when it is first used."""
    if not isinstance(self.a, nn.Sequential):
        self.a = nn.Sequential(self.a, nn.Tanh())
        return h.tanh()
    return h


def initialise_by_data(self, h):
    """ActNorm: the first batch sets the scale."""
    if not self.installed:
        with torch.no_grad():
            self.f.weight.div_(1 + h.std(0))
        self.installed = True
    return h


FIRST_FORWARD = {
    "hooks": variant(capture, installed=bool, captured=list),
    "hooks with keywords": variant(capture_inputs, installed=bool, captured=list),
    "hooks on parameters": variant(double_gradients, installed=bool),
    "backward hooks": variant(watch_backward, installed=bool, captured=list),
    "a layer": variant(build_layer, installed=bool),
    "a parameter and a buffer": variant(build_parameter, installed=bool),
    "layers in a list and a dict": variant(build_in_a_list, layers=nn.ModuleList, by_name=nn.ModuleDict),
    "a wrapper": variant(replace_layer),
    "weights set by the first batch": variant(initialise_by_data, installed=bool),
}


@REUSE
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("name", FIRST_FORWARD)
def test_what_the_first_forward_puts_in_is_there_once(name, behind, reuse):
    model, _ = drive(lambda: FIRST_FORWARD[name](behind), reuse=reuse)
    x = torch.randn(4, 6)
    before = [len(m._forward_hooks) for m in model.modules()]
    model.eval()(x)
    assert before == [len(m._forward_hooks) for m in model.modules()], "and goes on without the blocker"


@pytest.mark.parametrize("steps", [1, 5])
def test_hooks_behind_a_flag_are_registered_once(steps):
    model, _ = drive(FIRST_FORWARD["hooks"], steps=steps)
    assert len(model.a._forward_hooks) == len(model.f._forward_hooks) == 1


@REUSE
def test_hooks_that_remove_themselves_run_once(reuse):
    def make():
        net = Net()
        net.calls = 0

        def hook(module, args, out):
            net.calls += 1
            handle.remove()

        handle = net.a.register_forward_hook(hook)
        return net

    model, _ = drive(make, reuse=reuse)
    assert model.calls == 1


@REUSE
def test_hooks_that_replace_each_other_stay_one(reuse):
    def prepare(self, h):
        for handle in self.handles:
            handle.remove()
        self.handles[:] = [self.f.register_forward_hook(lambda m, args, out: out * 2)]
        return h

    model, _ = drive(variant(prepare, handles=list), reuse=reuse)
    assert len(model.f._forward_hooks) == 1


# --- parameters that move in forward ---------------------------------------------------------------------------------


class Momentum(nn.Module):
    """A momentum encoder that forward itself moves, before the cut or behind it."""

    def __init__(self, move, behind):
        super().__init__()
        self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False)
        self.cut, self.f = nn.Identity(), nn.Linear(8, 3)
        self.move, self.behind = move, behind

    @torch.no_grad()
    def key(self, x):
        for name in ("weight", "bias"):
            self.move(self.k, name, getattr(self.q, name))
        return self.k(x)

    def forward(self, x):
        key = None if self.behind else self.key(x)
        h = self.cut(self.q(x))
        return self.f(h * (self.key(x) if key is None else key))


def moved(k, q):
    return k * 0.9 + q * 0.1 + 1.0


def assign_data(module, name, q):
    k = getattr(module, name)
    k.data = moved(k.data, q.data)


def copy_data(module, name, q):
    k = getattr(module, name)
    k.data.copy_(moved(k.data, q.data))


def set_storage(module, name, q):
    k = getattr(module, name)
    k.set_(moved(k.data, q.data))


def new_parameter(module, name, q):
    setattr(module, name, nn.Parameter(moved(getattr(module, name).data, q.data), requires_grad=False))


def new_entry(module, name, q):
    module._parameters[name] = nn.Parameter(moved(module._parameters[name].data, q.data), requires_grad=False)


def in_place(module, name, q):
    getattr(module, name).lerp_(q, 0.1).add_(1.0)


def data_of_data(module, name, q):
    flat = getattr(module, name).detach().view(-1)
    flat += 1.0


def by_state_dict(module, name, q):
    module.load_state_dict({n: moved(p, p) for n, p in module.state_dict().items()})


MOVES = [assign_data, copy_data, set_storage, new_parameter, new_entry, in_place, data_of_data, by_state_dict]


@REUSE
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_a_momentum_encoder_moves_once_per_step(move, behind, reuse):
    drive(lambda: Momentum(move, behind), steps=4, reuse=reuse)


def test_a_momentum_encoder_of_the_retained_samples_is_the_one_that_plain_training_gives():
    model, _ = drive(lambda: Momentum(assign_data, behind=False), steps=3)
    torch.manual_seed(0)
    start = Momentum(assign_data, False)
    expected = start.k.weight.data
    for _ in range(3):
        expected = moved(expected, start.q.weight.data)
    torch.testing.assert_close(model.k.weight.data, expected)


# --- layers and parameters that come later ---------------------------------------------------------------------------


class Wrap(nn.Module):
    """A wrapper of a layer, with state of its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.calls = layer, 0
        self.gain = nn.Parameter(torch.ones(8))
        self.register_buffer("n", torch.zeros(1))
        self.plain = torch.zeros(1)

    def forward(self, x):
        self.n += 1
        self.plain += len(x)
        self.calls += 1
        return self.layer(x) * self.gain


def by_setattr(model, name):
    setattr(model, name, Wrap(getattr(model, name)))


def by_modules(model, name):
    model._modules[name] = Wrap(model._modules[name])


def by_set_submodule(model, name):
    model.set_submodule(name, Wrap(model.get_submodule(name)))


@REUSE
@pytest.mark.parametrize("put", [by_setattr, by_modules, by_set_submodule])
@pytest.mark.parametrize("name", ["a", "extra"])
def test_a_layer_put_in_after_the_blocker_was_made_moves_once_per_step(put, name, reuse):
    make = variant(lambda self, h: self.extra(h), extra=lambda: nn.Linear(8, 8))
    model, stats = drive(make, reuse=reuse, between=lambda step, net: put(net, name) if step == 1 else None)
    assert getattr(model, name).n == getattr(model, name).calls == 4
    assert reuse == "recompute" or stats.steps_replayed == 5


@pytest.mark.parametrize("put", [by_setattr, by_modules])
def test_a_change_of_a_layer_that_came_later_is_seen(put):
    """Between the blocker and the model's call: what was recorded is not what the layer now gives."""
    net = Net()
    blocker = halfway.ForwardBlocker(net, "cut", 0.5, selector=halfway.Density(num_centroids=4))
    net(blocker(torch.randn(8, 6)))
    put(net, "a")
    net(blocker(torch.randn(8, 6)))
    retained = blocker(torch.randn(8, 6))
    with torch.no_grad():
        net.a.gain.mul_(2)
    with pytest.warns(UserWarning, match="parameters or buffers changed"):
        found = net(retained)
    torch.testing.assert_close(found, net(retained))


@REUSE
@pytest.mark.parametrize("name", ["a", "f"])
def test_a_parameter_replaced_after_the_blocker_was_made_is_trained(name, reuse):
    def replace(step, net):
        if step == 2:
            module = getattr(net, name)
            module.weight = nn.Parameter(module.weight.detach() * 2)

    drive(Net, reuse=reuse, between=replace)


# --- a generator of the model's own ----------------------------------------------------------------------------------


class Drawing(Net):
    def __init__(self, reads=False):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)
        self.reads = reads

    def prepare(self, h):
        if self.reads:
            float(h.sum())  # differs between all samples and some: such a step is recomputed
        return h * torch.rand(h.shape, generator=self.generator)


def test_a_generator_of_the_model_moves_once_per_replayed_step():
    model, plain = Drawing(), Drawing()
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=halfway.Density(num_centroids=4), reuse="replay")
    for _ in range(4):
        x = torch.randn(8, 6)
        model(blocker(x)).sum().backward()
        plain(x)
        assert torch.equal(model.generator.get_state(), plain.generator.get_state())


@pytest.mark.parametrize("how", [{"reads": True}, {"reads": False}])
def test_a_generator_of_the_model_moves_as_in_plain_training_in_a_recomputed_step(how):
    drive(lambda: Drawing(**how), reuse="auto" if how["reads"] else "recompute")


# --- a default device that is not the data's -------------------------------------------------------------------------


@REUSE
@pytest.mark.parametrize("selector", ["density", "density_public", "random", "rotate"])
def test_another_default_device_changes_nothing(reuse, selector):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(8, 6)
    blocker = halfway.ForwardBlocker(model, "1", 0.5, selector=selector, reuse=reuse)
    ids = torch.arange(8)
    with torch.device("meta"):
        for _ in range(3):
            model(blocker(x, ids=ids)).sum().backward()
    assert blocker.stats.samples_retained == 12
    blocker.remove()


def test_a_default_device_set_for_good_changes_nothing():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    x = torch.randn(32, 6)
    blocker = halfway.ForwardBlocker(model, "1", 0.5, selector=halfway.Density(num_centroids=4), reuse="replay")
    torch.set_default_device("meta")
    try:
        for _ in range(2):
            model(blocker(x)).sum().backward()
    finally:
        torch.set_default_device(None)
    assert blocker.stats.steps_replayed == 2
