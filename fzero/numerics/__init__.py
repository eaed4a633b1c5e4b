"""Dtypes, casts, loss scale, rounding, random streams: values and functions of single tensors."""
