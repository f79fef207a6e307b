"""What the user asked for: config files, options, names of hooks, and the errors that say what is wrong with them."""
