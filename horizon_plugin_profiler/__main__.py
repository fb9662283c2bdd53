"""``python -m horizon_plugin_profiler``: check, measure, profile and compare models from the command line."""

import sys

from horizon_plugin_profiler.command_line.run import main

if __name__ == "__main__":
    sys.exit(main())
