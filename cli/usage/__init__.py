"""How a command line is told of, and what is said of one that is wrong."""
