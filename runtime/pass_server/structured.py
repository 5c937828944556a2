"""What a request says about the form of its text: OpenAI's `response_format`, and vLLM's `structured_outputs` and its
older `guided_*` fields, all as one `Constraint`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pass_runtime.errors import PassError
from pass_runtime.text.constraint import Constraint
from pass_server.chat_schemas import JsonSchema
from pass_server.errors import ApiError
from pass_server.fields import MAX_LIST, Fields, Name, Text

Choices = Annotated[list[Text], Field(max_length=MAX_LIST, fail_fast=True)]


class NamedSchema(Fields):
    """`json_schema` of a response format. The schema is enforced whether `strict` is true or not."""

    name: Name | None = Field(None, description="Not used.")
    description: Text | None = Field(None, description="Not used.")
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's: exactly one of these."""

    json_schema: JsonSchema | Text | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = Field(None, description="llguidance's variant of Lark.")


class Structured(Fields):
    """The fields of a request that say what its text must look like; at most one of them may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | Text | None = Field(None, description="As structured_outputs.json.")
    guided_regex: Text | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: Choices | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: Text | None = Field(None, description="As structured_outputs.grammar.")


def constraint_of(request: Structured) -> tuple[str, Constraint] | None:
    """The field that says what the text must look like, and what that is. ApiError where there are several."""
    wanted = dict(_wanted(request))
    if len(wanted) > 1:
        raise ApiError(f"give one of {' and '.join(wanted)}", param=[*wanted][-1])
    for param, fields in wanted.items():
        try:
            return param, Constraint(**fields)
        except PassError as error:
            raise ApiError(str(error), param=param) from None
    return None


def _wanted(request: Structured) -> list[tuple[str, dict[str, Any]]]:
    """Each field that asks for something, with the fields of `Constraint` that it stands for."""
    found: list[tuple[str, dict[str, Any]]] = []
    if (form := request.response_format) is not None and form.type != "text":
        found.append(("response_format", _of_format(form)))
    if (own := request.structured_outputs) is not None:
        fields = {name: value for name in type(own).model_fields if (value := getattr(own, name)) not in (None, False)}
        found.append(("structured_outputs", fields))
    for param in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if (value := getattr(request, param)) is not None:
            name = param.removeprefix("guided_")
            found.append((param, {"json_schema" if name == "json" else name: value}))
    return found


def _of_format(form: ResponseFormat) -> dict[str, Any]:
    if form.type == "json_object":
        return {"json_object": True}
    if form.json_schema is None or form.json_schema.json_schema is None:
        raise ApiError("a response format of type json_schema needs json_schema.schema", param="response_format")
    return {"json_schema": form.json_schema.json_schema}
