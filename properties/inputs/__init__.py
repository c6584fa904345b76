"""How inputs are made: recipes that shrink, strategies, recorded activations."""
