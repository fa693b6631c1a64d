"""Detects lost processes of a job: a sidecar process for each of them, and a hub."""
