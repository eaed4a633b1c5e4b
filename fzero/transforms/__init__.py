"""Functions of sharded parameters: gather, differentiate, reduce; staged out as a whole."""
