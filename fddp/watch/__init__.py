"""Monitoring of training: times of phases on all ranks, stragglers, and traces.

A `Monitor` observes the `SyncInfo` of each step. Its `MonitorReport`s name each `Straggler`. Its
exporters, `TensorBoard` and `Prometheus`, receive all steps and reports.
"""

from fddp.watch.exporters import Prometheus as Prometheus
from fddp.watch.exporters import TensorBoard as TensorBoard
from fddp.watch.exporters import report_figures as report_figures
from fddp.watch.exporters import step_figures as step_figures
from fddp.watch.monitor import Exporter as Exporter
from fddp.watch.monitor import Monitor as Monitor
from fddp.watch.phases import StepRecord as StepRecord
from fddp.watch.report import MonitorReport as MonitorReport
from fddp.watch.stragglers import RankSummary as RankSummary
from fddp.watch.stragglers import RobustStats as RobustStats
from fddp.watch.stragglers import Straggler as Straggler
