"""The result of a check: rows, a verdict, and both as a table."""

from typing import NamedTuple


class Row(NamedTuple):
    """One comparison. error and limit are relative; None where there is nothing to measure."""

    what: str
    error: float | None
    limit: float | None
    ok: bool
    note: str = ""


class Report:
    """Rows in the order in which they were made. `ok` is the verdict: every row is."""

    def __init__(self, title: str) -> None:
        self.title, self.rows = title, []

    @property
    def ok(self) -> bool:
        """The verdict."""
        return all(row.ok for row in self.rows)

    def add(
        self, what: str, error: float | None = None, limit: float | None = None, ok: bool | None = None, note: str = ""
    ) -> None:
        """A row; without `ok` the error decides, and one that is not a number is too large."""
        self.rows.append(Row(what, error, limit, error <= limit if ok is None else ok, note))

    def failed(self) -> list[Row]:
        """The rows that are not."""
        return [row for row in self.rows if not row.ok]

    def __str__(self):
        cells = [("", "error", "limit", "", "")]
        number = lambda value: "" if value is None else "0" if value == 0 else f"{value:.1e}"  # noqa: E731
        cells += [(r.what, number(r.error), number(r.limit), "ok" if r.ok else "WRONG", r.note) for r in self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        lines = [self.title]
        for row in cells:
            lines.append("  ".join([f"{row[0]:<{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in (1, 2, 3)), row[4]]))
        bad = self.failed()
        verdict = f"{len(bad)} of {len(self.rows)} comparisons failed: {', '.join(row.what for row in bad)}"
        return "\n".join(
            [*(line.rstrip() for line in lines), f"verdict: {verdict if bad else 'all equal within the limits'}"]
        )

    __repr__ = __str__
