"""Training frameworks with fddp: `make integrations` installs them and runs these examples."""
