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
    from bridle.export.codes import read_codes, read_features
    from bridle.export.files import FileCodes, FileFeatures
    from bridle.export.model import Model, load
    from bridle.export.sequence_files import read_sequences
    from bridle.retrieve.search import Index, open_index

__all__ = [
    "FileCodes",
    "FileFeatures",
    "Finished",
    "Index",
    "Model",
    "__version__",
    "load",
    "open_index",
    "pretrain",
    "read_codes",
    "read_features",
    "read_sequences",
]

_HOME = {
    "pretrain": "bridle.api",
    "Finished": "bridle.api",
    "load": "bridle.export.model",
    "Model": "bridle.export.model",
    "FileCodes": "bridle.export.files",
    "FileFeatures": "bridle.export.files",
    "read_codes": "bridle.export.codes",
    "read_features": "bridle.export.codes",
    "read_sequences": "bridle.export.sequence_files",
    "open_index": "bridle.retrieve.search",
    "Index": "bridle.retrieve.search",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        return version("bridle")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bridle' has no attribute {name!r}")
