"""`python -m fcdp_compile.cli`, if the `fcdp` command is not on the PATH."""

import sys

from fcdp_compile.cli import main

sys.exit(main())
