#!/usr/bin/env python3
"""`python tools/proof_study`: see `study.py`."""

import sys

from study import main

sys.exit(main())
