"""Mixed-precision policies: which pages of the KV cache get more bits. One file per policy, registered here.

To add one: a file with a function `policy`, which takes the share of pages that may have more bits, and the file's name in POLICIES.
`keep.py` defines the interface; `salient.py` is the base for score-based policies.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ... import UsageError
from .keep import Keep, Policy

POLICIES: dict[str, Callable[[float], Policy]] = {
    name: import_module(f".{name}", __name__).policy
    for name in ("mikv", "zipcache")
}


def check_policy(name: str) -> None:
    """The NAME of `--kv 4bit+NAME`; "" is none. Raises UsageError listing the known names."""
    if name and name not in POLICIES:
        raise UsageError(f"--kv …+{name}: there is no such policy", f"+{' or +'.join(POLICIES)}")


def open_policy(name: str, share: float) -> Policy:
    """Create a policy by name, "" for uniform pages. `share`: of pages that may get more bits. Raises UsageError."""
    check_policy(name)
    return POLICIES[name](share) if name else Keep()
