"""Thousands of steps with every hook, in processes that live on, with everything that goes wrong in a long run."""
