"""The algorithms: what a hook is (base), plain and foreign hooks, and one folder for each method."""
