"""Whole attention layers: projections, norms and rotation around grouped or latent attention."""
