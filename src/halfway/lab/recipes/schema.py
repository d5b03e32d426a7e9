"""A recipe: everything one training needs to know. `reading` has it from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ...errors import did_you_mean
from ...ratios import PruneRatio, Ramp, Ratios, ramp, steps
from ...samplers import EpochSampler
from ...schedule import Schedule
from ...selectors import Selector
from ...selectors.earlier import sections_today
from ..coresets.settings import CoresetSettings
from ..data.settings import VARIANTS, DataSettings
from . import methods as known_methods
from .conversion import flat, make, merged, nested, plain
from .methods import FULL, IMPLEMENTATIONS, WHOLE_BATCHES, Method

if TYPE_CHECKING:
    from ..data import Data

# Settings in which the runs of a comparison differ.
OF_A_RUN = ("root", "seed", "method", "prune_ratio")
# Descriptions, and where and how the data are read: none of this changes what a run computes.
_NO_IDENTITY = ("title", "paper", "root")
# Settings that runs made before them do not have: their defaults are no part of what a run is.
_LATER = {"stop_after": 1.0, "record": "nothing"}


@dataclass(frozen=True)
class ModelSettings:
    """Which network.

    name: see `models.small.build`.
    options: passed to its builder.
    weights: a file of pretrained weights.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None


@dataclass(frozen=True)
class OptimizerSettings:
    """Which optimizer.

    name: sgd, lars (timm's) or adamw.
    lr: the peak.
    options: passed to the optimizer.
    """

    name: Literal["sgd", "lars", "adamw"]
    lr: float
    weight_decay: float
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LearningRate:
    """How the learning rate changes.

    name: onecycle, cosine or poly.
    warmup: length of its linear or one-cycle rise, in the recipe's unit; None: the policy's own.
    final: the last learning rate, where the policy has one.
    power: of poly.
    """

    name: Literal["onecycle", "cosine", "poly"]
    warmup: float | None = None
    final: float = 0.0
    power: float = 0.9


@dataclass(frozen=True)
class Paper:
    """What the paper reports for this setting: its numbers, not ours.

    where: its table.
    score: its metric.
    full: score on all data.
    pfb: score by pruning ratio.
    saved: share of the training time that it reports as saved, by pruning ratio.
    """

    where: str
    score: str
    full: float | None = None
    pfb: dict[float, float] = field(default_factory=dict)
    saved: dict[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """All settings of a training. `length`, `window`, `log_every` and warm-up are counted in `unit`s.

    cut: the layer PFB blocks at.
    window: prune in [start, stop); a stop of None is the end of the run.
    method: one of `methods.names`.
    seed: of weights, batches and augmentation.
    selection_seed: of what the method draws; None: `seed`. Two runs that differ in it alone show how much of a score is
        the luck of the draw.
    stop_after: the share of the run after which it ends; the learning rate is still that of the whole run.
    record: what to keep for coresets, see `training.recorders`.
    coreset: a subset that was chosen before the training.
    methods: settings by method; in files and on the command line each is a section, like `density: {noise: 0.1}`.
    auxiliary_weight: of the auxiliary head's loss.
    precision: "amp" is float16 with a gradient scaler on CUDA and bfloat16 elsewhere.
    log_every: how often metrics and a checkpoint are written.
    evaluate_every: how many of those intervals lie between two evaluations (the last one always evaluates).
    batch_norm_samples: estimate BatchNorm's statistics anew on that many random training images before an evaluation;
        0: those of the training.
    training_score: also score that many training images at the end, in eval mode and not augmented.
    multi_scale: scales of the final evaluation, each also flipped.
    root: folder of the data.
    """

    name: str
    title: str
    task: Literal["classification", "segmentation"]
    data: DataSettings
    model: ModelSettings
    optimizer: OptimizerSettings
    learning_rate: LearningRate
    length: int
    batch_size: int
    cut: str
    window: tuple[int, int | None]
    unit: Literal["epoch", "step"] = "epoch"
    method: str = "pfb"
    prune_ratio: float | dict[str, Any] = 0.3
    seed: int = 0
    selection_seed: int | None = None
    stop_after: float = 1.0
    record: Literal["nothing", "dynamics", "checkpoints"] = "nothing"
    coreset: CoresetSettings = field(default_factory=CoresetSettings)
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    auxiliary_weight: float = 0.4
    precision: Literal["float32", "amp"] = "float32"
    channels_last: bool = False
    log_every: int = 1
    evaluate_every: int = 1
    evaluation_batch: int = 500
    batch_norm_samples: int = 0
    training_score: int = 0
    multi_scale: tuple[float, ...] = ()
    root: str = "data"
    paper: Paper | None = None

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "log_every", "evaluate_every", "evaluation_batch"):
            _in_range(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("batch_norm_samples", "training_score"):
            _in_range(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        _in_range("optimizer.lr", self.optimizer.lr, self.optimizer.lr > 0, "positive")
        _in_range("stop_after", self.stop_after, 0 < self.stop_after <= 1, "in (0, 1]")
        # Aliases are resolved here: from now on `density` is `pfb`.
        object.__setattr__(self, "method", known_methods.resolve(self.method))
        self.schedule  # noqa: B018  a window that ends before it begins is refused here
        self.ratios  # noqa: B018  and so is a ratio that is none
        for name, settings in self.methods.items():
            if not isinstance(settings, Mapping):
                raise ValueError(f"{name} is a section of settings, got {settings!r}")
            for option in settings:
                names = list(known_methods.settings_of(name))
                if option not in names:
                    raise ValueError(f"{name} has no setting {option!r}; {did_you_mean(option, names)}")

    @property
    def prunes(self) -> bool:
        """Whether the run costs less than full data."""
        return self.method != FULL and self.ratios.largest > 0

    @property
    def ratio_by_position(self) -> PruneRatio:
        """`prune_ratio` as the blocker takes it: a number, {ramp: [0, 0.8]} or {steps: {0: 0.0, 5: 0.3}}."""
        given = self.prune_ratio
        if not isinstance(given, dict):
            return given
        if len(given) == 1 and isinstance(pair := given.get("ramp"), (list, tuple)) and len(pair) == 2:
            return ramp(*pair)
        if len(given) == 1 and isinstance(table := given.get("steps"), dict):
            return steps({int(position): ratio for position, ratio in table.items()})
        raise ValueError(f"prune_ratio is a number, {{ramp: [0, 0.8]}} or {{steps: {{0: 0.0, 5: 0.3}}}}, got {given!r}")

    @property
    def ratios(self) -> Ratios:
        """The pruning ratio at each position of the run."""
        if self.schedule.stop is None and isinstance(self.ratio_by_position, Ramp):
            raise ValueError("a ramp ends where pruning does: give the window an end, as in window=[5, 180]")
        return Ratios(self.ratio_by_position, self.schedule)

    @property
    def mean_ratio(self) -> float:
        """Of the positions in the window: what a pruned step prunes on average."""
        if not isinstance(self.prune_ratio, dict):
            return self.prune_ratio
        return self.ratios.mean(self.schedule, self.length)

    def require_one_ratio(self, who: str) -> float:
        """The ratio; an error that says who cannot do with one that changes."""
        if isinstance(self.prune_ratio, dict):
            raise ValueError(f"{who} takes one ratio, but prune_ratio is {self.prune_ratio}; pass prune_ratio=0.5")
        return self.prune_ratio

    @property
    def pruning(self) -> Method | None:
        """The selector or sampler; None if every sample of a batch is trained on, and the plain loop runs."""
        return known_methods.find(self.method) if self.prunes and self.method not in WHOLE_BATCHES else None

    @property
    def method_settings(self) -> dict[str, Any]:
        """The settings of this recipe's method."""
        return dict(self.methods.get(self.pruning.implementation, {})) if self.pruning is not None else {}

    def selector(self, **known: Any) -> Selector | None:
        """A new selector with its settings, if the method decides within the batch.

        known: what a selector may ask for (`loss_fn`, `num_samples`, `class_counts`).
        """
        method = self.pruning
        if method is None or method.before_epoch:
            return None
        settings = self.method_settings
        if method.implementation == "proxy":
            settings["model"] = self.network(self.proxy_options)
        return method.selector(settings, num_classes=self.data.classes, **known)

    @property
    def proxy_options(self) -> dict[str, Any]:
        """The options of the small network of `proxy`: the recipe's own, with those of `proxy.model` instead."""
        given = self.method_settings.get("model")
        if not isinstance(given, dict) or not given:
            raise ValueError(
                "the method 'proxy' needs a small network: proxy.model={width: 8} is the recipe's own with this option"
            )
        return {**self.model.options, **given}

    def network(self, options: dict[str, Any] | None = None, weights: str | None = None) -> Any:
        """Its network, initialised by its seed.

        options: instead of the recipe's.
        weights: a file of pretrained ones to begin with, such as `model.weights`.
        """
        from ..models import small as nets

        options = self.model.options if options is None else options
        return nets.build(self.model.name, self.data.classes, options, weights, self.seed, self.data.size[0])

    @property
    def chosen_once(self) -> bool:
        """Whether the method decides once, before the training."""
        return self.pruning is not None and self.pruning.once

    @property
    def repeats(self) -> bool:
        """Whether a subset is trained on for as many steps as all data."""
        return self.chosen_once and self.coreset.equal_steps

    def sampler(self, samples: int, per_epoch: int, data: Data | None = None) -> EpochSampler | None:
        """A new sampler with its settings, if the method decides before the epoch.

        per_epoch: steps of an epoch of all data. A window in steps begins and ends at the nearest epoch. Unless it
            begins at step 0, it begins with the second epoch at the earliest, so that there are losses to learn from.
        data: which a subset file is compared with; None: not known yet.
        """
        method = self.pruning
        if method is None or not method.before_epoch:
            return None
        if method.once:
            from ..coresets.chosen import sampler_of

            return sampler_of(self, data)
        start, stop = self.window
        if self.unit == "step":
            start, stop = _scaled(start, 1 / per_epoch), None if stop is None else round(stop / per_epoch)
        schedule = Schedule(start, None if stop is None else max(start, stop))
        sampler = method.sampler(
            samples,
            self.require_one_ratio(f"{self.method}, which decides before the epoch,"),
            self.method_settings,
            schedule=schedule,
            seed=self.draw_seed,
        )
        sampler.foresee(self.length if self.unit == "epoch" else -(-self.length // per_epoch))
        return sampler

    @property
    def score_name(self) -> str:
        """The name of the score, a percentage; of the final one if that is evaluated at several scales."""
        if self.task == "classification":
            return "top-1 accuracy"
        return "mean intersection over union" + (", multi-scale with flips" if self.multi_scale else "")

    @property
    def schedule(self) -> Schedule:
        """When to prune."""
        window = Schedule(*self.window, unit=self.unit)
        return Schedule(unit=self.unit) if known_methods.without_window(self.method) else window

    @property
    def draw_seed(self) -> int:
        """The seed of what the method draws."""
        return self.seed if self.selection_seed is None else self.selection_seed

    def of_length(self, length: int) -> Recipe:
        """The same recipe with another length; window and warm-up keep their share of it."""
        factor = length / self.length
        start, stop = self.window
        # At least one epoch before the window if there was any, and one within it: zero would be another recipe.
        first = _scaled(start, factor)
        if start < self.length:
            first = min(first, length - 1)
        window = (first, None if stop is None else max(first + 1, round(stop * factor)))
        warmup = self.learning_rate.warmup
        rate = dataclasses.replace(self.learning_rate, warmup=None if warmup is None else warmup * factor)
        return dataclasses.replace(self, length=length, window=window, learning_rate=rate)

    def with_settings(self, changes: Mapping[str, Any]) -> Recipe:
        """The same recipe with other values, by dotted key."""
        return from_dict(merged(self.as_dict(), nested(changes)))

    def get(self, key: str) -> Any:
        """The value of a dotted key."""
        value: Any = self.as_dict()
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def identity(self) -> dict[str, Any]:
        """Everything that affects the result of a run, by dotted key, lists as text. Equal identities are the same run.

        Of the methods' settings only those of this recipe's method count, with defaults filled in: a setting left out
        equals its default given explicitly.
        """
        content = {key: value for key, value in self.as_dict().items() if key not in (*_NO_IDENTITY, *IMPLEMENTATIONS)}
        content["data"].pop("workers")
        # Settings at their defaults that did not exist when earlier runs were made: these are still the same runs.
        if self.draw_seed == self.seed:
            content.pop("selection_seed")
        for name in VARIANTS:
            if getattr(self.data, name) == getattr(DataSettings, name):
                content["data"].pop(name)
        content = {key: value for key, value in content.items() if key not in _LATER or value != _LATER[key]}
        content.pop("coreset", None)
        if self.chosen_once:  # what is in the file, not where it is
            mine = self.coreset
            switches = {"weights": mine.weights, "equal_steps": mine.equal_steps}
            content["coreset"] = {"content": mine.content or mine.file, **switches}
        if self.pruning is not None:
            used = self.pruning.implementation
            content[used] = {**known_methods.settings_of(used), **self.method_settings}
        return flat(content)

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for YAML; the settings of each method as a section."""
        content = plain(dataclasses.asdict(self))
        methods = content.pop("methods")
        if self.coreset == CoresetSettings():
            content.pop("coreset")
        return {**content, **methods}


def from_dict(content: Mapping[str, Any]) -> Recipe:
    """A recipe from plain values; every key and type is checked."""
    if "methods" in content:
        raise ValueError("no setting 'methods'; each method is a section of its own, like density.noise=0.1")
    own = {key: value for key, value in content.items() if key not in IMPLEMENTATIONS}
    sections = {key: value for key, value in content.items() if key in IMPLEMENTATIONS}
    if isinstance(own.get("method"), str):
        own["method"], sections = sections_today(own["method"], sections)
    return make(Recipe, {**own, "methods": sections}, "")


def _scaled(length: int, factor: float) -> int:
    return max(1, round(length * factor)) if length else 0


def _in_range(name: str, value: Any, fine: bool, words: str) -> None:
    if not fine:
        raise ValueError(f"{name} must be {words}, got {value}")
