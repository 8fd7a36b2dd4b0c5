"""Flight recorder, wait accounting, stragglers, traces and exporters."""
