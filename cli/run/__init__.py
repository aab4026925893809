"""One run, from its files to its files: what is read, decoded, written, stopped and resumed."""
