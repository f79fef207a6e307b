"""Private ground of torch, Accelerate and Transformers: what the package needs of them and they do not offer publicly."""
