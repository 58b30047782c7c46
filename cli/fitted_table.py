"""Tables that drop columns in a narrow terminal instead of folding words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .screen import Screen, align_columns, cell_width

MIN_FOLDED_WIDTH = 10  # columns: a narrower folded cell is not readable
MAX_FOLDED_LINES = 4  # of a folded word: paths on more lines are hard to tell apart


def fitted_table(screen: Screen, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = (),
                 spare: Sequence[str] = ()) -> bool:
    """Write a table that fits the terminal. Returns whether all columns are shown.

    numbers: headings of right-aligned columns; spare: headings of the columns that may be dropped, in this order. In a pipe none is.
    """
    droppable = [*spare]
    while droppable and screen.report_width is not None and max(map(cell_width, align_columns([headings, *rows]))) > screen.report_width:
        dropped = headings.index(droppable.pop(0))
        headings, *rows = ([*row[:dropped], *row[dropped + 1 :]] for row in (headings, *rows))
    screen.table(headings, rows, right=[index for index, heading in enumerate(headings) if heading in numbers])
    return len(droppable) == len(spare)


def is_cramped(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether a table is too wide to be readable with folded cells: its two widest columns may be wrapped, the others have to fit. A path
    counts as one word, and may be folded."""
    cells = [[*column] for column in zip(headings, *rows)]
    widths = sorted(max(map(cell_width, column)) for column in cells)
    longest = max(cell_width(word) for column in cells for cell in column for word in cell.split() or [""])
    available = max(width - sum(widths[:-1]) - 2 * (len(widths) - 1), MIN_FOLDED_WIDTH)
    return sum(widths[:-2]) + 2 * len(widths) + 2 * MIN_FOLDED_WIDTH > width or longest > MAX_FOLDED_LINES * available
