"""Resource limits of chat templates: time, memory and the size of any value, checked before each operation.

Templates come with downloaded models, so they are untrusted code. They render in this process, where a C call such as `'a' * 10**10` cannot
be interrupted. So nothing is interrupted: every operation is checked *before* it runs. `Meter` holds three limits: a deadline, checked at
each step; the weight of one value (characters + elements of the whole tree, so that `[a, a]` repeated forty times is caught while it is
small); and the total of everything created. The cost is a closed list of methods and filters.
"""

import operator
import re
import time
from collections.abc import Callable, Iterable
from json import JSONEncoder
from typing import Any

VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
INT_BITS = 4096  # no template computes with larger integers; their squares and powers are the classic bomb
SCAN_WORK = 200_000_000  # strip(chars) and the r-searches of CPython are quadratic: bound text x argument
LONG_NUMBER = re.compile(r"\d{5,}")  # a width or precision in a format: no template pads to 10,000 columns


class LimitExceeded(Exception):
    """The template exceeds a limit; the text says which, for the user."""


class Meter:
    """Limits of one render, in its thread.

    `input_weight`: weight of the messages, with which limits grow.
    `seconds`: CPU time; other load on the machine, or a suspended process, does not count.
    """

    __slots__ = ("began", "budget", "deadline", "seconds", "value_limit")

    def __init__(self, input_weight: int, seconds: float) -> None:
        self.value_limit = 1_000_000 + 4 * input_weight
        self.budget = 64_000_000 + 64 * input_weight
        self.seconds = seconds
        self.began, self.deadline = time.thread_time(), time.perf_counter() + seconds

    def step(self) -> None:
        """Called at each operation; between two steps only bounded work happens."""
        if time.perf_counter() > self.deadline:  # reading this clock is cheaper than reading the CPU time
            left = self.began + self.seconds - time.thread_time()
            if left <= 0:
                raise LimitExceeded(f"it ran longer than {self.seconds:g} s (an endless loop?)")
            self.deadline = time.perf_counter() + left

    def require(self, size: float) -> None:
        """Raise for a value of this weight before it is created."""
        if size > self.value_limit:
            raise LimitExceeded(f"it builds a value of {size:,.0f} elements, more than the {self.value_limit:,} allowed")

    def weigh(self, value: Any) -> int:
        """Weight of the whole tree, with shared parts counted as often as they would be printed."""
        total, stack = 0, [value]
        while stack:
            item = stack.pop()
            kind = type(item)
            if kind is str:
                total += len(item) + 1
            elif kind is dict:
                total += 2 * len(item) + 1
                self.require(total)
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset)) or kind in VIEWS:
                total += len(item) + 1
                self.require(total)
                stack.extend(item)
            elif kind is int:
                total += 1 + item.bit_length() // 4
            else:
                total += 1
            if total > self.value_limit:
                self.require(total)
        return total

    def charge(self, value: Any) -> Any:
        """Account for a new value (top level only: its parts were counted when they were created) and return it."""
        kind = type(value)
        if kind is str:
            self.require(len(value))
            self.budget -= len(value)
        elif kind in (list, tuple, dict):
            self.budget -= 32 * len(value) + 32
        elif kind is int and value.bit_length() > INT_BITS:
            raise LimitExceeded(f"it computes an integer of more than {INT_BITS:,} bits")
        if self.budget < 0:
            raise LimitExceeded("it builds more text than any conversation needs")
        return value

    def charge_tree(self, value: Any) -> Any:
        """As `charge`, for a container whose elements may repeat: weighs the whole tree."""
        self.weigh(value)
        return self.charge(value)


# ---- operators ----------------------------------------------------------------------------------------------------------

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
    "%": operator.mod,
}
_SIZED = (str, list, tuple)


def binary(meter: Meter, sign: str, left: Any, right: Any) -> Any:
    """`left sign right` with the size of the result checked beforehand."""
    a, b = type(left), type(right)
    if a in VIEWS or b in VIEWS or isinstance(left, (set, frozenset)) or isinstance(right, (set, frozenset)):
        raise LimitExceeded(f"it applies {sign} to a view of a mapping")
    if sign == "%" and a is str:
        return meter.charge(percent(meter, left, right))
    if sign == "**" and isinstance(left, int) and isinstance(right, int) and right > 0 and left.bit_length() * right > INT_BITS:
        raise LimitExceeded(f"it computes an integer of more than {INT_BITS:,} bits")
    if sign == "*":
        if a in _SIZED and isinstance(right, int):
            meter.require(max(right, 0) * (len(left) if a is str else meter.weigh(left)))
        elif b in _SIZED and isinstance(left, int):
            meter.require(max(left, 0) * (len(right) if b is str else meter.weigh(right)))
    elif sign == "+" and a is b is str:
        meter.require(len(left) + len(right))
    result = OPERATORS[sign](left, right)
    return meter.charge_tree(result) if type(result) in (list, tuple) else meter.charge(result)


def percent(meter: Meter, text: str, values: Any) -> str:
    """printf formatting. Large widths, as digits or through `*`, are rejected whatever the exact grammar says."""
    columns = values if type(values) is tuple else ()
    if LONG_NUMBER.search(text) or ("*" in text and any(isinstance(v, int) and abs(v) > 9999 for v in columns)):
        raise LimitExceeded("it formats with an absurd width")
    width = 9999 if re.search(r"\d{3,}|\*", text) else 1100  # a float or a 4,096-bit integer prints in at most 1,100 characters
    meter.require(len(text) + text.count("%") * (meter.weigh(values) + width) if "%" in text else len(text))
    return text % values


def concat(meter: Meter, parts: Iterable[Any], separator: str = "") -> str:
    """`a ~ b`, `join`: the total is checked before the text is created."""
    texts, total = [], 0
    for part in parts:
        text = part if type(part) is str else str(part)
        total += len(text) + len(separator)
        meter.require(total)
        texts.append(text)
    return meter.charge(separator.join(texts))


def tojson(
    meter: Meter, value: Any, ensure_ascii: bool = False, indent: int | str | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """json.dumps as templates expect it (without HTML escapes), incrementally, so that deep indentation stops at the limit."""
    steps = [indent] if isinstance(indent, (int, str)) else []
    if any((s if isinstance(s, int) else len(s)) > 64 for s in [*steps, *(separators or ())]):
        raise LimitExceeded("it indents JSON absurdly far")
    encoder = JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return concat(meter, encoder.iterencode(value))


# ---- methods of text ----------------------------------------------------------------------------------------------------


def _width(meter: Meter, text: str, width: Any, *_: Any) -> None:
    meter.require(width)


def _scan(meter: Meter, text: str, needle: Any = "", *_: Any) -> None:
    if len(text) * len(needle or "") > SCAN_WORK:
        raise LimitExceeded("it searches a long text for another long text")


def _split(meter: Meter, text: str, sep: Any = None, *_: Any, **__: Any) -> None:
    _scan(meter, text, sep)
    meter.charge(text)


def replace_size(meter: Meter, text: str, old: str, new: str, count: int | None = -1, *_: Any) -> None:
    """Raise for a `replace` whose result is too long; replacing the empty string inserts between all characters."""
    hits = text.count(old) if count is None or count < 0 else min(count, len(text) + 1)
    meter.require(len(text) + hits * max(len(new) - len(old), 0))


def _free(meter: Meter, text: str, *_: Any, **__: Any) -> None:
    meter.step()


STR_METHODS: dict[str, Callable[..., None]] = dict.fromkeys(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle isupper "
    "lower partition removeprefix removesuffix splitlines startswith swapcase title upper".split(),
    _free,
)
STR_METHODS |= dict.fromkeys(["center", "ljust", "rjust", "zfill"], _width)
STR_METHODS |= dict.fromkeys(["strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition"], _scan)
STR_METHODS |= {"split": _split, "rsplit": _split, "replace": replace_size}
METHODS: dict[type, frozenset[str]] = {
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    float: frozenset({"is_integer"}),
}


def call_method(meter: Meter, target: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Call a method of a built-in value, if it is allowed and its result within limits."""
    kind = type(target)
    if kind is str and name == "join":
        return concat(meter, *args, separator=target, **kwargs)
    if kind is str and name in STR_METHODS:
        STR_METHODS[name](meter, target, *args, **kwargs)
        return meter.charge(getattr(target, name)(*args, **kwargs))
    if name in METHODS.get(kind, ()):
        return meter.charge(getattr(target, name)(*args, **kwargs))
    raise LimitExceeded(f"it calls .{name}() of {'text' if kind is str else kind.__name__}, which templates may not use")
