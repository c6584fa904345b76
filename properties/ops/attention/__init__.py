"""The properties of dense attention."""
