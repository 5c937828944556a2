"""Reads prompts from flags, files and standard input, whose name is `-`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pass_runtime.errors import PassError
from pass_runtime.json_lines import Line, lines_of

STDIN = Path("-")


def read_lines(path: Path) -> list[Line]:
    """The lines of a .jsonl file that are not blank."""
    return lines_of(_read(path, "the input"))


def read_prompts(path: Path) -> list[str]:
    """The "prompt" of every line of a .jsonl file; PassError names the line that has none."""
    prompts = []
    for line in read_lines(path):
        try:
            prompt = line.object().get("prompt")
            if not isinstance(prompt, str):
                raise PassError('it needs a "prompt" that is text')
        except PassError as error:
            raise PassError(f"{path}, line {line.number}: {error}") from None
        prompts.append(prompt)
    if not prompts:
        raise PassError(f'{path} is empty: it needs a line with a "prompt"')
    return prompts


def read_prompt(prompt: str | None, file: Path | None, *, keep_newline: bool = False) -> str:
    """-p, --prompt-file or standard input: one of them. A file's last line feed is not part of the prompt."""
    if prompt is not None and file is not None:
        raise PassError("give the prompt with -p or with --prompt-file, not both")
    if prompt is not None:
        if keep_newline:
            raise PassError("--keep-newline is for prompts from a file or standard input: -p is taken as it is")
        return prompt
    text = _read(file or STDIN, "the prompt")
    if keep_newline:
        return text
    return text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")


def _read(path: Path, what: str) -> str:
    """UTF-8 text, line ends as they are; a byte order mark is no part of it."""
    name = "standard input" if path == STDIN else str(path)
    try:
        return (_standard_input(what) if path == STDIN else path.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise PassError(f"cannot read {what} from {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PassError(f"{what} in {name} is not UTF-8 text") from None


def _standard_input(what: str) -> bytes:
    if sys.stdin is None:
        raise PassError(f"standard input is closed: give {what} in another way")
    if sys.stdin.isatty():
        click.echo(f"reading {what} from the terminal; end with Ctrl-D", err=True)
    return sys.stdin.buffer.read()
