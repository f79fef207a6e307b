"""Scripts under torchrun whose ranks are killed again and again, and which end as if nothing had happened."""
