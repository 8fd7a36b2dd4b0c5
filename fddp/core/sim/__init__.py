"""Cost models, simulation and optimisation of step times."""
