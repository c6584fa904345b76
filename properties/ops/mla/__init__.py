"""The properties of multi-head latent attention."""
