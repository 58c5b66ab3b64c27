"""`python -m longspan`, as torchrun starts it: `torchrun --nproc-per-node 8 -m longspan train ...`."""

import sys

from longspan.cli import main

if __name__ == "__main__":
    sys.exit(main())
