"""Every pair of traits that scripts have, in short runs on real ranks, judged by one oracle."""
