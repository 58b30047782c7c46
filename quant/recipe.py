"""Recipe of a conversion: the format of each matrix by a base, rules by name, and a finer format for the embedding, the head and values
that several query heads share, where errors cost most per bit.

Norms, biases, vectors and routers keep their type. `allocate` divides a byte budget among tensors whose size and damage in each format are
known (`runtime/conversion/bit_search.py` measures them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from .. import UsageError
from .spec import DEFAULTS, QuantSpec

OUTER_ROLES = ("embed", "layer_embed", "layer_proj", "ngrams", "head")  # last parts of roles
OUTER_LOW, OUTER_HIGH = "6bit", "8bit"  # for a base of at most four bits, and above
MIN_TARGET, MAX_TARGET = 2.0, 16.0  # bits per weight
TARGET = re.compile(r"(\d+(?:\.\d+)?)(?:bpw)?")


@dataclass(frozen=True)
class Recipe:
    """The formats of a model's matrices."""

    base: QuantSpec
    rules: tuple[tuple[str, QuantSpec], ...] = ()  # (regular expression on the tensor's name, spec); the last match wins
    short: Mapping[str, str] = field(default_factory=lambda: DEFAULTS)  # formats of widths without a scheme
    names: Mapping[str, QuantSpec] = field(default_factory=dict)  # of tensors that no rule matches; MoE models have too many for rules

    def spec_for(self, name: str, shape: tuple[int, ...], role: str) -> QuantSpec:
        """The format of the matrix `name` of `shape` [N, K]."""
        spec = self.ruled(name)
        if spec is not None:
            return spec
        is_shared_v = role == "v" and shape[0] < shape[1] and self.base.scheme != "ternary"  # few weights, which all query heads use
        if (role.rpartition(".")[2] in OUTER_ROLES or is_shared_v) and not self.base.is_raw:
            return QuantSpec.parse(OUTER_LOW if self.base.bits <= 4 else OUTER_HIGH, self.short)
        return self.base

    def ruled(self, name: str) -> QuantSpec | None:
        """The format that a rule or `names` gives to this tensor; None if neither does."""
        return next((spec for pattern, spec in reversed(self.rules) if re.search(pattern, name)), self.names.get(name))

    def with_outliers(self, share: float) -> Recipe:
        """The same with a `share` of outliers in every low-bit format that has none."""

        def add(spec: QuantSpec) -> QuantSpec:
            return spec if spec.is_raw or spec.outliers else replace(spec, outliers=share)

        return replace(self, base=add(self.base), rules=tuple((pattern, add(spec)) for pattern, spec in self.rules),
                       names={name: add(spec) for name, spec in self.names.items()})


def parse_rule(text: str, short: Mapping[str, str] = DEFAULTS) -> tuple[str, QuantSpec]:
    """`REGEX=SPEC`, as in `down_proj=6bit`; `short` as for `QuantSpec.parse`. Raises UsageError."""
    pattern, equals, spec = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"{text!r} is not a rule", "REGEX=SPEC, as in down_proj=6bit")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:  # the latter two: too large a count, groups nested too deeply
        reason = "groups nested too deeply" if isinstance(error, RecursionError) else error
        shown = repr(pattern) if len(pattern) <= 60 else f"{pattern[:57]!r}..."
        raise UsageError(f"{shown} is not a regular expression: {reason}", "a rule is REGEX=SPEC, as in down_proj=6bit") from error
    return pattern, QuantSpec.parse(spec, short)


def parse_target(text: str) -> float:
    """`4.25bpw` or `4.25` -> bits per weight, every tensor counted. Raises UsageError."""
    match = TARGET.fullmatch(text.strip())
    if match is None or not MIN_TARGET <= float(match[1]) <= MAX_TARGET:
        problem = "is not a number of bits per weight" if match is None else "is out of range"
        raise UsageError(f"--target {text!r} {problem}",
                         f"between {MIN_TARGET:g} and {MAX_TARGET:g}, as in 4.25bpw")
    return float(match[1])


@dataclass(frozen=True)
class Choice:
    """A candidate format of a tensor: its size in bytes and its damage, in any unit that adds up over tensors."""

    spec: QuantSpec
    nbytes: int
    damage: float


def allocate(choices: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, QuantSpec]:
    """A format for each name, within `budget` bytes in total, with little damage. Raises UsageError if the smallest formats do not fit.

    Greedy over the convex hulls: always the step that saves most damage per byte.
    """
    hulls = {name: convex_hull(options) for name, options in choices.items()}
    smallest = sum(options[0].nbytes for options in hulls.values())
    if smallest > budget:
        raise UsageError(f"the target allows {budget} bytes and the smallest formats take {smallest}", "a larger --target")
    position = dict.fromkeys(hulls, 0)
    left = budget - smallest
    steps = [(-_gain(options, 0), index, name) for index, (name, options) in enumerate(hulls.items()) if len(options) > 1]
    heapify(steps)
    while steps:
        _, index, name = heappop(steps)
        options, current = hulls[name], position[name]
        price = options[current + 1].nbytes - options[current].nbytes
        if price > left:  # the later steps of this tensor need it first
            continue
        left, position[name] = left - price, current + 1
        if current + 2 < len(options):
            heappush(steps, (-_gain(options, current + 1), index, name))
    return {name: hulls[name][index].spec for name, index in position.items()}


def convex_hull(options: Sequence[Choice]) -> list[Choice]:
    """Lower convex hull by rising size and falling damage: each step saves less damage per byte than the one before."""
    hull: list[Choice] = []
    for option in sorted(options, key=lambda option: (option.nbytes, option.damage)):
        if hull and option.damage >= hull[-1].damage:
            continue
        while len(hull) > 1 and _gain([hull[-2], option], 0) >= _gain(hull, len(hull) - 2):
            hull.pop()
        hull.append(option)
    return hull


def _gain(options: Sequence[Choice], index: int) -> float:
    """Damage saved per byte by the step from option `index` to the next."""
    smaller, larger = options[index], options[index + 1]
    return (smaller.damage - larger.damage) / (larger.nbytes - smaller.nbytes)
