"""Worked examples: scripts that compare what several ranks did with what one process does.

Each is started by `torchrun --nproc-per-node 2 -m examples.maml`, or without torchrun by
`python -m examples.maml --ranks 2`; `running` is what they share.
"""
