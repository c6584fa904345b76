"""What a failing case looks like: one engine, and the counterfactuals that any op may have."""
