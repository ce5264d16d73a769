"""Format tables as text and as HTML."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from html import escape
from typing import NamedTuple


class Table(NamedTuple):
    """Rows of texts with headings.

    Attributes:
        title: the title of the table.
        heads: one heading per column; (): the rows are names with values.
        rows: the rows, with one text per column.
        words: the columns of words, aligned left. Other columns are aligned right.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[int, ...] = (0,)

    @classmethod
    def of_columns(
        cls, title: str, columns: Mapping[str, Iterable[object]], words: Container[str]
    ) -> Table:
        """Make a table from columns by heading; ``words`` has the headings of columns of words."""
        rows = zip(*(map(str, cells) for cells in columns.values()), strict=True)
        places = tuple(place for place, head in enumerate(columns) if head in words)
        return cls(title, tuple(columns), tuple(rows), places)

    def text(self, width: int | None = None) -> str:
        """Return the aligned rows, without the title.

        >>> print(Table("", ("lane", "busy", "idle"), (("0", "75%", "25%"), ("1", "70%", "30%"))).text(12))
        lane  busy
        0      75%
        1      70%
        lane  idle
        0      25%
        1      30%

        Args:
            width: the largest number of characters of a line. Columns without room continue below,
                with the first column repeated. None: any width.
        """
        lines = [self.heads, *self.rows] if self.heads else [*self.rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        out: list[str] = []
        for block in self._blocks(widths, width):
            forms = [f"{'<' if column in self.words else '>'}{widths[column]}" for column in block]
            for line in lines:
                cells = map(format, [line[column] for column in block], forms)
                out.append("  ".join(cells).rstrip()[:width])
        return "\n".join(out)

    @staticmethod
    def _blocks(widths: list[int], width: int | None) -> Iterable[list[int]]:
        """Yield the columns of each block, from top to bottom."""
        block = [0] if widths else []
        for column in range(1, len(widths)):
            needed = sum(widths[shown] + 2 for shown in block) + widths[column]
            if width is not None and needed > width and len(block) > 1:
                yield block
                block = [0]
            block.append(column)
        yield block

    def html(self) -> str:
        """Return the rows as an HTML table, without the title and without columns that are empty.

        >>> print(Table("", ("layer", "bytes", "state"), (("<a>", "12", ""),)).html())
        <table><thead><tr><th class="word">layer</th><th>bytes</th></tr></thead><tbody><tr><td class="word">&lt;a&gt;</td>\
<td>12</td></tr></tbody></table>
        """
        heads = range(len(self.heads))
        kept = [
            column for column in heads if not self.rows or any(row[column] for row in self.rows)
        ]

        def cells(tag: str, row: tuple[str, ...]) -> str:
            marks = {column: ' class="word"' if column in self.words else "" for column in kept}
            return (
                f"<tr>{''.join(f'<{tag}{marks[at]}>{escape(row[at])}</{tag}>' for at in kept)}</tr>"
            )

        body = "".join(cells("td", row) for row in self.rows)
        return f"<table><thead>{cells('th', self.heads)}</thead><tbody>{body}</tbody></table>"
