"""How a tensor becomes low-bit: one method per file, each a pure function of a block of rows, a spec and statistics.

A method is added by its file here and its name in METHODS of `method_names.py`. Its module has

    NEEDS: frozenset[str]      what it takes from `Stats` ("hessian", "mean_square"); empty: needs no calibration text
    check(spec)                raises UsageError for a spec that the method does not serve, before any work
    quantize(rows, spec, stats=None, pool=None) -> Codes

`rows` is float32 [n, K], some rows of one tensor; all of them where the spec keeps outliers, which compete over the whole tensor. The
result depends neither on how a tensor is cut into blocks of rows nor on the number of threads in `pool`. Raises what `check` does,
EffllmError for weights that are not finite. A tensor of which a text shows nothing goes to PLAIN instead, unless its spec keeps outliers:
then a method that needs a text is called without `stats`.

A module may have what else `Method` lists: what a width alone means for it, work on a layer's tensors before they are quantized, and what
an estimate of the time cannot see in a sample of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

from ... import EffllmError, UsageError
from ..method_names import METHODS
from ..method_names import PLAIN as PLAIN
from ..spec import DEFAULTS, QuantSpec

if TYPE_CHECKING:
    from ..codes import Codes
    from ..stats import Stats


@dataclass(frozen=True)
class Layout:
    """What `equalise` must know of a layer: query heads, KV heads, their width, the kind of its norms, the type in which they, and
    biases, are stored, the activation of its MLP, and whether values are normed or clipped, which undoes what is moved into what makes
    them."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_kind: str = "rms"
    stored: str = "bf16"
    act: str = "silu"
    values_normed: bool = False


def no_seconds(shape: Sequence[int], weight_s: float, rate: float) -> float:
    """What a method takes beside the work on rows, where its module does not say."""
    return 0.0


@dataclass(frozen=True)
class Method:
    """What the module of a method offers, under the same names; with a default: what it may leave out.

    `SHORT` is the format of a width alone ("4bit" -> "affine4:64"), where it is not the usual one. `OUTLIERS`: the share of weights that
    low-bit formats keep as outliers where nobody says one. `equalise(tensors, stats, specs, layout, pool)`, of a method that needs a text,
    returns those of a layer's tensors, float32 by role, that change together before each is quantized; mixtures of experts are refused.

    For the estimate of a method that needs a text: `PRODUCTS` are multiplications in float64 of a weight for each input of its row, 0 where
    a weight takes the same in a longer row. `equalise_s(shape, weight_s, rate)` are seconds of `equalise` for one matrix [N, K], by what
    quantizing a weight of the sample takes and operations a second of a product in float32, multiplications and additions.
    """

    NEEDS: frozenset[str]
    check: Callable[[QuantSpec], None]
    quantize: Callable[..., Codes]
    SHORT: Mapping[str, str] = field(default_factory=lambda: DEFAULTS)
    OUTLIERS: float = 0.0
    PRODUCTS: float = 0.0
    equalise: Callable[[Mapping[str, np.ndarray], Mapping[str, Stats], Mapping[str, QuantSpec], Layout, object],
                       dict[str, np.ndarray]] | None = None
    equalise_s: Callable[[Sequence[int], float, float], float] = no_seconds


def get(name: str) -> Method:
    """A method by name. Raises UsageError for a name that is none."""
    if name not in METHODS:
        raise UsageError(f"no quantization method {name!r}", f"known: {', '.join(METHODS)}")
    own = vars(import_module(f".{name}", __name__))
    return Method(**{each.name: own[each.name] for each in fields(Method) if each.name in own})


def checked(rows: np.ndarray) -> np.ndarray:
    """`rows` as contiguous float32 [n, K]. Raises EffllmError where a value is not finite."""
    rows = np.ascontiguousarray(rows, np.float32)
    # a sum is NaN or infinite if any part is; it may also overflow by itself, and then every value is looked at
    if not np.isfinite(rows.sum()) and not np.isfinite(rows).all():
        raise EffllmError("NaN or infinity", "the weights are damaged: download them again, or ask who published them")
    return rows
