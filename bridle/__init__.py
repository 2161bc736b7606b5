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
    from bridle.api import Finished as Finished
    from bridle.api import pretrain as pretrain
    from bridle.data.arrays.decode import Signal as Signal
    from bridle.data.arrays.modality import array_modality as array_modality
    from bridle.data.modality import Modality as Modality
    from bridle.data.modality import register_modality as register_modality
    from bridle.evaluate.scorers import register_scorer as register_scorer
    from bridle.export.auto_model import BridleModel as BridleModel
    from bridle.infer.detokenize_files import detokenize as detokenize
    from bridle.infer.file_rows import FileCodes as FileCodes
    from bridle.infer.file_rows import FileFeatures as FileFeatures
    from bridle.infer.model import Model as Model
    from bridle.infer.model import load as load
    from bridle.infer.read import read_codes as read_codes
    from bridle.infer.read import read_features as read_features
    from bridle.infer.sequences import read_sequences as read_sequences
    from bridle.models.tokenizer import Tokenizer as Tokenizer
    from bridle.models.tokenizer import register_tokenizer as register_tokenizer
    from bridle.runs.results import Score as Score
    from bridle.search.query import Index as Index
    from bridle.search.query import open_index as open_index

_HOME = {
    "pretrain": "bridle.api",
    "Finished": "bridle.api",
    "load": "bridle.infer.model",
    "Model": "bridle.infer.model",
    "FileCodes": "bridle.infer.file_rows",
    "FileFeatures": "bridle.infer.file_rows",
    "detokenize": "bridle.infer.detokenize_files",
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
__all__ = ["__version__", *_HOME]  # noqa: PLE0604 - strings


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
