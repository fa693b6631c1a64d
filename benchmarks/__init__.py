"""Measurements of what the library costs; README.md beside this file lists the commands."""
