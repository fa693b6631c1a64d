"""`tests.embrace.worker` with rows held back at the end, and the kernel's gradient carried.

python -m tests.embrace.scheduled_worker OUT [COORDINATOR RANK]
"""

import sys

from tests.embrace.worker import main


if __name__ == "__main__":
    out, *rest = sys.argv[1:]
    main(out, *rest[:1], *(int(rank) for rank in rest[1:]), scheduled=True)
