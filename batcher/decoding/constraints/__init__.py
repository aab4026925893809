"""Outputs that keep a JSON schema, a regex, a list of choices or a grammar, by llguidance."""
