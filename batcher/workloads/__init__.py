"""Workloads: requests that arrive by a pattern or as in a recorded trace, with lengths alone."""
