"""The shape of a run: frozen, typed and strict; every cross-check that can be made before data is touched.

Field names are the words of docs/design.md; the paper's letters are in the comments. Batches are global (over all
devices), learning rates are absolute peaks.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from bridle.config.data_schema import (
    SOURCES,
    AudioConfig,
    AugmentConfig,
    DataConfig,
    SignalsConfig,
    SourceEntry,
    VideoConfig,
)
from bridle.config.section import (
    Above0,
    Codes,
    Count,
    Natural,
    NonNegative,
    Positive,
    Section,
    Share,
    Sizes,
    Width,
)  # fmt: skip
from bridle.config.training_schema import (
    DetokenizerConfig,
    EncoderPhaseConfig,
    FinetuneConfig,
    HidingConfig,
    MaskConfig,
    PhaseConfig,
    ProbeConfig,
    RuntimeConfig,
    ScheduleConfig,
)
from bridle.errors import ConfigError, UsageError, quoted
from bridle.geometry import Geometry


class GeometryConfig(Section):
    """Channels, input size and patch size; one number per axis."""

    channels: Positive
    input: Sizes
    patch: Sizes

    def build(self) -> Geometry:
        return Geometry(channels=self.channels, input=self.input, patch=self.patch)


class TrunkConfig(Section):
    """A stack of transformer blocks."""

    width: Width  # D
    depth: Count
    heads: Count
    mlp_ratio: Above0 = 4.0


class EncoderConfig(TrunkConfig):
    """Main encoder E; the tokenizer's encoder E_T has the same architecture."""

    drop_path: Share = 0.0
    class_token: bool = False
    whiten: Above0 | None = None  # ridge; None: patches are not whitened
    stem: Count | None = None  # k-means centres of windows inside patches (nn/stem.py); None: patches alone
    weights: str | None = None  # a ViT's safetensors file (timm or torch names) to start from


class DecoderConfig(TrunkConfig):
    """Decoder D: predicts codes at masked positions from what is visible."""

    # cross: predicted positions attend to visible tokens, not to each other; all others are not computed.
    kind: Literal["window", "plain", "cross"] = "window"
    window: Literal["auto"] | Sizes = "auto"


class EstimatorConfig(TrunkConfig):
    """Tokenizer estimator TE: from code vectors back to the encoder's features."""


class TokenizerConfig(Section):
    """Which tokenizers give the codes, and options of the random projection."""

    first: str = "projection"  # of iteration 1: a fixed random projection of patches, or one that you registered
    later: str = "vit"  # of later iterations: a network trained in its own phase; `features`: none; or a registered one
    # Before the projection. dataset: as inputs are. item: every item loses its mean over `item_axes` and its deviation,
    # so that codes do not depend on level, background or lighting. patch: the same for every patch alone.
    standardise: Literal["dataset", "item", "patch"] = "dataset"
    item_axes: tuple[Natural, ...] | None = None  # with item: such as [0], the frames of each band; None: all axes
    position: bool = False  # add sin-cos positions to the patches before the projection, as the released code does
    # Principal components divided by their variance^(whiten/2); None: a random projection alone.
    whiten: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    components: Positive | None = None  # with whiten: how many are kept; None: as many as quantizer.width, at most all

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.components is not None and self.whiten is None:
            raise ValueError("tokenizer.components: needs tokenizer.whiten, for example 0.5")
        if self.item_axes is not None and self.standardise != "item":
            raise ValueError("tokenizer.item_axes: needs tokenizer.standardise=item")
        return self


class QuantizerConfig(Section):
    """Residual quantizer; `codebooks: 1` is plain vector quantization."""

    codebooks: Count = 4  # M
    codes: Codes | tuple[Codes, ...] = 256  # K, or K_1 ... K_M
    width: Width = 256  # Dq
    start: Literal["kmeans", "uniform", "uniform-raw"] = "kmeans"
    residual: Literal["once", "perstage", "released", "none", "independent"] = "once"
    update: Literal["ema", "gradient"] = "ema"
    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.99  # γ
    eps: Above0 = 1e-5  # ε
    reset_below: Natural = 1  # T_u; 0 never resets
    reset_every: Natural = 20  # tokenizer steps; codes unused so long are redrawn; 0 only at the start
    restart: bool = False  # solve k-means again on the trained tokenizer's latents before the encoder learns from it
    soft: Positive = 1  # k nearest codes as soft targets; 1 is hard
    soft_weights: Literal["even", "softmax"] = "even"
    soft_temperature: Above0 = 0.1  # τ of softmax(−d²/τ)
    soft_q: bool = True  # false: soft targets alone; q, the residual and the statistics take the nearest code
    kmeans_iterations: Positive = 10

    @property
    def sizes(self) -> tuple[int, ...]:
        """K_1 ... K_M."""
        return (self.codes,) * self.codebooks if isinstance(self.codes, int) else self.codes

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.sizes) != self.codebooks:
            raise ValueError(f"quantizer.codes: {len(self.sizes)} sizes given for {self.codebooks} codebooks")
        if self.soft > min(self.sizes):
            raise ValueError(f"quantizer.soft: {self.soft} nearest codes asked from a codebook of {min(self.sizes)}")
        if self.residual == "independent" and self.width % self.codebooks:
            raise ValueError(
                f"quantizer.width: {self.width} cannot be cut into {self.codebooks} equal slices, "
                "which the residual rule 'independent' needs"
            )
        return self


class LossConfig(Section):
    """Weights and forms of the three losses."""

    target: Literal["codes", "patches"] = "codes"  # patches: no tokenizer, each patch is regressed
    codes: Literal["ce", "bce"] = "ce"
    commitment_weight: NonNegative = 0.25  # β
    commitment: Literal["stages", "sum"] = "stages"
    cosine_weight: NonNegative = 1.0  # λ_cos
    cosine: Literal["mean", "ratio"] = "mean"
    centre_teacher: Literal["none", "mean", "position"] = "position"  # what is subtracted from the teacher's features
    teacher_block: Positive | None = None  # the encoder's block that teaches, 1 to its depth; None: the last


class Config(Section):
    """A whole run."""

    name: str
    summary: str = ""
    size: Literal["tiny", "small", "base", "large"] = "tiny"
    seed: Natural = 0
    max_steps: Positive | None = None  # caps every phase
    # The experiment tracker; auto: TensorBoard where it is installed.
    log: Literal["auto", "tensorboard", "wandb", "mlflow", "trackio", "none"] = "auto"
    geometry: GeometryConfig
    data: DataConfig
    audio: AudioConfig = AudioConfig()
    video: VideoConfig = VideoConfig()
    signals: SignalsConfig = SignalsConfig()
    augment: AugmentConfig = AugmentConfig()
    encoder: EncoderConfig
    decoder: DecoderConfig
    estimator: EstimatorConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    quantizer: QuantizerConfig = QuantizerConfig()
    mask: MaskConfig = MaskConfig()
    loss: LossConfig = LossConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    encoder_phase: EncoderPhaseConfig
    tokenizer_phase: PhaseConfig
    runtime: RuntimeConfig = RuntimeConfig()
    probe: ProbeConfig = ProbeConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    detokenizer: DetokenizerConfig = DetokenizerConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            geometry = self.geometry.build()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        self._check_trunks()
        self._check_grid(geometry)
        self._check_mask(geometry, self.mask, "mask")
        if self.finetune.mask is not None:
            self._check_mask(geometry, self.finetune.mask, "finetune.mask")
        self._check_blocks()
        self._check_whitening(geometry)
        self._check_target()
        for key in ("mean", "std"):
            values = getattr(self.data, key)
            if values is not None and len(values) not in (1, geometry.channels):
                raise ValueError(f"data.{key}: {len(values)} values for {geometry.channels} channels; give 1 or all")
        return self

    def _check_blocks(self) -> None:
        for name, block in (("loss.teacher_block", self.loss.teacher_block), ("probe.layer", self.probe.layer)):
            if isinstance(block, int) and block > self.encoder.depth:
                raise ValueError(
                    f"{name}: {block} of an encoder with {self.encoder.depth} blocks; "
                    f"give 1 to {self.encoder.depth}, or null for the last"
                )

        if self.probe.layer == "stem" and self.encoder.stem is None:
            raise ValueError("probe.layer: 'stem' needs encoder.stem, for example 200")

    def _check_whitening(self, geometry: Geometry) -> None:
        if self.encoder.whiten is not None and self.encoder.weights is not None:
            raise ValueError(
                "encoder.whiten: weights from elsewhere (encoder.weights) know plain patches; add encoder.whiten=null"
            )
        kept = self.tokenizer.components
        if kept is not None and kept > geometry.patch_features:
            raise ValueError(
                f"tokenizer.components: {kept} of patches with {geometry.patch_features} values; "
                f"give 1 to {geometry.patch_features}, or null"
            )
        axes = self.tokenizer.item_axes
        if axes is not None and (not axes or len(set(axes)) < len(axes) or max(axes) >= geometry.rank):
            raise ValueError(
                f"tokenizer.item_axes: {list(axes)}; name some of the axes 0 to {geometry.rank - 1}, once each"
            )

    def _check_target(self) -> None:
        if self.schedule.mode == "joint":
            if self.loss.target == "patches":
                raise ValueError("loss.target: 'patches' has no tokenizer to train; use schedule.mode=interleaved")
            if self.schedule.tokenizer == "keep":
                raise ValueError("schedule.tokenizer: 'keep' trains no tokenizer; use schedule.mode=interleaved")
            if self.encoder_phase.masks > 1:
                raise ValueError(
                    "encoder_phase.masks: in joint training codes change with every step and cannot be reused; use 1"
                )

    def _check_trunks(self) -> None:
        for name in ("encoder", "decoder", "estimator"):
            trunk: TrunkConfig = getattr(self, name)
            if trunk.width % trunk.heads:
                raise ValueError(
                    f"{name}.heads: {trunk.heads} heads do not divide width {trunk.width}; "
                    f"try {name}.heads={_nearest_divisor(trunk.width, trunk.heads)}"
                )
            if trunk.width < 2 * self.geometry.build().rank:
                raise ValueError(f"{name}.width: {trunk.width} is too narrow for the sin-cos positions of this grid")

    def _check_grid(self, geometry: Geometry) -> None:
        window = self.decoder.window
        if self.decoder.kind == "window" and window != "auto":
            if len(window) != geometry.rank:
                raise ValueError(
                    f"decoder.window: {list(window)} has not the rank of grid {list(geometry.grid)}; use 'auto'"
                )
            if any(w > n for w, n in zip(window, geometry.grid, strict=True)):
                raise ValueError(
                    f"decoder.window: {list(window)} is larger than grid {list(geometry.grid)}; use 'auto'"
                )
        for name, pooled in (("probe", self.probe), ("finetune", self.finetune)):
            if pooled.pool == "axis" and pooled.axis >= geometry.rank:
                raise ValueError(f"{name}.axis: {pooled.axis} is not an axis of grid {list(geometry.grid)}")
            if pooled.pool == "class" and not self.encoder.class_token:
                raise ValueError(f"{name}.pool: 'class' needs encoder.class_token=true; use 'mean'")

    def _check_mask(self, geometry: Geometry, mask: HidingConfig, name: str) -> None:
        ratio, grid = mask.ratio, geometry.grid
        if geometry.tokens < 2:
            raise ValueError(
                f"geometry.patch: {list(geometry.patch)} makes a single token of input {list(geometry.input)}, "
                "so a mask leaves nothing to see or nothing to predict; use a smaller patch"
            )
        if not isinstance(ratio, tuple):
            ratio = (ratio,) * (geometry.rank if mask.kind == "axes" else 1)
        elif mask.kind != "axes" or len(ratio) != geometry.rank:
            raise ValueError(
                f"{name}.ratio: a list needs {name}.kind 'axes' and one ratio for each of {geometry.rank} axes"
            )
        if mask.kind == "tube" and geometry.rank < 2:
            raise ValueError(f"{name}.kind: 'tube' needs a time axis and at least one more; use 'random'")
        counted = {"random": [geometry.tokens], "tube": [prod(grid[1:])], "axes": list(grid)}[mask.kind]
        shown = [max(1, round((1 - r) * n)) for r, n in zip(ratio, counted, strict=True)]
        if shown == counted and name == "mask":
            raise ValueError(
                f"{name}.ratio: {mask.ratio} of {counted} positions hides nothing, so there is nothing to predict; "
                "use a larger ratio or a smaller patch"
            )
        # Less than half a position would be shown: one is shown anyway, but the ratio asked for cannot be met.
        if any((1 - r) * n < 0.5 for r, n in zip(ratio, counted, strict=True)):
            raise ValueError(
                f"{name}.ratio: {mask.ratio} of {counted} positions leaves nothing visible; "
                "use a smaller ratio or a smaller patch"
            )


def _nearest_divisor(width: int, wanted: int) -> int:
    return min((d for d in range(1, width + 1) if width % d == 0), key=lambda d: (abs(d - wanted), d))


def add_source(name: str, *, section: type[Section] | None) -> None:
    """Make `name` a value of data.source and, where it has settings, `section` a section of that name in every Config.

    UsageError where the package itself has that source or section.
    """
    if name in SOURCES and SOURCES[name].module:
        raise UsageError(f"data.source {quoted(name)} comes with bridle; register your modality under another name.")
    if name not in SOURCES and name in Config.model_fields:
        raise UsageError(f"{quoted(name)} is a section of every config; register your modality under another name.")
    if section is not None:
        Config.model_fields[name] = FieldInfo.from_annotated_attribute(section, section())
        Config.model_rebuild(force=True)
    SOURCES[name] = SourceEntry(module="", section=None if section is None else name)
