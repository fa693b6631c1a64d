"""What must be the same everywhere: on ranks its bits, on processes what they set out with.

`checksums` are of arrays, on the device, `replicas` compares them over ranks. `setup` is
what a process says before its first collective of what it is about to train, `program`
what of it stands in no option: the numbers that an optimizer computes with. `numbers` is
how ranks agree on a step in which one of them has a number that is not finite.
"""
