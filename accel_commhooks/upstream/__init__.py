"""Private names of torch, Accelerate and Transformers, used where they offer no public way."""
