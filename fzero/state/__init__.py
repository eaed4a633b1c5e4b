"""What lives between steps: shards, masters, optimizer state, and their first values."""
