"""What rows are made of: how tokens are chosen, what they have to be, and what ends them."""
