"""Adaptive thread count: use fewer of the pool's threads while other programs compete for the cores.

When the OS preempts a thread in the middle of a block, all others wait for it for a whole time slice. Next to one CPU-bound process, two
threads on two cores generated 30 tokens/s where a single one generated 39, and took more CPU time from that process. So the time spent
waiting for preempted threads is tracked, and when it exceeds what a thread contributes, one thread fewer is used for a while.
"""

from __future__ import annotations

WINDOW_S = 0.1  # of work over which waiting is judged: several slices of other programs
REST_S, LONGEST_REST_S = 0.5, 4.0
WORTH = 0.8  # of a thread's share of the work: what is limited by memory loses less than the share


class ThreadThrottle:
    """`now` of a pool's `most` threads are in use. The number changes only between two job lists, never within one."""

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._rest_s, self._until, self._looks = REST_S, 0.0, False
        self._spent_s = self._waited_s = 0.0

    def worked(self, now: float, spent_s: float, waited_s: float) -> None:
        """Report that jobs took `spent_s` up to time `now` (seconds of one clock), of which `waited_s` were spent waiting for preempted
        threads.

        After a back-off one more thread is tried; if it has to be waited for again, the next back-off is twice as long.
        """
        self._spent_s += spent_s
        self._waited_s += waited_s
        if self._spent_s < WINDOW_S:
            return
        waited, self._spent_s, self._waited_s = self._waited_s / self._spent_s, 0.0, 0.0
        if self.now > 1 and waited > WORTH / self.now:
            if self._looks:
                self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s)
            self.now, self._until, self._looks = self.now - 1, now + self._rest_s, False
        elif self.now == self.most:
            self._rest_s, self._looks = REST_S, False
        elif now >= self._until:
            self.now, self._looks = self.now + 1, True
