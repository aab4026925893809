"""What happens to generated tokens: stop conditions."""
