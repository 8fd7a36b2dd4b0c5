"""A long run of mixed steps, whose resources must stay flat: `make soak`.

`script.py` draws what happens in each turn, `work.py` does it, `resources.py` reads what a process
holds and judges it, `rank.py` is the loop of a rank, and `__main__.py` the command.
"""
