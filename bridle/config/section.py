"""What all sections of a config share: their base class, and numbers with bounds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Above0 = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Width = Annotated[int, Field(ge=1, le=65_536)]
Count = Annotated[int, Field(ge=1, le=1_024)]
Codes = Annotated[int, Field(ge=2, le=2**20)]
Sizes = tuple[Annotated[int, Field(ge=1, le=2**24)], ...]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not coerced, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def with_tuples(value: Any) -> Any:
    """The value with tuples for lists: JSON and YAML have lists where a section, which converts nothing, has tuples."""
    if isinstance(value, dict):
        return {key: with_tuples(own) for key, own in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value
