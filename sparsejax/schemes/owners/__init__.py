"""Push to owners, add up, pull from owners: what schemes with Parallelism share."""
