"""Result of the demo, its checks, and its table."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.table import Table

from fddp.cli.common import Check
from fddp.cli.demo.model import Score
from fddp.extend import size_text

#: Bound on rounding errors of a parameter (float64, of magnitude 1). Ranks sum a batch's gradients
#: in another order than one process, which changes the last bits (1e-16), and training amplifies
#: the difference. A missing rank or a wrong weight causes differences of 1e-3 and above.
ROUNDING = 1e-10


@dataclass(frozen=True)
class Report:
    """A finished run, from rank 0.

    Attributes:
        images: number of training images.
        steps: number of steps of each rank.
        score: score on the held-out images.
        between_ranks: largest absolute difference of a parameter from rank 0.
        from_one_process: the same between rank 0 and one process with the whole batches.
        bucket_bytes: size of each bucket, in launch order.
        hidden: share of the time with a bucket in flight in which backward still ran; median of
            the steps.
    """

    ranks: int
    epochs: int
    images: int
    steps: int
    transport: str
    score: Score
    between_ranks: float
    from_one_process: float
    bucket_bytes: tuple[int, ...]
    hidden: float


def checks(report: Report) -> dict[str, Check]:
    """Return the conditions of a correct run, by the name of their row.

    Example:
        >>> score = Score(loss=0.1, accuracy=0.97)
        >>> report = Report(2, 1, 1437, 12, "c10d", score, 0.0, 0.5, (1024,), 0.5)
        >>> for name, check in checks(report).items():
        ...     print(f"{name}: {check}")
        difference between ranks: passed: must be 0
        difference from one process: FAILED: at most 1e-10
    """
    return {
        "difference between ranks": Check(report.between_ranks, 0.0),
        "difference from one process": Check(report.from_one_process, ROUNDING),
    }


def table(report: Report) -> Table:
    """Return the report as a table of at most 80 columns."""
    rows = Table(
        title=f"{report.images} digits, epochs: {report.epochs}, ranks: {report.ranks}, "
        f"transport: {report.transport}",
        caption="difference: the largest of any parameter",
        box=box.SIMPLE_HEAVY,
        show_header=False,
    )
    rows.add_row("steps", f"{report.steps}", "weighted by number of images")
    rows.add_row("loss on held-out images", f"{report.score.loss:.4f}", "")
    rows.add_row("accuracy on held-out images", f"{report.score.accuracy:.1%}", "")
    for name, check in checks(report).items():
        rows.add_row(name, f"{check.value:.1e}" if check.value else "0", str(check))
    sizes = ", ".join(map(size_text, report.bucket_bytes))
    rows.add_row("buckets", f"{len(report.bucket_bytes)}", sizes)
    rows.add_row("communication hidden", f"{report.hidden:.0%}", "behind backward, median step")
    return rows
