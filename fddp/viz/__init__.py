"""Figures of plans and timelines, for notebooks and reports.

Requires matplotlib (`pip install fddp[viz]`), which is imported when a figure is drawn. Figures are
independent of pyplot: they need no display and no `close`. A notebook with `%matplotlib inline`
shows the figure that a cell returns. The palette is that of M. Okabe and K. Ito, "Color Universal
Design", 2008, which is distinguishable with colour vision deficiency.
"""

from fddp.viz.caps import plot_caps as plot_caps
from fddp.viz.periodic import plot_periodic as plot_periodic
from fddp.viz.plans import compare_plans as compare_plans
from fddp.viz.plans import plot_plan as plot_plan
from fddp.viz.ranks import plot_ranks as plot_ranks
from fddp.viz.timelines import plot_timeline as plot_timeline
