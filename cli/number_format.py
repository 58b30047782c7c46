"""Formats durations, rates and prediction errors for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """8 s, 4:05 min, 3:20 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


def age(seconds: float) -> str:
    """8 s ago, 4 min ago, 3 h ago, 5 days ago: how long ago something happened, in whole units."""
    for nsec, unit in ((86_400, "day"), (3600, "h"), (60, "min")):
        if seconds >= nsec:
            count = int(seconds // nsec)
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"
    return f"{int(seconds)} s ago"


def rounded(value: float, digits: int = 3) -> str:
    """A number rounded to `digits` significant digits, without exponent: 0.52, 18.2, 1590."""
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e+" in text else text


def margin(error: float) -> str:
    """The uncertainty of a prediction: a percentage, or a factor if that would reach zero."""
    return f"± {100 * error:.0f}%" if error < 0.95 else f"within a factor of {1 + error:.1f}"
