"""How tokens are chosen from logits: pure functions, and the Sampler, which holds their state."""
