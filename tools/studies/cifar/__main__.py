"""`python tools/studies/cifar`: see cifar_main.py."""

import sys

from cifar_main import main

sys.exit(main())
