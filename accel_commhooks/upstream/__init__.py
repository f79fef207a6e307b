"""What torch, Accelerate and Transformers ask of us: private names where there is no public way, and weak callbacks."""
