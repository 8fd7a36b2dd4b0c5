"""torch's own tests of DistributedDataParallel, run on fddp's class.

The tests come from the installed wheel: `catalogue.py` finds them, `left_out.py` says which do not
run and why, `edits.py` has the few changes to them, `on_cpu.py` answers calls that ask for a GPU,
`on_rank.py` runs one test on one rank.
"""
