"""The kernel registry: selects the implementation of an op and records why. Candidates are tried in order and may decline; the last one,
the reference, never does.

A candidate sees only a small description of the call, so a choice can be made, printed and tested without running anything. A fallback is
announced once and stays visible in `effllm doctor`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Call:
    """The properties of a call that a choice depends on."""

    op: str
    stored: str = "f32"  # stored type of the weights
    columns: int = 1  # number of tokens
    act: str = "none"  # activation function
    bits: int = 0  # of low-bit weights
    looked_up: bool = False  # codes are in lookup-table layout


@dataclass(frozen=True)
class Candidate:
    """One implementation of an op."""

    op: str
    name: str
    declines: Callable[[Call], str]  # the reason for not handling a call, empty if it does
    run: Callable
    because: str  # why it is preferred where it runs
    fallback: bool = False  # slower than the implementation for better-equipped machines


@dataclass(frozen=True)
class Choice:
    """A selected candidate."""

    call: Call
    candidate: Candidate
    declined: tuple[tuple[str, str], ...]  # (name, reason) of each candidate before it

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
        return list(dict.fromkeys(candidate.op for candidate in self.candidates))

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
