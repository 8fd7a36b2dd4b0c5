"""Plain-text and HTML tables."""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Iterable, Sequence


def plain_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], numeric: Collection[int] = ()
) -> str:
    """Return aligned columns of text. Columns in `numeric` are right-aligned.

    Example:
        >>> print(plain_table(("bucket", "leaf"), [("0", "w"), ("12", "bias")], numeric=(0,)))
        bucket  leaf
             0  w
            12  bias
    """
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def narrowed(
    header: Sequence[str], rows: Sequence[Sequence[str]], columns: Collection[int], width: int
) -> list[tuple[str, ...]]:
    """Return rows whose cells in `columns` keep only their end, so that the table fits a width.

    Columns share what is left by the others; a cell keeps at least 10 characters.

    Example:
        >>> header = ("no", "leaf", "dtype")
        >>> rows = [("0", "layers.0.attention.weight", "f32"), ("1", "bias", "f32")]
        >>> print(plain_table(header, narrowed(header, rows, (1,), 28)))
        no  leaf               dtype
        0   …attention.weight  f32
        1   bias               f32
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    spare = width - sum(widths) - 2 * (len(widths) - 1) + sum(widths[i] for i in columns)
    most = list(widths)
    for others, column in enumerate(sorted(columns, key=widths.__getitem__)):
        most[column] = min(widths[column], max(10, spare // (len(columns) - others)))
        spare -= most[column]
    return [
        tuple(
            cell if len(cell) <= room else f"…{cell[len(cell) - room + 1 :]}"
            for cell, room in zip(row, most, strict=True)
        )
        for row in rows
    ]


def abridged(
    count: int, row: Callable[[int], tuple[str, ...]], most: int, left_out: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return rows 0 to `count`, or the first and last of them if there are more than `most`.

    Args:
        count: number of rows.
        row: builds a row of at least `len(left_out)` columns.
        most: number of rows to keep.
        left_out: first columns of the row between them; `{}` stands for the number left out.

    Example:
        >>> abridged(5, lambda i: (str(i), "leaf"), 2, ("…", "({} more)"))
        [('0', 'leaf'), ('…', '(3 more)'), ('4', 'leaf')]
    """
    if count <= most:
        return [row(i) for i in range(count)]
    head = [row(i) for i in range(most // 2)]
    tail = [row(i) for i in range(count - most // 2, count)]
    middle = [text.format(count - len(head) - len(tail)) for text in left_out]
    return [*head, (*middle, *[""] * (len(head[0]) - len(middle))), *tail]


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table for notebooks. Cells are escaped.

    Example:
        >>> html_table("a", ["b"], [["<c>"]])  # doctest: +NORMALIZE_WHITESPACE
        '<table><caption>a</caption><thead><tr><th>b</th></tr></thead><tbody><tr><td>&lt;c&gt;</td></tr></tbody></table>'
    """
    head = _html_row("th", header)
    body = "".join(_html_row("td", row) for row in rows)
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead>{head}</thead><tbody>{body}</tbody></table>"
    )


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
