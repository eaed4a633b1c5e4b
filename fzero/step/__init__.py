"""One training step: gradients, update, and the two executors."""
