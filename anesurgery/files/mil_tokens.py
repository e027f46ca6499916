"""Tokens of the MIL text: a position in the text, and errors that show the line."""

from __future__ import annotations

import re
from typing import NoReturn

from anesurgery.errors import LoadError

NAME = re.compile(r"\s*([^\W\d][\w@.]*)")
INTEGER = re.compile(r"\s*(\d{1,19})(?![\w.])")
VERSION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})*)")
STRING = re.compile(r'\s*"((?:[^"\\]|\\.)*)"', re.DOTALL)
SPACE = re.compile(r"\s*")
TOKEN = re.compile(r'\s*("(?:[^"\\\n]|\\.)*"?|[\w@.]+|->|.)?', re.DOTALL)

ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
PRINTED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}

SHOWN = 60
"""How many characters of a long line an error shows on each side of the place."""


class Scanner:
    """A text and a position in it."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.at = text, where, 0

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What stands here, if it is of this form; then the position is after it."""
        token = pattern.match(self.text, self.at)
        if token is not None:
            self.at = token.end()
        return token

    def here(self, mark: str) -> bool:
        """Do these characters come next? Then the position is after them."""
        start = SPACE.match(self.text, self.at)
        place = self.at if start is None else start.end()
        if not self.text.startswith(mark, place):
            return False
        self.at = place + len(mark)
        return True

    def expect(self, mark: str) -> None:
        """Pass over these characters.

        Raises:
            LoadError: something else stands here.
        """
        if not self.here(mark):
            self.unexpected(repr(mark))

    def name(self) -> str:
        """A name; one with other characters than letters, digits, `_`, `@` and `.` stands in quotes."""
        if (token := self.take(NAME)) is not None:
            return token[1]
        if (quoted := self.take(STRING)) is not None:
            return unescape(quoted[1])
        self.unexpected("a name")

    def string(self) -> str:
        """A string in quotes, without its escapes."""
        token = self.take(STRING)
        if token is None:
            self.unexpected("a string")
        return unescape(token[1])

    def integer(self) -> int:
        """A whole number that is not negative."""
        token = self.take(INTEGER)
        if token is None:
            self.unexpected("a whole number")
        return int(token[1])

    def unexpected(self, wanted: str) -> NoReturn:
        """Say that something else was expected here."""
        token = TOKEN.match(self.text, self.at)
        word = "" if token is None or token[1] is None else token[1]
        start = len(self.text) if token is None else token.end() - len(word)
        self.fail(f"expected {wanted}, found {word[:SHOWN]!r}" if word else f"it ends before {wanted}", start)

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        """Raise an error that names the line and column and shows the line.

        Raises:
            LoadError: always.
        """
        place = self.at if at is None else at
        start = self.text.rfind("\n", 0, place) + 1
        end = self.text.find("\n", place)
        line = self.text[start : len(self.text) if end < 0 else end]
        column = place - start
        left, right = max(0, column - SHOWN), column + SHOWN
        shown = ("…" if left else "") + line[left:right] + ("…" if right < len(line) else "")
        mark = " " * (column - left + bool(left)) + "^"
        number = self.text.count("\n", 0, place) + 1
        raise LoadError(
            f"{self.where}, line {number}, column {column + 1}: {problem}\n    {printable(shown)}\n    {mark}"
        )


def printable(text: str) -> str:
    """A text without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def unescape(text: str) -> str:
    """The characters that a string in quotes stands for."""
    return ESCAPED.sub(_character, text) if "\\" in text else text


def _character(escape: re.Match[str]) -> str:
    code = escape[1]
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16)) if int(code[1:], 16) < 0x110000 else "\N{REPLACEMENT CHARACTER}"
    if code[0] in "01234567":
        return chr(int(code, 8))
    return ESCAPES.get(code, code)


def quote(text: str) -> str:
    """A string in quotes, with escapes where they are needed."""
    return '"' + "".join(PRINTED.get(c) or (c if c >= " " else f"\\x{ord(c):02x}") for c in text) + '"'


def name_text(name: str) -> str:
    """A name as it stands in the text."""
    plain = NAME.fullmatch(name)
    return name if plain is not None and plain[1] == name else quote(name)
