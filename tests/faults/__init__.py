"""Faults: ranks killed, stopped and slow, disks that are full, damaged files, ranks that disagree, links that are cut."""
