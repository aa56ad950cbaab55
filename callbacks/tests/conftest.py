"""For these tests alone, too: processes are forked from theirs, which the threads of torch do not survive."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
