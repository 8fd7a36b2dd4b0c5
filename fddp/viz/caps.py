"""Step time against bucket cap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from fddp.extend import MIB, entrance, size_text
from fddp.viz import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT_IN = 3.4
_MARGIN = 0.08  # of the axis, above and below
_LEAST_SPAN = 0.1  # of the longest time
_FACTOR = 4.0  # between the shortest and the longest time, above which the axis is logarithmic
_NOTHING: Mapping[float, float] = MappingProxyType({})
_LEVELS = ((canvas.GREEN, "--"), (canvas.BLACK, ":"), (canvas.PURPLE, "-."))


@entrance
def plot_caps(
    simulated_s: Mapping[float, float],
    measured_s: Mapping[float, float] = _NOTHING,
    levels_s: Mapping[str, float] = MappingProxyType({}),
    ax: Axes | None = None,
) -> Figure:
    """Plot the time of a step against the bucket cap.

    Args:
        simulated_s: simulated seconds of a step, by cap in MiB.
        measured_s: measured seconds of a step, by cap in MiB.
        levels_s: seconds at which to draw a horizontal line, by name; for example backward alone,
            or the step of a plan without a single cap.
        ax: axes to draw into; None creates a figure.

    Raises:
        ValueError: there is no cap, or a cap is not positive.
        ImportError: matplotlib is missing.

    Example:
        >>> figure = plot_caps({1.0: 0.030, 5.0: 0.020, 25.0: 0.025}, {5.0: 0.021})
        >>> figure.axes[0].get_title()
        'step time by bucket cap: least in simulation 20.00 ms at 5 MiB'
    """
    caps = sorted({*simulated_s, *measured_s})
    if not simulated_s or not caps[0] > 0.0:
        raise ValueError(f"simulated_s needs caps above 0 MiB as keys, got {caps}")
    if ax is None:
        (ax,) = canvas.new_figure(_HEIGHT_IN)
    for values_s, name, colour, form in (
        (simulated_s, "simulated", canvas.BLUE, "o-"),
        (measured_s, "measured", canvas.ORANGE, "D"),
    ):
        if values_s:
            known = sorted(values_s)
            times_ms = [values_s[cap] * 1e3 for cap in known]
            ax.plot(known, times_ms, form, color=colour, markersize=5.0, label=name)
    for number, (name, level_s) in enumerate(levels_s.items()):
        colour, dashes = _LEVELS[number % len(_LEVELS)]
        ax.axhline(level_s * 1e3, color=colour, linestyle=dashes, linewidth=1.2, label=name)
    ax.set_xscale("log")
    unit, per_mib = ("KiB", 1024.0) if caps[-1] < 1.0 else ("MiB", 1.0)
    ax.set_xticks(caps, [f"{cap * per_mib:.4g}" for cap in caps])
    ax.minorticks_off()
    _fit_(ax, [*simulated_s.values(), *measured_s.values(), *levels_s.values()])
    best = min(simulated_s, key=lambda cap: simulated_s[cap])
    least = f"{simulated_s[best] * 1e3:.2f} ms at {size_text(best * MIB)}"
    title = f"step time by bucket cap: least in simulation {least}"
    canvas.label_(ax, title=title, x=f"bucket cap, {unit}", y="step, ms", grid="y")
    canvas.explain_(ax, ax.get_legend_handles_labels()[0])
    return canvas.figure_of(ax)


def _fit_(ax: Axes, times_s: Sequence[float]) -> None:
    """Fit the axis of times to them, with room for markers."""
    low_ms, high_ms = min(times_s) * 1e3, max(times_s) * 1e3
    if 0.0 < _FACTOR * low_ms < high_ms:
        from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

        ax.set_yscale("log")
        margin = (high_ms / low_ms) ** _MARGIN
        ax.set_ylim(low_ms / margin, high_ms * margin)
        subs = (1.0, 2.0, 5.0) if high_ms > 10.0 * low_ms else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
        ax.yaxis.set_major_locator(LogLocator(subs=subs))
        ax.yaxis.set_major_formatter(ScalarFormatter())
        ax.yaxis.set_minor_locator(NullLocator())
        return
    # At least a small part of the time, so that small differences look small.
    middle_ms, half_ms = (low_ms + high_ms) / 2.0, (high_ms - low_ms) / 2.0
    half_ms = max(half_ms, _LEAST_SPAN * high_ms / 2.0, 1e-9) * (1.0 + 2.0 * _MARGIN)
    ax.set_ylim(middle_ms - half_ms, middle_ms + half_ms)
