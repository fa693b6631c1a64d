"""`tests.embrace.worker` with `embrace_sync`: some rows are held back at the end.

python -m tests.embrace.vertical_worker OUT [COORDINATOR RANK]
"""

import sys

from tests.embrace.worker import main


if __name__ == "__main__":
    out, *rest = sys.argv[1:]
    main(out, *rest[:1], *(int(rank) for rank in rest[1:]), vertical=True)
