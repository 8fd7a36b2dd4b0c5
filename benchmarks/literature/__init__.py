"""The simulator and the planner beside published results: `python -m benchmarks.literature`.

Each module holds one source: its numbers, what the simulator makes of the same inputs, and a table.
Inputs are published as well, and no number is fitted to one that is then predicted.
"""
