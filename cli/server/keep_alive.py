"""Keep-alive durations, in the notation of Ollama."""

from __future__ import annotations

NEVER = float("inf")
FOREVER_S = 100 * 365 * 86400  # longer is treated, and shown, as for ever
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_keep_alive(said: str | float) -> float:
    """`90`, `90s`, `5m`, `1h30m` in seconds; negative values, and a century, are for ever. Raises ValueError."""
    text = f"{said:f}" if isinstance(said, float) else str(said).strip()
    if text.startswith("-"):
        if parse_keep_alive(text[1:]) == NEVER:  # a second sign
            raise ValueError(text)
        return NEVER
    total, number = 0.0, ""
    for letter in f"{text}s" if text[-1:].isdecimal() else text:
        if letter in UNITS:
            total, number = total + float(number) * UNITS[letter], ""
        elif letter in "0123456789.":
            number += letter
        else:
            raise ValueError(text)
    if not text or number:
        raise ValueError(text)
    return total if total < FOREVER_S else NEVER


def format_duration(seconds: float) -> str:
    """`5 minutes`, `90 seconds`."""
    for name, unit in (("hour", 3600), ("minute", 60)):
        if seconds >= unit and seconds % unit == 0:
            count = round(seconds / unit)
            return f"{count} {name}{'' if count == 1 else 's'}"
    return f"{seconds:g} second{'' if seconds == 1 else 's'}"
