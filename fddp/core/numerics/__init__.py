"""Weights, loss scales, noise scales, overflow bounds and norm spikes as pure functions."""
