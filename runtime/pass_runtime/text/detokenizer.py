"""Tokens to text, one at a time: whole characters only, and the text of decoding prompt and answer as a whole."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from pass_runtime.text.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
_EACH_BYTE = "pass-replace-each-byte"
_LONGEST_BEGINNING = 3
"""Bytes of a character that is not complete."""
_BEGINNING = re.compile(
    rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|\xed[\x80-\x9f]?|[\xe1-\xec\xee\xef][\x80-\xbf]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?|[\xf1-\xf3][\x80-\xbf]{0,2})\Z"
)
"""The bytes at the end that more bytes may complete to a character (table 3-7 of the Unicode standard)."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class Detokenizer:
    """The text of tokens that follow a prompt.

    Bytes that are part of no character are shown as U+FFFD, as the tokenizer's decoder shows them. The beginning of a
    character is held back until the next token completes it or does not; what is left of one at the end is no text. A
    character that begins in the prompt belongs to the text if the text completes it.

    place: where in the text that of the newest token begins; a part of a character begins where the character does.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._strip, self._strips_left = vocabulary.strip
        self._first = True
        """Whether the text, with the prompt's, has no token yet."""
        self._errors = _EACH_BYTE if vocabulary.byte_fallback else "replace"
        self._held = b""
        self._shown_before = self._read_prompt(prompt)
        self.place = self._length = 0

    def push(self, token: int) -> str:
        """-> the text that is certain with `token`"""
        self.place = self._length
        if not (found := self._bytes(token)):
            return ""
        if self._held and len((self._held + found[:1]).decode(errors="replace")) > 1:  # no part of that character
            self.place += len(self._held.decode(errors=self._errors)) - len(self._shown_before)
        text = self._decode(found)
        if self._shown_before and text:
            text, self._shown_before = text.removeprefix(self._shown_before), ""
        self._length += len(text)
        return text

    def _decode(self, more: bytes) -> str:
        found = self._held + more
        beginning = _BEGINNING.search(found, max(0, len(found) - _LONGEST_BEGINNING))
        end = beginning.start() if beginning else len(found)
        self._held = found[end:]
        return found[:end].decode(errors=self._errors)

    def _bytes(self, token: int) -> bytes:
        if self._first and self._vocabulary.is_text(token):
            self._first, found = False, self._vocabulary.first(token)
        else:
            found = self._vocabulary.bytes(token)
        if self._strips_left and found:
            while self._strips_left and found.startswith(self._strip):
                found, self._strips_left = found[len(self._strip) :], self._strips_left - 1
            if found:
                self._strips_left = 0
        return found

    def _read_prompt(self, prompt: Sequence[int]) -> str:
        """Take in what the text depends on: whether anything stands before it, and a character that begins there.
        -> what the prompt's own text shows in place of that character"""
        for token in prompt:
            if not self._first and not self._strips_left:
                break
            self._bytes(token)
        end = b""
        for token in reversed(prompt):
            if len(end) >= _LONGEST_BEGINNING:
                break
            end = self._vocabulary.bytes(token) + end
        self._decode(end)
        return self._held.decode(errors=self._errors)
