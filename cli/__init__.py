"""The command line of batchdecode: everything that touches a terminal, a signal or a file."""
