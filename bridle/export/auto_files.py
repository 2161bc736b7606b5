"""The files by which `transformers` knows an exported folder; writing them needs no transformers.

modeling_bridle.py          imports bridle's classes
preprocessor_config.json    how inputs are made
config.json                 also says `auto_map` and the settings of config.yaml
"""

from __future__ import annotations

from pathlib import Path

from bridle.config import Config
from bridle.data.modality import modality_of
from bridle.files import write_json

MODULE = "modeling_bridle"
CODE = '''"""Loaded by transformers with trust_remote_code=True; the networks are those of the package bridle."""

from bridle.export.auto_model import (  # noqa: F401
    BridleConfig,
    BridleFeatureExtractor,
    BridleImageProcessor,
    BridleModel,
    BridlePipeline,
)
'''
PROCESSOR = "preprocessor_config.json"
AUTO_FILES = (f"{MODULE}.py", PROCESSOR)


def auto_settings(config: Config) -> dict[str, object]:
    """What config.json says for transformers."""
    pipeline = {"impl": f"{MODULE}.BridlePipeline", "pt": ["AutoModel"]}
    return {
        "architectures": ["BridleModel"],
        "auto_map": {"AutoConfig": f"{MODULE}.BridleConfig", "AutoModel": f"{MODULE}.BridleModel"},
        "custom_pipelines": {"feature-extraction": pipeline},
        "dtype": "float32",
        "settings": config.model_dump(mode="json"),
    }


def write_auto_files(folder: Path, config: Config) -> None:
    """Write the code and the processor's settings into an exported folder."""
    (folder / f"{MODULE}.py").write_text(CODE, encoding="utf-8")
    pictures = modality_of(config).is_unit_range  # clips too: transformers' video processors need torchvision
    kind, name = ("image_processor", "ImageProcessor") if pictures else ("feature_extractor", "FeatureExtractor")
    stored = {
        f"{kind}_type": f"Bridle{name}",
        "auto_map": {f"Auto{name}": f"{MODULE}.Bridle{name}"},
        "settings": config.model_dump(mode="json"),
    }
    write_json(folder / PROCESSOR, stored)
