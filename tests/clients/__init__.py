"""Other people's training loops, run unchanged, with a hook and without."""
