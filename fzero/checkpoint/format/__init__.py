"""What a checkpoint is on the disk."""
