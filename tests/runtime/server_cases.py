"""What each option of a server changes (`recorded_arguments.Case`): for the tests of `pass-run
serve` and scripts/serve_ray.py, which write the key k to the file `keys`."""

from __future__ import annotations

from recorded_arguments import Case

SERVER_CASES = {
    **{
        name: Case([f"--{name.replace('_', '-')}", value], {f"ServeOptions.{name}": value})
        for name, value in {
            "max_queue": 5,
            "max_prompt_tokens": 6,
            "max_output_tokens": 7,
            "max_body_bytes": 8,
            "request_seconds": 9.0,
            "client_seconds": 10.0,
            "keep_alive_seconds": 11.0,
            "tool_call_parser": "hermes",
            "reasoning_parser": "think",
        }.items()
    },
    "api_key_file": Case(
        ["--api-key-file", "keys"], {"ServeOptions.keys": ("k",), "check_exposure.keys": ("k",)}
    ),
    "allow_no_key": Case(["--allow-no-key"], {"check_exposure.allow_no_key": True}),
    "model_name": Case(["--served-model-name", "m"], {"ServeOptions.model_name": "m"}),
    "reuse_prefix": Case(["--reuse-prefix"], {"ServeOptions.reuse_prefix": True}),
    "client_plans": Case(["--no-client-plan"], {"ServeOptions.client_plans": False}),
    "special_tokens": Case(["--allow-special-tokens"], {"ServeOptions.special_tokens": True}),
    "page": Case(["--no-page"], {"ServeOptions.page": False}),
    "cors_origins": Case(["--cors-origin", "*"], {"ServeOptions.cors_origins": ("*",)}),
    "speculative_max_concurrency": Case(
        ["--speculative-max-concurrency", 2], {"LoadOptions.speculative_max_concurrency": 2}
    ),
    "prefix_cache": Case(["--no-prefix-cache"], {"LoadOptions.prefix_cache": False}),
    "logprobs_mode": Case(
        ["--logprobs-mode", "processed"], {"LoadOptions.logprobs_mode": "processed"}
    ),
}
