"""The JSON schema of recipes, for editors and programs."""

from __future__ import annotations

from typing import Any

from bridle.config.load import QUANTIZERS
from bridle.config.schema import Config

SCHEMA = "bridle-schema.json"  # what `bridle schema --out` writes beside a recipe
HEADER = f"# yaml-language-server: $schema={SCHEMA}\n"


def recipe_schema() -> dict[str, Any]:
    """Config's JSON schema as a recipe may be written: every key optional, `extends`, and presets of the quantizer."""
    found = Config.model_json_schema()
    for part in (found, *found["$defs"].values()):
        part.pop("required", None)
    keys = found["properties"]
    keys["extends"] = {"type": "string", "description": "The recipe this one changes."}
    keys["paper"] = {"const": "literal", "description": "The paper's text where bridle's defaults differ."}
    keys["quantizer"] = {"anyOf": [{"$ref": "#/$defs/QuantizerConfig"}, {"enum": list(QUANTIZERS)}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
