"""Tables that do without a column rather than with words cut to pieces, where a terminal has no room for all."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .screen import Screen, cell_width, columns


def fitted_table(screen: Screen, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = (),
                 spare: Sequence[str] = ()) -> bool:
    """A table whose `numbers` are set flush right; its `spare` columns are left out, the first one first, until the others fit. Whether all
    are there: a pipe has room for any."""
    left = [*spare]
    while left and screen.report_width is not None and max(map(cell_width, columns([headings, *rows]))) > screen.report_width:
        gone = headings.index(left.pop(0))
        headings, *rows = ([*row[:gone], *row[gone + 1 :]] for row in (headings, *rows))
    screen.table(headings, rows, right=[at for at, heading in enumerate(headings) if heading in numbers])
    return len(left) == len(spare)
