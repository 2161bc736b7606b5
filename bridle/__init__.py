"""bridle: good features and discrete codes from unlabelled audio, images and video.

    import bridle
    run = bridle.pretrain("image", dataset=my_dataset, out="runs/mine", size="tiny")
    model = bridle.load("runs/mine")
    codes, z = model.tokenize(x), model.encode(x)
    found = model.tokenize_file("dog.wav")

Names are imported when first used, so that `import bridle` and the command line start without loading torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridle.api import Finished, pretrain
    from bridle.data.arrays.decode import Signal
    from bridle.data.arrays.modality import array_modality
    from bridle.data.modality import Modality, register_modality
    from bridle.evaluate.scorers import register_scorer
    from bridle.export.auto_model import BridleModel
    from bridle.infer.files import FileCodes, FileFeatures
    from bridle.infer.model import Model, load
    from bridle.infer.read import read_codes, read_features
    from bridle.infer.reconstruct import detokenize
    from bridle.infer.sequences import read_sequences
    from bridle.models.tokenizer import Tokenizer, register_tokenizer
    from bridle.runs.results import Score
    from bridle.search.query import Index, open_index

__all__ = [
    "BridleModel",
    "FileCodes",
    "FileFeatures",
    "Finished",
    "Index",
    "Modality",
    "Model",
    "Score",
    "Signal",
    "Tokenizer",
    "__version__",
    "array_modality",
    "detokenize",
    "load",
    "open_index",
    "pretrain",
    "read_codes",
    "read_features",
    "read_sequences",
    "register_modality",
    "register_scorer",
    "register_tokenizer",
]

_HOME = {
    "pretrain": "bridle.api",
    "Finished": "bridle.api",
    "load": "bridle.infer.model",
    "Model": "bridle.infer.model",
    "FileCodes": "bridle.infer.files",
    "FileFeatures": "bridle.infer.files",
    "detokenize": "bridle.infer.reconstruct",
    "read_codes": "bridle.infer.read",
    "read_features": "bridle.infer.read",
    "read_sequences": "bridle.infer.sequences",
    "Tokenizer": "bridle.models.tokenizer",
    "register_tokenizer": "bridle.models.tokenizer",
    "register_modality": "bridle.data.modality",
    "register_scorer": "bridle.evaluate.scorers",
    "Score": "bridle.runs.results",
    "Modality": "bridle.data.modality",
    "array_modality": "bridle.data.arrays.modality",
    "Signal": "bridle.data.arrays.decode",
    "BridleModel": "bridle.export.auto_model",
    "open_index": "bridle.search.query",
    "Index": "bridle.search.query",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        return version("bridle")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bridle' has no attribute {name!r}")
