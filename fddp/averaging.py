"""Averages of parameters over ranks, at periodic steps: local SGD.

Averager, Periodic          averages at periodic steps
average                     one average
"""

from fddp.periodic.averaging import Averager as Averager
from fddp.periodic.averaging import average as average
from fddp.periodic.schedule import Periodic as Periodic
