"""A hook attached to a model: the only code that touches DDP and optimizers' steps."""
