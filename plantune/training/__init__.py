"""Training as one step: forward, loss, backward and optimizer."""
