"""bridle models for the library `transformers`: config, model, and processors that make its inputs.

`bridle export RUN --transformers` writes a folder that `AutoModel.from_pretrained(folder, trust_remote_code=True)`
loads. The code in that folder imports this module, so the networks are bridle's own. Importing this module registers
its classes; `AutoModel.from_pretrained(folder)` then needs no code of the folder.

Shapes: inputs (B, C, *input), normalised by the processor; last_hidden_state (B, T, D); codes (B, T, M).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.feature_extraction_utils import BatchFeature, FeatureExtractionMixin
from transformers.image_processing_utils import BaseImageProcessor

from bridle.config import Config
from bridle.config.section import with_tuples
from bridle.data.arrays.memory import is_picture, is_sound
from bridle.data.audio.modality import front_end
from bridle.data.audio.source import Shape, wave_sample
from bridle.data.build import open_reader
from bridle.data.image.source import fitted
from bridle.data.loading.loader import moments_tensors, normalise
from bridle.data.modality import modality_of
from bridle.errors import UsageError
from bridle.train.algorithm1 import Turn, build_frozen


class BridleConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    """The settings of a run (`settings`, as in config.yaml) and which of its networks the weights are of."""

    model_type = "bridle"

    def __init__(
        self,
        settings: dict[str, Any] | None = None,
        iteration: int = 1,
        phase: str = "encoder",
        parts: Iterable[str] = ("encoder", "tokenizer"),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.settings, self.iteration, self.phase, self.parts = settings or {}, iteration, phase, list(parts)


@dataclass
class BridleOutput(transformers.utils.ModelOutput):  # type: ignore[misc]
    """What `BridleModel` returns."""

    last_hidden_state: Tensor | None = None  # (B, T, D), after the final norm
    hidden_states: tuple[Tensor, ...] | None = None  # the embedding and every block, each (B, T, D)
    codes: Tensor | None = None  # (B, T, M); None where the model has no tokenizer


class BridleModel(transformers.PreTrainedModel):  # type: ignore[misc]
    """Encoder and tokenizer of a run."""

    config_class = BridleConfig
    base_model_prefix = "bridle"
    main_input_name = "input_values"
    _keep_in_fp32_modules_strict = ("tokenizer",)  # codes must not depend on the precision of features

    def __init__(self, config: BridleConfig) -> None:
        super().__init__(config)
        turn = Turn(config.iteration, config.phase)
        with torch.device("cpu"):  # transformers builds on the meta device, where buffers would have no values
            self.encoder, self.tokenizer = build_frozen(
                as_config(config.settings), turn, tokenizer="tokenizer" in config.parts
            )
        self._derived = {
            module: {name: getattr(module, name) for name in module._non_persistent_buffers_set}
            for module in self.modules()
        }
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Put back the buffers that are not saved, which transformers leaves empty; all else is loaded."""
        for name, value in self._derived[module].items():
            if value is not None:
                getattr(module, name).copy_(value)

    def forward(
        self,
        input_values: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_codes: bool = True,
        return_dict: bool | None = None,
    ) -> BridleOutput | tuple[Any, ...]:
        """Features and codes of inputs from the folder's processor; `attention_mask` (B, T) is 0 on padding."""
        given = [x for x in (input_values, pixel_values) if x is not None]
        if len(given) != 1:
            raise UsageError("give either input_values or pixel_values.")
        valid = None if attention_mask is None else attention_mask.bool()
        wanted = range(self.encoder.depth + 1) if output_hidden_states else [self.encoder.depth]
        states = tuple(found.z for found in self.encoder.layers(given[0].to(self.dtype), wanted=wanted, valid=valid))
        codes = None
        if output_codes and self.tokenizer is not None:
            with torch.no_grad():
                codes = self.tokenizer.tokenize(given[0].float(), valid=valid)
        output = BridleOutput(states[-1], states if output_hidden_states else None, codes)
        return output.to_tuple() if return_dict is False else output


class Inputs:
    """Base of the processors: files, pictures and sounds as normalised inputs of a model's size.

    Of what is longer than the input the first part is taken, as the first window of `bridle.load(…).encode_file`.
    """

    settings: dict[str, Any]
    input_name = "input_values"

    @cached_property
    def _config(self) -> Config:
        return as_config(self.settings)

    def to_dict(self) -> dict[str, Any]:
        """What is saved: the settings without what was derived from them."""
        saved: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        return {key: value for key, value in saved.items() if key != "_config"}

    def __call__(
        self, inputs: Any, sampling_rate: int | None = None, return_tensors: str | None = "pt", **unused: Any
    ) -> BatchFeature:
        """Inputs (B, C, *input) and their marks (B, T) of one or a list of paths, PIL images or waveforms.

        Waveforms are arrays at `sampling_rate` Hz, or dicts with "array" and "sampling_rate".
        """
        several = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        config = self._config
        read = [self._read(one, sampling_rate) for one in several]
        data: dict[str, Tensor] = {}
        mean, std = moments_tensors(*config.data.statistics)
        data[self.input_name] = normalise(torch.stack([x for x, _ in read]), mean=mean, std=std)
        if any(valid is not None for _, valid in read):
            every = torch.ones(config.geometry.build().tokens, dtype=torch.bool)
            data["attention_mask"] = torch.stack([every if valid is None else valid for _, valid in read]).long()
        return BatchFeature(data, tensor_type=return_tensors)

    def _read(self, one: Any, rate: int | None) -> tuple[Tensor, Tensor | None]:
        config = self._config
        geometry = config.geometry.build()
        if isinstance(one, str | os.PathLike):
            window = next(iter(open_reader(config).windows(Path(one))))
            return window.x, window.valid
        if is_picture(one):
            return fitted(one, geometry=geometry), None
        if modality_of(config).open_front_end is not None:
            if is_sound(one) and isinstance(one, Mapping):
                one, rate = one["array"], one["sampling_rate"]
            if rate is None:
                raise UsageError("a waveform needs its rate: give sampling_rate in Hz.")
            shape = Shape(geometry, front_end(config))
            return wave_sample(torch.as_tensor(np.asarray(one)), int(rate), shape, lambda spare: 0)
        x = torch.as_tensor(np.asarray(one))
        if tuple(x.shape) != geometry.shape:
            raise UsageError(f"expected a path, a PIL image or an array {geometry.shape}, got shape {tuple(x.shape)}.")
        scale = 255 if modality_of(config).is_unit_range and x.dtype == torch.uint8 else 1
        return x.float() / scale, None


class BridleFeatureExtractor(Inputs, FeatureExtractionMixin):  # type: ignore[misc]
    """Sounds and signals as `input_values`."""


class BridleImageProcessor(Inputs, BaseImageProcessor):  # type: ignore[misc]
    """Pictures and clips as `pixel_values`."""

    input_name = "pixel_values"


class BridlePipeline(transformers.Pipeline):  # type: ignore[misc]
    """`pipeline("feature-extraction")`: paths, PIL images or sounds -> features (1, T, D)."""

    _load_processor = _load_tokenizer = _load_image_processor = _load_feature_extractor = False

    def _sanitize_parameters(self, return_tensors: bool = False, **options: Any) -> tuple[dict[str, Any], ...]:
        return options, {}, {"return_tensors": return_tensors}

    def preprocess(self, inputs: Any, **options: Any) -> Any:
        """One input for the model."""
        return processor_for(self.model.config.settings)(inputs, **options)

    def _forward(self, model_inputs: Any) -> Any:
        return self.model(**model_inputs, output_codes=False)

    def postprocess(self, model_outputs: Any, return_tensors: bool = False) -> Any:
        """Features as a tensor or as nested lists."""
        return model_outputs[0] if return_tensors else model_outputs[0].tolist()


def as_config(settings: dict[str, Any]) -> Config:
    """Settings that were read from JSON as a checked config."""
    return Config.model_validate(with_tuples(settings))


def processor_for(settings: dict[str, Any]) -> Any:
    """The processor of a model with these settings."""
    pictures = modality_of(as_config(settings)).is_unit_range
    return (BridleImageProcessor if pictures else BridleFeatureExtractor)(settings=settings)


transformers.AutoConfig.register("bridle", BridleConfig, exist_ok=True)
transformers.AutoModel.register(BridleConfig, BridleModel, exist_ok=True)
transformers.AutoFeatureExtractor.register(BridleConfig, BridleFeatureExtractor, exist_ok=True)
if transformers.utils.is_vision_available():  # pillow is installed
    transformers.AutoImageProcessor.register(BridleConfig, BridleImageProcessor, exist_ok=True)
