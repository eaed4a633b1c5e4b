"""One training step: gradients, update, and the executors."""
