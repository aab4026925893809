"""Bytes to records and back: requests in, results out, traces and views; no file is opened."""
