"""Chat templates that do what published ones do, by family of models, and conversations to render
with them. test_chat_constructs.py compares the results with those of transformers."""

from __future__ import annotations

from typing import Any

SPECIAL = [
    *("<unk>", "<s>", "</s>", "<pad>", "<sep>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|image|>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<｜User｜>", "<｜Assistant｜>"),
]
"""Special tokens of the tokenizers."""
ADDED = [f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")]
"""Tokens that are added to the vocabulary and are not special."""

LOOP = "{% for m in messages %}BODY{% endfor %}"
GENERATION_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def turns(body: str, end: str = GENERATION_PROMPT) -> str:
    """Return a template that renders `body` for each message `m`, and then `end`."""
    return LOOP.replace("BODY", body) + end


def alternating(body: str) -> str:
    """Return a template as of `turns` that refuses roles which do not alternate."""
    return turns(
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation "
        "roles must alternate user/assistant/user/assistant/...') }}{% endif %}" + body,
        "",
    )


CHATML = (
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% "
    "endif %}<|im_end|>\n"
)
"""A turn in the format of ChatML."""
CONSTRUCTS: dict[str, str] = {
    # Llama 3 and 4
    "llama: header and trim": "{{ bos_token }}"
    + turns(
        "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim "
        "+ '<|eot_id|>' }}"
    ),
    "llama: a date from outside or from now": """
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- endif %}
{{- 'Today Date: ' + date_string + '\n\n' }}""",
    "llama: tools in the first user message": """
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- system_message }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length == 0 %}{{- raise_exception('no first message') }}{%- endif %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
    {{- messages[0]['content'] | trim }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>' }}{%- endfor %}""",
    "llama: one call only": turns(
        "{% if 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
        "{{ raise_exception('single tool-calls only') }}"
        '{% endif %}{% set call = m.tool_calls[0].function %}{{ \'{"name": "\' + call.name + '
        '\'", "parameters": \' }}'
        "{{ call.arguments | tojson }}{{ '}' }}{% elif m.role == 'tool' or m.role == 'ipython' %}"
        "{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}"
        "{{ m.content }}{% endif %}"
        "{% endif %}<|eot_id|>"
    ),
    "llama 4: pieces of a message": turns(
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for content in "
        "m['content'] %}{% if content['type'] == 'image' %}{{ '<|image|>' }}{% elif "
        "content['type'] == 'text' %}{{ content['text'] | trim }}{% endif %}{% endfor %}{% endif "
        "%}{{ '<|eot_id|>' }}"
    ),
    # Qwen 2.5 and 3, Hermes
    "chatml": turns(CHATML),
    "qwen: a default system message": "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}" + turns(CHATML),
    "qwen: tools, and results that follow each other": """
{%- if tools %}{{- '<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{
    '\n</tools>' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' }}{{ m.content }}{{ '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\n' }}{% endif %}
    {%- elif not m.tool_calls %}{{- '<|im_start|>' + m.role + '\n' ~ m.content ~ '<|im_end|>' + '\n' }}
    {%- else %}
        {%- for call in m.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' }}{{ call.name }}{{ '", "arguments": ' }}{{ call.arguments | tojson }}
        {%- endfor %}{{- '}\n</tool_call>' }}
    {%- endif %}
{%- endfor %}""",
    "qwen 3: the last question, backwards": """
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(
        message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{{- ns.last_query_index }} {{ messages[ns.last_query_index].content }}""",
    "qwen 3: thoughts are taken out of earlier turns": turns(
        "{% set content = m.content if m.content is string else '' %}{% set thoughts = '' %}{% if "
        "m.reasoning_content is string %}{% set thoughts = m.reasoning_content %}{% elif "
        "'</think>' in content %}{% set thoughts = "
        "content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{% set "
        "content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{% if loop.last or "
        "(not loop.last and thoughts) %}{{ '<think>\n' + thoughts.strip('\\n') + '\n</think>\n\n' "
        "}}{% endif %}{{ content }}<|im_end|>"
    ),
    "qwen 3: a switch": turns(CHATML)
    + (
        "{% if enable_thinking is defined and enable_thinking is false %}{{ "
        "'<think>\n\n</think>\n\n' }}{% endif %}"
    ),
    "hermes: types of a schema, by recursion": """
{%- macro type_of(schema) -%}
    {%- if schema.type == 'array' -%}{{ 'List[' ~ type_of(schema['items']) ~ ']' }}
    {%- elif schema.type == 'object' -%}
        {%- if schema.properties is defined -%}
            {%- for name, inner in schema.properties.items() -%}
                {{ name }}: {{ type_of(inner) }}{{ ', ' if not loop.last }}
            {%- endfor -%}
        {%- else -%}{{ 'Dict' }}{%- endif -%}
    {%- elif schema.type is iterable and schema.type is not string -%}
        {{ 'Union[' }}{% for one in schema.type %}{{ type_of({'type': one}) }}{{ ',' if not loop.last }}{%
            endfor %}{{ ']' }}
    {%- else -%}{{ {'string': 'str', 'number': 'float'}.get(schema.type, schema.type) }}{%- endif -%}
{%- endmacro %}
{%- for tool in tools or [] %}{{ tool.function.name ~ '(' ~ type_of(tool.function.parameters) ~ ')\n' }}{%
    endfor %}""",
    "hermes: a nested loop's last": turns(
        "{% if m.tool_calls is defined and m.tool_calls is not none %}{% for call in m.tool_calls "
        "%}{{ '<tool_call>' ~ call.function | tojson ~ '</tool_call>' }}{{ '' if loop.last else "
        "'\n' }}{% endfor %}{% endif %}{{ m.content }}"
    ),
    # Mistral
    "mistral v1: strict alternation": "{{ bos_token }}"
    + alternating(
        "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content "
        "+ eos_token }}{% endif %}"
    ),
    "mistral v3: tools beside the last user message": """
{%- set user_messages = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in messages | rejectattr('role', 'equalto', 'system') %}
    {%- if tools is not none and (m == user_messages[-1]) %}
        {{- '[AVAILABLE_TOOLS] [' }}
        {%- for tool in tools %}
            {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
            {%- for key, val in tool.items() if key != 'return' %}
                {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{% else %}{{-
                    '"' + key + '": ' + val|tojson }}{% endif %}
                {%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}{{- '}}' }}
        {%- endfor %}{{- ']' }}
    {%- endif %}
    {%- if m.content is defined %}{{- '[INST]' ~ m.content }}{% endif %}
{%- endfor %}""",
    "mistral v3: ids of calls": turns(
        "{% if m.tool_calls is defined %}[TOOL_CALLS] [{% for call in m.tool_calls %}{% set out = "
        "call.function | tojson %}{{ out[:-1] }}{% if not call.id is defined or call.id | length "
        "!= 9 %}{{ raise_exception('9 characters') }}{% endif %}{{ ', \"id\": \"' + call.id + "
        "'\"}' }}{% endfor %}]{% endif %}{{ eos_token }}",
        "",
    ),
    "mistral tekken: a result in fields": turns(
        "{% if m.role == 'tool' %}{% if m.content is defined and m.content.content is defined %}"
        "{% set content = m.content.content %}{% else %}{% set content = m.content %}{% endif %}"
        "{{ '[TOOL_RESULTS] {\"content\": ' + content | string | tojson + '}' }}{% endif %}",
        "",
    ),
    # Gemma
    "gemma: system before the first user turn": """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{%- set first = messages[0]['content'] + '\n\n' %}
    {%- else %}{%- set first = messages[0]['content'][0]['text'] + '\n\n' %}{%- endif %}
    {%- set rest = messages[1:] %}
{%- else %}{%- set first = '' %}{%- set rest = messages %}{%- endif %}
{%- for m in rest %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
    {%- if m.content is string %}{{- m.content | trim }}
    {%- elif m.content is iterable %}{% for i in m.content %}{{ i.text | trim if i.type == 'text' }}{% endfor %}
    {%- else %}{{- raise_exception('Invalid content type') }}{% endif %}{{- '<end_of_turn>\n' }}
{%- endfor %}""",
    # Phi
    "phi 3: a chain of ifs": turns(
        "{% if m['role'] == 'system' and m['content'] %}{{ '<|system|>\n' + m['content'] + "
        "'<|end|>\n' }}{% elif m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' "
        "}}{% elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + '<|end|>\n' "
        "}}{% endif %}",
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    ),
    # GLM
    "glm 4: an observation": "[gMASK]<sop>"
    + turns(
        "{% if m.role == 'tool' %}{{ '<|observation|>\n' ~ m.content }}{% else %}{{ '<|' ~ m.role "
        "~ '|>' }}{{ m.metadata | default('') }}{{ '\n' ~ m.content }}{% endif %}",
        "<|assistant|>",
    ),
    "glm 4.5: arguments by name": turns(
        "{% for call in m.tool_calls or [] %}{% set _args = call.function.arguments %}{% for k, v "
        "in _args.items() %}{{ '<arg_key>' ~ k ~ '</arg_key>\n<arg_value>' }}{{ v | "
        "tojson(ensure_ascii=False) if v is not string else v }}{{ '</arg_value>\n' }}{% endfor "
        "%}{% endfor %}"
    ),
    # DeepSeek
    "deepseek r1: the answer behind the thoughts": turns(
        "{% if m['role'] == 'assistant' and m['content'] is not none %}{% set content = "
        "m['content'] %}{% if '</think>' in content %}{% set content = "
        "content.split('</think>')[-1] %}{% endif %}{{ '<｜Assistant｜>' + content + eos_token }}{% "
        "endif %}",
        "{{ '<｜Assistant｜><think>\n' }}",
    ),
    "deepseek v3: a call with a code block": turns(
        "{% for tool in m['tool_calls'] if m['tool_calls'] is defined %}{{ tool['type'] + '<sep>' "
        "+ tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] | tojson + "
        "'\n```' }}{% endfor %}"
    ),
    # OLMo, Granite, Command-R and others
    "olmo: sorted JSON": (
        "{% if tools %}{{ tools | tojson(sort_keys=true, separators=(',', ':')) }}{% endif %}"
    )
    + turns(CHATML),
    "granite: none and undefined": "{{ tools is defined }}{{ tools is none }}{{ documents is "
    "defined }}{{ documents is none }}{{ controls is defined }}{{ messages[0].tool_calls is "
    "defined }}{{ cls_token is defined }}{{ mask_token }}",
    "command-r: documents": """
{%- if documents %}{% for doc in documents %}
{{ 'Document: ' }}{{ loop.index0 }}
{% for key, value in doc.items() %}{{ key ~ ': ' ~ value }}
{% endfor %}{% endfor %}{% endif %}
{% for m in messages %}{{ m.content }}{% endfor %}""",
    "all tokens of the tokenizer": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token "
    "}}{{ sep_token }}{{ image_token }}",
    "tools or none": "{% if tools is not none %}{{ tools | length }}{% else %}no tools{% endif %}",
    "tojson in order": turns(
        "{{ m | tojson(true, 1) }}{{ m | tojson(false, none, (', ', ': '), true) }}"
    ),
    "tojson and quotes": turns(
        "{{ m.content | tojson }}{{ m.content | string | tojson(indent='\t') }}"
    ),
    "generation, with a name of its own": "{% set x = 1 %}"
    + turns(
        "{% if m.role == 'assistant' %}{% generation %}{% set x = 2 %}{{ m.content ~ x }}{% "
        "endgeneration %}{% endif %}{{ x }}"
    ),
    "loop controls": turns(
        "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% if loop.index > 2 "
        "%}{% break %}{% endif %}"
    ),
    "slices and measures": turns(
        "{{ m.content[:10] }}|{{ m.content[-3:] }}|{{ m.content | length }}|{{ m.content[::2] }}"
    ),
    "thoughts by any name": turns(
        "{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning is defined }}"
    ),
    "fields that are none": turns(
        "{{ m.keys() | list | sort }}{{ 'content' in m }}{{ m.content is defined }}"
    ),
    "space control": "  {% for m in messages %}\n  {{ m.role }}\n    {%- if m.content %}\n x "
    "{% endif %}  \n {#- c -#} \n{% endfor %}\n",
    "a dict and a namespace": "{% set d = dict(a=1, **{'b': 2}) %}{{ d }}{% set ns = namespace(d, "
    "c=[]) %}{% set ns.c = ns.c + [ns.a] %}{{ ns.c }}{{ dict.fromkeys('ab', 0) }}{{ d.items() | "
    "list }}",
    "set blocks and filters": turns(
        "{% set text %}{{ m.content }}{% endset %}{{ text | upper | replace('A', 'b') | wordcount "
        "}}{% filter lower %}{{ m.role }}ÄB{% endfilter %}{{ m.content | default('none', true) "
        "}}{{ m.content | e }}"
    ),
}


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **fields: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


SYSTEM = {"role": "system", "content": "  You are brief.\n"}
USER = user("How warm is it in Rome?")
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather"}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Größe & <b>"},
        "days": {"type": "array", "items": {"type": ["integer", "null"]}},
        "more": {"type": "object", "properties": {"unit": {"type": "number"}}},
        "any": {"type": "object"},
    },
    "required": ["city"],
}
FUNCTION = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA},
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {
        "name": "weather",
        "arguments": {"city": "Köln", "days": [1, None, True], "deep": {"x": 1.5}},
    },
}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {  # messages, variables
    "one message": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "turns": ([USER, assistant(" Warm.\n"), user("And in Oslo? ")], {}),
    "turns with system": ([SYSTEM, USER, assistant("21"), USER], {"enable_thinking": False}),
    "empty": ([user(""), assistant(""), USER], {"enable_thinking": True}),
    "unicode": ([user("  Grüße 🦊 ｜ \u200d\u00a0 e\u0301 中文\t\r\n")], {"date_string": "26 Jul"}),
    "markup": ([user("<b>&amp;{{ x }}{% if %}\\n\"'</b> <|im_ | <")], {}),
    "tools offered": ([USER], {"tools": [FUNCTION]}),
    "no tools offered": ([USER], {"tools": []}),
    "tools called": (
        [
            SYSTEM,
            USER,
            assistant(None, tool_calls=[CALL]),
            RESULT | {"content": '{"degrees": 21}'},
            RESULT | {"content": "<none>"},
            assistant("21 degrees."),
            user("Thanks"),
        ],
        {"tools": [FUNCTION, FUNCTION]},
    ),
    "thoughts in a field": ([USER, assistant("21", reasoning_content="\nSo.\n"), USER], {}),
    "thoughts by another name": ([USER, assistant("2", reasoning="So", name=None)], {}),
    "thoughts in the text": (
        [USER, assistant("<think>\nSo\n</think>\n\n2"), USER],
        {"thinking": True},
    ),
    "documents": (
        [USER],
        {
            "documents": [{"title": "Ä", "text": "One."}, {"title": "B", "text": "Two."}],
            "tools": [FUNCTION],
        },
    ),
    "parts": ([user([{"type": "text", "text": text} for text in (" How ", "warm?")])], {}),
    "roles that do not alternate": ([USER, USER], {}),
}
