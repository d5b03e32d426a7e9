"""The command line, a file per command: `halfway train` is `train`."""
