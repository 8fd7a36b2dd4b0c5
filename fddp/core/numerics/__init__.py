"""Weights, loss scales, overflow bounds and norm spikes as pure functions."""
