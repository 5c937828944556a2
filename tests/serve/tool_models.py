"""Bundles with chat templates for function calls and thoughts. The templates are like those of Qwen,
Llama 3 and Mistral, but short: they write only the names of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from manifests import linked, real_document, replace, write_manifest

from pass_runtime.bundle.integrity import file_info

HERMES = """
{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool.function.name | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '[user]<tool_response>' + (message.content or '') + '</tool_response>' }}
    {%- else %}
        {{- '[' + message.role + ']' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{{- '[assistant]' }}"""
THINKING = (
    HERMES + "{{- '' if enable_thinking is defined and not enable_thinking else '<think>\n' }}"
)
LLAMA = """
{%- if tools %}{% for tool in tools %}{{ tool.function.name | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' }}{{ call.function.arguments | tojson }}{{ '}' }}
    {%- endfor %}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>' }}"""
MISTRAL = """
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | map(attribute='function.name') | list | tojson) }}{% endif %}
{%- for message in messages %}
    {{- '[INST]' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
        {{- '[TOOL_CALLS] [' }}{{ call.function | tojson }}{{ ']' }}
    {%- endfor %}
{%- endfor %}"""
QUESTION = [{"role": "user", "content": "How warm is it?"}]
TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL, "thinking": THINKING}
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SPECIAL = ("<|python_tag|>", "[TOOL_CALLS]")
"""Texts that are one token each in the tokenizers of these families. SPECIAL are special tokens."""


def with_template(
    bundle: Path, output: Path, template: str, special: Sequence[str] = SPECIAL
) -> Path:
    """Return a copy of a tiny bundle with another chat template. PLAIN and `special` replace the last
    tokens of its vocabulary."""
    output.mkdir()
    document, tokenizer = (
        real_document(bundle),
        json.loads((bundle / "tokenizer.json").read_bytes()),
    )
    model, added = tokenizer["model"], (*PLAIN, *special)
    first = len(model["vocab"]) - len(added)
    model["merges"] = model["merges"][: -len(added)]
    model["vocab"] = {text: number for text, number in model["vocab"].items() if number < first}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": first + i, "content": text, "special": text in special, **flags}
        for i, text in enumerate(added)
    ]
    linked(bundle, output)
    files = {"chat_template.jinja": template, "tokenizer.json": json.dumps(tokenizer)}
    for name, text in files.items():
        replace(output / name, text.encode())
        document["files"][name] = file_info(output / name).model_dump()
    write_manifest(output, document)
    return output


def tool(name: str, **properties: object) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters |= {"additionalProperties": False}
    function = {"name": name, "description": f"{name}.", "parameters": parameters}
    return {"type": "function", "function": function}


DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = tool("weather", city={"enum": ["Paris", "Rome"]}, days=DAYS)
CLOCK = tool("clock", utc={"type": "boolean"})
TOOLS = [WEATHER, CLOCK]
FUNCTIONS = [{"type": "function"} | each["function"] for each in TOOLS]
"""TOOLS, in the form of /v1/responses."""
