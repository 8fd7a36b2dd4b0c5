"""Low-communication training: schedules over many steps, and their execution.

`local_sgd`, `diloco`, `streaming_diloco` and `layerwise` make schedules, `fddp.check_schedule`
proves them, `simulate_periodic` simulates them, and `PeriodicSync` executes them, with an outer
optimizer such as `sgd`.
"""

from fddp.core.schedule.periodic import Event as Event
from fddp.core.schedule.periodic import Fragment as Fragment
from fddp.core.schedule.periodic import PeriodicSchedule as PeriodicSchedule
from fddp.core.schedule.periodic import make_periodic_schedule as make_periodic_schedule
from fddp.core.schedule.periods import Periodic as Periodic
from fddp.core.sim.periodic import PeriodicSpan as PeriodicSpan
from fddp.core.sim.periodic import PeriodicTimeline as PeriodicTimeline
from fddp.core.sim.periodic import simulate_periodic as simulate_periodic
from fddp.sync.periodic.outer import sgd as sgd
from fddp.sync.periodic.periodic_sync import FragmentState as FragmentState
from fddp.sync.periodic.periodic_sync import PeriodicState as PeriodicState
from fddp.sync.periodic.periodic_sync import PeriodicSync as PeriodicSync
from fddp.sync.periodic.schedules import diloco as diloco
from fddp.sync.periodic.schedules import layerwise as layerwise
from fddp.sync.periodic.schedules import local_sgd as local_sgd
from fddp.sync.periodic.schedules import streaming_diloco as streaming_diloco
