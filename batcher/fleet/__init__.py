"""Fleets: replicas of an engine behind a router, simulated without a model."""
