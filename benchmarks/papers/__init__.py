"""Measurements of published papers, repeated with this library."""
