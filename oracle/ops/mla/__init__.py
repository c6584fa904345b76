"""Multi-head latent attention in both orders of its products, and its gradients."""
