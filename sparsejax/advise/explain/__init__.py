"""What a synchronization would send, and how long it would take, without any device."""
