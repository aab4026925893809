"""Stops and states: what ends an output, found while it is generated and told once it has ended."""
