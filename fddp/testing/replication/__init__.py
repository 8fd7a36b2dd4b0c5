"""Whether a training step keeps replicas equal, found out in one process."""

from fddp.testing.replication.check import check_replication as check_replication
