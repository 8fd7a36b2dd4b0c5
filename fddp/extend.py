"""Parts for packages that build on fddp, as `fddp.periodic` and `fddp.watch` do.

These names are public, and may change between minor versions.

    Group, communicator_of      groups of ranks, and their communicators
    exchange, Schema, MappingOf, optional
                                values of all ranks, validated
    StepTimes, BucketTimes, Interval, waits_since
                                times of a step, and waits of this thread
    counted, plain_table, html_table
                                texts of reports
"""

from fddp.collectives.communicator import communicator_of as communicator_of
from fddp.collectives.exchange import exchange as exchange
from fddp.core.protocol.messages import MappingOf as MappingOf
from fddp.core.protocol.messages import Schema as Schema
from fddp.core.protocol.messages import optional as optional
from fddp.core.tables import html_table as html_table
from fddp.core.tables import plain_table as plain_table
from fddp.core.text import counted as counted
from fddp.core.timeline import BucketTimes as BucketTimes
from fddp.core.timeline import Interval as Interval
from fddp.core.timeline import StepTimes as StepTimes
from fddp.telemetry.waits import waits_since as waits_since
from fddp.transport import Group as Group
