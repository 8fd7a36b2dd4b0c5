"""Generated faults on real processes: what each rank then sees, held against what is promised.

`python -m chaos --faults 200 --seed 7`, with `tests` on the path. `test_chaos.py` runs a few.
"""
