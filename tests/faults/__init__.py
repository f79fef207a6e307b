"""Faults: ranks killed, stopped and delayed, disks that are full, files that are damaged, ranks that disagree, links that are cut."""
