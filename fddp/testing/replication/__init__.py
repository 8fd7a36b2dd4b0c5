"""Check, in one process, that a training step keeps replicas equal."""

from fddp.testing.replication.check import check_replication as check_replication
