"""Implicit Drifting Policy: what the paper adds to a Diffusion Policy code base."""
