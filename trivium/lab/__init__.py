"""Experiments that reproduce published claims, and the baselines they need."""
