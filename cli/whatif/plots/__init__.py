"""Throughput against latency, of a comparison or a plan: as a picture, or on the terminal."""
