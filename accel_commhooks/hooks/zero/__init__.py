"""ZeRO overlap: optimizer state divided among the ranks, communication hidden."""
