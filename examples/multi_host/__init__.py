"""The same script as a job of several hosts, under several launchers."""
