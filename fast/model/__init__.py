"""Matrix products, norms, rotary positions and attention metadata."""
