"""How a tensor becomes low-bit: one method a file, each a pure function of a block of rows, a spec and statistics.

A method's module has

    NEEDS: frozenset[str]      what it takes from `Stats` ("hessian", "mean_square", "mean_abs_max"); empty: needs no calibration text
    check(spec)                raises UsageError for a spec that the method does not serve, before any work
    quantize(rows, spec, stats=None, pool=None) -> Codes

`rows` is float32 [n, K], some rows of one tensor. The result depends neither on how a tensor is cut into blocks of rows nor on the number
of threads in `pool`. Raises what `check` does, EffllmError for weights that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ... import EffllmError, UsageError

if TYPE_CHECKING:
    from ..codes import Codes
    from ..spec import QuantSpec

METHODS = ("rtn", "hqq", "gptq", "smooth", "spqr")


class Method(Protocol):
    """What the module of a method offers."""

    NEEDS: frozenset[str]
    check: Callable[[QuantSpec], None]
    quantize: Callable[..., Codes]


def get(name: str) -> Method:
    """The module of a method. Raises UsageError for a name that is none."""
    if name not in METHODS:
        raise UsageError(f"no quantization method {name!r}", f"known: {', '.join(METHODS)}")
    return import_module(f".{name}", __name__)


def checked(rows: np.ndarray) -> np.ndarray:
    """`rows` as contiguous float32 [n, K]. Raises EffllmError where a value is not finite."""
    rows = np.ascontiguousarray(rows, np.float32)
    # a sum is NaN or infinite if any part is; it may also overflow by itself, and then every value is looked at
    if not np.isfinite(rows.sum()) and not np.isfinite(rows).all():
        raise EffllmError("NaN or infinity", "the weights are damaged: download them again, or ask who published them")
    return rows
