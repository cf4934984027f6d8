import sys

from rl_training.cli import main

sys.exit(main())
