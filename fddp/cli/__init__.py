"""The commands of `python -m fddp`, a file for each.

A command is two functions: one that declares it on the parser, and one that carries it out and
returns the exit code. `fddp.cli` has the list.
"""
