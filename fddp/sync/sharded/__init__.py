"""Sharded updates: schedules that gather parameters during the next forward pass.

`GradSync.start_all_gather` returns a `Gathering`, which takes the place of the parameters.
`make_sharded_schedule` makes schedules, `fddp.check_schedule` proves them, and `simulate_sharded`
simulates them.
"""

from fddp.core.schedule.sharded import ShardedSchedule as ShardedSchedule
from fddp.core.schedule.sharded import ShardEvent as ShardEvent
from fddp.core.schedule.sharded import make_sharded_schedule as make_sharded_schedule
from fddp.core.sim.sharded import ComputeTimes as ComputeTimes
from fddp.core.sim.sharded import ShardedTimeline as ShardedTimeline
from fddp.core.sim.sharded import simulate_sharded as simulate_sharded
from fddp.sync.gathering import Gathering as Gathering
