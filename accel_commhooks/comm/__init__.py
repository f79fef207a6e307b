"""How ranks talk: collectives, which ranks share a node, means in two levels, and what each of them costs."""
