"""A timeline as SVG text, for notebooks; `fddp.viz.plot_timeline` draws figures of it."""

from __future__ import annotations

import html
from collections.abc import Sequence

_LEFT, _WIDTH, _LANE, _BAR = 110, 600, 30, 18  # pixels


def timeline_svg(
    lanes: Sequence[tuple[str, Sequence[tuple[str, float, float]]]],
    backward_end_s: float,
    step_s: float,
    title: str,
) -> str:
    """Return one row of bars for each lane; the time after backward is shaded.

    Args:
        lanes: name and bars of each lane; a bar has a label, a start and an end in seconds.
        backward_end_s: end of backward.
        step_s: end of the step.
        title: line above the bars.

    Example:
        >>> svg = timeline_svg([("world", [("all_reduce 0", 0.001, 0.003)])], 0.002, 0.003, "a < b")
        >>> svg.count("<rect"), "a &lt; b" in svg, "all_reduce 0: 1.000 to 3.000 ms" in svg
        (2, True, True)
    """
    scale = _WIDTH / max([step_s, *(end_s for _, bars in lanes for *_, end_s in bars), 1e-9])
    bottom = 24 + _LANE * len(lanes)
    backward_x, step_x = _LEFT + scale * backward_end_s, _LEFT + scale * step_s
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 50}" '
        f'height="{bottom + 20}" font-family="sans-serif" font-size="11">',
        f'<text x="4" y="14">{html.escape(title)}</text>',
        f'<rect x="{backward_x:.1f}" y="22" width="{max(step_x - backward_x, 0.0):.1f}" '
        f'height="{bottom - 22}" fill="#D55E00" fill-opacity="0.18"/>',
    ]
    for row, (lane, bars) in enumerate(lanes):
        top = 24 + _LANE * row
        parts.append(f'<text x="4" y="{top + 17}">{html.escape(lane)}</text>')
        for label, start_s, end_s in bars:
            colour = "#C8C8C8" if label == "backward" else "#0072B2"
            when = f"{html.escape(label)}: {start_s * 1e3:.3f} to {end_s * 1e3:.3f} ms"
            parts.append(
                f'<rect x="{_LEFT + scale * start_s:.1f}" y="{top + 4}" '
                f'width="{max(scale * (end_s - start_s), 0.5):.1f}" height="{_BAR}" '
                f'fill="{colour}" stroke="white" stroke-width="0.5"><title>{when}</title></rect>'
            )
    for x, time_s in ((_LEFT, 0.0), (backward_x, backward_end_s), (step_x, step_s)):
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="22" y2="{bottom}" stroke="#444444"/>')
        if time_s in (0.0, step_s) or step_x - backward_x > 50.0:
            at = f'x="{x:.1f}" y="{bottom + 14}" text-anchor="middle"'
            parts.append(f"<text {at}>{time_s * 1e3:.2f} ms</text>")
    return "".join([*parts, "</svg>"])
