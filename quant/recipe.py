"""Recipe of a conversion: the format of each tensor by a base, rules by name, and a finer format for the embedding, the head and values
that several query heads share, where errors cost most per bit.

It is asked about matrices alone; norms, biases, vectors and routers keep their type in any case. `allocate` divides a byte budget among
tensors whose size and damage in each format are known (`runtime/conversion/bit_search.py` measures them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from .. import UsageError
from .spec import DEFAULTS, QuantSpec

OUTER_ROLES = ("embed", "layer_embed", "layer_proj", "ngrams", "head")  # the ends of roles
OUTER_LOW, OUTER_HIGH = "6bit", "8bit"  # for a base of at most four bits, and above
LEAST_BITS, MOST_BITS = 2.0, 16.0
TARGET = re.compile(r"(\d+(?:\.\d+)?)(?:bpw)?")


@dataclass(frozen=True)
class Recipe:
    """`rules` are (regular expression on the tensor's name, spec); the last that matches wins. `short`: the format of a width alone.
    `names`: the formats of tensors that no rule matches, by their whole names, of which a mixture has more than patterns can be tried."""

    base: QuantSpec
    rules: tuple[tuple[str, QuantSpec], ...] = ()
    short: Mapping[str, str] = field(default_factory=lambda: DEFAULTS)
    names: Mapping[str, QuantSpec] = field(default_factory=dict)

    def spec_for(self, name: str, shape: tuple[int, ...], role: str) -> QuantSpec:
        """The format of the matrix `name` of `shape` [N, K]."""
        ruled = self.ruled(name)
        if ruled is not None:
            return ruled
        shared = role == "v" and shape[0] < shape[1] and self.base.scheme != "ternary"  # of few weights, and all that a token gives others
        if (role.rpartition(".")[2] in OUTER_ROLES or shared) and not self.base.is_raw:
            return QuantSpec.parse(OUTER_LOW if self.base.bits <= 4 else OUTER_HIGH, self.short)
        return self.base

    def ruled(self, name: str) -> QuantSpec | None:
        """What the recipe says of this name rather than of a role."""
        return next((spec for pattern, spec in reversed(self.rules) if re.search(pattern, name)), self.names.get(name))

    def with_outliers(self, share: float) -> Recipe:
        """The same where every low-bit format of the base, the rules and the names without outliers keeps `share` of its weights."""

        def kept(spec: QuantSpec) -> QuantSpec:
            return spec if spec.is_raw or spec.outliers else replace(spec, outliers=share)

        return replace(self, base=kept(self.base), rules=tuple((pattern, kept(spec)) for pattern, spec in self.rules),
                       names={name: kept(spec) for name, spec in self.names.items()})


def parse_rule(text: str, short: Mapping[str, str] = DEFAULTS) -> tuple[str, QuantSpec]:
    """`REGEX=SPEC`, as in `down_proj=6bit`; `short` as for `QuantSpec.parse`. Raises UsageError."""
    pattern, equals, spec = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"{text!r} is not a rule", "REGEX=SPEC, as in down_proj=6bit")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:  # the latter two of a count that is too large, groups nested too deeply
        said = "groups nested too deeply" if isinstance(error, RecursionError) else error
        shown = repr(pattern) if len(pattern) <= 60 else f"{pattern[:57]!r}..."
        raise UsageError(f"{shown} is not a regular expression: {said}", "a rule is REGEX=SPEC, as in down_proj=6bit") from error
    return pattern, QuantSpec.parse(spec, short)


def parse_target(text: str) -> float:
    """`4.25bpw` or `4.25` -> bits per weight, every tensor counted. Raises UsageError."""
    match = TARGET.fullmatch(text.strip())
    if match is None or not LEAST_BITS <= float(match[1]) <= MOST_BITS:
        raise UsageError(f"--target {text!r} is not a number of bits per weight",
                         f"between {LEAST_BITS:g} and {MOST_BITS:g}, as in 4.25bpw")
    return float(match[1])


@dataclass(frozen=True)
class Choice:
    """One candidate format of a tensor: its size in bytes and its damage, in any unit that adds up over tensors."""

    spec: QuantSpec
    nbytes: int
    damage: float


def allocate(choices: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, QuantSpec]:
    """A format for each name, within `budget` bytes in total, with little damage. Raises UsageError where the cheapest do not fit."""
    hulls = {name: convex_hull(options) for name, options in choices.items()}
    least = sum(options[0].nbytes for options in hulls.values())
    if least > budget:
        raise UsageError(f"the target allows {budget} bytes and the smallest formats take {least}", "a larger --target")
    at = dict.fromkeys(hulls, 0)
    left = budget - least
    waiting = [(-_worth(options, 0), index, name) for index, (name, options) in enumerate(hulls.items()) if len(options) > 1]
    heapify(waiting)
    while waiting:
        _, index, name = heappop(waiting)
        options, place = hulls[name], at[name]
        price = options[place + 1].nbytes - options[place].nbytes
        if price > left:  # whatever comes after it costs more still
            continue
        left, at[name] = left - price, place + 1
        if place + 2 < len(options):
            heappush(waiting, (-_worth(options, place + 1), index, name))
    return {name: hulls[name][place].spec for name, place in at.items()}


def convex_hull(options: Sequence[Choice]) -> list[Choice]:
    """Lower convex hull by rising size and falling damage: each step saves less damage per byte than the one before."""
    kept: list[Choice] = []
    for option in sorted(options, key=lambda each: (each.nbytes, each.damage)):
        if kept and option.damage >= kept[-1].damage:
            continue
        while len(kept) > 1 and _worth([kept[-2], option], 0) >= _worth(kept, len(kept) - 2):
            kept.pop()
        kept.append(option)
    return kept


def _worth(options: Sequence[Choice], place: int) -> float:
    """Damage mended per byte by the step after `place`."""
    here, there = options[place], options[place + 1]
    return (here.damage - there.damage) / (there.nbytes - here.nbytes)
