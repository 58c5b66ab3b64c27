"""`python -m longspan.lm_eval`: see `longspan.lm_eval.command`."""

import sys

from longspan.lm_eval.command import main

if __name__ == "__main__":
    sys.exit(main())
