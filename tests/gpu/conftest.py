"""Makes ``runtime_cases`` importable, here and in the ranks that tests start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
