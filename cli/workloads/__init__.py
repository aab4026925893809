"""The workload command: from its options to a requests file."""
