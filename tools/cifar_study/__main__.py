"""`python tools/cifar_study`: see cifar_main.py."""

import sys

from cifar_main import main

sys.exit(main())
