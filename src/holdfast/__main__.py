"""`python -m holdfast`: the same as the command."""

import sys

from holdfast.cli.main import main

sys.exit(main())
