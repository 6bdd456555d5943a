"""A single-device model, spread over processes."""
