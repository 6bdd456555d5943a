"""Grade: whether an answer says what it should."""

from __future__ import annotations

import re


def says(text: str, wanted: str) -> bool:
    """Whether `wanted` stands in the text as a whole: not as a part of a longer word or number."""
    pattern = rf"(?<![\w.-])(?<!\d,){re.escape(wanted)}(?!\w|[.,-]\w)"
    return re.search(pattern, text) is not None
