"""The server of `batchdecode serve` as a process: its options, signals, files and picture."""
