"""Adaptive thread count: use fewer of the pool's threads while other programs compete for the cores.

When the OS preempts a thread in the middle of a block, all others wait for it for a whole time slice. Next to one CPU-bound process, two
threads on two cores generated 30 tokens/s where a single one generated 39, and took more CPU time from that process. So the time spent
waiting for preempted threads is tracked, and when it exceeds what a thread contributes, one thread fewer is used for a while.
"""

from __future__ import annotations

WINDOW_S = 0.1  # of work over which waiting is measured: several time slices of other programs
BACKOFF_S, MAX_BACKOFF_S = 0.5, 4.0
MAX_WAITED_SHARE = 0.8  # of a thread's share of the work: memory-bound work loses less than the share with one thread fewer


class ThreadThrottle:
    """`active` of a pool's `maximum` threads are in use. The number changes only between two job lists, never within one."""

    def __init__(self, maximum: int) -> None:
        self.maximum = self.active = maximum
        self._backoff_s, self._backoff_until, self._probing = BACKOFF_S, 0.0, False
        self._spent_s = self._waited_s = 0.0

    def report(self, now: float, spent_s: float, waited_s: float) -> None:
        """Report that jobs took `spent_s` up to time `now` (seconds of one clock), of which `waited_s` were spent waiting for preempted
        threads.

        After a back-off one more thread is tried; if it has to be waited for again, the next back-off is twice as long.
        """
        self._spent_s += spent_s
        self._waited_s += waited_s
        if self._spent_s < WINDOW_S:
            return
        waited_share, self._spent_s, self._waited_s = self._waited_s / self._spent_s, 0.0, 0.0
        if self.active > 1 and waited_share > MAX_WAITED_SHARE / self.active:
            if self._probing:
                self._backoff_s = min(MAX_BACKOFF_S, 2 * self._backoff_s)
            self.active, self._backoff_until, self._probing = self.active - 1, now + self._backoff_s, False
        elif self.active == self.maximum:
            self._backoff_s, self._probing = BACKOFF_S, False
        elif now >= self._backoff_until:
            self.active, self._probing = self.active + 1, True
