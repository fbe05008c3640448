#!/usr/bin/env python3
"""`python tools/studies/proofs`: see `study.py`."""

import sys

from study import main

sys.exit(main())
