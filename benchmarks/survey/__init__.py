"""How many models of the libraries at hand run through the traced executor."""
