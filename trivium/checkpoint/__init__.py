"""Tensors on disk. Importing this room imports no torch; `names` and `safetensors` never do."""
