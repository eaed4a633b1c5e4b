"""The ranks: mesh, collectives, buckets, and agreement before a collective can hang."""
