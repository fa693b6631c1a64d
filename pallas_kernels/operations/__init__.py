"""The operations, a file each: what one computes, and which backends have it."""
