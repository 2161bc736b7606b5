"""How numbers are written on the page; what is missing or not finite is a dash."""

from __future__ import annotations

from bridle.report.runs import number


def percent(value: object, digits: int = 1) -> str:
    found = number(value)
    return "–" if found is None else f"{100 * found:.{digits}f}"


def decimal(value: object, digits: int = 2) -> str:
    found = number(value)
    return "–" if found is None else f"{found:.{digits}f}"


def thousands(value: object) -> str:
    found = number(value)
    return "–" if found is None else f"{found:,.0f}"
