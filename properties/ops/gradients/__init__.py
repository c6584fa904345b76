"""The properties of gradients: of attention, of latent attention and of softmax."""
