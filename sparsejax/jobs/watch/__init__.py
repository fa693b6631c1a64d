"""Watching that the processes of a job live: a sidecar process for each, and a hub."""
