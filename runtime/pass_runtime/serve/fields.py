"""Fields of requests that are checked strictly, and those that are known but not supported."""

from __future__ import annotations

from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def only(*neutral: Any) -> Any:
    """A field that may only be null or one of `neutral`, which change nothing; other values are not supported."""
    return Field(None, json_schema_extra={"enum": [None, *neutral]})


def unsupported(fields: BaseModel) -> str | None:
    """The first field whose value is not one that its `only` allows."""
    for name, info in type(fields).model_fields.items():
        extra, value = info.json_schema_extra, getattr(fields, name)
        if isinstance(extra, dict) and not any(_same(value, neutral) for neutral in cast(list[Any], extra["enum"])):
            return name
    return None


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells 0 from False."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
