"""Check that a training step does on several ranks what it does on one device."""

from fddp.testing.equivalence.check import check_equivalence as check_equivalence
