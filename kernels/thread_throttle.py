"""How many threads of a pool work now: fewer while other programs want the cores.

A thread that the system puts aside in the middle of a block is waited for by all others, for a whole slice of time. Beside one process that
wants a core, two threads of two cores wrote 30 tokens a second where one alone wrote 39, and took more from that process. So the time spent
waiting for such threads is watched, and where it is more than a thread is worth, one fewer works for a while.
"""

from __future__ import annotations

WINDOW_S = 0.1  # of work over which waiting is judged: several slices of other programs
REST_S, LONGEST_REST_S = 0.5, 4.0
WORTH = 0.8  # of a thread's share of the work: what is limited by memory loses less than the share


class ThreadThrottle:
    """`now` of a pool's `most` threads work. It changes between two lists of jobs, never within one."""

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._rest_s, self._until, self._looks = REST_S, 0.0, False
        self._spent_s = self._waited_s = 0.0

    def worked(self, now: float, spent_s: float, waited_s: float) -> None:
        """Jobs took `spent_s` up to the time `now` (seconds of one clock), of which threads that were put aside were waited for `waited_s`.

        After a rest one looks whether it has a core now; where it is waited for again it rests for twice as long.
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
