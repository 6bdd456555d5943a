"""How good a model is, and beside what: compressors, its own samples, the real text."""
