"""Pieces: how text falls apart before byte pairs are merged. No merge ever crosses the border of a piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import regex

_OTHER = r"[^\r\n\p{L}\p{N}]?"  # at most one character in front of a word, the space most often
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

# The released pre-tokenisation: the first alternative that matches takes the piece. Letters without case (Lm, Lo) and
# marks are in both classes, so a script without case is one word. tiktoken and tokenizers read it alike; Python's `re`
# knows neither \p{Han} nor set intersection.
PATTERN = "|".join(
    (
        r"\p{Han}+",
        f"{_OTHER}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_OTHER}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

MAX_CHARS = 400_000
MAX_RUN_CHARS = 25_000


def cut_text(text: str, max_chars: int = MAX_CHARS, max_run_chars: int = MAX_RUN_CHARS) -> Iterator[str]:
    """The parts in which a long text is encoded, as released: "" has none, and their concatenation is the text.

    A cut stands after every `max_chars` characters. Inside such a part another stands wherever a run of whitespace, or
    of anything else, would grow past `max_run_chars`; the count starts anew at a cut. Whitespace is what `str.isspace`
    says, which has four control characters more than the pattern's \\s (U+001C to U+001F).
    """
    for start in range(0, len(text), max_chars):
        part = text[start : start + max_chars]
        if _is_mixed(part, max_run_chars):
            yield part
            continue
        whole_runs = _whole_runs(max_run_chars)
        cut = 0
        while len(part) - cut > max_run_chars:
            match = whole_runs.match(part, cut)
            assert match is not None  # no run at all is a match too
            end = match.end()
            if end == len(part):
                break
            yield part[cut : end + max_run_chars]
            cut = end + max_run_chars
        if cut < len(part):
            yield part[cut:]


def check_text(text: str) -> None:
    """Raise ValueError if a lone surrogate stands in the text: it has no UTF-8, so no bytes to encode."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(f"text: character {error.start} is the lone surrogate U+{code:04X}, wanted text") from error


def _is_mixed(part: str, max_run_chars: int) -> bool:
    """Whether every window of half that many characters has both kinds: then no run is longer. In no time, mostly."""
    window = max_run_chars // 2
    if len(part) <= max_run_chars:
        return True
    if window == 0:
        return False
    for start in range(0, len(part) - window + 1, window):
        end = start + window
        first = part[start].isspace()
        if all(char.isspace() is first for char in part[start + 1 : end]):
            return False
    return True


def _whole_runs(max_run_chars: int) -> regex.Pattern[str]:
    """Matches up to the first run longer than `max_run_chars`. `regex` keeps the compiled pattern."""
    import regex  # here, since training reads this file and needs no tokenizer

    # Possessive throughout: a run that is too long is given up at once, never tried again from its middle.
    # Not by re: before Python 3.11.5 its possessive repeats go on from where a failed one began, and a run is missed.
    space, other = r"[\s\x1c-\x1f]", r"[^\s\x1c-\x1f]"
    return regex.compile(rf"(?:{space}{{1,{max_run_chars}}}+(?!{space})|{other}{{1,{max_run_chars}}}+(?!{other}))*+")
