"""Tests of other libraries, run over what takes the place of their objects."""
