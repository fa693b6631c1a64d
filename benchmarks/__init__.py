"""What the library costs, measured. Each module is one command and prints what it finds."""
