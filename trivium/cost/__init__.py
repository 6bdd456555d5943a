"""Arithmetic on a config that you could do on paper. No torch."""
