"""The ways in: install() for unchanged scripts, the launcher, Accelerate's kwargs handler, Trainer's callbacks."""
