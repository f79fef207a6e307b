"""A hook's life on one model: the only code that touches DDP and optimizers' steps."""
