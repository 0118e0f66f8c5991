"""Errors for misspelt keywords."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def reject_unknown(given: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raise ValueError for the first name in `given` that is not in `valid`, with the nearest valid name if any.

    `where` names what was called, for the message.
    """
    known = sorted(valid)
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "supported: " + ", ".join(known)
            raise ValueError(f"{where} got an unknown keyword {name!r}; {hint}")
