"""The kernel registry: which implementation an op uses, and why. Candidates are asked in order and may decline; the last one, the
reference, never does.

A candidate sees only a small description of the call, so a choice can be made, printed and tested without running anything. A fallback is
announced once and stays visible in `effllm doctor`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Call:
    """What a choice depends on: the op, the stored type, the number of columns (tokens), the activation; for low-bit weights also the bits,
    and whether the codes are in lookup layout."""

    op: str
    stored: str = "f32"
    columns: int = 1
    act: str = "none"
    bits: int = 0
    looked_up: bool = False


@dataclass(frozen=True)
class Candidate:
    """One implementation. `declines(call)` returns why not, or an empty string; `because`: what speaks for it where it runs. `fallback`:
    slower than what a good machine runs."""

    op: str
    name: str
    declines: Callable[[Call], str]
    run: Callable
    because: str
    fallback: bool = False


@dataclass(frozen=True)
class Choice:
    """A selected candidate with the reasons of those before it."""

    call: Call
    candidate: Candidate
    declined: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        why = "; ".join(f"{name}: {reason}" for name, reason in self.declined)
        return f"{self.call.op} on {self.call.stored}: {self.candidate.name}" + (f" ({why})" if why else "")


@dataclass
class Registry:
    """Candidates in order of preference; caches choices and tracks fallbacks not yet announced."""

    candidates: list[Candidate]
    choices: dict[Call, Choice] = field(default_factory=dict)
    _announced: set[str] = field(default_factory=set)
    _pending: list[str] = field(default_factory=list)

    @property
    def ops(self) -> list[str]:
        """Ops that have candidates, in registration order."""
        return list(dict.fromkeys(each.op for each in self.candidates))

    def select(self, call: Call) -> Choice:
        """The first candidate that does not decline. Raises LookupError with every reason when all do."""
        if call in self.choices:
            return self.choices[call]
        declined = []
        for candidate in self.candidates:
            if candidate.op != call.op:
                continue
            if reason := candidate.declines(call):
                declined.append((candidate.name, reason))
                continue
            choice = self.choices[call] = Choice(call, candidate, tuple(declined))
            if candidate.fallback and candidate.name not in self._announced:
                self._announced.add(candidate.name)
                self._pending.append(f"slower kernel: {choice}")
            return choice
        raise LookupError(f"no kernel for {call}: {declined}")

    def announcements(self) -> list[str]:
        """Fallbacks chosen since the last call, each one line, each only once."""
        pending, self._pending = self._pending, []
        return pending
