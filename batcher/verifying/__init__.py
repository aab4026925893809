"""Proofs that outputs do not depend on the batch: one by one, then under many settings."""
