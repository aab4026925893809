"""The replay command: a log of a real run against its simulation."""
