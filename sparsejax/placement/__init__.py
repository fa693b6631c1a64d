"""The placement of states on a mesh: their specs, first states, and the checks of a job."""
