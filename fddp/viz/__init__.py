"""Figures of plans and timelines, for notebooks and reports.

Needs matplotlib (`pip install fddp[viz]`), which is imported when a figure is drawn. Figures are
objects of their own, outside of pyplot: nothing is shown, kept or closed, no display is needed, and
a notebook after `%matplotlib inline` shows the one that a cell ends with. Colours are those of
M. Okabe and K. Ito, "Color Universal Design", 2008, told apart by all kinds of sight.
"""

from fddp.viz.caps import plot_caps as plot_caps
from fddp.viz.plans import compare_plans as compare_plans
from fddp.viz.plans import plot_plan as plot_plan
from fddp.viz.ranks import plot_ranks as plot_ranks
from fddp.viz.timelines import plot_timeline as plot_timeline
