"""How ranks communicate: collectives, topology, two-level means, and what each of them costs."""
