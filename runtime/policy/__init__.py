"""Which pages get more bits than others: one file a policy, its name here.

To add one: a file with a function `policy`, which makes it from the share of pages that may have more bits, and the file's name in
POLICIES. `keep.py` says what a policy is asked; `salient.py` is one by a score.
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
    """Of `--kv 4bit+NAME`; "" is none. Raises UsageError for a name that is not known, naming those that are."""
    if name and name not in POLICIES:
        raise UsageError(f"--kv …+{name}: there is no such policy", f"+{' or +'.join(POLICIES)}")


def open_policy(name: str, share: float) -> Policy:
    """The policy of a name, "" for pages alike. `share`: of pages that may get more bits. Raises UsageError."""
    check_policy(name)
    return POLICIES[name](share) if name else Keep()
