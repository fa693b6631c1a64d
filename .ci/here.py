"""Prints which list of .ci/requirements is for the Python that runs this."""

import platform
import sys


version = "".join(map(str, sys.version_info[:2]))
library, _ = platform.libc_ver()  # wheels for glibc are no use to musl
kind = "py" if sys.implementation.name == "cpython" else sys.implementation.name
print(f"{kind}{version}-{library or sys.platform}-{platform.machine()}")
