"""Experiments: data, training, records."""
