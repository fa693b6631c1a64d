"""Sparsifiers whose threshold is an estimate, from a sample or from moments."""
