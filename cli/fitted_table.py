"""Tables that drop columns in a narrow terminal instead of folding words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .screen import Screen, cell_width, columns

LEAST_FOLDED = 10  # the least columns at which a folded cell is readable
MOST_LINES = 4  # lines of a folded word: in more, paths are hard to tell apart


def fitted_table(screen: Screen, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = (),
                 spare: Sequence[str] = ()) -> bool:
    """A table with `numbers` right-aligned; its `spare` columns are dropped, first one first, until the others fit. Returns whether all are
    there; a pipe has room for any."""
    left = [*spare]
    while left and screen.report_width is not None and max(map(cell_width, columns([headings, *rows]))) > screen.report_width:
        gone = headings.index(left.pop(0))
        headings, *rows = ([*row[:gone], *row[gone + 1 :]] for row in (headings, *rows))
    screen.table(headings, rows, right=[at for at, heading in enumerate(headings) if heading in numbers])
    return len(left) == len(spare)


def is_cramped(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether a table would have to fold words: its two widest columns may be wrapped, the others have to fit. Paths count as one word, and
    may be folded."""
    cells = [[*column] for column in zip(headings, *rows)]
    widths = sorted(max(map(cell_width, column)) for column in cells)
    longest = max(cell_width(word) for column in cells for cell in column for word in cell.split() or [""])
    room = width - sum(widths[:-1]) - 2 * (len(widths) - 1)
    return sum(widths[:-2]) + 2 * len(widths) + 2 * LEAST_FOLDED > width or longest > MOST_LINES * max(room, LEAST_FOLDED)
