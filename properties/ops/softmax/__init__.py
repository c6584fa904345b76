"""The properties of softmax, log_softmax and logsumexp."""
