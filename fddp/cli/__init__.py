"""Commands of `python -m fddp`, a file for each.

A command is two functions: `add` declares it on the parser, and `_run` runs it and returns the exit
code. `fddp.cli.main` has the list.
"""
