"""Builders: from a config to networks, only in this module.

Every part is initialised from a generator named by (seed, iteration, part), so a part's weights do not depend on which
other parts were built, and every iteration's tokenizer is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from bridle.config import Config
from bridle.config.schema import TrunkConfig
from bridle.errors import ConfigError, UsageError
from bridle.models.classifier import Classifier
from bridle.models.decoder import CodeHeads, Decoder, PatchHead
from bridle.models.detokenizer import Detokenizer
from bridle.models.encoder import Encoder
from bridle.models.estimator import Estimator
from bridle.models.tokenizer import (
    KINDS,
    ColdStartTokenizer,
    FeatureTokenizer,
    Tokenizer,
    VitTokenizer,
    register_tokenizer,
    tokenizer_kind,
)
from bridle.nn.transformer import initialise
from bridle.quantize import ResidualQuantizer
from bridle.seeding import generator


@dataclass
class Networks:
    """Networks that are trained and saved together: the fields of a subclass, by name and in their order."""

    def modules(self) -> dict[str, nn.Module]:
        """The networks by name, in a fixed order."""
        named = {field.name.removeprefix("own_"): getattr(self, field.name) for field in fields(self)}
        return {name: module for name, module in named.items() if isinstance(module, nn.Module)}

    def state(self) -> dict[str, Tensor]:
        """Every parameter and saved buffer, by dotted name."""
        return named_state(self.modules())

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps of them beside tensors, as JSON."""
        return {}


@dataclass
class Nets(Networks):
    """The networks of a run as they stand.

    The estimator exists from the first tokenizer phase on; a run that predicts patches has neither it nor a tokenizer.
    """

    encoder: Encoder
    decoder: Decoder
    heads: CodeHeads | PatchHead
    own_tokenizer: Tokenizer | None
    estimator: Estimator | None = None
    norms_start: list[list[float]] = field(default_factory=list)  # code norms right after the codebooks' start

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; UsageError says why there is none."""
        return require_tokenizer(self.own_tokenizer)

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self.own_tokenizer = tokenizer

    def record(self) -> dict[str, Any]:
        """The code norms."""
        return {"norms_start": self.norms_start}


def named_state(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Every parameter and saved buffer of several networks, by dotted name."""
    return {f"{name}.{key}": tensor for name, module in modules.items() for key, tensor in module.state_dict().items()}


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of a model; UsageError if it has none."""
    if tokenizer is None:
        raise UsageError(
            "this model has no tokenizer, so no codes and no codebooks: it predicts patches (loss.target=patches), "
            "or its encoder comes from elsewhere; use a run with loss.target=codes."
        )
    return tokenizer


def build_encoder(config: Config, *, iteration: int = 1, part: str = "encoder") -> Encoder:
    """Main encoder, or with part='tokenizer-encoder' the tokenizer's own of the same architecture."""
    c = config.encoder
    saved = c.weights is not None and part == "encoder"
    encoder = Encoder(
        class_token=c.class_token, saved_position=saved, whiten=c.whiten, stem=c.stem, **_trunk(config, c)
    )
    _initialise(encoder, config, iteration, part)
    return encoder


def _trunk(config: Config, c: TrunkConfig) -> dict[str, Any]:
    """The arguments that all networks with a stack of blocks have."""
    return {
        "geometry": config.geometry.build(),
        "checkpoint_activations": config.runtime.checkpoint_activations,
        **{key: getattr(c, key) for key in TrunkConfig.model_fields},
    }


def build_decoder(config: Config, *, iteration: int = 1) -> Decoder:
    """Decoder D."""
    c = config.decoder
    decoder = Decoder(encoder_width=config.encoder.width, kind=c.kind, window=c.window, **_trunk(config, c))
    _initialise(decoder, config, iteration, "decoder")
    return decoder


def build_heads(config: Config, *, iteration: int) -> CodeHeads | PatchHead:
    """What turns the decoder's features into guesses: of codes, or of patches."""
    width = config.decoder.width
    heads: CodeHeads | PatchHead
    if config.loss.target == "patches":
        heads = PatchHead(width=width, patch_features=config.geometry.build().patch_features)
    else:
        heads = CodeHeads(width=width, sizes=config.quantizer.sizes)
    _initialise(heads, config, iteration, "heads")
    return heads


def build_quantizer(config: Config) -> ResidualQuantizer:
    """The residual quantizer; the two settings left out are those of the tokenizer phase."""
    return ResidualQuantizer(**config.quantizer.model_dump(exclude={"reset_every", "restart"}))


def build_first_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of iteration 1, as `tokenizer.first` says."""
    kind = tokenizer_kind(config.tokenizer.first, key="tokenizer.first")
    if kind.is_trained:
        raise ConfigError(f"tokenizer.first: {config.tokenizer.first!r} needs training; use it as tokenizer.later.")
    return kind.build(config, iteration=1)


def build_later_tokenizer(config: Config, *, iteration: int) -> Tokenizer:
    """A new tokenizer as `tokenizer.later` says; nothing of an earlier iteration's goes into it."""
    return tokenizer_kind(config.tokenizer.later, key="tokenizer.later").build(config, iteration=iteration)


def build_cold_start(config: Config, *, iteration: int = 1) -> ColdStartTokenizer:
    """Kind `projection`: a fixed random projection of patch content."""
    tokenizer = ColdStartTokenizer(
        geometry=config.geometry.build(),
        quantizer=build_quantizer(config),
        standardise=config.tokenizer.standardise,
        item_axes=config.tokenizer.item_axes,
        position=config.tokenizer.position,
        whiten=config.tokenizer.whiten,
        components=config.tokenizer.components,
    )
    if not tokenizer.projection.is_meta:
        tokenizer.draw_projection(generator(config.seed, iteration, "cold-start"))
    return tokenizer


def build_vit_tokenizer(config: Config, *, iteration: int) -> VitTokenizer:
    """Kind `vit`: an encoder of the main encoder's architecture with a projection to the code width."""
    encoder = build_encoder(config, iteration=iteration, part="tokenizer-encoder")
    tokenizer = VitTokenizer(encoder=encoder, quantizer=build_quantizer(config))
    _initialise(tokenizer.projection, config, iteration, "tokenizer-projection")
    return tokenizer


def build_feature_tokenizer(config: Config, *, iteration: int) -> FeatureTokenizer:
    """Kind `features`: a copy of the main encoder, whose features are quantized; `take_from` gives it the weights."""
    return FeatureTokenizer(
        encoder=build_encoder(config),
        quantizer=build_quantizer(config),
        block=config.loss.teacher_block,
        whiten=config.tokenizer.whiten or 0.0,
    )


def build_estimator(config: Config, *, iteration: int) -> Estimator:
    """Tokenizer estimator TE."""
    widths = {"code_width": config.quantizer.width, "encoder_width": config.encoder.width}
    estimator = Estimator(**widths, **_trunk(config, config.estimator))
    _initialise(estimator, config, iteration, "estimator")
    return estimator


def build_detokenizer(config: Config, *, iteration: int) -> Detokenizer:
    """A new network from the codes of iteration `iteration`'s tokenizer to inputs."""
    c, q = config.detokenizer, config.quantizer
    blocks = TrunkConfig(width=c.width or config.encoder.width, depth=c.depth, heads=c.heads or config.encoder.heads)
    detokenizer = Detokenizer(code_width=q.width, codebooks=q.codebooks, **_trunk(config, blocks))
    _initialise(detokenizer, config, iteration, "detokenizer")
    return detokenizer


def build_classifier(config: Config, encoder: Encoder, *, classes: int, iteration: int) -> Classifier:
    """An encoder as it is, with a new head for `classes`."""
    c = config.finetune
    classifier = Classifier(encoder=encoder, classes=classes, pool=c.pool, axis=c.axis, deviation=c.deviation)
    classifier.start_head(generator(config.seed, iteration, "classifier"))
    return classifier


def build_nets(config: Config, *, iteration: int = 1, later_tokenizer: bool = False) -> Nets:
    """All networks of an iteration: with its first or a later tokenizer, or without one if patches are the target."""
    tokenizer: Tokenizer | None = None
    if config.loss.target == "codes" and later_tokenizer:
        tokenizer = build_later_tokenizer(config, iteration=iteration)
    elif config.loss.target == "codes":
        tokenizer = build_first_tokenizer(config)
    is_trained = tokenizer is not None and tokenizer.is_trained
    return Nets(
        encoder=build_encoder(config, iteration=1),
        decoder=build_decoder(config, iteration=1),
        heads=build_heads(config, iteration=iteration),
        own_tokenizer=tokenizer,
        estimator=build_estimator(config, iteration=iteration) if is_trained else None,
    )


def _initialise(module: nn.Module, config: Config, iteration: int, part: str) -> None:
    if any(parameter.is_meta for parameter in module.parameters()):
        return  # shapes only, as `bridle show` and the tests use it
    random = generator(config.seed, iteration, part)
    initialise(module, generator=random)
    for name, parameter in module.named_parameters():
        if name.endswith(("class_token", "mask_token")):
            with torch.no_grad():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=random))


register_tokenizer("projection", build_cold_start)
register_tokenizer("features", build_feature_tokenizer)
register_tokenizer("vit", build_vit_tokenizer, is_trained=True)
BUILT_IN_TOKENIZERS = frozenset(KINDS)
