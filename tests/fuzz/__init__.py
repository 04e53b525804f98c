"""Damaged files (`make fuzz`) and killed writers (`make kill`): see docs/reliability.md.

Campaigns of minutes, so they are not part of `make test`: no module here is called test_*, which
is what pytest collects. That they notice what they should is tested in tests/test_fuzz.py.
"""

import os

# Before NumPy, torch or Arrow are imported: no threads in the process that forks, and memory from
# malloc, which is filled on purpose (see child.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
