"""Low-communication training: schedules over many steps, and their execution.

`local_sgd`, `diloco` and `streaming_diloco` make schedules, `simulate_periodic` simulates them, and
`PeriodicSync` executes them, with an outer optimizer such as `sgd`.
"""

from fddp.periodic.methods import diloco as diloco
from fddp.periodic.methods import local_sgd as local_sgd
from fddp.periodic.methods import streaming_diloco as streaming_diloco
from fddp.periodic.outer import sgd as sgd
from fddp.periodic.schedule import Event as Event
from fddp.periodic.schedule import Fragment as Fragment
from fddp.periodic.schedule import Periodic as Periodic
from fddp.periodic.schedule import PeriodicSchedule as PeriodicSchedule
from fddp.periodic.simulation import PeriodicTimeline as PeriodicTimeline
from fddp.periodic.simulation import simulate_periodic as simulate_periodic
from fddp.periodic.sync import FragmentState as FragmentState
from fddp.periodic.sync import PeriodicState as PeriodicState
from fddp.periodic.sync import PeriodicSync as PeriodicSync
