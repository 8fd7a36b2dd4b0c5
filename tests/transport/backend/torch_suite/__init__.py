"""torch's own tests of process groups on the CPU, run with the backend "fddp".

The tests come from the installed wheel. `catalogue.py` finds them, `left_out.py` says which do not
run and why, `on_rank.py` runs one test on one rank.
"""
