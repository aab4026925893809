"""The verify command: requests in, a verdict out."""
